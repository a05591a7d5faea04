"""A module's structure without its tensors: take the tensors out, fill them in, share nothing by accident.

A *skeleton* has parameters and persistent buffers on the meta device; constants (non-persistent buffers) stay real,
since they are part of the structure. Tensors are named once each: tied parameters appear under their first name.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from torch import Tensor, nn

from anysize.elastic.tracing.values import on_meta
from anysize.errors import ModelError

Network = TypeVar("Network", bound=nn.Module)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer, once each, parameters first."""
    yield from module.named_parameters()
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield (f"{prefix}.{name}" if prefix else name), buffer


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The module's tensors by name, detached and contiguous; already contiguous ones share their memory.

    >>> sorted(tensors_of(nn.Linear(2, 3)))
    ['bias', 'weight']
    """
    return {name: tensor.detach().contiguous() for name, tensor in named_tensors(module)}


def hollow(module: nn.Module, *, constants: bool = True) -> nn.Module:
    """A copy of the structure with its tensors on the meta device; no tensor's contents are copied.

    Args:
        module: any module.
        constants: keep non-persistent buffers real; False puts them on the meta device too, so that the copy can run
            there.
    """
    memo: dict[int, Any] = {}
    stay = set() if not constants else {id(buffer) for buffer in _constants(module)}
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in stay:
            plain = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = _like(tensor, tensor.detach().to("meta")) if plain else on_meta(tensor)
    return copied(module, memo)


def copied(module: Network, memo: dict[int, Any] | None = None) -> Network:
    """A deep copy of a module, several times as fast as `copy.deepcopy`; `memo` says by `id` what is no copy but given.

    A module has two dozen attributes, nearly all of them a number or an empty table of hooks.

    >>> net = nn.Sequential(nn.Linear(2, 3))
    >>> copied(net, {id(net[0].weight): net[0].weight})[0].weight is net[0].weight
    True
    """
    memo = {} if memo is None else memo
    for part in reversed(list(module.modules())):  # parts before the modules that hold them
        kind: Any = type(part)
        if id(part) in memo or not _is_usual(kind):
            continue
        twin = kind.__new__(kind)
        memo[id(part)] = twin
        fields = vars(twin)
        for name, value in vars(part).items():
            fields[name] = value if type(value) in _CONSTANT else _copied_value(value, memo)
    return copy.deepcopy(module, memo)


def _copied_value(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of an attribute that is no constant; for what modules usually have, without a look at all else."""
    kind = type(value)
    if kind is tuple and all(type(part) in _CONSTANT for part in value):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind in _TABLES and not value:
        return memo.setdefault(id(value), kind())
    return copy.deepcopy(value, memo)


_CONSTANT = frozenset((bool, int, float, str, type(None)))
_TABLES = frozenset((dict, OrderedDict, set))
_COPYING = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__slots__")
"""What a class of modules has of its own if it must be copied in another way."""


@lru_cache(1024)
def _is_usual(kind: type[Any]) -> bool:
    """Whether modules of a class are copied attribute by attribute; convolutions only add what old files lack."""
    usual = (nn.Module, nn.Conv2d)
    return all(any(getattr(kind, name, None) is getattr(own, name, None) for own in usual) for name in _COPYING)


@contextmanager
def weightless() -> Iterator[None]:
    """Modules made inside have no weights: each parameter moves to the meta device as soon as its layer registers it.

    So a device that trains a small part of a large network can learn the whole structure with no more than one layer's
    weights in memory at a time. Tied parameters stay tied.

    >>> with weightless():
    ...     network = nn.Linear(2, 3)
    >>> network.weight.device.type, network.weight.shape
    ('meta', torch.Size([3, 2]))
    """
    register = nn.Module.register_parameter

    def without_weights(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = without_weights  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def fill(skeleton: nn.Module, tensors: Mapping[str, Tensor], shared: Collection[str] = ()) -> nn.Module:
    """A real module with the skeleton's structure and copies of `tensors`; tied parameters stay tied.

    Args:
        skeleton: the structure.
        tensors: by name.
        shared: names of tensors that are not copied: the module must not change them.

    >>> net = nn.Linear(2, 3)
    >>> fill(hollow(net), tensors_of(net)).weight.equal(net.weight)
    True
    """
    memo: dict[int, Any] = {}
    problems = []
    for name, old in named_tensors(skeleton):
        new = tensors.get(name)
        if new is None:
            problems.append(f"{name} is missing")
        elif new.shape != old.shape:
            problems.append(f"{name} has shape {tuple(new.shape)}, the network needs {tuple(old.shape)}")
        else:
            memo[id(old)] = _like(old, new.detach() if name in shared else new.detach().clone())
    problems += [
        f"{name} is not part of the network" for name in sorted(set(tensors) - {n for n, _ in named_tensors(skeleton)})
    ]
    if problems:
        raise ModelError("tensors do not fit the network: " + "; ".join(problems))
    return copied(skeleton, memo)


def _constants(module: nn.Module) -> Iterator[Tensor]:
    for child in module.modules():
        for name in child._non_persistent_buffers_set:
            buffer = child._buffers.get(name)
            if buffer is not None:
                yield buffer


def _like(old: Tensor, new: Tensor) -> Tensor:
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return new
