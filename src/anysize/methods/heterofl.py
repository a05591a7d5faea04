"""HeteroFL: a client trains the first channels of every layer; the server averages each entry over its holders.

Diao, Ding, Tarokh. "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients".
ICLR 2021.

    paper           here                            shape
    W_g             state.tensors                   full network
    W_l^p           cut(context, W_g, p)            the first ceil(p n) channels of every width group
    r^{p-1}         size.width                      scalar
    Scaler          scaled                          divides a layer's output by the width

Equation index: Eqs. (1)-(3), the mean of every entry over the clients whose sub-network has it ->
`HeteroFL.aggregate`; masked cross-entropy and static batch-norm -> [tricks] masked_loss, batch_norm = "calibrated"; the
authors' code averages a classifier row only over clients that hold its class -> classwise_head, and counts clients
rather than samples -> weighting = "clients".

Departures: slices follow the width groups that tracing finds, instead of rules per architecture. As in the authors'
code, the scaler follows each convolution and linear layer whose outputs are narrowed. Here it is left out between a
convolution and its batch-norm if the two are neighbours in one container, since it has almost no effect there. The
authors scale in training only and let the statistics of batch-norm absorb it in tests. Here a small network always
scales, and customising folds the scaler into its weights: without batch-norm it would otherwise not be the network that
was trained. There the scaler also makes the outputs of every layer of a narrow network larger, and training may
diverge: set `training.clip = 1.0`, as the authors' code has it for every run, or `scaler = false`.

`share = "convolutions"` is the pruning baseline of the FLANC authors (Mei et al., NeurIPS 2022), which their repository
holds as bytecode only: inner convolutions are slices of one network, all else belongs to a width and is averaged over
its clients, with plain cross-entropy, tracked batch-norm and no scaler (`scaler = false`). Theirs counts the holders of
a convolution at [:out, :out] instead of [:out, :in], so that entries are divided by the wrong number where a layer's
inputs are not its outputs; here every entry is divided by its holders. Theirs leaves the first stage of a ResNet to
each width too; here its convolutions are slices like the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from anysize.elastic.axes import Index, Kept
from anysize.elastic.scaling import folded, scaled
from anysize.elastic.skeleton import fill
from anysize.elastic.slicing import take
from anysize.elastic.views import Nested, within
from anysize.errors import MethodError
from anysize.methods.base import Method
from anysize.methods.capabilities import Parted
from anysize.methods.context import Context
from anysize.methods.factorising import inner_weights
from anysize.methods.kit import (
    check_width,
    checked,
    class_weights,
    cut,
    first_tensors,
    nested,
    nested_parts,
    parts_within,
    sound,
    sub_model,
    trained_parameters,
    width_key,
    widths_up_to,
)
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step, Tricks
from anysize.wire import Tensors


@dataclass(frozen=True)
class HeteroFLState:
    """The full network's tensors that widths share as slices, and for each width those that belong to it."""

    tensors: Tensors
    own: dict[str, Tensors] = field(default_factory=dict)


@dataclass(frozen=True)
class HeteroFL(Method[HeteroFLState], Parted):
    """Prefix slices of one network.

    Attributes:
        scaler: divide the outputs of narrowed layers by the width, as dropout does, so that the full network sees
            activations as large as those that its parts were trained on.
        ordered_dropout: for every batch a client trains a random one of the trained widths up to its own (Horváth et
            al. 2021), instead of always its own.
        share: which tensors are slices of one network: "all", or inner "convolutions" alone, with a copy of the rest
            for each width (the pruning baseline of FLANC's authors; they have no scaler).
    """

    scaler: bool = True
    ordered_dropout: bool = False
    share: Literal["all", "convolutions"] = "all"

    summary = "prefix slices of one network, averaged entry by entry (Diao et al. 2021)"
    paper = Tricks(masked_loss=True, classwise_head=True, batch_norm="calibrated", weighting="clients")

    def conflicts(self) -> Iterable[str]:
        if self.ordered_dropout and self.share == "convolutions":
            yield "ordered_dropout together with share = 'convolutions'; choose one of the two"

    @property
    def recipe(self) -> Tricks:
        return self.paper if self.share == "all" else Tricks(weighting="clients")

    def sizes(self, context: Context) -> Sequence[Size]:
        return context.sizes

    def init(self, context: Context) -> HeteroFLState:
        if self.share == "all":
            return HeteroFLState(dict(context.start()))
        shared = shared_convolutions(context)
        widths = widths_up_to(context, context.largest.width)
        first = {width_key(width): first_tensors(context, width) for width in widths}
        return HeteroFLState(
            {name: context.start()[name] for name in shared},
            {width: {n: t for n, t in tensors.items() if n not in shared} for width, tensors in first.items()},
        )

    def extract(self, context: Context, state: HeteroFLState, client: Client) -> SubModel:
        width = client.size.width
        tensors = cut(context, state.tensors, width) | state.own.get(width_key(width), {})
        parts = [*parts_within(context, width), *([_rest(width)] if state.own else [])]
        return sub_model(client, {f"{self._prefix}{name}": t for name, t in tensors.items()}, width=width, parts=parts)

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        if not self.ordered_dropout:
            network = fill(context.skeleton(sub_model.width), sub_model.tensors)
            return self._scaled(context, network, sub_model.width)
        module = fill(nested(context, sub_model), sub_model.tensors)
        assert isinstance(module, Nested)
        for network, width in zip(module.inner, widths_up_to(context, sub_model.width)):
            self._scaled(context, network, width)
        self._scaled(context, module.network, sub_model.width)
        return module

    def loss(self, module: nn.Module, batch: Batch, step: Step) -> Tensor:
        """The task's loss; with ordered dropout, the loss of a width drawn at random."""
        return step.objective(module.at(step.choose(len(module))) if isinstance(module, Nested) else module, batch)

    def aggregate(self, context: Context, state: HeteroFLState, updates: Iterable[Update]) -> HeteroFLState:
        mean = context.average(state.tensors, context.axes.head)
        own = {width: context.average(tensors, context.axes.head) for width, tensors in state.own.items()}
        indices: dict[Kept, dict[str, Index]] = {}
        for update in checked(context, updates, numbers=False):
            kept, weight, classes = (
                context.axes.kept(update.width),
                update.weight(context.tricks),
                class_weights(context, update),
            )
            tensors = {name.removeprefix(self._prefix): tensor for name, tensor in update.tensors.items()}
            if own:
                if width_key(update.width) not in own:
                    raise MethodError(f"heterofl: an update has width {update.width}; allowed: {', '.join(own)}")
                rest = {name: tensor for name, tensor in tensors.items() if name not in state.tensors}
                own[width_key(update.width)].add(rest, weight, classes=classes, look=sound(update))
                tensors = {name: tensor for name, tensor in tensors.items() if name in state.tensors}
            if kept not in indices:
                indices[kept] = {name: context.axes.index(name, kept) for name in tensors}
            mean.add(tensors, weight, indices[kept], classes, look=sound(update))
        return HeteroFLState(mean.result(), {width: each.result() for width, each in own.items()})

    def customize(self, context: Context, state: HeteroFLState, size: Size) -> nn.Module:
        check_width(context, size.width, "heterofl")
        tensors = cut(context, state.tensors, size.width) | _nearest(context, state, size.width)
        network = fill(context.skeleton(size.width), tensors)
        return folded(context.axes, network, size.width) if self.scaler else network

    def parts(self, context: Context) -> Mapping[str, int]:
        if self.share == "all":
            return nested_parts(context)
        widths = widths_up_to(context, context.largest.width)
        counts = [_convolution_parameters(context, width) for width in widths]
        parts = {f"{width:g}": count - inner for width, count, inner in zip(widths, counts, [0, *counts])}
        return parts | {_rest(w): trained_parameters(context.skeleton(w)) - count for w, count in zip(widths, counts)}

    @property
    def _prefix(self) -> str:
        """The prefix of the network's names in a message: empty unless the trained module holds several networks."""
        return "network." if self.ordered_dropout else ""

    def _scaled(self, context: Context, network: nn.Module, width: float) -> nn.Module:
        """The network, changed in place: its narrowed layers divide their outputs by its width."""
        return scaled(context.axes, network, width) if self.scaler else network


def shared_convolutions(context: Context) -> set[str]:
    """The weights that all widths share if only inner convolutions are slices; refuses a network that has none."""
    shared = {name for name in inner_weights(context) if len(context.axes.shapes[name]) > 2}
    if not shared:
        raise MethodError(
            "heterofl: share = 'convolutions', but the model has no convolution whose inputs and outputs both change "
            "with the width (1 x 1 convolutions do not count); widths would share nothing. Take share = 'all'"
        )
    return shared


def _rest(width: float) -> str:
    """The name of the part that belongs to one width alone."""
    return f"rest of {width:g}"


def _nearest(context: Context, state: HeteroFLState, width: float) -> Tensors:
    """The tensors that belong to a width; of a width that was never trained, parts of the next larger one's."""
    if not state.own:
        return {}
    nearest = min(trained for trained in map(float, state.own) if trained >= width)
    small, large = context.axes.kept(width), context.axes.kept(nearest)
    return {n: take(t, within(context.axes, n, small, large)) for n, t in state.own[width_key(nearest)].items()}


def _convolution_parameters(context: Context, width: float) -> int:
    shapes = (context.axes.shape(name, context.axes.kept(width)) for name in shared_convolutions(context))
    return sum(math.prod(shape) for shape in shapes)
