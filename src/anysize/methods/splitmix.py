"""Split-Mix: a wide network is split into narrow base networks that every client can train; a device mixes what fits.

Hong, Wang, Wang, Zhou. "Efficient Split-Mix Federated Learning for On-Demand and In-Situ Customization". ICLR 2022.

    paper           here                            shape
    r               SplitMix.base_width             scalar; by default the smallest trained width
    M               number of bases                 floor(1 / r)
    w_{i,r}         state.bases[str(i)]             the network narrowed to r
    R_k             client.size.width               scalar
    P, p            state.served                    the shuffled orders of all bases, and how far they were read
    W_k             extract()                       floor(R_k / r) bases
    |D_k|           update.samples                  scalar

Equation index: Algorithm 1 -> `SplitMix`; its line 7 and 8, the mean of each base over the clients that trained it ->
`SplitMix.aggregate`; line 9, sorting by validation accuracy -> `SplitMix.finish`; line 11, the mean of logits ->
`elastic.ensemble.mean_output`; Algorithm 2 -> `sampled_bases`; Algorithm 3 -> `SplitMix.loss`;
Eq. (1) and Algorithm 4 -> `objectives.adversarial`; Eq. (2) -> `elastic.norm.mixed_norms`; the mean of the two
branches' outputs, which section 4.3 names before it -> `elastic.norm.MixedOutputs`. Rescaled initialisation (section
4.2) -> [tricks] rescaled_init.

Departures: the paper's line 8 divides by zero for a base that no client trained; here the base keeps its value, as in
the authors' code. Bases are not drawn one by one but are the blocks of channels of one full-width start, whose entries
are independent draws at the full width's scale: the same distribution, for any network and any initialisation; if the
channels do not divide evenly, blocks share some; the classifier's biases, which have no channels, are in another order
in every base. The authors' masked loss masks by the classes of the current batch,
ours by the classes of the client, as HeteroFL's does and the paper says. `rescale_layer` divides the outputs of
narrowed layers by r in training only, as in the authors' code; it is off by default, since the paper finds that it
changes nothing if statistics are the batch's and ruins those tracked in training. The authors train bases one after
another; here they run in one pass where `elastic.grouping` can and where it is faster, which changes no more than
rounding.
The attack's step is 2/255 as in the paper; the authors' code has min(1.25 epsilon, epsilon + 4/255) / steps, which is
10/255/7 at epsilon 8/255 and 7 steps; [tricks] attack_step = 0.0056 is that, rounded.
Section 4.3 does not say which outputs it averages; here they are logits, as in line 11 of Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from anysize.config.values import UpToOne
from anysize.elastic.ensemble import Networks, bases_within, mixed, split
from anysize.elastic.grouping import Grouped, grouped, stacked, unstacked
from anysize.elastic.norm import Dual, MixedOutputs, batch_norms, dual_tensors, mixed_norms
from anysize.elastic.scaling import Scaler, narrowed_layers
from anysize.elastic.skeleton import fill, tensors_of
from anysize.errors import MethodError
from anysize.methods.base import Method
from anysize.methods.capabilities import Adjustable, Finishing, Judge, Mixture, Parted
from anysize.methods.context import Context
from anysize.methods.kit import checked, class_weights, first_tensors, sub_model, trained_parameters
from anysize.methods.messages import Client, ParameterGroup, SubModel, Update
from anysize.methods.size import Levels, Size
from anysize.methods.training import Batch, Step, Tricks
from anysize.rng import generator
from anysize.wire import Tensors, under


@dataclass(frozen=True)
class SplitMixState:
    """The base networks.

    Attributes:
        bases: the tensors of each base, by its number.
        served: how many clients have trained, which is where Algorithm 2 continues in its shuffled order.
        order: the order in which bases are mixed.
    """

    bases: dict[str, Tensors]
    served: int
    order: list[int]


def sampled_bases(count: int, bases: int, place: int, seed: int, rest: torch.Generator) -> list[int]:
    """Algorithm 2: the next base in the shuffled order and others drawn without replacement, sorted.

    Args:
        count: how many bases the client trains, n.
        bases: how many bases there are, M.
        place: how many clients were served before, over all rounds; with M it gives the shuffle and the place in it.
        seed: the seed from which each shuffle is derived.
        rest: draws the other bases.

    >>> first = [sampled_bases(1, 4, place, 0, torch.Generator())[0] for place in range(4)]
    >>> sorted(first)
    [0, 1, 2, 3]
    """
    shuffle, at = divmod(place, bases)
    first = int(torch.randperm(bases, generator=generator(seed, shuffle, "order of bases"))[at])
    others = [base for base in range(bases) if base != first]
    drawn = torch.randperm(len(others), generator=rest)[: count - 1].tolist()
    return sorted([first, *(others[i] for i in drawn)])


@dataclass(frozen=True)
class SplitMix(Method[SplitMixState], Mixture[SplitMixState], Finishing[SplitMixState], Adjustable, Parted):
    """Base networks of the smallest width, mixed on demand.

    Attributes:
        base_width: the width r of the base networks; 0 for the smallest trained width.
        sort_bases: after the last round, sort the bases so that the best on the clients' held-out data are mixed first;
            needs data.validation.
        rescale_layer: in training, divide the outputs of narrowed layers by r.
        one_pass: train a client's bases in one pass where that is possible and faster.
        dual_norm: have every batch-norm twice, for clean inputs and for inputs under attack, and mix the two when a
            network is customised; needs tricks.adversarial (0.5 in the paper) and batch_norm = "tracked", or "local",
            with which both stay on the client and nothing is mixed.
        mixing: what dual_norm mixes: "norms" in every layer, which costs as much as one network; "outputs" of the two
            networks, which costs two forward passes.
    """

    base_width: UpToOne = 0.0
    sort_bases: bool = False
    rescale_layer: bool = False
    one_pass: bool = True
    dual_norm: bool = False
    mixing: Literal["norms", "outputs"] = "norms"

    summary = "narrow base networks trained everywhere, mixed on demand (Hong et al. 2022)"
    paper = Tricks(masked_loss=True, batch_norm="batch")
    exceptions = MappingProxyType({"pretrained_start": "a learned network is split, and its parts mixed are not it"})
    reusable = False  # the names of a client's tensors tell which bases it trains

    def ignored(self) -> Iterable[str]:
        if self.mixing != "norms" and not self.dual_norm:
            yield f'mixing = "{self.mixing}" works with dual_norm = true, and dual_norm = false'

    def sizes(self, context: Context) -> Sequence[Size]:
        return context.sizes

    def init(self, context: Context) -> SplitMixState:
        self._check_dual(context)
        width, count = self._width(context), self._count(context)
        self._fitting(context, context.sizes[0])
        parts = split(context.axes, width, count)
        bases = {str(i): starting_apart(context, first_tensors(context, width, own), i) for i, own in enumerate(parts)}
        _check_alike(bases)
        if self.dual_norm:
            bases = {name: dual_tensors(own, context.skeleton(width)) for name, own in bases.items()}
        return SplitMixState(bases, 0, list(range(count)))

    def extract(self, context: Context, state: SplitMixState, client: Client) -> SubModel:
        count = self._fitting(context, client.size)
        chosen = state.order[:count]
        if client.job == "train":
            place, rest = state.served + client.position, client.generator("bases")
            chosen = sampled_bases(count, len(state.bases), place, client.seed, rest)
        return sub_model(client, _named(chosen, state), width=client.size.width, parts=map(str, chosen), bases=chosen)

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        chosen = sub_model.ticket.more["bases"]
        parts = {str(i): under(f"{i}.", sub_model.tensors) for i in chosen}
        if sub_model.finished:
            return Networks({name: self._tested(context, own) for name, own in parts.items()})
        # Whether bases can be grouped is tried with real weights, which a device must not allocate to count a cost.
        counted = any(tensor.is_meta for tensor in sub_model.tensors.values())
        trains = sub_model.ticket.job == "train" and not counted
        together = self._together(context, len(chosen)) if trains else ""
        if isinstance(together, Grouped):
            module = fill(together, stacked(list(parts.values())))
        else:
            structure = self._structure(context)
            module = Networks({name: fill(structure, own) for name, own in parts.items()})
        if self.rescale_layer and self._width(context) < 1:
            base = context.skeleton(self._width(context))
            within = "network." if self.dual_norm else ""
            names = [f"{within}{name}" for name, _ in narrowed_layers(context.axes, base, before_norms=True)]
            for layer in (network.get_submodule(name) for network in module.children() for name in names):
                layer.register_forward_hook(Scaler(self._width(context), in_training_only=True))
        return module

    def groups(self, module: nn.Module) -> list[ParameterGroup]:
        """One parameter group per base, since bases share nothing, not even the norm for clipping gradients."""
        networks = [[p for p in network.parameters() if p.requires_grad] for network in module.children()]
        return [ParameterGroup(parameters) for parameters in networks if parameters]

    def loss(self, module: nn.Module, batch: Batch, step: Step) -> Tensor:
        """Algorithm 3: the sum of the bases' losses, whose gradients do not mix; each base faces its own attack."""
        if isinstance(module, Grouped):
            x = torch.cat([batch.x] * module.count) if module.own else batch.x
            # A loss is a mean over samples, here over the samples of all bases.
            return module.count * step.objective(module, Batch(x, torch.cat([batch.y] * module.count)))
        losses = [step.objective(network, batch) for network in module.children()]
        return sum(losses[1:], start=losses[0])

    def pack(self, module: nn.Module, sub_model: SubModel) -> Update:
        chosen = sub_model.ticket.more["bases"]
        tensors = tensors_of(module)
        if isinstance(module, Grouped):
            shapes = {name: tensor.shape for name, tensor in under(f"{chosen[0]}.", sub_model.tensors).items()}
            parts = unstacked(tensors, shapes, module.count)
            tensors = {f"{i}.{name}": tensor for i, part in zip(chosen, parts) for name, tensor in part.items()}
        return Update(tensors, sub_model.ticket)

    def aggregate(self, context: Context, state: SplitMixState, updates: Iterable[Update]) -> SplitMixState:
        """Algorithm 1, lines 7 and 8; a base that no client trained keeps its value."""
        head = {f"network.{name}" if self.dual_norm else name: axis for name, axis in context.axes.head.items()}
        means = {name: context.average(tensors, head) for name, tensors in state.bases.items()}
        served = state.served
        for update in checked(context, updates):
            weight, classes = update.weight(context.tricks), class_weights(context, update)
            for base in _trained_bases(update, len(means)):
                means[str(base)].add(under(f"{base}.", update.tensors), weight, classes=classes)
            served += 1
        return SplitMixState({name: mean.result() for name, mean in means.items()}, served, state.order)

    def customize(self, context: Context, state: SplitMixState, size: Size) -> nn.Module:
        """Algorithm 1, line 11: the first floor(R / r) bases."""
        chosen = self._mixed(context, state, size)
        return mixed([self._network(context, state.bases[str(base)], size.robustness) for base in chosen])

    def mixtures(self, context: Context) -> Sequence[Size]:
        width, trained = self._width(context), self.sizes(context)
        counts = set(range(1, self._count(context) + 1)) - {bases_within(size.width, width) for size in trained}
        between = [Size(round(count * width, _DIGITS)) for count in counts]
        return sorted([*trained, *between], key=lambda size: size.order)

    def members(self, context: Context, state: SplitMixState, size: Size) -> Sequence[str]:
        return [_MEMBER.format(base) for base in self._mixed(context, state, size)]

    def _mixed(self, context: Context, state: SplitMixState, size: Size) -> list[int]:
        """The bases of a size, in the order in which they are mixed."""
        width = self._width(context)
        count = bases_within(size.width, width)
        if not 1 <= count <= len(state.bases):
            raise MethodError(
                f"splitmix: width {size.width:g} was asked for; there are {len(state.bases)} bases of width {width:g}"
            )
        return state.order[:count]

    def member(self, context: Context, state: SplitMixState, name: str, client: Client) -> SubModel:
        base = next(i for i in state.order if _MEMBER.format(i) == name)
        return sub_model(client, _named([base], state), width=self._width(context), bases=[base])

    def parts(self, context: Context) -> Mapping[str, int]:
        return dict.fromkeys(map(str, range(self._count(context))), trained_parameters(self._structure(context)))

    def levels(self, context: Context) -> Levels | None:
        # With local norms the two branches differ on clients alone: whatever the server mixes is the same network.
        mixes = self.dual_norm and context.tricks.batch_norm != "local"
        return Levels((0.0, 1.0), mixes=True) if mixes else None

    @property
    def finishes(self) -> bool:
        return self.sort_bases

    def finish(self, context: Context, state: SplitMixState, judge: Judge) -> SplitMixState:
        """Algorithm 1, line 9: the best base on the clients' held-out data is mixed first."""
        task = context.task
        found = {
            base: judge(partial(self.member, context, state, _MEMBER.format(base)))[task.metric]
            for base in range(len(state.bases))
        }
        order = sorted(found, key=lambda base: (-found[base] if task.higher_is_better else found[base], base))
        return replace(state, order=order)

    def notices(self, context: Context) -> list[str]:
        notes = []
        counts = sorted({self._fitting(context, size) for size in context.sizes} - {1})
        reasons = [self._together(context, count) for count in counts]
        if reasons and all(isinstance(reason, str) and reason for reason in reasons):
            notes.append(f"splitmix: a client's bases are trained one after another: {reasons[-1]}")
        kept = context.tricks.batch_norm in ("tracked", "local") or not batch_norms(context.template)
        if self.rescale_layer and kept and self._width(context) < 1:
            notes.append(
                "splitmix: rescale_layer scales in training only; without batch-norm, or with statistics that are "
                "tracked in training, the finished network is not the one that was trained (Table 4: about 10 %)"
            )
        if self.dual_norm and context.tricks.batch_norm == "local":
            notes.append(
                'splitmix: dual_norm with tricks.batch_norm = "local": both batch-norms stay on the clients, which are '
                "tested with the one for clean inputs; customised networks offer no choice of robustness"
            )
        return notes

    def _network(self, context: Context, tensors: Mapping[str, Tensor], level: float | None) -> nn.Module:
        """A base as an ordinary network; the branches of a dual one are mixed at a level of robustness."""
        network = fill(self._structure(context), tensors)
        if not isinstance(network, Dual):
            return network
        mix = mixed_norms if self.mixing == "norms" else MixedOutputs
        return mix(network, level or 0.0)

    def _tested(self, context: Context, tensors: Mapping[str, Tensor]) -> nn.Module:
        """A base as a client tests it: as it is customised, with norms under the names by which a client keeps them."""
        if not (self.dual_norm and context.tricks.batch_norm == "local"):
            return self._network(context, tensors, None)
        clean = context.skeleton(self._width(context))
        return Networks({"network": fill(clean, under("network.", tensors))})

    def _structure(self, context: Context) -> nn.Module:
        """The structure of a base as a client trains it: the network, with every batch-norm twice if dual_norm."""
        base = context.skeleton(self._width(context))
        if not self.dual_norm:
            return base
        if base not in _duals:
            _duals[base] = Dual(base)
        return _duals[base]

    def _check_dual(self, context: Context) -> None:
        tricks = context.tricks
        if not self.dual_norm:
            return
        problems = [
            problem
            for wrong, problem in (
                (not batch_norms(context.template), "the model has no batch-norm"),
                (not 0 < tricks.adversarial < 1, "set tricks.adversarial between 0 and 1, 0.5 as in the paper"),
                (
                    tricks.batch_norm not in ("tracked", "local"),
                    f'tricks.batch_norm = "{tricks.batch_norm}"; set it to "tracked" or "local"',
                ),
                (
                    tricks.batch_norm == "local" and self.mixing != "norms",
                    'tricks.batch_norm = "local" leaves nothing to mix; leave out method.mixing',
                ),
                (
                    tricks.batch_norm == "tracked" and tricks.server_momentum > 0,
                    "tricks.server_momentum would move statistics; leave it out",
                ),
            )
            if wrong
        ]
        if problems:
            raise MethodError("splitmix: dual_norm: " + "; ".join(problems))

    def _width(self, context: Context) -> float:
        return self.base_width or context.sizes[0].width

    def _count(self, context: Context) -> int:
        return bases_within(1.0, self._width(context))

    def _fitting(self, context: Context, size: Size) -> int:
        count = bases_within(size.width, self._width(context))
        if count < 1:
            raise MethodError(
                f"splitmix: a device of width {size.width:g} fits no base of width {self._width(context):g}; lower "
                "method.base_width"
            )
        return min(count, self._count(context))

    def _together(self, context: Context, count: int) -> Grouped | str:
        """The structure of `count` bases in one pass, or why they run one after another ("": no reason to give)."""
        if not self.one_pass or count == 1:
            return ""
        if context.training.clip is not None:
            return "training.clip clips each base's gradients separately"
        looks = _looking_at_bases(context.tricks)
        if looks:
            return f"tricks.{looks[0]} treats each base separately"
        own_inputs = context.tricks.adversarial > 0  # each base is attacked with different inputs
        return grouped(self._structure(context), count, context.axes.found.example, own_inputs)


def _check_alike(bases: Mapping[str, Tensors]) -> None:
    """Refuse a network whose bases would differ in shape: they would not be networks of one kind."""
    first, *others = bases.values()
    for name, tensor in first.items():
        shapes = {tuple(own[name].shape) for own in others} - {tuple(tensor.shape)}
        if shapes:
            raise MethodError(
                f"splitmix: the model cannot be split into bases of one shape: '{name}' would have shape "
                f"{tuple(tensor.shape)} in one base and {shapes.pop()} in another. Its width groups tie channels "
                "unevenly, as a group norm over concatenated layers does; keep such a width group whole with "
                "model.keep, or use another method"
            )


_MEMBER = "base {}"
_DIGITS = 12  # of a size's label: three bases of width 0.1 are 0.3, not 0.30000000000000004

_duals: WeakKeyDictionary[nn.Module, Dual] = WeakKeyDictionary()

_HARMLESS = {
    "masked_loss", "classwise_head", "batch_norm", "weighting", "rescaled_init", "proximal", "server_momentum",
    "adversarial", "attack_epsilon", "attack_step", "attack_steps",
}  # fmt: skip
"""Tricks that treat every entry or every sample the same way; any other might differ for bases in one pass."""


def _looking_at_bases(tricks: Tricks) -> list[str]:
    """The chosen tricks that need each base as a separate network."""
    chosen = [f.name for f in fields(tricks) if f.name not in _HARMLESS and getattr(tricks, f.name) != f.default]
    return chosen + (["batch_norm"] if tricks.batch_norm == "local" else [])


def starting_apart(context: Context, tensors: Tensors, base: int) -> Tensors:
    """A base's first tensors, with the classifier's biases shuffled: otherwise all bases would start with the same.

    A learned start stays as it is.
    """
    biases = [name for name in context.axes.head if name in tensors and tensors[name].dim() == 1]  # not a tie's names
    if base == 0 or context.pretrained or not biases:
        return tensors
    order = torch.randperm(len(tensors[biases[0]]), generator=generator(context.seed, "head biases", base))
    return tensors | {name: tensors[name][order] for name in biases}


def _named(bases: Iterable[int], state: SplitMixState) -> Tensors:
    """The tensors of several bases under their names in a message."""
    return {f"{base}.{name}": tensor for base in bases for name, tensor in state.bases[str(base)].items()}


def _trained_bases(update: Update, count: int) -> list[int]:
    """The bases that an update claims to hold; refuses an update whose tensors say otherwise."""
    given = update.ticket.more.get("bases")
    held = sorted({name.partition(".")[0] for name in update.tensors})
    if not isinstance(given, list) or sorted(str(base) for base in given) != held:
        raise MethodError(f"splitmix: an update claims to hold the bases {given!r}, but holds {', '.join(held)}")
    wrong = [base for base in given if not isinstance(base, int) or not 0 <= base < count]
    if wrong:
        raise MethodError(f"splitmix: an update holds base {wrong[0]}; there are {count}, numbered from 0")
    return given
