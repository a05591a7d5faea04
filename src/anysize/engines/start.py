"""A quick start and a quick end for the processes of anysize: the command line and the workers."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any


def quick_start() -> None:
    """Make torch load faster, and the process end faster. Call it before torch is imported.

    Torch marks functions that its compiler must not enter, such as those of optimizers and of the meta device. The
    first call of any of them loads the whole compiler: two seconds in every process, wasted unless something compiles.
    As long as the compiler is not loaded, the mark has no effect.

    Torch also creates a quarter of a million permanent objects. The garbage collector scans them again and again while
    torch loads, and once more when the process ends, for half a second. Here it skips them.
    """
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Finds the two modules of torch that need another loader, and nothing else."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in _LOADERS else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _LOADERS[name](spec.loader.name, spec.loader.path)
        return spec


class _Uncollected(SourceFileLoader):
    """Loads a module with the garbage collector off, and then freezes all objects."""

    def exec_module(self, module: ModuleType) -> None:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            super().exec_module(module)
        finally:
            gc.freeze()
            if was_enabled:
                gc.enable()


class _Unmarked(SourceFileLoader):
    """Loads the module with the decorator for such functions, and replaces the decorator."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        module._disable_dynamo = _disable_dynamo  # type: ignore[attr-defined]


_LOADERS = {"torch": _Uncollected, "torch._compile": _Unmarked}


def _disable_dynamo(function: Callable[..., Any] | None = None, recursive: bool = True) -> Callable[..., Any]:
    """The function, decorated by torch as soon as the compiler is loaded."""
    if function is None:
        return partial(_disable_dynamo, recursive=recursive)
    disabled: Callable[..., Any] | None = None

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        if disable is None:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = disable(function, recursive, wrapping=False)
        return disabled(*args, **kwargs)

    return called
