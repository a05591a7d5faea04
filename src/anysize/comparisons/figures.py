"""The figures of a comparison as SVG, with error bars; colours are the page's CSS variables.

A figure is narrow, so that its text stays readable on a phone, and scales with its card. Every point has its exact
values as its title.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from anysize.report import svg
from anysize.report.svg import round_ticks, rule, scale, text

WIDTH, HEIGHT = 420, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 40
_ROW = 22  # height of a method's row in the dot plot
_LABEL_WIDTH = 156
_LABEL_SIGNS = 22
COLOURS = 8  # with more methods than colours the next ones have the same colours and another mark


@dataclass(frozen=True)
class Point:
    """One point of a line: where it is, how far its error bar goes, and what its title says."""

    x: float
    y: float
    spread: float | None
    title: str


@dataclass(frozen=True)
class Line:
    """A method's points, from left to right; `place` is its number among the methods, which gives its colour."""

    label: str
    place: int
    points: Sequence[Point]


@dataclass(frozen=True)
class Dots:
    """A row of the dot plot: the mean with its error bar, the value of each seed, and that of the best round."""

    label: str
    place: int
    mean: float
    spread: float | None
    values: Sequence[float]
    best: float
    title: str


def colour(place: int) -> str:
    """The CSS colour of the method at that place.

    >>> colour(1), colour(9)
    ('var(--series-1)', 'var(--series-1)')
    """
    return f"var(--series-{place % COLOURS})"


def mark(place: int, x: float, y: float, hollow: bool = False, radius: float = 4.0) -> str:
    """The mark of the method at that place."""
    kind = svg.MARKS[place // COLOURS % len(svg.MARKS)]
    return svg.mark(kind, x, y, colour(place), radius, hollow)


def swatch(place: int) -> str:
    """A method's line and mark, for the legend."""
    line = rule(1, 7, 23, 7, colour(place), ' stroke-width="2"')
    return f'<svg class="swatch-line" viewBox="0 0 24 14" aria-hidden="true">{line}{mark(place, 12, 7)}</svg>'


def lines(
    title: str,
    drawn: Sequence[Line],
    x_title: str,
    y_title: str,
    y_text: Callable[[float], str],
    x_ticks: Sequence[tuple[float, str]] | None = None,
    log: bool = False,
    apart: bool = False,
) -> str:
    """Lines with error bars.

    Args:
        title: for readers who do not see the figure.
        drawn: the lines.
        x_title: of the horizontal axis.
        y_title: of the vertical axis.
        y_text: how a value is written at the axis.
        x_ticks: places and texts of the horizontal axis; by default round numbers.
        log: whether the horizontal axis is logarithmic.
        apart: whether to move lines a little sideways, so that their error bars do not hide each other.
    """
    points = [point for line in drawn for point in line.points if math.isfinite(point.y)]
    if not points:
        return ""
    xs = [math.log10(point.x) if log else point.x for point in points]
    ys = [value for p in points for value in (p.y - (p.spread or 0.0), p.y + (p.spread or 0.0))]
    margin = 28 if apart else 8
    x_of = scale(min(xs), max(xs), _LEFT + margin, WIDTH - _RIGHT - margin)
    ticks, low, high = round_ticks(min(ys), max(ys))
    y_of = scale(low, high, HEIGHT - _BOTTOM, _TOP)
    parts = [*_y_axis(ticks, y_of, y_text, y_title), _x_title(x_title)]
    if x_ticks is None:
        x_ticks = [(value, f"{value:g}") for value in round_ticks(min(xs), max(xs))[0] if min(xs) <= value <= max(xs)]
    for value, words in x_ticks:
        parts.append(text(x_of(math.log10(value) if log else value), HEIGHT - _BOTTOM + 16, words))
    step = min(4.0, 40.0 / len(drawn)) if apart else 0.0
    for number, line in enumerate(drawn):
        aside = (number - (len(drawn) - 1) / 2) * step
        parts += _line(line, partial(_place, x_of, log, aside), y_of)
    return _svg(title, HEIGHT, parts)


def dots(
    title: str, rows: Sequence[Dots], x_title: str, x_text: Callable[[float], str], reference: float | None
) -> str:
    """A row per method: mean and error bar, a faint dot per seed, a hollow mark for the best round.

    Args:
        title: for readers who do not see the figure.
        rows: the methods, from top to bottom.
        x_title: of the axis.
        x_text: how a value is written at the axis.
        reference: where the baseline's mean is, as a line; None: nowhere.
    """
    finite = [row for row in rows if math.isfinite(row.mean)]
    if not finite:
        return ""
    ends = [value for row in finite for value in (row.mean - (row.spread or 0.0), row.mean + (row.spread or 0.0))]
    ends += [value for row in finite for value in (*row.values, row.best) if math.isfinite(value)]
    ticks, low, high = round_ticks(min(ends), max(ends))
    bottom = _TOP + _ROW * len(rows)
    x_of = scale(low, high, _LABEL_WIDTH, WIDTH - _RIGHT - 6)
    parts = []
    for value in ticks:
        x = x_of(value)
        parts += [rule(x, _TOP, x, bottom), text(x, bottom + 16, x_text(value))]
    if reference is not None and math.isfinite(reference):
        x = x_of(reference)
        parts.append(rule(x, _TOP, x, bottom, "var(--soft)", ' stroke-dasharray="4 3"'))
    for number, row in enumerate(rows):
        parts += _dots_row(row, _TOP + _ROW * (number + 0.5), x_of)
    parts.append(text((_LABEL_WIDTH + WIDTH) / 2, bottom + 34, x_title))
    return _svg(title, bottom + 42, parts)


def _dots_row(row: Dots, y: float, x_of: Callable[[float], float]) -> list[str]:
    short = row.label if len(row.label) <= _LABEL_SIGNS else row.label[: _LABEL_SIGNS - 1] + "…"
    parts = [text(_LABEL_WIDTH - 12, y + 4, short, "end", "var(--ink)")]
    if not math.isfinite(row.mean):
        return [*parts, text(_LABEL_WIDTH + 4, y + 4, "diverged", "start")]
    parts += [
        f'<circle opacity="0.4" cx="{x_of(value):.1f}" cy="{y:.1f}" r="2.5" fill="{colour(row.place)}"/>'
        for value in row.values
        if math.isfinite(value)
    ]
    if row.spread:
        left, right = x_of(row.mean - row.spread), x_of(row.mean + row.spread)
        parts.append(
            f'<path d="M{left:.1f} {y:.1f}H{right:.1f}M{left:.1f} {y - 4:.1f}V{y + 4:.1f}M{right:.1f} {y - 4:.1f}'
            f'V{y + 4:.1f}" stroke="{colour(row.place)}" stroke-width="1.5" fill="none"/>'
        )
    if math.isfinite(row.best):
        parts.append(mark(row.place, x_of(row.best), y, hollow=True, radius=3.5))
    parts.append(mark(row.place, x_of(row.mean), y, radius=4.5))
    return [f"<g><title>{html.escape(row.title)}</title>{''.join(parts)}</g>"]


def _place(x_of: Callable[[float], float], log: bool, aside: float, value: float) -> float:
    return x_of(math.log10(value) if log else value) + aside


def _line(line: Line, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> list[str]:
    places = [(x_of(p.x), y_of(p.y), p) for p in line.points if math.isfinite(p.y)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    dash = ' stroke-dasharray="5 3"' if line.place // COLOURS % 2 else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour(line.place)}" stroke-width="2"{dash}/>']
    for x, y, point in places:
        bar = ""
        if point.spread:
            top, bottom = y_of(point.y + point.spread), y_of(point.y - point.spread)
            bar = svg.error_bar(x, top, bottom, colour(line.place))
        parts.append(f"<g><title>{html.escape(point.title)}</title>{bar}{mark(line.place, x, y, radius=3.5)}</g>")
    return parts


def _y_axis(
    ticks: Sequence[float], y_of: Callable[[float], float], written: Callable[[float], str], title: str
) -> list[str]:
    parts = []
    for value in ticks:
        y = y_of(value)
        parts += [rule(_LEFT, y, WIDTH - _RIGHT, y), text(_LEFT - 6, y + 4, written(value), "end")]
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    return [*parts, text(11, middle, title, more=f' transform="rotate(-90 11 {middle})"')]


def _x_title(words: str) -> str:
    return text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 6, words)


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="figure" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(title)}">'
        f"{''.join(parts)}</svg>"
    )
