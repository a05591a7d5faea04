"""What anysize says over Flower: a note as one JSON text and tensors as one safetensors blob; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from torch import Tensor

from anysize.config.extras import needs
from anysize.errors import AnysizeError, ConfigError
from anysize.wire import Json, Tensors, dump, load

if (_missing := needs("a fleet", "fleet", "flwr")) is not None:
    raise ConfigError(_missing)

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict


def packed(
    note: Json, tensors: Mapping[str, Tensor] | None = None, kept: Mapping[str, Tensor] | None = None
) -> RecordDict:
    """A note and tensors, those that travel and those that stay, as Flower's records; `unpacked` is the inverse."""
    return with_note(note, record([dump(tensors or {}, {}), dump(kept or {}, {})]))


def unpacked(content: RecordDict) -> tuple[Json, Tensors, Tensors]:
    """The note and the tensors that travel and that stay; an error if the records are not ours."""
    blobs = blobs_in(content)
    if len(blobs) != 2:
        raise AnysizeError(f"a message is not one of anysize's (it has {len(blobs)} blobs)")
    tensors, kept = (load(blob)[0] for blob in blobs)
    return note_in(content), tensors, kept


def record(blobs: Sequence[bytes]) -> ArrayRecord:
    """The record of blobs; messages with the same ones can share it."""
    return ArrayRecord({f"{place:04d}": array(blob) for place, blob in enumerate(blobs)})


def with_note(note: Json, blobs: ArrayRecord) -> RecordDict:
    """A message's content."""
    return RecordDict({"arrays": blobs, "note": ConfigRecord({"json": json.dumps(note)})})


def blobs_in(content: RecordDict) -> list[bytes]:
    """The blobs of a message, not yet looked into; an error if the records are not ours."""
    try:
        arrays = content["arrays"]
        return [arrays[name].data for name in sorted(arrays)]  # type: ignore[union-attr]
    except (KeyError, AttributeError, TypeError) as error:
        raise foreign(error) from None


def note_in(content: RecordDict) -> Json:
    """The note of a message; an error if it is not ours."""
    try:
        note = json.loads(str(content["note"]["json"]))
    except (KeyError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise foreign(error) from None
    if not isinstance(note, dict):
        raise AnysizeError(f"a message is not one of anysize's (its note is a {type(note).__name__})")
    return note


def foreign(error: Exception) -> AnysizeError:
    """What to say about records that are not ours."""
    return AnysizeError(f"a message is not one of anysize's ({type(error).__name__}: {error})")


def array(blob: bytes) -> Array:
    """A blob as Flower's array."""
    return Array(dtype="uint8", shape=(len(blob),), stype="safetensors", data=blob)
