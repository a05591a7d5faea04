"""One table of an experiment file, and the error lines for its mistakes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from anysize.config.values import range_words
from anysize.errors import ConfigError, unknown

PROBLEMS = "problems"  # the type of errors whose lines are complete, key included


class Table(BaseModel):
    """One table of the experiment file: immutable, strict about types, without unknown keys.

    Its constructor raises the same `ConfigError` as reading a file does.

    >>> from anysize.config.tables import TrainingConfig
    >>> TrainingConfig(batch_size=0, schedule="cosin")
    Traceback (most recent call last):
    anysize.errors.ConfigError: [training] has 2 problems:
      - training.batch_size: given 0, must be 1 or more
      - training.schedule: unknown value 'cosin'; did you mean 'cosine'? Known: constant, cosine, step
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    table: ClassVar[str] = ""
    """The dotted key of the table in the file."""
    whole: ClassVar[str] = "the experiment"
    """How errors name the file of the table."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = list(problem_lines(error, type(self)))
        else:
            return
        refuse(problems, f"[{self.table}]" if self.table else self.whole)

    # Tells pydantic that nested tables need not pass through `__init__`: they are checked together with
    # the whole file, so that the problems of all tables are collected.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def raise_problems(problems: Iterable[str]) -> None:
    """End validation of a table if there are problems; each line names its key."""
    lines = list(problems)
    if lines:
        raise PydanticCustomError(PROBLEMS, "{lines}", {"lines": "\n".join(lines)})


def refuse(problems: Sequence[str], source: str) -> NoReturn:
    """Raise one error with a line for each problem."""
    if len(problems) == 1:
        raise ConfigError(f"{source}: {problems[0]}")
    listed = "".join(f"\n  - {problem}" for problem in problems)
    raise ConfigError(f"{source} has {len(problems)} problems:{listed}")


_TYPES: Mapping[str, str] = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string, in quotes",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "finite_number": "a finite number",
}


RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
"""The mistakes about a number's range, as pydantic names them."""


def problem_lines(error: ValidationError, root: type[Table]) -> Iterator[str]:
    """A line for each problem: the dotted key, what was given, what is allowed."""
    for detail in error.errors(include_url=False):
        yield from _line(detail, root)


def _line(detail: ErrorDetails, root: type[Table]) -> list[str]:
    """The line or lines of one problem."""
    kind, given = detail["type"], detail["input"]
    key = _dotted(root.table, detail["loc"])
    context = detail.get("ctx", {})
    if kind == PROBLEMS:
        return str(context["lines"]).split("\n")
    if kind == "extra_forbidden":
        return [_unknown_key(detail["loc"], root)]
    if kind == "missing":
        return [f"{key}: missing; {_how_to_give(detail['loc'], root)}"]
    if kind == "literal_error" and isinstance(given, str):
        allowed = re.findall(r"'([^']*)'", context["expected"])
        return [f"{key}: {unknown('value', given, allowed)}"]
    if kind == "literal_error":
        return [f"{key}: given {_shown(given)}, must be {context['expected']}"]
    if kind == "value_error":
        whole = isinstance(given, dict)  # a whole table: the user can see its content in the file
        return [f"{key}: {context['error']}" if whole else f"{key}: given {_shown(given)}, {context['error']}"]
    if kind in RANGES:
        return [f"{key}: given {_shown(given)}, must be {_range_at(root, detail['loc'])}"]
    wanted = f"must be {_TYPES[kind]}" if kind in _TYPES else detail["msg"]
    return [f"{key}: given {_shown(given)}, {wanted}"]


def _dotted(table: str, location: Sequence[int | str]) -> str:
    """A key as written in errors: `devices.groups[0].capacity`."""
    text = table
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def _shown(value: object) -> str:
    """A value as TOML, if TOML can hold it, cut short."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _table_at(root: type[Table], location: Sequence[int | str]) -> type[Table]:
    """The class of the table at a location below a root."""
    found = root
    for part in location:
        field = found.model_fields.get(str(part)) if isinstance(part, str) else None
        found = next(tables_in(field.annotation), found) if field else found
    return found


def _range_at(root: type[Table], location: Sequence[int | str]) -> str:
    """The range of the number at a location below a root, in words."""
    for end in range(len(location), 0, -1):  # what follows the key is a place in a list, or one of several types
        field = _table_at(root, location[: end - 1]).model_fields.get(str(location[end - 1]))
        if field:
            return range_words(field.metadata) or next(_ranges_in(field.annotation))
    raise KeyError(location)


def _ranges_in(annotation: Any) -> Iterator[str]:
    """The ranges of numbers that an annotation mentions, in words."""
    words = range_words(getattr(annotation, "__metadata__", ()))
    if words:
        yield words
    for argument in get_args(annotation):
        yield from _ranges_in(argument)


def tables_in(annotation: Any) -> Iterator[type[Table]]:
    """The tables that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        yield annotation
    for argument in get_args(annotation):
        yield from tables_in(argument)


def _unknown_key(location: Sequence[int | str], root: type[Table]) -> str:
    """The line for an unknown key: the nearest match, or the table where the key belongs."""
    *above, last = location
    key, table = str(last), _dotted(root.table, above)
    keys = _table_at(root, above).model_fields
    line = f"{table or 'top level'}: {unknown('key', key, keys)}"
    tables = _keys_by_table() if root.whole == Table.whole else {}
    homes = [home for home, fields in tables.items() if key in fields and home != table]
    return f"{line}. '{key}' belongs to {' or '.join(homes)}" if homes else line


def _keys_by_table() -> dict[str, set[str]]:
    """The keys of every table of an experiment file, by the table's name as written in the file."""
    kinds = [kind for kind in Table.__subclasses__() if kind.whole == Table.whole and "." not in kind.table]
    return {f"[{kind.table}]" if kind.table else "the top level": _plain_keys(kind) for kind in kinds}


def _plain_keys(kind: type[Table]) -> set[str]:
    """The keys of a table that are not tables themselves."""
    return {name for name, field in kind.model_fields.items() if next(tables_in(field.annotation), None) is None}


def _how_to_give(location: Sequence[int | str], root: type[Table]) -> str:
    """What to write for a key that is missing."""
    *above, last = location
    field = _table_at(root, above).model_fields[str(last)]
    if next(tables_in(field.annotation), None):
        return f'add a table [{last}] with name = "..."'
    return f'add {last} = "..." to [{_dotted(root.table, above)}]'


Kind = TypeVar("Kind", bound=Table)
