"""Clients that attack: what each attack sends, who attacks, and that a robust rule withstands what breaks a mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anysize.attacks import Attack, backdoor_success, inner_product, noise, scaled
from anysize.attacks.data import TARGET
from anysize.config.tables import AdversaryConfig
from anysize.data import TensorPart
from anysize.errors import ConfigError
from anysize.methods.steps import norm_of, step_of
from anysize.runs.experiment import Experiment

SENT = {"w": torch.tensor([1.0, -1.0]), "variance": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}
LEARNED = {"w": torch.tensor([2.0, -3.0]), "variance": torch.tensor([2.0, 2.0]), "n": torch.tensor(4)}


def test_a_flipped_update_goes_backwards_but_keeps_a_variance_one_and_whole_numbers_as_they_are() -> None:
    found = scaled(SENT, LEARNED, -4.0)
    assert found["w"].tolist() == [-3.0, 7.0]
    assert found["variance"].tolist() == [0.0, 2.0]
    assert found["n"].item() == 4


def test_noise_is_as_long_as_it_is_asked_to_be() -> None:
    sent, learned = {"w": torch.full((100, 100), -1.0)}, {"w": torch.full((100, 100), -0.99)}
    found = noise(sent, learned, 3.0, torch.Generator().manual_seed(0))
    added = step_of(learned, found)
    assert norm_of(added) == pytest.approx(3.0 * norm_of(step_of(sent, learned)), rel=0.05)


def test_the_inner_product_attack_is_no_longer_than_honest_updates_and_against_their_mean() -> None:
    random = torch.Generator().manual_seed(0)
    honest = [{"w": torch.randn(50, generator=random) + 1} for _ in range(5)]
    sent = {"w": torch.randn(50, generator=random)}
    step = step_of(sent, inner_product(sent, sent, honest))
    norms = sorted(norm_of(own) for own in honest)
    assert norm_of(step) == pytest.approx(norms[2], rel=1e-5)
    mean = torch.stack([own["w"] for own in honest]).mean(0)
    assert float(nn.functional.cosine_similarity(step["w"], mean, dim=0)) == pytest.approx(-1.0, abs=1e-5)


@pytest.mark.parametrize("name", ["sign-flip", "scale", "noise", "inner-product"])
def test_every_attack_on_updates_changes_them_the_same_way_twice(name: str) -> None:
    attack = Attack(AdversaryConfig.model_validate({"name": name}), seed=0)
    assert attack.on_updates
    first, again = (attack.answer(SENT, LEARNED, (1, 2)) for _ in range(2))
    assert not torch.equal(first["w"], LEARNED["w"])
    assert torch.equal(first["w"], again["w"])


def made(**more: Any) -> Experiment:
    tables: dict[str, Any] = {"devices": {"capacities": [0.5, 1.0]}, "training": {"learning_rate": 0.05}}
    return Experiment(data="digits", clients=10, model="mlp", method="heterofl", **tables | more)


def test_attackers_of_the_largest_size_all_have_it() -> None:
    experiment = made(adversary={"name": "sign-flip", "share": 0.3, "who": "largest"})
    assert len(experiment.attackers) == 3
    assert {experiment.fleet.group_of(client, 1).capacity for client in experiment.attackers} == {1.0}


def test_flipped_labels_are_those_of_attackers_alone_and_not_of_what_they_hold_out() -> None:
    options = {"split": "iid", "validation": 0.2}
    plain, experiment = made(partition=options), made(partition=options, adversary="label-flip")
    liar = min(experiment.attackers)
    honest = next(client for client in range(10) if client not in experiment.attackers)
    own, true = experiment.shares.share(liar), plain.shares.share(liar)
    assert torch.equal(own.train.labels(), 9 - true.train.labels())
    index = torch.tensor([0, 3])
    assert torch.equal(own.train.batch(index)[1], 9 - true.train.batch(index)[1])
    assert torch.equal(own.held_out.labels(), true.held_out.labels())
    assert torch.equal(experiment.shares.share(honest).train.labels(), plain.shares.share(honest).train.labels())


def test_half_of_an_attackers_pictures_carry_the_trigger_and_its_class() -> None:
    experiment = made(adversary="backdoor")
    part = experiment.shares.share(min(experiment.attackers)).train
    x, y = part.batch(torch.arange(10))
    white = 255 if x.dtype == torch.uint8 else 1.0
    stamped = (x[..., -3:, -3:] == white).flatten(1).all(1)
    assert stamped.tolist() == [True, False] * 5
    assert set(y[::2].tolist()) == {TARGET}
    assert torch.equal(part.labels()[:10], y)


def test_the_success_of_a_backdoor_is_the_share_of_other_classes_that_it_turns() -> None:
    class Triggered(nn.Module):
        """Says 0 for a white corner, else 1."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            white = (x[..., -1, -1] > 0.99).float().amax(1)
            return torch.stack([white, 1 - white], 1)

    part = TensorPart(torch.zeros(4, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1, 1, 1]))
    assert backdoor_success(Triggered(), part) == 1.0
    always = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    nn.init.zeros_(always[1].weight)
    always[1].bias.data = torch.tensor([0.0, 1.0])
    assert backdoor_success(always, part) == 0.0


@pytest.mark.parametrize(
    "tables, words",
    [
        ({"task": "regression", "adversary": "label-flip"}, "one class for each sample"),
        ({"adversary": {"name": "backdoor", "strength": 2.0}}, "does not use it"),
        ({"adversary": {"name": "scale", "who": "largest"}, "devices": {"capacities": [0.5, 1.0], "redraw": "round"}},
         "fixed capacities"),
    ],
)  # fmt: skip
def test_an_attack_that_is_impossible_is_refused_by_name(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _ = made(**tables).shares.share(0), made(**tables).attackers


def test_with_its_rule_a_run_withstands_attackers_that_break_the_mean(tmp_path: Path) -> None:
    common: dict[str, Any] = {"rounds": 8, "evaluate_every": 8, "engine": "inprocess", "adversary": "sign-flip"}
    found = {}
    for rule in ("mean", "median"):
        run = made(**common, aggregation=rule).run(tmp_path / rule)
        found[rule] = run.history[-1]["accuracy"]["1.0"]
        start = json.loads((tmp_path / rule / "events.jsonl").read_text().splitlines()[0])
        assert any('2 of 10 clients attack: "sign-flip"' in notice for notice in start["notices"])
    assert found["median"] > found["mean"] + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inner-product", "label-flip", "noise"])
def test_workers_attack_with_the_same_bits(name: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {"rounds": 2, "evaluate_every": 2, "adversary": name, "aggregation": "norm-clip"}
    here = made(**common, engine="inprocess").run(tmp_path / "here").history[-1]
    there = made(**common, engine={"name": "processes", "workers": 2}).run(tmp_path / "there").history[-1]
    assert here["accuracy"] == there["accuracy"]
