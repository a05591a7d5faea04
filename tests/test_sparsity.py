"""Iterative magnitude pruning against numpy, and masks in few bytes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from anysize.elastic.sparsity import (
    Masks,
    iterative_pruning,
    pack,
    prune,
    pruning_steps,
    put_values,
    take_values,
    unpack,
)
from anysize.errors import ModelError


def weights() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = {"conv": (4, 3, 3, 3), "head": (5, 7), "bias": (5,)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.9])
def test_global_pruning_keeps_what_numpy_ranks_highest(sparsity: float) -> None:
    masks = prune(weights(), {}, sparsity)
    assert set(masks) == {"conv", "head"}
    magnitude = np.abs(np.concatenate([weights()[name].numpy().ravel() for name in ("conv", "head")]))
    gone = round(sparsity * magnitude.size)
    expected = magnitude > np.sort(magnitude)[gone - 1] if gone else np.ones(magnitude.size, bool)
    found = np.concatenate([masks[name].numpy().ravel() for name in ("conv", "head")])
    assert (found == expected).all()


def test_pruning_by_layer_has_the_same_sparsity_in_each() -> None:
    masks = prune(weights(), {}, 0.5, "layer")
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {"conv": 54, "head": 35 - round(0.5 * 35)}


def test_what_was_pruned_stays_pruned_however_large_it_became() -> None:
    first = prune(weights(), {}, 0.5)
    grown = {
        name: torch.where(first[name], tensor, 100.0) if name in first else tensor for name, tensor in weights().items()
    }
    second = prune(grown, first, 0.75)
    assert all(bool((second[name] <= first[name]).all()) for name in first)
    assert sum(int(mask.sum()) for mask in second.values()) == 143 - round(0.75 * 143)


def test_every_step_of_the_series_is_trained_from_the_first_weights_under_rising_sparsity() -> None:
    seen: list[Masks] = []

    def train(masks: Masks) -> tuple[Mapping[str, Tensor], float]:
        seen.append(masks)
        return weights(), float(len(seen))

    tickets = list(iterative_pruning([0.25, 0.5], train))
    assert [(ticket.sparsity, ticket.accuracy) for ticket in tickets] == [(0.0, 1.0), (0.25, 2.0), (0.5, 3.0)]
    assert seen == [ticket.masks for ticket in tickets]
    kept = [sum(int(mask.sum()) for mask in ticket.masks.values()) for ticket in tickets]
    assert kept == [0, 143 - round(0.25 * 143), 143 - round(0.5 * 143)]


@pytest.mark.parametrize("shape", [(1,), (7, 3), (2, 3, 3, 3), (8, 8)])
def test_packed_masks_and_values_come_back_whole(shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(len(shape))
    mask, tensor = torch.rand(shape, generator=random) < 0.5, torch.randn(shape, generator=random)
    bits = pack(mask)
    assert bits.numel() == -(-mask.numel() // 8)
    assert torch.equal(unpack(bits, shape), mask)
    assert torch.equal(put_values(take_values(tensor, bits), bits, shape), tensor * mask)


def test_bytes_that_do_not_fit_are_refused() -> None:
    bits = pack(torch.tensor([True, False, True]))
    with pytest.raises(ModelError, match="does not fit"):
        unpack(bits, (9,))
    with pytest.raises(ModelError, match="a mask that keeps 2"):
        put_values(torch.ones(3), bits, (3,))
    with pytest.raises(ModelError, match="sparsity of 1"):
        prune(weights(), {}, 1.0)


@pytest.mark.parametrize("at_once", [0.05, 0.2, 0.5])
def test_steps_reach_every_sparsity_and_none_prunes_more_than_allowed(at_once: float) -> None:
    steps = pruning_steps([0.36, 0.5, 0.9], at_once)
    assert {0.36, 0.5, 0.9} <= set(steps)
    left = np.array([1.0, *(1 - np.array(steps))])
    pruned = 1 - left[1:] / left[:-1]
    assert (pruned > 0).all()
    assert (pruned <= at_once + 1e-9).all()
    assert len(steps) < 3 + np.log(0.1) / np.log(1 - at_once)  # no more than are needed


def test_two_fifths_of_two_steps_are_two_steps() -> None:
    """Oracle: 1 - 0.8 * 0.8 = 0.36 by hand; rounding must not add a third step."""
    assert pruning_steps([0.36], 0.2) == pytest.approx([0.2, 0.36])
