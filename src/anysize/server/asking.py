"""Choosing the clients that calibrate or evaluate a state, and the messages to them."""

from __future__ import annotations

import torch

from anysize.devices.fleet import Fleet
from anysize.methods.context import Context
from anysize.methods.messages import Client
from anysize.methods.size import Size
from anysize.rng import generator

_TRIES = 20  # draws per wanted client when looking for devices that can run a size


def client_of(context: Context, id: int, size: Size, round: int, job: str) -> Client:
    """A client that calibrates or evaluates a finished network."""
    return Client(id, 0, size, round, 0, context.seed, job)


def draws(context: Context, fleet: Fleet, round: int, count: int, purpose: str) -> list[int]:
    """Distinct clients that do not sit out, in random order: all if there are few, else enough to choose from."""
    if fleet.present is not None:
        return list(fleet.shuffled(round, purpose))
    random = generator(context.seed, round, purpose)
    if fleet.clients <= 10_000:
        order = torch.randperm(fleet.clients, generator=random)
    else:
        order = torch.randint(fleet.clients, (count * _TRIES,), generator=random)
    return [client for client in dict.fromkeys(map(int, order)) if not fleet.sits_out(client, round)]
