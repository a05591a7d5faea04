"""A chart as SVG of a given width, and the words that a reader sees who points at it."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, log10
from typing import Any

import numpy as np

from anysize.report.charts import Axis, Bars, Box, Boxes, Chart, Figure, HeatMap, Lines, Series, shortened
from anysize.report.colours import HEAT_LEVELS
from anysize.report.record import Number
from anysize.report.svg import error_bar, mark, round_ticks, rule, scale, text, text_width

_LEGEND_ROW = 20
_SWATCH = 26
_PADDING = 8  # between the outermost points and the ends of the axes
_TURN = 35  # degrees, of names that are wider than their place
_GOLDEN = 0.618034

Tick = tuple[float, str]


@dataclass(frozen=True)
class _Frame:
    """Where the plot is, and where a value of each axis is drawn; x0 and y0 are the places of the smallest values."""

    x0: float
    x1: float
    y0: float
    y1: float
    x_of: Callable[[float], float]
    y_of: Callable[[float], float]


def draw(figure: Figure, width: int, look: str = "figure") -> str:
    """The figure as an SVG element of that width; text has 12 px if it is shown so wide."""
    chart = figure.chart
    head = 6.0
    parts: list[str] = []
    if not isinstance(chart, Boxes | HeatMap):
        legend, head = _legend(chart, width)
        parts += legend
    height = figure.height + head - 6
    drawn, frame = _map(chart, width, height) if isinstance(chart, HeatMap) else _plot(chart, width, height, head)
    area = f"{frame.x0:.1f} {frame.y1:.1f} {frame.x1:.1f} {frame.y0:.1f}"
    return (
        f'<svg class="{look}" viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{html.escape(figure.title)}" '
        f'data-area="{area}">{"".join([*parts, *drawn])}</svg>'
    )


def standalone(svg: str, colours: Mapping[str, str]) -> str:
    """The drawing as a file of its own, with the colours written out.

    >>> standalone('<svg class="figure" viewBox="0 0 9 5"><path stroke="var(--line)"/></svg>', {"line": "#123456"})
    '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="5" viewBox="0 0 9 5"><path stroke="#123456"/></svg>\\n'
    """
    resolved = re.sub(r"var\(--([a-z0-9-]+)\)", lambda found: colours[found[1]], svg)
    width, height = re.findall(r'viewBox="0 0 (\d+) (\d+)"', svg)[0]
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    return re.sub(r'^<svg class="[^"]*"', opening, resolved) + "\n"


def pointed_at(chart: Chart) -> dict[str, Any]:
    """What a reader sees who points somewhere: texts with their places, as fractions of the axes from left and top.

    A place without a height stands for everything above it. A heat map gives its cells instead.
    """
    if isinstance(chart, HeatMap):
        rows = [[None if value is None else f"{value:.4g}" for value in row] for row in chart.z]
        x, y = chart.x, chart.y
        across = [f"{x.title} {x.written(place)}" for place in range(len(rows[0]) if rows else 0)]
        down = [f"{y.title} {y.written(place)}" for place in range(len(rows))]
        return {"cells": rows, "x": across, "y": down, "unit": chart.unit}
    (x_low, x_high), (y_low, y_high) = _ends(chart)
    x_of, y_of = scale(x_low, x_high, 0, 1), scale(y_low, y_high, 1, 0)
    at = _logarithm(chart)
    points: list[tuple[float, float | None, str]]
    if isinstance(chart, Boxes):
        points = [
            (x_of(x), y_of(value), f"{title}: {chart.y.written(value)}")
            for place, box in enumerate(chart.boxes)
            for x, value, title in _box_points(box, place)
        ]
    elif isinstance(chart, Lines) and not chart.together:
        points = [
            (x_of(at(x)), y_of(y), _point_words(chart, series, place, x, y))
            for series in chart.series
            for place, x, y in _known(series)
        ]
    else:
        points = [(x_of(at(x)), None, words) for x, words in _by_place(chart)]
    return {"points": [[round(x, 4), None if y is None else round(y, 4), words] for x, y, words in points]}


def _point_words(chart: Lines, series: Series, place: int, x: Number, y: Number) -> str:
    name = series.name or (series.labels[place] if series.labels else "")
    values = [f"{chart.y.title} {chart.y.written(y)}", f"{chart.x.title} {chart.x.written(x)}"]
    return "\n".join([*([name] if name else []), *values])


def _by_place(chart: Lines | Bars) -> Iterator[tuple[Number, str]]:
    """Every place of the horizontal axis, with the values of all series there."""
    rows: dict[Number, list[str]] = {}
    for series in chart.series:
        for place, x, y in _known(series):
            spread = series.spread[place] if series.spread else None
            around = "" if spread is None else f" ± {chart.y.written(spread)}"
            name = f"{series.name}: " if series.name else ""
            rows.setdefault(x, []).append(f"{name}{chart.y.written(y)}{around}")
    for x in sorted(rows):
        yield x, "\n".join([chart.x.written(x), *rows[x]])


def _known(series: Series) -> Iterator[tuple[int, Number, Number]]:
    """The points that have both coordinates, with their number in the series."""
    for place, (x, y) in enumerate(zip(series.x, series.y)):
        if x is not None and y is not None:
            yield place, x, y


def _logarithm(chart: Lines | Bars | Boxes) -> Callable[[float], float]:
    return (lambda value: log10(value)) if isinstance(chart, Lines) and chart.x.log else (lambda value: value)


def _ends(chart: Lines | Bars | Boxes) -> tuple[tuple[float, float], tuple[float, float]]:
    """The smallest and the largest value of each axis; of a logarithmic axis, their logarithms."""
    if isinstance(chart, Boxes):
        values = [float(value) for box in chart.boxes for value in box.values]
        return (-0.5, len(chart.boxes) - 0.5), _span(values, chart.y)
    at = _logarithm(chart)
    known = [(place, x, y, series) for series in chart.series for place, x, y in _known(series)]
    xs = [at(x) for _, x, _, _ in known]
    spreads = [(s.spread[place] or 0.0) if s.spread else 0.0 for place, _, _, s in known]
    ys = [value for (_, _, y, _), spread in zip(known, spreads) for value in (y - spread, y + spread)]
    if isinstance(chart, Bars):
        half = _step(chart) / 2
        ends = (min(xs, default=0.0) - half, max(xs, default=0.0) + half)
        tops = [*_stacked(chart).values()] if chart.stacked else ys
        return (_named(chart.x) or ends), _span([0.0, *tops], chart.y)
    return (_named(chart.x) or _span(xs, chart.x)), _span(ys, chart.y)


def _named(axis: Axis) -> tuple[float, float] | None:
    return None if axis.names is None else (-0.5, len(axis.names) - 0.5)


def _span(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low = min(0.0, *values) if axis.from_zero else min(values)
    high = max(values)
    if low < high:
        return low, high
    around = abs(low) * 0.1 or 0.5
    return low - around, high + around


def _step(chart: Bars) -> float:
    """The smallest distance between two places with bars."""
    places = sorted({x for series in chart.series for _, x, _ in _known(series)})
    return min((b - a for a, b in pairwise(places)), default=1.0)


def _stacked(chart: Bars) -> dict[Number, float]:
    heights: dict[Number, float] = {}
    for series in chart.series:
        for _, x, y in _known(series):
            heights[x] = heights.get(x, 0.0) + y
    return heights


def _legend(chart: Lines | Bars, width: int) -> tuple[list[str], float]:
    """The legend in as many rows as it needs, and where it ends; nothing for a single series."""
    if len(chart.series) < 2:
        return [], 6.0
    parts, x, y = [], 2.0, 14.0
    if chart.legend:
        parts.append(text(x, y, chart.legend, "start"))
        x += text_width(chart.legend) + 12
    for series in chart.series:
        name = series.name if len(series.name) <= 40 else series.name[:39] + "…"
        needed = _SWATCH + text_width(name) + 16
        if x > 2.0 and x + needed > width:
            x, y = 2.0, y + _LEGEND_ROW
        parts += [*_swatch(chart, series, x, y - 4), text(x + _SWATCH, y, name, "start", "var(--ink)")]
        x += needed
    return parts, y + 12


def _swatch(chart: Lines | Bars, series: Series, x: float, y: float) -> list[str]:
    colour, kind = series.look
    if isinstance(chart, Bars):
        fill = "none" if series.hollow else colour
        return [f'<rect x="{x + 4:.1f}" y="{y - 5:.1f}" width="14" height="10" fill="{fill}" stroke="{colour}"/>']
    joined = [rule(x, y, x + 20, y, colour, ' stroke-width="2"')] if series.joined else []
    return [*joined, *([mark(kind, x + 10, y, colour, 3.5)] if series.marked else [])]


def _plot(chart: Lines | Bars | Boxes, width: int, height: float, head: float) -> tuple[list[str], _Frame]:
    """Axes and what stands between them."""
    x_axis = Axis(chart.title, names=tuple(b.name for b in chart.boxes)) if isinstance(chart, Boxes) else chart.x
    (x_low, x_high), (y_low, y_high) = _ends(chart)
    y_ticks = _ticks(chart.y, y_low, y_high, int((height - head) / 50))
    left = 24 + max((text_width(words) for _, words in y_ticks), default=0.0) + 6
    padding = 0 if isinstance(chart, Bars | Boxes) or x_axis.names is not None else _PADDING
    across = _ticks(x_axis, x_low, x_high, int((width - left) / 70))
    right = max(10.0, text_width(across[-1][1]) / 2 - padding) if across and x_axis.names is None else 10.0
    x0, x1 = left + padding, width - right - padding
    x_of = scale(x_low, x_high, x0, x1)
    turned = x_axis.names is not None and any(text_width(words) > (x1 - x0) / len(across) for _, words in across)
    foot = 42 + (max(text_width(words) for _, words in across) * 0.57 if turned else 0)
    labelled = isinstance(chart, Lines) and any(series.labels for series in chart.series)
    y0, y1 = height - foot, head + (18 if labelled else 6)
    y_of = scale(y_low, y_high, y0 - (0 if y_low == 0 else _PADDING / 2), y1)
    frame = _Frame(x0, x1, y_of(y_low), y1, x_of, y_of)
    middle = (y0 + y1) / 2
    parts = [
        *(rule(left, y_of(value), width - right, y_of(value)) for value, _ in y_ticks),
        *(text(left - 6, y_of(value) + 4, words, "end") for value, words in y_ticks),
        text(12, middle, chart.y.title, more=f' transform="rotate(-90 12 {middle:.1f})"'),
        *_x_ticks(across, x_of, y0 + 17, turned),
        text((left + width - right) / 2, height - 6, x_axis.title),
    ]
    if isinstance(chart, Boxes):
        drawn = [part for place, box in enumerate(chart.boxes) for part in _box(chart, box, place, frame)]
    elif isinstance(chart, Bars):
        drawn = _bars(chart, frame)
    else:
        bands = [_band(chart, series, frame) for series in chart.series if _banded(chart, series)]
        drawn = [*bands, *(part for series in chart.series for part in _series(chart, series, frame))]
    return [*parts, *drawn], frame


def _ticks(axis: Axis, low: float, high: float, count: int) -> list[Tick]:
    """Places and texts; on a logarithmic axis the places are logarithms."""
    if axis.names is not None:
        return [(float(place), shortened(name)) for place, name in enumerate(axis.names)]
    if axis.ticks is not None:
        return [(log10(value) if axis.log else value, words) for value, words in axis.ticks]
    return [(value, axis.show(value)) for value in round_ticks(low, high, max(count, 2), axis.whole)[0]]


def _x_ticks(ticks: Sequence[Tick], x_of: Callable[[float], float], y: float, turned: bool) -> list[str]:
    if not turned:
        return [text(x_of(value), y, words) for value, words in _fitting(ticks, x_of)]
    room = abs(x_of(1) - x_of(0))
    each = max(1, -(-14 // max(int(room), 1)))
    return [
        text(
            x_of(value) + 4,
            y - 3,
            words,
            "end",
            more=f' transform="rotate(-{_TURN} {x_of(value) + 4:.1f} {y - 3:.1f})"',
        )
        for value, words in ticks[::each]
    ]


def _fitting(ticks: Sequence[Tick], x_of: Callable[[float], float]) -> list[Tick]:
    """The first tick, the last, and as many between them as do not run into each other."""
    ordered = sorted(ticks)
    if len(ordered) < 2:
        return ordered

    def apart(a: Tick, b: Tick) -> bool:
        return x_of(b[0]) - x_of(a[0]) > (text_width(a[1]) + text_width(b[1])) / 2 + 8

    kept = [ordered[0]]
    for tick in ordered[1:-1]:
        if apart(kept[-1], tick) and apart(tick, ordered[-1]):
            kept.append(tick)
    return [*kept, ordered[-1]] if apart(kept[-1], ordered[-1]) else kept


def _series(chart: Lines, series: Series, frame: _Frame) -> list[str]:
    """A line with its error bars, its marks and its labels."""
    at, (colour, _) = _logarithm(chart), series.look
    points = [(place, frame.x_of(at(x)), y) for place, x, y in _known(series)]
    parts, bars = [], not _banded(chart, series)
    if series.joined:
        drawn = {place: f"{x:.1f} {frame.y_of(y):.1f}" for place, x, y in points}
        path = " ".join(f"{'L' if place - 1 in drawn else 'M'}{words}" for place, words in drawn.items())
        stroke = "var(--line)" if series.looks else colour
        parts.append(f'<path d="{path}" stroke="{stroke}" stroke-width="2" fill="none" stroke-linejoin="round"/>')
    for place, x, value in points:
        own, kind = series.look_at(place)
        y = frame.y_of(value)
        spread = series.spread[place] if series.spread and bars else None
        if spread:
            parts.append(error_bar(x, frame.y_of(value + spread), frame.y_of(value - spread), own))
        if series.marked or len(points) == 1:
            parts.append(mark(kind, x, y, own, 5 if series.looks else 4))
        if series.labels:
            anchor = "end" if x > frame.x1 - 20 else "start" if x < frame.x0 + 20 else "middle"
            parts.append(text(x, y - 10, series.labels[place], anchor))
    return parts


def _banded(chart: Lines, series: Series) -> bool:
    """Whether the spread of a series is a band around its line, not a bar at each point."""
    return bool(series.spread) and series.joined and chart.x.names is None and len(series.x) > 1


def _band(chart: Lines, series: Series, frame: _Frame) -> str:
    at = _logarithm(chart)
    points = [(frame.x_of(at(x)), y, series.spread[place] or 0.0) for place, x, y in _known(series)]
    upper = [f"{x:.1f} {frame.y_of(y + spread):.1f}" for x, y, spread in points]
    lower = [f"{x:.1f} {frame.y_of(y - spread):.1f}" for x, y, spread in points]
    outline = " L".join([*upper, *reversed(lower)])
    return f'<path class="band" d="M{outline}Z" fill="{series.look[0]}" fill-opacity="0.1"/>' if points else ""


def _bars(chart: Bars, frame: _Frame) -> list[str]:
    room = (frame.x_of(_step(chart)) - frame.x_of(0.0)) * 0.82
    width = room if chart.stacked else room / len(chart.series)
    reached: dict[Number, float] = {}
    parts = []
    for number, series in enumerate(chart.series):
        for place, x, y in _known(series):
            colour = series.look_at(place)[0]
            below = reached.get(x, 0.0) if chart.stacked else 0.0
            reached[x] = below + y
            left = frame.x_of(x) - room / 2 + (0 if chart.stacked else number * width)
            top, bottom = sorted((frame.y_of(below), frame.y_of(below + y)))
            fill = f'fill="none" stroke="{colour}" stroke-width="1.5"' if series.hollow else f'fill="{colour}"'
            size = f'width="{max(width - 1, 0.5):.1f}" height="{bottom - top:.1f}"'
            parts.append(f'<rect x="{left:.1f}" y="{top:.1f}" {size} {fill}/>')
    return parts


def _box_points(box: Box, place: int) -> Iterator[tuple[float, Number, str]]:
    """The places of a box's points: side by side, so that equal values do not hide each other."""
    for number, (value, title) in enumerate(zip(box.values, box.titles)):
        yield place + 0.24 * ((number * _GOLDEN) % 1 - 0.5), value, title


def _box(chart: Boxes, box: Box, place: int, frame: _Frame) -> list[str]:
    """The middle half of the values with their median, lines to the last values that are not far out, and points."""
    if not box.values:
        return []
    low, middle, high = (float(q) for q in np.percentile(box.values, [25, 50, 75]))
    near = [value for value in box.values if low - 1.5 * (high - low) <= value <= high + 1.5 * (high - low)]
    half = min((frame.x_of(1) - frame.x_of(0)) * 0.3, 60)
    x, colour = frame.x_of(place), box.colour
    y_low, y_middle, y_high = frame.y_of(low), frame.y_of(middle), frame.y_of(high)
    y_least, y_most = frame.y_of(min(near)), frame.y_of(max(near))
    outline = (
        f"M{x - half:.1f} {y_high:.1f}H{x + half:.1f}V{y_low:.1f}H{x - half:.1f}Z"
        f"M{x - half:.1f} {y_middle:.1f}H{x + half:.1f}"
        f"M{x:.1f} {y_low:.1f}V{y_least:.1f}M{x:.1f} {y_high:.1f}V{y_most:.1f}"
    )
    far = set(box.values) - set(near)
    points = [
        f'<circle cx="{frame.x_of(at):.1f}" cy="{frame.y_of(value):.1f}" r="2.5" fill="{colour}" fill-opacity="0.75"/>'
        for at, value, _ in _box_points(box, place)
        if chart.all_points or value in far
    ]
    return [f'<path d="{outline}" stroke="{colour}" stroke-width="1.5" fill="none"/>', *points]


def _map(chart: HeatMap, width: int, height: float) -> tuple[list[str], _Frame]:
    """A heat map with its scale of colours at the right."""
    rows, columns = len(chart.z), len(chart.z[0]) if chart.z else 0
    known = [value for row in chart.z for value in row if value is not None and isfinite(value)]
    low, high = min([0.0] * chart.from_zero + known, default=0.0), max(known, default=1.0)
    down = _ticks(chart.y, 0, rows - 1, max(int(height / 40), 2)) if rows > 1 else [(0.0, chart.y.written(0))]
    left = 24 + max((text_width(words) for _, words in down), default=0.0) + 6
    scale_texts = [f"{low:.3g}", f"{high:.3g}", chart.unit]
    right = width - 34 - max(map(text_width, scale_texts))
    top, bottom = 8.0, height - 42
    x_of, y_of = scale(-0.5, columns - 0.5, left, right), scale(-0.5, rows - 0.5, top, bottom)
    across = _ticks(chart.x, 0, columns - 1, max(int((right - left) / 60), 2)) if columns > 1 else []
    middle = (top + bottom) / 2
    kept_rows = down[:: max(1, -(-len(down) * 13 // int(bottom - top)))]
    parts = [
        *_cells(chart, low, high, (left, top, (right - left) / max(columns, 1), (bottom - top) / max(rows, 1))),
        *(text(left - 6, y_of(value) + 4, words, "end") for value, words in kept_rows),
        text(12, middle, chart.y.title, more=f' transform="rotate(-90 12 {middle:.1f})"'),
        *(text(x_of(value), bottom + 16, words) for value, words in _fitting(across, x_of)),
        text((left + right) / 2, height - 6, chart.x.title),
        *_colour_scale(right + 14, top + (16 if chart.unit else 0), bottom, scale_texts),
    ]
    return parts, _Frame(left, right, bottom, top, x_of, y_of)


def _cells(chart: HeatMap, low: float, high: float, place: tuple[float, float, float, float]) -> list[str]:
    """One path per colour, in units of cells, with cells of one colour in a row as one."""
    paths: dict[int, list[str]] = {}
    for y, row in enumerate(chart.z):
        levels = [_level(value, low, high) for value in row]
        x = 0
        while x < len(levels):
            level, start = levels[x], x
            while x < len(levels) and levels[x] == level and (x == start or not chart.gaps):
                x += 1
            if level is not None:
                paths.setdefault(level, []).append(f"M{start} {y}h{x - start}v1h-{x - start}z")
    left, top, width, height = place
    edge = ' stroke="var(--surface)" vector-effect="non-scaling-stroke"' if chart.gaps else ""
    moved = f'transform="translate({left:.2f} {top:.2f}) scale({width:.4f} {height:.4f})"'
    crisp = "" if chart.gaps else ' shape-rendering="crispEdges"'
    drawn = [f'<path d="{"".join(d)}" fill="var(--heat-{level})"{edge}/>' for level, d in sorted(paths.items())]
    return [f"<g {moved}{crisp}>{''.join(drawn)}</g>"]


def _level(value: Number | None, low: float, high: float) -> int | None:
    if value is None or not isfinite(value):
        return None
    return round((value - low) / (high - low) * (HEAT_LEVELS - 1)) if high > low else 0


def _colour_scale(x: float, top: float, bottom: float, texts: Sequence[str]) -> list[str]:
    low, high, unit = texts
    step = (bottom - top) / HEAT_LEVELS
    colours = [
        f'<rect x="{x:.1f}" y="{bottom - (level + 1) * step:.2f}" width="10" height="{step + 0.4:.2f}" '
        f'fill="var(--heat-{level})"/>'
        for level in range(HEAT_LEVELS)
    ]
    return [
        *colours,
        text(x + 14, bottom, low, "start"),
        text(x + 14, top + 10, high, "start"),
        *([text(x, top - 6, unit, "start")] if unit else []),
    ]
