"""Attacks, training under attack, dual batch-norm, and robustness that is chosen when a network is customised."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

import anysize as az
import small
from anysize.client import attacks
from anysize.client.attacks import Attack, pgd, strongest
from anysize.client.batches import draw
from anysize.client.objectives import make_objective
from anysize.elastic.norm import Dual, MixedOutputs, affine, batch_norms, dual_tensors, fold, mixed_norms, noisy
from anysize.elastic.skeleton import fill, hollow, tensors_of
from anysize.errors import ConfigError, MethodError
from anysize.exports.formats import export
from anysize.methods.size import Size
from anysize.methods.splitmix import SplitMix
from anysize.methods.training import Batch, Tricks
from anysize.runtime import load
from anysize.tasks import task
from anysize.testing import check_method
from anysize.wire import under

Array = NDArray[np.float64]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(weight: Array, bias: Array) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data, layer.bias.data = torch.from_numpy(weight).float(), torch.from_numpy(bias).float()
    return layer


def numpy_pgd(w: Array, b: Array, x: Array, y: Array, noise: Array, attack: Attack) -> Array:
    """Madry et al., Eq. (2), for a linear classifier with cross-entropy, from its closed gradient."""
    now = np.clip(
        x + attack.epsilon * (2 * noise - 1), np.clip(x - attack.epsilon, 0, 1), np.clip(x + attack.epsilon, 0, 1)
    )
    for _ in range(attack.steps):
        logits = now @ w.T + b
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        slope = (p - np.eye(len(b))[y]) @ w
        moved = now + attack.step * np.sign(slope)
        now = np.clip(np.clip(moved, x - attack.epsilon, x + attack.epsilon), 0, 1)
    return now


def test_the_attack_is_projected_gradient_ascent_from_a_random_start() -> None:
    random = np.random.default_rng(0)
    w, b, x, y = random.normal(size=(3, 6)), random.normal(size=3), random.random((8, 6)), random.integers(3, size=8)
    attack = Attack(epsilon=0.1, step=0.03, steps=4)
    net, labels = linear(w, b), torch.from_numpy(y)
    inputs = torch.from_numpy(x).float()
    found = pgd(net, inputs, lambda z: nn.functional.cross_entropy(net(z), labels), attack, seeded())
    noise = torch.rand(8, 6, generator=seeded()).double().numpy()
    assert np.allclose(found.numpy(), numpy_pgd(w, b, x, y, noise, attack), atol=1e-5)
    assert float((found - inputs).abs().max()) <= 0.1 + 1e-6
    assert net.weight.grad is None


def test_an_attack_leaves_modes_statistics_and_gradients_as_they_were() -> None:
    net = small.normalised_network().train()
    net[2].eval()
    before = {name: tensor.clone() for name, tensor in tensors_of(net).items()}
    x, y = torch.rand(4, 1, 8, 8), torch.arange(4)
    pgd(net, x, lambda z: nn.functional.cross_entropy(net(z), y), Attack(), seeded())
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors_of(net).items())
    assert net.training
    assert not net[2].training
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_adversarial_training_weighs_the_clean_and_the_attacked_loss(weight: float) -> None:
    random = np.random.default_rng(1)
    w, b, x, y = random.normal(size=(3, 6)), random.normal(size=3), random.random((8, 6)), random.integers(3, size=8)
    tricks = Tricks(adversarial=weight, attack_epsilon=0.1, attack_step=0.03, attack_steps=2)
    objective = make_objective(task("classification"), tricks, None, seeded())
    batch = Batch(torch.from_numpy(x).float(), torch.from_numpy(y))
    noise = torch.rand(8, 6, generator=seeded()).double().numpy()

    def cross_entropy(inputs: Array) -> float:
        logits = inputs @ w.T + b
        return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(8), y]))

    attacked = numpy_pgd(w, b, x, y, noise, Attack(0.1, 0.03, 2))
    expected = (1 - weight) * cross_entropy(x) + weight * cross_entropy(attacked)
    assert float(objective(linear(w, b), batch).detach()) == pytest.approx(expected, abs=1e-4)


# Dual batch-norm ----------------------------------------------------------------------------------


def dual_network() -> Dual:
    """A dual network whose two branches differ in every tensor."""
    dual = Dual(small.normalised_network())
    for i, norm in enumerate(batch_norms(dual)):
        for j, tensor in enumerate((norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var)):
            assert tensor is not None
            tensor.copy_(torch.rand(tensor.shape, generator=seeded(10 * i + j)) + 0.5)
    return dual


def numpy_norm(norm: nn.BatchNorm2d, x: Array) -> Array:
    def of(tensor: Tensor | None) -> Array:
        assert tensor is not None
        return tensor.detach().double().numpy()[None, :, None, None]

    return (x - of(norm.running_mean)) / np.sqrt(of(norm.running_var) + norm.eps) * of(norm.weight) + of(norm.bias)


@pytest.mark.parametrize("level", [0.0, 0.3, 1.0])
def test_equation_2_folds_into_one_ordinary_batch_norm(level: float) -> None:
    dual = dual_network().eval()
    clean, noise = dual.network[1], dual.noise["1"]
    x = torch.randn(3, 8, 4, 4, generator=seeded())
    expected = (1 - level) * numpy_norm(clean, x.double().numpy()) + level * numpy_norm(noise, x.double().numpy())
    network = mixed_norms(dual, level)
    assert type(network[1]) is nn.BatchNorm2d
    assert np.allclose(network[1](x).detach().numpy(), expected, atol=1e-5)


def test_the_ends_of_the_mixture_are_the_two_branches() -> None:
    dual, x = dual_network().eval(), torch.rand(5, 1, 8, 8, generator=seeded())
    with torch.no_grad():
        branches = dual(x), dual.noisy()(x)
        assert not torch.allclose(*branches)
        for level, branch in enumerate(branches):
            again = fill(hollow(dual), tensors_of(dual))
            assert isinstance(again, Dual)
            assert torch.allclose(mixed_norms(again, float(level)).eval()(x), branch, atol=1e-5)


@pytest.mark.parametrize("level", [0.0, 0.3, 1.0])
def test_mixed_outputs_are_the_weighted_mean_of_the_two_branches(level: float) -> None:
    dual, x = dual_network().eval(), torch.rand(5, 1, 8, 8, generator=seeded())
    with torch.no_grad():
        clean, noised = (branch(x).double().numpy() for branch in (dual, dual.noisy()))
        again = fill(hollow(dual), tensors_of(dual))
        assert isinstance(again, Dual)
        found = MixedOutputs(again, level).eval()(x).numpy()
    assert not np.allclose(clean, noised)
    assert np.allclose(found, (1 - level) * clean + level * noised, atol=1e-6)


def test_mixed_outputs_share_all_weights_but_the_norms() -> None:
    dual = dual_network()
    norms = sum(parameter.numel() for norm in dual.noise.values() for parameter in norm.parameters())
    plain = sum(parameter.numel() for parameter in dual.network.parameters())
    assert sum(parameter.numel() for parameter in MixedOutputs(dual, 0.5).parameters()) == plain + norms


def test_each_branch_tracks_statistics_of_its_own_inputs_and_shares_all_other_weights() -> None:
    dual = Dual(small.normalised_network()).train()
    alone = small.normalised_network().train()
    x, other = torch.rand(6, 1, 8, 8, generator=seeded()), torch.rand(6, 1, 8, 8, generator=seeded(1)) * 3
    dual(x)
    loss = noisy(dual)(other).square().sum()
    loss.backward()
    alone(x)
    own, reference = dual.network[1], alone[1]
    assert torch.equal(own.running_mean, reference.running_mean)
    assert not torch.allclose(dual.noise["1"].running_mean, own.running_mean)
    assert dual.noise["1"].weight.grad is not None
    assert own.weight.grad is None
    assert dual.network[0].weight.grad is not None


def test_a_dual_network_starts_with_both_branches_as_the_network() -> None:
    network = small.normalised_network()
    tensors = dual_tensors(tensors_of(network), network)
    dual = fill(hollow(Dual(network)), tensors)
    x = torch.rand(4, 1, 8, 8, generator=seeded())
    assert isinstance(dual, Dual)
    assert torch.equal(dual.eval()(x), dual.noisy()(x))


def test_a_batch_norm_without_weights_folds_too() -> None:
    norm = nn.BatchNorm1d(3, affine=False).eval()
    assert norm.running_mean is not None
    norm.running_mean += 2
    x = torch.rand(4, 3)
    expected = norm(x)
    fold(norm, *affine(norm))
    assert torch.allclose(norm(x), expected, atol=1e-5)


# Split-Mix with dual adversarial training ---------------------------------------------------------

ROBUST: dict[str, Any] = {"adversarial": 0.5, "attack_steps": 1, "batch_norm": "tracked"}


@pytest.mark.parametrize(
    "mixing, batch_norm",
    [
        ("norms", "tracked"),
        pytest.param("outputs", "tracked", marks=pytest.mark.slow),
        pytest.param("norms", "local", marks=pytest.mark.slow),
    ],
)
def test_split_mix_with_dual_batch_norm_keeps_every_law(mixing: Any, batch_norm: str) -> None:
    check_method(SplitMix(dual_norm=True, mixing=mixing), tricks={**ROBUST, "batch_norm": batch_norm})


@pytest.mark.parametrize(
    "options, tricks, words",
    [
        ({}, {"batch_norm": "tracked"}, "set tricks.adversarial"),
        ({}, {"adversarial": 0.5}, 'batch_norm = "batch"'),
        ({}, {**ROBUST, "server_momentum": 0.5}, "server_momentum"),
        ({"mixing": "outputs"}, {**ROBUST, "batch_norm": "local"}, "leaves nothing to mix"),
    ],
)
def test_dual_batch_norm_says_what_it_needs(options: dict[str, Any], tricks: dict[str, Any], words: str) -> None:
    made = small.experiment(
        model={"name": "small-cnn", "options": {"channels": [8, 8]}},
        method={"name": "splitmix", "dual_norm": True, **options},
        tricks=tricks,
    )
    with pytest.raises(MethodError, match=words):
        made.method.init(made.context)


def robust_run(folder: Path, mixing: str) -> az.Run:
    """Split-Mix on two widths, trained against a small attack, measured under attack."""
    return small.experiment(
        model={"name": "small-cnn", "options": {"channels": [8, 16]}},
        method={"name": "splitmix", "dual_norm": True, "mixing": mixing},
        tricks={**ROBUST, "attack_steps": 2},
        evaluation={"attack": "pgd", "attack_samples": 40, "attack_steps": 2, "robustness": [0.0, 0.5, 1.0]},
        engine={"name": "inprocess"},
        rounds=2,
        evaluate_every=2,
        data={"fraction": 0.3},
    ).run(folder)


def test_mixing_is_refused_where_there_is_nothing_to_mix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="works with dual_norm = true"):
        small.experiment(method={"name": "splitmix", "mixing": "outputs"}).run(tmp_path / "run")


@pytest.fixture(scope="module")
def robust(tmp_path_factory: pytest.TempPathFactory) -> az.Run:
    return robust_run(tmp_path_factory.mktemp("robust") / "run", "norms")


@pytest.fixture(scope="module")
def by_outputs(tmp_path_factory: pytest.TempPathFactory) -> az.Run:
    return robust_run(tmp_path_factory.mktemp("outputs") / "run", "outputs")


def test_width_and_robustness_are_customised_jointly(robust: az.Run) -> None:
    x = torch.rand(3, 1, 8, 8, generator=seeded())
    for size in (0.5, 1.0):
        clean, default = robust.customize(size, robustness=0.0), robust.customize(size)
        hard = robust.customize(size, robustness=1.0)
        with torch.no_grad():
            assert torch.equal(clean(x), default(x))
            assert not torch.allclose(clean(x), hard(x))
        assert {type(norm) for norm in batch_norms(hard)} == {nn.BatchNorm2d}
    with pytest.raises(ConfigError, match="allowed: 0 to 1"):
        robust.customize(0.5, robustness=1.5)


def test_a_run_records_the_trade_off_of_every_size(robust: az.Run) -> None:
    event = robust.history[-1]["robust"]
    assert list(event) == ["0.5", "1.0"]
    for rows in event.values():
        assert [row["robustness"] for row in rows] == [0.0, 0.5, 1.0]
        assert all(0 <= row["robust"] <= 1 and 0 <= row["standard"] <= 1 for row in rows)
    assert robust.attack() == event


@pytest.mark.parametrize("mixing", ["robust", "by_outputs"])
def test_the_bundle_switches_robustness_and_width_without_reading_again(
    mixing: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    robust: az.Run = request.getfixturevalue(mixing)
    path = robust.bundle(tmp_path / "net.anysize").path
    network = load(path)
    assert network.levels == (0.0, 1.0)
    assert network.robustness == 0.0
    x = torch.rand(4, 1, 8, 8, generator=seeded())
    for size in ("0.5", "1.0"):
        for level in (0.0, 0.35, 1.0):
            with torch.no_grad():
                expected = robust.customize(size, robustness=level)(x)
            assert torch.allclose(network.switch(size, level)(x), expected, atol=1e-5)
    assert network.switch("0.5").robustness == 1.0
    assert repr(network) == f"<Network, size 0.5 at robustness 1 in use; it has {', '.join(network.sizes)}>"


def test_mixing_outputs_changes_what_is_customised_and_not_what_is_trained(robust: az.Run, by_outputs: az.Run) -> None:
    x = torch.rand(6, 1, 8, 8, generator=seeded())
    for tensors, others in zip(robust.state.bases.values(), by_outputs.state.bases.values()):
        assert all(torch.equal(tensors[name], others[name]) for name in tensors)

    def outputs(run: az.Run, level: float) -> Array:
        with torch.no_grad():
            return run.customize(1.0, robustness=level)(x).double().numpy()

    clean, noised = outputs(robust, 0.0), outputs(robust, 1.0)
    assert np.allclose(outputs(by_outputs, 0.4), 0.6 * clean + 0.4 * noised, atol=1e-5)
    assert not np.allclose(outputs(robust, 0.4), 0.6 * clean + 0.4 * noised, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["net.pt2", "net.onnx", "net.safetensors"])
def test_mixed_outputs_are_exported(by_outputs: az.Run, tmp_path: Path, name: str) -> None:
    network, signature = by_outputs.customize(1.0, robustness=0.4), by_outputs.experiment.signature
    assert export(network, tmp_path / name, signature).difference < 1e-5


def test_mixing_outputs_costs_two_passes_and_the_norms_of_both(robust: az.Run, by_outputs: az.Run) -> None:
    for label in ("0.5", "1.0"):
        one, two = (run.cost(run.size(label)) for run in (robust, by_outputs))
        norms = batch_norms(robust.customize(label))
        extra = sum(4 * (4 * norm.num_features) + 8 for norm in norms)  # four vectors of floats and a counter
        levels = 4 * len(by_outputs.customize(label).bases) if label == "1.0" else 4
        assert two.macs == 2 * one.macs
        assert two.inference_bytes == one.inference_bytes + extra + levels
        assert (two.bytes, two.training_macs) == (one.bytes, one.training_macs)


@pytest.fixture(scope="module")
def kept_at_home(tmp_path_factory: pytest.TempPathFactory) -> az.Run:
    """Split-Mix whose batch-norms, both of each, stay with the clients."""
    return small.experiment(
        model={"name": "small-cnn", "options": {"channels": [8, 16]}},
        method={"name": "splitmix", "dual_norm": True},
        tricks={**ROBUST, "batch_norm": "local"},
        evaluation={"on": ["clients"]},
        engine={"name": "inprocess"},
        rounds=4,
        evaluate_every=4,
        data={"fraction": 0.4, "validation": 0.5},
    ).run(tmp_path_factory.mktemp("local") / "run")


def test_local_norms_of_both_branches_never_reach_the_server(kept_at_home: az.Run) -> None:
    run = kept_at_home
    fresh = run.experiment.method.init(run.experiment.context)
    for base, tensors in run.state.bases.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, fresh.bases[base][name]) == ("norm" in name), name
    with pytest.raises(ConfigError, match="offers no choice"):
        run.customize(0.5, robustness=0.5)
    assert any("offer no choice" in text for text in run.experiment.notices())


def test_a_client_keeps_the_norms_of_every_base_that_it_ever_trained(kept_at_home: az.Run) -> None:
    run = kept_at_home
    for client in range(6):
        turns = [row["parts"] for event in run.history for row in event["clients"] if row["client"] == client]
        kept = load_file(run.directory / "kept" / f"{client}-4.safetensors")
        assert {name.partition(".")[0] for name in kept} == {base for parts in turns for base in parts}
        for base in {name.partition(".")[0] for name in kept}:
            norm = "norm1.running_mean"
            clean, noised = kept[f"{base}.network.network.{norm}"], kept[f"{base}.noise.network:{norm}"]
            assert not torch.allclose(clean, noised)
    assert any(len(turns) > 1 and turns[0] != turns[1] for turns in _turns_of_narrow_clients(run))


def _turns_of_narrow_clients(run: az.Run) -> list[list[list[str]]]:
    rows = [row for event in run.history for row in event["clients"] if row["size"] == "0.5"]
    return [[row["parts"] for row in rows if row["client"] == client] for client in {row["client"] for row in rows}]


def test_a_client_is_tested_with_its_own_norms_for_clean_inputs(kept_at_home: az.Run) -> None:
    run, experiment = kept_at_home, kept_at_home.experiment
    rows = list(csv.DictReader((run.directory / "clients.csv").open()))
    assert len(rows) == 6
    for row in rows:
        kept = load_file(run.directory / "kept" / f"{row['client']}-4.safetensors")
        bases = []
        for base in run.state.order[: 1 if row["size"] == "0.5" else 2]:
            own = {**run.state.bases[str(base)], **under(f"{base}.", kept)}
            bases.append(fill(experiment.context.skeleton(0.5), under("network.", own)).eval())
        held = experiment.shares.share(int(row["client"])).held_out
        assert held is not None
        batch = draw(held, torch.arange(len(held)))
        with torch.no_grad():
            right = (sum(base(batch.x) for base in bases).argmax(1) == batch.y).float().mean()
        assert float(row["accuracy"]) == pytest.approx(float(right), abs=1e-6)


def test_the_command_line_takes_robustness_and_an_attack(
    robust: az.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where, to = robust.directory, tmp_path / "net.safetensors"
    code, _, err = small.call(
        monkeypatch, capsys, "customize", where, "--size", "0.5", "--robustness", "0.3", "--to", to
    )
    assert code == 0, err
    code, out, err = small.call(
        monkeypatch, capsys, "evaluate", where, "--size", "0.5", "--robustness", "1", "--attack", "pgd", "--json"
    )
    assert code == 0, err
    assert '"robust"' in out
    assert small.call(monkeypatch, capsys, "evaluate", where, "--attack", "strong")[0] == 2
    assert small.call(monkeypatch, capsys, "evaluate", where, "--robustness", "7")[0] == 2


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "flanc", "sheterofl"])
def test_every_method_can_be_trained_under_attack(tmp_path: Path, method: str) -> None:
    def run(name: str, tricks: dict[str, Any]) -> az.Run:
        made = small.experiment(method={"name": method}, tricks=tricks, rounds=1, engine={"name": "inprocess"})
        return made.run(tmp_path / name)

    plain, attacked = run("plain", {}), run("attacked", {"adversarial": 0.5, "attack_steps": 2})
    costs = [made.cost(Size(0.5)) for made in (plain, attacked)]
    assert costs[1].training_macs > 2 * costs[0].training_macs
    weights = [next(made.customize(0.5).parameters()) for made in (plain, attacked)]
    assert not torch.equal(*weights)
    with pytest.raises(ConfigError, match="offers no choice"):
        attacked.customize(0.5, robustness=0.5)


def test_training_under_attack_makes_a_network_robust(tmp_path: Path) -> None:
    def accuracy(name: str, weight: float) -> float:
        run = small.experiment(
            method={"name": "fedavg"},
            model={"name": "mlp", "options": {"hidden": [64]}},
            tricks={"adversarial": weight, "attack_epsilon": 0.1, "attack_step": 0.05, "attack_steps": 3},
            evaluation={"attack": "pgd", "attack_epsilon": 0.1, "attack_step": 0.02, "attack_steps": 10},
            devices={"capacities": [1.0]},
            data={"fraction": 1.0},
            training={"learning_rate": 0.1, "local_epochs": 5},
            engine={"name": "inprocess"},
            rounds=4,
            evaluate_every=4,
        ).run(tmp_path / name)
        return float(run.history[-1]["robust"]["1.0"][0]["robust"])

    assert accuracy("attacked", 1.0) > accuracy("plain", 0.0) + 0.1


def test_tokens_cannot_be_attacked() -> None:
    x = torch.randint(7, (60, 6))
    made = az.Experiment(
        data=az.Data(train=(x[:, :-1], x[:, 1:]), test=(x[:6, :-1], x[:6, 1:])),
        clients=4,
        model={"name": "char-lstm", "options": {"hidden": 8}},
        method="fedavg",
        task="next-token",
        tricks={"adversarial": 0.5},
    )
    with pytest.raises(ConfigError, match="tokens"):
        made.context_for(made.sizes)


@pytest.mark.parametrize("part", [0.1, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_stronger_attack_beats_projected_gradient_descent(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a part of its iterations or all, on a trained network, at a strength under which some samples stay right."""
    monkeypatch.setattr(attacks, "_ITERATIONS", {name: int(part * n) for name, n in attacks._ITERATIONS.items()})
    digits = load_digits()
    x, y = torch.from_numpy(digits.images).float()[:, None] / 16, torch.from_numpy(digits.target)
    net = small.normalised_network()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for index in torch.randperm(1400, generator=seeded()).repeat(8).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[index]), y[index]).backward()
        optimizer.step()
    net.eval().requires_grad_(False)
    x, y, attack = x[1400:1448], y[1400:1448], Attack(epsilon=0.06, step=0.015, steps=20)
    weak = pgd(net, x, lambda z: nn.functional.cross_entropy(net(z), y), attack, seeded())
    before = np.random.get_state()[1].tolist()
    strong = strongest(net, x, y, attack, 10, 0)
    assert np.random.get_state()[1].tolist() == before
    assert float((strong - x).abs().max()) <= 0.06 + 1e-6
    assert 0 <= float(strong.min()) <= float(strong.max()) <= 1
    clean, after_weak, after_strong = (int((net(z).argmax(1) == y).sum()) for z in (x, weak, strong))
    assert 0 < after_strong <= after_weak < clean
    assert torch.equal(strong, strongest(net, x, y, attack, 10, 0))
