"""FIARSE, by channels: a client trains the channels whose weights are the largest, chosen anew in every round.

Wu, Wang, Wang, Liu, Su, Gao. "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction".
NeurIPS 2024.

    symbol          here                            shape
    x               state.tensors                   full network
    p               size.width                      scalar
    |x|             magnitudes(group, x)            a number for every unit of a width group
    M_p             important(context, x, p)        the ceil(p n) units of every group with the largest ones

Equation index: the sub-model of what has a magnitude above the client's threshold -> `important`; the mean of every
entry over the clients whose sub-model has it -> `FIARSE.aggregate`.

The larger a unit's weights, the more clients train it, and a smaller sub-model lies inside every larger one of the
same round. No importance is stored or sent: it is in the weights.

Departures, from the abstract and the authors' code: they choose single entries, in the whole network or in each
layer. Such a mask saves neither time nor memory in training, since a layer with zeros computes as much as one
without, and a client would hold the full network; its indices travel too. Here whole units are chosen, by the sum of
the magnitudes of their weights, so that a small client trains a small network, whose entries are fewer by the square
of the width. Their gradient weighs a kept entry by up to 1.5 where it is near the threshold; here gradients are
plain. Norms and biases follow their unit; the authors leave norms out of the mask. As in the authors' code, all
clients count alike, and losses and classifiers are plain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anysize.elastic.axes import Group, Kept
from anysize.elastic.skeleton import fill
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.kit import checked, class_weights, cut, sub_model
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.size import Size
from anysize.methods.training import Tricks
from anysize.wire import Tensors


@dataclass(frozen=True)
class FIARSEState:
    """The full network's tensors."""

    tensors: Tensors


@dataclass(frozen=True)
class FIARSE(Method[FIARSEState]):
    """The channels of one network with the largest weights."""

    summary = "the channels with the largest weights, chosen anew every round (by channels, after Wu et al. 2024)"
    paper = Tricks(batch_norm="batch", weighting="clients")

    def sizes(self, context: Context) -> Sequence[Size]:
        """The trained sizes and the full network."""
        return context.sizes if context.largest.width == 1 else (*context.sizes, Size(1.0))

    def init(self, context: Context) -> FIARSEState:
        return FIARSEState(dict(context.start()))

    def extract(self, context: Context, state: FIARSEState, client: Client) -> SubModel:
        width = client.size.width
        return sub_model(client, cut(context, state.tensors, important(context, state.tensors, width)), width=width)

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        return fill(context.skeleton(sub_model.width), sub_model.tensors)

    def aggregate(self, context: Context, state: FIARSEState, updates: Iterable[Update]) -> FIARSEState:
        """The mean of every entry over its holders, at the places that the state before the round gave it."""
        mean = context.average(state.tensors, context.axes.head)
        for update in checked(context, updates):
            kept = important(context, state.tensors, update.width)
            index = {name: context.axes.index(name, kept) for name in update.tensors}
            mean.add(update.tensors, update.weight(context.tricks), index, class_weights(context, update))
        return FIARSEState(mean.result())

    def customize(self, context: Context, state: FIARSEState, size: Size) -> nn.Module:
        kept = important(context, state.tensors, size.width)
        return fill(context.skeleton(size.width), cut(context, state.tensors, kept))


def important(context: Context, tensors: Mapping[str, Tensor], width: float) -> Kept:
    """M_p: as many units of every group as the width keeps, those with the largest weights; of equals, the first."""
    counts = context.axes.kept(width)
    if any(tensor.is_meta for tensor in tensors.values()):  # what a size costs is told from shapes, which are the same
        return counts
    chosen = {}
    for group in context.axes.groups:
        if not group.fixed:
            order = magnitudes(group, tensors).argsort(descending=True, stable=True)
            chosen[group.name] = sorted(order[: counts.count(group.name)].tolist())
    return context.axes.kept(chosen)


def magnitudes(group: Group, tensors: Mapping[str, Tensor]) -> Tensor:
    """For every unit of a group, the sum of the magnitudes of all weights that it has; (units,).

    >>> from anysize.elastic.axes import Member
    >>> group = Group("0", 2, (Member("0.weight", 0, (0, 1)), Member("1.weight", 1, (0, 1))))
    >>> weights = {"0.weight": torch.tensor([[1.0], [-3.0]]), "1.weight": torch.tensor([[4.0, 0.5]])}
    >>> magnitudes(group, weights).tolist()
    [5.0, 3.5]
    """
    total = torch.zeros(group.size + 1, dtype=torch.float64)  # the last one: elements of no unit of this group
    for member in group.members:
        weight = tensors.get(member.name)  # a shared weight stands there under one of its names
        if weight is None or weight.dim() < 2 or not weight.is_floating_point():
            continue
        sums = weight.abs().movedim(member.axis, 0).flatten(1).sum(1, dtype=torch.float64)
        total.index_add_(0, torch.tensor(member.units) % (group.size + 1), sums)
    return total[:-1]
