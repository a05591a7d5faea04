"""Changes to an experiment file from the command line: key=value."""

from __future__ import annotations

import copy
import datetime
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

# An override removes the keys that exclude it: `--set training.local_steps=10` on a file with local_epochs.
_DISPLACES: Mapping[str, tuple[str, ...]] = {
    "training.local_steps": ("training.local_epochs",),
    "training.local_epochs": ("training.local_steps",),
    "devices.participation": ("devices.clients_per_round",),
    "devices.clients_per_round": ("devices.participation",),
    "devices.distribution": ("devices.distribution_options", "devices.fractions"),
    "devices.fractions": ("devices.distribution_options", "devices.distribution"),
}
# An override of the split removes the keys that only the file's split uses.
_OF_SPLITS: Mapping[str, tuple[str, ...]] = {
    "classes": ("classes_per_client", "unbalance"),
    "dirichlet": ("alpha", "equal_sizes"),
    "natural": ("groups_per_client", "domains"),
}


def overridden(tables: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """A copy of the tables with the overrides applied, and the problems of the overrides."""
    changes: dict[tuple[str, ...], Any] = {}
    problems: list[str] = []
    for text in overrides:
        try:
            key, value = _assignment(text)
        except ValueError as error:
            problems.append(str(error))
        else:
            changes[key] = value
    merged, more = changed(tables, changes)
    return merged, problems + more


def changed(tables: Mapping[str, Any], changes: Mapping[tuple[str, ...], Any]) -> tuple[dict[str, Any], list[str]]:
    """A copy of the tables with other values at the keys, given by their parts, and which keys cannot be set.

    >>> changed({"data": {"split": "dirichlet", "alpha": 0.3}}, {("data", "split"): "iid"})
    ({'data': {'split': 'iid'}}, [])
    """
    merged: dict[str, Any] = copy.deepcopy(dict(tables))
    for key in _displaced(merged, changes):
        merged[key[0]].pop(key[1], None)
    put = [_put(merged, key, value) for key, value in changes.items()]
    return merged, [problem for problem in put if problem]


def _displaced(tables: Mapping[str, Any], changes: Mapping[tuple[str, ...], Any]) -> set[tuple[str, ...]]:
    """The keys of the file that the changes exclude."""
    displaced: set[tuple[str, ...]] = set()
    for key in changes:
        displaced |= {tuple(name.split(".")) for name in _DISPLACES.get(".".join(key), ())}
    if ("data", "split") in changes:
        others = (keys for split, keys in _OF_SPLITS.items() if split != changes[("data", "split")])
        displaced |= {("data", key) for keys in others for key in keys}
    method = tables.get("method")
    if isinstance(method, dict) and changes.get(("method", "name"), method.get("name")) != method.get("name"):
        displaced |= {("method", option) for option in method}  # one method's options mean nothing to another
    return {key for key in displaced if isinstance(tables.get(key[0]), dict)}


def _assignment(text: str) -> tuple[tuple[str, ...], Any]:
    """The components of the key and the value of one `key=value`; the value is TOML, or a bare word."""
    key_text, equals, value_text = text.partition("=")
    example = "such as training.learning_rate=0.1"
    if not equals or not key_text.strip() or not value_text.strip():
        raise ValueError(f"override {text!r}: must be key=value, {example}")
    try:
        node = tomllib.loads(f"{key_text} = 0")
    except tomllib.TOMLDecodeError:
        raise ValueError(f"override {text!r}: {key_text!r} is not a dotted key, {example}") from None
    parts: list[str] = []
    branch: Any = node
    while isinstance(branch, dict):
        parts.extend(branch)
        branch = branch[parts[-1]]
    return tuple(parts), _override_value(value_text.strip(), text)


def _override_value(value: str, text: str) -> Any:
    """The TOML value of an override, or the words themselves where they are not TOML."""
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError as error:
        if value[0] in "[{\"'" or "\n" in value:
            raise ValueError(f"override {text!r}: the value is not valid TOML: {error}") from None
        return value
    if len(parsed) > 1 or isinstance(parsed["value"], datetime.date | datetime.time):
        return value
    return parsed["value"]


def _put(tables: dict[str, Any], key: tuple[str, ...], value: Any) -> str | None:
    """Set a nested key; return a sentence that says why if that is impossible."""
    node: Any = tables
    for depth, part in enumerate(key[:-1]):
        below = ".".join(key[: depth + 1])
        if isinstance(node, list):
            place = _place(part, node)
            if place is None:
                return f"override {'.'.join(key)}: {below} does not exist; there are {len(node)} entries, from 0"
            node = node[place]
        else:
            node = node.setdefault(part, {})
        if not isinstance(node, dict | list):
            return f"override {'.'.join(key)}: {below} is a value, not a table"
    if isinstance(node, list):
        place = _place(key[-1], node)
        if place is None:
            return f"override {'.'.join(key)}: there are {len(node)} entries, from 0"
        node[place] = value
    else:
        node[key[-1]] = value
    return None


def _place(text: str, entries: Sequence[Any]) -> int | None:
    """The index that a component of a key gives, or None."""
    return int(text) if text.isdecimal() and int(text) < len(entries) else None
