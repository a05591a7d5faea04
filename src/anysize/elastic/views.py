"""Several networks over one set of tensors: the largest is real, the smaller ones are skeletons called with views.

A skeleton has no weights. A call fills it, for its duration, with the entries that it keeps of the largest network's
tensors (`torch.func.functional_call`). Prefixes are views; entries that are not contiguous (the gates of a recurrent
layer, parts of a concatenation) are gathered. Either way gradients reach the one set of tensors. No layer has a mode,
and nothing is copied from network to network.

>>> from anysize.elastic.axes import trace
>>> from anysize.elastic.slicing import narrow
>>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
>>> axes = trace(net, torch.zeros(2, 3))
>>> nested = Nested([narrow(net, axes, 0.25), net], axes, [0.25, 1.0])
>>> nested.at(0)(torch.zeros(5, 3)).sum().backward()
>>> nested.network[2].weight.grad.shape, nested.network[2].bias.grad.tolist()
(torch.Size([2, 8]), [5.0, 5.0])
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from anysize.elastic.axes import Axes, Index, Kept, Width
from anysize.elastic.skeleton import copied, named_tensors


class Nested(nn.Module):
    """A network, and smaller ones inside it that share its tensors.

    Attributes:
        network: the largest, an ordinary network; calling the whole calls it.
        inner: the structures of the smaller ones, smallest first. They hold placeholders for the tensors that they
            share with the largest, and real tensors for those that they do not share.
    """

    def __init__(
        self, networks: Sequence[nn.Module], axes: Axes, widths: Sequence[Width | Kept], own: Collection[str] = ()
    ) -> None:
        """Nest networks of one structure at several widths; of all but the last only the structure is used.

        Args:
            networks: smallest first, real ones or skeletons.
            axes: the axes of the full network.
            widths: the widths of the networks.
            own: names of tensors that are not shared, such as `statistics_names` of the full network.
        """
        super().__init__()
        self.network = networks[-1]
        self.inner = nn.ModuleList(copied(network) for network in networks[:-1])
        kept = [axes.kept(width) for width in widths]
        self._shared = [
            list(_share(self.network, inner, axes, small, kept[-1], own))
            for inner, small in zip(self.inner, kept[:-1], strict=True)
        ]

    def __len__(self) -> int:
        """How many networks there are."""
        return len(self.inner) + 1

    def at(self, place: int) -> nn.Module:
        """The network at a place, smallest first; the last is the largest.

        A smaller one holds views of the present tensors, so ask again in the next step.
        """
        if place == len(self.inner):
            return self.network
        views = {name: part for shared in self._shared[place] for name, part in shared.views()}
        return Viewed(self.inner[place], views)

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self.network(*inputs)
        return output


class Viewed(nn.Module):
    """A skeleton that runs with another network's tensors."""

    def __init__(self, network: nn.Module, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.network = network
        self._tensors = tensors

    def forward(self, *inputs: Tensor) -> Tensor:
        # The mapping lists every name, tied ones too, so torch need not search for ties at every call.
        output: Tensor = functional_call(self.network, self._tensors, inputs, tie_weights=False)
        return output


def statistics_names(module: nn.Module) -> list[str]:
    """Names of the running statistics of all norm layers.

    >>> statistics_names(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)))
    ['1.running_mean', '1.running_var', '1.num_batches_tracked']
    """
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        if isinstance(child, _NormBase)
        for name, _ in child.named_buffers(recurse=False)
    ]


def within(axes: Axes, name: str, small: Kept, large: Kept) -> Index:
    """The places of the entries that `small` keeps of a tensor among those that `large` keeps; None for a whole axis.

    >>> from anysize.elastic.axes import trace
    >>> axes = trace(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), torch.zeros(2, 3))
    >>> within(axes, "1.weight", axes.kept({"0": [1, 5]}), axes.kept({"0": [1, 2, 5, 6]}))
    (None, tensor([0, 2]))
    """
    places: list[Tensor | None] = []
    for inner, outer in zip(axes.index(name, small), axes.index(name, large), strict=True):
        same = inner is None or (outer is not None and len(inner) == len(outer))
        places.append(None if same or inner is None else inner if outer is None else torch.searchsorted(outer, inner))
    return tuple(places)


@dataclass(frozen=True)
class _Shared:
    """A tensor of the largest network and the names under which a smaller one sees a part of it."""

    owner: nn.Module
    leaf: str
    names: tuple[str, ...]
    ranges: tuple[tuple[int, int, int], ...]  # (axis, first, length)
    gathered: tuple[tuple[int, Tensor], ...]  # (axis, places)

    def views(self) -> Iterator[tuple[str, Tensor]]:
        part = getattr(self.owner, self.leaf)
        if self.ranges:
            part = _window(part, self.ranges)
        for axis, places in self.gathered:
            part = part.index_select(axis, places.to(part.device))
        for name in self.names:
            yield name, part


def _share(
    large: nn.Module, small: nn.Module, axes: Axes, inner: Kept, outer: Kept, own: Collection[str]
) -> Iterator[_Shared]:
    """The tensors that `small` shares with `large`; each becomes a placeholder in `small`."""
    for name, tensor in list(named_tensors(small)):
        if name in own:
            continue
        path, _, leaf = name.rpartition(".")
        ranges, gathered = [], []
        for axis, places in enumerate(within(axes, name, inner, outer)):
            if places is None:
                continue
            if bool((places[1:] - places[:-1] == 1).all()):
                ranges.append((axis, int(places[0]), len(places)))
            else:
                gathered.append((axis, places))
        names = tuple(_held_out(small, tensor))
        yield _Shared(large.get_submodule(path), leaf, names, tuple(ranges), tuple(gathered))


def _held_out(network: nn.Module, tensor: Tensor) -> Iterator[str]:
    """The names of a tensor in a network; a placeholder replaces it under each name."""
    placeholder = torch.empty_like(tensor, device="meta", requires_grad=False)
    for prefix, child in network.named_modules():
        for held in (child._parameters, child._buffers):
            for leaf in [leaf for leaf, one in held.items() if one is tensor]:
                del held[leaf]
                child.register_buffer(leaf, placeholder, persistent=False)
                yield f"{prefix}.{leaf}" if prefix else leaf


def _window(tensor: Tensor, ranges: tuple[tuple[int, int, int], ...]) -> Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        part: Tensor = _Window.apply(tensor, ranges)  # type: ignore[no-untyped-call]
        return part
    return _narrowed(tensor, ranges)


def _narrowed(tensor: Tensor, ranges: tuple[tuple[int, int, int], ...]) -> Tensor:
    for axis, first, length in ranges:
        tensor = tensor.narrow(axis, first, length)
    return tensor


class _Window(torch.autograd.Function):
    """A view of a range of entries along several axes, whose gradient is one tensor in the layout of the whole.

    `narrow` after `narrow` would make a tensor of zeros for each axis, and one more where the layouts differ.
    """

    @staticmethod
    def forward(context: Any, tensor: Tensor, ranges: tuple[tuple[int, int, int], ...]) -> Tensor:
        context.ranges = ranges
        context.layout = (tensor.shape, tensor.stride())
        return _narrowed(tensor, ranges)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].new_empty_strided(*context.layout).zero_()
        _narrowed(whole, context.ranges).copy_(gradients[0])
        return whole, None
