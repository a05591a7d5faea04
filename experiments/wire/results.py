"""Puts the finished cells of a comparison into results/cifar.csv, a row for every cell and size.

python experiments/wire/results.py runs/wire
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

COLUMNS = ("update", "method", "seed", "size", "accuracy", "bytes_down", "bytes_up", "hours", "command")
OUT = Path(__file__).parent / "results" / "cifar.csv"


def main(folder: Path) -> None:
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
