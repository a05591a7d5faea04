"""One round: the participants, the message to each, the answers, and the server's new state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from anysize.client.compression import bytes_up
from anysize.engines.base import Absence, Engine
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.private import PrivateRound
from anysize.profiling import stage, staged
from anysize.server.clipping import norm_clipped, norm_filtered
from anysize.server.summing import Summing
from anysize.wire import Json, Tensors, size_bytes


@dataclass
class Tally:
    """What a round reports besides the new state.

    Attributes:
        bytes_down: the bytes sent to clients.
        bytes_up: the bytes of their answers.
        clients: those that answered, each with its size, and its samples and loss if it told them.
        losses: the losses that were told, each with its weight: of a client, or the mean of several.
        parts: for each client, the parts of the full model that it received.
        kept: the tensors that stay with them.
        missing: those without a valid answer, and why.
        void: whether too few answered, so that the state did not change.
    """

    bytes_down: int = 0
    bytes_up: int = 0
    clients: list[Json] = field(default_factory=list)
    losses: list[tuple[float | None, float]] = field(default_factory=list)
    parts: dict[int, tuple[str, ...]] = field(default_factory=dict)
    kept: dict[int, Tensors] = field(default_factory=dict)
    missing: list[Json] = field(default_factory=list)
    void: bool = False

    @property
    def train_loss(self) -> float | None:
        """The mean loss of the clients, weighted by their samples if they tell them; None if they tell none."""
        told = [(loss, weight) for loss, weight in self.losses if loss is not None]
        if len(told) < len(self.losses) or not told:
            return None
        return sum(loss * weight for loss, weight in told) / sum(weight for _, weight in told)


def run_round(
    context: Context,
    method: Method[Any],
    state: Any,
    clients: Iterable[Client],
    engine: Engine,
    rate: float,
    on_answer: Callable[[Update | Absence], None] = lambda answer: None,
    least: int = 0,
    private: PrivateRound | None = None,
) -> tuple[Any, Tally]:
    """The state after one round, and its tally.

    Args:
        context: the server's.
        method: the method.
        state: the state before the round; does not change.
        clients: the participants in the order of aggregation.
        engine: where they run.
        rate: the learning rate of this round.
        on_answer: called after each answer, for progress.
        private: clips the updates and makes the averages, under differential privacy.
        least: how many clients must answer (at least one if any are missing); if fewer do, the state does not change.
    """
    tally, given = Tally(), dict[int, Tensors]()
    rule: str = context.aggregation.rule
    most = context.aggregation.norm
    if private is not None:
        rule, context = "private", replace(context, averages=private)
    clips = rule in ("norm-clip", "norm-filter", "private")
    sent = _sent(context, method, state, clients, rate, tally, given if clips else None)
    summing = Summing(context)
    received = _received(context, staged("train", engine.perform(summing.noted(sent))), tally, on_answer)
    if rule == "norm-filter":
        received = norm_filtered(received, given, most, lambda absence: tally.missing.append(asdict(absence)))
    received = _told(summing.summed(received, tally.missing), tally)
    if rule == "norm-clip":
        received = norm_clipped(received, given, most)
    if private is not None:
        received = _private(received, given, private)
    with stage("aggregate"):
        first = next(received, None)
        if first is None and private is None:
            after = state
        else:  # a private round without participants has its noise too, since it would else be known
            updates, first = _again(first, received), None
            after = method.aggregate(context, state, updates)
    tally.void = len(tally.clients) < max(least, 1 if tally.missing else 0)
    return state if tally.void else after, tally


def _again(first: Update | None, rest: Iterator[Update]) -> Iterator[Update]:
    """The first update, if there is one, and the rest; none is held once it was given."""
    if first is not None:
        yield first
        del first
    yield from rest


def _sent(
    context: Context,
    method: Method[Any],
    state: Any,
    clients: Iterable[Client],
    rate: float,
    tally: Tally,
    given: dict[int, Tensors] | None = None,
) -> Iterator[SubModel]:
    """What each client gets; `given` takes their tensors, if these are needed when answers come."""
    for client in clients:
        with stage("extract"):
            sub_model = method.extract(context, state, client)
        sub_model = replace(sub_model, ticket=replace(sub_model.ticket, rate=rate))
        tally.bytes_down += size_bytes(sub_model.tensors, sub_model.ticket.to_json())
        tally.parts[client.id] = sub_model.parts
        if given is not None:
            given[client.id] = sub_model.tensors
        yield sub_model
        del sub_model  # its memory is free before the next one is made


def _received(
    context: Context,
    answers: Iterator[Update | Absence],
    tally: Tally,
    on_answer: Callable[[Update | Absence], None],
) -> Iterator[Update]:
    for answer in answers:
        on_answer(answer)
        if isinstance(answer, Absence):
            tally.missing.append(asdict(answer))
            continue
        tally.bytes_up += bytes_up(context, answer)
        if answer.keep:
            tally.kept[answer.ticket.client] = answer.keep
        yield answer
        del answer


def _private(updates: Iterator[Update], sent: Mapping[int, Tensors], private: PrivateRound) -> Iterator[Update]:
    for update in updates:
        yield replace(update, tensors=private.clipped(sent[update.ticket.client], update.tensors))


def _told(updates: Iterator[Update], tally: Tally) -> Iterator[Update]:
    """The updates; notes what is known of each client. Of those that were summed, that they took part."""
    for update in updates:
        about = {"size": update.label, "samples": update.samples, "loss": update.loss}
        tally.losses.append((update.loss, float(update.samples or max(1, len(update.members)))))
        if update.members:
            about |= {"samples": None, "loss": None}
        for client in update.members or (update.ticket.client,):
            parts = tally.parts[client]
            tally.clients.append({"client": client, **about} | ({"parts": list(parts)} if parts else {}))
        yield update
        del update
