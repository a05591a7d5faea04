"""What attackers send in place of what they learned, from the message that they received and their honest answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anysize.config.tables import AdversaryConfig
from anysize.methods.steps import moved, norm_of, step_of
from anysize.rng import generator
from anysize.wire import Tensors

STRENGTH: Mapping[str, float] = {"sign-flip": 4.0, "scale": 10.0, "noise": 4.0}
"""The strength of attacks that have one. A fifth of the clients that flip signs by 4 make a mean stand still."""


def scaled(sent: Mapping[str, Tensor], learned: Mapping[str, Tensor], factor: float) -> Tensors:
    """The answer of a client that moved `factor` times as far as the honest one; a negative one flips the sign.

    >>> scaled({"w": torch.tensor([1.0, -1.0])}, {"w": torch.tensor([2.0, -1.0])}, -3.0)["w"].tolist()
    [-2.0, -1.0]
    """
    return _moved(sent, learned, {name: factor * step for name, step in step_of(sent, learned).items()})


def noise(
    sent: Mapping[str, Tensor], learned: Mapping[str, Tensor], strength: float, random: torch.Generator
) -> Tensors:
    """The honest answer and Gaussian noise, whose norm is about `strength` times that of the honest update."""
    step = step_of(sent, learned)
    entries = sum(own.numel() for own in step.values())
    spread = strength * norm_of(step) / math.sqrt(max(entries, 1))
    return _moved(
        sent, learned, {n: own + spread * torch.randn(own.shape, generator=random) for n, own in step.items()}
    )


def inner_product(
    sent: Mapping[str, Tensor], learned: Mapping[str, Tensor], honest: Sequence[Mapping[str, Tensor]]
) -> Tensors:
    """The answer whose inner product with the honest mean is most negative, no longer than honest updates are.

    It is the mean of the `honest` updates backwards (Xie et al. 2020), as long as their median norm, so that no bound
    on norms notices it.

    >>> steps = [{"w": torch.tensor([3.0, 4.0])}] * 2
    >>> inner_product({"w": torch.zeros(2) - 9}, {"w": torch.zeros(2) - 9}, steps)["w"].tolist()
    [-12.0, -13.0]
    """
    mean = {name: torch.stack([step[name] for step in honest]).mean(dim=0) for name in honest[0]}
    length = float(torch.tensor([norm_of(step) for step in honest]).median())
    factor = -length / max(norm_of(mean), 1e-30)
    return _moved(sent, learned, {name: factor * own for name, own in mean.items()})


def _moved(sent: Mapping[str, Tensor], learned: Mapping[str, Tensor], step: Mapping[str, Tensor]) -> Tensors:
    """The answer that moved by `step`; a tensor without negative numbers gets none: a variance must stay one."""
    found = moved(sent, learned, step)
    return found | {name: found[name].clamp_min(0) for name in step if bool((sent[name] >= 0).all())}


@dataclass(frozen=True)
class Attack:
    """The attack of an experiment on updates.

    Attributes:
        options: the [adversary] table.
        seed: of the run.
    """

    options: AdversaryConfig
    seed: int

    @property
    def on_updates(self) -> bool:
        """Whether attackers change their answers; else their data, if anything."""
        return self.options.name in (*STRENGTH, "inner-product")

    @property
    def needs_honest(self) -> bool:
        """Whether attackers must know what honest clients send in the same round."""
        return self.options.name == "inner-product"

    def answer(
        self,
        sent: Mapping[str, Tensor],
        learned: Mapping[str, Tensor],
        names: Sequence[int],
        honest: Sequence[Mapping[str, Tensor]] = (),
    ) -> Tensors:
        """What an attacker sends.

        Args:
            sent: what it received.
            learned: its honest answer.
            names: the round and the client, for random choices.
            honest: the updates of honest clients with messages of the same form; its own if there are none.
        """
        strength = self.options.strength or STRENGTH.get(self.options.name, 1.0)
        random = generator(self.seed, *names, "adversary")
        attacks: dict[str, Callable[[], Tensors]] = {
            "sign-flip": lambda: scaled(sent, learned, -strength),
            "scale": lambda: scaled(sent, learned, strength),
            "noise": lambda: noise(sent, learned, strength, random),
            "inner-product": lambda: inner_product(sent, learned, honest or [step_of(sent, learned)]),
        }
        return attacks[self.options.name]()
