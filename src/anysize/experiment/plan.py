"""What each device group would train, what it costs, and what leaves a device: the plan of an experiment."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, fields

from anysize.client.work import needs_calibration
from anysize.cost.count import Cost, trained
from anysize.errors import ConfigError, DataError
from anysize.experiment.estimating import estimates
from anysize.experiment.experiment import Experiment, evaluation_part
from anysize.experiment.privacy import check_private, spending
from anysize.experiment.robust import standing
from anysize.experiment.secure import check_secure, sums
from anysize.methods.capabilities import Factored, Searched, asks_held_out
from anysize.methods.size import Size
from anysize.wire import Json

_NOTHING: Json = {"size": None, "width": None, "depth": None, "mask": None, "ways": {}} | dict.fromkeys(
    field.name for field in fields(Cost)
)
"""What a device group trains that never trains."""


def plan(experiment: Experiment) -> Json:
    """The plan as one JSON object: groups, the look-up table, what leaves a device, statistics, attackers, notices.

    A group whose budget changes trains one of its "sizes" in each round; what stands beside these is of the largest.
    "same_as" names the first group that trains the same. "domains" counts the clients of each data group in a natural
    split where a client has one.
    """
    experiment.check_options()
    planned, experiment = experiment, experiment.without_data()
    check_private(experiment)
    context = experiment.context
    state = experiment.method.init(context)
    check_secure(experiment, state)
    costs = {size.label: experiment.cost(size, state=state) for size in context.sizes}
    groups: list[Json] = []
    for group in experiment.fleet.groups:
        sizes = [_trains(experiment, size, costs[size.label]) for size in experiment.sizes_of(group)]
        about: Json = {
            "name": group.name,
            "capacity": group.capacity,
            "budget": None if group.budget is None else group.budget.limits(),
            "clients": group.clients or None,  # unknown before the clients of a real fleet connect
            "sits_out": experiment.sits_out(group),
        }
        largest = sizes[-1] if sizes else _NOTHING
        same = next((other["name"] for other in groups if sizes and _alike(other["sizes"], sizes)), None)
        groups.append(about | largest | {"sizes": sizes, "same_as": same})
    table = context.table
    return {
        "groups": groups,
        "table": None if table is None else [entry.to_json() for entry in table.best_first],
        "domains": domains_of(experiment),
        "leaves_the_device": leaves_the_device(experiment),
        "statistics": estimates(experiment, state),
        "aggregation": standing(experiment, state),
        "secure": sums(experiment),
        "privacy": spending(experiment, state),
        "notices": experiment.notices() + _unmeasurable(experiment) + _stood_in(planned, experiment),
    }


def _trains(experiment: Experiment, size: Size, cost: Cost) -> Json:
    """The size that a device group trains, and what it costs."""
    method, context = experiment.method, experiment.context
    return {
        "size": size.label,
        "width": trained(method, context, size).width,
        "depth": size.depth,
        "mask": size.mask,
        "ways": dict(method.ways(context, size)) if isinstance(method, Factored) else {},
    } | asdict(cost)


def _alike(some: list[Json], others: list[Json]) -> bool:
    """Whether two device groups train the same networks, whatever these are called."""
    network = ("width", "depth", "mask", "parameters", "macs")
    return [[size[key] for key in network] for size in some] == [[size[key] for key in network] for size in others]


def domains_of(experiment: Experiment) -> dict[str, int] | None:
    """How many clients have each data group (writer, role, domain), in their order; None if clients mix them."""
    shares = experiment.shares
    names = [shares.group_of(client) for client in range(len(shares))]
    return dict(Counter(name for name in names if name is not None)) or None


def _unmeasurable(experiment: Experiment) -> list[str]:
    """Why the experiment could not be evaluated as asked; the plan is still possible."""
    try:
        if "test" in experiment.config.evaluation.on:
            evaluation_part(experiment)
        experiment.calibration_proxy()
    except (ConfigError, DataError) as error:
        return [f"a run would be refused: {error}"]
    return []


def _stood_in(planned: Experiment, used: Experiment) -> list[str]:
    """What is not known because the data is not here."""
    if used is planned:
        return []
    found = f"data set '{planned.config.data.name}' is not on this machine: planned with its known shape and counts"
    if planned.tabulates and isinstance(planned.method, Searched):
        found += "; the method's look-up table needs the data, so that masks and solved budgets may differ"
    return [found]


def leaves_the_device(experiment: Experiment) -> list[str]:
    """What a client's messages hold, as phrases for people."""
    config, tricks = experiment.config, experiment.context.tricks
    if config.aggregation.secure_threshold is not None:
        return _leaves_masked(experiment)
    leaves = ["the trained tensors of its sub-model"]
    if config.privacy.clip is None:
        leaves.append("its mean training loss")
    if config.tells("samples") and config.privacy.clip is None:
        leaves.insert(1, "its number of samples")
    if tricks.batch_norm == "local":
        leaves[0] += " (norm layers stay)"
    if experiment.context.classes is not None and tricks.classwise_head:
        leaves.append("which classes it holds (for tricks.classwise_head)")
    if needs_calibration(experiment.context):
        leaves.append("mean and variance of the inputs of each batch-norm, when it calibrates")
    if "clients" in config.evaluation.on or asks_held_out(experiment.method):
        what = "sums and counts" if config.tells("samples") else "means"
        leaves.append(f"{what} of the metrics on its held-out share")
    if config.own_data:
        leaves.append("its name, and its capacity or budget (the size of its sub-model reveals it too)")
    return leaves


def _leaves_masked(experiment: Experiment) -> list[str]:
    """What a client's messages hold if the server learns sums only."""
    config, tricks = experiment.config, experiment.context.tricks
    weight = " and its number of samples" if tricks.weighting == "samples" else ""
    norms = " (norm layers stay)" if tricks.batch_norm == "local" else ""
    leaves = [
        f"masked, so that the server learns the sum over at least {config.aggregation.secure_threshold} clients of its "
        f"size alone: the trained tensors of its sub-model{norms}, its training loss{weight}",
        "public keys, and shares of its masks' secrets, encrypted for other clients of its size",
    ]
    if config.own_data:
        leaves.append("its name, and its capacity or budget (the size of its sub-model reveals it too)")
    return leaves
