"""Differential privacy of clients: what is refused, how much noise each size gets, and what a run spends.

The guarantee is about a client as a whole (add or remove one client with all its data and every update that it ever
sends), for whoever sees the networks of a run. The server is trusted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anysize.client.work import local_names
from anysize.config.extras import needs
from anysize.elastic.norm import batch_norms
from anysize.errors import ConfigError
from anysize.experiment.experiment import Experiment
from anysize.methods.capabilities import Searched, asks_held_out
from anysize.methods.messages import Client, Update
from anysize.methods.private import Mechanism, Quantile, Recorder
from anysize.methods.size import Size
from anysize.methods.steps import moved, norm_of, step_of
from anysize.rng import generator
from anysize.wire import Json, flatten, restore


def epsilon(noise: float, sampling: float, rounds: int, delta: float) -> float:
    """The epsilon that a client spends in so many rounds, by the accountant of Opacus (Rényi, Mironov et al. 2019).

    It holds for rounds in which every client takes part independently with probability `sampling`, and a client is
    added or removed.

    Args:
        noise: the deviation of the noise, in clips.
        sampling: the probability with which a client takes part in a round.
        rounds: how many.
        delta: the probability with which the guarantee may fail.
    """
    missing = needs("privacy.clip", "privacy", "opacus")
    if missing:
        raise ConfigError(missing)
    from opacus.accountants.analysis import rdp  # an extra

    orders = [1 + step / 10 for step in range(1, 100)] + list(range(12, 64)) + [128, 256, 512]
    spent = rdp.compute_rdp(q=sampling, noise_multiplier=noise, steps=rounds, orders=orders)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that another order might give less: every order gives a bound that holds
        return float(rdp.get_privacy_spent(orders=orders, rdp=spent, delta=delta)[0])


def spent(experiment: Experiment, rounds: int) -> Json | None:
    """What every client has spent after so many rounds; None if the experiment is not private."""
    options, fleet = experiment.config.privacy, experiment.fleet
    if options.clip is None:
        return None
    sampling = fleet.per_round / fleet.clients
    found = epsilon(options.noise, sampling, rounds, options.delta) if rounds else 0.0
    return {"epsilon": round(found, 4), "delta": options.delta, "sampling": sampling, "rounds": rounds}


def check_private(experiment: Experiment) -> None:
    """Refuses a private experiment in which something leaves a client that the noise does not cover; lists all."""
    if experiment.config.privacy.clip is None:
        return
    problems = list(_problems(experiment))
    if problems:
        raise ConfigError("\n".join(f"privacy.clip: {problem}" for problem in problems))


def _problems(experiment: Experiment) -> Iterator[str]:
    config, tricks, devices = experiment.config, experiment.context.tricks, experiment.config.devices
    if config.own_data:
        yield "the accountant relies on independent draws, and a real fleet has none; simulations only"
    if config.aggregation.rule != "mean":
        yield f'noise is calibrated for sums, not for aggregation.rule = "{config.aggregation.rule}"; leave it out'
    if tricks.weighting != "clients":
        yield 'a weight by samples tells how many a client has; set tricks.weighting = "clients"'
    if tricks.classwise_head and experiment.context.classes is not None:
        yield "tricks.classwise_head tells which classes a client has; set it to false"
    if tricks.batch_norm != "local" and batch_norms(experiment.context.template):
        yield (
            f'tricks.batch_norm = "{tricks.batch_norm}": batch-norm statistics leave clients without noise; set '
            '"local", or take a model without batch-norm'
        )
    if "clients" in config.evaluation.on or asks_held_out(experiment.method):
        yield "metrics on clients' held-out data leave them without noise; evaluate on the test set alone"
    if config.evaluation.calibration_proxy is not None or isinstance(experiment.method, Searched):
        yield "the server's proxy samples are clients' training data in a simulation; leave them out"
    if devices.redraw != "never" or devices.budgets or devices.infeasible == "skip":
        yield "clients must keep their size, so that the expected holders of an entry are known"
    if devices.available != 1.0 or any(group.available not in (None, 1.0) for group in devices.groups):
        yield "availability makes participation other than independent draws; leave devices.available out"
    quantile = _quantile(experiment)
    if quantile is not None and config.privacy.noise >= 2 * quantile.noise:
        yield (
            f"privacy.quantile: noise of {quantile.noise:g} clients on the count of updates leaves nothing of "
            f"privacy.noise = {config.privacy.noise:g} for their sum; set privacy.count_noise above "
            f"{config.privacy.noise / 2:g}, or take more clients in a round"
        )
    if config.engine.min_clients is not None:
        yield "a round that changes nothing since few came tells how many came; leave engine.min_clients out"
    if experiment.described.per_group:
        yield "clients_per_round by group is not one probability for all; give one number"


def mechanism(experiment: Experiment, state: Any) -> Mechanism | None:
    """What the server does in each round; None if the experiment is not private.

    Raises:
        ConfigError: the method's aggregation is not a sum of what clients send, entry for entry.
    """
    options = experiment.config.privacy
    if options.clip is None:
        return None
    fleet = experiment.fleet
    sampling = fleet.per_round / fleet.clients
    clients: dict[Size, int] = {}
    for client in range(fleet.clients):
        size = experiment.size_of_group[fleet.group_of(client, 1).key]
        clients[size] = clients.get(size, 0) + 1
    expected: list[dict[str, Tensor]] = []
    for size, count in clients.items():
        held = _held(experiment, state, size)
        expected = expected or [{} for _ in held]
        for whole, part in zip(expected, held, strict=True):
            for name, own in part.items():
                whole[name] = whole.get(name, 0) + sampling * count * own
    return Mechanism(options.clip, options.noise, expected, experiment.config.seed, _quantile(experiment))


def _quantile(experiment: Experiment) -> Quantile | None:
    """How the clip follows the norms; None if it stays as it is."""
    options, clients = experiment.config.privacy, float(experiment.fleet.per_round)
    if options.quantile is None:
        return None
    return Quantile(options.quantile, options.count_noise or clients / 20, clients)


def _held(experiment: Experiment, state: Any, size: Size) -> list[dict[str, Tensor]]:
    """For each average of a round, the entries that a client of a size trains; refuses what is no one-to-one sum."""
    name, seed = experiment.config.method.name, experiment.config.seed
    first, again = (
        _recorded(experiment, each, Client(i, i, size, i + 1, 1, seed))
        for i, each in enumerate((state, _turned(state)))
    )
    if not _alike(first.held(), again.held()):
        raise ConfigError(
            f"privacy.clip: {name} draws or chooses anew which entries a client holds, so that nobody knows how many "
            "to expect"
        )
    return first.held()


def _turned(state: Any) -> Any:
    """The state with the numbers of every tensor in the opposite order: what depends on them is another in it."""
    tensors, note = flatten(state)
    turned = {n: t.flip(tuple(range(t.dim()))) if t.is_floating_point() else t for n, t in tensors.items()}
    return restore(type(state), turned, note)


def _recorded(experiment: Experiment, state: Any, client: Client) -> Recorder:
    """The averages of a round with one client, whose update is a random step of norm 1."""
    method, context = experiment.method, experiment.context
    message = method.extract(context, state, client)
    module = method.build(context.for_client(), message)
    stays = set(local_names(context, module))
    packed = {name: own for name, own in method.pack(module, message).tensors.items() if name not in stays}
    fixed = {_storage(p) for p in module.parameters() if not p.requires_grad} | set(map(_storage, module.buffers()))
    names = [name for name in step_of(message.tensors, packed) if _storage(packed[name]) not in fixed]
    random = generator("privacy", client.id)
    step = {name: torch.randn(packed[name].shape, generator=random) for name in names}
    norm = max(norm_of(step), 1e-30)
    tensors = moved(message.tensors, packed, {name: own / norm for name, own in step.items()})
    recorder = Recorder()
    update = Update(tensors, replace(message.ticket, rate=0.0), samples=1, loss=0.0)
    method.aggregate(replace(context, averages=recorder), state, iter([update]))
    if not math.isclose(recorder.moved(), 1.0, rel_tol=1e-3):
        raise ConfigError(
            f"privacy.clip: {experiment.config.method.name} does not add what clients send entry for entry (a step "
            f"of norm 1 moved the state by {math.sqrt(recorder.moved()):.3g}), so that clipping bounds nothing"
        )
    return recorder


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _alike(some: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> bool:
    if [set(own) for own in some] != [set(own) for own in others]:
        return False
    return all(torch.equal(own[name], other[name]) for own, other in zip(some, others) for name in own)


def spending(experiment: Experiment, state: Any) -> Json | None:
    """What a run would spend, and per size the deviation of the noise on its rarest entries; None if not private."""
    made = mechanism(experiment, state)
    about = spent(experiment, experiment.config.rounds)
    if made is None or about is None:
        return None
    rarest = {size.label: _rarest(made.expected, _held(experiment, state, size)) for size in experiment.sizes}
    noise = made.sum_noise * made.clip
    sizes = [{"size": label, "holders": few, "deviation": noise / few} for label, few in rarest.items()]
    return about | {"clip": made.clip, "noise": made.noise, "sizes": sizes}


def _rarest(expected: Any, held: list[Mapping[str, Tensor]] | list[dict[str, Tensor]]) -> float:
    """The expected holders of the rarest of the entries that a client holds."""
    found = [whole[name][own > 0] for whole, part in zip(expected, held) for name, own in part.items()]
    return min(float(counts.min()) for counts in found if counts.numel())
