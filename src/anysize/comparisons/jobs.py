"""Several processes that bring a comparison's cells to their end, each with one thread.

They need no word from us: cells are locked, and whatever is finished lies in the comparison's folder. Each watches its
standard input, which ends with this process, however that ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from anysize import interrupts
from anysize.comparisons.cells import Cell, plan_tables
from anysize.comparisons.locks import FOLDER
from anysize.config.tables import ExperimentConfig
from anysize.errors import AnysizeError

_LOOK_SECONDS = 0.3
_STOP_SECONDS = 60.0  # a step of a large network may take that long
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def run_in_processes(
    config: ExperimentConfig, cells: Sequence[Cell], folder: Path, jobs: int, look: Callable[[], None]
) -> None:
    """Returns when every cell is finished or has failed; calls `look` now and then.

    Raises:
        AnysizeError: a process has ended by itself before that.
    """
    request = {
        "tables": plan_tables(config),
        "home": None if config.folder is None else str(config.folder),
        "folder": str(folder.resolve()),
        "paths": [cell.path for cell in cells],
    }
    with interrupts.deferred(), _Workers(json.dumps(request), folder, jobs) as workers:
        while workers.are_running():
            look()
            interrupts.pause(_LOOK_SECONDS)
        look()
        workers.check()


class _Workers:
    """Processes that work on cells; leaving the block stops those that still run."""

    def __init__(self, request: str, folder: Path, count: int) -> None:
        self._request, self._folder, self._count = request, folder, count
        self._running: list[tuple[subprocess.Popen[str], Path, IO[str]]] = []

    def __enter__(self) -> _Workers:
        (self._folder / FOLDER).mkdir(parents=True, exist_ok=True)
        for number in range(self._count):
            path = self._folder / FOLDER / f"process-{os.getpid()}-{number}.log"
            log = path.open("w", encoding="utf-8")
            process = subprocess.Popen(
                [sys.executable, "-m", "anysize.comparisons.worker"],
                env=dict(os.environ) | _ONE_THREAD,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,  # so that Ctrl-C is ours alone, which stops them
            )
            self._running.append((process, path, log))
            assert process.stdin is not None
            process.stdin.write(self._request + "\n")
            process.stdin.flush()
        return self

    def are_running(self) -> bool:
        return any(process.poll() is None for process, _, _ in self._running)

    def check(self) -> None:
        """Refuses to go on where a process has ended with an error of its own."""
        for process, path, _ in self._running:
            if process.returncode != 0:
                tail = path.read_text(encoding="utf-8", errors="replace").strip()[-2000:]
                raise AnysizeError(
                    f"a process of the comparison has ended with code {process.returncode}; finished cells are kept, "
                    f"and the same command goes on. It said:\n{tail or 'nothing'}"
                )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, _, _ in self._running:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for process, path, log in self._running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
            log.close()
            if error is None or isinstance(error, KeyboardInterrupt):
                path.unlink(missing_ok=True)
