"""A run as a notebook or a prompt shows it: a few lines of text, a small table, one figure."""

from __future__ import annotations

import html
from dataclasses import dataclass, replace
from pathlib import Path

from anysize.atomic import replaced
from anysize.errors import AnysizeError
from anysize.report import colours
from anysize.report.drawing import draw, standalone
from anysize.report.figures import over_rounds
from anysize.report.record import Record, read
from anysize.report.tables import Table, sizes, times

_WIDTH = 640  # pixels
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


@dataclass(frozen=True)
class Plot:
    """A figure that a notebook shows; `svg` is the drawing as text."""

    svg: str

    def __repr__(self) -> str:
        return 'Plot: a notebook shows it; save("plot.svg") writes it'

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> Path:
        """The path of an SVG file with the drawing, newly written."""
        with replaced(Path(path)) as new:
            new.write_text(self.svg, encoding="utf-8")
        return Path(path)


def plot(directory: Path) -> Plot:
    """The metric of every size after each round that was evaluated.

    Raises:
        AnysizeError: nothing was evaluated yet.
    """
    record = read(directory)
    figure = over_rounds(record)
    if figure is None:
        raise AnysizeError(f"the run in {directory} has no evaluation yet, so there is nothing to plot")
    light, _ = colours.variables(len(record.labels))
    return Plot(standalone(draw(figure, _WIDTH), light))


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
