"""The demo's table of the README, made from results.csv: `python experiments/demo/table.py` writes it there."""

from __future__ import annotations

import csv
from pathlib import Path

from anysize.cli.printing import bytes_text, count_text
from anysize.comparisons.comparison import MEAN

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "demo" / "results.csv"
START, END = "<!-- demo table -->\n", "<!-- end of demo table -->"
HEAD = ("what is trained", "width", "parameters trained", "MACs, one forward", "bytes per client and round", "accuracy")


def rows() -> list[dict[str, str]]:
    """The rows of the results, one for each network."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["size"] != MEAN]


def table() -> str:
    """The table in Markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for row in rows():
        traffic = bytes_text(int(row["bytes_down"]) + int(row["bytes_up"]))
        costs = [f"{int(row['parameters']):,}", count_text(int(row["macs"])), traffic]
        accuracy = f"{100 * float(row['mean']):.1f} ± {100 * float(row['std']):.1f} %"
        lines.append(f"| {' | '.join([row['method'], row['size'], *costs, accuracy])} |")
    return "\n".join([*lines, ""])


def shown(page: str) -> str:
    """The page with the table between its marks."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page has no {START.strip()} ... {END}")
    return before + start + table() + end + after


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(shown(readme.read_text(encoding="utf-8")), encoding="utf-8")
