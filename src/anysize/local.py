"""The client's side: train, calibrate, evaluate. One loop for all methods.

Each of the three tasks takes a sub-model and a share of data and gives an update, so that an engine needs to know
one message shape only. What happens depends on the message and the data alone: the same bits come out wherever it runs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from anysize import interrupts
from anysize.accelerators import place
from anysize.config import TrainingConfig
from anysize.context import Context
from anysize.data import Part, Share, to_input
from anysize.data.augment import augment
from anysize.elastic.norm import Statistics, attach, batch_norms, collect, norm_tensors
from anysize.elastic.skeleton import named_tensors
from anysize.errors import DataError, MethodError
from anysize.layout import fast, layout
from anysize.methods.base import Method, ParameterGroup, SubModel, Update
from anysize.objectives import Batch, Step, make_attack, make_distillation, make_objective, proximal
from anysize.rng import derive, generator
from anysize.tasks import Sums, add, label_set
from anysize.wire import Json, Tensors

STATISTICS = "statistics/"
_EVALUATION_BATCH = 500
_AHEAD = 16  # batches that are gathered at once


def perform(
    context: Context, method: Method[Any], sub_model: SubModel, share: Share, kept: Mapping[str, Tensor] | None = None
) -> Update:
    """Does what the ticket asks: "train", "calibrate" or "evaluate"; "echo" sends back what came, to time an engine.

    Args:
        context: what server and client both know.
        method: the method.
        sub_model: what the server sent.
        share: the client's own data.
        kept: tensors that stayed with this client at its last turn.
    """
    task = {"train": train, "calibrate": calibrate, "evaluate": evaluate, "echo": echo}[sub_model.ticket["task"]]
    with global_seed(derive(*_names(sub_model), "layers")):
        return task(context, method, sub_model, share, kept or {})


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """A seed for the global generator, from which layers such as dropout draw; afterwards it is as it was.

    `torch.manual_seed` would do, but it also prepares for devices that are not there, which takes two milliseconds.
    """
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def train(
    context: Context, method: Method[Any], sub_model: SubModel, share: Share, kept: Mapping[str, Tensor]
) -> Update:
    """The update after local training."""
    module = built(context, method, sub_model)
    local = local_names(context, module)
    own = fitting(module, local, kept)
    load_into(module, own)
    module.train()
    training, tricks = context.training, context.tricks
    optimizer = make_optimizer(context, method, module, sub_model.ticket["rate"])
    momentum = method.momentum_buffers(module)
    for parameter, buffer in momentum.items():
        optimizer.state[parameter]["momentum_buffer"].copy_(buffer)
    received = as_received(context, module, sub_model, own)
    classes = held_classes(context, share.train)
    held = None if classes is None else classes.to(context.device)
    attacks = generator(*_names(sub_model), "attack")
    objective = make_objective(context.task, tricks, held, attacks, context.axes.classifier)
    distillation = make_distillation(context.task, tricks, held)
    attack = make_attack(tricks, attacks)
    choices = generator(*_names(sub_model), "step")
    loss_sum, seen = torch.zeros((), device=context.device), 0
    for number, batch in enumerate(local_batches(context, sub_model, share.train)):
        loss = method.loss(module, batch, Step(number, choices, received, objective, distillation, attack=attack))
        if tricks.proximal:
            loss = loss + proximal(module, received, tricks)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if training.clip is not None:
            for group in optimizer.param_groups:
                nn.utils.clip_grad_norm_(group["params"], training.clip)
        take_step(optimizer)
        loss_sum += loss.detach() * len(batch.y)
        seen += len(batch.y)
    for parameter, buffer in momentum.items():
        buffer.copy_(optimizer.state[parameter]["momentum_buffer"])
    told = learned(context, sub_model, len(share.train), float(loss_sum) / seen, classes)
    update = method.pack(module, sub_model)
    # The module trains the next client too, so what leaves it gets memory of its own.
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in update.tensors.items()}
    keep = {name: tensors.pop(name) for name in local}
    return Update(tensors, update.ticket | told, keep)


def learned(context: Context, sub_model: SubModel, samples: int, mean_loss: float, classes: Tensor | None) -> Json:
    """What a client tells of its training besides the tensors; an error if its loss is no number any more."""
    if not math.isfinite(mean_loss):
        raise MethodError(
            f"round {sub_model.ticket['round']}: the loss of client {sub_model.ticket['client']} is {mean_loss}: "
            "training diverged. Lower training.learning_rate or set training.clip; what was saved before stays"
        )
    # Label sets leave a client only where the chosen tricks need them, and the experiment allows it.
    wanted = context.tricks.classwise_head and "labels" in context.tells
    held = classes.int().tolist() if classes is not None and wanted else None
    return {"samples": samples if "samples" in context.tells else None, "loss": mean_loss, "classes": held}


def calibrate(
    context: Context, method: Method[Any], sub_model: SubModel, share: Share, kept: Mapping[str, Tensor]
) -> Update:
    """Statistics of what enters each batch-norm, over the client's training data; forward only.

    A message without statistics is a first pass: the network normalises by its batches. With statistics it is a
    further one: the network normalises by them, so that what enters a layer no longer depends on who shares a batch.
    """
    module = with_fixed_statistics(context, method, sub_model)
    order = torch.randperm(len(share.train), generator=generator(*_names(sub_model), "calibrate"))
    order = order[: sub_model.ticket.get("calibration_samples")]
    fixed = any(name.startswith(STATISTICS) for name in sub_model.tensors)  # then batches may be of any size
    drawn = (draw(share.train, i) for i in batches(order, _EVALUATION_BATCH if fixed else context.training.batch_size))
    found = collect(module, (batch.x.to(context.device) for batch in drawn))
    if len(order) == 1:  # it stood twice in its batch
        found = replace(found, counts=tuple(count / 2 for count in found.counts))
    if "samples" not in context.tells:  # values per sample, which the network knows: so every client counts alike
        found = replace(found, counts=tuple(count / len(order) for count in found.counts))
    return Update({name: tensor.cpu() for name, tensor in found.tensors().items()}, dict(sub_model.ticket))


def evaluate(
    context: Context, method: Method[Any], sub_model: SubModel, share: Share, kept: Mapping[str, Tensor]
) -> Update:
    """Sums and counts of the metrics on the client's own held-out share."""
    if share.held_out is None:
        raise DataError(f"client {sub_model.ticket['client']} has no held-out share; set data.validation above 0")
    module = with_fixed_statistics(context, method, sub_model)
    load_into(module, fitting(module, local_names(context, module), kept))
    sums = measure(context, module, share.held_out, sub_model.ticket.get("batch_size", _EVALUATION_BATCH))
    count = len(share.held_out)
    if "samples" in context.tells:
        return Update({}, sub_model.ticket | {"sums": sums, "samples": count})
    means = {name: value / count for name, value in sums.items()}  # so every client counts alike
    return Update({}, sub_model.ticket | {"sums": means, "samples": None})


def echo(
    context: Context, method: Method[Any], sub_model: SubModel, share: Share, kept: Mapping[str, Tensor]
) -> Update:
    """What came, unchanged."""
    return Update(sub_model.tensors, sub_model.ticket)


def with_fixed_statistics(context: Context, method: Method[Any], sub_model: SubModel) -> nn.Module:
    """The built network, with the batch-norm statistics that came with the message attached, if any did."""
    plain = {name: tensor for name, tensor in sub_model.tensors.items() if not name.startswith(STATISTICS)}
    sent = {n.removeprefix(STATISTICS): t for n, t in sub_model.tensors.items() if n.startswith(STATISTICS)}
    module = built(context, method, replace(sub_model, tensors=plain), fixed=bool(sent))
    return place(attach(module, Statistics.of(sent)), context.device) if sent else module


def with_statistics(sub_model: SubModel, statistics: Statistics) -> SubModel:
    """The sub-model with batch-norm statistics, for `calibrate` and `evaluate`."""
    named = {STATISTICS + name: tensor for name, tensor in statistics.tensors().items()}
    return replace(sub_model, tensors={**sub_model.tensors, **named})


def measure(
    context: Context,
    module: nn.Module,
    part: Part,
    batch_size: int = _EVALUATION_BATCH,
    change: Callable[[Batch], Tensor] | None = None,
) -> Sums:
    """Sums and counts of the task's metrics of `module` over all of `part`, its inputs changed if asked."""
    return measured(context, module.eval(), part, batches(torch.arange(len(part)), batch_size), change)


def measured(
    context: Context,
    module: nn.Module,
    part: Part,
    indices: Sequence[Tensor],
    change: Callable[[Batch], Tensor] | None = None,
) -> Sums:
    """Sums and counts of the task's metrics of `module`, on the context's device, over these batches of `part`."""
    sums: Sums = {}
    for index in indices:
        batch = draw(part, index)
        there = Batch(batch.x.to(context.device), batch.y.to(context.device))
        x = there.x if change is None else change(there)
        with torch.no_grad():
            output = module(x).cpu()
        judged = min(len(index), len(part))  # a single sample stands twice in its batch, and is judged once
        add(sums, context.task.sums(output[:judged], batch.y[:judged]))
    return sums


def built(context: Context, method: Method[Any], sub_model: SubModel, fixed: bool = False) -> nn.Module:
    """The network of the sub-model; one of the same shapes is used again with the new tensors.

    Args:
        context: the client's, which holds the networks that were built before.
        method: the method.
        sub_model: what the client received.
        fixed: whether batch-norm statistics will be attached to it; such networks are kept apart.
    """
    if not method.reusable:
        return place(layout(method.build(context, sub_model)), context.device)
    shapes = tuple((name, tensor.shape) for name, tensor in sub_model.tensors.items())
    key = (id(method), sub_model.width, sub_model.finished, fixed, shapes)
    if key not in context.built:
        module = place(layout(method.build(context, sub_model)), context.device)
        # Only a network that holds the message's own tensors can be loaded with another message's. One whose weights
        # are made from them, such as products of factors, would keep the weights it was built with.
        if {name for name, _ in named_tensors(module)} == set(sub_model.tensors):
            context.built[key] = (method, module, dict(constants(module)))
        return module
    _, module, first = context.built[key]
    load_into(module, sub_model.tensors)
    for name, value in first.items():  # what a forward pass may have changed
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = value.clone()
    module.zero_grad()
    return module


def constants(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Copies of the buffers that are no part of the state, by name."""
    for prefix, child in module.named_modules():
        for name in sorted(child._non_persistent_buffers_set):
            buffer = child._buffers.get(name)
            if buffer is not None and not buffer.is_meta:
                yield f"{prefix}.{name}" if prefix else name, buffer.clone()


def as_received(
    context: Context, module: nn.Module, sub_model: SubModel, kept: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """The module's tensors before training: the message's own where it has them by the module's names, else copies."""
    arrived = {**sub_model.tensors, **kept}
    if all(name in arrived for name, _ in module.named_parameters()):
        return {name: tensor.to(context.device) for name, tensor in arrived.items()}
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def local_batches(context: Context, sub_model: SubModel, part: Part) -> Iterator[Batch]:
    """The batch of each local step, on the context's device.

    Several are gathered and converted at once and then handed out as views: one gather of many samples costs less than
    many of a few.
    """
    changes = generator(*_names(sub_model), "augment")
    indices = steps(len(part), context, generator(*_names(sub_model), "batches"))
    while ahead := list(islice(indices, _AHEAD)):
        drawn = draw(part, torch.cat(ahead))
        x, y = drawn.x.to(context.device), drawn.y.to(context.device)
        ends = [0]
        for index in ahead:
            ends.append(ends[-1] + len(index))
        for first, last in pairwise(ends):
            interrupts.check()
            some = x[first:last]
            yield Batch(fast(augment(some, context.augment, changes)) if context.augment else some, y[first:last])


def steps(samples: int, context: Context, random: torch.Generator) -> Iterator[Tensor]:
    """The sample indices of each local step: shuffled epochs, as many steps or epochs as the training asks for."""
    training = context.training
    done = 0
    for _ in range(training.local_epochs or training.local_steps or 1):
        for index in batches(torch.randperm(samples, generator=random), training.batch_size):
            if training.local_steps is not None and done == training.local_steps:
                return
            done += 1
            yield index


def batches(order: Tensor, batch_size: int) -> list[Tensor]:
    """The indices of `order` in batches, none of one sample, since that has no batch statistics.

    A last batch of one joins the one before it; a single sample stands twice in its batch.

    >>> [len(batch) for batch in batches(torch.arange(7), 3)], batches(torch.tensor([4]), 3)
    ([3, 4], [tensor([4, 4])])
    """
    if len(order) == 1:
        return [order.repeat(2)]
    parts = list(torch.split(order, max(batch_size, 2)))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def draw(part: Part, index: Tensor) -> Batch:
    """The samples at `index` as a network receives them."""
    interrupts.check()
    x, y = part.batch(index)
    return Batch(fast(to_input(x)), y)


def make_optimizer(context: Context, method: Method[Any], module: nn.Module, rate: float) -> torch.optim.Optimizer:
    """A new optimizer over the method's parameter groups, whose momentum is zero."""
    return optimizer_of(context.training, method.groups(module), rate)


def optimizer_of(training: TrainingConfig, groups: Iterable[ParameterGroup], rate: float) -> torch.optim.Optimizer:
    """A new optimizer over parameter groups."""
    options = [
        {"params": list(g.parameters), "lr": rate * g.rate, "weight_decay": training.weight_decay * g.decay}
        for g in groups
    ]
    if training.optimizer == "adam":
        return torch.optim.Adam(options, lr=rate, fused=True)
    optimizer = SGD(options, lr=rate, momentum=training.momentum, fused=True)
    if training.momentum:
        # Torch's fused step needs all of them or none, and a parameter that this batch does not use has no gradient.
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class SGD(torch.optim.SGD):
    """Torch's own fused step, asked for directly: finding the way there takes several times as long as the step.

    On small networks that is a twentieth of the training. Momentum buffers are there from the start.
    """

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            kinds: dict[torch.dtype, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kinds.setdefault(parameter.dtype, []).append(parameter)
            for some in kinds.values():
                torch._fused_sgd_(
                    some,
                    [parameter.grad for parameter in some],  # type: ignore[misc]
                    [self.state[parameter]["momentum_buffer"] for parameter in some] if group["momentum"] else [],
                    weight_decay=group["weight_decay"],
                    momentum=group["momentum"],
                    lr=group["lr"],
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    is_first_step=False,
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """One step, without what torch puts around it for its compiler and its profiler: that loads them, for seconds."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


def held_classes(context: Context, part: Part) -> Tensor | None:
    """A boolean per class, those in the client's training data; None where the task has no classes."""
    labels = part.labels()
    if context.task.class_axis is None or context.classes is None or labels.is_floating_point():
        return None
    return label_set(labels, context.classes)


def local_names(context: Context, module: nn.Module) -> list[str]:
    """Names of the tensors that never leave the client."""
    return list(norm_tensors(module)) if context.tricks.batch_norm == "local" else []


def fitting(module: nn.Module, names: Collection[str], kept: Mapping[str, Tensor]) -> Tensors:
    """Those of the kept tensors that fit the module; a client whose capacity changed starts its norm layers anew."""
    shapes = {name: tensor.shape for name, tensor in named_tensors(module)}
    return {name: kept[name] for name in names if name in kept and kept[name].shape == shapes[name]}


def load_into(module: nn.Module, tensors: Tensors) -> None:
    """Copies `tensors` into the module's tensors of the same names."""
    if tensors:
        with torch.no_grad():
            for name, tensor in named_tensors(module):
                if name in tensors:
                    tensor.copy_(tensors[name])


def needs_calibration(context: Context) -> bool:
    """Whether a finished network still needs batch-norm statistics."""
    return context.tricks.batch_norm in ("batch", "calibrated") and bool(batch_norms(context.template))


def _names(sub_model: SubModel) -> tuple[int, int, int]:
    ticket = sub_model.ticket
    return int(ticket["seed"]), int(ticket["round"]), int(ticket["client"])
