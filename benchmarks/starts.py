"""How long our commands take to start: an import, a plan, and a run until its first round begins and ends.

    python benchmarks/starts.py            # about two minutes; writes benchmarks/starts.json
    python benchmarks/starts.py --table    # prints it for the docs

Every case is a new process, in turns, several times; what else the machine does can only add time, so the shortest
counts. Beside them: Python itself, and `import torch` alone, which every run needs. "cpu" is the processor time of the
process and of those that it started, until then. The experiment is the demo's, with its first method and two workers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from anysize.runs.runner import environment

OUT = Path(__file__).with_suffix(".json")
TIMES = 5
ANYSIZE = [sys.executable, "-m", "anysize"]
SHOWN = {
    "python": "`python -c pass`",
    "import": "`import anysize`",
    "torch": "`import torch`",
    "plan": "`anysize plan`",
    "begins": "`anysize run` until its first round begins",
    "ends": "`anysize run` until its first round is over",
}
_WATCH_SECONDS = 0.005
_TICK = os.sysconf("SC_CLK_TCK")


def experiment() -> str:
    """The demo's file with its first method alone."""
    text = (files("anysize") / "demo.toml").read_text(encoding="utf-8")
    return re.split(r"^\[compare\]", text, flags=re.MULTILINE)[0] + '\n[engine]\nname = "processes"\nworkers = 2\n'


def cpu_seconds(process: int) -> float:
    """The processor time of a process, of its children now and of those that have ended."""
    spent: dict[int, float] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            values = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(entry.name)] = int(values[1])
        spent[int(entry.name)] = sum(map(int, values[11:15])) / _TICK
    ours = {process}
    while more := {own for own, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(spent.get(own, 0.0) for own in ours)


def whole(command: list[str], folder: Path) -> dict[str, float]:
    """Wall and processor time of a command."""
    before = os.times()
    began = time.perf_counter()
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - began, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall": wall, "cpu": used}


def a_run(folder: Path) -> dict[str, dict[str, float]]:
    """The times until a run's first round begins and is over; then the run is told to stop."""
    out = folder / "run"
    command = [*ANYSIZE, "run", "demo.toml", "--out", str(out), "--overwrite"]
    events, found = out / "events.jsonl", dict[str, dict[str, float]]()
    events.unlink(missing_ok=True)
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while "ends" not in found:
            assert process.poll() is None, "the run ended too early"
            text = events.read_text() if events.exists() else ""
            for name, mark in (("begins", '"event": "start"'), ("ends", '"event": "round"')):
                if name not in found and mark in text:
                    found[name] = {"wall": time.perf_counter() - began, "cpu": cpu_seconds(process.pid)}
            time.sleep(_WATCH_SECONDS)
    finally:
        process.terminate()
        process.wait(60)
    return found


def main() -> None:
    """Measures everything and writes it down."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in SHOWN}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "demo.toml").write_text(experiment(), encoding="utf-8")
        commands = {
            "python": [sys.executable, "-c", "pass"],
            "import": [sys.executable, "-c", "import anysize"],
            "torch": [sys.executable, "-c", "import torch"],
            "plan": [*ANYSIZE, "plan", "demo.toml"],
        }
        cases: dict[str, Callable[[], dict[str, Any]]] = {
            **{case: lambda case=case: {case: whole(commands[case], folder)} for case in commands},  # type: ignore[misc]
            "run": lambda: a_run(folder),
        }
        for turn in range(TIMES + 1):  # the first fills the system's cache of files
            for case in cases.values():
                for own, times in case().items():
                    if turn:
                        seen[own].append(times)
            print(turn, {own: times[-1:] for own, times in seen.items()}, flush=True)
    found: dict[str, Any] = {"environment": environment()}
    for own, times in seen.items():
        least = {kind: min(time[kind] for time in times) for kind in ("wall", "cpu")}
        spread = {kind: round(max(time[kind] for time in times) / max(least[kind], 0.01) - 1, 2) for kind in least}
        found[own] = {kind: round(value, 3) for kind, value in least.items()} | {"spread": spread}
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def table(found: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    lines = ["| what | seconds | of processor time |", "| --- | ---: | ---: |"]
    lines += [f"| {what} | {found[own]['wall']:.2f} | {found[own]['cpu']:.2f} |" for own, what in SHOWN.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    if "--table" in sys.argv:
        print(table(json.loads(OUT.read_text())))
    else:
        main()
