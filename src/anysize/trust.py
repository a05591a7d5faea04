"""What comes from outside, checked before it can do anything: updates at the server, sub-models on a device.

The server knows what it asked for. An answer must have the names, shapes and types that packing an untrained network
of the same message gives, numbers that are finite and within bounds, and nothing else; what it says about itself is
taken from the ticket that was sent, not from the one that came back. An answer that fails is an `Absence`: it costs the
client its update.

A device knows what it can afford and which code it may run. It reads the sizes of a message from its header, builds
the network on the meta device, and refuses what is too large before it allocates any of it.

What is not checked: whether an answer is true. A device can lie within the bounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anysize import config as configs
from anysize.affordable import REMEMBERED, Costs, finished_network, kind_of, statistics_form, without_statistics
from anysize.config import EngineConfig, ExperimentConfig
from anysize.context import Context, Size
from anysize.cost import answered, on_meta
from anysize.device import DeviceConfig, Limits
from anysize.elastic.norm import batch_norms
from anysize.engines.base import Absence
from anysize.errors import AnysizeError, TrustError
from anysize.measuring import available_bytes
from anysize.methods.base import Method, SubModel, Update, finite
from anysize.objectives import Batch
from anysize.wire import load, peek

if TYPE_CHECKING:
    from anysize.experiment import Experiment

_TOLD: Mapping[str, tuple[str, ...]] = {
    "train": ("samples", "loss", "classes"),
    "evaluate": ("samples", "sums"),
    "calibrate": (),
}
"""By task, what an answer's ticket says that the message's did not."""

_SHOWN = 3  # problems of an answer that are named
_LARGEST = {"mean": 1e15, "variance": 1e30, "count": 1e15}
"""The largest statistics of a batch-norm: their squares and sums stay numbers in single precision."""


# The server's side ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """What an answer must look like.

    Attributes:
        tensors: the shape and type of each by its name.
        kinds: of those that are statistics rather than parameters, which: "mean", "variance", "count".
        keys: what the method itself adds to the ticket.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    kinds: Mapping[str, str] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()


def form(context: Context, method: Method[Any], sub_model: SubModel) -> Form:
    """The form of the answer to a message, found without its numbers by building and packing an untrained network."""
    task = sub_model.ticket["task"]
    if task == "evaluate":
        return Form({})
    meta = on_meta(replace(sub_model, tensors=without_statistics(sub_model.tensors)))
    if task == "calibrate":
        shapes = statistics_form(finished_network(context, method, meta))
        return Form(shapes, {name: name.rpartition(".")[2] for name in shapes})
    module, answer = answered(context, method, meta)
    tensors = answer.tensors
    storages = {_storage(buffer): "count" if not buffer.is_floating_point() else "mean" for buffer in module.buffers()}
    storages |= {_storage(n.running_var): "variance" for n in batch_norms(module) if n.running_var is not None}
    kinds = {name: storages[_storage(t)] for name, t in tensors.items() if _storage(t) in storages}
    added = frozenset(answer.ticket) - frozenset(meta.ticket)
    return Form({name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}, kinds, added)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Guard:
    """The server's door: `guard(sub_model, update)` is the update, cleared of what was not asked for, or an absence.

    Args:
        context: the server's.
        method: the method.
        options: the bounds.
        sums: what the task sums up over held-out samples.
    """

    def __init__(self, context: Context, method: Method[Any], options: EngineConfig, sums: Collection[str]) -> None:
        self._context = context.for_client()
        self._method = method
        self._options = options
        self._sums = frozenset(sums)
        self._forms: dict[str, Form] = {}

    @classmethod
    def of(cls, experiment: Experiment) -> Guard:
        """The guard of an experiment."""
        from anysize.experiment import example_sums

        options = experiment.config.engine
        return cls(experiment.context, experiment.method, options, example_sums(experiment))

    def __call__(self, sub_model: SubModel, update: Update) -> Update | Absence:
        """The update if it is what the message asked for, else who sent it and what is wrong."""
        client, expected = int(sub_model.ticket["client"]), self.form(sub_model)
        for problems in (
            self._ticket_problems(sub_model, update.ticket, expected),
            _form_problems(update.tensors, expected),
            _number_problems(update.tensors, expected),
            self._norm_problems(sub_model, update, expected),
        ):
            found = list(problems)  # each step relies on those before it
            if found:
                more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
                return Absence(client, "; ".join(found[:_SHOWN]) + more)
        told = {*_TOLD[sub_model.ticket["task"]], *expected.keys}
        said = {key: value for key, value in update.ticket.items() if key in told}
        return Update(update.tensors, sub_model.ticket | said)

    def form(self, sub_model: SubModel) -> Form:
        """The form of the answer to a message; found once for all messages of one kind."""
        kind = kind_of(sub_model)
        if kind not in self._forms:
            if len(self._forms) == REMEMBERED:
                self._forms.clear()
            self._forms[kind] = form(self._context, self._method, sub_model)
        return self._forms[kind]

    def _ticket_problems(self, sub_model: SubModel, ticket: Any, expected: Form) -> Iterator[str]:
        if not isinstance(ticket, dict):
            yield "sent no ticket"
            return
        sent = json.loads(json.dumps(sub_model.ticket))  # as it arrived
        told = _TOLD[sent["task"]]
        for key, value in sent.items():
            if key not in ticket:
                yield f"sent a ticket without {key}"
            elif not _same(ticket[key], value):
                yield f"sent a ticket with {key} = {_short(ticket[key])}, expected {_short(value)}"
        for key in sorted(set(map(str, ticket)) - set(sent) - set(told) - expected.keys):
            yield f"sent a ticket with {_short(key)}, which nobody asked for"
        checks = {"samples": self._samples, "loss": _loss, "classes": self._classes, "sums": self._metrics}
        for key in told:
            yield from checks[key](ticket.get(key))

    def _samples(self, samples: Any) -> Iterator[str]:
        most = self._options.max_samples
        if "samples" not in self._context.tells:
            if samples is not None:
                yield "sent its number of samples, which nobody may ask for (devices.share)"
        elif type(samples) is not int or not 0 < samples <= most:
            yield f"sent samples = {_short(samples)}, expected a whole number from 1 to {most} (engine.max_samples)"

    def _classes(self, classes: Any) -> Iterator[str]:
        known = self._context.classes
        wanted = self._context.tricks.classwise_head and "labels" in self._context.tells and known is not None
        if not wanted:
            if classes is not None:
                yield "sent which classes it has, which nobody may ask for (devices.share)"
        elif not isinstance(classes, list) or len(classes) != known or not _bits(classes):
            yield f"sent classes = {_short(classes)}, expected a 0 or 1 for each of the {known} classes, and a 1"

    def _metrics(self, sums: Any) -> Iterator[str]:
        if not isinstance(sums, dict) or set(sums) != self._sums:
            yield f"sent sums {_short(sums)}, expected {', '.join(sorted(self._sums))}"
            return
        wrong = [f"{key} = {_short(value)}" for key, value in sums.items() if not _is_number(value)]
        count = sums.get("count")
        if wrong or (count is not None and not 0 < count <= 1e15):
            yield f"sent sums with {', '.join(wrong) or f'count = {_short(count)}'}, expected finite numbers"
        elif count is not None and not 0 <= sums.get("correct", 0) <= count:
            yield f"sent {sums['correct']:g} correct answers of {count:g}"
        elif not self._judgeable(sums):
            yield f"sent sums {_short(sums)}, from which no metrics follow"

    def _judgeable(self, sums: dict[str, float]) -> bool:
        """Whether the task's metrics of these sums are numbers; its code may be anybody's."""
        try:
            return all(_is_number(value) for value in self._context.task.metrics(sums).values())
        except (ArithmeticError, ValueError, TypeError, KeyError):
            return False

    def _norm_problems(self, sub_model: SubModel, update: Update, expected: Form) -> Iterator[str]:
        """Whether the parameters moved further than allowed from those that were sent."""
        moved = still = 0.0
        for name, tensor in update.tensors.items():
            if name in expected.kinds:
                continue
            before = sub_model.tensors.get(name)
            if before is not None and before.shape == tensor.shape:
                still += _norm(before) ** 2
                tensor = tensor.to(torch.float64) - before.to(torch.float64)
            moved += _norm(tensor) ** 2
        allowed = self._options.update_norm * (1 + math.sqrt(still))
        if math.sqrt(moved) > allowed:
            yield (
                f"sent parameters that moved by {math.sqrt(moved):.3g}, expected at most {allowed:.3g} "
                "(engine.update_norm)"
            )


def _form_problems(tensors: Mapping[str, Tensor], expected: Form) -> Iterator[str]:
    """Names, shapes and types that are not those expected."""
    for name in expected.tensors:
        if name not in tensors:
            yield f"sent no weight {name}"
    for name, tensor in tensors.items():
        if name not in expected.tensors:
            yield f"sent weight {_short(name)}, which it was not given"
            continue
        shape, kind = expected.tensors[name]
        if tuple(tensor.shape) != shape:
            yield f"sent weight {name} of shape {tuple(tensor.shape)}, expected {shape}"
        elif tensor.dtype != kind:
            yield f"sent weight {name} of type {_type(tensor.dtype)}, expected {_type(kind)}"


def _number_problems(tensors: Mapping[str, Tensor], expected: Form) -> Iterator[str]:
    """Numbers that are none, and statistics that no data has."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()) or not finite(tensor):
            yield f"sent weight {name} with numbers that are not finite"
            continue
        kind = expected.kinds.get(name)
        if kind is None or not tensor.numel():
            continue
        low, high = float(tensor.min()), float(tensor.max())
        lowest = -_LARGEST[kind] if kind == "mean" else 0.0
        if not lowest <= low <= high <= _LARGEST[kind]:
            yield f"sent statistics {name} from {low:.3g} to {high:.3g}, expected {lowest:.3g} to {_LARGEST[kind]:.3g}"


def _loss(loss: Any) -> Iterator[str]:
    if not _is_number(loss):
        yield f"sent loss = {_short(loss)}, expected a finite number"


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.to(torch.float64)))


def _same(one: object, other: object) -> bool:
    """Whether two values of JSON are equal; unlike Python's, its true is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _bits(values: list[Any]) -> bool:
    return all(type(value) is int and value in (0, 1) for value in values) and 1 in values


def _type(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _short(value: object) -> str:
    """A value of a stranger's in one short line, without signs that a terminal would obey."""
    text = "".join(sign if sign.isprintable() else "?" for sign in repr(value)[:60])
    return f"{text[:57]}..." if len(text) == 60 else text


# The device's side ----------------------------------------------------------------------------------


def refuse_upper_bounds(method: Method[Any]) -> None:
    """Refuses a method that sends clients more than they can afford."""
    if method.needs_simulation:
        raise TrustError(
            f"{type(method).__name__} with these options sends devices more than they can train, as an upper bound for "
            "simulations; real devices refuse it"
        )


def accepted(text: str, device: DeviceConfig) -> ExperimentConfig:
    """The experiment that a server tells a device of, if it names no code but what the device allows, and no files.

    Raises:
        TrustError: with all names that the device's file does not allow.
        ConfigError: if it is no experiment at all.
    """
    tables = configs.parse(text, "the server's experiment")
    devices = tables.get("devices")
    if isinstance(devices, dict) and "file" in devices:
        raise TrustError("the server's experiment names a file of this device (devices.file)")
    config = configs.from_dict(tables, folder=device.folder, source="the server's experiment")
    named = {"model": config.model.name, "method": config.method.name, "task": config.task.name}
    foreign = [f'{kind}.name = "{name}"' for kind, name in named.items() if ":" in name and name not in device.allow]
    if foreign:
        raise TrustError(
            f"the server's experiment names code that this device does not allow: {_short(', '.join(foreign))}; if you "
            "trust it, install it here and list it under allow in the device's file"
        )
    return config


def accepted_sizes(told: Any) -> tuple[Size, ...]:
    """The sizes that a server says its fleet trains, smallest first, as every method expects them.

    Raises:
        TrustError: if they are none.

    >>> [size.label for size in accepted_sizes([{"width": 1.0}, {"width": 0.25}])]
    ['0.25', '1.0']
    """
    try:
        sizes = sorted((Size(**size) for size in told), key=lambda size: size.order)
        fine = all(0 < s.width <= 1 and 0 <= s.mask < 1 and (s.depth or 1) >= 1 for s in sizes)
    except TypeError:
        sizes, fine = [], False
    if not sizes or not fine:
        raise TrustError(f"the server's sizes, {_short(told)}, are none that a network can have")
    return tuple(sizes)


class Gate:
    """A device's door: `gate(blob, ticket)` is the sub-model in a message, unless the device cannot afford it.

    Args:
        context: the client's.
        method: the method.
        example: a batch of the training batch size; only its shapes and types matter.
        limits: what the device can afford.
        capacity_of: what its capacity is a fraction of.
    """

    def __init__(
        self, context: Context, method: Method[Any], example: Batch, limits: Limits, capacity_of: str = "width"
    ) -> None:
        self._limits = limits
        self._costs = Costs(context, method, example, capacity_of)

    def __call__(self, blob: bytes, ticket: Any) -> SubModel:
        """The sub-model; an error that says why not, before any of its tensors has memory.

        Raises:
            TrustError: the device cannot afford it, or it is not what its ticket says.
            CheckpointError: it is damaged.
        """
        reasons = list(_order_problems(ticket)) or self.refusals(SubModel(peek(blob), ticket))
        if reasons:
            raise TrustError(f"refused what the server sent: {'; '.join(reasons)}")
        return SubModel(load(blob)[0], ticket)

    def refusals(self, sub_model: SubModel) -> list[str]:
        """Why the device does not take a sub-model, whose numbers it has not seen; nothing if it does."""
        try:
            costs = self._costs.of(sub_model)
        except (AnysizeError, RuntimeError, KeyError, TypeError, ValueError) as error:
            return [f"it does not make the network that its ticket says ({_short(str(error))})"]
        over = list(self._above(costs, sub_model.ticket["task"]))
        free = self._limits.memory_bytes or available_bytes()
        if free is not None and costs["memory_bytes"] > free:
            over.append(f"it takes {costs['memory_bytes']:.3g} bytes of memory, and {free:.3g} are free")
        return over

    def _above(self, costs: Mapping[str, float], task: str) -> Iterator[str]:
        """In which units a message costs more than any size that the device's capacity or budget allows."""
        if self._limits.capacity is None and self._limits.budget is None:
            return
        most = self._costs.most(self._limits, task)
        if not most:
            yield f"this device's {self._limits} allows none of the sizes that the experiment trains"
            return
        for unit, cost in costs.items():
            if unit != "memory_bytes" and cost > most[unit]:
                yield f"{unit} = {cost:.0f}, and this device's {self._limits} allows {most[unit]:.0f}"


def _order_problems(ticket: Any) -> Iterator[str]:
    """What is wrong with what a server asks for."""
    if not isinstance(ticket, dict):
        yield "there is no ticket"
        return
    if ticket.get("task") not in list(_TOLD):
        yield f"task {_short(ticket.get('task'))} is none of {', '.join(_TOLD)}"
    for key in ("client", "round", "seed"):
        if type(ticket.get(key)) is not int or ticket[key] < 0:
            yield f"{key} = {_short(ticket.get(key))} is no whole number"
    if not _is_number(ticket.get("width")) or not 0 < ticket["width"] <= 1:
        yield f"width = {_short(ticket.get('width'))} is not above 0 and at most 1"
    if ticket.get("task") == "train" and (not _is_number(ticket.get("rate")) or ticket["rate"] < 0):
        yield f"rate = {_short(ticket.get('rate'))} is no learning rate"
    for key in ("batch_size", "calibration_samples"):
        if ticket.get(key) is not None and (type(ticket[key]) is not int or ticket[key] < 1):
            yield f"{key} = {_short(ticket[key])} is no number of samples"
