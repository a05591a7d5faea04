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
was trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from anysize.elastic.scaling import folded, scaled
from anysize.elastic.skeleton import fill
from anysize.elastic.views import Nested
from anysize.errors import MethodError
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.kit import checked, class_weights, cut, nested, nested_parts, sub_model, widths_up_to
from anysize.methods.mean import StreamingMean
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step, Tricks
from anysize.wire import Json, Tensors


@dataclass(frozen=True)
class HeteroFLState:
    """The full network's tensors."""

    tensors: Tensors


@dataclass(frozen=True)
class HeteroFL(Method[HeteroFLState]):
    """Prefix slices of one network.

    Attributes:
        scaler: divide the outputs of narrowed layers by the width, as dropout does, so that the full network sees
            activations as large as those that its parts were trained on.
        ordered_dropout: for every batch a client trains a random one of the trained widths up to its own (Horváth et
            al. 2021), instead of always its own.
    """

    scaler: bool = True
    ordered_dropout: bool = False

    summary = "prefix slices of one network, averaged entry by entry (Diao et al. 2021)"
    paper = Tricks(masked_loss=True, classwise_head=True, batch_norm="calibrated", weighting="clients")

    def sizes(self, context: Context) -> Sequence[Size]:
        return context.sizes

    def init(self, context: Context) -> HeteroFLState:
        return HeteroFLState(dict(context.start()))

    def extract(self, context: Context, state: HeteroFLState, client: Client) -> SubModel:
        width = client.size.width
        tensors = cut(context, state.tensors, width)
        return sub_model(client, {f"{self._prefix}{name}": t for name, t in tensors.items()}, width=width)

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
        mean = StreamingMean(state.tensors, context.axes.head)
        for update in checked(context, updates):
            kept = context.axes.kept(update.width)
            tensors = {name.removeprefix(self._prefix): tensor for name, tensor in update.tensors.items()}
            index = {name: context.axes.index(name, kept) for name in tensors}
            mean.add(tensors, update.weight(context.tricks), index, class_weights(context, update))
        return HeteroFLState(mean.result())

    def customize(self, context: Context, state: HeteroFLState, size: Size) -> nn.Module:
        if not 0 < size.width <= context.largest.width:
            raise MethodError(
                f"heterofl: width {size.width:g} was asked for; this fleet trained widths up to "
                f"{context.largest.width:g}"
            )
        network = fill(context.skeleton(size.width), cut(context, state.tensors, size.width))
        return folded(context.axes, network, size.width) if self.scaler else network

    def parts(self, context: Context, ticket: Json | None = None) -> Mapping[str, int]:
        return nested_parts(context, ticket)

    @property
    def _prefix(self) -> str:
        """The prefix of the network's names in a message: empty unless the trained module holds several networks."""
        return "network." if self.ordered_dropout else ""

    def _scaled(self, context: Context, network: nn.Module, width: float) -> nn.Module:
        """The network, changed in place: its narrowed layers divide their outputs by its width."""
        return scaled(context.axes, network, width) if self.scaler else network
