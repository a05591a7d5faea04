"""The methods, one file per paper, and how they are found by name; and all that the author of a method imports."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from typing import Any

from anysize.config.names import METHODS, PLUGINS
from anysize.config.options import received, writable
from anysize.config.own_code import by_name
from anysize.elastic.skeleton import fill, tensors_of
from anysize.errors import ConfigError, MethodError, unknown
from anysize.methods.base import Method
from anysize.methods.capabilities import (
    Adjustable,
    CarriesMomentum,
    Factored,
    Finishing,
    Judge,
    Masked,
    Mixture,
    OnBase,
    Parted,
    Searched,
)
from anysize.methods.context import Context
from anysize.methods.elf import ELF
from anysize.methods.fedavg import FedAvg
from anysize.methods.fedhm import FedHM
from anysize.methods.fedrolex import FedRolex
from anysize.methods.fiarse import FIARSE
from anysize.methods.fjord import FjORD
from anysize.methods.flanc import FLANC
from anysize.methods.heterofl import HeteroFL
from anysize.methods.kit import checked, class_weights, cut, first_tensors, nested, paste, sub_model
from anysize.methods.ladder import Ladder
from anysize.methods.lora import LoRA
from anysize.methods.mean import StreamingMean
from anysize.methods.messages import Client, ParameterGroup, SubModel, Ticket, Update
from anysize.methods.oat import OAT
from anysize.methods.options import default_options, option_problems
from anysize.methods.origdrop import OrigDrop
from anysize.methods.prism import PriSM
from anysize.methods.sheterofl import SHeteroFL
from anysize.methods.size import Levels, Size
from anysize.methods.splitmix import SplitMix
from anysize.methods.training import Batch, Step, Tricks
from anysize.wire import Tensors

__all__ = [
    "ELF",
    "FIARSE",
    "FLANC",
    "OAT",
    "Adjustable",
    "Batch",
    "CarriesMomentum",
    "Client",
    "Context",
    "Factored",
    "FedAvg",
    "FedHM",
    "FedRolex",
    "Finishing",
    "FjORD",
    "HeteroFL",
    "Judge",
    "Ladder",
    "Levels",
    "LoRA",
    "Masked",
    "Method",
    "Mixture",
    "OnBase",
    "OrigDrop",
    "ParameterGroup",
    "Parted",
    "PriSM",
    "SHeteroFL",
    "Searched",
    "Size",
    "SplitMix",
    "Step",
    "StreamingMean",
    "SubModel",
    "Tensors",
    "Ticket",
    "Tricks",
    "Update",
    "checked",
    "class_weights",
    "cut",
    "defaults",
    "fill",
    "first_tensors",
    "make",
    "methods",
    "name_of",
    "nested",
    "paste",
    "sub_model",
    "tensors_of",
]

_METHODS: dict[str, type[Method[Any]]] = {name: globals()[kind] for name, kind in METHODS.items()}


def make(name: str, options: Mapping[str, Any] | None = None) -> Method[Any]:
    """The method of that name, built in or from a plug-in, or a user's by "module:Class".

    >>> make("flanc", {"orthogonality": 1.0}).orthogonality
    1.0
    """
    kind = _kind(name)
    given = options or {}
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    problems = [f"method: {unknown(f'option of {name}', key, known)}" for key in given if key not in known]
    problems += [f"method.{problem}" for problem in option_problems(kind, given)]
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        made: Method[Any] = kind(**received(default_options(kind), given))
    except MethodError as error:
        raise ConfigError(str(error)) from None
    except TypeError as error:
        raise ConfigError(f"method '{name}': {error}") from None
    return made


def defaults(name: str) -> dict[str, Any]:
    """What the options of the method of that name are where a file gives none, as far as a file can hold it.

    >>> defaults("heterofl")
    {'scaler': True, 'ordered_dropout': False, 'share': 'all'}
    """
    return writable(default_options(_kind(name)))


def methods() -> list[tuple[str, str]]:
    """Every method's name and one line on it, plug-ins included.

    >>> [name for name, _ in methods()][:3]
    ['elf', 'fedavg', 'fedhm']
    """
    kinds = _METHODS | _plugins()
    return [(name, kinds[name].summary) for name in sorted(kinds)]


def name_of(method: Method[Any]) -> str:
    """The name by which `make` finds the method's class."""
    for name, kind in _METHODS.items():
        if type(method) is kind:
            return name
    return f"{type(method).__module__}:{type(method).__qualname__}"


def _plugins(name: str | None = None) -> dict[str, type[Method[Any]]]:
    return {point.name: point.load() for point in _installed() if name in (None, point.name)}


@cache
def _installed() -> EntryPoints:
    """The methods of other packages; to find them takes a look at every installed package."""
    return entry_points(group=PLUGINS)


def _kind(name: str) -> Any:
    """The class of the method of that name."""
    kinds = _METHODS | _plugins(name)
    kind = kinds[name] if name in kinds else by_name(name, "method", kinds)
    if not (isinstance(kind, type) and issubclass(kind, Method) and dataclasses.is_dataclass(kind)):
        raise ConfigError(f"method '{name}' is not a dataclass derived from anysize.methods.Method")
    return kind
