"""OrigDrop: every client trains the first channels of every layer; what no client trains is zero in the end.

A baseline of PriSM (Niu et al. 2023, section 4): it drops kernels in the original space, in order, as HeteroFL (Diao et
al. 2021) and FjORD (Horvath et al. 2021) do.

    paper           here                            shape
    W               state.tensors                   full network
    keep ratio      size.width                      the first ceil(keep n) channels of every width group

Equation index: the mean of every entry over the clients that have it -> `OrigDrop.aggregate`; the full network of a
fleet in which no client trains it -> `OrigDrop.customize`.

Departures: the paper says that it follows HeteroFL, but the authors' code has neither HeteroFL's scaler nor its masked
loss nor its treatment of the classifier, and it sets dropped kernels to zero on the server. Here they are zero in the
finished full network, unless `dropped = "kept"` leaves what no client trained as it started.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from anysize.elastic.skeleton import fill
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.kit import checked, class_weights, cut, paste, sub_model
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.size import Size
from anysize.methods.training import Tricks
from anysize.wire import Tensors


@dataclass(frozen=True)
class OrigDropState:
    """The full network's tensors."""

    tensors: Tensors


@dataclass(frozen=True)
class OrigDrop(Method[OrigDropState]):
    """Ordered dropout in the original space.

    Attributes:
        dropped: what no client trained is "zero" in the finished full network, or "kept" as it started.
    """

    dropped: Literal["zero", "kept"] = "zero"

    summary = "the first channels of every layer; what nobody trains is zero (baseline of Niu et al. 2023)"
    paper = Tricks(batch_norm="batch", weighting="clients")

    def sizes(self, context: Context) -> Sequence[Size]:
        """The trained sizes and the full network."""
        return context.sizes if context.largest.width == 1 else (*context.sizes, Size(1.0))

    def init(self, context: Context) -> OrigDropState:
        return OrigDropState(dict(context.start()))

    def extract(self, context: Context, state: OrigDropState, client: Client) -> SubModel:
        width = client.size.width
        return sub_model(client, self._cut(context, state, width), width=width)

    def aggregate(self, context: Context, state: OrigDropState, updates: Iterable[Update]) -> OrigDropState:
        mean = context.average(state.tensors, context.axes.head)
        for update in checked(context, updates):
            kept = context.axes.kept(update.width)
            index = {name: context.axes.index(name, kept) for name in update.tensors}
            mean.add(update.tensors, update.weight(context.tricks), index, class_weights(context, update))
        return OrigDropState(mean.result())

    def customize(self, context: Context, state: OrigDropState, size: Size) -> nn.Module:
        return fill(context.skeleton(size.width), self._cut(context, state, size.width))

    def _cut(self, context: Context, state: OrigDropState, width: float) -> Tensors:
        """The tensors of that width, without the entries that no client can train."""
        trained = context.largest.width
        if width <= trained or self.dropped == "kept":
            return cut(context, state.tensors, width)
        empty = {name: torch.zeros_like(tensor) for name, tensor in state.tensors.items()}
        return cut(context, paste(context, empty, cut(context, state.tensors, trained), trained), width)
