"""The client's side: train, calibrate, evaluate. One loop for all methods.

Each of the three jobs takes a sub-model and the client's data and returns an update, so an engine needs only one type
of message. The result depends on the message and the data alone: it is equal bit for bit wherever it runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from anysize.client.accelerators import brought, moved, place
from anysize.client.batches import batches, draw, local_batches, names_of
from anysize.client.metrics import EVALUATION_BATCH, measure
from anysize.client.networks import built, load_into
from anysize.client.optimizer import make_optimizer
from anysize.client.precision import LossScale
from anysize.client.step import TrainingStep, client_loss, copies_of
from anysize.data import Part, Share
from anysize.elastic.norm import Statistics, attach, batch_norms, collect, norm_tensors
from anysize.elastic.skeleton import named_tensors
from anysize.errors import DataError, MethodError
from anysize.methods.base import Method
from anysize.methods.capabilities import CarriesMomentum
from anysize.methods.context import Context
from anysize.methods.messages import SubModel, Update
from anysize.rng import derive, generator
from anysize.tasks import label_set
from anysize.wire import Json, Tensors, under

STATISTICS = "statistics/"

CALIBRATION_PASSES = 2
"""The first pass normalises by each client's own batches, which differ from client to client; in the second all
normalise by the first one's statistics, as the finished network will."""


def perform(
    context: Context, method: Method[Any], sub_model: SubModel, share: Share, kept: Mapping[str, Tensor] | None = None
) -> Update:
    """Do the job of the ticket: "train", "calibrate", "evaluate" or "echo".

    Args:
        context: what server and client both know.
        method: the method.
        sub_model: what the server sent.
        share: the client's data.
        kept: tensors that stayed with this client at its last turn.
    """
    job = {"train": train, "calibrate": calibrate, "evaluate": evaluate, "echo": echo}[sub_model.ticket.job]
    with global_seed(derive(*names_of(sub_model), "layers"), context.device):
        return job(context, method, sub_model, share, kept or {})


@contextmanager
def global_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators, which layers such as dropout use; restore the processor's afterwards.

    `torch.manual_seed` also prepares devices that do not exist, which takes two milliseconds.
    """
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
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
    optimizer = make_optimizer(context, method, module, sub_model.ticket.rate or 0.0)
    momentum = method.momentum_buffers(module) if isinstance(method, CarriesMomentum) else {}
    for parameter, buffer in momentum.items():
        optimizer.state[parameter]["momentum_buffer"].copy_(buffer)
    classes = held_classes(context, share.train)
    loss = client_loss(
        context,
        method,
        module,
        as_received(context, module, sub_model, own),
        classes=None if classes is None else classes.to(context.device),
        random=generator(*names_of(sub_model), "step"),
        attacks=generator(*names_of(sub_model), "attack"),
    )
    take = TrainingStep(loss, optimizer, context.training.clip, scale=LossScale.of(context.training))
    loss_sum, seen = torch.zeros((), device=context.device), 0
    for number, batch in enumerate(local_batches(context, sub_model, share.train)):
        loss_sum += take(batch, number) * len(batch.y)
        seen += len(batch.y)
    for parameter, buffer in momentum.items():
        buffer.copy_(optimizer.state[parameter]["momentum_buffer"])
    told = learned(context, sub_model, len(share.train), float(loss_sum) / seen, classes)
    update = method.pack(module, sub_model)
    # The module trains the next client too, so copy what leaves it.
    tensors = brought(update.tensors, context.device)
    # A client may train another part of the network at each turn: what it keeps of the others stays.
    keep = {**kept, **{name: tensors.pop(name) for name in local}} if local else {}
    return replace(update, tensors=tensors, keep=keep, **told)


def learned(context: Context, sub_model: SubModel, samples: int, mean_loss: float, classes: Tensor | None) -> Json:
    """What a client tells about its training besides the tensors; an error if its loss is not finite."""
    if not math.isfinite(mean_loss):
        raise MethodError(
            f"round {sub_model.ticket.round}: the loss of client {sub_model.ticket.client} is {mean_loss}: "
            "training diverged. Lower training.learning_rate or set training.clip; what was saved before stays"
        )
    # Label sets leave a client only if the chosen tricks need them and the experiment allows it.
    wanted = context.tricks.classwise_head and "labels" in context.tells
    held = classes.int().tolist() if classes is not None and wanted else None
    if context.private:
        return {"samples": None, "loss": None, "classes": None}
    return {"samples": samples if "samples" in context.tells else None, "loss": mean_loss, "classes": held}


def calibrate(
    context: Context, method: Method[Any], sub_model: SubModel, share: Share, kept: Mapping[str, Tensor]
) -> Update:
    """Statistics of the inputs of each batch-norm over the client's training data; forward only.

    A message without statistics is the first pass: the network normalises by its batches. In later passes the network
    normalises by the statistics of the message, so that inputs do not depend on which samples share a batch.
    """
    module = with_fixed_statistics(context, method, sub_model)
    order = torch.randperm(len(share.train), generator=generator(*names_of(sub_model), "calibrate"))
    order = order[: sub_model.ticket.calibration_samples]
    fixed = any(name.startswith(STATISTICS) for name in sub_model.tensors)  # then batches may have any size
    drawn = (draw(share.train, i) for i in batches(order, EVALUATION_BATCH if fixed else context.training.batch_size))
    found = collect(module, (moved(batch.x, context.device) for batch in drawn))
    if len(order) == 1:  # it occurred twice in its batch
        found = replace(found, counts=tuple(count / 2 for count in found.counts))
    if "samples" not in context.tells:  # as means per sample, so that all clients count equally
        found = replace(found, counts=tuple(count / len(order) for count in found.counts))
    return Update({name: tensor.cpu() for name, tensor in found.tensors().items()}, sub_model.ticket)


def evaluate(
    context: Context, method: Method[Any], sub_model: SubModel, share: Share, kept: Mapping[str, Tensor]
) -> Update:
    """Sums and counts of the metrics on the client's holdout."""
    if share.held_out is None:
        raise DataError(f"client {sub_model.ticket.client} has no holdout; set data.validation above 0")
    module = with_fixed_statistics(context, method, sub_model)
    load_into(module, fitting(module, local_names(context, module), kept))
    sums = measure(context, module, share.held_out, sub_model.ticket.batch_size or EVALUATION_BATCH)
    count = len(share.held_out)
    if "samples" in context.tells:
        return Update({}, sub_model.ticket, samples=count, sums=sums)
    means = {name: value / count for name, value in sums.items()}  # so every client counts the same
    return Update({}, sub_model.ticket, sums=means)


def echo(
    context: Context, method: Method[Any], sub_model: SubModel, share: Share, kept: Mapping[str, Tensor]
) -> Update:
    """The message's tensors, unchanged."""
    return Update(sub_model.tensors, sub_model.ticket)


def with_fixed_statistics(context: Context, method: Method[Any], sub_model: SubModel) -> nn.Module:
    """The built network, with the batch-norm statistics of the message attached, if it has any."""
    plain = {name: tensor for name, tensor in sub_model.tensors.items() if not name.startswith(STATISTICS)}
    sent = under(STATISTICS, sub_model.tensors)
    module = built(context, method, replace(sub_model, tensors=plain), fixed=bool(sent))
    return place(attach(module, Statistics.of(sent)), context.device) if sent else module


def with_statistics(sub_model: SubModel, statistics: Statistics) -> SubModel:
    """The sub-model with batch-norm statistics, for `calibrate` and `evaluate`."""
    named = {STATISTICS + name: tensor for name, tensor in statistics.tensors().items()}
    return replace(sub_model, tensors={**sub_model.tensors, **named})


def calibrated(context: Context, method: Method[Any], sub_model: SubModel, share: Share) -> SubModel:
    """The sub-model with the batch-norm statistics of a share; as it is if its network needs none.

    Args:
        context: the client's.
        method: the method.
        sub_model: a message that asks to calibrate.
        share: the data.
    """
    if not needs_calibration(context):
        return sub_model
    found = sub_model
    for _ in range(CALIBRATION_PASSES):
        found = with_statistics(sub_model, Statistics.of(perform(context, method, found, share).tensors))
    return found


def as_received(
    context: Context, module: nn.Module, sub_model: SubModel, kept: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """The module's tensors before training: those of the message if the names match, else copies."""
    arrived = {**sub_model.tensors, **kept}
    if all(name in arrived for name, _ in module.named_parameters()):
        return {name: moved(tensor, context.device) for name, tensor in arrived.items()}
    return copies_of(module)


def held_classes(context: Context, part: Part) -> Tensor | None:
    """For each class, whether the client's training data has it; None if the task has no classes."""
    labels = part.labels()
    if context.task.class_axis is None or context.classes is None or labels.is_floating_point():
        return None
    return label_set(labels, context.classes)


def local_names(context: Context, module: nn.Module) -> list[str]:
    """Names of the tensors that never leave the client."""
    return list(norm_tensors(module)) if context.tricks.batch_norm == "local" else []


def fitting(module: nn.Module, names: Collection[str], kept: Mapping[str, Tensor]) -> Tensors:
    """The kept tensors that fit the module; a client whose capacity changed starts with new norm layers."""
    shapes = {name: tensor.shape for name, tensor in named_tensors(module)}
    return {name: kept[name] for name in names if name in kept and kept[name].shape == shapes[name]}


def needs_calibration(context: Context) -> bool:
    """Whether a finished network still needs batch-norm statistics."""
    return context.tricks.batch_norm in ("batch", "calibrated") and bool(batch_norms(context.template))
