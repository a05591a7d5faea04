"""Networks of several widths that share one basis: what ordered dropout trains if weights are composed."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence

from torch import Tensor, nn

from anysize.elastic.basis import Composed
from anysize.elastic.skeleton import named_tensors


class ComposedWidths(nn.Module):
    """Composed networks of several widths that share one basis and the same unscaled layers.

    Attributes:
        largest: the network of the largest width; calling the whole calls it.
        inner: the smaller ones, smallest first.
    """

    def __init__(self, networks: Sequence[Composed], shared: Collection[str]) -> None:
        """Make the networks share the largest one's basis from now on.

        Args:
            networks: one structure at several widths, smallest first.
            shared: names of the other tensors that all widths share.
        """
        super().__init__()
        *smaller, largest = networks
        ours = dict(_common(largest, shared))
        memo: dict[int, object] = {}
        for network in smaller:
            memo |= {id(tensor): ours[name] for name, tensor in _common(network, shared)}
        memo |= {id(tensor): tensor for tensor in ours.values()}  # the copy keeps these tensors, so it shares the basis
        self.largest = largest
        self.inner = nn.ModuleList(copy.deepcopy(smaller, memo))

    def __len__(self) -> int:
        """How many networks there are."""
        return len(self.inner) + 1

    def at(self, place: int) -> nn.Module:
        """The network at a place, smallest first; the last is the largest."""
        return self.largest if place == len(self.inner) else self.inner[place]

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self.largest(*inputs)
        return output


def _common(network: Composed, shared: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a composed network that all widths share."""
    for name, tensor in named_tensors(network):
        if name.startswith("basis.") or name.removeprefix("network.") in shared:
            yield name, tensor
