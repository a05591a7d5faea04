"""Puts the finished cells of a comparison into the CSV beside its file, a row for every cell and size.

    anysize compare experiments/benchmark/cifar.toml --out runs/cifar
    python experiments/gather.py experiments/benchmark/cifar.toml runs/cifar     # -> benchmark/results/cifar.csv

Rows of cells that the folder does not hold stay in the CSV. Sizes that no client trains have no costs.
"""

from __future__ import annotations

import csv
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMNS = (
    *("setting", "method", "seed", "size", "accuracy", "best", "best_round", "learning_rate", "parameters"),
    *("training_macs", "activation_bytes", "bytes", "inference_bytes", "hours", "machine", "commit", "command"),
)

COSTS = ("parameters", "training_macs", "activation_bytes", "inference_bytes")


def gather(file: Path, folder: Path) -> None:
    """Writes the finished cells of a comparison's folder into the CSV, beside those that it holds already."""
    path = file.parent / "results" / f"{file.stem}.csv"
    new = list(finished(file, folder))
    cells = {(row["setting"], row["method"], str(row["seed"])) for row in new}
    kept = [row for row in _rows(path) if (row["setting"], row["method"], row["seed"]) not in cells]
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as csv_file:
        writer = csv.DictWriter(csv_file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*kept, *new], key=_order))
    print(f"{path}: {len(cells)} cells of {folder}, {len(kept)} rows kept")


def finished(file: Path, folder: Path) -> Iterator[dict[str, object]]:
    """A row for every finished cell and size."""
    from anysize.comparisons.compare import compare_runs
    from anysize.comparisons.statistics import best
    from anysize.records.directory import saved_environment

    name = file.resolve().relative_to(ROOT.resolve())
    for outcome in compare_runs([folder]).outcomes:
        about = {
            "setting": outcome.setting,
            "method": outcome.label,
            "seed": outcome.seed,
            "learning_rate": outcome.tuned.get("training.learning_rate", outcome.config.training.learning_rate),
            "hours": round(sum(event["seconds"] for event in outcome.rounds) / 3600, 3),
            "machine": _machine(),
            "commit": saved_environment(outcome.directory).get("revision", ""),
            "command": f"anysize compare {name} --only '{outcome.path}'",
        }
        for size, curve in outcome.curves.items():
            top = best(curve, outcome.higher_is_better)
            cost = outcome.costs.get(size)  # None of a size that no client trains
            costs = (
                {}
                if cost is None
                else {"bytes": cost["bytes_down"] + cost["bytes_up"], **{key: cost[key] for key in COSTS}}
            )
            yield (
                about
                | costs
                | {
                    "size": size,
                    "accuracy": round(curve[-1][1], 5),
                    "best": round(top[1], 5),
                    "best_round": top[0],
                }
            )


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _machine() -> str:
    import torch

    models = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return f"{models[0] if models else 'CPU'}, {os.cpu_count()} cores, torch {torch.__version__}"


def _order(row: dict[str, object]) -> tuple[object, ...]:
    return (row["setting"], row["method"], int(str(row["seed"])), float(str(row["size"])))


if __name__ == "__main__":
    gather(Path(sys.argv[1]), Path(sys.argv[2]))
