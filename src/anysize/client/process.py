"""Settings of a process that computes: one thread, and an allocator that keeps memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one intra-op thread inside: the number of threads changes the last bits of a convolution."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of glibc's malloc.h
_KEEP_BYTES = (1 << 31) - 1  # the most that mallopt takes; a state of 300 million parameters is 1.2 GB


def hold_memory() -> None:
    """Let the allocator reuse large blocks: otherwise it maps, zeroes and unmaps memory for every large tensor.

    Evaluating the full `small-cnn` on Fashion-MNIST in batches of 500 takes half the time with it. Only glibc has
    this setting; elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, _KEEP_BYTES)
