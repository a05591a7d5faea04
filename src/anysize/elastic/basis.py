"""Neural composition: a weight as linear combinations of one small basis.

A weight W of shape (T, S, *k) is cut along its inputs into S / R1 fragments of R1 inputs each. Every fragment of every
output is a combination of the same R2 basis vectors: W = U V with the basis V of shape (R2, R1, *k) and the
coefficients U of shape (T, S / R1, R2). Neither T nor S appears in V, so weights of every width can share it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call


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
    """The orthonormal basis of `size` vectors over `inputs` inputs that fits the fragments of `weight` best."""
    flat = weight.reshape(-1, inputs * weight[0, 0].numel()).double()  # (T S/R1, R1 k^2)
    right: Tensor = torch.linalg.svd(flat, full_matrices=False)[2]
    if len(right) < size:  # fewer fragments than vectors: complete the basis
        extra = torch.linalg.svd(right, full_matrices=True)[2][len(right) :]
        right = torch.cat([right, extra])
    return right[:size].reshape(size, inputs, *weight.shape[2:]).to(weight.dtype).contiguous()


def orthonormal_basis(size: int, inputs: int, kernel: Sequence[int], generator: torch.Generator) -> Tensor:
    """A random basis (R2, R1, *k) with orthonormal vectors."""
    length = inputs * math.prod(kernel)
    drawn = torch.randn(length, size, generator=generator, dtype=torch.float64)
    columns, upper = torch.linalg.qr(drawn)
    rows: Tensor = (columns * upper.diagonal().sign()).T  # signs make the draw uniform over all orthonormal sets
    return rows.reshape(size, inputs, *kernel).float().contiguous()


def random_coefficients(outputs: int, fragments: int, size: int, generator: torch.Generator) -> Tensor:
    """Coefficients (T, S / R1, R2) that give the composed weight the variance of Kaiming's rule, 2 / (S k^2).

    An entry of an orthonormal vector of length R1 k^2 has mean square 1 / (R1 k^2), so a composed weight has variance
    R2 var(U) / (R1 k^2), which is 2 / (S k^2) for var(U) = 2 R1 / (S R2).
    """
    scale = math.sqrt(2 / (fragments * size))
    return torch.randn(outputs, fragments, size, generator=generator) * scale


def gram(basis: Tensor) -> Tensor:
    """The inner products of the basis vectors, (R2, R2)."""
    rows = basis.reshape(basis.shape[0], -1)
    return rows @ rows.T


class Composed(nn.Module):
    """A network some of whose weights are composed at every forward pass from a basis and coefficients.

    Attributes:
        network: a copy of the given network in which the composed weights are placeholders, not parameters.
        basis: the basis of each composed weight; keys are weight names with ':' for '.'.
        coefficients: the coefficients likewise.
    """

    def __init__(self, network: nn.Module, basis: Mapping[str, Tensor], coefficients: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.network = copy.deepcopy(network)
        for name in basis:
            weight = self.network.get_parameter(name)
            placeholder = torch.empty_like(weight, device="meta", requires_grad=False)
            for owner, leaf in _owners(self.network, weight):  # several where layers share the weight
                del owner._parameters[leaf]
                owner.register_buffer(leaf, placeholder, persistent=False)
        self.basis = nn.ParameterDict({key(name): nn.Parameter(basis[name]) for name in basis})
        self.coefficients = nn.ParameterDict({key(name): nn.Parameter(coefficients[name]) for name in basis})

    def forward(self, *inputs: Tensor) -> Tensor:
        weights = {unkey(name): compose(basis, self.coefficients[name]) for name, basis in self.basis.items()}
        output: Tensor = functional_call(self.network, weights, inputs)
        return output


def key(name: str) -> str:
    """A parameter's name as a key of `Composed`, which may hold no dots.

    >>> key("stage.0.weight"), unkey(key("stage.0.weight"))
    ('stage:0:weight', 'stage.0.weight')
    """
    return name.replace("%", "%25").replace(":", "%3A").replace(".", ":")


def unkey(key: str) -> str:
    """The parameter's name that `key` made a key of."""
    return key.replace(":", ".").replace("%3A", ":").replace("%25", "%")


def _owners(network: nn.Module, weight: Tensor) -> list[tuple[nn.Module, str]]:
    """The layers that hold this very parameter, and its name in each."""
    return [(m, leaf) for m in network.modules() for leaf, own in m._parameters.items() if own is weight]
