"""LoRA: a frozen network is fine-tuned by adapters beside its layers, whose rank is what each device can afford.

Hu et al. "LoRA: Low-Rank Adaptation of Large Language Models". ICLR 2022. How adapters of unequal rank become one:

- "zero-padding": Cho, Liu, Xu, Fahrezi, Joshi. "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation
  Models" (HetLoRA). EMNLP 2024.
- "svd": Bai, Chen, Qian, Yao, Li. "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
  Resources" (FlexLoRA). NeurIPS 2024.
- "stacking": Wang, Shen, He, Sun, Wang, Lyu, Li. "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous
  Low-Rank Adaptations". NeurIPS 2024.
- "basis": FLANC's idea (Mei et al., NeurIPS 2022): one shared basis, and coefficients of every rank's own.
- "sampled": PriSM's idea (Niu et al. 2023): each client trains principal directions drawn by importance.

    paper       here                                    shape
    W           context.base, in nobody's messages      (N, M, *k)
    B           state.left[...][layer]                  (N, r), of a convolution (N, r, 1, 1)
    A           state.right[layer]                      (r, M, *k)
    alpha / r   scaling, the same for every rank        scalar
    r_k         LoRA.rank_of                            ceil(capacity rank)

Equation index: W + (alpha / r) B A -> `LoRA._finished`, and peft's modules in training; HetLoRA's zero-padding
-> `ZeroPadding.add`, its truncation -> `Factors.cut`; FlexLoRA's SVD of the mean product -> `Svd.merged`; FLoRA's
stacking, sum_k p_k B_k A_k -> `Stacking.merged`.

The frozen network is built on every device, from the same definition or its own file of weights, and checked by a
fingerprint; only adapters travel, and the head if `train_head` says so. Batch-norm layers are frozen too, with the
statistics that they came with, unless [tricks] batch_norm takes those away.

Departures: all ranks scale their product by the same factor, since products could otherwise not be averaged. HetLoRA
also weighs clients by the norm of their product and lets them prune their own rank; here clients count as [tricks]
weighting says, and the rank is the capacity's. FlexLoRA puts the singular values on one side, here each side takes
their square root. FLoRA sends all clients' adapters to every client, which adds them to its own copy of the network;
here the server sends the sum of all rounds so far, so that a client may miss rounds: as many bytes down as the adapted
weights have, whatever the rank. All sizes of a finished network have that whole sum. "basis" has no term that keeps
the basis orthogonal, and "sampled" keeps the momentum of a client on the client.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from anysize.config.extras import needs
from anysize.config.values import BelowOne, Count, Names, Positive
from anysize.elastic.adapters import ADAPTER, ALL, Adapted, Adapter, Site, drawn, padded, principal, products, sites
from anysize.elastic.kernels import draw, importance, principal_kernels
from anysize.elastic.skeleton import fill, named_tensors
from anysize.errors import MethodError
from anysize.methods.base import Method
from anysize.methods.capabilities import OnBase
from anysize.methods.context import Context
from anysize.methods.kit import check_width, checked, class_weights, sub_model
from anysize.methods.mean import Average, Index
from anysize.methods.messages import Client, SubModel, Ticket, Update
from anysize.methods.size import Size
from anysize.profiling import stage
from anysize.rng import generator
from anysize.wire import Tensors

MakesAverage = Callable[[Mapping[str, Tensor]], Average]
"""Makes what averages tensors, of their values before the round."""
_NETWORK = "network."  # before a name of the network in a message, as in `Adapted`
_FINGERPRINT = "base"  # the ticket's key
_KAPPA = 1.0  # of "sampled": a direction is drawn in proportion to its singular value
_EVERY = "every rank"  # the key of left factors that all ranks share


@dataclass(frozen=True)
class Factors:
    """The factors of every layer's adapter, by the layers' names."""

    left: Tensors
    right: Tensors

    def cut(self, rank: int) -> Factors:
        """HetLoRA's truncation: the first directions."""
        left = {name: tensor[:, :rank] for name, tensor in self.left.items()}
        return Factors(left, {name: tensor[:rank] for name, tensor in self.right.items()})

    def picked(self, at: Mapping[str, Tensor]) -> Factors:
        """Some directions of each layer."""
        left = {name: tensor[:, at[name]] for name, tensor in self.left.items()}
        return Factors(left, {name: tensor[at[name]] for name, tensor in self.right.items()})

    def named(self) -> Tensors:
        """The factors under the names that peft's modules have for them."""
        left = {_left(name): tensor for name, tensor in self.left.items()}
        return left | {_right(name): tensor for name, tensor in self.right.items()}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], sites: Sequence[Site]) -> Factors:
        """The inverse of `named`, for the adapters of these layers."""
        left = {site.name: tensors[_left(site.name)] for site in sites}
        return cls(left, {site.name: tensors[_right(site.name)] for site in sites})


@dataclass(frozen=True)
class LoRAState:
    """What is learned; the frozen network is not part of it.

    Attributes:
        fingerprint: of the frozen network.
        left: the left factors of every layer, shared by all ranks or, with merge = "basis", by rank.
        right: the right factors of every layer.
        sums: with merge = "stacking", the sum of all rounds' products in place of factors.
        head: the parameters that are trained whole.
    """

    fingerprint: str
    left: dict[str, Tensors] = field(default_factory=dict)
    right: Tensors = field(default_factory=dict)
    sums: Tensors = field(default_factory=dict)
    head: Tensors = field(default_factory=dict)

    @property
    def factors(self) -> Factors:
        """The factors of the largest rank, where all ranks share them."""
        return Factors(self.left[_EVERY], self.right)


# --- merging --------------------------------------------------------------------------------------------------


class Merge(ABC):
    """How adapters of unequal rank become one: what clients receive, and what becomes of what they send.

    Args:
        sites: the layers that have adapters.
        ranks: that the fleet trains, smallest first.
        seed: of the run.
    """

    def __init__(self, sites: Sequence[Site], ranks: Sequence[int], seed: int) -> None:
        self.sites, self.ranks, self.rank, self.seed = sites, ranks, ranks[-1], seed

    def start(self) -> LoRAState:
        """The first factors: nothing on the left, so that the network is the frozen one, and noise on the right."""
        return LoRAState("", {_EVERY: self.zeros(self.rank)}, self.fresh(self.rank))

    def sent(self, state: LoRAState, rank: int, ticket: Ticket) -> Factors:
        """What a client of a rank trains in this round."""
        return self.finished(state, rank)

    @abstractmethod
    def finished(self, state: LoRAState, rank: int) -> Factors:
        """The adapters of a finished network of a rank."""

    @abstractmethod
    def begin(self, state: LoRAState, average: MakesAverage) -> None:
        """Before the updates of a round; `average` makes what they are averaged with."""

    @abstractmethod
    def add(self, state: LoRAState, factors: Factors, rank: int, weight: float, ticket: Ticket) -> None:
        """Fold in one client's factors."""

    @abstractmethod
    def merged(self, state: LoRAState) -> LoRAState:
        """The state after the updates of a round; its head is as before."""

    def zeros(self, rank: int) -> Tensors:
        """Left factors of a rank that change nothing."""
        return {site.name: torch.zeros(site.left_shape(rank)) for site in self.sites}

    def fresh(self, rank: int, *names: int) -> Tensors:
        """Right factors of a rank, drawn for what the names say."""
        return {s.name: drawn(s, rank, generator(self.seed, *names, "adapter", s.name)) for s in self.sites}

    def nothing(self) -> Tensors:
        """Products that change nothing."""
        return {site.name: torch.zeros(site.outputs, site.inputs, *site.kernel) for site in self.sites}

    def best(self, whole: Mapping[str, Tensor]) -> Factors:
        """The factors of the best approximation of every layer's product at the largest rank."""
        fresh = self.fresh(self.rank)
        with stage("svd"):
            found = {name: principal(product, self.rank, fresh[name]) for name, product in whole.items()}
        return Factors({name: left for name, (left, _) in found.items()}, {n: right for n, (_, right) in found.items()})


class ZeroPadding(Merge):
    """HetLoRA: factors are padded with zeros to the largest rank and averaged; a smaller rank has the first ones."""

    def finished(self, state: LoRAState, rank: int) -> Factors:
        return state.factors.cut(rank)

    def begin(self, state: LoRAState, average: MakesAverage) -> None:
        self._left, self._right = average(state.left[_EVERY]), average(state.right)

    def add(self, state: LoRAState, factors: Factors, rank: int, weight: float, ticket: Ticket) -> None:
        self._left.add({name: padded(tensor, 1, self.rank) for name, tensor in factors.left.items()}, weight)
        self._right.add({name: padded(tensor, 0, self.rank) for name, tensor in factors.right.items()}, weight)

    def merged(self, state: LoRAState) -> LoRAState:
        return replace(state, left={_EVERY: self._left.result()}, right=self._right.result())


class Svd(Merge):
    """FlexLoRA: the products are averaged, and every rank gets the best approximation of the mean."""

    def finished(self, state: LoRAState, rank: int) -> Factors:
        return state.factors.cut(rank)

    def begin(self, state: LoRAState, average: MakesAverage) -> None:
        self._mean = average(self.nothing())

    def add(self, state: LoRAState, factors: Factors, rank: int, weight: float, ticket: Ticket) -> None:
        self._mean.add(products(factors.left, factors.right), weight)

    def merged(self, state: LoRAState) -> LoRAState:
        best = self.best(self._mean.result())
        return replace(state, left={_EVERY: best.left}, right=best.right)


class Stacking(Merge):
    """FLoRA: every round has new adapters, and the sum of their products is added to the frozen weights.

    Stacked side by side, the clients' factors make one adapter whose product is sum_k p_k B_k A_k. That sum is what is
    kept here: nothing of it is lost, and it needs no more memory for more clients.
    """

    def start(self) -> LoRAState:
        return LoRAState("", sums=self.nothing())

    def sent(self, state: LoRAState, rank: int, ticket: Ticket) -> Factors:
        return Factors(self.zeros(rank), self.fresh(rank, ticket.round, ticket.client))

    def finished(self, state: LoRAState, rank: int) -> Factors:
        kernels = {name: principal_kernels(whole) for name, whole in state.sums.items()}
        whole = Factors({n: own.left for n, own in kernels.items()}, {n: own.right for n, own in kernels.items()})
        return whole.cut(rank)

    def begin(self, state: LoRAState, average: MakesAverage) -> None:
        self._mean = average(self.nothing())

    def add(self, state: LoRAState, factors: Factors, rank: int, weight: float, ticket: Ticket) -> None:
        self._mean.add(products(factors.left, factors.right), weight)

    def merged(self, state: LoRAState) -> LoRAState:
        return replace(state, sums={name: state.sums[name] + mean for name, mean in self._mean.result().items()})


class Basis(Merge):
    """FLANC's idea: the right factors are a basis that all ranks share; each rank has left factors of its own."""

    def start(self) -> LoRAState:
        return LoRAState("", {str(rank): self.zeros(rank) for rank in self.ranks}, self.fresh(self.rank))

    def finished(self, state: LoRAState, rank: int) -> Factors:
        nearest = min(trained for trained in self.ranks if trained >= rank)
        return Factors(state.left[str(nearest)], state.right).cut(rank)

    def begin(self, state: LoRAState, average: MakesAverage) -> None:
        self._left = {rank: average(own) for rank, own in state.left.items()}
        self._right = average(state.right)

    def add(self, state: LoRAState, factors: Factors, rank: int, weight: float, ticket: Ticket) -> None:
        first = torch.arange(rank)
        self._left[str(rank)].add(factors.left, weight)
        self._right.add(factors.right, weight, dict.fromkeys(factors.right, (first,)))

    def merged(self, state: LoRAState) -> LoRAState:
        left = {rank: mean.result() for rank, mean in self._left.items()}
        return replace(state, left=left, right=self._right.result())


class Sampled(Merge):
    """PriSM's idea: a client trains directions drawn by their singular values; each is averaged over its holders."""

    def sent(self, state: LoRAState, rank: int, ticket: Ticket) -> Factors:
        return state.factors.picked(self._drawn(state, rank, ticket))

    def finished(self, state: LoRAState, rank: int) -> Factors:
        return state.factors.cut(rank)

    def begin(self, state: LoRAState, average: MakesAverage) -> None:
        self._left, self._right = average(state.left[_EVERY]), average(state.right)

    def add(self, state: LoRAState, factors: Factors, rank: int, weight: float, ticket: Ticket) -> None:
        at = self._drawn(state, rank, ticket)  # again, rather than trust what the client says
        columns: dict[str, Index] = {name: (None, own) for name, own in at.items()}
        self._left.add(factors.left, weight, columns)
        self._right.add(factors.right, weight, {name: (own,) for name, own in at.items()})

    def merged(self, state: LoRAState) -> LoRAState:
        best = self.best(products(self._left.result(), self._right.result()))
        return replace(state, left={_EVERY: best.left}, right=best.right)

    def _drawn(self, state: LoRAState, rank: int, ticket: Ticket) -> dict[str, Tensor]:
        """By layer, the directions that a client trains in a round."""
        found = {}
        for name, left in state.left[_EVERY].items():
            if left.is_meta:  # any directions have the same shape
                found[name] = torch.arange(rank)
                continue
            values = importance(left, state.right[name])
            random = generator(ticket.seed, ticket.round, ticket.client, "directions", name)
            found[name] = draw(values, rank, random, kappa=_KAPPA)
        return found


_MERGES: Mapping[str, type[Merge]] = {
    "zero-padding": ZeroPadding,
    "svd": Svd,
    "stacking": Stacking,
    "basis": Basis,
    "sampled": Sampled,
}


# --- the method -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoRA(Method[LoRAState], OnBase[LoRAState]):
    """Adapters of unequal rank beside a frozen network.

    Attributes:
        rank: of the adapters at capacity 1; capacity 0.25 has a quarter of it, rounded up.
        merge: how adapters of unequal rank become one: "zero-padding" (HetLoRA), "svd" of the mean product (FlexLoRA),
            "stacking" (FLoRA), a shared "basis" with coefficients for each rank (FLANC's idea), or "sampled" principal
            directions (PriSM's idea).
        targets: the layers that get an adapter, as peft's target_modules: names or ends of names, or a regular
            expression of whole names; "all-linear" is every linear and convolutional layer but the head.
        train_head: train the layer that makes the classes as a whole; it then travels with the adapters.
        scaling: the factor of an adapter's product, peft's lora_alpha / r, the same for every rank.
        dropout: of an adapter's inputs in training, peft's lora_dropout.
    """

    rank: Count = 8
    merge: Literal["zero-padding", "svd", "stacking", "basis", "sampled"] = "svd"
    targets: Names | str = ALL
    train_head: bool = False
    scaling: Positive = 1.0
    dropout: BelowOne = 0.0

    summary = "adapters of unequal rank beside a frozen network (Hu et al. 2022; HetLoRA, FlexLoRA, FLoRA)"

    @property
    def excused(self) -> Mapping[str, str]:
        if self.merge == "stacking":
            return {"full_round_trip": "the sum of earlier rounds goes down to a client, and not up again"}
        if self.merge in ("zero-padding", "svd"):
            return {"unchanged_updates": "directions that a client does not have are missing from what it sends"}
        return {}

    def rank_of(self, width: float) -> int:
        """The rank at a capacity.

        >>> LoRA(rank=16).rank_of(0.25), LoRA(rank=4).rank_of(0.1)
        (4, 1)
        """
        return max(1, math.ceil(width * self.rank - 1e-9))

    def sizes(self, context: Context) -> Sequence[Size]:
        return context.sizes

    def init(self, context: Context) -> LoRAState:
        problems = list(self._problems(context))
        if problems:
            raise MethodError("lora: " + "; ".join(problems))
        head = {name: context.start()[name] for name in self._head(context)}
        return replace(self._merge(context).start(), fingerprint=self._fingerprint(context), head=head)

    def extract(self, context: Context, state: LoRAState, client: Client) -> SubModel:
        check_width(context, client.size.width, "lora")
        made = sub_model(client, {}, width=client.size.width, **{_FINGERPRINT: state.fingerprint})
        rank, merge = self.rank_of(client.size.width), self._merge(context)
        sums = {_sum(name): whole for name, whole in state.sums.items()}
        head = {f"{_NETWORK}{name}": tensor for name, tensor in state.head.items()}
        if client.job == "train":
            factors = merge.sent(state, rank, made.ticket).named()
        else:  # a finished network adds either the whole sum or a product
            factors = {} if state.sums else merge.finished(state, rank).named()
        return replace(made, tensors=factors | sums | head)

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        assert context.base is not None
        self._check_base(context, sub_model.ticket.more.get(_FINGERPRINT))
        tensors = sub_model.tensors
        places, head = self._sites(context), {n: tensors[f"{_NETWORK}{n}"] for n in self._head(context)}
        sums = {place.name: tensors[_sum(place.name)] for place in places if _sum(place.name) in tensors}
        if sub_model.finished:
            factors = None if sums else Factors.of(tensors, places)
            return fill(context.template, self._finished(context, sums, factors, head))
        network = dict(context.base.tensors) | self._added(context, sums) | head
        frozen = {name for name, _ in context.template.named_parameters()} - head.keys()  # nobody writes into these
        factors = Factors.of(tensors, places)
        return Adapted(
            fill(context.template, network, shared=frozen),
            places,
            factors.left,
            factors.right,
            head=head,
            scaling=self.scaling,
            dropout=self.dropout,
        )

    def pack(self, module: nn.Module, sub_model: SubModel) -> Update:
        trained = {name: own.detach() for name, own in module.named_parameters() if own.requires_grad}
        return Update({name: tensor.contiguous() for name, tensor in trained.items()}, sub_model.ticket)

    def aggregate(self, context: Context, state: LoRAState, updates: Iterable[Update]) -> LoRAState:
        merge, places = self._merge(context), self._sites(context)
        head = context.average(state.head, context.axes.head)
        merge.begin(state, context.average)
        for update in checked(context, updates):
            rank, weight = self.rank_of(update.width), update.weight(context.tricks)
            self._check(update, rank, places, state.head)
            merge.add(state, Factors.of(update.tensors, places), rank, weight, update.ticket)
            own = {name: update.tensors[f"{_NETWORK}{name}"] for name in state.head}
            head.add(own, weight, classes=class_weights(context, update))
        return replace(merge.merged(state), head=head.result())

    def customize(self, context: Context, state: LoRAState, size: Size) -> nn.Module:
        check_width(context, size.width, "lora")
        self._check_base(context, state.fingerprint)
        factors = None if state.sums else self._merge(context).finished(state, self.rank_of(size.width))
        return fill(context.template, self._finished(context, state.sums, factors, state.head))

    def adapter(self, context: Context, state: LoRAState, size: Size) -> Adapter:
        """The adapters of a size; with merge = "stacking" the best approximation of the sum at that rank."""
        check_width(context, size.width, "lora")
        self._check_base(context, state.fingerprint)
        assert context.base is not None
        factors = self._merge(context).finished(state, self.rank_of(size.width))
        merged = fill(context.template, self._finished(context, {}, factors, state.head))
        base = fill(context.template, context.base.tensors)
        return Adapter(base, merged, self._sites(context), factors.left, factors.right, state.head, self.scaling)

    def frozen(self, context: Context) -> Collection[str]:
        head = set(self._head(context))
        return [name for name, _ in named_tensors(context.template) if name not in head]

    def notices(self, context: Context) -> list[str]:
        ranks = ", ".join(f"{self.rank_of(size.width)} at {size.label}" for size in context.sizes)
        base = [tensor for name, tensor in named_tensors(context.template) if name in set(self.frozen(context))]
        held = sum(tensor.numel() * tensor.element_size() for tensor in base)
        count = len(self._sites(context))
        return [
            f"lora: adapters of rank {ranks}, in {count} layers. Besides what it trains, every device holds the frozen "
            f"network, {held:,} bytes, once: it has no gradients and never travels"
        ]

    def _problems(self, context: Context) -> Iterable[str]:
        if (missing := needs("the method", "lora", "peft")) is not None:
            yield missing
        if any(hasattr(part, "lora_A") for part in context.template.modules()):
            yield "the network has adapters of peft already; give it without them, as network.merge_and_unload() does"
            return
        largest = self.rank_of(context.largest.width)
        small = [site for site in self._sites(context) if site.full_rank < largest]
        if small:
            listed = ", ".join(f"{site.name} (at most {site.full_rank})" for site in small[:5])
            yield f"rank {largest} is above the smaller dimension of {listed}; lower method.rank, or name other targets"
        if context.tricks.batch_norm == "local":
            yield 'tricks.batch_norm = "local" keeps norms on clients, and here they are frozen; take "tracked"'
        if self.train_head and not self._head(context):
            yield "train_head: the network has no layer of its own that makes the classes; set it to false"

    def _merge(self, context: Context) -> Merge:
        ranks = sorted({self.rank_of(size.width) for size in context.sizes})
        return _MERGES[self.merge](self._sites(context), ranks, context.seed)

    def _sites(self, context: Context) -> list[Site]:
        head = {name.rpartition(".")[0] for name in context.axes.head}
        found = sites(context.template, self.targets, head)
        return [site for site in found if not (self.train_head and site.name in head)]

    def _head(self, context: Context) -> list[str]:
        """The names of the parameters that are trained whole; those that another layer shares are not among them."""
        if not self.train_head:
            return []
        made_by = {name.rpartition(".")[0] for name in context.axes.head}
        shared = {id(p) for p in context.template.parameters() if len(_holders(context.template, p)) > 1}
        return [
            name
            for name, parameter in context.template.named_parameters()
            if name.rpartition(".")[0] in made_by and id(parameter) not in shared
        ]

    def _fingerprint(self, context: Context) -> str:
        assert context.base is not None
        return context.base.fingerprint(self._head(context))

    def _check_base(self, context: Context, expected: str | None) -> None:
        """Refuse what belongs to another frozen network than the one here."""
        own = self._fingerprint(context)
        if expected != own:
            raise MethodError(
                f"lora: the adapters belong to another base: theirs has the fingerprint {expected}, the one here has "
                f"{own}; use the same model, options and seed here, and the same file of model.weights"
            )

    def _added(self, context: Context, changes: Mapping[str, Tensor]) -> Tensors:
        """The frozen weights with what is added to them."""
        assert context.base is not None
        by_name = {site.name: site for site in self._sites(context)}
        found = {}
        for name, change in changes.items():
            weight = context.base.tensors[by_name[name].weight]
            if change.is_meta:
                weight = weight.to("meta")
            found[by_name[name].weight] = weight + self.scaling * by_name[name].change(change).to(weight.dtype)
        return found

    def _finished(
        self, context: Context, sums: Mapping[str, Tensor], factors: Factors | None, head: Mapping[str, Tensor]
    ) -> Tensors:
        """The tensors of a finished network: W + s B A, or W plus the sum of all rounds."""
        assert context.base is not None
        changes = sums if factors is None else products(factors.left, factors.right)
        return dict(context.base.tensors) | self._added(context, changes) | dict(head)

    def _check(self, update: Update, rank: int, places: Sequence[Site], head: Mapping[str, Tensor]) -> None:
        """Refuse tensors of other names or shapes than those that were sent; a mean of products would not show it."""
        wanted = {f"{_NETWORK}{name}": tuple(tensor.shape) for name, tensor in head.items()}
        wanted |= {_left(site.name): site.left_shape(rank) for site in places}
        wanted |= {_right(site.name): site.right_shape(rank) for site in places}
        given = {name: tuple(tensor.shape) for name, tensor in update.tensors.items()}
        wrong = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
        if wrong:
            raise MethodError(f"lora: client {update.ticket.client} sent other shapes than rank {rank}'s: {wrong[0]}")


def _left(layer: str) -> str:
    return f"{_NETWORK}{layer}.lora_B.{ADAPTER}.weight"


def _right(layer: str) -> str:
    return f"{_NETWORK}{layer}.lora_A.{ADAPTER}.weight"


def _sum(layer: str) -> str:
    return f"{_NETWORK}{layer}.sum"


def _holders(network: nn.Module, parameter: nn.Parameter) -> list[str]:
    """The names under which a network has a parameter."""
    return [name for name, own in network.named_parameters(remove_duplicate=False) if own is parameter]
