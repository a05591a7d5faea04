"""The elements of every figure: axes, lines, heat maps, colours, and the layout around them.

A specification is plain data and needs no Plotly. Colours in it are names of CSS variables, which the page
resolves when it draws, so that one figure serves light and dark screens and paper.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from anysize.report.record import Number, Record
from anysize.report.tables import Row, csv_text

Spec = dict[str, Any]

# Anchors of viridis, dark to light: even steps in lightness, and safe for colour-blind readers.
VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
# The range of the scale with a contrast of at least 3 to 1 to the page; the largest size stands out most.
ON_LIGHT = (0.58, 0.0)
ON_DARK = (0.4, 1.0)
# Colours and markers of lines that are not sizes.
SERIES = tuple(
    (f"var(--series-{index})", mark)
    for index, mark in enumerate(("circle", "square", "diamond", "cross", "triangle-up", "x", "star", "hexagon"))
)
MANY_POINTS = 40  # with more, markers would hide the line
UNIFIED = "x unified"  # one hover box for all lines at one x, and a thin vertical line there
# A negative thickness removes the halo, which is meant for busy backgrounds.
SPIKES = {"spikecolor": "var(--line)", "spikethickness": -1, "spikedash": "solid"}


@dataclass(frozen=True)
class Figure:
    """One figure: its exact values (`keys`, `rows`), what it shows in words, and its Plotly specification."""

    name: str
    section: str
    title: str
    caption: str
    keys: tuple[str, ...]
    rows: tuple[Row, ...]
    spec: Spec
    height: int = 300
    wide: bool = False

    @property
    def csv(self) -> str:
        """The exact values, with one line of keys."""
        return csv_text(self.keys, self.rows)


def palette(sizes: int, span: tuple[float, float]) -> list[str]:
    """One colour per size, smallest first, evenly spaced along a range of viridis.

    >>> palette(2, (0.0, 1.0))
    ['#440154', '#fde725']
    """
    first, last = span
    steps = max(sizes - 1, 1)
    # A single size takes the end that stands out most.
    positions = [last - (last - first) * (sizes - 1 - index) / steps for index in range(sizes)]
    return [_viridis(position) for position in positions]


def plot_text(text: str) -> str:
    """The text, escaped so that Plotly shows it as it is: it would otherwise obey tags, templates and our variables.

    >>> plot_text("<b>%{x}")
    '&lt;b&gt;%&#123;x}'
    """
    return html.escape(text, quote=False).replace("{", "&#123;").replace("(", "&#40;")


def line(x: Sequence[Number | None], y: Sequence[Number | None], colour_name: str, symbol_name: str) -> Spec:
    """A line through the points, with markers if they are few."""
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= MANY_POINTS else "lines",
        "x": list(x),
        "y": [finite(value) for value in y],
        "cliponaxis": False,
        "line": {"color": colour_name, "width": 2},
        "marker": {"color": colour_name, "symbol": symbol_name, "size": 8},
    }


def heat_map(z: Sequence[Sequence[Number | None]], unit: str) -> Spec:
    """A heat map over the rows and columns of `z`, darker for larger values."""
    return {
        "type": "heatmap",
        "z": [[finite(value) for value in row] for row in z],
        "x": list(range(len(z[0]) if z else 0)),
        "y": list(range(len(z))),
        "colorscale": [[0, "var(--heat-0)"], [0.5, "var(--heat-1)"], [1, "var(--heat-2)"]],
        "colorbar": {"title": {"text": unit, "font": {"size": 12}}, "thickness": 10, "outlinewidth": 0, "len": 1},
    }


def chart(data: list[Spec], x_axis: Spec, y_axis: Spec, hovermode: str = UNIFIED, legend: str = "size") -> Spec:
    """A figure without decoration: no frame, faint grid, a legend above if there are several lines."""
    layout = {
        "xaxis": {**x_axis, **SPIKES} if hovermode == UNIFIED else x_axis,
        "yaxis": y_axis,
        "hovermode": hovermode,
        "showlegend": len(data) > 1 and data[0]["type"] == "scatter",
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.02,
            "yanchor": "bottom",
            "title": {"text": f"{legend} ", "font": {"size": 12}},
        },
        "margin": {"l": 48, "r": 12, "t": 12, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--soft)"},
        "hoverlabel": {
            "bgcolor": "var(--surface)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--ink)", "size": 12},
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "var(--soft)", "activecolor": "var(--ink)"},
        "bargap": 0.15,
    }
    return {"data": data, "layout": layout}


def axis(title: str, from_zero: bool = False) -> Spec:
    """An axis with a title and a faint grid."""
    return {
        "rangemode": "tozero" if from_zero else "normal",
        "title": {"text": title, "standoff": 8, "font": {"size": 12}},
        "ticklabelstandoff": 3,
        "gridcolor": "var(--grid)",
        "linecolor": "var(--line)",
        "zeroline": False,
        "automargin": True,
    }


def round_axis(record: Record) -> Spec:
    """An axis of rounds: whole numbers only, from zero on."""
    rounds = {**axis("round", from_zero=True), "unifiedhovertitle": {"text": "round %{x}"}}
    return {**rounds, "dtick": 1} if record.rounds[-1].round <= 10 else rounds


def finite(value: Number | None) -> Number | None:
    """The value, or None (a gap in the curve) if it is not finite: JSON in a page cannot write infinity."""
    return value if value is not None and isfinite(value) else None


def capital(text: str) -> str:
    """The text with a capital first request."""
    return text[:1].upper() + text[1:]


def shortened(text: str) -> str:
    """The text, cut if it is too long for a point's label or an axis."""
    return text if len(text) <= 18 else text[:17] + "…"


def _viridis(position: float) -> str:
    """The colour at a position from 0 (dark) to 1 (light), between the two nearest anchors."""
    place = position * (len(VIRIDIS) - 1)
    low = min(int(place), len(VIRIDIS) - 2)
    start, end = (bytes.fromhex(anchor[1:]) for anchor in VIRIDIS[low : low + 2])
    return "#" + bytes(round(a + (b - a) * (place - low)) for a, b in zip(start, end)).hex()
