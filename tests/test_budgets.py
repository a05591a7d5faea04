"""The best size that a budget allows."""

from __future__ import annotations

import math

import pytest

from anysize.cost.budgets import allowed, as_budget, best, needs, next_below, untimed
from anysize.devices.budget import Budget
from anysize.errors import ConfigError
from anysize.methods.size import Size

SIZES = [Size(1.0), Size(0.5), Size(0.25)]


def units(size: Size) -> dict[str, float]:
    """A hundred parameters and a thousand bytes at full width, fewer in proportion."""
    return {"parameters": 100 * size.width, "bytes": 1000 * size.width}


def test_the_first_size_that_fits_is_taken_and_none_where_nothing_fits() -> None:
    assert best(SIZES, Budget(parameters=60), units) == Size(0.5)
    assert best(SIZES, Budget(parameters=60, bytes=300), units) == Size(0.25)
    assert best(SIZES, Budget(parameters=20), units) is None
    assert best(SIZES, None, units) == Size(1.0)
    assert best([], None, units) is None


def test_costs_behind_the_first_size_that_fits_are_not_asked_for() -> None:
    asked: list[Size] = []

    def counted(size: Size) -> dict[str, float]:
        asked.append(size)
        return units(size)

    assert best(SIZES, Budget(parameters=60), counted) == Size(0.5)
    assert asked == SIZES[:2]


def test_all_sizes_that_a_budget_allows_keep_their_order() -> None:
    assert list(allowed(SIZES, Budget(bytes=500), units)) == [Size(0.5), Size(0.25)]
    assert list(allowed(SIZES, None, units)) == SIZES


def test_a_capacity_is_a_part_of_the_full_cost_and_does_not_fail_for_rounding() -> None:
    found = as_budget(0.29, None, "parameters", lambda: {"parameters": 100.0})
    assert found is not None
    assert 0.29 * 100 < 29
    assert found.fits({"parameters": 29.0})
    assert not found.fits({"parameters": 29.1})


def test_a_budget_counts_before_a_capacity_and_nothing_given_limits_nothing() -> None:
    def unasked() -> dict[str, float]:
        raise AssertionError("the full cost is needed for a capacity only")

    given = Budget(bytes=3)
    assert as_budget(0.5, given, "parameters", unasked) is given
    assert as_budget(None, None, "parameters", unasked) is None


def test_time_that_was_not_measured_is_refused_unless_nobody_judges_it() -> None:
    budget = Budget(parameters=60, latency_ms=5)
    with pytest.raises(ConfigError, match="latency_ms, which was not measured"):
        best(SIZES, budget, units)
    assert best(SIZES, budget, lambda size: untimed(units(size))) == Size(0.5)


def test_what_is_needed_is_the_least_in_each_unit_that_is_limited() -> None:
    assert needs(Budget(parameters=1), *map(units, SIZES)) == "parameters = 25"
    assert needs(None, units(SIZES[0])) == ""
    unknown = [{**units(size), "latency_ms": math.inf} for size in SIZES]
    assert needs(Budget(parameters=1, latency_ms=5), *unknown) == "parameters = 25"


def test_the_next_choice_keeps_the_name_of_the_group() -> None:
    named = Size(0.5, name="camera")
    assert next_below(named, SIZES) == Size(0.25, name="camera")
    assert next_below(Size(0.25), SIZES) is None
