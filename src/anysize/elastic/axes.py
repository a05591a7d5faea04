"""Which elements of which axis of which tensor are kept or dropped together: the width groups of any module.

`trace` runs a plain `nn.Module` once on the meta device and follows labels through it (`tracing` says how, and
why it uses labels); `Axes` is what it found. A *unit* is the smallest thing that can be kept or dropped: a
channel with all that is tied to it through sums, norms, gates and shared tensors. A *width group*, or *group*
for short, is a set of units that live on the same axes and are narrowed by one prefix (or one set of indices).

>>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
>>> axes = trace(net, torch.zeros(2, 3))
>>> print(axes)
0: 8 units
  0.weight axis 0
  0.bias axis 0
  2.weight axis 1
never narrowed: 2.weight axis 0
>>> axes.shape("2.weight", axes.kept(0.25))
(2, 2)
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anysize.elastic.tracing.classes import Classes
from anysize.elastic.tracing.forward import Run, run, stored
from anysize.elastic.tracing.sizes import Extent, SizeNote, Unequal, attributes_in, evaluate
from anysize.elastic.tracing.tracer import Heads, Tracer, line_of
from anysize.elastic.tracing.values import on_meta
from anysize.errors import ModelError, unknown

Width = float | Mapping[str, float | int | Sequence[int]]
Index = tuple[Tensor | None, ...]

_REMEMBERED = 64
"""How many choices of units have their indices cached; not all, since some methods draw new units for every client."""


@dataclass(frozen=True)
class Member:
    """One axis of one tensor in a width group.

    `units` has one entry per element of the axis: the unit it belongs to, or -1 if it is outside this group.

    >>> Member("conv.weight", 0, (0, 1, 2, 3)).times
    1
    """

    name: str
    axis: int
    units: tuple[int, ...] = field(repr=False)

    @property
    def times(self) -> int:
        """How many elements of this axis the most frequent unit has: 49 after a flatten of 7 x 7 pixels."""
        return int(np.bincount([unit for unit in self.units if unit >= 0]).max())

    def __str__(self) -> str:
        inside = sum(unit >= 0 for unit in self.units)
        text = f"{self.name} axis {self.axis}"
        if self.times > 1:
            text += f", {self.times} elements a unit"
        return text if inside == len(self.units) else f"{text}, {inside} of {len(self.units)} elements"


@dataclass(frozen=True)
class Group:
    """A width group: units that live on the same axes and are narrowed together.

    Attributes:
        name: the layer that first produces the units.
        size: how many units there are.
        members: the axes that the units live on.
        fixed: whether `keep` excludes the group from narrowing.

    >>> print(Group("conv", 2, (Member("conv.weight", 0, (0, 1)),), fixed=True))
    conv: 2 units, kept whole
      conv.weight axis 0
    """

    name: str
    size: int
    members: tuple[Member, ...]
    fixed: bool = False

    def __str__(self) -> str:
        units = f"{self.size} unit" if self.size == 1 else f"{self.size} units"
        head = f"{self.name}: {units}" + (", kept whole" if self.fixed else "")
        return "\n".join([head, *(f"  {member}" for member in self.members)])


@dataclass(frozen=True)
class Kept:
    """Which units of each width group stay: a count (the first so many), or the sorted indices.

    >>> Kept((("conv", 2), ("fc", (0, 3)))).units("fc")
    (0, 3)
    """

    groups: tuple[tuple[str, int | tuple[int, ...]], ...]

    @cached_property
    def _by_name(self) -> dict[str, int | tuple[int, ...]]:
        return dict(self.groups)

    @cached_property
    def _hash(self) -> int:
        return hash(self.groups)

    def __hash__(self) -> int:
        return self._hash

    def units(self, group: str) -> tuple[int, ...]:
        """The indices of the units that stay, in order."""
        kept = self._by_name[group]
        return tuple(range(kept)) if isinstance(kept, int) else kept

    def count(self, group: str) -> int:
        """How many units stay."""
        kept = self._by_name[group]
        return kept if isinstance(kept, int) else len(kept)


@dataclass(frozen=True)
class _Found:
    """What tracing leaves: per tensor name the atoms of each axis, and per atom its class, group and unit."""

    atoms: Mapping[str, tuple[Tensor | None, ...]]
    classes: Tensor  # (atoms,) dense class number of each atom, 0 for "always there"
    group: Tensor  # (atoms,) which group, -1 for none
    unit: Tensor  # (atoms,) which unit of it
    notes: tuple[SizeNote, ...]
    unequal: tuple[Unequal, ...]
    attributes: Mapping[str, int]
    inputs: Mapping[str, tuple[Extent, ...]]
    outputs: Mapping[str, tuple[Extent, ...]]
    example: tuple[Tensor, ...]
    overrides: Mapping[str, str]
    heads: Heads
    parameters: tuple[str, ...]  # each once, under its first name
    unread: frozenset[str]  # the tensors that the forward never reads
    accepted: frozenset[str]  # the tensors that `keep` names


class Axes:
    """The width groups of a module: what can be kept, and what that means for every tensor.

    Attributes:
        groups: Elastic groups, and those that `keep` keeps whole.
        head: For each tensor that has the output's class axis, which of its axes that is.
        shapes: The full shape of every parameter and buffer, by its name in `state_dict`.
    """

    def __init__(
        self,
        groups: tuple[Group, ...],
        head: Mapping[str, int],
        shapes: Mapping[str, tuple[int, ...]],
        all_shapes: Mapping[str, tuple[int, ...]],
        fixed: tuple[str, ...],
        found: _Found,
    ) -> None:
        self.groups = groups
        self.head = head
        self.shapes = shapes
        self.fixed = fixed
        self.found = found
        self._all_shapes = all_shapes
        self._by_name = {group.name: group for group in groups}
        self.verified: set[Kept] = {self.kept(1.0)}  # the network that was traced
        self._alive: dict[Kept, Tensor] = {}
        self._index: dict[tuple[str, Kept], Index] = {}

    def __str__(self) -> str:
        lines = [str(group) for group in self.groups]
        if self.fixed:
            lines.append(f"never narrowed: {', '.join(self.fixed)}")
        return "\n".join(lines) or "no group can be narrowed"

    def __repr__(self) -> str:
        return f"Axes({', '.join(f'{group.name}: {group.size}' for group in self.groups)})"

    @property
    def classifier(self) -> str | None:
        """The layer that produces the class axis; None unless exactly one layer does.

        >>> trace(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), torch.zeros(2, 3)).classifier
        '1'
        """
        layers = {_layer(name): None for name in self.head if len(self._all_shapes[name]) > 1}
        return next(iter(layers)) if len(layers) == 1 else None

    def group(self, name: str) -> Group:
        """The group of that name.

        >>> trace(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), torch.zeros(2, 3)).group("0").size
        8
        """
        if name not in self._by_name:
            raise ModelError(unknown("width group", name, self._by_name))
        return self._by_name[name]

    def kept(self, width: Width | Kept) -> Kept:
        """Which units stay at a width: one fraction for every group, or a mapping with one entry per group.

        A fraction keeps the first ceil(width * size) units, an int the first so many, a sequence those indices.
        Groups that the mapping does not name stay whole.

        >>> axes = trace(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), torch.zeros(2, 3))
        >>> axes.kept(0.3).count("0"), axes.kept({"0": [1, 5]}).units("0")
        (3, (1, 5))
        """
        if isinstance(width, Kept):
            return width
        if not isinstance(width, Mapping):
            return Kept(tuple((g.name, g.size if g.fixed else _count(g, float(width))) for g in self.groups))
        problems = [unknown("width group", name, self._by_name) for name in width if name not in self._by_name]
        chosen: list[tuple[str, int | tuple[int, ...]]] = []
        for group in self.groups:
            try:
                chosen.append((group.name, _chosen(group, width.get(group.name, group.size))))
            except ModelError as error:
                problems.append(str(error))
        if problems:
            raise ModelError("; ".join(problems))
        return Kept(tuple(chosen))

    def knows(self, name: str) -> bool:
        """Whether the network had a tensor of this name when it was traced."""
        return name in self._all_shapes

    def index(self, name: str, kept: Kept) -> Index:
        """The sorted indices that stay on each axis of a tensor; None where the whole axis stays.

        >>> axes = trace(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), torch.zeros(2, 3))
        >>> axes.index("0.weight", axes.kept(0.25))
        (tensor([0, 1]), None)
        """
        if name not in self._all_shapes:
            raise ModelError(unknown("tensor", name, self._all_shapes))
        if (name, kept) not in self._index:
            if len(self._index) >= _REMEMBERED * len(self._all_shapes):
                self._index.clear()
            alive = self.alive(kept)
            rows = (None if atoms is None else alive[atoms] for atoms in self.found.atoms[name])
            self._index[name, kept] = tuple(
                None if row is None or bool(row.all()) else row.nonzero().flatten() for row in rows
            )
        return self._index[name, kept]

    def shape(self, name: str, kept: Kept) -> tuple[int, ...]:
        """The shape of a tensor in the narrowed module.

        >>> axes = trace(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), torch.zeros(2, 3))
        >>> axes.shape("0.weight", axes.kept(0.5))
        (4, 3)
        """
        index = self.index(name, kept)
        return tuple(size if rows is None else len(rows) for size, rows in zip(self._all_shapes[name], index))

    def elastic(self, name: str, axis: int) -> bool:
        """Whether every element of that axis belongs to a group that is not kept whole.

        >>> axes = trace(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), torch.zeros(2, 3))
        >>> axes.elastic("0.weight", 0), axes.elastic("0.weight", 1)
        (True, False)
        """
        if name not in self._all_shapes:
            raise ModelError(unknown("tensor", name, self._all_shapes))
        atoms = self.found.atoms[name][axis]
        if atoms is None:
            return False
        fixed = torch.tensor([*(group.fixed for group in self.groups), True])
        return not bool(fixed[self.found.group[atoms]].any())

    def alive(self, kept: Kept) -> Tensor:
        """For every atom, whether it stays; (atoms,) bool."""
        if kept not in self._alive:
            if len(self._alive) >= _REMEMBERED:
                self._alive.clear()
            result = torch.ones_like(self.found.group, dtype=torch.bool)
            for number, group in enumerate(self.groups):
                stays = torch.zeros(group.size, dtype=torch.bool)
                stays[list(kept.units(group.name))] = True
                mine = self.found.group == number
                result[mine] = stays[self.found.unit[mine]]
            self._alive[kept] = result
        return self._alive[kept]

    def survivors(self, extent: Extent, kept: Kept) -> Tensor:
        """For each position along a traced axis, whether anything stays there; (size,) bool."""
        alive = self.alive(kept)
        result = torch.ones(extent.size, dtype=torch.bool)
        for plane in extent.planes:
            result &= alive[plane].movedim(extent.axis, 0).reshape(extent.size, -1).any(1)
        return result[: extent.stop]

    def check_shrinks(self) -> None:
        """Refuse a network most of whose parameters have the same size at every width, unless `keep` names them.

        Raises:
            ModelError: they are two thirds of all: at half the width the network would have three quarters or more.

        >>> net = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
        >>> trace(net, torch.zeros(2, 3)).check_shrinks()
        """
        counts = {name: math.prod(self._all_shapes[name]) for name in self.found.parameters}
        stuck = {name: n for name, n in counts.items() if name not in self.found.accepted and not self._moves(name)}
        left, allowed = sum(stuck.values()), 2 * sum(counts.values()) // 3
        if left <= allowed:
            return
        unread = sum(n for name, n in stuck.items() if name in self.found.unread)
        reason = f"; the forward never reads {unread:,} of them, so leave their layers out" if unread else ""
        large: list[str] = []
        for name in sorted(stuck, key=lambda name: -stuck[name]):
            if left > allowed:
                large.append(_layer(name))
                left -= stuck[name]
        raise ModelError(
            f"too little of the network can be narrowed: {sum(stuck.values()):,} of {sum(counts.values()):,} "
            f"parameters have the same size at every width, most of them in {large[0]}{reason}. To narrow the rest all "
            f"the same, name those that stay, as in keep={[*dict.fromkeys(large)]}"
        )

    def _moves(self, name: str) -> bool:
        """Whether any element of a tensor can be dropped, or could be if `keep` allowed it."""
        rows = (atoms for atoms in self.found.atoms[name] if atoms is not None)
        return any(bool((self.found.group[atoms] >= 0).any()) for atoms in rows)

    def attributes(self, kept: Kept) -> dict[str, int]:
        """The integers on the user's modules that change with the width, by dotted path.

        Each use of such an integer as a size is an equation; the ones with a single unknown are solved first.
        """
        found = self.found
        values = dict(found.attributes)
        solved: set[str] = set()
        for path, name in found.overrides.items():
            values[path] = found.attributes[path] * kept.count(name) // self.group(name).size
            solved.add(path)

        def size(extent: Extent) -> int:
            return int(self.survivors(extent, kept).sum())

        equations = [(note, attributes_in(note.expression), size(note.extent)) for note in found.notes]
        while True:
            ready = [(note, names - solved, target) for note, names, target in equations]
            single = [entry for entry in ready if len(entry[1]) == 1]
            for name in dict.fromkeys(next(iter(names)) for _, names, _ in single):
                own = [(note, target) for note, names, target in single if name in names]
                self._solve(own, name, values, solved, size)
            if not single and not any(self._solve_largest(*entry, values, solved, size) for entry in ready if entry[1]):
                break
        self._keep_apart(values, solved)
        return {path: value for path, value in values.items() if value != found.attributes[path]}

    def _keep_apart(self, values: dict[str, int], solved: set[str]) -> None:
        """Shrink an integer that is no size itself but was found different from one that now has its value."""
        full = self.found.attributes
        for pair in self.found.unequal:
            loose = [path for path in (pair.left, pair.right) if path not in solved]
            if values[pair.left] != values[pair.right] or len(loose) != 1:
                continue
            other = pair.right if loose[0] == pair.left else pair.left
            values[loose[0]] = max(1, full[loose[0]] * values[other] // full[other])

    def _solve(
        self,
        equations: Sequence[tuple[SizeNote, int]],
        name: str,
        values: dict[str, int],
        solved: set[str],
        size: Callable[[Extent], int],
    ) -> None:
        """Set one unknown: to its present value if that fits the first equation, else to one that fits most of them.

        On a tie, to the one that shrinks as the axis does (of `n // 2 == 8` to 16, not to 17), else to the largest.
        """
        note, target = equations[0]

        def fits(candidate: int, equation: tuple[SizeNote, int]) -> bool:
            return evaluate(equation[0].expression, {**values, name: candidate}, size) == equation[1]

        def rank(candidate: int) -> tuple[int, bool]:
            shrunk = candidate * note.extent.size == values[name] * target
            return sum(fits(candidate, equation) for equation in equations), shrunk

        solved.add(name)
        fitting = [candidate for candidate in range(values[name], 0, -1) if fits(candidate, equations[0])]
        if fitting and fitting[0] != values[name]:
            values[name] = max(fitting, key=rank)

    def _solve_largest(
        self,
        note: SizeNote,
        names: frozenset[str],
        target: int,
        values: dict[str, int],
        solved: set[str],
        size: Callable[[Extent], int],
    ) -> bool:
        """Whether an equation of several unknowns, as `channels // paths`, fits once the largest of them is set."""
        if evaluate(note.expression, values, size) == target:
            return False
        largest = max(sorted(names), key=values.__getitem__)
        self._solve([(note, target)], largest, values, solved, size)
        return True


def _count(group: Group, width: float) -> int:
    if not 0.0 < width <= 1.0:
        raise ModelError(f"width {width} of group '{group.name}' is not in (0, 1]")
    return max(1, math.ceil(width * group.size - 1e-9))


def _chosen(group: Group, width: float | int | Sequence[int]) -> int | tuple[int, ...]:
    """What one entry of a width mapping keeps of its group."""
    if isinstance(width, Integral):
        kept: int | tuple[int, ...] = int(width)
        allowed = 1 <= int(width) <= group.size
    elif isinstance(width, Iterable):
        kept = tuple(sorted({int(unit) for unit in width}))
        allowed = bool(kept) and kept[0] >= 0 and kept[-1] < group.size and len(kept) == len(tuple(width))
        kept = len(kept) if kept == tuple(range(len(kept))) else kept
    else:
        kept, allowed = _count(group, float(width)), True
    if not allowed:
        raise ModelError(
            f"cannot keep {width} of group '{group.name}': give a fraction in (0, 1], a count from 1 to "
            f"{group.size}, or distinct indices below {group.size}"
        )
    if group.fixed and kept != group.size:
        raise ModelError(f"group '{group.name}' is kept whole by keep=, so all of it stays; given {width}")
    return kept


def trace(
    module: nn.Module,
    example: Tensor | tuple[Tensor, ...],
    *,
    keep: Sequence[str] = (),
    heads: Heads = "within",
    class_axis: int | None = -1,
    output: Callable[[Any], Any] | None = None,
    attributes: Mapping[str, str] | None = None,
) -> Axes:
    """The width groups of a module, found by one forward on the meta device; the module is left untouched.

    Args:
        module: Any plain module, on any device.
        example: Its input, or a tuple of inputs. Only shapes and types matter, unless the forward reads the values of
            integers, such as which symbols end a text. Use a batch of two or more.
        keep: Patterns of parameter or module names. The output side of what they match is kept whole, with all
            that is coupled to it. A pattern also matches the end of a dotted name.
        heads: What is elastic in attention: channels "within" every head, or "whole" heads.
        class_axis: Which axis of the (first) output tensor counts classes; None if there is no such axis.
        output: Picks, from what the forward returns, what must keep its size; by default everything.
        attributes: For integer attributes that the trace cannot infer: dotted path -> group it shrinks with.

    Returns:
        The groups, with which `slicing.narrow` cuts the module.

    >>> str(trace(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), torch.zeros(2, 3), keep=["0"]).groups[0])
    '0: 8 units, kept whole\\n  0.weight axis 0\\n  0.bias axis 0\\n  1.weight axis 1'
    """
    if heads not in ("within", "whole"):
        raise ModelError(unknown("choice of heads", heads, ("within", "whole")))
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    matched = _matching(stored(module), keep)
    classes = Classes()
    ran_atoms: dict[str, tuple[Tensor | None, ...]] = {}

    def fresh(name: str, tensor: Tensor) -> list[Tensor | None]:
        return [classes.fresh(size) if size > 1 else None for size in tensor.shape]

    def released(tracer: Tracer, plane: Tensor) -> bool:
        return bool(np.isin(classes.roots(plane).numpy(), _kept_roots(tracer, ran_atoms, matched)).all())

    try:
        ran = run(
            module,
            inputs,
            classes=classes,
            heads=heads,
            labels_of=fresh,
            pick=output,
            released=released,
            atoms=ran_atoms,
        )
    except ModelError:
        raise
    except Exception as error:
        place = getattr(error, "tracer_path", "") or "the network's own forward"
        raise ModelError(
            f"the network cannot run without data, at {place} "
            f"({line_of(error) or 'inside PyTorch'}): {str(error).rstrip('.')}. "
            "Its forward must not depend on the values of its input, and the example must fit it"
        ) from error
    ran.tracer.settle_grids()
    head = _head(ran, class_axis)
    for extents in ran.outputs:
        for plane in (plane for extent in extents for plane in extent.planes):
            classes.pin(plane)
    for name in ran.unused:
        for row in ran.atoms[name]:
            classes.pin(row) if row is not None else None
    for row in _left_over(ran, dict(module.named_buffers(remove_duplicate=False))):
        classes.pin(row)
    fixed = _kept_roots(ran.tracer, ran.atoms, matched)
    return _assemble(module, ran, inputs, head, fixed, heads, dict(attributes or {}), frozenset(matched))


def _paths(name: str) -> list[str]:
    """A parameter's name and the names of the modules around it: a.b.weight, a.b, a."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _matching(tensors: Mapping[str, Tensor], keep: Sequence[str]) -> set[str]:
    """The names of the tensors that at least one pattern matches; refuses a pattern that matches nothing."""
    matched: set[str] = set()
    problems = []
    for pattern in keep:
        hits = {
            name
            for name in tensors
            if any(fnmatch.fnmatchcase(p, pattern) or fnmatch.fnmatchcase(p, f"*.{pattern}") for p in _paths(name))
        }
        if not hits:
            problems.append(unknown("name in keep", pattern, {p for name in tensors for p in _paths(name)}))
        matched |= hits
    if problems:
        raise ModelError("; ".join(problems))
    return matched


def _kept_roots(
    tracer: Tracer, atoms: Mapping[str, tuple[Tensor | None, ...]], matched: set[str]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The classes on the output side of the matched tensors: on the axes that produce units, else on all axes."""
    rows = []
    for name in matched:
        made = [axis for axis in range(len(atoms[name])) if (name, axis) in tracer.producers]
        rows += [atoms[name][axis] for axis in made or range(len(atoms[name]))]
    labels = [row for row in rows if row is not None]
    return np.unique(tracer.classes.roots(torch.cat(labels)).numpy()) if labels else np.empty(0, dtype=np.int64)


def _head(ran: Run, class_axis: int | None) -> dict[str, int]:
    """Which axis of which tensor is the output's class axis."""
    if class_axis is None or not ran.outputs or not ran.outputs[0]:
        return {}
    lanes = ran.outputs[0][class_axis].lanes()
    if not lanes:
        return {}
    wanted = np.unique(ran.tracer.classes.roots(torch.cat(lanes)).numpy())
    found: dict[str, int] = {}
    for name, rows in ran.atoms.items():
        for axis, row in enumerate(rows):
            if row is not None and np.isin(ran.tracer.classes.roots(row).numpy(), wanted).all():
                found.setdefault(name, axis)
    return found


def _assemble(
    module: nn.Module,
    ran: Run,
    example: tuple[Tensor, ...],
    head: Mapping[str, int],
    fixed: np.ndarray[Any, np.dtype[np.int64]],
    heads: Heads,
    overrides: Mapping[str, str],
    accepted: frozenset[str],
) -> Axes:
    """Turn classes into groups."""
    classes = ran.tracer.classes
    pinned = classes.pinned_roots()
    homes = _homes(ran, pinned)
    producers = list(ran.tracer.producers)
    sets: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for root, axes in homes.items():
        sets.setdefault(tuple(axes), []).append(root)
    parent = classes.parent
    group = np.full(len(parent), -1)
    unit = np.full(len(parent), -1)
    drafts: list[tuple[str, int, bool]] = []
    ordered = sorted(sets.items(), key=lambda entry: _place(entry[0], producers, ran))
    for axes_of, roots in ordered:
        main = _main_axis(axes_of, producers)
        group[roots] = len(drafts)
        row = _roots_row(ran, main)
        members = np.array(roots)
        first = {int(root): place for place, root in reversed(list(enumerate(row.tolist())))}
        members = np.array(sorted(members.tolist(), key=lambda root: first[root]))
        unit[members] = np.arange(len(members))
        drafts.append((_layer(main[0]), len(roots), bool(np.isin(members, fixed).any())))
    group, unit = group[parent], unit[parent]
    names = _unique([name for name, _, _ in drafts])
    groups = tuple(
        Group(name, size, _members(ran, group, unit, number), cold)
        for number, (name, (_, size, cold)) in enumerate(zip(names, drafts))
    )
    problems = [unknown("attribute", path, ran.attributes) for path in overrides if path not in ran.attributes]
    problems += [unknown("width group", name, names) for name in overrides.values() if name not in names]
    if problems:
        raise ModelError("; ".join(problems))
    every = {name: tuple(tensor.shape) for name, tensor in stored(module).items()}
    persistent = module.state_dict().keys()
    found = _Found(
        atoms=ran.atoms,
        classes=torch.from_numpy(np.unique(parent, return_inverse=True)[1]),
        group=torch.from_numpy(group),
        unit=torch.from_numpy(unit),
        notes=tuple(ran.tracer.notes),
        unequal=tuple(dict.fromkeys(ran.tracer.unequal)),
        attributes=ran.attributes,
        inputs=ran.tracer.inputs,
        outputs=ran.tracer.outputs,
        example=tuple(_remembered(part) for part in example),
        overrides=overrides,
        heads=heads,
        parameters=tuple(name for name, _ in module.named_parameters()),
        unread=frozenset(ran.unused),
        accepted=accepted,
    )
    return Axes(
        groups,
        dict(head),
        {name: shape for name, shape in every.items() if name in persistent},
        every,
        _fixed(ran, group, producers),
        found,
    )


def _remembered(part: Tensor) -> Tensor:
    """An input as the trace used it: of floating-point numbers only the shape and type, of others the values too."""
    return on_meta(part) if part.is_floating_point() or part.is_meta else part.detach().clone()


def _roots_row(ran: Run, axis: tuple[str, int]) -> Tensor:
    row = ran.atoms[axis[0]][axis[1]]
    assert row is not None
    return ran.tracer.classes.roots(row)


def _left_over(ran: Run, buffers: Collection[str]) -> list[Tensor]:
    """The axes that keep their size in part and otherwise have units that live nowhere else and that no layer makes.

    Such are tables of positions of which the forward reads the middle: a shorter text leaves more of them unread. In a
    buffer no layer makes units, even where what is read of it becomes an axis of a product.
    """
    pinned = ran.tracer.classes.pinned_roots()
    homes = _homes(ran, pinned)
    found = []
    for name, axis in {axes[0]: None for axes in homes.values() if len(axes) == 1}:
        roots = _roots_row(ran, (name, axis))
        fixed = pinned[roots.numpy()]
        alone = all(len(homes[root]) == 1 for root in roots[torch.from_numpy(~fixed)].tolist())
        if alone and fixed.any() and (name in buffers or (name, axis) not in ran.tracer.producers):
            found.append(roots)
    return found


def _homes(ran: Run, pinned: np.ndarray[Any, np.dtype[np.bool_]]) -> dict[int, list[tuple[str, int]]]:
    """The axes on which each droppable class lives; each tensor appears under its first name."""
    homes: dict[int, list[tuple[str, int]]] = {}
    seen: set[int] = set()
    for name, rows in ran.atoms.items():
        for axis, row in enumerate(rows):
            if row is None or id(row) in seen:
                continue
            seen.add(id(row))
            roots = np.unique(ran.tracer.classes.roots(row).numpy())
            for root in roots[~pinned[roots]].tolist():
                homes.setdefault(root, []).append((name, axis))
    return homes


def _main_axis(axes: tuple[tuple[str, int], ...], producers: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """The axis that first produces these units as the network runs, or their first axis if none does."""
    made = [axis for axis in axes if axis in producers]
    return min(made, key=producers.index) if made else axes[0]


def _place(axes: tuple[tuple[str, int], ...], producers: Sequence[tuple[str, int]], ran: Run) -> tuple[int, int]:
    """A sort key that puts groups in the order in which the network produces them."""
    main = _main_axis(axes, producers)
    names = list(ran.atoms)
    return (producers.index(main) if main in producers else len(producers), names.index(main[0]))


def _layer(name: str) -> str:
    """The dotted name of the layer that owns a tensor; a tensor of the root module names itself."""
    owner = name.partition(".parametrizations.")[0] if ".parametrizations." in name else name.rpartition(".")[0]
    return owner or name


def _unique(names: Sequence[str]) -> list[str]:
    """The names, numbered where one occurs more than once.

    >>> _unique(["a", "b", "a"])
    ['a:0', 'b', 'a:1']
    """
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, -1) + 1
        result.append(f"{name}:{seen[name]}" if names.count(name) > 1 else name)
    return result


def _members(ran: Run, group: np.ndarray[Any, Any], unit: np.ndarray[Any, Any], number: int) -> tuple[Member, ...]:
    members = []
    for name, rows in ran.atoms.items():
        for axis, row in enumerate(rows):
            if row is None:
                continue
            atoms = row.numpy()
            mine = group[atoms] == number
            if mine.any():
                members.append(Member(name, axis, tuple(np.where(mine, unit[atoms], -1).tolist())))
    return tuple(members)


def _fixed(ran: Run, group: np.ndarray[Any, Any], producers: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """The producing axes on which no element can be dropped, as text."""
    rows = ((name, axis, ran.atoms[name][axis]) for name, axis in producers)
    return tuple(
        f"{name} axis {axis}" for name, axis, row in rows if row is not None and (group[row.numpy()] < 0).all()
    )
