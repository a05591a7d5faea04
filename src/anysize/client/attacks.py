"""Small changes to inputs that make a network err: projected gradient descent, and stronger attacks.

Inputs are in [0, 1], since normalisation is a network's first layer; so an attack's size is in units of pixel values.

Madry, Makelov, Schmidt, Tsipras, Vladu. "Towards Deep Learning Models Resistant to Adversarial Attacks". ICLR 2018.
Croce, Hein. "Reliable Evaluation of Adversarial Robustness with an Ensemble of Diverse Parameter-free Attacks". ICML
2020: two forms of automatic PGD and the Square attack, one after another on the samples still classified correctly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anysize import interrupts
from anysize.config.extras import needs
from anysize.errors import ConfigError
from anysize.methods.training import Loss

_PARTS = ("apgd-ce", "apgd-dlr", "square")
_ITERATIONS = {"apgd-ce": 100, "apgd-dlr": 100, "square": 1000}


@dataclass(frozen=True)
class Attack:
    """How strong an attack is.

    Attributes:
        epsilon: how far any entry of an input may be moved.
        step: how far one step moves it.
        steps: how many steps.

    >>> Attack().steps
    7
    """

    epsilon: float = 8 / 255
    step: float = 2 / 255
    steps: int = 7

    def __post_init__(self) -> None:
        problems = [
            f"{name} = {getattr(self, name)!r}; allowed: a number above 0"
            for name in ("epsilon", "step", "steps")
            if not 0 < getattr(self, name) < math.inf
        ]
        if problems:
            raise ConfigError("attack: " + "; ".join(problems))


def pgd(module: nn.Module, x: Tensor, loss: Loss, attack: Attack, random: torch.Generator) -> Tensor:
    """Madry et al., Eq. (2): inputs within epsilon of `x` and in [0, 1] that raise `loss`, from a random start.

    The network runs in evaluation mode: an attack does not change its statistics, and dropout is off.

    Args:
        module: the network that `loss` runs.
        x: inputs in [0, 1].
        loss: the loss of the changed inputs, a mean over samples.
        attack: the strength of the attack.
        random: draws the random start.
    """
    low, high = (x - attack.epsilon).clamp(0, 1), (x + attack.epsilon).clamp(0, 1)
    noise = torch.rand(x.shape, generator=random).to(x)
    changed = torch.clamp(x + attack.epsilon * (2 * noise - 1), low, high)
    with answering(module), _unobserved():
        for _ in range(attack.steps):
            interrupts.check()
            changed = changed.detach().requires_grad_()
            # A view, since torch's operation counter cannot follow the gradient of a leaf.
            (slope,) = torch.autograd.grad(loss(changed.view_as(changed)), changed)
            changed = torch.clamp(changed.detach() + attack.step * slope.sign(), low, high)
    return changed


@contextmanager
def answering(module: nn.Module) -> Iterator[None]:
    """Put every layer into evaluation mode, and afterwards back into its previous mode."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True


def _unobserved() -> Any:
    """Hide what an attack saves for its own gradients from a memory count, since it is freed when the attack ends."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def strongest(module: nn.Module, x: Tensor, y: Tensor, attack: Attack, classes: int, seed: int) -> Tensor:
    """Inputs attacked by automatic PGD on two losses and the Square attack, each on samples still classified correctly.

    These are AutoAttack's attacks for many classes, except FAB, from the Adversarial Robustness Toolbox. Only
    `attack.epsilon` matters: step sizes are automatic.
    """
    if (missing := needs('attack "auto"', "attacks", "art")) is not None:
        raise ConfigError(missing)
    changed = x.clone()
    state = np.random.get_state()  # the toolbox draws from the global generator
    np.random.seed(seed % (1 << 32))
    try:
        with answering(module):
            for part in _PARTS:
                interrupts.check()
                right = _right(module, changed, y)
                if bool(right.any()):
                    changed[right] = _toolbox(module, x[right], y[right], attack, classes, part)
    finally:
        np.random.set_state(state)
    return changed


def _right(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        answers: Tensor = module(x).argmax(1)
    return answers == y


def _toolbox(module: nn.Module, x: Tensor, y: Tensor, attack: Attack, classes: int, part: str) -> Tensor:
    from art.attacks.evasion import AutoProjectedGradientDescent, SquareAttack
    from art.estimators.classification import PyTorchClassifier

    network = PyTorchClassifier(
        model=module,
        loss=nn.CrossEntropyLoss(),
        input_shape=tuple(x.shape[1:]),
        nb_classes=classes,
        clip_values=(0.0, 1.0),
        device_type="cpu",
    )
    common = {"norm": "inf", "eps": attack.epsilon, "max_iter": _ITERATIONS[part], "batch_size": len(x)}
    if part == "square":
        made = SquareAttack(network, nb_restarts=1, verbose=False, **common)
    else:
        loss = {"apgd-ce": "cross_entropy", "apgd-dlr": "difference_logits_ratio"}[part]
        made = AutoProjectedGradientDescent(
            network, eps_step=2 * attack.epsilon, loss_type=loss, nb_random_init=1, verbose=False, **common
        )
    found = torch.from_numpy(made.generate(x.numpy(), y.numpy())).to(x)
    low, high = (x - attack.epsilon).clamp(0, 1), (x + attack.epsilon).clamp(0, 1)
    return torch.clamp(found, low, high)
