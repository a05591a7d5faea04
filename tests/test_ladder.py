"""Ladder: the own width in every step, a smaller one beside it that the own one teaches, HeteroFL's mean."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anysize.client.objectives import make_distillation, make_objective
from anysize.elastic.slicing import narrow
from anysize.errors import MethodError
from anysize.experiment.plan import plan
from anysize.methods import Client, FedAvg, Ladder
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step
from anysize.runs.experiment import Experiment
from anysize.tasks import task
from test_equivalences import bare, digits, same
from test_golden import context_of, numbers


@pytest.mark.parametrize("batch_norm", ["batch", pytest.param("tracked", marks=pytest.mark.slow)])
def test_one_width_is_fedavg_bit_for_bit(tmp_path: Path, batch_norm: str) -> None:
    tricks = {"batch_norm": batch_norm, "masked_loss": False, "classwise_head": False}
    ours = digits(Ladder(), [1.0], tmp_path / "ladder", tricks=tricks)
    theirs = digits(FedAvg(), [1.0], tmp_path / "fedavg", tricks=tricks)
    assert same(bare(ours), bare(theirs))


def gradients(network: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in network.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(network.parameters()))))


@pytest.mark.parametrize("teaching", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("drawn", [0, 1])
def test_a_step_follows_the_own_loss_and_the_pupils_two_losses(teaching: float, drawn: int) -> None:
    """The oracle cuts a network for each width, and writes the three terms with softmax by hand."""
    method = Ladder(teaching=teaching)
    context = context_of(method, [0.25, 0.5, 1.0])
    message = method.extract(context, method.init(context), Client(0, 0, Size(1.0), 1, 1, 0))
    module: Any = method.build(context, replace(message, ticket=replace(message.ticket, job="train")))
    batch = Batch(numbers(3, 7, 6), torch.arange(7) % 3)
    learned = task("classification")
    step = Step(
        0,
        torch.Generator(),
        {},
        make_objective(learned, context.tricks, None),
        make_distillation(learned, context.tricks, None),
        choices=lambda count: drawn if count == 2 else pytest.fail(f"{count} choices"),
    )
    method.loss(module, batch, step).backward()
    full = copy.deepcopy(context.template).to_empty(device="cpu")
    full.load_state_dict(context.start())
    small = narrow(full, context.axes, [0.25, 0.5][drawn])
    own, pupil = full(batch.x), small(batch.x)
    rows = torch.arange(7)
    expected = gradients(full, -own.log_softmax(1)[rows, batch.y].mean())
    labels = -pupil.log_softmax(1)[rows, batch.y].mean()
    taught = -(own.detach().softmax(1) * pupil.log_softmax(1)).sum(1).mean()
    for name, part in gradients(small, (1 - teaching) * labels + teaching * taught).items():
        expected[name][tuple(slice(size) for size in part.shape)] += part
    for name, parameter in module.network.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_a_step_of_the_largest_width_costs_less_than_half_more_than_heterofls() -> None:
    def macs(method: str) -> int:
        made = Experiment(data="digits", clients=8, model="small-cnn", method=method)
        return int(plan(made)["groups"][-1]["training_macs"])

    assert macs("heterofl") < macs("ladder") < 1.5 * macs("heterofl")


def test_what_is_not_allowed_is_refused() -> None:
    with pytest.raises(MethodError, match="teaching"):
        Ladder(teaching=1.5)
    context = context_of(Ladder(), [0.5])
    with pytest.raises(MethodError, match="ladder: width 1 was asked for; this fleet trained widths up"):
        Ladder().customize(context, Ladder().init(context), Size(1.0))
