"""Measuring a state at every size: on the server's test set, under attack, and on the clients' holdouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anysize.client.attacks import Attack, pgd, strongest
from anysize.client.metrics import measure
from anysize.client.shards import Evaluation, Evaluator, Subject, finished, statistics_of
from anysize.client.work import with_statistics
from anysize.config.tables import EvaluationConfig
from anysize.cost.count import trained
from anysize.data import Part, SubsetPart, groups_of
from anysize.devices.fleet import Fleet
from anysize.elastic.fast import channels_last
from anysize.elastic.norm import Statistics
from anysize.engines.base import Absence, Engine, present
from anysize.errors import AnysizeError, ConfigError, DataError
from anysize.experiment.experiment import Experiment
from anysize.methods.base import Method
from anysize.methods.capabilities import levels_of
from anysize.methods.context import Context
from anysize.methods.messages import Client, SubModel
from anysize.methods.size import Size
from anysize.methods.training import Batch
from anysize.rng import derive, generator
from anysize.server.asking import client_of, draws
from anysize.tasks import Sums, add
from anysize.wire import Json


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
    """The metrics of every size on `part`, equal wherever they are measured: here, or by an engine's workers.

    With `by_domain`, this process measures every data group separately, and adds its metric as "metric/domain".
    """
    wanted = sizes if sizes is not None else method.sizes(context)
    subject = Subject(state, statistics)
    if not by_domain:
        sums = _evaluated(context, method, subject, part, batch_size, wanted, engine)
        return {label: context.task.metrics(own) for label, own in sums.items()}
    parts = {name: _evaluated(context, method, subject, own, batch_size, wanted) for name, own in domains(part).items()}
    return {size.label: _of_domains(context, {n: sums[size.label] for n, sums in parts.items()}) for size in wanted}


def _evaluated(
    context: Context,
    method: Method[Any],
    subject: Subject,
    part: Part,
    batch_size: int,
    sizes: Sequence[Size],
    engine: Engine | None = None,
) -> dict[str, Sums]:
    """The sums of the metrics per size label."""
    evaluator = Evaluator(context, method, part, batch_size)
    evaluation = Evaluation(subject, evaluator, part, batch_size, evaluator.shards(sizes))
    found: dict[str, Sums] = {size.label: {} for size in sizes}
    measured = engine.evaluate(evaluation) if engine else evaluation.here()
    for shard, sums in zip(evaluation.shards, measured, strict=True):
        add(found[shard.size.label], sums)
    return found


def domains(part: Part) -> dict[str, SubsetPart]:
    """The samples of each data group (domain, writer), by its name."""
    groups = groups_of(part)
    if groups is None:
        raise DataError("evaluation.by_domain = true, but the test data has no data groups; set it to false")
    return {str(name): SubsetPart(part, (groups == name).nonzero()[0]) for name in np.unique(groups)}


def _of_domains(context: Context, sums: Mapping[str, Sums]) -> dict[str, float]:
    """The metrics over all domains, and the main metric of each domain."""
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
    """Per size, an entry for every level of robustness: the metric on clean samples and on the same under attack."""
    some, metric = shuffled(part, options.attack_samples), context.task.metric
    found: dict[str, list[Json]] = {}
    for size in sizes if sizes is not None else method.sizes(context):
        found[size.label] = []
        for level in levels_to_measure(context, method, size, options):
            network = finished(context, method, state, replace(size, robustness=level), statistics)
            network = channels_last(network).requires_grad_(False)
            change = attacker(context, network, options)
            clean = context.task.metrics(measure(context, network, some, options.batch_size))
            attacked = context.task.metrics(measure(context, network, some, options.batch_size, change))
            found[size.label].append({"robustness": level, "standard": clean[metric], "robust": attacked[metric]})
    return found


def levels_to_measure(
    context: Context, method: Method[Any], size: Size, options: EvaluationConfig
) -> list[float | None]:
    """The levels of robustness to measure: the requested ones that the method offers; None if it offers no choice."""
    levels = levels_of(method, context)
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
    """One row per client that answers: its metrics on its holdout, at the size that its device runs."""
    ids = _asked(context, fleet, round, count)
    groups = {client: fleet.group_of(client, round) for client in ids}

    def messages() -> Iterator[SubModel]:
        for client in ids:
            size = size_of_group[groups[client].key]
            asked = client_of(context, client, size, round, "evaluate")
            message = method.extract(context, state, asked)
            message = replace(message, ticket=replace(message.ticket, batch_size=batch_size))
            runs = trained(method, context, size)  # FedAvg at the weakest width runs that on every device
            own = statistics_of(context, method, state, runs, statistics)
            yield message if own is None else with_statistics(message, own)

    rows = []
    for update in present(engine.perform(messages()), [] if missing is None else missing):
        client = update.ticket.client
        row = {"round": round, "client": client, "group": groups[client].name, "size": update.label}
        rows.append(row | {"samples": update.samples} | context.task.metrics(update.sums or {}))
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
    """The metrics of the network that `message` sends each client, over the holdouts of all clients, or of `count`."""
    ids = _asked(context, fleet, round, count)
    clients = [Client(c, i, context.sizes[0], round, 0, context.seed, "evaluate") for i, c in enumerate(ids)]
    messages = (message(client) for client in clients)
    total: Sums = {}
    for update in present(engine.perform(messages), [] if missing is None else missing):
        add(total, update.sums or {})
    if not total:
        raise AnysizeError(
            f"round {round}: the method evaluates its members on devices, and none answered; go on with resume=True "
            "when they are back"
        )
    return context.task.metrics(total)


def _asked(context: Context, fleet: Fleet, round: int, count: int | None) -> list[int]:
    """The clients that evaluate on their holdouts: all that do not sit out, or `count`, drawn every round."""
    if count is None or count >= fleet.clients:
        everybody = range(fleet.clients) if fleet.present is None else sorted(fleet.present)
        return [client for client in everybody if not fleet.sits_out(client, round)]
    return sorted(draws(context, fleet, round, count, "evaluation")[:count])


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


def check_attackable(experiment: Experiment) -> None:
    """Refuse an attack on inputs that are not numbers in [0, 1]."""
    if experiment.signature.tokens:
        raise ConfigError("evaluation.attack: inputs are tokens, and no attack moves tokens a little; leave it out")
    if "test" not in experiment.config.evaluation.on:
        raise ConfigError('evaluation.attack: only the server\'s test set is attacked; add "test" to evaluation.on')
