"""Budgets in total memory: what a training process takes, counted before and measured on real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import small
from anysize.config.tables import TrainingConfig
from anysize.cost.count import HeldBytes
from anysize.cost.memory import PROCESS_BYTES, Scratch, process_bytes
from anysize.cost.operations import FusedAttention, counter
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
    """The memory of a dense network's training, by hand: its six tensors, its copies and momentum."""
    first, second = (max(1, -(-int(width * 16) * hidden // 16)) for hidden in (512, 256))
    parameters = 65 * first + (first + 1) * second + (second + 1) * 10
    return PROCESS_BYTES + 6 * 220_000 + 9 * 4 * parameters


def test_a_memory_budget_is_met_by_the_largest_width_that_fits() -> None:
    full = budgeted(1e12)
    costs = {width: full.cost_in(full.context_for((Size(width),)), Size(width)).memory_bytes for width in GRID}
    for width, cost in costs.items():
        held = 1.5 * 4 * 16 * (64 + 3 * (512 + 256) * width + 60)  # activations of 16 samples, at most
        assert memory(width) < cost < memory(width) + held
    made = budgeted((costs[0.5] + costs[0.5625]) / 2)
    assert [size.width for size in made.sizes] == [0.5]
    assert full.context.scarce_activations  # FLANC then spends time rather than memory


def test_a_memory_budget_that_nothing_fits_names_the_smallest_that_would() -> None:
    with pytest.raises(
        ConfigError, match=r"group 'board' can train no size; the smallest needs memory_bytes = 4.9\d*e\+07"
    ):
        _ = budgeted(1e6).sizes


def test_a_memory_budget_that_changes_is_honoured_in_every_round() -> None:
    changing = {"group": "board", "rounds": [2, 3], "memory_bytes": [memory(0.25) * 1.001, 1e12]}
    made = budgeted(1e12, budgets=[changing])
    widths = sorted({size.width for size in made.sizes_of(made.fleet.groups[0])})
    assert widths[-1] == 1.0
    assert made.cost(made.sizes[0]).memory_bytes <= memory(0.25) * 1.001 < made.cost(made.sizes[-1]).memory_bytes


def test_the_optimizer_and_lstms_count() -> None:
    plain = process_bytes(TrainingConfig(momentum=0.0), 1000, 2, 0, 0)
    assert process_bytes(TrainingConfig(momentum=0.9), 1000, 2, 0, 0) - plain == 1000
    assert process_bytes(TrainingConfig(optimizer="adam"), 1000, 2, 0, 0) - plain == 2000
    network = nn.LSTM(3, 5, num_layers=2, batch_first=True, device="meta")
    with Scratch(network) as scratch:
        network(torch.zeros(7, 11, 3, device="meta"))
    assert scratch.total == round(2.7 * 4 * 5 * 2 * 7 * 11 * 4)


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.all, self.head = heads, nn.Linear(8, 24), nn.Linear(8, 2)

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        parts = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.all(x).chunk(3, -1)]
        mixed = nn.functional.scaled_dot_product_attention(*parts, **how)
        return self.head(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "how",
    [{}, {"is_causal": True}, {"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, {"attn_mask": torch.zeros(5, 5)}],
    ids=["plain", "causal", "bool mask", "float mask"],
)
def test_attention_is_counted_as_a_processor_holds_it(how: dict[str, Any]) -> None:
    """Autograd's own hooks around a real step are the oracle; products are counted by hand."""
    network, x = Attention(2), torch.randn(3, 5, 8)
    with HeldBytes(network) as real:
        network(x, **how).sum().backward()
    bare = Attention(2).to("meta")
    given = {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in how.items()}
    with FusedAttention(), counter() as found, HeldBytes(bare) as held:
        bare(x.to("meta"), **given).sum().backward()
    assert held.total == real.total
    linear = 3 * 5 * (8 * 24 * 2 + 8 * 2 * 3)  # the first layer's input needs no gradient
    assert found.get_total_flops() // 2 == linear + 6 * 3 * 2 * 5 * 5 * 4


def test_attention_with_dropout_is_taken_apart_as_a_processor_does() -> None:
    bare = Attention(2).to("meta")
    with FusedAttention(), HeldBytes(bare) as whole:
        bare(torch.zeros(3, 5, 8, device="meta")).sum().backward()
    with FusedAttention(), HeldBytes(bare) as apart:
        bare(torch.zeros(3, 5, 8, device="meta"), dropout_p=0.5).sum().backward()
    assert apart.total > whole.total


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small-cnn", "resnet18", "vit-tiny", "char-lstm", "vgg11"])
def test_a_device_of_a_fleet_takes_what_is_predicted(name: str) -> None:
    command = [sys.executable, str(BENCHMARK), "--once", name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    for (found,) in json.loads(done.stdout.splitlines()[-1]).values():
        assert found["predicted"] == pytest.approx(found["peak"] - found["idle"], rel=0.15)
