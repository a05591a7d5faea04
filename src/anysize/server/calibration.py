"""Batch-norm statistics of finished networks, estimated by clients, or by the server for what no client can run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anysize.client.batches import batches, draw
from anysize.client.work import CALIBRATION_PASSES, needs_calibration, with_statistics
from anysize.devices.fleet import Fleet
from anysize.elastic.norm import Statistics, attach, collect, merge, without_statistics
from anysize.engines.base import Absence, Engine, present
from anysize.experiment.estimating import Job, jobs, whole
from anysize.experiment.experiment import Experiment
from anysize.methods.averaging import left_out
from anysize.methods.base import Method
from anysize.methods.capabilities import offered_sizes
from anysize.methods.context import Context
from anysize.methods.messages import SubModel
from anysize.methods.size import Size
from anysize.server.asking import client_of, draws
from anysize.wire import size_bytes


@dataclass
class Traffic:
    """What calibration sends to clients, and what they answer."""

    bytes_down: int = 0
    bytes_up: int = 0


def untrained(context: Context, method: Method[Any], state: Any, size: Size, inputs: Sequence[Tensor]) -> Statistics:
    """Statistics of a size that no client runs, from passes of the customised network over batches of inputs."""
    network = without_statistics(method.customize(context, state, size))
    for _ in range(CALIBRATION_PASSES):
        statistics = collect(network, inputs)
        attach(network, statistics)
    return statistics


def proxy_inputs(experiment: Experiment) -> list[Tensor] | None:
    """The server's own samples in batches; None if it has none."""
    part = experiment.calibration_proxy()
    if part is None:
        return None
    orders = batches(torch.arange(len(part)), experiment.config.evaluation.batch_size)
    return [draw(part, order).x for order in orders]


def calibrated(
    context: Context,
    method: Method[Any],
    state: Any,
    engine: Engine,
    fleet: Fleet,
    size_of_group: Mapping[str, Size],
    round: int,
    count: int,
    sizes: Sequence[Size] | None = None,
    samples: int | None = None,
    missing: list[Absence] | None = None,
    traffic: Traffic | None = None,
    proxy: Sequence[Tensor] | None = None,
) -> dict[str, Statistics]:
    """Batch-norm statistics per size label, or of a mixture per member; empty if none are needed.

    Each is estimated by up to `count` clients that can run it, or that can run a piece of it, on all of their training
    samples or on `samples` of them. A client that does not answer is put into `missing` and not asked again; what
    nobody answers for, and what nobody can run, is left out. What no client can run whole is estimated here, if the
    server has batches of its own samples (`proxy`).
    """
    if not needs_calibration(context):
        return {}
    found: dict[str, Statistics] = {}
    wanted = sizes if sizes is not None else offered_sizes(method, context)
    every = jobs(context, method, state, wanted, size_of_group.values(), proxy is not None)
    todo = [job for job in every if not job.server]
    ids = {job.label: able(context, fleet, size_of_group, job, round, count) for job in todo}
    absent: list[Absence] = []
    sent = traffic or Traffic()

    def messages() -> Iterator[SubModel]:
        for job in todo:
            for client in ids[job.label]:
                asked = client_of(context, client, job.size, round, "calibrate")
                message = job.extract(asked)
                message = replace(message, ticket=replace(message.ticket, calibration_samples=samples))
                message = with_statistics(message, found[job.label]) if job.label in found else message
                sent.bytes_down += size_bytes(message.tensors, message.ticket.to_json())
                yield message

    for _ in range(CALIBRATION_PASSES):
        parts: dict[str, list[Statistics]] = {}
        asked = [job.label for job in todo for _ in ids[job.label]]
        for answer, label in zip(engine.perform(messages()), asked):
            for update in present([answer], absent):
                sent.bytes_up += size_bytes(update.tensors, update.to_json())
                parts.setdefault(label, []).append(Statistics.of(update.tensors))
        found = {label: merge(own, left_out(context.aggregation, len(own))) for label, own in parts.items()}
        silent = {absence.client for absence in absent}
        ids = {label: [client for client in own if client not in silent] for label, own in ids.items()}
    if missing is not None:
        missing.extend(absent)
    found |= {job.label: untrained(context, method, state, job.size, proxy or ()) for job in every if job.server}
    complete = whole(context, every, found)
    labels = dict.fromkeys(job.whole for job in reversed(every))
    return {label: complete[label] for label in labels if label in complete}


def able(
    context: Context, fleet: Fleet, size_of_group: Mapping[str, Size], job: Job, round: int, count: int
) -> list[int]:
    """Up to `count` clients whose devices can do a job, drawn anew every round; where it says so any, if none can."""
    order = draws(context, fleet, round, count, "calibration")
    chosen = [c for c in order if size_of_group[fleet.group_of(c, round).key].holds(job.size)]
    anybody = order if job.anybody and fleet.present is None else []  # a real device refuses what it cannot run
    return sorted((chosen or anybody)[:count])


def calibrate(
    experiment: Experiment,
    state: Any,
    engine: Engine,
    fleet: Fleet,
    number: int,
    sizes: Sequence[Size] | None = None,
    missing: list[Absence] | None = None,
    traffic: Traffic | None = None,
) -> dict[str, Statistics]:
    options, context, method = experiment.config.evaluation, experiment.context, experiment.method
    count, samples, of_group = options.calibration_clients, options.calibration_samples, experiment.size_of_group
    who = (engine, fleet, of_group, number, count, sizes, samples, missing, traffic, proxy_inputs(experiment))
    return calibrated(context, method, state, *who)
