"""A quick start, for processes that are all ours: the command line and the workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

_HOME = "torch._compile"


def without_compiler() -> None:
    """Lets torch load its compiler when somebody compiles; before, nothing does. Call it before torch is imported.

    Torch marks functions that its compiler must not enter, among them the optimisers' and what the meta device runs,
    and a first call of any of them loads the whole compiler: two seconds in every process, for nothing if nobody
    compiles. As long as the compiler is not loaded, there is nothing that could enter them.
    """
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Finds the module of torch that holds the decorator, and nothing else."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _HOME else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Loads that module, and puts our decorator in the place of its own."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        module._disable_dynamo = _disable_dynamo  # type: ignore[attr-defined]


def _disable_dynamo(function: Callable[..., Any] | None = None, recursive: bool = True) -> Callable[..., Any]:
    """The function, as torch's own decorator of this name gives it as soon as the compiler is loaded."""
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
