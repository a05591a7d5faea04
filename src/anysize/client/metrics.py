"""Sums of a task's metrics over samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from anysize.client.accelerators import moved
from anysize.client.batches import batches, draw
from anysize.data import Part
from anysize.methods.context import Context
from anysize.methods.training import Batch
from anysize.tasks import Sums, add

EVALUATION_BATCH = 500


def measure(
    context: Context,
    module: nn.Module,
    part: Part,
    batch_size: int = EVALUATION_BATCH,
    change: Callable[[Batch], Tensor] | None = None,
) -> Sums:
    """Sums and counts of the task's metrics of `module` over all of `part`; `change` may alter the inputs first."""
    return measured(context, module.eval(), part, batches(torch.arange(len(part)), batch_size), change)


def measured(
    context: Context,
    module: nn.Module,
    part: Part,
    indices: Sequence[Tensor],
    change: Callable[[Batch], Tensor] | None = None,
) -> Sums:
    """Sums and counts of the task's metrics of `module`, on the context's device, over these batches of `part`."""
    sums: Sums = {}
    for index in indices:
        batch = draw(part, index)
        there = Batch(*(moved(own, context.device) for own in batch))
        x = there.x if change is None else change(there)
        with torch.no_grad():
            output = module(x).cpu()
        judged = min(len(index), len(part))  # a single sample occurs twice in its batch, but counts once
        add(sums, context.task.sums(output[:judged], batch.y[:judged]))
    return sums
