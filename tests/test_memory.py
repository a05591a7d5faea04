"""Budgets in total memory: what a training process takes, counted before and measured on real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import small
from anysize.config.tables import TrainingConfig
from anysize.cost.memory import PROCESS_BYTES, Scratch, process_bytes
from anysize.errors import ConfigError
from anysize.experiment.sizes import GRID
from anysize.methods.size import Size
from anysize.runs.experiment import Experiment

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "device_memory.py"
WIDE: dict[str, Any] = {"model": {"options": {"hidden": [512, 256]}}, "method": {"name": "heterofl"}}


def budgeted(limit: float, **more: Any) -> Experiment:
    groups = [{"name": "board", "fraction": 1.0, "budget": {"memory_bytes": limit}}]
    tables = small.config(**WIDE).to_dict() | {"devices": {"groups": groups, **more}}
    return Experiment.from_config(type(small.config()).model_validate(tables))


def memory(width: float) -> int:
    """The memory of a dense network's training, by hand: momentum, copies, and the inputs of every layer."""
    first, second = (max(1, -(-int(width * 16) * hidden // 16)) for hidden in (512, 256))
    parameters = 65 * first + (first + 1) * second + (second + 1) * 10
    return PROCESS_BYTES + 8 * 4 * parameters


def test_a_memory_budget_is_met_by_the_largest_width_that_fits() -> None:
    full = budgeted(1e12)
    costs = {width: full.cost_in(full.context_for((Size(width),)), Size(width)).memory_bytes for width in GRID}
    for width, cost in costs.items():
        held = 1.1 * 4 * 16 * (64 + 3 * (512 + 256) * width + 60)  # activations of 16 samples, at most
        assert memory(width) < cost < memory(width) + held
    made = budgeted((costs[0.5] + costs[0.5625]) / 2)
    assert [size.width for size in made.sizes] == [0.5]
    assert full.context.scarce_activations  # FLANC then spends time rather than memory


def test_a_memory_budget_that_nothing_fits_names_the_smallest_that_would() -> None:
    with pytest.raises(
        ConfigError, match=r"group 'board' can train no size; the smallest needs memory_bytes = 8.5\d*e\+07"
    ):
        _ = budgeted(1e6).sizes


def test_a_memory_budget_that_changes_is_honoured_in_every_round() -> None:
    changing = {"group": "board", "rounds": [2, 3], "memory_bytes": [memory(0.25) * 1.001, 1e12]}
    made = budgeted(1e12, budgets=[changing])
    widths = sorted({size.width for size in made.sizes_of(made.fleet.groups[0])})
    assert widths[-1] == 1.0
    assert made.cost(made.sizes[0]).memory_bytes <= memory(0.25) * 1.001 < made.cost(made.sizes[-1]).memory_bytes


def test_the_optimizer_and_lstms_count() -> None:
    plain = process_bytes(TrainingConfig(momentum=0.0), 1000, 0, 0)
    assert process_bytes(TrainingConfig(momentum=0.9), 1000, 0, 0) - plain == 1000
    assert process_bytes(TrainingConfig(optimizer="adam"), 1000, 0, 0) - plain == 2000
    network = nn.LSTM(3, 5, num_layers=2, batch_first=True, device="meta")
    with Scratch(network) as scratch:
        network(torch.zeros(7, 11, 3, device="meta"))
    assert scratch.total == 5 * 4 * 5 * 2 * 7 * 11 * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small-cnn", "resnet18", "vit-tiny", "char-lstm"])
def test_a_real_process_takes_what_is_predicted(tmp_path: Path, name: str) -> None:
    for step in ("--message", "--answer"):
        command = [sys.executable, str(BENCHMARK), step, str(tmp_path), name, "1.0"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    assert found["predicted"] == pytest.approx(found["peak"] - found["idle"], rel=0.15)
