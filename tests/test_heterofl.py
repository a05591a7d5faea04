"""HeteroFL's `share = "convolutions"`: slices of inner convolutions, and everything else a width's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anysize as az
from anysize.elastic.skeleton import tensors_of
from anysize.errors import MethodError
from anysize.methods import Client, HeteroFL
from anysize.methods.context import Context
from anysize.methods.size import Size
from anysize.methods.training import Tricks
from anysize.runtime import load
from anysize.wire import flatten, restore
from test_golden import answers, context_of, mean_over_holders, numbers

PRUNING = HeteroFL(share="convolutions", scaler=False)


def images() -> nn.Module:
    """A stem, an inner convolution whose inputs are half its outputs, a projection, norms and a classifier."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def context(capacities: list[float], **more: Any) -> Context:
    tricks = {"batch_norm": "batch"} | more.pop("tricks", {})  # tracked statistics would hold counters, no numbers
    return context_of(PRUNING, capacities, images(), tricks=tricks, **more)


def test_a_shared_convolution_is_the_mean_of_each_entrys_holders_and_the_rest_the_mean_of_its_width() -> None:
    made = context([0.5, 1.0])
    state = PRUNING.init(made)
    assert set(state.tensors) == {"4.weight"}  # (8, 4, 3, 3): not the stem, not the 1 x 1 projection
    about = [{"width": 0.5, "samples": 2}, {"width": 1.0, "samples": 3}, {"width": 0.5, "samples": 5}]
    updates = answers(made, PRUNING, state, about)
    after = PRUNING.aggregate(made, state, iter(updates))
    sent = [update.tensors for update in updates]
    # Clients count alike, as in the authors' code. Both halves hold [:4, :2]; the full width alone the other entries.
    slices = [own["4.weight"].numpy() for own in sent]
    assert [own.shape[:2] for own in slices] == [(4, 2), (8, 4), (4, 2)]
    by_hand = slices[1].copy()
    by_hand[:4, :2] = (slices[0] + slices[1][:4, :2] + slices[2]) / 3
    np.testing.assert_allclose(after.tensors["4.weight"], by_hand, rtol=1e-5, atol=1e-6)
    oracle = mean_over_holders(state.tensors["4.weight"].numpy(), [(own, 1.0, None) for own in slices])
    np.testing.assert_allclose(after.tensors["4.weight"], oracle, rtol=1e-5, atol=1e-6)
    for name, tensor in after.own["0.5"].items():
        np.testing.assert_allclose(tensor, (sent[0][name] + sent[2][name]) / 2, rtol=1e-5, atol=1e-6)
    for name, tensor in after.own["1.0"].items():
        np.testing.assert_allclose(tensor, sent[1][name], rtol=1e-5, atol=1e-6)


def test_a_width_without_clients_keeps_its_own_tensors_and_gets_the_others_slices() -> None:
    made = context([0.5, 1.0])
    state = PRUNING.init(made)
    after = PRUNING.aggregate(made, state, iter(answers(made, PRUNING, state, [{"width": 1.0, "samples": 1}])))
    small = [tensors_of(PRUNING.customize(made, one, Size(0.5))) for one in (state, after)]
    changed = {name for name in small[0] if not torch.equal(small[0][name], small[1][name])}
    assert changed == {"4.weight"}
    assert torch.equal(small[1]["4.weight"], after.tensors["4.weight"][:4, :2])


def test_a_width_never_trained_has_parts_of_the_next_larger_ones_tensors() -> None:
    made = context([0.25, 0.75, 1.0])
    state = PRUNING.init(made)
    own = {width: {n: numbers(1, *t.shape) for n, t in tensors.items()} for width, tensors in state.own.items()}
    between = tensors_of(PRUNING.customize(made, replace(state, own=own), Size(0.5)))
    np.testing.assert_array_equal(between["1.bias"], own["0.75"]["1.bias"][:2])
    np.testing.assert_array_equal(between["9.weight"], own["0.75"]["9.weight"][:, :4])
    np.testing.assert_array_equal(between["4.weight"], state.tensors["4.weight"][:4, :2])


def test_a_run_has_plain_cross_entropy_unless_it_says_otherwise() -> None:
    assert PRUNING.recipe == Tricks(weighting="clients")
    assert HeteroFL().recipe == HeteroFL.paper
    assert not context([0.5, 1.0]).tricks.masked_loss
    assert context([0.5, 1.0], tricks={"masked_loss": True}).tricks.masked_loss


@pytest.mark.parametrize("widths", [[0.5], [1.0, 0.5], [0.25, 0.5, 1.0]])
def test_the_parts_of_updates_are_the_parameters_that_they_change(widths: list[float]) -> None:
    made = context([0.25, 0.5, 1.0])
    state = PRUNING.init(made)
    updates = answers(made, PRUNING, state, [{"width": width, "samples": 2} for width in widths])
    before, after = (flatten(one)[0] for one in (state, PRUNING.aggregate(made, state, iter(updates))))
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    clients = [Client(i, i, Size(width), 1, 2, 0) for i, width in enumerate(widths)]
    held = {name for client in clients for name in PRUNING.extract(made, state, client).parts}
    assert changed == sum(PRUNING.parts(made)[name] for name in held)
    assert sum(before[name].numel() for name in before) == sum(PRUNING.parts(made).values())


def test_what_cannot_be_is_refused_at_once() -> None:
    with pytest.raises(MethodError, match="ordered_dropout together with share"):
        HeteroFL(share="convolutions", ordered_dropout=True)
    with pytest.raises(MethodError, match="share = 'some'"):
        HeteroFL(share="some")  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="no convolution whose inputs and outputs both change"):
        PRUNING.init(context_of(PRUNING, [0.5, 1.0]))
    made = context([0.5, 1.0])
    state = PRUNING.init(made)
    (update,) = answers(made, PRUNING, state, [{"width": 0.5, "samples": 1}])
    with pytest.raises(MethodError, match=r"an update has width 0\.75; allowed: 0\.5, 1\.0"):
        PRUNING.aggregate(made, state, iter([replace(update, ticket=replace(update.ticket, width=0.75))]))


def test_a_state_that_was_written_before_widths_had_own_tensors_is_read() -> None:
    made = context_of(HeteroFL(), [0.5, 1.0])
    state = HeteroFL().init(made)
    tensors, _ = flatten(state)
    assert all(name.startswith("tensors/") for name in tensors)
    assert restore(type(state), tensors, {}).own == {}


def test_every_width_is_customised_bundled_and_resumed(tmp_path: Path) -> None:
    experiment = az.Experiment(
        data="digits",
        clients=4,
        partition={"fraction": 0.2},
        model={"name": "small-cnn", "options": {"channels": [8, 8]}},
        method=PRUNING,
        devices={"capacities": [0.5, 1.0]},
        rounds=1,
        engine={"name": "inprocess"},
    )
    experiment.run(tmp_path / "run")
    run = az.load(tmp_path / "run")
    network = load(run.bundle(tmp_path / "net.anysize").path)
    x = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        for size in ("0.5", "1.0"):
            torch.testing.assert_close(network.switch(size)(x), run.customize(size)(x), rtol=1e-4, atol=1e-5)
