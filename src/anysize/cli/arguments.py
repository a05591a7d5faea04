"""Arguments of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anysize.errors import ConfigError, UsageError, unknown

if TYPE_CHECKING:
    from anysize.devices.budget import Budget

File = Annotated[Path, typer.Argument(help="The experiment file.", show_default=False)]


Directory = Annotated[Path, typer.Argument(help="The run directory.", show_default=False)]


Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the file; repeatable.")
]


Robustness = Annotated[
    float | None,
    typer.Option("--robustness", help="From 0 (accurate) to 1 (robust), for runs trained so.", show_default=False),
]


Best = Annotated[bool, typer.Option("--best", help="The best round, which callbacks.keep_best keeps, not the last.")]


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def whole_number(option: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{option}: '{text}' is not a whole number; write for example 0,1,2")
    return int(text)


def shard_of(text: str | None) -> tuple[int, int] | None:
    """The parts of `I/N`.

    >>> shard_of("2/3")
    (2, 3)
    """
    if text is None:
        return None
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UsageError(f"--shard {text}: write I/N with I from 1 to N, for example 2/2")
    return int(number), int(count)


def budget_of(pairs: Sequence[str]) -> Budget:
    from anysize.devices.budget import Budget

    amounts: dict[str, float] = {}
    for pair in pairs:
        unit, _, text = pair.partition("=")
        if unit not in Budget.__dataclass_fields__:
            raise ConfigError(unknown("unit of a budget", unit, Budget.__dataclass_fields__))
        amounts[unit] = _number(pair, text)
    return Budget(**amounts)


def _number(pair: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--budget {pair}: '{text}' is not a number; write for example inference_bytes=4e6") from None
