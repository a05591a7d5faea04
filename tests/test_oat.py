"""OAT: conditional batch-norms, the loss over many weights of the attack, and networks at one of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import anysize as az
import small
from anysize.client.objectives import make_objective
from anysize.elastic.film import Conditional, conditional_tensors, conditioned
from anysize.elastic.norm import batch_norms
from anysize.elastic.skeleton import fill, hollow, tensors_of
from anysize.errors import ConfigError, MethodError, ModelError
from anysize.methods import OAT, FedAvg
from anysize.methods.oat import codes, drawn
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step, Tricks
from anysize.runtime import load
from anysize.tasks import task
from anysize.testing import check_method

Array = NDArray[np.float64]
LEVELS = (0.0, 0.25, 1.0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shaken(network: nn.Module, conditions: int = len(LEVELS)) -> Conditional:
    """The conditional form of a network, every tensor of it moved, so that all branches and codes differ."""
    structure = Conditional(hollow(network), codes(conditions, 8, seeded()))
    tensors = conditional_tensors(tensors_of(network), structure, seeded())
    moved = {
        name: tensor + 0.3 * torch.rand(tensor.shape, generator=seeded(i)) if tensor.is_floating_point() else tensor
        for i, (name, tensor) in enumerate(tensors.items())
    }
    made = fill(structure, moved)
    assert isinstance(made, Conditional)
    return made


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def array(tensor: Tensor | None) -> Array:
    assert tensor is not None
    return tensor.detach().double().numpy()


def numpy_film(layer: nn.Sequential, code: Array) -> tuple[Array, Array]:
    """(gamma, beta) of every sample."""
    hidden = code @ array(layer[0].weight).T + array(layer[0].bias)
    both = np.where(hidden > 0, hidden, 0.01 * hidden) @ array(layer[2].weight).T + array(layer[2].bias)
    return both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]


def numpy_answer(network: Conditional, x: Array, places: list[int], noisy: bool) -> Array:
    """Linear, batch-norm by the batch's statistics, film: the network of `dense` in training."""
    linear, film = network.dual.network
    norm = network.dual.noise["1:norm"] if noisy else film.norm
    h = x @ array(linear.weight).T + array(linear.bias)
    h = (h - h.mean(0)) / np.sqrt(h.var(0) + norm.eps) * array(norm.weight) + array(norm.bias)
    gamma, beta = numpy_film(film.film, array(network.codes)[places])
    return gamma * h + beta


def cross_entropies(logits: Array, y: Array) -> Array:
    return np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]


@pytest.mark.parametrize("noisy", [False, True])
def test_a_conditional_layer_scales_and_shifts_what_its_batch_norm_gives(noisy: bool) -> None:
    network, x, places = shaken(dense()).train(), torch.rand(5, 4, generator=seeded()), [0, 1, 1, 2, 0]
    expected = numpy_answer(network, array(x), places, noisy)
    assert np.allclose(array(network.given(places, noisy)(x)), expected, atol=1e-5)


def test_the_loss_weighs_clean_and_attacked_samples_by_each_ones_lambda() -> None:
    network = shaken(dense()).train()
    x, y = torch.rand(9, 4, generator=seeded()), torch.arange(9) % 3
    method, objective = OAT(robustness=LEVELS, encoding=8), make_objective(task("classification"), Tricks(), None)

    def attack(module: nn.Module, x: Tensor, loss: Any) -> Tensor:
        assert loss(x).dim() == 0
        return 1 - x

    places = drawn(LEVELS, 9, seeded(3))
    weights = np.array(LEVELS)[places]
    zero, above = weights == 0, weights > 0
    own = [place for place in places if place > 0]
    clean, attacked = np.zeros(9), np.zeros(9)
    clean[zero] = cross_entropies(numpy_answer(network, array(x)[zero], [0] * sum(zero), False), y.numpy()[zero])
    clean[above] = cross_entropies(numpy_answer(network, array(x)[above], own, True), y.numpy()[above])
    attacked[above] = cross_entropies(numpy_answer(network, 1 - array(x)[above], own, True), y.numpy()[above])
    expected = np.mean((1 - weights) * clean + weights * attacked)
    found = method.loss(network, Batch(x, y), Step(0, seeded(3), {}, objective, attack=attack))
    assert float(found.detach()) == pytest.approx(expected, abs=1e-5)


def test_lambda_zero_trains_the_clean_batch_norm_alone_and_every_other_the_noised_one_alone() -> None:
    for levels, trained, still in (
        ((0.0,), "network.1.norm", "noise.1:norm"),
        ((0.5,), "noise.1:norm", "network.1.norm"),
    ):
        network = shaken(dense(), 1).train()
        before = {name: tensor.clone() for name, tensor in tensors_of(network).items()}
        objective = make_objective(task("classification"), Tricks(), None)
        step = Step(0, seeded(), {}, objective, attack=lambda module, x, loss: x + 0.1)
        method = OAT(robustness=levels, encoding=8)
        method.loss(network, Batch(torch.rand(6, 4), torch.arange(6) % 3), step).backward()
        after = tensors_of(network)
        assert not torch.equal(after[f"dual.{trained}.running_mean"], before[f"dual.{trained}.running_mean"])
        assert torch.equal(after[f"dual.{still}.running_mean"], before[f"dual.{still}.running_mean"])
        gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
        assert gradients[f"dual.{trained}.weight"] is not None
        assert gradients[f"dual.{still}.weight"] is None
        assert gradients["dual.network.1.film.0.weight"] is not None


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_a_sample_alone_with_its_batch_norm_has_a_loss(samples: int) -> None:
    network = shaken(dense()).train()
    objective = make_objective(task("classification"), Tricks(), None)
    step = Step(0, seeded(), {}, objective, attack=lambda module, x, loss: x)
    batch = Batch(torch.rand(samples, 4), torch.zeros(samples, dtype=torch.int64))
    assert bool(torch.isfinite(OAT(robustness=LEVELS, encoding=8).loss(network, batch, step)))


@pytest.mark.parametrize("place", range(len(LEVELS)))
def test_the_folded_network_is_the_conditional_one(place: int) -> None:
    network, x = shaken(small.normalised_network()).eval(), torch.rand(5, 1, 8, 8, generator=seeded())
    noisy = LEVELS[place] > 0
    with torch.no_grad():
        expected = network.given([place] * 5, noisy)(x)
        others = [network.given([other] * 5, noisy)(x) for other in range(len(LEVELS)) if other != place]
        folded = conditioned(copy.deepcopy(network), place, noisy).eval()
        assert torch.allclose(folded(x), expected, atol=1e-4)
    assert not any(torch.allclose(expected, other, atol=1e-3) for other in others)
    assert [type(layer) for layer in folded] == [type(layer) for layer in small.normalised_network()]


def test_samples_of_one_batch_do_not_see_each_others_condition() -> None:
    network, x = shaken(small.normalised_network()).eval(), torch.rand(3, 1, 8, 8, generator=seeded())
    with torch.no_grad():
        together = network.given([0, 1, 2], noisy=True)(x)
        alone = [network.given([place], noisy=True)(x[place : place + 1]) for place in range(3)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


def test_a_norm_that_is_used_at_two_places_stays_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.BatchNorm1d(4)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)))

    network, x = shaken(Twice()).eval(), torch.rand(5, 4)
    with torch.no_grad():
        expected = network.given([1] * 5, noisy=False)(x)
        folded = conditioned(network, 1, noisy=False).eval()
        assert folded.first is folded.second
        assert torch.allclose(folded(x), expected, atol=1e-5)


def test_rows_that_are_no_samples_are_refused() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.flatten(0, 1))

    with pytest.raises(ModelError, match="10 rows for 5 samples"):
        shaken(Rows()).given([0] * 5, noisy=False)(torch.rand(5, 2, 4))


def test_values_of_lambda_are_drawn_per_sample_and_zero_has_its_fixed_part() -> None:
    values = OAT().robustness
    batches = [drawn(values, 32, seeded(i)) for i in range(200)]
    assert all(places == sorted(places) and places.count(0) == 6 and len(places) == 32 for places in batches)
    counts = np.bincount(np.concatenate(batches), minlength=6)[1:] / (26 * 200)
    assert np.allclose(counts, 0.2, atol=0.03)
    assert drawn([0.5], 3, seeded()) == [0, 0, 0]
    assert drawn([0.0], 3, seeded()) == [0, 0, 0]


def test_the_encoding_is_orthonormal_and_the_same_for_a_seed() -> None:
    found = codes(6, 128, seeded())
    assert torch.allclose(found @ found.T, torch.eye(6), atol=1e-6)
    assert torch.equal(found, codes(6, 128, seeded()))
    assert not torch.equal(found, codes(6, 128, seeded(1)))


# The method ---------------------------------------------------------------------------------------


def made(**changes: Any) -> az.Experiment:
    tables: dict[str, Any] = {
        "model": {"name": "small-cnn", "options": {"channels": [8, 16]}},
        "method": {"name": "oat", "robustness": list(LEVELS), "encoding": 8},
        "tricks": {"attack_steps": 2},
        "engine": {"name": "inprocess"},
    }
    return small.experiment(**(tables | changes))


def test_oat_keeps_every_law_at_one_value_too() -> None:
    check_method(OAT(robustness=(0.5,), encoding=4), tricks={"attack_steps": 1})


def test_before_training_every_level_is_fedavgs_network() -> None:
    ours, theirs = made(), made(method={"name": "fedavg"}, tricks={})
    x = torch.rand(4, 1, 8, 8, generator=seeded())
    plain = FedAvg().customize(theirs.context, FedAvg().init(theirs.context), Size(0.5)).eval()
    state = ours.method.init(ours.context)
    with torch.no_grad():
        for level in LEVELS:
            network = ours.method.customize(ours.context, state, Size(0.5, robustness=level)).eval()
            assert torch.allclose(network(x), plain(x), atol=1e-5)


def test_a_step_of_the_attack_costs_two_passes_of_the_samples_that_it_moves() -> None:
    costs = {steps: made(tricks={"attack_steps": steps}).cost(Size(0.5)) for steps in (1, 5)}
    macs = costs[1].macs
    assert macs == made(method={"name": "fedavg"}, tricks={}).cost(Size(0.5)).macs
    # 10 samples of 16 have lambda above 0; the codes of 8 numbers go through films for 4 and for 8 channels once.
    films = (8 * 8 + 8 * 8) + (8 * 16 + 16 * 16)
    assert costs[5].training_macs - costs[1].training_macs == 4 * (2 * macs + films) * 10 / 16


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model": {"name": "mlp", "options": {"hidden": [8]}}}, r"has no batch-norm"),
        ({"tricks": {"adversarial": 0.5}}, "tricks.adversarial"),
        ({"tricks": {"batch_norm": "batch"}}, 'batch_norm = "batch"'),
        ({"tricks": {"server_momentum": 0.5}}, "server_momentum"),
        ({"tricks": {"max_entropy": 0.5}}, "max_entropy"),
    ],
)
def test_oat_says_what_it_needs(changes: dict[str, Any], words: str) -> None:
    experiment = made(**changes)
    with pytest.raises(MethodError, match=words):
        experiment.method.init(experiment.context)


@pytest.mark.parametrize("robustness", [[], [1.0, 0.0], [0.5, 0.5], [0.0, 1.5]])
def test_values_of_lambda_must_ascend_from_0_to_1(robustness: list[float]) -> None:
    with pytest.raises(MethodError, match="ascending numbers from 0 to 1"):
        OAT(robustness=robustness)
    with pytest.raises(MethodError, match="at least one number for each"):
        OAT(encoding=3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> az.Run:
    return made(
        evaluation={"attack": "pgd", "attack_samples": 60, "attack_steps": 2},
        tricks={"attack_steps": 1},
        rounds=3,
        evaluate_every=3,
        data={"fraction": 0.6},
        training={"learning_rate": 0.1, "local_epochs": 3},
    ).run(tmp_path_factory.mktemp("oat") / "run")


def test_oat_learns_the_digits_at_every_level(run: az.Run) -> None:
    (rows,) = run.history[-1]["robust"].values()
    assert [row["robustness"] for row in rows] == list(LEVELS)
    assert all(row["standard"] > 0.6 for row in rows)
    assert run.history[-1]["accuracy"].keys() == {"0.5"}


def test_the_level_is_chosen_when_a_network_is_customised_or_runs(run: az.Run, tmp_path: Path) -> None:
    x = torch.rand(3, 1, 8, 8, generator=seeded())
    device = load(run.bundle(tmp_path / "net.anysize").path)
    assert device.levels == LEVELS
    answers = []
    for level in LEVELS:
        network = run.customize(0.5, robustness=level)
        assert {type(norm) for norm in batch_norms(network)} == {nn.BatchNorm2d}
        with torch.no_grad():
            answers.append(network(x))
        assert torch.allclose(device.switch("0.5", level)(x), answers[-1], atol=1e-5)
    assert not torch.allclose(answers[0], answers[2], atol=1e-3)
    with pytest.raises(ConfigError, match=r"allowed: 0, 0\.25, 1"):
        run.customize(0.5, robustness=0.3)
