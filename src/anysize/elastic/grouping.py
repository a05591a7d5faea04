"""Several networks of one structure in one pass: one small rule per layer type.

The networks' channels lie side by side, network after network, on the channel axis: a convolution becomes a grouped
convolution, a linear layer a batched product, a norm one over all channels, and what works on each channel alone stays
as it is. Every tensor of the grouped network is the networks' tensors concatenated along the first axis, so stacking
and unstacking need no rules.

The layers do not show what a network's own `forward` does to its channels. The result is therefore compared with the
separate networks once, on random weights; if it differs, or if a layer type has no rule, there is no grouped network,
only the reason.

A fixed rule on shapes, read off `benchmarks/splitmix_grouping.json`, says when it is faster: every convolution must be
one that `pays`, and networks without convolutions must be at least three. Otherwise they run one after another.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from anysize.elastic.skeleton import fill, hollow, named_tensors
from anysize.errors import ModelError
from anysize.models.normalize import Normalize
from anysize.rng import generator

Rule = Callable[[Any, int], nn.Module]
RULES: dict[type[nn.Module], Rule] = {}
R = TypeVar("R", bound=Rule)

_TOLERANCE = 1e-3
_WIDE_LAYER = 32  # outputs of one network
_LARGEST = 13_000  # largest input per sample, in numbers over all networks, at which grouped convolutions are faster
_LARGEST_WIDE = 20_000  # the same for wide layers
_FEW = 2  # so many networks without convolutions gain less than stacking costs


class Grouped(nn.Module):
    """Networks of one structure in one; returns their outputs concatenated along the first axis.

    Attributes:
        network: the layers of all networks.
        count: how many networks there are.
        own: whether each network has separate inputs, concatenated along the first axis too; otherwise all networks see
            the same inputs.

    >>> base = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> grouped(hollow(base), 5, [torch.zeros(2, 4)])(torch.zeros(7, 4, device="meta")).shape
    torch.Size([35, 2])
    """

    def __init__(self, network: nn.Module, count: int, own: bool = False) -> None:
        super().__init__()
        self.network = network
        self.count = count
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        given = torch.cat(x.chunk(self.count), 1) if self.own else x  # (samples, count * inputs, ...)
        beside: Tensor = self.network(given)  # (samples, count * outputs)
        return torch.cat(beside.chunk(self.count, 1))  # (count * samples, outputs)


_found: WeakKeyDictionary[nn.Module, dict[tuple[int, bool], Grouped | str]] = WeakKeyDictionary()
_alike: WeakKeyDictionary[nn.Module, dict[bool, bool]] = WeakKeyDictionary()


def grouped(base: nn.Module, count: int, example: Sequence[Tensor], own: bool = False) -> Grouped | str:
    """The structure of `count` networks like `base` in one pass, or why they run separately; `fill` copies it.

    Args:
        base: the structure of one network.
        count: how many networks.
        example: inputs; only shapes and types matter.
        own: whether each network has separate inputs.
    """
    known = _found.setdefault(base, {})
    if (count, own) not in known:
        known[count, own] = _made(base, count, example, own)
    return known[count, own]


def stacked(networks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of a grouped network: the networks' tensors, concatenated along the first axis."""
    return {f"network.{name}": torch.cat([_row(network[name]) for network in networks]) for name in networks[0]}


def _row(tensor: Tensor) -> Tensor:
    """The tensor with an axis to concatenate along; a counter has none, so it gets one."""
    return tensor if tensor.dim() else tensor[None]


def unstacked(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], count: int) -> list[dict[str, Tensor]]:
    """The inverse of `stacked`, with the networks' own shapes.

    >>> parts = unstacked(stacked([{"w": torch.zeros(2)}, {"w": torch.ones(2)}]), {"w": torch.Size([2])}, 2)
    >>> [part["w"].tolist() for part in parts]
    [[0.0, 0.0], [1.0, 1.0]]
    """
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, shape in shapes.items():
        for part, tensor in zip(parts, tensors[f"network.{name}"].chunk(count)):
            part[name] = tensor.reshape(shape)
    return parts


# --- layers -------------------------------------------------------------------------------------------------


def rule(*kinds: type[nn.Module]) -> Callable[[R], R]:
    """Register the function that makes the layer of `count` networks from the layer of one."""

    def register(function: R) -> R:
        RULES.update(dict.fromkeys(kinds, function))
        return function

    return register


class GroupedLinear(nn.Module):
    """Linear layers side by side; inputs that all networks share come once."""

    def __init__(self, layer: nn.Linear, count: int) -> None:
        super().__init__()
        self.inputs, self.outputs, self.count = layer.in_features, layer.out_features, count
        self.weight = _wide(layer.weight, count)  # (count * outputs, inputs)
        self.bias = None if layer.bias is None else _wide(layer.bias, count)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] == self.inputs:
            return functional.linear(x, self.weight, self.bias)
        each = x.view(-1, self.count, self.inputs).transpose(0, 1)  # (count, samples, inputs)
        weight = self.weight.view(self.count, self.outputs, self.inputs).transpose(1, 2)
        if self.bias is None:
            y = torch.bmm(each, weight)
        else:
            y = torch.baddbmm(self.bias.view(self.count, 1, self.outputs), each, weight)
        return y.transpose(0, 1).reshape(len(x), -1)


class GroupedConv2d(nn.Conv2d):
    """Convolutions side by side; inputs that all networks share come once."""

    count: int

    def forward(self, x: Tensor) -> Tensor:
        groups = self.groups if x.shape[1] == self.in_channels else self.groups // self.count
        return functional.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, groups)


def pays(weight: Sequence[int], x: Sequence[int], count: int) -> bool:
    """Whether one grouped convolution is faster than the convolutions one after another.

    Args:
        weight: the shape of all the weights, (count * outputs, inputs, ...).
        x: the shape of the inputs side by side, (samples, count * inputs, height, width).
        count: how many networks there are.

    >>> pays((64, 8, 3, 3), (32, 64, 8, 8), 8), pays((64, 8, 3, 3), (32, 64, 32, 32), 8)
    (True, False)
    """
    return math.prod(x[1:]) <= (_LARGEST_WIDE if weight[0] // count >= _WIDE_LAYER else _LARGEST)


class GroupedNormalize(Normalize):
    """The data's normalisation, the same for all networks; inputs that all networks share come once."""

    def forward(self, x: Tensor) -> Tensor:
        channels = len(self.mean)
        if channels in (1, x.shape[1]):
            return super().forward(x)
        return super().forward(torch.unflatten(x, 1, (-1, channels))).flatten(1, 2)


@rule(Normalize)
def _normalize(layer: Normalize, count: int) -> nn.Module:
    alike = copy.deepcopy(layer)
    alike.__class__ = GroupedNormalize
    return alike


@rule(nn.Linear)
def _linear(layer: nn.Linear, count: int) -> nn.Module:
    return GroupedLinear(layer, count)


@rule(nn.Conv2d)
def _convolution(layer: nn.Conv2d, count: int) -> nn.Module:
    if layer.padding_mode != "zeros":
        raise ModelError(f"padding_mode = '{layer.padding_mode}'")
    with torch.device("meta"):
        wide = GroupedConv2d(
            layer.in_channels * count,
            layer.out_channels * count,
            layer.kernel_size,  # type: ignore[arg-type]
            layer.stride,  # type: ignore[arg-type]
            layer.padding,  # type: ignore[arg-type]
            layer.dilation,  # type: ignore[arg-type]
            layer.groups * count,
            bias=layer.bias is not None,
        )
    wide.count = count
    return wide


@rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def _batch_norm(layer: nn.modules.batchnorm._BatchNorm, count: int) -> nn.Module:
    if layer.momentum is None and layer.track_running_stats:
        raise ModelError("momentum = None, which counts batches per network")
    wide = copy.deepcopy(layer)
    wide.num_features *= count
    return _widened(wide, count)


@rule(nn.GroupNorm)
def _group_norm(layer: nn.GroupNorm, count: int) -> nn.Module:
    wide = copy.deepcopy(layer)
    wide.num_groups *= count
    wide.num_channels *= count
    return _widened(wide, count)


def _wide(tensor: Tensor, count: int) -> Any:
    """A placeholder for `count` tensors, concatenated along the first axis."""
    shape = (count * tensor.shape[0], *tensor.shape[1:]) if tensor.dim() else (count,)
    empty = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _widened(layer: nn.Module, count: int) -> nn.Module:
    """The layer with all its tensors widened."""
    for store in (layer._parameters, layer._buffers):
        for name, tensor in store.items():
            store[name] = None if tensor is None else _wide(tensor, count)
    return layer


# --- networks -----------------------------------------------------------------------------------------------


def _made(base: nn.Module, count: int, example: Sequence[Tensor], own: bool) -> Grouped | str:
    made = beside(base, count, own)
    if isinstance(made, str):
        return made
    alike = _alike.setdefault(base, {})
    if own not in alike:
        two = beside(base, 2, own)
        alike[own] = isinstance(two, Grouped) and _agrees(base, two, example)
    if not alike[own]:
        return "its forward does not treat each channel separately"
    return _slower(made, example) or made


def _slower(made: Grouped, example: Sequence[Tensor]) -> str:
    """Why one pass would be slower, by the rule on shapes; an empty string if it would not."""
    shapes: list[tuple[torch.Size, torch.Size]] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(layer, GroupedConv2d) and inputs[0].shape[1] == layer.in_channels:
            shapes.append((layer.weight.shape, inputs[0].shape))

    trial = hollow(made, constants=False)
    convolutions = [layer for layer in trial.modules() if isinstance(layer, GroupedConv2d)]
    if not convolutions:
        return (
            "" if made.count > _FEW else f"{made.count} networks without convolutions are too few to gain from one pass"
        )
    for layer in convolutions:
        layer.register_forward_pre_hook(note)
    with torch.no_grad():
        trial(torch.empty((2 * made.count if made.own else 2, *example[0].shape[1:]), device="meta"))
    if all(pays(weight, x, made.count) for weight, x in shapes):
        return ""
    return f"the images are too large for the convolutions of {made.count} networks to gain from one pass"


def beside(base: nn.Module, count: int, own: bool = False) -> Grouped | str:
    """The structure of `count` networks like `base` in one pass, faster or not; or which layer has no rule for it."""
    names = [name for name, _ in base.named_parameters(remove_duplicate=False)]
    if len(names) != len(list(base.parameters())):
        return "some of its weights are shared"
    network = hollow(base)
    for path, layer in list(network.named_modules()):
        try:
            wide = _wide_layer(layer, count)
        except ModelError as error:
            return f"{path or 'the network'}: {error}"
        if path and wide is not layer:
            owner, _, leaf = path.rpartition(".")
            setattr(network.get_submodule(owner), leaf, wide)
        elif wide is not layer:
            network = wide
    return Grouped(network, count, own)


def _wide_layer(layer: nn.Module, count: int) -> nn.Module:
    """The layer of `count` networks; containers, and layers without tensors, stay as they are."""
    for kind in type(layer).__mro__:
        if kind in RULES:
            return RULES[kind](layer, count)
    own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
    if any(name not in layer._non_persistent_buffers_set for name, _ in own):
        raise ModelError(f"no rule for {type(layer).__name__}")
    return layer


def _agrees(base: nn.Module, made: Grouped, example: Sequence[Tensor]) -> bool:
    """Whether grouped and separate networks give the same outputs in training, on random weights and inputs."""
    random = generator("grouping")
    if len(example) != 1 or not example[0].is_floating_point():
        return False
    each = torch.rand((3 * made.count, *example[0].shape[1:]), generator=random).chunk(made.count)
    given = each if made.own else each[:1] * made.count
    tensors = [{name: _random(tensor, random) for name, tensor in named_tensors(base)} for _ in range(made.count)]
    with torch.no_grad():
        apart = [fill(base, weights).train()(x) for weights, x in zip(tensors, given)]
        try:
            together = fill(made, stacked(tensors)).train()(torch.cat(given) if made.own else given[0])
        except Exception:  # a user's forward may raise anything when it gets other shapes
            return False
    expected = torch.cat(apart)
    return expected.dim() == 2 and torch.allclose(together, expected, rtol=_TOLERANCE, atol=_TOLERANCE)


def _random(tensor: Tensor, random: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    scale = max(1, tensor[0].numel()) ** -0.5 if tensor.dim() > 1 else 1.0
    return (torch.rand(tensor.shape, generator=random) * 2 - 0.8).to(tensor.dtype) * scale
