"""What server and clients both know: the model without its weights, the task, the sizes, the options."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from anysize.config.tables import AggregationConfig, CommunicationConfig, TrainingConfig
from anysize.data import Share
from anysize.elastic.axes import Axes
from anysize.elastic.depth import Stage, without
from anysize.elastic.slicing import narrow
from anysize.methods.averaging import averaging
from anysize.methods.mean import Average
from anysize.methods.messages import SubModel, Update
from anysize.methods.size import Size
from anysize.methods.table import Table
from anysize.methods.training import Tricks
from anysize.tasks import Task


@dataclass(frozen=True)
class Proxy:
    """A little data on the server, and the ordinary local training on it.

    Attributes:
        share: gives a fraction of the training data in use, drawn evenly, with a fifth of it held out.
        perform: does what a client does with a message; see `anysize.client.work.perform`.
        calibrated: gives a message, of a context, a method, a message that asks to calibrate and a share, with the
            batch-norm statistics of that share if the finished network needs them.
    """

    share: Callable[[float], Share]
    perform: Callable[..., Update]
    calibrated: Callable[..., SubModel]


class Base:
    """The first weights of a network that clients have themselves, since most of them are never trained.

    Args:
        tensors: every tensor of the network, by name; nobody writes into them.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._fingerprints: dict[frozenset[str], str] = {}

    def fingerprint(self, but: Collection[str] = ()) -> str:
        """A text that is the same for the same weights, whichever machine made them; computed once.

        Args:
            but: names of tensors that do not count.

        >>> net = nn.Linear(2, 3)
        >>> one, other = Base(net.state_dict()), Base({**net.state_dict(), "bias": torch.ones(3)})
        >>> one.fingerprint() == other.fingerprint(), one.fingerprint(["bias"]) == other.fingerprint(["bias"])
        (False, True)
        """
        left_out = frozenset(but)
        if left_out not in self._fingerprints:
            found = hashlib.sha256()
            for name in sorted(self.tensors.keys() - left_out):
                tensor = self.tensors[name].detach()
                found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                if not tensor.is_meta:
                    found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            self._fingerprints[left_out] = found.hexdigest()[:16]
        return self._fingerprints[left_out]


@dataclass(frozen=True)
class Context:
    """The immutable facts of an experiment, the same on the server and every client except for what only a server has.

    Attributes:
        template: the full network's structure (a skeleton: no weights), with batch-norm as `tricks` says.
        axes: which axis of which tensor belongs to which width group.
        task: what is learned.
        sizes: the sizes that the fleet trains, smallest first.
        training: the local training options.
        tricks: the shared tricks; the method's own values if the experiment gives none.
        aggregation: the rule by which the server combines updates.
        augment: names of the augmentations of a client's batches.
        classes: how many classes the task has; None if it has none.
        scarce_activations: whether a device's budget limits the memory of a training step, so that a method should
            spend time rather than memory.
        seed: the seed of the whole run.
        initial: the full network's weights at the start; None on a client.
        base: the same weights, on clients too, if the method leaves most of them frozen; else None.
        communication: in which form an update travels.
        built: a cache, by method and shapes, of networks that `local` trains again and again.
        pretrained: whether `initial` was learned, so that a method must start from it rather than draw new weights.
        stages: the blocks that can be removed.
        proxy: data and training for what a method measures before the first round; None on a client.
        table: the results of these measurements; None on a client, and for methods that need none.
        device: where a client's tensors are while it works.
        tells: what a client may reveal about its data: its number of "samples", its "labels" (which classes it has).
        private: whether a client tells nothing of its training besides tensors, as differential privacy asks.
        averages: makes the averages of `average` in place of the chosen rule; for `plan`, which counts holders.
    """

    template: nn.Module
    axes: Axes
    task: Task
    sizes: tuple[Size, ...]
    training: TrainingConfig
    tricks: Tricks
    augment: tuple[str, ...] = ()
    classes: int | None = None
    scarce_activations: bool = False
    seed: int = 0
    initial: Mapping[str, Tensor] | None = None
    base: Base | None = None
    pretrained: bool = False
    stages: tuple[Stage, ...] = ()
    proxy: Proxy | None = None
    table: Table | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tells: frozenset[str] = frozenset({"samples", "labels"})
    private: bool = False
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    averages: Callable[[Mapping[str, Tensor], Mapping[str, int]], Average] | None = None
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    built: dict[Any, tuple[Any, nn.Module, dict[str, Tensor]]] = field(default_factory=dict, repr=False, compare=False)
    _skeletons: dict[tuple[float, int | None], nn.Module] = field(default_factory=dict, repr=False, compare=False)

    def skeleton(self, width: float, depth: int | None = None) -> nn.Module:
        """The network cut to a width and a depth, without weights; made once, so copy it before you change it."""
        if (width, depth) not in self._skeletons:
            whole = narrow(self.template, self.axes, width) if depth is None else self.skeleton(width)
            self._skeletons[width, depth] = whole if depth is None else without(whole, self.stages, depth)
        return self._skeletons[width, depth]

    @property
    def largest(self) -> Size:
        """The largest trained size."""
        return self.sizes[-1]

    def start(self) -> Mapping[str, Tensor]:
        """The full network's weights at the start; fails on a client, which never holds them."""
        assert self.initial is not None, "only the server holds the initial weights"
        return self.initial

    def average(self, before: Mapping[str, Tensor], head: Mapping[str, int] | None = None) -> Average:
        """What every `aggregate` averages with: of each entry, the chosen rule over the clients that hold it.

        Args:
            before: the tensors to average, with their values before the round; left untouched.
            head: names of the classifier's tensors and their class axis.
        """
        make = self.averages or averaging(self.aggregation)
        return make(before, head or {})

    def for_client(self) -> Context:
        """The same context without what only the server may hold."""
        return replace(self, initial=None, proxy=None, table=None)
