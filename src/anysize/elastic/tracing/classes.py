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
        self.pinned = np.ones(1, dtype=bool) if fixed is None else fixed.numpy().copy()
        self.known = len(self.pinned) - 1
        self.parent = np.arange(self.known + 1)

    def fresh(self, count: int) -> Tensor:
        """`count` new atoms, each in a separate class."""
        start = len(self.parent)
        new = np.arange(start, start + count)
        self.parent = np.concatenate([self.parent, new])
        self.pinned = np.concatenate([self.pinned, np.zeros(count, dtype=bool)])
        return torch.from_numpy(new.copy())

    def roots(self, labels: Tensor) -> Tensor:
        """The root of each label; the same shape."""
        return torch.from_numpy(self.parent[labels.numpy()])

    def pin(self, labels: Tensor) -> None:
        """Never drop these."""
        self.pinned[labels.numpy().ravel()] = True

    def pinned_roots(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For every atom, whether it is the root of a class with a pinned member."""
        result = np.zeros(len(self.parent), dtype=bool)
        result[self.parent[self.pinned]] = True
        return result

    def unite(self, left: Tensor, right: Tensor) -> None:
        """Keep or drop these together, element by element after broadcasting; uniting with atom 0 means pinning."""
        a, b = np.broadcast_arrays(self.roots(left).numpy(), self.roots(right).numpy())
        a, b = a.ravel(), b.ravel()
        low, high = np.minimum(a, b), np.maximum(a, b)
        self.pinned[high[low == 0]] = True
        meet = (low > 0) & (low != high)
        if meet.any():
            keys = np.unique(low[meet] * len(self.parent) + high[meet])
            self._join(keys // len(self.parent), keys % len(self.parent))

    def _join(self, low: np.ndarray[Any, Any], high: np.ndarray[Any, Any]) -> None:
        if np.unique(np.concatenate([low, high])).size == 2 * low.size:  # a plain matching: no chains to follow
            settled = high <= self.known
            if not (self.pinned[low[settled]] & self.pinned[high[settled]]).all():
                raise Clash
            self.parent[high] = low
        else:
            self._join_one_by_one(low.tolist(), high.tolist())
        while True:
            flat = self.parent[self.parent]
            if np.array_equal(flat, self.parent):
                return
            self.parent = flat

    def _join_one_by_one(self, low: list[int], high: list[int]) -> None:
        for a, b in zip(low, high):
            first, second = sorted((self._find(a), self._find(b)))
            apart = first != second and second <= self.known
            if apart and not (self.pinned[first] and self.pinned[second]):
                raise Clash
            self.parent[second] = first

    def _find(self, atom: int) -> int:
        while self.parent[atom] != atom:
            atom = int(self.parent[atom])
        return atom
