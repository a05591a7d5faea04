"""Runs that are killed while they write: resumed, every file is the one of a run that nobody killed, byte for byte.

A run is killed with SIGKILL at one of its writes, drawn at random: before it, in the middle of it, or after it. Two
files hold times, and are compared without them: `environment.json` (when the run was started, and the random id that it
has on trackers) and `events.jsonl` (how long it and its rounds took; a resumed run also says there that it was resumed,
and repeats rounds and its end).
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import anysize as az
import small
from anysize import atomic
from anysize.records import directory, events

ROUNDS = 3
METHODS = small.METHODS | ({"lora": {"train_head": True}} if find_spec("peft") else {})
ENGINES: list[dict[str, Any]] = [{"name": "inprocess"}, {"name": "processes", "workers": 2}]
PAIRS = [(case, engine) for engine in (0, 1) for case in METHODS]
KILLS = [(number, *PAIRS[number % len(PAIRS)]) for number in range(50)]

# Runs an experiment, and dies at a write: at which, and when.
DIES = """
import os, signal, sys
from pathlib import Path
import anysize as az
from anysize import atomic
from anysize.records import directory
source, out, step, when = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
seen = 0

def dying(write, begin):
    def writes(path, content, *more):
        global seen
        seen += 1
        if seen == step and when == "within":
            begin(path, content[: len(content) // 2])
        if seen != step or when == "after":
            write(path, content, *more)
        if seen == step:
            os.kill(os.getpid(), signal.SIGKILL)
    return writes

def begin_file(path, content):
    path.with_name(f".{path.name}.0123456789ab.part").write_bytes(content)

def begin_line(path, text):
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(text)

if __name__ == "__main__":
    atomic.write = dying(atomic.write, begin_file)
    directory._append = dying(directory._append, begin_line)
    az.run(source, out=out)
"""


def tables(case: str, engine: int) -> dict[str, Any]:
    """An experiment in which every kind of file is written: client metrics, kept norms, momentum, analyses."""
    method = case.partition(",")[0]
    fleet = small.fleet_tables(case) if case in small.METHODS else {}
    tricks: dict[str, Any] = {"server_momentum": 0.5} if method in ("fedavg", "heterofl", "fjord") else {}
    return {
        "rounds": ROUNDS,
        "evaluation": {"on": ["test", "clients"]},
        "model": {key: value for key, value in fleet.get("model", {"name": "mlp"}).items() if key != "input"},
        "method": {"name": method} | METHODS[case],
        "devices": {"clients_per_round": 3},
        "tricks": tricks | ({"batch_norm": "local"} if method == "heterofl" else {}) | fleet.get("tricks", {}),
        "engine": ENGINES[engine],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


@cache
def whole(folder: Path, case: str, engine: int) -> tuple[Path, Path, int]:
    """The experiment's file, its run from beginning to end, and how many writes that took."""
    home = folder / f"{case}-{engine}"
    home.mkdir()
    source, writes = small.file(home, **tables(case, engine)), 0

    def counted(write: Any) -> Any:
        def counts(*arguments: Any) -> None:
            nonlocal writes
            writes += 1
            write(*arguments)

        return counts

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(atomic, "write", counted(atomic.write))
        patched.setattr(directory, "_append", counted(directory._append))
        return source, az.run(source, out=home / "run").directory, writes


def without_times(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key != "seconds"}


def contents(run: Path) -> dict[str, Any]:
    """Every file of a run directory: its bytes or, where these hold times, what it says besides."""
    found: dict[str, Any] = {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    environment = json.loads(found["environment.json"])
    del environment["started"], environment["id"]
    said = [without_times(event) for event in events.read_events(run / "events.jsonl")]
    once = [e for place, e in enumerate(said) if e["event"] not in ("round", "resume") and e not in said[:place]]
    history = [without_times(event) for event in events.history(run)]
    return found | {"environment.json": environment, "events.jsonl": (once, history)}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize("number, case, engine", KILLS)
def test_a_run_killed_at_a_write_and_resumed_leaves_the_same_files(
    tmp_path: Path, folder: Path, number: int, case: str, engine: int
) -> None:
    source, expected, writes = whole(folder, case, engine)
    dice = random.Random(number)
    step, when = dice.randint(1, writes), dice.choice(["before", "within", "after"])
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    command = [sys.executable, str(script), str(source), str(tmp_path / "run"), str(step), when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = az.run(source, out=tmp_path / "run", resume=True)
    found, wanted = contents(run.directory), contents(expected)
    assert sorted(found) == sorted(wanted), f"killed {when} write {step}"
    differ = [name for name in wanted if found[name] != wanted[name]]
    assert not differ, f"killed {when} write {step} of {writes}: {found[differ[0]]} is not {wanted[differ[0]]}"
