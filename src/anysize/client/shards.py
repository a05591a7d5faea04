"""Evaluating a state in shards: a shard is one size on one range of the test set, and any process can measure it.

The shards depend on the experiment alone, and their sums are added in a fixed order. So the metrics are equal bit for
bit, whichever process measured which shard.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from anysize.client.accelerators import place
from anysize.client.batches import batches
from anysize.client.metrics import measured
from anysize.data import Part
from anysize.elastic.fast import answering
from anysize.elastic.norm import Statistics, attach
from anysize.methods.base import Method
from anysize.methods.capabilities import Mixture, levels_of
from anysize.methods.context import Context
from anysize.methods.size import Size
from anysize.rng import generator
from anysize.tasks import Sums
from anysize.wire import Json, Tensors, flatten, restore, under

_PIECE = 1000  # the fewest samples in a shard; small enough that workers finish together


@dataclass(frozen=True)
class Shard:
    """One size, and the batches of the test set on which it is measured: `first` up to but not including `last`."""

    size: Size
    first: int
    last: int


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a state, and batch-norm statistics outside it, by size label or member name."""

    state: Any
    statistics: Mapping[str, Statistics] = field(default_factory=dict)

    def to_wire(self) -> tuple[Tensors, Json] | None:
        """The subject as named tensors and JSON, or None if another process cannot import the state's class."""
        kind = type(self.state)
        if not _has_name(kind):
            return None
        state, note = flatten(self.state)
        tensors = {f"state/{name}": tensor for name, tensor in state.items()}
        for place_, statistics in enumerate(self.statistics.values()):
            tensors |= {f"statistics/{place_}/{name}": tensor for name, tensor in statistics.tensors().items()}
        about = {"kind": [kind.__module__, kind.__qualname__], "note": note, "labels": list(self.statistics)}
        return tensors, about

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], about: Json) -> Subject:
        """The subject that `to_wire` described."""
        module, name = about["kind"]
        kind = attrgetter(name)(importlib.import_module(module))
        statistics = {
            label: Statistics.of(under(f"statistics/{place_}/", tensors))
            for place_, label in enumerate(about["labels"])
        }
        return cls(restore(kind, under("state/", tensors), about["note"]), statistics)


class Evaluator:
    """Measures sizes of one subject after another on one data set."""

    def __init__(self, context: Context, method: Method[Any], part: Part, batch_size: int) -> None:
        self._context = context.for_client()  # the client's context, since other processes have no other
        self._method = method
        self._part = part
        # A fixed shuffle: networks that normalise by the batch would see single classes in a sorted test set.
        self._batches = batches(torch.randperm(len(part), generator=generator("test order")), batch_size)
        self._ready: tuple[Subject, Size, nn.Module] | None = None

    def shards(self, sizes: Sequence[Size]) -> list[Shard]:
        """Every size on every range of the data, largest sizes first, so that workers finish together."""
        lengths = [len(batch) for batch in self._batches]
        return [Shard(size, first, last) for size in reversed(sizes) for first, last in stretches(lengths, _PIECE)]

    def sit(self, subject: Subject, shard: Shard) -> Sums:
        """The sums of the task's metrics of one shard."""
        network = self._network(subject, shard.size)
        return measured(self._context, network, self._part, self._batches[shard.first : shard.last])

    def forget(self) -> None:
        """Free the network of the last shard."""
        self._ready = None

    def _network(self, subject: Subject, size: Size) -> nn.Module:
        if self._ready is None or self._ready[0] is not subject or self._ready[1] != size:
            self._ready = None  # frees the previous one first
            network = answering(finished(self._context, self._method, subject.state, size, subject.statistics))
            self._ready = (subject, size, place(network, self._context.device))
        return self._ready[2]


@dataclass(frozen=True)
class Evaluation:
    """A subject and all its shards."""

    subject: Subject
    evaluator: Evaluator
    part: Part
    batch_size: int
    shards: Sequence[Shard]

    def here(self) -> Iterator[Sums]:
        """The sums of each shard, in order, measured in this process."""
        return (self.evaluator.sit(self.subject, shard) for shard in self.shards)


def finished(
    context: Context, method: Method[Any], state: Any, size: Size, statistics: Mapping[str, Statistics]
) -> nn.Module:
    """The ordinary network of that size, in evaluation mode, with fixed batch-norm statistics if it has any."""
    network = method.customize(context, state, size)
    own = statistics_of(context, method, state, size, statistics)
    if own is not None and levels_of(method, context) is None:
        attach(network, own)
    return network.eval()


def statistics_of(
    context: Context, method: Method[Any], state: Any, size: Size, known: Mapping[str, Statistics]
) -> Statistics | None:
    """The batch-norm statistics of a size, or of its members if it is a mixture; None if unknown."""
    members = method.members(context, state, size) if isinstance(method, Mixture) else []
    if members and all(name in known for name in members):
        return Statistics.joined([known[name] for name in members])
    return known.get(size.label)


def stretches(lengths: Sequence[int], least: int) -> list[tuple[int, int]]:
    """Consecutive ranges of batches with at least `least` samples each, except the last.

    >>> stretches([4, 4, 4, 4, 1], 6)
    [(0, 2), (2, 4), (4, 5)]
    """
    found, first, samples = [], 0, 0
    for position, length in enumerate(lengths, start=1):
        samples += length
        if samples >= least or position == len(lengths):
            found.append((first, position))
            first, samples = position, 0
    return found


def _has_name(kind: type) -> bool:
    """Whether another process can import the class by its module and name."""
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        return False
    return attrgetter(kind.__qualname__)(importlib.import_module(kind.__module__)) is kind
