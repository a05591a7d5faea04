"""Networks by name, or a user's by "package.module:function"."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anysize.config.names import MODELS
from anysize.config.options import defaults as defaults_of
from anysize.config.options import option_problems, received, writable
from anysize.config.own_code import by_name
from anysize.errors import ModelError
from anysize.models import attention, convolutional, dense, hub, recurrent, residual
from anysize.rng import derive
from anysize.tasks import Classification, Task

_FILES = {file.__name__.rpartition(".")[2]: file for file in (attention, convolutional, dense, recurrent, residual)}
_MODELS: dict[str, Callable[..., nn.Module]] = {
    name: getattr(_FILES[file], name.replace("-", "_")) for name, file in MODELS.items()
}
_GIVEN = ("input_shape", "classes")
"""Parameters that follow from the data and are no options."""


def build(
    name: str,
    input_shape: Sequence[int],
    classes: int,
    options: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    task: Task | None = None,
    folder: Path | None = None,
    bare: bool = False,
) -> nn.Module:
    """The network of that name for inputs of `input_shape`, its weights drawn from `seed` alone.

    A user's function is called with `options`, and with `input_shape` and `classes` if it has parameters of
    these names.

    Args:
        name: a name from `models()`, "package.module:function", or "hf:...", "timm:...", "torchvision:...".
        input_shape: the shape of one sample: (C, H, W), (T,) for tokens, anything for `mlp`.
        classes: how many logits the network returns.
        options: keyword arguments of the network.
        seed: the seed of the first weights. The global generator is left as it was.
        task: what is learned, which says what head a network of transformers has; by default classification.
        folder: where a relative path in the name begins.
        bare: whether only the structure matters, so that learned weights need not be read.

    >>> net = build("mlp", (1, 8, 8), 10, {"hidden": [32]})
    >>> net(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    function = _function(name)
    options = received(defaults_of(function), options or {})
    given: dict[str, Any] = {"input_shape": tuple(input_shape), "classes": classes}
    if hub.function(name) is not None:
        given |= {"task": task or Classification(), "folder": folder, "bare": bare}
    problems = option_problems(f"model '{name}'", function, options, given)
    if problems:
        raise ModelError("\n".join(problems))
    wanted = inspect.signature(function).parameters
    filled = {key: value for key, value in given.items() if key in wanted} | options
    # Layers draw their weights from the global generator; it gets a derived seed here and is then restored.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "weights"))
        module = function(**filled)
    if not isinstance(module, nn.Module):
        raise ModelError(f"model '{name}' returned a {type(module).__name__}; it must return an nn.Module")
    return module


def defaults(name: str) -> dict[str, Any]:
    """What the options of the network of that name are where a file gives none, as far as a file can hold it.

    >>> defaults("mlp")
    {'hidden': [256, 128]}
    """
    found = writable(defaults_of(_function(name)))
    return {} if hub.function(name) else {option: value for option, value in found.items() if option not in _GIVEN}


def models() -> list[tuple[str, str]]:
    """Every network's name, and one line on it.

    >>> dict(models())["mlp"]
    'Fully connected layers with ReLU; takes any input.'
    """
    return [(name, (inspect.getdoc(function) or "").splitlines()[0]) for name, function in sorted(_MODELS.items())]


def _function(name: str) -> Callable[..., Any]:
    """The function that builds the network of that name."""
    function = _MODELS.get(name) or hub.function(name) or by_name(name, "model", _MODELS)
    if not callable(function):
        raise ModelError(
            f"model '{name}' is a {type(function).__name__}; it must be a function that gives an nn.Module"
        )
    return function
