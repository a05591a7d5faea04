"""Shared memory: files that several processes map.

A mapped file works the same way on Linux, macOS and Windows and needs no registry of names. Tensors are views of it:
nothing is pickled, and one process reads without a copy what another writes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anysize.errors import AnysizeError
from anysize.wire import Tensors

_ALIGNMENT = 64  # bytes; a cache line, and enough for every dtype

Layout = list[list[Any]]
"""One entry per tensor: name, dtype, shape, offset in bytes."""


def create(path: Path, size_bytes: int) -> Tensor:
    """A new mapped file as a tensor of bytes."""
    with path.open("wb") as file:
        file.truncate(max(size_bytes, 1))
        try:
            if hasattr(os, "posix_fallocate"):  # writing to a sparse file on a full disk would kill the process
                os.posix_fallocate(file.fileno(), 0, max(size_bytes, 1))
        except OSError as error:
            raise AnysizeError(
                f"no room for {size_bytes:,} bytes of shared memory in {path.parent} ({error.strerror}); free some, or "
                'set engine.name = "inprocess"'
            ) from None
    return attach(path)


def attach(path: Path) -> Tensor:
    """An existing mapped file as a tensor of bytes."""
    return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)


def space(tensors: Mapping[str, Tensor]) -> int:
    """The bytes that `put` needs."""
    return sum(_padded(tensor.numel() * tensor.element_size()) for tensor in tensors.values())


def put(tensors: Mapping[str, Tensor], memory: Tensor, start: int = 0) -> tuple[Layout, int]:
    """Copy tensors into memory from `start` on; returns their layout, and where the next could start."""
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
