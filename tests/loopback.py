"""A fleet on this machine, for tests and benchmarks: the real commands as processes, and none of them left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from anysize.deploy import folder as layout
from anysize.deploy.children import environment, free_port

Json = dict[str, Any]

DEVICES = {"board": 0.5, "cam": 0.25, "phone": 0.75, "van": 1.0}

_EXPERIMENT = """
name = "fleet"
rounds = {rounds}
evaluate_every = {rounds}
[data]
name = "devices"
validation = 0.2
[model]
name = "small-cnn"
input = [1, 8, 8]
options = {{ channels = [8, 16] }}
[task]
classes = 10
[method]
name = "heterofl"
[tricks]
batch_norm = "local"
classwise_head = false
[training]
learning_rate = 0.05
[engine]
name = "flower"
min_clients = {min_clients}
round_timeout = {round_timeout}
"""


def experiment(rounds: int, min_clients: int, round_timeout: float = 60.0) -> str:
    """An experiment file for a fleet whose devices have the data."""
    return _EXPERIMENT.format(rounds=rounds, min_clients=min_clients, round_timeout=round_timeout)


class Loopback:
    """A fleet's folder, its server and its devices; a context manager that ends them all."""

    def __init__(self, home: Path, experiment: str, devices: Mapping[str, float], data: str | None = None) -> None:
        self.home = home
        file = home.with_suffix(".toml")
        file.write_text(experiment)
        wanted = {name: {"capacity": capacity} for name, capacity in devices.items()}
        layout.lay_out(home, layout.planned(file, wanted, [], free_port(), data))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = environment() | {"ANYSIZE_LOOPBACK": str(home)}  # marks whatever descends from us
        self.logs = home / "test-logs"
        self.logs.mkdir()

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def serve(self, *options: str) -> None:
        """Starts the server and waits until it is ready."""
        self.start("server", "server", self.home, *options)
        self.wait(lambda: "ready on" in self.log("server"), 90, "server")

    def join(self, *names: str) -> None:
        """Starts devices."""
        for name in names or sorted(layout.device_keys(self.home)):
            self.start(name, "join", self.home / layout.DEVICES / name / layout.DEVICE)

    def run(self, *options: str) -> subprocess.Popen[bytes]:
        """Starts a run, which may go on when this returns."""
        superlink = ("--engine", "flower", "--superlink", self.home)
        return self.start("run", "run", self.home / layout.EXPERIMENT, *superlink, *options)

    def start(self, name: str, *arguments: object) -> subprocess.Popen[bytes]:
        """Starts an `anysize` command under a name; its output goes to a new log of that name."""
        with (self.logs / f"{name}.log").open("wb") as out:
            command = [sys.executable, "-m", "anysize", *map(str, arguments)]
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=self._environment)
        self._processes[name] = process
        return process

    def log(self, name: str) -> str:
        """What a command has said so far."""
        path = self.logs / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def events(self, run: str) -> list[Json]:
        """The events of a run so far."""
        path = self.home / layout.RUNS / run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def rounds(self, run: str) -> list[Json]:
        """Its finished rounds so far."""
        return [event for event in self.events(run) if event["event"] == "round"]

    def wait(self, until: Callable[[], bool], seconds: float, name: str) -> None:
        """Waits until something is so; fails with the log of the named command if it takes too long, or ends."""
        deadline = time.monotonic() + seconds
        process = self._processes[name]
        while not until():
            ended = process.poll() is not None and not until()
            late = time.monotonic() > deadline
            assert not ended, f"{name} ended: {self.log(name)[-3000:]}"
            assert not late, f"{name} is late: {self.log(name)[-3000:]}"
            time.sleep(0.2)

    def finished(self, seconds: float = 240) -> str:
        """Waits for the run that was started last, and gives what it said; fails if it failed."""
        process = self._processes["run"]
        assert process.wait(seconds) == 0, self.log("run")[-3000:]
        return self.log("run")

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a command a signal and waits for its end."""
        self._processes[name].send_signal(number)
        self._processes.pop(name).wait(60)

    def pid(self, name: str) -> int:
        """The process of a command."""
        return self._processes[name].pid

    def stop(self) -> None:
        """Ends every command, the server last."""
        order = sorted(self._processes, key=lambda name: name == "server")
        for name in order:
            if self._processes[name].poll() is None:
                self._processes[name].terminate()
        for name in order:
            try:
                self._processes[name].wait(60)
            except subprocess.TimeoutExpired:
                self._processes[name].kill()
                self._processes[name].wait()
        self._processes.clear()


def left_behind(home: Path, seconds: float = 20.0) -> list[str]:
    """Commands of processes whose arguments or environment name a folder and that do not end by themselves.

    The server's part of a run gives Flower a few seconds to end it, once its SuperLink is gone.
    """
    deadline = time.monotonic() + seconds
    while (found := list(processes_of(home))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [" ".join(arguments) for _, arguments in found]


def processes_of(home: Path) -> Iterable[tuple[int, list[str]]]:
    """Living processes, but for this one, whose arguments or environment name a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            about = (path / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        living = bool(arguments[0]) and int(path.name) != os.getpid()
        if living and (str(home) in " ".join(arguments) or str(home) in about):
            found.append((int(path.name), arguments))
    return found
