"""FjORD: ordered dropout. For every batch a client draws one of the widths that it can hold, and trains that one.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane. "FjORD: Fair and Accurate Federated Learning under
Heterogeneous Targets with Ordered Dropout". NeurIPS 2021.

    paper           here                                    shape
    w               state.tensors                           full network
    w_p, F_p        module.at(i), i the place of p          the first ceil(p n) channels of every width group
    p_max^i         client.size.width                       scalar
    p ~ D_P         step.choose(...)                        uniform over the trained widths up to p_max^i
    S_p             clients with width >= p                 set

Equation index: ordered dropout, section 3.1 -> `Nested.at` with `step.choose` in `FjORD.loss`; self-distillation,
section 3.2 -> `FjORD.loss` with distillation = true; aggregation of Algorithm 1, the part of w between two widths is
the mean over S_p -> `FjORD.aggregate`.

Batch-norm has one scale and shift for all widths (a width's are a prefix) and running statistics for each width, which
never mix: with [tricks] batch_norm = "tracked" a client holds statistics of every width that it may draw.

Departures:
- The aggregation weights clients by their samples, as the authors' code for Flower does; the paper writes a plain mean.
  [tricks] weighting has both.
- Distilling the largest width into itself gives no gradient, so when the largest is drawn only its own loss counts. The
  paper weights the two losses by alpha and a temperature; the authors' code for Flower has neither.
- Entries that a drawn width does not hold get gradients of zero, so momentum and weight decay still move them. So they
  do in the authors' code, where they are part of the same tensors.
- A width that was never trained uses the statistics of the next larger trained one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

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
    loss_and_answers,
    nested,
    nested_parts,
    parts_within,
    sub_model,
    width_key,
    widths_up_to,
)
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step
from anysize.wire import Tensors, by_prefix


@dataclass(frozen=True)
class FjORDState:
    """The full network's tensors without running statistics, and each width's running statistics."""

    tensors: Tensors
    statistics: dict[str, Tensors]


@dataclass(frozen=True)
class FjORD(Method[FjORDState], Parted):
    """Ordered dropout over nested widths.

    Attributes:
        distillation: on every batch, train the client's largest width on the data and the drawn width on its answers.
    """

    distillation: bool = False

    summary = "nested widths, one drawn per batch (Horváth et al. 2021)"

    def sizes(self, context: Context) -> Sequence[Size]:
        return context.sizes

    def init(self, context: Context) -> FjORDState:
        start, own = context.start(), set(statistics_names(context.template))
        statistics = {name: tensor for name, tensor in start.items() if name in own}
        return FjORDState(
            {name: tensor for name, tensor in start.items() if name not in own},
            {
                width_key(width): cut(context, statistics, width)
                for width in widths_up_to(context, context.largest.width)
            },
        )

    def extract(self, context: Context, state: FjORDState, client: Client) -> SubModel:
        width = client.size.width
        tensors = {f"network.{name}": tensor for name, tensor in cut(context, state.tensors, width).items()}
        for prefix, key in _statistics(context, width):
            tensors |= {f"{prefix}{name}": tensor for name, tensor in state.statistics[key].items()}
        return sub_model(client, tensors, width=width, parts=parts_within(context, width))

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        module = nested(context, sub_model, own=statistics_names(context.template))
        needed = ("network.",) if len(module) == 1 else ("network.", "inner.")
        return fill(module, {name: t for name, t in sub_model.tensors.items() if name.startswith(needed)})

    def loss(self, module: nn.Module, batch: Batch, step: Step) -> Tensor:
        """The loss of a width drawn at random; with distillation (section 3.2) the largest width is its teacher."""
        assert isinstance(module, Nested)
        drawn = step.choose(len(module))
        if not self.distillation:
            return step.objective(module.at(drawn), batch)
        loss, answers = loss_and_answers(module.network, batch, step)
        if drawn == len(module) - 1:
            return loss
        assert step.distillation is not None
        return loss + step.distillation(module.at(drawn), batch, answers)

    def aggregate(self, context: Context, state: FjORDState, updates: Iterable[Update]) -> FjORDState:
        """Algorithm 1: every entry is averaged over the clients that hold it, statistics over those of their width."""
        mean = context.average(state.tensors, context.axes.head)
        statistics = {key: context.average(tensors) for key, tensors in state.statistics.items()}
        own = set(statistics_names(context.template))
        for update in checked(context, updates):
            kept, weight = context.axes.kept(update.width), update.weight(context.tricks)
            parts = _parts(context, update)
            tensors = {name: tensor for name, tensor in parts["network."].items() if name not in own}
            index = {name: context.axes.index(name, kept) for name in tensors}
            mean.add(tensors, weight, index, class_weights(context, update))
            for prefix, key in _statistics(context, update.width):
                statistics[key].add({n: t for n, t in parts[prefix].items() if n in own}, weight)
        return FjORDState(mean.result(), {key: each.result() for key, each in statistics.items()})

    def customize(self, context: Context, state: FjORDState, size: Size) -> nn.Module:
        check_width(context, size.width, "fjord")
        width = min(float(key) for key in state.statistics if float(key) >= size.width)
        small, large = context.axes.kept(size.width), context.axes.kept(width)
        statistics = {
            name: take(tensor, within(context.axes, name, small, large))
            for name, tensor in state.statistics[width_key(width)].items()
        }
        return fill(context.skeleton(size.width), cut(context, state.tensors, size.width) | statistics)

    def parts(self, context: Context) -> Mapping[str, int]:
        return nested_parts(context)


def _statistics(context: Context, width: float) -> list[tuple[str, str]]:
    """(prefix in a message, key in the state) of each width whose statistics a client of `width` holds."""
    *inner, largest = widths_up_to(context, width)
    return [*((f"inner.{i}.", width_key(w)) for i, w in enumerate(inner)), ("network.", width_key(largest))]


def _parts(context: Context, update: Update) -> dict[str, Tensors]:
    """An update's tensors by part, under the names of the network."""
    prefixes = [prefix for prefix, _ in _statistics(context, update.width)]
    return by_prefix(update.tensors, prefixes, "fjord: an update")
