"""Settings of a process that computes: one thread, an allocator that keeps memory, no parts of PyTorch in vain."""

from __future__ import annotations

import ctypes
import importlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
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


def spare_modules() -> None:
    """Let PyTorch not load two of its parts only to ask them about plain values; whatever else asks for them gets them.

    An operation on the meta device asks the compiler to leave a function alone, and the algebra of symbolic shapes
    whether plain numbers are equal. The compiler takes 38 MB of memory, the algebra 27 MB, and both take seconds on a
    small board.
    """
    _stand_in("torch._dynamo", {"disable": lambda function, *args, **kwargs: function})
    _stand_in("torch.fx.experimental.symbolic_shapes", _ON_PLAIN_VALUES)
    _stand_in("torch.utils._sympy.functions", {"Max": max})
    _stand_in("sympy", {}, Basic=_Nothing)


def _stand_in(name: str, functions: Mapping[str, Callable[..., Any]], **types: type) -> None:
    if name in sys.modules:
        return
    package, _, attribute = name.rpartition(".")
    sys.modules[name] = _StandIn(name, functions)
    vars(sys.modules[name]).update(types)
    if package:
        setattr(importlib.import_module(package), attribute, sys.modules[name])


class _Nothing:
    """A type of which nothing is an instance."""


class _StandIn(ModuleType):
    """Stands for a module until more of it is needed than its answers about plain values."""

    def __init__(self, name: str, functions: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(name)
        for about, function in functions.items():
            setattr(self, about, self._answering(about, function))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system asks for
            raise AttributeError(name)
        return getattr(self._module(), name)

    def _module(self) -> ModuleType:
        """The module itself, in the place of this one."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return importlib.import_module(self.__name__)

    def _answering(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            symbolic = any(_is_symbolic(arg) for arg in args)
            return getattr(self._module(), name)(*args, **kwargs) if symbolic else function(*args, **kwargs)

        return answer


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(item, torch.SymInt) for item in (*value.shape, *value.stride(), value.storage_offset()))
    if isinstance(value, tuple | list):
        return any(_is_symbolic(item) for item in value)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _same(value: Any) -> Any:
    return value


_ON_PLAIN_VALUES: dict[str, Callable[..., Any]] = {
    "expect_true": lambda value, skip=0: value,
    "guard_or_false": _same,
    "guard_or_true": _same,
    "guard_size_oblivious": _same,
    "statically_known_true": _same,
    "statically_known_false": operator.not_,
    "is_nested_int": lambda value: False,
    "free_unbacked_symbols": lambda value: set(),
    "has_guarding_hint": lambda value: True,
    "guarding_hint_or_throw": _same,
    "sym_eq": lambda a, b: (tuple(a) == tuple(b)) if isinstance(a, tuple | list) else a == b,
    "sym_and": lambda *values: reduce(operator.and_, values),
    "sym_or": lambda *values: reduce(operator.or_, values),
}
