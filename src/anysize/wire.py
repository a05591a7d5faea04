"""Named tensors and a small JSON object (the note) as bytes: the one format for files and messages.

The format is safetensors with a single metadata entry. Equal contents give equal bytes, reading runs no code, and
a damaged file is refused before anything is built from it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import re
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from anysize.errors import AnysizeError, CheckpointError, MethodError, TrustError, short

Json = dict[str, Any]
Tensors = dict[str, Tensor]
T = TypeVar("T")

_NOTE = "anysize"  # the one metadata key: several would be written in random order
_LONGEST_HEADER = 1 << 24  # bytes; the header of a thousand tensors has about a hundred thousand
_SEAL = "checksum"  # in the note of a file
_EMPTY = "/empty"  # in a state's note: its empty mappings, since no tensor's name restores them
_DAMAGE = (KeyError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError, RecursionError)
"""What reading a damaged header may raise."""

_DIGITS = 300  # a whole number of more may be larger than any float
_HALF = re.compile(r"\\u[dD][89a-fA-F]")

_DTYPES = {  # in the order in which safetensors lays tensors out
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def dump(tensors: Mapping[str, Tensor], note: Json) -> bytes:
    """The bytes of `tensors` and `note`; the same contents always give the same bytes.

    >>> tensors, note = load(dump({"w": torch.ones(2)}, {"round": 3}))
    >>> tensors["w"].tolist(), note
    ([1.0, 1.0], {'round': 3})
    """
    plain: Tensors = {}
    storages: set[int] = set()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        address = tensor.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory, as slices of one tensor do, so copy each.
        plain[name] = tensor.clone() if address in storages else tensor
        storages.add(address)
    return safetensors.torch.save(plain, {_NOTE: _canonical(note)})


def sealed(tensors: Mapping[str, Tensor], note: Json) -> bytes:
    """As `dump`, with a checksum of everything in the note: for files, which may be damaged where they lie."""
    return dump(tensors, note | {_SEAL: checksum(tensors, note)})


def opened(blob: bytes, source: str, error: type[AnysizeError]) -> tuple[Tensors, Json]:
    """As `load`, for what `sealed` wrote: refuses a wrong checksum. Older versions wrote files without one."""
    tensors, note = load(blob, source, error)
    if _SEAL in note and note[_SEAL] != checksum(tensors, note):
        raise error(f"{source} is damaged: its checksum does not match")
    return tensors, note


def checksum(tensors: Mapping[str, Tensor], note: Json) -> int:
    """A checksum of names, types, shapes and contents of the tensors, and of the note without a checksum."""
    about = {name: [_DTYPES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()}
    own = {key: value for key, value in note.items() if key != _SEAL}
    # Read again before it is sorted: a key that is a number is text in a file.
    total = zlib.crc32(_canonical([about, json.loads(_canonical(own))]).encode())
    for name in sorted(tensors):
        flat = tensors[name].detach().contiguous().reshape(-1)
        total = zlib.crc32(flat.view(torch.uint8).numpy().data, total)
    return total


def load(blob: bytes, source: str = "the message", error: type[AnysizeError] = TrustError) -> tuple[Tensors, Json]:
    """The tensors and the note in `blob`.

    Args:
        blob: the bytes.
        source: what they are, for the error: a message, or the path of a file.
        error: what to raise if they are damaged or not ours.
    """
    try:
        header, _ = _header(blob)
        note = parsed(header["__metadata__"][_NOTE])
        read = safetensors.torch.load(blob)  # in another order every time
        tensors = {name: read[name] for name in header if name in read}
    except (safetensors.SafetensorError, *_DAMAGE) as problem:
        raise error(f"{source} is damaged or was not written by anysize ({problem})") from None
    if not isinstance(note, dict):
        raise error(f"{source} was not written by anysize (its note is not an object)")
    return tensors, note


def peek(blob: bytes) -> Tensors:
    """The tensors of a message, on the meta device: names, shapes and types from the header alone.

    A receiver can thus refuse a message that is too large before it allocates any of it. A header that lies about the
    payload raises a TrustError.

    >>> peek(dump({"w": torch.ones(2, 3)}, {}))["w"].shape
    torch.Size([2, 3])
    """
    kinds = {name: dtype for dtype, name in _DTYPES.items()}
    try:
        header, length = _header(blob)
        found: Tensors = {}
        for name, about in header.items():
            if name == "__metadata__":
                continue
            shape = [operator.index(size) for size in about["shape"]]
            first, last = map(operator.index, about["data_offsets"])
            kind = kinds[about["dtype"]]
            if min(shape, default=0) < 0 or last - first != math.prod(shape) * kind.itemsize:
                raise ValueError(f"'{name}' does not have as many bytes as its shape needs")
            found[name] = torch.empty(shape, dtype=kind, device="meta")
        total = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
        if total != len(blob) - 8 - length:
            raise ValueError(f"tensors of {total} bytes in a payload of {len(blob) - 8 - length}")
    except _DAMAGE as error:
        raise TrustError(f"the message is damaged or was not written by anysize ({error})") from None
    return found


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text from outside: every key comes once, every number fits a float, every text is Unicode.

    Raises:
        ValueError: it is no such text.
        RecursionError: it is nested too deep.

    >>> parsed('{"round": 1, "round": 2}')
    Traceback (most recent call last):
    ValueError: 'round' comes twice
    """
    told = text.decode() if isinstance(text, bytes) else text
    found = json.loads(told, object_pairs_hook=_once, parse_constant=_finite, parse_float=_finite, parse_int=_whole)
    if _HALF.search(told):  # an escape of half a character, or of a whole one in two halves
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _once(pairs: Sequence[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(repr(name) for name in names if names.count(name) > 1)} comes twice")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def _whole(text: str) -> int:
    if len(text) > _DIGITS and abs(int(text)) > sys.float_info.max:
        raise ValueError(f"a number of {len(text.lstrip('-'))} digits is too large")
    return int(text)


def _header(blob: bytes) -> tuple[Json, int]:
    """The header of a message, and its length."""
    length = int.from_bytes(blob[:8], "little")
    if length > min(_LONGEST_HEADER, len(blob) - 8):
        raise ValueError(f"its header has {length} bytes")
    return parsed(blob[8 : 8 + length]), length


def size_bytes(tensors: Mapping[str, Tensor], note: Json) -> int:
    """The length of `dump(tensors, note)`, computed from shapes alone, so that it works for meta tensors too."""
    # The order and padding of safetensors: by dtype, then by name; header padded to eight bytes.
    rank = {dtype: position for position, dtype in enumerate(_DTYPES)}
    order = sorted(tensors, key=lambda name: (rank[tensors[name].dtype], name))
    header: Json = {"__metadata__": {_NOTE: _canonical(note)}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + (length + 7) // 8 * 8 + offset


def under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Those of the tensors whose names begin with a prefix, under the rest of their names.

    >>> sorted(under("network.", {"network.w": torch.ones(1), "basis.w": torch.ones(1)}))
    ['w']
    """
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def by_prefix(tensors: Mapping[str, Tensor], prefixes: Iterable[str], what: str) -> dict[str, Tensors]:
    """For each prefix the tensors under it; refuses a name that begins with none of them.

    Args:
        tensors: by their full names.
        prefixes: that there can be.
        what: holds the tensors, for the error: "fjord: an update".

    Raises:
        MethodError: with the first such name.

    >>> by_prefix({"left.w": torch.ones(1), "right.w": torch.ones(2)}, ("left.", "right."), "an update")["right."]
    {'w': tensor([1., 1.])}
    """
    found = {prefix: under(prefix, tensors) for prefix in prefixes}
    foreign = [name for name in tensors if not name.startswith(tuple(found))]
    if foreign:
        raise MethodError(f"{what} holds '{foreign[0]}'; allowed: names that begin with {', '.join(found)}")
    return found


def copies(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copies of the tensors that share no memory with them.

    >>> tensors = {"w": torch.zeros(1)}
    >>> copies(tensors)["w"].data_ptr() == tensors["w"].data_ptr()
    False
    """
    return {name: tensor.clone() for name, tensor in tensors.items()}


def flatten(state: Any) -> tuple[Tensors, Json]:
    """A state dataclass as (tensors, json): nested mappings of tensors become names joined by '/'."""
    tensors: Tensors = {}
    note: Json = {}
    empty: list[str] = []
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if isinstance(value, Tensor | Mapping):
            _collect(field.name, value, tensors, empty)
        else:
            note[field.name] = value
    return tensors, note | ({_EMPTY: sorted(empty)} if empty else {})


def restore(kind: type[T], tensors: Mapping[str, Tensor], note: Json) -> T:
    """The inverse of `flatten`: the state of that kind. What an older version did not write has its default.

    Raises:
        CheckpointError: they are not what `flatten` makes of such a state.
    """
    tree: Json = {}
    empty = note.get(_EMPTY, [])
    named = isinstance(empty, list) and all(isinstance(name, str) for name in empty)
    if not named or empty != sorted(set(empty)):
        raise CheckpointError(f"the checkpoint's empty mappings are {short(empty)}")
    for name in sorted(tensors):
        *path, last = name.split("/")
        _node(tree, path)[_plain(last)] = tensors[name]
    for name in empty:
        _node(tree, name.split("/"))
    assert dataclasses.is_dataclass(kind)
    values = tree | {name: value for name, value in note.items() if name != _EMPTY}
    fields = dataclasses.fields(kind)
    needed = {f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    strange, missing = set(values) - {f.name for f in fields}, needed - set(values)
    if strange or missing:
        problems = [f"holds {name}, which {kind.__name__} does not have" for name in sorted(strange)]
        problems += [f"lacks {name}" for name in sorted(missing)]
        raise CheckpointError(f"the checkpoint {'; '.join(problems)}: another method wrote it")
    state = kind(**values)
    again, noted = flatten(state)
    names = [*again, *noted.get(_EMPTY, [])]
    # Fields that an older version did not write have their defaults, and no names here.
    if {name for name in names if name.split("/")[0] in values} != {*tensors, *empty}:
        raise CheckpointError("the checkpoint has names that no state has")
    return state


def _node(tree: Json, path: list[str]) -> Json:
    """The mapping at `path`, created if it is missing."""
    node = tree
    for part in path:
        node = node.setdefault(_plain(part), {})
        if not isinstance(node, dict):
            raise CheckpointError(f"the checkpoint has a tensor where {'/'.join(path)} should be a mapping")
    return node


def _collect(name: str, value: Tensor | Mapping[str, Any], into: Tensors, empty: list[str]) -> None:
    if isinstance(value, Tensor):
        into[name] = value
        return
    if not value:
        empty.append(name)
    for key in value:
        _collect(f"{name}/{_quoted(key)}", value[key], into, empty)


def _quoted(key: str) -> str:
    """A key with '/' escaped: it joins keys, and a module's name may hold one."""
    return key.replace("%", "%25").replace("/", "%2F")


def _plain(key: str) -> str:
    return key.replace("%2F", "/").replace("%25", "%")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
