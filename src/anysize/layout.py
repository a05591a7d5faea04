"""The same network, arranged so that it trains fast on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def fast(x: Tensor) -> Tensor:
    """The same inputs; images in the memory layout that is fast on a CPU."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def layout(module: nn.Module) -> nn.Module:
    """The same module and names in the memory layout that is fast on a CPU; the same bits with less memory to go over.

    A ReLU before a max-pooling is moved behind it, where there is less to go over: the largest of clipped values is the
    clipped largest value, and both give the same gradient to the same entry. A ReLU behind a layer that does not need
    its own output again writes into it.

    In the channels-last layout torch 2.13 on a CPU corrupts memory in the backward pass of 1 x 1 convolutions with a
    stride, at some numbers of channels. Such a layer is given every s-th pixel instead, which is the same function.
    """
    for container in _chains(module):
        _pool_first(container)
        for layer, after in pairwise(container):
            if isinstance(after, nn.ReLU) and isinstance(layer, nn.Conv2d | nn.Linear | nn.MaxPool2d | _BatchNorm):
                after.inplace = True
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d) and _strides_over_pixels(layer):
            layer.register_forward_pre_hook(_EveryPixel(*(int(step) for step in layer.stride)))
            layer.stride = (1, 1)
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _chains(module: nn.Module) -> list[nn.Sequential]:
    """The containers whose parts run one after another and in no other way."""
    parts = [part for part in module.modules() if isinstance(part, nn.Sequential)]
    return [part for part in parts if type(part).forward is nn.Sequential.forward]


def _pool_first(container: nn.Sequential) -> None:
    """Moves every max-pooling before the ReLU that it follows; the parts keep their names."""
    order = list(container._modules.items())
    for place, ((_, layer), (_, after)) in enumerate(pairwise(order)):
        if isinstance(layer, nn.ReLU) and _forgets_where(after):
            order[place : place + 2] = reversed(order[place : place + 2])
    container._modules.clear()
    container._modules.update(order)


def _forgets_where(layer: nn.Module | None) -> bool:
    """Whether it is a max-pooling that gives values only: indices of equal zeros would differ."""
    return isinstance(layer, nn.MaxPool2d) and not layer.return_indices


@dataclass(frozen=True)
class _EveryPixel:
    """A forward hook: every pixel that a stride would visit."""

    rows: int
    columns: int

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0][..., :: self.rows, :: self.columns], *inputs[1:])


def _strides_over_pixels(layer: nn.Conv2d) -> bool:
    return layer.kernel_size == (1, 1) and layer.padding in ((0, 0), "valid") and tuple(layer.stride) != (1, 1)
