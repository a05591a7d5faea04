"""Messages over Flower: a note as JSON text and tensors as safetensors blobs; nothing is pickled.

Flower transfers every record of a message, every array in it, and every piece of an array by a request of its own, and
for small messages these requests are all that a message costs. So small blobs are in one record with the note, and
only large ones are arrays: those are sent in pieces, and once for all messages with the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from torch import Tensor

from anysize.config.extras import needs
from anysize.errors import AnysizeError, ConfigError
from anysize.wire import Json, Tensors, dump, load, parsed

if (_missing := needs("a fleet", "fleet", "flwr")) is not None:
    raise ConfigError(_missing)

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

_SMALL_BYTES = 1 << 18
_NOTE = "json"


def packed(
    note: Json, tensors: Mapping[str, Tensor] | None = None, kept: Mapping[str, Tensor] | None = None
) -> RecordDict:
    """A note, its tensors and the tensors that stay with a client, as Flower's records; `unpacked` is the inverse."""
    return with_note(note, record([dump(tensors or {}, {}), dump(kept or {}, {})]))


def unpacked(content: RecordDict) -> tuple[Json, Tensors, Tensors]:
    """The note, its tensors and the tensors that stay with a client; an error if anysize did not write the records."""
    blobs = blobs_in(content)
    if len(blobs) != 2:
        raise AnysizeError(f"a message is not one of anysize's (it has {len(blobs)} blobs)")
    tensors, kept = (load(blob)[0] for blob in blobs)
    return note_in(content), tensors, kept


def record(blobs: Sequence[bytes]) -> ArrayRecord | ConfigRecord:
    """The record of blobs; messages with equal blobs can share it.

    >>> [type(record([bytes(size)])).__name__ for size in (1000, 1_000_000)]
    ['ConfigRecord', 'ArrayRecord']
    """
    named = {f"{place:04d}": blob for place, blob in enumerate(blobs)}
    if sum(map(len, blobs)) <= _SMALL_BYTES:
        return ConfigRecord({**named})
    return ArrayRecord({name: array(blob) for name, blob in named.items()})


def with_note(note: Json, blobs: ArrayRecord | ConfigRecord) -> RecordDict:
    """A message's content."""
    text = json.dumps(note)
    if isinstance(blobs, ConfigRecord):
        return RecordDict({"note": ConfigRecord({_NOTE: text, **blobs})})
    return RecordDict({"arrays": blobs, "note": ConfigRecord({_NOTE: text})})


def blobs_in(content: RecordDict) -> list[bytes]:
    """The blobs of a message, still unparsed; an error if anysize did not write the records."""
    try:
        if "arrays" in content:
            arrays = content["arrays"]
            return [arrays[name].data for name in sorted(arrays)]  # type: ignore[union-attr]
        note = content["note"]
        found = [note[name] for name in sorted(note) if name != _NOTE]
    except (KeyError, AttributeError, TypeError) as error:
        raise foreign(error) from None
    blobs = [blob for blob in found if isinstance(blob, bytes)]
    if len(blobs) < len(found):
        raise AnysizeError("a message is not one of anysize's (its blobs are not bytes)")
    return blobs


def note_in(content: RecordDict) -> Json:
    """The note of a message; an error if anysize did not write it."""
    try:
        note = parsed(str(content["note"][_NOTE]))
    except (KeyError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise foreign(error) from None
    if not isinstance(note, dict):
        raise AnysizeError(f"a message is not one of anysize's (its note is a {type(note).__name__})")
    return note


def foreign(error: Exception) -> AnysizeError:
    """The error for records that anysize did not write."""
    return AnysizeError(f"a message is not one of anysize's ({type(error).__name__}: {error})")


def array(blob: bytes) -> Array:
    """A blob as Flower's array."""
    return Array(dtype="uint8", shape=(len(blob),), stype="safetensors", data=blob)
