"""Nested widths of one network whose norms have something of their own: what SHeteroFL and Ladder send and average.

A state holds the full network's tensors, and for each trained width the tensors that it does not share: batch-norm
statistics, or whole norm layers. A message holds a slice of the former, and of the latter those of every width that a
client trains.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from anysize.elastic.skeleton import fill
from anysize.elastic.slicing import take
from anysize.elastic.views import Nested, within
from anysize.methods.context import Context
from anysize.methods.kit import checked, class_weights, cut, parts_within, sub_model, trained_widths, width_key
from anysize.methods.messages import Client, SubModel, Update
from anysize.wire import Tensors, by_prefix

Owned = dict[str, Tensors]
"""By width, the tensors that it does not share."""


def affordable(context: Context, width: float, job: str) -> list[float]:
    """The widths of the networks that a client holds: all that it can afford when it trains, else its own."""
    return [own for own in trained_widths(context) if own <= width] if job == "train" else [width]


def start(context: Context, own: Collection[str]) -> tuple[Tensors, Owned]:
    """The full network's first tensors, and what each width has of those named in `own`."""
    first = context.start()
    apart = {name: first[name] for name in own}
    shared = {name: tensor for name, tensor in first.items() if name not in apart}
    return shared, {width_key(width): cut(context, apart, width) for width in trained_widths(context)}


def message(context: Context, shared: Tensors, owned: Owned, client: Client) -> SubModel:
    """What a client receives: its slice, and what the widths that it trains have of their own."""
    *smaller, width = affordable(context, client.size.width, client.job)
    tensors = cut(context, shared, width) | owned[width_key(width)]
    named = {f"network.{name}": tensor for name, tensor in tensors.items()}
    for i, inner in enumerate(smaller):
        named |= {f"inner.{i}.{name}": tensor for name, tensor in owned[width_key(inner)].items()}
    return sub_model(client, named, width=width, parts=parts_within(context, width))


def network(context: Context, sub_model: SubModel, own: Collection[str]) -> tuple[Nested, Sequence[float]]:
    """The client's networks over one set of tensors, and their widths, smallest first."""
    widths = affordable(context, sub_model.width, sub_model.ticket.job)
    made = fill(Nested([context.skeleton(width) for width in widths], context.axes, widths, own), sub_model.tensors)
    assert isinstance(made, Nested)
    return made, widths


def averaged(
    context: Context, shared: Tensors, owned: Owned, updates: Iterable[Update], method: str
) -> tuple[Tensors, Owned]:
    """The mean of every entry over the clients that hold it; of what a width owns, over those that trained it."""
    mean = context.average(shared, context.axes.head)
    means = {width: context.average(tensors) for width, tensors in owned.items()}
    for update in checked(context, updates):
        weight, kept = update.weight(context.tricks), context.axes.kept(update.width)
        own, parts = _parts(context, update, shared, method)
        index = {name: context.axes.index(name, kept) for name in own}
        mean.add(own, weight, index, class_weights(context, update))
        for width, tensors in parts.items():
            means[width].add(tensors, weight)
    return mean.result(), {width: found.result() for width, found in means.items()}


def finished(context: Context, shared: Tensors, owned: Owned, width: float) -> nn.Module:
    """The network of a width; one that no client trained has a slice of what the next larger one owns."""
    nearest = min(trained for trained in trained_widths(context) if trained >= width)
    kept, near = context.axes.kept(width), context.axes.kept(nearest)
    own = {n: take(t, within(context.axes, n, kept, near)) for n, t in owned[width_key(nearest)].items()}
    return fill(context.skeleton(width), cut(context, shared, width) | own)


def _parts(context: Context, update: Update, shared: Tensors, method: str) -> tuple[Tensors, Owned]:
    """An update's entries of the full network, and by width what it owns."""
    *smaller, width = affordable(context, update.width, "train")
    prefixes = {f"inner.{i}.": inner for i, inner in enumerate(smaller)} | {"network.": width}
    found = by_prefix(update.tensors, prefixes, f"{method}: an update of width {update.width:g}")
    tensors = {name: tensor for name, tensor in found["network."].items() if name in shared}
    found["network."] = {name: tensor for name, tensor in found["network."].items() if name not in shared}
    return tensors, {width_key(prefixes[prefix]): own for prefix, own in found.items() if own}
