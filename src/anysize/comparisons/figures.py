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

WIDTH, HEIGHT = 420, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 40
_ROW = 22  # height of a method's row in the dot plot
_LABEL_WIDTH = 156
_LABEL_SIGNS = 22
COLOURS, MARKS = 8, 4  # with more methods than colours the next ones have the same colours and another mark


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
    """The mark of the method at that place: a disc, a square, a diamond or a triangle."""
    fill = "var(--surface)" if hollow else colour(place)
    look = f'fill="{fill}" stroke="{colour(place)}" stroke-width="1.5"'
    kind, r = place // COLOURS % MARKS, radius
    if kind == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" {look}/>'
    if kind == 1:
        return f'<rect x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r}" height="{2 * r}" {look}/>'
    corners = (
        [(0, -r - 1), (r + 1, 0), (0, r + 1), (-r - 1, 0)] if kind == 2 else [(0, -r - 1), (r + 1, r), (-r - 1, r)]
    )
    return f'<polygon points="{" ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners)}" {look}/>'


def swatch(place: int) -> str:
    """A method's line and mark, for the legend."""
    line = f'<line x1="1" y1="7" x2="23" y2="7" stroke="{colour(place)}" stroke-width="2"/>'
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
    x_of = _scale(min(xs), max(xs), _LEFT + margin, WIDTH - _RIGHT - margin)
    ticks, low, high = _ticks(min(ys), max(ys))
    y_of = _scale(low, high, HEIGHT - _BOTTOM, _TOP)
    parts = [*_y_axis(ticks, y_of, y_text, y_title), _x_title(x_title)]
    if x_ticks is None:
        x_ticks = [(value, f"{value:g}") for value in _ticks(min(xs), max(xs))[0] if min(xs) <= value <= max(xs)]
    for value, text in x_ticks:
        place = x_of(math.log10(value) if log else value)
        parts.append(_text(place, HEIGHT - _BOTTOM + 16, text, "middle"))
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
    ticks, low, high = _ticks(min(ends), max(ends))
    bottom = _TOP + _ROW * len(rows)
    x_of = _scale(low, high, _LABEL_WIDTH, WIDTH - _RIGHT - 6)
    parts = []
    for value in ticks:
        x = x_of(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 16, x_text(value), "middle"))
    if reference is not None and math.isfinite(reference):
        x = x_of(reference)
        parts.append(f'<line class="reference" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>')
    for number, row in enumerate(rows):
        parts += _dots_row(row, _TOP + _ROW * (number + 0.5), x_of)
    parts.append(_text((_LABEL_WIDTH + WIDTH) / 2, bottom + 34, x_title, "middle"))
    return _svg(title, bottom + 42, parts)


def _dots_row(row: Dots, y: float, x_of: Callable[[float], float]) -> list[str]:
    short = row.label if len(row.label) <= _LABEL_SIGNS else row.label[: _LABEL_SIGNS - 1] + "…"
    parts = [
        f'<text class="name" x="{_LABEL_WIDTH - 12}" y="{y + 4:.1f}" text-anchor="end">{html.escape(short)}</text>'
    ]
    if not math.isfinite(row.mean):
        return [*parts, _text(_LABEL_WIDTH + 4, y + 4, "diverged", "start")]
    parts += [
        f'<circle class="seed" cx="{x_of(value):.1f}" cy="{y:.1f}" r="2.5" fill="{colour(row.place)}"/>'
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
            bar = (
                f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}M{x - 3:.1f} {top:.1f}H{x + 3:.1f}M{x - 3:.1f} {bottom:.1f}'
                f'H{x + 3:.1f}" stroke="{colour(line.place)}" stroke-width="1.2" fill="none"/>'
            )
        parts.append(f"<g><title>{html.escape(point.title)}</title>{bar}{mark(line.place, x, y, radius=3.5)}</g>")
    return parts


def _y_axis(
    ticks: Sequence[float], y_of: Callable[[float], float], text: Callable[[float], str], title: str
) -> list[str]:
    parts = []
    for value in ticks:
        y = y_of(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 6, y + 4, text(value), "end"))
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    turned = f'transform="rotate(-90 11 {middle})"'
    return [*parts, f'<text x="11" y="{middle}" text-anchor="middle" {turned}>{html.escape(title)}</text>']


def _x_title(text: str) -> str:
    return _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 6, text, "middle")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="figure" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """The place of a value on an axis; in the middle if all values are the same."""
    if high == low:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _ticks(low: float, high: float, count: int = 5) -> tuple[list[float], float, float]:
    """Round numbers about as many as asked for, and the ends of an axis that holds all values.

    >>> _ticks(0.513, 0.588)
    ([0.52, 0.54, 0.56, 0.58], 0.513, 0.588)
    >>> _ticks(3, 3)[1:]
    (2.5, 3.5)
    """
    if high == low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)], low, high
