"""Budgets that change from round to round: the tables [[devices.budgets]], and the CSV file that becomes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from anysize.config.rows import Row, number, raise_listed, read_rows
from anysize.config.table import Table
from anysize.config.values import UNITS, Count, Name, ascending, not_empty

_KEY = "devices.budgets"

Limits = Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=True)], ...], Field(strict=False)]


class TraceConfig(Table):
    """The budgets of a device group, or of one client, that change from round to round; for simulations.

    A round that is not named has the budget of the last one that is; before the first, the group's own.

    >>> TraceConfig(group="board", rounds=[1, 10], macs=[4e6, 1e6]).macs
    (4000000.0, 1000000.0)
    """

    table: ClassVar[str] = _KEY
    group: Name | None = None
    """The device group whose budget this is."""
    client: Annotated[int, Field(ge=0)] | None = None
    """The client whose budget this is, in place of a group: 0, 1, ... It counts before that of the client's group."""
    rounds: Annotated[tuple[Count, ...], Field(strict=False), AfterValidator(not_empty), AfterValidator(ascending)]
    """From which rounds on there is another budget."""
    parameters: Limits | None = None
    """The limits of this unit, one for each of `rounds`; inf where it is not limited."""
    macs: Limits | None = None
    """As `parameters`."""
    training_macs: Limits | None = None
    """As `parameters`."""
    activation_bytes: Limits | None = None
    """As `parameters`."""
    memory_bytes: Limits | None = None
    """As `parameters`."""
    bytes: Limits | None = None
    """As `parameters`."""
    inference_bytes: Limits | None = None
    """As `parameters`."""
    latency_ms: Limits | None = None
    """As `parameters`."""
    nonzero_macs: Limits | None = None
    """As `parameters`."""
    _place: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.group is None) == (self.client is None):
            raise ValueError("must name either a group or a client")
        short = [unit for unit, limits in self.limits.items() if len(limits) != len(self.rounds)]
        if short:
            raise ValueError(f"must have a limit for each of the {len(self.rounds)} rounds; {', '.join(short)} differs")
        free = [r for place, r in enumerate(self.rounds) if not self.budget(place)]
        if free:
            raise ValueError(f"must limit at least one of {', '.join(UNITS)} in every round; round {free[0]} has none")
        return self

    @property
    def limits(self) -> dict[str, tuple[float, ...]]:
        """The limits of each unit that is limited in some round."""
        return {unit: limits for unit in UNITS if (limits := getattr(self, unit)) is not None}

    def budget(self, place: int) -> dict[str, float]:
        """The limits from one of the named rounds on, by unit."""
        return {unit: limits[place] for unit, limits in self.limits.items() if math.isfinite(limits[place])}

    @property
    def holder(self) -> str | int:
        """The group's name, or the client."""
        found = self.client if self.group is None else self.group
        assert found is not None
        return found

    def where(self, place: int) -> str:
        """Where the user finds this table, which is at some place among its like: a line of the file, or its key."""
        return self._place or f"{_KEY}[{place}]"


def read_traces(path: Path) -> list[TraceConfig]:
    """The traces in a CSV file: a line for each round in which a group's or a client's budget changes.

    The columns are `round`, `group` or `client` or both, and units of a budget; an empty cell does not limit its unit.
    """
    rows = read_rows(path, _KEY, ("round", "group", "client", *UNITS), ("round",), "round and group")
    problems: list[str] = []
    found: dict[str | int, dict[int, Row]] = {}
    for line, row in rows:
        where = f"{_KEY}: {path}, line {line}"
        wrong = list(_row_problems(row))
        problems += [f"{where}: {problem}" for problem in wrong]
        if wrong:
            continue
        holder = row["group"] if "group" in row else int(row["client"])
        own, named = found.setdefault(holder, {}), int(row["round"])
        if named in own:
            problems.append(f"{where}: gives another budget for round {named}, which line {own[named][0]} gave")
        own[named] = line, row
    raise_listed(problems)
    return [_trace(holder, own, path) for holder, own in found.items()]


def _row_problems(row: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with a row by itself."""
    named = number(row.get("round", ""))
    if not isinstance(named, int) or named < 1:
        yield f"round: given '{row.get('round', '')}', must be an integer, 1 or more"
    if ("group" in row) == ("client" in row):
        yield "must name either a group or a client"
    client = number(row.get("client", "0"))
    if not isinstance(client, int) or client < 0:
        yield f"client: given '{row['client']}', must be an integer, 0 or more"
    limits = {unit: number(row[unit]) for unit in UNITS if unit in row}
    for unit, limit in limits.items():
        if isinstance(limit, str) or not limit > 0:
            yield f"{unit}: given '{row[unit]}', must be a number above 0"
    if all(limit == math.inf for limit in limits.values()):
        yield f"must limit at least one of {', '.join(UNITS)}"


def _trace(holder: str | int, rows: Mapping[int, Row], path: Path) -> TraceConfig:
    """The trace of one group or client, from its valid rows by round."""
    rounds = tuple(sorted(rows))
    named = [unit for unit in UNITS if any(unit in row for _, row in rows.values())]
    limits: dict[str, Any] = {unit: [float(rows[r][1].get(unit, math.inf)) for r in rounds] for unit in named}
    who: dict[str, Any] = {"group": holder} if isinstance(holder, str) else {"client": holder}
    made = TraceConfig(**who, rounds=rounds, **limits)
    made._place = f"{_KEY}: {path}, line {min(line for line, _ in rows.values())}"
    return made
