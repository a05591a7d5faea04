"""A device measures the memory of a training process, holds its budget against it, and tells its server."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from anysize.deploy import footprint, selftest
from anysize.deploy.affordable import Costs
from anysize.deploy.device_file import Limits
from anysize.deploy.folder import lay_out, named, planned
from anysize.deploy.footprint import FOOTPRINTS, noted, peak_bytes, written
from anysize.deploy.gate import Gate
from anysize.deploy.introduction import Introduction
from anysize.deploy.timing import measure
from anysize.devices.budget import Budget
from anysize.errors import AnysizeError, ConfigError
from anysize.methods.size import Size
from test_timing import experiment

STEP = {"method": "fjord", "network": "5f3a", "batch_size": 8}


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """The file of a device of a fleet whose experiment is the example."""
    home = tmp_path / "fleet"
    lay_out(home, planned(None, named(["board=0.5"]), [], 8123, None))
    return home / "devices" / "board" / "device.toml"


def test_what_was_measured_is_read_back_and_counts_for_the_same_training_step_only(tmp_path: Path) -> None:
    path = tmp_path / FOOTPRINTS
    assert noted(path, STEP)(Size(0.5)) is None
    path.write_bytes(written(STEP, {Size(0.5): 50, Size(1.0, depth=2): 70}))
    found = noted(path, STEP)
    assert [found(size) for size in (Size(0.5), Size(1.0, depth=2), Size(1.0))] == [50.0, 70.0, None]
    assert noted(path, {**STEP, "batch_size": 16})(Size(0.5)) is None


@pytest.mark.parametrize("damage", ["", "[]", "{}", "sizes", "0", "-3", "true", "NaN", '"4 GB"'])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / FOOTPRINTS
    size = f'[{{"width": 0.5, "depth": null, "memory_bytes": {damage or "1"}}}]'
    path.write_text(damage if damage in ("", "[]", "{}") else json.dumps(STEP)[:-1] + f', "sizes": {size}}}')
    with pytest.raises(ConfigError, match="is damaged"):
        noted(path, STEP)


def test_a_measured_peak_counts_before_a_predicted_one() -> None:
    """Predicted are 49 MB for every size."""
    made = experiment()
    context = made.context_for((Size(0.25), Size(1.0))).for_client()
    costs = Costs(context, made.method, made.example)
    limits = Limits(budget=Budget(memory_bytes=30e6))
    assert list(costs.allowed(limits, context.sizes)) == []
    own = {Size(0.25): 20e6, Size(1.0): 90e6}
    assert list(costs.allowed(limits, context.sizes, footprint=own.get)) == [Size(0.25)]
    gate = Gate(context, made.method, made.example, limits, footprint=own.get)
    assert gate.footprints() == {"0.25": 20e6, "1.0": 90e6}
    assert gate.refusals(costs.message(Size(0.25), "train")) == []
    assert "allows" in gate.refusals(costs.message(Size(1.0), "train"))[0]


def test_a_budget_that_nothing_fits_names_the_smallest_that_would() -> None:
    made = experiment()
    context = made.context_for((Size(0.25), Size(1.0))).for_client()
    gate = Gate(context, made.method, made.example, Limits(budget=Budget(memory_bytes=1e6)))
    (said,) = gate.refusals(Costs(context, made.method, made.example).message(Size(0.25), "train"))
    assert "; the smallest needs memory_bytes = 4.9" in said
    own = {Size(0.25): 2e7}
    gate = Gate(context, made.method, made.example, Limits(budget=Budget(memory_bytes=1e6)), footprint=own.get)
    assert (
        "the smallest needs memory_bytes = 2e+07"
        in gate.refusals(Costs(context, made.method, made.example).message(Size(0.25), "train"))[0]
    )


def test_sizes_that_took_too_much_memory_do_not_fit() -> None:
    took = {0.25: 10_000_000, 0.5: 20_000_000, 1.0: 90_000_000}
    found = measure(experiment(), samples=8, memory_bytes=40e6, peak=took.get)
    assert [timing.peak_bytes for timing in found.timings] == list(took.values())
    assert (found.capacity, found.timings[2].step_seconds) == (0.5, None)


def test_a_size_that_ran_out_of_memory_does_not_fit_and_the_others_are_measured() -> None:
    took = {0.25: 10_000_000.0, 0.5: math.inf, 1.0: 20_000_000.0}
    for memory in (40e6, None):
        found = measure(experiment(), samples=8, memory_bytes=memory, peak=took.get)
        assert [timing.step_seconds is not None for timing in found.timings] == [True, False, True]
        assert found.capacity == 0.25
    lines = selftest.described(found, None)
    assert [line.endswith("capacity 0.5: ran out of memory") for line in lines[1:]] == [False, True, False]


def test_a_size_that_ran_out_of_memory_is_in_no_budget_of_the_device_or_its_server(tmp_path: Path) -> None:
    path = tmp_path / FOOTPRINTS
    path.write_bytes(written(STEP, {Size(0.25): 20e6, Size(1.0): math.inf}))
    own = noted(path, STEP)
    made = experiment()
    context = made.context_for((Size(0.25), Size(1.0))).for_client()
    gate = Gate(context, made.method, made.example, Limits(budget=Budget(memory_bytes=1e15)), footprint=own)
    assert gate.footprints() == {"0.25": 20e6, "1.0": math.inf}
    costs = Costs(context, made.method, made.example)
    assert gate.refusals(costs.message(Size(0.25), "train")) == []
    assert "allows" in gate.refusals(costs.message(Size(1.0), "train"))[0]


OUT_OF_MEMORY = {
    "pytorch": "torch.empty(1 << 50)",
    "python": "bytes(1 << 60)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("how", OUT_OF_MEMORY)
def test_a_process_that_ran_out_of_memory_has_an_infinite_peak(board: Path, how: str) -> None:
    code = f"import os, signal, torch\n\n\ndef load(device):\n    {OUT_OF_MEMORY[how]}\n"
    (board.parent / "greedy.py").write_text(code)
    lines = board.read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("data", "options"))]
    board.write_text("\n".join(['data = "greedy:load"', *kept]) + "\n")
    assert peak_bytes(board, 0.5) == math.inf


def test_a_device_without_memory_for_its_largest_size_joins_with_the_others(
    board: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "peak_bytes", lambda file, capacity: 30e6 if capacity < 0.75 else math.inf)
    said: list[str] = []
    selftest.measured(board, insecure=True, say=said.append)
    assert "capacity = 0.5" in board.read_text()
    assert any(line.endswith("the memory of 4 sizes, 30 to 30 MB; 2 ran out of it") for line in said)


def test_what_a_device_measured_travels_with_its_introduction() -> None:
    told = Introduction("cam", budget=Budget(memory_bytes=6e7), memory_bytes={"0.25": 4e7, "1.0": math.inf})
    note = json.dumps(told.to_note(), allow_nan=False)
    assert Introduction.of(json.loads(note)) == told


@pytest.mark.parametrize("lie", [0, -1, True, "4 GB", [1], float("inf"), float("nan")])
def test_a_device_that_tells_nonsense_of_its_memory_is_refused(lie: Any) -> None:
    note = {"device": {"name": "cam", "budget": {"memory_bytes": 6e7}, "memory_bytes": {"0.25": lie}}}
    with pytest.raises(AnysizeError, match="memory_bytes that are no numbers above 0"):
        Introduction.of(note)
    with pytest.raises(AnysizeError):
        Introduction.of({"device": {"name": "cam", "budget": {"memory_bytes": lie}}})


def test_a_device_measures_the_peak_of_a_real_process_and_keeps_its_budget(board: Path) -> None:
    board.write_text(board.read_text().replace("capacity = 0.5", "budget = { memory_bytes = 300_000_000 }"))
    lines: list[str] = []
    found = selftest.measured(board, insecure=True, say=lines.append)
    assert [timing.capacity for timing in found.timings] == [0.25, 0.5, 0.75, 1.0]
    # A process that has loaded PyTorch's kernels, traced and trained a small network: between 20 and 100 MB here.
    assert all(20e6 < (timing.peak_bytes or 0) < 100e6 for timing in found.timings)
    assert "budget" in board.read_text()
    noted_sizes = json.loads((board.parent / FOOTPRINTS).read_text())["sizes"]
    assert [one["memory_bytes"] for one in noted_sizes] == [timing.peak_bytes for timing in found.timings]


def test_a_process_that_fails_says_why(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board.write_text(board.read_text().replace("example:digits", "example:nothing"))
    with pytest.raises(ConfigError, match=r"capacity 0.5: the process that tried it failed: .*nothing"):
        peak_bytes(board, 0.5)
    monkeypatch.setattr(footprint, "STATUS", Path("/nowhere"))
    assert peak_bytes(board, 0.5) is None
