"""Bundles taken apart and put together without the package, in the layout of their first format or of today's."""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable
from typing import Any

SEAL = ("format", "header", "sha256", "signature")


def plain(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def parts_of(content: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """(the header's tensors, seal and note in one, the bytes of the tensors); ONNX graphs are a tensor, "graphs"."""
    end = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:end]), content[end:]
    seal = json.loads(header.pop("__metadata__")["anysize"])
    if "note" not in header:
        return header, seal, data
    begin, last = header.pop("note")["data_offsets"]
    text, _, graphs = zlib.decompress(data[begin:last]).partition(b"\n")
    assert last == len(data)
    if graphs:
        data = data[:begin] + zlib.compress(graphs)
        header["graphs"] = about(begin, len(data))
    return header, {**json.loads(text), **seal}, data if graphs else data[:begin]


def assembled(header: dict[str, Any], note: dict[str, Any], data: bytes) -> bytes:
    """The file, with the checksums that an attacker would make anew; its format says where the note is."""
    if str(note.get("format")).endswith("-3"):
        header, note, data = packed(header, note, data)
    if "header" in note:
        note["header"] = hashlib.sha256(plain(header)).hexdigest()
    named = {key: value for key, value in note.items() if key not in ("sha256", "signature")}
    note["sha256"] = hashlib.sha256(plain(named) + data).hexdigest()
    text = json.dumps({"__metadata__": {"anysize": json.dumps(note)}, **header}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def packed(
    header: dict[str, Any], note: dict[str, Any], data: bytes, written: Callable[[Any], str] = json.dumps
) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The parts with the note, written in that way, in a tensor before the graphs."""
    graphs = b""
    with contextlib.suppress(TypeError, ValueError, KeyError, IndexError, zlib.error):  # a place that was changed
        begin, last = header["graphs"]["data_offsets"]
        graphs = zlib.decompress(data[begin:last])
        data = data[:begin]
    inner = {key: value for key, value in note.items() if key not in SEAL}
    held = zlib.compress(written(inner).encode() + b"\n" + graphs)
    others = {key: value for key, value in header.items() if key != "graphs"}
    seal = {key: value for key, value in note.items() if key in SEAL}
    return {**others, "note": about(len(data), len(data) + len(held))}, seal, data + held


def about(begin: int, last: int) -> dict[str, Any]:
    """What a header says of bytes."""
    return {"dtype": "U8", "shape": [last - begin], "data_offsets": [begin, last]}
