"""One HTML page from tables and figures: self-contained, with every text from a file escaped.

Scripts run only if their hash is in the page's security policy, and nothing is fetched: a name or a config
that holds HTML could do nothing even if it were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from anysize.report.browser import POINT, style
from anysize.report.charts import Figure, colour
from anysize.report.drawing import draw, pointed_at
from anysize.report.record import Record
from anysize.report.tables import Column, Table, duration, times

SECTIONS = (
    ("sizes", "Sizes"),
    ("rounds", "Training"),
    ("cost", "What a size costs, and how good it is"),
    ("robustness", "Robustness"),
    ("progress", "What it took to get there"),
    ("analysis", "Inside the method"),
    ("groups", "Device groups"),
    ("devices", "Devices"),
    ("coverage", "What clients and domains trained"),
    ("clients", "Clients’ own held-out data"),
    ("missing", "Who was missing, and why"),
    ("partition", "Data on the clients"),
    ("time", "Where the time went"),
)

# Widths in pixels at which figures are drawn: over the whole page, half of it, a third of it, and on a phone.
WIDE, HALF, THIRD, NARROW = 1000, 480, 330, 400
_DIGEST = base64.b64encode(hashlib.sha256(POINT.encode()).digest()).decode()
POLICY = f"default-src 'none'; script-src 'sha256-{_DIGEST}'; style-src 'unsafe-inline'"


def render(record: Record, tables: Sequence[Table], figures: Sequence[Figure]) -> str:
    """The whole page."""
    sections = [_section(record, key, title, tables, figures) for key, title in SECTIONS]
    body = "\n".join(
        [
            _header(record),
            "<main>",
            *sections,
            _notices(record.start.notices),
            _appendix(record),
            "</main>",
            "<footer>Written by anysize. Point at a rounded number for the exact one, and into a figure for "
            "its values; every figure and table has them in a CSV file next to this page.</footer>",
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(record.start.name)} · anysize</title>\n"
        f"<style>{style(len(record.labels))}</style>\n</head>\n"
        f"<body>\n{body}\n<script>{POINT}</script>\n</body>\n</html>\n"
    )


def _header(record: Record) -> str:
    start = record.start
    clients = times(record.clients, "device" if record.devices else "client") if record.clients else None
    facts = [
        f"<b>{html.escape(start.method)}</b>",
        f"{html.escape(start.model)} on {html.escape(start.data)}",
        clients,
        times(max(start.rounds, _reached(record)), "round"),
        f"seed {start.seed}",
        _spent(record),
        _state(record),
    ]
    line = " ".join(f"<span>{fact}</span>" for fact in facts if fact)
    return f'<header>\n<h1>{html.escape(start.name)}</h1>\n<p class="what">{line}</p>\n</header>'


def _spent(record: Record) -> str | None:
    """What a private run has spent."""
    spent = record.rounds[-1].privacy if record.rounds else None
    return None if spent is None else f"each client's privacy: epsilon {spent.epsilon:g} at delta {spent.delta:g}"


def _reached(record: Record) -> int:
    """The last round done; a resumed run may have gone beyond the rounds first asked for."""
    return record.rounds[-1].round if record.rounds else 0


def _state(record: Record) -> str:
    if record.finished:
        took = f" in {duration(record.seconds)}" if record.seconds is not None else ""
        early = f" after round {_reached(record)}: {html.escape(record.stopped)}" if record.stopped else ""
        return f'<span class="finished">{"stopped" if early else "finished"}{took}{early}</span>'
    return f'<span class="running">running at round {_reached(record)}</span>'


def _section(record: Record, key: str, title: str, tables: Sequence[Table], figures: Sequence[Figure]) -> str:
    """A section's tables and figures under its title; an empty string if it has none."""
    names = {"clients": "client-metrics", "time": "profile"}  # sections whose table has another name
    parts = [_table(record, table) for table in tables if table.name == names.get(key, key)]
    shown = [figure for figure in figures if figure.section == key]
    small = [figure for figure in shown if not figure.wide]
    parts += [_figure(figure, WIDE) for figure in shown if figure.wide or len(small) == 1]
    if len(small) > 1:
        columns, width = ("two", HALF) if len(small) in (2, 4) else ("three", THIRD)
        drawn = "".join(_figure(figure, width) for figure in small)
        parts.append(f'<div class="grid {columns}">\n{drawn}</div>')
    if key == "sizes" and record.latest is None:
        parts.append('<p class="note">No evaluation yet: the metrics appear after the first evaluated round.</p>')
    return f'<section id="{key}">\n<h2>{html.escape(title)}</h2>\n{"".join(parts)}\n</section>' if parts else ""


def _table(record: Record, table: Table) -> str:
    head = "".join(
        f'<th scope="col"{_class(column, record)}>{html.escape(column.heading)}</th>' for column in table.columns
    )
    rows = "".join(_row(record, table, row, size) for row, size in zip(table.rows, table.sizes))
    return (
        f'<div class="card">\n<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f'<tbody>\n{rows}</tbody>\n</table></div>\n<div class="head">'
        f'<p class="note">{html.escape(table.caption)}</p>{_csv_link(table.name)}</div>\n</div>\n'
    )


def _row(record: Record, table: Table, row: Sequence[Any], size: str | None) -> str:
    swatch = f'<span class="swatch" style="background: {colour(record, size)}"></span>' if size is not None else ""
    cells = [f'<th scope="row">{swatch}{html.escape(table.columns[0].show(row[0]))}</th>']
    cells += [
        f"<td{_class(column, record)}{_exact(column, value)}>{html.escape(column.show(value))}</td>"
        for column, value in zip(table.columns[1:], row[1:])
    ]
    return f"<tr>{''.join(cells)}</tr>\n"


def _class(column: Column, record: Record) -> str:
    names = ["n"] * column.numeric + ["main"] * (column.key == record.start.metric)
    return f' class="{" ".join(names)}"' if names else ""


def _exact(column: Column, value: Any) -> str:
    """The exact value as the cell's title, if the shown one is rounded."""
    return f' title="{html.escape(str(value))}"' if value is not None and column.show(value) != str(value) else ""


def _figure(figure: Figure, width: int) -> str:
    """A card with the figure, drawn for a wide and, where that would be too small to read, for a narrow screen."""
    title = html.escape(figure.title)
    drawn = draw(figure, width) if width <= NARROW else draw(figure, width, "wide") + draw(figure, NARROW, "narrow")
    caption = f'<p class="note">{html.escape(figure.caption)}</p>\n' if figure.caption else ""
    told = f"told-{figure.name}"
    return (
        f'<figure class="card">\n<div class="head"><h3>{title}</h3><span>{_svg_link(figure.name)} '
        f'{_csv_link(figure.name)}</span></div>\n<div class="plot" data-told="{told}">{drawn}</div>\n{caption}'
        f'<script type="application/json" id="{told}">{_json(pointed_at(figure.chart))}</script>\n</figure>\n'
    )


def _csv_link(name: str) -> str:
    return f'<a class="csv" href="report/{name}.csv" download>CSV</a>'


def _svg_link(name: str) -> str:
    return f'<a class="csv" href="report/{name}.svg" download>SVG</a>'


def _json(value: object) -> str:
    """JSON that cannot end the script element that holds it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")


def _notices(notices: Sequence[str]) -> str:
    if not notices:
        return ""
    items = "".join(f"<li>{html.escape(notice)}</li>" for notice in notices)
    return f'<section>\n<h2>Notices</h2>\n<div class="card"><ul class="notices">{items}</ul></div>\n</section>'


def _appendix(record: Record) -> str:
    """The config and the environment, collapsed."""
    parts = []
    if record.config is not None:
        parts.append(_folded("Config", f"<pre>{html.escape(record.config)}</pre>"))
    if record.environment:
        rows = "".join(
            f'<tr><th scope="row">{html.escape(key)}</th><td>{html.escape(value)}</td></tr>'
            for key, value in flattened(record.environment)
        )
        parts.append(_folded("Environment", f'<div class="facts"><table><tbody>{rows}</tbody></table></div>'))
    return f"<section>\n<h2>How to repeat it</h2>\n{''.join(parts)}\n</section>" if parts else ""


def _folded(title: str, content: str) -> str:
    return f'<details class="card"><summary>{title}</summary>{content}</details>\n'


def flattened(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as dotted names and texts.

    >>> flattened({"torch": "2.13", "cpu": {"cores": 2}})
    [('torch', '2.13'), ('cpu.cores', '2')]
    """
    rows = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            rows += flattened(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return rows
