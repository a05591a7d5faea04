"""A quick start and a quick end for the processes of anysize: the command line and the workers."""

from __future__ import annotations

import gc
import operator
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from threading import RLock
from types import ModuleType
from typing import Any


def quick_start() -> None:
    """Make torch load faster, and the process end faster. Call it before torch is imported.

    Torch marks functions that its compiler must not enter, such as those of optimizers and of the meta device. The
    first call of any of them loads the whole compiler: two seconds in every process, wasted unless something compiles.
    As long as the compiler is not loaded, the mark has no effect.

    The meta device compares sizes by functions that also take symbols, and loads a package for algebra with them: half
    a second. As long as all sizes are numbers, such a function is one operation.

    Torch also creates a quarter of a million permanent objects. The garbage collector scans them again and again while
    torch loads, and once more when the process ends, for half a second. Here it skips them.
    """
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Finds the modules of torch that need another loader, and nothing else."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package in _pending and name != package:
            return _part(name, package, path)
        spec = PathFinder.find_spec(name, path) if name in _LOADERS else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _LOADERS[name](spec.loader.name, spec.loader.path)
        return spec


def _part(name: str, package: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """How to import a part of a late package, which is loaded first; it may have loaded the part already."""
    _load(package)
    module = sys.modules.get(name)
    if module is None:
        return PathFinder.find_spec(name, path)
    spec = ModuleSpec(name, _Made(module))
    module.__spec__ = spec  # Python takes this one where it finds the module
    return spec


class _Made(Loader):
    """Gives a module that was made while it was looked for, in place of a second one."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


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


class _Late(SourceFileLoader):
    """Loads a module when somebody wants more of it than what `_EARLY` has."""

    def exec_module(self, module: ModuleType) -> None:
        name, execute = module.__name__, super().exec_module

        def load() -> None:
            with _loading:
                if _pending.pop(name, None) is not None:
                    del module.__getattr__
                    execute(module)  # replaces what is early by what torch means

        def wanted(attribute: str) -> Any:
            if attribute.startswith("__"):  # what Python asks every module for
                raise AttributeError(f"module '{name}' has no attribute '{attribute}'")
            load()
            return getattr(module, attribute)

        _pending[name] = load
        module.__getattr__ = wanted  # type: ignore[method-assign]
        _EARLY[name](module)


def _numbers(module: ModuleType) -> None:
    """The functions of torch's symbolic sizes, as they are where all sizes are numbers."""
    import_module("torch.fx.experimental._config")  # torch expects it to be loaded with this module

    def of_numbers(name: str, simple: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            if (len(given) == 1 and type(given[0]) is bool) or _all_numbers(given):  # nearly always one truth
                return simple(*given)
            _load(module.__name__)
            return getattr(module, name)(*given)

        return called

    for name, simple in _OF_NUMBERS.items():
        setattr(module, name, of_numbers(name, simple))


def _all_numbers(values: Sequence[Any]) -> bool:
    return all(
        type(value) in (bool, int) or (isinstance(value, list | tuple) and _all_numbers(value)) or _plainly_sized(value)
        for value in values
    )


def _plainly_sized(value: object) -> bool:
    """Whether a value is a tensor whose sizes are numbers."""
    from torch import Tensor

    return isinstance(value, Tensor) and _all_numbers((value.shape, value.stride(), value.storage_offset()))


_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "expect_true": lambda truth, skip=0: truth,
    "free_unbacked_symbols": lambda value: set(),
    "guard_or_false": bool,
    "guard_or_true": bool,
    "guard_size_oblivious": bool,
    "guarding_hint_or_throw": lambda number: number,
    "has_guarding_hint": lambda number: True,
    "is_nested_int": lambda number: False,
    "statically_known_false": operator.not_,
    "statically_known_true": bool,
    "sym_and": lambda *given: all(given),
    "sym_eq": lambda a, b: a == b if isinstance(a, int) else tuple(a) == tuple(b),
    "sym_or": lambda *given: any(given),
}


class _Symbol:
    """Stands for a class of symbols: as long as its module is not loaded, nothing is one."""

    def __init__(self, name: str, module: ModuleType) -> None:
        self._name, self._module = name, module
        setattr(module, name, self)

    def _real(self) -> Any:
        _load(self._module.__name__)
        return getattr(self._module, self._name)

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self._real()(*given, **options)

    def __instancecheck__(self, value: object) -> bool:
        return self._module.__name__ not in _pending and isinstance(value, self._real())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)


def _load(name: str) -> None:
    """Load a late module now, unless it is loaded."""
    if name in _pending:
        _pending[name]()


_loading = RLock()
_pending: dict[str, Callable[[], None]] = {}
"""The late modules that are not loaded yet, and what loads them."""

_EARLY: dict[str, Callable[[ModuleType], object]] = {
    "sympy": partial(_Symbol, "Basic"),
    "torch.fx.experimental.symbolic_shapes": _numbers,
    "torch.utils._sympy.functions": partial(_Symbol, "Max"),  # which a check of strides imports, and does not use
}
"""What a late module has before it is loaded: all that the meta device needs of it."""

_LOADERS = {"torch": _Uncollected, "torch._compile": _Unmarked, **dict.fromkeys(_EARLY, _Late)}


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
