"""The process that forks workers, `python -m anysize.engines.workers.forkserver HANDLE ADDRESS`; on Linux only.

It loads what every worker needs, and then only forks. It has a single thread: a fork copies only the thread that forks,
so locks of other threads would stay locked. The kernel ends it with its server, and the workers with it, whatever they
are doing: loading a library, or a step that takes minutes. `multiprocessing`'s forkserver does not end its workers in
that case, and needs a `__main__` guard in the user's script.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

from anysize.engines.workers.main import KEY, load, work
from anysize.engines.workers.pool import FORK, RELEASE

_LOOK_SECONDS = 0.1  # between checks for workers that have ended
_PARENT_DEATH_SIGNAL = 1  # from Linux's prctl.h


def main(handle: str, address: str) -> None:
    """Fork workers for the server at that address; it requests them over the connection with that handle."""
    control = Connection(int(handle))
    _end_with_parent()
    if _is_cut(control):  # the server ended before this process told the kernel
        return
    key = os.environ.pop(KEY)
    load()
    gc.freeze()  # otherwise the garbage collector writes to every object, and workers no longer share the memory
    alone = _has_one_thread()
    if not becomes_worker(control):
        return
    if alone:
        work(address, bytes.fromhex(key))
    else:  # some library has started a thread: load everything again
        command = [sys.executable, "-m", "anysize.engines.workers.main", address, str(os.getppid())]
        os.execve(command[0], command, os.environ | {KEY: key})


def becomes_worker(control: Connection[bytes, bytes]) -> bool:
    """True in each worker that the server requested; False in the fork server when the server has ended."""
    forkserver = os.getpid()
    children: set[int] = set()
    try:
        while True:
            asked = control.recv_bytes() if control.poll(_LOOK_SECONDS) else None
            if asked == FORK:
                child = os.fork()
                if child == 0:
                    control.close()
                    _end_with_parent()
                    return os.getppid() == forkserver
                children.add(child)
                control.send_bytes(json.dumps([child, None]).encode())
            for child, code in _killed(children) if asked == RELEASE else _ended(children, os.WNOHANG):
                children.remove(child)
                control.send_bytes(json.dumps([child, code]).encode())
    except (EOFError, ConnectionError):
        return False


def _end_with_parent() -> None:
    """Make the kernel end this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _is_cut(connection: Connection[bytes, bytes]) -> bool:
    """Whether the other end is closed, even if unread messages remain."""
    watch = select.poll()
    watch.register(connection.fileno(), 0)  # poll reports a closed end without being asked
    return bool(watch.poll(0))


def _killed(children: set[int]) -> Iterator[tuple[int, int]]:
    """End all children at once, and return their exit codes."""
    for child in children:
        os.kill(child, signal.SIGKILL)
    return _ended(children, 0)


def _ended(children: set[int], options: int) -> Iterator[tuple[int, int]]:
    """The children that have ended, with their exit codes."""
    for child in list(children):
        ended, status = os.waitpid(child, options)
        if ended:
            yield child, os.waitstatus_to_exitcode(status)


def _has_one_thread() -> bool:
    """Whether this process has only this thread, counting those of libraries."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
