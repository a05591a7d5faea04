"""The arithmetic of a comparison: spread over seeds, paired differences, equal cost, cost to a target."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A value over the seeds.

    Attributes:
        mean: over the seeds; not a number if there is none, or if a run has diverged.
        std: the sample standard deviation; None of a single value.
        count: how many seeds it is of.
    """

    mean: float
    std: float | None
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation; a single value has none.

    >>> spread([0.5, 1.5, 2.5])
    Spread(mean=1.5, std=1.0, count=3)
    """
    mean = statistics.fmean(values) if values else math.nan
    if len(values) < 2:
        return Spread(mean, None, len(values))
    # statistics.stdev cannot do without finite numbers; a run that has diverged makes the spread nan as well.
    deviation = statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
    return Spread(mean, deviation, len(values))


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Spread:
    """The difference to the baseline, seed by seed: its mean and the standard deviation of the differences.

    Seeds that one of the two lacks are left out.

    >>> paired({0: 3.0, 1: 5.0, 2: 9.0, 3: 7.0}, {0: 2.5, 1: 3.5, 3: 4.5})
    Spread(mean=1.5, std=1.0, count=3)
    """
    return spread([values[seed] - baseline[seed] for seed in values if seed in baseline])


def at_cost(costs: Sequence[float], values: Sequence[float], cost: float) -> float | None:
    """The value at a cost on the straight lines between the points; None below the cheapest and above the dearest.

    Of several points of equal cost the best is not known beforehand, so their mean counts.

    >>> at_cost([10, 20, 40], [0.5, 0.7, 0.8], 30), at_cost([10, 20, 40], [0.5, 0.7, 0.8], 50)
    (0.75, None)
    """
    by_cost: dict[float, list[float]] = {}
    for own, value in zip(costs, values, strict=True):
        by_cost.setdefault(own, []).append(value)
    points = [(own, statistics.fmean(by_cost[own])) for own in sorted(by_cost)]
    if not points or not points[0][0] <= cost <= points[-1][0]:
        return None
    for (left, low), (right, high) in itertools.pairwise(points):
        if cost < right:
            return low + (high - low) * (cost - left) / (right - left)
    return points[-1][1]


def first_reached(curve: Sequence[tuple[int, float]], target: float, higher_is_better: bool) -> int | None:
    """The first measured round whose value is as good as the target, or None.

    >>> first_reached([(10, 0.5), (20, 0.8), (30, 0.7)], 0.75, True)
    20
    """
    return next((r for r, value in curve if (value >= target if higher_is_better else value <= target)), None)


def best(curve: Sequence[tuple[int, float]], higher_is_better: bool) -> tuple[int, float]:
    """The measured round with the best value, the first of several, and the value.

    >>> best([(10, 0.5), (20, 0.8), (30, 0.8)], True)
    (20, 0.8)
    """
    finite = [point for point in curve if math.isfinite(point[1])]
    if not finite:
        return (curve[-1][0] if curve else 0), math.nan
    sign = 1.0 if higher_is_better else -1.0
    return max(finite, key=lambda point: (sign * point[1], -point[0]))
