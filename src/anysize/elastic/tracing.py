"""Labels that follow every channel through a network, from which `axes` finds the width groups.

The forward runs once on the meta device, under a dispatch mode that sees every aten operation. Each index of
each axis of each parameter and buffer is an *atom*, and every tensor carries *planes*: integer tensors that
give, for each element, the atom to which it belongs. An operation that moves data (a view, a permutation, a
concatenation) is applied to the planes too, so that a flatten or a fused projection needs no special rule.
Arithmetic that combines elements or indices unites their atoms; a class of united atoms is kept or dropped
together.

Why labels, and not a graph of layers with a pruning rule for each (as in Torch-Pruning)? A graph knows which
*layers* are coupled, but needs a rule per layer type for how indices map from one layer to the next. Maps
through gates, fused projections, tied tensors, the groups of a norm and sizes written in Python then go wrong,
some of them silently. Labels carry the map itself.

Words used here:

- *pinned*: an atom that is never dropped. Atom 0 is "always there": the label of elements that no parameter
  produced.
- *neutral*: a tensor made by a factory such as `zeros`; its size follows the code, so it couples nothing.
- *static*: a tensor computed from parameters and buffers alone.
- *grid*: a plane that varies along several axes, as after `view(B, T, heads, head_dim)`. What is kept of a
  tensor must be a product of what is kept along each axis, so exactly one axis of a grid can stay elastic.
"""

from __future__ import annotations

import copy
import math
import operator
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from anysize.errors import ModelError

Heads = Literal["within", "whole"]
Planes = tuple[Tensor, ...]

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


class Clash(Exception):
    """Two classes that the full network keeps apart meet in the narrowed one."""


# --- classes of atoms ---------------------------------------------------------------------------------------


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


# --- integers that remember where they came from ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Extent:
    """The size of one axis of a labelled tensor; `stop` counts only the first `stop` positions."""

    planes: Planes
    axis: int
    size: int
    stop: int | None = None

    def lanes(self) -> list[Tensor]:
        """The labels along the axis, one row per plane, cut at `stop`."""
        rows = [plane.movedim(self.axis, 0).reshape(plane.shape[self.axis], -1)[:, 0] for plane in self.planes]
        return [row.expand(self.size)[: self.stop] for row in rows]


@dataclass(frozen=True)
class Attribute:
    """An integer stored on a module, by dotted path."""

    path: str


@dataclass(frozen=True, eq=False)
class Arithmetic:
    """An operation on two expressions."""

    apply: Callable[[int, int], int]
    left: Expression
    right: Expression


Expression = int | Extent | Attribute | Arithmetic


def evaluate(expression: Expression, attributes: Mapping[str, int], extent: Callable[[Extent], int]) -> int | None:
    """The value of an expression at the given attribute values and sizes; None if it has no value there."""
    if isinstance(expression, int):
        return int(expression)
    if isinstance(expression, Attribute):
        return attributes[expression.path]
    if isinstance(expression, Extent):
        return extent(expression)
    left = evaluate(expression.left, attributes, extent)
    right = evaluate(expression.right, attributes, extent)
    if left is None or right is None:
        return None
    try:
        return expression.apply(left, right)
    except ZeroDivisionError:
        return None


def attributes_in(expression: Expression) -> frozenset[str]:
    """The attribute paths an expression depends on."""
    if isinstance(expression, Attribute):
        return frozenset((expression.path,))
    if isinstance(expression, Arithmetic):
        return attributes_in(expression.left) | attributes_in(expression.right)
    return frozenset()


class TracedInt(int):
    """An int that behaves like any other and remembers the expression that made it."""

    expression: Expression

    def __new__(cls, value: int, expression: Expression) -> TracedInt:
        made = super().__new__(cls, value)
        made.expression = expression
        return made

    def __add__(self, other: Any) -> Any:
        return _arithmetic(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return _arithmetic(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return _arithmetic(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _arithmetic(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return _arithmetic(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _arithmetic(operator.mul, other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _arithmetic(operator.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _arithmetic(operator.floordiv, other, self)

    def __mod__(self, other: Any) -> Any:
        return _arithmetic(operator.mod, self, other)

    def __rmod__(self, other: Any) -> Any:
        return _arithmetic(operator.mod, other, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedInt:
        return self


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, TracedInt) else value


def _expression(value: int) -> Expression:
    return value.expression if isinstance(value, TracedInt) else value


def _arithmetic(apply: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    value = apply(_plain(left), _plain(right))
    integers = isinstance(left, int) and isinstance(right, int)
    if not integers or not isinstance(value, int):
        return value
    return TracedInt(value, Arithmetic(apply, _expression(left), _expression(right)))


@dataclass(frozen=True, eq=False)
class SizeNote:
    """The forward used `expression` as the size `extent`: both must agree in a narrowed network too."""

    expression: Expression
    extent: Extent


# --- labels of tensors --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Labels:
    """What is known about one tensor: its planes, and whether it is neutral or static.

    `loose` are the axes along which it was expanded from size 1: there its size follows that of any other operand.
    """

    planes: Planes = ()
    neutral: bool = False
    static: bool = False
    loose: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Call:
    """One aten operation with its arguments and result."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any

    @property
    def name(self) -> str:
        """The operation's name without its overload and without the underscore of an in-place variant."""
        name = str(self.func.overloadpacket.__name__)
        return name.rstrip("_") if not name.startswith("__") else name

    def bound(self) -> dict[str, Any]:
        """Every argument by name, defaults included."""
        values: dict[str, Any] = {}
        for position, argument in enumerate(self.func._schema.arguments):
            if position < len(self.args):
                values[argument.name] = self.args[position]
            else:
                values[argument.name] = self.kwargs.get(argument.name, argument.default_value)
        return values

    def tensors(self) -> list[Tensor]:
        """Every tensor given, in order."""
        leaves = tree_flatten((self.args, dict(self.kwargs)))[0]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def results(self) -> list[Tensor]:
        """Every tensor returned, in order."""
        return [leaf for leaf in tree_flatten(self.out)[0] if isinstance(leaf, Tensor)]


def varying(plane: Tensor) -> tuple[int, ...]:
    """The axes along which a plane varies: those on which it has not been reduced to size 1."""
    return tuple(axis for axis, size in enumerate(plane.shape) if size > 1)


def user_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """`file:line` of the innermost frame outside PyTorch and this package's tracing, or an empty string."""
    found = ""
    for frame, line in frames:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _HERE, "<")):
            found = f"{file}:{line}"
    return found


def line_of(error: BaseException) -> str:
    """`file:line` of the user's code in which an error was raised, or an empty string."""
    trace: TracebackType | None = error.__traceback__
    return user_line(traceback.walk_tb(trace)) if trace else ""


Rule = Callable[["Tracer", Call], None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what one kind of aten operation does to labels."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows labels through every aten operation that runs while it is active."""

    def __init__(self, classes: Classes, heads: Heads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.classes = classes
        self.heads = heads
        self.paused = False
        self.stack: list[str] = [""]
        self.grids: list[Tensor] = []
        self.notes: list[SizeNote] = []
        self.inputs: dict[str, tuple[Extent, ...]] = {}
        self.outputs: dict[str, tuple[Extent, ...]] = {}
        self.producers: dict[tuple[str, int], None] = {}
        self.origin: dict[int, tuple[str, int]] = {}
        self.seen: set[int] = set()
        self.released: Callable[[Tracer, Tensor], bool] = lambda tracer, plane: False
        # Hold the tensors too: an id is a valid key only while its tensor lives.
        self._labels: dict[int, tuple[Tensor, Labels]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.paused:
            self.follow(Call(func, args, kwargs or {}, out))
        return out

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Operations inside are not followed."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    # -- reading and writing labels

    def labels(self, tensor: Tensor) -> Labels:
        """What is known about a tensor; one never seen has no planes and couples like any constant."""
        self.seen.add(id(tensor))
        return self._labels[id(tensor)][1] if id(tensor) in self._labels else Labels()

    def put(self, tensor: Tensor, planes: Iterable[Tensor], *, neutral: bool = False, static: bool = False) -> None:
        """Give a tensor its planes, each reduced to the axes along which it varies."""
        kept: dict[tuple[Any, ...], Tensor] = {}
        for plane in planes:
            small = self.compact(plane)
            if small.numel() == 1:  # one class covers every element: without it the tensor would be empty
                self.classes.pin(small)
                continue
            if small.dim() != tensor.dim():
                raise AssertionError(f"plane {tuple(small.shape)} on tensor {tuple(tensor.shape)}")
            key = (varying(small), self.classes.roots(small).numpy().tobytes())
            kept.setdefault(key, small)
        thin = self._one_each(list(kept.values()))
        self.grids.extend(plane for plane in thin if len(varying(plane)) > 1)
        self._labels[id(tensor)] = (tensor, Labels(thin, neutral, static))

    def _one_each(self, planes: list[Tensor]) -> Planes:
        """One plane for each set of axes, since two that merged into one axis cannot both be elastic there.

        A plane that is already pinned gives way; otherwise the one with fewer classes does, and is pinned.
        """
        chosen: dict[tuple[int, ...], Tensor] = {}
        pinned = self.classes.pinned_roots() if len(planes) > 1 else None
        for plane in planes:
            rival = chosen.setdefault(varying(plane), plane)
            if rival is plane or pinned is None:
                continue
            roots = [np.unique(self.classes.roots(each).numpy()) for each in (rival, plane)]
            ranks = [(not pinned[own].all(), own.size) for own in roots]
            winner, loser = (plane, rival) if ranks[1] > ranks[0] else (rival, plane)
            self.classes.pin(loser)
            chosen[varying(plane)] = winner
        return tuple(chosen.values())

    def adopt(self, tensor: Tensor, name: str, labels: Sequence[Tensor | None]) -> None:
        """Give a parameter or buffer one plane for each axis with labels."""
        planes = []
        for axis, row in enumerate(labels):
            if row is None:
                continue
            for atom in row.tolist():
                self.origin.setdefault(atom, (name, axis))
            planes.append(row.reshape([-1 if other == axis else 1 for other in range(tensor.dim())]))
        self._labels[id(tensor)] = (tensor, Labels(tuple(planes), static=True))

    def produce(self, planes: Iterable[Tensor]) -> None:
        """Remember the parameter axes of these planes as axes that put labels on an activation."""
        for plane in planes:
            for atom in plane.flatten().tolist():
                if atom in self.origin:
                    self.producers.setdefault(self.origin[atom])

    def extents(self, tensor: Tensor) -> tuple[Extent, ...]:
        """The size of each axis, in a form that can be evaluated again after narrowing."""
        planes = self._labels[id(tensor)][1].planes if id(tensor) in self._labels else ()
        return tuple(
            Extent(tuple(plane for plane in planes if plane.shape[axis] > 1), axis, size)
            for axis, size in enumerate(tuple(tensor.shape))
        )

    # -- planes

    def compact(self, plane: Tensor) -> Tensor:
        """The plane, reduced to size 1 along every axis on which its classes do not change."""
        roots = self.classes.roots(plane)
        for axis, size in enumerate(plane.shape):
            if size > 1 and bool((roots == roots.narrow(axis, 0, 1)).all()):
                plane, roots = plane.narrow(axis, 0, 1), roots.narrow(axis, 0, 1)
        return plane

    def unite_along(self, plane: Tensor, *axes: int) -> Tensor:
        """The plane after uniting its labels along `axes`."""
        for axis in axes:
            self.classes.unite(plane, plane.narrow(axis, 0, 1))
        return self.compact(plane)

    def fix_along(self, plane: Tensor, axis: int) -> Tensor:
        """The plane after fixing the size of `axis`: it is pinned, or united along the axis if it is a grid."""
        if axis not in varying(plane):
            return plane
        if varying(plane) == (axis,):
            self.classes.pin(plane)
            return plane
        return self.unite_along(plane, axis)

    def _elastic_axis(self, plane: Tensor, met: frozenset[int]) -> int:
        """The axis of a grid that stays elastic: the one with the most distinct slices, on a tie the outer one.

        Where the grid meets planes that vary along the axes `met`, the choice of heads comes first: "within"
        keeps the last axis if it is in `met`, "whole" the first if all its slices are distinct.
        """
        axes, roots = varying(plane), self.classes.roots(plane)
        counts = {axis: torch.unique(roots.movedim(axis, 0).flatten(1), dim=0).shape[0] for axis in axes}
        if self.heads == "within" and axes[-1] in met:
            return axes[-1]
        if self.heads == "whole" and met and counts[axes[0]] == plane.shape[axes[0]]:
            return axes[0]
        return max(counts, key=lambda axis: (counts[axis], -axis))

    def settle(self, plane: Tensor, met: frozenset[int] = frozenset()) -> Tensor:
        """The plane after reducing its variation to at most one axis."""
        plane = self.compact(plane)
        if len(varying(plane)) < 2:
            return plane
        elastic = self._elastic_axis(plane, met)
        return self.unite_along(plane, *(axis for axis in varying(plane) if axis != elastic))

    def settle_grids(self) -> None:
        """Settle every grid seen and every pair of sizes that the code makes equal, until nothing changes."""
        for resolve in (self._settle_each_grid, self._couple_sizes):
            before = self.classes.parent.copy()
            resolve()
            if not np.array_equal(before, self.classes.parent):
                self.settle_grids()  # sizes can be compared only after every grid has its shape
                return

    def _settle_each_grid(self) -> None:
        for plane in self.grids:
            self.settle(plane)

    def _couple_sizes(self) -> None:
        """Unite axes if Python code takes the size of one from the other, as `view(B, T, C)` with another C does."""
        by_attribute: dict[str, list[Extent]] = {}
        for note in self.notes:
            wanted = note.expression
            if isinstance(wanted, Extent):
                self._match([wanted, note.extent])
            elif isinstance(wanted, Attribute):
                by_attribute.setdefault(wanted.path, []).append(note.extent)
        for extents in by_attribute.values():
            self._match(extents)
        for note in self.notes:
            self._couple_quotient(note, by_attribute)

    def _match(self, extents: Sequence[Extent]) -> None:
        lanes = [lane for lane in map(self._own_lane, extents) if lane is not None]
        for lane in lanes[1:]:
            if lane.shape == lanes[0].shape and not self._same_count(lanes[0], lane):
                self.classes.unite(lanes[0], lane)

    def _same_count(self, whole: Tensor, part: Tensor) -> bool:
        """Whether the same fraction of both stays at every width: they hold the same classes equally often."""
        own = self.classes.roots(part).repeat(whole.numel() // part.numel())
        return torch.equal(self.classes.roots(whole).sort()[0], own.sort()[0])

    def _own_lane(self, extent: Extent) -> Tensor | None:
        """The labels of an axis if some plane varies along it alone; None for the bound of a slice."""
        small = [self.compact(plane) for plane in extent.planes]
        own = [plane.flatten() for plane in small if varying(plane) == (extent.axis,)]
        return own[0] if own and extent.stop is None else None

    def _couple_quotient(self, note: SizeNote, by_attribute: Mapping[str, Sequence[Extent]]) -> None:
        """Unite the axes that a size such as `C // heads` relates: C with the channels of a part, or with the heads."""
        wanted = note.expression
        if not isinstance(wanted, Arithmetic) or wanted.apply is not operator.floordiv:
            return
        if not isinstance(wanted.left, Extent) or not isinstance(wanted.right, Attribute | int):
            return
        whole, part = self._own_lane(wanted.left), self._own_lane(note.extent)
        if whole is None or whole.numel() % note.extent.size:
            return
        grid = whole.reshape(-1, note.extent.size)
        if part is not None and not self._same_count(whole, part):
            self.classes.unite(grid, part)
        elif part is None and isinstance(wanted.right, Attribute):
            parts = map(self._own_lane, by_attribute.get(wanted.right.path, ()))
            for lane in (lane for lane in parts if lane is not None and lane.numel() == len(grid)):
                self.classes.unite(grid, lane.reshape(-1, 1))

    def lane(self, planes: Iterable[Tensor], axis: int) -> Tensor | None:
        """The labels along one axis, (size,), after fixing every other axis; None if it has no labels."""
        rows = []
        for plane in planes:
            for other in varying(plane):
                plane = self.fix_along(plane, other) if other != axis else plane
            if varying(plane) == (axis,):
                rows.append(plane.flatten())
        for row in rows[1:]:
            self.classes.unite(rows[0], row)
        return rows[0] if rows else None

    def couple(self, left: Tensor | None, right: Tensor | None, *, loose: bool = False) -> None:
        """Unite two lanes; one without a partner is pinned, unless its partner is `loose` (neutral)."""
        if left is not None and right is not None:
            self.classes.unite(left, right)
        elif not loose:
            for lane in (left, right):
                self.classes.pin(lane) if lane is not None else None

    # -- rules used by many operations

    def follow(self, call: Call) -> None:
        """Label what an operation returned."""
        given = [self.labels(tensor) for tensor in call.tensors()]
        try:
            self._follow(call, given)
        except Clash:
            raise ModelError(
                f"narrowing changes what meets what at {self.where()}: {call.func} would combine units that "
                "the full network keeps apart. A slice, split or view there has a size written as a number; "
                "derive it from the input's shape or from a module attribute, or keep the layer whole with keep="
            ) from None

    def _follow(self, call: Call, given: list[Labels]) -> None:
        apply = RULES.get(call.name)
        if apply is None and torch.Tag.pointwise in call.func.tags:
            apply = _pointwise
        if apply is None and call.func.is_view:
            apply = _move
        loose = _loose_axes(call, given) if apply in (_pointwise, _expand) else frozenset()
        self._label_results(call, given, apply)
        for result in call.results() if loose else ():
            self._labels[id(result)] = (result, replace(self._labels[id(result)][1], loose=loose))

    def _label_results(self, call: Call, given: list[Labels], apply: Rule | None) -> None:
        if not any(labels.planes for labels in given):
            neutral = all(labels.neutral for labels in given)
            static = bool(given) and all(labels.static for labels in given)
            for result in call.results():
                self._labels[id(result)] = (result, Labels((), neutral, static))
        elif apply is not None:
            apply(self, call)
        elif all(self.free(plane) for labels in given for plane in labels.planes):
            for result in call.results():
                self.put(result, ())
        else:
            self.refuse(call)

    def free(self, plane: Tensor) -> bool:
        """Whether no unit of this plane can be dropped, so that any operation may read it."""
        roots = self.classes.roots(plane).numpy()
        return bool(self.classes.pinned_roots()[roots].all()) or self.released(self, plane)

    def refuse(self, call: Call) -> None:
        """Raise the error for an operation that has no rule."""
        raise ModelError(
            f"cannot follow widths through {call.func} at {self.where()}: there is no rule for it. Keep "
            "the layers that feed it whole with keep=[...], or rewrite it with ordinary tensor operations"
        )

    def where(self) -> str:
        """The module and the line of user code that are running."""
        path = self.stack[-1] or "the network's own forward"
        frames = reversed(list(traceback.walk_stack(sys._getframe())))
        line = user_line(frames)
        return f"{path} ({line})" if line else path

    def combine(self, operands: Sequence[tuple[Sequence[int], Labels]], dims: int) -> Planes:
        """The planes of the result of an element-by-element operation, after uniting the operands' labels."""
        sizes = [(1,) * (dims - len(shape)) + tuple(shape) for shape, _ in operands]
        planes = [
            [plane.reshape((1,) * (dims - plane.dim()) + tuple(plane.shape)) for plane in labels.planes]
            for _, labels in operands
        ]
        self._settle_unequal(planes)
        self._unite_equal(planes)
        for place, (shape, labels) in enumerate(operands):
            shift = dims - len(shape)
            sizes[place] = tuple(1 if axis - shift in labels.loose else size for axis, size in enumerate(sizes[place]))
        for mine, rows in enumerate(planes):
            others = [k for k in range(len(planes)) if k != mine and not operands[k][1].neutral]
            planes[mine] = [self._against(plane, [(sizes[k], planes[k]) for k in others]) for plane in rows]
        met: dict[tuple[int, ...], Tensor] = {}
        for plane in (plane for rows in planes for plane in rows):
            first = met.get(varying(plane), plane)
            met[varying(plane)] = torch.where(first == 0, plane, first)  # all united, except "always there"
        return tuple(met.values())

    def _settle_unequal(self, planes: list[list[Tensor]]) -> None:
        """Settle each grid that meets a plane with other varying axes."""
        met = {varying(plane) for rows in planes for plane in rows}
        for rows in planes:
            for place, plane in enumerate(rows):
                axes = set(varying(plane))
                others = [set(other) & axes for other in met if set(other) != axes]
                if len(axes) > 1 and any(others):
                    rows[place] = self.settle(plane, frozenset().union(*others))

    def _unite_equal(self, planes: list[list[Tensor]]) -> None:
        first: dict[tuple[int, ...], Tensor] = {}
        for plane in (plane for rows in planes for plane in rows):
            self.classes.unite(first.setdefault(varying(plane), plane), plane)

    def _against(self, plane: Tensor, others: Sequence[tuple[Sequence[int], list[Tensor]]]) -> Tensor:
        """The plane after fixing each axis that another operand has at full size but without labels."""
        for axis in varying(plane):
            bare = any(sizes[axis] > 1 and not any(other.shape[axis] > 1 for other in rows) for sizes, rows in others)
            plane = self.fix_along(plane, axis) if bare else plane
        return plane

    def contract(self, left: Labels, right: Labels, sizes: tuple[int, int, int, int]) -> Planes:
        """The planes (batch, row, column) of a product (batch, row, k) x (batch, k, column)."""
        batch, _, inner, _ = sizes
        lefts = [self._straighten(plane, contracted=2, other=1) for plane in left.planes]
        rights = [self._straighten(plane, contracted=1, other=2) for plane in right.planes]
        self.couple(
            self._first_lane(lefts, 2),
            self._first_lane(rights, 1),
            loose=inner == 1 or left.neutral or right.neutral,
        )
        lefts = [plane for plane in lefts if plane.shape[2] == 1]
        rights = [plane for plane in rights if plane.shape[1] == 1]
        if batch > 1:
            lefts, rights = self._match_batch(lefts, rights, left.neutral, right.neutral)
        if left.static != right.static:
            self.produce(lefts if left.static else rights)
        return (*lefts, *rights)

    def _first_lane(self, planes: list[Tensor], axis: int) -> Tensor | None:
        return self.lane([plane for plane in planes if plane.shape[axis] > 1], axis)

    def _straighten(self, plane: Tensor, *, contracted: int, other: int) -> Tensor:
        """The plane after uniting labels so that it varies along the contracted axis alone or not along it at all."""
        if plane.shape[contracted] > 1 and plane.shape[0] > 1:
            plane = self.unite_along(plane, 0 if self.heads == "within" else contracted)
        if plane.shape[contracted] > 1 and plane.shape[other] > 1:
            plane = self.unite_along(plane, other)
        return plane

    def _match_batch(
        self, lefts: list[Tensor], rights: list[Tensor], left_neutral: bool, right_neutral: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The planes of both sides after making their batch axes agree."""

        def along_batch(planes: list[Tensor]) -> bool:
            return any(plane.shape[0] > 1 for plane in planes)

        if along_batch(lefts) and along_batch(rights):
            lefts, rights = ([self._decide_batch(plane) for plane in side] for side in (lefts, rights))
        if not along_batch(rights) and not right_neutral:
            lefts = [self.fix_along(plane, 0) for plane in lefts]
        if not along_batch(lefts) and not left_neutral:
            rights = [self.fix_along(plane, 0) for plane in rights]
        whole = [plane for plane in (*lefts, *rights) if varying(plane) == (0,)]
        for plane in whole[1:]:
            self.classes.unite(whole[0], plane)
        return lefts, rights

    def _decide_batch(self, plane: Tensor) -> Tensor:
        if plane.shape[0] == 1 or len(varying(plane)) < 2:
            return plane
        inner = tuple(axis for axis in varying(plane) if axis != 0)
        return self.unite_along(plane, *((0,) if self.heads == "within" else inner))


# --- rules: one small function per kind of operation --------------------------------------------------------


def _expanded(plane: Tensor, tensor: Tensor) -> Tensor:
    return plane.expand(tuple(tensor.shape))


def _put_all(tracer: Tracer, call: Call, planes: Sequence[Planes], *, like: Tensor) -> None:
    labels = tracer.labels(like)
    for result, own in zip(call.results(), planes):
        tracer.put(result, own, neutral=labels.neutral, static=labels.static)


@rule(
    "_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp",
    "tril", "triu", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "fill",
    "zero", "bernoulli", "uniform", "normal", "_to_copy", "detach", "alias", "lift_fresh", "clone", "random",
    "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "elu", "rrelu_with_noise", "log_sigmoid_forward",
    "native_dropout", "contiguous", "_conj", "flip", "roll", "view_as_real_copy",
)  # fmt: skip
def _keep(tracer: Tracer, call: Call) -> None:
    """The result has the operand's labels. Flips and rolls along a labelled axis move them."""
    source = call.tensors()[0]
    labels = tracer.labels(source)
    if call.name in ("flip", "roll"):
        _move(tracer, call)
        return
    neutral = labels.neutral or call.name.endswith("_like")
    for result in call.results():
        tracer.put(result, labels.planes, neutral=neutral, static=labels.static)


@rule("_prelu_kernel", "copy", "where", "masked_fill", "lerp", "addcmul", "addcdiv", "_weight_norm_interface")
def _pointwise(tracer: Tracer, call: Call) -> None:
    """Operands meet element by element."""
    tensors = call.tensors()
    result = call.results()[0]
    given = [tracer.labels(tensor) for tensor in tensors]
    planes = tracer.combine([(tuple(t.shape), own) for t, own in zip(tensors, given)], result.dim())
    if result is tensors[0] and planes and not given[0].planes:
        _refuse_partial_write(tracer, call, result)
    tracer.put(
        result,
        planes,
        neutral=all(own.neutral for own in given),
        static=all(own.static for own in given),
    )


def _refuse_partial_write(tracer: Tracer, call: Call, target: Tensor) -> None:
    """Refuse a write into a part of a tensor: it would have to change the labels of the whole."""
    if target.numel() * target.element_size() < target.untyped_storage().nbytes():
        raise ModelError(
            f"cannot follow widths through {call.func} at {tracer.where()}: it writes units into a part of "
            "an unlabelled tensor. Collect the parts and use torch.cat or torch.stack, or keep the layers "
            "that feed it whole with keep=[...]"
        )


def _move(tracer: Tracer, call: Call) -> None:
    """Apply the operation itself to every plane."""
    source = call.tensors()[0]
    planes: list[list[Tensor]] = [[] for _ in call.results()]
    for plane in tracer.labels(source).planes:
        full = _expanded(plane, source).contiguous()
        moved_parts = call.func(full, *call.args[1:], **call.kwargs)
        for place, moved in enumerate(tree_flatten(moved_parts)[0]):
            planes[place].append(moved)
    _put_all(tracer, call, [tuple(own) for own in planes], like=source)


@rule("expand")
def _expand(tracer: Tracer, call: Call) -> None:
    """A view that expands axes of size 1; `_loose_axes` remembers which."""
    _move(tracer, call)


def _loose_axes(call: Call, given: Sequence[Labels]) -> frozenset[int]:
    """The axes of a result whose size comes only from expanding: it follows the size of other operands."""
    result = call.results()[0]
    found = set()
    for axis in range(result.dim()):
        sizes = []
        for tensor, labels in zip(call.tensors(), given):
            own = axis - (result.dim() - tensor.dim())
            full = own >= 0 and tensor.shape[own] > 1
            sizes.append("loose" if own in labels.loose else "full" if full else "one")
        grown = call.name == "expand" and result.shape[axis] > 1
        if "full" not in sizes and ("loose" in sizes or grown):
            found.add(axis)
    return frozenset(found)


RULES.update(dict.fromkeys(("repeat", "pixel_shuffle", "pixel_unshuffle"), _move))


@rule("view", "_unsafe_view", "_reshape_alias")
def _view(tracer: Tracer, call: Call) -> None:
    """A view by sizes; planes are reshaped, since they need not share the tensor's strides."""
    source, result = call.tensors()[0], call.results()[0]
    shape = tuple(result.shape)
    planes = tuple(_expanded(plane, source).reshape(shape) for plane in tracer.labels(source).planes)
    _put_all(tracer, call, [planes], like=source)


@rule("as_strided")
def _as_strided(tracer: Tracer, call: Call) -> None:
    """Strides mean the same on a plane only where the tensor is contiguous."""
    if not call.tensors()[0].is_contiguous():
        tracer.refuse(call)
    _move(tracer, call)


@rule("constant_pad_nd")
def _pad(tracer: Tracer, call: Call) -> None:
    """Padded elements belong to no unit."""
    source, pad = call.args[0], call.args[1]
    planes = tuple(torch.constant_pad_nd(_expanded(plane, source), pad, 0) for plane in tracer.labels(source).planes)
    _put_all(tracer, call, [planes], like=source)


@rule("slice")
def _slice(tracer: Tracer, call: Call) -> None:
    """A slice of a stored tensor fixes that axis: a later call may use what this one leaves out."""
    source = call.args[0]
    labels = tracer.labels(source)
    axis = int(call.bound()["dim"]) % source.dim()
    if labels.static and source.shape[axis] != call.results()[0].shape[axis]:
        for plane in labels.planes:
            tracer.fix_along(plane, axis)
    _move(tracer, call)


@rule("select", "unbind", "diagonal")
def _select(tracer: Tracer, call: Call) -> None:
    """Taking one index of an axis fixes that axis, or unites a grid along it."""
    source, bound = call.args[0], call.bound()
    axes = [int(bound[name]) % source.dim() for name in ("dim", "dim1", "dim2") if name in bound]
    for plane in tracer.labels(source).planes:
        for axis in axes:
            plane = tracer.fix_along(plane, axis)
    _move(tracer, call)


@rule("split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes", "chunk", "unsafe_chunk")
def _split(tracer: Tracer, call: Call) -> None:
    """Equal parts stay equal: they are united; unequal parts only carry their labels on.

    In a check of a narrowed network nothing is united: unequal parts may have become equal by chance.
    """
    source = call.args[0]
    axis = int(call.bound()["dim"]) % source.dim()
    sizes = [int(part.shape[axis]) for part in call.results()]
    equal = len(set(sizes)) == 1 and not tracer.classes.known
    for plane in tracer.labels(source).planes:
        if plane.shape[axis] > 1 and equal:
            first, *rest = torch.split(plane, sizes[0], axis)
            for part in rest:
                tracer.classes.unite(first, part)
    _move(tracer, call)


@rule("cat", "concatenate")
def _cat(tracer: Tracer, call: Call) -> None:
    """Labels are concatenated as the tensors are."""
    tensors = [tensor for tensor in call.args[0] if tuple(tensor.shape) != (0,)]
    axis = int(call.bound()["dim"]) % tensors[0].dim()
    parts = [(tuple(tensor.shape), tracer.labels(tensor)) for tensor in tensors]
    _put_joined(tracer, call, parts, axis)


@rule("stack")
def _stack(tracer: Tracer, call: Call) -> None:
    """Like a concatenation, along a new axis."""
    axis = int(call.bound()["dim"]) % call.results()[0].dim()
    parts = []
    for tensor in call.args[0]:
        labels = tracer.labels(tensor)
        shape = (*tensor.shape[:axis], 1, *tensor.shape[axis:])
        planes = tuple(plane.unsqueeze(axis) for plane in labels.planes)
        parts.append((shape, Labels(planes, labels.neutral, labels.static)))
    _put_joined(tracer, call, parts, axis)


def _put_joined(tracer: Tracer, call: Call, parts: Sequence[tuple[tuple[int, ...], Labels]], axis: int) -> None:
    slots: dict[tuple[int, ...], list[Tensor | None]] = {}
    for place, (_, labels) in enumerate(parts):
        for plane in labels.planes:
            slot = tuple(other for other in varying(plane) if other != axis)
            row = slots.setdefault(slot, [None] * len(parts))
            mine = row[place]
            row[place] = plane if mine is None else mine
            tracer.couple(mine, plane if mine is not None else None, loose=True)
    for slot, row in slots.items():
        _fix_unmatched(tracer, slot, row, parts)
    planes = [_joined(slot, row, parts, axis) for slot, row in slots.items()]
    given = [labels for _, labels in parts]
    tracer.put(
        call.results()[0],
        planes,
        neutral=all(labels.neutral for labels in given),
        static=all(labels.static for labels in given),
    )


def _fix_unmatched(
    tracer: Tracer,
    slot: tuple[int, ...],
    row: list[Tensor | None],
    parts: Sequence[tuple[tuple[int, ...], Labels]],
) -> None:
    """Fix the axes of a slot that some part has at full size but without labels."""
    bare = [labels for plane, (_, labels) in zip(row, parts) if plane is None and not labels.neutral]
    for other in slot if bare else ():
        row[:] = [plane if plane is None else tracer.fix_along(plane, other) for plane in row]


def _joined(
    slot: tuple[int, ...],
    row: Sequence[Tensor | None],
    parts: Sequence[tuple[tuple[int, ...], Labels]],
    axis: int,
) -> Tensor:
    """The planes of one slot joined along `axis`; a part without a plane is "always there" (if neutral, it follows)."""
    example = next(plane for plane in row if plane is not None)
    pieces = []
    for plane, (shape, labels) in zip(row, parts):
        if plane is None:
            follows = labels.neutral and slot
            plane = example.narrow(axis, 0, 1) if follows else torch.zeros_like(example).narrow(axis, 0, 1)
        pieces.append(plane.expand(shape))
    return torch.cat(pieces, axis)


@rule("glu")
def _glu(tracer: Tracer, call: Call) -> None:
    """The two halves of an axis meet."""
    source = call.args[0]
    axis = int(call.bound()["dim"]) % source.dim()
    planes = []
    for plane in tracer.labels(source).planes:
        if plane.shape[axis] > 1:
            plane, second = plane.chunk(2, axis)
            tracer.classes.unite(plane, second)
        planes.append(plane)
    _put_all(tracer, call, [tuple(planes)], like=source)


@rule("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(tracer: Tracer, call: Call) -> None:
    """Channels move between the module's groups; the number of groups does not change."""
    source, groups = call.args[0], int(call.args[1])
    planes = []
    for plane in tracer.labels(source).planes:
        if plane.shape[1] > 1:
            first, *rest = plane.chunk(groups, 1)
            for part in rest:
                tracer.classes.unite(first, part)
            shape = (plane.shape[0], groups, -1, *plane.shape[2:])
            plane = plane.reshape(shape).transpose(1, 2).flatten(1, 2)
        planes.append(plane)
    _put_all(tracer, call, [tuple(planes)], like=source)


@rule(
    "mean", "sum", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "prod", "argmax",
    "argmin", "any", "all", "logsumexp", "norm", "linalg_vector_norm", "median", "nansum", "count_nonzero",
)  # fmt: skip
def _reduce(tracer: Tracer, call: Call) -> None:
    """A reduced axis may have any size; its labels end here."""
    source, bound = call.args[0], call.bound()
    given = bound.get("dim")
    listed = [given] if isinstance(given, int) else list(given or range(source.dim()))
    axes = sorted({int(axis) % source.dim() for axis in listed})
    labels = tracer.labels(source)
    planes = [_reduced(tracer, plane, axes) for plane in labels.planes]
    kept = [plane for plane in planes if plane is not None]
    for result in call.results():
        flat = result.dim() < source.dim()
        own = [plane.squeeze(axes) if flat else plane for plane in kept]
        tracer.put(result, own, neutral=labels.neutral, static=labels.static)


def _reduced(tracer: Tracer, plane: Tensor, axes: Sequence[int]) -> Tensor | None:
    """The plane without variation along `axes`, or None if it varies along no other axis.

    A grid must give up some axes: if only the last is reduced (a norm within each head) `heads` decides which;
    otherwise the reduced axes are united and the others stay elastic.
    """
    inside = [axis for axis in varying(plane) if axis in axes]
    outside = [axis for axis in varying(plane) if axis not in axes]
    if inside and outside:
        normalising = list(axes) == [plane.dim() - 1] and tracer.heads == "within"
        plane = tracer.unite_along(plane, *(outside if normalising else inside))
    return None if any(plane.shape[axis] > 1 for axis in axes) else plane


@rule(
    "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d", "fractional_max_pool2d", "grid_sampler_2d",
)  # fmt: skip
def _spatial(tracer: Tracer, call: Call) -> None:
    """Channels pass through; spatial axes cannot carry units, since the operation mixes their elements."""
    source = call.args[0]
    found = re.search(r"(\d)d", call.name)
    first = source.dim() - int(found.group(1) if found else 2)
    planes = _clear_of(tracer, tracer.labels(source).planes, range(first, source.dim()))
    _put_all(tracer, call, [planes] * len(call.results()), like=source)


def _clear_of(tracer: Tracer, planes: Iterable[Tensor], axes: Iterable[int]) -> Planes:
    """The planes after fixing `axes`, without those that vary only along them."""
    kept = []
    for plane in planes:
        for axis in axes:
            plane = tracer.fix_along(plane, axis)
        if not any(plane.shape[axis] > 1 for axis in axes):
            kept.append(plane)
    return tuple(kept)


@rule("topk", "sort", "kthvalue")
def _ordered(tracer: Tracer, call: Call) -> None:
    """Sorting along an axis fixes it."""
    source = call.args[0]
    axis = int(call.bound()["dim"]) % source.dim()
    planes = _clear_of(tracer, tracer.labels(source).planes, [axis])
    for result in call.results():
        flat = result.dim() < source.dim()
        tracer.put(result, [plane.squeeze(axis) if flat else plane for plane in planes])


@rule("im2col")
def _im2col(tracer: Tracer, call: Call) -> None:
    """(B, C, H, W) -> (B, C k k, positions): each channel's label repeats over its window."""
    source, window = call.args[0], math.prod(call.args[1])
    planes = _clear_of(tracer, tracer.labels(source).planes, (2, 3))
    rows = tuple(
        plane.repeat_interleave(window, 1).squeeze(3) if plane.shape[1] > 1 else plane.squeeze(3) for plane in planes
    )
    _put_all(tracer, call, [rows], like=source)


@rule("embedding")
def _embedding(tracer: Tracer, call: Call) -> None:
    """Rows are symbols and stay; features are units."""
    table, symbols = call.args[0], call.args[1]
    features = _clear_of(tracer, tracer.labels(table).planes, [0])
    tracer.produce(features)
    rows = [plane.reshape((1,) * symbols.dim() + (-1,)) for plane in features]
    places = [plane.unsqueeze(-1) for plane in tracer.labels(symbols).planes]
    tracer.put(call.results()[0], [*rows, *places])


@rule("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(tracer: Tracer, call: Call) -> None:
    """Like an embedding, with one row for each bag."""
    features = _clear_of(tracer, tracer.labels(call.args[0]).planes, [0])
    tracer.produce(features)
    first, *rest = call.results()
    tracer.put(first, [plane.reshape(1, -1) for plane in features])
    for result in rest:
        tracer.put(result, ())


@rule("index", "index_select", "gather")
def _index(tracer: Tracer, call: Call) -> None:
    """An indexed axis is fixed; the others keep their labels."""
    source = call.args[0]
    if call.name == "index":
        axes = [axis for axis, chosen in enumerate(call.args[1]) if chosen is not None]
    else:
        axes = [int(call.args[1]) % source.dim()]
    for tensor in call.tensors()[1:]:
        for plane in tracer.labels(tensor).planes:
            tracer.classes.pin(plane)

    def first_place(leaf: Any) -> Any:
        plain = isinstance(leaf, Tensor) and leaf is not source
        return torch.zeros(tuple(leaf.shape), dtype=torch.int64, device="cpu") if plain else leaf

    arguments = tree_map(first_place, tuple(call.args[1:]))
    planes = _clear_of(tracer, tracer.labels(source).planes, axes)
    moved = tuple(call.func(_expanded(plane, source).contiguous(), *arguments) for plane in planes)
    tracer.put(call.results()[0], moved)


@rule("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot")
def _matmul(tracer: Tracer, call: Call) -> None:
    """Products: the contracted axes meet, the others pass through; an added bias meets the result."""
    *added, left, right = call.tensors()
    first, second = tracer.labels(left), tracer.labels(right)
    a, b = _matrix_shape(left, row=True), _matrix_shape(right, row=False)
    planes = tracer.contract(_as_matrices(first, a), _as_matrices(second, b), (max(a[0], b[0]), a[1], a[2], b[2]))
    result = call.results()[0]
    static = first.static and second.static
    # The result's own axes among (batch, row, column).
    spare = [axis for axis in range(3) if axis not in _result_axes(call.name)]
    own = Labels(tuple(plane.squeeze(spare) for plane in planes), static=static)
    if added:
        operands = [(tuple(result.shape), own), (tuple(added[0].shape), tracer.labels(added[0]))]
        planes = tracer.combine(operands, result.dim())
    tracer.put(result, planes if added else own.planes, static=static)


def _result_axes(name: str) -> tuple[int, ...]:
    if name in ("bmm", "baddbmm"):
        return (0, 1, 2)
    if name in ("mm", "addmm"):
        return (1, 2)
    return (1,) if name in ("mv", "addmv") else ()


def _matrix_shape(tensor: Tensor, *, row: bool) -> tuple[int, int, int]:
    sizes = tuple(int(size) for size in tensor.shape)
    if len(sizes) == 3:
        return sizes
    if len(sizes) == 2:
        return (1, *sizes)
    return (1, 1, sizes[0]) if row else (1, sizes[0], 1)


def _as_matrices(labels: Labels, shape: tuple[int, int, int]) -> Labels:
    def lift(plane: Tensor) -> Tensor:
        return plane.reshape(shape) if plane.dim() == 1 else plane.reshape((-1, *plane.shape[-2:]))

    return Labels(tuple(lift(plane) for plane in labels.planes), labels.neutral, labels.static)


@rule("convolution")
def _convolution(tracer: Tracer, call: Call) -> None:
    """Input channels meet the weight's input axis; its output axis labels the result."""
    bound = call.bound()
    source, weight, bias = bound["input"], bound["weight"], bound["bias"]
    transposed, groups = bool(bound["transposed"]), int(bound["groups"])
    labels, stored = tracer.labels(source), tracer.labels(weight)
    planes = _clear_of(tracer, stored.planes, range(2, weight.dim()))
    rows, columns = (tracer.lane([p for p in planes if varying(p) == (axis,)], axis) for axis in (0, 1))
    given = tracer.lane(labels.planes, 1)
    if groups == 1:
        into, made = (rows, columns) if transposed else (columns, rows)
        tracer.couple(given, into, loose=labels.neutral)
        out = made
    else:
        lanes = GroupedLanes(given, rows, columns, groups, transposed, labels.neutral)
        out = _grouped_convolution(tracer, lanes, int(weight.shape[0]), int(weight.shape[1]))
    depthwise = groups > 1 and given is not None and groups == source.shape[1]
    if out is not None and stored.static and not depthwise:
        tracer.produce([out])
    if bias is not None:
        tracer.couple(out, tracer.lane(tracer.labels(bias).planes, 0))
    result = call.results()[0]
    shape = [-1 if axis == 1 else 1 for axis in range(result.dim())]
    tracer.put(result, [out.reshape(shape)] if out is not None else [])


@dataclass(frozen=True)
class GroupedLanes:
    """What meets in a convolution with groups: the input's channels, and the weight's axes 0 and 1."""

    given: Tensor | None
    rows: Tensor | None
    columns: Tensor | None
    groups: int
    transposed: bool
    loose: bool


def _grouped_convolution(tracer: Tracer, lanes: GroupedLanes, rows: int, columns: int) -> Tensor | None:
    """The labels of the output channels; either whole convolution groups are elastic, or channels within every one."""
    groups, given = lanes.groups, lanes.given
    grid = given.reshape(groups, -1) if given is not None else None
    by_group = grid is not None and varying(tracer.settle(grid)) == (0,)
    full = lanes.rows.reshape(groups, -1) if lanes.rows is not None else None
    shared = lanes.columns
    if full is not None:
        tracer.unite_along(full, 1 if by_group else 0)
    if by_group and grid is not None:
        tracer.couple(grid[:, :1], full, loose=True)
        tracer.couple(shared, None)
        return lanes.rows if not lanes.transposed else grid[:, :1].expand(groups, columns).flatten()
    into = full[0] if lanes.transposed and full is not None else shared
    tracer.couple(grid[0] if grid is not None else None, into, loose=lanes.loose)
    if not lanes.transposed:
        return lanes.rows
    return shared.repeat(groups) if shared is not None else None


@rule(
    "native_batch_norm",
    "cudnn_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
)
def _batch_norm(tracer: Tracer, call: Call) -> None:
    """Weight, bias and statistics meet the channels."""
    _normalise(tracer, call, 1)


@rule("native_layer_norm", "_fused_rms_norm")
def _layer_norm(tracer: Tracer, call: Call) -> None:
    """Weight and bias meet the last axes."""
    _normalise(tracer, call, call.args[0].dim() - len(call.args[1]))


@rule("native_group_norm")
def _group_norm(tracer: Tracer, call: Call) -> None:
    """Weight and bias meet the channels, which form a grid (groups, channels of a group)."""
    _normalise(tracer, call, 1)
    source, groups = call.args[0], int(call.bound()["group"])
    lane = tracer.lane(tracer.labels(source).planes, 1)
    if lane is not None and 1 < groups < source.shape[1]:
        tracer.grids.append(lane.reshape(groups, -1))


def _normalise(tracer: Tracer, call: Call, axis: int) -> None:
    source, *stored = call.tensors()
    after = source.dim() - axis
    operands = [(tuple(source.shape), tracer.labels(source))]
    for tensor in stored:
        trailing = (1,) * (after - tensor.dim())
        labels = tracer.labels(tensor)
        planes = tuple(plane.reshape(tuple(plane.shape) + trailing) for plane in labels.planes)
        operands.append((tuple(tensor.shape) + trailing, Labels(planes, labels.neutral, labels.static)))
    planes = tracer.combine(operands, source.dim())
    first, *rest = call.results()
    tracer.put(first, planes)
    for result in rest:
        tracer.put(result, ())


# --- modules with special rules -----------------------------------------------------------------------------


def _rows(tracer: Tracer, tensor: Tensor | None, axis: int) -> Tensor | None:
    """The labels of one axis of a stored tensor."""
    if tensor is None:
        return None
    return tracer.lane([p for p in tracer.labels(tensor).planes if varying(p) == (axis,)], axis)


def _tied(tracer: Tracer, unit: Tensor | None, row: Tensor | None) -> None:
    """Unite a row with `unit`, which it repeats a whole number of times; without a unit fix the row."""
    if row is None:
        return
    if unit is None:
        tracer.classes.pin(row)
    else:
        tracer.classes.unite(unit, row.reshape(-1, unit.numel()))


def _last_axis(tracer: Tracer, tensor: Tensor) -> Tensor | None:
    return tracer.lane(tracer.labels(tensor).planes, tensor.dim() - 1)


def _label_last(tracer: Tracer, tensor: Tensor, lane: Tensor | None) -> None:
    shape = (1,) * (tensor.dim() - 1) + (-1,)
    tracer.put(tensor, [lane.reshape(shape)] if lane is not None else [])


def _recurrent(tracer: Tracer, module: nn.RNNBase, given: tuple[Any, ...], result: Any) -> None:
    """All layers, gates and directions share one set of hidden units and one set of projected units."""
    stored = dict(module.named_parameters(recurse=False))
    ends = ["_reverse"] if module.bidirectional else []
    layers = [f"_l{layer}{end}" for layer in range(module.num_layers) for end in ["", *ends]]
    gates = _rows(tracer, stored["weight_ih_l0"], 0)
    hidden = gates.reshape(-1, module.hidden_size)[0] if gates is not None else None
    made = _rows(tracer, stored.get("weight_hr_l0"), 0) if module.proj_size else hidden
    source, *states = given
    packed = isinstance(source, nn.utils.rnn.PackedSequence)
    read = _last_axis(tracer, source.data if packed else source)
    for end in layers:
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            _tied(tracer, hidden, _rows(tracer, stored.get(name + end), 0))
        _tied(tracer, made, _rows(tracer, stored["weight_hh" + end], 1))
        _tied(tracer, hidden, _rows(tracer, stored.get("weight_hr" + end), 1))
        _tied(tracer, made, _rows(tracer, stored.get("weight_hr" + end), 0))
        into = _rows(tracer, stored["weight_ih" + end], 1)
        if end.startswith("_l0"):
            tracer.couple(read, into)
        else:
            _tied(tracer, made, into)
    tracer.produce([lane for lane in (hidden, made) if lane is not None])
    output, last = result
    output = output.data if packed else output
    _label_last(tracer, output, made.repeat(1 + len(ends)) if made is not None else None)
    first = [state for state in states if state is not None]
    for state in (last, *first):
        _label_states(tracer, state, made, hidden, known=state is not last)


def _label_states(tracer: Tracer, state: Any, made: Tensor | None, hidden: Tensor | None, *, known: bool) -> None:
    """Label the states that a recurrent module returned, or couple the ones it was given."""
    parts = state if isinstance(state, tuple) else (state,)
    for part, lane in zip(parts, (made, hidden)):
        if known:
            tracer.couple(_last_axis(tracer, part), lane, loose=tracer.labels(part).neutral)
        else:
            _label_last(tracer, part, lane)


def _attention(tracer: Tracer, module: nn.MultiheadAttention, given: tuple[Any, ...], result: Any) -> None:
    """The stream's and the inner channels are one set, since `embed_dim` is one number; `heads` says how it is cut."""
    units = _rows(tracer, module.out_proj.weight, 0)
    if units is None:
        return
    query, key, value = given[:3]
    tracer.couple(_last_axis(tracer, query), units)
    into = (module.in_proj_weight, module.q_proj_weight, module.out_proj.weight)
    along: tuple[tuple[int, tuple[Tensor | None, ...]], ...] = (
        (0, (*into, module.k_proj_weight, module.v_proj_weight, module.in_proj_bias, module.out_proj.bias)),
        (1, into),
        (2, (module.bias_k, module.bias_v)),
    )
    for axis, tensor in ((axis, tensor) for axis, tensors in along for tensor in tensors):
        _tied(tracer, units, _rows(tracer, tensor, axis))
    fused = module.in_proj_weight is not None
    for source, weight in ((key, module.k_proj_weight), (value, module.v_proj_weight)):
        tracer.couple(_last_axis(tracer, source), units if fused else _rows(tracer, weight, 1))
    grid = units.reshape(module.num_heads, -1)
    grid = tracer.unite_along(grid, 0 if tracer.heads == "within" else 1)
    tracer.produce([units, *(row for row in [_rows(tracer, module.in_proj_weight, 0)] if row is not None)])
    output, weights = result
    _label_last(tracer, output, units)
    if weights is not None and weights.dim() == 4 and varying(grid) == (0,):
        tracer.put(weights, [grid.reshape(1, -1, 1, 1)])


def _bilinear(tracer: Tracer, module: nn.Bilinear, given: tuple[Any, ...], result: Any) -> None:
    """Both inputs meet their axis of the weight (out, in1, in2)."""
    for axis, source in enumerate(given[:2], start=1):
        tracer.couple(_last_axis(tracer, source), _rows(tracer, module.weight, axis))
    out = _rows(tracer, module.weight, 0)
    _tied(tracer, out, _rows(tracer, module.bias, 0))
    tracer.produce([out] if out is not None else [])
    _label_last(tracer, result, out)


LeafRule = Callable[[Tracer, Any, tuple[Any, ...], Any], None]
LEAVES: dict[type[nn.Module], LeafRule] = {
    nn.RNNBase: _recurrent,
    nn.MultiheadAttention: _attention,
    nn.Bilinear: _bilinear,
}
_INPUT_NAMES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.RNNBase: ("input", "hx"),
    nn.MultiheadAttention: ("query", "key", "value"),
    nn.Bilinear: ("input1", "input2"),
}


def _one_step(module: Any, forward: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """A recurrent module's result, by shape, from one time step: on the meta device all steps would take time."""
    source, *states = given
    if not isinstance(source, Tensor):
        return forward(*given)
    time = 1 if module.batch_first and source.dim() == 3 else 0
    output, last = forward(source.narrow(time, 0, 1), *states)
    shape = [source.shape[time] if axis == time else size for axis, size in enumerate(output.shape)]
    return output.new_empty(shape), last


def _wrap_leaf(tracer: Tracer, module: nn.Module) -> None:
    """Replace the forward of a (copied) module by one that labels its results by the module's special rule."""
    kind = next((kind for kind in LEAVES if isinstance(module, kind)), None)
    if kind is None:
        return
    names, original = _INPUT_NAMES[kind], module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if tracer.paused:
            return original(*args, **kwargs)
        given = tuple(args) + tuple(kwargs.get(name) for name in names[len(args) :])
        with tracer.pause():
            brief = isinstance(module, nn.RNNBase)
            result = _one_step(module, original, given) if brief else original(*args, **kwargs)
            try:
                LEAVES[kind](tracer, module, given, result)
            except Clash:
                raise ModelError(f"narrowing changes what meets what at {tracer.where()}") from None
        return result

    module.forward = forward


# --- sizes in Python code -----------------------------------------------------------------------------------

_FACTORIES = frozenset(f"{prefix}{name}" for prefix in ("", "new_") for name in ("zeros", "ones", "full", "empty")) | {
    "rand",
    "randn",
    "arange",
}
_RESHAPES = frozenset(("view", "reshape", "expand", "_unsafe_view", "broadcast_to"))
_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]


class SizeWatch(TorchFunctionMode):
    """Records the sizes that Python code reads and passes, before they become plain numbers."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.tracer.paused:
            return result
        name = getattr(func, "__name__", "")
        if func == _SHAPE or name == "size":
            return self._asked(args[0], result, args[1:], kwargs)
        if isinstance(result, Tensor) or name in ("split", "split_with_sizes"):
            with self.tracer.pause():
                self._given(name, args, kwargs, result)
        return result

    def _asked(self, tensor: Tensor, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self.tracer.pause():
            extents = self.tracer.extents(tensor)
            whole = [TracedInt(e.size, e) if e.planes else e.size for e in extents]
        if isinstance(result, int):
            return whole[kwargs.get("dim", args[0] if args else 0)]
        return torch.Size(whole)

    def _given(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if name in _FACTORIES:
            sizes = args[1:] if name.startswith("new_") else args
            self._made(_listed(sizes, kwargs.get("size")), result)
        elif name in _RESHAPES:
            self._sized(_listed(args[1:], kwargs.get("shape", kwargs.get("size"))), result, 0)
        elif name == "unflatten":
            sizes = _listed(args[2:], kwargs.get("sizes"))
            self._sized(sizes, result, int(kwargs.get("dim", args[1] if len(args) > 1 else 0)) % args[0].dim())
        elif name in ("layer_norm", "rms_norm"):
            sizes = _listed(args[1:2], kwargs.get("normalized_shape"))
            self._sized(sizes, args[0], args[0].dim() - len(sizes))
        elif name in ("split", "split_with_sizes"):
            self._parted(args, kwargs, result)
        elif name == "narrow":
            self._sized(args[3:4], result, int(args[1]) % args[0].dim())
        elif name == "__getitem__":
            self._cut(args[0], args[1])

    def _sized(self, sizes: Sequence[Any], tensor: Tensor, start: int) -> None:
        """Note that axis `start + i` of a tensor has the size `sizes[i]`."""
        extents = self.tracer.extents(tensor)
        for axis, size in enumerate(sizes, start):
            if isinstance(size, TracedInt) and axis < len(extents):
                self.tracer.notes.append(SizeNote(size.expression, extents[axis]))

    def _made(self, sizes: Sequence[Any], tensor: Tensor) -> None:
        """Label a factory's result along each axis whose size is a traced integer."""
        planes: list[Tensor] = []
        for axis, size in enumerate(sizes[: tensor.dim()]):
            if not isinstance(size, TracedInt) or size < 2 or size != tensor.shape[axis]:
                continue
            shape = [-1 if other == axis else 1 for other in range(tensor.dim())]
            if isinstance(size.expression, Extent):
                planes.extend(lane.reshape(shape) for lane in size.expression.lanes())
            elif attributes_in(size.expression):
                planes.append(self.tracer.classes.fresh(int(size)).reshape(shape))
        if planes:
            self.tracer.put(tensor, planes, neutral=True)
        self._sized(sizes, tensor, 0)

    def _parted(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        given = args[1] if len(args) > 1 else kwargs.get("split_size_or_sections", kwargs.get("split_size"))
        axis = int(kwargs.get("dim", args[2] if len(args) > 2 else 0)) % args[0].dim()
        sizes = [given] * len(result) if isinstance(given, int) else list(given or ())
        for size, part in zip(sizes, result):
            self._sized([size], part, axis)

    def _cut(self, tensor: Tensor, index: Any) -> None:
        """Note where slices with known bounds begin and end."""
        entries = index if isinstance(index, tuple) else (index,)
        if any(entry is None or entry is Ellipsis or isinstance(entry, Tensor) for entry in entries):
            return
        for extent, entry in zip(self.tracer.extents(tensor), entries):
            bounds = (entry.start, entry.stop) if isinstance(entry, slice) else ()
            for bound in bounds:
                if isinstance(bound, TracedInt) and 0 < bound <= extent.size:
                    cut = Extent(extent.planes, extent.axis, extent.size, int(bound))
                    self.tracer.notes.append(SizeNote(bound.expression, cut))


def _listed(sizes: Sequence[Any], named: Any) -> Sequence[Any]:
    """Sizes given one by one, as one sequence, or by name."""
    if not sizes:
        return tuple(named) if isinstance(named, Sequence) else ()
    first = sizes[0]
    return tuple(first) if isinstance(first, Sequence) else sizes


# --- running ------------------------------------------------------------------------------------------------


class _MetaCopies(TorchFunctionMode):
    """While a module is copied, its tensors outside parameters and buffers become meta tensors too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.__deepcopy__:
            return torch.empty_like(args[0], device="meta", requires_grad=False)
        return func(*args, **(kwargs or {}))


def stored(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, under every name that it has; tied tensors appear several times."""
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    return found


def meta_copy(module: nn.Module) -> nn.Module:
    """The same module on the meta device; no tensor's contents are copied."""
    memo: dict[int, Any] = {}
    with torch.no_grad():
        for tensor in stored(module).values():
            small = torch.empty_like(tensor, device="meta")
            keep = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(small, tensor.requires_grad) if keep else small
        with _MetaCopies():
            return copy.deepcopy(module, memo)


def _trace_integers(module: nn.Module) -> dict[str, int]:
    """The integers on the user's own modules by path; each is replaced by one that remembers its path."""
    found = {}
    for path, owner in module.named_modules():
        if type(owner).__module__.startswith("torch.nn"):
            continue
        for name, value in list(vars(owner).items()):
            if type(value) is int and value > 1:
                dotted = f"{path}.{name}" if path else name
                found[dotted] = value
                owner.__dict__[name] = TracedInt(value, Attribute(dotted))
    return found


_SIZED_LAYERS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
    nn.Unflatten,
)


def _watch_modules(tracer: Tracer, module: nn.Module) -> None:
    """Keep the running module on top of `tracer.stack`, and note sizes at layers that store them."""

    def enter(path: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
            tracer.stack.append(path)
            if isinstance(layer, _SIZED_LAYERS) and args and isinstance(args[0], Tensor):
                with tracer.pause():
                    tracer.inputs.setdefault(path, tracer.extents(args[0]))

        return hook

    def leave(path: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            tracer.stack.pop()
            if isinstance(layer, _SIZED_LAYERS) and isinstance(result, Tensor):
                with tracer.pause():
                    tracer.outputs.setdefault(path, tracer.extents(result))

        return hook

    for path, layer in module.named_modules():
        layer.register_forward_pre_hook(enter(path))
        layer.register_forward_hook(leave(path))
        _wrap_leaf(tracer, layer)


LabelsOf = Callable[[str, Tensor], Sequence[Tensor | None]]


@dataclass
class Run:
    """One traced forward: the tracer with all that it found, and the labelled outputs."""

    tracer: Tracer
    attributes: dict[str, int]
    atoms: dict[str, tuple[Tensor | None, ...]]
    outputs: list[tuple[Extent, ...]] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def run(
    module: nn.Module,
    example: tuple[Tensor, ...],
    *,
    classes: Classes,
    heads: Heads,
    labels_of: LabelsOf,
    pick: Callable[[Any], Any] | None = None,
    released: Callable[[Tracer, Tensor], bool] | None = None,
    atoms: dict[str, tuple[Tensor | None, ...]] | None = None,
) -> Run:
    """The labels of one forward of `module` on the meta device; the module itself is left untouched.

    Errors of the forward propagate unchanged, with `tracer_path` set to the module that ran.
    """
    network = meta_copy(module).eval()
    tracer = Tracer(classes, heads)
    if released is not None:
        tracer.released = released
    found = Run(tracer, _trace_integers(network), {} if atoms is None else atoms)
    tensors: dict[int, tuple[Tensor, tuple[Tensor | None, ...]]] = {}
    for name, tensor in stored(network).items():
        if id(tensor) not in tensors:
            tensors[id(tensor)] = (tensor, tuple(labels_of(name, tensor)))
            tracer.adopt(tensor, name, tensors[id(tensor)][1])
        found.atoms[name] = tensors[id(tensor)][1]
    _watch_modules(tracer, network)
    given = tuple(torch.empty_like(part, device="meta", requires_grad=False) for part in example)
    try:
        result = _forward(network, given, tracer)
    except Exception as error:
        error.tracer_path = tracer.stack[-1]  # type: ignore[attr-defined]
        raise
    chosen = pick(result) if pick is not None else result
    leaves = [leaf for leaf in tree_flatten(chosen)[0] if isinstance(leaf, Tensor)]
    found.outputs = [tracer.extents(leaf) for leaf in leaves]
    found.unused = [name for name, tensor in stored(network).items() if id(tensor) not in tracer.seen]
    return found


@contextmanager
def unread_masks() -> Iterator[None]:
    """Inside, torch's transformer layers do not read the values of a mask, which they do to choose a faster kernel."""
    layers: Any = nn.modules.transformer
    detect = layers._detect_is_causal_mask
    layers._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        layers._detect_is_causal_mask = detect


@contextmanager
def without_data() -> Iterator[None]:
    """For passes on the meta device: tensors that a network creates are there too, and no path depends on values.

    Torch's transformer layers also have a fused path, which hides its operations; it is switched off.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with unread_masks(), torch.device("meta"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _forward(network: nn.Module, given: tuple[Tensor, ...], tracer: Tracer) -> Any:
    with ExitStack() as stack:
        stack.enter_context(without_data())
        stack.enter_context(torch.no_grad())
        stack.enter_context(sdpa_kernel([SDPBackend.MATH]))
        stack.enter_context(SizeWatch(tracer))
        stack.enter_context(tracer)
        return network(*given)
