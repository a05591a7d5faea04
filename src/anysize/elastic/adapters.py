"""Adapters of low rank beside the layers of a frozen network: which layers can have one, and the weights they make.

A layer with weight W and an adapter of rank r computes with W + s L R, where `left` is L, (N, r), and `right` is R,
(r, M): LoRA's B and A, in the shapes that peft's modules have. For a convolution they are (N, r, 1, 1) and
(r, M, k, k). peft makes the modules that train; it is imported only where one is made.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from anysize.config.extras import needs
from anysize.config.packages import load_torchvision
from anysize.elastic.kernels import principal_kernels, recompose
from anysize.elastic.norm import batch_norms
from anysize.errors import ModelError, told, unknown

if TYPE_CHECKING:
    import peft

ADAPTER = "default"  # peft's own name for the only adapter of a network
ALL = "all-linear"  # peft's name for every layer that can have an adapter
_DEAD = 1e-6  # times the largest singular value: smaller ones are rounding errors of a product of trained factors


@dataclass(frozen=True)
class Site:
    """A layer that has an adapter.

    Attributes:
        name: of the layer.
        outputs: of the layer.
        inputs: of the layer.
        kernel: the shape of a convolution's kernel; empty for a linear layer.
        transposed: whether the weight is (inputs, outputs), as in the `Conv1D` of transformers.
    """

    name: str
    outputs: int
    inputs: int
    kernel: tuple[int, ...] = ()
    transposed: bool = False

    @property
    def weight(self) -> str:
        """The name of the layer's weight."""
        return f"{self.name}.weight"

    @property
    def full_rank(self) -> int:
        """The rank above which an adapter could say no more than a whole weight.

        >>> Site("conv", 32, 2, (3, 3)).full_rank
        18
        """
        return min(self.outputs, self.inputs * math.prod(self.kernel))

    def left_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the left factor: LoRA's B."""
        return (self.outputs, rank, *(1 for _ in self.kernel))

    def right_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the right factor: LoRA's A."""
        return (rank, self.inputs, *self.kernel)

    def change(self, product: Tensor) -> Tensor:
        """A product of factors, (outputs, inputs, *kernel), in the shape of the layer's weight."""
        return product.T if self.transposed else product


def site_of(name: str, layer: nn.Module) -> Site | None:
    """How a layer can have an adapter; None if peft has none for it, or none that can be merged into its weight.

    >>> site_of("fc", nn.Linear(3, 5))
    Site(name='fc', outputs=5, inputs=3, kernel=(), transposed=False)
    >>> site_of("norm", nn.LayerNorm(3)) is None
    True
    """
    weight = layer._parameters.get("weight")
    if weight is None or isinstance(layer, NonDynamicallyQuantizableLinear):  # torch's attention reads its weight
        return None
    if isinstance(layer, nn.Linear):
        return Site(name, *weight.shape)
    if type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers."):
        return Site(name, weight.shape[1], weight.shape[0], transposed=True)
    if not isinstance(layer, _ConvNd) or isinstance(layer, _ConvTransposeNd):
        return None
    plain = layer.groups == 1 and layer.padding_mode == "zeros" and set(layer.dilation) == {1}
    return Site(name, weight.shape[0], weight.shape[1], tuple(weight.shape[2:])) if plain else None


def sites(network: nn.Module, targets: Sequence[str] | str, head: Collection[str]) -> list[Site]:
    """The layers of a network that get an adapter, in its order.

    Args:
        network: any.
        targets: as peft's `target_modules`: names or ends of names, or a regular expression that matches a whole name;
            "all-linear" for every linear and convolutional layer but the head.
        head: names of the modules that make the classes.

    Raises:
        ModelError: a target matches nothing, or a module that can have no adapter.

    >>> [site.name for site in sites(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)), ALL, ["2"])]
    ['0']
    """
    modules = {name: module for name, module in network.named_modules() if name}
    shared = _shared(network)
    able = {name: site for name, layer in modules.items() if name not in shared and (site := site_of(name, layer))}
    if targets == ALL:
        found = [site for name, site in able.items() if name not in head]
        if not found:
            raise ModelError("lora: the network has no linear or convolutional layer of its own besides its head")
        return found
    patterns = [targets] if isinstance(targets, str) else list(targets)
    whole = isinstance(targets, str)
    lost = [p for p in patterns if not any(_matches(p, name, whole) for name in modules)]
    if lost or not patterns:
        raise ModelError("lora: method.targets: " + unknown("layer", ", ".join(lost) or "[]", able))
    named = [name for name in modules if any(_matches(pattern, name, whole) for pattern in patterns)]
    wrong = [name for name in named if name not in able]
    if wrong:
        listed = ", ".join(f"{name} ({type(modules[name]).__name__})" for name in wrong[:5])
        raise ModelError(
            f"lora: method.targets names {listed}; allowed: linear layers and convolutions without groups or dilation "
            "whose weight no other layer shares"
        )
    return [able[name] for name in named]


def _matches(pattern: str, name: str, whole: bool) -> bool:
    if not whole:
        return name == pattern or name.endswith(f".{pattern}")
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise ModelError(f"lora: method.targets: '{pattern}' is no regular expression: {error}") from None


def _shared(network: nn.Module) -> set[str]:
    """The names of the modules that hold a parameter which another module holds too."""
    holders: dict[int, list[str]] = {}
    for name, module in network.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(name)
    return {name for names in holders.values() if len(names) > 1 for name in names}


@dataclass(frozen=True)
class Adapter:
    """Adapters of one rank, with the network that they belong to.

    Attributes:
        base: the network without them.
        merged: the network with their products added to its weights.
        sites: the layers that have one.
        left: their left factors, by the layers' names.
        right: their right factors.
        head: parameters of the network that were trained whole, by name.
        scaling: the factor of the product.
    """

    base: nn.Module
    merged: nn.Module
    sites: Sequence[Site]
    left: Mapping[str, Tensor]
    right: Mapping[str, Tensor]
    head: Mapping[str, Tensor]
    scaling: float

    @property
    def rank(self) -> int:
        """Of every adapter."""
        return len(self.right[self.sites[0].name])


# --- factors --------------------------------------------------------------------------------------------------


def drawn(site: Site, rank: int, generator: torch.Generator) -> Tensor:
    """A new right factor, as peft draws it: Kaiming's uniform distribution over the layer's inputs."""
    bound = 1 / math.sqrt(site.inputs * math.prod(site.kernel))
    return torch.rand(site.right_shape(rank), generator=generator) * (2 * bound) - bound


def principal(product: Tensor, rank: int, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of the best approximation of a product at a rank, the most important direction first.

    Where the product has fewer directions than the rank, the others start as those of a new adapter do: nothing on the
    left, and on the right the rows of `fresh`.

    >>> left, right = principal(torch.tensor([[4.0, 0.0], [0.0, 0.0]]), 2, torch.ones(2, 2))
    >>> left.tolist(), right.tolist()
    ([[2.0, 0.0], [0.0, 0.0]], [[2.0, 0.0], [1.0, 1.0]])
    """
    kernels = principal_kernels(product)
    alive = kernels.values[:rank] > _DEAD * kernels.values[0]
    shape = [1] * product.dim()
    left = kernels.left[:, :rank] * alive.reshape([1, -1, *shape[2:]])
    right = torch.where(alive.reshape([-1, *shape[1:]]), kernels.right[:rank], fresh)
    return left.contiguous(), right.contiguous()


def padded(factor: Tensor, axis: int, rank: int) -> Tensor:
    """A factor with zeros up to a rank.

    >>> padded(torch.ones(1, 2), 0, 2).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    shape = list(factor.shape)
    shape[axis] = rank - shape[axis]
    return torch.cat([factor, factor.new_zeros(shape)], axis)


def products(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The product of every layer's factors, (outputs, inputs, *kernel)."""
    return {name: recompose(left[name], right[name]) for name in left}


# --- modules --------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A network with peft's adapters, in which nothing else is trained except what the head is made of.

    Batch-norms that have statistics use these in training too, since they belong to what is frozen.

    Args:
        network: without adapters; it is changed.
        sites: the layers that get one.
        left: their left factors, by the layers' names.
        right: their right factors.
        head: names of the network's parameters that are trained as they are.
        scaling: the factor of the product.
        dropout: of an adapter's inputs, in training.
    """

    def __init__(
        self,
        network: nn.Module,
        sites: Sequence[Site],
        left: Mapping[str, Tensor],
        right: Mapping[str, Tensor],
        head: Collection[str] = (),
        scaling: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        trained = {name: parameter for name, parameter in network.named_parameters() if name in head}
        rank = next(iter(right.values())).shape[0]
        config = lora_config([site.name for site in sites], rank, scaling, lora_dropout=dropout)
        with quiet():
            self.network: nn.Module = load_peft().inject_adapter_in_model(config, network, low_cpu_mem_usage=True)
        for site in sites:
            layer: Any = self.network.get_submodule(site.name)
            layer.lora_B[ADAPTER].weight = nn.Parameter(left[site.name].detach().clone())
            layer.lora_A[ADAPTER].weight = nn.Parameter(right[site.name].detach().clone())
        for parameter in trained.values():
            parameter.requires_grad_(True)

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        for norm in batch_norms(self.network):
            norm.train(mode and norm.running_mean is None)
        return self

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self.network(*inputs)
        return output


def lora_config(names: Sequence[str], rank: int, scaling: float, **more: Any) -> peft.LoraConfig:
    """peft's description of adapters of a rank in the layers of these names and no others."""
    exact = "|".join(map(re.escape, names))
    return load_peft().LoraConfig(r=rank, lora_alpha=scaling * rank, target_modules=exact, **more)


def load_peft() -> Any:
    """The package peft.

    Raises:
        ModelError: it is not installed, or another package here keeps it from loading.
    """
    if (missing := needs("an adapter", "lora", "peft")) is not None:
        raise ModelError(missing)
    try:
        with quiet():
            load_torchvision()  # transformers, which peft loads, would fail where torchvision's operators do not load
            import peft
    except Exception as error:  # it loads transformers, and that whatever is installed beside it
        raise ModelError(f"lora: peft is installed but does not load here: {told(error)}") from error
    return peft


@contextmanager
def quiet() -> Iterator[None]:
    """Without peft's warnings, such as those on the layout of a weight, which it finds out itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
