"""Split-Mix and its baselines on the digits domains, at every width (Table 1, Fig. 4).

    python experiments/splitmix/widths.py 0 1 2 > experiments/splitmix/results/widths.csv

The arguments are seeds. `accuracy` is that of the network as it ships, also for each domain; `by_test_batch` has the
statistics of the test batch, as the paper tests. Every row has a command that gives its run alone.
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

FILE = Path(__file__).parent / "digits-domains.toml"
FEDAVG = ["method.name=fedavg", "tricks.masked_loss=true"]
METHODS = {
    "splitmix": [],
    "sheterofl": ["method.name=sheterofl"],
    "fedavg": FEDAVG,
    "fedavg each": [*FEDAVG, "method.width=each"],
    "splitmix, rate 0.01": ["training.learning_rate=0.01"],
}
DOMAINS = ("mnist", "mnist-m", "usps")


def rows(method: str, seed: str) -> Iterator[str]:
    """A row for each evaluated round and size of one run."""
    changes = [*METHODS[method], f"seed={seed}", "engine.name=inprocess"]
    sets = " ".join(f"--set {shlex.quote(change)}" for change in changes)
    with tempfile.TemporaryDirectory() as folder, one_thread():
        run = az.run(FILE, overrides=changes, out=Path(folder) / "run", progress=False)
        history = run.history
    hours = sum(event["seconds"] for event in history) / 3600
    for event in history:
        for size, metrics in event.get("metrics", {}).items():
            accuracies = [metrics["accuracy"], *(metrics[f"accuracy/{domain}"] for domain in DOMAINS)]
            shown = ",".join(f"{accuracy:.4f}" for accuracy in [event["by_test_batch"][size], *accuracies])
            command = f"anysize run experiments/splitmix/digits-domains.toml {sets}"
            yield f'"{method}",{seed},{event["round"]},{size},{shown},{hours:.3f},"{command}"'


def main(seeds: list[str]) -> None:
    print(f"method,seed,round,size,by_test_batch,accuracy,{','.join(DOMAINS)},hours,command", flush=True)
    for seed, method in product(seeds, METHODS):
        for row in rows(method, seed):
            print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
