"""A recurrent layer counted by a few of its steps costs what torch counts for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from anysize.cost import count as cost
from anysize.cost.recurrence import FewSteps
from anysize.elastic.basis import Composed


class Reading(nn.Module):
    """A recurrent layer, something after it, and a decision."""

    def __init__(self, layer: nn.Module, features: int, embedded: bool) -> None:
        super().__init__()
        self.embedding = nn.Linear(5, 5) if embedded else nn.Identity()
        self.layer = layer
        self.head = nn.Linear(features, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.layer(self.embedding(x))[0]))


LAYERS: dict[str, tuple[type[nn.Module], dict[str, Any], int]] = {
    "lstm": (nn.LSTM, {}, 8),
    "lstm of two layers both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}, 16),
    "lstm that projects": (nn.LSTM, {"proj_size": 4}, 4),
    "lstm without bias": (nn.LSTM, {"bias": False}, 8),
    "gru of two layers with dropout": (nn.GRU, {"num_layers": 2, "dropout": 0.5}, 8),
    "gru both ways": (nn.GRU, {"bidirectional": True}, 16),
    "rnn": (nn.RNN, {}, 8),
    "rnn with relu": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}, 8),
}


def counts(network: nn.Module, x: torch.Tensor) -> tuple[tuple[int, int], int]:
    network.train()
    step = cost._count(lambda: network(x).square().sum().backward(), network)  # type: ignore[no-untyped-call]
    return step, cost.forward_macs(network, x)


@pytest.mark.parametrize(("batch_first", "embedded"), [(False, False), (True, True)])
@pytest.mark.parametrize("layer", LAYERS)
def test_few_steps_count_as_all(layer: str, batch_first: bool, embedded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, options, features = LAYERS[layer]
    network = Reading(kind(5, 8, batch_first=batch_first, **options), features, embedded).to("meta")
    x = torch.zeros(5, 6, 5, device="meta")
    few = counts(network, x)
    monkeypatch.setattr("anysize.cost.recurrence._LAYERS", ())
    assert few == counts(network, x)


def test_few_steps_of_composed_weights_count_as_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A composed network takes its weights out of the layer's list after every forward pass."""
    reading = Reading(nn.LSTM(5, 8), 8, embedded=True)
    basis, coefficients = ({"layer.weight_hh_l0": torch.ones(*shape)} for shape in ((3, 4), (32, 2, 3)))
    network = Composed(reading, basis, coefficients).to("meta")
    x = torch.zeros(5, 6, 5, device="meta")
    few = counts(network, x)
    monkeypatch.setattr("anysize.cost.recurrence._LAYERS", ())
    assert few == counts(network, x)


def test_real_tensors_and_packed_sequences_are_left_alone() -> None:
    layer = nn.LSTM(5, 8)
    x = torch.rand(9, 2, 5)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([9, 4]))
    expected = layer(x)[0], layer(packed)[0].data
    with FewSteps():
        assert torch.equal(layer(x)[0], expected[0])
        assert torch.equal(layer(packed)[0].data, expected[1])
