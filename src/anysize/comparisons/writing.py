"""A comparison as files: CSV, JSON and LaTeX."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields
from typing import Any

from anysize.comparisons.comparison import (
    MEAN,
    ROW_COLUMNS,
    AtCost,
    Comparison,
    Difference,
    Reached,
    Row,
    in_percent,
    shown,
)
from anysize.comparisons.statistics import best
from anysize.report.tables import csv_text


def to_json(made: Comparison) -> str:
    return json.dumps(made.to_json(), indent=1) + "\n"


def to_csv(made: Comparison) -> str:
    """A line per row, the seeds' values in columns of their own, first of the last round, then of the best."""
    heads = [f"{made.metric} seed {seed}" for seed in made.seeds] + [f"best seed {seed}" for seed in made.seeds]
    return csv_text([*ROW_COLUMNS, *heads], [_csv_row(made, row) for row in made.rows])


def tables(made: Comparison) -> Iterator[tuple[str, str]]:
    """The further tables, each with its name: differences, equal cost, cost to the target, curves, runs."""
    for name, kind, entries in (
        ("differences", Difference, made.differences),
        ("equal-cost", AtCost, made.equal_cost),
        ("target", Reached, made.reached),
    ):
        if entries:
            keys = [entry.name for entry in fields(kind)]
            yield name, csv_text(keys, [[_plain(value) for value in astuple(entry)] for entry in entries])
    keys = ["setting", "method", "seed", "size", "round", made.metric]
    points = [
        (outcome.setting, outcome.label, outcome.seed, size, number, _plain(value))
        for outcome in made.outcomes
        for size, curve in (*outcome.curves.items(), (MEAN, outcome.mean_curve))
        for number, value in curve
    ]
    yield "curves", csv_text(keys, points)
    yield "runs", _runs(made)


def _runs(made: Comparison) -> str:
    keys = ["path", "setting", "method", "seed", "tuned", "bytes", "training_macs", "best round of the mean"]
    rows = []
    for outcome in made.outcomes:
        spent = list(outcome.spent.values())[-1]
        peak = best(outcome.mean_curve, outcome.higher_is_better)[0]
        tuned = json.dumps(dict(outcome.tuned)) if outcome.tuned else ""
        about = (outcome.path, outcome.setting, outcome.label, outcome.seed, tuned)
        rows.append((*about, spent["bytes"], spent["training_macs"], peak))
    return csv_text(keys, rows)


def _csv_row(made: Comparison, row: Row) -> list[Any]:
    last, top = dict(zip(row.seeds, row.values)), dict(zip(row.seeds, row.best_values))
    seeds = [_plain(values.get(seed)) for values in (last, top) for seed in made.seeds]
    return [*(_plain(getattr(row, key)) for key in ROW_COLUMNS), *seeds]


def _plain(value: Any) -> Any:
    """The value as a cell of a CSV file, empty where there is none."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_latex(made: Comparison) -> str:
    """A booktabs table: a block per setting, a row per method, a column per size and one for their mean.

    The best mean of a column is bold. Accuracies are in percent.
    """
    sizes = _all_sizes(made)
    columns = [*sizes, MEAN]
    lines = [
        "% \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{l{'r' * len(columns)}}}",
        "\\toprule",
        " & ".join(["method", *map(_tex, columns)]) + " \\\\",
    ]
    for setting in made.settings:
        lines.append("\\midrule")
        if setting:
            lines.append(f"\\multicolumn{{{len(columns) + 1}}}{{l}}{{\\emph{{{_tex(setting)}}}}} \\\\")
        tops = {size: _top(made, setting, size) for size in columns}
        for method in made.methods:
            rows = {size: made.row(method, size, setting) for size in columns}
            if any(rows.values()):
                cells = [_latex_cell(made, rows[size], tops[size]) for size in columns]
                lines.append(" & ".join([_tex(method), *cells]) + " \\\\")
    unit = ", in percent" if in_percent(made) else ""
    spread = f", mean $\\pm$ standard deviation over {len(made.seeds)} seeds" if len(made.seeds) > 1 else ""
    judged = "test set" if made.judged_on == "test" else "clients' held-out data"
    lines += ["\\bottomrule", "\\end{tabular}", f"% {_tex(made.metric)}{unit}, {judged}, round {made.rounds}{spread}"]
    return "\n".join(lines) + "\n"


def _all_sizes(made: Comparison) -> list[str]:
    found = dict.fromkeys(size for setting in made.settings for size in made.sizes(setting))
    try:
        return sorted(found, key=float)
    except ValueError:
        return list(found)


def _top(made: Comparison, setting: str, size: str) -> float:
    """The best mean of a column."""
    means = [row.mean for method in made.methods if (row := made.row(method, size, setting)) is not None]
    finite: Sequence[float] = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return math.nan
    return max(finite) if made.higher_is_better else min(finite)


def _latex_cell(made: Comparison, row: Row | None, top: float) -> str:
    if row is None:
        return "--"
    value, small = shown(made, row.mean, row.std)
    text = f"\\mathbf{{{value}}}" if row.mean == top else value
    return f"${text}$" if not small else f"${text} \\pm {small}$"


def _tex(text: str) -> str:
    """The text with LaTeX's own signs escaped.

    >>> print(_tex("40 % at 0.4 & more_"))
    40 \\% at 0.4 \\& more\\_
    """
    special = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater", "|": "bar"}
    signs = {sign: f"\\text{name}{{}}" for sign, name in special.items()} | {sign: f"\\{sign}" for sign in "&%$#_{}"}
    return "".join(signs.get(sign, sign if sign.isprintable() else " ") for sign in text)
