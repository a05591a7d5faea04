"""An update as a step: how far a client's answer is from the message that it got."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from anysize.wire import Tensors


def step_of(sent: Mapping[str, Tensor], learned: Mapping[str, Tensor]) -> Tensors:
    """How far each tensor of an answer is from the one that was sent; whole numbers do not move.

    >>> import torch
    >>> step_of({"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])})
    {'w': tensor([2.])}
    """
    same = {n: t for n, t in learned.items() if t.is_floating_point() and n in sent and sent[n].shape == t.shape}
    return {name: tensor - sent[name] for name, tensor in same.items()}


def norm_of(step: Mapping[str, Tensor]) -> float:
    """The norm of a step over all its tensors."""
    return math.sqrt(sum(float(own.double().square().sum()) for own in step.values()))


def moved(sent: Mapping[str, Tensor], learned: Mapping[str, Tensor], step: Mapping[str, Tensor]) -> Tensors:
    """The answer of a client that made that step; tensors without one stay as it sent them."""
    return {**learned, **{name: sent[name] + own for name, own in step.items()}}


def clipped(sent: Mapping[str, Tensor], learned: Mapping[str, Tensor], most: float) -> Tensors:
    """The answer with a step no longer than `most`; as it is, bit for bit, if its step is not longer.

    >>> import torch
    >>> clipped({"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}, 1.0)["w"].tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    step = step_of(sent, learned)
    norm = norm_of(step)
    if norm <= most:
        return dict(learned)
    return moved(sent, learned, {name: own * (most / norm) for name, own in step.items()})
