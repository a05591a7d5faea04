"""What a device can afford: a capacity or a budget as costs, and the check of a message against them.

A capacity is a fraction of something that the experiment chooses, and a method may narrow channels or remove kernels,
bases or blocks. So a width does not determine what a message costs. One rule holds for all methods: a capacity or a
budget allows some of the sizes that the experiment trains, and a device can afford a message if, in every unit, it
costs no more than the most expensive of these sizes.

A device computes these costs itself, before it has any weights: the method makes its state and sub-models on the meta
device, where tensors have only shapes. Nothing is allocated, and the device relies on nothing from the server except
the experiment.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anysize.client.work import STATISTICS
from anysize.cost.budgets import allowed, as_budget, needs, untimed
from anysize.cost.count import answered, forward_macs, measure, on_meta, own_bytes, shipped_bytes, training_cost
from anysize.cost.memory import training_bytes
from anysize.deploy.device_file import Limits
from anysize.elastic.norm import batch_norms
from anysize.elastic.skeleton import hollow, named_tensors
from anysize.errors import AnysizeError, MethodError
from anysize.experiment.sizes import sized
from anysize.methods.base import Method
from anysize.methods.capabilities import OnBase
from anysize.methods.context import Context
from anysize.methods.messages import Client, SubModel
from anysize.methods.size import Size
from anysize.methods.training import Batch
from anysize.wire import flatten, restore

_VOLATILE = ("client", "round", "seed", "rate")
Latency = Callable[[Size], float]
"""The milliseconds of a training step of a size on some machine."""
Footprint = Callable[[Size], float | None]
"""The bytes of memory that a device's process took in the training of a size; None where nobody measured it."""
REMEMBERED = 256
"""Kinds of messages whose form or cost is remembered."""
_MAKERS = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye)


def unmeasured(size: Size) -> None:
    """Where nobody measured."""


class Costs:
    """What the sizes of an experiment cost, and which of them a device can afford.

    Args:
        context: the client's.
        method: the method.
        example: a batch of the training batch size; only its shapes and types matter.
        capacity_of: what a capacity is a fraction of: "width", or a unit of a budget.
        latency: the milliseconds of a training step of a size; without it, time is not judged.
        footprint: the memory that was measured on the device, which counts in place of what is predicted.
    """

    def __init__(
        self,
        context: Context,
        method: Method[Any],
        example: Batch,
        capacity_of: str = "width",
        latency: Latency | None = None,
        footprint: Footprint = unmeasured,
    ) -> None:
        self._latency = latency
        self._footprint = footprint
        self._context = context
        self._method = method
        self._example = example
        self._capacity_of = capacity_of
        self._units: dict[tuple[Size, ...], Mapping[str, float]] = {}
        self._states: dict[tuple[Size, ...], tuple[Context, Any]] = {}
        self._most: dict[tuple[Limits, str], dict[str, float]] = {}
        self._messages: dict[str, dict[str, float]] = {}

    def allowed(
        self,
        limits: Limits,
        sizes: Iterable[Size],
        latency: Latency | None = None,
        footprint: Footprint | None = None,
    ) -> Iterator[Size]:
        """Those of `sizes` that a capacity or a budget allows; of time only if somebody measured it.

        Args:
            limits: the device's.
            sizes: any.
            latency: the milliseconds of a training step of a size, in place of the one that was given at first.
            footprint: the memory that was measured, likewise.
        """
        if self._capacity_of == "width" and limits.capacity is not None and limits.budget is None:
            whole = sized(self._method, self._context, limits.capacity)
            return (size for size in sizes if whole.holds(size))
        full = Size(1.0)
        budget = as_budget(limits.capacity, limits.budget, self._capacity_of, lambda: self.units(full, (full,)))
        counted = allowed(sizes, budget, lambda size: untimed(self.own_units(size, footprint)))
        timed = latency or self._latency
        if timed is None or budget is None or budget.latency_ms is None:
            return counted
        return allowed(counted, budget, lambda size: {**self.own_units(size, footprint), "latency_ms": timed(size)})

    def least(
        self,
        limits: Limits,
        sizes: Iterable[Size],
        latency: Latency | None = None,
        footprint: Footprint | None = None,
    ) -> str:
        """What the smallest of `sizes` needs in the units that a budget limits, in words that end a sentence."""
        timed = latency or self._latency or (lambda size: math.inf)
        costs = [{**self.own_units(size, footprint), "latency_ms": timed(size)} for size in sizes]
        needed = needs(limits.budget, *costs) if costs else ""
        return needed and f"; the smallest needs {needed}"

    def own_units(self, size: Size, footprint: Footprint | None = None) -> Mapping[str, float]:
        """As `units`, with the memory that was measured on the device in place of the predicted one."""
        measured = (footprint or self._footprint)(size)
        return self.units(size) if measured is None else {**self.units(size), "memory_bytes": measured}

    def most(self, limits: Limits, job: str) -> dict[str, float]:
        """In every unit of `message_cost`, the highest cost of a size within the limits; empty if no size is.

        Args:
            limits: the device's.
            job: "train", or a job with the finished network.
        """
        if (limits, job) not in self._most:
            sizes = self.allowed(limits, self._context.sizes)
            costs = [self.of(self.message(size, job)) for size in sizes]
            self._most[limits, job] = {unit: max(c[unit] for c in costs) for unit in (costs[0] if costs else ())}
        return self._most[limits, job]

    def of(self, sub_model: SubModel) -> dict[str, float]:
        """The `message_cost` of a message; counted once for all messages of its kind."""
        kind = kind_of(sub_model)
        if kind not in self._messages:
            if len(self._messages) == REMEMBERED:
                self._messages.clear()
            self._messages[kind] = message_cost(self._context, self._method, sub_model, self._example)
        return self._messages[kind]

    def units(self, size: Size, fleet: tuple[Size, ...] | None = None) -> Mapping[str, float]:
        """The cost of a client of that size in the units of a budget, in the experiment's fleet or another."""
        key = (size, *(self._context.sizes if fleet is None else fleet))
        if key not in self._units:
            context, state = self._state(key[1:])
            self._units[key] = self._shaped(lambda: measure(context, self._method, state, size, self._example).units())
        return self._units[key]

    def message(self, size: Size, job: str) -> SubModel:
        """The message to a client of that size, on the meta device; with statistics for a finished network."""
        context, state = self._state(self._context.sizes)
        client = Client(0, 0, size, 1, len(self._example.x), context.seed, job)
        made = on_meta(self._shaped(lambda: self._method.extract(context, state, client)))
        if not made.finished:
            return replace(made, ticket=replace(made.ticket, rate=0.1))
        forms = statistics_form(finished_network(self._context, self._method, made))
        sent = {STATISTICS + n: torch.empty(shape, dtype=kind, device="meta") for n, (shape, kind) in forms.items()}
        return replace(made, tensors=made.tensors | sent)

    def _state(self, sizes: tuple[Size, ...]) -> tuple[Context, Any]:
        """The context of a fleet that trains `sizes`, and the method's first state, both with shapes only."""
        if sizes not in self._states:
            start = shapes_of(named_tensors(self._context.template))
            context = replace(self._context, sizes=sizes, initial=start)
            state = self._shaped(lambda: self._method.init(context))
            tensors, note = flatten(state)
            self._states[sizes] = context, restore(type(state), shapes_of(tensors.items()), note)
        return self._states[sizes]

    def _shaped(self, work: Callable[[], Any]) -> Any:
        """The result of `work` of the method, with shapes only."""
        try:
            with OnlyShapes():
                return work()
        except AnysizeError:
            raise
        except Exception as error:  # a method may be the user's
            name, what = type(self._method).__name__, f"{type(error).__name__}: {error}"
            raise MethodError(
                f"{name} cannot say what its sizes cost before there are weights ({what}); see the law "
                "costs_need_no_weights of anysize.testing.check_method"
            ) from error


class OnlyShapes(TorchFunctionMode):
    """While active, floating-point tensors are made on the meta device; integers, which are indices, stay real.

    >>> with OnlyShapes():
    ...     torch.randn(2, 3, generator=torch.Generator()).is_meta, torch.arange(3).is_meta
    (True, False)
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        kind = given.get("dtype")
        made = function in _MAKERS and (kind is None or kind.is_floating_point)
        if made:
            given["device"] = "meta"
        if made or any(isinstance(value, Tensor) and value.is_meta for value in args):
            given.pop("generator", None)  # the meta device draws nothing
        return function(*args, **given)


def shapes_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors on the meta device, by name.

    >>> shapes_of([("w", torch.ones(2))])["w"].is_meta
    True
    """
    return {name: tensor.detach().to("meta") for name, tensor in tensors}


def kind_of(sub_model: SubModel) -> str:
    """What the form and the cost of a message depend on: its shapes, and its ticket except client and round."""
    asked = {key: value for key, value in sub_model.ticket.to_json().items() if key not in _VOLATILE}
    shapes = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in sorted(sub_model.tensors.items())]
    return json.dumps([asked, shapes], sort_keys=True)


def message_cost(context: Context, method: Method[Any], sub_model: SubModel, example: Batch) -> dict[str, float]:
    """What a message costs the client that receives it, as far as a client can tell.

    For a training message, the cost of a step; for any other, the cost of the finished network. Memory includes the
    message, the network with its gradients, optimizer and copies, and the activations of a step; not what the process
    has loaded.
    """
    meta = on_meta(replace(sub_model, tensors=without_statistics(sub_model.tensors)))
    payload = _bytes(sub_model.tensors)
    if sub_model.finished:
        network = finished_network(context, method, meta)
        own = own_bytes(network)
        macs = forward_macs(network, example.x.to("meta"))
        shipped = shipped_bytes(context, network)
        return {"macs": macs, "inference_bytes": shipped, "tensor_bytes": payload, "memory_bytes": payload + 2 * own}
    cost = training_cost(context, method, meta, example)
    module, answer = answered(context, method, meta)
    return {
        "parameters": cost["parameters"],
        "training_macs": cost["training_macs"],
        "activation_bytes": cost["activation_bytes"],
        "tensor_bytes": payload + _bytes(answer.tensors),
        "memory_bytes": payload + _training_bytes(context, method, module, cost["activation_bytes"]),
    }


def _training_bytes(context: Context, method: Method[Any], module: nn.Module, held: int) -> int:
    """The memory of training; what the device has frozen takes its place once, whatever is trained beside it."""
    frozen = set(method.frozen(context)) if isinstance(method, OnBase) else set()
    resting = _bytes({name: tensor for name, tensor in named_tensors(context.template) if name in frozen})
    return resting + training_bytes(context.training, own_bytes(module) - resting, held)


def finished_network(context: Context, method: Method[Any], meta: SubModel) -> nn.Module:
    """The network that a client runs on its data, on the meta device."""
    return hollow(method.build(context, replace(meta, tensors=without_statistics(meta.tensors))), constants=False)


def statistics_form(network: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The shape and type of each tensor of a network's batch-norm statistics, by its name."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for place, norm in enumerate(batch_norms(network)):
        shapes[f"{place}.mean"] = shapes[f"{place}.variance"] = ((norm.num_features,), torch.float32)
        shapes[f"{place}.count"] = ((), torch.float64)
    return shapes


def without_statistics(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a message without the batch-norm statistics that came with it."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(STATISTICS)}


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
