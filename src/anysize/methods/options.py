"""The options of a method: each is checked against its annotation, wherever the method is made.

An annotation says which values an option may have: `Literal["mean", "sum"]`, or a type with a range in `Annotated`, as
`anysize.config.values` has them for the experiment file. Pydantic checks them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from anysize.config.table import RANGES
from anysize.config.values import range_words

_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", NoneType: "None"}

_IN_WORDS = (*RANGES, "literal_error", "finite_number", "int_from_float")  # mistakes that `allowed` explains


def option_problems(kind: type, options: Mapping[str, Any]) -> list[str]:
    """One sentence for each option of a dataclass with a value that its annotation does not allow.

    A value is judged as a file holds it: a list may stand for a tuple. A default is always allowed, and so is whatever
    is annotated with a type that pydantic cannot check.

    >>> from anysize.methods import PriSM
    >>> for problem in option_problems(PriSM, {"kappa": -1, "sampling": "best", "refresh_every": "no"}):
    ...     print(problem)
    kappa = -1; allowed: 0 or more
    sampling = 'best'; allowed: 'importance', 'uniform', 'softmax', 'top'
    refresh_every = 'no'; allowed: an integer, 1 or more
    """
    known, standard = _checks(kind), default_options(kind)
    names = [name for name in options if name in known and options[name] is not standard.get(name, MISSING)]
    return [line for name in names for line in _problems(name, options[name], *known[name])]


def default_options(kind: Any) -> dict[str, Any]:
    """The defaults of a dataclass's options."""
    made = {field.name: _default(field) for field in fields(kind) if field.init}
    return {name: default for name, default in made.items() if default is not MISSING}


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


@cache
def _checks(kind: Any) -> dict[str, tuple[Any, TypeAdapter[Any]]]:
    """The annotation and the check of every option that can be checked."""
    found = {}
    for field in fields(kind):
        hint = _hint(kind, field)
        try:
            found[field.name] = hint, TypeAdapter(hint)
        except (PydanticUserError, NameError):  # a type that pydantic does not know: an object of the author's
            continue
    return found


def _hint(kind: type, field: Field[Any]) -> Any:
    """The annotation of an option; where a name in it is imported for type checkers only, the type of its default."""
    *_, home = (each for each in kind.__mro__ if vars(each).get("__dataclass_fields__", {}).get(field.name) is field)
    alone = type(home.__name__, (), {"__annotations__": {field.name: field.type}, "__module__": home.__module__})
    try:
        return get_type_hints(alone, include_extras=True)[field.name]
    except (NameError, AttributeError, TypeError):
        guess = type(_default(field))
        return guess if guess in _KINDS else Any


def _problems(name: str, value: Any, hint: Any, check: TypeAdapter[Any]) -> list[str]:
    """One sentence for each place in the value of an option that is not allowed."""
    try:
        try:
            check.validate_json(json.dumps(value), strict=True)
        except TypeError:  # an object that no file can hold
            check.validate_python(value, strict=True)
    except ValidationError as error:
        return list(dict.fromkeys(_line(name, value, hint, detail) for detail in error.errors(include_url=False)))
    return []


def _line(name: str, value: Any, hint: Any, detail: ErrorDetails) -> str:
    """What an option holds, and what it may hold: its annotation in words, and what these words do not say."""
    where, given = _place(name, value, detail["loc"])
    words, kind = allowed(hint, given), detail["type"]
    if kind == "value_error" and not _described(hint):
        words = str(detail["ctx"]["error"]).removeprefix("must be ")
    elif not (_described(hint) or kind in _IN_WORDS or kind.endswith("_type")):
        words = f"{words} ({detail['msg']})"
    return f"{where} = {given!r}; allowed: {words}"


def _place(name: str, value: Any, location: Sequence[int | str]) -> tuple[str, Any]:
    """The key of the innermost table's entry that a location points at, and what it holds."""
    for part in location:
        if not isinstance(value, Mapping) or part not in value:
            break
        name, value = f"{name}.{part if str(part).isidentifier() else repr(part)}", value[part]
    return name, value


def allowed(hint: Any, given: Any = None) -> str:
    """What an annotation allows, in words; a `description` in its metadata says it instead.

    >>> import pydantic
    >>> allowed(Literal["mean", "sum"])
    "'mean', 'sum'"
    >>> allowed(Annotated[float, pydantic.Field(gt=0, le=1)]), allowed(Annotated[float, pydantic.Field(gt=0, le=1)], 2)
    ('a number, above 0 and at most 1', 'above 0 and at most 1')
    >>> allowed(Sequence[int] | None)
    'a list of: an integer; or None'
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated and _described(hint):
        return _described(hint)
    if origin is Annotated:
        return _annotated(arguments[0], arguments[1:], given)
    if origin is Literal:
        return ", ".join(map(repr, arguments))
    if origin in (Union, UnionType):
        return "; or ".join(allowed(argument) for argument in arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a table of: {allowed(arguments[1])}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a list of: {allowed(arguments[0])}"
    return _KINDS.get(hint) or f"a {getattr(hint, '__name__', hint)}"


def _described(hint: Any) -> str:
    """The description in an annotation's metadata; empty without one."""
    found = [entry.description for entry in getattr(hint, "__metadata__", ()) if isinstance(entry, FieldInfo)]
    return next(filter(None, found), "")


def _annotated(kind: Any, metadata: Sequence[Any], given: Any) -> str:
    """What a type with metadata allows; of a number only the range, if a number was given."""
    words, is_number = range_words(metadata), type(given) in ((int,) if kind is int else (int, float))
    return words if words and is_number else ", ".join(filter(None, (allowed(kind), words)))
