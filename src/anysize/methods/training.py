"""What a method's loss sees of a local step, and the tricks that all methods share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor], Tensor]
"""The loss that an attack raises, as a function of the inputs."""


@dataclass(frozen=True)
class Tricks:
    """Options that every method shares; a method's `paper` lists those that its authors used.

    Attributes:
        masked_loss: logits of classes that a client does not hold are set to zero in its loss (HeteroFL).
        classwise_head: a row of the classifier is averaged only over clients that hold its class (HeteroFL).
        batch_norm: which statistics normalise, and which are kept. "tracked": running statistics, averaged with the
            weights; "calibrated": the batch's statistics in training, estimated anew for tests; "batch": the batch's
            statistics in training and in tests; "local": norm layers never leave the client.
        weighting: a client's weight in an average: its number of samples, or one.
        rescaled_init: networks narrower than the full one start with parts of its weights, at the scale of the full
            width (Split-Mix); if off, at the scale of an initialisation at their own width. It does not change methods
            that start only from the full network.
        proximal: FedProx's mu; 0 is off.
        proximal_form: the squared distance as a "sum" over all entries (FedProx) or the sum of each tensor's "mean"
            (FedMAX's code).
        max_entropy: FedMAX's beta, which pulls the classifier's inputs towards the uniform distribution; 0 is off.
        server_momentum: momentum of the server's step; 0 is off.
        adversarial: the weight of the loss on inputs under attack; the loss on clean inputs has the rest (Split-Mix,
            Eq. 1); 0 is off.
        attack_epsilon: how far the attack may move any entry of an input.
        attack_step: how far one step of the attack moves it.
        attack_steps: how many steps the attack takes.
    """

    masked_loss: bool = False
    classwise_head: bool = False
    batch_norm: Literal["batch", "tracked", "calibrated", "local"] = "tracked"
    weighting: Literal["samples", "clients"] = "samples"
    rescaled_init: bool = True
    proximal: float = 0.0
    proximal_form: Literal["sum", "mean"] = "sum"
    max_entropy: float = 0.0
    server_momentum: float = 0.0
    adversarial: float = 0.0
    attack_epsilon: float = 8 / 255
    attack_step: float = 2 / 255
    attack_steps: int = 7

    def chosen(self, options: Mapping[str, Any]) -> Tricks:
        """These tricks, with the values of `options` that are not None in place of theirs."""
        return replace(self, **{name: value for name, value in options.items() if value is not None})


class Batch(NamedTuple):
    """What the network receives, and what it should answer."""

    x: Any
    """A tensor, or `anysize.inputs.Inputs` if the network has several inputs by name."""
    y: Tensor


@dataclass(frozen=True)
class Step:
    """One local step as a method's `loss` sees it.

    Attributes:
        number: 0 for the first step of this client in this round.
        generator: for the method's random choices, derived from (seed, round, client).
        received: the tensors as they arrived, by the trained module's names.
        objective: the task's loss of one pass, with all chosen tricks.
        distillation: the loss of one pass against another network's outputs, masked as the objective is.
        choices: if given, `choose` calls it instead of the generator; counting costs tries every choice.
        attack: for methods that weigh the loss under attack themselves: a function of the network, the inputs and the
            loss (a function of the inputs) that returns attacked inputs, as strong as the tricks say.
    """

    number: int
    generator: torch.Generator
    received: Mapping[str, Tensor]
    objective: Callable[[nn.Module, Batch], Tensor]
    distillation: Callable[[nn.Module, Batch, Tensor], Tensor] | None = None
    choices: Callable[[int], int] | None = None
    attack: Callable[[nn.Module, Tensor, Loss], Tensor] | None = None

    def choose(self, count: int) -> int:
        """One of `count` choices, from 0, each with the same probability."""
        if self.choices is not None:
            return self.choices(count)
        return int(torch.randint(count, (), generator=self.generator))
