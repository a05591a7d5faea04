"""Principal kernels against numpy's SVD, the two reshapes, sampling, and layers that run as two."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anysize.elastic.basis import key
from anysize.elastic.kernels import (
    Factorised,
    Pair,
    draw,
    factorised_network,
    full_rank,
    importance,
    named,
    needed_kernels,
    participating_kernels,
    principal_kernels,
    rank,
    recompose,
    sides,
    squared_norm,
)
from anysize.elastic.skeleton import hollow
from anysize.errors import MethodError

SHAPES = [(8, 5, 3, 3), (40, 3, 2, 2), (6, 6, 3, 3), (8, 30), (30, 8), (8, 5, 3), (4, 3, 2, 3, 2)]


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def matrix_of(weight: Tensor, reshape: str) -> np.ndarray:
    """The papers' two matrices, written with numpy alone."""
    array = weight.double().numpy()
    if reshape == "rows" or array.ndim == 2:
        return array.reshape(len(array), -1)
    moved = np.moveaxis(array, 2, 1)  # (N, a, M, ...)
    return moved.reshape(moved.shape[0] * moved.shape[1], -1)


@pytest.mark.parametrize("reshape", ["rows", "square"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_are_the_singular_vectors_with_the_values_as_roots_in_both(
    shape: tuple[int, ...], reshape: str
) -> None:
    weight = numbers(1, *shape)
    left, right, values = principal_kernels(weight, reshape)
    matrix = matrix_of(weight, reshape)
    expected = np.linalg.svd(matrix, compute_uv=False)
    assert len(values) == full_rank(shape, reshape) == len(expected)
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    np.testing.assert_allclose(importance(left, right), expected, rtol=1e-5)
    outer = np.moveaxis(left.double().numpy(), 1, -1).reshape(-1, len(values))
    inner = right.double().numpy().reshape(len(values), -1)
    np.testing.assert_allclose(outer.T @ outer, np.diag(expected), atol=1e-4)
    np.testing.assert_allclose(inner @ inner.T, np.diag(expected), atol=1e-4)
    np.testing.assert_allclose(outer @ inner, matrix, atol=1e-5)
    np.testing.assert_allclose(recompose(left, right), weight, atol=1e-5)
    assert bool((outer[np.abs(outer).argmax(0), np.arange(len(values))] > 0).all())


def test_a_double_weight_keeps_its_digits() -> None:
    weight = numbers(2, 12, 40, dtype=torch.float64)
    left, right, values = principal_kernels(weight)
    np.testing.assert_allclose(recompose(left, right), weight, atol=1e-13)
    np.testing.assert_allclose(values, np.linalg.svd(weight.numpy(), compute_uv=False), rtol=1e-12)


@pytest.mark.parametrize("shape", [(8, 20), (20, 8)], ids=str)
def test_a_weight_of_low_rank_or_zero_is_still_the_sum_of_its_kernels(shape: tuple[int, int]) -> None:
    low = numbers(3, shape[0], 2) @ numbers(4, 2, shape[1])
    for weight in (low, torch.zeros(shape)):
        left, right, values = principal_kernels(weight)
        np.testing.assert_allclose(recompose(left, right), weight, atol=1e-5)
        assert torch.isfinite(left).all()
        assert torch.isfinite(right).all()
        assert float(values[2:].max()) < 1e-5


def test_part_of_the_kernels_is_the_nearest_weight_of_that_rank() -> None:
    weight = numbers(5, 6, 4, 3, 3)
    left, right, values = principal_kernels(weight)
    error = (recompose(left[:, :2], right[:2]) - weight).square().sum()
    assert float(error) == pytest.approx(float(values[2:].square().sum()), rel=1e-4)


def test_the_squared_norm_of_the_product_needs_no_product() -> None:
    left, right = numbers(6, 7, 3, 3, 1), numbers(7, 3, 5, 1, 3)
    assert float(squared_norm(left, right)) == pytest.approx(float(recompose(left, right).square().sum()), rel=1e-5)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_squared_norm_holds_the_factors_and_small_products_in_either_memory_layout(
    layout: torch.memory_format,
) -> None:
    left, right, _ = principal_kernels(numbers(8, 6, 5, 3, 3))
    left, right = left.requires_grad_(), right.to(memory_format=layout).requires_grad_()
    held: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm = squared_norm(left, right) * 3
    assert float(norm.detach()) == pytest.approx(3 * float(recompose(left, right).detach().square().sum()), rel=1e-5)
    beside = [tensor for tensor in held if tensor.data_ptr() not in (left.data_ptr(), right.data_ptr())]
    assert len(held) == len(beside) + 2
    rows = len(right)  # one for every kernel
    assert all(tensor.numel() == 1 or tensor.shape == (rows, rows) for tensor in beside)
    norm.backward()  # type: ignore[no-untyped-call]
    assert right.grad is not None
    assert right.grad.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("shapes", [((6, 4), (4, 5)), ((6, 4, 1, 1), (4, 5, 3, 3)), ((6, 4, 3, 1), (4, 5, 1, 3))])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_of_the_squared_norm_is_twice_the_product_times_the_other_factor(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], layout: torch.memory_format
) -> None:
    left, right = (numbers(seed, *shape) for seed, shape in enumerate(shapes))
    if left.dim() == 4:
        left, right = left.to(memory_format=layout), right.to(memory_format=layout)
    (2.5 * squared_norm(left.requires_grad_(), right.requires_grad_())).backward()  # type: ignore[no-untyped-call]
    outer = np.moveaxis(left.detach().numpy(), 1, -1).reshape(-1, 4)  # (N k, R)
    inner = right.detach().numpy().reshape(4, -1)
    product = outer @ inner
    assert left.grad is not None
    assert right.grad is not None
    of_left = np.moveaxis(left.grad.numpy(), 1, -1).reshape(-1, 4)
    np.testing.assert_allclose(of_left, 5 * product @ inner.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(right.grad.numpy().reshape(4, -1), 5 * outer.T @ product, rtol=1e-4, atol=1e-4)


def test_the_squared_norm_of_several_weights_is_the_sum_of_theirs_with_the_same_gradients() -> None:
    factors = [numbers(seed, *shape) for seed, shape in enumerate([(6, 4), (4, 5), (3, 2, 3, 1), (2, 7, 1, 3)])]
    together = [factor.clone().requires_grad_() for factor in factors]
    apart = [factor.clone().requires_grad_() for factor in factors]
    whole = squared_norm(*together)
    parts = [squared_norm(*apart[:2]), squared_norm(*apart[2:])]
    assert float(whole) == pytest.approx(float(sum(parts)), rel=1e-6)
    (whole * 3).backward()  # type: ignore[no-untyped-call]
    for part in parts:
        (part * 3).backward()  # type: ignore[no-untyped-call]
    for one, other in zip(together, apart):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.equal(other.grad)


def test_the_squared_norm_has_the_same_gradients_inside_torchs_function_transforms() -> None:
    stacked = [torch.stack([numbers(seed + 10 * one, *shape) for one in range(3)]) for seed, shape in
               enumerate([(6, 4, 1, 1), (4, 5, 3, 3)])]  # fmt: skip
    leaves = [factor.clone().requires_grad_() for factor in stacked]
    torch.func.vmap(lambda left, right: squared_norm(left, right, times=0.5))(*leaves).sum().backward()
    for client in range(3):
        left, right = (factor[client].clone().requires_grad_() for factor in stacked)
        squared_norm(left, right, times=0.5).backward()  # type: ignore[no-untyped-call]
        for leaf, own in zip(leaves, (left, right)):
            assert leaf.grad is not None
            assert own.grad is not None
            torch.testing.assert_close(leaf.grad[client], own.grad)


def test_pairs_hold_their_factors_during_a_pass_only_even_if_it_fails() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
    left, right, _ = principal_kernels(net[0].weight.detach())
    pair = Factorised(net, {"0.weight": left}, {"0.weight": right})
    x = numbers(3, 4)
    torch.testing.assert_close(pair(x), net(x))
    buffers = dict(pair.network.named_buffers())
    assert all(buffer.is_meta for buffer in buffers.values())
    with pytest.raises(RuntimeError, match="shape"):
        pair(numbers(3, 7))
    assert all(now is buffers[name] for name, now in pair.network.named_buffers())
    assert len(buffers) == 2


@pytest.mark.parametrize("passes", [True, False])
def test_the_regulariser_of_a_recurrent_weight_is_its_norm_whether_a_pass_made_it_or_not(passes: bool) -> None:
    layer = nn.Sequential(nn.LSTM(3, 4, batch_first=True))
    kernels = {name: principal_kernels(p.detach()) for name, p in layer.named_parameters() if p.dim() == 2}
    left, right = ({name: own[i][:, :2] if i == 0 else own[i][:2] for name, own in kernels.items()} for i in (0, 1))
    rest = {name: p.detach() for name, p in layer.named_parameters() if p.dim() == 1}
    module = factorised_network(hollow(layer), named(left, right, rest), 0.5)
    if passes:
        module(torch.ones(1, 2, 3))
    module.regulariser().backward()  # type: ignore[no-untyped-call]
    assert not module._made
    for name in left:
        outer, inner = left[name].numpy(), right[name].numpy()
        product = outer @ inner
        np.testing.assert_allclose(module.left[key(name)].grad, 0.5 * product @ inner.T, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(module.right[key(name)].grad, 0.5 * outer.T @ product, rtol=1e-4, atol=1e-5)


def test_the_rank_of_a_client_is_rounded_up_and_never_zero() -> None:
    assert [rank((64, 64, 3, 3), keep) for keep in (0.2, 0.4, 0.5, 1.0)] == [13, 26, 32, 64]
    assert rank((64, 2, 1), 0.01) == 1
    assert rank((10, 100), 0.3) == 3  # 0.3 * 10 is a little above 3 in floating point


def test_the_needed_kernels_are_two_to_the_entropy() -> None:
    values = np.array([4.0, 2.0, 1.0, 1.0])
    shares = values / values.sum()
    expected = 2 ** -(shares * np.log2(shares)).sum()
    assert needed_kernels(torch.tensor(values)) == pytest.approx(expected)
    assert needed_kernels(torch.ones(16)) == pytest.approx(16)
    assert needed_kernels(torch.zeros(4)) == pytest.approx(4)


def test_the_authors_count_of_needed_kernels_is_one_over_the_sum_of_squares() -> None:
    values = np.array([4.0, 2.0, 1.0, 1.0])
    shares = values / values.sum()
    assert participating_kernels(torch.tensor(values)) == pytest.approx(1 / (shares**2).sum())
    assert participating_kernels(torch.ones(16)) == pytest.approx(16)
    assert participating_kernels(torch.zeros(4)) == pytest.approx(4)
    assert participating_kernels(torch.tensor(values)) < needed_kernels(torch.tensor(values))


def without_replacement(shares: np.ndarray, count: int) -> dict[tuple[int, ...], float]:
    """The probability of each set when one after another is drawn among those that are left."""
    found: Counter[tuple[int, ...]] = Counter()
    for order in itertools.permutations(range(len(shares)), count):
        chance, left = 1.0, 1.0
        for item in order:
            chance, left = chance * shares[item] / left, left - shares[item]
        found[tuple(sorted(order))] += chance
    return dict(found)


@pytest.mark.parametrize("sampling", ["importance", "softmax", "uniform"])
def test_kernels_are_drawn_one_after_another_by_the_papers_probabilities(sampling: str) -> None:
    values, kappa = np.array([2.0, 1.5, 1.0, 0.5]), 2.0
    weights = {"importance": values**kappa, "softmax": np.exp(values), "uniform": np.ones(4)}[sampling]
    expected = without_replacement(weights / weights.sum(), 2)
    random, draws = torch.Generator().manual_seed(0), 8000
    seen = Counter(tuple(draw(torch.tensor(values), 2, random, sampling, kappa).tolist()) for _ in range(draws))
    for chosen, chance in expected.items():
        assert abs(seen[chosen] / draws - chance) < 5 * np.sqrt(chance * (1 - chance) / draws), (chosen, chance)


def test_top_takes_the_largest_and_kappa_sharpens() -> None:
    values, random = torch.tensor([1.0, 3.0, 2.0, 0.0]), torch.Generator().manual_seed(0)
    assert draw(values, 2, random, "top").tolist() == [1, 2]
    assert all(draw(values, 2, random, "importance", 200.0).tolist() == [1, 2] for _ in range(20))
    assert all(3 not in draw(values, 3, random, "importance", 1.0).tolist() for _ in range(20))
    assert draw(values, 4, random).tolist() == [0, 1, 2, 3]


LAYERS = {
    "conv": (nn.Conv2d(5, 8, 3, stride=2, padding=1), (2, 5, 9, 11)),
    "conv dilated": (nn.Conv2d(5, 8, (3, 2), padding=(2, 1), dilation=2, bias=False), (2, 5, 9, 9)),
    "conv 1d": (nn.Conv1d(5, 8, 4, stride=3), (2, 5, 20)),
    "conv 3d": (nn.Conv3d(2, 4, 2, padding=1), (2, 2, 4, 4, 4)),
    "linear": (nn.Linear(5, 8), (2, 3, 5)),
}


@pytest.mark.parametrize("reshape", ["rows", "square"])
@pytest.mark.parametrize("kind", LAYERS)
def test_two_layers_after_one_another_are_the_layer(kind: str, reshape: str) -> None:
    layer, shape = LAYERS[kind]
    net, x = nn.Sequential(layer), numbers(8, *shape)
    left, right, _ = principal_kernels(layer.weight.detach(), reshape)
    pair = Factorised(net, {"0.weight": left}, {"0.weight": right})
    assert isinstance(pair.network[0], Pair)
    torch.testing.assert_close(pair(x), net(x), rtol=1e-4, atol=1e-5)
    small = Factorised(net, {"0.weight": left[:, :2]}, {"0.weight": right[:2]})
    cut = nn.Sequential(type(layer)(**_options(layer)))
    cut[0].weight.data = recompose(left[:, :2], right[:2])
    cut[0].bias = layer.bias
    torch.testing.assert_close(small(x), cut(x), rtol=1e-4, atol=1e-5)


def _options(layer: nn.Module) -> dict[str, object]:
    if isinstance(layer, nn.Linear):
        return {"in_features": layer.in_features, "out_features": layer.out_features}
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation")
    return {name: getattr(layer, name) for name in names} | {"bias": layer.bias is not None}


class Odd(nn.Module):
    """Layers whose weights are read by something else than their own call."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4, batch_first=True)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.circular = nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(self.lstm(x)[0]))
        x = self.attention(x, x, x)[0]
        return self.circular(x.transpose(1, 2))


def test_weights_that_others_read_are_recomposed() -> None:
    net, x = Odd(), numbers(9, 2, 5, 6)
    names = ["lstm.weight_ih_l0", "lstm.weight_hh_l0", "first.weight", "attention.in_proj_weight", "circular.weight"]
    kernels = {name: principal_kernels(net.get_parameter(name).detach()) for name in names}
    left, right = ({name: own[i] for name, own in kernels.items()} for i in (0, 1))
    factorised = Factorised(net, left, right)
    assert not any(isinstance(child, Pair) for child in factorised.modules())
    torch.testing.assert_close(factorised(x), net(x), rtol=1e-4, atol=1e-5)
    factorised(x).sum().backward()
    assert all(parameter.grad is not None for parameter in factorised.factors())
    full = sum(parameter.numel() for name, parameter in net.named_parameters() if name not in names)
    assert sum(parameter.numel() for parameter in factorised.dense()) == full


def test_a_weight_that_layers_share_reaches_all_of_them_and_gathers_their_gradients() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    net[2].weight = net[0].weight
    weight, x = net[0].weight, numbers(3, 4, 6)
    left, right, _ = principal_kernels(weight.detach())
    factorised = Factorised(net, {"0.weight": left}, {"0.weight": right})
    torch.testing.assert_close(factorised(x), net(x), rtol=1e-4, atol=1e-5)
    factorised(x).square().sum().backward()
    net(x).square().sum().backward()
    found = factorised.left["0:weight"].grad
    torch.testing.assert_close(found, weight.grad @ right.T, rtol=1e-3, atol=1e-4)


def test_names_go_there_and_back_and_strange_ones_are_refused() -> None:
    left, right, rest = {"a.weight": torch.ones(1)}, {"a.weight": torch.zeros(1)}, {"a.bias": torch.ones(2)}
    assert sides(named(left, right, rest)) == {"left": left, "right": right, "network": rest}
    with pytest.raises(MethodError, match=r"'middle\.a'; allowed: names that begin with left"):
        sides({"middle.a": torch.ones(1)})


class Asking(nn.Module):
    """A network whose own code asks for a layer's weight, as T5's does for its type."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x)).to(self.second.weight.dtype)
        return self.second(hidden) + self.first.weight.mean()


def test_code_that_asks_a_factorised_layer_for_its_weight_gets_the_product() -> None:
    torch.manual_seed(0)
    network, x = Asking(), torch.rand(3, 12)
    weights = {name: principal_kernels(network.get_parameter(name)) for name in ("first.weight", "second.weight")}
    factorised = Factorised(
        network,
        {name: kernels.left for name, kernels in weights.items()},
        {name: kernels.right for name, kernels in weights.items()},
    )
    torch.testing.assert_close(factorised(x), network(x))
