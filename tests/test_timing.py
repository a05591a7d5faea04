"""What a machine can train is found out on it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import small
from anysize import config as configs
from anysize.cost import memory
from anysize.cost.memory import available_bytes
from anysize.deploy import timing as timings
from anysize.deploy.timing import measure
from anysize.methods.capabilities import Searched
from anysize.methods.messages import Client
from anysize.methods.size import Size
from anysize.runs.experiment import Experiment


def experiment(**tables: Any) -> Experiment:
    given: dict[str, Any] = {
        "data": {"name": "devices"},
        "model": {"name": "mlp", "input": [64], "options": {"hidden": [400]}},
        "task": {"classes": 10},
        "devices": {"capacities": [1.0, 0.25, 0.5]},
        "method": {"name": "fjord"},
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
        # six copies: the message, the network, its gradients, its momentum, as it came and as it leaves; and what a
        # step holds
        assert timing.memory_bytes > 6 * 4 * parameters(hidden)
        assert timing.memory_bytes < 6 * 4 * parameters(hidden) + 8 * 4 * (64 + 3 * hidden + 40)
        assert timing.round_seconds == pytest.approx(10 * timing.step_seconds)
    assert found.to_json()["capacity"] == 1.0


def test_what_memory_does_not_hold_is_not_even_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = measure(experiment(), samples=80).timings
    tried: list[int] = []

    def timed(context: Any, method: Any, module: nn.Module, batch: Any) -> float:
        tried.append(sum(parameter.numel() for parameter in module.parameters()))
        return 0.001

    monkeypatch.setattr(timings, "step_seconds", timed)
    found = measure(experiment(), samples=80, memory_bytes=round(1.3 * sizes[1].memory_bytes))
    assert found.capacity == 0.5
    assert tried == [parameters(100), parameters(200)]
    assert found.timings[2].step_seconds is None
    assert measure(experiment(), samples=80, memory_bytes=1000).capacity is None


def test_time_counts_steps_and_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "step_seconds", lambda context, method, module, batch: 0.5)
    slow = measure(experiment(), samples=20, bytes_per_second=1000.0)
    expected = [3 * 0.5 + 2 * 4 * parameters(hidden) / 1000 for hidden in (100, 200, 400)]
    # the rest is names, shapes and tickets
    assert [timing.round_seconds for timing in slow.timings] == pytest.approx(expected, rel=0.03)
    limited = measure(experiment(), samples=20, bytes_per_second=1000.0, seconds=1.03 * expected[1])
    assert limited.capacity == 0.5
    assert measure(experiment(), samples=20, seconds=1.4).capacity is None
    steps = experiment(training={"batch_size": 8, "local_steps": 7})
    assert measure(steps, samples=20).timings[0].round_seconds == pytest.approx(3.5)


@pytest.mark.parametrize("name", small.fast_if({"heterofl", "splitmix", "flanc", "fedhm"}.__contains__, small.METHODS))
def test_what_is_timed_is_a_step_of_the_method_on_the_network_that_it_sends(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only what has blocks can lose some.
    options = {"channels": [4, 4, 8] if name == "elf" else [4, 8]}
    model = {"name": "resnet20" if name == "elf" else "small-cnn", "input": [1, 8, 8]}
    made = experiment(
        model=model | {"options": options},
        method={"name": name.split(",")[0], **small.METHODS[name]},
        devices={"capacities": [0.5, 1.0], "share": ["labels"]},
        tricks={"attack_steps": 1},
    )
    method, context = made.method, made.context_for(tuple(Size(c) for c in (0.5, 1.0)))
    tried: list[int] = []
    plain = timings.step_seconds

    def timed(context: Any, given: Any, module: nn.Module, batch: Any) -> float:
        assert given is method
        tried.append(sum(parameter.numel() for parameter in module.parameters()))
        return plain(context, given, module, batch)

    monkeypatch.setattr(timings, "step_seconds", timed)
    found = measure(made, samples=8)
    assert [timing.fits for timing in found.timings] == [True, True]
    if isinstance(method, Searched):
        return  # its sizes are depths
    state = method.init(context)
    sent = [method.extract(context, state, Client(0, 0, size, 1, 8, context.seed)) for size in context.sizes]
    built = [method.build(context, message) for message in sent]
    assert tried == [sum(parameter.numel() for parameter in network.parameters()) for network in built]


def test_other_tasks_and_blocks_can_be_measured() -> None:
    text = experiment(
        model={"name": "char-lstm", "input": [12], "options": {"hidden": 8}},
        task={"name": "next-token", "classes": 20},
        method={"name": "fedavg"},
        devices={"groups": [{"name": "board", "budget": {"macs": 1e6}}]},
    )
    assert [timing.label for timing in measure(text, samples=8).timings] == ["0.25", "0.5", "0.75", "1.0"]


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


def test_a_size_for_which_memory_does_not_suffice_is_not_made_to_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = small.fleet_tables("heterofl", [0.25, 1.0])
    made = Experiment.from_config(configs.from_dict(tables))
    context = made.context.for_client()
    least = timings.own_latency(context, made.method, made.example)
    assert 0 < least(context.sizes[0]) < math.inf
    monkeypatch.setattr(timings, "trainable", lambda *given: pytest.fail("it was made"))
    none = timings.own_latency(context, made.method, made.example, memory_bytes=10)
    assert none(context.sizes[0]) == math.inf
    assert least(context.sizes[0]) < math.inf  # what was timed once is not timed again
