"""Neural composition: a weight as linear combinations of one small basis.

A weight W of shape (T, S, *k) is cut along its inputs into S / R1 fragments of R1 inputs each. Every fragment of every
output is a combination of the same R2 basis vectors: W = U V with the basis V of shape (R2, R1, *k) and the
coefficients U of shape (T, S / R1, R2). Neither T nor S appears in V, so weights of every width can share it.

There are two ways to compute a layer, with the same result up to rounding: *compose* its weight first, or apply the
basis to every fragment of the input and *mix* the results by the coefficients. `mixing_pays` says which is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from anysize import rng
from anysize.elastic.skeleton import copied

Way = Literal["auto", "compose", "mix"]

_NULL = 1e-6  # far below the share of a direction that matters, far above rounding in double precision

MIX_BELOW = {nn.Linear: 1.1, nn.Conv1d: 0.6, nn.Conv2d: 0.6, nn.Conv3d: 0.6}
"""Layer types that can mix, and the fraction of the dense layer's multiply-adds up to which mixing is faster."""


def compose(basis: Tensor, coefficients: Tensor) -> Tensor:
    """The weight (T, S, *k) that the coefficients (T, S / R1, R2) make of the basis (R2, R1, *k).

    >>> compose(torch.ones(2, 3, 5, 5), torch.ones(8, 4, 2)).shape
    torch.Size([8, 12, 5, 5])
    """
    outputs, fragments, size = coefficients.shape
    flat = coefficients.reshape(outputs * fragments, size) @ basis.reshape(size, -1)  # (T S/R1, R1 k^2)
    return flat.reshape(outputs, fragments * basis.shape[1], *basis.shape[2:])


def project(weight: Tensor, basis: Tensor) -> Tensor:
    """The coefficients whose composition is nearest to `weight` (least squares); R1 must divide its inputs."""
    outputs, inputs = weight.shape[:2]
    fragments = inputs // basis.shape[1]
    flat = weight.reshape(outputs * fragments, -1).double()  # (T S/R1, R1 k^2)
    rows = basis.reshape(basis.shape[0], -1).double()  # (R2, R1 k^2)
    solved: Tensor = torch.linalg.lstsq(rows.T, flat.T).solution.T
    return solved.reshape(outputs, fragments, -1).to(weight.dtype).contiguous()


def principal_basis(weight: Tensor, inputs: int, size: int) -> Tensor:
    """The orthonormal basis of `size` vectors over `inputs` inputs that fits the fragments of `weight` best.

    More vectors than the length of one span everything; then their columns are orthonormal, as in `orthonormal_basis`.
    """
    length = inputs * weight[0, 0].numel()
    if size > length:
        every = orthonormal_basis(size, inputs, weight.shape[2:], rng.generator("more vectors than entries"))
        return every.to(weight.dtype)
    flat = weight.reshape(-1, length).double()  # (T S/R1, R1 k^2)
    right: Tensor = torch.linalg.svd(flat, full_matrices=False)[2]
    if len(right) < size:  # fewer fragments than vectors: complete the basis
        extra = torch.linalg.svd(right, full_matrices=True)[2][len(right) :]
        right = torch.cat([right, extra])
    return right[:size].reshape(size, inputs, *weight.shape[2:]).to(weight.dtype).contiguous()


def joint_basis(weights: Sequence[Tensor], near: Tensor) -> Tensor:
    """The orthonormal basis in which all `weights` together lose least, each relative to its own norm.

    Of all bases of that subspace, this is the one nearest to `near`. So if `near` is orthonormal and composes the
    weights exactly, the result is `near` itself.

    Args:
        weights: of any widths, (T, S, *k) with S a multiple of R1.
        near: a basis (R2, R1, *k).
    """
    rows = near.reshape(len(near), -1).double()  # (R2, R1 k^2)
    scatter = _NULL * rows.T @ rows  # decides the directions that the weights leave open: they may span fewer than R2
    for weight in weights:
        flat = weight.reshape(-1, rows.shape[1]).double()
        scatter = scatter + flat.T @ flat / flat.square().sum().clamp_min(torch.finfo(torch.float32).tiny)
    span: Tensor = torch.linalg.eigh(scatter)[1][:, -len(rows) :].T
    left, _, right = torch.linalg.svd(rows @ span.T, full_matrices=False)
    nearest: Tensor = left @ right @ span
    return nearest.reshape(near.shape).to(near.dtype).contiguous()


def orthonormal_basis(size: int, inputs: int, kernel: Sequence[int], generator: torch.Generator) -> Tensor:
    """A random basis (R2, R1, *k) with orthonormal vectors.

    More vectors than the length R1 k^2 of one cannot be orthonormal. Then the columns are: of all such sets, these are
    nearest to orthonormal, in the sense of Eq. (3).
    """
    length = inputs * math.prod(kernel)
    drawn = torch.randn(max(length, size), min(length, size), generator=generator, dtype=torch.float64)
    columns, upper = torch.linalg.qr(drawn)
    columns = columns * upper.diagonal().sign()  # signs make the draw uniform over all orthonormal sets
    rows: Tensor = columns.T if size <= length else columns
    return rows.reshape(size, inputs, *kernel).float().contiguous()


def random_coefficients(outputs: int, fragments: int, basis: Tensor, generator: torch.Generator) -> Tensor:
    """Coefficients (T, S / R1, R2) that give the weight that they compose mean zero and variance one.

    At an entry of a fragment the weight has variance var(U) times the squares there of all basis vectors, so on average
    over the R1 k^2 entries var(U) |V|^2 / (R1 k^2); of an orthonormal basis |V|^2 is R2.
    """
    scale = (basis[0].numel() / basis.double().square().sum()).sqrt()
    return torch.randn(outputs, fragments, len(basis), generator=generator) * scale


def spreads(weight: Tensor, matrices: int) -> Tensor:
    """For each output of a weight, the standard deviation of the entries of its matrix, (T,).

    Args:
        weight: (T, S, *k).
        matrices: how many matrices of one height lie in it, one below the other.

    >>> spreads(torch.tensor([[1.0, -1.0], [1.0, -1.0], [2.0, -2.0], [2.0, -2.0]]), 2)
    tensor([1., 1., 2., 2.])
    """
    found = [own.double().std(correction=0).expand(len(own)) for own in weight.chunk(matrices)]
    return torch.cat(found).to(weight.dtype)


def stacked_matrices(layer: nn.Module, outputs: int) -> int:
    """How many matrices a layer keeps in one weight of so many outputs: the gates of a recurrent layer, or Q, K, V.

    >>> stacked_matrices(nn.LSTM(8, 16), 64), stacked_matrices(nn.Linear(8, 64), 64)
    (4, 1)
    """
    if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
        return max(1, outputs // int(layer.hidden_size))  # the projection of an LSTM is one matrix
    return outputs // int(layer.embed_dim) if isinstance(layer, nn.MultiheadAttention) else 1


def gram(basis: Tensor) -> Tensor:
    """The inner products of the basis vectors, (R2, R2)."""
    rows = basis.reshape(basis.shape[0], -1)
    return rows @ rows.T


def distance_from_identity(basis: Tensor) -> Tensor:
    """The Gram matrix of the basis minus the identity, (R2, R2)."""
    rows = basis.reshape(basis.shape[0], -1)
    return torch.addmm(_minus_identity(len(rows), rows.dtype, rows.device), rows, rows.T)


@lru_cache(maxsize=64)
def _minus_identity(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return -torch.eye(size, dtype=dtype, device=device)


def mixing_pays(layer: nn.Module, basis: Tensor, coefficients: Tensor) -> bool:
    """Whether mixing is the faster way to compute the layer, by a fixed rule on shapes.

    Per position, mixing takes R2 / T + R2 / (R1 k^2) of the dense layer's multiply-adds; composing takes all of them
    plus the composition. `benchmarks/flanc_ways.py` measures both at the shapes of the networks here, at batch 32: up
    to `MIX_BELOW` mixing was faster at every shape. Above it neither always wins (many channels on small maps would
    still gain from mixing), so the default there is composing, which holds less memory.

    >>> layer = nn.Conv2d(128, 128, 3)
    >>> mixing_pays(layer, torch.empty(32, 16, 3, 3), torch.empty(128, 8, 32))  # 32 / 128 + 32 / 144 = 0.47
    True
    >>> mixing_pays(nn.Conv2d(32, 32, 3), torch.empty(32, 16, 3, 3), torch.empty(32, 2, 32))  # 32 / 32 + 32 / 144
    False
    """
    size, outputs = len(basis), len(coefficients)
    return can_mix(layer) and size / outputs + size / basis[0].numel() <= MIX_BELOW[type(layer)]


def can_mix(layer: nn.Module) -> bool:
    """Whether the layer is a plain linear layer or convolution that `Mixed` can replace."""
    if type(layer) not in MIX_BELOW or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    if isinstance(layer, _ConvNd):
        return layer.groups == 1 and layer.padding_mode == "zeros"
    return True


class Mixed(nn.Module):
    """A layer with a composed weight, computed by applying the basis to every fragment of the input, then U."""

    def __init__(self, layer: nn.Module, basis: nn.Parameter, coefficients: nn.Parameter) -> None:
        super().__init__()
        self.register_parameter("bias", layer.get_parameter("bias") if layer.bias is not None else None)
        self._factors = (basis, coefficients)  # in a tuple, so that only `Composed` lists them as parameters
        self._mix = _mixer(layer)

    @property
    def weight(self) -> Tensor:
        """The composed weight, for code that reads it without calling the layer."""
        return compose(*self._factors)

    def forward(self, x: Tensor) -> Tensor:
        return self._mix(x, *self._factors, self.bias)


def mix_linear(x: Tensor, basis: Tensor, coefficients: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer (*, S) -> (*, T) without its composed weight.

    >>> x, basis, coefficients = torch.rand(5, 6), torch.rand(4, 3), torch.rand(7, 2, 4)
    >>> weight = compose(basis, coefficients)
    >>> torch.allclose(mix_linear(x, basis, coefficients, None), x @ weight.T, atol=1e-5)
    True
    """
    fragments = coefficients.shape[1]
    each = functional.linear(x.reshape(*x.shape[:-1], fragments, -1), basis).flatten(-2)  # (*, S/R1 R2)
    return functional.linear(each, coefficients.flatten(1), bias)


def mix_convolution(
    x: Tensor, basis: Tensor, coefficients: Tensor, bias: Tensor | None, convolve: Callable[..., Tensor], **how: Any
) -> Tensor:
    """A convolution (B, S, *positions) -> (B, T, *positions) without its composed weight.

    Args:
        x: input.
        basis: (R2, R1, *k).
        coefficients: (T, S / R1, R2).
        bias: (T,) or None.
        convolve: torch's convolution of that many dimensions.
        **how: stride, padding, dilation.
    """
    fragments, ones = coefficients.shape[1], (1,) * (basis.dim() - 2)
    each = convolve(x, basis.repeat(fragments, 1, *ones), groups=fragments, **how)  # (B, S/R1 R2, *positions)
    return convolve(each, coefficients.flatten(1).reshape(len(coefficients), -1, *ones), bias)


def _mixer(layer: nn.Module) -> Callable[..., Tensor]:
    if not isinstance(layer, _ConvNd):
        return mix_linear
    convolve = _CONVOLUTIONS[len(layer.kernel_size)]
    return partial(
        mix_convolution, convolve=convolve, stride=layer.stride, padding=layer.padding, dilation=layer.dilation
    )


_CONVOLUTIONS: Mapping[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


class Composed(nn.Module):
    """A network some of whose weights are made at every forward pass from a basis and coefficients.

    Attributes:
        network: a copy of the given network in which the composed weights are placeholders, not parameters.
        basis: the basis of each composed weight; keys are weight names with ':' for '.'.
        coefficients: the coefficients likewise.
        ways: "compose" or "mix" per weight name.
    """

    def __init__(
        self,
        network: nn.Module,
        basis: Mapping[str, Tensor],
        coefficients: Mapping[str, Tensor],
        way: Way = "auto",
    ) -> None:
        """Takes the network apart.

        Args:
            network: the network whose weights are composed; left untouched.
            basis: per weight name.
            coefficients: likewise.
            way: "auto" mixes where `mixing_pays`, "mix" wherever a layer can, "compose" nowhere.
        """
        super().__init__()
        self.network = copied(network)
        self.basis = nn.ParameterDict({key(name): nn.Parameter(basis[name]) for name in basis})
        self.coefficients = nn.ParameterDict({key(name): nn.Parameter(coefficients[name]) for name in basis})
        owners = {name: owners_of(self.network, self.network.get_parameter(name)) for name in basis}
        self.ways: dict[str, Way] = {
            name: _way(own, basis[name], coefficients[name], way) for name, own in owners.items()
        }
        self._composed = {key(name): own for name, own in owners.items() if self.ways[name] == "compose"}
        for name, own in owners.items():
            if self.ways[name] == "mix":
                self._mix(name)
            else:
                placeholder = torch.empty_like(self.network.get_parameter(name), device="meta", requires_grad=False)
                for owner, leaf in own:
                    del owner._parameters[leaf]
                    owner.register_buffer(leaf, placeholder, persistent=False)

    def _mix(self, name: str) -> None:
        """Replace the layer that holds this weight by one that mixes."""
        path, _, _ = f"network.{name}".rpartition(".")
        parent, _, leaf = path.rpartition(".")
        mixed = Mixed(self.get_submodule(path), self.basis[key(name)], self.coefficients[key(name)])
        setattr(self.get_submodule(parent), leaf, mixed)

    def forward(self, *inputs: Tensor) -> Tensor:
        # What `functional_call` does, without its search for tied names, which costs small networks time at every step.
        empty = [getattr(*owners[0]) for owners in self._composed.values()]
        for name, owners in self._composed.items():
            _place(owners, compose(self.basis[name], self.coefficients[name]))
        try:
            output: Tensor = self.network(*inputs)
        finally:
            for owners, placeholder in zip(self._composed.values(), empty):
                _place(owners, placeholder)
        return output


def _way(owners: Sequence[tuple[nn.Module, str]], basis: Tensor, coefficients: Tensor, asked: Way) -> Way:
    (layer, leaf), *others = owners
    if asked == "compose" or others or leaf != "weight":  # layers that share a weight share its composition
        return "compose"
    pays = mixing_pays(layer, basis, coefficients) if asked == "auto" else can_mix(layer)
    return "mix" if pays else "compose"


def _place(owners: Sequence[tuple[nn.Module, str]], weight: Tensor) -> None:
    """Give this weight to all layers that share it."""
    for owner, leaf in owners:
        setattr(owner, leaf, weight)  # not into its dict of buffers: recurrent layers keep a list beside it


def key(name: str) -> str:
    """A parameter's name as a key of `Composed`, where dots are not allowed.

    >>> key("stage.0.weight"), unkey(key("stage.0.weight"))
    ('stage:0:weight', 'stage.0.weight')
    """
    return name.replace("%", "%25").replace(":", "%3A").replace(".", ":")


def unkey(key: str) -> str:
    """The inverse of `key`: the parameter's name."""
    return key.replace(":", ".").replace("%3A", ":").replace("%25", "%")


def owners_of(network: nn.Module, weight: Tensor) -> list[tuple[nn.Module, str]]:
    """The layers that hold this very parameter, and its name in each."""
    return [(m, leaf) for m in network.modules() for leaf, own in m._parameters.items() if own is weight]
