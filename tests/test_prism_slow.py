"""A few rounds of each of PriSM's settings on real data, where $ANYSIZE_DATA has it: they start, and they learn."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import anysize as az
from anysize import config as configs
from anysize.runs.experiment import Experiment

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[1] / "experiments" / "prism"


def shortened(name: str, out: Path, *overrides: str) -> az.Run:
    """The run of an experiment file with these changes, judged once, after the last round."""
    data = Path(os.environ.get("ANYSIZE_DATA", "nowhere"))
    wanted = [*overrides, "engine.name=inprocess", "evaluate_every=1000", "checkpoint_every=1000"]
    config = configs.load(FOLDER / f"{name}.toml", wanted)
    if not any(data.glob(f"{config.data.name}.*")):
        pytest.skip(f"{config.data.name} is not in $ANYSIZE_DATA")
    return Experiment.from_config(config).run(out)


def test_handwriting_is_learned_by_writers_that_hold_a_fifth(tmp_path: Path) -> None:
    run = shortened("handwriting", tmp_path, "rounds=6", "data.fraction=0.2", "training.learning_rate=0.2")
    assert run.history[-1]["accuracy"]["1.0"] > 0.5, run.history[-1]["accuracy"]


def test_film_reviews_are_read_by_an_lstm_whose_loss_falls(tmp_path: Path) -> None:
    few = ["data.fraction=0.12", "data.clients=10", "data.options.length=30", "devices.participation=1.0"]
    fast = ["training.optimizer=adam", "training.learning_rate=0.01", "model.options.layers=1"]
    run = shortened("imdb-lstm", tmp_path, "rounds=6", *few, *fast)
    losses = [event["train_loss"] for event in run.history]
    assert losses[-1] < losses[0] - 0.004, losses
    assert set(run.history[-1]["accuracy"]) == {"0.2", "1.0"}


def test_a_transformer_learns_from_a_random_start(tmp_path: Path) -> None:
    few = ["data.name=cifar10-16", "data.fraction=0.04", "data.clients=10", "devices.participation=0.4"]
    fast = ["training.optimizer=adam", "training.learning_rate=0.002", "model.options.depth=4"]
    run = shortened("cifar10-vit", tmp_path, "rounds=5", *few, *fast)
    assert run.history[-1]["accuracy"]["1.0"] > 0.15, run.history[-1]["accuracy"]  # of ten classes


def test_vgg11_learns_in_one_place_with_a_sub_model_every_step(tmp_path: Path) -> None:
    small = ["data.name=cifar10-16", "data.augment=[]", "model.options.channels=[32,64,64,64,128,128,128,128]"]
    run = shortened("vgg11-centralised", tmp_path, "rounds=100", *small)
    assert run.history[-1]["accuracy"]["1.0"] > 0.15, run.history[-1]["accuracy"]
    first, last = (run.history[i]["train_loss"] for i in (0, -1))
    assert last < first - 0.3
