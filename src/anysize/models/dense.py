"""Fully connected networks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import prod

from torch import nn

from anysize.models.shapes import positive


def mlp(input_shape: Sequence[int], classes: int, hidden: Sequence[int] = (256, 128)) -> nn.Sequential:
    """Fully connected layers with ReLU; takes any input.

    Weights have torch's default initialisation.

    Args:
        input_shape: flattened first.
        classes: outputs.
        hidden: the width of each hidden layer.
    """
    positive("mlp", hidden=[*hidden, classes])
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = prod(input_shape)
    for number, out in enumerate(hidden, start=1):
        layers[f"linear{number}"] = nn.Linear(width, out)
        layers[f"relu{number}"] = nn.ReLU()
        width = out
    layers["head"] = nn.Linear(width, classes)
    return nn.Sequential(layers)
