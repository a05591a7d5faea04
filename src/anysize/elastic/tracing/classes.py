"""Labels that belong together: a union-find over the units of a network."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Planes = tuple[Tensor, ...]


class Clash(Exception):
    """Two classes that the full network keeps apart meet in the narrowed one."""


class Classes:
    """A union-find over atoms, in arrays; the smallest atom of a class is its root.

    If `fixed` is given, the atoms from 1 on are classes settled earlier, and `fixed` says which are pinned. Uniting
    two of them is then a `Clash`, unless both are pinned: classes that are never dropped may meet.

    >>> classes = Classes()
    >>> a, b = classes.fresh(2), classes.fresh(2)
    >>> classes.unite(a, b)
    >>> classes.roots(b).tolist() == a.tolist()
    True
    """

    def __init__(self, fixed: Tensor | None = None) -> None:
        known = 0 if fixed is None else len(fixed) - 1
        self.known = known
        self.count = known + 1
        self._parent = np.arange(max(2 * self.count, 1024))
        self._pinned = np.zeros(len(self._parent), dtype=bool)  # of a class at its root
        self._pinned[: self.count] = True if fixed is None else fixed.numpy()
        self.changes = 0  # how often classes were joined

    @property
    def parent(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The root of every atom."""
        return self._found(np.arange(self.count))

    def fresh(self, count: int) -> Tensor:
        """`count` new atoms, each in a separate class."""
        start, self.count = self.count, self.count + count
        if self.count > len(self._parent):
            room = 2 * self.count
            self._parent = np.concatenate([self._parent, np.arange(len(self._parent), room)])
            self._pinned = np.concatenate([self._pinned, np.zeros(room - len(self._pinned), dtype=bool)])
        return torch.arange(start, self.count, device="cpu")

    def _found(self, atoms: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The root of each atom, found by following parents; the way is shortened for the next time."""
        roots: np.ndarray[Any, Any] = self._parent[atoms]
        while True:
            above = self._parent[roots]
            if np.array_equal(above, roots):
                return roots
            self._parent[atoms] = above
            roots = above

    def roots(self, labels: Tensor) -> Tensor:
        """The root of each label; the same shape."""
        return torch.from_numpy(np.asarray(self._found(labels.numpy())))

    def pin(self, labels: Tensor) -> None:
        """Never drop these."""
        self._pinned[self._found(labels.numpy())] = True

    def is_pinned(self, labels: Tensor) -> bool:
        """Whether every one of these is never dropped."""
        return bool(self._pinned[self._found(labels.numpy())].all())

    def pinned_roots(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For every atom, whether it is the root of a class with a pinned member."""
        parent, result = self.parent, np.zeros(self.count, dtype=bool)
        result[parent[self._pinned[parent]]] = True
        return result

    def unite(self, left: Tensor, right: Tensor) -> None:
        """Keep or drop these together, element by element after broadcasting; uniting with atom 0 means pinning."""
        a, b = np.broadcast_arrays(self.roots(left).numpy(), self.roots(right).numpy())
        a, b = a.ravel(), b.ravel()
        low, high = np.minimum(a, b), np.maximum(a, b)
        self._pinned[high[low == 0]] = True
        meet = (low > 0) & (low != high)
        if meet.any():
            keys = np.unique(low[meet] * self.count + high[meet])
            self.changes += 1
            self._join(keys // self.count, keys % self.count)

    def _join(self, low: np.ndarray[Any, Any], high: np.ndarray[Any, Any]) -> None:
        if np.unique(np.concatenate([low, high])).size == 2 * low.size:  # a plain matching: no chains to follow
            settled = high <= self.known
            if not (self._pinned[low[settled]] & self._pinned[high[settled]]).all():
                raise Clash
            self._parent[high] = low
            self._pinned[low] |= self._pinned[high]
        else:
            self._join_one_by_one(low.tolist(), high.tolist())

    def _join_one_by_one(self, low: list[int], high: list[int]) -> None:
        for a, b in zip(low, high):
            first, second = sorted((self._find(a), self._find(b)))
            apart = first != second and second <= self.known
            if apart and not (self._pinned[first] and self._pinned[second]):
                raise Clash
            self._parent[second] = first
            self._pinned[first] |= self._pinned[second]

    def _find(self, atom: int) -> int:
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = int(self._parent[atom])
        return atom
