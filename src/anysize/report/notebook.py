"""A run as a notebook or a prompt shows it: a few lines of text, a small table, one figure."""

from __future__ import annotations

import html
from dataclasses import replace
from pathlib import Path
from typing import Any

from anysize.config.extras import needs
from anysize.errors import AnysizeError
from anysize.report.plots import ON_LIGHT, capital, palette
from anysize.report.record import Record, read
from anysize.report.tables import Table, sizes, times

_SHOWN = ("size", "parameters", "macs", "bytes_down", "bytes_up")


def as_text(directory: Path, round: int) -> str:
    """The run in a directory after a round, in lines: what it is, and a line for each size."""
    record = _until(directory, round)
    table = _few(sizes(record), record.start.metric)
    lines = [[column.heading for column in table.columns]]
    lines += [[column.show(value) for column, value in zip(table.columns, row)] for row in table.rows]
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    body = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines]
    return "\n  ".join([f"Run {directory}: {_title(record, round)}", *body])


def as_html(directory: Path, round: int) -> str:
    """The same as a heading and a table."""
    record = _until(directory, round)
    table = _few(sizes(record), record.start.metric)
    head = "".join(f"<th>{html.escape(column.heading)}</th>" for column in table.columns)
    cells = [[html.escape(column.show(value)) for column, value in zip(table.columns, row)] for row in table.rows]
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells)
    title = f"<b>{html.escape(str(directory))}</b>: {html.escape(_title(record, round))}"
    return f"<div><p>{title}</p><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


def plot(directory: Path) -> Any:
    """A Plotly figure: the metric of every size after each round that was evaluated.

    Raises:
        AnysizeError: Plotly is not installed.
    """
    if (missing := needs("run.plot()", "report", "plotly")) is not None:
        raise AnysizeError(missing)
    import plotly.graph_objects as go

    record = read(directory)
    figure = go.Figure()
    for label, colour in zip(record.labels, palette(len(record.labels), ON_LIGHT)):
        points = [(round_.round, round_.scores[label]) for round_ in record.evaluated if label in round_.scores]
        x, y = [number for number, _ in points], [value for _, value in points]
        figure.add_scatter(x=x, y=y, name=html.escape(label), line={"color": colour}, mode="lines+markers")
    metric, where = record.start.metric, ", on the clients' held-out data" if record.on_clients else ""
    figure.update_layout(
        title=html.escape(f"{record.start.name}: {metric}{where}"),
        xaxis_title="round",
        yaxis_title=html.escape(capital(metric)),
        legend_title="size",
        template="plotly_white",
    )
    return figure


def _until(directory: Path, round: int) -> Record:
    record = read(directory)
    return replace(record, rounds=tuple(round_ for round_ in record.rounds if round_.round <= round))


def _few(table: Table, metric: str) -> Table:
    """The table with the columns that fit a screen."""
    places = [place for place, column in enumerate(table.columns) if column.key in (*_SHOWN, metric)]
    columns = tuple(table.columns[place] for place in places)
    return replace(table, columns=columns, rows=tuple(tuple(row[place] for place in places) for row in table.rows))


def _title(record: Record, round: int) -> str:
    start = record.start
    state = f"stopped: {record.stopped}" if record.stopped else "finished" if record.finished else "not finished"
    rounds = times(max(start.rounds, round), "round")
    return f"{start.method}, {start.model} on {start.data}, after round {round} of {rounds}, {state}"
