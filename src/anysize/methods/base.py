"""__BASE__"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

from torch import Tensor, nn

from anysize.elastic.skeleton import fill, tensors_of
from anysize.methods.context import Context
from anysize.methods.kit import trained_parameters
from anysize.methods.messages import Client, ParameterGroup, SubModel, Update
from anysize.methods.size import Levels, Size
from anysize.methods.table import Table
from anysize.methods.training import Batch, Step, Tricks
from anysize.wire import Json

State = TypeVar("State")


GRID = tuple(i / 16 for i in range(1, 17))
"""Widths among which a budget in units is solved, where a method has no other choices."""


Judge = Callable[[Callable[[Client], SubModel]], Mapping[str, float]]
"""Takes what each client is to receive, and gives the metrics over all clients' held-out samples."""


class Method(ABC, Generic[State]):
    """A way to train one model across devices of every size.

    Attributes:
        summary: one line for `anysize methods`.
        paper: the tricks that the method's authors used; an experiment's [tricks] override them.
        exceptions: laws of `anysize.testing` that the method does not keep, each with the reason.
        reusable: whether a built network depends on nothing but the names, shapes and values of the sub-model's tensors
            and its width, so that it can be loaded with another client's tensors instead of being built again.
        needs_all_updates: whether `aggregate` must hold all updates of a round at once.
    """

    summary: ClassVar[str] = ""
    paper: ClassVar[Tricks] = Tricks()
    exceptions: ClassVar[Mapping[str, str]] = {}
    needs_all_updates: ClassVar[bool] = False
    reusable: ClassVar[bool] = True

    @property
    def needs_held_out(self) -> bool:
        """Whether `finish` asks clients about their held-out data."""
        return False

    @property
    def needs_simulation(self) -> bool:
        """Whether clients are sent more than they can afford, as an upper bound; real devices refuse it."""
        return False

    @abstractmethod
    def sizes(self, context: Context) -> Sequence[Size]:
        """What it can train or be cut to with what was trained, smallest first."""

    def sized(self, context: Context, capacity: float) -> Size:
        """The size that a device trains which has that part of what is elastic here; by default of the width."""
        return Size(capacity)

    def choices(self, context: Context) -> Sequence[Size]:
        """The sizes among which a budget is solved, best first; by default widths, the largest first."""
        return [Size(width) for width in reversed(GRID)]

    def tabulate(self, context: Context) -> Table | None:
        """Server, once before the sizes are known: what the method must find out first; by default nothing."""
        return None

    @abstractmethod
    def init(self, context: Context) -> State:
        """The state before the first round; starts from `context.start()`."""

    @abstractmethod
    def extract(self, context: Context, state: State, client: Client) -> SubModel:
        """Server: what one client receives. Tensors may share memory with the state."""

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        """Client: the trainable network, really that small, with its own memory."""
        return fill(context.skeleton(sub_model.width), sub_model.tensors)

    def parameters(self, module: nn.Module, sub_model: SubModel) -> int:
        """How many numbers a client trains; by default every parameter of its network that is not frozen."""
        return trained_parameters(module)

    def groups(self, module: nn.Module) -> list[ParameterGroup]:
        """Parameters with factors on learning rate and decay; by default one group."""
        return [ParameterGroup([p for p in module.parameters() if p.requires_grad])]

    def momentum_buffers(self, module: nn.Module) -> Mapping[nn.Parameter, Tensor]:
        """Buffers of the module in which momentum of its parameters begins and ends a round; by default there are none.

        What `build` put there is where it begins, and `pack` finds there where it ended.
        """
        return {}

    def loss(self, module: nn.Module, batch: Batch, step: Step) -> Tensor:
        """The loss of one local step."""
        return step.objective(module, batch)

    def pack(self, module: nn.Module, sub_model: SubModel) -> Update:
        """The inverse of `build`: what the module learned, under the names of the sub-model."""
        return Update(tensors_of(module), dict(sub_model.ticket))

    @abstractmethod
    def aggregate(self, context: Context, state: State, updates: Iterable[Update]) -> State:
        """A new state; updates stream once, in order; state and updates are left untouched."""

    @abstractmethod
    def customize(self, context: Context, state: State, size: Size) -> nn.Module:
        """An ordinary network of that size; made of the state and the template alone, so that a worker can test it."""

    def finish(self, context: Context, state: State, judge: Judge) -> State:
        """The state after the last round, which may follow what clients say on held-out data; by default as it is."""
        return state

    def levels(self, context: Context) -> Levels | None:
        """The robustness that a customised network can have; by default there is no choice.

        Where there is one, `customize` gives networks with fixed statistics.
        """
        return None

    def products(self, context: Context, state: State, size: Size) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Weights of the customised network that are smaller as (coefficients, basis): a bundle stores them so.

        By default none; `elastic.basis.compose` says what they make.
        """
        return {}

    def describe(self, context: Context, state: State) -> Mapping[str, Tensor]:
        """Arrays for the report; by default none."""
        return {}

    def parts(self, context: Context, ticket: Json | None = None) -> Mapping[str, int]:
        """By name, the parts of the whole that a client with that ticket trains, each with its number of parameters.

        A part is trained whole or not at all; without a ticket, all that there are. Only for statistics of who trained
        what; by default a method says nothing of it.
        """
        return {}

    def ways(self, context: Context, size: Size) -> Mapping[str, str]:
        """By name, how tensors of that size are computed with, where there is more than one way; by default none."""
        return {}

    def notices(self, context: Context) -> list[str]:
        """What a user should know about how the method fits this model; by default nothing."""
        return []


class Mixture(ABC, Generic[State]):
    """What a method also derives from if its networks are means of smaller ones, each of which every client can run.

    Batch-norm statistics are then estimated once for each member, by clients of every size, and a network of any size
    has those of its members.
    """

    @abstractmethod
    def members(self, context: Context, state: State, size: Size) -> Sequence[str]:
        """The names of the networks whose mean the customised network of that size is, in its order."""

    @abstractmethod
    def member(self, context: Context, state: State, name: str, client: Client) -> SubModel:
        """What a client receives to evaluate or to calibrate one member."""
