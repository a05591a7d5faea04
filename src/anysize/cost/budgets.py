"""The best size that a budget allows, solved in one place: for the groups of an experiment, a finished run, a device.

Costs come as a function of a size, since counting one takes time and most are never asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from anysize.devices.budget import SLACK, Budget
from anysize.methods.size import Size

Units = Mapping[str, float]
"""What a size costs, by the units of a budget."""


def as_budget(capacity: float | None, budget: Budget | None, unit: str, full: Callable[[], Units]) -> Budget | None:
    """A device's budget, or its capacity as a budget; None where nothing is limited.

    Args:
        capacity: the part of the full network's cost that the device can afford, or None.
        budget: what it can afford in units, or None; it counts before the capacity.
        unit: what the capacity is a part of.
        full: what the full network costs.

    >>> as_budget(0.25, None, "macs", lambda: {"macs": 800}).fits({"macs": 200})
    True
    """
    if budget is not None or capacity is None:
        return budget
    return Budget(**{unit: capacity * full()[unit] + SLACK})


def allowed(sizes: Iterable[Size], budget: Budget | None, units: Callable[[Size], Units]) -> Iterator[Size]:
    """Those of `sizes` that a budget allows, in their order; all of them without one."""
    return (size for size in sizes if budget is None or budget.fits(units(size)))


def best(sizes: Iterable[Size], budget: Budget | None, units: Callable[[Size], Units]) -> Size | None:
    """The first of `sizes`, which are given best first, that a budget allows; None if it allows none."""
    return next(allowed(sizes, budget, units), None)


def untimed(costs: Units) -> Units:
    """The costs for where time is not judged: every budget allows the time."""
    return {**costs, "latency_ms": 0.0}


def needs(budget: Budget | None, *costs: Units) -> str:
    """The least of the costs in each unit that a budget limits, in words; without units whose costs nobody knows.

    >>> needs(Budget(macs=10, bytes=10), {"macs": 30, "bytes": 2}, {"macs": 20, "bytes": 3})
    'macs = 20, bytes = 2'
    """
    limits = {} if budget is None else budget.limits()
    least = {unit: min(cost[unit] for cost in costs) for unit in limits}
    return ", ".join(f"{unit} = {amount:g}" for unit, amount in least.items() if math.isfinite(amount))


def next_below(size: Size, choices: Sequence[Size]) -> Size | None:
    """The choice after `size`, under its name; None if it is the last. Choices are given best first.

    >>> next_below(Size(1.0, name="camera"), [Size(1.0), Size(0.5)])
    Size(width=0.5, name='camera', depth=None, mask=0.0, robustness=None)
    """
    unnamed = [replace(choice, name="") for choice in choices]
    after = unnamed[unnamed.index(replace(size, name="")) + 1 :]
    return replace(after[0], name=size.name) if after else None
