"""A few rounds of the FLANC paper's experiments on real data, where $ANYSIZE_DATA has it."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from anysize import config as configs
from anysize.comparisons.compare import compare
from anysize.comparisons.comparison import Comparison

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[1] / "experiments" / "flanc"
SHORT = ["rounds=2", "evaluate_every=2", "training.local_epochs=1", "data.clients=20", "devices.participation=0.2"]
NARROW = "model.options.channels=[16,32,64,128]"  # a quarter of the paper's: the full one takes hours on a CPU
SHORT_TEST = "data.options.test_fraction=0.01"
METHODS = ["heterofl", "fjord", "flanc"]


def needs(file: str) -> None:
    if not (Path(os.environ.get("ANYSIZE_DATA", "nowhere")) / file).exists():
        pytest.skip(f"{file} is not in $ANYSIZE_DATA")


def rounds(name: str, out: Path, *overrides: str) -> Comparison:
    """A short comparison; every number of it is finite and every method has every width."""
    made = compare(configs.load(FOLDER / f"{name}.toml", [*SHORT, *overrides]), METHODS, out=out)
    assert {(row.method, row.size) for row in made.rows} == {
        (method, size) for method in METHODS for size in ("0.25", "0.5", "0.75", "1.0")
    }
    assert all(math.isfinite(row.mean) for row in made.rows)
    return made


@pytest.mark.parametrize(("data", "capacities"), [("cifar10-16", "round"), ("cifar10-small", "never")])
def test_cifar10_runs_with_all_methods(tmp_path: Path, data: str, capacities: str) -> None:
    needs(f"{data}.npz")
    static = ["devices.redraw=never", "devices.cover=false"] if capacities == "never" else []
    fraction = 0.06 if data == "cifar10-small" else 0.04
    made = rounds("cifar10", tmp_path / "runs", f'data.name="{data}"', f"data.fraction={fraction}", NARROW, *static)
    assert made.metric == "accuracy"


def test_an_imbalanced_fleet_runs(tmp_path: Path) -> None:
    needs("cifar10-16.npz")
    overrides = [*SHORT, 'data.name="cifar10-16"', "data.fraction=0.04", "devices.fractions=[0.25,0.75]", NARROW]
    made = compare(configs.load(FOLDER / "imbalanced.toml", overrides), METHODS, out=tmp_path / "runs")
    assert {row.size for row in made.rows} == {"0.25", "1.0"}


def test_cifar100_runs_with_all_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    parts = {}
    for part, count in (("train", 1200), ("test", 200)):
        parts[f"x_{part}"] = random.integers(256, size=(count, 32, 32, 3), dtype=np.uint8)
        parts[f"y_{part}"] = (np.arange(count) % 100).astype(np.uint8)
    np.savez(tmp_path / "cifar100.npz", **parts)
    monkeypatch.setenv("ANYSIZE_DATA", str(tmp_path))
    assert rounds("cifar100", tmp_path / "runs", NARROW).metric == "accuracy"


@pytest.mark.parametrize("split", ["natural", "iid"])
def test_shakespeare_is_learned_by_all_methods(tmp_path: Path, split: str) -> None:
    needs("shakespeare.jsonl.gz")
    made = rounds("shakespeare", tmp_path / "runs", f"data.split={split}", "data.fraction=0.1", "rounds=8", SHORT_TEST)
    assert made.metric == "perplexity"
    assert all(row.mean < 60 for row in made.rows)  # guessing among the 75 symbols has 75


def test_fashion_mnist_is_learned_with_equal_tricks(tmp_path: Path) -> None:
    needs("fashion-mnist.npz")
    overrides = ["data.split=iid", "data.fraction=0.1", "training.learning_rate=0.02", "rounds=4"]
    made = rounds("fashion-mnist-equal", tmp_path / "runs", *overrides)
    assert all(row.mean > 0.3 for row in made.rows)
