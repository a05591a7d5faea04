"""The report of a run: tables, figures and one HTML page from the files of its directory, with no number changed.

`write` puts `report.html` into the run directory, and beside it `report/*.csv` with the exact values of every
table and figure, and `report/*.svg` with every figure. The page is self-contained and opens offline.
"""

from __future__ import annotations

from pathlib import Path

from anysize.atomic import replaced
from anysize.errors import AnysizeError
from anysize.records.directory import REPORT, REPORT_FOLDER
from anysize.report import analysis, colours, coverage, drawing, figures, page, robustness, tables, widths
from anysize.report.charts import Figure
from anysize.report.record import Record, read

__all__ = ["write"]

WIDTH = 640  # of a figure's own file, in pixels


def write(directory: Path) -> Path:
    """The path of the run's `report.html`, newly written from the files in its directory.

    Works while the run is going on. A reader never sees half a page, since each file is replaced in one step.

    Raises:
        CheckpointError: the directory holds no run, or a file in it is damaged.
        AnysizeError: the report cannot be written.

    >>> import json, tempfile
    >>> directory = Path(tempfile.mkdtemp())
    >>> start = {"event": "start", "name": "demo", "method": "fedavg", "model": "mlp", "data": "digits",
    ...          "rounds": 3, "seed": 0}
    >>> _ = (directory / "events.jsonl").write_text(json.dumps(start) + "\\n")
    >>> write(directory).name
    'report.html'
    """
    record = read(directory)
    drawn = figures_of(record)
    kinds = [robustness.levels, tables.groups, tables.devices, coverage.statistics]
    kinds += [tables.client_metrics, tables.missing, tables.profile]
    shown = [tables.sizes(record), *(table for kind in kinds if (table := kind(record)) is not None)]
    report, values = directory / REPORT, directory / REPORT_FOLDER
    try:
        values.mkdir(exist_ok=True)
        for name, content in [(part.name, part.csv) for parts in (shown, drawn) for part in parts]:
            _replace(values / f"{name}.csv", content)
        light, _ = colours.variables(len(record.labels))
        for figure in drawn:
            _replace(values / f"{figure.name}.svg", drawing.standalone(drawing.draw(figure, WIDTH), light))
        _replace(report, page.render(record, shown, drawn))
    except OSError as error:
        raise AnysizeError(f"cannot write the report into {directory}: {error.strerror or error}") from error
    return report


def figures_of(record: Record) -> list[Figure]:
    """Every figure for which the run has values."""
    return [figure for kind in (figures, widths, robustness, analysis, coverage) for figure in kind.build(record)]


def _replace(path: Path, content: str) -> None:
    with replaced(path) as new:
        new.write_text(content, encoding="utf-8", newline="")
