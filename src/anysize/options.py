"""Keyword arguments from an experiment file, checked against the function that will receive them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature
from typing import Any

from anysize.errors import unknown


def option_problems(
    what: str, function: Callable[..., Any], options: Mapping[str, Any], given: Iterable[str] = ()
) -> list[str]:
    """One sentence for each option that the function does not know, and for each that it needs and lacks.

    Args:
        what: is called, for the sentences: "model 'mlp'".
        function: that will be called.
        options: as the user gave them.
        given: parameters that are filled by us and are no options.

    >>> for problem in option_problems("model 'x'", lambda width, depth=2: None, {"dept": 3}):
    ...     print(problem)
    unknown option of model 'x' 'dept'; did you mean 'depth'? Known: depth, width
    model 'x' needs the option 'width'
    """
    parameters = [p for p in signature(function).parameters.values() if p.name not in set(given)]
    named = [p for p in parameters if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)]
    allowed = [p.name for p in named]
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    strange = [] if takes_any else [key for key in options if key not in allowed]
    absent = [p.name for p in named if p.default is Parameter.empty and p.name not in options]
    return [unknown(f"option of {what}", key, allowed) for key in strange] + [
        f"{what} needs the option '{key}'" for key in absent
    ]
