"""Which weights of a network FLANC, PriSM and FedHM write as products, and what they leave as it is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from torch import nn

from anysize.methods.context import Context

_LITTLE = 0.5  # of the trained parameters, below which a method says how few it factorises


def inner_weights(context: Context, pointwise: bool = False) -> list[str]:
    """Trained weights whose outputs change with the width and whose inputs are a layer's.

    These are what methods write in another form; a stem, projections, the classifier, norms and biases are left alone.

    Args:
        context: of the experiment.
        pointwise: include 1 x 1 convolutions, projections too.
    """
    return [name for name, kind in _left_alone(context, pointwise).items() if kind is None]


def feed_forward_weights(context: Context) -> list[str]:
    """The inner weights of a transformer's feed-forward layers: attention and the residual stream are left alone.

    They are the weights on both sides of a group of channels that nothing but linear layers has, one element a channel.
    Channels of an attention have one for each head, and those of the residual stream are in norms too.
    """
    found: set[str] = set()
    for group in context.axes.groups:
        names = [member.name for member in group.members]
        linear = all(isinstance(_layer(context, name), nn.Linear) for name in names)
        if linear and all(member.times == 1 for member in group.members):
            found.update(names)
    return [name for name in inner_weights(context) if name in found]


def factorising_notices(context: Context, method: str, rest: str, pointwise: bool = False) -> list[str]:
    """One line where less than half of the trained parameters are factorised, and none elsewhere.

    Args:
        context: of the experiment.
        method: its name.
        rest: what the method does with all that it does not factorise.
        pointwise: whether it factorises 1 x 1 convolutions.
    """
    counts: Counter[str | None] = Counter()
    for name, kind in _left_alone(context, pointwise).items():
        counts[kind] += context.template.get_parameter(name).numel()
    total, factorised = counts.total(), counts.pop(None, 0)
    if factorised >= _LITTLE * total:
        return []
    left = ", ".join(f"{count:,} in {kind}" for kind, count in counts.most_common())
    return [
        f"{method}: {factorised:,} of {total:,} trained parameters are factorised ({factorised / total:.0%}); {rest}. "
        f"Not factorised are {left}. For smaller parts of every layer, take heterofl or fjord"
    ]


def _left_alone(context: Context, pointwise: bool) -> dict[str, str | None]:
    """By name, every trained parameter: the kind for which it is left alone, or None for an inner weight."""
    members = {(member.name, member.axis) for group in context.axes.groups for member in group.members}
    trained = {name: p.shape for name, p in context.template.named_parameters() if p.requires_grad}
    return {name: _kind(context, name, shape, members, pointwise) for name, shape in trained.items()}


def _kind(
    context: Context, name: str, shape: Sequence[int], members: Collection[tuple[str, int]], pointwise: bool
) -> str | None:
    layer = _layer(context, name)
    if len(shape) < 2:
        return "norms and biases"
    if len(shape) > 2 and math.prod(shape[2:]) == 1 and not pointwise:
        return "1 x 1 convolutions"
    if not context.axes.elastic(name, 0):
        embeds = isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        return "embeddings" if embeds else "layers whose outputs no width changes, as the classifier"
    if (name, 1) not in members:
        return "depthwise convolutions" if getattr(layer, "groups", 1) > 1 else "layers that read the data"
    if any((name, axis) in members for axis in range(2, len(shape))):
        return "kernels that change with the width"  # there is no one kernel for all widths
    return None


def _layer(context: Context, name: str) -> nn.Module:
    """The layer that holds the tensor of that name."""
    return context.template.get_submodule(name.rpartition(".")[0])
