"""SHeteroFL: the sum of all affordable widths' losses; and what Ladder shares: HeteroFL's mean, own statistics."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anysize as az
from anysize.client.objectives import make_objective
from anysize.elastic.slicing import narrow
from anysize.errors import MethodError
from anysize.methods import Client, FedAvg, HeteroFL, Ladder, Method, SHeteroFL
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step
from anysize.tasks import task
from anysize.testing import make_trial
from test_equivalences import bare, digits, same
from test_golden import answers, context_of, mean_over_holders, numbers


@pytest.mark.parametrize("batch_norm", ["batch", "tracked"])
def test_one_width_is_fedavg_bit_for_bit(tmp_path: Path, batch_norm: str) -> None:
    tricks = {"batch_norm": batch_norm}
    ours = digits(SHeteroFL(), [1.0], tmp_path / "sheterofl", tricks=tricks)
    theirs = digits(FedAvg(), [1.0], tmp_path / "fedavg", tricks=tricks)
    assert same(bare(ours), bare(theirs))


def test_a_step_follows_the_sum_of_all_affordable_widths_losses() -> None:
    """The oracle cuts a network for each width, takes its gradient, and adds the gradients where their entries are."""
    context = context_of(SHeteroFL(scaler=False), [0.25, 0.5, 1.0])
    method = SHeteroFL(scaler=False)
    message = method.extract(context, method.init(context), Client(0, 0, Size(0.5), 1, 1, 0))
    message = replace(message, ticket=replace(message.ticket, job="train"))
    module = method.build(context, message)
    batch = Batch(numbers(3, 7, 6), torch.arange(7) % 3)
    objective = make_objective(task("classification"), context.tricks, None)
    method.loss(module, batch, Step(0, torch.Generator(), {}, objective)).backward()
    full = copy.deepcopy(context.template).to_empty(device="cpu")
    full.load_state_dict(context.start())
    expected = {name: torch.zeros_like(p) for name, p in module.network.named_parameters()}
    for width in (0.25, 0.5):
        small = narrow(full, context.axes, width)
        nn.functional.cross_entropy(small(batch.x), batch.y).backward()
        for name, p in small.named_parameters():
            expected[name][tuple(slice(size) for size in p.shape)] += p.grad
    for name, p in module.network.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [SHeteroFL(), Ladder()], ids=repr)
def test_every_entry_is_averaged_over_the_clients_whose_largest_width_has_it(method: Method[Any]) -> None:
    context = context_of(method, [0.25, 0.5, 1.0])
    state = method.init(context)
    about = [{"width": 0.5, "samples": 4}, {"width": 0.25, "samples": 1}, {"width": 0.5, "samples": 3}]
    updates = answers(context, method, state, about)
    after = method.aggregate(context, state, iter(updates)).tensors
    for name, old in state.tensors.items():
        parts = [(u.tensors[f"network.{name}"].numpy(), float(u.samples), None) for u in updates]
        np.testing.assert_allclose(after[name], mean_over_holders(old.numpy(), parts), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [SHeteroFL(), Ladder()], ids=repr)
def test_every_width_has_statistics_of_its_own(method: Method[Any]) -> None:
    trial = make_trial(method, None, (0.25, 0.5, 1.0), {"batch_norm": "tracked"})
    updates = trial.trained()
    state = trial.method.aggregate(trial.context, trial.state, iter(updates))
    means = {width: tensors["1.running_mean"] for width, tensors in state.statistics.items()}
    assert [len(mean) for mean in means.values()] == [2, 4, 8]
    weights = [u.samples for u in updates]
    small = [u.tensors["network.1.running_mean" if u.width == 0.25 else "inner.0.1.running_mean"] for u in updates]
    expected = sum(w * mean.numpy() for w, mean in zip(weights, small)) / sum(weights)
    np.testing.assert_allclose(means["0.25"], expected, rtol=1e-5, atol=1e-7)
    network = trial.method.customize(trial.context, state, Size(0.25))
    assert torch.equal(network[1].running_mean, means["0.25"])
    assert len(trial.method.customize(trial.context, state, Size(0.75))[1].running_mean) == 6


def test_only_the_largest_width_is_uploaded() -> None:
    context = context_of(SHeteroFL(), [0.25, 0.5, 1.0])
    plain = context_of(HeteroFL(), [0.25, 0.5, 1.0])
    for width in (0.25, 0.5, 1.0):
        client = Client(0, 0, Size(width), 1, 1, 0)
        ours = SHeteroFL().extract(context, SHeteroFL().init(context), client).tensors
        theirs = HeteroFL().extract(plain, HeteroFL().init(plain), client).tensors
        assert sum(t.numel() for t in ours.values()) == sum(t.numel() for t in theirs.values())


@pytest.mark.parametrize("name", ["inner.7.0.bias", "inner.x.0.bias", "other.0.bias"])
def test_an_update_with_parts_of_no_network_is_refused(name: str) -> None:
    context = context_of(SHeteroFL(), [0.25, 1.0])
    state = SHeteroFL().init(context)
    (update,) = answers(context, SHeteroFL(), state, [{"width": 0.25, "samples": 1}])
    wrong = replace(update, tensors=update.tensors | {name: torch.zeros(1)})
    with pytest.raises(MethodError, match="sheterofl: an update"):
        SHeteroFL().aggregate(context, state, iter([wrong]))


def test_a_width_above_the_largest_is_refused() -> None:
    context = context_of(SHeteroFL(), [0.25, 0.5])
    with pytest.raises(MethodError, match=r"this fleet trained widths up to 0\.5"):
        SHeteroFL().customize(context, SHeteroFL().init(context), Size(1.0))


def test_digits_are_learned_at_every_width(tmp_path: Path) -> None:
    options: dict[str, Any] = {"name": "small-cnn", "options": {"channels": [16, 32]}}
    run = az.Experiment(
        data="digits",
        clients=6,
        partition={"validation": 0.2, "fraction": 0.5},
        model=options,
        method=SHeteroFL(),
        devices={"capacities": [0.25, 0.5, 1.0]},
        training={"learning_rate": 0.1, "batch_size": 16},
        rounds=4,
        evaluate_every=4,
    ).run(out=tmp_path / "run")
    accuracy = run.history[-1]["accuracy"]
    assert list(accuracy) == ["0.25", "0.5", "1.0"]
    assert min(accuracy.values()) > 0.5
