"""What a figure shows, as plain data: lines, bars, boxes or a heat map, their axes and their colours.

Colours are names of CSS variables, so that one drawing serves light and dark screens and paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from anysize.report.record import Number, Record
from anysize.report.svg import MARKS
from anysize.report.tables import Row, count, csv_text

Values = tuple[Number | None, ...]
Look = tuple[str, str]  # a colour and a mark

ACCENT: Look = ("var(--accent)", "circle")
SERIES: tuple[Look, ...] = tuple((f"var(--series-{index})", mark) for index, mark in enumerate(MARKS))
"""Colours and marks of lines that are not sizes."""


def plain(value: float) -> str:
    """A number at an axis.

    >>> plain(0.25), plain(1000.0), plain(250000).replace("\N{NARROW NO-BREAK SPACE}", " ")
    ('0.25', '1000', '250 K')
    """
    return f"{value:g}" if abs(value) < 1e5 else count(value)


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        title: what is measured.
        show: how a tick is written.
        exact: how the value of a point is written; None: as a tick.
        log: whether it is logarithmic.
        from_zero: whether it begins at zero.
        whole: whether ticks are at whole numbers only.
        ticks: places and texts of the ticks; None: round numbers.
        names: what the places 0, 1, ... are called; None: they are numbers.
    """

    title: str
    show: Callable[[float], str] = plain
    exact: Callable[[float], str] | None = None
    log: bool = False
    from_zero: bool = False
    whole: bool = False
    ticks: tuple[tuple[float, str], ...] | None = None
    names: tuple[str, ...] | None = None

    def written(self, value: float) -> str:
        """A point's value in words: the name of its place, or its number."""
        if self.names is not None:
            return self.names[round(value)]
        return (self.exact or self.show)(value)


@dataclass(frozen=True)
class Series:
    """Points of one name.

    Attributes:
        name: in the legend.
        x: where they are.
        y: their values; None leaves a gap.
        look: colour and mark.
        spread: half the height of each point's error bar, or of the band around a line.
        labels: a text beside each point.
        looks: a look for each point, where they differ.
        joined: whether a line joins them.
        marked: whether they have marks.
        hollow: whether bars are drawn as outlines.
    """

    name: str
    x: Values
    y: Values
    look: Look
    spread: Values = ()
    labels: tuple[str, ...] = ()
    looks: tuple[Look, ...] = ()
    joined: bool = True
    marked: bool = True
    hollow: bool = False

    def look_at(self, place: int) -> Look:
        """The look of one of the points."""
        return self.looks[place] if self.looks else self.look


@dataclass(frozen=True)
class Lines:
    """Lines or points; `together` shows all series at one x when the reader points there, else the nearest point."""

    series: tuple[Series, ...]
    x: Axis
    y: Axis
    legend: str = "size"
    together: bool = True


@dataclass(frozen=True)
class Bars:
    """Bars from zero, next to each other or stacked."""

    series: tuple[Series, ...]
    x: Axis
    y: Axis
    legend: str = "size"
    stacked: bool = False


@dataclass(frozen=True)
class Box:
    """The values of one group, the name of each, and the group's colour."""

    name: str
    values: tuple[Number, ...]
    titles: tuple[str, ...]
    colour: str


@dataclass(frozen=True)
class Boxes:
    """A box per group, with a point per value, or with the outlying ones only."""

    boxes: tuple[Box, ...]
    title: str
    y: Axis
    all_points: bool = True


@dataclass(frozen=True)
class HeatMap:
    """A matrix of values, rows from top to bottom; `gaps` draws thin lines between the cells."""

    z: tuple[Values, ...]
    x: Axis
    y: Axis
    unit: str = ""
    from_zero: bool = False
    gaps: bool = False


Chart = Lines | Bars | Boxes | HeatMap


@dataclass(frozen=True)
class Figure:
    """One figure: its exact values (`keys`, `rows`), what it shows in words, and how it is drawn."""

    name: str
    section: str
    title: str
    caption: str
    keys: tuple[str, ...]
    rows: tuple[Row, ...]
    chart: Chart
    height: int = 300
    wide: bool = False

    @property
    def csv(self) -> str:
        """The exact values, with one line of keys."""
        return csv_text(self.keys, self.rows)


MANY_POINTS = 40  # with more, marks would hide the line


def line(
    name: str, x: Sequence[Number | None], y: Sequence[Number | None], look: Look, spread: Sequence[Number | None] = ()
) -> Series:
    """A line through the points, with marks if they are few."""
    values = tuple(finite(value) for value in y)
    return Series(name, tuple(x), values, look, tuple(map(finite, spread)), marked=len(x) <= MANY_POINTS)


def heat_map(z: Sequence[Sequence[Number | None]], x: Axis, y: Axis, unit: str = "") -> HeatMap:
    """A heat map of the values, darker for larger ones."""
    return HeatMap(tuple(tuple(finite(value) for value in row) for row in z), x, y, unit)


def colour(record: Record, label: str | None) -> str:
    """The CSS variable with a size's colour: the same size has the same colour everywhere."""
    return f"var(--size-{record.labels.index(label)})" if label in record.labels else ACCENT[0]


def look(record: Record, label: str | None) -> Look:
    """A size's colour and mark, so that sizes differ by more than colour."""
    place = record.labels.index(label) if label in record.labels else 0
    return colour(record, label), MARKS[place % len(MARKS)]


def looks(record: Record, names: Sequence[str]) -> list[Look]:
    """Colours and marks of lines: those of the sizes where all of them are sizes, else those of other series."""
    if all(name in record.labels for name in names):
        return [look(record, name) for name in names]
    return [SERIES[index % len(SERIES)] for index in range(len(names))]


def round_axis() -> Axis:
    """An axis of rounds: whole numbers only, from zero on."""
    return Axis("round", from_zero=True, whole=True, exact=lambda value: f"round {value:g}")


def finite(value: Number | None) -> Number | None:
    """The value, or None (a gap in the curve) if it is not finite."""
    return value if value is not None and isfinite(value) else None


def capital(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def shortened(text: str) -> str:
    """The text, cut if it is too long for a point's label or an axis."""
    return text if len(text) <= 18 else text[:17] + "…"
