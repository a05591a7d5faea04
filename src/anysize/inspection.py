"""Can my model do this: its width groups, and for every method yes or why not."""

from __future__ import annotations

from anysize.errors import AnysizeError
from anysize.experiment import Experiment
from anysize.methods import make, methods
from anysize.wire import Json


def inspect(experiment: Experiment) -> Json:
    """The width groups as text and as data, and what each method says to this model."""
    axes = experiment.axes
    groups = [
        {
            "name": group.name,
            "size": group.size,
            "frozen": group.frozen,
            "members": [{"name": member.name, "axis": member.axis} for member in group.members],
        }
        for group in axes.groups
    ]
    return {"groups": groups, "methods": [_verdict(experiment, name) for name, _ in methods()], "text": str(axes)}


def _verdict(experiment: Experiment, name: str) -> Json:
    """Whether a method can train this model at the fleet's sizes: found by really building the smallest and largest."""
    try:
        method = make(name)
        context = experiment.context
        state = method.init(context)
        costs = [experiment.cost(size, context, state, method) for size in (context.sizes[0], context.sizes[-1])]
    except AnysizeError as error:
        return {"name": name, "can": False, "why": str(error)}
    small, large = costs[0], costs[-1]
    why = f"{small.parameters:,} to {large.parameters:,} parameters, {small.macs:,} to {large.macs:,} MACs"
    return {"name": name, "can": True, "why": why}
