"""Secure aggregation: what is refused since it would need single updates, and which sizes have enough clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anysize.client.work import needs_calibration
from anysize.errors import ConfigError
from anysize.experiment.experiment import Experiment
from anysize.experiment.robust import first_round
from anysize.methods.capabilities import asks_held_out
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.sums import class_of
from anysize.rng import generator
from anysize.wire import Json, flatten

_CLIENTS = 3  # of each size, by which a method is tried
_MOVED = 0.1  # how far they move: far enough that products of two moves show


def check_secure(experiment: Experiment, state: Any) -> None:
    """Refuses an experiment in which something of a single client would leave it, or that sums are not enough for."""
    if experiment.config.aggregation.secure_threshold is None:
        return
    problems = list(_problems(experiment)) or list(_method_problems(experiment, state))
    if problems:
        raise ConfigError("\n".join(f"aggregation.secure_threshold: {problem}" for problem in problems))


def _problems(experiment: Experiment) -> Iterator[str]:
    config, context = experiment.config, experiment.context
    if config.privacy.clip is not None:
        yield "privacy.clip cuts single updates on the server, which sees none; leave one out"
    if config.communication.update != "float32":
        yield f'communication.update = "{config.communication.update}" is nothing that can be summed; take "float32"'
    if context.tricks.classwise_head and context.classes is not None:
        yield (
            "tricks.classwise_head averages a row of the classifier over the clients that have its class, and one that "
            "a single client has would be told alone; set it to false"
        )
    if needs_calibration(context):
        yield (
            f'tricks.batch_norm = "{context.tricks.batch_norm}": each client would tell its own batch-norm statistics; '
            'set "tracked", which sums them with the weights, or "local", or take a model without batch-norm'
        )
    if "clients" in config.evaluation.on:
        test = " of the server's, named in data.test," if config.own_data else ""
        yield f'evaluation.on = ["clients"]: each client would tell its own metrics; evaluate on a test set{test} alone'
    if asks_held_out(experiment.method):
        yield f"{config.method.name} with these options asks each client for metrics on its held-out data"


def _method_problems(experiment: Experiment, state: Any) -> Iterator[str]:
    """Tries the method: the state after a round must be the same from the clients' updates as from their means."""
    method, context, name = experiment.method, experiment.context, experiment.config.method.name
    single: list[Update] = []
    means: list[Update] = []
    for size in context.sizes:
        ids = range(len(single), len(single) + _CLIENTS)
        messages = [method.extract(context, state, Client(i, i, size, 1, 1, context.seed)) for i in ids]
        if not all(_same(messages[0], message) for message in messages):
            yield f"{name} draws anew what each client of a size gets, so that no two can be summed"
            return
        own = [_learned(experiment, message, place) for place, message in enumerate(messages)]
        single += own
        means.append(_mean(experiment, own))
    apart, summed = (flatten(method.aggregate(context, state, iter(updates))) for updates in (single, means))
    if apart[1] != summed[1] or not _close(apart[0], summed[0]):
        yield f"{name} with these options needs each client's update: means over the clients of a size are not enough"


def _same(one: SubModel, other: SubModel) -> bool:
    return class_of(one) == class_of(other) and all(torch.equal(t, other.tensors[n]) for n, t in one.tensors.items())


def _learned(experiment: Experiment, message: SubModel, place: int) -> Update:
    """The update of a client that moved every number a little, upwards, since variances must stay above zero."""
    method, context = experiment.method, experiment.context.for_client()
    update = method.pack(method.build(context, message), message)
    random = generator("secure", message.ticket.client)
    tensors = {
        name: tensor + _MOVED * torch.rand(tensor.shape, generator=random) if tensor.is_floating_point() else tensor
        for name, tensor in ((name, tensor.detach()) for name, tensor in update.tensors.items())
    }
    return replace(update, tensors=tensors, ticket=replace(update.ticket, rate=0.0), samples=2 * place + 1, loss=0.0)


def _mean(experiment: Experiment, updates: list[Update]) -> Update:
    """The mean of updates, as one."""
    tricks = experiment.context.tricks
    weights = [update.weight(tricks) for update in updates]

    def mean(name: str) -> Tensor:
        tensors = [update.tensors[name] for update in updates]
        if not tensors[0].is_floating_point():
            return tensors[0]
        total = torch.stack([weight * tensor.double() for weight, tensor in zip(weights, tensors)]).sum(dim=0)
        return (total / sum(weights)).to(tensors[0].dtype)

    members = tuple(update.ticket.client for update in updates)
    samples = sum(update.samples or 0 for update in updates)
    return replace(updates[0], tensors={n: mean(n) for n in updates[0].tensors}, samples=samples, members=members)


def _close(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    def near(one: Tensor, other: Tensor) -> bool:
        return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-5)

    return set(some) == set(others) and all(near(tensor, others[name]) for name, tensor in some.items())


def sums(experiment: Experiment) -> Json | None:
    """The threshold, and per size how many clients a round like the first has; None without secure aggregation.

    "clients" is None if only the devices know how many they are.
    """
    threshold = experiment.config.aggregation.secure_threshold
    if threshold is None:
        return None
    clients = first_round(experiment)
    counts = {size.label: 0 for size in experiment.context.sizes}
    for client in clients:
        counts[client.size.label] += 1
    known = bool(len(experiment.shares))
    sizes: list[Json] = [
        {"size": label, "clients": count if known else None, "enough": count >= threshold if known else None}
        for label, count in counts.items()
    ]
    return {"threshold": threshold, "sizes": sizes}
