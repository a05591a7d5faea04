"""Base networks: a wide network split by its channels into narrow ones, whose outputs are averaged.

A width group of n channels is cut into blocks of r n; block i of every group makes base network i. At a random start
the entries of different blocks are independent draws, so the bases are independent networks. Each has the (smaller)
weights that the wide network starts with, which Split-Mix calls rescaled initialisation. If the wide network is already
trained, the bases are parts of it.

>>> import torch
>>> net = Ensemble([nn.Linear(2, 3), nn.Linear(2, 3)])
>>> net(torch.zeros(5, 2)).shape
torch.Size([5, 3])
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from anysize.elastic.axes import Axes, Kept

_SLACK = 1e-9  # 0.3 / 0.1 is 2.9999999999999996 and must count as three


class Ensemble(nn.Module):
    """Networks of one kind as one ordinary network, whose output is the mean of theirs.

    Attributes:
        bases: the networks, in the order in which they are mixed.
    """

    def __init__(self, bases: Iterable[nn.Module]) -> None:
        super().__init__()
        self.bases = nn.ModuleList(bases)

    def forward(self, x: Tensor) -> Tensor:
        return mean_output(self.bases, x)


class Networks(nn.ModuleDict):
    """Networks that are trained side by side, by name; calling the whole returns the mean of their outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return mean_output(self.values(), x)


def mean_output(networks: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Split-Mix, Algorithm 1, line 11: F(x) = 1/K sum_i f(x; w_i)."""
    outputs: list[Tensor] = [network(x) for network in networks]
    return sum(outputs[1:], start=outputs[0]) / len(outputs)


def mixed(bases: Sequence[nn.Module]) -> nn.Module:
    """The ensemble of the bases; a single base is returned as it is.

    >>> type(mixed([nn.Linear(2, 3)])).__name__, type(mixed([nn.Linear(2, 3)] * 2)).__name__
    ('Linear', 'Ensemble')
    """
    return bases[0] if len(bases) == 1 else Ensemble(bases)


def bases_within(width: float, base: float) -> int:
    """How many networks of width `base` fit into a width: floor(R / r), with a tolerance for rounding.

    >>> bases_within(0.3, 0.1), bases_within(0.5, 0.2)
    (3, 2)
    """
    return math.floor(width / base + _SLACK)


def split(axes: Axes, width: float, parts: int) -> list[Kept]:
    """The units of each group that each of `parts` networks of `width` takes.

    The networks take one block of units after another. Where a group has too few units for that, they start again at
    its first unit. Groups that are kept whole stay whole in every network.

    >>> import torch
    >>> from anysize.elastic.axes import trace
    >>> axes = trace(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), torch.zeros(2, 3))
    >>> [kept.units("0") for kept in split(axes, 0.25, 4)]
    [(0, 1), (2, 3), (4, 5), (6, 7)]
    """
    first = axes.kept(width)
    blocks = []
    for part in range(parts):
        units = {}
        for group in axes.groups:
            count = first.count(group.name)
            if count < group.size:
                units[group.name] = sorted((part * count + i) % group.size for i in range(count))
        blocks.append(axes.kept(units))
    return blocks


def scaled_to_own_width(tensors: Mapping[str, Tensor], narrow: nn.Module, full: nn.Module) -> dict[str, Tensor]:
    """The tensors of a narrow network, rescaled as if its own initialisation had drawn them.

    Kaiming's initialisation shrinks with the square root of a layer's inputs. A part of a wide network's first weights
    is therefore smaller than weights drawn for the narrow network, by the square root of (full inputs / narrow inputs).

    Args:
        tensors: the narrow network's, cut from the full network's first weights; left untouched.
        narrow: the narrow network's structure.
        full: the full network's structure.

    >>> import torch
    >>> wide, small = nn.Linear(8, 4), nn.Linear(2, 4)
    >>> scaled_to_own_width({"weight": torch.ones(4, 2)}, small, wide)["weight"][0].tolist()
    [2.0, 2.0]
    """
    scaled = dict(tensors)
    for name, layer in narrow.named_modules():
        own, whole = _inputs(layer), _inputs(full.get_submodule(name))
        if own is None or whole is None or own == whole:
            continue
        for leaf, _ in layer.named_parameters(prefix=name, recurse=False):
            if leaf in scaled:
                scaled[leaf] = scaled[leaf] * math.sqrt(whole / own)
    return scaled


def _inputs(layer: nn.Module) -> int | None:
    """How many inputs set the scale of a layer's first weights; None if that scale is the same at every width."""
    if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
        return layer.weight[0].numel()
    if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
        return int(layer.hidden_size)
    return int(layer.embed_dim) if isinstance(layer, nn.MultiheadAttention) else None
