"""The optimizer of a client's training."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from anysize.config.tables import TrainingConfig
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.messages import ParameterGroup


def make_optimizer(context: Context, method: Method[Any], module: nn.Module, rate: float) -> torch.optim.Optimizer:
    """A new optimizer with zero momentum over the method's parameter groups."""
    return optimizer_of(context.training, method.groups(module), rate)


def optimizer_of(training: TrainingConfig, groups: Iterable[ParameterGroup], rate: float) -> torch.optim.Optimizer:
    """A new optimizer over parameter groups."""
    options = [
        {"params": list(g.parameters), "lr": rate * g.rate, "weight_decay": training.weight_decay * g.decay}
        for g in groups
    ]
    if training.optimizer == "adam":
        return torch.optim.Adam(options, lr=rate, fused=True)
    optimizer = SGD(options, lr=rate, momentum=training.momentum, fused=True)
    if training.momentum:
        # Torch's fused step needs all of them or none, and a parameter that this batch does not use has no gradient.
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class SGD(torch.optim.SGD):
    """Torch's fused step, called directly: torch's dispatch to it takes several times as long as the step.

    On small networks that is a twentieth of the training time. Momentum buffers exist from the start.
    """

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            kinds: dict[torch.dtype, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kinds.setdefault(parameter.dtype, []).append(parameter)
            for some in kinds.values():
                torch._fused_sgd_(
                    some,
                    [parameter.grad for parameter in some],  # type: ignore[misc]
                    [self.state[parameter]["momentum_buffer"] for parameter in some] if group["momentum"] else [],
                    weight_decay=group["weight_decay"],
                    momentum=group["momentum"],
                    lr=group["lr"],
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    is_first_step=False,
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """One step without torch's hooks for its compiler and profiler, which take seconds to load."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)
