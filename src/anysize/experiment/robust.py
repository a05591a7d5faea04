"""How many attackers the chosen rule stands, and what it holds in memory: found by a round in which nobody learns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from anysize.errors import ConfigError
from anysize.experiment.experiment import Experiment
from anysize.methods.averaging import BOUNDED, STREAMED, Counted, stands
from anysize.methods.messages import Client, Update
from anysize.wire import Json, size_bytes


def standing(experiment: Experiment, state: Any) -> Json | None:
    """The rule, the bytes of the updates that the server holds at once, and per size what it stands; None for the mean.

    For every size that takes part in the first round: how many clients hold the rarest entry of its network, and how
    many of them may lie.
    """
    options = experiment.config.aggregation
    if options.rule == "mean":
        return None
    _refuse_claims(experiment)
    clients = first_round(experiment)
    updates = [_unchanged(experiment, state, client) for client in clients]
    streams = options.rule in BOUNDED and options.norm is not None
    held = 0 if streams else sum(size_bytes(update.tensors, update.to_json()) for update in updates)
    found: Json = {"rule": options.rule, "clients": len(clients), "held_bytes": held, "sizes": []}
    if options.rule not in STREAMED:
        holders = counted(experiment, state, updates)
        found["sizes"] = [
            {"size": label, "holders": fewest, "stands": stands(options.rule, fewest, options.attackers)}
            for label, fewest in holders.items()
        ]
    return found


def check_rule(experiment: Experiment, state: Any) -> None:
    """Refuses a rule that the method's averages do not follow, which one client of each size shows."""
    _refuse_claims(experiment)
    if experiment.config.aggregation.rule in STREAMED:
        return
    sizes, seed = experiment.context.sizes, experiment.config.seed
    clients = [Client(i, i, size, 1, 1, seed) for i, size in enumerate(sizes)]
    counted(experiment, state, [_unchanged(experiment, state, client) for client in clients])


def _refuse_claims(experiment: Experiment) -> None:
    """Refuses to weigh real devices by what they claim, under rules that bound how far an update moves the mean."""
    rule, tricks = experiment.config.aggregation.rule, experiment.context.tricks
    if rule in BOUNDED and experiment.config.own_data and tricks.weighting == "samples":
        raise ConfigError(
            f'aggregation.rule = "{rule}": on a fleet a number of samples is a claim, and a device that claims most '
            'would be most of the mean; set tricks.weighting = "clients"'
        )


def counted(experiment: Experiment, state: Any, updates: list[Update]) -> dict[str, int]:
    """By size, how many of these clients hold the rarest entry of a client of that size.

    Raises:
        ConfigError: the method does not average with `context.average`, or counts a client several times.
    """
    averages: list[Counted] = []
    turn = -1

    def averaged(before: Mapping[str, Tensor], head: Mapping[str, int]) -> Counted:
        averages.append(Counted(before, head, lambda: turn))
        return averages[-1]

    def stream() -> Iterator[Update]:
        nonlocal turn
        for turn, update in enumerate(updates):  # noqa: B007 - `averaged` reads it
            yield update

    context = replace(experiment.context, averages=averaged)
    experiment.method.aggregate(context, state, stream())
    rule, name = experiment.config.aggregation.rule, experiment.config.method.name
    other = 'take rule = "mean", "norm-clip" or "norm-filter"'
    if not any(average.turns for average in averages):
        raise ConfigError(
            f'aggregation.rule = "{rule}": method {name} does not average with `context.average`, so that no rule '
            f"reaches it; {other}"
        )
    if any(len(set(average.turns)) < len(average.turns) for average in averages):
        raise ConfigError(
            f'aggregation.rule = "{rule}": method {name} with these options adds a client several times to one '
            f"average, so that an attacker would count several times; {other}"
        )
    found: dict[str, int] = {}
    for place, update in enumerate(updates):
        own = [fewest for average in averages if (fewest := average.fewest(place)) is not None]
        found[update.label] = min([*own, found.get(update.label, len(updates))])
    return dict(sorted(found.items(), key=lambda item: [s.label for s in experiment.sizes].index(item[0])))


def first_round(experiment: Experiment) -> list[Client]:
    """The participants of the first round; nobody, if only the devices know who they are."""
    fleet, sizes = experiment.fleet, experiment.size_of_group
    ids = fleet.participants(1) if len(experiment.shares) else []
    groups = [fleet.group_of(client, 1).key for client in ids]
    return [Client(c, i, sizes[key], 1, 1, experiment.config.seed) for i, (c, key) in enumerate(zip(ids, groups))]


def _unchanged(experiment: Experiment, state: Any, client: Client) -> Update:
    """The update of a client that learned nothing."""
    method, context = experiment.method, experiment.context
    message = method.extract(context, state, client)
    update = method.pack(method.build(context.for_client(), message), message)
    return replace(update, samples=1, loss=0.0)
