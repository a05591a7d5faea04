"""The results of operations on the meta device, remembered.

A tensor on the meta device is its shape, strides and type. torch finds those of a result by functions in Python, which
take a hundred times as long as to make such a tensor. The same operations on the same shapes return in every size of
every method, so each is computed once in a process.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_MOST = 20_000
"""How many results are remembered, a kilobyte or so each."""

_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]

_Known = list[_Form | None] | _Form | str
"""A result: several tensors, one tensor, or the first argument."""

_SAME = "the first argument"

_results: dict[Hashable, _Known] = {}


class Remembered(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, an operation on the meta device that was computed before is not computed again.

    >>> x = torch.ones(2, 3, device="meta")
    >>> with Remembered():
    ...     [(x + x).shape for _ in range(2)]
    [torch.Size([2, 3]), torch.Size([2, 3])]
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = _key(func, args, kwargs)
        known = None if key is None else _results.get(key)
        if known is not None:
            return _again(known, args)
        before = None if key is None else _state(args)
        found = func(*args, **kwargs)
        if before is not None and found is args[0]:
            form: _Known | None = _SAME if _state(args) == before else None
        else:
            form = None if key is None else _forms(found, (*args, *kwargs.values()))
        if form is not None:
            if len(_results) >= _MOST:
                _results.clear()
            _results[key] = form
        return found


class _Unknown(Exception):
    """An argument on which more than the form of the result may depend."""


def _key(func: Any, args: Any, kwargs: Any) -> Hashable:
    """What the form of a result depends on; None if the operation returns nothing, or a part of what it was given.

    What an operation changes, such as the statistics of a batch-norm, keeps its form.
    """
    returns = func._schema.returns
    if not returns or any(part.alias_info and not part.alias_info.is_write for part in returns):
        return None
    try:
        return func, torch.get_default_dtype(), _described(args), _described(tuple(kwargs.items()))
    except _Unknown:
        return None


def _again(known: _Known, args: Any) -> Any:
    if isinstance(known, str):
        return args[0]
    return tuple(form and _made(form) for form in known) if isinstance(known, list) else _made(known)


def _state(args: Any) -> Hashable:
    """What an operation on the first argument must leave as it is; None if that is not a tensor."""
    first = args[0] if args else None
    return (_form(first), first.untyped_storage()._cdata) if isinstance(first, Tensor) else None


def _described(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        if not value.is_meta or type(value) not in (Tensor, torch.nn.Parameter):
            raise _Unknown
        return value.shape, value.stride(), value.dtype, value.storage_offset()
    if isinstance(value, list | tuple):
        return tuple(_described(part) for part in value)
    if isinstance(value, torch.Generator):
        raise _Unknown
    return type(value), value  # 1, 1.0 and True are equal


def _forms(found: Any, given: Any) -> _Known | None:
    """How to make the results again; None if one of them shares its memory or leaves some of it out."""
    several = isinstance(found, list | tuple)
    results = [part for part in (found if several else [found]) if part is not None]
    if not all(isinstance(part, Tensor) and part.is_meta for part in results):
        return None
    places = [part.untyped_storage()._cdata for part in results]
    others = [part.untyped_storage()._cdata for part in _tensors(given)]
    if len({*places, *others}) < len(places) + len(set(others)) or not all(map(_whole, results)):
        return None
    return [None if part is None else _form(part) for part in found] if several else _form(found)


def _tensors(values: Any) -> list[Tensor]:
    parts = [_tensors(value) if isinstance(value, list | tuple) else [value] for value in values]
    return [tensor for part in parts for tensor in part if isinstance(tensor, Tensor)]


def _form(tensor: Tensor) -> _Form:
    return tensor.shape, tensor.stride(), tensor.dtype


def _made(form: _Form) -> Tensor:
    shape, stride, dtype = form
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _whole(tensor: Tensor) -> bool:
    """Whether a new tensor of the same form has as much memory."""
    return tensor.untyped_storage().nbytes() == _made(_form(tensor)).untyped_storage().nbytes()
