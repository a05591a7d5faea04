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

from anysize.elastic.scaling import folded, scaled
from anysize.elastic.skeleton import fill
from anysize.elastic.slicing import take
from anysize.elastic.views import Nested, statistics_names, within
from anysize.methods.base import Method
from anysize.methods.capabilities import Parted
from anysize.methods.context import Context
from anysize.methods.kit import (
    check_width,
    checked,
    class_weights,
    cut,
    nested_parts,
    parts_within,
    sub_model,
    trained_widths,
    width_key,
)
from anysize.methods.mean import StreamingMean
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step, Tricks
from anysize.wire import Tensors, by_prefix


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
        start = context.start()
        own = {name: start[name] for name in statistics_names(context.template)}
        tensors = {name: tensor for name, tensor in start.items() if name not in own}
        return SHeteroFLState(
            tensors, {width_key(width): cut(context, own, width) for width in trained_widths(context)}
        )

    def extract(self, context: Context, state: SHeteroFLState, client: Client) -> SubModel:
        *smaller, width = _trained(context, client.size.width, client.job)
        tensors = cut(context, state.tensors, width) | state.statistics[width_key(width)]
        named = {f"network.{name}": tensor for name, tensor in tensors.items()}
        for i, inner in enumerate(smaller):
            named |= {f"inner.{i}.{name}": tensor for name, tensor in state.statistics[width_key(inner)].items()}
        return sub_model(client, named, width=width, parts=parts_within(context, width))

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        widths = _trained(context, sub_model.width, sub_model.ticket.job)
        skeletons = [context.skeleton(width) for width in widths]
        own = statistics_names(context.template)
        nested = fill(Nested(skeletons, context.axes, widths, own), sub_model.tensors)
        assert isinstance(nested, Nested)
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
        mean = StreamingMean(state.tensors, context.axes.head)
        statistics = {width: StreamingMean(tensors) for width, tensors in state.statistics.items()}
        for update in checked(context, updates):
            weight, kept = update.weight(context.tricks), context.axes.kept(update.width)
            own, parts = _parts(context, update, set(state.tensors))
            index = {name: context.axes.index(name, kept) for name in own}
            mean.add(own, weight, index, class_weights(context, update))
            for width, tensors in parts.items():
                statistics[width].add(tensors, weight)
        return SHeteroFLState(mean.result(), {width: found.result() for width, found in statistics.items()})

    def customize(self, context: Context, state: SHeteroFLState, size: Size) -> nn.Module:
        width = size.width
        check_width(context, width, "sheterofl")
        # A width that no client trained has no statistics, only a slice of those of the next larger one.
        nearest = min(trained for trained in trained_widths(context) if trained >= width)
        kept, near = context.axes.kept(width), context.axes.kept(nearest)
        own = {n: take(t, within(context.axes, n, kept, near)) for n, t in state.statistics[width_key(nearest)].items()}
        network = fill(context.skeleton(width), cut(context, state.tensors, width) | own)
        return folded(context.axes, network, width) if self.scaler else network

    def parts(self, context: Context) -> Mapping[str, int]:
        return nested_parts(context)


def _trained(context: Context, width: float, job: str) -> list[float]:
    """The widths of the networks that a client holds: all that it can afford when it trains, else its own."""
    return [own for own in trained_widths(context) if own <= width] if job == "train" else [width]


def _parts(context: Context, update: Update, shared: set[str]) -> tuple[Tensors, dict[str, Tensors]]:
    """An update's entries of the full network, and its statistics by width."""
    *smaller, width = _trained(context, update.width, "train")
    prefixes = {f"inner.{i}.": inner for i, inner in enumerate(smaller)} | {"network.": width}
    found = by_prefix(update.tensors, prefixes, f"sheterofl: an update of width {update.width:g}")
    tensors = {name: tensor for name, tensor in found["network."].items() if name in shared}
    found["network."] = {name: tensor for name, tensor in found["network."].items() if name not in shared}
    return tensors, {width_key(prefixes[prefix]): own for prefix, own in found.items() if own}
