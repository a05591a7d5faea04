"""Keyword arguments from an experiment file, checked against the function that will receive them; their defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature
from typing import Any

from anysize.config.values import plain
from anysize.errors import unknown


def option_problems(
    what: str, function: Callable[..., Any], options: Mapping[str, Any], given: Iterable[str] = ()
) -> list[str]:
    """One sentence for each option that the function does not know, and for each that it needs and lacks.

    Args:
        what: how errors name the function: "model 'mlp'".
        function: the function to be called.
        options: as the user gave them.
        given: parameters that anysize passes itself, so they are not options.

    >>> for problem in option_problems("model 'x'", lambda width, depth=2: None, {"dept": 3}):
    ...     print(problem)
    unknown option of model 'x' 'dept'; did you mean 'depth'? Known: depth, width
    model 'x' needs the option 'width'
    """
    named = [p for p in _named(function) if p.name not in set(given)]
    allowed = [p.name for p in named]
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in signature(function).parameters.values())
    strange = [] if takes_any else [key for key in options if key not in allowed]
    absent = [p.name for p in named if p.default is Parameter.empty and p.name not in options]
    return [unknown(f"option of {what}", key, allowed) for key in strange] + [
        f"{what} needs the option '{key}'" for key in absent
    ]


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The default of every option of the function that has one.

    >>> defaults(lambda width, depth=2, *, hidden=(64, 32): None)
    {'depth': 2, 'hidden': (64, 32)}
    """
    return {p.name: p.default for p in _named(function) if p.default is not Parameter.empty}


def writable(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that a file can hold, in the form of the file; `received` restores them exactly.

    The file leaves out options whose default is None, an object, or a tuple with lists in it.

    >>> writable({"hidden": (64, 32), "weights": None, "rate": 0.1})
    {'hidden': [64, 32], 'rate': 0.1}
    """
    found = {}
    for name, default in defaults.items():
        try:
            value = plain(default, name)
        except ValueError:
            continue
        if repr(_like(default, value)) == repr(default):  # the types of all items must be equal too
            found[name] = value
    return found


def received(defaults: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as a function expects them: a list from the file becomes a tuple if the default is a tuple.

    >>> received({"hidden": (64, 32)}, {"hidden": [8], "names": ["a"]})
    {'hidden': (8,), 'names': ['a']}
    """
    return {name: _like(defaults.get(name), value) for name, value in options.items()}


def _named(function: Callable[..., Any]) -> list[Parameter]:
    """The parameters that can be given by name."""
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return [parameter for parameter in signature(function).parameters.values() if parameter.kind in kinds]


def _like(default: Any, value: Any) -> Any:
    return _tupled(value) if type(default) is tuple else value


def _tupled(value: Any) -> Any:
    """The value with every list turned into a tuple."""
    return tuple(map(_tupled, value)) if isinstance(value, list) else value
