"""What a model can do: its width groups, and for every method whether it can train the model or why not."""

from __future__ import annotations

import copy

from anysize.config.tables import MethodConfig
from anysize.cost.count import tried
from anysize.errors import AnysizeError
from anysize.experiment.experiment import Experiment
from anysize.methods import methods
from anysize.methods.capabilities import OnBase
from anysize.wire import Json


def inspect(experiment: Experiment) -> Json:
    """The width groups as text and as data, and for each method whether it can train this model."""
    experiment = experiment.without_data()
    axes = experiment.axes
    groups = [
        {
            "name": group.name,
            "size": group.size,
            "kept_whole": group.fixed,
            "members": [{"name": member.name, "axis": member.axis} for member in group.members],
        }
        for group in axes.groups
    ]
    names = dict.fromkeys([*(name for name, _ in methods()), experiment.config.method.name])
    stages = experiment.stages
    blocks = "\n".join(f"  {stage}" for stage in stages) or "  none; the line of elf says why"
    return {
        "groups": groups,
        "stages": [{"first": list(stage.first), "removable": [list(b) for b in stage.blocks]} for stage in stages],
        "methods": [_verdict(experiment, name) for name in names],
        "text": f"{axes}\nremovable blocks:\n{blocks}",
    }


def _verdict(experiment: Experiment, name: str) -> Json:
    """Whether a method with its tricks can train this model; the smallest and the largest size take a step.

    The experiment's method has the options of the file; any other has its defaults.
    """
    config = experiment.config
    experiment = copy.copy(experiment)
    if name != config.method.name:
        experiment = experiment.with_config(config.replaced(method=MethodConfig(name=name)))
    experiment.tabulates = False  # the answer needs no training
    try:
        with experiment.blamed("inspection"):
            context, method = experiment.context, experiment.method
            state = method.init(context)
            if isinstance(method, OnBase) and name != config.method.name:  # a step would load a large package
                return {"name": name, "can": True, "why": "trains adapters beside the network, which stays as it is"}
            sizes = (context.sizes[0], context.sizes[-1])
            small, large = (tried(context, method, state, size, experiment.example) for size in sizes)
    except AnysizeError as error:
        return {"name": name, "can": False, "why": str(error).removeprefix(f"{name}: ")}
    parameters, macs = (_range(*ends) for ends in zip(small, large))
    return {"name": name, "can": True, "why": f"{parameters} parameters, {macs} MACs"}


def _range(small: int, large: int) -> str:
    return f"{small:,}" if small == large else f"{small:,} to {large:,}"
