"""What methods are made of: cutting and pasting tensors, nested networks, checks of updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from anysize.elastic.axes import Kept
from anysize.elastic.ensemble import scaled_to_own_width
from anysize.elastic.slicing import scatter_, take
from anysize.elastic.views import Nested
from anysize.errors import MethodError
from anysize.methods.context import Context
from anysize.methods.messages import Client, SubModel, Ticket, Update
from anysize.methods.training import Batch, Step
from anysize.wire import Tensors


def sub_model(client: Client, tensors: Tensors, *, width: float, parts: Iterable[str] = (), **more: Any) -> SubModel:
    """The message to a client.

    Args:
        client: to whom.
        tensors: what it receives.
        width: of the network that it will build.
        parts: the names of the parts of the whole that these are (see `Parted`).
        more: what the method's `build` or `aggregate` must know besides, as JSON.
    """
    ticket = Ticket(client.id, client.round, client.seed, client.size.label, width, client.job, more=more)
    return SubModel(tensors, ticket, tuple(parts))


def cut(context: Context, tensors: Mapping[str, Tensor], width: float | Kept) -> Tensors:
    """The full network's tensors cut to `width`, or to the units that are kept."""
    kept = context.axes.kept(width)
    return {name: take(tensor, context.axes.index(name, kept)) for name, tensor in tensors.items()}


def first_tensors(context: Context, width: float, kept: Kept | None = None) -> Tensors:
    """What a network of its own of that width starts with: a part of the full one's start.

    Without rescaled initialisation its layers are brought to the scale that a network of that width draws; a learned
    start is taken as it is.

    Args:
        context: the server's.
        width: of the network.
        kept: which units are its part; by default the first of every group.
    """
    tensors = cut(context, context.start(), width if kept is None else kept)
    if context.tricks.rescaled_init or context.pretrained:
        return tensors
    return scaled_to_own_width(tensors, context.skeleton(width), context.template)


def paste(context: Context, into: Mapping[str, Tensor], tensors: Mapping[str, Tensor], width: float) -> Tensors:
    """Copies of the full tensors `into` with the entries of a network of `width` in their places."""
    kept = context.axes.kept(width)
    full = {name: into[name].clone() for name in into}
    for name, tensor in tensors.items():
        scatter_(full[name], context.axes.index(name, kept), tensor)
    return full


def width_key(width: float) -> str:
    """The name of a width in a state that holds something for each.

    >>> width_key(1), width_key(0.25)
    ('1.0', '0.25')
    """
    return repr(float(width))


def trained_widths(context: Context) -> list[float]:
    """The distinct widths that the fleet trains, smallest first."""
    return sorted({size.width for size in context.sizes})


def check_width(context: Context, width: float, method: str) -> None:
    """Refuses a width that is not above 0, or that is larger than any client trained.

    Raises:
        MethodError: in the name of the method.
    """
    largest = context.largest.width
    if not 0 < width <= largest:
        raise MethodError(f"{method}: width {width:g} was asked for; this fleet trained widths up to {largest:g}")


def widths_up_to(context: Context, width: float) -> list[float]:
    """The distinct widths that the fleet trains and that a network of `width` holds, smallest first."""
    return sorted({size.width for size in context.sizes if size.width < width} | {width})


def nested_parts(context: Context) -> dict[str, int]:
    """`Parted.parts` of a network that holds every smaller trained one: the smallest, and what each larger one adds."""
    widths = widths_up_to(context, context.largest.width)
    counts = [trained_parameters(context.skeleton(width)) for width in widths]
    return {f"{width:g}": count - inner for width, count, inner in zip(widths, counts, [0, *counts])}


def parts_within(context: Context, width: float) -> list[str]:
    """The names of those of `nested_parts` that a network of `width` holds."""
    return [f"{own:g}" for own in widths_up_to(context, width)]


def trained_parameters(module: nn.Module) -> int:
    """How many numbers of a network are trained: its parameters that are not frozen.

    >>> trained_parameters(nn.Linear(2, 3))
    9
    """
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def nested(context: Context, sub_model: SubModel, own: Collection[str] = ()) -> Nested:
    """The skeleton of the sub-model's network and of every smaller trained one inside it.

    A client that is asked to evaluate or to calibrate runs the largest alone.

    Args:
        context: what server and client both know.
        sub_model: what the client received.
        own: names of tensors that every network has for itself.
    """
    widths = [sub_model.width] if sub_model.finished else widths_up_to(context, sub_model.width)
    return Nested([context.skeleton(width) for width in widths], context.axes, widths, own)


def loss_and_answers(network: nn.Module, batch: Batch, step: Step) -> tuple[Tensor, Tensor]:
    """The objective of a network, and its outputs in that pass, which another one can learn from."""
    answers: list[Tensor] = []
    heard = network.register_forward_hook(lambda network, inputs, output: answers.append(output))
    loss = step.objective(network, batch)
    heard.remove()
    return loss, answers[-1]


def class_weights(context: Context, update: Update) -> Tensor | None:
    """One where the client holds the class, zero elsewhere; None where the classifier is averaged like all else."""
    if not context.tricks.classwise_head or update.classes is None:
        return None
    return torch.tensor(update.classes, dtype=torch.float32)


def checked(context: Context, updates: Iterable[Update], *, numbers: bool = True) -> Iterator[Update]:
    """The updates as they stream, each refused with its client's name if it cannot be averaged.

    That is: numbers that are not finite, a number of samples that is none, classes that the task has not.
    `context.average` refuses names and shapes that do not fit.

    Args:
        context: the server's.
        updates: the updates.
        numbers: whether to look at the numbers here; if not, `sound` must see every tensor that is averaged.
    """
    for update in updates:
        if problems := list(_problems(context, update)):
            _refuse(update, [*_not_finite(update), *problems])
        if numbers and (problems := _not_finite(update)):
            _refuse(update, problems)
        yield update
        del update  # its memory is free before the next one comes


def sound(update: Update) -> Callable[[Tensor], None]:
    """Refuses the update, with its client's name, as soon as it is given a tensor with numbers that are not finite.

    An average that looks at a tensor and folds it in at once reads it from memory once.
    """

    def look(tensor: Tensor) -> None:
        if not finite(tensor):
            _refuse(update, _not_finite(update))

    return look


def _problems(context: Context, update: Update) -> Iterator[str]:
    """What is wrong with an update besides its numbers."""
    samples, classes = update.samples, update.classes
    told = samples is not None or context.tricks.weighting == "samples"
    if told and (not isinstance(samples, int | float) or not 0 < samples < math.inf):
        yield f"samples = {samples!r}; a number above 0 is needed"
    if classes is not None and (len(classes) != context.classes or not set(classes) <= {0, 1}):
        yield f"classes = {classes!r}; a 0 or 1 for each of the {context.classes} classes is needed"


def _not_finite(update: Update) -> list[str]:
    return [
        f"{name} with numbers that are not finite: lower training.learning_rate or set training.clip"
        for name, tensor in update.tensors.items()
        if not finite(tensor)
    ]


def _refuse(update: Update, problems: Sequence[str]) -> NoReturn:
    ticket = update.ticket
    raise MethodError(f"round {ticket.round}: client {ticket.client} sent {'; '.join(problems)}")


def finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite, by one sum: it is finite if they are; an overflow counts as not finite."""
    if not tensor.is_floating_point():
        return True
    narrow = tensor.element_size() < 4
    return math.isfinite((tensor.sum(dtype=torch.float32) if narrow else tensor.sum()).item())
