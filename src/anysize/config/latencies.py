"""How long a training step takes on a device: [devices.groups.latencies], and the CSV file that becomes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, ValidationInfo, model_validator

from anysize.config.rows import Row, number, raise_listed, read_rows
from anysize.config.table import Table, raise_problems
from anysize.config.values import Count, Name, Part, Positive

_KEY = "devices.groups.latencies"
_ALIKE = ("method", "network", "batch_size")  # the same in every row
COLUMNS = ("width", "depth", "latency_ms", *_ALIKE)
"""The columns of the file; `depth` is empty where no blocks are removed."""


class LatenciesConfig(Table):
    """How long a training step of each size takes on a device of the group, as `anysize join --measure` measured it.

    >>> LatenciesConfig(method="elf", network="5f3a", batch_size=32, widths=[1.0], depths=[2], latency_ms=[8.5]).depths
    (2,)
    """

    table: ClassVar[str] = _KEY
    method: Name
    """The method that trained."""
    network: Name
    """A checksum of the operations of the full network: other networks take other times."""
    batch_size: Count
    """How many samples a step had."""
    widths: Annotated[tuple[Part, ...], Field(strict=False)]
    """The width of every size that was timed."""
    depths: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)]
    """How many blocks of every stage it had; 0: all."""
    latency_ms: Annotated[tuple[Positive, ...], Field(strict=False)]
    """The milliseconds of a training step of it."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any, info: ValidationInfo) -> Any:
        """Read the file, if its name is given."""
        folder = (info.context or {}).get("folder") or Path()
        return read_latencies(folder / given) if isinstance(given, str) else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not len(self.widths) == len(self.depths) == len(self.latency_ms) > 0:
            raise ValueError("must have as many widths as depths and latency_ms, at least one")
        return self


def read_latencies(path: Path) -> dict[str, Any]:
    """The table that a CSV file describes."""
    needed = [column for column in COLUMNS if column != "depth"]
    rows = read_rows(path, _KEY, COLUMNS, needed, "size")
    raise_listed([f"{_KEY}: {path}, line {line}: {problem}" for line, row in rows for problem in _row_problems(row)])
    alike = {column: sorted({row[column] for _, row in rows}) for column in _ALIKE}
    raise_problems(
        f"{_KEY}: {path}: rows differ in {column} ({', '.join(values)}); measure all sizes together"
        for column, values in alike.items()
        if len(values) > 1
    )
    return _table(rows)


def _row_problems(row: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with a row by itself."""
    yield from (f"{column} is empty" for column in COLUMNS if column != "depth" and column not in row)
    width, time = number(row.get("width", "1")), number(row.get("latency_ms", "1"))
    if isinstance(width, str) or not 0 < width <= 1:
        yield f"width: given '{row['width']}', must be a number above 0 and at most 1"
    if isinstance(time, str) or not 0 < time < float("inf"):
        yield f"latency_ms: given '{row['latency_ms']}', must be a number above 0"
    for column in ("depth", "batch_size"):
        count = number(row.get(column, "1"))
        if not isinstance(count, int) or count < 1:
            yield f"{column}: given '{row[column]}', must be an integer, 1 or more"


def _table(rows: list[Row]) -> dict[str, Any]:
    first = rows[0][1]
    return {
        "method": first["method"],
        "network": first["network"],
        "batch_size": int(first["batch_size"]),
        "widths": [float(row["width"]) for _, row in rows],
        "depths": [int(row.get("depth", 0)) for _, row in rows],
        "latency_ms": [float(row["latency_ms"]) for _, row in rows],
    }
