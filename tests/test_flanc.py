"""FLANC's two ways to compute a layer, what it offers beside the paper's rule, and what the report draws of it."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anysize import models
from anysize.data import Data
from anysize.elastic.basis import (
    MIX_BELOW,
    Composed,
    Mixed,
    compose,
    gram,
    joint_basis,
    mixing_pays,
    orthonormal_basis,
    project,
)
from anysize.elastic.skeleton import tensors_of
from anysize.errors import MethodError
from anysize.methods import FLANC, Client, Method, Update
from anysize.methods.context import Context
from anysize.methods.size import Size
from anysize.report import write
from anysize.runs.experiment import Experiment
from anysize.runs.runner import run
from anysize.testing import make_trial
from small import call, config, experiment, file

Array = NDArray[np.float64]


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(6, 8), (5, 6)),
    "linear on sequences": (nn.Linear(6, 8, bias=False), (2, 3, 6)),
    "1d": (nn.Conv1d(6, 8, 3, padding=1), (2, 6, 7)),
    "2d": (nn.Conv2d(6, 8, 3, padding=1, bias=False), (2, 6, 5, 5)),
    "2d strided": (nn.Conv2d(6, 8, 3, stride=2, padding=(0, 1)), (2, 6, 7, 7)),
    "2d dilated": (nn.Conv2d(6, 8, (3, 2), dilation=2, padding="same"), (2, 6, 6, 6)),
    "3d": (nn.Conv3d(6, 8, 2), (1, 6, 3, 4, 3)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_both_ways_give_the_outputs_and_gradients_of_the_composed_layer(kind: str) -> None:
    layer, shape = LAYERS[kind]
    kernel = layer.get_parameter("weight").shape[2:]
    basis, coefficients, x = numbers(1, 4, 3, *kernel), numbers(2, 8, 2, 4), numbers(3, *shape)
    # The oracle: the layer itself with the weight of Eq. (2), and the chain rule by hand.
    weight = np.einsum("tfr,ri...->tfi...", coefficients.numpy(), basis.numpy()).reshape(8, 6, *kernel)
    with torch.no_grad():
        layer.get_parameter("weight").copy_(torch.from_numpy(weight))
    layer.zero_grad()
    expected = layer(x)
    slope = numbers(4, *expected.shape)
    expected.backward(slope)
    pull = layer.get_parameter("weight").grad.numpy().reshape(8, 2, 3, *kernel)  # type: ignore[union-attr]
    for way in ("compose", "mix"):
        made = Composed(layer, {"weight": basis}, {"weight": coefficients}, way)  # type: ignore[arg-type]
        assert made.ways == {"weight": way}
        made.zero_grad()
        found = made(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        found.backward(slope)
        for_basis = np.einsum("tfr,tfi...->ri...", coefficients.numpy(), pull)
        for_coefficients = np.einsum("rn,tfn->tfr", basis.numpy().reshape(4, -1), pull.reshape(8, 2, -1))
        np.testing.assert_allclose(made.basis["weight"].grad, for_basis, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(made.coefficients["weight"].grad, for_coefficients, rtol=1e-3, atol=1e-4)
        if layer.bias is not None:
            torch.testing.assert_close(made.network.bias.grad, layer.bias.grad, rtol=1e-4, atol=1e-4)


def test_both_ways_have_the_same_tensors_under_the_same_names() -> None:
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 8))
    basis = {"0.weight": numbers(1, 3, 1, 3, 3), "2.weight": numbers(2, 3, 2)}
    coefficients = {"0.weight": numbers(3, 4, 2, 3), "2.weight": numbers(4, 8, 2, 3)}
    ways = [tensors_of(Composed(network, basis, coefficients, way)) for way in ("compose", "mix")]  # type: ignore[arg-type]
    assert list(ways[0]) == list(ways[1])
    assert all(torch.equal(ways[0][name], ways[1][name]) for name in ways[0])


def test_the_rule_counts_multiply_adds_against_the_dense_layer() -> None:
    basis = torch.empty(32, 16, 3, 3)  # R2 / (R1 k^2) = 0.222
    for outputs, pays in ((128, True), (96, True), (64, False), (32, False)):  # R2 / T = 0.25, 0.33, 0.5, 1
        assert mixing_pays(nn.Conv2d(32, outputs, 3), basis, torch.empty(outputs, 2, 32)) is pays
        assert (32 / outputs + 32 / 144 <= MIX_BELOW[nn.Conv2d]) is pays
    assert not mixing_pays(nn.ConvTranspose2d(32, 128, 3), basis, torch.empty(128, 2, 32))


class Reader(nn.Module):
    """Two layers that share a weight, one whose weight is read without a call, and some that cannot mix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.read = nn.Linear(8, 8)
        self.hooked = nn.Linear(8, 8)
        self.hooked.register_forward_hook(lambda layer, inputs, output: 2 * output)
        self.grouped = nn.Conv1d(8, 8, 1, groups=2)
        self.circular = nn.Conv1d(8, 8, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        x = self.hooked(self.second(self.first(x)) @ self.read.weight.T)
        return self.circular(self.grouped(x[..., None]))[..., 0]


def test_layers_that_cannot_mix_compose_and_a_weight_can_be_read_without_a_call() -> None:
    network = Reader()
    names = ("first.weight", "read.weight", "hooked.weight", "circular.weight")
    shapes = {name: network.get_parameter(name).shape for name in names}
    basis = {n: numbers(i, 3, 4, *s[2:]) for i, (n, s) in enumerate(shapes.items())}
    coefficients = {n: numbers(10 + i, 8, 2, 3) for i, n in enumerate(shapes)}
    made = Composed(network, basis, coefficients, "mix")
    ways = {"first.weight": "compose", "read.weight": "mix", "hooked.weight": "compose", "circular.weight": "compose"}
    assert made.ways == ways
    assert isinstance(made.network.read, Mixed)
    with torch.no_grad():
        for name in names:
            network.get_parameter(name).copy_(compose(basis[name], coefficients[name]))
    x = numbers(20, 3, 8)
    torch.testing.assert_close(made(x), network(x), rtol=1e-4, atol=1e-3)


def context_of(method: Method[Any], model: nn.Module | None = None, **devices: Any) -> Experiment:
    net = model or nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    x, y = np.zeros((12, 1, 8, 8), dtype=np.uint8), np.arange(12) % 3
    devices = devices or {"capacities": [0.25, 1.0]}
    return Experiment(data=Data(train=(x, y), test=(x, y)), clients=4, model=net, method=method, devices=devices)


def test_a_wide_layer_mixes_and_a_narrow_one_composes() -> None:
    # R1 = 4 (a quarter of 16), R2 = 16 of 64: 16 / 64 + 16 / 36 = 0.69 at full width; R2 = 8: 0.35 there, 0.72 at 0.25.
    made = context_of(FLANC(basis_inputs=0.25, basis_size=0.125))
    ways = {size.label: dict(made.method.ways(made.context, size)) for size in made.sizes}
    assert ways == {"0.25": {"2.weight": "compose"}, "1.0": {"2.weight": "mix"}}
    for size in made.sizes:
        message = made.method.extract(made.context, made.method.init(made.context), Client(0, 0, size, 1, 3, 0))
        built = made.method.build(made.context.for_client(), message)
        assert isinstance(built, Composed)
        assert built.ways == ways[size.label]


@pytest.mark.parametrize(
    "devices",
    [
        {"capacity_of": "activation_bytes", "capacities": [0.9, 1.0]},
        {"groups": [{"name": "all", "clients": 4, "budget": {"activation_bytes": 10**9}}]},
    ],
)
def test_a_budget_of_activations_makes_every_layer_compose(devices: dict[str, Any]) -> None:
    method = FLANC(basis_inputs=0.25, basis_size=0.125, execution="mix")
    made = context_of(method, **devices)
    assert made.context.scarce_activations
    assert set(made.method.ways(made.context, made.sizes[-1]).values()) == {"compose"}
    assert not context_of(method).context.scarce_activations


def test_plan_reports_the_way_of_every_layer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = file(tmp_path, model={"options": {"hidden": [32, 16]}})
    for way in ("mix", "compose"):
        asked = ("--set", f"method.execution={way}")
        _, out, _ = call(monkeypatch, capsys, "plan", source, "--json", *asked)
        planned = json.loads(out)["groups"]
        assert [group["ways"] for group in planned] == [{"network.linear2.weight": way}] * 2
        _, out, _ = call(monkeypatch, capsys, "plan", source, *asked)
        assert "Weights from a basis and coefficients" in out
        groups = ", ".join(group["name"] for group in planned)
        assert f"  {groups}: {way} network.linear2.weight\n" in out
    _, out, _ = call(monkeypatch, capsys, "plan", source, "--set", "method.name=fedavg")
    assert "a basis" not in out


def trained(method: Method[Any], **tricks: Any) -> tuple[Context, Any, list[Update]]:
    trial = make_trial(method, None, (0.5, 1.0), tricks or None)
    return trial.context, trial.state, trial.trained()


def test_a_client_learns_the_same_either_way() -> None:
    updates = {way: trained(FLANC(execution=way, basis_inputs=0.5))[2] for way in ("compose", "mix")}  # type: ignore[arg-type]
    for one, other in zip(updates["compose"], updates["mix"]):
        for name, tensor in one.tensors.items():
            torch.testing.assert_close(other.tensors[name], tensor, rtol=1e-2, atol=1e-4)


def test_averaged_products_are_factored_again_with_the_least_loss() -> None:
    method = FLANC(average="products", orthogonality=0.0)
    context, state, updates = trained(method)
    after = method.aggregate(context, state, iter(updates))
    for name, basis in after.basis.items():
        rows = basis.numpy().reshape(len(basis), -1).astype(np.float64)
        np.testing.assert_allclose(rows @ rows.T, np.eye(len(rows)), atol=1e-5)
        stacked, fitted = [], []
        for width in state.coefficients:
            mine = [u for u in updates if repr(u.width) == width]
            total = sum(u.samples for u in mine)
            short = name.replace(".", ":")
            mean = sum(
                u.samples
                / total
                * compose(u.tensors[f"basis.{short}"], u.tensors[f"coefficients.{short}"]).numpy().astype(np.float64)
                for u in mine
            )
            flat = np.asarray(mean).reshape(-1, rows.shape[1])
            made = compose(basis, after.coefficients[width][name]).numpy().reshape(flat.shape)
            stacked.append(flat / np.linalg.norm(flat))
            fitted.append(made / np.linalg.norm(flat))
        lost = np.linalg.norm(np.concatenate(stacked) - np.concatenate(fitted)) ** 2
        values = np.linalg.svd(np.concatenate(stacked), compute_uv=False)
        assert lost == pytest.approx((values[len(rows) :] ** 2).sum(), rel=1e-2, abs=1e-6)  # Eckart and Young


def test_a_joint_basis_stays_where_it_is_if_nothing_was_learned() -> None:
    basis = orthonormal_basis(5, 2, (3, 3), torch.Generator().manual_seed(0))
    weights = [compose(basis, numbers(i, outputs, 3, 5)) for i, outputs in enumerate((4, 8))]
    torch.testing.assert_close(joint_basis(weights, basis), basis, rtol=1e-4, atol=1e-5)
    few = [compose(basis, numbers(1, 1, 2, 5))]  # two fragments cannot fix five directions
    torch.testing.assert_close(joint_basis(few, basis), basis, rtol=1e-4, atol=1e-5)
    other = joint_basis(weights, orthonormal_basis(5, 2, (3, 3), torch.Generator().manual_seed(1)))
    for weight in weights:  # the same span, another start
        torch.testing.assert_close(compose(other, project(weight, other)), weight, rtol=1e-4, atol=1e-5)


def test_an_update_whose_coefficients_do_not_fit_its_basis_is_refused() -> None:
    method = FLANC(average="products")
    context, state, (update, *_) = trained(method)
    name = next(name for name in update.tensors if name.startswith("coefficients."))
    wrong = replace(update, tensors=update.tensors | {name: update.tensors[name][..., :1]})
    with pytest.raises(MethodError, match="do not fit the basis"):
        method.aggregate(context, state, iter([wrong]))


def test_shared_dense_tensors_are_averaged_entry_by_entry_over_all_who_hold_them() -> None:
    method = FLANC(share_dense=True)
    context, state, updates = trained(method)
    assert all(not own for own in state.dense.values())
    after = method.aggregate(context, state, iter(updates))
    for name in ("0.weight", "9.weight", "1.bias"):
        total, weight = np.zeros(state.shared[name].shape), np.zeros(state.shared[name].shape)
        for update in updates:
            part = update.tensors[f"network.{name}"].numpy()
            at = tuple(slice(0, size) for size in part.shape)
            total[at] += update.samples * part
            weight[at] += update.samples
        np.testing.assert_allclose(after.shared[name], total / weight, rtol=1e-4, atol=1e-6)
    small = tensors_of(method.customize(context, after, Size(0.5)))
    torch.testing.assert_close(small["9.weight"], after.shared["9.weight"][:, :8])


def test_nested_coefficients_are_slices_of_the_largest() -> None:
    made = context_of(FLANC(start="nested"))
    state = made.method.init(with_tricks(made.context, rescaled_init=True))
    small, large = (state.coefficients[width]["2.weight"].numpy() for width in ("0.25", "1.0"))
    np.testing.assert_allclose(small, large[: small.shape[0], : small.shape[1]], rtol=1e-6)
    own = FLANC(start="nested").init(with_tricks(made.context, rescaled_init=False))
    wider = own.coefficients["0.25"]["2.weight"].numpy()  # a quarter of the inputs: twice as large
    np.testing.assert_allclose(wider, 2 * small, rtol=1e-5)
    apart = FLANC().init(made.context)
    assert not torch.equal(apart.coefficients["0.25"]["2.weight"], torch.from_numpy(small))


def with_tricks(context: Context, **tricks: Any) -> Context:
    return replace(context, tricks=replace(context.tricks, **tricks))


class Gated(nn.Module):
    """An LSTM whose gates start with different spreads, between an embedding and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent, self.head = nn.Embedding(10, 64), nn.LSTM(64, 64), nn.Linear(64, 3)
        for gate in range(4):
            with torch.no_grad():
                self.recurrent.weight_hh_l0[64 * gate : 64 * (gate + 1)] *= gate + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(x.long().flatten(1)).transpose(0, 1))[0][-1])


def own_start(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "lstm":
            return Gated()
        return models.build(name, (1, 8, 8), 3)


@pytest.mark.parametrize("start", ["apart", "nested"])
@pytest.mark.parametrize("name", ["flanc-cnn", "resnet20", "lstm"])
def test_composed_weights_start_with_the_spread_of_the_networks_own_start(name: str, start: Any) -> None:
    made = context_of(FLANC(start=start), own_start(name), capacities=[0.25, 0.5, 1.0])
    first = {key: tensor.numpy() for key, tensor in made.context.start().items()}
    state = made.method.init(with_tricks(made.context, rescaled_init=True))  # every width at the full one's scale
    for width, coefficients in state.coefficients.items():
        for key, u in coefficients.items():
            weight = compose(state.basis[key], u).numpy()
            gates = 4 if name == "lstm" else 1
            for own, full in zip(np.split(weight, gates), np.split(first[key], gates), strict=True):
                drawn = min(own.size, u.numel() // gates, full.size)  # numbers behind either estimate
                assert own.std() == pytest.approx(full.std(), rel=4 / np.sqrt(drawn)), (width, key)
                assert own.mean() == pytest.approx(0, abs=4 * full.std() / np.sqrt(drawn)), (width, key)


def test_convolutions_have_as_many_basis_vectors_as_asked_for() -> None:
    """Figure 7c at 75 %: R1 = 8 inputs of 3 x 3 are 72 numbers, and 96 vectors of them."""
    net = nn.Sequential(
        nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 3),
    )  # fmt: skip
    made = context_of(FLANC(basis_size=0.75), net)
    factors = made.method.factors(made.context)
    assert (factors["2.weight"].inputs, factors["2.weight"].size) == (8, 96)
    assert (factors["6.weight"].inputs, factors["6.weight"].size) == (16, 15)  # a linear layer: 15 / 16 of its length
    state = made.method.init(with_tricks(made.context, rescaled_init=True))
    rows = state.basis["2.weight"].numpy().reshape(96, 72)
    np.testing.assert_allclose(rows.T @ rows, np.eye(72), atol=1e-5)
    first = made.context.start()["2.weight"]
    for u in (own["2.weight"] for own in state.coefficients.values()):
        assert float(compose(state.basis["2.weight"], u).std()) == pytest.approx(float(first.std()), rel=0.05)


def test_averaged_products_of_more_vectors_than_entries_compose_the_same_weights() -> None:
    method = FLANC(basis_inputs=0.01, basis_size=1.0, average="products")
    context, state, updates = trained(method)
    own = [replace(u, tensors=method.extract(context, state, client_of(u)).tensors) for u in updates]
    after = method.aggregate(context, state, iter(own))
    for width, coefficients in state.coefficients.items():
        for name, u in coefficients.items():
            composed = compose(after.basis[name], after.coefficients[width][name])
            torch.testing.assert_close(composed, compose(state.basis[name], u), rtol=1e-4, atol=1e-5)


def client_of(update: Update) -> Client:
    return Client(update.ticket.client, 0, Size(update.width), 1, 1, 0)


def test_a_learned_start_is_composed_exactly_where_vectors_span_everything() -> None:
    made = context_of(FLANC(basis_size=1.0))  # R1 = 2 of 16 inputs: 18 numbers, and 64 vectors
    state = made.method.init(replace(made.context, pretrained=True))
    first = made.context.start()["2.weight"]
    for width, own in state.coefficients.items():
        composed = compose(state.basis["2.weight"], own["2.weight"])
        rows, columns = composed.shape[:2]
        torch.testing.assert_close(composed, first[:rows, :columns], rtol=1e-4, atol=1e-5, msg=width)


def test_without_rescaled_initialisation_a_width_starts_at_its_own_scale() -> None:
    made = context_of(FLANC(), own_start("flanc-cnn"))
    state = FLANC().init(with_tricks(made.context, rescaled_init=False))
    for width, coefficients in state.coefficients.items():
        weight = compose(state.basis["conv2.weight"], coefficients["conv2.weight"]).numpy()
        assert weight.shape[0] == 128 * float(width)
        assert weight.std() == pytest.approx(np.sqrt(1 / (3 * weight[0].size)), rel=0.05)  # torch's own rule


def test_a_layer_that_starts_at_zero_starts_at_zero() -> None:
    net = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.zeros_(net.get_parameter("2.weight"))
    made = context_of(FLANC(), nn.Sequential(nn.Flatten(), net))
    state = made.method.init(made.context)
    assert all(not u.any() for own in state.coefficients.values() for u in own.values())


def test_rates_reach_the_basis_and_the_coefficients_alone() -> None:
    made = context_of(FLANC(basis_rate=0.25, coefficients_rate=3.0))
    message = made.method.extract(made.context, made.method.init(made.context), Client(0, 0, made.sizes[0], 1, 3, 0))
    module = made.method.build(made.context, message)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    rates = {names[id(p)]: group.rate for group in made.method.groups(module) for p in group.parameters}
    assert rates["basis.2:weight"] == 0.25
    assert rates["coefficients.2:weight"] == 3.0
    assert {rate for name, rate in rates.items() if name.startswith("network.")} == {1.0}
    assert len(rates) == len(names)
    assert len(FLANC().groups(module)) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"execution": "fast"}, "execution = 'fast'; allowed: 'auto', 'compose', 'mix'"),
        ({"start": "zero"}, "start = 'zero'"),
        ({"average": "sums"}, "average = 'sums'"),
        ({"basis_rate": 0.0}, "basis_rate = 0.0; allowed: above 0"),
    ],
)
def test_an_option_that_is_not_offered_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        FLANC(**options)


def test_orthogonality_brings_a_skew_basis_nearer_to_an_orthonormal_one() -> None:
    distances = {}
    for weight in (0.0, 1.0):
        method = FLANC(orthogonality=weight, orthogonality_form="sum")
        trial = make_trial(method, None, (0.5, 1.0), None)
        skew = replace(trial.state, basis={name: basis * 1.5 for name, basis in trial.state.basis.items()})
        after = method.aggregate(trial.context, skew, iter(replace(trial, state=skew).trained()))
        distances[weight] = sum(float((gram(b) - torch.eye(len(b))).square().sum()) for b in after.basis.values())
    assert distances[1.0] < 0.5 * distances[0.0]


def test_the_report_draws_gram_matrices_coefficients_sizes_and_messages(tmp_path: Path) -> None:
    made = run(experiment(rounds=2, method={"name": "flanc"}), out=tmp_path / "run")
    write(made.directory)

    def rows(name: str) -> list[dict[str, str]]:
        return list(csv.DictReader((made.directory / "report" / f"{name}.csv").open()))

    layer = "network.linear2.weight"
    basis = made.state.basis[layer]
    matrix = np.array([float(row["gram"]) for row in rows(f"analysis-gram-{layer}")]).reshape(len(basis), len(basis))
    np.testing.assert_allclose(matrix, gram(basis), atol=1e-6)
    drift = {row["round"]: float(row["distance"]) for row in rows("analysis-gram-over-rounds")}
    assert list(drift) == ["1", "2"]
    assert drift["2"] == pytest.approx(np.sqrt(np.mean((matrix - np.eye(len(basis))) ** 2)), rel=1e-4)
    table = rows(f"analysis-coefficients-{layer}")
    for width, coefficients in made.state.coefficients.items():
        mine = [row for row in table if row["item"] == width]
        assert sum(float(row["part"]) for row in mine) == pytest.approx(1)
        columns = np.abs(coefficients[layer].numpy()).mean(-1).ravel()
        middle = mine[len(mine) // 2]
        inside = np.mean((columns >= float(middle["from"])) & (columns < float(middle["to"])))
        assert float(middle["part"]) == pytest.approx(inside)
    assert [(row["size"], row["clients"]) for row in rows("by-size")] == [("0.5", "3"), ("1.0", "3")]
    sent = {row["size"]: row for row in rows("against-dense")}
    for size in made.sizes:
        cost = made.cost(size)
        assert float(sent[size.label]["bytes_down"]) == cost.bytes_down
        assert float(sent[size.label]["ordinary_network_bytes"]) == cost.inference_bytes


def test_both_ways_learn_the_digits(tmp_path: Path) -> None:
    scores = {}
    for way in ("compose", "mix"):
        changed = config(
            rounds=4,
            evaluate_every=4,
            data={"fraction": 1.0},
            model={"options": {"hidden": [32, 32]}},
            method={"name": "flanc", "execution": way},
            engine={"name": "inprocess"},
        )
        made = run(Experiment.from_config(changed), out=tmp_path / way)
        scores[way] = made.history[-1]["accuracy"]["1.0"]
    assert min(scores.values()) > 0.5
    assert abs(scores["compose"] - scores["mix"]) < 0.05
