"""The same network, arranged so that it trains fast on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from anysize.inputs import Input, mapped


def fast(x: Input) -> Any:
    """The same inputs; images in the memory layout that is fast on a CPU."""
    return mapped(x, lambda one: one.contiguous(memory_format=torch.channels_last) if one.dim() == 4 else one)


def layout(module: nn.Module) -> nn.Module:
    """The same module and names in the memory layout that is fast on a CPU; the same bits with less memory traffic.

    A max-pooling after a ReLU moves before it, so that the ReLU has fewer values to clip: the largest of clipped values
    is the clipped largest value, and both orders give the same gradient to the same entry. A ReLU after a layer that
    does not need its own output again works in place. Without gradients, max-poolings do not record where they found
    the largest value.

    In the channels-last layout, torch 2.13 on a CPU corrupts memory in the backward pass of 1 x 1 convolutions with a
    stride, for some numbers of channels. Such a layer gets every s-th pixel as its input instead, which is the same
    function.
    """
    for parent in module.modules():
        for name, child in parent._modules.items():
            if type(child) is nn.MaxPool2d and not child.return_indices:
                parent._modules[name] = _MaxPool.like(child)
    for container in _chains(module):
        _pool_first(container, lambda layer: isinstance(layer, nn.ReLU))
        for layer, after in pairwise(container):
            if isinstance(after, nn.ReLU) and isinstance(layer, nn.Conv2d | nn.Linear | nn.MaxPool2d | _BatchNorm):
                after.inplace = True
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d) and _strides_over_pixels(layer):
            layer.register_forward_pre_hook(_EveryPixel(*(int(step) for step in layer.stride)))
            layer.stride = (1, 1)
    return channels_last(module)


def channels_last(module: nn.Module) -> nn.Module:
    """The same module, with its convolution weights in the memory layout of `fast`."""
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and tensor.dim() == 4:
                # Not `contiguous`: a weight for one channel is so in both layouts, and torch would choose the slow one.
                tensor.data = tensor.data.to(memory_format=torch.channels_last)
    return module


def answering(module: nn.Module) -> nn.Module:
    """The `layout` of a network in evaluation mode that will not change any more, with still less memory traffic.

    A max-pooling moves before a batch-norm too, if that has fixed statistics and a positive factor for every channel:
    then a larger value stays the larger one, and the bits are the same.
    """
    module = layout(module)
    for container in _chains(module):
        _pool_first(container, _keeps_order)
    return module


def _chains(module: nn.Module) -> list[nn.Sequential]:
    """The containers whose parts only ever run one after another."""
    parts = [part for part in module.modules() if isinstance(part, nn.Sequential)]
    return [part for part in parts if type(part).forward is nn.Sequential.forward]


def _pool_first(container: nn.Sequential, passes: Callable[[nn.Module], bool]) -> None:
    """Move every max-pooling before the layer that it follows, if `passes` allows it; the parts keep their names."""
    order = list(container._modules.items())
    for place, ((_, layer), (_, after)) in enumerate(pairwise(order)):
        if layer is not None and isinstance(after, _MaxPool) and passes(layer):
            order[place : place + 2] = reversed(order[place : place + 2])
    container._modules.clear()
    container._modules.update(order)


def _keeps_order(layer: nn.Module) -> bool:
    """Whether the layer is a batch-norm that never changes the order of two values of a channel."""
    if not isinstance(layer, _BatchNorm) or layer.training or layer.running_mean is None:
        return False
    return layer.weight is None or bool((layer.weight > 0).all())


class _MaxPool(nn.MaxPool2d):
    """A max-pooling that returns values only: the indices of equal zeros would differ if a ReLU moved after it."""

    @classmethod
    def like(cls, layer: nn.MaxPool2d) -> _MaxPool:
        """The same pooling."""
        return cls(layer.kernel_size, layer.stride, layer.padding, layer.dilation, ceil_mode=layer.ceil_mode)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not self._halves(x):
            pooled: Tensor = super().forward(x)
            return pooled
        samples, channels, height, width = x.shape
        rows = x.permute(0, 2, 3, 1).view(samples * height // 2, 2, width * channels)
        columns = torch.maximum(rows[:, 0], rows[:, 1]).view(-1, 2, channels)
        largest = torch.maximum(columns[:, 0], columns[:, 1])
        return largest.view(samples, height // 2, width // 2, channels).permute(0, 3, 1, 2)

    def _halves(self, x: Tensor) -> bool:
        """Whether it takes the largest of every 2 x 2 pixels, with none left over, of channels-last images."""
        if x.dim() != 4 or x.shape[2] % 2 or x.shape[3] % 2:
            return False
        pairs = all(size in (2, (2, 2)) for size in (self.kernel_size, self.stride))
        plain = self.padding in (0, (0, 0)) and self.dilation in (1, (1, 1))
        return pairs and plain and x.is_contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class _EveryPixel:
    """A forward hook that passes on every pixel that a stride would visit."""

    rows: int
    columns: int

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0][..., :: self.rows, :: self.columns], *inputs[1:])


def _strides_over_pixels(layer: nn.Conv2d) -> bool:
    return layer.kernel_size == (1, 1) and layer.padding in ((0, 0), "valid") and tuple(layer.stride) != (1, 1)
