"""The device's gate: it checks what a server sends before allocating any of it.

A device knows what it can afford and which code it may run. It reads the sizes of a message from its header, builds
the network on the meta device, and refuses what is too large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from anysize import config as configs
from anysize.config.devices import files_in
from anysize.config.tables import ExperimentConfig
from anysize.cost.memory import available_bytes
from anysize.deploy.affordable import Costs, Footprint, Latency, unmeasured
from anysize.deploy.device_file import DeviceConfig, Limits
from anysize.elastic.skeleton import tensors_of
from anysize.errors import AnysizeError, TrustError, short
from anysize.experiment.experiment import Experiment
from anysize.methods.base import Method
from anysize.methods.capabilities import OnBase
from anysize.methods.context import Context
from anysize.methods.messages import SubModel, Ticket
from anysize.methods.training import Batch
from anysize.models import hub
from anysize.models.registry import build
from anysize.wire import load, peek


def refuse_upper_bounds(method: Method[Any]) -> None:
    """Refuse a method that sends clients more than they can afford."""
    if method.needs_simulation:
        raise TrustError(
            f"{type(method).__name__} with these options sends devices more than they can train, as an upper bound for "
            "simulations; real devices refuse it"
        )


def refuse_foreign_weights(method: Method[Any], config: ExperimentConfig, device: DeviceConfig) -> None:
    """Refuse to read weights from outside the device's folder, where the device must have a frozen network itself."""
    named, folder = config.model.weights, device.folder.resolve()
    if named is not None and isinstance(method, OnBase) and not (folder / named).resolve().is_relative_to(folder):
        raise TrustError(
            f"the server's experiment reads model.weights = {short(named)}, which is outside this device's folder; put "
            "the file beside the device's file, and name it so in the experiment"
        )


def refuse_layers(experiment: Experiment, memory: float | None) -> None:
    """Refuse a network of which one tensor does not fit the memory: a device makes the whole one, layer by layer.

    Args:
        experiment: the server's.
        memory: the bytes that are free; None if nobody knows.
    """
    config, about, folder = experiment.config.model, experiment.signature, experiment.config.folder
    made = partial(build, config.name, about.input_shape, about.outputs, config.options)
    try:
        with torch.device("meta"):  # where nothing is allocated
            network = made(task=experiment.task, folder=folder, bare=True)
    except (NotImplementedError, RuntimeError):
        return  # code that cannot be tried so is the owner's, whose file allows it by name
    largest = max((tensor.numel() * tensor.element_size() for tensor in tensors_of(network).values()), default=0)
    if memory is not None and largest > memory:
        raise TrustError(
            f"the server's network has a tensor of {largest:.3g} bytes, and {memory:.3g} bytes of memory are free"
        )


def accepted(text: str, device: DeviceConfig) -> ExperimentConfig:
    """The experiment that a server sends, if it names only code that the device allows, no files, and large sums.

    Raises:
        TrustError: lists all names that the device's file does not allow, or says that sums would be too small.
        ConfigError: it is not a valid experiment.
    """
    tables = configs.parse(text, "the server's experiment")
    files = files_in(tables)
    if files:
        raise TrustError(f"the server's experiment names a file of this device ({', '.join(files)})")
    config = configs.from_dict(tables, folder=device.folder, source="the server's experiment")
    if not config.own_data:
        raise TrustError(
            f'the server\'s experiment has data.name = "{short(config.data.name)}", which is for simulations; devices '
            'have their own data (data.name = "devices")'
        )
    named = {"model": config.model.name, "method": config.method.name, "task": config.task.name}
    foreign = [f'{kind}.name = "{name}"' for kind, name in named.items() if ":" in name and name not in device.allow]
    if foreign:
        raise TrustError(
            f"the server's experiment names code that this device does not allow: {short(', '.join(foreign))}; if you "
            "trust it, install it here and list it under allow in the device's file"
        )
    leads = [text for text in _texts(config.model.options) if set(text) & set("./\\:")]
    if leads and hub.function(config.model.name) is not None:
        raise TrustError(
            f"the server's experiment gives {config.model.name} the option {short(leads[0])}, which may lead to a file "
            "or an address; a device takes plain words and numbers"
        )
    least, asked = device.secure_threshold, config.aggregation.secure_threshold
    if least is not None and (asked is None or asked < least):
        wants = "to see single updates" if asked is None else f"sums over {asked} devices"
        raise TrustError(
            f"the server wants {wants}; this device's file allows sums over at least {least} (secure_threshold)"
        )
    return config


def _texts(value: Any) -> Iterator[str]:
    """The texts in options, at any depth."""
    if isinstance(value, str):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for one in inner:
        yield from _texts(one)


class Gate:
    """A device's gate: `gate(blob, ticket)` is the sub-model in a message; an error if the device cannot afford it.

    Args:
        context: the client's.
        method: the method.
        example: a batch of the training batch size; only its shapes and types matter.
        limits: what the device can afford.
        capacity_of: what its capacity is a fraction of.
        latency: the milliseconds of a training step of a size on this device; without it, time is not judged.
        footprint: the memory that the training of a size took on this device, where it was measured.
    """

    def __init__(
        self,
        context: Context,
        method: Method[Any],
        example: Batch,
        limits: Limits,
        capacity_of: str = "width",
        latency: Latency | None = None,
        footprint: Footprint = unmeasured,
    ) -> None:
        self.limits = limits
        self._sizes, self._latency, self._footprint = context.sizes, latency, footprint
        self._costs = Costs(context, method, example, capacity_of, latency, footprint)

    def __call__(self, blob: bytes, ticket: Any) -> SubModel:
        """The sub-model; refuses it before allocating any of its tensors.

        Raises:
            TrustError: the device cannot afford it, it is not what its ticket says, or it is damaged.
        """
        try:
            asked = Ticket.from_json(ticket)
        except TrustError as error:
            raise TrustError(f"refused what the server sent: {error}") from None
        reasons = self.refusals(SubModel(peek(blob), asked))
        if reasons:
            raise TrustError(f"refused what the server sent: {'; '.join(reasons)}")
        return SubModel(load(blob)[0], asked)

    def latencies(self) -> dict[str, float]:
        """The milliseconds of a training step of each size that fits but for its time; empty if time is not limited."""
        if self._latency is None or self.limits.budget is None or self.limits.budget.latency_ms is None:
            return {}
        counted = self._costs.allowed(self.limits, self._sizes, latency=lambda size: 0.0)
        found = {size.label: self._latency(size) for size in counted}
        return {label: time for label, time in found.items() if math.isfinite(time)}

    def footprints(self) -> dict[str, float]:
        """The memory of each size that was measured here; empty if memory is not limited."""
        if self.limits.budget is None or self.limits.budget.memory_bytes is None:
            return {}
        found = {size.label: self._footprint(size) for size in self._sizes}
        return {label: amount for label, amount in found.items() if amount is not None}

    def refusals(self, sub_model: SubModel) -> list[str]:
        """Why the device refuses a sub-model, from its shapes alone; empty if it accepts it."""
        if sub_model.ticket.job == "echo":
            return ["devices do not echo"]
        try:
            costs = self._costs.of(sub_model)
        except (AnysizeError, RuntimeError, KeyError, TypeError, ValueError) as error:
            return [f"it does not build the network that its ticket describes ({short(str(error))})"]
        over = list(self._above(costs, sub_model.ticket.job))
        free = self.limits.memory_bytes or available_bytes()
        if free is not None and costs["memory_bytes"] > free:
            over.append(f"it takes {costs['memory_bytes']:.3g} bytes of memory, and {free:.3g} are free")
        return over

    def _above(self, costs: Mapping[str, float], job: str) -> Iterator[str]:
        """In which units a message costs more than any size that the device's capacity or budget allows."""
        if self.limits.capacity is None and self.limits.budget is None:
            return
        most = self._costs.most(self.limits, job)
        if not most:
            least = self._costs.least(self.limits, self._sizes)
            yield f"this device's {self.limits} allows none of the sizes that the experiment trains{least}"
            return
        for unit, cost in costs.items():
            if unit != "memory_bytes" and cost > most[unit]:
                yield f"{unit} = {cost:.0f}, and this device's {self.limits} allows {most[unit]:.0f}"
