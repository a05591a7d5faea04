"""Updates as whole numbers that can be added up, and the mean of clients from their sum.

Clients of one *class* hold the same entries: they got the same tensors and tickets that differ in the client alone.
Their weighted sum is all that an average of these entries needs. Of each client it has

    its weight | weight x loss | weight x (learned - sent), entry by entry

in fixed point with 24 bits after the point, modulo 2^64. So the mean over a class differs from the mean of floating
point numbers by at most 2^-25 in every entry. Whole numbers, such as batch-norm's count of batches, get the rounded
mean. An entry so large that the sum of 4,096 such entries would overflow is an error on the client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anysize.errors import TrustError
from anysize.methods.messages import SubModel, Update
from anysize.methods.training import Tricks
from anysize.wire import Tensors

Words = NDArray[np.uint64]

WORD_BYTES = 8
CLIENTS = 2**12
"""The most clients of a sum: so many cannot overflow."""

_ONE = 2.0**24
_LARGEST = 2.0**63 / CLIENTS
_ABOUT = 2  # words before those of the tensors: the weight, and the loss


def class_of(sub_model: SubModel) -> str:
    """A text that is equal for clients of one class.

    >>> from anysize.methods.messages import Ticket
    >>> some = [SubModel({"w": torch.zeros(2)}, Ticket(client, 1, 0, "0.5", 0.5)) for client in (3, 4)]
    >>> class_of(some[0]) == class_of(some[1])
    True
    """
    ticket = {name: value for name, value in sub_model.ticket.to_json().items() if name != "client"}
    forms = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in sorted(sub_model.tensors.items())]
    return json.dumps([ticket, forms], sort_keys=True)


def words_of(update: Update, sub_model: SubModel, tricks: Tricks) -> Words:
    """What a client adds to the sum of its class.

    Args:
        update: after its training.
        sub_model: what it got.
        tricks: say how clients are weighted.

    Raises:
        TrustError: a number is not finite, or too large.
    """
    weight = update.weight(tricks)
    parts = [torch.tensor([update.loss or 0.0], dtype=torch.float64)]
    parts += [_step(name, update.tensors[name], sub_model.tensors) for name in sorted(update.tensors)]
    scaled = (torch.cat(parts) * (weight * _ONE)).round_()
    if not bool((scaled.abs() < _LARGEST).all()):
        most = _LARGEST / _ONE / weight
        raise TrustError(f"an update moved by what is not finite, or by {most:.3g} or more, which no sum can hold")
    return np.concatenate([np.array([int(weight)], dtype=np.int64), scaled.to(torch.int64).numpy()]).view(np.uint64)


def count_words(forms: Mapping[str, Tensor]) -> int:
    """How many words an update of tensors of these forms has."""
    return _ABOUT + sum(tensor.numel() for tensor in forms.values())


def mean_of(
    words: Words, sub_model: SubModel, forms: Tensors, members: Sequence[int], tricks: Tricks, most: float = 1e6
) -> Update:
    """The mean of a class's updates from the sum of their words, as the update of its first client.

    Args:
        words: the sum.
        sub_model: what one of the clients got.
        forms: tensors of the form of an update's; their values do not matter.
        members: the clients in the sum.
        tricks: say how clients are weighted.
        most: the largest weight of a client.

    Raises:
        TrustError: the sum is not one of so many clients.
    """
    signed = words.view(np.int64)
    weight = int(signed[0])
    by_samples = tricks.weighting == "samples"
    if not (len(members) <= weight <= most * len(members) if by_samples else weight == len(members)):
        raise TrustError(
            f"the sum of {len(members)} clients has weight {weight}: one of them did not add what it should"
        )
    values = torch.from_numpy(signed[1:].astype(np.float64)) / (weight * _ONE)
    tensors, at = {}, 1
    for name in sorted(forms):
        form = forms[name]
        step = values[at : at + form.numel()].reshape(form.shape)
        at += form.numel()
        before = _before(name, form, sub_model.tensors)
        tensors[name] = _as(form, step if before is None else step + before)
    tensors = {name: tensors[name] for name in forms}
    samples = float(weight) if by_samples else None
    return Update(tensors, sub_model.ticket, samples=samples, loss=float(values[0]), members=tuple(sorted(members)))


@dataclass
class ClassSum:
    """The sum of a class whose clients' updates are known, as in a simulation: what masks would leave.

    Attributes:
        sub_model: what its first client got.
        forms: tensors of the form of an update's.
        members: its clients.
        total: the sum of their words.
    """

    sub_model: SubModel
    forms: Tensors
    members: list[int]
    total: Words

    @classmethod
    def of(cls, sub_model: SubModel, update: Update) -> ClassSum:
        """The sum before its first client."""
        forms = {name: torch.empty_like(tensor, device="meta") for name, tensor in update.tensors.items()}
        return cls(sub_model, forms, [], np.zeros(count_words(forms), dtype=np.uint64))

    def add(self, update: Update, tricks: Tricks) -> None:
        """Add a client's update."""
        self.total += words_of(update, self.sub_model, tricks)
        self.members.append(update.ticket.client)

    def mean(self, tricks: Tricks) -> Update:
        """The mean of its clients' updates."""
        return mean_of(self.total, self.sub_model, self.forms, self.members, tricks, float("inf"))


def _step(name: str, tensor: Tensor, sent: Tensors) -> Tensor:
    """How far a tensor is from the sent one, or its values if none was sent, flat."""
    before = _before(name, tensor, sent)
    values = tensor.detach().to(torch.float64)
    return (values if before is None else values - before).reshape(-1)


def _before(name: str, tensor: Tensor, sent: Tensors) -> Tensor | None:
    found = sent.get(name)
    return found.detach().to(torch.float64) if found is not None and found.shape == tensor.shape else None


def _as(form: Tensor, values: Tensor) -> Tensor:
    return values.to(form.dtype) if form.is_floating_point() else values.round().to(form.dtype)
