"""Weights that a network starts with, and those that are not trained."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import safetensors.torch
from torch import nn

from anysize.elastic.skeleton import fill, hollow, tensors_of
from anysize.errors import ConfigError, ModelError, first_of, unknown


def with_weights(network: nn.Module, path: Path) -> nn.Module:
    """The network with the weights of a safetensors file."""
    if path.is_dir():
        raise ModelError(f"model.weights: {path} is a folder; name the .safetensors file in it")
    try:
        tensors = safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise ModelError(f"model.weights: {path} does not exist") from None
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"model.weights: {path} is damaged or not a safetensors file ({error})") from None
    own = tensors_of(network)
    prefix = "" if set(own) & set(tensors) else "network."  # weights of the network without normalisation fit too
    try:
        return fill(hollow(network), {f"{prefix}{name}": tensor for name, tensor in tensors.items()})
    except ModelError as error:
        raise ModelError(f"model.weights: {path}: {first_of(str(error).split('; '))}") from None


def with_frozen(network: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """The same network; parameters that match a pattern require no gradient."""
    names = dict(network.named_parameters())
    for pattern in patterns:
        hits = [name for name in names if any(fnmatch(name, form) for form in _forms(pattern))]
        if not hits:
            raise ConfigError("model.frozen: " + unknown("parameter", pattern, names))
        for name in hits:
            names[name].requires_grad_(False)
    return network


def _forms(pattern: str) -> tuple[str, ...]:
    return pattern, f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*"
