"""Table 1's cells of CIFAR-10 at 16 x 16: each dense residual network alone, and eLF with zeros and with holders.

    python experiments/elf/residual.py 40 0 iid > experiments/elf/results/cifar10-16-residual.csv

The arguments are a number of rounds, a seed, and splits (iid, noniid). Networks have half of the paper's channels.
Every row has a command that gives its run alone.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anysize as az
from anysize.client.process import one_thread

HERE = Path(__file__).parent
NARROW = "model.options.channels=[8,16,32]"
SPLITS = {"iid": [], "noniid": ["data.split=classes", "data.classes_per_client=5", "data.unbalance=0.5"]}
CELLS = {
    "resnet14": ["model.name=resnet14"],
    "resnet20": ["model.name=resnet20"],
    "resnet32": ["model.name=resnet32"],
    "elf zeros": ["method.average=all"],
    "elf holders": ["method.average=holders"],
}


def rows(split: str, cell: str, rounds: str, seed: str) -> Iterator[str]:
    """A row for each evaluated round and size of one run."""
    dense = cell.startswith("resnet")
    file = "cifar10-16-fixed.toml" if dense else f"cifar10-16-{split}.toml"
    table = [] if dense else [f"method.table=residual-{split}-{seed}.table.safetensors"]
    changes = [*CELLS[cell], NARROW, *table, *(SPLITS[split] if dense else []), f"rounds={rounds}", f"seed={seed}"]
    changes += ["evaluate_every=20", "engine.name=inprocess"]
    sets = " ".join(f"--set {shlex.quote(change)}" for change in changes)
    with tempfile.TemporaryDirectory() as folder, one_thread():
        history = az.run(HERE / file, overrides=changes, out=Path(folder) / "run", progress=False).history
    hours = sum(event["seconds"] for event in history) / 3600
    for event in history:
        for size, accuracy in event.get("accuracy", {}).items():
            about = f"{split},{cell},{seed},{event['round']},{cell if dense else size},{accuracy:.4f},{hours:.2f}"
            yield f'{about},"anysize run experiments/elf/{file} {sets}"'


def main(rounds: str, seed: str, splits: list[str]) -> None:
    print("split,method,seed,round,network,accuracy,hours,command", flush=True)
    for split in splits:
        for cell in CELLS:
            for row in rows(split, cell, rounds, seed):
                print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
