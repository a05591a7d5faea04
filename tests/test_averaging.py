"""Rules of aggregation against numpy, on sub-models of unequal size; their laws; and what they stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anysize import config as configs
from anysize.config.tables import AggregationConfig
from anysize.elastic.norm import Statistics, merge
from anysize.engines.inprocess import InProcess
from anysize.errors import ConfigError
from anysize.experiment.plan import plan
from anysize.experiment.robust import first_round
from anysize.methods import FLANC, FedHM, FjORD, HeteroFL, Method, PriSM, SHeteroFL, SplitMix, StreamingMean
from anysize.methods.averaging import HeldAverage, averaging, patterns, stands
from anysize.methods.mean import Rows
from anysize.methods.messages import Ticket, Update
from anysize.methods.steps import clipped
from anysize.runs.experiment import Experiment
from anysize.server.clipping import FAR, norm_clipped, norm_filtered
from anysize.server.round import run_round
from anysize.testing import LAWS, make_trial

RULES = ("median", "trimmed-mean", "krum", "geometric-median")


@dataclass
class Sent:
    """What a client sent of one tensor: where, the values, and which of these count."""

    at: tuple[np.ndarray, ...]
    values: np.ndarray
    holds: np.ndarray


def drawn(dice: np.random.Generator, shape: Sequence[int], clients: int) -> list[Sent]:
    """Clients that hold prefixes or any index sets of a tensor, some with holes."""
    found = []
    for _ in range(clients):
        prefix = dice.random() < 0.5
        at = tuple(
            np.arange(dice.integers(1, n + 1)) if prefix else np.sort(dice.permutation(n)[: dice.integers(1, n + 1)])
            for n in shape
        )
        size = tuple(len(own) for own in at)
        found.append(Sent(at, dice.normal(size=size), dice.random(size) < 0.9))
    return found


def by_numpy(rule: str, before: dict[str, np.ndarray], sent: dict[str, list[Sent]], share: float) -> dict[str, Any]:
    """The rule, entry by entry and client by client, straight from its definition."""
    clients = len(next(iter(sent.values())))
    full = {name: np.full((clients, *old.shape), np.nan) for name, old in before.items()}
    for name, own in sent.items():
        for i, one in enumerate(own):
            full[name][i][np.ix_(*one.at)] = np.where(one.holds, one.values, np.nan)
    flat = np.concatenate([full[name].reshape(clients, -1) for name in before], axis=1)
    old = np.concatenate([before[name].reshape(-1) for name in before])
    after = old.copy()
    blocks: dict[tuple[int, ...], list[int]] = {}
    for entry in range(flat.shape[1]):
        blocks.setdefault(tuple(np.flatnonzero(~np.isnan(flat[:, entry]))), []).append(entry)
    for holders, entries in blocks.items():
        if holders:
            after[entries] = of_block(rule, flat[np.ix_(holders, entries)], share)
    split = np.split(after, np.cumsum([own.size for own in before.values()])[:-1])
    return {name: part.reshape(before[name].shape) for name, part in zip(before, split)}


def of_block(rule: str, x: np.ndarray, share: float) -> np.ndarray:
    count = len(x)
    f = int(np.ceil(share * count - 1e-9))
    if rule == "median":
        return np.median(x, axis=0)
    if rule == "trimmed-mean":
        f = min(f, (count - 1) // 2)
        return np.sort(x, axis=0)[f : count - f].mean(axis=0)
    if rule == "krum":
        f = max(0, min(f, (count - 3) // 2))
        if f == 0:
            return x.mean(axis=0)
        distances = ((x[:, None] - x[None]) ** 2).sum(axis=2)
        scores = [np.sort(np.delete(distances[i], i))[: count - f - 2].sum() for i in range(count)]
        return x[np.argsort(scores)[: count - f]].mean(axis=0)
    middle = x.mean(axis=0)
    for _ in range(3_000):
        weights = 1 / np.maximum(np.linalg.norm(x - middle, axis=1), 1e-9)
        middle = weights @ x / weights.sum()
    return middle


def averaged(
    rule: str, before: dict[str, np.ndarray], sent: dict[str, list[Sent]], order: Sequence[int] | None = None
) -> dict[str, Tensor]:
    average = averaging(AggregationConfig.model_validate({"rule": rule}))(
        {name: torch.from_numpy(old) for name, old in before.items()}, {}
    )
    clients = len(next(iter(sent.values())))
    for i in order if order is not None else range(clients):
        own = {name: every[i] for name, every in sent.items()}
        average.add(
            {name: torch.from_numpy(one.values) for name, one in own.items()},
            float(i + 1),  # a weight that no rule may use
            {name: tuple(map(torch.from_numpy, one.at)) for name, one in own.items()},
            held={name: torch.from_numpy(one.holds) for name, one in own.items()},
        )
    return average.result()


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum"])
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(0, 9999))
def test_a_rule_over_sub_models_of_any_form_is_numpys(rule: str, clients: int, seed: int) -> None:
    dice = np.random.default_rng(seed)
    shapes = {"w": (4, 3), "b": (5,)}
    before = {name: dice.normal(size=shape) for name, shape in shapes.items()}
    sent = {name: drawn(dice, shape, clients) for name, shape in shapes.items()}
    expected = by_numpy(rule, before, sent, 0.2)
    for name, found in averaged(rule, before, sent).items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_the_geometric_median_of_nested_sub_models_is_numpys(seed: int) -> None:
    dice = np.random.default_rng(seed)
    before = {"w": dice.normal(size=(6, 4)), "b": dice.normal(size=6)}
    widths = [6, 6, 6, 3, 3, 3, 3]
    sent = {
        name: [Sent((np.arange(w), *map(np.arange, old.shape[1:])), x, np.ones(x.shape, bool)) for w, x in own]
        for name, old in before.items()
        for own in [[(w, dice.normal(size=(w, *old.shape[1:]))) for w in widths]]
    }
    expected = by_numpy("geometric-median", before, sent, 0.2)
    for name, found in averaged("geometric-median", before, sent).items():
        np.testing.assert_allclose(found, expected[name], atol=1e-4)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 8), st.integers(0, 9999))
def test_the_order_of_clients_does_not_matter(rule: str, clients: int, seed: int) -> None:
    dice = np.random.default_rng(seed)
    before = {"w": dice.normal(size=(4, 3))}
    sent = {"w": drawn(dice, (4, 3), clients)}
    found, other = averaged(rule, before, sent), averaged(rule, before, sent, list(dice.permutation(clients)))
    torch.testing.assert_close(found["w"], other["w"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_clients_that_agree_give_what_they_say_bit_for_bit(rule: str) -> None:
    old, new = torch.zeros(5, 3), torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    average = HeldAverage({"w": old, "idle": old}, rule=rule, attackers=0.2)
    for rows in (5, 5, 3, 3, 3, 2, 2):
        average.add({"w": new[:rows]}, 1.0, {"w": (torch.arange(rows), None)})
    assert torch.equal(average.result()["w"], new)
    assert average.result()["idle"] is old


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("holders", [5, 8, 20])
def test_as_many_attackers_as_are_promised_cannot_move_an_entry_away(rule: str, holders: int) -> None:
    lying = stands(rule, holders, 0.2)
    assert lying >= 1
    dice = np.random.default_rng(holders)
    honest = torch.from_numpy(dice.normal(size=(holders - lying, 6)))
    average = HeldAverage({"w": torch.zeros(6, dtype=torch.float64)}, rule=rule, attackers=0.2)
    for values in (*honest, *torch.full((lying, 6), 1e8, dtype=torch.float64)):
        average.add({"w": values}, 1.0)
    # The least sum of distances may lie outside the range of the honest, but not far.
    reach = float(honest.abs().max()) * (20 if rule == "geometric-median" else 1)
    assert float(average.result()["w"].abs().max()) <= reach


def test_an_attacker_that_comes_first_does_not_take_the_digits_of_the_others() -> None:
    dice = np.random.default_rng(0)
    honest = dice.normal(scale=1e-3, size=(4, 50)).astype("f4")
    average = HeldAverage({"w": torch.zeros(50)}, rule="krum", attackers=0.2)
    for values in (np.full(50, 1e9, "f4"), *honest):
        average.add({"w": torch.from_numpy(values)}, 1.0)
    np.testing.assert_allclose(average.result()["w"], honest.mean(axis=0), atol=1e-9)


@pytest.mark.parametrize("rule", ["norm-clip", "norm-filter"])
def test_what_a_device_claims_to_have_is_no_weight_under_a_rule_that_bounds_it(rule: str) -> None:
    def fleet(weighting: str) -> Experiment:
        tables: dict[str, Any] = {
            "data": {"name": "devices"},
            "model": {"name": "mlp", "input": [1, 8, 8], "options": {"hidden": [16]}},
            "task": {"classes": 10},
            "method": {"name": "heterofl"},
            "devices": {"capacities": [0.5, 1.0], "share": ["samples"]},
            "tricks": {"weighting": weighting, "classwise_head": False},
            "aggregation": {"rule": rule},
        }
        return Experiment.from_config(configs.from_dict(tables))

    with pytest.raises(ConfigError, match=r"number of samples is a claim.*weighting = \"clients\""):
        plan(fleet("samples"))
    assert plan(fleet("clients"))


def test_liars_that_hardly_move_pull_the_bound_down_to_an_honest_update_unless_they_are_half() -> None:
    honest = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    for liars, bound in ((2, 1.1), (4, 1.0), (6, 0.0)):
        updates = [update(place, "1.0", w=[norm]) for place, norm in enumerate([*honest, *[0.0] * liars])]
        sent = {place: {"w": torch.zeros(1)} for place in range(len(updates))}
        out: list[Any] = []
        kept = list(norm_filtered(updates, sent, None, out.append))
        assert max(float(one.tensors["w"]) for one in kept) == pytest.approx(bound)
        assert len(out) == (6 if liars == 6 else 0)


def test_a_row_of_the_classifier_is_decided_by_those_who_have_its_class() -> None:
    average = HeldAverage({"head": torch.zeros(2, 1)}, {"head": 0}, rule="median", attackers=0.2)
    for value, classes in ((1.0, [1, 0]), (2.0, [1, 1]), (9.0, [1, 0])):
        average.add({"head": torch.full((2, 1), value)}, 1.0, classes=torch.tensor(classes))
    assert average.result()["head"].tolist() == [[2.0], [2.0]]


def test_counters_get_the_lower_median_instead_of_a_lie() -> None:
    average = HeldAverage({"n": torch.tensor(4)}, rule="krum", attackers=0.2)
    for seen in (6, 5, 10**9):
        average.add({"n": torch.tensor(seen)}, 1.0)
    assert average.result()["n"].item() == 6


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 150), st.integers(1, 30), st.integers(0, 9999))
def test_entries_are_in_one_block_if_and_only_if_the_same_clients_hold_them(
    clients: int, entries: int, seed: int
) -> None:
    kinds = np.random.default_rng(seed).random((clients, 4)) < 0.5
    holds = kinds[:, np.random.default_rng(seed + 1).integers(0, 4, entries)]
    found = patterns(torch.from_numpy(holds)).numpy()
    equal = (holds[:, :, None] == holds[:, None]).all(axis=0)
    assert np.array_equal(found[:, None] == found[None], equal)


def test_the_mean_is_the_streaming_one_whatever_the_attackers() -> None:
    assert averaging(AggregationConfig(attackers=0.4)) is StreamingMean


METHODS: list[Method[Any]] = [HeteroFL(), FjORD(), SHeteroFL(), SplitMix(), FLANC(), PriSM(), FedHM()]
FAST = ((HeteroFL, "krum"), (FLANC, "median"), (PriSM, "trimmed-mean"), (SplitMix, "geometric-median"))


@pytest.mark.parametrize(
    "method, rule",
    [
        pytest.param(
            method,
            rule,
            id=f"{type(method).__name__}-{rule}",
            marks=[] if (type(method), rule) in FAST else [pytest.mark.slow],
        )
        for method in METHODS
        for rule in RULES
    ],
)
def test_every_method_keeps_the_laws_of_aggregating_under_every_rule(method: Method[Any], rule: str) -> None:
    trial = make_trial(method, None, (0.25, 0.5, 1.0), None)
    context = replace(trial.context, aggregation=AggregationConfig.model_validate({"rule": rule}))
    trial = replace(trial, context=context)
    asked = ("unchanged_updates", "order_of_clients", "scale_of_weights", "inputs_untouched", "updates_stream_once")
    more = ("training_changes_something", "misfits_are_refused")
    problems = {law: LAWS[law](trial) for law in (*asked, *more) if law not in method.exceptions}
    assert not {law: problem for law, problem in problems.items() if problem is not None}


# Norms


def update(client: int, size: str, **tensors: list[float]) -> Update:
    ticket = Ticket(client=client, round=1, seed=0, size=size, width=1.0)
    return Update({name: torch.tensor(values) for name, values in tensors.items()}, ticket)


def test_updates_are_cut_to_the_median_norm_of_their_own_size() -> None:
    sent = {i: {"w": torch.ones(2)} for i in range(5)}
    lengths = [1.0, 2.0, 100.0, 7.0, 8.0]
    sizes = ["small", "small", "small", "large", "large"]
    updates = [update(i, size, w=[1 + length, 1.0]) for i, (size, length) in enumerate(zip(sizes, lengths))]
    found = [float(u.tensors["w"][0]) - 1 for u in norm_clipped(updates, sent, None)]
    assert found == pytest.approx([1.0, 2.0, 2.0, 7.0, 7.5])


def test_with_a_given_bound_updates_stream() -> None:
    drawn = []

    def stream() -> Any:
        for i in range(2):
            drawn.append(i)
            yield update(i, "1.0", w=[30.0, 40.0])

    first = next(norm_clipped(stream(), {0: {"w": torch.zeros(2)}, 1: {"w": torch.zeros(2)}}, 5.0))
    assert first.tensors["w"].tolist() == pytest.approx([3.0, 4.0])
    assert drawn == [0]


def filtered(
    sizes: list[str], lengths: list[float], most: float | None = None
) -> tuple[dict[int, float], dict[int, str]]:
    """By client, how far the updates that are left move, and why others are left out."""
    sent = {i: {"w": torch.ones(2)} for i in range(len(lengths))}
    updates = [update(i, size, w=[1 + length, 1.0]) for i, (size, length) in enumerate(zip(sizes, lengths))]
    out: dict[int, str] = {}
    kept = norm_filtered(updates, sent, most, lambda absence: out.update({absence.client: absence.why}))
    return {u.ticket.client: float(u.tensors["w"][0]) - 1 for u in kept}, out


def test_updates_are_held_against_the_median_of_all_sizes_and_the_far_ones_left_out() -> None:
    """By hand: the median of 1, 2, 3, 5, 8 and 40 is the lower of 3 and 5; of 8 it is 2.7 times as far."""
    kept, out = filtered(["small", "small", "large", "large", "large", "small"], [1.0, 2.0, 3.0, 5.0, 8.0, 40.0])
    assert kept == pytest.approx({0: 1.0, 1: 2.0, 2: 3.0, 3: 3.0})
    assert out == {
        4: "left out: its update moved 2.67 times as far as the round's bound",
        5: "left out: its update moved 13.3 times as far as the round's bound",
    }


def test_half_of_a_round_and_all_of_a_size_may_be_attackers() -> None:
    """The only client of a size is left out if it goes far; clipping by size would take it for its own measure."""
    honest, lies = [1.0, 1.1, 0.9], [4.0, 4.4, 3.6]
    kept, out = filtered(["0.5"] * 3 + ["1.0"] * 3, honest + lies)
    assert sorted(kept) == [0, 1, 2]
    assert sorted(out) == [3, 4, 5]
    sent = {i: {"w": torch.ones(2)} for i in range(6)}
    by_size = norm_clipped([update(i, "x" if i else "y", w=[9.0, 1.0]) for i in range(2)], sent, None)
    assert [float(u.tensors["w"][0]) for u in by_size] == [9.0, 9.0]


def test_a_given_bound_filters_without_holding_updates() -> None:
    kept, out = filtered(["a"] * 3, [0.5, 2.0, 2.1], 1.0)
    assert kept == pytest.approx({0: 0.5, 1: 1.0})
    assert list(out) == [2]
    assert FAR == 2.0
    kept, out = filtered(["a"] * 3, [0.0, 0.0, 0.1])
    assert kept == {0: 0.0, 1: 0.0}
    assert out == {2: "left out: its update moved further than the round's bound"}
    assert filtered([], []) == ({}, {})


def test_an_update_that_is_no_number_has_no_say_in_the_bound() -> None:
    kept, out = filtered(["a"] * 4, [1.0, math.nan, 1.2, 1.1])
    assert {client: length for client, length in kept.items() if client != 1} == pytest.approx({0: 1.0, 2: 1.1, 3: 1.1})
    assert math.isnan(kept[1])  # what takes the updates refuses it
    assert not out


def test_a_round_goes_on_without_those_that_were_left_out_and_says_who_they_are(tmp_path: Path) -> None:
    """With a bound that no honest client reaches, the state is that of a round without the attackers, bit for bit."""
    tables: dict[str, Any] = {"rounds": 1, "engine": "inprocess", "training": {"local_steps": 3}}
    attack = {"name": "sign-flip", "strength": 1e4}
    made = experiment("heterofl", aggregation={"rule": "norm-filter", "norm": 10.0}, adversary=attack, **tables)
    done = made.run(tmp_path / "run")
    (event,) = done.history
    assert {entry["client"] for entry in event["missing"]} == made.attackers
    assert {entry["client"] for entry in event["clients"]} == set(range(8)) - made.attackers
    assert all("times as far as the round's bound" in entry["why"] for entry in event["missing"])
    assert not event.get("void")
    plain = experiment("heterofl", **tables)
    clients = [c for c in first_round(plain) if c.id not in made.attackers]
    engine = InProcess(plain.context, plain.method, plain.shares, {})
    rate = plain.config.training.rate(0, 1)
    state, _ = run_round(plain.context, plain.method, plain.method.init(plain.context), clients, engine, rate)
    for name, tensor in state.tensors.items():
        assert torch.allclose(tensor, done.state.tensors[name], atol=1e-6), name


def test_an_update_within_the_bound_keeps_its_bits_and_whole_numbers_their_values() -> None:
    sent = {"w": torch.tensor([0.1]), "n": torch.tensor(3)}
    near = {"w": torch.tensor([0.3]), "n": torch.tensor(9)}
    assert torch.equal(clipped(sent, near, 1.0)["w"], near["w"])
    far = clipped(sent, {"w": torch.tensor([5.1]), "n": torch.tensor(9)}, 1.0)
    assert far["w"].item() == pytest.approx(1.1)
    assert far["n"].item() == 9


def test_one_clients_false_statistics_do_not_move_those_of_the_others() -> None:
    def of(mean: float, variance: float) -> Statistics:
        return Statistics((torch.tensor([mean]),), (torch.tensor([variance]),), (10.0,))

    honest = [of(0.9, 1.0), of(1.0, 1.1), of(1.1, 1.2), of(1.0, 1.1)]
    found = merge([*honest, of(1e15, 1e30)], cut=1)
    assert found.means[0].item() == pytest.approx((1.0 + 1.0 + 1.1) / 3)
    assert 1.0 < found.variances[0].item() < 1.3


# Plans and refusals


def experiment(method: Any, **more: Any) -> Experiment:
    tables: dict[str, Any] = {"devices": {"capacities": [0.5, 1.0]}, "model": {"name": "mlp"}} | more
    return Experiment(data="digits", clients=8, method=method, **tables)


def test_a_plan_says_how_many_attackers_each_size_stands() -> None:
    made = plan(experiment("heterofl", aggregation="trimmed-mean", devices={"capacities": [0.5, 1.0]}))
    about = made["aggregation"]
    assert about["sizes"] == [
        {"size": "0.5", "holders": 8, "stands": 2},
        {"size": "1.0", "holders": 4, "stands": 1},
    ]
    assert about["clients"] == 8
    assert about["held_bytes"] > 0
    assert plan(experiment("heterofl"))["aggregation"] is None


def test_what_a_width_owns_is_held_by_its_clients_alone() -> None:
    about = plan(experiment("flanc", aggregation="median"))["aggregation"]
    assert {row["size"]: row["holders"] for row in about["sizes"]} == {"0.5": 4, "1.0": 4}


def test_clipping_with_a_bound_holds_nothing() -> None:
    for rule in ("norm-clip", "norm-filter"):
        about = plan(experiment("heterofl", aggregation={"rule": rule, "norm": 1.0}))["aggregation"]
        assert about["held_bytes"] == 0
        assert about["sizes"] == []
        assert plan(experiment("heterofl", aggregation=rule))["aggregation"]["held_bytes"] > 0


def test_a_notice_says_when_filtering_takes_many_samples_for_an_attack() -> None:
    words = "all clients train about the same number of steps"
    assert any(words in notice for notice in experiment("heterofl", aggregation="norm-filter").notices())
    steady = experiment("heterofl", aggregation="norm-filter", training={"local_steps": 3})
    assert not any(words in notice for notice in steady.notices())


class Lonely(HeteroFL):
    """Averages by itself."""

    def aggregate(self, context: Any, state: Any, updates: Any) -> Any:
        return super().aggregate(replace(context, averages=StreamingMean), state, updates)


def test_a_method_that_averages_by_itself_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"median.*Lonely does not average"):
        plan(experiment(Lonely(), aggregation="median"))


def test_a_method_that_counts_a_client_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="several times"):
        plan(experiment(FLANC(ordered_dropout=True), aggregation="median"))


KINDS = ("whole", "prefix", "rows", "gathered", "classes", "masked")


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_the_mean_is_that_of_every_entrys_holders_in_whatever_way_clients_hold_it(kinds: list[str], seed: int) -> None:
    random = np.random.default_rng(seed)
    old = random.normal(size=(6, 5, 3)).astype(np.float32)
    mean = StreamingMean({"w": torch.from_numpy(old)}, {"w": 0})
    total, weights = np.zeros(old.shape), np.zeros(old.shape)
    for kind in kinds:
        weight, holds, classes, held = float(random.integers(1, 5)), np.ones(old.shape), None, None
        axes: list[np.ndarray | None] = [None, None, None]
        if kind in ("prefix", "rows"):
            axes[0] = np.arange(random.integers(1, 7))
        if kind == "prefix":
            axes[1] = np.arange(random.integers(1, 6))
        if kind == "gathered":
            axes[0] = np.sort(random.choice(6, random.integers(1, 7), replace=False))
        places = np.ix_(*(np.arange(n) if own is None else own for n, own in zip(old.shape, axes, strict=True)))
        sent = random.normal(size=old[places].shape).astype(np.float32)
        if kind == "classes":
            present = random.integers(0, 2, size=6)
            classes, holds = torch.from_numpy(present), holds * present[:, None, None]
        if kind == "masked":
            holds = random.integers(0, 2, size=old.shape).astype(np.float64)
            held = {"w": torch.from_numpy(holds.astype(np.float32))}
        index = {"w": tuple(None if own is None else torch.from_numpy(own) for own in axes)}
        mean.add({"w": torch.from_numpy(sent)}, weight, index, classes, held)
        total[places] += weight * holds[places] * sent
        weights[places] += weight * holds[places]
    expected = np.where(weights > 0, total / np.maximum(weights, 1), old)
    np.testing.assert_allclose(mean.result()["w"].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_single_entry_that_the_first_client_does_not_hold_keeps_its_value() -> None:
    one, other = torch.tensor([9.0]), torch.tensor([3.0])
    masked, headed, unweighted = (StreamingMean({"w": torch.ones(1)}, {"w": 0}) for _ in range(3))
    masked.add({"w": one}, 1.0, held={"w": torch.tensor([0])})
    headed.add({"w": one}, 1.0, classes=torch.tensor([0.0]))
    unweighted.add({"w": one}, 0.0)
    for mean in (masked, headed, unweighted):
        assert mean.result()["w"].tolist() == [1.0]
        mean.add({"w": other}, 1.0)
        assert mean.result()["w"].tolist() == [3.0]


def test_weights_of_prefixes_take_a_row_for_each_width_and_no_more() -> None:
    mean = StreamingMean({"w": torch.zeros(64, 64)})
    for part in (64, 32, 16, 32, 64):
        prefix = torch.arange(part)
        mean.add({"w": torch.ones(part, part)}, 1.0, {"w": (prefix, prefix) if part < 64 else (None, None)})
    held = mean._weight["w"]
    assert isinstance(held, Rows)
    assert held._weight.shape == (3, 64)
    assert mean.result()["w"].equal(torch.ones(64, 64))
