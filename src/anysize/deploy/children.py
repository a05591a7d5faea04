"""Child processes that stop with this process, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
}
"""Environment variables for Flower's processes, unless the user sets them."""

_STOP_SECONDS = 10.0
_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent ends


class Children:
    """Starts processes and stops them all at the end, the last one first.

    A child ends even if this process is killed: on Linux the kernel ends it. Flower's processes watch their parents.
    """

    def __init__(self) -> None:
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(
        self, name: str, command: Sequence[str], log: IO[bytes] | None = None, more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process; its output goes to `log`, by default to this process's; `more` extends its environment."""
        process = subprocess.Popen(
            list(command),
            env=environment() | dict(more or {}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT if log is not None else None,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        self._running.append((name, process))
        return process

    def ended(self) -> list[tuple[str, int]]:
        """Names and exit codes of the processes that ended since the last call."""
        over = [(name, process) for name, process in self._running if process.poll() is not None]
        self._running = [entry for entry in self._running if entry not in over]
        return [(name, process.returncode) for name, process in over]

    def stop(self) -> None:
        """Ask each process to end, wait a little, and kill those that did not."""
        for _, process in reversed(self._running):
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for _, process in reversed(self._running):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        self._running.clear()

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def environment() -> dict[str, str]:
    """This environment, extended for Flower's processes: they find each other's commands on the path."""
    path = os.environ.get("PATH", "")
    own = str(Path(sys.executable).parent)
    return SETTINGS | dict(os.environ) | {"PATH": path if own in path.split(os.pathsep) else f"{own}{os.pathsep}{path}"}


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_free(host: str, port: int) -> bool:
    """Whether this process could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def answers(host: str, port: int) -> bool:
    """Whether a process listens there."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with socket.create_connection((reached, port), timeout=1):
            return True
    except OSError:
        return False


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)
