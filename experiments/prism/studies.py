"""Accuracies over seeds: against full-model training, by sampling (Table 5), local epochs and clients (Figs. 10, 11).

    python experiments/prism/studies.py local-epochs 0 1 2 > experiments/prism/results/local-epochs.csv

The arguments are a study, seeds and, if not all are wanted, methods. Every row has a command that gives its run alone.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import anysize as az
from anysize.client.process import one_thread

HERE = Path(__file__).parent
SPLITS = {"iid": [], "dirichlet 0.1": ["data.split=dirichlet", "data.alpha=0.1"]}
METHODS = {
    "fedavg": ['method={name="fedavg"}', "devices.capacities=[1.0]"],
    "prism": [],
    "prism windows": ["method.channels=windows"],
    "prism kept": ["method.dropped=kept"],
    "origdrop": ['method={name="origdrop"}'],
    "orthdrop": ['method={name="fedhm"}'],
    "splitmix": ['method={name="splitmix"}'],
    "heterofl": ['method={name="heterofl"}'],
    "prism kept softmax": ["method.dropped=kept", "method.kappa=2.5", "method.sampling=softmax"],
    "prism kept uniform": ["method.dropped=kept", "method.kappa=2.5", "method.sampling=uniform"],
    "prism kept top": ["method.dropped=kept", "method.kappa=2.5", "method.sampling=top"],
}
COMPARED = tuple(method for method in METHODS if not method.startswith("prism kept "))  # with full-model training
SAMPLED = ("fedavg", "prism", "prism windows")  # of Figs. 10 and 11
SHORT = ["data.fraction=0.25", "rounds=30", "evaluate_every=30"]  # on Fashion-MNIST
PRODUCT = 24  # rounds times local epochs of Fig. 10


class Cell(NamedTuple):
    """A run but for its seed: what it is called, and what it changes in a file."""

    file: str
    split: str
    method: str
    keep: float
    epochs: int
    active: int
    changes: list[str]


def accuracy_drop() -> Iterator[Cell]:
    """Every method at 0.2 and 0.4, after 30 rounds on a quarter of Fashion-MNIST."""
    for keep, split, method in product((0.2, 0.4), SPLITS, COMPARED):
        if method != "fedavg" or keep == 0.2:
            yield Cell("fashion-mnist.toml", split, method, at(method, keep), 2, 10, SHORT)


def sampling() -> Iterator[Cell]:
    """Table 5: how kernels are drawn, where there are more than a client may hold."""
    for method in METHODS:
        if method.startswith("prism kept"):
            yield Cell("fashion-mnist.toml", "iid", method, 0.2, 2, 10, SHORT)


def local_epochs() -> Iterator[Cell]:
    """Fig. 10 on digits: more epochs, fewer rounds."""
    for split, method, epochs in product(SPLITS, SAMPLED, (1, 2, 4)):
        rounds = PRODUCT // epochs
        changes = [f"training.local_epochs={epochs}", f"rounds={rounds}", f"evaluate_every={rounds}"]
        yield Cell("digits.toml", split, method, at(method, 0.2), epochs, 10, changes)


def active_clients() -> Iterator[Cell]:
    """Fig. 11 on digits: how many of ten clients take part in a round."""
    for split, method, active in product(SPLITS, SAMPLED, (2, 5, 10)):
        changes = [f"devices.participation={active / 10}"]
        yield Cell("digits.toml", split, method, at(method, 0.2), 2, active, changes)


def at(method: str, keep: float) -> float:
    """The keep ratio of a method: FedAvg, the reference, trains the full network."""
    return 1.0 if method == "fedavg" else keep


STUDIES = {
    "accuracy-drop": accuracy_drop,
    "sampling": sampling,
    "local-epochs": local_epochs,
    "active-clients": active_clients,
}


def rows(cell: Cell, seed: str) -> Iterator[str]:
    """A row for each evaluated size of one run."""
    capacity = [f"devices.capacities=[{cell.keep}]"] if cell.keep == 0.4 else []
    kappa = ["method.kappa=2.5"] if cell.keep == 0.4 and cell.method.startswith("prism") else []
    more = [*cell.changes, *SPLITS[cell.split], *METHODS[cell.method], *capacity, *kappa, f"seed={seed}"]
    more.append("engine.name=inprocess")
    sets = " ".join(f"--set {shlex.quote(change)}" for change in more)
    command = f"anysize run experiments/prism/{cell.file} {sets}".replace('"', '""')
    with tempfile.TemporaryDirectory() as folder, one_thread():
        run = az.run(HERE / cell.file, overrides=more, out=Path(folder) / "run", progress=False)
        for size, accuracy in measured(run, cell.method).items():
            about = f"{cell.split},{cell.method},{cell.keep},{cell.epochs},{cell.active},{run.round},{seed}"
            yield f'{about},{size},{accuracy:.4f},"{command}"'


def measured(run: az.Run, method: str) -> dict[str, float]:
    """The accuracy of each evaluated size; of Split-Mix, which trains one base, also that of all bases together."""
    found = dict(run.history[-1]["accuracy"])
    return found | {"1.0": run.evaluate("1.0")["1.0"]["accuracy"]} if method == "splitmix" else found


def main(study: str, more: list[str]) -> None:
    seeds = [word for word in more if word.isdigit()]
    wanted = [word for word in more if not word.isdigit()] or list(METHODS)
    print("split,method,keep,local_epochs,active_clients,rounds,seed,size,accuracy,command", flush=True)
    for seed, cell in product(seeds, STUDIES[study]()):
        for row in rows(cell, seed) if cell.method in wanted else ():
            print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
