"""The command `demo`: the table that it prints and the networks that it writes."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from anysize.cli.printing import bytes_text, count_text, out, say
from anysize.comparisons.comparison import MEAN, Comparison
from anysize.exports.formats import export, onnx_needs
from anysize.runs.progress import err
from anysize.runs.run import load


def print_rows(made: Comparison) -> None:
    """One line for every network that came out: who trained it, what it costs a device, and how good it is."""
    table = Table("", box=None, header_style="bold")
    for column in ("width", "parameters", "MACs", "bytes per round", made.metric):
        table.add_column(column, justify="right")
    rows = [row for row in made.rows if row.size != MEAN]
    for before, row in zip([None, *rows], rows):
        title = "" if before is not None and before.method == row.method else row.method
        costs = [f"{row.parameters or 0:,}", count_text(row.macs or 0), bytes_text(row.bytes or 0)]
        table.add_row(escape(title), escape(row.size), *costs, f"{row.mean:.4f}")
    out.print(table)


def write_networks(made: Comparison) -> None:
    """The smallest and the largest network of the first method as ONNX, or a line that says what that needs."""
    if (missing := onnx_needs()) is not None:
        say(f"no ONNX files: {missing}")
        return
    run = load(first_run(made))
    for size in (run.offered[0], run.offered[-1]):
        path = made.directory / f"net-{size.label}.onnx"
        with err.status(f"exporting {path}"):
            done = export(run.customize(size.label), path, run.experiment.signature, {"size": size.label})
        say(f"{path}: {bytes_text(done.size_bytes)}, checked in onnxruntime: outputs within {done.difference:.1g}")


def first_run(made: Comparison) -> Path:
    """The directory of the first method's run."""
    return made.directory / made.outcomes[0].path
