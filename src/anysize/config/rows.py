"""CSV files that an experiment file names: their rows, each with its line, and the errors for other files."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from anysize.config.table import raise_problems
from anysize.errors import unknown

_LARGEST = 1e300
_SHOWN = 10  # problems of one file that an error lists

Row = tuple[int, dict[str, str]]
"""The number of a row's last line, and its cells by column; an empty cell is left out."""


def read_rows(path: Path, key: str, allowed: Collection[str], needed: Collection[str], kind: str) -> list[Row]:
    """The rows of a CSV file with a line of column names.

    Args:
        path: the file.
        key: the key of the experiment file that names it, for errors.
        allowed: the columns that it may have.
        needed: the columns that it must have.
        kind: what a row is called in errors.
    """
    where = f"{key}: {path}"
    reader = csv.reader(io.StringIO(_text(path, where), newline=""), skipinitialspace=True, strict=True)
    try:
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(cells)]
    except csv.Error as error:
        raise_problems([f"{where}, line {reader.line_num}: cannot be read as CSV: {error}"])
    first, columns = lines[0] if lines else (1, [])
    wrong = [f"{where}, line {first}: {unknown('column', c, allowed)}" for c in columns if c not in allowed]
    wrong += [
        f"{where}, line {first}: column '{c}' occurs {columns.count(c)} times"
        for c in sorted({c for c in columns if columns.count(c) > 1})
    ]
    wrong += [f"{where}, line {first}: column '{c}' is missing" for c in needed if lines and c not in columns]
    wrong += [
        f"{where}, line {line}: has more cells than there are columns"
        for line, cells in lines[1:]
        if any(cells[len(columns) :])
    ]
    if len(lines) < 2:
        wrong.append(f"{where} has no rows; give a line of column names and a line per {kind}")
    raise_listed(wrong)
    return [(line, {c: cell for c, cell in zip(columns, cells) if cell}) for line, cells in lines[1:]]


def raise_listed(problems: Sequence[str]) -> None:
    """End validation of a table if there are problems; a long list is cut."""
    more = len(problems) - _SHOWN
    raise_problems([*problems[:_SHOWN], *([f"... and {more} more like these"] if more > 0 else [])])


def number(text: str) -> int | float | str:
    """The number in a cell, or its text if it is not a number.

    >>> number("4"), number("4e6"), number("four")
    (4, 4000000.0, 'four')
    """
    kinds: Iterable[type[int] | type[float]] = (int, float)
    for kind in kinds:
        try:
            found = kind(text)
        except ValueError:
            continue
        too_large = abs(found) > _LARGEST and "inf" not in text.lower()  # not an infinity that nobody wrote
        return text if too_large else found
    return text


def _text(path: Path, where: str) -> str:
    """The text of a file; ends validation if it cannot be read."""
    content = b""
    try:
        content = path.read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        problem = f"{where} cannot be read as CSV: {error.strerror}"
    except UnicodeDecodeError as error:
        problem = f"{where}, line {content[: error.start].count(10) + 1}: cannot be read as CSV: not UTF-8 text"
    raise_problems([problem])
    return ""
