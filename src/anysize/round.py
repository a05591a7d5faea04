"""One round: who takes part, what each receives, what comes back, what the server makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from anysize.context import Context
from anysize.engines.base import Engine
from anysize.methods.base import Client, Method, SubModel, Update
from anysize.profiling import stage, staged
from anysize.wire import Json, Tensors, copies, size_bytes


@dataclass
class Tally:
    """What is known of a round besides the new state."""

    bytes_down: int = 0
    bytes_up: int = 0
    clients: list[Json] = field(default_factory=list)
    kept: dict[int, Tensors] = field(default_factory=dict)

    @property
    def train_loss(self) -> float | None:
        """The clients' mean loss, each weighted by its samples; None if nobody took part."""
        samples = sum(client["samples"] for client in self.clients)
        total = sum(client["loss"] * client["samples"] for client in self.clients)
        return total / samples if samples else None


def run_round(
    context: Context,
    method: Method[Any],
    state: Any,
    clients: Iterable[Client],
    engine: Engine,
    rate: float,
    on_update: Callable[[Update], None] = lambda update: None,
) -> tuple[Any, Tally]:
    """The state after one round, and its tally.

    Args:
        context: the server's.
        method: the method.
        state: before the round; left untouched.
        clients: the participants in the order in which their updates are folded in.
        engine: where they run.
        rate: the learning rate of this round.
        on_update: called after each update, for progress.
    """
    tally = Tally()
    sent = _sent(context, method, state, clients, rate, tally)
    received = _received(method, staged("train", engine.perform(sent)), tally, on_update)
    with stage("aggregate"):
        after = method.aggregate(context, state, received)
    return after, tally


def _sent(
    context: Context, method: Method[Any], state: Any, clients: Iterable[Client], rate: float, tally: Tally
) -> Iterator[SubModel]:
    for client in clients:
        with stage("extract"):
            sub_model = method.extract(context, state, client)
        sub_model = replace(sub_model, ticket=sub_model.ticket | {"task": "train", "rate": rate})
        tally.bytes_down += size_bytes(sub_model.tensors, sub_model.ticket)
        yield sub_model


def _received(
    method: Method[Any], updates: Iterator[Update], tally: Tally, on_update: Callable[[Update], None]
) -> Iterator[Update]:
    for update in updates:
        ticket = update.ticket
        tally.bytes_up += size_bytes(update.tensors, ticket)
        tally.clients.append({key: ticket[key] for key in ("client", "size", "samples", "loss")})
        if update.keep:
            tally.kept[int(ticket["client"])] = update.keep
        on_update(update)
        yield replace(update, tensors=copies(update.tensors)) if method.needs_all_updates else update
