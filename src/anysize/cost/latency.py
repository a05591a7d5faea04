"""How long a training step takes on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from anysize.client.accelerators import place
from anysize.client.optimizer import make_optimizer
from anysize.client.precision import LossScale
from anysize.client.process import one_thread
from anysize.client.step import TrainingStep, client_loss
from anysize.cost.count import for_every_choice
from anysize.elastic.fast import fast, layout
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.messages import SubModel
from anysize.methods.training import Batch

_WARMING = 2
_TIMED = 5
_RATE = 1e-6  # weights stay as they are, so that no step meets numbers of another size


def step_latency_ms(context: Context, method: Method[Any], message: SubModel, example: Batch) -> float:
    """The milliseconds of a training step of the very network that a client builds; see `step_seconds`."""
    module = place(layout(method.build(context, message)), context.device)
    return 1000 * step_seconds(context, method, module, blank(example, context.device))


def step_seconds(context: Context, method: Method[Any], module: nn.Module, batch: Batch) -> float:
    """The time of a plain training step: warm, with one thread, and the median of several.

    Of a method that draws at every step all choices are timed: the mean of their medians.
    """
    module.train()

    def median(choices: Callable[[int], int]) -> float:
        loss = client_loss(context, method, module, choices=choices)
        optimizer, training = make_optimizer(context, method, module, _RATE), context.training
        take = TrainingStep(loss, optimizer, training.clip, scale=LossScale.of(training))
        times = [_seconds(take, batch, number) for number in range(_WARMING + _TIMED)]
        return statistics.median(times[_WARMING:])

    with one_thread():
        return statistics.fmean(for_every_choice(median))


def _seconds(take: TrainingStep, batch: Batch, number: int) -> float:
    began = time.perf_counter()
    take(batch, number).item()  # an accelerator is done when its answer is here
    return time.perf_counter() - began


def blank(example: Batch, device: torch.device | str) -> Batch:
    """A batch of zeros with the example's shapes and types, in the layout that training uses."""
    return Batch(fast(torch.zeros_like(example.x, device=device)), torch.zeros_like(example.y, device=device))
