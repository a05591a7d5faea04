"""The batches of a client's training, and of any measurement."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise

import torch
from torch import Tensor

from anysize import interrupts
from anysize.client.accelerators import moved
from anysize.data import CollatedPart, Part, SubsetPart, to_input
from anysize.data.augment import augment
from anysize.elastic.fast import fast
from anysize.inputs import one_tensor
from anysize.methods.context import Context
from anysize.methods.messages import SubModel
from anysize.methods.training import Batch
from anysize.rng import generator

_AHEAD = 16  # batches that are gathered together


def local_batches(context: Context, sub_model: SubModel, part: Part) -> Iterator[Batch]:
    """The batch of each local step, on the context's device.

    Several batches are gathered and converted together and yielded as views: one large gather costs less than many
    small ones.
    """
    changes = generator(*names_of(sub_model), "augment")
    indices = steps(len(part), context, generator(*names_of(sub_model), "batches"))
    while ahead := list(islice(indices, 1 if collates(part) else _AHEAD)):
        drawn = draw(part, torch.cat(ahead))
        x, y = (moved(own, context.device) for own in drawn)
        ends = [0]
        for index in ahead:
            ends.append(ends[-1] + len(index))
        for first, last in pairwise(ends):
            interrupts.check()
            some = x[first:last]
            if context.augment:
                some = fast(augment(one_tensor(some, "data.augment"), context.augment, changes))
            yield Batch(some, y[first:last])


def collates(part: Part) -> bool:
    """Whether each batch is made separately, as one whose texts are as long as the longest of them."""
    while isinstance(part, SubsetPart):
        part = part.part
    return isinstance(part, CollatedPart)


def steps(samples: int, context: Context, random: torch.Generator) -> Iterator[Tensor]:
    """The sample indices of each local step: shuffled epochs, as many steps or epochs as the training asks for."""
    training = context.training
    done = 0
    for _ in range(training.local_epochs or training.local_steps or 1):
        for index in batches(torch.randperm(samples, generator=random), training.batch_size):
            if training.local_steps is not None and done == training.local_steps:
                return
            done += 1
            yield index


def batches(order: Tensor, batch_size: int) -> list[Tensor]:
    """The indices of `order` in batches of at least two samples, since one sample has no batch statistics.

    A last batch of one joins the batch before it; a single sample occurs twice in its batch.

    >>> [len(batch) for batch in batches(torch.arange(7), 3)], batches(torch.tensor([4]), 3)
    ([3, 4], [tensor([4, 4])])
    """
    if len(order) == 1:
        return [order.repeat(2)]
    parts = list(torch.split(order, max(batch_size, 2)))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def draw(part: Part, index: Tensor) -> Batch:
    """The samples at `index` as a network receives them."""
    interrupts.check()
    x, y = part.batch(index)
    return Batch(fast(to_input(x)), y)


def names_of(sub_model: SubModel) -> tuple[int, int, int]:
    ticket = sub_model.ticket
    return ticket.seed, ticket.round, ticket.client
