"""Normalisation as a network's first layer, so that a network takes raw inputs in [0, 1]."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from anysize.errors import ModelError


class Normalize(nn.Module):
    """Inputs (N, C, H, W) minus the mean of each channel, divided by its standard deviation.

    Mean and deviation belong to the data and are not learned: they are buffers that move with the module from
    device to device, but are not part of its state.

    >>> layer = Normalize([0.5], [0.25])
    >>> layer(torch.ones(1, 1, 1, 1)).item(), len(layer.state_dict())
    (2.0, 0)
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise ModelError(f"mean {list(mean)} and std {list(std)}: give equally many of both, and each std above 0")
        self.register_buffer("mean", torch.tensor(list(mean)).float().view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(list(std)).float().view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def normalized(module: nn.Module, mean: Sequence[float] | None, std: Sequence[float] | None) -> nn.Sequential:
    """The module as `network` after a layer `normalize`, which is the identity without mean and std.

    >>> [name for name, _ in normalized(nn.Flatten(), [0.5], [0.5]).named_children()]
    ['normalize', 'network']
    """
    first = nn.Identity() if mean is None or std is None else Normalize(mean, std)
    return nn.Sequential(OrderedDict(normalize=first, network=module))
