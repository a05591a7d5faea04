"""Differential privacy of clients: the accountant, the mechanism, what is refused, and a membership attack."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anysize.attacks import membership_advantage
from anysize.data import TensorPart
from anysize.errors import ConfigError
from anysize.experiment.plan import plan
from anysize.experiment.privacy import epsilon, mechanism, spent
from anysize.methods import FLANC, FedHM, SplitMix
from anysize.methods.private import Mechanism, NoisySum, Quantile
from anysize.runs.experiment import Experiment
from anysize.wire import flatten

create_accountant = pytest.importorskip("opacus").accountants.create_accountant


def gaussian_epsilon(noise: float, rounds: int, delta: float) -> float:
    """The epsilon of composed Gaussian mechanisms by its closed form (Balle and Wang 2018)."""
    mu = math.sqrt(rounds) / noise

    def phi(value: float) -> float:
        return 0.5 * math.erfc(-value / math.sqrt(2))

    low, high = 0.0, 200.0
    for _ in range(200):
        middle = (low + high) / 2
        fails = phi(mu / 2 - middle / mu) - math.exp(middle) * phi(-mu / 2 - middle / mu)
        low, high = (middle, high) if fails > delta else (low, middle)
    return high


@pytest.mark.parametrize("noise, rounds", [(1.0, 1), (4.0, 10), (2.0, 40), (8.0, 100)])
def test_without_sampling_the_accountant_bounds_the_exact_gaussian_closely(noise: float, rounds: int) -> None:
    exact = gaussian_epsilon(noise, rounds, 1e-5)
    assert exact <= epsilon(noise, 1.0, rounds, 1e-5) <= 1.25 * exact


def test_the_accountant_gives_what_is_known_of_sampled_rounds() -> None:
    # Abadi et al. 2016: q = 0.01, z = 4, 10,000 steps, delta = 1e-5 give 1.26 by the moments accountant.
    assert epsilon(4.0, 0.01, 10_000, 1e-5) == pytest.approx(1.26, abs=0.27)
    found = [epsilon(1.0, q, 40, 1e-5) for q in (0.01, 0.1, 0.4, 1.0)]
    assert found == sorted(found)


@pytest.mark.parametrize(
    "noise, sampling, rounds", [(1.0, 0.1, 100), (0.8, 0.01, 2000), (4.0, 1.0, 10), (2.0, 0.3, 40)]
)
def test_the_accountant_is_opacus_own_and_no_tighter_than_numerical_composition(
    noise: float, sampling: float, rounds: int
) -> None:
    found = epsilon(noise, sampling, rounds, 1e-5)
    theirs = {}
    for name in ("rdp", "prv"):
        accountant = create_accountant(name)
        accountant.history = [(noise, sampling, rounds)]
        theirs[name] = accountant.get_epsilon(delta=1e-5)
    assert found <= theirs["rdp"] * (1 + 1e-9)  # ours has a few orders more
    assert found == pytest.approx(theirs["rdp"], rel=0.02)
    assert theirs["prv"] - 0.02 <= found <= 1.4 * theirs["prv"]  # its error is at most 0.01 either way


@pytest.mark.parametrize("noise, sampling", [(1.0, 0.1), (0.7, 0.5), (2.0, 0.9), (0.5, 0.01)])
def test_one_sampled_round_is_bounded_by_the_accountant(noise: float, sampling: float) -> None:
    """The exact delta of (1 - q) N(0, z) + q N(1, z) against N(0, z), in both directions, by a sum over a fine grid."""
    x = np.linspace(-40 * noise, 1 + 40 * noise, 2_000_001)
    without = np.exp(-(x**2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
    shifted = np.exp(-((x - 1) ** 2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
    taking_part = (1 - sampling) * without + sampling * shifted

    def delta(found: float) -> float:
        pairs = ((taking_part, without), (without, taking_part))
        return max(float(np.maximum(p - math.exp(found) * q, 0).sum() * (x[1] - x[0])) for p, q in pairs)

    found = epsilon(noise, sampling, 1, 1e-5)
    assert delta(found) <= 1e-5
    assert delta(found / 3) > 1e-5


DEEP = {"name": "mlp", "options": {"hidden": [16, 16]}}


def made(**more: Any) -> Experiment:
    tables: dict[str, Any] = {
        "data": "digits",
        "clients": 20,
        "model": {"name": "mlp", "options": {"hidden": [16]}},
        "method": "heterofl",
        "devices": {"capacities": [0.5, 1.0], "participation": 0.5},
        "tricks": {"weighting": "clients", "classwise_head": False},
        "privacy": {"clip": 0.5, "noise": 2.0},
        "engine": "inprocess",
        "rounds": 2,
        "evaluate_every": 2,
    }
    return Experiment(**tables | more)


def of(experiment: Experiment) -> Mechanism:
    found = mechanism(experiment, experiment.method.init(experiment.context))
    assert found is not None
    return found


def test_an_entry_is_divided_by_the_holders_to_expect() -> None:
    (expected,) = of(made()).expected
    weight = next(own for name, own in expected.items() if own.dim() == 2 and own.shape[0] == 16)
    assert set(weight[:8].flatten().tolist()) == {10.0}  # half of twenty clients, whatever their size
    assert set(weight[8:].flatten().tolist()) == {5.0}  # half of the ten that train the whole network


def test_noise_on_the_sum_has_the_deviation_that_is_asked_for() -> None:
    private = Mechanism(clip=0.5, noise=2.0, expected=[{"w": torch.full((100, 100), 4.0)}], seed=0)
    average = private.round(1)({"w": torch.zeros(100, 100)}, {})
    noise = average.result()["w"]
    assert float(noise.std()) == pytest.approx(0.5 * 2.0 / 4.0, rel=0.03)
    again = private.round(2)({"w": torch.zeros(100, 100)}, {}).result()["w"]
    assert not torch.equal(noise, again)


def test_a_client_moves_the_sum_by_no_more_than_the_clip(tmp_path: Path) -> None:
    from anysize.server.clipping import norm_clipped
    from test_averaging import update

    sent = {0: {"w": torch.zeros(2), "v": torch.zeros(2)}}
    (far,) = norm_clipped([update(0, "1.0", w=[30.0, 40.0], v=[0.0, 120.0])], sent, 0.5)
    average = NoisySum({"w": torch.zeros(2), "v": torch.zeros(2)})
    average.add(far.tensors, 1.0)
    assert math.sqrt(sum(float(own.square().sum()) for own in average.sums.values())) == pytest.approx(0.5)


def test_clients_are_drawn_independently_of_each_other() -> None:
    fleet = made(clients=200).fleet
    counts = [len(fleet.participants(number)) for number in range(1, 101)]
    assert np.mean(counts) == pytest.approx(100, abs=3)
    assert np.std(counts) == pytest.approx(math.sqrt(200 * 0.25), rel=0.3)


def test_a_run_says_what_it_spent_and_clients_tell_neither_loss_nor_samples(tmp_path: Path) -> None:
    experiment = made()
    run = experiment.run(tmp_path / "run")
    assert [event["privacy"]["epsilon"] for event in run.history] == [
        pytest.approx(epsilon(2.0, 0.5, rounds, 1e-5), abs=1e-3) for rounds in (1, 2)
    ]
    told = [client for event in run.history for client in event["clients"]]
    assert {(client["loss"], client["samples"]) for client in told} == {(None, None)}
    assert plan(made())["privacy"]["epsilon"] == run.history[-1]["privacy"]["epsilon"]
    assert spent(made(privacy=None), 2) is None
    assert not any("loss" in item or "samples" in item for item in plan(made())["leaves_the_device"])


MOVING = {"clip": 0.5, "noise": 2.0, "quantile": 0.3, "count_noise": 4.0}


@pytest.mark.parametrize("privacy", [{"clip": 0.5, "noise": 2.0}, MOVING])
def test_a_resumed_private_run_has_the_same_noise(tmp_path: Path, privacy: dict[str, Any]) -> None:
    whole = made(privacy=privacy).run(tmp_path / "whole")
    made(rounds=1, privacy=privacy).run(tmp_path / "parts")
    parts = made(privacy=privacy).run(tmp_path / "parts", resume=True)
    assert whole.history[-1]["accuracy"] == parts.history[-1]["accuracy"]
    assert whole.history[-1]["privacy"] == parts.history[-1]["privacy"]
    assert [("clip" in event["privacy"]) for event in whole.history] == 2 * [privacy is MOVING]
    one, other = ((tmp_path / name / "state.safetensors").read_bytes() for name in ("whole", "parts"))
    assert one == other


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_update_that_no_factor_makes_short_adds_nothing(wrong: float) -> None:
    private = Mechanism(0.5, 2.0, [], 0, Quantile(0.5, 3.0, 50.0)).round(1)
    sent = {"w": torch.ones(2), "v": torch.zeros(1)}
    taken = private.clipped(sent, {"w": torch.tensor([wrong, 1.0]), "v": torch.ones(1)})
    assert all(torch.equal(taken[name], sent[name]) for name in sent)
    assert private._others == 1


# A clip that follows the norms


@pytest.mark.parametrize("noise, count_noise", [(1.0, 5.0), (2.0, 1.5), (0.3, 0.2)])
def test_sum_and_count_together_have_the_noise_that_is_accounted(noise: float, count_noise: float) -> None:
    """A client moves (sum / its deviation, count / its deviation) by a vector of length 1 / noise, in numpy."""
    private = Mechanism(1.0, noise, [], 0, Quantile(0.5, count_noise, 100.0))
    moved = np.array([1.0 / private.sum_noise, 0.5 / count_noise])
    assert np.linalg.norm(moved) == pytest.approx(1 / noise)
    assert private.sum_noise > noise


def test_the_clip_finds_the_quantile_of_the_norms() -> None:
    """Steps of norms drawn from 0 to 4, of which 30 % are below 1.2; every round is told its clip by the one before."""
    random = np.random.default_rng(0)
    private, clip = Mechanism(0.1, 1.0, [], 0, Quantile(0.3, 2.5, 50.0)), None
    seen = []
    for number in range(1, 201):
        now = private.round(number, clip)
        for norm in random.uniform(0, 4, random.binomial(100, 0.5)):
            cut = now.clipped({"w": torch.zeros(2)}, {"w": torch.tensor([0.0, norm])})
            assert float(cut["w"].norm()) <= now.clip * (1 + 1e-6)
        clip = now.next_clip()
        seen.append(clip)
    assert np.mean(seen[100:]) == pytest.approx(1.2, rel=0.1)
    assert seen[0] == pytest.approx(0.1 * math.exp(-0.2 * (0.02 - 0.3)), rel=0.1)  # nearly all are longer than 0.1


def test_the_noise_of_a_round_follows_its_clip() -> None:
    expected = [{"w": torch.full((100, 100), 4.0)}]
    private = Mechanism(0.5, 2.0, expected, 0, Quantile(0.5, 3.0, 50.0))
    noise = private.round(3, 0.05)({"w": torch.zeros(100, 100)}, {}).result()["w"]
    assert float(noise.std()) == pytest.approx(0.05 * (2.0**-2 - 6.0**-2) ** -0.5 / 4.0, rel=0.03)


def test_norm_layers_that_stay_on_clients_get_no_noise(tmp_path: Path) -> None:
    tricks = {"weighting": "clients", "classwise_head": False, "batch_norm": "local"}
    experiment = made(model={"name": "small-cnn", "options": {"channels": [4, 4]}}, tricks=tricks)
    before, _ = flatten(experiment.method.init(experiment.context))
    after, _ = flatten(experiment.run(tmp_path / "run").state)
    still = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    assert still == {name for name in before if ".norm" in name}


def test_epsilon_does_not_depend_on_whether_the_clip_moves() -> None:
    still, moving = plan(made())["privacy"], plan(made(privacy=MOVING))["privacy"]
    assert moving["epsilon"] == still["epsilon"]
    ratio = moving["sizes"][0]["deviation"] / still["sizes"][0]["deviation"]
    assert ratio == pytest.approx((1 - (2.0 / 8.0) ** 2) ** -0.5)


@pytest.mark.parametrize(
    "tables, words",
    [
        ({"tricks": {"weighting": "samples", "classwise_head": False}}, 'weighting = "clients"'),
        ({"tricks": {"weighting": "clients", "classwise_head": True}}, "classwise_head"),
        ({"model": "small-cnn"}, "batch-norm statistics leave"),
        ({"aggregation": "median"}, "calibrated for sums"),
        ({"aggregation": "norm-filter"}, "calibrated for sums"),
        ({"privacy": {"clip": 0.5, "noise": 2.0, "quantile": 0.5}}, "count_noise above 1, or take more clients"),
        ({"privacy": {"noise": 2.0, "quantile": 0.5}}, "give the clip of the first round"),
        ({"privacy": {"clip": 0.5, "count_noise": 2.0}}, "given without privacy.quantile"),
        ({"engine": {"name": "inprocess", "min_clients": 3}}, "tells how many came"),
        ({"partition": {"validation": 0.2}, "evaluation": {"on": ["test", "clients"]}}, "held-out data"),
        ({"devices": {"capacities": [0.5, 1.0], "available": 0.5}}, "availability"),
        ({"devices": {"capacities": [0.5, 1.0], "redraw": "round"}}, "keep their size"),
        ({"method": SplitMix()}, "draws or chooses anew"),
        ({"method": "fiarse"}, "draws or chooses anew"),
        ({"method": FedHM(), "model": DEEP}, "entry for entry"),
        ({"method": FLANC(average="products"), "model": DEEP}, "entry for entry"),
    ],
)
def test_what_the_noise_does_not_cover_is_refused_by_name(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(made(**tables))


@pytest.mark.parametrize("method", ["fedavg", "ladder", "flanc"])
def test_methods_that_add_up_entries_are_private(method: str) -> None:
    assert plan(made(method=method))["privacy"]["sizes"]


def test_a_network_that_knows_its_samples_by_heart_gives_them_away_and_a_blind_one_does_not() -> None:
    x, y = torch.arange(8).reshape(8, 1).float() / 8, torch.tensor([0, 1] * 4)
    members, others = TensorPart(x[:4], y[:4]), TensorPart(x[4:], 1 - y[4:])

    class Heart(torch.nn.Module):
        """Right where its input is below a half, else wrong."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            even = (x[:, 0] * 8).long() % 2
            return 9.0 * torch.nn.functional.one_hot(even, 2).float()

    assert membership_advantage(Heart(), members, others) == 1.0
    assert membership_advantage(torch.nn.Linear(1, 2).requires_grad_(False), members, members) == 0.0


@pytest.mark.slow
def test_membership_is_harder_to_tell_the_smaller_epsilon_is(tmp_path: Path) -> None:
    script = runpy.run_path(str(Path(__file__).parents[1] / "experiments" / "trust" / "privacy.py"))
    found = [script["measured"](noise, 0)["membership"] for noise in (0.1, 0.3, 1.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] + 0.03
