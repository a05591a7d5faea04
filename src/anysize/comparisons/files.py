"""The files of a comparison: in its folder, and of a user's choice."""

from __future__ import annotations

from pathlib import Path

from anysize.comparisons.comparison import Comparison
from anysize.comparisons.page import render
from anysize.comparisons.writing import tables, to_csv, to_json, to_latex
from anysize.errors import UsageError
from anysize.records.directory import make, write_text

JSON, CSV, HTML = "compare.json", "compare.csv", "compare.html"
TABLES = "compare"
"""The folder with the values of the page's further tables."""


def write(made: Comparison) -> None:
    """Puts compare.json, compare.csv and compare.html into the comparison's folder, and further tables as CSV."""
    make(made.directory / TABLES)
    write_text(made.directory / JSON, to_json(made))
    write_text(made.directory / CSV, to_csv(made))
    for name, text in tables(made):
        write_text(made.directory / TABLES / f"{name}.csv", text)
    write_text(made.directory / HTML, render(made))


def write_to(made: Comparison, path: Path) -> None:
    """Writes the comparison to a file of a user's choice, by its ending."""
    kinds = {".tex": to_latex, ".csv": to_csv, ".json": to_json, ".html": render}
    write_text(path, kinds[checked(path).suffix](made))


def checked(path: Path) -> Path:
    """The path, whose ending says what to write."""
    if path.suffix not in (".tex", ".csv", ".json", ".html"):
        raise UsageError(f"--to {path}: allowed endings: .tex, .csv, .json, .html")
    return path
