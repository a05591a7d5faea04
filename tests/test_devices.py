"""Fleets: who can afford what, who takes part, and how long it would take."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anysize.config.devices import BudgetConfig, DevicesConfig, GroupConfig
from anysize.devices.budget import Budget
from anysize.devices.distributions import capacity_shares
from anysize.devices.fleet import Fleet, cover_probability, make_fleet
from anysize.devices.groups import DeviceGroup, round_seconds
from anysize.errors import ConfigError


def counts(fleet: Fleet) -> dict[str, int]:
    """The number of clients of each group, by the group's name."""
    return {group.name: group.clients for group in fleet.groups}


def labels(fleet: Fleet, round: int = 0) -> list[str]:
    """The label of every client in a round."""
    return [fleet.group_of(client, round).label for client in range(fleet.clients)]


def capacities(fleet: Fleet, round: int = 0) -> list[float]:
    """The capacity of every client in a round."""
    return [fleet.group_of(client, round).capacity or 0.0 for client in range(fleet.clients)]


# Capacities


@pytest.mark.parametrize("assignment", ["random", "order"])
def test_fractions_are_exact_whoever_gets_them(assignment: str) -> None:
    config = DevicesConfig(capacities=[0.5, 0.25, 1.0], fractions=[0.3, 0.6, 0.1], assignment=assignment)
    fleet = make_fleet(config, clients=50, seed=3)
    assert Counter(labels(fleet)) == {"0.5": 15, "0.25": 30, "1.0": 5}
    assert counts(fleet) == {"0.25": 30, "0.5": 15, "1.0": 5}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(60, 400), st.integers(0, 2**31))
def test_counts_add_up_and_are_within_one_of_the_fractions(weights: list[int], clients: int, seed: int) -> None:
    sizes = [(place + 1) / 10 for place in range(len(weights))]
    fractions = [weight / sum(weights) for weight in weights]
    fleet = make_fleet(DevicesConfig(capacities=sizes, fractions=fractions), clients, seed)
    assert sum(group.clients for group in fleet.groups) == clients
    assert Counter(labels(fleet)) == counts(fleet)
    for group, fraction in zip(fleet.groups, fractions):
        assert abs(group.clients - fraction * clients) < 1 + 1e-6


def test_groups_are_sorted_but_blocks_stay_as_listed() -> None:
    fleet = make_fleet(DevicesConfig(capacities=[1.0, 0.25, 0.5], assignment="order"), clients=6, seed=0)
    assert [group.label for group in fleet.groups] == ["0.25", "0.5", "1.0"]
    assert labels(fleet) == ["1.0", "1.0", "0.25", "0.25", "0.5", "0.5"]


def test_a_capacity_is_labelled_as_a_decimal_number() -> None:
    fleet = make_fleet(DevicesConfig(capacities=[1, 0.0625]), clients=2, seed=0)
    assert [group.label for group in fleet.groups] == ["0.0625", "1.0"]


def test_random_assignment_depends_on_the_seed_and_on_nothing_else() -> None:
    config = DevicesConfig()
    first, again, other = (labels(make_fleet(config, 40, seed)) for seed in (5, 5, 6))
    assert first == again
    assert first != other
    assert first != sorted(first)


def test_static_capacities_never_change() -> None:
    fleet = make_fleet(DevicesConfig(), clients=20, seed=0)
    assert all(labels(fleet, round) == labels(fleet, 0) for round in range(20))


def test_redrawn_capacities_change_by_round_with_the_given_probabilities() -> None:
    config = DevicesConfig(capacities=[0.5, 1.0], fractions=[0.8, 0.2], redraw="round")
    fleet = make_fleet(config, clients=200, seed=1)
    drawn = [labels(fleet, round) for round in range(20)]
    assert len({tuple(row) for row in drawn}) == 20
    share = sum(label == "0.5" for row in drawn for label in row) / 4000
    assert abs(share - 0.8) < 4 * math.sqrt(0.8 * 0.2 / 4000)
    fresh = make_fleet(config, clients=200, seed=1)
    assert [fresh.group_of(client, 13).label for client in reversed(range(200))] == drawn[13][::-1]


def test_a_redrawn_capacity_does_not_depend_on_who_else_is_there() -> None:
    config = DevicesConfig(redraw="round")
    small, large = (make_fleet(config, clients, seed=1) for clients in (10, 1000))
    assert labels(small, 4) == labels(large, 4)[:10]


def test_cover_gives_every_capacity_to_some_participant_in_every_round() -> None:
    plain = make_fleet(DevicesConfig(redraw="round", clients_per_round=5), clients=30, seed=0)
    covered = make_fleet(DevicesConfig(redraw="round", clients_per_round=5, cover=True), clients=30, seed=0)
    complete = []
    for number in range(40):
        assert plain.participants(number) == covered.participants(number)
        kinds = [{fleet.group_of(c, number).label for c in fleet.participants(number)} for fleet in (plain, covered)]
        assert kinds[1] == {"0.25", "0.5", "0.75", "1.0"}
        complete.append(len(kinds[0]) == 4)
    assert not all(complete)
    assert any(complete)


def test_cover_leaves_a_draw_that_covers_as_it_is_and_does_not_depend_on_the_order_of_asking() -> None:
    config = DevicesConfig(redraw="round", clients_per_round=6)
    plain = make_fleet(config, clients=30, seed=2)
    covered = make_fleet(config.model_copy(update={"cover": True}), clients=30, seed=2)
    backwards = make_fleet(config.model_copy(update={"cover": True}), clients=30, seed=2)
    rounds = [
        number for number in range(30) if len({plain.group_of(c, number) for c in plain.participants(number)}) == 4
    ]
    assert rounds
    assert all(labels(plain, number) == labels(covered, number) for number in rounds)
    assert [labels(backwards, number) for number in reversed(range(8))] == [
        labels(covered, number) for number in reversed(range(8))
    ]


@pytest.mark.parametrize("shares, draws", [([0.25] * 4, 4), ([0.25] * 4, 7), ([0.7, 0.2, 0.1], 5), ([1.0], 3)])
def test_the_probability_of_covering_is_that_of_counting_all_draws(shares: list[float], draws: int) -> None:
    counted = sum(
        math.prod(shares[kind] for kind in row)
        for row in itertools.product(range(len(shares)), repeat=draws)
        if len(set(row)) == len(shares)
    )
    assert cover_probability(shares, draws) == pytest.approx(counted, rel=1e-9)


def test_data_groups_decide_where_asked() -> None:
    config = DevicesConfig(capacities=[0.5, 1.0], assignment="group")
    domains = [2, 0, 1, 0, 3, 2]
    fleet = make_fleet(config, clients=6, seed=0, domains=domains)
    assert labels(fleet) == ["1.0", "0.5", "0.5", "0.5", "1.0", "1.0"]
    assert counts(fleet) == {"0.5": 3, "1.0": 3}


# Distributions, against the papers' formulas


@pytest.mark.parametrize("clients", [4, 8, 10, 23, 100, 101])
def test_exponential_is_split_mixs_formula_client_by_client(clients: int) -> None:
    fleet = make_fleet(DevicesConfig(distribution="exponential", assignment="order"), clients, seed=0)
    formula = [0.5 ** (math.ceil(4 * k / clients) - 1) for k in range(1, clients + 1)]
    assert capacities(fleet) == formula


def test_a_richer_fleet_has_more_groups_with_wide_networks() -> None:
    options = {"divisors": [1, 1, 2, 8]}
    config = DevicesConfig(distribution="exponential", distribution_options=options)
    assert counts(make_fleet(config, clients=40, seed=0)) == {"0.125": 10, "0.5": 10, "1.0": 20}


def test_step_rises_by_a_fixed_step() -> None:
    fleet = make_fleet(DevicesConfig(distribution="step", assignment="order"), clients=12, seed=0)
    assert capacities(fleet) == [0.25 * math.ceil(4 * k / 12) for k in range(1, 13)]


def test_log_normal_rounds_down_to_the_bins() -> None:
    config = DevicesConfig(distribution="log-normal", distribution_options={"sigma": 0.3})
    draws = np.random.default_rng(0).lognormal(math.log(0.4), 0.3, size=400_000)
    floored = np.clip(np.floor(draws / 0.125) * 0.125, 0.125, 1.0)
    expected = [float(np.mean(floored == capacity)) for capacity in config.capacities or ()]
    assert capacity_shares(config) == pytest.approx(expected, abs=4e-3)
    fleet = make_fleet(config, clients=10_000, seed=0)
    assert [group.clients / 10_000 for group in fleet.groups] == pytest.approx(expected, abs=5e-3)


def test_log_normal_budgets_are_those_of_split_mix() -> None:
    """scipy's lognorm(s=0.5, scale=0.4), whose mean is the paper's 0.45, in bins of an eighth."""
    normal = statistics.NormalDist(math.log(0.4), 0.5)
    edges = [0.0, *(normal.cdf(math.log(eighths / 8)) for eighths in range(2, 9)), 1.0]
    shares = capacity_shares(DevicesConfig(distribution="log-normal"))
    assert shares == pytest.approx([high - low for low, high in itertools.pairwise(edges)])
    assert 0.4 * math.exp(0.5**2 / 2) == pytest.approx(0.45, abs=0.005)


@pytest.mark.parametrize(
    ("divisors", "expected"),
    [
        ([8, 1, 1, 1], {"0.125": 5, "1.0": 15}),
        ([8, 2, 1, 1], {"0.125": 5, "0.5": 5, "1.0": 10}),
        ([8, 2, 2, 1], {"0.125": 5, "0.5": 10, "1.0": 5}),
    ],
)
def test_more_sufficient_fleets_are_named_by_their_divisors(divisors: list[int], expected: dict[str, int]) -> None:
    config = DevicesConfig(
        distribution="exponential",
        distribution_options={"divisors": divisors},
        capacities=[0.125, 0.25, 0.5, 1.0],
        assignment="order",
    )
    fleet = make_fleet(config, clients=20, seed=0)
    assert counts(fleet) == expected
    assert capacities(fleet) == sorted(capacities(fleet))


def test_log_normal_follows_the_listed_order() -> None:
    ascending = DevicesConfig(distribution="log-normal", capacities=[0.25, 0.5, 1.0])
    descending = DevicesConfig(distribution="log-normal", capacities=[1.0, 0.5, 0.25])
    assert capacity_shares(ascending) == capacity_shares(descending)[::-1]


def test_a_small_fleet_leaves_out_capacities_that_a_distribution_gives_to_nobody() -> None:
    fleet = make_fleet(DevicesConfig(distribution="log-normal"), clients=6, seed=0)
    assert sum(group.clients for group in fleet.groups) == 6
    assert all(group.clients for group in fleet.groups)
    assert Counter(labels(fleet)) == counts(fleet)


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_two_types_are_flancs_a_and_b(share: float) -> None:
    config = DevicesConfig(distribution="two-type", distribution_options={"share": share})
    assert counts(make_fleet(config, clients=100, seed=0)) == {
        "0.25": round(100 - 100 * share),
        "1.0": 100 * share,
    }


# Named groups


def test_named_groups_keep_their_numbers_budgets_and_speeds() -> None:
    config = DevicesConfig(
        macs_per_second=1e9,
        bytes_per_second=1e6,
        available=0.9,
        groups=[
            GroupConfig(name="server", capacity=1.0, macs_per_second=1e12, bytes_per_second_up=5e6),
            GroupConfig(name="board", clients=7, capacity=0.25, available=0.5),
        ],
        assignment="order",
    )
    fleet = make_fleet(config, clients=10, seed=0)
    board, server = fleet.groups
    assert counts(fleet) == {"board": 7, "server": 3}
    assert labels(fleet) == ["1.0"] * 3 + ["0.25"] * 7
    assert (board.macs_per_second, board.bytes_per_second_down, board.bytes_per_second_up) == (1e9, 1e6, 1e6)
    assert (server.macs_per_second, server.bytes_per_second_down, server.bytes_per_second_up) == (
        1e12,
        1e6,
        5e6,
    )
    assert (board.available, server.available) == (0.5, 0.9)


def test_budget_groups_are_called_by_their_names_smallest_first() -> None:
    groups = [
        GroupConfig(name=name, fraction=0.5, budget=BudgetConfig(macs=macs)) for name, macs in (("b", 9), ("a", 5))
    ]
    fleet = make_fleet(DevicesConfig(groups=groups), clients=4, seed=0)
    assert [(group.label, group.capacity, group.budget) for group in fleet.groups] == [
        ("a", None, Budget(macs=5.0)),
        ("b", None, Budget(macs=9.0)),
    ]


def test_groups_that_do_not_compare_stay_as_listed() -> None:
    groups = [GroupConfig(name="b", budget=BudgetConfig(macs=9)), GroupConfig(name="a", capacity=0.5)]
    assert [group.name for group in make_fleet(DevicesConfig(groups=groups), 4, 0).groups] == ["b", "a"]


def test_lists_of_speeds_follow_the_capacities_they_were_given_with() -> None:
    config = DevicesConfig(capacities=[1.0, 0.5], macs_per_second=[8e9, 2e9], bytes_per_second_down=[3.0, 4.0])
    half, whole = make_fleet(config, clients=2, seed=0).groups
    assert (half.macs_per_second, whole.macs_per_second) == (2e9, 8e9)
    assert (half.bytes_per_second_down, half.bytes_per_second_up) == (4.0, None)


# Participation


@pytest.mark.parametrize(
    "keys, clients, expected",
    [
        ({"participation": 0.1}, 100, 10),
        ({"participation": 0.29}, 100, 29),
        ({"participation": 0.25}, 10, 2),
        ({"clients_per_round": 7}, 9, 7),
        ({}, 9, 9),
    ],
)
def test_participants_are_distinct_sorted_and_as_many_as_asked(
    keys: dict[str, Any], clients: int, expected: int
) -> None:
    fleet = make_fleet(DevicesConfig(**keys), clients, seed=0)
    for number in range(10):
        chosen = fleet.participants(number)
        assert len(chosen) == len(set(chosen)) == expected
        assert chosen == sorted(chosen)
        assert all(type(client) is int and 0 <= client < clients for client in chosen)


def test_participants_depend_on_the_seed_and_the_round_only() -> None:
    config = DevicesConfig(clients_per_round=5)
    other_capacities = DevicesConfig(clients_per_round=5, capacities=[1.0], redraw="round")
    first, again = make_fleet(config, 100, seed=1), make_fleet(other_capacities, 100, seed=1)
    rounds = [first.participants(number) for number in range(20)]
    assert [again.participants(number) for number in reversed(range(20))] == rounds[::-1]
    assert len({tuple(chosen) for chosen in rounds}) == 20
    assert make_fleet(config, 100, seed=2).participants(0) != rounds[0]


def test_every_client_is_drawn_equally_often() -> None:
    fleet = make_fleet(DevicesConfig(clients_per_round=5), clients=20, seed=0)
    drawn = Counter(client for number in range(2000) for client in fleet.participants(number))
    expected, spread = 2000 * 5 / 20, math.sqrt(2000 * 0.25 * 0.75)
    assert len(drawn) == 20
    assert all(abs(count - expected) < 4.5 * spread for count in drawn.values())


def test_unavailable_clients_are_passed_over() -> None:
    config = DevicesConfig(capacities=[0.5, 1.0], available=[0.1, 1.0], assignment="order", clients_per_round=10)
    fleet = make_fleet(config, clients=100, seed=0)
    drawn = Counter(fleet.group_of(c, number).label for number in range(300) for c in fleet.participants(number))
    assert sum(drawn.values()) == 3000
    assert drawn["0.5"] / 3000 == pytest.approx(0.1 / 1.1, abs=0.025)


def test_a_round_may_have_fewer_participants_than_asked_or_none() -> None:
    fleet = make_fleet(DevicesConfig(available=0.2), clients=5, seed=0)
    sizes = Counter(len(fleet.participants(number)) for number in range(3000))
    for size in range(6):
        chance = math.comb(5, size) * 0.2**size * 0.8 ** (5 - size)
        assert abs(sizes[size] - 3000 * chance) < 4.5 * math.sqrt(3000 * chance) + 1


@pytest.mark.parametrize("available", [1.0, 0.5])
def test_a_million_clients_cost_nothing_until_they_are_drawn(available: float) -> None:
    fleet = make_fleet(DevicesConfig(clients_per_round=1000, available=available), clients=1_000_000, seed=0)
    assert fleet.members.nbytes <= 4_000_000
    start = time.perf_counter()
    chosen = fleet.participants(3)
    kinds = Counter(fleet.group_of(client, 3).label for client in chosen)
    assert time.perf_counter() - start < 0.2
    assert len(set(chosen)) == 1000
    assert max(chosen) > 900_000
    assert all(abs(count - 250) < 80 for count in kinds.values())


@pytest.mark.parametrize("client", [-1, 5])
def test_a_client_that_is_not_registered_has_no_group(client: int) -> None:
    with pytest.raises(IndexError, match="not among the 5 clients"):
        make_fleet(DevicesConfig(), 5, 0).group_of(client, 0)


# What it refuses


def named(*clients: int | None) -> list[GroupConfig]:
    """Named groups with these numbers of clients."""
    return [GroupConfig(name=f"g{place}", capacity=1.0, clients=count) for place, count in enumerate(clients)]


@pytest.mark.parametrize(
    "config, clients, words",
    [
        (DevicesConfig(participation=0.01), 20, "0.01 of 20 clients selects nobody; the smallest .* is 0.05"),
        (
            DevicesConfig(participation=0.1),
            3,
            "0.1 of 3 clients selects nobody; the smallest that selects one is 0.333334",
        ),
        (DevicesConfig(clients_per_round=21), 20, "given 21, but there are only 20"),
        (DevicesConfig(), 3, "0.25 of 3 clients is nobody, so no device could train 0.25"),
        (DevicesConfig(groups=named(3, 4)), 10, r"\(g0 3, g1 4\) do not add up to the 10 clients"),
        (DevicesConfig(groups=named(3, None)), 3, r"\(g0 3, g1 the rest\) do not add up to the 3 clients"),
        (DevicesConfig(groups=named(8, 4)), 10, "do not add up"),
        (DevicesConfig(assignment="group"), 10, "this data has none"),
        (DevicesConfig(distribution="exponential", capacities=[0.5, 1.0]), 10, "only train 0.125, 0.25"),
        (
            DevicesConfig(redraw="round", cover=True, clients_per_round=3),
            10,
            "3 clients a round cannot cover 4",
        ),
        (DevicesConfig(redraw="round", cover=True, available=0.5), 10, "always available"),
        (
            DevicesConfig(redraw="round", cover=True, capacities=[0.5, 1.0], fractions=[0.9999, 0.0001]),
            5,
            "in less than one of 1000 draws",
        ),
        (DevicesConfig(), 0, "at least one client; given 0"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_with_the_way_out(config: DevicesConfig, clients: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_fleet(config, clients, seed=0)


def test_the_participation_that_an_error_names_works() -> None:
    for clients in (3, 7, 20, 999):
        with pytest.raises(ConfigError) as caught:
            make_fleet(DevicesConfig(capacities=[1.0], participation=0.5 / clients), clients, 0)
        smallest = float(str(caught.value).rsplit(" ", 1)[1])
        fleet = make_fleet(DevicesConfig(capacities=[1.0], participation=smallest), clients, 0)
        assert fleet.per_round == 1


def test_all_problems_of_a_fleet_come_at_once() -> None:
    config = DevicesConfig(groups=named(3, 4), clients_per_round=50)
    with pytest.raises(ConfigError) as caught:
        make_fleet(config, clients=10, seed=0)
    assert len(str(caught.value).split("\n")) == 2


@pytest.mark.parametrize("domains, words", [([0] * 10, "1 data groups for 4"), ([0, 1], "given 2 for 10")])
def test_data_groups_that_do_not_match_are_refused(domains: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_fleet(DevicesConfig(assignment="group"), 10, 0, domains=domains)


# Budgets and time


def test_a_budget_fits_up_to_its_limit_in_every_unit() -> None:
    budget = Budget(macs=100, bytes=10)
    assert budget.fits({"macs": 100, "bytes": 10, "parameters": 1e12})
    assert not budget.fits({"macs": 101, "bytes": 1})
    assert not budget.fits({"macs": 1, "bytes": 10.5})


def test_a_budget_in_a_unit_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="limits bytes, which was not measured; measured were macs"):
        Budget(macs=1, bytes=1).fits({"macs": 1})


@pytest.mark.parametrize("limits", [{}, {"macs": 0}, {"macs": -1.0}, {"bytes": math.nan}, {"bytes": True}])
def test_a_budget_without_a_positive_limit_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="a budget"):
        Budget(**limits)


def test_budget_units_are_those_of_the_file() -> None:
    assert set(BudgetConfig.model_fields) == set(Budget(macs=1).__dataclass_fields__)


@pytest.mark.parametrize(
    "speeds, seconds",
    [
        ({}, None),
        ({"macs_per_second": 2.0}, 3.0),
        ({"bytes_per_second_down": 4.0, "bytes_per_second_up": 2.0}, 5.0 + 15.0),
        ({"macs_per_second": 2.0, "bytes_per_second_down": 4.0, "bytes_per_second_up": 2.0}, 23.0),
    ],
)
def test_virtual_time_is_receiving_computing_and_sending(speeds: dict[str, float], seconds: float | None) -> None:
    group = DeviceGroup("g", "1.0", 1.0, **speeds)  # type: ignore[arg-type]
    assert round_seconds(group, macs=6, bytes_down=20, bytes_up=30) == seconds
