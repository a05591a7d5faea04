"""Folders that several processes share: in memory if the system allows it, removed when their creator ends.

Nothing here loads PyTorch: the command line creates such a folder before that.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_PREFIX, _LOCK = "anysize-", "in-use"
_MEMORY = Path("/dev/shm")
_ROOM = 1 << 30  # bytes; with less, such as the 64 MB of a container, mapped files go to the ordinary temporary folder
_GUARD = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"


class Folder:
    """A new folder that is removed when this process ends, however that happens.

    A small process, the *guard*, removes it: it waits for the end of a pipe that no other process holds. As long as
    this process lives, it locks the folder, so that others see that it is in use.
    """

    def __init__(self, parent: Path) -> None:
        self.path = parent / f"{_PREFIX}{secrets.token_hex(8)}"
        self._guard = _guarding(self.path)  # first, so that the folder never exists without a guard
        self.path.mkdir(mode=0o700)
        self._lock: int | None = None
        if sys.platform != "win32":
            draft = self.path / "draft"
            self._lock = os.open(draft, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.rename(self.path / _LOCK)  # other processes only ever see the file locked

    def remove(self) -> None:
        """Remove the folder now."""
        shutil.rmtree(self.path, ignore_errors=True)
        with self._guard:
            self._guard.kill()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def new_folder() -> Folder:
    """A new folder, in memory if there is room; removes folders of processes that were killed with their guards."""
    for parent in {_MEMORY, Path(tempfile.gettempdir())}:
        remove_abandoned(parent)
    usable = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _ROOM
    return Folder(_MEMORY if usable else Path(tempfile.gettempdir()))


def remove_abandoned(parent: Path) -> None:
    """Remove folders whose creators have ended.

    A lock marks the folders in use, also across containers that share memory but not process ids.
    """
    if sys.platform == "win32":
        return
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            handle = os.open(lock, os.O_RDWR)
        except OSError:
            continue  # another user's, or already removed
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            pass  # in use
        finally:
            os.close(handle)


def _guarding(path: Path) -> subprocess.Popen[bytes]:
    """A process that removes a folder as soon as this process has ended."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # it must outlive a Ctrl-C
    )
