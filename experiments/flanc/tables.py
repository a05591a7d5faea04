"""The tables of this folder's README from results/: `python experiments/flanc/tables.py` writes them there.

Whatever stands between `<!-- table: NAME -->` and `<!-- end of table -->` is written anew: `paper` is the paper's Table
1 with ours beside it; `table1, 3 classes` and the like are one setting of a comparison, from `results/table1.csv`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).parent
MARK = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
WIDTHS = ("0.25", "0.5", "0.75", "1.0")
METHODS = {"heterofl": "HeteroFL", "fjord": "FjORD", "flanc": "FLANC"}
SPLITS = ("iid", "non-iid")
SETTINGS = {"iid": "iid", "3 classes": "non-iid", "roles": "non-iid"}
PERPLEXITY = "Shakespeare"  # all other figures are accuracies
OURS = {"Fashion-MNIST": "table1"}
"""Which comparison has the paper's own network, rounds and data."""
PAPER: Mapping[str, Mapping[str, Sequence[float]]] = {
    "CIFAR-10": {
        "iid heterofl": (81.9, 85.0, 87.4, 88.1, 85.6),
        "iid fjord": (85.1, 86.4, 86.8, 86.7, 86.3),
        "iid flanc": (85.1, 87.9, 88.8, 89.5, 87.8),
        "non-iid heterofl": (59.9, 54.6, 57.5, 56.7, 56.2),
        "non-iid fjord": (51.7, 58.4, 66.2, 65.7, 60.5),
        "non-iid flanc": (63.7, 69.7, 70.6, 73.0, 69.3),
    },
    "CIFAR-100": {
        "iid heterofl": (49.2, 56.5, 61.3, 63.6, 57.7),
        "iid fjord": (52.5, 54.9, 55.8, 55.8, 54.8),
        "iid flanc": (54.2, 61.8, 64.2, 65.5, 61.4),
        "non-iid heterofl": (44.2, 50.6, 52.1, 52.7, 49.9),
        "non-iid fjord": (46.7, 47.5, 49.2, 48.8, 48.1),
        "non-iid flanc": (48.3, 54.7, 56.5, 57.1, 54.2),
    },
    "Fashion-MNIST": {
        "iid heterofl": (89.4, 90.5, 90.5, 91.1, 90.4),
        "iid fjord": (88.3, 88.6, 89.1, 89.1, 88.8),
        "iid flanc": (90.5, 91.1, 91.2, 91.4, 91.1),
        "non-iid heterofl": (81.3, 83.7, 83.1, 84.6, 83.2),
        "non-iid fjord": (81.6, 83.1, 85.5, 83.7, 83.5),
        "non-iid flanc": (82.0, 85.7, 86.0, 86.8, 85.1),
    },
    PERPLEXITY: {
        "iid heterofl": (5.54, 5.07, 4.86, 4.64, 5.03),
        "iid fjord": (5.54, 5.06, 4.87, 4.67, 5.04),
        "iid flanc": (5.17, 4.74, 4.64, 4.52, 4.77),
        "non-iid heterofl": (5.55, 5.09, 4.92, 4.69, 5.06),
        "non-iid fjord": (5.54, 5.05, 4.94, 4.73, 5.07),
        "non-iid flanc": (5.21, 4.80, 4.65, 4.54, 4.80),
    },
}
"""Table 1 by split and method: at each width, and the mean."""
SAME = {"pruning baseline": "heterofl"}
"""What the paper calls HeteroFL is its authors' pruning baseline: both stand beside the paper's figure."""
LIKE = {"cifar10-16": "CIFAR-10", "table1": "Fashion-MNIST", "shakespeare-small": PERPLEXITY}
"""Whose figures of the paper stand beside a comparison's."""


def rows(name: str, **where: str) -> list[dict[str, str]]:
    """The rows of a CSV with these values; none, if there is no such file."""
    path = HERE / "results" / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in where.items())]


def paper() -> str:
    """Table 1: the paper's figure and ours, or a dash, in every cell."""
    heads = [f"{split}: {title}" if not at else title for split in SPLITS for at, title in enumerate(METHODS.values())]
    lines = _head(["data", "width", *heads])
    for data, figures in PAPER.items():
        for at, width in enumerate((*WIDTHS, "mean")):
            cells = []
            for split in SPLITS:
                for method in METHODS:
                    own = [row for row in rows(OURS.get(data, ""), method=method) if SETTINGS[row["setting"]] == split]
                    ours = _values(own, "accuracy", 1 if data == PERPLEXITY else 100).get(width)
                    digits = 2 if data == PERPLEXITY else 1
                    theirs = f"{figures[f'{split} {method}'][at]:.{digits}f}"
                    cells.append(f"{theirs} / {_spread(ours, digits) if ours else '–'}")
            lines.append(f"| {data} | {width} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def comparison(name: str, setting: str) -> str:
    """Every method of one setting by its last round, the mean of its best rounds, and the paper's mean."""
    found = rows(name, setting=setting)
    scale = _scale(name)
    sizes = sorted({row["size"] for row in found}, key=float)
    lines = _head(["method", "paper, mean", "last round, mean", *sizes, "best, mean"])
    methods = dict.fromkeys(row["method"] for row in found)
    last = {method: _values([row for row in found if row["method"] == method], "accuracy", scale) for method in methods}
    for method in sorted(methods, key=lambda method: mean(last[method]["mean"]), reverse=scale > 1):
        best = _values([row for row in found if row["method"] == method], "best", scale)
        theirs = PAPER[LIKE[name]].get(f"{SETTINGS.get(setting)} {SAME.get(method, method)}") if name in LIKE else None
        digits = 1 if scale > 1 else 2
        figures = [*(last[method][size] for size in ("mean", *sizes)), best["mean"]]
        cells = [_spread(values, digits) for values in figures]
        lines.append(f"| {method} | {f'{theirs[-1]:.{digits}f}' if theirs else ''} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def shown(page: str) -> str:
    """The page with all tables between their marks."""

    def made(found: re.Match[str]) -> str:
        name, _, setting = found[2].partition(", ")
        return f"{found[1]}{comparison(name, setting) if setting else paper()}{found[4]}"

    return MARK.sub(made, page)


def _scale(name: str) -> int:
    return 1 if LIKE.get(name) == PERPLEXITY else 100


def _values(found: Sequence[Mapping[str, str]], column: str, scale: int) -> dict[str, list[float]]:
    """By size, and of the mean of the sizes: a figure for every seed."""
    seeds = sorted({row["seed"] for row in found})
    values = {
        size: [scale * float(row[column]) for row in found if row["size"] == size]
        for size in sorted({row["size"] for row in found})
    }
    if found:
        values["mean"] = [mean(scale * float(row[column]) for row in found if row["seed"] == seed) for seed in seeds]
    return values


def _spread(values: Sequence[float], digits: int) -> str:
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def _head(titles: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(titles)} |", "| --- |" + " ---: |" * (len(titles) - 1)]


if __name__ == "__main__":
    readme = HERE / "README.md"
    readme.write_text(shown(readme.read_text(encoding="utf-8")), encoding="utf-8")
