"""PriSM: every client trains a few principal kernels of every layer, drawn by importance; none holds the full model.

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
-> `Pair`; Eq. (4) and Fig. 3 -> `PriSM.observe` here; Eq. (5) -> `PriSM.aggregate` and `make_part` here; Eq. (6) ->
`Factorised.regulariser`; orthogonal space refresh -> `refreshed` here, the stage "svd" of a profiled run (Table 4); the
number of required kernels (section 4.4.1) -> `needed_kernels`, as the authors' code counts it ->
`participating_kernels`; activation normalisation -> [tricks] batch_norm = "batch"; alpha = 1 / C_i -> weighting =
"clients".

What is decomposed: every trained weight whose outputs change with the width and whose inputs are another layer's
outputs, except 1 x 1 convolutions. That leaves the stem, projections, the classifier, norms and biases dense, as the
authors do. Recurrent weights have one decomposition over all gates, and their rows are left out gate by gate.

Departures:
- The authors mask full tensors, and in their residual networks every channel stays alive through the shortcuts, the
  stem and the projections. Here a client's network is narrowed everywhere to the channels that it computes, so that it
  costs what Table 1 says. By default these are the first channels, the paper's u_i(1:r). If no client is strong enough
  for all of them, none trains the entries beyond: 84 % of a weight at keep 0.4, 96 % at 0.2. They start at zero and
  stay there (`dropped = "zero"`), so that they are not drawn in place of trained kernels, and the full network is the
  sum of what was trained; a pretrained network keeps them. `notices` says how much that is.
- With `channels = "windows"`, clients compute different windows of channels, which together make the full network: see
  `windows`. Kernels are drawn by their importance within the client's window. This learned more where clients' data
  was alike and a small network too small for the task, and much less where data was skewed.
- `channels = "all"` is section 3.2.1 without its paragraph on memory: all is trained, at the cost of OrthDrop. "drawn"
  is an earlier version of the authors' code, which drew the rows of the left factors. "mlp" is what their code does to
  transformers, where it leaves attention and the residual stream whole.
- The authors' code, but not the paper, averages the momentum of factors and norms and hands it back; after a refresh it
  goes to whatever kernels then have the same numbers. `momentum = "averaged"` averages it for all trained tensors, and
  a refresh transforms it together with the kernels.
- The paper gives the number of required kernels as 2^(-log(sum p log p)); it must mean 2^(-sum p log2 p).
- lambda of Eq. (6) is training.weight_decay, as in the authors' code; a factor on it is an option.
- A finished network smaller than full has the first channels and the kernels that are most important there. The paper
  has no such network.
- The paper tests by the statistics of the test batch. A finished network has fixed ones. If no client can run the full
  network and all beyond the first channels or the windows is zero, clients estimate those of the networks there, which
  they can run, and the server puts them together (`PriSM.pieces`). With the other choices there is nothing to put
  together: unless the server has samples of its own (`evaluation.calibration_proxy`), the full network goes on
  normalising by its batch, as the paper does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from anysize.config.values import Count, NotNegative
from anysize.elastic.axes import Kept
from anysize.elastic.basis import key, unkey
from anysize.elastic.features import Seen, layer_inputs, maps, overlap, ranks
from anysize.elastic.kernels import (
    Factorised,
    Sampling,
    draw,
    factorised_network,
    importance,
    named,
    needed_kernels,
    participating_kernels,
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
from anysize.methods.base import Method
from anysize.methods.capabilities import CarriesMomentum, Observed, Piece, Pieced
from anysize.methods.context import Context
from anysize.methods.factorising import factorising_notices, feed_forward_weights, inner_weights
from anysize.methods.kit import checked, class_weights, sub_model
from anysize.methods.mean import Index
from anysize.methods.messages import Client, ParameterGroup, SubModel, Update
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step, Tricks
from anysize.profiling import stage
from anysize.rng import generator
from anysize.wire import Tensors, copies, under

_SAMPLINGS = ("importance", "uniform", "softmax", "top")
_KAPPA = 2.5
_MOMENTUM = "momentum."
_ROUNDING = 1e-5  # times the largest singular value: smaller ones are rounding errors in single precision
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class PriSMState:
    """Both sides of every decomposed weight with its singular values, all other tensors, and counts of draws.

    Attributes:
        left: the left factors, full.
        right: the right factors, full.
        values: the singular values.
        rest: the full network's other tensors.
        draws: how many clients have had the kernel at each rank of importance so far.
        rounds: how many rounds are done.
        momentum: if averaged, that of the "left" and "right" factors and of the "network"'s other trained tensors.
    """

    left: Tensors
    right: Tensors
    values: Tensors
    rest: Tensors
    draws: Tensors
    rounds: int
    momentum: dict[str, Tensors]

    @property
    def sides(self) -> dict[str, Tensors]:
        """The tensors that clients train, by the part of their network that holds them."""
        return {"left": self.left, "right": self.right, "network": self.rest}


@dataclass(frozen=True)
class Part:
    """A part of the state: kernels of each layer, and which entries of each tensor belong to it."""

    kernels: Mapping[str, Tensor]
    at: Mapping[str, Mapping[str, Index]]

    def of(self, sides: Mapping[str, Tensors]) -> dict[str, Tensors]:
        """This part's entries of the left factors, the right factors and the rest of the network."""
        return {side: {n: take(t, self.at[side][n]) for n, t in own.items()} for side, own in sides.items()}


@dataclass(frozen=True)
class PriSM(Method[PriSMState], CarriesMomentum, Observed[PriSMState], Pieced[PriSMState]):
    """Principal probabilistic sub-models.

    Attributes:
        kappa: the smooth factor of Eq. (2); the paper has 2.5, and 4 for sub-models of 0.2.
        sampling: "importance" is Eq. (2); "uniform" and "softmax" (of the singular values) are the paper's ablation;
            "top" gives every client the most important kernels.
        refresh_every: rounds from one decomposition to the next.
        frobenius: the factor of Eq. (6), as a multiple of training.weight_decay; 0 is off.
        channels: which output channels a client computes: the "first", the same for all clients of a size (the paper);
            in "windows", another one for each client in each round, so that together they train all channels; "drawn"
            at random for each client; "all", which saves parameters and multiply-adds, but no activations; or "mlp":
            all, and of a transformer only its feed-forward layers are decomposed (the authors' code).
        dropped: with the first channels or windows, what no client can train is "zero" from the start, so that it is
            neither decomposed nor part of a finished network, unless the network is pretrained; or "kept" as it started
            (the paper).
        momentum: "local" starts at zero in every round; "averaged": clients send it, the server averages it as it
            averages kernels and gives it to the next round's clients, which doubles the bytes.
    """

    kappa: NotNegative = _KAPPA
    sampling: Sampling = "importance"
    channels: Literal["first", "windows", "drawn", "all", "mlp"] = "first"
    refresh_every: Count = 1
    frobenius: NotNegative = 1.0
    dropped: Literal["zero", "kept"] = "zero"
    momentum: Literal["local", "averaged"] = "local"

    summary = "random low-rank sub-models of principal kernels; nobody trains the full network (Niu et al. 2023)"
    paper = Tricks(batch_norm="batch", weighting="clients")
    exceptions: ClassVar[Mapping[str, str]] = {
        "pretrained_start": "weights are kept as principal kernels, whose sum is the given weight but for rounding",
    }

    def ignored(self) -> Iterable[str]:
        if self.dropped != "zero" and self.channels in ("drawn", "all", "mlp"):
            yield f'dropped = "{self.dropped}" works where channels are dropped, and channels = "{self.channels}"'
        if self.kappa != _KAPPA and self.sampling != "importance":
            yield f'kappa = {self.kappa:g} works with sampling = "importance", and sampling = "{self.sampling}"'

    def sizes(self, context: Context) -> Sequence[Size]:
        """The trained sizes and the full network, which training aims at even if no client can hold it."""
        return context.sizes if context.largest.width == 1 else (*context.sizes, Size(1.0))

    def init(self, context: Context) -> PriSMState:
        problems = list(self._context_problems(context))
        if problems:
            raise MethodError("prism: " + "; ".join(problems))
        start, names = context.start(), self._decomposed_names(context)
        if self._empties(context):
            start = trained_only(context, start, self._all_kept(context))
        left, right, values = _decomposed({name: start[name] for name in names})
        rest = {name: tensor for name, tensor in start.items() if name not in left}
        draws = {name: torch.zeros(len(own), dtype=torch.int64) for name, own in values.items()}
        state = PriSMState(left, right, values, rest, draws, 0, {})
        return replace(state, momentum=no_momentum(context, state)) if self.momentum == "averaged" else state

    def _empties(self, context: Context) -> bool:
        """Whether what no client can train starts at zero."""
        return self.channels in ("first", "windows") and self.dropped == "zero" and not context.pretrained

    def _decomposed_names(self, context: Context) -> list[str]:
        return feed_forward_weights(context) if self.channels == "mlp" else inner_weights(context)

    def _all_kept(self, context: Context) -> list[Kept]:
        """Every choice of channels that a client of this fleet can have."""
        if self.channels in ("all", "mlp", "drawn"):  # drawn channels can be any
            return [context.axes.kept(1.0)]
        widths = sorted({size.width for size in context.sizes})
        if self.channels == "first":
            return [context.axes.kept(width) for width in widths]
        return [kept for width in widths for kept in windows(context, width)]

    def _context_problems(self, context: Context) -> Iterator[str]:
        if self.channels == "mlp" and not feed_forward_weights(context):
            yield 'channels = "mlp": the network has no feed-forward layers between attentions; take "first" or "all"'
        if context.tricks.server_momentum:
            yield "tricks.server_momentum would add steps of kernels that a refresh has since replaced; leave it out"
        if self.momentum == "averaged":
            training = context.training
            if training.optimizer != "sgd" or not training.momentum:
                yield 'momentum = "averaged" needs training.optimizer = "sgd" and training.momentum above 0'
            if training.stack > 1:
                yield f'momentum = "averaged" and training.stack = {training.stack}; leave one of them out'
            if context.tricks.batch_norm == "local":
                yield 'momentum = "averaged" would send the momentum of norms that tricks.batch_norm = "local" keeps'

    def extract(self, context: Context, state: PriSMState, client: Client) -> SubModel:
        """Section 3.2.1: kernels drawn for this client, cut to the channels of its width."""
        keep = client.size.width
        if client.job == "train":
            part = self._part(context, state, keep, client.round, client.id)
            tensors = named(*part.of(state.sides).values()) | carried(part.of(state.momentum))
        else:
            tensors = named(*self._finished(context, state, keep).values())
        return sub_model(client, tensors, width=self._width(keep), keep=keep)

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        skeleton = context.skeleton(sub_model.width)
        if sub_model.finished:
            return recomposed_network(skeleton, sub_model.tensors)
        plain = {name: tensor for name, tensor in sub_model.tensors.items() if not name.startswith(_MOMENTUM)}
        module = factorised_network(skeleton, plain, self.frobenius * context.training.weight_decay)
        if self.momentum == "averaged":
            module.momentum = Buffers(under(_MOMENTUM, sub_model.tensors))
        return module

    def momentum_buffers(self, module: nn.Module) -> Mapping[nn.Parameter, Tensor]:
        """With `momentum = "averaged"`, the momentum with which this client's training starts."""
        if self.momentum == "local":
            return {}
        own = dict(module.get_submodule("momentum").named_buffers())
        return {p: own[key(name)] for name, p in module.named_parameters() if key(name) in own}

    def groups(self, module: nn.Module) -> list[ParameterGroup]:
        """The factors have no weight decay, since decaying each factor would not decay their product."""
        assert isinstance(module, Factorised)
        return [ParameterGroup(module.dense()), ParameterGroup(module.factors(), decay=0.0)]

    def loss(self, module: nn.Module, batch: Batch, step: Step) -> Tensor:
        """Eq. (6)."""
        assert isinstance(module, Factorised)
        return step.objective(module, batch) + module.regulariser()

    def aggregate(self, context: Context, state: PriSMState, updates: Iterable[Update]) -> PriSMState:
        """Eq. (5): the mean of every entry of every kernel over the clients that had it; then the refresh."""
        means = {side: context.average(own, context.axes.head) for side, own in state.sides.items()}
        momentum = {side: context.average(own, context.axes.head) for side, own in state.momentum.items()}
        draws = copies(state.draws)
        for update in checked(context, updates):
            weight, classes = update.weight(context.tricks), class_weights(context, update)
            # Derive again which part the client had, rather than trust what it says.
            ticket = update.ticket
            part = self._part(context, state, float(ticket.more["keep"]), ticket.round, ticket.client)
            own, buffers = received(update.tensors)
            for side, mean in means.items():
                mean.add(own[side], weight, part.at[side], classes)
            for side, mean in momentum.items():
                mean.add(buffers[side], weight, part.at[side], classes)
            for name, kernels in part.kernels.items():
                draws[name][kernels] += 1
        rounds = state.rounds + 1
        left, right, rest = (means[side].result() for side in ("left", "right", "network"))
        after = PriSMState(
            left, right, _values(left, right), rest, draws, rounds, {side: m.result() for side, m in momentum.items()}
        )
        if rounds % self.refresh_every:
            return after
        # A layer that no client changed needs no refresh, if its kernels were orthogonal before.
        orthogonal = state.rounds % self.refresh_every == 0
        with stage("svd"):
            return refreshed(after, state, _unchanged(state, after) if orthogonal else set())

    def customize(self, context: Context, state: PriSMState, size: Size) -> nn.Module:
        if not 0 < size.width <= 1:
            raise MethodError(f"prism: width {size.width:g} was asked for; allowed: above 0 and at most 1")
        own = self._finished(context, state, size.width)
        return fill(context.skeleton(self._width(size.width)), recomposed(own["left"], own["right"]) | own["network"])

    def describe(self, context: Context, state: PriSMState) -> Mapping[str, Tensor]:
        """For each layer, how many kernels it needs and has; for each kernel, its value and mean clients per round.

        "needed_kernels" is the paper's count, "participating_kernels" that of the authors' code.
        """
        found: Tensors = {}
        for name, values in state.values.items():
            found[f"needed_kernels/{name}"] = torch.tensor([needed_kernels(values), float(len(values))])
            found[f"participating_kernels/{name}"] = torch.tensor(participating_kernels(values))
            found[f"kernel_draws/{name}"] = torch.stack([values, state.draws[name] / max(1, state.rounds)])
        return found

    def observe(self, context: Context, state: PriSMState, x: Tensor) -> Mapping[str, Tensor]:
        """For each layer of the full network, how far its kernels' features overlap, and Eq. (4) at every size; Fig. 3.

        "feature_overlap" is the largest cosine between two kernels' outputs. A row of "feature_rank" is a keep ratio:
        that ratio, r, N, the ranks of Eq. (4) for the r most important kernels at all channels (of the maps that enter
        Conv_U, of its weight, of its outputs), and how many directions the outputs need. "kernel_features" are the
        first sample and what the first three kernels of the first convolution make of it.
        """
        found: Tensors = {}
        seen = layer_inputs(self.customize(context, state, Size(1.0)), list(state.values), x)
        for name, own in seen.items():
            made = maps(own, state.right[name])
            if not made.isfinite().all():  # a network that diverges; the report's arrays must not stop the run
                continue
            found[f"feature_overlap/{name}"] = torch.tensor(overlap(state.left[name], made))
            rows = [output_ranks(state, name, made, size.width) for size in self.sizes(context)]
            found[f"feature_rank/{name}"] = torch.tensor(rows, dtype=torch.float64)
        return found | features(state, seen, x)

    def _part(self, context: Context, state: PriSMState, keep: float, round: int, client: int) -> Part:
        """The part of the state that a client trains in a round."""
        kept = context.axes.kept(self._width(keep))
        if self.channels == "drawn":
            kept = drawn_channels(context, kept, generator(context.seed, round, client, "channels"))
        if self.channels == "windows":
            choices = windows(context, keep)
            kept = choices[(client + round) % len(choices)]
        random = generator(context.seed, round, client, "kernels")
        return make_part(context, state, self._drawn(context, state, keep, kept, random, self.sampling), kept)

    def pieces(self, context: Context, state: PriSMState, size: Size) -> Sequence[Piece]:
        """The networks in all windows, or at the first channels if all else is zero.

        What lies between them is zero, so that a channel's inputs in the full network are those that it has in a piece.
        """
        largest = context.largest
        if size.width != 1 or not self._empties(context):
            return []
        if self.channels == "first":
            return [self._piece(context, state, largest, context.axes.kept(largest.width))]
        return [self._piece(context, state, own, kept) for own in context.sizes for kept in windows(context, own.width)]

    def _piece(self, context: Context, state: PriSMState, size: Size, kept: Kept) -> Piece:
        """The finished network of a size at these channels."""

        def extract(client: Client) -> SubModel:
            tensors = named(*self._finished(context, state, size.width, kept).values())
            return sub_model(client, tensors, width=size.width, keep=size.width)

        return Piece(size, kept, extract)

    def _finished(
        self, context: Context, state: PriSMState, keep: float, kept: Kept | None = None
    ) -> dict[str, Tensors]:
        """The tensors of the finished network of that size: the most important kernels, at the first channels."""
        kept = kept or context.axes.kept(self._width(keep))
        kernels = self._drawn(context, state, keep, kept, torch.Generator(), "top")
        return make_part(context, state, kernels, kept).of(state.sides)

    def _drawn(
        self,
        context: Context,
        state: PriSMState,
        keep: float,
        kept: Kept,
        random: torch.Generator,
        sampling: Sampling,
    ) -> dict[str, Tensor]:
        """The kernels of a client with these channels; in a window they are drawn by what they are there."""
        values = within(context, state, kept) if self.channels == "windows" else state.values
        return drawn(replace(state, values=values), keep, random, sampling, self.kappa)

    def _width(self, keep: float) -> float:
        """The fraction of the channels that a client with that keep ratio computes."""
        return 1.0 if self.channels in ("all", "mlp") else keep

    def notices(self, context: Context) -> list[str]:
        whole = self.channels in ("all", "mlp")
        rest = "trained by every client" if whole else "cut to a client's channels, as origdrop does"
        found = factorising_notices(context, "prism", f"the rest is {rest}")
        trainable, total = trainable_entries(context, self._all_kept(context))
        if trainable == total:
            return found
        found.append(
            f"prism: clients can ever train {trainable:,} of the full network's {total:,} parameters "
            f'({trainable / total:.0%}) with channels = "{self.channels}" and no client of capacity 1; the rest '
            f"{'is zero' if self._empties(context) else 'keeps its start'}. "
            'channels = "all" trains everything, at more cost'
        )
        number = len(windows(context, context.sizes[0].width))
        if self.channels == "windows" and number > 1:
            found.append(
                f"prism: each of {number} windows of channels has 1 in {number} of a round's clients. If these are few "
                'and their data is skewed, channels = "first" learns more'
            )
        return found


def output_ranks(state: PriSMState, name: str, made: Tensor, keep: float) -> list[float]:
    """Eq. (4) for a layer's most important kernels, as many as a keep ratio has; see `PriSM.observe`."""
    left, right = state.left[name], state.right[name]
    count = rank((left.shape[0], *right.shape[1:]), keep)
    top = state.values[name].topk(count).indices
    return [keep, count, len(left), *ranks(left[:, top], made[top])]


def features(state: PriSMState, seen: Mapping[str, Seen], x: Tensor) -> Tensors:
    """Fig. 3: the first sample, and sigma_i v_i^T X of the three most important kernels of the first convolution."""
    name = next((name for name in seen if state.right[name].dim() == 4), None)
    if name is None:
        return {}
    top = state.values[name].topk(min(3, len(state.values[name]))).indices
    first = Seen(seen[name].layer, seen[name].inputs[:1])
    shown = maps(first, state.right[name][top])[:, 0] * state.left[name][:, top].flatten(1).norm(dim=0)[:, None, None]
    pictures = {"input": x[0].mean(0)} | {f"kernel-{i}": picture for i, picture in enumerate(shown, 1)}
    return {f"kernel_features/{name.removesuffix('.weight')}-{what}": own for what, own in pictures.items()}


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
    """As many units of each width group as `kept` has, drawn without replacement."""
    chosen = {}
    for group in context.axes.groups:
        if not group.fixed:
            order = torch.randperm(group.size, generator=random)
            chosen[group.name] = order[: kept.count(group.name)].sort().values.tolist()
    return context.axes.kept(chosen)


def windows(context: Context, width: float) -> list[Kept]:
    """The windows of neighbouring channels that clients of that width compute, each at one place in all layers.

    From the fleet's largest width to the smallest, as many windows lie side by side as fit into what the larger ones
    leave of every layer. Inside each of these, windows of every smaller width cover it. So all windows that have a
    channel lie inside one window, and outside of that one the channel has no inputs.
    """
    sizes = {group.name: group.size for group in context.axes.groups if not group.fixed}
    widths = {width, *(size.width for size in context.sizes if size.width > width)}
    counts = {own: {name: context.axes.kept(own).count(name) for name in sizes} for own in widths}
    places: list[dict[str, int]] = []
    start = dict.fromkeys(sizes, 0)
    for own in sorted(widths, reverse=True):
        for _ in range(min(((size - start[name]) // counts[own][name] for name, size in sizes.items()), default=1)):
            places += _covering(start, counts[own], counts[width])
            start = {name: first + counts[own][name] for name, first in start.items()}
    return [
        context.axes.kept({name: list(range(first, first + counts[width][name])) for name, first in place.items()})
        for place in places
    ]


def _covering(start: Mapping[str, int], outer: Mapping[str, int], inner: Mapping[str, int]) -> list[dict[str, int]]:
    """Where windows of `inner` channels start that cover a window of `outer` ones; the last ends where it ends."""
    number = max((math.ceil(outer[name] / inner[name]) for name in start), default=1)
    return [
        {name: first + min(place * inner[name], outer[name] - inner[name]) for name, first in start.items()}
        for place in range(number)
    ]


def within(context: Context, state: PriSMState, kept: Kept) -> Tensors:
    """What `state.values` is for whole kernels, for the parts of the kernels at the channels that are kept."""
    every = {name: torch.arange(len(own)) for name, own in state.values.items()}
    at = make_part(context, state, every, kept).at
    return {
        name: importance(take(state.left[name], at["left"][name]), take(state.right[name], at["right"][name]))
        for name in state.values
    }


def make_part(context: Context, state: PriSMState, kernels: Mapping[str, Tensor], kept: Kept) -> Part:
    """The part of the state with these kernels, at the channels that are kept."""
    left: dict[str, Index] = {}
    right: dict[str, Index] = {}
    for name, own in kernels.items():
        outputs, inputs, *kernel = context.axes.index(name, kept)
        left[name], right[name] = (outputs, own, *kernel), (own, inputs, *kernel)
    rest = {name: context.axes.index(name, kept) for name in state.rest}
    return Part(kernels, {"left": left, "right": right, "network": rest})


def trained_only(context: Context, tensors: Mapping[str, Tensor], choices: Sequence[Kept]) -> Tensors:
    """The full network's tensors, with zeros at the entries of which no choice of channels has any."""
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for kept in choices:
        for name, tensor in tensors.items():
            index = context.axes.index(name, kept)
            scatter_(found[name], index, take(tensor, index))
    return found


def trainable_entries(context: Context, choices: Sequence[Kept]) -> tuple[int, int]:
    """How many of the full network's trained parameters some choice of channels has, and how many there are."""
    trained = {name: p for name, p in context.template.named_parameters() if p.requires_grad}
    ones = {name: torch.ones(p.shape, dtype=torch.bool) for name, p in trained.items()}
    had = trained_only(context, ones, choices)
    return sum(int(own.sum()) for own in had.values()), sum(p.numel() for p in trained.values())


def refreshed(after: PriSMState, before: PriSMState, same: Collection[str] = ()) -> PriSMState:
    """The orthogonal space refresh: principal kernels of the recomposed weights; `same` layers keep theirs."""
    weights = {name: recompose(after.left[name], after.right[name]) for name in after.left if name not in same}
    fresh = _decomposed(weights)
    left, right, values = (
        {name: (old if name in same else own)[name] for name in after.left}
        for own, old in zip(fresh, (before.left, before.right, before.values))
    )
    new = replace(after, left=left, right=right, values=values)
    return replace(new, momentum=turned(after, new, weights)) if after.momentum else new


def _unchanged(state: PriSMState, after: PriSMState) -> set[str]:
    equal = torch.equal
    return {
        name
        for name in state.left
        if equal(state.left[name], after.left[name]) and equal(state.right[name], after.right[name])
    }


# --- momentum ---------------------------------------------------------------------------------------------------


class Buffers(nn.Module):
    """Tensors that are sent with a network but are not its parameters."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().clone())


def no_momentum(context: Context, state: PriSMState) -> dict[str, Tensors]:
    """Zeros for everything that clients train."""
    trained = {name for name, parameter in context.template.named_parameters() if parameter.requires_grad}
    return {
        side: {name: torch.zeros_like(tensor) for name, tensor in own.items() if name in trained}
        for side, own in state.sides.items()
    }


def carried(momentum: Mapping[str, Tensors]) -> Tensors:
    """Momentum as a message holds it: in buffers of the client's network, named after its parameters."""
    if not momentum:
        return {}
    tensors = named(momentum["left"], momentum["right"], momentum["network"])
    return {_MOMENTUM + key(name): tensor for name, tensor in tensors.items()}


def received(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensors], dict[str, Tensors]]:
    """What a client trained, by part of its network, and the momentum of each part: the inverse of `carried`."""
    plain = {name: tensor for name, tensor in tensors.items() if not name.startswith(_MOMENTUM)}
    buffers = {unkey(name): tensor for name, tensor in under(_MOMENTUM, tensors).items()}
    return sides(plain), sides(buffers)


def turned(before: PriSMState, after: PriSMState, names: Collection[str]) -> dict[str, Tensors]:
    """The momentum of the same weights, in terms of the kernels after a refresh.

    A gradient G of a weight L R is G R^T in L and L^T G in R. The refresh replaces L and R by L' = L B and R' = A R,
    where A = S'^-1 L'^T L and B = R R'^T S'^-1, so that G R'^T = (G R^T) A^T, and likewise L'^T G = B^T (L^T G).
    Directions whose singular value is only a rounding error get no momentum.
    """
    left, right = dict(before.momentum["left"]), dict(before.momentum["right"])
    for name in names:
        old_left, old_right, new_left, new_right = (
            tensors[name].flatten(1).double() for tensors in (before.left, before.right, after.left, after.right)
        )
        values = after.values[name].double()
        inverse = torch.where(values > values.max() * _ROUNDING, 1 / values.clamp_min(_TINY), 0.0)
        moved = left[name].flatten(1).double() @ (old_left.T @ new_left) * inverse
        left[name] = moved.reshape(left[name].shape).to(left[name].dtype)
        moved = inverse[:, None] * (new_right @ old_right.T) @ right[name].flatten(1).double()
        right[name] = moved.reshape(right[name].shape).to(right[name].dtype)
    return {**before.momentum, "left": left, "right": right}


def _decomposed(weights: Mapping[str, Tensor]) -> tuple[Tensors, Tensors, Tensors]:
    kernels = {name: principal_kernels(weight) for name, weight in weights.items()}
    left, right, values = ({name: own[i] for name, own in kernels.items()} for i in range(3))
    return left, right, values


def _values(left: Tensors, right: Tensors) -> Tensors:
    return {name: importance(left[name], right[name]) for name in left}
