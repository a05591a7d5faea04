"""Messages to a client and from it: named tensors, and a ticket that says what they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from anysize.errors import TrustError, short
from anysize.methods.size import Size
from anysize.methods.training import Tricks
from anysize.rng import generator
from anysize.wire import Json, Tensors

ANSWERS: Mapping[str, tuple[str, ...]] = {
    "train": ("samples", "loss", "classes"),
    "calibrate": (),
    "evaluate": ("samples", "sums"),
    "echo": (),
}
"""The jobs of a client, and what it tells after each besides tensors."""


@dataclass(frozen=True)
class Client:
    """One participant of a round as a method sees it.

    Attributes:
        id: which client, from 0.
        position: its place in the round's order, from 0.
        size: the largest size that its device can train.
        round: from 1.
        samples: how many samples it trains on.
        seed: of the run; random choices are derived from (seed, round, id, purpose).
        job: the client's job: "train", "calibrate" or "evaluate"; the last two need the finished network.
    """

    id: int
    position: int
    size: Size
    round: int
    samples: int
    seed: int
    job: str = "train"

    def generator(self, purpose: str) -> torch.Generator:
        """Random numbers for `purpose`, the same on every engine and after a resume."""
        return generator(self.seed, self.round, self.id, purpose)


@dataclass(frozen=True)
class Ticket:
    """What a message says besides its tensors: which client does which job with them.

    Attributes:
        client: the client that receives it.
        round: from 1; 0 before the first round.
        seed: of the run.
        size: the label of the client's size.
        width: of the network that the client builds.
        job: "train", "calibrate" or "evaluate"; "echo" sends back what came, to time an engine.
        rate: the learning rate, if the job is to train.
        batch_size: the batch size of an evaluation; None for the usual one.
        calibration_samples: the most samples that a calibration uses; None for all.
        more: what the method tells its client, as JSON.
    """

    client: int
    round: int
    seed: int
    size: str
    width: float
    job: str = "train"
    rate: float | None = None
    batch_size: int | None = None
    calibration_samples: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> Json:
        """One flat JSON object without None values; `from_json` is the inverse.

        >>> Ticket(client=3, round=1, seed=0, size="0.5", width=0.5, more={"keep": 0.5}).to_json()
        {'keep': 0.5, 'client': 3, 'round': 1, 'seed': 0, 'size': '0.5', 'width': 0.5, 'job': 'train'}
        """
        own = {name: getattr(self, name) for name in _OWN}
        return {**self.more, **{name: value for name, value in own.items() if value is not None}}

    @classmethod
    def from_json(cls, note: Any) -> Ticket:
        """The ticket in a message from outside: the check that a server and its clients both make.

        Raises:
            TrustError: lists all its problems.

        >>> Ticket.from_json({"client": 3, "round": 1, "seed": 0, "size": "0.5", "width": 2, "job": "evaluate"})
        Traceback (most recent call last):
        anysize.errors.TrustError: width = 2 is not above 0 and at most 1
        """
        problems = list(_problems(note))
        if problems:
            raise TrustError("; ".join(problems))
        own = {name: value for name, value in note.items() if name in _OWN}
        return cls(**own, more={name: value for name, value in note.items() if name not in _OWN})


_OWN = tuple(own.name for own in fields(Ticket) if own.name != "more")


def _problems(note: Any) -> Iterator[str]:
    """The problems of a ticket."""
    if not isinstance(note, dict) or not all(isinstance(name, str) for name in note):
        yield f"{short(note)} is not a ticket"
        return
    missing = [name for name in ("client", "round", "seed", "size", "width", "job") if name not in note]
    if missing:
        yield f"{', '.join(missing)} missing"
        return
    if note["job"] not in list(ANSWERS):
        yield f"job = {short(note['job'])} is not one of {', '.join(ANSWERS)}"
    for name in ("client", "round", "seed"):
        if type(note[name]) is not int or note[name] < 0:
            yield f"{name} = {short(note[name])} is not a whole number"
    if not isinstance(note["size"], str):
        yield f"size = {short(note['size'])} is not a label"
    if not is_number(note["width"]) or not 0 < note["width"] <= 1:
        yield f"width = {short(note['width'])} is not above 0 and at most 1"
    rate: Any = note.get("rate")
    if (rate is not None or note["job"] == "train") and (not is_number(rate) or rate < 0):
        yield f"rate = {short(rate)} is not a learning rate"
    for name in ("batch_size", "calibration_samples"):
        if note.get(name) is not None and (type(note[name]) is not int or note[name] < 1):
            yield f"{name} = {short(note[name])} is not a number of samples"


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number.

    >>> is_number(0.5), is_number(True), is_number(float("nan")), is_number("1")
    (True, False, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


@dataclass(frozen=True)
class SubModel:
    """What goes down to a client.

    Attributes:
        tensors: by name.
        ticket: what they are, and what the client is to do.
        parts: the names of the parts of the whole that it holds (see `Parted`), for statistics; not sent.
    """

    tensors: Tensors
    ticket: Ticket
    parts: tuple[str, ...] = ()

    @property
    def width(self) -> float:
        """The width of the network that the client will build."""
        return self.ticket.width

    @property
    def finished(self) -> bool:
        """Whether the job needs the finished network (calibrate, evaluate), not one to train."""
        return self.ticket.job in ("calibrate", "evaluate")


@dataclass(frozen=True)
class Update:
    """What comes up from a client.

    Attributes:
        tensors: by name.
        ticket: of the message that it answers.
        keep: tensors that stay with the client and return to it at its next turn; not sent.
        samples: how many it trained or evaluated on; None if it does not tell.
        loss: its mean training loss.
        classes: a 0 or 1 for each class, which of them it holds; None if it does not tell.
        sums: the sums of the task's metrics over its holdout.
        members: the clients whose mean it is, if they were summed securely; the ticket is of one of them.
    """

    tensors: Tensors
    ticket: Ticket
    keep: Tensors = field(default_factory=dict)
    samples: float | None = None
    loss: float | None = None
    classes: Sequence[int] | None = None
    sums: Mapping[str, float] | None = None
    members: tuple[int, ...] = ()

    @property
    def width(self) -> float:
        """The width of the network that the client trained."""
        return self.ticket.width

    @property
    def label(self) -> str:
        """The label of the size that the client trained."""
        return self.ticket.size

    def weight(self, tricks: Tricks) -> float:
        """The weight in an average: of a client its samples, or one; of several clients their sum."""
        return float(self.samples or 0) if tricks.weighting == "samples" else float(max(1, len(self.members)))

    def to_json(self) -> Json:
        """All but the tensors as one flat JSON object: the ticket, and what the client tells after its job."""
        return self.ticket.to_json() | {name: getattr(self, name) for name in ANSWERS[self.ticket.job]}

    @classmethod
    def from_json(cls, tensors: Tensors, note: Any, keep: Tensors | None = None) -> Update:
        """The update of tensors and the JSON of `to_json`.

        Raises:
            TrustError: its ticket is not valid.
        """
        told = ANSWERS.get(note["job"], ()) if isinstance(note, dict) and isinstance(note.get("job"), str) else ()
        ticket = Ticket.from_json({k: v for k, v in note.items() if k not in told} if told else note)
        return cls(tensors, ticket, keep or {}, **{name: note.get(name) for name in told})


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share factors on the learning rate and on the weight decay."""

    parameters: Sequence[nn.Parameter]
    rate: float = 1.0
    decay: float = 1.0
