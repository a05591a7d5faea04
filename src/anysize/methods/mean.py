"""Streaming weighted means: one update is folded in at a time; entries that no client trained keep their value.

The mean is updated in place as m <- m + (w / W) (x - m), where W is the weight seen so far. So no copy per client is
held, and an update that changes nothing leaves every bit the same.

Of a tensor whose clients hold prefixes, or prefixes of every head or gate, whole ranges of rows have equal weights: the
prefixes cut the first axis into ranges, and W is held for one row of each (`Rows`). So m and x are all that is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import pairwise, zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from anysize.elastic.slicing import divided
from anysize.errors import MethodError
from anysize.wire import Tensors

T = TypeVar("T")

Index = tuple[Tensor | None, ...]

Forms = tuple[tuple[int, ...], tuple[int, ...]]
"""The shapes of a tensor and of a client's part of it in which the part is a prefix of every axis."""


class Average(ABC):
    """Combines entry by entry what clients send; an entry that none holds keeps its value."""

    def __init__(self, before: Mapping[str, Tensor], head: Mapping[str, int] | None = None) -> None:
        """Start from the values before the round.

        Args:
            before: the tensors to average, with their old values; left untouched.
            head: names of the classifier's tensors and their class axis.
        """
        self._before = before
        self._head = head or {}
        self._clients = 0

    def add(
        self,
        tensors: Mapping[str, Tensor],
        weight: float,
        index: Mapping[str, Index] | None = None,
        classes: Tensor | None = None,
        held: Mapping[str, Tensor] | None = None,
        look: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Take one client's tensors.

        Args:
            tensors: what the client sent: some of the tensors, or some of their entries.
            weight: the client's weight, positive.
            index: per tensor and axis, which entries were sent; None for whole tensors.
            classes: a factor per class on the weight of the classifier's rows.
            held: for tensors that the client holds in part, a mask of their shape with the entries that it holds.
            look: called with each tensor before it is taken; raises if it must not be.
        """
        self._begin()
        for name, tensor in tensors.items():
            at = index[name] if index is not None else ()
            self._check(name, tensor, at)
            if look is not None:
                look(tensor)
            self._take(name, tensor, at, weight, classes, None if held is None else held.get(name))

    def _begin(self) -> None:
        """Count a client; called before its tensors."""
        self._clients += 1

    @abstractmethod
    def _take(
        self, name: str, tensor: Tensor, at: Index, weight: float, classes: Tensor | None, held: Tensor | None
    ) -> None:
        """Take one tensor of a client; the arguments are those of `add`, for this tensor."""

    @abstractmethod
    def result(self) -> Tensors:
        """The averages, and the old values of tensors and entries that no client sent."""

    def _check(self, name: str, tensor: Tensor, at: Index) -> None:
        """Refuse a tensor that does not fit: an axis of size one would otherwise broadcast silently."""
        if name not in self._before:
            raise MethodError(f"an update holds '{name}', which the state does not hold")
        shape = tuple(self._before[name].shape)
        if any(rows is not None for rows in at):
            shape = tuple(size if rows is None else rows.shape[0] for size, rows in zip_longest(shape, at))
        if tensor.shape != shape:
            raise MethodError(f"an update's '{name}' has shape {tuple(tensor.shape)}; expected {shape}")
        if tensor.is_floating_point() != self._before[name].is_floating_point():
            raise MethodError(f"an update's '{name}' holds {tensor.dtype}; expected {self._before[name].dtype}")

    def _share(self, name: str, tensor: Tensor, weight: float, classes: Tensor | None) -> Tensor:
        """The client's weight in each entry that it sent of a tensor, in a shape that broadcasts to it."""
        if classes is None or name not in self._head:
            return torch.full((1,) * tensor.dim(), weight, dtype=self._precision(name))
        shape = [1] * tensor.dim()
        shape[self._head[name]] = -1
        return (classes.to(self._precision(name)) * weight).reshape(shape)

    def _holds(self, name: str, tensor: Tensor, classes: Tensor | None, held: Tensor | None) -> Tensor:
        """Which entries of a tensor count, of those that a client sent, in a shape that broadcasts to it."""
        holds = self._share(name, tensor, 1.0, classes) > 0
        return holds if held is None else holds & (held > 0)

    def _precision(self, name: str) -> torch.dtype:
        """The precision of a tensor's mean and weights: the tensor's own, but at least single."""
        own = self._before[name].dtype
        return torch.promote_types(own, torch.float32) if own.is_floating_point else torch.float32


class StreamingMean(Average):
    """The weighted mean of every entry over the clients that hold it.

    >>> mean = StreamingMean({"w": torch.tensor([1.0, 5.0])})
    >>> mean.add({"w": torch.tensor([2.0])}, 1.0, {"w": (torch.tensor([0]),)})
    >>> mean.add({"w": torch.tensor([4.0])}, 3.0, {"w": (torch.tensor([0]),)})
    >>> mean.result()["w"].tolist()
    [3.5, 5.0]
    """

    def __init__(self, before: Mapping[str, Tensor], head: Mapping[str, int] | None = None) -> None:
        super().__init__(before, head)
        self._mean: Tensors = {}
        self._weight: dict[str, Tensor | Rows] = {}  # never changed in place, since tensors of one kind share them
        self._shares: dict[torch.dtype, Tensor] = {}
        self._steps: dict[tuple[Any, ...], Any] = {}
        self._divided: dict[tuple[str, int], tuple[Index, Forms | None]] = {}

    def _begin(self) -> None:
        super()._begin()
        self._shares, self._steps = {}, {}

    def _take(
        self, name: str, tensor: Tensor, at: Index, weight: float, classes: Tensor | None, held: Tensor | None
    ) -> None:
        """Fold in one tensor."""
        headed = classes is not None and name in self._head
        if held is None and not headed:
            share = self._every(name, weight)
        else:
            share = self._share(name, tensor, weight, classes) * (1 if held is None else held)
        whole = all(part is None for part in at)
        every = weight > 0 and held is None and not headed  # no entry has the weight zero
        if whole and every and name not in self._mean:
            self._begin_with(name, tensor, share)
        elif whole and not isinstance(self._weight.get(name), Rows):
            self._fold(name, tensor, share)
        elif share.numel() == 1 and (forms := self._forms(name, at, whole)) is not None:
            self._fold_rows(name, tensor, share, forms)
        else:
            self._fold_part(name, tensor, share, at)

    def result(self) -> Tensors:
        return {name: self._mean.get(name, old).to(old.dtype) for name, old in self._before.items()}

    def _every(self, name: str, weight: float) -> Tensor:
        """The client's weight in every entry of a tensor; one for all tensors of a precision."""
        kind = self._precision(name)
        if kind not in self._shares:
            self._shares[kind] = torch.tensor(weight, dtype=kind)
        return self._shares[kind]

    def _begin_with(self, name: str, tensor: Tensor, share: Tensor) -> None:
        """Take the first client's values, which are the mean so far; of whole numbers the larger ones count."""
        old = self._before[name]
        if old.is_floating_point():
            self._mean[name] = torch.empty_like(old, dtype=self._precision(name)).copy_(tensor)
        else:
            self._mean[name] = torch.maximum(old, tensor)
        self._weight[name] = share

    def _fold(self, name: str, tensor: Tensor, share: Tensor) -> None:
        mean = self._open(name)
        total = self._weight.get(name)
        assert not isinstance(total, Rows)

        def step() -> tuple[Tensor, Tensor]:
            after = share if total is None else total + share
            return after, _factor(share, after)

        self._weight[name], factor = self._once((total, share), (), step)
        _move(mean, tensor, factor)

    def _forms(self, name: str, at: Index, whole: bool) -> Forms | None:
        """The shapes in which a client holds prefixes of all axes; None if weights were not equal in ranges of rows."""
        total = self._weight.get(name)
        if whole and isinstance(total, Rows):
            return total.shape, total.shape
        if (name, id(at)) not in self._divided:  # what is remembered holds the index, so that no other has its number
            self._divided[name, id(at)] = at, _tuples(divided(self._before[name].shape, at))
        forms = self._divided[name, id(at)][1]
        if forms is None or total is None or (not isinstance(total, Rows) and total.numel() == 1):
            return forms
        return forms if isinstance(total, Rows) and total.shape == forms[0] else None

    def _fold_rows(self, name: str, tensor: Tensor, share: Tensor, forms: Forms) -> None:
        total, (whole, part) = self._weight.get(name), forms

        def step() -> tuple[Rows, list[tuple[slice, Tensor]]]:
            weight = share.reshape(())
            if isinstance(total, Rows):
                rows = total
            else:
                rows = Rows(whole, weight.new_zeros(()) if total is None else total.reshape(()))
            after, ranges = rows.added(part, weight)
            return after, [(at, _single(_factor(weight, weights))) for at, weights in ranges]

        self._weight[name], moves = self._once((total, share), forms, step)
        mean, sent = self._open(name).view(whole), tensor.reshape(part)
        inside = tuple(slice(size) for size in part[1:])
        for rows, factor in moves:
            _move(mean[(rows, *inside)], sent[rows], factor)

    def _once(self, given: tuple[Tensor | Rows | None, Tensor], forms: tuple[Any, ...], step: Callable[[], T]) -> T:
        """What `step` returns; once for all tensors of a client whose weights were the same and grow by the same.

        What is as large as a tensor belongs to that tensor alone, and is not remembered.
        """
        total, share = given
        if share.numel() > 1 or (isinstance(total, Tensor) and total.numel() > 1):
            return step()
        key = (*map(id, given), *forms)
        if key not in self._steps:
            self._steps[key] = given, step()  # holds what is given, so that nothing else has its number
        found: T = self._steps[key][1]
        return found

    def _fold_part(self, name: str, tensor: Tensor, share: Tensor, at: Index) -> None:
        mean, total = self._open(name), self._weight.get(name)
        if isinstance(total, Rows):
            total = total.entries().reshape(mean.shape)
        elif total is None:
            total = torch.zeros(mean.shape, dtype=self._precision(name))
        else:
            total = total.expand(mean.shape).clone(memory_format=torch.contiguous_format)
        self._weight[name] = total
        view = prefix(mean, at)
        if view is not None:
            weights = prefix(total, at)
            assert weights is not None
            weights += share
            _move(view, tensor, _factor(share, weights))
            return
        places = grid(mean.shape, at)
        weights = total[places] + share
        total[places] = weights
        values = mean[places]
        _move(values, tensor, _factor(share, weights))
        mean[places] = values

    def _open(self, name: str) -> Tensor:
        """The mean so far of a tensor; at first its old value."""
        if name not in self._mean:
            old = self._before[name]
            self._mean[name] = old.to(self._precision(name) if old.is_floating_point() else old.dtype, copy=True)
        return self._mean[name]


class Rows:
    """The weights of a tensor's entries, held for one row of every range of rows that have the same; never changed.

    Args:
        shape: of the tensor.
        weight: of every entry.

    >>> rows, ranges = Rows((2, 4), torch.tensor(0.0)).added((1, 3), torch.tensor(1.0))
    >>> [(place, weights.tolist()) for place, weights in ranges]
    [(slice(0, 1, None), [[1.0, 1.0, 1.0]])]
    >>> rows, ranges = rows.added((2, 4), torch.tensor(3.0))
    >>> [weights.tolist() for _, weights in ranges]
    [[[4.0, 4.0, 4.0, 3.0]], [[3.0, 3.0, 3.0, 3.0]]]
    >>> rows.entries().tolist()
    [[4.0, 4.0, 4.0, 3.0], [3.0, 3.0, 3.0, 3.0]]
    """

    def __init__(self, shape: tuple[int, ...], weight: Tensor) -> None:
        self.shape = shape
        self._ends = [shape[0]]  # where the ranges end
        self._weight = weight.expand(1, *shape[1:]).contiguous()

    def added(self, sizes: tuple[int, ...], share: Tensor) -> tuple[Rows, list[tuple[slice, Tensor]]]:
        """These weights and those of a client that holds a prefix; the ranges of its rows, with the weights of each."""
        after = self._cut(sizes[0])
        inside = tuple(slice(size) for size in sizes[1:])
        ranges, start = [], 0
        for i, end in enumerate(after._ends[: after._ends.index(sizes[0]) + 1]):
            weights = after._weight[(slice(i, i + 1), *inside)]
            weights += share
            ranges.append((slice(start, end), weights))
            start = end
        return after, ranges

    def entries(self) -> Tensor:
        """The weight of every entry."""
        counts = torch.tensor([end - start for start, end in pairwise([0, *self._ends])])
        return self._weight.repeat_interleave(counts, 0)

    def _cut(self, at: int) -> Rows:
        """A copy in which the range that holds a row is divided, unless one ends before it."""
        other = copy(self)
        if at in self._ends:
            other._weight = self._weight.clone()
            return other
        i = sum(end < at for end in self._ends)
        other._ends = [*self._ends[:i], at, *self._ends[i:]]
        other._weight = torch.cat([self._weight[: i + 1], self._weight[i:]])
        return other


def _tuples(forms: tuple[list[int], list[int]] | None) -> Forms | None:
    return None if forms is None else (tuple(forms[0]), tuple(forms[1]))


def _factor(share: Tensor, total: Tensor) -> Tensor:
    """w / W; zero where the weight is zero."""
    return share / total.clamp_min(torch.finfo(total.dtype).tiny)


def _single(factor: Tensor) -> Tensor:
    """One number if all are the same, which is read once instead of for every row; the bits are those of all."""
    first = factor.flatten()[0]
    return first if bool((factor == first).all()) else factor


def _move(mean: Tensor, tensor: Tensor, factor: Tensor) -> None:
    """m <- m + (w / W) (x - m), in place."""
    if mean.is_floating_point():
        mean.lerp_(tensor.to(mean.dtype), factor)
    else:
        torch.maximum(mean, tensor, out=mean)  # counters, such as batch-norm's number of batches


def prefix(tensor: Tensor, at: Index) -> Tensor | None:
    """The kept entries as a view, if every axis keeps a prefix; None otherwise."""
    view = tensor
    for axis, index in enumerate(at):
        if index is None:
            continue
        if int(index[-1]) != len(index) - 1:
            return None
        view = view.narrow(axis, 0, len(index))
    return view


def grid(shape: Sequence[int], at: Index) -> tuple[Tensor, ...]:
    """The kept entries as an index of a tensor of that shape."""
    parts = [torch.arange(size) if index is None else index for size, index in zip(shape, at)]
    return torch.meshgrid(*parts, indexing="ij")
