"""Secure aggregation in a simulation: the same network within the fixed point, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import small
from anysize import config as configs
from anysize.errors import ConfigError
from anysize.experiment.plan import plan
from anysize.runs.experiment import Experiment
from anysize.runs.runner import run
from anysize.wire import flatten

SECURE: dict[str, Any] = {"aggregation": {"secure_threshold": 3}}


def tables(case: str = "heterofl", **more: Any) -> dict[str, Any]:
    """A small simulation: ten clients of two sizes, which all take part; no norm layers."""
    name = case.partition(",")[0]
    found: dict[str, Any] = {
        "name": "secure",
        "rounds": 2,
        "evaluate_every": 2,
        "data": {"name": "digits", "clients": 10, "fraction": 0.3},
        "model": {"name": "mlp", "options": {"hidden": [16]}},
        "devices": {"capacities": [0.5, 1.0]},
        "method": {"name": name} | small.METHODS.get(case, {}),
        "tricks": {"classwise_head": False},
        "training": {"learning_rate": 0.05},
        "engine": {"name": "inprocess"},
    }
    if name in ("splitmix", "prism", "fedhm") or "products" in case:
        found["model"] = {"name": "small-cnn", "options": {"channels": [4, 8]}}
        found["tricks"]["batch_norm"] = "tracked"
    for key, value in more.items():
        found[key] = {**found.get(key, {}), **value}
    return found


def experiment(case: str = "heterofl", **more: Any) -> Experiment:
    return Experiment.from_config(configs.from_dict(tables(case, **more)))


@pytest.mark.parametrize("case", ["fedavg", "heterofl", "sheterofl", "ladder", "fjord", "flanc", "origdrop"])
@pytest.mark.parametrize("weighting", ["clients", "samples"])
def test_a_run_with_sums_is_the_run_without_within_the_fixed_point(tmp_path: Path, case: str, weighting: str) -> None:
    more = {"tricks": {"weighting": weighting}}
    plain = run(experiment(case, **more), out=tmp_path / "plain")
    summed = run(experiment(case, **more, **SECURE), out=tmp_path / "summed")
    one, other = flatten(plain.state)[0], flatten(summed.state)[0]
    assert any(not torch.equal(one[name], other[name]) for name in one)  # the fixed point shows, a little
    for name, tensor in one.items():
        assert torch.allclose(tensor, other[name], rtol=1e-5, atol=2e-6), name
    for before, after in zip(plain.history, summed.history):
        if weighting == "samples":  # without, the server does not learn the numbers of samples, and losses count alike
            assert after["train_loss"] == pytest.approx(before["train_loss"], rel=1e-4)
        assert sorted(c["client"] for c in after["clients"]) == sorted(c["client"] for c in before["clients"])
        assert {(c["loss"], c["samples"]) for c in after["clients"]} == {(None, None)}
        assert "missing" not in after
        assert after["bytes_up"] > 1.5 * before["bytes_up"]  # eight bytes for four


def test_batch_norm_statistics_that_travel_with_the_weights_are_summed_too(tmp_path: Path) -> None:
    net = {"model": {"name": "small-cnn", "options": {"channels": [4, 8]}}, "tricks": {"batch_norm": "tracked"}}
    plain = run(experiment(**net), out=tmp_path / "plain")
    summed = run(experiment(**net, **SECURE), out=tmp_path / "summed")
    one, other = flatten(plain.state)[0], flatten(summed.state)[0]
    statistics = [name for name in one if "running_" in name]
    assert statistics
    for name in one:
        if one[name].is_floating_point():
            assert torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-5), name


def test_a_size_with_too_few_clients_learns_nothing_and_says_why(tmp_path: Path) -> None:
    groups = [{"name": "small", "clients": 8, "capacity": 0.5}, {"name": "large", "clients": 2, "capacity": 1.0}]
    more = {"devices": {"groups": groups, "assignment": "order", "capacities": None}}
    values = tables(**more, **SECURE)
    del values["devices"]["capacities"]
    made = Experiment.from_config(configs.from_dict(values))
    planned = plan(made)["secure"]
    assert [(own["clients"], own["enough"]) for own in planned["sizes"]] == [(8, True), (2, False)]
    done = run(made, out=tmp_path / "run")
    for event in done.history:
        assert {entry["client"] for entry in event["missing"]} == {8, 9}
        assert {entry["why"] for entry in event["missing"]} == {
            "2 clients of its size took part, and a sum that hides each needs 3"
        }
    first = made.method.init(made.context).tensors
    after = done.state.tensors
    moved = {name: (after[name] != first[name]) for name in first}
    assert any(bool(own.any()) for own in moved.values())
    wide = max(moved, key=lambda name: moved[name].numel())
    assert not moved[wide][moved[wide].shape[0] // 2 :].any()  # what only the large size holds


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("splitmix", "splitmix draws anew what each client of a size gets"),
        ("prism, all channels", "prism draws anew what each client of a size gets"),
        ("fedhm", "fedhm with these options needs each client's update"),
        ("flanc, products", "flanc with these options needs each client's update"),
    ],
)
def test_methods_that_sums_are_not_enough_for_are_refused_by_name(tmp_path: Path, case: str, why: str) -> None:
    more = {"method": {"average": "products"}} if "products" in case else {}
    made = experiment(case, **more, **SECURE)
    for refused in (lambda: plan(made), lambda: run(made, out=tmp_path / "run")):
        with pytest.raises(ConfigError, match=f"aggregation.secure_threshold: {why}"):
            refused()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tricks": {"classwise_head": True}}, "a single client has would be told alone"),
        ({"communication": {"update": "int8"}}, "nothing that can be summed"),
        ({"evaluation": {"on": ["clients"]}, "data": {"validation": 0.2}}, "each client would tell its own metrics"),
        (
            {"model": {"name": "small-cnn", "options": {"channels": [4, 8]}}, "tricks": {"batch_norm": "batch"}},
            "each client would tell its own batch-norm statistics",
        ),
        ({"privacy": {"clip": 1.0}, "tricks": {"weighting": "clients"}}, "cuts single updates on the server"),
    ],
)
def test_what_would_tell_of_a_single_client_is_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"aggregation.secure_threshold: .*{why}"):
        plan(experiment(**more, **SECURE))


@pytest.mark.parametrize("rule", ["median", "krum", "norm-clip", "norm-filter"])
def test_rules_that_compare_updates_are_refused(rule: str) -> None:
    with pytest.raises(ConfigError, match="which compares single updates"):
        experiment(aggregation={"secure_threshold": 3, "rule": rule})


def test_the_plan_says_what_leaves_a_device_and_what_it_costs() -> None:
    before, after = (
        plan(experiment(tricks={"weighting": "samples"})),
        plan(experiment(tricks={"weighting": "samples"}, **SECURE)),
    )
    assert before["secure"] is None
    assert after["secure"]["threshold"] == 3
    told = after["leaves_the_device"]
    assert len(told) == 2
    assert told[0].startswith("masked, so that the server learns the sum over at least 3 clients of its size alone")
    assert told[0].endswith("its training loss and its number of samples")
    assert 1.5 < after["groups"][0]["bytes_up"] / before["groups"][0]["bytes_up"] < 2
