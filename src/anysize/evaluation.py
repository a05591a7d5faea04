"""Measuring a state: at every size on the server's test set and on the clients' held-out shares, calibrated before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anysize.attacks import Attack, pgd, strongest
from anysize.config import EvaluationConfig
from anysize.context import Context, Size
from anysize.cost import trained
from anysize.data import Part, SubsetPart, groups_of
from anysize.devices import Fleet
from anysize.elastic.norm import Statistics, attach, collect, merge, without_statistics
from anysize.engines.base import Absence, Engine, present
from anysize.errors import AnysizeError, ConfigError, DataError
from anysize.exams import Examination, Examiner, Subject, finished, statistics_of
from anysize.layout import channels_last
from anysize.local import measure, needs_calibration, with_statistics
from anysize.methods.base import Client, Method, Mixture, SubModel
from anysize.objectives import Batch
from anysize.rng import derive, generator
from anysize.tasks import Sums, add
from anysize.wire import Json

# The first pass normalises by each client's own batches, which differ from client to client; in the second all
# normalise by the first one's statistics, as the finished network will.
_CALIBRATION_PASSES = 2
_TRIES = 20  # draws per wanted client when looking for devices that can run a size


def untrained(context: Context, method: Method[Any], state: Any, size: Size, batches: Sequence[Tensor]) -> Statistics:
    """Statistics of a size that was never trained, by passes of the customised network itself; `batches` is re-read."""
    network = without_statistics(method.customize(context, state, size))
    for _ in range(_CALIBRATION_PASSES):
        statistics = collect(network, batches)
        attach(network, statistics)
    return statistics


def on_test(
    context: Context,
    method: Method[Any],
    state: Any,
    part: Part,
    statistics: Mapping[str, Statistics],
    batch_size: int,
    sizes: Sequence[Size] | None = None,
    by_domain: bool = False,
    engine: Engine | None = None,
) -> dict[str, dict[str, float]]:
    """The metrics of every size on `part`, the same wherever they are measured: here, or by an engine's workers.

    By domain, every data group is measured by itself, here, and its metric is there as "metric/domain".
    """
    wanted = sizes if sizes is not None else method.sizes(context)
    subject = Subject(state, statistics)
    if not by_domain:
        sums = _examined(context, method, subject, part, batch_size, wanted, engine)
        return {label: context.task.metrics(own) for label, own in sums.items()}
    parts = {name: _examined(context, method, subject, own, batch_size, wanted) for name, own in domains(part).items()}
    return {size.label: _of_domains(context, {n: sums[size.label] for n, sums in parts.items()}) for size in wanted}


def _examined(
    context: Context,
    method: Method[Any],
    subject: Subject,
    part: Part,
    batch_size: int,
    sizes: Sequence[Size],
    engine: Engine | None = None,
) -> dict[str, Sums]:
    """The sums of the metrics per size label."""
    examiner = Examiner(context, method, part, batch_size)
    examination = Examination(subject, examiner, part, batch_size, examiner.exams(sizes))
    found: dict[str, Sums] = {size.label: {} for size in sizes}
    measured = engine.examine(examination) if engine else examination.here()
    for exam, sums in zip(examination.exams, measured, strict=True):
        add(found[exam.size.label], sums)
    return found


def domains(part: Part) -> dict[str, SubsetPart]:
    """The samples of each data group (domain, writer), by its name."""
    groups = groups_of(part)
    if groups is None:
        raise DataError("evaluation.by_domain = true, but the test data has no groups; set it to false")
    return {str(name): SubsetPart(part, (groups == name).nonzero()[0]) for name in np.unique(groups)}


def _of_domains(context: Context, sums: Mapping[str, Sums]) -> dict[str, float]:
    """The metrics over all domains, and the main one of each."""
    metric = context.task.metric
    total: Sums = {}
    for own in sums.values():
        add(total, own)
    each = {f"{metric}/{name}": context.task.metrics(own)[metric] for name, own in sums.items()}
    return context.task.metrics(total) | each


def shuffled(part: Part, count: int | None = None) -> SubsetPart:
    """All samples, or the first `count`, in a fixed random order.

    Networks that normalise by the batch would see single classes in a sorted test set.
    """
    return SubsetPart(part, torch.randperm(len(part), generator=generator("test order"))[:count])


def under_attack(
    context: Context,
    method: Method[Any],
    state: Any,
    part: Part,
    statistics: Mapping[str, Statistics],
    options: EvaluationConfig,
    sizes: Sequence[Size] | None = None,
) -> dict[str, list[Json]]:
    """Per size, one entry for every level of robustness: the metric on clean samples and on the same under attack."""
    some, metric = shuffled(part, options.attack_samples), context.task.metric
    found: dict[str, list[Json]] = {}
    for size in sizes if sizes is not None else method.sizes(context):
        found[size.label] = []
        for level in levels_of(context, method, size, options):
            network = finished(context, method, state, replace(size, robustness=level), statistics)
            network = channels_last(network).requires_grad_(False)
            change = attacker(context, network, options)
            clean = context.task.metrics(measure(context, network, some, options.batch_size))
            attacked = context.task.metrics(measure(context, network, some, options.batch_size, change))
            found[size.label].append({"robustness": level, "standard": clean[metric], "robust": attacked[metric]})
    return found


def levels_of(context: Context, method: Method[Any], size: Size, options: EvaluationConfig) -> list[float | None]:
    """The levels of robustness to measure: those asked for, as far as the method has them; None for no choice."""
    levels = method.levels(context)
    if levels is None:
        return [None]
    if size.robustness is not None:
        return [size.robustness]
    wanted = [value for value in options.robustness if levels.allows(value)]
    return list(wanted if levels.mixes else levels.values)


def attacker(context: Context, network: nn.Module, options: EvaluationConfig) -> Callable[[Batch], Tensor]:
    """The chosen attack on the network."""
    attack = Attack(options.attack_epsilon, options.attack_step, options.attack_steps)
    if options.attack == "auto":
        if context.classes is None or context.task.class_axis not in (1, -1):
            raise ConfigError('evaluation.attack = "auto" needs a task that gives each sample one class; use "pgd"')
        classes = context.classes
        return lambda batch: strongest(network, batch.x, batch.y, attack, classes, derive("attack"))
    random, task = generator("attack"), context.task
    return lambda batch: pgd(network, batch.x, lambda x: task.loss(network(x), batch.y), attack, random)


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

    Each is estimated by up to `count` clients that can run it, on all of their training samples or on `samples` of
    them. A client that does not answer is put into `missing` and not asked again; what nobody answers for is left out.
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
                asked = _client(context, client, size, round, "calibrate")
                message = _asking(extract(asked), "calibrate", calibration_samples=samples)
                yield with_statistics(message, found[label]) if label in found else message

    for _ in range(_CALIBRATION_PASSES):
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
    """What clients run to calibrate these sizes: what a device must hold for it, and what a client receives.

    Members of a mixture are all of the smallest size; otherwise every size is run whole, the largest, the longest work,
    first.
    """
    if isinstance(method, Mixture):
        names = dict.fromkeys(name for size in sizes for name in method.members(context, state, size))
        return {name: (context.sizes[0], partial(method.member, context, state, name)) for name in names}
    return {size.label: (size, partial(method.extract, context, state)) for size in reversed(sizes)}


def able(
    context: Context, fleet: Fleet, size_of_group: Mapping[str, Size], size: Size, round: int, count: int
) -> list[int]:
    """Up to `count` clients whose devices can run `size`, drawn anew every round; in a simulation any, if none can."""
    order = _draws(context, fleet, round, count, "calibration")
    chosen = [c for c in order if size_of_group[fleet.group_of(c, round).name].holds(size)]
    anybody = order if fleet.present is None else []  # a real device refuses what it cannot run
    return sorted((chosen or anybody)[:count])


def on_clients(
    context: Context,
    method: Method[Any],
    state: Any,
    engine: Engine,
    fleet: Fleet,
    size_of_group: Mapping[str, Size],
    statistics: Mapping[str, Statistics],
    round: int,
    count: int | None,
    batch_size: int = 500,
    missing: list[Absence] | None = None,
) -> list[Json]:
    """One row per client that answers: its metrics on its own held-out share at the size that its device runs."""
    ids = _asked(context, fleet, round, count)
    groups = {client: fleet.group_of(client, round) for client in ids}

    def messages() -> Iterator[SubModel]:
        for client in ids:
            size = size_of_group[groups[client].name]
            asked = _client(context, client, size, round, "evaluate")
            message = _asking(method.extract(context, state, asked), "evaluate", batch_size=batch_size)
            runs = trained(method, context, size)  # FedAvg at the weakest width runs that on every device
            own = statistics_of(context, method, state, runs, statistics)
            yield message if own is None else with_statistics(message, own)

    rows = []
    for update in present(engine.perform(messages()), [] if missing is None else missing):
        client = int(update.ticket["client"])
        row = {"round": round, "client": client, "group": groups[client].name, "size": update.label}
        rows.append(row | {"samples": update.ticket["samples"]} | context.task.metrics(update.ticket["sums"]))
    return rows


def judged(
    context: Context,
    engine: Engine,
    fleet: Fleet,
    round: int,
    count: int | None,
    message: Callable[[Client], SubModel],
    missing: list[Absence] | None = None,
) -> dict[str, float]:
    """The metrics of the network that `message` gives each client, over the held-out samples of all, or of `count`."""
    ids = _asked(context, fleet, round, count)
    clients = [Client(c, i, context.sizes[0], round, 0, context.seed, "evaluate") for i, c in enumerate(ids)]
    messages = (message(client) for client in clients)
    asked = (_asking(message, "evaluate") for message in messages)
    total: Sums = {}
    for update in present(engine.perform(asked), [] if missing is None else missing):
        add(total, update.ticket["sums"])
    if not total:
        raise AnysizeError(
            f"round {round}: the method asks devices how good parts of it are, and none answered; go on with --resume "
            "when they are back"
        )
    return context.task.metrics(total)


def _asked(context: Context, fleet: Fleet, round: int, count: int | None) -> list[int]:
    """The clients that are asked about their held-out data: all, or `count` drawn anew every round."""
    if count is None or count >= fleet.clients:
        return list(range(fleet.clients)) if fleet.present is None else sorted(fleet.present)
    return sorted(_draws(context, fleet, round, count, "evaluation")[:count])


def by_group(rows: Sequence[Json], metric: str, higher_is_better: bool) -> dict[str, Json]:
    """Mean, worst decile and spread (standard deviation) of the clients' metric per device group.

    >>> by_group([{"group": "a", "accuracy": 0.5}, {"group": "a", "accuracy": 1.0}], "accuracy", True)["a"]
    {'mean': 0.75, 'worst_decile': 0.5, 'spread': 0.25, 'clients': 2}
    """
    summary = {}
    for group in dict.fromkeys(row["group"] for row in rows):
        values = sorted((row[metric] for row in rows if row["group"] == group), reverse=not higher_is_better)
        mean = sum(values) / len(values)
        worst = values[: max(1, math.ceil(len(values) / 10))]
        spread = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
        summary[group] = {
            "mean": mean,
            "worst_decile": sum(worst) / len(worst),
            "spread": spread,
            "clients": len(values),
        }
    return summary


def _client(context: Context, id: int, size: Size, round: int, task: str) -> Client:
    return Client(id, 0, size, round, 0, context.seed, task)


def _asking(message: SubModel, task: str, **more: Any) -> SubModel:
    """The message with the task that its client is to do."""
    return replace(message, ticket=message.ticket | {"task": task} | more)


def _draws(context: Context, fleet: Fleet, round: int, count: int, purpose: str) -> list[int]:
    """Distinct client ids in random order: all of them if they are few, else enough to choose from."""
    if fleet.present is not None:
        return list(fleet.shuffled(round, purpose))
    random = generator(context.seed, round, purpose)
    if fleet.clients <= 10_000:
        return [int(i) for i in torch.randperm(fleet.clients, generator=random)]
    return list(dict.fromkeys(int(i) for i in torch.randint(fleet.clients, (count * _TRIES,), generator=random)))
