"""A device's part in secure sums: it trains, keeps what it learned, and answers the steps by which it is summed.

What the device learned leaves it in masked words alone, once for every round of a run and once for every message, which
`Summed` remembers. And it leaves only in a sum of devices that learned from the same message.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from anysize.deploy.masking import Keys, Member
from anysize.deploy.summed import Summed
from anysize.errors import TrustError, short
from anysize.methods.messages import SubModel, Ticket, Update
from anysize.methods.sums import Words, class_of, words_of
from anysize.methods.training import Tricks
from anysize.wire import Json, Tensors

WORDS = "words"
"""The name of the words among an answer's tensors."""


class Membership:
    """What a device holds from the training of a round to the end of its sum.

    Args:
        threshold: the fewest devices of a sum.
        tricks: say how clients are weighted.
        run: the run's id.
        summed: the sums that the device was part of; it outlives this object.
    """

    def __init__(self, threshold: int, tricks: Tricks, run: str, summed: Summed) -> None:
        self._threshold, self._tricks = threshold, tricks
        self._run, self._summed = run, summed
        self._held: tuple[Member, SubModel, Update, bytes] | None = None

    def check(self, ticket: Ticket, message: bytes) -> None:
        """Refuse a job whose answer would tell of this device alone, and to learn again what was summed already.

        Args:
            ticket: of the job.
            message: the digest of all that it is to learn from.
        """
        if ticket.job != "train":
            raise TrustError(f'refused to "{ticket.job}": the experiment sums updates securely and asks nothing else')
        self._summed.check(self._run, ticket.round, message)

    def begin(self, sub_model: SubModel, update: Update, message: bytes) -> Json:
        """Keep what was learned, and tell fresh public keys.

        Args:
            sub_model: what the device got.
            update: what it learned.
            message: the digest of all that it learned from; the same for all devices of the sum.
        """
        member = Member(sub_model.ticket.client, self._threshold, message)
        public = member.keys()
        self._held = member, sub_model, update, message
        return {"keys": [text(key) for key in public]}

    def step(self, asked: Any) -> tuple[Json, Tensors]:
        """The answer to the next step of the sum: a note and tensors. After an error the sum is over."""
        held, self._held = self._held, None
        if held is None:
            raise TrustError("is asked for the next step of a sum that it has no part in")
        member, sub_model, update, message = held
        step, told = asked_in(asked, sub_model.ticket.round)
        tensors: Tensors = {}
        if step == "shares":
            note = {"shares": texts(member.shares(keys_in(told)))}
        elif step == "words":
            words = member.words(blobs_in(told), words_of(update, sub_model, self._tricks))
            self._summed.note(self._run, sub_model.ticket.round, message)
            note, tensors = {}, {WORDS: torch.from_numpy(words.view("int64"))}
        elif step == "unmask":
            note = {"shares": texts(member.unmask(numbers_in(told)))}
        else:
            raise TrustError(f'is asked for step {short(step)} of a sum; there are "shares", "words" and "unmask"')
        if step != "unmask":
            self._held = held
        return note, tensors


def digest(brief: Any, ticket: Ticket, blob: bytes) -> bytes:
    """The same for devices that learn from the same: experiment, tensors, and ticket but for the client.

    Args:
        brief: the experiment, as the server tells it.
        ticket: of the message.
        blob: its tensors, as they came.
    """
    told = json.dumps([brief, class_of(SubModel({}, ticket)), hashlib.sha256(blob).hexdigest()], sort_keys=True)
    return hashlib.sha256(told.encode()).digest()


def asked(step: str, round: int, told: Any) -> Json:
    """What the server asks of a device in a step."""
    return {"step": step, "round": round, "told": told}


def asked_in(note: Any, round: int) -> tuple[str, Any]:
    """The step and what was told, of what a server asks in a round."""
    if not isinstance(note, dict) or not isinstance(note.get("step"), str) or note.get("round") != round:
        raise TrustError(f"is asked for {short(note)}, which is no step of the sum of round {round}")
    return note["step"], note.get("told")


def text(blob: bytes) -> str:
    """Bytes as JSON can hold them."""
    return base64.b64encode(blob).decode()


def texts(blobs: Mapping[int, bytes]) -> dict[str, str]:
    """Bytes of members as JSON can hold them; `blobs_in` is the inverse.

    >>> blobs_in(texts({3: b"a share"}))
    {3: b'a share'}
    """
    return {str(member): text(blob) for member, blob in blobs.items()}


def blobs_in(told: Any) -> dict[int, bytes]:
    """The bytes of members in a message from outside."""
    try:
        return {int(member): base64.b64decode(blob, validate=True) for member, blob in told.items()}
    except (AttributeError, TypeError, ValueError):
        raise TrustError(f"sent {short(told)} in a step of a sum, expected a text for each member") from None


def key_texts(keys: Mapping[int, Keys]) -> dict[str, list[str]]:
    """Public keys as JSON can hold them; `keys_in` is the inverse."""
    return {str(member): [text(key) for key in own] for member, own in keys.items()}


def keys_in(told: Any) -> dict[int, Keys]:
    """The public keys of members in a message from outside."""
    try:
        return {int(member): key_pair(own) for member, own in told.items()}
    except (AttributeError, TypeError, ValueError):
        raise TrustError(f"sent {short(told)}, expected two keys for each member") from None


def key_pair(told: Any) -> Keys:
    """A member's public keys in a message from outside."""
    try:
        first, second = (base64.b64decode(key, validate=True) for key in told)
    except (TypeError, ValueError):
        raise TrustError(f"sent {short(told)}, expected two keys") from None
    return Keys(first, second)


def numbers_in(told: Any) -> list[int]:
    """The members that a message from outside names."""
    if not isinstance(told, list) or not all(type(member) is int for member in told):
        raise TrustError(f"sent {short(told)}, expected the numbers of members")
    return told


def words_in(tensors: Tensors) -> Words:
    """The words in an answer."""
    found = tensors.get(WORDS)
    if found is None or len(tensors) != 1 or found.dtype != torch.int64 or found.dim() != 1:
        raise TrustError("sent no words in the step that asks for them")
    words: Words = found.numpy().view("uint64")
    return words
