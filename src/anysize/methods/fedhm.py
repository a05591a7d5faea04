"""FedHM: a weak client trains the most important kernels of every layer; the server averages the recomposed weights.

Yao, Pan, Wan, Jin, Sun. "FedHM: Efficient Federated Learning for Heterogeneous Models via Low-rank Factorization".
arXiv:2111.14655, 2021. It is also OrthDrop, the baseline of PriSM (Niu et al. 2023): ordered dropout in the space of
principal kernels.

    paper       here                            shape
    W           state.tensors[name]             (N, M, *k)
    U S V^T     state.left[name], right[name]   the most important kernels, as many as any constrained client has
    r           elastic.kernels.rank            ceil(keep min(N, M k^2)), keep being the width of the size

Equation index: the decomposition and its two shapes -> `elastic.kernels.principal_kernels`; the mean of the recomposed
weights -> `FedHM.aggregate`; the decay of the product -> `elastic.kernels.Factorised.regulariser`.

No channel is left out, so activations do not shrink, and a factorised layer holds one activation more than a whole
layer. A client of capacity 1 trains the network as it is. The finished full network has the server's weights; one of a
smaller size has weights of lower rank, but of the same shape.

Departures: `reshape = "rows"` is the matrix (N, M k^2) of PriSM's OrthDrop, "square" the (N k, M k) of FedHM's code,
which takes round(N / factor) kernels where this takes ceil(keep min(N, M k^2)). The first layer and 1 x 1 convolutions
are whole in both; FedHM's code leaves more of the early layers whole: name them in [model] keep. Its code weights the
classifier's rows by the classes that a client holds but does not divide by the sum of these weights, which shrinks the
rows; [tricks] classwise_head divides. Its pseudo-client is an option.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from anysize.config.values import NotNegative
from anysize.elastic.kernels import (
    Factorised,
    Reshape,
    factorised_network,
    named,
    principal_kernels,
    rank,
    recomposed,
    recomposed_network,
    sides,
)
from anysize.elastic.skeleton import fill
from anysize.errors import MethodError
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.factorising import factorising_notices, inner_weights
from anysize.methods.kit import checked, class_weights, sub_model
from anysize.methods.messages import Client, ParameterGroup, SubModel, Update
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step, Tricks
from anysize.wire import Tensors


@dataclass(frozen=True)
class FedHMState:
    """The full network's tensors, and the kernels of its inner weights that constrained clients get."""

    tensors: Tensors
    left: Tensors
    right: Tensors


@dataclass(frozen=True)
class FedHM(Method[FedHMState]):
    """The top kernels for every client (OrthDrop).

    Attributes:
        reshape: the matrix of a convolution: "rows" (N, M k^2) or "square" (N k, M k).
        frobenius: the decay of the product of the factors, as a multiple of training.weight_decay; 0 is off.
        pseudo_client: in a round without a client of capacity 1, the server's weights count as one more client's.
    """

    reshape: Reshape = "rows"
    frobenius: NotNegative = 1.0
    pseudo_client: bool = False

    summary = "the same top principal kernels for all clients of a size, recomposed and averaged (Yao et al. 2021)"
    paper = Tricks(batch_norm="batch", weighting="clients")
    exceptions: ClassVar[Mapping[str, str]] = {
        "unchanged_updates": "the kernels that a client does not get are missing from what it sends",
        "cost_is_monotone": "a factorised layer can hold more than a whole one: 143 % at 0.8 in PriSM's Table 1",
    }

    def sizes(self, context: Context) -> Sequence[Size]:
        """The trained sizes and the full network, whose weights are the mean of the recomposed ones."""
        return context.sizes if context.largest.width == 1 else (*context.sizes, Size(1.0))

    def init(self, context: Context) -> FedHMState:
        tensors = dict(context.start())
        return FedHMState(tensors, *self._kernels(context, tensors))

    def extract(self, context: Context, state: FedHMState, client: Client) -> SubModel:
        left, right = truncated(state, client.size.width)
        rest = {name: tensor for name, tensor in state.tensors.items() if name not in left}
        return sub_model(client, named(left, right, rest), width=1.0, keep=client.size.width)

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        skeleton = context.skeleton(1.0)
        if sub_model.finished:
            return recomposed_network(skeleton, sub_model.tensors)
        return factorised_network(skeleton, sub_model.tensors, self.frobenius * context.training.weight_decay)

    def groups(self, module: nn.Module) -> list[ParameterGroup]:
        """The factors have no weight decay, since decaying each factor would not decay their product."""
        assert isinstance(module, Factorised)
        return [ParameterGroup(module.dense()), ParameterGroup(module.factors(), decay=0.0)]

    def loss(self, module: nn.Module, batch: Batch, step: Step) -> Tensor:
        assert isinstance(module, Factorised)
        return step.objective(module, batch) + module.regulariser()

    def aggregate(self, context: Context, state: FedHMState, updates: Iterable[Update]) -> FedHMState:
        """The mean of the weights that the clients' kernels make, and that mean's kernels for the next round."""
        mean = context.average(state.tensors, context.axes.head)
        whole, total, count = False, 0.0, 0
        for update in checked(context, updates):
            weight, own = update.weight(context.tricks), sides(update.tensors)
            self._check(state, update, own)
            weights = recomposed(own["left"], own["right"])
            whole, total, count = whole or not weights, total + weight, count + 1
            mean.add(weights | own["network"], weight, classes=class_weights(context, update))
        if self.pseudo_client and count and not whole:
            mean.add(state.tensors, total / count)
        tensors = mean.result()
        return FedHMState(tensors, *self._kernels(context, tensors))

    def customize(self, context: Context, state: FedHMState, size: Size) -> nn.Module:
        largest = max((s.width for s in context.sizes if s.width < 1), default=1.0)
        if size.width != 1 and not 0 < size.width <= largest:
            raise MethodError(f"fedhm: size {size.width:g} was asked for; allowed: 1, or sizes up to {largest:g}")
        return fill(context.skeleton(1.0), state.tensors | recomposed(*truncated(state, size.width)))

    def notices(self, context: Context) -> list[str]:
        return factorising_notices(context, "fedhm", "every client trains the rest whole, whatever its capacity")

    def _check(self, state: FedHMState, update: Update, own: Mapping[str, Tensors]) -> None:
        """Refuse factors whose shapes are not those that were sent; their product would not show it."""
        left, right = truncated(state, float(update.ticket.more["keep"]))
        wanted = {name: tensor.shape for name, tensor in named(left, right, {}).items()}
        given = {name: tensor.shape for name, tensor in named(own["left"], own["right"], {}).items()}
        if wanted != given:
            wrong = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
            raise MethodError(f"fedhm: client {update.ticket.client} sent factors of other shapes: {', '.join(wrong)}")

    def _kernels(self, context: Context, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """The kernels of the largest constrained client; none if no client is constrained."""
        keep = max((size.width for size in context.sizes if size.width < 1), default=None)
        left: Tensors = {}
        right: Tensors = {}
        for name in inner_weights(context) if keep is not None else []:
            assert keep is not None
            kernels, count = principal_kernels(tensors[name], self.reshape), rank(tensors[name].shape, keep)
            left[name], right[name] = kernels.left[:, :count].contiguous(), kernels.right[:count].contiguous()
        return left, right


def truncated(state: FedHMState, keep: float) -> tuple[Tensors, Tensors]:
    """The most important kernels, as many as a client with that keep ratio gets; none at 1: weights stay whole."""
    if keep == 1:
        return {}, {}
    counts = {name: rank(state.tensors[name].shape, keep) for name in state.left}
    left = {name: state.left[name][:, :count] for name, count in counts.items()}
    return left, {name: state.right[name][:count] for name, count in counts.items()}
