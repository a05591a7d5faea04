"""FedRolex: a client trains a window of channels that rolls through the network from round to round.

Alam, Liu, Yan, Zhang. "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction". NeurIPS
2022.

    paper           here                            shape
    theta           state.tensors                   full network
    beta_n          size.width                      scalar
    S_{n,i}^(j)     rolled(context, beta_n, j)      ceil(beta_n K_i) neighbouring channels of layer i, from j mod K_i on

Equation index: the rolling window, which starts one channel further in every round and goes on at the first channel
when it reaches the last -> `rolled`; the mean of every entry over the clients whose window has it ->
`FedRolex.aggregate`. The authors' code extends HeteroFL's, with its masked cross-entropy, static batch-norm and
classifier rows by class -> [tricks] masked_loss, batch_norm = "calibrated", classwise_head; it counts clients rather
than samples -> weighting = "clients".

Every entry is so trained by clients of every width, and the full network may be one that no client can train. The
authors measure that one alone. Here a smaller size is the first channels of every layer, as in HeteroFL: no client
trains it as such, except when its window starts at the first channel.

Departures: windows follow the width groups that tracing finds, one place in each. The authors' code rolls the other
way than the paper, has the gradients clipped to norm 1 ([training] clip), and weighs norms and classifier by how often
an entry was trained before; here every entry has the plain mean, as in the paper. The scaler is HeteroFL's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from anysize.elastic.axes import Kept
from anysize.elastic.scaling import folded, scaled
from anysize.elastic.skeleton import fill
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.kit import checked, class_weights, cut, sub_model
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.size import Size
from anysize.methods.training import Tricks
from anysize.wire import Tensors


@dataclass(frozen=True)
class FedRolexState:
    """The full network's tensors."""

    tensors: Tensors


@dataclass(frozen=True)
class FedRolex(Method[FedRolexState]):
    """Windows of one network that roll."""

    summary = "windows of channels that roll through one network, a channel further every round (Alam et al. 2022)"
    paper = Tricks(masked_loss=True, classwise_head=True, batch_norm="calibrated", weighting="clients")

    def sizes(self, context: Context) -> Sequence[Size]:
        """The trained sizes and the full network."""
        return context.sizes if context.largest.width == 1 else (*context.sizes, Size(1.0))

    def init(self, context: Context) -> FedRolexState:
        return FedRolexState(dict(context.start()))

    def extract(self, context: Context, state: FedRolexState, client: Client) -> SubModel:
        """The window of the round; of a finished network, the first channels."""
        width = client.size.width
        kept = rolled(context, width, client.round) if client.job == "train" else context.axes.kept(width)
        return sub_model(client, cut(context, state.tensors, kept), width=width)

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        network = fill(context.skeleton(sub_model.width), sub_model.tensors)
        return scaled(context.axes, network, sub_model.width)

    def aggregate(self, context: Context, state: FedRolexState, updates: Iterable[Update]) -> FedRolexState:
        mean = context.average(state.tensors, context.axes.head)
        for update in checked(context, updates):
            kept = rolled(context, update.width, update.ticket.round)
            index = {name: context.axes.index(name, kept) for name in update.tensors}
            mean.add(update.tensors, update.weight(context.tricks), index, class_weights(context, update))
        return FedRolexState(mean.result())

    def customize(self, context: Context, state: FedRolexState, size: Size) -> nn.Module:
        network = fill(context.skeleton(size.width), cut(context, state.tensors, size.width))
        return folded(context.axes, network, size.width)


def rolled(context: Context, width: float, round: int) -> Kept:
    """The window of a width in a round, counted from 1: the first channels in the first round.

    Args:
        context: what server and client both know.
        width: of the network in the window.
        round: moves the window.
    """
    counts = context.axes.kept(width)
    return context.axes.kept(
        {
            group.name: sorted((round - 1 + i) % group.size for i in range(counts.count(group.name)))
            for group in context.axes.groups
            if not group.fixed
        }
    )
