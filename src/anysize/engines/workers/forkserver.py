"""The process that forks workers, `python -m anysize.engines.workers.forkserver HANDLE ADDRESS`; on Linux only.

It loads what every worker needs and from then on only forks, so that it has no thread but one: a fork takes along
nothing but the thread that forks, and what others have locked would stay locked. The kernel ends it with its server,
and workers with it, whatever they are doing: loading a library, or a step that takes minutes.
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

_LOOK_SECONDS = 0.1  # from one look at who has ended to the next
_PARENT_DEATH_SIGNAL = 1  # a name of Linux' prctl.h


def main(handle: str, address: str) -> None:
    """Forks workers of the server at that address, which asks for them over the connection with that handle."""
    control = Connection(int(handle))
    _end_with_parent()
    if _is_cut(control):  # the server had ended before the kernel was told
        return
    key = os.environ.pop(KEY)
    load()
    gc.freeze()  # the collector would write into every object, and the workers would no longer share its memory
    alone = _has_one_thread()
    if not becomes_worker(control):
        return
    if alone:
        work(address, bytes.fromhex(key))
    else:  # some library has started a thread: load everything anew
        command = [sys.executable, "-m", "anysize.engines.workers.main", address, str(os.getppid())]
        os.execve(command[0], command, os.environ | {KEY: key})


def becomes_worker(control: Connection[bytes, bytes]) -> bool:
    """True in each worker that the server asked for; False in the fork server itself, when the server is gone."""
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
    """Lets the kernel end this process with the one that started it, from now on."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _is_cut(connection: Connection[bytes, bytes]) -> bool:
    """Whether nobody is at the other end any more, whatever was still sent from there."""
    watch = select.poll()
    watch.register(connection.fileno(), 0)  # an end is told unasked
    return bool(watch.poll(0))


def _killed(children: set[int]) -> Iterator[tuple[int, int]]:
    """All children with their exit codes, ended at once."""
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
    """Whether this process is known to have no thread but this one, of Python or of a library."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
