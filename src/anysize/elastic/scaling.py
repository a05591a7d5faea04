"""Scaling the outputs of narrowed layers, so that the full network sees activations as large as its parts did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from anysize.elastic.axes import Axes


@dataclass(frozen=True)
class Scaler:
    """A forward hook that divides outputs by the width, always or in training only."""

    width: float
    in_training_only: bool = False

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output if self.in_training_only and not layer.training else output / self.width


def narrowed_layers(axes: Axes, network: nn.Module, *, before_norms: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Convolutions and linear layers that lost outputs, by name.

    Args:
        axes: of the full network.
        network: the narrowed one.
        before_norms: include layers directly before a batch-norm, which cancels any factor on their outputs.
    """
    followed = set() if before_norms else {id(layer) for layer in _before_norm(network)}
    for name, layer in network.named_modules():
        # Attention reads the weight of its output projection without calling the layer.
        if isinstance(layer, NonDynamicallyQuantizableLinear):
            continue
        if not isinstance(layer, nn.Linear | _ConvNd) or id(layer) in followed:
            continue
        axis, weight = 1 if isinstance(layer, _ConvTransposeNd) else 0, f"{name}.weight"
        # A weight computed from other tensors, as by weight norm, gives outputs that do not shrink with the width.
        if weight in axes.shapes and axes.elastic(weight, axis):
            yield name, layer


def scaled(axes: Axes, network: nn.Module, width: float) -> nn.Module:
    """The network, changed in place: its narrowed layers divide their outputs by the width."""
    if width < 1:
        for _, layer in narrowed_layers(axes, network):
            layer.register_forward_hook(Scaler(width))
    return network


def folded(axes: Axes, network: nn.Module, width: float) -> nn.Module:
    """The network, changed in place: the scaler is in its weights instead of in hooks."""
    if width == 1:
        return network
    layers = [layer for _, layer in narrowed_layers(axes, network)]
    own = [(layer, name, p) for layer in layers for name, p in layer._parameters.items() if p is not None]
    # Divide each shared tensor once; a layer that shares it but is not scaled keeps the old one.
    divided = {id(p): nn.Parameter(p.detach() / width, requires_grad=p.requires_grad) for _, _, p in own}
    for layer, name, parameter in own:
        layer._parameters[name] = divided[id(parameter)]
    return network


def _before_norm(network: nn.Module) -> Iterator[nn.Module]:
    for container in network.modules():
        for layer, after in pairwise(container.children()):
            if isinstance(after, _BatchNorm):
                yield layer
