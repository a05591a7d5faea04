"""The demo's table of the project's README, made from results.csv, and this folder's own, made from results/choice.csv.

`python experiments/demo/table.py` writes them there.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean, stdev

from anysize.cli.printing import bytes_text, count_text
from anysize.comparisons.comparison import MEAN

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "demo" / "results.csv"
CHOICE = RESULTS.parent / "results" / "choice.csv"
START, END = "<!-- demo table -->\n", "<!-- end of demo table -->"
SIZES = ("0.25", "0.5", "0.75", "1.0")
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


def choice() -> str:
    """What was tried on held-out digits, in Markdown: seed 0, or mean and standard deviation of three seeds."""
    with CHOICE.open(encoding="utf-8", newline="") as file:
        tried = list(csv.DictReader(file))
    lines = [
        f"| held-out digits | what is trained | seeds | {' | '.join(SIZES)} |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for setting, method in dict.fromkeys((row["setting"], row["method"]) for row in tried):
        own = [row for row in tried if (row["setting"], row["method"]) == (setting, method)]
        whole = len({row["seed"] for row in own}) == 3
        kept = [row for row in own if whole or row["seed"] == "0"]
        cells = [_spread([100 * float(row["accuracy"]) for row in kept if row["size"] == size]) for size in SIZES]
        lines.append(f"| {setting} | {method} | {'0, 1, 2' if whole else '0'} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def shown(page: str, made: str) -> str:
    """The page with a table between its marks."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page has no {START.strip()} ... {END}")
    return before + start + made + end + after


if __name__ == "__main__":
    for readme, made in ((ROOT / "README.md", table()), (RESULTS.parent / "README.md", choice())):
        readme.write_text(shown(readme.read_text(encoding="utf-8"), made), encoding="utf-8")
