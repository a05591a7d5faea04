"""Who trains what, and at which cost (Figs. 5 and 6): Split-Mix and SHeteroFL on the digits domains.

    python experiments/splitmix/coverage.py > experiments/splitmix/results/coverage.csv

All clients take part in every round, so 16 rounds on a tenth of the data are enough: which parts a client trains
depends on neither. Every row has a command that gives its run alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import anysize as az
from anysize.client.process import one_thread
from anysize.report import coverage
from anysize.report.record import read

FILE = Path(__file__).parent / "digits-domains.toml"
SHORT = ["data.fraction=0.1", "rounds=16", "evaluate_every=16", "engine.name=inprocess"]


def rows(method: str) -> Iterator[str]:
    """The share of the model that each domain's clients ever trained, then mean and spread of a client's costs."""
    changes = [f"method.name={method}", *SHORT]
    sets = " ".join(f"--set {change}" for change in changes)
    command = f"anysize run experiments/splitmix/digits-domains.toml {sets}"
    with tempfile.TemporaryDirectory() as folder, one_thread():
        az.run(FILE, overrides=changes, out=Path(folder) / "run", progress=False)
        record = read(Path(folder) / "run")
    trained, costs = coverage.trained_by_domain(record), coverage.statistics(record)
    assert trained is not None
    assert costs is not None
    for domain, clients, _, share in trained.rows:
        yield f"{method},share trained,{domain},{clients},{share:.4f},,{command}"
    for of, clients, mean, spread, *_ in costs.rows:
        if of in ("parameters", "training_macs"):
            yield f"{method},{of},,{clients},{mean:.0f},{spread:.0f},{command}"


def main() -> None:
    print("method,of,domain,clients,mean,spread,command")
    for method in ("splitmix", "sheterofl"):
        for row in rows(method):
            print(row, flush=True)


if __name__ == "__main__":
    main()
