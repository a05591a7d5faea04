"""FLANC: the weights of every width are linear combinations of one shared, orthogonal neural basis.

Mei, Guo, Zhou, Patel. "Resource-Adaptive Federated Learning with All-In-One Neural Composition". NeurIPS 2022.

    paper       here                                    shape
    W_p         a weight of the p-width network         (T_p, S_p, *k)
    V_share     state.basis[name]                       (R2, R1, *k)
    U_p         state.coefficients[width][name]         (T_p, S_p / R1, R2)
    R1          Factors.inputs                          a common divisor of all trained S_p
    R2          Factors.size                            number of basis vectors
    lambda      orthogonality                           scalar
    D_k         update.samples                          |D_k| is the weight of client k

Equation index: Eqs. (1), (2) -> `elastic.basis.compose`; Eq. (3) -> `orthogonality_loss`; Eq. (4) ->
`FLANC.aggregate`.

What is composed: every trained weight with at least two axes whose outputs change with the width and whose inputs are
another layer's outputs, except 1 x 1 convolutions (`compose_pointwise` composes them too): convolutions, linear,
recurrent and attention weights. The rest of a width's network (norm layers, biases, the classifier, projections, frozen
weights) is dense, belongs to the width and is averaged over its clients. All widths share a layer that no width
changes, such as a stem that is kept whole; it is averaged over all clients.

Departures:
- The paper gives no value for lambda and does not say how the entries are reduced; the authors' code has 10 times the
  *mean* of the squared entries per layer, the default here. `orthogonality_form = "sum"` is Eq. (3) to the request.
- The authors' code counts clients in both means; Eq. (4) weights by |D_k|, and so does this. [tricks] weighting has
  both.
- The authors' code keeps a copy of an unscaled stem per width, as `share_unscaled = false` does here.
- In linear and recurrent layers (k = 1), R2 is at most 15/16 of the length R1 of a basis vector: more vectors cannot be
  orthogonal, and as many would save nothing. 15/16 is what the paper's parameter counts imply. Convolutions have the R2
  that is asked for, even above R1 k^2 as in Fig. 7c at 75 %.
- Coefficients start with the variance that gives the composed weight that of the network's own start, layer by layer
  and gate by gate (`first_spreads`). Only mean and variance are the same: R2 vectors for R1 k^2 entries cannot make the
  entries independent, and a start with a structure (identity, orthogonal rows, a mean) loses it. As the
  authors' networks, a width starts at its own scale ([tricks] rescaled_init = false); their ResNet's coefficients have
  variance 2 / T, whatever that makes of the composed weight. From pretrained weights, the basis starts with their
  principal directions and every width's coefficients with the nearest fit to its slice.
- The authors' code always mixes (a convolution with the basis, then a 1 x 1 one); which way is faster depends on the
  shapes, so a layer is computed the way that `elastic.basis.mixing_pays` says.
- `compose_pointwise`, `share_dense`, `start = "nested"`, `average = "products"`, `basis_rate` and `coefficients_rate`
  are not in the paper: experiments/flanc/study.md says what most of them change.
- A width that was never trained is a slice of the largest trained network: where the slice holds whole fragments it
  lies in the span of the basis already, so projecting it on the basis changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from anysize.config.values import NotNegative, Part, Positive
from anysize.elastic.basis import (
    Composed,
    Way,
    compose,
    distance_from_identity,
    gram,
    joint_basis,
    key,
    orthonormal_basis,
    principal_basis,
    project,
    random_coefficients,
    spreads,
    stacked_matrices,
    unkey,
)
from anysize.elastic.composed import ComposedWidths
from anysize.elastic.ensemble import scaled_to_own_width
from anysize.elastic.skeleton import fill
from anysize.elastic.slicing import take
from anysize.elastic.views import within
from anysize.errors import MethodError, unknown
from anysize.methods.base import Method
from anysize.methods.capabilities import Factored
from anysize.methods.context import Context
from anysize.methods.factorising import factorising_notices, inner_weights
from anysize.methods.kit import (
    check_width,
    checked,
    class_weights,
    cut,
    first_tensors,
    paste,
    sub_model,
    trained_widths,
    width_key,
    widths_up_to,
)
from anysize.methods.messages import Client, ParameterGroup, SubModel, Update
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step, Tricks
from anysize.rng import generator
from anysize.wire import Tensors, by_prefix

Fraction = Literal["basis_inputs", "basis_size"]
Layers = Annotated[
    Mapping[str, Mapping[Fraction, Part]],
    Field(description="a table of name patterns, each with basis_inputs, basis_size above 0 and at most 1"),
]
_RANK_CAP = 15 / 16


@dataclass(frozen=True)
class FLANCState:
    """The shared basis, each width's coefficients and dense tensors, and the full network's tensors that all share."""

    basis: Tensors
    coefficients: dict[str, Tensors]
    dense: dict[str, Tensors]
    shared: Tensors


@dataclass(frozen=True)
class Factors:
    """The shape of one weight's basis: R1 inputs, R2 vectors; `asked` is the R1 that was asked for."""

    inputs: int
    size: int
    asked: int


@dataclass(frozen=True)
class FLANC(Method[FLANCState], Factored[FLANCState]):
    """All-in-one neural composition.

    Attributes:
        orthogonality: lambda of Eq. (3).
        orthogonality_form: squared entries of a layer's Gram matrix minus identity, as their "mean" or their "sum".
        basis_inputs: R1 as a fraction of a layer's full inputs, lowered to a divisor of every trained input width.
        basis_size: R2 as a fraction of a layer's full outputs.
        layers: other fractions for some weights: a pattern of names -> { basis_inputs = ..., basis_size = ... }.
        compose_pointwise: compose 1 x 1 convolutions too, for networks made of depthwise and 1 x 1 ones; the authors
            leave them dense.
        share_unscaled: layers that no width changes are averaged over all clients instead of per width.
        ordered_dropout: for every batch a client trains a random one of the trained widths up to its own (Horváth et
            al. 2021); it receives and sends the coefficients of all of them.
        execution: "auto" computes each layer the faster way by a fixed rule on shapes: it composes the weight, or mixes
            the outputs of the basis; "compose" and "mix" force one way. If a budget limits activations, all layers are
            composed.
        share_dense: all widths share what is not composed (first layer, norms, classifier) as slices of one network,
            averaged entry by entry as in HeteroFL, instead of one copy for each width.
        start: "apart" draws every width's coefficients separately; "nested" makes them slices of the largest width's.
        average: the server averages "factors" as in Eq. (4), or "products": the composed weights per width, which are
            then factored again, all widths together.
        basis_rate: a factor on the learning rate of the basis.
        coefficients_rate: a factor on the learning rate of the coefficients.
    """

    orthogonality: NotNegative = 10.0
    orthogonality_form: Literal["mean", "sum"] = "mean"
    basis_inputs: Part = 0.125
    basis_size: Part = 0.25
    layers: Layers = field(default_factory=dict)
    compose_pointwise: bool = False
    share_unscaled: bool = True
    ordered_dropout: bool = False
    execution: Way = "auto"
    share_dense: bool = False
    start: Literal["apart", "nested"] = "apart"
    average: Literal["factors", "products"] = "factors"
    basis_rate: Positive = 1.0
    coefficients_rate: Positive = 1.0

    summary = "every width composed from one shared orthogonal basis (Mei et al. 2022)"
    paper = Tricks(rescaled_init=False)
    exceptions: ClassVar[Mapping[str, str]] = {
        "pretrained_start": "composed weights lie in the span of a basis that is smaller than the weight",
    }

    def conflicts(self) -> Iterable[str]:
        if self.ordered_dropout and self.share_dense:
            yield "ordered_dropout together with share_dense; choose one of the two"
        if self.ordered_dropout and self.average == "products":
            yield "ordered_dropout together with average = 'products': a client's widths share one basis; choose one"

    def sizes(self, context: Context) -> Sequence[Size]:
        return context.sizes

    def init(self, context: Context) -> FLANCState:
        factors = self.factors(context)
        start = context.start()
        basis = {name: _first_basis(context, name, factors[name]) for name in factors}
        coefficients: dict[str, Tensors] = {}
        dense: dict[str, Tensors] = {}
        shared = set(self._shared(context))
        for width in trained_widths(context):
            slices = first_tensors(context, width)
            coefficients[width_key(width)] = {
                name: self._first_coefficients(context, name, width, slices[name], basis[name]) for name in factors
            }
            dense[width_key(width)] = {n: t for n, t in slices.items() if n not in factors and n not in shared}
        return FLANCState(basis, coefficients, dense, {name: start[name] for name in sorted(shared)})

    def groups(self, module: nn.Module) -> list[ParameterGroup]:
        if self.basis_rate == self.coefficients_rate == 1:
            return super().groups(module)
        networks = [m for m in module.modules() if isinstance(m, Composed)]  # several with ordered dropout
        basis = {id(p): p for network in networks for p in network.basis.values()}
        coefficients = {id(p): p for network in networks for p in network.coefficients.values()}
        rest = [p for p in module.parameters() if p.requires_grad and id(p) not in basis | coefficients]
        return [
            ParameterGroup(rest),
            ParameterGroup(list(basis.values()), rate=self.basis_rate),
            ParameterGroup(list(coefficients.values()), rate=self.coefficients_rate),
        ]

    def extract(self, context: Context, state: FLANCState, client: Client) -> SubModel:
        width = client.size.width
        tensors = {f"basis.{key(name)}": tensor for name, tensor in state.basis.items()}
        tensors |= {f"network.{name}": tensor for name, tensor in cut(context, state.shared, width).items()}
        tensors |= _own_tensors(state, width)
        if self.ordered_dropout:
            tensors = {f"largest.{name}": tensor for name, tensor in tensors.items()}
            for i, inner in enumerate(widths_up_to(context, width)[:-1]):
                tensors |= {f"inner.{i}.{name}": tensor for name, tensor in _own_tensors(state, inner).items()}
        return sub_model(client, tensors, width=width)

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        if self.ordered_dropout:
            return self._build_widths(context, sub_model)
        parts = _parts(sub_model.tensors)
        skeleton = context.skeleton(sub_model.width)
        return fill(Composed(skeleton, parts["basis"], parts["coefficients"], self._way(context)), sub_model.tensors)

    def _build_widths(self, context: Context, sub_model: SubModel) -> nn.Module:
        """The networks of all widths that the client may draw; only the largest if the client runs no other."""
        by_width = _by_width(context, sub_model.tensors, sub_model.width)
        basis = _parts(by_width[-1][1])["basis"]
        if sub_model.finished:
            by_width = by_width[-1:]
        networks = [
            Composed(context.skeleton(width), basis, _parts(tensors)["coefficients"], self._way(context))
            for width, tensors in by_width
        ]
        module = ComposedWidths(networks, self._shared(context))
        prefixes = ("largest.", "inner.") if len(module) > 1 else ("largest.",)
        return fill(module, {name: t for name, t in sub_model.tensors.items() if name.startswith(prefixes)})

    def loss(self, module: nn.Module, batch: Batch, step: Step) -> Tensor:
        """Eq. (3); with ordered dropout, for a width drawn at random."""
        if isinstance(module, ComposedWidths):
            module = module.at(step.choose(len(module)))
        assert isinstance(module, Composed)
        loss = step.objective(module, batch)
        if self.orthogonality == 0 or not module.basis:
            return loss
        return loss + self.orthogonality * orthogonality_loss(module.basis.values(), self.orthogonality_form)

    def aggregate(self, context: Context, state: FLANCState, updates: Iterable[Update]) -> FLANCState:
        """Eq. (4): the mean basis over all clients, mean coefficients and dense tensors over the clients of a width."""
        head = context.axes.head
        basis, shared = context.average(state.basis), context.average(state.shared, head)
        own = {width: context.average(self._averaged(state.basis, u)) for width, u in state.coefficients.items()}
        dense = {width: context.average(tensors, head) for width, tensors in state.dense.items()}
        for update in checked(context, updates):
            if width_key(update.width) not in own:
                raise MethodError(f"flanc: an update has width {width_key(update.width)}; allowed: {', '.join(own)}")
            weight, classes = update.weight(context.tricks), class_weights(context, update)
            for width, tensors in self._networks(context, update):
                parts, kept = _parts(tensors), context.axes.kept(width)
                basis.add(parts["basis"], weight)
                own[width_key(width)].add(self._averaged(parts["basis"], parts["coefficients"]), weight)
                common = {name: t for name, t in parts["network"].items() if name in state.shared}
                rest = {name: t for name, t in parts["network"].items() if name not in state.shared}
                shared.add(common, weight, {name: context.axes.index(name, kept) for name in common}, classes)
                dense[width_key(width)].add(rest, weight, classes=classes)
        vectors, means = basis.result(), {width: mean.result() for width, mean in own.items()}
        if self.average == "products":
            vectors, means = refactored(vectors, means)
        return FLANCState(vectors, means, {width: mean.result() for width, mean in dense.items()}, shared.result())

    def _averaged(self, basis: Mapping[str, Tensor], coefficients: Tensors) -> Tensors:
        """What is averaged within a width: its coefficients, or the weights that they compose."""
        if self.average == "factors":
            return coefficients
        wrong = [name for name, u in coefficients.items() if name not in basis or u.shape[2:] != basis[name].shape[:1]]
        if wrong:
            raise MethodError(f"flanc: an update's coefficients of {', '.join(wrong)} do not fit the basis")
        return {name: compose(basis[name], u) for name, u in coefficients.items()}

    def customize(self, context: Context, state: FLANCState, size: Size) -> nn.Module:
        if width_key(size.width) in state.coefficients:
            return fill(context.skeleton(size.width), composed_tensors(context, state, size.width))
        largest = context.largest.width
        check_width(context, size.width, "flanc")
        blank = {name: torch.zeros_like(tensor) for name, tensor in fill_like(context).items()}
        full = paste(context, blank, composed_tensors(context, state, largest), largest)
        return fill(context.skeleton(size.width), cut(context, full, size.width))

    def products(self, context: Context, state: FLANCState, size: Size) -> Mapping[str, tuple[Tensor, Tensor]]:
        coefficients = state.coefficients.get(width_key(size.width), {})
        return {name: (own, state.basis[name]) for name, own in coefficients.items()}

    def describe(self, context: Context, state: FLANCState) -> Mapping[str, Tensor]:
        """Gram matrices (Fig. 6), and the mean absolute coefficient of every fragment of every output (Fig. 5)."""
        grams = {f"gram/{name}": gram(basis) for name, basis in state.basis.items()}
        columns = {
            f"coefficients/{width}/{name}": u.abs().mean(-1).flatten()
            for width, tensors in state.coefficients.items()
            for name, u in tensors.items()
        }
        return grams | columns

    def ways(self, context: Context, size: Size) -> Mapping[str, str]:
        """How `build` computes each composed weight's layer: "compose" or "mix"."""
        basis, coefficients = {}, {}
        for name, f in self.factors(context).items():
            outputs, inputs, *kernel = _shape(context, name, size.width)
            basis[name] = torch.empty(f.size, f.inputs, *kernel, device="meta")
            coefficients[name] = torch.empty(outputs, inputs // f.inputs, f.size, device="meta")
        return Composed(context.skeleton(size.width), basis, coefficients, self._way(context)).ways

    def _way(self, context: Context) -> Way:
        return "compose" if context.scarce_activations else self.execution

    def notices(self, context: Context) -> list[str]:
        rest = "one network of which widths have slices" if self.share_dense else "a network of its own for each width"
        notes = factorising_notices(context, "flanc", f"the rest is {rest}", self.compose_pointwise)
        more = set(inner_weights(context, pointwise=True)) - set(inner_weights(context, self.compose_pointwise))
        if notes and more:
            count = sum(context.template.get_parameter(name).numel() for name in more)
            notes[0] += f". method.compose_pointwise = true composes {count:,} more, those of 1 x 1 convolutions"
        return notes + [
            f"flanc: {name}: basis_inputs gives R1 = {f.asked}, which does not divide every trained input width; "
            f"R1 = {f.inputs}"
            for name, f in self.factors(context).items()
            if f.inputs != f.asked
        ]

    def factors(self, context: Context) -> dict[str, Factors]:
        """R1 and R2 of every weight that is composed."""
        names = inner_weights(context, self.compose_pointwise)
        problems = [
            unknown("weight in flanc's layers", pattern, names)
            for pattern in self.layers
            if not any(_matches(name, pattern) for name in names)
        ]
        if problems:
            raise MethodError("; ".join(problems))
        return {name: self._factors(context, name) for name in names}

    def _factors(self, context: Context, name: str) -> Factors:
        outputs, inputs, *kernel = context.axes.shapes[name]
        fractions: dict[Fraction, float] = {"basis_inputs": self.basis_inputs, "basis_size": self.basis_size}
        for pattern, options in self.layers.items():
            if _matches(name, pattern):
                fractions |= options
        asked = max(1, round(fractions["basis_inputs"] * inputs))
        widths = [_shape(context, name, width)[1] for width in trained_widths(context)]
        common = math.gcd(*widths)
        lowered = next(r for r in range(min(asked, common), 0, -1) if common % r == 0)
        size = max(1, round(fractions["basis_size"] * outputs))
        if math.prod(kernel) == 1:
            size = min(size, max(1, math.floor(_RANK_CAP * lowered)))
        return Factors(lowered, size, asked)

    def _networks(self, context: Context, update: Update) -> list[tuple[float, Tensors]]:
        """(width, tensors) of every network that the client trained."""
        if self.ordered_dropout:
            return _by_width(context, update.tensors, update.width)
        return [(update.width, update.tensors)]

    def _first_coefficients(self, context: Context, name: str, width: float, weight: Tensor, basis: Tensor) -> Tensor:
        if context.pretrained:
            return project(weight, basis)
        drawn = max(trained_widths(context)) if self.start == "nested" else width
        outputs, inputs = _shape(context, name, drawn)[:2]
        random = generator(context.seed, "coefficients", name, width_key(drawn))
        whole = random_coefficients(outputs, inputs // basis.shape[1], basis, random)
        rows = within(context.axes, name, context.axes.kept(width), context.axes.kept(drawn))[0]
        part = take(whole, (rows, None, None))[:, : weight.shape[1] // basis.shape[1]]
        return part * first_spreads(context, name, width)[:, None, None]

    def _shared(self, context: Context) -> list[str]:
        if self.share_dense:
            composed = set(self.factors(context))
            return [name for name in context.axes.shapes if name not in composed]
        return unscaled_names(context) if self.share_unscaled else []


def orthogonality_loss(bases: Iterable[Tensor], form: str = "sum") -> Tensor:
    """Eq. (3), second term: the squared distance of each Gram matrix from the identity, summed over layers."""
    terms = []
    for basis in bases:
        entries = distance_from_identity(basis).flatten()
        square = entries.dot(entries)
        terms.append(square if form == "sum" else square / len(entries))
    return sum(terms[1:], start=terms[0]) if terms else torch.zeros(())


def refactored(near: Tensors, weights: Mapping[str, Tensors]) -> tuple[Tensors, dict[str, Tensors]]:
    """One basis per weight for all widths, close to the bases `near`, and every width's coefficients in it."""
    basis = {name: joint_basis([tensors[name] for tensors in weights.values()], near[name]) for name in near}
    return basis, {
        width: {name: project(weight, basis[name]) for name, weight in tensors.items()}
        for width, tensors in weights.items()
    }


def unscaled_names(context: Context) -> list[str]:
    """Tensors of layers that no width changes."""
    # Membership, not `elastic`: an axis changes even if only a part of it does (a concatenation).
    members = (member for group in context.axes.groups if not group.fixed for member in group.members)
    scaled = {member.name.rpartition(".")[0] for member in members}
    return [name for name in context.axes.shapes if name.rpartition(".")[0] not in scaled]


def composed_tensors(context: Context, state: FLANCState, width: float) -> Tensors:
    """The tensors of the ordinary network of a trained width: Eq. (1) for every composed weight."""
    weights = {name: compose(state.basis[name], u) for name, u in state.coefficients[width_key(width)].items()}
    return weights | state.dense[width_key(width)] | cut(context, state.shared, width)


def fill_like(context: Context) -> Tensors:
    """Empty tensors of the full network's shapes."""
    dtypes = {name: tensor.dtype for name, tensor in context.template.state_dict().items()}
    return {name: torch.empty(shape, dtype=dtypes[name]) for name, shape in context.axes.shapes.items()}


def _first_basis(context: Context, name: str, factors: Factors) -> Tensor:
    if context.pretrained:
        weight = cut(context, {name: context.start()[name]}, max(trained_widths(context)))[name]
        return principal_basis(weight, factors.inputs, factors.size)
    kernel = context.axes.shapes[name][2:]
    return orthonormal_basis(factors.size, factors.inputs, kernel, generator(context.seed, "basis", name))


def first_spreads(context: Context, name: str, width: float) -> Tensor:
    """For each output of a weight, the standard deviation with which the network of that width starts there, (T_p,).

    It is measured on the full network's own start, each gate of a recurrent weight by itself. As for every other tensor
    of a narrow network, [tricks] rescaled_init says whether it is the full width's or the width's own.
    """
    weight = context.start()[name]
    layer = context.template.get_submodule(name.rpartition(".")[0])
    kept = context.axes.index(name, context.axes.kept(width))[0]
    own = {name: take(spreads(weight, stacked_matrices(layer, len(weight))), (kept,))}
    if not context.tricks.rescaled_init:
        own = scaled_to_own_width(own, context.skeleton(width), context.template)
    return own[name]


def _matches(name: str, pattern: str) -> bool:
    """Whether the pattern matches the end of a weight's name, or of its layer's name."""
    layer = name.rpartition(".")[0]
    return any(fnmatch(text, form) for text in (name, layer) for form in (pattern, f"*.{pattern}"))


def _shape(context: Context, name: str, width: float) -> tuple[int, ...]:
    return context.axes.shape(name, context.axes.kept(width))


def _own_tensors(state: FLANCState, width: float) -> Tensors:
    """The tensors that belong to one width, under their names in a message."""
    own = {f"coefficients.{key(name)}": tensor for name, tensor in state.coefficients[width_key(width)].items()}
    return own | {f"network.{name}": tensor for name, tensor in state.dense[width_key(width)].items()}


def _by_width(context: Context, tensors: Mapping[str, Tensor], width: float) -> list[tuple[float, Tensors]]:
    """(width, tensors) of every network in a message with ordered dropout, smallest first."""
    *smaller, largest = widths_up_to(context, width)
    widths = {f"inner.{i}.": inner for i, inner in enumerate(smaller)} | {"largest.": largest}
    found = by_prefix(tensors, widths, "flanc: an update")
    return [(own, found[prefix]) for prefix, own in widths.items()]


def _parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensors]:
    """A sub-model's tensors by part, under the names of the network."""
    found = by_prefix(tensors, ("basis.", "coefficients.", "network."), "flanc: an update")
    parts = {part: {unkey(n): t for n, t in found[f"{part}."].items()} for part in ("basis", "coefficients")}
    return parts | {"network": found["network."]}
