"""The robustness dial after longer training: in a federation beside FedAvg, and on one client that has all data.

    python experiments/splitmix/robust.py 0 1 2 > experiments/splitmix/results/robustness-seeds.csv

The arguments are seeds and, if not all are wanted, runs. Every row has a command that gives its run alone.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import anysize as az
from anysize.client.process import one_thread

FILE = Path(__file__).parent / "robustness.toml"
ALL = ["devices.capacities=[0.125]", "devices.clients_per_round=30", "rounds=40", "evaluate_every=40"]
FEDAVG = [*ALL, "method={name='fedavg'}", "tricks.masked_loss=true"]
ONE = ["data.clients=1", "data.split=iid", "evaluation.by_domain=false", "devices.capacities=[1.0]"]
ONE += ["devices.clients_per_round=1", "method.base_width=0.125", "rounds=15", "evaluate_every=15"]
CELLS = {
    "one client with all data": ONE,
    "fedavg adversarial 0": [*FEDAVG, "tricks.adversarial=0.0"],
    "fedavg adversarial 0.5": FEDAVG,
    "fedavg adversarial 1": [*FEDAVG, "tricks.adversarial=1.0"],
    "oat": [*ALL, "method={name='oat'}", "tricks.masked_loss=true", "tricks.adversarial=0.0"],
    "splitmix": ALL,
}


def rows(cell: str, seed: str) -> Iterator[str]:
    """A row for each size and robustness of one run."""
    changes = [*CELLS[cell], "evaluation.attack_samples=1500", f"seed={seed}", "engine.name=inprocess"]
    sets = " ".join(f"--set {shlex.quote(change)}" for change in changes).replace('"', '""')
    sizes = ["0.125"] if cell.startswith(("fedavg", "oat")) else ["0.125", "1.0"]
    attack = " ".join(["anysize evaluate DIR --attack pgd", *(f"--size {size}" for size in sizes)])
    command = f"anysize run experiments/splitmix/robustness.toml {sets} --out DIR && {attack}"
    with tempfile.TemporaryDirectory() as folder, one_thread():
        run = az.run(FILE, overrides=[*changes, "evaluation.attack=none"], out=Path(folder) / "run", progress=False)
        hours = sum(event["seconds"] for event in run.history) / 3600
        measured = run.attack(sizes)
    for size, levels in measured.items():
        for level in levels:
            dial = "" if level["robustness"] is None else level["robustness"]
            about = f"{cell},{seed},{run.round},{size},{dial},{level['standard']:.4f},{level['robust']:.4f}"
            yield f'{about},{hours:.2f},"{command}"'


def main(words: list[str]) -> None:
    seeds = [word for word in words if word.isdigit()]
    wanted = [word for word in words if not word.isdigit()] or list(CELLS)
    print("run,seed,round,size,robustness,standard,robust,hours,command", flush=True)
    for seed, cell in product(seeds, wanted):
        for row in rows(cell, seed):
            print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
