"""The task's loss with the chosen tricks: the one place where a client's objective is put together.

A method calls `step.objective` once per pass and adds what its paper adds; it never calls a loss itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from anysize.tasks import Task


@dataclass(frozen=True)
class Tricks:
    """Options that every method shares; a method's `paper` gives those that its authors used.

    Attributes:
        masked_loss: logits of classes that a client does not hold are set to zero in its loss (HeteroFL).
        classwise_head: a row of the classifier is averaged only over clients that hold its class (HeteroFL).
        batch_norm: what normalises, and what is kept. "batch": statistics of the batch, also in tests; "tracked":
            running statistics, averaged with the weights; "calibrated": statistics of the batch in training, estimated
            afresh for tests; "local": norm layers never leave the client.
        weighting: a client's weight in an average, its number of samples or one.
        proximal: FedProx's mu; 0 is off.
        proximal_form: the squared distance as a "sum" over all entries (FedProx) or the sum of each tensor's "mean"
            (FedMAX's code).
        server_momentum: momentum of the server's step; 0 is off.
    """

    masked_loss: bool = False
    classwise_head: bool = False
    batch_norm: Literal["batch", "tracked", "calibrated", "local"] = "tracked"
    weighting: Literal["samples", "clients"] = "samples"
    proximal: float = 0.0
    proximal_form: Literal["sum", "mean"] = "sum"
    server_momentum: float = 0.0

    def chosen(self, options: Mapping[str, Any]) -> Tricks:
        """These tricks with those of `options` that are not None in their place."""
        return replace(self, **{name: value for name, value in options.items() if value is not None})


class Batch(NamedTuple):
    """What the network receives, and what it should say."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Step:
    """One local step as a method's `loss` sees it.

    Attributes:
        number: 0 for the first step of this client in this round.
        generator: for random choices of the method, derived from (seed, round, client).
        received: the tensors as they arrived, by the trained module's names.
        objective: the task's loss of one pass, with all chosen tricks.
        distillation: the loss of one pass against another network's outputs, masked as the objective is.
        choices: what `choose` asks instead of the generator; the cost of a step is that of every choice.
    """

    number: int
    generator: torch.Generator
    received: Mapping[str, Tensor]
    objective: Callable[[nn.Module, Batch], Tensor]
    distillation: Callable[[nn.Module, Batch, Tensor], Tensor] | None = None
    choices: Callable[[int], int] | None = None

    def choose(self, count: int) -> int:
        """One of `count` choices, from 0, each with the same probability."""
        if self.choices is not None:
            return self.choices(count)
        return int(torch.randint(count, (), generator=self.generator))


def make_objective(task: Task, tricks: Tricks, classes: Tensor | None) -> Callable[[nn.Module, Batch], Tensor]:
    """The loss of one pass: the task's, masked to the client's classes if asked.

    Args:
        task: what is learned.
        tricks: the chosen ones.
        classes: a boolean per class, those that the client holds; None where the task has no classes.
    """
    return masked_objective(task, _mask(tricks, classes))


def masked_objective(task: Task, mask: Tensor | None) -> Callable[[nn.Module, Batch], Tensor]:
    """The task's loss of one pass, over the classes of `mask` where there is one."""
    seen = _seen(task, mask)

    def objective(module: nn.Module, batch: Batch) -> Tensor:
        return task.loss(seen(module(batch.x)), batch.y)

    return objective


def make_distillation(
    task: Task, tricks: Tricks, classes: Tensor | None
) -> Callable[[nn.Module, Batch, Tensor], Tensor]:
    """The loss of one pass against a teacher's outputs for the same batch, which receive no gradient.

    Args:
        task: what is learned.
        tricks: the chosen ones; a masked loss masks teacher and student alike.
        classes: a boolean per class, those that the client holds; None where the task has no classes.
    """
    return masked_distillation(task, _mask(tricks, classes))


def masked_distillation(task: Task, mask: Tensor | None) -> Callable[[nn.Module, Batch, Tensor], Tensor]:
    """The loss of one pass against a teacher, over the classes of `mask` where there is one."""
    seen = _seen(task, mask)

    def distillation(module: nn.Module, batch: Batch, teacher: Tensor) -> Tensor:
        return task.distillation(seen(module(batch.x)), seen(teacher.detach()))

    return distillation


def _mask(tricks: Tricks, classes: Tensor | None) -> Tensor | None:
    """The classes to which the loss is masked; None where it sees all."""
    return classes if tricks.masked_loss and classes is not None and not bool(classes.all()) else None


def _seen(task: Task, mask: Tensor | None) -> Callable[[Tensor], Tensor]:
    """What the loss sees of an output."""
    return lambda output: output if mask is None else masked(output, mask, task.class_axis)


def masked(output: Tensor, classes: Tensor, class_axis: int | None) -> Tensor:
    """HeteroFL, section 3: the logits of absent classes are zero, so that no gradient reaches their rows.

    >>> masked(torch.tensor([[3.0, 5.0]]), torch.tensor([True, False]), -1).tolist()
    [[3.0, 0.0]]
    """
    assert class_axis is not None
    shape = [1] * output.dim()
    shape[class_axis] = -1
    return output.masked_fill(~classes.reshape(shape), 0.0)


def proximal(
    module: nn.Module, received: Mapping[str, Tensor], tricks: Tricks, trained: Collection[str] | None = None
) -> Tensor:
    """FedProx, Eq. (2): mu / 2 times the squared distance from the received parameters.

    Args:
        module: in training.
        received: its parameters as they arrived, by name.
        tricks: the strength mu and the form of the distance.
        trained: names of the parameters that are trained; by default those that require a gradient.
    """
    total: Tensor | float = 0.0
    for name, parameter in module.named_parameters():
        if parameter.requires_grad if trained is None else name in trained:
            square = (parameter - received[name]).square()
            total = total + (square.sum() if tricks.proximal_form == "sum" else square.mean())
    return torch.as_tensor(total * (tricks.proximal / 2))
