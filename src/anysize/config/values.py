"""Values of an experiment file: what each type allows, and the errors for other values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, PlainValidator
from pydantic.fields import FieldInfo

UNITS = (
    "parameters",
    "macs",
    "training_macs",
    "activation_bytes",
    "memory_bytes",
    "bytes",
    "inference_bytes",
    "latency_ms",
    "nonzero_macs",
)
"""What a device's budget may limit."""


_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


_Item = TypeVar("_Item")


def range_words(metadata: Iterable[Any]) -> str:
    """The range that the metadata of a number ask for, in words; empty if they ask for none.

    >>> range_words([Field(gt=0, le=1)]), range_words([Field(ge=0, lt=1)]), range_words([Field(ge=1)])
    ('above 0 and at most 1', 'at least 0 and below 1', '1 or more')
    """
    bounds: dict[str, Any] = {}
    for entry in metadata:
        for each in entry.metadata if isinstance(entry, FieldInfo) else [entry]:
            bounds |= {name: value for name in _BOUNDS if (value := getattr(each, name, None)) is not None}
    if set(bounds) == {"ge"}:
        return f"{bounds['ge']} or more"
    return " and ".join(f"{words} {bounds[name]}" for name, words in _BOUNDS.items() if name in bounds)


def distinct(values: tuple[_Item, ...]) -> tuple[_Item, ...]:
    """The values; raises if one occurs twice."""
    repeated = sorted({str(value) for value in values if values.count(value) > 1})
    if repeated:
        raise ValueError(f"must name each value once; {', '.join(repeated)} occurs more than once")
    return values


def shares(values: tuple[float, ...]) -> tuple[float, ...]:
    """The values; raises unless they sum to 1."""
    if not math.isclose(math.fsum(values), 1.0, abs_tol=1e-6):
        raise ValueError(f"must sum to 1; these sum to {math.fsum(values):g}")
    return values


def ascending(values: Sequence[float]) -> Sequence[float]:
    """The values, of which each is larger than the one before."""
    if any(before >= after for before, after in pairwise(values)):
        raise ValueError("must ascend, each value once")
    return values


def not_empty(values: tuple[_Item, ...]) -> tuple[_Item, ...]:
    """The values; raises if there is none."""
    if not values:
        raise ValueError("must hold at least one value")
    return values


def folder_name(text: str) -> str:
    """The text; raises unless it can be the name of a folder."""
    if not text.strip() or text in (".", "..") or re.search(r'[/\\:*?"<>|\x00-\x1f\x7f]', text):
        raise ValueError('must be usable as a folder name: not empty, none of / \\ : * ? " < > |')
    return text


def _not_blank(text: str) -> str:
    """The text; raises if it is empty."""
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def plain(value: Any, key: str) -> Any:
    """The value as TOML can hold it, tuples as lists; a `ValueError` naming the key otherwise."""
    if isinstance(value, Mapping):
        return {_plain_key(name, key): plain(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{key}[{place}]") for place, item in enumerate(value)]
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"must hold numbers; {key} is not a number (nan)")
    if type(value) not in (bool, int, float, str):
        advice = "leave it out instead" if value is None else "write a string, a number, a list or a table"
        raise ValueError(f"must hold what TOML can hold; {key} is a {type(value).__name__}: {advice}")
    return value


def _plain_key(name: object, key: str) -> str:
    """The name of an entry; raises unless it is a string."""
    if not isinstance(name, str):
        raise ValueError(f"must have strings as keys; {key} has {name!r}")
    return name


def _plain_table(table: dict[str, Any]) -> dict[str, Any]:
    """A copy of the table as TOML can hold it."""
    return {_plain_key(name, "it"): plain(value, str(name)) for name, value in table.items()}


def _one_or_list(allowed: Callable[[float], bool], words: str) -> PlainValidator:
    """A check for a number, or a list of numbers parallel to `capacities`."""

    def check(value: Any) -> float | tuple[float, ...] | None:
        if value is None:
            return None
        several = isinstance(value, list | tuple)
        numbers = list(value) if several else [value]
        if not numbers or not all(_is_number(number) and allowed(number) for number in numbers):
            raise ValueError(f"must be a number {words}, or a list of such numbers")
        return tuple(float(number) for number in numbers) if several else float(value)

    return PlainValidator(check)


def _is_number(value: object) -> bool:
    """Whether the value is a finite number; a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_above_zero: tuple[Callable[[float], bool], str] = (lambda value: value > 0, "above 0")


_unit_interval: tuple[Callable[[float], bool], str] = (lambda value: 0 < value <= 1, "above 0 and at most 1")


Name = Annotated[str, AfterValidator(_not_blank)]


Count = Annotated[int, Field(ge=1)]


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


Part = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


UpToOne = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


Options = Annotated[dict[str, Any], AfterValidator(_plain_table)]


Names = Annotated[tuple[Name, ...], Field(strict=False)]


Rate = Annotated[float | tuple[float, ...] | None, _one_or_list(*_above_zero)]


Probability = Annotated[float | tuple[float, ...] | None, _one_or_list(*_unit_interval)]


def within(key: str, table: str) -> bool:
    """Whether a dotted key equals another, or lies below it."""
    return key == table or key.startswith((f"{table}.", f"{table}["))
