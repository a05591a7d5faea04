'''The contract that every method keeps: ten verbs over an explicit state.

The server holds a `State`. In a round it *extracts* a sub-model for each client; the client *builds* a network from
it, trains it with the method's *loss*, and *packs* what it learned into an update; the server *aggregates* the updates
into a new state. At any time the state can be *customised* to an ordinary network of some size.

A method is a frozen dataclass: its fields are its hyperparameters and its schema in the experiment file. It keeps no
state of its own. This toy trains one network everywhere and keeps the last answer that came:

    @dataclass(frozen=True)
    class LastState:
        tensors: Tensors

    @dataclass(frozen=True)
    class Last(Method[LastState]):
        """The last client's network becomes everybody's."""

        def sizes(self, context): return context.sizes[:1]
        def init(self, context): return LastState(dict(context.start()))
        def extract(self, context, state, client):
            width = context.sizes[0].width
            return sub_model(client, cut(context, state.tensors, width), width=width)
        def aggregate(self, context, state, updates):
            *_, last = checked(context, updates)
            return LastState(paste(context, state.tensors, last.tensors, last.width))
        def customize(self, context, state, size):
            return fill(context.skeleton(size.width), cut(context, state.tensors, size.width))

`anysize.testing.check_method(Last())` says which laws it keeps (it fails the one about the order of clients).
'''

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from anysize.context import Context, Levels, Size
from anysize.elastic.axes import Kept
from anysize.elastic.ensemble import scaled_to_own_width
from anysize.elastic.skeleton import fill, tensors_of
from anysize.elastic.slicing import scatter_, take
from anysize.elastic.views import Nested
from anysize.errors import MethodError
from anysize.objectives import Batch, Step, Tricks
from anysize.rng import generator
from anysize.table import Table
from anysize.wire import Json, Tensors

State = TypeVar("State")

GRID = tuple(i / 16 for i in range(1, 17))
"""Widths among which a budget in units is solved, where a method has no other choices."""


@dataclass(frozen=True)
class Client:
    """One participant of a round as a method sees it.

    Attributes:
        id: which client, from 0.
        position: its place in the round's order, from 0.
        size: the largest size that its device can train.
        round: from 1.
        samples: how many samples it trains on.
        seed: of the run; random choices are derived from (seed, round, id, purpose).
        task: what the client will be asked to do: "train", "calibrate" or "evaluate"; the last two want the network as
            it is finished.
    """

    id: int
    position: int
    size: Size
    round: int
    samples: int
    seed: int
    task: str = "train"

    def generator(self, purpose: str) -> torch.Generator:
        """Random numbers for `purpose`, the same on every engine and after a resume."""
        return generator(self.seed, self.round, self.id, purpose)


@dataclass(frozen=True)
class SubModel:
    """What goes down to a client: named tensors and a small JSON ticket."""

    tensors: Tensors
    ticket: Json

    @property
    def width(self) -> float:
        """The width of the network that the client will build."""
        return float(self.ticket["width"])

    @property
    def finished(self) -> bool:
        """Whether the client is asked about the finished network (calibrate, evaluate) rather than to train."""
        return self.ticket.get("task") in ("calibrate", "evaluate")


@dataclass(frozen=True)
class Update:
    """What comes up from a client; `keep` stays there and returns to it at its next turn."""

    tensors: Tensors
    ticket: Json
    keep: Tensors = field(default_factory=dict)

    @property
    def width(self) -> float:
        """The width of the network that the client trained."""
        return float(self.ticket["width"])

    @property
    def label(self) -> str:
        """The label of the size that the client trained."""
        return str(self.ticket["size"])

    def weight(self, tricks: Tricks) -> float:
        """The client's weight in an average: its samples, or one."""
        return float(self.ticket["samples"]) if tricks.weighting == "samples" else 1.0


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share factors on the learning rate and on the weight decay."""

    parameters: Sequence[nn.Parameter]
    rate: float = 1.0
    decay: float = 1.0


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


def sub_model(client: Client, tensors: Tensors, *, width: float, **more: Any) -> SubModel:
    """A sub-model with the ticket that every client task needs."""
    ticket = {
        "client": client.id,
        "round": client.round,
        "size": client.size.label,
        "width": width,
        "seed": client.seed,
    }
    return SubModel(tensors, ticket | more)


def cut(context: Context, tensors: Mapping[str, Tensor], width: float | Kept) -> Tensors:
    """The full network's tensors cut to `width`, or to the units that are kept."""
    kept = context.axes.kept(width)
    return {name: take(tensor, context.axes.index(name, kept)) for name, tensor in tensors.items()}


def first_tensors(context: Context, width: float, kept: Kept | None = None) -> Tensors:
    """What a network of its own of that width starts with: a part of the full one's start.

    Without rescaled initialisation its layers are brought to the scale that a network of that width draws; a learned
    start is taken as it is.

    Args:
        context: the server's.
        width: of the network.
        kept: which units are its part; by default the first of every group.
    """
    tensors = cut(context, context.start(), width if kept is None else kept)
    if context.tricks.rescaled_init or context.pretrained:
        return tensors
    return scaled_to_own_width(tensors, context.skeleton(width), context.template)


def paste(context: Context, into: Mapping[str, Tensor], tensors: Mapping[str, Tensor], width: float) -> Tensors:
    """Copies of the full tensors `into` with the entries of a network of `width` in their places."""
    kept = context.axes.kept(width)
    full = {name: into[name].clone() for name in into}
    for name, tensor in tensors.items():
        scatter_(full[name], context.axes.index(name, kept), tensor)
    return full


def widths_up_to(context: Context, width: float) -> list[float]:
    """The distinct widths that the fleet trains and that a network of `width` holds, smallest first."""
    return sorted({size.width for size in context.sizes if size.width < width} | {width})


def nested_parts(context: Context, ticket: Json | None) -> dict[str, int]:
    """`Method.parts` of a network that holds every smaller trained one: the smallest, and what each larger one adds."""
    widths = widths_up_to(context, context.largest.width if ticket is None else float(ticket["width"]))
    counts = [trained_parameters(context.skeleton(width)) for width in widths]
    return {f"{width:g}": count - inner for width, count, inner in zip(widths, counts, [0, *counts])}


def trained_parameters(module: nn.Module) -> int:
    """How many numbers of a network are trained: its parameters that are not frozen.

    >>> trained_parameters(nn.Linear(2, 3))
    9
    """
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def nested(context: Context, sub_model: SubModel, own: Collection[str] = ()) -> Nested:
    """The skeleton of the sub-model's network and of every smaller trained one inside it.

    A client that is asked to evaluate or to calibrate runs the largest alone.

    Args:
        context: what server and client both know.
        sub_model: what the client received.
        own: names of tensors that every network has for itself.
    """
    widths = [sub_model.width] if sub_model.finished else widths_up_to(context, sub_model.width)
    return Nested([context.skeleton(width) for width in widths], context.axes, widths, own)


def class_weights(context: Context, update: Update) -> Tensor | None:
    """One where the client holds the class, zero elsewhere; None where the classifier is averaged like all else."""
    classes = update.ticket.get("classes")
    if not context.tricks.classwise_head or classes is None:
        return None
    return torch.tensor(classes, dtype=torch.float32)


def checked(context: Context, updates: Iterable[Update]) -> Iterator[Update]:
    """The updates as they stream, each refused with its client's name if it cannot be averaged.

    That is: numbers that are not finite, a number of samples that is none, classes that the task has not.
    `StreamingMean` refuses names and shapes that do not fit.
    """
    for update in updates:
        problems = [
            f"{name} with numbers that are not finite: lower training.learning_rate or set training.clip"
            for name, tensor in update.tensors.items()
            if not finite(tensor)
        ]
        samples, classes = update.ticket.get("samples"), update.ticket.get("classes")
        told = samples is not None or context.tricks.weighting == "samples"
        if told and (not isinstance(samples, int | float) or not 0 < samples < math.inf):
            problems.append(f"samples = {samples!r}; a number above 0 is needed")
        if classes is not None and (len(classes) != context.classes or not set(classes) <= {0, 1}):
            problems.append(f"classes = {classes!r}; a 0 or 1 for each of the {context.classes} classes is needed")
        if problems:
            ticket = update.ticket
            raise MethodError(f"round {ticket['round']}: client {ticket['client']} sent {'; '.join(problems)}")
        yield update


def finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite, by one sum: it is, unless something in it is not (or it overflows, as bad)."""
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))))
