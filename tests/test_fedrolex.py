"""FedRolex: windows that roll a channel further every round, and the mean of every entry over its holders."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from anysize.methods import Client, FedRolex
from anysize.methods.fedrolex import rolled
from anysize.methods.size import Size
from test_golden import context_of, numbers


def places(size: int, width: float, round: int) -> list[int]:
    """By numpy: the first channels, rolled by a channel in every round."""
    chosen = np.arange(size) < math.ceil(width * size)
    return np.flatnonzero(np.roll(chosen, round - 1)).tolist()


@pytest.mark.parametrize("width", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("round", [1, 2, 7, 8, 9, 23])
def test_the_window_is_that_of_numpys_roll(width: float, round: int) -> None:
    context = context_of(FedRolex(), [0.25, 0.5, 1.0])
    kept = rolled(context, width, round)
    assert context.axes.groups
    for group in context.axes.groups:
        assert list(kept.units(group.name)) == places(group.size, width, round)


def test_every_entry_is_averaged_over_the_clients_whose_window_has_it() -> None:
    """The oracle writes every client's window into the full tensors with numpy's own indices."""
    method, round = FedRolex(), 6
    context = context_of(method, [0.25, 0.5, 1.0], tricks={"classwise_head": False, "weighting": "samples"})
    state = method.init(context)
    sums = {name: np.zeros(tensor.shape) for name, tensor in state.tensors.items()}
    weights = {name: np.zeros(tensor.shape) for name, tensor in state.tensors.items()}
    updates = []
    for id, (width, samples) in enumerate([(0.25, 3), (0.5, 1), (0.25, 2)]):
        message = method.extract(context, state, Client(id, id, Size(width), round, samples, 0))
        sent = {name: numbers(id, *tensor.shape) for name, tensor in message.tensors.items()}
        for name, tensor in message.tensors.items():
            at = np.ix_(*(_kept(axis, full, width, round) for axis, full in zip(tensor.shape, sums[name].shape)))
            assert np.array_equal(tensor.numpy(), state.tensors[name].numpy()[at])
            sums[name][at] += samples * sent[name].numpy()
            weights[name][at] += samples
        updates.append(replace(method.pack(method.build(context, message), message), tensors=sent, samples=samples))
    after = method.aggregate(context, state, iter(updates)).tensors
    for name, old in state.tensors.items():
        held = weights[name] > 0
        expected = np.where(held, sums[name] / np.maximum(weights[name], 1), old.numpy())
        assert not held.all() or name.endswith("bias")
        np.testing.assert_allclose(after[name].numpy(), expected, rtol=1e-5, atol=1e-6)


def _kept(now: int, full: int, width: float, round: int) -> list[int]:
    return list(range(full)) if now == full else places(full, width, round)


def test_a_finished_network_has_the_first_channels_in_every_round() -> None:
    method = FedRolex()
    context = context_of(method, [0.5, 1.0])
    state = method.init(context)
    for job in ("calibrate", "evaluate"):
        sent = method.extract(context, state, Client(0, 0, Size(0.5), 5, 1, 0, job))
        for name, tensor in sent.tensors.items():
            assert torch.equal(tensor, state.tensors[name][tuple(slice(size) for size in tensor.shape)])


def test_the_full_network_is_a_size_that_no_client_need_train() -> None:
    assert [size.width for size in FedRolex().sizes(context_of(FedRolex(), [0.25, 0.5]))] == [0.25, 0.5, 1.0]
