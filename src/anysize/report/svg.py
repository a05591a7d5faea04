"""The elements of an SVG figure: scales, round numbers for an axis, text, and marks that differ by more than colour."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

MARKS = ("circle", "square", "diamond", "triangle", "cross", "x", "star", "hexagon")
_SIGN = 6.5  # width of a character of 12 px, on average


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """The place of a value on an axis; in the middle if all values are the same."""
    if high == low:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def round_ticks(low: float, high: float, count: int = 5, whole: bool = False) -> tuple[list[float], float, float]:
    """Round numbers about as many as asked for, and the ends of an axis that holds all values.

    >>> round_ticks(0.513, 0.588)
    ([0.52, 0.54, 0.56, 0.58], 0.513, 0.588)
    >>> round_ticks(3, 3)[1:]
    (2.5, 3.5)
    >>> round_ticks(0, 2, whole=True)[0]
    [0.0, 1.0, 2.0]
    """
    if high == low:
        low, high = low - 0.5, high + 0.5
    rough = max((high - low) / count, 1.0) if whole else (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)], low, high


def text_width(text: str) -> float:
    """About how wide a text of 12 px is."""
    return _SIGN * len(text)


def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "var(--soft)", more: str = "") -> str:
    """A text of 12 px, whose `anchor` (start, middle or end) is at x."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-family="system-ui, sans-serif" font-size="12" '
        f'fill="{colour}"{more}>{html.escape(words)}</text>'
    )


def rule(x1: float, y1: float, x2: float, y2: float, colour: str = "var(--grid)", more: str = "") -> str:
    """A straight line."""
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" fill="none"{more}/>'


def mark(kind: str, x: float, y: float, colour: str, radius: float = 4.0, hollow: bool = False) -> str:
    """A mark of one of `MARKS`."""
    look = f'fill="{"var(--surface)" if hollow else colour}" stroke="{colour}" stroke-width="1.5"'
    r = radius
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:g}" {look}/>'
    if kind == "square":
        return f'<rect x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r:g}" height="{2 * r:g}" {look}/>'
    corners = " ".join(f"{x + a * (r + 1):.1f},{y + b * (r + 1):.1f}" for a, b in _CORNERS[kind])
    return f'<polygon points="{corners}" {look}/>'


def error_bar(x: float, top: float, bottom: float, colour: str) -> str:
    """A vertical bar with a short line at each end."""
    d = f"M{x:.1f} {top:.1f}V{bottom:.1f}M{x - 3:.1f} {top:.1f}H{x + 3:.1f}M{x - 3:.1f} {bottom:.1f}H{x + 3:.1f}"
    return f'<path d="{d}" stroke="{colour}" stroke-width="1.2" fill="none"/>'


def _turned(corners: Sequence[tuple[float, float]], degrees: float) -> list[tuple[float, float]]:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return [(a * cos - b * sin, a * sin + b * cos) for a, b in corners]


def _star(points: int, inner: float) -> list[tuple[float, float]]:
    """The corners of a star, or of a polygon with as many corners if `inner` is 1 and every second one is left out."""
    angles = [math.pi * (number / points - 0.5) for number in range(2 * points)]
    return [
        (math.cos(angle) * (inner if number % 2 else 1), math.sin(angle) * (inner if number % 2 else 1))
        for number, angle in enumerate(angles)
    ]


_PLUS = [(-1, -0.35), (-0.35, -0.35), (-0.35, -1), (0.35, -1), (0.35, -0.35), (1, -0.35)]
_PLUS = [*_PLUS, *((-a, -b) for a, b in _PLUS)]
_CORNERS: dict[str, Sequence[tuple[float, float]]] = {
    "diamond": [(0, -1), (1, 0), (0, 1), (-1, 0)],
    "triangle": [(0, -1), (1, 0.8), (-1, 0.8)],
    "cross": _PLUS,
    "x": _turned(_PLUS, 45),
    "star": _star(5, 0.45),
    "hexagon": _star(6, 1)[::2],
}
