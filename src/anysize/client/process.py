"""Settings of a process that computes: one thread, an allocator that keeps its memory, and no compiler."""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

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
_KEEP_BYTES = 1 << 30


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


_COMPILER = "torch._dynamo"


def spare_compiler() -> None:
    """Let PyTorch not load its compiler only to exclude a function from it; whatever else asks for it gets it.

    An operation on the meta device asks for that exclusion. The compiler takes 38 MB of memory, and seconds on a small
    board.
    """
    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = torch._dynamo = _Uncompiled(_COMPILER)


class _Uncompiled(ModuleType):
    """Stands for PyTorch's compiler until it is needed."""

    @staticmethod
    def disable(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The function itself: nothing compiles it."""
        return function

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER], torch._dynamo
        return getattr(importlib.import_module(_COMPILER), name)
