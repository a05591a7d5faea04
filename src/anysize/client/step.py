"""The training step of a client. Whoever takes, counts or times one uses this module.

A step computes the loss of a batch (`ClientLoss`: the method's loss and the proximal term), its gradients, clips them,
and lets the optimizer step (`TrainingStep`). Clients that train alone or stacked take whole steps; counting a cost
takes the loss and its backward pass only. The precision in which the network runs is chosen here too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anysize.client.objectives import make_attack, make_distillation, make_objective, proximal
from anysize.client.optimizer import take_step
from anysize.client.precision import LossScale, passes
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.training import Batch, Loss, Step, Tricks


@dataclass(frozen=True)
class ClientLoss:
    """A client's loss of one batch: the method's own, and the proximal term where the tricks ask for it.

    Attributes:
        method: the method.
        module: the network in training.
        tricks: the chosen tricks.
        received: the module's tensors as they arrived, by name.
        objective: the task's loss of one pass, with the tricks.
        distillation: the loss of one pass against another network's outputs.
        attack: makes attacked inputs, for methods that weigh the loss under attack themselves.
        random: for the method's random choices.
        choices: if given, makes these choices instead.
        trained: names of the parameters that the proximal term holds; by default those that require a gradient.
    """

    method: Method[Any]
    module: nn.Module
    tricks: Tricks
    received: Mapping[str, Tensor]
    objective: Callable[[nn.Module, Batch], Tensor]
    distillation: Callable[[nn.Module, Batch, Tensor], Tensor]
    random: torch.Generator
    attack: Callable[[nn.Module, Tensor, Loss], Tensor] | None = None
    choices: Callable[[int], int] | None = None
    trained: Collection[str] | None = None

    def __call__(self, batch: Batch, number: int) -> Tensor:
        """The loss of step `number`, 0 for the first of a client's round."""
        step = Step(number, self.random, self.received, self.objective, self.distillation, self.choices, self.attack)
        loss = self.method.loss(self.module, batch, step)
        if not self.tricks.proximal:
            return loss
        return loss + proximal(self.module, self.received, self.tricks, self.trained)


def client_loss(
    context: Context,
    method: Method[Any],
    module: nn.Module,
    received: Mapping[str, Tensor] | None = None,
    classes: Tensor | None = None,
    random: torch.Generator | None = None,
    attacks: torch.Generator | None = None,
    choices: Callable[[int], int] | None = None,
) -> ClientLoss:
    """The loss of a client that trains `module`.

    Args:
        context: what server and client both know.
        method: the method.
        module: the network that the client built.
        received: its tensors as they arrived, by name; by default copies of its parameters as they are.
        classes: for each class, whether the client holds it; None if the task has no classes, or to mask none.
        random: for the method's random choices; by default one that counting and timing may use.
        attacks: draws the random starts of attacks; by default one that counting and timing may use.
        choices: if given, makes the method's choices instead of `random`.
    """
    task, tricks = context.task, context.tricks
    attacks = attacks or torch.Generator()
    run = passes(context.training, context.device)
    return ClientLoss(
        method=method,
        module=module,
        tricks=tricks,
        received=copies_of(module) if received is None else received,
        objective=make_objective(task, tricks, classes, attacks, context.axes.classifier, run),
        distillation=make_distillation(task, tricks, classes, run),
        random=random or torch.Generator(),
        attack=make_attack(tricks, attacks),
        choices=choices,
    )


def copies_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the module's parameters, by name; of frozen ones, which stay as they are, no copies.

    >>> sorted(copies_of(nn.Linear(2, 3)))
    ['bias', 'weight']
    """
    named = module.named_parameters()
    return {name: own.detach().clone() if own.requires_grad else own.detach() for name, own in named}


class TrainingStep:
    """One step of local training: loss, gradients, clipping, and the optimizer's step.

    Args:
        loss: of a batch and the step's number: one number, or one for each client of a stack.
        optimizer: over the trained parameters.
        clip: the largest norm that the gradients of a parameter group may have; None for any.
        clipped: scales gradients to that norm in place; by default torch's function for one client.
        scale: a factor on the loss for the way back, where gradients have few bits; a step whose gradients are too
            large for them is left out.
    """

    def __init__(
        self,
        loss: Callable[[Batch, int], Tensor],
        optimizer: torch.optim.Optimizer,
        clip: float | None,
        clipped: Callable[[list[Tensor], float], object] = nn.utils.clip_grad_norm_,
        scale: LossScale | None = None,
    ) -> None:
        self._loss = loss
        self._optimizer = optimizer
        self._clip = clip
        self._clipped = clipped
        self._scale = scale

    def __call__(self, batch: Batch, number: int) -> Tensor:
        """Take the step, and return the loss that was found before it, without its graph."""
        loss = self._loss(batch, number)
        self._optimizer.zero_grad()
        # No client's loss depends on another's parameters, so in a stack's sum each gets its own gradient.
        total = loss if loss.dim() == 0 else loss.sum()
        (total if self._scale is None else total * self._scale.factor).backward()  # type: ignore[no-untyped-call]
        if self._scale is None or self._scale.removed(self._gradients()):
            self._move()
        return loss.detach()

    def _move(self) -> None:
        """Clip the gradients, and let the optimizer step."""
        if self._clip is not None:
            for group in self._optimizer.param_groups:
                self._clipped(group["params"], self._clip)
        take_step(self._optimizer)

    def _gradients(self) -> Iterator[Tensor]:
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        return (parameter.grad for parameter in parameters if parameter.grad is not None)
