"""The tracer: follows the units of every tensor through the operations of a forward pass."""

from __future__ import annotations

import copy
import operator
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from anysize.elastic.tracing.classes import Clash, Classes, Planes
from anysize.elastic.tracing.sizes import Arithmetic, Attribute, Extent, SizeNote, Unequal
from anysize.elastic.tracing.values import plainly
from anysize.errors import ModelError

Heads = Literal["within", "whole"]
Tie = Literal["outer", "inner"]


_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = Path(__file__).parents[2]
_MODELS = str(_PACKAGE / "models")


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
    """`file:line` of the innermost frame outside PyTorch and this package, but for its models, or an empty string."""
    found = ""
    for frame, line in frames:
        file = frame.f_code.co_filename
        if file.startswith(_MODELS) or not file.startswith((_TORCH, str(_PACKAGE), "<")):
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
        self.cut_by_size = False  # whether a slice that is being taken has bounds which follow a size
        self.stack: list[str] = [""]
        self.grids: list[Tensor] = []
        self.notes: list[SizeNote] = []
        self.unequal: list[Unequal] = []
        self.inputs: dict[str, tuple[Extent, ...]] = {}
        self.outputs: dict[str, tuple[Extent, ...]] = {}
        self.producers: dict[tuple[str, int], None] = {}
        self.origin: dict[int, tuple[str, int]] = {}
        self.seen: set[int] = set()
        self.released: Callable[[Tracer, Tensor], bool] = lambda tracer, plane: False
        self._debts: dict[int, list[Tensor]] = {}
        # Hold the tensors too: an id is a valid key only while its tensor lives.
        self._labels: dict[int, tuple[Tensor, Labels]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.paused:
            with plainly():
                self.follow(Call(func, args, kwargs or {}, out))
        return out

    def snapshot(self) -> Any:
        """What is known now, for `restore`."""
        own = (self.grids, self.notes, self.unequal, self.inputs, self.outputs, self.producers, self.seen)
        return copy.deepcopy(self.classes), [copy.copy(each) for each in own]

    def restore(self, before: Any) -> None:
        """Forget what was learned since a snapshot."""
        self.classes.__dict__.update(before[0].__dict__)
        self.grids, self.notes, self.unequal, self.inputs, self.outputs, self.producers, self.seen = before[1]
        self.stack, self.paused = [""], False

    def hear(self, note: SizeNote | Unequal) -> None:
        """Take note of what code found when it compared sizes."""
        if isinstance(note, SizeNote):
            self.notes.append(note)
        else:
            self.unequal.append(note)

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
            if small.untyped_storage().nbytes() > 2 * small.numel() * small.element_size():
                small = small.clone()  # not a view that holds on to a plane of full size
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
        for plane in planes:
            rival = chosen.setdefault(varying(plane), plane)
            if rival is plane:
                continue
            ranks = [
                (not self.classes.is_pinned(each), np.unique(self.classes.roots(each).numpy()).size)
                for each in (rival, plane)
            ]
            winner, loser = (plane, rival) if ranks[1] > ranks[0] else (rival, plane)
            self.classes.pin(loser)
            chosen[varying(plane)] = winner
        return tuple(chosen.values())

    def pin_if_read(self, tensor: Tensor, plane: Tensor) -> None:
        """Pin a plane as soon as an operation reads this tensor; one made only for its shape pins nothing."""
        self._debts.setdefault(id(tensor), []).append(plane)

    def read(self, tensor: Tensor) -> None:
        """Take note that the contents of a tensor matter."""
        for plane in self._debts.pop(id(tensor), ()):
            self.classes.pin(plane)

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

    def _elastic_axis(self, plane: Tensor, met: frozenset[int], tie: Tie) -> int:
        """The axis of a grid that stays elastic: the one with the most distinct slices, on a tie the one named.

        Where the grid meets planes that vary along the axes `met`, the choice of heads comes first: "within"
        keeps the last axis if it is in `met`, "whole" the first if all its slices are distinct.
        """
        axes, roots = varying(plane), self.classes.roots(plane)
        counts = {axis: torch.unique(roots.movedim(axis, 0).flatten(1), dim=0).shape[0] for axis in axes}
        if self.heads == "within" and axes[-1] in met:
            return axes[-1]
        if self.heads == "whole" and met and counts[axes[0]] == plane.shape[axes[0]]:
            return axes[0]
        return max(counts, key=lambda axis: (counts[axis], axis if tie == "inner" else -axis))

    def settle(self, plane: Tensor, met: frozenset[int] = frozenset(), tie: Tie = "outer") -> Tensor:
        """The plane after reducing its variation to at most one axis."""
        plane = self.compact(plane)
        if len(varying(plane)) < 2:
            return plane
        elastic = self._elastic_axis(plane, met, tie)
        return self.unite_along(plane, *(axis for axis in varying(plane) if axis != elastic))

    def settle_grids(self) -> None:
        """Settle every grid seen and every pair of sizes that the code makes equal, until nothing changes."""
        for resolve in (self._settle_each_grid, self._couple_sizes):
            before = self.classes.changes
            resolve()
            if self.classes.changes != before:
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
                self._keep_fixed([wanted, note.extent])
            elif isinstance(wanted, Attribute):
                by_attribute.setdefault(wanted.path, []).append(note.extent)
        for extents in by_attribute.values():
            self._match(extents)
            self._keep_fixed(extents)
        for note in self.notes:
            self._couple_quotient(note, by_attribute)
            self._couple_multiple(note)

    def _match(self, extents: Sequence[Extent]) -> None:
        lanes = [lane for lane in map(self._own_lane, extents) if lane is not None]
        for lane in lanes[1:]:
            if lane.shape == lanes[0].shape and not self._same_count(lanes[0], lane):
                self.classes.unite(lanes[0], lane)

    def _keep_fixed(self, extents: Sequence[Extent]) -> None:
        """Pin the axes that take their size from an attribute which is also the size of an axis that never shrinks."""
        whole = [extent for extent in extents if extent.stop is None]
        if any(all(self.classes.is_pinned(plane) for plane in extent.planes) for extent in whole):
            for lane in (lane for lane in map(self._own_lane, whole) if lane is not None):
                self.classes.pin(lane)

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
        if part is not None and all(self.classes.is_pinned(plane) for plane in wanted.left.planes):
            self.classes.pin(part)
        if whole is None or whole.numel() % note.extent.size:
            return
        grid = whole.reshape(-1, note.extent.size)
        if part is not None and not self._same_count(whole, part):
            self.classes.unite(grid, part)
        elif part is None and isinstance(wanted.right, Attribute):
            parts = map(self._own_lane, by_attribute.get(wanted.right.path, ()))
            for lane in (lane for lane in parts if lane is not None and lane.numel() == len(grid)):
                self.classes.unite(grid, lane.reshape(-1, 1))

    def _couple_multiple(self, note: SizeNote) -> None:
        """Unite the parts of an axis whose size is a number times an attribute, as `3 * head_size`: they stay equal."""
        wanted = note.expression
        if not isinstance(wanted, Arithmetic) or wanted.apply is not operator.mul:
            return
        times = next((side for side in (wanted.left, wanted.right) if isinstance(side, int)), None)
        whole = self._own_lane(note.extent)
        if times is None or whole is None or isinstance(wanted.left, Extent) or isinstance(wanted.right, Extent):
            return
        first, *rest = whole.reshape(times, -1)
        for part in rest:
            if not self._same_count(first, part):
                self.classes.unite(first, part)

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
        for tensor in call.tensors():
            self.read(tensor)
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
            apply = move_labels
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
        return self.classes.is_pinned(plane) or self.released(self, plane)

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
        # A neutral side without a lane has its size from a number: nothing follows it.
        self.couple(self._first_lane(lefts, 2), self._first_lane(rights, 1), loose=inner == 1)
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


def expanded(plane: Tensor, tensor: Tensor) -> Tensor:
    return plane.expand(tuple(tensor.shape))


def put_all(tracer: Tracer, call: Call, planes: Sequence[Planes], *, like: Tensor) -> None:
    labels = tracer.labels(like)
    for result, own in zip(call.results(), planes):
        tracer.put(result, own, neutral=labels.neutral, static=labels.static)


@rule("_prelu_kernel", "copy", "where", "masked_fill", "lerp", "addcmul", "addcdiv", "_weight_norm_interface")
def _pointwise(tracer: Tracer, call: Call) -> None:
    """Operands meet element by element."""
    tensors = call.tensors()
    result = call.results()[0]
    given = [tracer.labels(tensor) for tensor in tensors]
    planes = tracer.combine([(tuple(t.shape), own) for t, own in zip(tensors, given)], result.dim())
    if result is tensors[0] and planes and not given[0].planes:
        _write_part(tracer, call, result, planes)
    tracer.put(
        result,
        planes,
        neutral=all(own.neutral for own in given),
        static=all(own.static for own in given),
    )


def _write_part(tracer: Tracer, call: Call, part: Tensor, planes: Planes) -> None:
    """Label the tensor that `part` is a view of, since units were written into that part."""
    whole = part._base
    if whole is None or whole.numel() == part.numel():
        return
    for plane in planes:
        axes = varying(plane)
        found = [axis for axis in range(whole.dim()) if whole.stride(axis) == part.stride(axes[0])]
        found = [axis for axis in found if whole.shape[axis] >= part.shape[axes[0]] > 1]
        if len(axes) != 1 or len(found) != 1:
            raise ModelError(
                f"cannot follow widths through {call.func} at {tracer.where()}: it writes units into a part of "
                "an unlabelled tensor. Collect the parts and use torch.cat or torch.stack, or keep the layers "
                "that feed it whole with keep=[...]"
            )
        _write_lane(tracer, whole, found[0], part, plane.flatten())


def _write_lane(tracer: Tracer, whole: Tensor, axis: int, part: Tensor, lane: Tensor) -> None:
    """Write labels into the places of a part along one axis; places that nothing is written into always stay."""
    labels = tracer.labels(whole)
    shape = [-1 if other == axis else 1 for other in range(whole.dim())]
    own = next((plane for plane in labels.planes if varying(plane) == (axis,)), None)
    row = torch.zeros(whole.shape[axis], dtype=torch.int64, device="cpu") if own is None else own.flatten().clone()
    first = (part.storage_offset() - whole.storage_offset()) // whole.stride(axis) % whole.shape[axis]
    first = first if len(lane) < len(row) else 0
    window = row[first : first + len(lane)]
    tracer.classes.unite(torch.where(window == 0, lane, window), lane)
    row[first : first + len(lane)] = lane
    others = [plane for plane in labels.planes if plane is not own]
    tracer.put(whole, [*others, row.reshape(shape)], static=labels.static)


def move_labels(tracer: Tracer, call: Call, chosen: Iterable[Tensor] | None = None) -> None:
    """Apply the operation itself to every plane, or to the chosen ones."""
    source = call.tensors()[0]
    planes: list[list[Tensor]] = [[] for _ in call.results()]
    for plane in tracer.labels(source).planes if chosen is None else chosen:
        full = expanded(plane, source).contiguous()
        moved_parts = call.func(full, *call.args[1:], **call.kwargs)
        for place, moved in enumerate(tree_flatten(moved_parts)[0]):
            planes[place].append(moved)
    put_all(tracer, call, [tuple(own) for own in planes], like=source)


@rule("expand")
def _expand(tracer: Tracer, call: Call) -> None:
    """A view that expands axes of size 1; `_loose_axes` remembers which."""
    source, result = call.tensors()[0], call.results()[0]
    lead = (1,) * (result.dim() - source.dim())
    planes = tuple(plane.reshape(*lead, *plane.shape) for plane in tracer.labels(source).planes)
    put_all(tracer, call, [planes], like=source)


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


RULES.update(dict.fromkeys(("repeat", "pixel_shuffle", "pixel_unshuffle"), move_labels))
