"""Every experiment file runs a round, on small sets that are made here in the documented formats of the named ones."""

from __future__ import annotations

import gzip
import json
import lzma
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from anysize import config as configs
from anysize.comparisons.cells import cells
from anysize.config.tables import ExperimentConfig
from anysize.data import files
from anysize.data.sources import DOMAINNET_CLASSES
from anysize.runs.experiment import Experiment
from test_experiments_all import FILES, SMALL

CLIENTS = 6
IMAGES = {  # height and width, channels, classes
    "cifar10": (32, 3, 10),
    "cifar10-16": (16, 3, 10),
    "cifar100": (32, 3, 100),
    "emnist-part": (28, 1, 62),
    "fashion-mnist": (28, 1, 10),
    "femnist": (28, 1, 62),
    "mnist": (28, 1, 10),
    "mnist-m": (28, 3, 10),
    "svhn": (32, 3, 10),
    "synth-digits": (32, 3, 10),
    "usps": (16, 1, 10),
}
WRITTEN = ("femnist", "mnist")  # every sample has its writer
QUICK = (
    "benchmark/fashion",
    "elf/fashion-iid",
    "flanc/fashion-mnist-small",
    "prism/digits",
    "splitmix/digits-domains",
)
"""One file of each folder; the others are slow tests, since all together they take minutes."""


def images(path: Path, side: int, channels: int, classes: int, writers: int) -> None:
    random = np.random.default_rng(0)
    shape = (side, side, 3) if channels == 3 else (side, side)
    arrays = {}
    for part, count in (("train", max(12 * CLIENTS, 3 * classes)), ("test", 2 * classes)):
        arrays[f"x_{part}"] = random.integers(256, size=(count, *shape), dtype=np.uint8)
        arrays[f"y_{part}"] = np.arange(count) % classes
        if writers and part == "train":
            arrays["group_train"] = np.arange(count) % writers
    np.savez(path, **arrays)


def texts(folder: Path) -> None:
    with gzip.open(folder / "shakespeare.jsonl.gz", "wt") as roles:
        for role in range(7 * CLIENTS):
            roles.write(json.dumps({"user": f"role {role}", "text": "to be, or not to be. " * 60}) + "\n")
    with lzma.open(folder / "imdb.jsonl.xz", "wt") as reviews:
        for number in range(16 * CLIENTS):
            part = "train" if number % 4 else "test"
            words = " ".join(f"word{(number * step) % 1500}" for step in range(1, 40))
            reviews.write(json.dumps({"text": words, "label": number // 4 % 2, "split": part}) + "\n")


def pictures(folder: Path) -> None:
    random = np.random.default_rng(0)
    for domain in ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"):
        for kind in DOMAINNET_CLASSES:
            place = folder / domain / kind
            place.mkdir(parents=True)
            for number in range(3):
                Image.fromarray(random.integers(256, size=(8, 8, 3), dtype=np.uint8)).save(place / f"{number}.png")


@pytest.fixture(scope="module", autouse=True)
def little_sets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A machine on which the folder of data holds a little of every named set; nothing is downloaded."""
    folder = tmp_path_factory.mktemp("data")
    for name, kind in IMAGES.items():
        images(folder / f"{name}.npz", *kind, writers=10 * CLIENTS if name in WRITTEN else 0)
    texts(folder)
    pictures(folder / "domainnet")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was downloaded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANYSIZE_DATA", str(folder))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(files, "DEBIAN_FOLDER", folder / "debian")
        patch.setattr(files, "download", refuse)
        yield


def short(config: ExperimentConfig) -> list[str]:
    """What makes one round of an experiment small, and leaves its method, tricks, split and devices as they are."""
    found = [
        *("rounds=1", "evaluate_every=1", 'engine.name="inprocess"'),
        *("training.local_steps=1", "training.batch_size=8", "evaluation.calibration_clients=2"),
        *(f"model.options.{option}" for option in SMALL[config.model.name]),
    ]
    if config.data.clients != 1:
        found.append(f"data.clients={CLIENTS}")
    each = config.devices.clients_per_round
    if isinstance(each, list | tuple):
        found.append(f"devices.clients_per_round={[1] * len(each)}")
    else:
        found.append("devices.participation=1.0")
    if config.data.name == "digits-domains":
        found += ["data.options.size=8", "data.options.per_domain=60", "data.options.test_per_domain=10"]
    if config.data.name == "domainnet":
        found.append("data.options.size=64")
    if config.method.name == "elf":
        found += ["method.proxy=0.5", "method.proxy_epochs=1", "method.prune_step=0.5"]
    if config.evaluation.attack != "none":
        found += ["tricks.attack_steps=1", "evaluation.attack_steps=1", "evaluation.attack_samples=8"]
    return found


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for path in FILES
        for name in [f"{path.parent.name}/{path.stem}"]
    ],
)
def test_a_file_runs_a_round(path: Path, tmp_path: Path) -> None:
    config = configs.load(path)
    if config.compare is not None:
        config = cells(config)[0].config
    config = configs.from_dict(config.to_dict(), short(config), folder=tmp_path)
    run = Experiment.from_config(config).run(tmp_path / "run")
    (event,) = run.history
    assert event["clients"]
    assert all(math.isfinite(row["loss"]) for row in event["clients"])
    assert set(event["metrics"]) == {size.label for size in run.sizes}
    assert run.customize() is not None
