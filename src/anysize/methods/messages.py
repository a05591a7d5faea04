"""What goes down to a client and what comes up from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from anysize.methods.size import Size
from anysize.methods.training import Tricks
from anysize.rng import generator
from anysize.wire import Json, Tensors


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
        task: what the client will be asked to do: "train", "calibrate" or "evaluate"; the last two want the network as
            it is finished.
    """

    id: int
    position: int
    size: Size
    round: int
    samples: int
    seed: int
    task: str = "train"

    def generator(self, purpose: str) -> torch.Generator:
        """Random numbers for `purpose`, the same on every engine and after a resume."""
        return generator(self.seed, self.round, self.id, purpose)


@dataclass(frozen=True)
class SubModel:
    """What goes down to a client: named tensors and a small JSON ticket."""

    tensors: Tensors
    ticket: Json

    @property
    def width(self) -> float:
        """The width of the network that the client will build."""
        return float(self.ticket["width"])

    @property
    def finished(self) -> bool:
        """Whether the client is asked about the finished network (calibrate, evaluate) rather than to train."""
        return self.ticket.get("task") in ("calibrate", "evaluate")


@dataclass(frozen=True)
class Update:
    """What comes up from a client; `keep` stays there and returns to it at its next turn."""

    tensors: Tensors
    ticket: Json
    keep: Tensors = field(default_factory=dict)

    @property
    def width(self) -> float:
        """The width of the network that the client trained."""
        return float(self.ticket["width"])

    @property
    def label(self) -> str:
        """The label of the size that the client trained."""
        return str(self.ticket["size"])

    def weight(self, tricks: Tricks) -> float:
        """The client's weight in an average: its samples, or one."""
        return float(self.ticket["samples"]) if tricks.weighting == "samples" else 1.0


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share factors on the learning rate and on the weight decay."""

    parameters: Sequence[nn.Parameter]
    rate: float = 1.0
    decay: float = 1.0
