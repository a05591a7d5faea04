"""Batch-norm: which statistics normalise, how they are estimated, and how they become fixed.

A network with "batch" or "calibrated" norms keeps no statistics: it normalises by those of the current batch. Before
export, statistics are *collected* by forward passes and *attached*, so that the answer for one sample no longer depends
on the rest of its batch.

A *dual* network has every batch-norm twice, for clean and for noised inputs (Xie, Yuille. "Intriguing Properties of
Adversarial Training at Scale". ICLR 2020); the two are views of one network. At fixed statistics a batch-norm is affine
per channel, so a mixture of two *folds* into one ordinary batch-norm. The other mixture is that of the two networks'
outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from anysize.elastic.basis import key, unkey
from anysize.elastic.grouping import Grouped
from anysize.elastic.skeleton import copied

_NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """The batch-norm layers in the order in which the module lists them."""
    return [child for child in module.modules() if isinstance(child, _BatchNorm)]


def norm_tensors(module: nn.Module) -> Iterator[str]:
    """Names of the parameters and buffers of all norm layers."""
    for prefix, child in module.named_modules():
        if isinstance(child, _NORMS):
            for name in child.state_dict():
                yield f"{prefix}.{name}" if prefix else name


def without_statistics(module: nn.Module) -> nn.Module:
    """A copy whose batch-norms always normalise by the current batch."""
    bare = copied(module)
    for norm in batch_norms(bare):
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    return bare


@dataclass(frozen=True)
class Statistics:
    """Mean and variance per channel of what enters each batch-norm, and the number of values behind them."""

    means: tuple[Tensor, ...]
    variances: tuple[Tensor, ...]
    counts: tuple[float, ...]

    def tensors(self) -> dict[str, Tensor]:
        """The statistics as named tensors, for messages and checkpoints."""
        named: dict[str, Tensor] = {}
        for i, (mean, variance, count) in enumerate(zip(self.means, self.variances, self.counts)):
            named |= {
                f"{i}.mean": mean,
                f"{i}.variance": variance,
                f"{i}.count": torch.tensor(count, dtype=torch.float64),
            }
        return named

    @classmethod
    def joined(cls, parts: Sequence[Statistics]) -> Statistics:
        """The statistics of several networks as those of one network that lists their layers in turn."""
        return cls(
            tuple(mean for part in parts for mean in part.means),
            tuple(variance for part in parts for variance in part.variances),
            tuple(count for part in parts for count in part.counts),
        )

    @classmethod
    def of(cls, named: dict[str, Tensor]) -> Statistics:
        """The inverse of `tensors`."""
        layers = range(len(named) // 3)
        return cls(
            tuple(named[f"{i}.mean"] for i in layers),
            tuple(named[f"{i}.variance"] for i in layers),
            tuple(float(named[f"{i}.count"]) for i in layers),
        )


def collect(module: nn.Module, batches: Iterable[Tensor]) -> Statistics:
    """Statistics of what enters each batch-norm while `module` runs over `batches`; it must keep no statistics."""
    norms = batch_norms(module)
    sums: list[list[Any]] = [[0.0, 0.0, 0.0] for _ in norms]  # count, sum, sum of squares

    def watch(position: int) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach()
            axes = [axis for axis in range(x.dim()) if axis != 1]
            count = x.numel() / x.shape[1]
            mean = x.mean(axes, keepdim=True)
            spread = (x - mean).square_().mean(axes).double()  # around the mean single precision is enough
            mean = mean.flatten().double()
            sums[position][0] += count
            sums[position][1] += mean * count
            sums[position][2] += (spread + mean.square()) * count

        return hook

    handles = [norm.register_forward_pre_hook(watch(i)) for i, norm in enumerate(norms)]
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            for x in batches:
                module(x)
    finally:
        module.train(was_training)
        for handle in handles:
            handle.remove()
    found = [_moments(norm, *entry) for norm, entry in zip(norms, sums)]
    return Statistics(
        tuple(mean.float() for mean, _ in found),
        tuple(variance.float() for _, variance in found),
        tuple(count for count, _, _ in sums),
    )


def _moments(norm: _BatchNorm, count: float, total: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, variance) of `count` values; zero and one for a layer that no forward pass reached."""
    if count == 0:
        return torch.zeros(norm.num_features), torch.ones(norm.num_features)
    mean = total / count
    return mean, (squares / count - mean.square()).clamp_min(0)


def merge(parts: Sequence[Statistics], cut: int = 0) -> Statistics:
    """The statistics of all values together, by the law of total variance: differences between clients count too.

    Args:
        parts: the statistics of each client.
        cut: leave out this many of the smallest and of the largest in every channel; clients then count equally.
    """
    means, variances, counts = [], [], []
    for i in range(len(parts[0].means)):
        own = [(p.means[i].double(), p.variances[i].double(), p.counts[i]) for p in parts]
        mean, variance, count = _trimmed(own, cut) if cut else _together(own)
        means.append(mean.float())
        variances.append(variance.float())
        counts.append(count)
    return Statistics(tuple(means), tuple(variances), tuple(counts))


def _together(parts: Sequence[tuple[Tensor, Tensor, float]]) -> tuple[Tensor, Tensor, float]:
    """(mean, variance, count) of all values of one layer, from those of its parts."""
    count = sum(own for _, _, own in parts)
    # A layer that no forward pass reached has no values at all; its placeholder statistics stay as they are.
    shares = torch.tensor([own / count if count else 1 / len(parts) for _, _, own in parts], dtype=torch.float64)
    mean = torch.tensordot(shares, torch.stack([own for own, _, _ in parts]), dims=1)
    within = torch.tensordot(shares, torch.stack([own for _, own, _ in parts]), dims=1)
    between = torch.tensordot(shares, torch.stack([(own - mean).square() for own, _, _ in parts]), dims=1)
    return mean, within + between, count


def _trimmed(parts: Sequence[tuple[Tensor, Tensor, float]], cut: int) -> tuple[Tensor, Tensor, float]:
    """(mean, variance, count) of one layer, without the extreme clients of every channel."""
    kept = slice(cut, len(parts) - cut)
    mean = torch.stack([own for own, _, _ in parts]).sort(dim=0).values[kept].mean(dim=0)
    spreads = torch.stack([variance + (own - mean).square() for own, variance, _ in parts])
    counts = sorted(count for _, _, count in parts)[kept]
    return mean, spreads.sort(dim=0).values[kept].mean(dim=0), sum(counts)


Places = Sequence[Tensor | None]
"""For each batch-norm of a part of a network, which of the network's channels it has; None for all."""


def put_together(ranks: Sequence[Sequence[tuple[Statistics, Places]]], channels: Sequence[int]) -> Statistics:
    """The statistics of a network from those of parts of it.

    A channel has those of all parts of the first rank that has it; mean 0 and variance 1 if none does.

    Args:
        ranks: parts, the most trusted first.
        channels: how many channels each batch-norm of the network has.
    """
    means = [torch.zeros(size) for size in channels]
    variances = [torch.ones(size) for size in channels]
    counts = [0.0] * len(channels)
    for parts in reversed(ranks):
        for i, size in enumerate(channels):
            sums = _sums([(own, i, places[i]) for own, places in parts], size)
            known, mean = sums[0] > 0, sums[1] / sums[0].clamp_min(1e-300)
            variance = (sums[2] / sums[0].clamp_min(1e-300) - mean.square()).clamp_min(0)
            means[i] = torch.where(known, mean.float(), means[i])
            variances[i] = torch.where(known, variance.float(), variances[i])
            counts[i] = max(counts[i], float(sums[0].max()))
    return Statistics(tuple(means), tuple(variances), tuple(counts))


def _sums(parts: Sequence[tuple[Statistics, int, Tensor | None]], size: int) -> Tensor:
    """(3, size): per channel the count, the sum and the sum of squares of all values of one layer."""
    sums = torch.zeros(3, size, dtype=torch.float64)
    for own, layer, at in parts:
        mean = own.means[layer].double()
        moments = torch.stack([torch.ones_like(mean), mean, own.variances[layer].double() + mean.square()])
        sums[:, torch.arange(size) if at is None else at] += own.counts[layer] * moments
    return sums


def attach(module: nn.Module, statistics: Statistics) -> nn.Module:
    """The module, changed in place: in evaluation mode its batch-norms normalise by `statistics`."""
    for norm, mean, variance in zip(batch_norms(module), statistics.means, statistics.variances):
        norm.track_running_stats = True
        norm.running_mean = mean.clone()
        norm.running_var = variance.clone()
        norm.num_batches_tracked = torch.tensor(0)
    return module


class Dual(nn.Module):
    """A network with batch-norms for clean inputs, and copies of them for noised inputs.

    Attributes:
        network: the network with the clean batch-norms; calling the dual network calls it.
        noise: the copies; keys are the layers' names with ':' for '.'.

    >>> dual = Dual(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    >>> dual.noisy()(torch.rand(4, 2)).shape, list(dual.noise)
    (torch.Size([4, 3]), ['1'])
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = copied(network)
        norms = {name: layer for name, layer in network.named_modules() if isinstance(layer, _BatchNorm)}
        self.noise = nn.ModuleDict({key(name): copy.deepcopy(layer) for name, layer in norms.items()})

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self.network(*inputs)
        return output

    def noisy(self) -> nn.Module:
        """The same network with its batch-norms for noised inputs."""
        return _Noisy(self)

    def noise_tensors(self) -> dict[str, Tensor]:
        """The copies' tensors, by the names of the tensors in `network` that they replace for noised inputs."""
        return {
            f"{unkey(name)}.{leaf}": tensor
            for name, layer in self.noise.items()
            for leaf, tensor in (*layer.named_parameters(), *layer.named_buffers())
        }


class _Noisy(nn.Module):
    """The noised branch of a dual network: a view in which the copies replace the clean batch-norms' tensors."""

    def __init__(self, dual: Dual) -> None:
        super().__init__()
        self.dual = dual
        self.training = dual.training

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = functional_call(self.dual.network, self.dual.noise_tensors(), inputs)
        return output


def noisy(module: nn.Module) -> nn.Module:
    """The network for noised inputs: the noised branch of a dual network (or of each grouped one), else `module`."""
    if isinstance(module, Grouped):
        return Grouped(noisy(module.network), module.count, module.own)
    return module.noisy() if isinstance(module, Dual) else module


def dual_tensors(tensors: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """The tensors of a dual network whose two branches both start as `network` does with `tensors`."""
    norms = [name for name, layer in network.named_modules() if isinstance(layer, _BatchNorm)]
    named = {f"network.{name}": tensor for name, tensor in tensors.items()}
    for norm in norms:
        own = {name.removeprefix(f"{norm}."): t for name, t in tensors.items() if name.rpartition(".")[0] == norm}
        named |= {f"noise.{key(norm)}.{leaf}": tensor for leaf, tensor in own.items()}
    return named


def mixed_norms(dual: Dual, level: float) -> nn.Module:
    """Split-Mix, Eq. (2): the network with (1 - level) BN_c(x) + level BN_n(x), each as one ordinary batch-norm.

    The dual network is used up: its tensors change in place.
    """
    for name, noise in dual.noise.items():
        clean = dual.network.get_submodule(unkey(name))
        assert isinstance(clean, _BatchNorm)
        assert isinstance(noise, _BatchNorm)
        ends = zip(affine(clean), affine(noise))
        fold(clean, *((1 - level) * own + level * other for own, other in ends))
    return dual.network


class MixedOutputs(nn.Module):
    """The two branches of a dual network as one ordinary network, which returns a mean of their outputs.

    Attributes:
        clean: the network with the batch-norms for clean inputs.
        noisy: the network with those for noised inputs; it shares all other tensors with `clean`.
        level: the weight of the noised one, a tensor, so that networks of different levels differ in tensors alone.

    >>> dual = Dual(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    >>> mixed = MixedOutputs(dual, 0.3)
    >>> mixed.noisy[0].weight is mixed.clean[0].weight, mixed.noisy[1].weight is mixed.clean[1].weight
    (True, False)
    """

    level: Tensor

    def __init__(self, dual: Dual, level: float) -> None:
        super().__init__()
        self.clean = dual.network
        memo: dict[int, object] = {id(tensor): tensor for tensor in (*self.clean.parameters(), *self.clean.buffers())}
        memo |= {id(self.clean.get_submodule(unkey(name))): norm for name, norm in dual.noise.items()}
        self.noisy = copy.deepcopy(self.clean, memo)
        self.register_buffer("level", torch.tensor(level))

    def forward(self, x: Tensor) -> Tensor:
        """Split-Mix, section 4.3: (1 - level) f_c(x) + level f_n(x)."""
        output: Tensor = (1 - self.level) * self.clean(x) + self.level * self.noisy(x)
        return output


def affine(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """The factor and the shift per channel, in double precision, that a batch-norm at fixed statistics applies."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    factor = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        factor = factor * norm.weight.detach().double()
    shift = -norm.running_mean.double() * factor
    return factor, shift if norm.bias is None else shift + norm.bias.detach().double()


def fold(norm: _BatchNorm, factor: Tensor, shift: Tensor) -> None:
    """Change `norm` in place so that it applies this factor and shift, at mean 0 and variance 1.

    Whatever is linear in a factor and a shift is therefore linear in the tensors of the folded layer too.
    """
    precision = torch.get_default_dtype() if norm.running_mean is None else norm.running_mean.dtype
    norm.track_running_stats = norm.affine = True
    norm.running_mean = torch.zeros_like(factor, dtype=precision)
    norm.running_var = torch.ones_like(factor, dtype=precision)
    norm.num_batches_tracked = torch.tensor(0)
    norm.weight = nn.Parameter((factor * (1 + norm.eps) ** 0.5).to(precision))
    norm.bias = nn.Parameter(shift.to(precision))
