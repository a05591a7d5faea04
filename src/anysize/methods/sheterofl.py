"""SHeteroFL: HeteroFL in which a client trains all widths that it can afford, in every step.

Hong, Wang, Wang, Zhou. "Efficient Split-Mix Federated Learning for On-Demand and In-Situ Customization". ICLR 2022,
sections 4.1 and 5.1: HeteroFL (Diao et al. 2021) extended by bounded slimmable training (Yu et al. 2018).

    paper           here                            shape
    W               state.tensors                   full network
    R_k             client.size.width               scalar
    x R net         nested.at(i)                    the first ceil(R n) channels of every width group
    BN per width    state.statistics[width]         running statistics, where they are tracked

Equation index: the sum of the losses of all affordable widths, smallest first, and one step -> `SHeteroFL.loss`; upload
of the largest one, and the mean of every entry over the clients whose largest width has it -> `SHeteroFL.aggregate`.

Departures: the authors run a backward pass after each width; here one backward pass over the sum of the losses gives
the same gradient, at the cost of holding all widths' activations at once. Scaling is that of `methods/heterofl.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

import anysize.methods.nesting as nesting
from anysize.elastic.scaling import folded, scaled
from anysize.elastic.views import Nested, statistics_names
from anysize.methods.base import Method
from anysize.methods.capabilities import Parted
from anysize.methods.context import Context
from anysize.methods.kit import check_width, nested_parts
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step, Tricks
from anysize.wire import Tensors


@dataclass(frozen=True)
class SHeteroFLState:
    """The full network's tensors, and each trained width's batch-norm statistics."""

    tensors: Tensors
    statistics: dict[str, Tensors]


@dataclass(frozen=True)
class SHeteroFL(Method[SHeteroFLState], Parted):
    """Prefix slices of one network, every affordable one trained in every step.

    Attributes:
        scaler: divide the outputs of narrowed layers by the width, as HeteroFL does.
    """

    scaler: bool = True

    summary = "HeteroFL whose clients train all widths they can afford in every step (Hong et al. 2022)"
    paper = Tricks(masked_loss=True, batch_norm="batch")

    def sizes(self, context: Context) -> Sequence[Size]:
        return context.sizes

    def init(self, context: Context) -> SHeteroFLState:
        return SHeteroFLState(*nesting.start(context, statistics_names(context.template)))

    def extract(self, context: Context, state: SHeteroFLState, client: Client) -> SubModel:
        return nesting.message(context, state.tensors, state.statistics, client)

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        nested, widths = nesting.network(context, sub_model, statistics_names(context.template))
        if self.scaler:
            for width, network in zip(widths, (*nested.inner, nested.network)):
                scaled(context.axes, network, width)
        return nested

    def loss(self, module: nn.Module, batch: Batch, step: Step) -> Tensor:
        """The sum of the losses of all affordable widths, smallest first."""
        assert isinstance(module, Nested)
        losses = [step.objective(module.at(place), batch) for place in range(len(module))]
        return sum(losses[1:], start=losses[0])

    def aggregate(self, context: Context, state: SHeteroFLState, updates: Iterable[Update]) -> SHeteroFLState:
        """The mean of every entry over the clients that hold it; of statistics, over those that trained the width."""
        return SHeteroFLState(*nesting.averaged(context, state.tensors, state.statistics, updates, "sheterofl"))

    def customize(self, context: Context, state: SHeteroFLState, size: Size) -> nn.Module:
        check_width(context, size.width, "sheterofl")
        network = nesting.finished(context, state.tensors, state.statistics, size.width)
        return folded(context.axes, network, size.width) if self.scaler else network

    def parts(self, context: Context) -> Mapping[str, int]:
        return nested_parts(context)
