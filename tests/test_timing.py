"""What a machine can train is found out on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anysize import config as configs
from anysize.cost import memory
from anysize.cost.memory import available_bytes
from anysize.deploy import timing as timings
from anysize.deploy.timing import measure, step_seconds
from anysize.runs.experiment import Experiment


def experiment(**tables: Any) -> Experiment:
    given: dict[str, Any] = {
        "data": {"name": "devices"},
        "model": {"name": "mlp", "input": [64], "options": {"hidden": [400]}},
        "task": {"classes": 10},
        "devices": {"capacities": [1.0, 0.25, 0.5]},
        "method": {"name": "flanc"},
        "training": {"batch_size": 8},
    }
    return Experiment.from_config(configs.from_dict(given | tables))


def parameters(hidden: int) -> int:
    """Of the ordinary network with that many hidden units."""
    network = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    return sum(parameter.numel() for parameter in network.parameters())


def test_every_size_is_timed_smallest_first() -> None:
    found = measure(experiment(), samples=80)
    assert [timing.label for timing in found.timings] == ["0.25", "0.5", "1.0"]
    assert found.capacity == 1.0
    for timing, hidden in zip(found.timings, (100, 200, 400)):
        assert timing.step_seconds is not None
        assert timing.step_seconds > 0
        # five copies: the network, its gradients, its momentum, as it came and as it leaves; and what a step holds
        assert timing.memory_bytes > 5 * 4 * parameters(hidden)
        assert timing.memory_bytes < 5 * 4 * parameters(hidden) + 8 * 4 * (64 + 3 * hidden + 40)
        assert timing.round_seconds == pytest.approx(10 * timing.step_seconds)
    assert found.to_json()["capacity"] == 1.0


def test_what_memory_does_not_hold_is_not_even_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = measure(experiment(), samples=80).timings
    tried: list[int] = []

    def timed(context: Any, network: nn.Module, batch: Any) -> float:
        tried.append(sum(parameter.numel() for parameter in network.parameters()))
        return 0.001

    monkeypatch.setattr(timings, "step_seconds", timed)
    found = measure(experiment(), samples=80, memory_bytes=round(1.3 * sizes[1].memory_bytes))
    assert found.capacity == 0.5
    assert tried == [parameters(100), parameters(200)]
    assert found.timings[2].step_seconds is None
    assert measure(experiment(), samples=80, memory_bytes=1000).capacity is None


def test_time_counts_steps_and_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "step_seconds", lambda context, network, batch: 0.5)
    slow = measure(experiment(), samples=20, bytes_per_second=1000.0)
    expected = [3 * 0.5 + 2 * 4 * parameters(hidden) / 1000 for hidden in (100, 200, 400)]
    assert [timing.round_seconds for timing in slow.timings] == pytest.approx(expected)
    limited = measure(experiment(), samples=20, bytes_per_second=1000.0, seconds=expected[1] + 0.1)
    assert limited.capacity == 0.5
    assert measure(experiment(), samples=20, seconds=1.4).capacity is None
    steps = experiment(training={"batch_size": 8, "local_steps": 7})
    assert measure(steps, samples=20).timings[0].round_seconds == pytest.approx(3.5)


def test_a_methods_own_costs_scale_the_ordinary_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "step_seconds", lambda context, network, batch: 0.5)
    plain = measure(experiment(), samples=8).timings[0]
    assert plain.macs_per_second is not None
    twice = {"training_macs": 2 * plain.macs_per_second * 0.5 / 8, "activation_bytes": 5, "bytes": 100, "parameters": 0}
    found = measure(experiment(), samples=8, costs={"0.25": twice}, bytes_per_second=100.0).timings[0]
    assert found.step_seconds == pytest.approx(1.0)
    assert found.round_seconds == pytest.approx(2.0)


def test_other_tasks_and_blocks_can_be_measured() -> None:
    text = experiment(
        model={"name": "char-lstm", "input": [12], "options": {"hidden": 8}},
        task={"name": "next-token", "classes": 20},
        method={"name": "fedavg"},
        devices={"groups": [{"name": "board", "budget": {"macs": 1e6}}]},
    )
    assert [timing.label for timing in measure(text, samples=8).timings] == ["0.25", "0.5", "0.75", "1.0"]


def test_a_step_is_a_real_training_step() -> None:
    made = experiment()
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    before = network[1].weight.detach().clone()
    batch = made.example
    real = type(batch)(torch.rand(8, 64), torch.zeros(8, dtype=torch.int64))
    assert step_seconds(made.context_for(()), network, real) > 0
    assert not torch.equal(network[1].weight, before)


def test_free_memory_is_the_least_of_machine_and_container(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": ["MemTotal: 100 kB", "MemAvailable: 50 kB"],
        "/sys/fs/cgroup/memory.max": ["30000"],
        "/sys/fs/cgroup/memory.current": ["10000"],
    }
    monkeypatch.setattr(memory, "_lines", lambda path: files.get(Path(path).as_posix(), []))
    assert available_bytes() == 20000
    files["/sys/fs/cgroup/memory.max"] = ["max"]
    assert available_bytes() == 50 * 1024
    files.clear()
    assert available_bytes() is None
