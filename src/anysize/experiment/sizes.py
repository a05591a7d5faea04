"""The size that each device group trains: the best that its budget allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anysize.cost.budgets import Units, as_budget, best, needs, next_below, untimed
from anysize.devices.budget import Budget
from anysize.devices.fleet import Fleet
from anysize.devices.groups import DeviceGroup, Latencies
from anysize.errors import ConfigError
from anysize.experiment.lookup import step_timed
from anysize.experiment.setup import Setup
from anysize.methods.base import Method
from anysize.methods.capabilities import Searched
from anysize.methods.context import Context
from anysize.methods.size import Size
from anysize.methods.table import Table

GRID = tuple(i / 16 for i in range(1, 17))
"""The widths that a budget in units chooses from, unless a method offers other choices."""
_SHOWN = 10  # groups that nothing fits which an error lists


def sized(method: Method[Any], context: Context, capacity: float) -> Size:
    """The size that a device of this capacity trains: that width, unless the method decides otherwise."""
    return method.sized(context, capacity) if isinstance(method, Searched) else Size(capacity)


def choices_of(method: Method[Any], context: Context) -> Sequence[Size]:
    """The sizes that a budget chooses from, best first: widths, largest first, unless the method offers others."""
    return method.choices(context) if isinstance(method, Searched) else [Size(width) for width in reversed(GRID)]


@dataclass(frozen=True)
class Solved:
    """What the device groups train, by their keys.

    Attributes:
        sizes: the size of each group that trains.
        idle: the groups that sit out, each with the reason.
    """

    sizes: dict[str, Size]
    idle: dict[str, str]


def solve_sizes(setup: Setup, table: Table | None, fleet: Fleet) -> Solved:
    """The best of the method's choices that each group's budget, or its fraction of the full cost, allows.

    A group whose budget changes from round to round has a size for each budget. For a device group with a plain
    capacity, the method decides.

    Raises:
        ConfigError: the method offers no choice that a group asks for, or a group can train nothing of at least
            devices.minimum_width; with devices.infeasible = "skip" such a group sits out, unless all would.
    """
    unit, least = setup.config.devices.capacity_of, setup.config.devices.minimum_width
    method = setup.method
    context = setup.context_for((), table)
    costs: dict[Size, Mapping[str, float]] = {}

    def units(size: Size) -> Mapping[str, float]:
        entry = None if table is None else table.entry(size)
        if entry is not None:
            return entry.cost
        if size not in costs:
            costs[size] = setup.cost_in(setup.context_for((size,), table), size).units()
        return costs[size]

    def on(group: DeviceGroup) -> Callable[[Size], Units]:
        """The costs of sizes on a group's devices: their time is as measured there, if it was."""
        times = group.latencies
        if times is None:
            return units
        return lambda size: {**units(size), "latency_ms": times.at(size.width, size.depth)}

    solved: dict[str, Size] = {}
    idle: dict[str, str] = {}
    bounded: dict[str, _Bounded] = {}
    problems: dict[str, None] = {}
    offered = choices_of(method, context)
    for group in fleet.kinds():
        if group.capacity is not None and unit == "width":
            size = sized(method, context, group.capacity)
            if size.width >= least:
                solved[group.key] = size
            else:
                idle[group.key] = f"can train width {size.width:g}; devices.minimum_width is {least:g}"
            continue
        whole = group.depth is None and group.sparsity is None
        capacity = (group.capacity or 1.0) if whole else None
        budget = as_budget(capacity, group.budget, unit, lambda: units(Size(1.0)))
        choices = [size for size in offered if size.width >= least and _asked(group, size)]
        problem = _no_choice(setup, table, group, budget, choices)
        if problem is not None:
            problems[problem] = None
            continue
        found = best(choices, budget, on(group))
        if found is None:
            idle[group.key] = f"can train no size; the smallest needs {needs(budget, *map(on(group), choices))}"
            continue
        solved[group.key] = _labelled(found, group)
        if budget is not None:
            limit = budget.latency_ms or math.inf
            timely = [s for s in choices if math.isinf(limit) or on(group)(s)["latency_ms"] <= limit]
            bounded[group.key] = _Bounded(group, budget, timely)
    skips = setup.config.devices.infeasible == "skip"
    _refuse([*problems, *([] if skips else _infeasible(fleet, idle))])
    sizes = lowered(setup, table, solved, bounded, idle)
    _refuse([] if skips and sizes else _infeasible(fleet, idle))
    _refuse(_ambiguous(sizes))
    return Solved(sizes, idle)


@dataclass(frozen=True)
class _Bounded:
    """A device group, the budget that it must keep, and the sizes that are fast enough for it, best first."""

    group: DeviceGroup
    budget: Budget
    choices: Sequence[Size]


def _infeasible(fleet: Fleet, idle: Mapping[str, str]) -> list[str]:
    """A line for each group that nothing fits, or client; a long list is cut."""
    lines = [f"devices: {who} {why}" for who, why in fleet.explained(idle)]
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"... and {more} more like these"] if more > 0 else [])]


def _ambiguous(sizes: Mapping[str, Size]) -> list[str]:
    """A line for each label that two sizes would have."""
    by_label: dict[str, dict[Size, str]] = {}
    for key, size in sizes.items():
        by_label.setdefault(size.label, {}).setdefault(replace(size, name=""), key)
    return [
        f"devices: {' and '.join(repr(key) for key in found.values())} would train different sizes of one label, "
        f"'{label}'; give a group another name, or a budget in place of its capacity"
        for label, found in by_label.items()
        if len(found) > 1
    ]


def _refuse(problems: Sequence[str]) -> None:
    """Raise a `ConfigError` if there are problems."""
    if problems:
        raise ConfigError("\n".join(problems))


def _no_choice(
    setup: Setup, table: Table | None, group: DeviceGroup, budget: Budget | None, choices: Sequence[Size]
) -> str | None:
    """Why a device group has no choices, or None."""
    name = setup.config.method.name
    if not choices:
        every = choices_of(setup.method, setup.context_for((), table))
        return f"devices: group '{group.name}' {_unknown_kind(name, every, group)}"
    if budget is None or budget.latency_ms is None:
        return None
    if group.latencies is not None:
        other = [f"{what} {was}, not {now}" for what, was, now in _other_step(setup, group.latencies)]
        return (
            f"devices: group '{group.name}' has latencies of another training step: {', '.join(other)}; measure again "
            "with `anysize join --measure`"
            if other
            else None
        )
    if table is None or not all("latency_ms" in entry.cost for entry in table.entries):
        return (
            f"devices: group '{group.name}' limits latency_ms, and nobody has measured it: name the file that `anysize "
            "join --measure` wrote on such a device in the group's latencies. For a method with a look-up table (elf) "
            "this machine can measure it: name the file in method.table"
        )
    return None


def _other_step(setup: Setup, times: Latencies) -> Iterator[tuple[str, object, object]]:
    """In what the training step that was timed differs from the experiment's, with both values."""
    now = step_timed(setup)
    for what, value in now.items():
        if getattr(times, what) != value:
            yield what, getattr(times, what), value


def _asked(group: DeviceGroup, size: Size) -> bool:
    """Whether a size has the depth and the sparsity that a group asks for."""
    return group.depth in (None, size.depth) and group.sparsity in (None, size.mask)


def _unknown_kind(name: str, every: Sequence[Size], group: DeviceGroup) -> str:
    """Why a method trains no size of the depth and the sparsity that a group asks for."""
    depths = sorted({size.depth for size in every if size.depth is not None})
    if group.depth is not None and group.depth not in depths:
        known = f"it trains depths {', '.join(map(str, depths))}" if depths else "it does not change the depth"
        return f"has depth = {group.depth}, which {name} cannot train; {known}"
    masks = ", ".join(f"{mask:g}" for mask in sorted({size.mask for size in every}))
    known = "it masks no weights" if masks == "0" else f"it trains sparsities {masks}; add it to method.sparsities"
    return f"has sparsity = {group.sparsity:g}, which {name} cannot train; {known}"


def _labelled(size: Size, group: DeviceGroup) -> Size:
    """The size with the device group's label; with its shape, if the group has several sizes."""
    label = group.label or size.shape
    plain = replace(size, name="")
    return plain if label == plain.label else replace(size, name=label)


def lowered(
    setup: Setup,
    table: Table | None,
    solved: dict[str, Size],
    bounded: Mapping[str, _Bounded],
    idle: dict[str, str],
) -> dict[str, Size]:
    """The sizes, lowered among the choices until each fits its budget in the resulting fleet.

    A group that nothing fits there has no size; it is added to `idle`, with the reason.
    The cost of a size may depend on the others: the inputs of FLANC's basis divide the inputs of every trained width.
    """
    while bounded := {key: own for key, own in bounded.items() if key in solved}:
        context = setup.context_for(tuple(sorted(set(solved.values()), key=lambda size: size.order)), table)
        state = setup.method.init(context)
        sizes = dict.fromkeys(solved[key] for key in bounded)
        costs = {size: setup.cost_in(context, size, state).units() for size in sizes}
        # The choices are fast enough.
        over = [key for key, own in bounded.items() if not own.budget.fits(untimed(costs[solved[key]]))]
        if not over:
            break
        for key in over:
            own = bounded[key]
            below = next_below(solved[key], own.choices)
            if below is None:
                least = needs(own.budget, costs[solved[key]])
                idle[key] = f"can train no size in this fleet; the smallest needs {least}"
                del solved[key]
            else:
                solved[key] = _labelled(below, own.group)
    return solved
