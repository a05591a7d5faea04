"""Split-Mix and its baselines by width: digits domains (Table 1, Fig. 4), batch-norm (Table 4), classes (Fig. 9).

    python experiments/splitmix/studies.py widths 0 1 2 > experiments/splitmix/results/widths.csv

The arguments are a study and seeds. `accuracy` is that of the network as it ships, also for each domain where a study
has any; `by_test_batch` has the statistics of the test batch, as the paper tests. Every row has a command that gives
its run alone.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

import anysize as az
from anysize.client.process import one_thread

HERE = Path(__file__).parent
DOMAINS = ("mnist", "mnist-m", "usps")
FEDAVG = ["method.name=fedavg", "tricks.masked_loss=true"]
SMALL = [
    "data.name=cifar10-16",
    "model.name=small-cnn",
    "rounds=60",
    "evaluate_every=20",
    "devices.clients_per_round=20",
]
SMALL += ["training.local_epochs=2", "training.batch_size=32", "training.learning_rate=0.1"]


class Study(NamedTuple):
    """A file, what every run changes in it, and the runs with their own changes."""

    file: str
    changes: list[str]
    runs: Mapping[str, list[str]]


def norms() -> dict[str, list[str]]:
    """Table 4: every treatment of batch-norm, with and without rescaled initialisation and layers."""
    starts = {"rescaled": [], "own": ["tricks.rescaled_init=false"]}
    layers = {"plain": [], "rescaled": ["method.rescale_layer=true"]}
    kinds = {"batch": []} | {kind: [f"tricks.batch_norm={kind}"] for kind in ("calibrated", "tracked", "local")}
    return {
        f"{kind}, {start}, {layer}": [*kinds[kind], *starts[start], *layers[layer]]
        for kind, start, layer in product(kinds, starts, layers)
    }


WIDTHS = {
    "splitmix": [],
    "sheterofl": ["method.name=sheterofl"],
    "fedavg": FEDAVG,
    "fedavg each": [*FEDAVG, "method.width=each"],
    "splitmix, rate 0.01": ["training.learning_rate=0.01"],
}
CLASSES = {method: WIDTHS[method] for method in ("splitmix", "sheterofl", "fedavg each")}
STUDIES = {
    "widths": Study("digits-domains.toml", [], WIDTHS),
    "norms": Study("norms.toml", [], norms()),
    "classes": Study("cifar10-classes.toml", SMALL, CLASSES),
}


def rows(study: Study, name: str, seed: str) -> Iterator[str]:
    """A row for each evaluated round and size of one run."""
    changes = [*study.runs[name], *study.changes, f"seed={seed}", "engine.name=inprocess"]
    sets = " ".join(f"--set {shlex.quote(change)}" for change in changes)
    with tempfile.TemporaryDirectory() as folder, one_thread():
        run = az.run(HERE / study.file, overrides=changes, out=Path(folder) / "run", progress=False)
        history = run.history
    hours = sum(event["seconds"] for event in history) / 3600
    for event in history:
        for size, metrics in event.get("metrics", {}).items():
            by_batch = event.get("by_test_batch", {}).get(size)
            found = [by_batch, metrics["accuracy"], *(metrics.get(f"accuracy/{domain}") for domain in DOMAINS)]
            shown = ",".join("" if value is None else f"{value:.4f}" for value in found)
            command = f"anysize run experiments/splitmix/{study.file} {sets}"
            yield f'"{name}",{seed},{event["round"]},{size},{shown},{hours:.3f},"{command}"'


def main(name: str, seeds: list[str]) -> None:
    study = STUDIES[name]
    print(f"method,seed,round,size,by_test_batch,accuracy,{','.join(DOMAINS)},hours,command", flush=True)
    for seed, run in product(seeds, study.runs):
        for row in rows(study, run, seed):
            print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
