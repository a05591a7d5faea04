"""Networks that are called by keyword and return more than a tensor, such as those of Hugging Face's transformers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from anysize.errors import ModelError
from anysize.inputs import Inputs

_SWITCHES = {"use_cache": False}
"""Arguments of networks that generate text, which training and measuring do without."""


class Keyed(nn.Module):
    """A network called by keyword, as a module of one input (or of its tensors in a row) that returns the logits.

    Args:
        network: any module; it is called with the inputs by name.
        names: the names of the inputs.

    >>> import torch
    >>> class Sum(nn.Module):
    ...     def forward(self, left, right):
    ...         return {"logits": left + right}
    >>> a, b = torch.ones(1, 2), torch.ones(1, 2)
    >>> Keyed(Sum(), ["left", "right"])(Inputs({"left": a, "right": b})).tolist()
    [[2.0, 2.0]]
    """

    def __init__(self, network: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.network = network
        self.names = tuple(names)
        self.switches = {name: value for name, value in _SWITCHES.items() if name in _parameters(network)}

    def forward(self, *inputs: Tensor | Inputs) -> Tensor:
        first = inputs[0]
        named = first.items() if isinstance(first, Inputs) else zip(self.names, inputs)
        return _logits(self.network(**dict(named), **self.switches), self.network)


def keyed(network: nn.Module, names: Sequence[str] | None) -> nn.Module:
    """The network as a module of one input that returns one tensor; as it is if it already is such a module.

    Args:
        network: any module.
        names: of the inputs, or None if the data has one input without a name.

    Raises:
        ModelError: the network has no such inputs, or needs others too.
    """
    accepted, required = _parameters(network), _required(network)
    kind = type(network).__name__
    if names is None and is_pretrained_model(network):
        return Keyed(network, [str(network.main_input_name)])
    if names is None and len(required) > 1:
        given = ", ".join(f'"{name}": ...' for name in required)
        raise ModelError(
            f"{kind}.forward needs {', '.join(required)}, but the data has one input without a name; name them: "
            f"az.Data(train=({{{given}}}, y))"
        )
    if names is None:
        return network
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values()) and not is_pretrained_model(network)
    strange = [name for name in names if name not in accepted and not takes_any]
    missing = [name for name in required if name not in names]
    if strange:
        known = ", ".join(name for name, p in accepted.items() if p.kind is not p.VAR_KEYWORD)
        raise ModelError(f"{kind}.forward has no input {', '.join(strange)}; leave it out of the data. Known: {known}")
    if missing:
        raise ModelError(f"{kind}.forward needs {', '.join(missing)}; the data has {', '.join(names)}")
    return Keyed(network, names)


def check_network(network: Any) -> None:
    """Refuse what is given as a network and cannot be trained.

    >>> check_network(nn.Linear)
    Traceback (most recent call last):
    anysize.errors.ModelError: the model is the class Linear; give a network, as Linear(...) makes one
    """
    kind = type(network).__name__
    if isinstance(network, type):
        name = network.__name__
        raise ModelError(f"the model is the class {name}; give a network, as {name}(...) makes one")
    if not isinstance(network, nn.Module):
        a_config = hasattr(network, "model_type")
        way = ", such as AutoModelForSequenceClassification.from_config(config) makes" if a_config else ""
        raise ModelError(f"the model is a {kind}; give a name, or a network: any nn.Module{way}")
    if hasattr(network, "_orig_mod"):
        raise ModelError("the model was compiled; give the network itself, as it was before torch.compile")
    if any(parameter.is_meta for parameter in network.parameters()):
        raise ModelError("the model has no weights: its parameters are on the meta device; load or make them first")


def plain(network: nn.Module) -> nn.Module:
    """The network that a user knows: without the module that calls it by keyword."""
    return network.network if isinstance(network, Keyed) else network


def is_pretrained_model(network: nn.Module) -> bool:
    """Whether a network is one of transformers' (a PreTrainedModel, its weights learned or not)."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(network, library.PreTrainedModel)


def logits_of(network: nn.Module) -> int | None:
    """How many classes or tokens a network of transformers has logits for; None if it does not say."""
    if not is_pretrained_model(network):
        return None
    model: Any = network
    head = model.get_output_embeddings()
    count = model.config.num_labels if head is None else len(head.weight)
    return int(count)


def vocabulary(network: nn.Module) -> int | None:
    """How many tokens a network of transformers knows; None of other networks, and of those that take no tokens."""
    model: Any = plain(network)
    if not is_pretrained_model(model) or model.main_input_name != "input_ids":
        return None
    return len(model.get_input_embeddings().weight)


def positions(network: nn.Module) -> int | None:
    """How many tokens a text may have, if a network of transformers looks up its positions in a table; else None."""
    model: Any = plain(network)
    if vocabulary(model) is None or not hasattr(model.config, "max_position_embeddings"):
        return None
    most: int = model.config.max_position_embeddings
    tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    rows = [len(table.weight) for table in tables if table is not model.get_input_embeddings()]
    return most if any(0 <= count - most <= 2 for count in rows) else None  # some begin with row 2


def _parameters(network: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(network.forward).parameters
    except (TypeError, ValueError):  # compiled code
        return {}


def _required(network: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, p in _parameters(network).items() if p.default is p.empty and p.kind in kinds]


def _logits(answer: Any, network: nn.Module) -> Tensor:
    """The logits in what a network returned."""
    if isinstance(answer, Mapping):
        answer = answer.get("logits")
    elif isinstance(answer, tuple) and answer:
        answer = answer[0]
    if not isinstance(answer, Tensor):
        raise ModelError(
            f"{type(network).__name__} returns no logits; use a network with a head, such as "
            "AutoModelForSequenceClassification"
        )
    return answer
