"""PriSM: every client trains a few principal kernels of every layer, drawn by importance; nobody holds the full model.

Niu, Prakash, Kundu, Lee, Avestimehr. "Overcoming Resource Constraints in Federated Learning: Large Models Can Be
Trained with only Weak Clients". Transactions on Machine Learning Research, 2023.

    paper           here                                    shape
    W               recompose(state.left, state.right)      (N, M, *k)
    sqrt(s_i) u_i   state.left[name][:, i]                  (N, 1, ...)
    sqrt(s_i) v_i   state.right[name][i]                    (M, *k)
    sigma_i         state.values[name][i]                   scalar
    keep ratio      size.width                              of the kernels, and of the channels
    r               elastic.kernels.rank(shape, keep)       ceil(keep min(N, M k^2))
    I_c             drawn(...)[name]                        (r,) sorted
    u_hat           what no client of the round had         kept as it was
    kappa           kappa                                   scalar
    lambda          training.weight_decay                   scalar

Equation index (in `elastic.kernels` unless said otherwise): Eq. (1) -> `principal_kernels`; Eq. (2) -> `draw`; Eq. (3)
-> `Pair`; Eq. (5) -> `PriSM.aggregate` and `make_part` here; Eq. (6) -> `Factorised.regulariser`; orthogonal space
refresh -> `refreshed` here, the stage "svd" of a profiled run (Table 4); the number of required kernels (section
4.4.1) -> `needed_kernels`; activation normalisation -> [tricks] batch_norm = "batch"; alpha = 1 / C_i -> weighting =
"clients".

What is decomposed: every trained weight whose outputs change with the width and whose inputs are another layer's
outputs, except 1 x 1 convolutions. That leaves the stem, projections, the classifier, norms and biases dense, as the
authors do. Recurrent weights have one decomposition over all gates, and their rows are left out gate by gate.

Departures:
- The authors mask full tensors, and in their residual networks every channel stays alive through the shortcuts, the
  stem and the projections. Here a client's network is narrowed to the channels that it computes, everywhere, so that
  it costs what Table 1 says. What follows is that entries of the stem, the classifier, norms and right factors beyond
  these channels are trained by nobody if all clients have one keep ratio and `channels = "first"`, as in the paper;
  with "drawn", which an earlier version of the authors' code had for the left factors, everything is. With "first",
  what nobody trains takes part in the decomposition and in the finished full network as it started;
  `dropped = "zero"` leaves it out of the latter.
- The paper gives the number of required kernels as 2^(-log(sum p log p)); it is meant as 2^(-sum p log2 p).
- lambda of Eq. (6) is training.weight_decay, the authors' too; a factor on it is an option.
- A finished network smaller than full is the first channels and the most important kernels. The paper has none.
- Batch-norm statistics for export are estimated by clients, by forward passes of the network at hand: those of the
  full one reach clients that could not train it. On a fleet that cannot have this, do not export it with batch-norm.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from anysize.context import Context, Size
from anysize.elastic.axes import Kept
from anysize.elastic.kernels import (
    Factorised,
    Sampling,
    draw,
    factorised_network,
    importance,
    named,
    needed_kernels,
    principal_kernels,
    rank,
    recompose,
    recomposed,
    recomposed_network,
    sides,
)
from anysize.elastic.skeleton import fill
from anysize.elastic.slicing import scatter_, take
from anysize.errors import MethodError
from anysize.methods.base import (
    Client,
    Method,
    ParameterGroup,
    SubModel,
    Update,
    checked,
    class_weights,
    inner_weights,
    sub_model,
)
from anysize.methods.mean import Index, StreamingMean
from anysize.objectives import Batch, Step, Tricks
from anysize.profiling import stage
from anysize.rng import generator
from anysize.wire import Tensors, copies

_SAMPLINGS = ("importance", "uniform", "softmax", "top")


@dataclass(frozen=True)
class PriSMState:
    """Both sides of every decomposed weight with its singular values, all other tensors, and who drew what.

    Attributes:
        left: the left factors, full.
        right: the right factors, full.
        values: the singular values.
        rest: the full network's other tensors.
        draws: how many clients have had each kernel so far, the kernels of a round in the order of their importance.
        rounds: how many rounds are behind.
    """

    left: Tensors
    right: Tensors
    values: Tensors
    rest: Tensors
    draws: Tensors
    rounds: int


@dataclass(frozen=True)
class Part:
    """A part of the state: kernels of each layer, and which entries of each tensor belong to it."""

    kernels: Mapping[str, Tensor]
    left: Mapping[str, Index]
    right: Mapping[str, Index]
    rest: Mapping[str, Index]

    def of(self, state: PriSMState) -> tuple[Tensors, Tensors, Tensors]:
        """Its entries of the left factors, the right ones and the rest."""
        pairs = ((state.left, self.left), (state.right, self.right), (state.rest, self.rest))
        left, right, rest = ({name: take(t, at[name]) for name, t in tensors.items()} for tensors, at in pairs)
        return left, right, rest


@dataclass(frozen=True)
class PriSM(Method[PriSMState]):
    """Principal probabilistic sub-models.

    Attributes:
        kappa: the smooth factor of Eq. (2); the paper has 2.5, and 4 for sub-models of 0.2.
        sampling: "importance" is Eq. (2); "uniform" and "softmax" (of the singular values) are the paper's ablation;
            "top" gives everybody the most important kernels.
        refresh_every: rounds from one decomposition to the next.
        frobenius: times training.weight_decay, the factor of Eq. (6); 0 is off.
        channels: which output channels a client computes: the "first", the same for all clients of a size (the paper),
            or some that are "drawn" for each client, so that all are trained.
        dropped: with `channels = "first"`, what nobody trained is "kept" as it started (the paper) or "zero" in a
            finished network wider than any client's.
    """

    kappa: float = 2.5
    sampling: Sampling = "importance"
    channels: Literal["first", "drawn"] = "first"
    refresh_every: int = 1
    frobenius: float = 1.0
    dropped: Literal["zero", "kept"] = "kept"

    summary = "random low-rank sub-models of principal kernels; nobody trains the full network (Niu et al. 2023)"
    paper = Tricks(batch_norm="batch", weighting="clients")
    exceptions: ClassVar[Mapping[str, str]] = {
        "pretrained_start": "weights are kept as principal kernels, whose sum is the given weight but for rounding",
    }

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.kappa < math.inf:
            problems.append(f"kappa = {self.kappa}; allowed: 0 (uniform) or more")
        if self.sampling not in _SAMPLINGS:
            problems.append(f"sampling = '{self.sampling}'; allowed: {', '.join(map(repr, _SAMPLINGS))}")
        if self.channels not in ("first", "drawn"):
            problems.append(f"channels = '{self.channels}'; allowed: 'first', 'drawn'")
        if self.refresh_every < 1:
            problems.append(f"refresh_every = {self.refresh_every}; allowed: 1 or more")
        if not 0 <= self.frobenius < math.inf:
            problems.append(f"frobenius = {self.frobenius}; allowed: 0 (off) or more")
        if self.dropped not in ("zero", "kept"):
            problems.append(f"dropped = '{self.dropped}'; allowed: 'zero', 'kept'")
        if problems:
            raise MethodError("prism: " + "; ".join(problems))

    def sizes(self, context: Context) -> Sequence[Size]:
        """The trained sizes and the full network, which is what training is for even if nobody can hold it."""
        return context.sizes if context.largest.width == 1 else (*context.sizes, Size(1.0))

    def init(self, context: Context) -> PriSMState:
        if context.tricks.server_momentum:
            raise MethodError(
                "prism: tricks.server_momentum adds steps of kernels that a refresh has replaced since; leave it out"
            )
        start, names = context.start(), inner_weights(context)
        left, right, values = _decomposed({name: start[name] for name in names})
        rest = {name: tensor for name, tensor in start.items() if name not in left}
        draws = {name: torch.zeros(len(own), dtype=torch.int64) for name, own in values.items()}
        return PriSMState(left, right, values, rest, draws, 0)

    def extract(self, context: Context, state: PriSMState, client: Client) -> SubModel:
        """Section 3.2.1: kernels drawn for this client, and of them only the channels of its width."""
        width = client.size.width
        if client.task == "train":
            tensors = self._part(context, state, width, client.round, client.id).of(state)
        else:
            tensors = self._finished(context, state, width)
        return sub_model(client, named(*tensors), width=width)

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        skeleton = context.skeleton(sub_model.width)
        if sub_model.finished:
            return recomposed_network(skeleton, sub_model.tensors)
        return factorised_network(skeleton, sub_model.tensors, self.frobenius * context.training.weight_decay)

    def groups(self, module: nn.Module) -> list[ParameterGroup]:
        """Factors have no weight decay of their own, which would not be a decay of their product."""
        assert isinstance(module, Factorised)
        return [ParameterGroup(module.dense()), ParameterGroup(module.factors(), decay=0.0)]

    def loss(self, module: nn.Module, batch: Batch, step: Step) -> Tensor:
        """Eq. (6)."""
        assert isinstance(module, Factorised)
        return step.objective(module, batch) + module.regulariser()

    def aggregate(self, context: Context, state: PriSMState, updates: Iterable[Update]) -> PriSMState:
        """Eq. (5): the mean of every entry of every kernel over the clients that had it; then the refresh."""
        left, right = StreamingMean(state.left), StreamingMean(state.right)
        rest = StreamingMean(state.rest, context.axes.head)
        draws = copies(state.draws)
        for update in checked(context, updates):
            weight, own = update.weight(context.tricks), sides(update.tensors)
            # What the client had is derived once more rather than believed.
            part = self._part(context, state, update.width, int(update.ticket["round"]), int(update.ticket["client"]))
            left.add(own["left"], weight, part.left)
            right.add(own["right"], weight, part.right)
            rest.add(own["network"], weight, part.rest, class_weights(context, update))
            for name, kernels in part.kernels.items():
                draws[name][kernels] += 1
        rounds = state.rounds + 1
        new = (left.result(), right.result())
        if rounds % self.refresh_every:
            new_left, new_right, values = *new, _values(*new)
        else:
            # A layer that nobody changed needs no refresh, if its kernels were orthogonal before.
            orthogonal = state.rounds % self.refresh_every == 0
            same = _unchanged(state, *new) if orthogonal else set()
            with stage("svd"):
                new_left, new_right, values = refreshed(state, *new, same)
        return PriSMState(new_left, new_right, values, rest.result(), draws, rounds)

    def customize(self, context: Context, state: PriSMState, size: Size) -> nn.Module:
        if not 0 < size.width <= 1:
            raise MethodError(f"prism: width {size.width:g} was asked for; allowed: above 0 and at most 1")
        left, right, rest = self._finished(context, state, size.width)
        return fill(context.skeleton(size.width), recomposed(left, right) | rest)

    def describe(self, context: Context, state: PriSMState) -> Mapping[str, Tensor]:
        """Per layer how many kernels it needs and has, and of each its value and how many clients a round had it."""
        found: Tensors = {}
        for name, values in state.values.items():
            found[f"needed_kernels/{name}"] = torch.tensor([needed_kernels(values), float(len(values))])
            found[f"kernel_draws/{name}"] = torch.stack([values, state.draws[name] / max(1, state.rounds)])
        return found

    def _part(self, context: Context, state: PriSMState, width: float, round: int, client: int) -> Part:
        """What a client of a round trains."""
        kernels = drawn(state, width, generator(context.seed, round, client, "kernels"), self.sampling, self.kappa)
        kept = context.axes.kept(width)
        if self.channels == "drawn":
            kept = drawn_channels(context, kept, generator(context.seed, round, client, "channels"))
        return make_part(context, state, kernels, kept)

    def _finished(self, context: Context, state: PriSMState, width: float) -> tuple[Tensors, Tensors, Tensors]:
        """What the finished network of that width is made of."""
        if self.channels == "first" and self.dropped == "zero" and width > context.largest.width:
            state = trained_only(context, state)
        return top_part(context, state, width).of(state)

    def notices(self, context: Context) -> list[str]:
        if inner_weights(context):
            return []
        return ["prism: no weight of this network lies between two layers, so nothing is decomposed"]


def drawn(
    state: PriSMState, keep: float, random: torch.Generator, sampling: Sampling, kappa: float
) -> dict[str, Tensor]:
    """Eq. (2) for every layer: the kernels of one client, I_c."""
    return {
        name: draw(
            values, rank((state.left[name].shape[0], *state.right[name].shape[1:]), keep), random, sampling, kappa
        )
        for name, values in state.values.items()
    }


def drawn_channels(context: Context, kept: Kept, random: torch.Generator) -> Kept:
    """As many units of each group as `kept` has, drawn without replacement."""
    chosen = {}
    for group in context.axes.groups:
        if not group.frozen:
            order = torch.randperm(group.size, generator=random)
            chosen[group.name] = order[: kept.count(group.name)].sort().values.tolist()
    return context.axes.kept(chosen)


def make_part(context: Context, state: PriSMState, kernels: Mapping[str, Tensor], kept: Kept) -> Part:
    """The part of the state that these kernels are, at the channels that are kept."""
    left: dict[str, Index] = {}
    right: dict[str, Index] = {}
    for name, own in kernels.items():
        outputs, inputs, *kernel = context.axes.index(name, kept)
        left[name], right[name] = (outputs, own, *kernel), (own, inputs, *kernel)
    return Part(kernels, left, right, {name: context.axes.index(name, kept) for name in state.rest})


def top_part(context: Context, state: PriSMState, width: float) -> Part:
    """The finished network of that width: its most important kernels, at the first channels."""
    kernels = drawn(state, width, torch.Generator(), "top", 1.0)
    return make_part(context, state, kernels, context.axes.kept(width))


def trained_only(context: Context, state: PriSMState) -> PriSMState:
    """The state with zeros wherever no client computes, if all have the first channels of their width."""
    kernels = {name: torch.arange(len(values)) for name, values in state.values.items()}
    part = make_part(context, state, kernels, context.axes.kept(context.largest.width))
    left, right, rest = (
        {name: _alone(tensor, at[name]) for name, tensor in tensors.items()}
        for tensors, at in ((state.left, part.left), (state.right, part.right), (state.rest, part.rest))
    )
    return replace(state, left=left, right=right, rest=rest)


def _alone(tensor: Tensor, index: Index) -> Tensor:
    """Zeros with the entries at the index."""
    alone = torch.zeros_like(tensor)
    scatter_(alone, index, take(tensor, index))
    return alone


def refreshed(
    state: PriSMState, left: Tensors, right: Tensors, same: Collection[str] = ()
) -> tuple[Tensors, Tensors, Tensors]:
    """The orthogonal space refresh: principal kernels of what the kernels now make; of the `same` layers, the old."""
    fresh = _decomposed({name: recompose(left[name], right[name]) for name in left if name not in same})
    before = (state.left, state.right, state.values)
    new = [{name: (old if name in same else own)[name] for name in left} for own, old in zip(fresh, before)]
    return new[0], new[1], new[2]


def _unchanged(state: PriSMState, left: Tensors, right: Tensors) -> set[str]:
    equal = torch.equal
    return {name for name in left if equal(left[name], state.left[name]) and equal(right[name], state.right[name])}


def _decomposed(weights: Mapping[str, Tensor]) -> tuple[Tensors, Tensors, Tensors]:
    kernels = {name: principal_kernels(weight) for name, weight in weights.items()}
    left, right, values = ({name: own[i] for name, own in kernels.items()} for i in range(3))
    return left, right, values


def _values(left: Tensors, right: Tensors) -> Tensors:
    return {name: importance(left[name], right[name]) for name in left}
