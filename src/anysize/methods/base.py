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

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import Tensor, nn

from anysize.elastic.skeleton import fill, tensors_of
from anysize.errors import MethodError
from anysize.methods.context import Context
from anysize.methods.messages import Client, ParameterGroup, SubModel, Update
from anysize.methods.options import option_problems
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step, Tricks

State = TypeVar("State")


class Method(ABC, Generic[State]):
    """A way to train one model across devices of every size.

    Attributes:
        summary: one line for `anysize methods`.
        paper: the tricks that the method's authors used; an experiment's [tricks] override them.
        exceptions: laws of `anysize.testing` that the method does not keep, each with the reason.
        reusable: whether a built network depends on nothing but the names, shapes and values of the sub-model's tensors
            and its width, so that it can be loaded with another client's tensors instead of being built again.
    """

    summary: ClassVar[str] = ""
    paper: ClassVar[Tricks] = Tricks()
    exceptions: ClassVar[Mapping[str, str]] = {}
    reusable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuses options that their annotations do not allow, all at once; then those that do not go together."""
        options = {field.name: getattr(self, field.name) for field in fields(cast(Any, self)) if field.init}
        problems = option_problems(type(self), options) or list(self.conflicts())
        if problems:
            raise MethodError(f"{type(self).__name__.lower()}: {'; '.join(problems)}")

    def conflicts(self) -> Iterable[str]:
        """What is wrong with options that are allowed one by one, but not together; by default nothing."""
        return ()

    def ignored(self) -> Iterable[str]:
        """Options that were given and would change nothing, with the reason; by default none.

        A new run is refused for them. An older run that was made with them goes on.
        """
        return ()

    @property
    def recipe(self) -> Tricks:
        """The tricks of an experiment that names none: the paper's, unless an option stands for another paper's."""
        return self.paper

    @property
    def excused(self) -> Mapping[str, str]:
        """The laws that the method does not keep with these options, each with the reason; by default `exceptions`."""
        return self.exceptions

    @property
    def needs_simulation(self) -> bool:
        """Whether clients are sent more than they can afford, as an upper bound; real devices refuse it."""
        return False

    @abstractmethod
    def sizes(self, context: Context) -> Sequence[Size]:
        """What it can train or be cut to with what was trained, smallest first."""

    @abstractmethod
    def init(self, context: Context) -> State:
        """The state before the first round; starts from `context.start()`."""

    @abstractmethod
    def extract(self, context: Context, state: State, client: Client) -> SubModel:
        """Server: what one client receives. Tensors may share memory with the state."""

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        """Client: the trainable network, really that small, with its own memory."""
        return fill(context.skeleton(sub_model.width), sub_model.tensors)

    def groups(self, module: nn.Module) -> list[ParameterGroup]:
        """Parameters with factors on learning rate and decay; by default one group."""
        return [ParameterGroup([p for p in module.parameters() if p.requires_grad])]

    def loss(self, module: nn.Module, batch: Batch, step: Step) -> Tensor:
        """The loss of one local step."""
        return step.objective(module, batch)

    def pack(self, module: nn.Module, sub_model: SubModel) -> Update:
        """The inverse of `build`: what the module learned, under the names of the sub-model."""
        return Update(tensors_of(module), sub_model.ticket)

    @abstractmethod
    def aggregate(self, context: Context, state: State, updates: Iterable[Update]) -> State:
        """A new state; updates stream once, in order; state and updates are left untouched."""

    @abstractmethod
    def customize(self, context: Context, state: State, size: Size) -> nn.Module:
        """An ordinary network of that size; made of the state and the template alone, so that a worker can test it."""

    def describe(self, context: Context, state: State) -> Mapping[str, Tensor]:
        """Arrays for the report; by default none."""
        return {}

    def notices(self, context: Context) -> list[str]:
        """What a user should know about how the method fits this model; by default nothing."""
        return []
