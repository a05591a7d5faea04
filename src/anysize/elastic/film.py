"""Batch-norms that depend on a condition of each sample: the condition's code sets a factor and a shift per channel.

Perez, Strub, de Vries, Dumoulin, Courville. "FiLM: Visual Reasoning with a General Conditioning Layer". AAAI 2018.

No layer stores a code: callers call a *view* of the network for given codes, which passes each layer its codes. With
one code and fixed statistics such a layer is affine per channel, so it folds into one ordinary batch-norm.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from anysize.elastic.basis import key
from anysize.elastic.norm import Dual, affine, batch_norms, dual_tensors, fold
from anysize.errors import ModelError


class Film(nn.Module):
    """The structure of gamma(code) BN(x) + beta(code); its tensors are on the meta device.

    Attributes:
        norm: the batch-norm.
        film: makes (gamma, beta) of all channels from a code.
        code: the code of each sample, (N, codes); a placeholder that a view replaces by the codes of the batch.
    """

    code: Tensor

    def __init__(self, norm: _BatchNorm, inputs: int) -> None:
        super().__init__()
        both = 2 * norm.num_features
        self.norm = copy.deepcopy(norm)
        with torch.device("meta"):
            self.film = nn.Sequential(nn.Linear(inputs, both), nn.LeakyReLU(), nn.Linear(both, both))
        self.register_buffer("code", torch.zeros(1, inputs), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != len(self.code):
            raise ModelError(
                f"a batch-norm gets {len(x)} rows for {len(self.code)} samples, so it cannot know to which sample a "
                "row belongs; keep the samples on the first axis"
            )
        places = (len(x), -1, *[1] * (x.dim() - 2))
        gamma, beta = (part.reshape(places) for part in self.film(self.code).chunk(2, dim=-1))  # (N, C, 1, ...)
        output: Tensor = gamma * self.norm(x) + beta
        return output


class Conditional(nn.Module):
    """The structure of a network whose batch-norms are dual and conditional.

    Attributes:
        dual: the network with each batch-norm in a `Film`, and copies of the batch-norms for noised inputs.
        codes: the code of each condition, (conditions, code).

    >>> network = Conditional(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), torch.eye(2))
    >>> [name for name, _ in network.named_parameters()][2:5]
    ['dual.network.1.norm.weight', 'dual.network.1.norm.bias', 'dual.network.1.film.0.weight']
    """

    codes: Tensor

    def __init__(self, network: nn.Module, codes: Tensor) -> None:
        super().__init__()
        films: dict[int, object] = {id(norm): Film(norm, codes.shape[1]) for norm in batch_norms(network)}
        self.dual = Dual(copy.deepcopy(network, films))  # the copy holds a film wherever the network holds a norm
        self.register_buffer("codes", codes.clone(), persistent=False)

    def given(self, conditions: Sequence[int], noisy: bool) -> nn.Module:
        """The network for samples with these conditions, one per sample, through the noised batch-norms if `noisy`."""
        return _Given(self, self.codes[torch.tensor(conditions, device=self.codes.device)], noisy)

    def films(self) -> Iterator[tuple[str, Film]]:
        """The conditional layers by their names in the network."""
        for name, layer in self.dual.network.named_modules():
            if isinstance(layer, Film):
                yield name, layer


class _Given(nn.Module):
    """A view of a conditional network: its own tensors, with the codes of some samples filled in."""

    def __init__(self, network: Conditional, codes: Tensor, noisy: bool) -> None:
        super().__init__()
        self.network = network
        self.training = network.training
        self._codes = codes
        self._noisy = noisy

    def forward(self, *inputs: Tensor) -> Tensor:
        dual = self.network.dual
        tensors = dual.noise_tensors() if self._noisy else {}
        tensors |= {_inside(name, "code"): self._codes for name, _ in self.network.films()}
        output: Tensor = functional_call(dual.network, tensors, inputs)
        return output


def conditional_names(network: Conditional) -> dict[str, str]:
    """From the name of each batch-norm tensor in the plain network to its name in `dual.network`."""
    return {
        _inside(name, leaf): _inside(name, f"norm.{leaf}")
        for name, layer in network.films()
        for leaf, _ in (*layer.norm.named_parameters(), *layer.norm.named_buffers())
    }


def conditional_tensors(
    tensors: Mapping[str, Tensor], network: Conditional, random: torch.Generator
) -> dict[str, Tensor]:
    """First tensors of `network`, with which it answers under every condition as the plain one does with `tensors`.

    A film begins with factor 1 and shift 0: its last layer has zero weights and that bias. The layer before it is drawn
    at random.
    """
    names = conditional_names(network)
    inner = {names.get(name, name): tensor for name, tensor in tensors.items()}
    for name, layer in network.films():
        first, _, last = layer.film
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
        bound = first.in_features**-0.5
        inner |= {
            _inside(name, "film.0.weight"): bound * (2 * torch.rand(first.weight.shape, generator=random) - 1),
            _inside(name, "film.0.bias"): bound * (2 * torch.rand(first.bias.shape, generator=random) - 1),
            _inside(name, "film.2.weight"): torch.zeros(last.weight.shape),
            _inside(name, "film.2.bias"): (torch.arange(last.out_features) < layer.norm.num_features).float(),
        }
    return {f"dual.{name}": tensor for name, tensor in dual_tensors(inner, network.dual.network).items()}


def conditioned(network: Conditional, condition: int, noisy: bool) -> nn.Module:
    """The ordinary network for one condition: each film and its batch-norm folded into one layer. Uses up `network`."""
    norms: dict[int, object] = {}
    code = network.codes[condition].double()
    for name, layer in network.films():
        norm = network.dual.noise[key(_inside(name, "norm"))] if noisy else layer.norm
        assert isinstance(norm, _BatchNorm)
        factor, shift = affine(norm)
        with torch.no_grad():
            gamma, beta = layer.film.double()(code.to(factor.device)).chunk(2)
        fold(norm, gamma * factor, gamma * shift + beta)
        norms[id(layer)] = norm
    return copy.deepcopy(network.dual.network, norms)


def _inside(name: str, leaf: str) -> str:
    return f"{name}.{leaf}" if name else leaf
