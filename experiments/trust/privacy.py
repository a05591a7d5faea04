"""Runs privacy.toml with less and more noise, and writes results/privacy.csv: epsilon, accuracy, a membership attack.

python experiments/trust/privacy.py
"""

from __future__ import annotations

import csv
import tempfile
import time
from pathlib import Path

from anysize import config
from anysize.attacks import membership_advantage
from anysize.data import SubsetPart
from anysize.experiment.experiment import evaluation_part
from anysize.runs.experiment import Experiment

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "privacy.csv"
NOISES = (None, 0.1, 0.3, 1.0)
SEEDS = (0, 1, 2)
COLUMNS = ("noise", "seed", "epsilon", "accuracy", "membership", "cpu_seconds", "command")


def measured(noise: float | None, seed: int) -> dict[str, object]:
    """One row; without noise, a run without clipping."""
    began = time.process_time()
    loaded = config.load(
        HERE / "privacy.toml", [f"seed={seed}"] + ([] if noise is None else [f"privacy.noise={noise}"])
    )
    if noise is None:
        loaded = loaded.replaced(privacy=loaded.privacy.model_copy(update={"clip": None}))
    experiment = Experiment.from_config(loaded)
    with tempfile.TemporaryDirectory() as folder:
        run = experiment.run(folder, overwrite=True)
        last = run.history[-1]
        members = SubsetPart(experiment.data.train, experiment.shares.used)
        advantage = membership_advantage(run.customize("1.0"), members, evaluation_part(experiment))
    return {
        "noise": 0 if noise is None else noise,
        "seed": seed,
        "epsilon": last["privacy"]["epsilon"] if noise else "",
        "accuracy": round(last["accuracy"]["1.0"], 4),
        "membership": round(advantage, 4),
        "cpu_seconds": round(time.process_time() - began, 1),
        "command": "python experiments/trust/privacy.py",
    }


def main() -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for noise in NOISES:
            for seed in SEEDS:
                row = measured(noise, seed)
                print(row, flush=True)
                writer.writerow(row)


if __name__ == "__main__":
    main()
