"""Named tensors plus a small JSON object as bytes: the one format on disk and on the wire.

The format is safetensors with a single metadata entry, so that equal contents give equal bytes, reading runs no
code, and a damaged file is refused before anything is built from it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from anysize.errors import CheckpointError

Json = dict[str, Any]
Tensors = dict[str, Tensor]
T = TypeVar("T")

_NOTE = "anysize"  # the one metadata key: several would be written in random order
_DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}


def dump(tensors: Mapping[str, Tensor], note: Json) -> bytes:
    """The bytes of `tensors` and `note`; the same contents always give the same bytes.

    >>> tensors, note = load(dump({"w": torch.ones(2)}, {"round": 3}))
    >>> tensors["w"].tolist(), note
    ([1.0, 1.0], {'round': 3})
    """
    plain = {name: tensors[name].detach().contiguous() for name in sorted(tensors)}
    return safetensors.torch.save(plain, {_NOTE: _json(note)})


def load(blob: bytes, source: str = "message") -> tuple[Tensors, Json]:
    """The tensors and the note in `blob`, refused with one line if it is damaged or not ours."""
    try:
        tensors = safetensors.torch.load(blob)
        length = int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8 : 8 + length])
        note = json.loads(header["__metadata__"][_NOTE])
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{source} is damaged or was not written by anysize ({error})") from None
    if not isinstance(note, dict):
        raise CheckpointError(f"{source} was not written by anysize (its note is not an object)")
    return tensors, note


def size_bytes(tensors: Mapping[str, Tensor], note: Json) -> int:
    """The length of `dump(tensors, note)`, computed from shapes alone, so that meta tensors have one too."""
    # The order and padding of safetensors: largest dtype first, then by name; header padded to eight bytes.
    order = sorted(tensors, key=lambda name: (list(_DTYPES).index(tensors[name].dtype), name))
    header: Json = {"__metadata__": {_NOTE: _json(note)}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + (length + 7) // 8 * 8 + offset


def write(path: Path, blob: bytes) -> None:
    """Replaces `path` by `blob` in one step: a reader, or a crash, sees the old file or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"could not write {path}: {error.strerror or error}. The file before it is untouched; free some space and go on "
            "with --resume"
        ) from None


def flatten(state: Any) -> tuple[Tensors, Json]:
    """A state dataclass as (tensors, json): nested mappings of tensors become names joined by '/'."""
    tensors: Tensors = {}
    note: Json = {}
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if isinstance(value, Tensor | Mapping):
            _collect(field.name, value, tensors)
        else:
            note[field.name] = value
    return tensors, note


def restore(kind: type[T], tensors: Mapping[str, Tensor], note: Json) -> T:
    """The state that `flatten` took apart; empty mappings come back empty."""
    tree: Json = {}
    for name in sorted(tensors):
        *path, leaf = name.split("/")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = tensors[name]
    assert dataclasses.is_dataclass(kind)
    names = {field.name for field in dataclasses.fields(kind)}
    foreign = sorted((set(tree) | set(note)) - names)
    if foreign:
        raise CheckpointError(
            f"the checkpoint holds {', '.join(foreign)}, unknown to {kind.__name__}: another method wrote it"
        )
    values = {name: note[name] if name in note else tree.get(name, {}) for name in names}
    return kind(**values)


def _collect(name: str, value: Tensor | Mapping[str, Any], into: Tensors) -> None:
    if isinstance(value, Tensor):
        into[name] = value
        return
    for key in value:
        _collect(f"{name}/{key}", value[key], into)


def _json(note: Json) -> str:
    return json.dumps(note, sort_keys=True, separators=(",", ":"), allow_nan=False)
