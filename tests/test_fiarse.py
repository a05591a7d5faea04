"""FIARSE by channels: the channels with the largest weights, and the mean of every entry over its holders."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anysize.methods import FIARSE, Client
from anysize.methods.context import Context
from anysize.methods.fiarse import important
from anysize.methods.size import Size
from test_golden import context_of, numbers

Array = np.ndarray[Any, Any]


def perceptron() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))


def largest(weights: list[Array], width: float) -> tuple[list[int], list[int]]:
    """By numpy: the units of both hidden layers, by the magnitudes of the rows before and the columns after them."""
    first, second, head = map(np.abs, weights)
    scores = first.sum(1) + second.sum(0), second.sum(1) + head.sum(0)
    one, two = (sorted(np.argsort(-own)[: int(np.ceil(width * len(own)))].tolist()) for own in scores)
    return one, two


def weights_of(tensors: dict[str, torch.Tensor]) -> list[Array]:
    return [tensors[name].numpy() for name in ("0.weight", "2.weight", "4.weight")]


@pytest.mark.parametrize("width", [0.25, 0.5, 0.7, 1.0])
def test_the_units_with_the_largest_weights_before_and_after_them_are_chosen(width: float) -> None:
    context = context_of(FIARSE(), [0.25, 0.5, 0.7, 1.0], perceptron())
    state = FIARSE().init(context)
    kept = important(context, state.tensors, width)
    assert tuple(list(kept.units(name)) for name in ("0", "2")) == largest(weights_of(state.tensors), width)


def test_a_smaller_sub_model_lies_inside_every_larger_one() -> None:
    context = context_of(FIARSE(), [0.25, 0.5, 1.0], perceptron())
    tensors = FIARSE().init(context).tensors
    chosen = [set(important(context, tensors, width).units("0")) for width in (0.25, 0.5, 0.75, 1.0)]
    assert all(small < large for small, large in pairwise(chosen))
    assert chosen[0] != {0, 1}


def test_every_entry_is_averaged_over_the_clients_that_had_it() -> None:
    """The oracle writes every client's numbers at the places that numpy chose from the state before the round."""
    method = FIARSE()
    context = context_of(method, [0.25, 0.5, 0.7], perceptron(), tricks={"weighting": "samples"})
    state = method.init(context)
    sums = {name: np.zeros(tensor.shape) for name, tensor in state.tensors.items()}
    counts = {name: np.zeros(tensor.shape) for name, tensor in state.tensors.items()}
    updates = []
    for id, (width, samples) in enumerate([(0.25, 3), (0.7, 1), (0.5, 2)]):
        message = method.extract(context, state, Client(id, id, Size(width), 4, samples, 0))
        sent = {name: numbers(id, *tensor.shape) for name, tensor in message.tensors.items()}
        for name, at in places(context, state.tensors, width).items():
            assert np.array_equal(message.tensors[name].numpy(), state.tensors[name].numpy()[at])
            sums[name][at] += samples * sent[name].numpy()
            counts[name][at] += samples
        updates.append(replace(method.pack(method.build(context, message), message), tensors=sent, samples=samples))
    after = method.aggregate(context, state, iter(updates)).tensors
    for name, old in state.tensors.items():
        held = counts[name] > 0
        expected = np.where(held, sums[name] / np.maximum(counts[name], 1), old.numpy())
        assert not held.all() or name == "4.bias"
        np.testing.assert_allclose(after[name].numpy(), expected, rtol=1e-5, atol=1e-6)


def places(context: Context, tensors: dict[str, torch.Tensor], width: float) -> dict[str, tuple[Array, ...]]:
    one, two = largest(weights_of(tensors), width)
    axes = {"0.weight": (one, range(6)), "0.bias": (one,), "2.weight": (two, one), "2.bias": (two,)}
    axes |= {"4.weight": (range(3), two), "4.bias": (range(3),)}
    return {name: np.ix_(*map(list, chosen)) for name, chosen in axes.items()}


def test_a_finished_network_computes_what_the_full_one_does_without_the_other_units() -> None:
    method = FIARSE()
    context = context_of(method, [0.5, 1.0], perceptron())
    state = method.init(context)
    one, two = largest(weights_of(state.tensors), 0.5)
    x = numbers(7, 4, 6).numpy()
    tensors = {name: tensor.numpy() for name, tensor in state.tensors.items()}
    hidden = np.maximum(x @ tensors["0.weight"].T + tensors["0.bias"], 0)
    hidden[:, [unit for unit in range(8) if unit not in one]] = 0
    hidden = np.maximum(hidden @ tensors["2.weight"].T + tensors["2.bias"], 0)
    hidden[:, [unit for unit in range(5) if unit not in two]] = 0
    expected = hidden @ tensors["4.weight"].T + tensors["4.bias"]
    found = method.customize(context, state, Size(0.5))(torch.from_numpy(x))
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


class Shared(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.third.weight = self.second.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.head(torch.relu(self.third(x)))


def test_a_weight_that_two_layers_share_counts_once() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        context = context_of(FIARSE(), [0.4, 1.0], Shared())
    tensors = FIARSE().init(context).tensors
    one, two, head = (np.abs(tensors[name].numpy()) for name in ("first.weight", "second.weight", "head.weight"))
    scores = one.sum(1) + two.sum(0) + two.sum(1) + head.sum(0)
    (group,) = context.axes.groups
    kept = important(context, tensors, 0.4)
    assert list(kept.units(group.name)) == sorted(np.argsort(-scores)[:2].tolist())
