"""Updates in fewer bytes, the same for every method: what a client sends of the change of its weights.

Only weights with two axes or more and `WORTH` entries are compressed; biases, norms, statistics and small weights
travel as they are. A client compresses the difference between a weight and the one that it received. What int8 and
top-k leave out stays with the client and is added to its next update (error feedback: Seide et al., "1-bit stochastic
gradient descent and its application to data-parallel distributed training of speech DNNs", Interspeech 2014), if it
then trains the same part of the network.

| `[communication] update` | sent for a weight of n entries and r rows |
| --- | --- |
| float16 | n halves |
| int8 | n integers from -127 to 127, and a factor for each row: 1/127 of its largest entry |
| top-k | the places and the values of the `keep` * n largest entries |

Server and client call the same functions, so every engine gets the same bits.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from anysize.config.tables import CommunicationConfig
from anysize.methods.context import Context
from anysize.methods.messages import SubModel, Update
from anysize.methods.sums import WORD_BYTES, count_words
from anysize.wire import Tensors, size_bytes

WORTH = 1_024
"""The fewest entries of a weight that is compressed."""
FEEDBACK = "feedback/"
"""How the names begin of what was left out of updates, among the tensors that stay with a client."""
_SCALE, _PLACES, _VALUES = "/scale", "/places", "/values"
_LARGEST_HALF = 65_504.0


def compressible(tensor: Tensor) -> bool:
    """Whether a tensor of an update is compressed."""
    return tensor.dtype == torch.float32 and tensor.dim() > 1 and tensor.numel() >= WORTH


def compressed(chosen: CommunicationConfig, update: Update, sub_model: SubModel, kept: Mapping[str, Tensor]) -> Update:
    """The update as it is sent, and with what it leaves out among the tensors that the client keeps.

    Args:
        chosen: how.
        update: after training.
        sub_model: what the client received.
        kept: the tensors that stayed with this client at its last turn.
    """
    if chosen.update == "float32":
        return update
    part = FEEDBACK + _part(sub_model)
    sent: Tensors = {}
    left: Tensors = {}
    for name, tensor in update.tensors.items():
        if not compressible(tensor):
            sent[name] = tensor
            continue
        change = tensor - _base(sub_model, name, tensor)
        before = kept.get(part + name)
        if before is not None and before.shape == change.shape:
            change = change + before
        own = encoded(chosen, name, change)
        sent |= own
        left[part + name] = change - decoded(chosen, name, own, change.shape)
    others = {name: tensor for name, tensor in update.keep.items() if not name.startswith(FEEDBACK)}
    return replace(update, tensors=sent, keep=others | (left if chosen.feeds_back else {}))


def restored(chosen: CommunicationConfig, update: Update, sub_model: SubModel, forms: Mapping[str, Tensor]) -> Update:
    """The update with its weights, from what was sent.

    Args:
        chosen: how it was compressed.
        update: as it was sent, checked with `problems` if it comes from outside.
        sub_model: what the client received.
        forms: the tensors of the update before it was compressed; only shapes and types matter.
    """
    tensors: Tensors = {}
    for name, form in forms.items():
        if chosen.update == "float32" or not compressible(form):
            tensors[name] = update.tensors[name]
        else:
            change = decoded(chosen, name, update.tensors, form.shape)
            tensors[name] = _base(sub_model, name, form) + change
    return replace(update, tensors=tensors)


def encoded(chosen: CommunicationConfig, name: str, change: Tensor) -> Tensors:
    """The tensors that are sent for the change of a weight."""
    if chosen.update == "float16":
        return {name: change.clamp(-_LARGEST_HALF, _LARGEST_HALF).half()}
    if chosen.update == "int8":
        scale = change.flatten(1).abs().amax(1) / 127
        rows = _columns(torch.where(scale > 0, scale, torch.ones_like(scale)), change.dim())
        return {name: (change / rows).round().clamp(-127, 127).to(torch.int8), name + _SCALE: scale}
    flat = change.flatten()
    places = flat.abs().topk(_count(chosen, flat.numel()), sorted=False).indices.sort().values
    return {name + _PLACES: places.to(torch.int32), name + _VALUES: flat[places]}


def decoded(chosen: CommunicationConfig, name: str, sent: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    """The change of a weight, from what was sent for it."""
    if chosen.update == "float16":
        return sent[name].float()
    if chosen.update == "int8":
        return sent[name].float() * _columns(sent[name + _SCALE], len(shape))
    flat = torch.zeros(shape.numel())
    flat[sent[name + _PLACES].long()] = sent[name + _VALUES]
    return flat.reshape(shape)


def sent_forms(chosen: CommunicationConfig, tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors that are sent for those of an update, on the meta device: names, shapes and types."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        shape, count = tensor.shape, tensor.numel()
        if chosen.update == "float32" or not compressible(tensor):
            found[name] = tensor.to("meta")
        elif chosen.update == "float16":
            found[name] = torch.empty(shape, dtype=torch.float16, device="meta")
        elif chosen.update == "int8":
            found[name] = torch.empty(shape, dtype=torch.int8, device="meta")
            found[name + _SCALE] = torch.empty(shape[0], device="meta")
        else:
            found[name + _PLACES] = torch.empty(_count(chosen, count), dtype=torch.int32, device="meta")
            found[name + _VALUES] = torch.empty(_count(chosen, count), device="meta")
    return found


def sent_bytes(chosen: CommunicationConfig, update: Update) -> int:
    """The bytes on the wire of an update whose tensors are not compressed yet, or were restored."""
    return size_bytes(sent_forms(chosen, update.tensors), update.to_json())


def bytes_up(context: Context, update: Update) -> int:
    """The bytes that a client sends for an update; under secure aggregation the words of all clients in the mean."""
    if context.aggregation.secure_threshold is not None:
        return max(1, len(update.members)) * WORD_BYTES * count_words(update.tensors)
    return sent_bytes(context.communication, update)


def problems(chosen: CommunicationConfig, sent: Mapping[str, Tensor], forms: Mapping[str, Tensor]) -> Iterator[str]:
    """What is wrong with the contents of compressed tensors that have the right names, shapes and types.

    Args:
        chosen: how they are to be compressed.
        sent: the tensors that came.
        forms: the tensors of the update before it was compressed.
    """
    for name in (name for name, form in forms.items() if compressible(form)):
        if chosen.update == "int8" and not bool((sent[name + _SCALE] >= 0).all()):
            yield f"sent weight {name} with a factor below 0"
        if chosen.update == "top-k":
            places = sent[name + _PLACES]
            if int(places.min()) < 0 or int(places.max()) >= forms[name].numel():
                yield f"sent weight {name} with places outside its {forms[name].numel()} entries"
            elif not bool((places[1:] > places[:-1]).all()):
                yield f"sent weight {name} with places that are not in order, or given twice"


def _count(chosen: CommunicationConfig, entries: int) -> int:
    """How many entries of a weight top-k sends."""
    return max(1, math.ceil(chosen.keep * entries - 1e-9))


def _base(sub_model: SubModel, name: str, tensor: Tensor) -> Tensor:
    """The weight that the client received under a name; zeros if it received none of this form."""
    before = sub_model.tensors.get(name)
    fits = before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype
    return before if before is not None and fits else torch.zeros(tensor.shape)


def _columns(rows: Tensor, dimensions: int) -> Tensor:
    return rows.reshape(-1, *[1] * (dimensions - 1))


def _part(sub_model: SubModel) -> str:
    """What names the part of the network that a client trains: equal only if what it leaves out belongs there."""
    told = json.dumps([sub_model.ticket.width, dict(sub_model.ticket.more)], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16] + "/"
