"""An experiment of a second or two on the bundled digits, and the command line called in this process."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anysize import config as configs
from anysize.cli.commands import main
from anysize.config.tables import ExperimentConfig
from anysize.runs.experiment import Experiment


def fast_if(is_fast: Callable[..., bool], *cases: Iterable[Any]) -> list[Any]:
    """The parameters of a test, or all combinations of several; those that are not fast stand in the slow suite."""
    return [
        pytest.param(*values, marks=() if is_fast(*values) else pytest.mark.slow)
        for values in itertools.product(*cases)
    ]


def config(**changes: Any) -> ExperimentConfig:
    """A small experiment; a table given as a keyword is merged into the small one's."""
    tables: dict[str, Any] = {
        "name": "small",
        "rounds": 3,
        "evaluate_every": 1,
        "data": {"name": "digits", "clients": 6, "fraction": 0.2, "validation": 0.2},
        "model": {"name": "mlp", "options": {"hidden": [16, 8]}},
        "devices": {"capacities": [0.5, 1.0]},
        "method": {"name": "flanc"},
        "training": {"learning_rate": 0.05, "batch_size": 16},
    }
    for key, value in changes.items():
        merged = key in tables and isinstance(value, Mapping) and key != "method"
        tables[key] = {**tables[key], **value} if merged else value
    return configs.from_dict(tables)


def experiment(**changes: Any) -> Experiment:
    """The small experiment, ready to run."""
    return Experiment.from_config(config(**changes))


def file(folder: Path, **changes: Any) -> Path:
    """The small experiment as a file."""
    path = folder / "experiment.toml"
    path.write_text(configs.dumps(config(**changes)))
    return path


METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "heterofl": {},
    "sheterofl": {},
    "ladder": {},
    "fedrolex": {},
    "fiarse": {},
    "fjord": {},
    "splitmix": {},
    "splitmix, sorted": {"sort_bases": True},
    "oat": {"encoding": 8},
    "flanc": {},
    "flanc, ordered dropout": {"ordered_dropout": True},
    "prism, first channels": {"channels": "first"},
    "prism, drawn channels": {"channels": "drawn"},
    "prism, all channels": {"channels": "all"},
    "prism, averaged momentum": {"channels": "all", "momentum": "averaged"},
    "fedhm": {},
    "fedhm, square": {"reshape": "square"},
    "origdrop": {},
    "elf": {"proxy": 0.0, "sparsities": [0.0]},
}
"""Every method, with the options that change what a device is sent; the name ends at the comma."""


def fleet_tables(case: str, capacities: Iterable[float] = (0.5, 1.0)) -> dict[str, Any]:
    """The tables of a small experiment with batch-norm for a fleet, by one of `METHODS`."""
    name = case.partition(",")[0]
    model: dict[str, Any] = {"name": "small-cnn", "options": {"channels": [8, 16]}}
    if name == "elf":
        model = {"name": "resnet14", "options": {"channels": [4, 8]}}
    tricks: dict[str, Any] = {"classwise_head": False} if name in ("fedrolex", "heterofl", "ladder") else {}
    return {
        "name": "fleet",
        "rounds": 2,
        "evaluate_every": 2,
        "data": {"name": "devices", "validation": 0.2},
        "model": model | {"input": [1, 8, 8]},
        "task": {"classes": 10},
        "devices": {"capacities": list(capacities)},
        "method": {"name": name} | METHODS[case],
        "tricks": tricks | ({"batch_norm": "tracked", "attack_steps": 1} if name == "oat" else {}),
        "training": {"learning_rate": 0.05},
        "engine": {"name": "flower", "min_clients": 2, "round_timeout": 300.0},
    }


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    """Exit code, output and errors of the command line."""
    monkeypatch.setattr(sys, "argv", ["anysize", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr()
    return int(stopped.value.code or 0), printed.out, printed.err


def normalised_network() -> nn.Module:
    """A little convolutional network with batch-norm for 8 x 8 digits, of torch's own layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32, 10),
        )
