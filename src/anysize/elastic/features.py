"""What principal kernels make of samples: feature maps, how far these overlap, and how many independent ones there are.

A layer with inputs X, a column for each place of its kernel, gives Y = sum_i Y_i with Y_i = left_i (right_i X). The
row right_i X is the *map* of kernel i: every output channel has a multiple of it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from anysize.elastic.kernels import needed_kernels, runs_as_pair

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_ROUNDING = 1e-6  # times the largest singular value: smaller ones are rounding errors of single precision


class Seen(NamedTuple):
    """A convolution or linear layer, and what entered it."""

    layer: nn.Linear | _ConvNd
    inputs: Tensor


def layer_inputs(network: nn.Module, names: Collection[str], x: Tensor) -> dict[str, Seen]:
    """By the name of its weight, what enters each layer while the network runs on `x`.

    Only layers with one input and one weight are in it: no recurrent ones, no attention.
    """
    found: dict[str, Seen] = {}

    def watch(name: str, layer: nn.Linear | _ConvNd) -> torch.utils.hooks.RemovableHandle:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found[name] = Seen(layer, inputs[0].detach())

        return layer.register_forward_pre_hook(hook)

    layers = {name: network.get_submodule(name.rpartition(".")[0]) for name in names if name.endswith(".weight")}
    handles = [watch(name, layer) for name, layer in layers.items() if runs_as_pair(layer)]
    try:
        with torch.no_grad():
            network.eval()(x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def maps(seen: Seen, right: Tensor) -> Tensor:
    """The map of every kernel, (R, samples, *places), for right factors (R, M, *k)."""
    layer = seen.layer
    if isinstance(layer, nn.Linear):
        return F.linear(seen.inputs, right).movedim(-1, 0)
    convolve = _CONVOLVE[right.dim() - 2]
    return convolve(seen.inputs, right, None, layer.stride, layer.padding, layer.dilation).movedim(1, 0)


def overlap(left: Tensor, maps: Tensor) -> float:
    """The largest |cosine| between the outputs of two kernels, <Y_i, Y_j> / (|Y_i| |Y_j|); 0 if all are orthogonal.

    >>> overlap(torch.eye(2), torch.ones(2, 5)), overlap(torch.ones(1, 2), torch.ones(2, 4))
    (0.0, 1.0)
    """
    cosines = _cosines(left.flatten(1).T) * _cosines(maps.flatten(1))
    return float((cosines - cosines.diag().diag()).abs().max())


class Ranks(NamedTuple):
    """The ranks of a layer Y = W X of some kernels: of their maps X, of their left factors W, and of the outputs Y.

    `needed` is how many directions it takes to approximate the outputs, as `kernels.needed_kernels` counts them.
    """

    maps: int
    kernels: int
    outputs: int
    needed: float


def ranks(left: Tensor, maps: Tensor) -> Ranks:
    """Of left factors (N, r, ...) and the maps (r, ...) of the same kernels.

    >>> ranks(torch.eye(3)[:, :2], torch.eye(2, 5))
    Ranks(maps=2, kernels=2, outputs=2, needed=2.0)
    """
    outer, rows = left.flatten(1).double(), maps.flatten(1).double()
    gram = rows @ rows.T
    outputs = _singular_values(outer @ gram @ outer.T)
    return Ranks(
        _rank(_singular_values(gram)), _rank(_singular_values(outer.T @ outer)), _rank(outputs), needed_kernels(outputs)
    )


def _cosines(rows: Tensor) -> Tensor:
    """Between any two rows; 0 for a row of zeros."""
    unit = F.normalize(rows.double(), dim=1)
    return unit @ unit.T


def _singular_values(gram: Tensor) -> Tensor:
    """Those of A, from A A^T."""
    values: Tensor = torch.linalg.eigvalsh(gram)
    return values.clamp_min(0).sqrt()


def _rank(values: Tensor) -> int:
    return int((values > values.max() * _ROUNDING).sum())
