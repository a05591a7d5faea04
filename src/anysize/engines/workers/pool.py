"""The worker pool: worker processes from their start to their end.

Nothing here loads PyTorch, so that the command line can start its workers first and load it at the same time. On Linux
one process, the *fork server*, loads what workers need and forks them: any number of workers costs one start, and they
share its memory. On other systems it is not safe to fork a process that has loaded libraries: there each worker is a
subprocess.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, Listener
from typing import Any, Protocol

from anysize import interrupts
from anysize.engines.folder import new_folder
from anysize.engines.workers.main import KEY
from anysize.errors import AnysizeError

FORK, RELEASE = b"fork", b"release"
_START_SECONDS = 120
_END_SECONDS = 5


class Process(Protocol):
    """A worker: the methods of `subprocess.Popen` that the engine uses."""

    @property
    def pid(self) -> int:
        """Its number."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def wait(self) -> int:
        """Wait for its end; returns its exit code."""

    def kill(self) -> None:
        """End it at once."""


class WorkerPool:
    """Worker processes that load what they need while the server prepares the experiment.

    However this process ends, the workers end too, and `home`, the folder that it shares with them, is removed.

    >>> with WorkerPool(2) as pool:
    ...     pool.count
    2

    Args:
        count: how many; by default one per core.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count or os.cpu_count() or 1
        self._key = secrets.token_bytes(32)
        self.home = new_folder()
        where = ("127.0.0.1", 0) if sys.platform == "win32" else str(self.home.path / "server")
        self._listener = Listener(where, authkey=self._key)
        self._source: _Subprocesses | _ForkServer | None = None
        self._members = 0
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Start all workers that are not running; does not wait for them."""
        while self._members < self.count:
            self._start()

    def arrived(self) -> tuple[Process, Connection[bytes, bytes]]:
        """The next worker that connects, and its connection; an error if a worker ended before it connected."""
        assert self._source is not None
        socket = self._listener._listener._socket  # type: ignore[attr-defined]
        deadline = time.monotonic() + _START_SECONDS
        socket.settimeout(0.2)
        while time.monotonic() < deadline:
            interrupts.check()
            try:
                connection = self._listener.accept()
                return self._source.greeted(int(connection.recv_bytes())), connection
            except TimeoutError:
                code = self._source.failure()
                if code is not None:
                    raise AnysizeError(
                        f"a worker ended with code {code} before it started; see its error above"
                    ) from None
            except (EOFError, ConnectionError):
                continue  # it has ended since; if it is one of ours, the next check will show it
        raise AnysizeError(f"a worker did not start within {_START_SECONDS} s")

    def replace(self) -> None:
        """Start a worker to replace one that has ended."""
        self._members -= 1
        self._start()

    def release(self) -> None:
        """End the workers at once (the server has everything they hold); new ones can be started."""
        if self._source is not None:
            self._source.release()
        self._members = 0

    def close(self) -> None:
        """End the workers at once, and the fork server."""
        if self._source is not None:
            self._source.close()
        self._source, self._members = None, 0
        self._listener.close()
        self.home.remove()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        if self._source is None or self._source.is_over():
            kind = _ForkServer if sys.platform == "linux" else _Subprocesses
            self._source = kind(json.dumps(self._listener.address), self._key)
        self._source.start()
        self._members += 1


class _Subprocesses:
    """Workers that are subprocesses of this process."""

    def __init__(self, address: str, key: bytes) -> None:
        self._address, self._key = address, key
        self._coming: dict[int, subprocess.Popen[bytes]] = {}
        self._here: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start one more worker."""
        process = started("anysize.engines.workers.main", self._address, str(os.getpid()), key=self._key)
        self._coming[process.pid] = process

    def greeted(self, pid: int) -> Process:
        """The worker with that number, once it has connected."""
        process = self._coming.pop(pid)
        self._here.append(process)
        return process

    def failure(self) -> int | None:
        """The exit code of a worker that ended before it connected, if there is one."""
        return next((code for process in self._coming.values() if (code := process.poll()) is not None), None)

    def is_over(self) -> bool:
        """Whether it cannot start any more workers."""
        return False

    def release(self) -> None:
        """End the workers."""
        processes = [*self._here, *self._coming.values()]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        self._here, self._coming = [], {}

    close = release


class _ForkServer:
    """Workers that the fork server forks; it reports which have started and which have ended.

    They end with the fork server, however that ends, and the fork server ends with this process.
    """

    def __init__(self, address: str, key: bytes) -> None:
        self._control, theirs = Pipe()
        with theirs:
            handle = theirs.fileno()
            module = "anysize.engines.workers.forkserver"
            self._process = started(module, str(handle), address, key=key, handles=(handle,))
        self._starting = 0
        self._codes: dict[int, int | None] = {}  # by the worker's number; None while it runs
        self._coming: set[int] = set()

    def start(self) -> None:
        """Request one more worker."""
        self._starting += 1
        self._say(FORK)

    def greeted(self, pid: int) -> Process:
        """The worker with that number, once it has connected."""
        while pid not in self._coming and self._heard(None):
            pass
        self._coming.discard(pid)
        return _Forked(self, pid)

    def failure(self) -> int | None:
        """The exit code of a worker that ended before it connected, if there is one."""
        if not self._heard():
            return self._process.wait()
        return next((code for pid in self._coming if (code := self._codes[pid]) is not None), None)

    def is_over(self) -> bool:
        """Whether it cannot start any more workers."""
        return self._process.poll() is not None

    def code(self, pid: int, timeout: float | None = 0.0) -> int | None:
        """The exit code of a worker; None while it runs."""
        if self._codes.get(pid) is None and not self._heard(timeout):
            return self._process.wait()
        return self._codes.get(pid)

    def release(self) -> None:
        """End the workers; when this returns, all of them have ended."""
        self._say(RELEASE)
        deadline = time.monotonic() + _END_SECONDS
        while self._starting or None in self._codes.values():
            if not self._heard(_END_SECONDS):
                break
            if time.monotonic() > deadline:
                self._process.kill()  # the workers end with it
        self._codes, self._coming = {}, set()

    def close(self) -> None:
        """End the workers and the fork server."""
        if self._heard() and self._codes:
            self.release()
        self._process.kill()
        self._process.wait()
        self._control.close()

    def _say(self, word: bytes) -> None:
        with suppress(OSError):  # it has ended; whoever waits for an answer will notice
            self._control.send_bytes(word)

    def _heard(self, timeout: float | None = 0.0) -> bool:
        """Read the fork server's reports for at most `timeout` seconds; False if it has ended."""
        try:
            while self._control.poll(timeout):
                pid, code = json.loads(self._control.recv_bytes())
                self._codes[pid] = code
                if code is None:
                    self._starting -= 1
                    self._coming.add(pid)
                timeout = 0.0
        except (EOFError, OSError):
            return False
        return True


class _Forked:
    """One worker of a fork server."""

    def __init__(self, forkserver: _ForkServer, pid: int) -> None:
        self._forkserver = forkserver
        self.pid = pid

    def poll(self) -> int | None:
        return self._forkserver.code(self.pid)

    def wait(self) -> int:
        while (code := self._forkserver.code(self.pid, None)) is None:
            pass
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def started(module: str, *arguments: str, key: bytes, handles: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """A new process that runs a module of anysize with one thread and prints to this process's standard error."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | one | {KEY: key.hex()},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if _has_file(sys.stderr) else subprocess.DEVNULL,
        pass_fds=handles,
        start_new_session=True,  # the server handles Ctrl-C; workers end with the connection
    )


def _has_file(stream: Any) -> bool:
    try:
        return stream is not None and stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
