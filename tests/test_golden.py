"""Every equation on cases small enough to compute by hand, against short numpy functions written here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from anysize.client.objectives import make_objective, masked, proximal
from anysize.data import Data
from anysize.elastic.basis import (
    Composed,
    compose,
    gram,
    orthonormal_basis,
    principal_basis,
    project,
    random_coefficients,
)
from anysize.elastic.norm import Statistics, attach, batch_norms, collect, merge, without_statistics
from anysize.errors import MethodError
from anysize.methods import FLANC, Client, FedAvg, HeteroFL, Method, Update
from anysize.methods.context import Context
from anysize.methods.flanc import orthogonality_loss
from anysize.methods.mean import StreamingMean
from anysize.methods.size import Size
from anysize.methods.training import Batch, Tricks
from anysize.runs.experiment import Experiment
from anysize.runs.runner import with_momentum
from anysize.tasks import task

Array = np.ndarray[Any, np.dtype[Any]]


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def network() -> nn.Module:
    """6 inputs, two hidden layers of 8, 3 classes."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def context_of(method: Method[Any], capacities: list[float], model: nn.Module | None = None, **more: Any) -> Context:
    x, y = numbers(0, 12, 6), torch.arange(12) % 3
    return Experiment(
        data=Data(train=(x, y), test=(x, y)),
        clients=4,
        model=model or network(),
        method=method,
        devices={"capacities": capacities},
        **more,
    ).context


def answers(context: Context, method: Method[Any], state: Any, clients: list[dict[str, Any]]) -> list[Update]:
    """What clients send that replaced each tensor by random numbers: one per {width, samples, classes}."""
    updates = []
    for i, about in enumerate(clients):
        client = Client(i, i, Size(about["width"]), 1, about["samples"], 0)
        message = method.extract(context, state, client)
        tensors = {n: numbers(100 * i + j, *t.shape) for j, (n, t) in enumerate(sorted(message.tensors.items()))}
        told = {"samples": about["samples"], "loss": 0.0, "classes": about.get("classes")}
        updates.append(Update(tensors, message.ticket, **told))
    return updates


# FedAvg


def test_fedavg_is_the_mean_weighted_by_samples() -> None:
    context = context_of(FedAvg(), [1.0])
    state = FedAvg().init(context)
    updates = answers(context, FedAvg(), state, [{"width": 1.0, "samples": n} for n in (3, 1, 6)])
    after = FedAvg().aggregate(context, state, iter(updates)).networks["1.0"]
    for name, tensor in after.items():
        sent = [update.tensors[f"0.{name}"].numpy() for update in updates]
        np.testing.assert_allclose(tensor, (3 * sent[0] + 1 * sent[1] + 6 * sent[2]) / 10, rtol=1e-5, atol=1e-6)


def test_clients_count_alike_where_the_weighting_says_so() -> None:
    context = context_of(FedAvg(), [1.0], tricks={"weighting": "clients"})
    state = FedAvg().init(context)
    updates = answers(context, FedAvg(), state, [{"width": 1.0, "samples": n} for n in (3, 1)])
    after = FedAvg().aggregate(context, state, iter(updates)).networks["1.0"]["0.bias"]
    np.testing.assert_allclose(after, sum(u.tensors["0.0.bias"].numpy() for u in updates) / 2, rtol=1e-5, atol=1e-6)


# HeteroFL


def mean_over_holders(old: Array, parts: list[tuple[Array, float, Array | None]]) -> Array:
    """HeteroFL, Eqs. (1)-(3), entry by entry: (part in the first rows and columns, weight, weight per row)."""
    new = old.copy()
    for place in np.ndindex(*old.shape):
        total = value = 0.0
        for part, weight, rows in parts:
            if all(at < size for at, size in zip(place, part.shape)):
                own = weight * (1.0 if rows is None else rows[place[0]])
                total, value = total + own, value + own * part[place]
        if total > 0:
            new[place] = value / total
    return new


def test_heterofl_averages_each_entry_over_its_holders_and_keeps_the_others() -> None:
    method = HeteroFL()
    context = context_of(method, [0.25, 0.5, 1.0], tricks={"weighting": "samples", "classwise_head": False})
    state = method.init(context)
    fleet = [{"width": 0.25, "samples": 2}, {"width": 0.5, "samples": 5}, {"width": 0.25, "samples": 1}]
    updates = answers(context, method, state, fleet)
    after = method.aggregate(context, state, iter(updates)).tensors
    assert updates[0].tensors["2.weight"].shape == (2, 2)
    for name, old in state.tensors.items():
        parts = [(u.tensors[name].numpy(), float(u.samples), None) for u in updates]
        np.testing.assert_allclose(after[name], mean_over_holders(old.numpy(), parts), rtol=1e-5, atol=1e-6)
    assert torch.equal(after["2.weight"][4:], state.tensors["2.weight"][4:])
    assert torch.equal(after["2.weight"][:, 4:], state.tensors["2.weight"][:, 4:])


def test_classifier_rows_come_from_clients_that_hold_the_class() -> None:
    method = HeteroFL()
    context = context_of(method, [0.5, 1.0])  # the paper's tricks: class-wise head, clients count alike
    state = method.init(context)
    fleet = [
        {"width": 0.5, "samples": 2, "classes": [1, 0, 0]},
        {"width": 1.0, "samples": 9, "classes": [1, 1, 0]},
    ]
    updates = answers(context, method, state, fleet)
    after = method.aggregate(context, state, iter(updates)).tensors
    for name in ("4.weight", "4.bias"):
        rows = [np.array(about["classes"], dtype=float) for about in fleet]
        parts = [(u.tensors[name].numpy(), 1.0, own) for u, own in zip(updates, rows)]
        expected = mean_over_holders(state.tensors[name].numpy(), parts)
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(after[name][2], state.tensors[name][2])  # nobody holds class 2
    plain = mean_over_holders(
        state.tensors["2.bias"].numpy(), [(u.tensors["2.bias"].numpy(), 1.0, None) for u in updates]
    )
    np.testing.assert_allclose(after["2.bias"], plain, rtol=1e-5, atol=1e-6)


def test_the_scaler_divides_by_the_width_and_is_folded_into_a_customised_network() -> None:
    context = context_of(HeteroFL(), [0.5, 1.0])
    state = HeteroFL().init(context)
    message = HeteroFL().extract(context, state, Client(0, 0, Size(0.5), 1, 3, 0))
    x = numbers(5, 4, 6)
    w = {name: tensor.numpy() for name, tensor in message.tensors.items()}
    built = HeteroFL().build(context, message)
    customised = HeteroFL().customize(context, state, Size(0.5))
    unscaled = HeteroFL(scaler=False).customize(context, state, Size(0.5))
    for network, scale in ((built.train(), 2.0), (built.eval(), 2.0), (customised, 2.0), (unscaled, 1.0)):
        h = np.maximum(scale * (x.numpy() @ w["0.weight"].T + w["0.bias"]), 0)
        h = np.maximum(scale * (h @ w["2.weight"].T + w["2.bias"]), 0)
        np.testing.assert_allclose(network(x).detach(), h @ w["4.weight"].T + w["4.bias"], rtol=1e-4, atol=1e-5)


def test_masked_cross_entropy_sets_absent_logits_to_zero() -> None:
    logits, labels = numbers(1, 5, 4).requires_grad_(), torch.tensor([0, 2, 2, 0, 2])
    held = torch.tensor([True, False, True, False])
    objective = make_objective(task("classification"), Tricks(masked_loss=True), held)
    loss = objective(nn.Identity(), Batch(logits, labels))
    loss.backward()
    seen = logits.detach().numpy() * np.array([1, 0, 1, 0])
    chances = np.exp(seen) / np.exp(seen).sum(1, keepdims=True)
    assert loss.item() == pytest.approx(-np.log(chances[np.arange(5), labels]).mean(), rel=1e-5)
    onehot = np.eye(4)[labels]
    np.testing.assert_allclose(logits.grad, (chances - onehot) / 5 * np.array([1, 0, 1, 0]), rtol=1e-4, atol=1e-6)


def test_a_mask_follows_the_class_axis() -> None:
    output, held = numbers(2, 2, 3, 4), torch.tensor([True, False, True])
    expected = output.numpy() * np.array([1, 0, 1])[:, None]
    np.testing.assert_array_equal(masked(output, held, 1), expected)


# FLANC


def composed_by_loops(basis: Array, coefficients: Array) -> Array:
    """FLANC, Eqs. (1) and (2): every fragment of R1 inputs is a weighted sum of the basis vectors."""
    outputs, fragments, size = coefficients.shape
    inputs = basis.shape[1]
    weight = np.zeros((outputs, fragments * inputs, *basis.shape[2:]))
    for t in range(outputs):
        for i in range(fragments):
            for j in range(size):
                weight[t, i * inputs : (i + 1) * inputs] += coefficients[t, i, j] * basis[j]
    return weight


@pytest.mark.parametrize("kernel", [(), (3,), (3, 3), (2, 3)])
def test_a_composed_weight_is_the_sum_over_the_basis_of_every_fragment(kernel: tuple[int, ...]) -> None:
    basis, coefficients = numbers(1, 5, 2, *kernel), numbers(2, 7, 3, 5)
    expected = composed_by_loops(basis.numpy(), coefficients.numpy())
    assert expected.shape == (7, 6, *kernel)
    np.testing.assert_allclose(compose(basis, coefficients), expected, rtol=1e-5, atol=1e-6)


def test_a_composed_network_computes_what_the_network_of_composed_weights_does() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 4, 3)
            self.rows = nn.LSTM(24, 8, num_layers=2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rows(self.conv(x).permute(0, 2, 1, 3).flatten(2))[0].mean(1))

    plain = Net()
    shapes = {
        n: p.shape for n, p in plain.named_parameters() if "weight_hh" in n or n in ("conv.weight", "head.weight")
    }
    basis = {n: numbers(i, 3, 2, *s[2:]) for i, (n, s) in enumerate(shapes.items())}
    coefficients = {n: numbers(i, s[0], s[1] // 2, 3) for i, (n, s) in enumerate(shapes.items())}
    small = Composed(plain, basis, coefficients)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name in shapes:
                weight = composed_by_loops(basis[name].numpy(), coefficients[name].numpy())
                parameter.copy_(torch.from_numpy(weight))
    x = numbers(9, 2, 2, 8, 8)
    torch.testing.assert_close(small(x), plain(x), rtol=1e-4, atol=1e-4)
    small(x).square().sum().backward()
    plain(x).square().sum().backward()
    for name in shapes:  # the chain rule: a fragment's slope along each basis vector
        slope = plain.get_parameter(name).grad.numpy().reshape(*coefficients[name].shape[:2], -1)
        expected = slope @ basis[name].numpy().reshape(3, -1).T
        found = small.coefficients[name.replace(".", ":")].grad
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_orthogonality_is_the_squared_distance_of_the_gram_matrices_from_the_identity() -> None:
    bases = [numbers(1, 3, 2, 2), numbers(2, 4, 5)]
    squares = []
    for basis in bases:
        rows = basis.numpy().reshape(len(basis), -1)
        squares.append((rows @ rows.T - np.eye(len(rows))) ** 2)
    assert float(orthogonality_loss(bases, "sum")) == pytest.approx(sum(s.sum() for s in squares), rel=1e-5)
    assert float(orthogonality_loss(bases, "mean")) == pytest.approx(sum(s.mean() for s in squares), rel=1e-5)
    assert float(orthogonality_loss([torch.eye(4)[:3]], "sum")) == 0


@pytest.mark.parametrize("form", ["mean", "sum"])
def test_the_loss_is_the_tasks_plus_lambda_times_orthogonality(form: str) -> None:
    @dataclass
    class Step:
        def objective(self, module: nn.Module, batch: Batch) -> Tensor:
            return torch.tensor(1.5)

    bases = [numbers(1, 3, 2), numbers(2, 3, 2)]
    module = Composed(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        dict(zip(("0.weight", "1.weight"), bases)),
        {"0.weight": numbers(3, 4, 2, 3), "1.weight": numbers(4, 4, 2, 3)},
    )
    method = FLANC(orthogonality=7.0, orthogonality_form=form)  # type: ignore[arg-type]
    loss = method.loss(module, Batch(torch.zeros(1), torch.zeros(1)), Step())  # type: ignore[arg-type]
    squares = [(b.numpy() @ b.numpy().T - np.eye(3)) ** 2 for b in bases]
    expected = sum(s.sum() if form == "sum" else s.mean() for s in squares)
    assert loss.item() == pytest.approx(1.5 + 7 * expected, rel=1e-5)


@pytest.mark.parametrize("share", [True, False])
def test_the_basis_is_averaged_over_all_and_coefficients_within_their_width(share: bool) -> None:
    method = FLANC(basis_inputs=0.25, basis_size=0.25, share_unscaled=share)
    context = context_of(method, [0.5, 1.0], keep=["0"])
    state = method.init(context)
    assert list(state.basis) == ["2.weight"]
    fleet = [{"width": 0.5, "samples": 1}, {"width": 1.0, "samples": 2}, {"width": 0.5, "samples": 5}]
    updates = answers(context, method, state, fleet)
    after = method.aggregate(context, state, iter(updates))

    def mean(name: str, clients: list[int]) -> Array:
        total = sum(fleet[i]["samples"] for i in clients)
        return sum(fleet[i]["samples"] / total * updates[i].tensors[name].numpy() for i in clients)  # type: ignore[return-value]

    close = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(after.basis["2.weight"], mean("basis.2:weight", [0, 1, 2]), **close)
    small, large = after.coefficients["0.5"]["2.weight"], after.coefficients["1.0"]["2.weight"]
    np.testing.assert_allclose(small, mean("coefficients.2:weight", [0, 2]), **close)
    np.testing.assert_allclose(large, mean("coefficients.2:weight", [1]), **close)
    np.testing.assert_allclose(after.dense["0.5"]["4.weight"], mean("network.4.weight", [0, 2]), **close)
    np.testing.assert_allclose(after.dense["1.0"]["2.bias"], mean("network.2.bias", [1]), **close)
    if share:
        np.testing.assert_allclose(after.shared["0.weight"], mean("network.0.weight", [0, 1, 2]), **close)
    else:
        assert after.shared == {}
        np.testing.assert_allclose(after.dense["0.5"]["0.weight"], mean("network.0.weight", [0, 2]), **close)


def test_a_width_without_clients_keeps_its_coefficients() -> None:
    method = FLANC()
    context = context_of(method, [0.5, 1.0])
    state = method.init(context)
    after = method.aggregate(context, state, iter(answers(context, method, state, [{"width": 0.5, "samples": 1}])))
    assert torch.equal(after.coefficients["1.0"]["2.weight"], state.coefficients["1.0"]["2.weight"])
    assert not torch.equal(after.basis["2.weight"], state.basis["2.weight"])


def test_class_wise_rows_hold_for_a_classifier_that_all_widths_share() -> None:
    method = FLANC()
    context = context_of(method, [0.5, 1.0], keep=["2"], tricks={"classwise_head": True})
    state = method.init(context)
    assert "4.weight" in state.shared
    updates = answers(context, method, state, [{"width": 0.5, "samples": 3, "classes": [0, 1, 1]}])
    after = method.aggregate(context, state, iter(updates))
    assert torch.equal(after.shared["4.weight"][0], state.shared["4.weight"][0])
    assert torch.equal(after.shared["4.weight"][1:], updates[0].tensors["network.4.weight"][1:])


def test_r1_divides_every_trained_input_width_and_r2_stays_below_the_vectors_length() -> None:
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 3))
    context = context_of(FLANC(), [0.25, 0.3, 1.0], model)  # inputs of the second layer: 10, 12, 40
    factors = FLANC(basis_inputs=0.25, basis_size=0.5).factors(context)["2.weight"]
    assert (factors.asked, factors.inputs, factors.size) == (10, 2, 1)  # gcd 2; floor(15 / 16 * 2) = 1
    single = context_of(FLANC(), [1.0], model)
    factors = FLANC(basis_inputs=0.4, basis_size=0.125).factors(single)["2.weight"]
    assert (factors.asked, factors.inputs, factors.size) == (16, 10, 8)  # the largest divisor of 40 up to 16
    factors = FLANC(layers={"2": {"basis_inputs": 0.1}}).factors(single)["2.weight"]
    assert (factors.inputs, factors.size) == (4, 3)


@pytest.mark.parametrize(
    "fragments, size, inputs, kernel", [(4, 12, 2, (3, 3)), (8, 7, 8, ()), (1, 30, 32, (1, 1)), (4, 12, 1, (3, 3))]
)
def test_random_coefficients_compose_weights_of_variance_one(
    fragments: int, size: int, inputs: int, kernel: tuple[int, ...]
) -> None:
    random = torch.Generator().manual_seed(0)
    basis = orthonormal_basis(size, inputs, kernel, random)
    rows = basis.numpy().reshape(size, -1)
    shorter = rows @ rows.T if size <= rows.shape[1] else rows.T @ rows  # more vectors than entries: the columns
    np.testing.assert_allclose(shorter, np.eye(len(shorter)), atol=1e-5)
    weight = compose(basis, random_coefficients(4000, fragments, basis, random))
    assert float(weight.var()) == pytest.approx(1, rel=0.03)
    assert float(weight.mean()) == pytest.approx(0, abs=0.02)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.sampled_from([(), (2,), (3, 3)]), st.integers(0, 999)
)
def test_principal_basis_and_projection_are_the_best_low_rank_fit(
    outputs: int, fragments: int, inputs: int, kernel: tuple[int, ...], seed: int
) -> None:
    weight = numbers(seed, outputs, fragments * inputs, *kernel)
    flat = weight.numpy().astype(np.float64).reshape(outputs * fragments, -1)
    values = np.linalg.svd(flat, compute_uv=False)
    for size in range(1, flat.shape[1] + 1):
        basis = principal_basis(weight, inputs, size)
        np.testing.assert_allclose(gram(basis), np.eye(size), atol=1e-5)
        error = float((compose(basis, project(weight, basis)) - weight).square().sum())
        assert error == pytest.approx((values[size:] ** 2).sum(), rel=1e-3, abs=1e-5)  # Eckart and Young


def test_projection_is_least_squares_on_a_skew_basis_too() -> None:
    weight, basis = numbers(1, 5, 6, 2), numbers(2, 4, 3, 2)
    flat, rows = weight.numpy().reshape(10, 6), basis.numpy().reshape(4, 6)
    expected = np.linalg.lstsq(rows.T, flat.T, rcond=None)[0].T.reshape(5, 2, 4)
    np.testing.assert_allclose(project(weight, basis), expected, rtol=1e-4, atol=1e-5)


def test_an_untrained_width_is_the_first_channels_of_the_largest() -> None:
    method = FLANC()
    context = context_of(method, [0.5, 1.0])
    state = method.init(context)
    full = dict(method.customize(context, state, Size(1.0)).named_parameters())
    cut = dict(method.customize(context, state, Size(0.75)).named_parameters())
    assert torch.equal(cut["2.weight"], full["2.weight"][:6, :6])
    assert torch.equal(cut["4.weight"], full["4.weight"][:, :6])
    with pytest.raises(MethodError, match=r"width 1\.5"):
        method.customize(context, state, Size(1.5))


# Means


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=3), st.integers(1, 4), st.integers(0, 9999), st.booleans())
def test_a_streaming_mean_over_any_index_sets_is_numpys(
    shape: list[int], clients: int, seed: int, classwise: bool
) -> None:
    dice = np.random.default_rng(seed)
    old = dice.normal(size=shape)
    head = {"w": 0} if classwise and shape else None
    mean = StreamingMean({"w": torch.from_numpy(old)}, head)
    value, total = np.zeros(shape), np.zeros(shape)
    for _ in range(clients):
        index = [
            None if dice.random() < 0.3 else np.sort(dice.permutation(n)[: dice.integers(1, n + 1)]) for n in shape
        ]
        if head:
            index[0] = None
        grid = np.ix_(*(np.arange(n) if own is None else own for n, own in zip(shape, index)))
        part, weight = dice.normal(size=total[grid].shape), float(dice.integers(1, 20))
        rows = dice.integers(0, 2, shape[0]).astype(np.float32) if head else None
        spread = weight * np.ones(part.shape) * (1 if rows is None else rows.reshape(-1, *[1] * (len(shape) - 1)))
        value[grid] += spread * part
        total[grid] += spread
        at = tuple(None if own is None else torch.from_numpy(own) for own in index)
        whole = all(own is None for own in at)
        classes = None if rows is None else torch.from_numpy(rows)
        mean.add({"w": torch.from_numpy(np.asarray(part))}, weight, None if whole else {"w": at}, classes)
    expected = np.where(total > 0, value / np.where(total > 0, total, 1), old)
    np.testing.assert_allclose(mean.result()["w"], expected, rtol=1e-9, atol=1e-12)


def test_a_streaming_mean_leaves_equal_values_bit_for_bit_and_its_inputs_alone() -> None:
    old, again = numbers(1, 50), numbers(1, 50)
    mean = StreamingMean({"w": old, "idle": old})
    for weight in (3.0, 0.1, 7e5):
        mean.add({"w": again}, weight)
    assert torch.equal(mean.result()["w"], again)
    mean.add({"w": again + 1}, 1e6)
    assert torch.equal(old, again)
    assert mean.result()["idle"] is old


def test_half_precision_is_averaged_in_single() -> None:
    ones = torch.ones(1, dtype=torch.bfloat16)
    mean = StreamingMean({"w": ones})
    for i in range(256):
        mean.add({"w": ones * (2 if i % 2 else 1)}, 1.0)
    assert mean.result()["w"].dtype == torch.bfloat16
    assert float(mean.result()["w"]) == 1.5


def test_counters_take_the_largest() -> None:
    mean = StreamingMean({"n": torch.tensor(4)})
    for seen in (6, 5):
        mean.add({"n": torch.tensor(seen)}, 1.0)
    assert mean.result()["n"].item() == 6


@pytest.mark.parametrize(
    "tensors, words",
    [
        ({"w": torch.ones(1, 3)}, r"shape \(1, 3\); expected \(2, 3\)"),
        ({"w": torch.ones(3)}, r"shape \(3,\)"),
        ({"v": torch.ones(2, 3)}, "'v', which the state does not"),
        ({"w": torch.ones(2, 3, dtype=torch.int64)}, "int64"),
    ],
)
def test_what_does_not_fit_is_refused_not_broadcast(tensors: dict[str, Tensor], words: str) -> None:
    with pytest.raises(MethodError, match=words):
        StreamingMean({"w": torch.ones(2, 3)}).add(tensors, 1.0)


@pytest.mark.parametrize(
    "told, words",
    [
        ({"samples": 0}, "samples = 0"),
        ({"samples": float("nan")}, "samples = nan"),
        ({"samples": "many"}, "samples = 'many'"),
        ({"classes": [1, 0]}, "each of the 3 classes"),
        ({"classes": [1, 0, 7]}, "each of the 3 classes"),
    ],
)
@pytest.mark.parametrize("method", [FedAvg(), HeteroFL(), FLANC()], ids=lambda m: type(m).__name__)
def test_an_update_that_tells_impossible_things_is_refused(
    method: Method[Any], told: dict[str, Any], words: str
) -> None:
    context = context_of(method, [0.5, 1.0])
    state = method.init(context)
    (update,) = answers(context, method, state, [{"width": 0.5, "samples": 1}])
    with pytest.raises(MethodError, match=f"round 1: client 0 sent .*{words}"):
        method.aggregate(context, state, iter([replace(update, **told)]))


@pytest.mark.parametrize("method", [FedAvg(), HeteroFL(), FLANC()], ids=lambda m: type(m).__name__)
def test_a_client_may_keep_its_number_of_samples_only_where_nothing_is_weighted_by_it(method: Method[Any]) -> None:
    context = context_of(method, [0.5, 1.0])
    state = method.init(context)
    (update,) = answers(context, method, state, [{"width": 0.5, "samples": 1}])
    silent = replace(update, samples=None)
    if context.tricks.weighting == "samples":
        with pytest.raises(MethodError, match="samples = None"):
            method.aggregate(context, state, iter([silent]))
    else:
        method.aggregate(context, state, iter([silent]))


# Tricks


@pytest.mark.parametrize("form", ["sum", "mean"])
def test_the_proximal_term_is_half_mu_times_the_squared_distance(form: str) -> None:
    net = nn.Linear(3, 2)
    net.bias.requires_grad_(False)
    received = {name: numbers(i, *p.shape) for i, (name, p) in enumerate(net.named_parameters())}
    term = proximal(net, received, Tricks(proximal=0.6, proximal_form=form))  # type: ignore[arg-type]
    square = (net.weight.detach().numpy() - received["weight"].numpy()) ** 2
    assert term.item() == pytest.approx(0.3 * (square.sum() if form == "sum" else square.mean()), rel=1e-5)
    term.backward()
    slope = 0.6 * (net.weight.detach().numpy() - received["weight"].numpy())
    np.testing.assert_allclose(net.weight.grad, slope if form == "sum" else slope / 6, rtol=1e-5)


@dataclass(frozen=True)
class Point:
    w: dict[str, Tensor]
    n: Tensor


def test_server_momentum_is_that_of_heavy_ball_descent() -> None:
    dice = np.random.default_rng(0)
    x, v = dice.normal(size=4), np.zeros(4)
    state, momentum = Point({"a": torch.from_numpy(x)}, torch.tensor(0)), {}
    for count in range(1, 5):
        mean = dice.normal(size=4)
        v = 0.7 * v + (mean - x)
        x = x + v
        after = Point({"a": torch.from_numpy(mean)}, torch.tensor(count))
        state, momentum = with_momentum(state, after, momentum, 0.7)
        np.testing.assert_allclose(state.w["a"], x, rtol=1e-12)
        assert state.n == count


# Batch-norm


def test_merged_statistics_are_those_of_all_values_together() -> None:
    dice = np.random.default_rng(1)
    values = [dice.normal(loc, scale, size=(n, 3)) for n, loc, scale in ((5, 0, 1), (50, 100, 0.1), (7, -3, 5))]
    parts = [
        Statistics((torch.tensor(v.mean(0)).float(),), (torch.tensor(v.var(0)).float(),), (float(len(v)),))
        for v in values
    ]
    found = merge(parts)
    whole = np.concatenate(values)
    np.testing.assert_allclose(found.means[0], whole.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found.variances[0], whole.var(0), rtol=1e-5)
    assert found.counts == (62.0,)
    np.testing.assert_allclose(merge([merge(parts[:2]), parts[2]]).variances[0], whole.var(0), rtol=1e-5)


def test_collected_statistics_are_numpys_over_everything_that_entered() -> None:
    net = without_statistics(
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 5), nn.BatchNorm1d(5))
    )
    batches = [numbers(i, 4 + i, 2, 6, 6) for i in range(3)]
    found = collect(net, batches)
    entered = [net[0](x).detach().numpy() for x in batches]
    first = np.concatenate([a.transpose(0, 2, 3, 1).reshape(-1, 3) for a in entered])
    np.testing.assert_allclose(found.means[0], first.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.variances[0], first.var(0), rtol=1e-4)
    last = np.concatenate([net[:4](x).detach().numpy() for x in batches])
    np.testing.assert_allclose(found.means[1], last.mean(0), rtol=1e-4, atol=1e-6)
    assert found.counts == (15 * 16, 15)
    assert Statistics.of(found.tensors()).counts == found.counts

    fixed = attach(net, found).eval()
    x = numbers(8, 1, 2, 6, 6)
    h = net[0](x).detach().numpy()
    h = (h - first.mean(0)[:, None, None]) / np.sqrt(first.var(0) + 1e-5)[:, None, None]
    np.testing.assert_allclose(fixed[:2](x).detach(), h, rtol=1e-4, atol=1e-5)


def test_a_far_mean_does_not_swallow_the_variance() -> None:
    net = without_statistics(nn.Sequential(nn.BatchNorm1d(1)))
    x = 1e4 + numbers(0, 500, 1)
    parts = [collect(net, [half]) for half in x.split(250)]
    assert float(merge(parts).variances[0]) == pytest.approx(x.double().numpy().var(), rel=1e-3)


def test_a_norm_that_no_pass_reaches_keeps_neutral_statistics() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.BatchNorm1d(2), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    net = without_statistics(Idle())
    found = merge([collect(net, [numbers(i, 4, 2)]) for i in range(2)])
    assert found.means[1].tolist() == [0, 0, 0]
    assert found.variances[1].tolist() == [1, 1, 1]
    assert len(batch_norms(attach(net, found))) == 2
