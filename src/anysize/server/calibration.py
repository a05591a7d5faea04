"""Batch-norm statistics of finished networks, estimated by clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from anysize.client.work import CALIBRATION_PASSES, needs_calibration, with_statistics
from anysize.devices.fleet import Fleet
from anysize.elastic.norm import Statistics, attach, collect, merge, without_statistics
from anysize.engines.base import Absence, Engine, present
from anysize.experiment.experiment import Experiment
from anysize.methods.base import Method
from anysize.methods.capabilities import Mixture
from anysize.methods.context import Context
from anysize.methods.messages import Client, SubModel
from anysize.methods.size import Size
from anysize.server.asking import client_of, draws


def untrained(context: Context, method: Method[Any], state: Any, size: Size, batches: Sequence[Tensor]) -> Statistics:
    """Statistics of a size that was never trained, from passes of the customised network over `batches`."""
    network = without_statistics(method.customize(context, state, size))
    for _ in range(CALIBRATION_PASSES):
        statistics = collect(network, batches)
        attach(network, statistics)
    return statistics


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
) -> dict[str, Statistics]:
    """Batch-norm statistics per size label, or of a mixture per member; empty if none are needed.

    Up to `count` clients that can run a size estimate its statistics, on all their training samples or on `samples` of
    them. Clients that do not answer go into `missing` and get no further messages; sizes without answers are left out.
    """
    if not needs_calibration(context):
        return {}
    found: dict[str, Statistics] = {}
    runnable = _runnable(context, method, state, sizes if sizes is not None else method.sizes(context))
    ids = {label: able(context, fleet, size_of_group, size, round, count) for label, (size, _) in runnable.items()}
    absent: list[Absence] = []

    def messages() -> Iterator[SubModel]:
        for label, (size, extract) in runnable.items():
            for client in ids[label]:
                asked = client_of(context, client, size, round, "calibrate")
                message = extract(asked)
                message = replace(message, ticket=replace(message.ticket, calibration_samples=samples))
                yield with_statistics(message, found[label]) if label in found else message

    for _ in range(CALIBRATION_PASSES):
        parts: dict[str, list[Statistics]] = {}
        labels = [label for label in runnable for _ in ids[label]]
        for answer, label in zip(engine.perform(messages()), labels):
            for update in present([answer], absent):
                parts.setdefault(label, []).append(Statistics.of(update.tensors))
        found = {label: merge(own) for label, own in parts.items()}
        silent = {absence.client for absence in absent}
        ids = {label: [client for client in own if client not in silent] for label, own in ids.items()}
    if missing is not None:
        missing.extend(absent)
    return {label: found[label] for label in reversed(runnable) if label in found}


def _runnable(
    context: Context, method: Method[Any], state: Any, sizes: Sequence[Size]
) -> dict[str, tuple[Size, Callable[[Client], SubModel]]]:
    """What clients run to calibrate these sizes: the size that a device must be able to run, and the message.

    Members of a mixture all have the smallest size. Other networks run whole, the largest first: it takes longest.
    """
    if isinstance(method, Mixture):
        names = dict.fromkeys(name for size in sizes for name in method.members(context, state, size))
        return {name: (context.sizes[0], partial(method.member, context, state, name)) for name in names}
    return {size.label: (size, partial(method.extract, context, state)) for size in reversed(sizes)}


def able(
    context: Context, fleet: Fleet, size_of_group: Mapping[str, Size], size: Size, round: int, count: int
) -> list[int]:
    """Up to `count` clients whose devices can run `size`, drawn every round; in a simulation any, if none can."""
    order = draws(context, fleet, round, count, "calibration")
    chosen = [c for c in order if size_of_group[fleet.group_of(c, round).name].holds(size)]
    anybody = order if fleet.present is None else []  # a real device refuses what it cannot run
    return sorted((chosen or anybody)[:count])


def calibrate(
    experiment: Experiment,
    state: Any,
    engine: Engine,
    fleet: Fleet,
    number: int,
    sizes: Sequence[Size] | None = None,
    missing: list[Absence] | None = None,
) -> dict[str, Statistics]:
    options, context, method = experiment.config.evaluation, experiment.context, experiment.method
    count, samples, of_group = options.calibration_clients, options.calibration_samples, experiment.size_of_group
    return calibrated(context, method, state, engine, fleet, of_group, number, count, sizes, samples, missing)
