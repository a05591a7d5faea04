"""Values that are known although nothing is computed: what a network makes from sizes and constants alone.

On the meta device a tensor has a shape and no contents. Many networks read contents nevertheless, of tensors that do
not depend on the weights or on the data: is this mask all ones, how long is the longest of these rows, which of these
positions come first. `KnownValues` computes such small tensors beside the meta tensors, so that they can be read.
Where a network selects by contents that are not known, as a mixture of experts does, everything is selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

_LARGEST = 1 << 20  # elements of a tensor whose values are computed
_FILLED = frozenset(
    ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
)
_DATA_NEEDED = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class _Memory:
    """One piece of memory that tensors share; its values are unknown once something unknown was written into it."""

    known = True


@dataclass(frozen=True)
class _Known:
    value: Tensor
    memory: _Memory


def value_of(tensor: Tensor) -> Tensor | None:
    """The values of a tensor, on the CPU, or None if they are unknown; do not change them."""
    if not tensor.is_meta:
        return tensor.detach()
    known: _Known | None = getattr(tensor, "_anysize_known", None)
    return known.value if known is not None and known.memory.known else None


def know(tensor: Tensor, value: Tensor) -> Tensor:
    """The meta tensor, which from now on has these values; too many or not on the CPU, and they stay unknown."""
    if value.numel() <= _LARGEST and value.device.type == "cpu":
        tensor._anysize_known = _Known(value, _Memory())  # type: ignore[attr-defined]
    return tensor


def on_meta(tensor: Tensor) -> Tensor:
    """A meta tensor like this one, detached; of integers and truths, which networks read, the values stay known."""
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    value = None if tensor.is_floating_point() or tensor.is_complex() else value_of(tensor)
    return empty if value is None else know(empty, value.clone())


@contextmanager
def plainly() -> Iterator[None]:
    """Inside, nothing watches: tensors are real and computed as usual."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes what is known, beside the meta device.

    Args:
        largest_float: elements of the largest tensor of fractions whose values are computed. A backward pass makes
            zeros as large as the weights, which nobody reads.
    """

    def __init__(self, largest_float: int = _LARGEST) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._largest_float = largest_float

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors(args, kwargs)
        if given and not any(tensor.is_meta for tensor in given):
            return func(*args, **kwargs)
        if any(tag in func.tags for tag in _DATA_NEEDED):
            return self._read(func, args, kwargs)
        if func is torch.ops.aten._grouped_mm.default and args[1].dim() == 3:  # meta tensors: only of half precision
            return args[0].new_empty((args[0].shape[0], args[1].shape[-1]))
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        if not all(tensor.is_meta for tensor in given):
            args, kwargs = tree_map(_as_meta, (args, kwargs))
        out = func(*args, **kwargs)
        self._remember(func, args, kwargs, out)
        return out

    def _remember(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Compute the values of a result, if all that it is made of is known."""
        given = _tensors(args, kwargs)
        results = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
        name = str(func.overloadpacket.__name__)
        fractions = any(result.is_floating_point() for result in results)
        small = sum(result.numel() for result in results) <= (self._largest_float if fractions else _LARGEST)
        values = _values(given, filled=name in _FILLED) if small else None
        if name == "rand" and not given and results[0].numel() == 1:  # code asks it whether to skip a layer
            know(results[0], torch.full(tuple(results[0].shape), 0.5, dtype=results[0].dtype, device="cpu"))
            return
        if values is None or torch.Tag.nondeterministic_seeded in func.tags:
            for tensor in _written(func, args, kwargs):
                _forget(tensor)
            return
        if not given and not (results and results[0].is_meta):
            return
        computed = _computed(func, args, kwargs, values)
        if computed is None:
            return
        for result, value in zip(results, (leaf for leaf in tree_flatten(computed)[0] if isinstance(leaf, Tensor))):
            if not any(result is tensor for tensor in given):
                result._anysize_known = _Known(value, _memory_of(value, given))  # type: ignore[attr-defined]

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation whose result, or the size of it, depends on values."""
        given = _tensors(args, kwargs)
        values = _values(given)
        if values is None:
            guess = _GUESSES.get(str(func.overloadpacket.__name__))
            if guess is not None:
                return guess(func, args, kwargs)
            return func(*args, **kwargs)
        computed = _computed(func, args, kwargs, values)
        return tree_map(lambda leaf: know(leaf.to("meta"), leaf) if isinstance(leaf, Tensor) else leaf, computed)


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for leaf in (*args, *kwargs.values()):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, list | tuple):
            found.extend(part for part in leaf if isinstance(part, Tensor))
    return found


def _as_meta(leaf: Any) -> Any:
    """A real tensor among meta tensors, such as a constant of the user's code, as a meta tensor of known values."""
    if not isinstance(leaf, Tensor) or leaf.is_meta or leaf.dim() == 0:
        return leaf
    return know(leaf.detach().to("meta"), leaf.detach())


def _values(given: Sequence[Tensor], *, filled: bool = False) -> dict[int, Tensor] | None:
    """The values of all tensors by their id, or None if one is unknown; `filled` if only their shapes matter."""
    values = {}
    for tensor in given:
        value = value_of(tensor)
        if value is None and filled and tensor.numel() <= _LARGEST:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if value is None:
            return None
        values[id(tensor)] = value
    return values


def _computed(func: Any, args: Any, kwargs: Any, values: Mapping[int, Tensor]) -> Any:
    """What the operation gives on the CPU; None if it cannot run there."""

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return values[id(leaf)]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    with plainly():
        own_args, own_kwargs = tree_map(real, (tuple(args), dict(kwargs)))
        try:
            return func(*own_args, **own_kwargs)
        except (RuntimeError, IndexError):  # what the full computation would also refuse is reported there
            return None


def _memory_of(value: Tensor, given: Sequence[Tensor]) -> _Memory:
    """The memory of a result: that of the operand which it is a view of, or a new one."""
    place = value.untyped_storage().data_ptr()
    for tensor in given:
        known: _Known | None = getattr(tensor, "_anysize_known", None)
        if known is not None and known.value.untyped_storage().data_ptr() == place:
            return known.memory
    return _Memory()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation changes in place."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor))


def _forget(tensor: Tensor) -> None:
    known: _Known | None = getattr(tensor, "_anysize_known", None)
    if known is not None:
        known.memory.known = False


# --- what is selected by unknown values: everything ------------------------------------------------------------------


def _all_places(mask: Tensor) -> Tensor:
    with plainly():
        places = torch.ones(tuple(mask.shape), dtype=torch.bool, device="cpu").nonzero()
        return know(places.to("meta"), places)


def _nonzero(func: Any, args: Any, kwargs: Any) -> Tensor:
    return _all_places(args[0])


def _masked_select(func: Any, args: Any, kwargs: Any) -> Tensor:
    values: Tensor = args[0]
    shape = torch.broadcast_shapes(values.shape, args[1].shape)  # type: ignore[no-untyped-call]
    return values.new_empty(math.prod(shape))


def _index(func: Any, args: Any, kwargs: Any) -> Any:
    """Truths among the indices become places; indices alone need no values."""
    return func(args[0], by_places(args[1]), *args[2:], **kwargs)


def by_places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The indices with each mask replaced by the places that it selects, all of them if it is unknown."""
    listed: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            listed.append(index)
            continue
        value = value_of(index)
        with plainly():
            places = value.nonzero() if value is not None else _all_places(index)
            listed.extend(know(row.to("meta"), row) for row in _known_rows(places))
    return listed


def _known_rows(places: Tensor) -> Sequence[Tensor]:
    value = value_of(places)
    assert value is not None
    return value.unbind(1)


_GUESSES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "nonzero": _nonzero,
    "masked_select": _masked_select,
    "index": _index,
}


# --- reading and making by functions that the dispatcher does not see ------------------------------------------------


_READ = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__format__)
_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def _listed_places(index: Any) -> Any:
    """The index with each list of integers as a tensor of known values."""
    if isinstance(index, tuple):
        return tuple(_listed_places(part) if isinstance(part, list) else part for part in index)
    if not isinstance(index, list) or not index or not all(type(part) is int for part in index):
        return index
    with plainly():
        value = torch.tensor(index, device="cpu")
        return know(value.to("meta"), value)


class MetaDevice(DeviceContext):
    """Tensors are made on the meta device; of those made from Python numbers the values are known."""

    def __init__(self) -> None:
        super().__init__("meta")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READ and args[0].is_meta:
            value = value_of(args[0])
            if value is not None:
                return func(value, *args[1:], **kwargs)
        if func in _INDEXED:
            args = (args[0], _listed_places(args[1]), *args[2:])
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func in (torch.tensor, torch.as_tensor) and isinstance(result, Tensor) and result.is_meta:
            return self._made(func, args, kwargs, result)
        return result

    def _made(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> Tensor:
        data = args[0] if args else kwargs["data"]
        if any(isinstance(leaf, Tensor) for leaf in tree_flatten(data)[0]):
            return result
        with plainly():
            value = torch.tensor(data, dtype=result.dtype, device="cpu")
        return know(result, value)


@contextmanager
def known_values() -> Iterator[None]:
    """Inside, tensors are made on the meta device, and what is known of their values can be read."""
    with MetaDevice(), KnownValues():
        yield
