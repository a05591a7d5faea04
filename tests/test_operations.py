"""Multiply-adds by hand: a layer's weights times its positions, forward, and backward for each gradient that is needed.

The first layer's inputs are the data, which need no gradient: its backward pass does as much as its forward pass, that
of every later layer twice as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anysize.cost import count as cost
from anysize.cost.operations import counter
from multiplied import multiplied

BATCH = 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False)[0]


class Pooling(nn.Module):
    """Linear features, summed up by a learned vector."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.vector = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.vector


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 6), nn.Bilinear(4, 6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.first(x))


class Last(nn.Module):
    """A recurrent layer's outputs, as one tensor."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def stack(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


# Name: network, shape of a sample, multiply-adds of a sample's forward pass, and of its backward pass.
BY_HAND: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "linear": (
        lambda: stack(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 4)),
        (7,),
        5 * 7 + 4 * 5,
        5 * 7 + 2 * 4 * 5,
    ),
    "linear at every position": (lambda: nn.Linear(7, 5), (6, 7), 6 * 5 * 7, 6 * 5 * 7),
    "dense": (
        lambda: stack(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2, padding=1)),
        (3, 10, 10),
        10 * 10 * 8 * 3 * 9 + 5 * 5 * 12 * 8 * 9,
        10 * 10 * 8 * 3 * 9 + 2 * 5 * 5 * 12 * 8 * 9,
    ),
    "dilated": (
        lambda: stack(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, (3, 2), dilation=2)),
        (3, 10, 10),
        10 * 10 * 8 * 3 + 6 * 8 * 6 * 8 * 3 * 2,
        10 * 10 * 8 * 3 + 2 * 6 * 8 * 6 * 8 * 3 * 2,
    ),
    "grouped": (
        lambda: stack(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3, groups=4)),
        (3, 10, 10),
        8 * 8 * 8 * 3 * 9 + 6 * 6 * 12 * (8 // 4) * 9,
        8 * 8 * 8 * 3 * 9 + 2 * 6 * 6 * 12 * (8 // 4) * 9,
    ),
    "grouped first": (
        lambda: nn.Conv2d(6, 12, 3, groups=3),
        (6, 10, 10),
        8 * 8 * 12 * (6 // 3) * 9,
        8 * 8 * 12 * (6 // 3) * 9,
    ),
    "depthwise": (
        lambda: stack(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Conv2d(6, 10, 1)),
        (3, 8, 8),
        8 * 8 * (6 * 3 + 6 * 9 + 10 * 6),
        8 * 8 * (6 * 3 + 2 * 6 * 9 + 2 * 10 * 6),
    ),
    "depthwise with two outputs a channel": (
        lambda: stack(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 12, 3, stride=2, groups=6)),
        (3, 9, 9),
        9 * 9 * 6 * 3 + 4 * 4 * 12 * 9,
        9 * 9 * 6 * 3 + 2 * 4 * 4 * 12 * 9,
    ),
    "transposed": (  # every input position meets every weight
        lambda: stack(nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1)),
        (3, 5, 5),
        5 * 5 * 4 * 3 + 5 * 5 * 4 * 6 * 9,
        5 * 5 * 4 * 3 + 2 * 5 * 5 * 4 * 6 * 9,
    ),
    "transposed in groups": (
        lambda: stack(nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2)),
        (3, 5, 5),
        5 * 5 * 4 * 3 + 5 * 5 * 4 * (6 // 2) * 9,
        5 * 5 * 4 * 3 + 2 * 5 * 5 * 4 * (6 // 2) * 9,
    ),
    "one dimension": (
        lambda: stack(nn.Conv1d(3, 4, 3), nn.Conv1d(4, 8, 3, groups=4), nn.ConvTranspose1d(8, 2, 2)),
        (3, 9),
        7 * 4 * 3 * 3 + 5 * 8 * 1 * 3 + 5 * 8 * 2 * 2,
        7 * 4 * 3 * 3 + 2 * 5 * 8 * 1 * 3 + 2 * 5 * 8 * 2 * 2,
    ),
    "three dimensions": (
        lambda: stack(nn.Conv3d(2, 4, 2), nn.Conv3d(4, 6, 2, groups=2)),
        (2, 5, 5, 5),
        4**3 * 4 * 2 * 8 + 3**3 * 6 * (4 // 2) * 8,
        4**3 * 4 * 2 * 8 + 2 * 3**3 * 6 * (4 // 2) * 8,
    ),
    "mixed": (
        lambda: stack(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.Conv2d(8, 12, 1, groups=2),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.ConvTranspose2d(12, 4, 2, stride=2, groups=4),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 10),
        ),
        (3, 8, 8),
        4 * 4 * (8 * 3 * 9 + 8 * 9 + 12 * 4 + 12 * 1 * 4) + 10 * 16,
        4 * 4 * (8 * 3 * 9 + 2 * (8 * 9 + 12 * 4 + 12 * 1 * 4)) + 2 * 10 * 16,
    ),
    "frozen": (  # what lies before the first trained layer needs no gradient, what lies behind it needs its input's
        lambda: stack(frozen(nn.Conv2d(3, 4, 3)), nn.Conv2d(4, 4, 3, groups=2), frozen(nn.Conv2d(4, 2, 3, groups=2))),
        (3, 9, 9),
        7 * 7 * 4 * 3 * 9 + 5 * 5 * 4 * 2 * 9 + 3 * 3 * 2 * 2 * 9,
        5 * 5 * 4 * 2 * 9 + 3 * 3 * 2 * 2 * 9,
    ),
    "attention": (  # queries, keys, values; scores; their mixture of values; the output
        Attention,
        (10, 12),
        10 * 36 * 12 + 10 * 10 * 12 + 10 * 10 * 12 + 10 * 12 * 12,
        10 * 36 * 12 + 2 * (10 * 10 * 12 + 10 * 10 * 12 + 10 * 12 * 12),
    ),
    "encoder": (  # two linear layers more, and inputs that a first layer made
        lambda: stack(nn.Linear(5, 12), nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True)),
        (10, 5),
        10 * 12 * 5 + 10 * (36 * 12 + 2 * 10 * 12 + 12 * 12 + 2 * 24 * 12),
        10 * 12 * 5 + 2 * 10 * (36 * 12 + 2 * 10 * 12 + 12 * 12 + 2 * 24 * 12),
    ),
}
# Of these there is no independent count: one runs in a single kernel, the other has a gradient that is no sum of
# products, the outer product of the vector and what it gave.
BY_HAND_ALONE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "bilinear": (Pairs, (4,), 6 * 4 + 5 * 4 * 6, 6 * 4 + 2 * 5 * 4 * 6),
    "a vector": (Pooling, (9, 4), 9 * 6 * 4 + 9 * 6, 9 * 6 * 4 + 9 * 6),
}


def counts(network: nn.Module, x: Tensor) -> tuple[int, int]:
    """(forward, forward and backward) of a sample, as costs are counted."""
    network = network.to("meta").train()
    step, _ = cost._count(lambda: network(x.to("meta")).sum().backward(), network)
    assert step % len(x) == 0
    return cost.forward_macs(network, x.to("meta")), step // len(x)


@pytest.mark.parametrize("name", BY_HAND | BY_HAND_ALONE)
def test_a_network_multiplies_what_is_counted_by_hand(name: str) -> None:
    make, shape, forward, backward = (BY_HAND | BY_HAND_ALONE)[name]
    assert counts(make(), torch.zeros(BATCH, *shape)) == (forward, forward + backward)


@pytest.mark.parametrize("name", BY_HAND)
def test_real_tensors_multiply_what_is_counted(name: str) -> None:
    make, shape, forward, backward = BY_HAND[name]
    network, x = make().train(), torch.rand(BATCH, *shape)
    assert multiplied(lambda: network(x).sum().backward()) == BATCH * (forward + backward)


def test_inputs_that_need_a_gradient_cost_the_first_layer_one_more() -> None:
    layer, x = nn.Conv2d(4, 8, 3, groups=2, device="meta"), torch.zeros(1, 4, 6, 6, device="meta", requires_grad=True)
    with counter() as found:
        layer(x).sum().backward()
    assert found.get_total_flops() // 2 == 3 * 4 * 4 * 8 * 2 * 9


def test_an_embedding_multiplies_nothing_but_wants_a_gradient() -> None:
    network = stack(nn.Embedding(30, 5), nn.Linear(5, 7))
    assert counts(network, torch.zeros(BATCH, 6, dtype=torch.int64)) == (6 * 7 * 5, 3 * 6 * 7 * 5)


def test_a_sum_of_products_over_a_batch_is_counted() -> None:
    added, left, right = (torch.zeros(*shape, device="meta") for shape in ((5, 3), (2, 5, 7), (2, 7, 3)))
    with counter() as found:
        torch.addbmm(added, left, right)
    assert found.get_total_flops() // 2 == 2 * 5 * 7 * 3


# Recurrent layers


RECURRENT: dict[str, tuple[type[nn.RNNBase], int, dict[str, Any]]] = {
    "rnn": (nn.RNN, 1, {}),
    "gru": (nn.GRU, 3, {}),
    "lstm": (nn.LSTM, 4, {}),
    "gru of two layers": (nn.GRU, 3, {"num_layers": 2}),
    "lstm of two layers both ways": (nn.LSTM, 4, {"num_layers": 2, "bidirectional": True}),
    "lstm that projects": (nn.LSTM, 4, {"proj_size": 3, "num_layers": 2}),
}


def recurrent_by_hand(gates: int, inputs: int, hidden: int, steps: int, options: dict[str, Any]) -> tuple[int, int]:
    """(forward, backward) of a sample; `inputs` are the data's, the first state is no one's output."""
    ways, project = 2 if options.get("bidirectional") else 1, options.get("proj_size", 0)
    state = project or hidden
    forward = backward = 0
    for layer in range(options.get("num_layers", 1)):
        from_inputs = gates * hidden * (ways * state if layer else inputs)
        from_state = gates * hidden * state
        projection = hidden * project
        forward += ways * steps * (from_inputs + from_state + projection)
        backward += ways * steps * (from_inputs + from_state + projection)  # of the weights
        backward += ways * ((steps if layer else 0) * from_inputs + (steps - 1) * from_state + steps * projection)
    return forward, backward


@pytest.mark.parametrize("steps", [2, 20])
@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_layer_multiplies_what_is_counted_by_hand(name: str, steps: int) -> None:
    kind, gates, options = RECURRENT[name]
    forward, backward = recurrent_by_hand(gates, 5, 6, steps, options)
    network, x = Last(kind(5, 6, batch_first=True, **options)), torch.rand(BATCH, steps, 5)
    assert multiplied(lambda: network(x).sum().backward()) == BATCH * (forward + backward)
    assert counts(network, x) == (forward, forward + backward)


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_a_recurrent_cell_is_one_step(cell: type[nn.RNNCellBase]) -> None:
    gates = {nn.RNNCell: 1, nn.GRUCell: 3, nn.LSTMCell: 4}[cell]
    network = cell(5, 6, device="meta")
    with counter() as found:
        network(torch.zeros(BATCH, 5, device="meta"))
    assert found.get_total_flops() // 2 == BATCH * gates * 6 * (5 + 6)
