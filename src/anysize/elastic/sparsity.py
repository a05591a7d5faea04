"""Unstructured masks: iterative magnitude pruning with rewinding, and masks and their values in few bytes.

A *mask* is a boolean tensor of a weight's shape, true where the weight stays. Only weights of layers (two or more axes)
are pruned; biases, norms and buffers stay. Masks save bytes, not time: a dense multiplication with zeros takes as long
as one without.

>>> masks = prune({"w": torch.tensor([[1.0, -3.0, 2.0, -0.5]])}, {}, 0.5)
>>> masks["w"].int().tolist()
[[0, 1, 1, 0]]
>>> bits = pack(masks["w"])
>>> take_values(torch.tensor([[1.0, -3.0, 2.0, -0.5]]), bits).tolist()
[-3.0, 2.0]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from anysize.errors import ModelError

_SLACK = 1e-9  # for rounding: log(0.64) / log(0.8) may be a little above two

Masks = dict[str, Tensor]
Scope = Literal["global", "layer"]
Train = Callable[[Masks], tuple[Mapping[str, Tensor], float]]
"""Trains the network from its first weights under masks; returns the trained tensors and their accuracy."""


@dataclass(frozen=True)
class Ticket:
    """One network of a pruning series.

    Attributes:
        sparsity: the fraction of the prunable weights that is zero.
        masks: which weights stay; empty for the dense network.
        accuracy: after training from the first weights under these masks.
    """

    sparsity: float
    masks: Masks
    accuracy: float


def iterative_pruning(sparsities: Sequence[float], train: Train, scope: Scope = "global") -> Iterator[Ticket]:
    """The dense network and one of each sparsity, rising: train, prune the smallest weights, rewind, train again.

    Args:
        sparsities: one per iteration, rising, above 0.
        train: trains a network from its first weights (rewinding) under masks.
        scope: whether weights are compared over all layers or within each.
    """
    masks: Masks = {}
    tensors, accuracy = train(masks)
    yield Ticket(0.0, masks, accuracy)
    for sparsity in sparsities:
        masks = prune(tensors, masks, sparsity, scope)
        tensors, accuracy = train(masks)
        yield Ticket(sparsity, masks, accuracy)


def pruning_steps(sparsities: Sequence[float], at_once: float) -> list[float]:
    """The sparsity after each iteration: all that are asked for, and before each as few even steps as are allowed.

    Args:
        sparsities: those asked for, rising, above 0.
        at_once: the largest fraction of the weights that are left which one iteration may prune; 1 goes straight to
            every sparsity.

    >>> [round(sparsity, 3) for sparsity in pruning_steps([0.5, 0.6], 0.2)]
    [0.159, 0.293, 0.405, 0.5, 0.6]
    >>> pruning_steps([0.5, 0.9], 1.0)
    [0.5, 0.9]
    """
    steps: list[float] = []
    left = 1.0
    for sparsity in sparsities:
        ratio = (1 - sparsity) / left
        count = 1 if at_once >= 1 else math.ceil(math.log(ratio) / math.log(1 - at_once) - _SLACK)
        steps += [1 - left * ratio ** (step / count) for step in range(1, count)] + [sparsity]
        left = 1 - sparsity
    return steps


def prune(tensors: Mapping[str, Tensor], masks: Masks, sparsity: float, scope: Scope = "global") -> Masks:
    """Masks that keep the largest of the weights that `masks` left.

    Args:
        tensors: a network's; those with two or more axes are pruned.
        masks: those of the iteration before, empty before the first.
        sparsity: the fraction of all prunable weights that is zero afterwards.
        scope: whether weights are compared over all layers or within each.

    >>> weights = {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([[3.0, 4.0]])}
    >>> {name: mask.int().tolist() for name, mask in prune(weights, {}, 0.5).items()}
    {'a': [[0, 0]], 'b': [[1, 1]]}
    >>> {name: mask.int().tolist() for name, mask in prune(weights, {}, 0.5, "layer").items()}
    {'a': [[0, 1]], 'b': [[0, 1]]}
    """
    if not 0 <= sparsity < 1:
        raise ModelError(f"a sparsity of {sparsity:g} was asked for; allowed: from 0 to below 1")
    names = prunable(tensors)
    # Pruned weights count as smaller than any other, so they are pruned again.
    sizes = {
        n: tensors[n].detach().abs().masked_fill(~masks[n], -1.0) if n in masks else tensors[n].abs() for n in names
    }
    if scope == "layer":
        return {name: _largest(size.flatten(), sparsity).reshape(size.shape) for name, size in sizes.items()}
    stays = _largest(torch.cat([sizes[name].flatten() for name in names]), sparsity)
    parts = torch.split(stays, [sizes[name].numel() for name in names])
    return {name: part.reshape(sizes[name].shape) for name, part in zip(names, parts)}


def _largest(sizes: Tensor, sparsity: float) -> Tensor:
    """True for all but the `sparsity` smallest; of equal ones the earlier are pruned, so that the count is exact."""
    order = torch.sort(sizes, stable=True).indices
    stays = torch.ones(len(sizes), dtype=torch.bool)
    stays[order[: round(sparsity * len(sizes))]] = False
    return stays


def prunable(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the weights that can be pruned: numbers with two or more axes.

    >>> prunable({"weight": torch.ones(2, 2), "bias": torch.ones(2), "counts": torch.ones(2, 2, dtype=torch.int64)})
    ['weight']
    """
    return [name for name, tensor in tensors.items() if tensor.dim() >= 2 and tensor.is_floating_point()]


# --- few bytes --------------------------------------------------------------------------------------------------


def pack(mask: Tensor) -> Tensor:
    """A mask with eight entries per byte, (ceil(n / 8),) uint8.

    >>> pack(torch.tensor([True, False, True])).tolist()
    [160]
    """
    if mask.is_meta:
        return torch.empty((mask.numel() + 7) // 8, dtype=torch.uint8, device="meta")
    return torch.from_numpy(np.packbits(mask.flatten().numpy()))


def unpack(bits: Tensor, shape: Sequence[int]) -> Tensor:
    """The mask of that shape; refuses too few or too many bytes.

    >>> unpack(torch.tensor([160], dtype=torch.uint8), (3,)).tolist()
    [True, False, True]
    """
    count = int(torch.Size(shape).numel())
    if bits.dtype != torch.uint8 or bits.shape != ((count + 7) // 8,):
        raise ModelError(f"a mask of {tuple(bits.shape)} {bits.dtype} does not fit a weight of shape {tuple(shape)}")
    if bits.is_meta:
        return torch.empty(tuple(shape), dtype=torch.bool, device="meta")
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=count).astype(bool)).reshape(tuple(shape))


def left_by(sparsity: float, counts: Mapping[str, int], scope: Scope) -> dict[str, int]:
    """How many weights of each tensor masks leave; of those that compare all layers, known in total alone.

    Args:
        sparsity: of the masks.
        counts: the number of weights of each tensor.
        scope: whether weights were compared over all layers or within each.

    >>> left_by(0.5, {"a": 3, "b": 3}, "layer"), left_by(0.5, {"a": 3, "b": 3}, "global")
    ({'a': 1, 'b': 1}, {'a': 1, 'b': 2})
    """
    if scope == "layer":
        return {name: count - round(sparsity * count) for name, count in counts.items()}
    ends = [round(sparsity * end) for end in accumulate(counts.values(), initial=0)]
    return {name: counts[name] - last + first for name, (first, last) in zip(counts, pairwise(ends))}


def take_values(tensor: Tensor, bits: Tensor) -> Tensor:
    """The entries of a tensor that a mask keeps, in order, (count,)."""
    return tensor.detach().contiguous()[unpack(bits, tensor.shape)]


def put_values(values: Tensor, bits: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of that shape with the values where the mask is true, zero elsewhere; the inverse of `take_values`.

    >>> put_values(torch.tensor([5.0]), pack(torch.tensor([False, True])), (2,)).tolist()
    [0.0, 5.0]
    """
    if values.is_meta or bits.is_meta:
        return torch.empty(tuple(shape), dtype=values.dtype, device="meta")
    mask = unpack(bits, shape)
    if values.shape != (int(mask.sum()),):
        raise ModelError(f"values of shape {tuple(values.shape)} came for a mask that keeps {int(mask.sum())}")
    full = torch.zeros(tuple(shape), dtype=values.dtype)
    full[mask] = values.detach()
    return full
