"""The cells of the paper's Table 1, Figs. 4 and 5 at the size two cores carry: dense networks alone, and eLF.

    python experiments/elf/studies.py residual 40 iid noniid 0 > experiments/elf/results/cifar10-16-residual.csv

The arguments are a study, a number of rounds, splits and seeds. The studies: residual (CIFAR-10 at 16 x 16, Table 1),
combinations (the same with two depths, Fig. 4), emnist (Table 1), fashion (Fashion-MNIST, Table 1, Figs. 4 and 5),
short (zeros and holders on a small residual network, with masks and without). Residual networks have half of the
paper's channels. Every row has a command that gives its run alone.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import anysize as az
from anysize.client.process import one_thread

HERE = Path(__file__).parent
RESIDUAL = {"resnet14": 2, "resnet20": 3, "resnet32": 5}  # blocks in a stage
PLAIN = {"conv3": 1, "conv5": 2, "conv7": 3}
NARROW = "model.options.channels=[8,16,32]"


class Cell(NamedTuple):
    """A run but for its seed and length: its name, its file, and what it changes there."""

    name: str
    file: str
    changes: list[str]
    table: str = ""


def skewed(split: str, classes: int) -> list[str]:
    """What makes a file of the dense networks, which is iid, non-iid as eLF's."""
    if split == "iid":
        return []
    return ["data.split=classes", f"data.classes_per_client={classes}", "data.unbalance=0.5"]


def residual(split: str) -> Iterator[Cell]:
    """Each dense network alone, and eLF's two ways to count what a device does not have."""
    for name in RESIDUAL:
        yield Cell(name, "cifar10-16-fixed.toml", [f"model.name={name}", NARROW, *skewed(split, 5)])
    for name, average in {"elf zeros": "all", "elf holders": "holders"}.items():
        yield Cell(name, f"cifar10-16-{split}.toml", [f"method.average={average}", NARROW], f"residual-{split}")


def pairs(split: str) -> Iterator[Cell]:
    """eLF with two depths of the three, half of the devices each."""
    for small, large in combinations(RESIDUAL, 2):
        groups = ",".join(f'{{name="{name}",depth={RESIDUAL[name]}}}' for name in (small, large))
        changes = [f"model.name={large}", NARROW, "devices.clients_per_round=[5,5]", f"devices.groups=[{groups}]"]
        changes.append(f"method.depths=[{RESIDUAL[small]},{RESIDUAL[large]}]")
        yield Cell(f"elf {small} + {large}", f"cifar10-16-{split}.toml", changes, f"{small}-{large}-{split}")


def emnist(split: str) -> Iterator[Cell]:
    """Each plain network alone, and eLF's two ways to count what a device does not have."""
    for name, blocks in PLAIN.items():
        yield Cell(name, "emnist-fixed.toml", [f"model.options.blocks={blocks}", *skewed(split, 20)])
    file = "emnist-iid.toml" if split == "iid" else "emnist.toml"
    for name, average in {"elf zeros": "all", "elf holders": "holders"}.items():
        yield Cell(name, file, [f"method.average={average}"], f"emnist-{split}")


def fashion(split: str) -> Iterator[Cell]:
    """Each plain network alone; eLF by what stands for removed blocks; iid also two depths, FedProx and FedMAX."""
    part, file, table = "data.fraction=0.25", f"fashion-{split}.toml", f"fashion-{split}"
    holders = [part, "method.average=holders"]
    for name, blocks in PLAIN.items():
        yield Cell(name, "fashion-fixed.toml", [part, f"model.options.blocks={blocks}", *skewed(split, 5)])
    yield Cell("elf zeros", file, [part, "method.average=all"], table)
    yield Cell("elf identity", file, [part, "method.average=all", "method.fill=identity"], table)
    yield Cell("elf holders", file, holders, table)
    if split != "iid":
        return
    for small, large in combinations(PLAIN, 2):
        groups = ",".join(f'{{name="{name}",depth={PLAIN[name]}}}' for name in (small, large))
        two = [*holders, "devices.clients_per_round=[5,5]", f"devices.groups=[{groups}]"]
        yield Cell(f"elf holders {small} + {large}", file, two, f"fashion-{small}-{large}")
    proximal = [*holders, "tricks.proximal=200", "tricks.proximal_form=mean"]
    yield Cell("elf holders fedprox", file, proximal, "fashion-proximal")
    yield Cell("elf holders fedmax", file, [*holders, "tricks.max_entropy=10"], "fashion-entropy")


def short(split: str) -> Iterator[Cell]:
    """Zeros and holders on three depths of ResNet-20, with half of all weights masked and with none."""
    for (name, average), masked in product({"zeros": "all", "holders": "holders"}.items(), (True, False)):
        masks = [] if masked else ["method.sparsities=[0.0]", "method.proxy=0"]
        label = f"elf {name}" if masked else f"elf {name} no masks"
        changes = [f"data.split={split}", f"method.average={average}", *masks]
        yield Cell(label, "cifar10-16-short.toml", changes, "short" if masked else "short-dense")


STUDIES = {"residual": residual, "combinations": pairs, "emnist": emnist, "fashion": fashion, "short": short}


def rows(split: str, cell: Cell, rounds: str, seed: str) -> Iterator[str]:
    """A row for each evaluated round and size of one run."""
    table = [f"method.table={cell.table}-{seed}.table.safetensors"] if cell.table else []
    changes = [*cell.changes, *table, f"rounds={rounds}", f"seed={seed}", "evaluate_every=10", "engine.name=inprocess"]
    sets = " ".join(f"--set {shlex.quote(change)}" for change in changes).replace('"', '""')
    with tempfile.TemporaryDirectory() as folder, one_thread():
        history = az.run(HERE / cell.file, overrides=changes, out=Path(folder) / "run", progress=False).history
    hours = sum(event["seconds"] for event in history) / 3600
    for event in history:
        for size, accuracy in event.get("accuracy", {}).items():
            network = size if cell.table else cell.name
            about = f"{split},{cell.name},{seed},{event['round']},{network},{accuracy:.4f},{hours:.2f}"
            yield f'{about},"anysize run experiments/elf/{cell.file} {sets}"'


def main(study: str, rounds: str, more: list[str]) -> None:
    seeds = [word for word in more if word.isdigit()]
    splits = [word for word in more if not word.isdigit()]
    print("split,method,seed,round,network,accuracy,hours,command", flush=True)
    for seed, split in product(seeds, splits):
        for cell in STUDIES[study](split):
            for row in rows(split, cell, rounds, seed):
                print(row, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], sys.argv[3:])
