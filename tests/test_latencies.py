"""The time of a training step on its way from the device that measured it to the size that its group trains."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import small
from anysize import config as configs
from anysize.deploy import device_file
from anysize.errors import ConfigError, TrustError
from anysize.experiment.lookup import step_timed
from anysize.experiment.plan import plan
from anysize.methods import ELF, Client
from anysize.methods.size import Size
from anysize.runs.experiment import Experiment
from test_elf import DENSE
from test_elf import made as elf_of

pytest.importorskip("flwr", reason="Flower is an extra")
layout = importlib.import_module("anysize.deploy.folder")
gate = importlib.import_module("anysize.deploy.gate")
selftest = importlib.import_module("anysize.deploy.selftest")
timing = importlib.import_module("anysize.deploy.timing")
fleet_tests = importlib.import_module("test_fleet")

ALIKE = {"method": "elf", "network": "5f3a", "batch_size": 16}


def milliseconds(module: nn.Module) -> float:
    """A clock that runs by the parameters of a network."""
    return sum(parameter.numel() for parameter in module.parameters()) / 100


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was timed."""
    timed: list[float] = []

    def seconds(context: Any, method: Any, module: nn.Module, batch: Any) -> float:
        timed.append(milliseconds(module))
        return timed[-1] / 1000

    monkeypatch.setattr(timing, "step_seconds", seconds)
    return timed


def fleet(folder: Path, case: str, limit: float) -> Path:
    """The folder of a fleet with one device, whose budget and whose group's limits the time."""
    tables = small.fleet_tables(case)
    kinds = [{"name": "board", "budget": {"latency_ms": limit}}]
    tables |= {"devices": {"groups": kinds}, "engine": {"name": "flower", "min_clients": 1}}
    file = folder / "own.toml"
    file.write_text(configs.dumps(configs.from_dict(tables)))
    home = folder / "fleet"
    layout.lay_out(home, layout.planned(file, 1, [], 18000, None))
    return home


def named(home: Path, name: str = "devices/device-0/latency.csv") -> None:
    """Names the file of latencies in the group of the server's experiment."""
    file = home / "experiment.toml"
    file.write_text(file.read_text().replace('name = "board"\n', f'name = "board"\nlatencies = "{name}"\n'))


def full_times(folder: Path) -> dict[Size, float]:
    """By hand: the time of each size that a budget could choose, by the clock."""
    experiment = Experiment.from_config(configs.load(folder / "experiment.toml"))
    method, found = experiment.method, {}
    for size in timing.choices_of(method, experiment.context_for(())):
        context = experiment.context_for((size,))
        message = method.extract(context, method.init(context), Client(0, 0, size, 1, 8, 0))
        found[size] = milliseconds(method.build(context, message))
    return found


@pytest.mark.parametrize("case, limit", [pytest.param("elf", 20.0, marks=pytest.mark.slow), ("heterofl", 10.0)])
def test_what_a_device_measures_decides_what_its_group_trains(
    tmp_path: Path, clock: list[float], case: str, limit: float
) -> None:
    home = fleet(tmp_path, case, limit)
    folder = home / "devices" / "device-0"
    times = full_times(folder)
    lines: list[str] = []
    selftest.measured(folder / "device.toml", insecure=True, say=lines.append)
    assert any(f"latency.csv: {len(times)} sizes" in line for line in lines)
    budget = device_file.load(folder / "device.toml").budget
    assert budget is not None
    assert budget.latency_ms == limit  # it stays

    with pytest.raises(ConfigError, match="group 'board' limits latency_ms, and nobody has measured it"):
        _ = Experiment.from_config(configs.load(home / "experiment.toml")).sizes
    named(home)
    wire = fleet_tests.Wire(home)
    clock.clear()
    experiment, ours = fleet_tests.made(home, wire, tmp_path)
    size = experiment.size_of_group["board"]
    fitting = [known for known, time in times.items() if time <= limit]
    assert 0 < len(fitting) < len(times)
    assert replace(size, name="") == max(fitting, key=lambda known: known.order)
    joined = ours.fleet(1, experiment.fleet)
    assert joined.group_of(0, 1).name == "board"
    assert not clock  # the device tells and holds the server to what it has measured
    [about] = list(ours._here.known.values())
    assert about.latency_ms == {"board": pytest.approx(times[replace(size, name="")], abs=1e-6)}


def device_times(folder: Path, experiment: Experiment, times: dict[int, float]) -> str:
    """A file in which a device says how long depths take."""
    file = folder / "latency.csv"
    sizes = {Size(1.0, depth=depth): time for depth, time in times.items()}
    file.write_text(timing.latency_rows(sizes, step_timed(experiment)))
    return str(file)


def test_the_look_up_table_is_solved_with_the_times_of_the_group(tmp_path: Path) -> None:
    """Oracle: the entry with the best accuracy among the depths that the device says are fast enough."""
    method = ELF(proxy=0.5, proxy_epochs=1, sparsities=(0.0, 0.5), table=str(tmp_path / "table.safetensors"))
    plain = elf_of(method, {"capacities": [1.0]})
    assert plain.table is not None
    file = device_times(tmp_path, plain, {1: 500.0, 2: 50.0, 3: 5000.0})  # an odd device: its own figures count
    board = {"name": "board", "budget": {"latency_ms": 60}, "latencies": file}
    found = elf_of(method, {"groups": [board, {"name": "any", "budget": {"latency_ms": 1e9}}]})
    best = max((e for e in plain.table.entries if e.size.depth == 2), key=lambda e: (e.accuracy, -e.cost["bytes"]))
    assert replace(found.size_of_group["board"], name="") == best.size
    with pytest.raises(ConfigError, match="group 'slow' can train no size; the smallest needs latency_ms = 50"):
        _ = elf_of(method, {"groups": [{"name": "slow", "budget": {"latency_ms": 40}, "latencies": file}]}).sizes


def test_a_trace_of_time_is_solved_with_the_times_of_the_group(tmp_path: Path) -> None:
    plain = elf_of(ELF(**DENSE), {"capacities": [1.0]})
    file = device_times(tmp_path, plain, {1: 10.0, 2: 20.0, 3: 30.0})
    (tmp_path / "budgets.csv").write_text("round,group,latency_ms\n2,board,15\n3,board,25\n")
    board = {"name": "board", "budget": {"latency_ms": 35}, "latencies": file}
    found = elf_of(ELF(**DENSE), {"groups": [board], "budgets": str(tmp_path / "budgets.csv")})
    keys = [found.fleet.group_of(0, number).key for number in (1, 2, 3, 4)]
    assert [found.size_of_group[key].depth for key in keys] == [3, 1, 2, 2]


def test_a_size_that_is_lowered_stays_fast_enough(tmp_path: Path) -> None:
    """The next smaller size may be slower; it is passed over."""
    plain = elf_of(ELF(**DENSE), {"capacities": [1.0]})
    file = device_times(tmp_path, plain, {1: 10.0, 2: 99.0, 3: 10.0})
    full = plain.cost(plain.sizes[-1])
    board = {
        "name": "b" * 60,
        "budget": {"latency_ms": 20, "bytes": full.bytes_down + full.bytes_up},
        "latencies": file,
    }
    found = elf_of(ELF(**DENSE), {"groups": [board]})  # the long name makes messages of the full depth too long
    assert found.size_of_group["b" * 60].depth == 1


def test_times_of_another_network_method_or_batch_are_refused(tmp_path: Path) -> None:
    plain = elf_of(ELF(**DENSE), {"capacities": [1.0]})
    file = device_times(tmp_path, plain, {1: 10.0, 2: 20.0, 3: 30.0})
    devices = {"groups": [{"name": "board", "budget": {"latency_ms": 35}, "latencies": file}]}
    other = elf_of(ELF(**DENSE), devices, training={"batch_size": 8, "learning_rate": 0.05})
    with pytest.raises(ConfigError, match=r"of another training step: batch_size 16, not 8; measure again"):
        _ = other.sizes
    with pytest.raises(ConfigError, match=r"another training step: network \w{16}, not \w{16}"):
        _ = elf_of(ELF(**DENSE), devices, normalised=True).sizes


def test_a_device_does_not_believe_times_of_another_step(tmp_path: Path) -> None:
    file = tmp_path / "latency.csv"
    file.write_text(timing.latency_rows({Size(0.5): 7.0}, ALIKE))
    measured = timing.noted_latency(file, ALIKE, lambda size: 99.0)
    assert (measured(Size(0.5, name="board")), measured(Size(1.0))) == (7.0, 99.0)
    assert timing.noted_latency(file, {**ALIKE, "batch_size": 8}, lambda size: 99.0)(Size(0.5)) == 99.0
    assert timing.noted_latency(tmp_path / "none.csv", ALIKE, lambda size: 99.0)(Size(0.5)) == 99.0
    file.write_text("width\n0.5\n")
    with pytest.raises(ConfigError, match="column 'latency_ms' is missing"):
        timing.noted_latency(file, ALIKE, lambda size: 99.0)


HEAD = "width,depth,latency_ms,method,network,batch_size\n"


@pytest.mark.parametrize(
    "content, words",
    [
        (HEAD + "2,,5,elf,a,16", "line 2: width: given '2', must be a number above 0 and at most 1"),
        (HEAD + "0.5,,-5,elf,a,16", "line 2: latency_ms: given '-5', must be a number above 0"),
        (HEAD + "0.5,,inf,elf,a,16", "line 2: latency_ms: given 'inf', must be a number above 0"),
        (HEAD + "0.5,0,5,elf,a,16", "line 2: depth: given '0', must be an integer, 1 or more"),
        (HEAD + "0.5,,5,elf,,16", "line 2: network is empty"),
        (HEAD + "0.5,,5,elf,a,16\n1,,5,elf,b,16", "rows differ in network (a, b)"),
        (HEAD, "has no rows"),
        ("width,time\n", "unknown column 'time'"),
    ],
)
def test_a_bad_file_of_latencies_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "latency.csv").write_text(content)
    board = {"name": "board", "budget": {"latency_ms": 5}, "latencies": "latency.csv"}
    tables = small.fleet_tables("heterofl") | {"devices": {"groups": [board]}}
    with pytest.raises(ConfigError) as caught:
        configs.from_dict(tables, folder=tmp_path)
    assert words in str(caught.value)
    assert "latency.csv" in str(caught.value)


def test_the_complete_file_and_new_devices_have_the_times_and_no_file(tmp_path: Path) -> None:
    home = fleet(tmp_path, "heterofl", 20.0)
    (home / "latency.csv").write_text(HEAD + "0.5,,5,heterofl,a,16\n1,,9.5,heterofl,a,16")
    named(home, "latency.csv")
    config = configs.load(home / "experiment.toml")
    assert configs.loads(configs.dumps(config)) == config
    times = config.devices.groups[0].latencies
    assert times is not None
    assert (times.widths, times.depths, times.latency_ms) == ((0.5, 1.0), (0, 0), (5.0, 9.5))
    layout.extend(home, {"late": {"capacity": 1.0}}, None)
    assert configs.load(home / "devices" / "late" / "experiment.toml").devices == config.devices
    device = device_file.load(home / "devices" / "late" / "device.toml")
    with pytest.raises(TrustError, match=r"names a file of this device \(devices\.groups\.latencies\)"):
        gate.accepted((home / "experiment.toml").read_text(), device)


def test_what_memory_does_not_hold_has_no_time_and_is_never_chosen(tmp_path: Path, clock: list[float]) -> None:
    home = fleet(tmp_path, "heterofl", 1e6)
    experiment = Experiment.from_config(configs.load(home / "experiment.toml"))
    every = timing.every_latency(experiment)
    half = timing.every_latency(experiment, memory_bytes=memory_of(experiment, Size(0.5)))
    assert set(half) == {size for size in every if size.width <= 0.5}
    (home / "latency.csv").write_text(timing.latency_rows(half, step_timed(experiment)))
    named(home, "latency.csv")
    limited = Experiment.from_config(configs.load(home / "experiment.toml"))
    assert limited.size_of_group["board"].width == 0.5
    assert plan(limited)["groups"][0]["width"] == 0.5
    assert math.isinf(limited.fleet.groups[0].latencies.at(1.0, None))  # type: ignore[union-attr]


def memory_of(experiment: Experiment, size: Size) -> float:
    """Just enough for a size."""
    costs = timing.Costs(experiment.context_for((size,)).for_client(), experiment.method, experiment.example)
    return costs.of(costs.message(size, "train"))["memory_bytes"] / timing._MARGIN + 1
