"""Principal kernels: a weight as a sum of orthogonal kernels of rank one; a few of them make a small layer.

A weight W of shape (N, M, *k) is a matrix, and its singular value decomposition a sum of principal kernels
sigma_i u_i v_i^T. Here each side takes the square root of sigma: `left` holds sqrt(sigma_i) u_i, `right` holds
sqrt(sigma_i) v_i, each with the shape of a weight, so that W is two layers in sequence, first `right` then `left`.
There are two ways to see the weight as a matrix:

    reshape     matrix          left                right
    "rows"      (N, M k^2)      (N, R, 1, 1)        (R, M, k, k)
    "square"    (N k, M k)      (N, R, k, 1)        (R, M, 1, k)

for a convolution; for a linear or recurrent weight both are the matrix itself, left (N, R) and right (R, M).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from anysize.elastic.basis import key, owners_of, unkey
from anysize.elastic.skeleton import copied, fill
from anysize.wire import by_prefix

Reshape = Literal["rows", "square"]
Sampling = Literal["importance", "uniform", "softmax", "top"]

_FLOOR = 1e-9  # times the largest singular value: smaller ones are rounding errors of a float32 weight
_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class Kernels(NamedTuple):
    """The principal kernels of one weight, the most important first; `values` are their singular values."""

    left: Tensor
    right: Tensor
    values: Tensor


# --- decomposition ------------------------------------------------------------------------------------------


def principal_kernels(weight: Tensor, reshape: Reshape = "rows") -> Kernels:
    """All principal kernels of a weight (N, M, *k); their sum is the weight.

    The singular vectors of the shorter side are the eigenvectors of the Gram matrix, computed in double precision, and
    those of the longer side are the weight's projections on them: four times faster than an SVD of a ResNet's layers.
    Small singular values lose digits that way, but their kernels do not, since the vectors of the shorter side are a
    complete orthonormal basis whatever the values are. A weight in double precision would lose digits, so it gets a
    proper SVD.

    >>> kernels = principal_kernels(torch.diag(torch.tensor([1.0, 9.0, 4.0])))
    >>> kernels.values.tolist(), kernels.left[:, 0].tolist()
    ([9.0, 4.0, 1.0], [0.0, 3.0, 0.0])
    """
    dims = weight.dim() - 2
    split = _split(dims, reshape)
    outer, values, inner = _signed(*_factors(_matrix(weight, split).double(), exact=weight.dtype == torch.float64))
    size, ones = len(values), [1] * dims
    left_kernel = [*weight.shape[2 : 2 + split], *ones[split:]]
    right_kernel = [*ones[:split], *weight.shape[2 + split :]]
    left = outer.reshape(weight.shape[0], -1, size).transpose(1, 2).reshape(weight.shape[0], size, *left_kernel)
    right = inner.T.reshape(size, weight.shape[1], *right_kernel)
    return Kernels(*(tensor.to(weight.dtype).contiguous() for tensor in (left, right, values)))


def recompose(left: Tensor, right: Tensor) -> Tensor:
    """The weight (N, M, *k) whose kernels these are, or the part of it that these kernels make.

    >>> kernels = principal_kernels(torch.arange(24.0).reshape(2, 3, 2, 2))
    >>> recompose(kernels.left, kernels.right)[1, 2, 1].round().tolist()
    [22.0, 23.0]
    """
    outputs, inputs, dims = left.shape[0], right.shape[1], left.dim() - 2
    if not dims:
        return left @ right
    flat = _left_matrix(left) @ right.reshape(len(right), -1)
    apart = flat.reshape(outputs, *left.shape[2:], inputs, *right.shape[2:])  # (N, *kl, M, *kr)
    order = [0, 1 + dims] + [axis for i in range(dims) for axis in (1 + i, 2 + dims + i)]
    kernel = [a * b for a, b in zip(left.shape[2:], right.shape[2:])]
    weight: Tensor = apart.permute(order).reshape(outputs, inputs, *kernel)
    return weight


def recomposed(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weight of every name."""
    return {name: recompose(left[name], right[name]) for name in left}


def importance(left: Tensor, right: Tensor) -> Tensor:
    """The weight of each kernel, |left_i| |right_i|: its singular value, also after both sides were trained."""
    squares: Tensor = _left_matrix(left).square().sum(0) * right.flatten(1).square().sum(1)
    return squares.sqrt()


def squared_norm(*factors: Tensor, times: float = 1.0) -> Tensor:
    """The squared Frobenius norm of the weight that a left and a right factor make, without making it.

    Given the factors of several weights, left and right in turn, it is the sum of their norms. `times` is a factor.

    >>> squared_norm(torch.ones(2, 1), torch.ones(1, 3)).item()
    6.0
    """
    if torch._C._are_functorch_transforms_active():  # these take no function that is as lean, and know no layouts
        norms = (_products(_left_matrix(left), right.flatten(1))[0] for left, right in _pairs(factors))
        return sum(norms, start=torch.zeros(())) * times
    norm: Tensor = _SquaredNorm.apply(times, *factors)  # type: ignore[no-untyped-call]
    return norm


def _products(outer: Tensor, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """|L R|^2 of two matrices, and the products L^T L and R R^T that it takes."""
    of_outer, of_inner = outer.T @ outer, inner @ inner.T
    return torch.dot(of_outer.flatten(), of_inner.flatten()), of_outer, of_inner


class _SquaredNorm(torch.autograd.Function):
    """Sums of |L R|^2 with gradients 2 L (R R^T) and 2 (L^T L) R.

    Besides the factors only these products of each factor with itself are held, which have a row for every kernel.
    """

    @staticmethod
    def forward(ctx: Any, times: float, *factors: Tensor) -> Tensor:
        found = [_products(_left_matrix(left), _entries(right)) for left, right in _pairs(factors)]
        ctx.save_for_backward(*factors, *(product for own in found for product in own[1:]))
        ctx.times = times
        norms = [own[0] for own in found]
        total: Tensor = sum(norms[1:], start=norms[0]) * times
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        half = len(ctx.saved_tensors) // 2
        twice, found = gradient * (2 * ctx.times), list[Tensor]()
        for (left, right), (of_outer, of_inner) in zip(
            *map(_pairs, (ctx.saved_tensors[:half], ctx.saved_tensors[half:]))
        ):
            outer, inner = _left_matrix(left), _entries(right)
            of_left = outer @ (of_inner * twice)
            if len(of_left) > len(left):
                of_left = of_left.reshape(len(left), *left.shape[2:], -1).movedim(-1, 1)
            found += [of_left.view_as(left), _of_entries((of_outer * twice) @ inner, right)]
        return None, *found


def squared_norm_of(*weights: Tensor, times: float = 1.0) -> Tensor:
    """The sum of the squared Frobenius norms of weights that exist; `times` is a factor.

    >>> squared_norm_of(torch.ones(2, 3), torch.ones(2), times=0.5).item()
    4.0
    """
    if torch._C._are_functorch_transforms_active():
        return sum((weight.square().sum() for weight in weights), start=torch.zeros(())) * times
    norm: Tensor = _SquaredNormOf.apply(times, *weights)  # type: ignore[no-untyped-call]
    return norm


class _SquaredNormOf(torch.autograd.Function):
    """Sums of |W|^2 with gradients 2 W, in one step for each weight."""

    @staticmethod
    def forward(ctx: Any, times: float, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        ctx.times = times
        flat = [weight.flatten() for weight in weights]
        norms = [torch.dot(entries, entries) for entries in flat]
        total: Tensor = sum(norms[1:], start=norms[0]) * times
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        twice = gradient * (2 * ctx.times)
        return None, *(weight * twice for weight in ctx.saved_tensors)


def _pairs(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tensors[::2], tensors[1::2]))


def _entries(kernels: Tensor) -> Tensor:
    """Each kernel's entries as a row, in memory order, so that the result is a view in either memory layout."""
    apart = kernels.dim() == 4 and kernels.is_contiguous(memory_format=torch.channels_last)
    return (kernels.permute(0, 2, 3, 1) if apart else kernels).flatten(1)


def _of_entries(rows: Tensor, kernels: Tensor) -> Tensor:
    """The inverse of `_entries`: these rows in the shape and memory layout of `kernels`."""
    if kernels.dim() == 4 and kernels.is_contiguous(memory_format=torch.channels_last):
        return rows.reshape(len(rows), *kernels.shape[2:], -1).permute(0, 3, 1, 2)
    return rows.reshape(kernels.shape)


def full_rank(shape: Sequence[int], reshape: Reshape = "rows") -> int:
    """How many principal kernels a weight of that shape has.

    >>> full_rank((64, 3, 3, 3)), full_rank((64, 64, 3, 3), "square")
    (27, 192)
    """
    split = _split(len(shape) - 2, reshape)
    lead = math.prod(shape[2 : 2 + split])
    return min(shape[0] * lead, math.prod(shape[1:]) // lead)


def rank(shape: Sequence[int], keep: float) -> int:
    """How many kernels of a weight a client with that keep ratio gets: ceil(keep min(N, M k^2)).

    >>> rank((64, 64, 3, 3), 0.2)
    13
    """
    return max(1, math.ceil(keep * full_rank(shape) - 1e-9))


def needed_kernels(values: Tensor) -> float:
    """How many principal kernels it takes to approximate the layer: 2 to the entropy of p_i = sigma_i / sum sigma_j.

    >>> needed_kernels(torch.tensor([1.0, 1.0, 0.0])), needed_kernels(torch.tensor([1.0, 0.0, 0.0]))
    (2.0, 1.0)
    """
    return float(torch.exp(torch.special.entr(_shares(values)).sum()))


def participating_kernels(values: Tensor) -> float:
    """The same number as the authors' code counts it, 1 / sum p_i^2: never larger, and less moved by small values.

    >>> participating_kernels(torch.tensor([1.0, 1.0, 0.0])), participating_kernels(torch.tensor([3.0, 1.0]))
    (2.0, 1.6)
    """
    return float(1 / _shares(values).square().sum())


def _shares(values: Tensor) -> Tensor:
    """p_i = sigma_i / sum sigma_j; all alike where every value is zero."""
    wide = values.double()
    total = wide.sum()
    return wide / total if total > 0 else torch.full_like(wide, 1 / len(wide))


# --- sampling -----------------------------------------------------------------------------------------------


def draw(
    values: Tensor,
    count: int,
    generator: torch.Generator,
    sampling: Sampling = "importance",
    kappa: float = 2.5,
) -> Tensor:
    """The sorted indices of `count` kernels, drawn without replacement by their singular values.

    Kernels are drawn one after another, with probability p_i among those that are left. The code does the same by
    taking the `count` largest of log p_i + g_i with independent Gumbel noise g_i.

    Args:
        values: singular values.
        count: how many to draw.
        generator: draws the noise.
        sampling: "importance": p_i ~ values_i ** kappa; "softmax": p_i ~ exp(values_i); "uniform"; "top": the
            largest, without noise.
        kappa: the smooth factor of "importance".

    >>> draw(torch.tensor([5.0, 4.0, 0.0]), 2, torch.Generator().manual_seed(0)).tolist()
    [0, 1]
    """
    wide = values.double()
    if sampling == "top":
        return wide.topk(count).indices.sort().values
    tiny = torch.finfo(torch.float64).tiny
    weights = {
        "importance": kappa * wide.clamp_min(tiny).log(),
        "softmax": wide,
        "uniform": torch.zeros_like(wide),
    }[sampling]
    noise = -torch.empty_like(wide).exponential_(generator=generator).clamp_min(tiny).log()
    return (weights + noise).topk(count).indices.sort().values


# --- layers -------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """A convolution or linear layer as two in sequence; its factors are placeholders that a caller fills.

    The first reads the inputs and gives one channel per kernel, the second mixes these channels into the outputs. A
    factor whose kernel covers an axis of the image also takes that axis's stride and padding.
    """

    left: Tensor
    right: Tensor

    def __init__(self, layer: nn.Linear | _ConvNd, left: Tensor, right: Tensor) -> None:
        super().__init__()
        self.register_buffer("left", left.to("meta"), persistent=False)
        self.register_buffer("right", right.to("meta"), persistent=False)
        self.bias = layer.bias
        dims = left.dim() - 2
        owns = [size > 1 for size in left.shape[2:]]  # the axes that the left factor's kernel covers
        stride, padding, dilation = (
            [int(size) for size in getattr(layer, name)] if dims else [] for name in ("stride", "padding", "dilation")
        )
        self._left = _options(stride, padding, dilation, owns)
        self._right = _options(stride, padding, dilation, [not own for own in owns])

    def forward(self, x: Tensor) -> Tensor:
        dims = self.left.dim() - 2
        if dims == 0:
            return F.linear(F.linear(x, self.right), self.left, self.bias)
        convolve = _CONVOLVE[dims]
        hidden = convolve(x, self.right, None, *self._right)
        return convolve(hidden, self.left, self.bias, *self._left)

    @property
    def weight(self) -> Tensor:
        """The weight of the layer, made anew each time that a network's own code asks for it, as T5's does."""
        return recompose(self.left, self.right)


class Factorised(nn.Module):
    """A network in which principal kernels replace some of the weights.

    A convolution or linear layer whose weight nothing else uses becomes a `Pair`: it computes with the factors, and
    neither its weight nor more than its kernels' channels ever exist. Other weights are recomposed at every forward
    pass: those of recurrent and attention layers, of convolutions with another padding mode, and shared ones.

    Attributes:
        network: a copy of the given network without the factorised weights.
        left: the left factor of each weight; keys are weight names with ':' for '.'.
        right: the right factors, with the same keys.
        decay: the factor of the Frobenius regulariser.
    """

    def __init__(
        self, network: nn.Module, left: Mapping[str, Tensor], right: Mapping[str, Tensor], decay: float = 0.0
    ) -> None:
        super().__init__()
        self.network = copied(network)
        self.decay = decay
        self._pairs: dict[str, str] = {}
        self._made: dict[str, Tensor] = {}  # by the last training pass, for the regulariser
        self._holders: dict[str, list[tuple[nn.Module, str]]] = {}  # of a recomposed weight, the layers that hold it
        for name in left:
            weight = self.network.get_parameter(name)
            path, _, leaf = name.rpartition(".")
            layer = self.network.get_submodule(path)
            if path and leaf == "weight" and len(owners_of(self.network, weight)) == 1 and runs_as_pair(layer):
                parent, _, child = path.rpartition(".")
                setattr(self.network.get_submodule(parent), child, Pair(layer, left[name], right[name]))
                self._pairs[key(name)] = path
            else:
                self._holders[key(name)] = _displace(self.network, weight)
        self.left = nn.ParameterDict({key(name): nn.Parameter(left[name]) for name in left})
        self.right = nn.ParameterDict({key(name): nn.Parameter(right[name]) for name in left})

    def forward(self, *inputs: Tensor) -> Tensor:
        self._made = {}
        pairs = [(self.network.get_submodule(path)._buffers, name) for name, path in self._pairs.items()]
        whole: list[tuple[nn.Module, str, Tensor]] = []
        for name, owners in self._holders.items():
            left = self.left[name]
            weight = recompose(left, self.right[name])
            whole += [(owner, leaf, weight) for owner, leaf in owners]
            if self.decay and self.training and weight.dtype == left.dtype:
                self._made[name] = weight
        # What `functional_call` does, without its search for names, which costs small networks time at every step.
        hollow_pairs = [(held["left"], held["right"]) for held, _ in pairs]
        hollow = [getattr(owner, leaf) for owner, leaf, _ in whole]
        try:
            for held, name in pairs:
                held["left"], held["right"] = self.left[name], self.right[name]
            for owner, leaf, weight in whole:
                setattr(owner, leaf, weight)  # not into its dict of buffers: recurrent layers keep a list beside it
            output: Tensor = self.network(*inputs)
        finally:
            for (held, _), (left, right) in zip(pairs, hollow_pairs):
                held["left"], held["right"] = left, right
            for (owner, leaf, _), placeholder in zip(whole, hollow):
                setattr(owner, leaf, placeholder)
        return output

    def factors(self) -> list[nn.Parameter]:
        """The parameters of both sides."""
        return [*self.left.values(), *self.right.values()]

    def dense(self) -> list[nn.Parameter]:
        """The trained parameters that are not factors."""
        return [parameter for parameter in self.network.parameters() if parameter.requires_grad]

    def regulariser(self) -> Tensor:
        """Half of `decay` times the squared Frobenius norms of all weights that the kernels make.

        Of a weight that the pass before has made, in its own precision, the entries are squared: products of factors
        cost more than that, however small they are.
        """
        if not self.decay:
            return torch.zeros(())
        made, self._made = self._made, {}
        factors = [own for name, left in self.left.items() if name not in made for own in (left, self.right[name])]
        terms = [squared_norm(*factors, times=self.decay / 2)] if factors else []
        terms += [squared_norm_of(*made.values(), times=self.decay / 2)] if made else []
        return sum(terms[1:], start=terms[0]) if terms else torch.zeros(())


def factorised_network(skeleton: nn.Module, tensors: Mapping[str, Tensor], decay: float) -> nn.Module:
    """The trainable network of the tensors that `named` made; it computes with factors, without whole weights."""
    own = sides(tensors)
    return fill(Factorised(skeleton, own["left"], own["right"], decay), tensors)


def recomposed_network(skeleton: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The ordinary network of the same tensors; every weight is the product of its factors."""
    own = sides(tensors)
    return fill(skeleton, recomposed(own["left"], own["right"]) | own["network"])


def sides(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of a `Factorised` network by part, "left", "right" and "network", under the weights' own names.

    >>> sides({"left.0:weight": torch.ones(1), "network.0.bias": torch.ones(1)})["left"]
    {'0.weight': tensor([1.])}
    """
    parts = by_prefix(tensors, ("left.", "right.", "network."), "a factorised network")
    keyed = {side: {unkey(name): tensor for name, tensor in parts[f"{side}."].items()} for side in ("left", "right")}
    return keyed | {"network": parts["network."]}


def named(left: Mapping[str, Tensor], right: Mapping[str, Tensor], network: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `sides`: the tensors under the names that they have in a `Factorised` network."""
    return {
        **{f"left.{key(name)}": tensor for name, tensor in left.items()},
        **{f"right.{key(name)}": tensor for name, tensor in right.items()},
        **{f"network.{name}": tensor for name, tensor in network.items()},
    }


def _displace(network: nn.Module, weight: Tensor) -> list[tuple[nn.Module, str]]:
    """Put a placeholder (not a parameter) wherever the network holds this weight: layer and name; a pass fills it.

    There are several where layers share the weight.
    """
    placeholder = torch.empty_like(weight, device="meta", requires_grad=False)
    owners = owners_of(network, weight)
    for owner, leaf in owners:
        del owner._parameters[leaf]
        owner.register_buffer(leaf, placeholder, persistent=False)
    return owners


def runs_as_pair(layer: nn.Module) -> TypeGuard[nn.Linear | _ConvNd]:
    """Whether the layer's own forward is all that uses its weight; False for subclasses, which may do anything."""
    if isinstance(layer, _ConvNd) and type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) is nn.Linear


def _options(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], owns: Sequence[bool]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Stride, padding and dilation of a factor: the layer's on the axes that its kernel covers, none elsewhere."""
    return (
        tuple(size if own else 1 for size, own in zip(stride, owns)),
        tuple(size if own else 0 for size, own in zip(padding, owns)),
        tuple(size if own else 1 for size, own in zip(dilation, owns)),
    )


def _split(dims: int, reshape: Reshape) -> int:
    """How many leading axes of the kernel the left factor has."""
    return 1 if reshape == "square" and dims > 0 else 0


def _matrix(weight: Tensor, split: int) -> Tensor:
    """The weight (N, M, *a, *b) as the matrix (N a, M b), `a` being the first `split` axes of its kernel."""
    moved = weight.movedim(list(range(2, 2 + split)), list(range(1, 1 + split)))  # (N, *a, M, *b)
    rows = math.prod(moved.shape[: 1 + split])
    return moved.reshape(rows, -1)


def _left_matrix(left: Tensor) -> Tensor:
    """A left factor (N, R, *k) as the matrix (N k, R)."""
    if left.numel() == left.shape[0] * left.shape[1]:
        return left.flatten(1)
    return left.movedim(1, -1).reshape(-1, left.shape[1])


def _factors(matrix: Tensor, *, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(sqrt(sigma) u, sigma, sqrt(sigma) v) of a matrix (A, B): (A, R), (R,), (B, R), largest sigma first."""
    if matrix.shape[0] > matrix.shape[1]:
        inner, values, outer = _factors(matrix.T, exact=exact)
        return outer, values, inner
    if exact:
        vectors, _, _ = torch.linalg.svd(matrix, full_matrices=False)
    else:
        vectors = torch.linalg.eigh(matrix @ matrix.T).eigenvectors.flip(1)
    projected = matrix.T @ vectors  # sigma v
    values = projected.norm(dim=0)
    floor = values.max() * _FLOOR + torch.finfo(torch.float32).tiny
    roots = values.clamp(min=floor).sqrt()
    return vectors * roots, values, projected / roots


def _signed(outer: Tensor, values: Tensor, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same factors, with signs chosen so that the largest entry of each outer vector is positive."""
    largest = outer.abs().argmax(dim=0)
    signs = torch.where(outer[largest, torch.arange(len(values))] < 0, -1.0, 1.0).to(outer.dtype)
    return outer * signs, values, inner * signs
