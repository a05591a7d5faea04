"""An experiment as TOML, and how two experiments differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_INLINE_WIDTH = 80


def written(tables: Mapping[str, Any]) -> str:
    """Tables as TOML.

    >>> print(written({"name": "cam", "budget": {"macs": 1e6}}), end="")
    name = "cam"
    <BLANKLINE>
    [budget]
    macs = 1000000.0
    """
    return "\n".join(_table_lines(tables, ())).strip("\n") + "\n"


def _table_lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """The lines of a table's own values, then those of the tables below it."""
    below: dict[str, Any] = {}
    for key, value in table.items():
        if _needs_header(value, path):
            below[key] = value
        else:
            yield f"{_key(key)} = {inline(value)}"
    for key, value in below.items():
        header = ".".join(_key(part) for part in (*path, key))
        several = not isinstance(value, Mapping)
        for entry in value if several else [value]:
            yield from ("", f"[[{header}]]" if several else f"[{header}]")
            yield from _table_lines(entry, (*path, key))


def inline(value: Any) -> str:
    """A value in TOML, on one line.

    >>> inline({"macs": 1e6, "names": ["a"]})
    '{ macs = 1000000.0, names = ["a"] }'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {inline(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(inline(item) for item in value)}]"
    return repr(value)


def _key(key: str) -> str:
    """A key, in quotes if TOML requires them."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _string(text: str) -> str:
    """A TOML string; its escapes are those of JSON, except for the delete character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def differences(changed: Mapping[str, tuple[Any, Any]], between: str = " -> ") -> list[str]:
    """A line for each key in which two experiments differ, with both values.

    >>> from anysize.config import changes, from_dict
    >>> tables = {"data": {"name": "digits", "clients": 20},
    ...           "model": {"name": "mlp"}, "method": {"name": "flanc"}}
    >>> differences(changes(from_dict(tables), from_dict(tables, ["rounds=5", "engine.workers=2"])))
    ['rounds: 100 -> 5', 'engine.workers: absent -> 2']
    """
    return [
        f"{key}: {between.join('absent' if value is None else inline(value) for value in pair)}"
        for key, pair in changed.items()
    ]


def _needs_header(value: Any, path: tuple[str, ...]) -> bool:
    """Whether a value is written as a separate table, not after an equals sign."""
    if isinstance(value, Mapping):
        return not path or len(inline(value)) > _INLINE_WIDTH
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf by its dotted key; an empty table or list is a leaf, and so is a list of plain values."""
    if isinstance(value, Mapping) and value:
        parts = [(f"{path}.{key}".lstrip("."), item) for key, item in value.items()]
    elif _needs_header(value, (path,)) and not isinstance(value, Mapping):
        parts = [(f"{path}[{place}]", item) for place, item in enumerate(value)]
    else:
        return {path: value}
    return {key: leaf for name, item in parts for key, leaf in flat(item, name).items()}
