"""Puts the finished cells of a comparison into results/cifar.csv, and the table made from it into README.md.

python experiments/wire/results.py runs/wire
python experiments/wire/results.py                # only the table
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from statistics import mean, stdev

COLUMNS = ("update", "method", "seed", "size", "accuracy", "bytes_down", "bytes_up", "hours", "command")
HERE = Path(__file__).parent
OUT = HERE / "results" / "cifar.csv"
MARK = re.compile(r"(<!-- table -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
SIZES = ("0.25", "0.5", "0.75", "1.0")
PLAIN = "float32"


def gather(folder: Path) -> None:
    """Write the rows of the comparison in a folder."""
    from anysize.comparisons.compare import compare_runs

    with OUT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for outcome in compare_runs([folder]).outcomes:
            about = {
                "update": outcome.setting,
                "method": outcome.label,
                "seed": outcome.seed,
                "hours": round(sum(event["seconds"] for event in outcome.rounds) / 3600, 3),
                "command": f"anysize compare experiments/wire/cifar.toml --only '{outcome.path}'",
            }
            for size, curve in outcome.curves.items():
                cost = outcome.costs.get(size, {})
                sent = {key: cost.get(key, "") for key in ("bytes_down", "bytes_up")}
                writer.writerow({**about, "size": size, "accuracy": round(curve[-1][1], 4), **sent})


def table() -> str:
    """Accuracy at every size, what a full-width client sends, and the difference to plain updates by seed."""
    with OUT.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = dict.fromkeys((row["method"], row["update"]) for row in rows)
    lines = [
        f"| method | update | sent | {' | '.join(SIZES)} | against {PLAIN} |",
        "| --- | --- |" + " ---: |" * (len(SIZES) + 2),
    ]
    for method, update in sorted(kinds, key=lambda kind: kind[0], reverse=True):
        own, plain = (
            [row for row in rows if (row["method"], row["update"]) == (method, form)] for form in (update, PLAIN)
        )
        cells = [_spread([_percent(row) for row in own if row["size"] == size]) for size in SIZES]
        sent = next(int(row["bytes_up"]) for row in own if row["size"] == SIZES[-1])
        ahead = [mine - theirs for mine, theirs in zip(_means(own), _means(plain), strict=True)]
        cells = [f"{sent / 1000:.1f} kB", *cells, "" if update == PLAIN else _spread(ahead, "+")]
        lines.append(f"| `{method}` | {update} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _percent(row: dict[str, str]) -> float:
    return 100 * float(row["accuracy"])


def _means(rows: list[dict[str, str]]) -> list[float]:
    """The mean of the sizes, for every seed."""
    seeds = sorted({row["seed"] for row in rows})
    return [mean(_percent(row) for row in rows if row["seed"] == seed) for seed in seeds]


def _spread(values: list[float], sign: str = "") -> str:
    return f"{mean(values):{sign}.1f} ± {stdev(values):.1f}"


def shown(page: str) -> str:
    """The page with the table between its marks."""
    return MARK.sub(lambda found: f"{found[1]}{table()}{found[3]}", page)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        gather(Path(sys.argv[1]))
    readme = HERE / "README.md"
    readme.write_text(shown(readme.read_text(encoding="utf-8")), encoding="utf-8")
