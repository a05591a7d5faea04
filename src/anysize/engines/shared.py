"""Memory that several processes see: files mapped by all of them, in memory where the system has such a folder.

A mapped file works alike on Linux, macOS and Windows, needs no registry of names, and tensors are views of it: nothing
is pickled, and what one process writes another reads without a copy.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anysize.errors import AnysizeError
from anysize.wire import Tensors

if sys.platform != "win32":
    import fcntl

_ALIGNMENT = 64  # bytes; a cache line, and enough for every dtype
_PREFIX, _LOCK = "anysize-", "in-use"
_MEMORY = Path("/dev/shm")
_ROOM = 1 << 30  # bytes; with less, such as the 64 MB of a container, mapped files go to the ordinary temporary folder

Layout = list[list[Any]]
"""One entry per tensor: name, dtype, shape, offset in bytes."""


class Folder:
    """A new folder for mapped files, locked as long as this process lives, so that others know whether it is in use."""

    def __init__(self, parent: Path) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True)
        self.path = Path(self._directory.name)
        self._lock: int | None = None
        if sys.platform != "win32":
            draft = self.path / "draft"
            self._lock = os.open(draft, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.rename(self.path / _LOCK)  # whoever sees the file sees it locked

    def cleanup(self) -> None:
        """Removes the folder."""
        self._directory.cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def folder() -> Folder:
    """A new folder for mapped files, in memory if there is room for them; what dead processes left there is removed."""
    remove_all_abandoned()
    usable = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _ROOM
    return Folder(_MEMORY if usable else Path(tempfile.gettempdir()))


def remove_all_abandoned() -> None:
    """Removes what killed servers left, wherever such folders are."""
    for parent in {_MEMORY, Path(tempfile.gettempdir())}:
        remove_abandoned(parent)


def remove_abandoned(parent: Path) -> None:
    """Removes folders of servers that were killed together with their workers, so that nobody tidied up.

    A lock tells them from those in use, also across containers that share this memory but count processes apart.
    """
    if sys.platform == "win32":
        return
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            handle = os.open(lock, os.O_RDWR)
        except OSError:
            continue  # another user's, or gone by now
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            pass  # in use
        finally:
            os.close(handle)


def create(path: Path, size_bytes: int) -> Tensor:
    """A new mapped file as a tensor of bytes."""
    with path.open("wb") as file:
        file.truncate(max(size_bytes, 1))
        try:
            if hasattr(os, "posix_fallocate"):  # a sparse file on a full disk would end the process when it is written
                os.posix_fallocate(file.fileno(), 0, max(size_bytes, 1))
        except OSError as error:
            raise AnysizeError(
                f"no room for {size_bytes:,} bytes of shared memory in {path.parent} ({error.strerror}); free some, or "
                'set engine.name = "inprocess"'
            ) from None
    return attach(path)


def attach(path: Path) -> Tensor:
    """A mapped file that exists already as a tensor of bytes."""
    return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)


def space(tensors: Mapping[str, Tensor]) -> int:
    """The bytes that `put` needs."""
    return sum(_padded(tensor.numel() * tensor.element_size()) for tensor in tensors.values())


def put(tensors: Mapping[str, Tensor], memory: Tensor, start: int = 0) -> tuple[Layout, int]:
    """Copies tensors into memory from `start` on; gives where they are, and where the next could start."""
    layout: Layout = []
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        target = memory[start : start + size].view(tensor.dtype).view(tensor.shape)
        target.copy_(tensor)
        layout.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start])
        start += _padded(size)
    return layout, start


def get(layout: Sequence[Sequence[Any]], memory: Tensor) -> Tensors:
    """The tensors that `put` laid out, as views of the memory."""
    found: Tensors = {}
    for name, kind, shape, start in layout:
        dtype = getattr(torch, kind)
        size = math.prod(shape) * dtype.itemsize
        found[name] = memory[start : start + size].view(dtype).view(shape)
    return found


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
