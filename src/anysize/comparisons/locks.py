"""Locks on cells: a lock is held by one process at a time, and ends with it, however that ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl

FOLDER = ".cells"


@contextmanager
def held(folder: Path, path: str) -> Iterator[bool]:
    """Whether the lock of a cell is ours inside; without waiting.

    On a system or a file system that has no such locks it always is: let processes there take different shards.
    """
    place = _file(folder, path, "lock")
    place.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(place, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield _taken(handle)
    finally:
        os.close(handle)


def note_failure(folder: Path, path: str, text: str) -> None:
    """Leaves word of an error, so that no other process of this comparison runs into it too."""
    place = _file(folder, path, "failed")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")


def failure(folder: Path, path: str) -> str | None:
    """The error with which a cell has failed since the comparison was last begun, or None."""
    try:
        return _file(folder, path, "failed").read_text(encoding="utf-8")
    except OSError:
        return None


def forget_failures(folder: Path) -> None:
    """Lets every cell that has failed be tried again."""
    for place in (folder / FOLDER).glob("*.failed"):
        place.unlink(missing_ok=True)


def _file(folder: Path, path: str, kind: str) -> Path:
    # One flat folder beside the runs: a file in a run's own would make it look like something else than a run.
    return folder / FOLDER / f"{path.replace('/', '+')}.{kind}"


def _taken(handle: int) -> bool:
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # some network file systems have no locks
    return True
