"""What only some methods can do. A method derives from a capability, and the one place that needs it asks for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from torch import Tensor, nn

from anysize.elastic.adapters import Adapter
from anysize.elastic.axes import Kept
from anysize.methods.base import Method, State
from anysize.methods.context import Context
from anysize.methods.messages import Client, SubModel
from anysize.methods.size import Levels, Size
from anysize.methods.table import Table

Judge = Callable[[Callable[[Client], SubModel]], Mapping[str, float]]
"""Takes what each client is to receive, and gives the metrics over all clients' held-out samples."""


class Searched(ABC):
    """What is elastic is not the width: the method says which sizes there are, and may search for them first."""

    @abstractmethod
    def sized(self, context: Context, capacity: float) -> Size:
        """The size that a device of this capacity trains."""

    @abstractmethod
    def choices(self, context: Context) -> Sequence[Size]:
        """The sizes among which a budget is solved, best first."""

    @abstractmethod
    def tabulate(self, context: Context) -> Table | None:
        """Server, once before the sizes are known: what the method must find out first; None for nothing."""


class Finishing(ABC, Generic[State]):
    """The state changes once more after the last round, by what clients say on held-out data."""

    @property
    @abstractmethod
    def finishes(self) -> bool:
        """Whether the method, with these options, asks clients at all."""

    @abstractmethod
    def finish(self, context: Context, state: State, judge: Judge) -> State:
        """The state after the last round."""


class Adjustable(ABC):
    """The robustness of a customised network can be chosen."""

    @abstractmethod
    def levels(self, context: Context) -> Levels | None:
        """The choices; None if the method, with these options, has none.

        Where there is one, `customize` gives networks with fixed statistics.
        """


class Factored(ABC, Generic[State]):
    """Weights of a network are products of a basis and coefficients."""

    @abstractmethod
    def products(self, context: Context, state: State, size: Size) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Weights of the customised network that are smaller as (coefficients, basis): a bundle stores them so.

        `elastic.basis.compose` says what they make.
        """

    @abstractmethod
    def ways(self, context: Context, size: Size) -> Mapping[str, str]:
        """By name, how tensors of that size are computed with, where there is more than one way."""


class Parted(ABC):
    """The whole consists of named parts, of which a client trains some, each whole or not at all.

    `extract` names them in `SubModel.parts`. They serve statistics of which clients trained what.
    """

    @abstractmethod
    def parts(self, context: Context) -> Mapping[str, int]:
        """Every part by its name, with its number of parameters."""


class Masked(ABC):
    """A client trains fewer numbers than its network has parameters."""

    @abstractmethod
    def trained(self, module: nn.Module, sub_model: SubModel) -> int:
        """How many numbers a client trains."""


class OnBase(ABC, Generic[State]):
    """Most of the network is frozen: it never travels, and every device has it itself, in `Context.base`."""

    @abstractmethod
    def frozen(self, context: Context) -> Collection[str]:
        """The names of the network's tensors that nobody trains."""

    @abstractmethod
    def adapter(self, context: Context, state: State, size: Size) -> Adapter:
        """What was learned beside the frozen network, at a size."""


class CarriesMomentum(ABC):
    """Momentum travels with the weights."""

    @abstractmethod
    def momentum_buffers(self, module: nn.Module) -> Mapping[nn.Parameter, Tensor]:
        """Buffers of the module in which momentum of its parameters begins and ends a round.

        `build` puts there where it begins, and `pack` finds there where it ended.
        """


class Observed(ABC, Generic[State]):
    """What the network does to samples belongs into the report."""

    @abstractmethod
    def observe(self, context: Context, state: State, x: Tensor) -> Mapping[str, Tensor]:
        """Server: arrays for the report besides those of `describe`, from inputs of a few test samples."""


class Mixture(ABC, Generic[State]):
    """What a method also derives from if its networks are means of smaller ones, each of which every client can run.

    Batch-norm statistics are then estimated once for each member, by clients of every size, and a network of any size
    has those of its members.
    """

    @abstractmethod
    def mixtures(self, context: Context) -> Sequence[Size]:
        """Every size that mixing gives, smallest first: those that were trained, and those between them."""

    @abstractmethod
    def members(self, context: Context, state: State, size: Size) -> Sequence[str]:
        """The names of the networks whose mean the customised network of that size is, in its order."""

    @abstractmethod
    def member(self, context: Context, state: State, name: str, client: Client) -> SubModel:
        """What a client receives to evaluate or to calibrate one member."""


@dataclass(frozen=True)
class Piece:
    """A part of a network that a device of that size can run, and which channels it has."""

    size: Size
    kept: Kept
    extract: Callable[[Client], SubModel]


class Pieced(ABC, Generic[State]):
    """A network that no client can run has batch-norm statistics that pieces of it tell, which clients can run."""

    @abstractmethod
    def pieces(self, context: Context, state: State, size: Size) -> Sequence[Piece]:
        """Parts that together have every channel of the network of that size which is not constant.

        A channel's statistics are those of the largest parts that have it. Empty if they are not the network's.
        """


def offered_sizes(method: Method[Any], context: Context) -> Sequence[Size]:
    """The sizes that a finished run offers: those that were trained, and of a mixture every number of members."""
    return method.mixtures(context) if isinstance(method, Mixture) else method.sizes(context)


def levels_of(method: Method[Any], context: Context) -> Levels | None:
    """The robustness that a method's customised networks can have; None where there is no choice."""
    return method.levels(context) if isinstance(method, Adjustable) else None


def parts_of(method: Method[Any], context: Context) -> dict[str, int]:
    """The parts of the whole, by name, with their numbers of parameters; none where the method names none."""
    return dict(method.parts(context)) if isinstance(method, Parted) else {}


def asks_held_out(method: Method[Any]) -> bool:
    """Whether the method asks clients about their held-out data after the last round."""
    return isinstance(method, Finishing) and method.finishes
