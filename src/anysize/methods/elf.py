"""eLF: a device trains as many blocks and weights as a table says for its budget; missing ones come back as zeros.

Farcas, Chen, Wang, Marculescu. "Model Elasticity for Hardware Heterogeneity in Federated Learning Systems".
FedEdge 2022.

    paper                   here                                    shape
    omega                   state.tensors                           the full network
    phi_p                   context.skeleton(width, depth)          blocks removed, last of a stage first
    phi_p^{-1}              restored(...)                           zeros in their place
    m_p^l                   state.masks[key(size)]                  a bit for every prunable weight
    D_proxy                 context.proxy.share(0.05)               a part of the data in use, at the server
    theta_{p,l}             table entry.accuracy                    scalar
    C(phi(omega * m))       table entry.cost                        a number per unit
    rho(B)                  context.table, choices()                the best entry that a budget allows
    L                       len(pruning_steps(sparsities, prune_step))

Equation index: Algorithm 1, line 4, iterative magnitude pruning -> `ELF.tabulate`; Eq. (3), the look-up ->
`ELF.choices` (an experiment takes the first choice that fits); line 10, phi(omega * m) -> `ELF.extract`; line 13 ->
`ELF.aggregate`.

Departures: theta is measured on a fifth of the proxy data, held out from pruning, since every network is nearly perfect
on the data that it was trained on. A block that no client of a round holds keeps its values: the mean of zeros alone
would silence it and, in a network without shortcuts, everything after it. Batch-norm statistics are estimated anew for
every size ([tricks] batch_norm = "calibrated"): the paper does not say, and zeros change what enters every norm; where
they are tracked, they are averaged over the clients that have them, since zeros are not statistics. `average =
"holders"` averages every entry only over the clients that trained it. A removed block is the identity, but a
convolution of zeros without a shortcut is not: it ends the signal. `fill = "identity"` does there what zeros do in a
residual network. Widths are beyond the paper: a narrowed entry is averaged over its holders, as in HeteroFL. The paper
does not say what is pruned, or how often: here the weights of layers, including the head, are compared over all
layers, and an iteration prunes at most a fifth of those left, as in its reference [3]. Line 4 prunes every depth by
itself, while section 3 chooses one subnetwork as the global model and cuts it: `masks = "each"` and `"one"`. A mask
goes down with its values and does not come back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from anysize.config.values import BelowOne, Count, Part, UpToOne, ascending
from anysize.data import Share
from anysize.elastic.depth import Fill, full_depth, restored, why_none
from anysize.elastic.skeleton import fill as filled
from anysize.elastic.skeleton import named_tensors
from anysize.elastic.sparsity import (
    Masks,
    Scope,
    Ticket,
    Train,
    iterative_pruning,
    left_by,
    pack,
    prunable,
    pruning_steps,
    put_values,
    take_values,
    unpack,
)
from anysize.errors import MethodError
from anysize.methods.base import Method
from anysize.methods.capabilities import Masked, Searched
from anysize.methods.context import Context, Proxy
from anysize.methods.kit import checked, class_weights, cut, sub_model
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.size import Size
from anysize.methods.table import Entry, Table
from anysize.methods.training import Tricks
from anysize.rng import generator
from anysize.wire import Tensors, under

Sparsities = Annotated[
    Sequence[BelowOne],
    Field(min_length=1, description="ascending numbers, at least 0 and below 1"),
    AfterValidator(ascending),
]
_VALUES, _MASK = "values/", "mask/"
_FEW = 400  # samples: a standard error above two and a half points
_SLACK = 1e-9  # for rounding: a capacity of a third times three blocks may be a little below one


@dataclass(frozen=True)
class ELFState:
    """The full network's tensors, and the packed masks of every trained size that has one, by its `key`."""

    tensors: Tensors
    masks: dict[str, Tensors]


@dataclass(frozen=True)
class ELF(Method[ELFState], Searched, Masked):
    """Depth and sparsity by device, from a look-up table.

    Attributes:
        depths: how many blocks of every stage may be trained; empty for every number.
        widths: the fractions of the channels that may be trained; any but 1.0 are beyond the paper.
        sparsities: the fractions of the weights that masks set to zero, rising; 0.0 is the network without a mask.
        prune_step: the largest fraction of the weights left that one iteration of pruning sets to zero, before the rest
            is trained again from the first weights; 1.0 prunes to each of `sparsities` at once.
        masks: "each": every depth and width is pruned by itself; "one": the whole network is pruned, and every depth
            and width has its part of that mask, which may be more or less sparse than the whole.
        scope: whether pruning compares weights over all layers ("global") or within each ("layer").
        proxy: the fraction of the training data in use with which the server prunes and judges; 0 for no table: nothing
            is pruned, and the largest size that fits is the best.
        proxy_epochs: how many epochs each training on the proxy data takes.
        average: "all": removed blocks and masked weights count as zeros (or what `fill` says); "holders": every entry
            is averaged over the clients that trained it.
        fill: what replaces removed blocks; only where "all" are averaged: "zeros", "identity" (passes its input on,
            also without a shortcut), "replicate" (the block before), "random".
        table: a file for the look-up table, relative to the experiment file: read if it exists, else computed and
            written.
    """

    depths: Sequence[Count] = ()
    widths: Annotated[Sequence[Part], Field(min_length=1)] = (1.0,)
    sparsities: Sparsities = (0.5,)
    prune_step: Part = 0.2
    masks: Literal["each", "one"] = "each"
    scope: Scope = "global"
    proxy: UpToOne = 0.05
    proxy_epochs: Count = 5
    average: Literal["all", "holders"] = "all"
    fill: Fill = "zeros"
    table: str = ""

    summary = "blocks removed and weights masked by device, from a look-up table (Farcas et al. 2022)"
    paper = Tricks(batch_norm="calibrated")
    reusable = False
    exceptions = {  # noqa: RUF012 - the contract's own attribute
        "unchanged_updates": "removed blocks and masked weights count as zeros in the mean",
        "full_round_trip": "masks go down and do not come back",
    }

    def conflicts(self) -> Iterable[str]:
        if self.proxy == 0 and any(self.sparsities):
            yield "proxy = 0 leaves nothing to prune with; set sparsities = [0.0]"
        if self.average == "holders" and self.fill != "zeros":
            yield (
                f"fill = '{self.fill}' with average = 'holders', which fills nothing in; leave fill out, or set "
                "average = 'all'"
            )

    def sizes(self, context: Context) -> Sequence[Size]:
        return context.sizes

    def sized(self, context: Context, capacity: float) -> Size:
        """The size with that fraction of the full depth, and the mask that did best at that depth."""
        affordable = max(1, math.floor(capacity * full_depth(context.stages) + _SLACK))
        depths = self._depths(context)
        depth = max((d for d in depths if d <= affordable), default=depths[0])
        best = next(s for s in self.choices(context) if s.depth == depth and s.width == max(self.widths))
        return replace(best, name=repr(float(capacity)))

    def choices(self, context: Context) -> Sequence[Size]:
        """Eq. (3): the table's entries, the most accurate first; without a table dense networks, the largest first."""
        if context.table is not None:
            return [entry.size for entry in context.table.best_first]
        return sorted(self._shapes(context), key=lambda size: size.order, reverse=True)

    def tabulate(self, context: Context) -> Table | None:
        """Algorithm 1, lines 3 to 5: every depth and width pruned step by step, with the accuracy of each step."""
        if self.proxy == 0:
            return None
        if context.proxy is None:
            raise MethodError(
                "elf prunes on data that the server holds, but here the data stays on the devices; name the file of a "
                "finished table in method.table, or set method.proxy = 0 and method.sparsities = [0.0]"
            )
        proxy, share = context.proxy, context.proxy.share(self.proxy)
        series = self._one_series if self.masks == "one" else self._each_series
        entries = tuple(series(context, lambda size: self._trainer(context, proxy, share, size)))
        return Table(entries, len(share.train), len(share.held_out or ()))

    def _each_series(self, context: Context, trainer: Callable[[Size], Train]) -> Iterator[Entry]:
        """IMP(phi_p(omega^0), D_proxy, L) of every depth and width by itself."""
        for size in self._shapes(context):
            for ticket in self._pruned(trainer(size)):
                yield _entry(size, ticket.sparsity, ticket.masks, ticket.accuracy)

    def _one_series(self, context: Context, trainer: Callable[[Size], Train]) -> Iterator[Entry]:
        """IMP(omega^0, D_proxy, L) of the whole network, of whose masks every depth and width has its part."""
        whole = Size(1.0, depth=max(self._depths(context)))
        tickets = list(self._pruned(trainer(whole)))
        for size in self._shapes(context):
            for ticket in tickets:
                masks = self._cut(context, ticket.masks, size)
                accuracy = ticket.accuracy if size == whole else trainer(size)(masks)[1]
                yield _entry(size, ticket.sparsity, masks, accuracy)

    def _pruned(self, train: Train) -> Iterator[Ticket]:
        """The networks of a pruning series that were asked for."""
        steps = pruning_steps([s for s in self.sparsities if s > 0], self.prune_step)
        return (ticket for ticket in iterative_pruning(steps, train, self.scope) if ticket.sparsity in self.sparsities)

    def _trainer(self, context: Context, proxy: Proxy, share: Share, size: Size) -> Train:
        """What trains a network of one depth and width from its first weights under masks, and says how well it did."""
        start = self._cut(context, context.start(), size)
        epochs = {"local_epochs": self.proxy_epochs, "local_steps": None}
        client = replace(context.for_client(), training=context.training.model_copy(update=epochs))

        def asked(job: str, tensors: Tensors, bits: Tensors) -> SubModel:
            server = Client(0, 0, size, 0, len(share.train), context.seed, job)
            message = self._message(server, tensors, bits)
            return replace(message, ticket=replace(message.ticket, rate=context.training.learning_rate))

        def train(masks: Masks) -> tuple[Tensors, float]:
            bits = {name: pack(mask) for name, mask in masks.items()}
            update = proxy.perform(client, self, asked("train", start, bits), share, {})
            tensors = start | dense(update.tensors, bits, start)
            finished = proxy.calibrated(client, self, asked("calibrate", tensors, bits), share)
            question = replace(finished, ticket=replace(finished.ticket, job="evaluate"))
            sums = proxy.perform(client, self, question, share, update.keep).sums or {}
            score = context.task.metrics(sums)[context.task.metric]
            return tensors, score if context.task.higher_is_better else -score

        return train

    def init(self, context: Context) -> ELFState:
        """The given weights, and the table's masks; a finished run has its masks in the checkpoint."""
        return ELFState(dict(context.start()), {key(s): self._bits(context, s) for s in context.sizes if s.mask})

    def _bits(self, context: Context, size: Size) -> Tensors:
        entry = None if context.table is None else context.table.entry(size)
        if entry is not None:
            return dict(entry.masks)
        tensors = self._cut(context, context.start(), size)
        return {name: pack(torch.ones_like(tensors[name], dtype=torch.bool)) for name in prunable(tensors)}

    def extract(self, context: Context, state: ELFState, client: Client) -> SubModel:
        tensors = self._cut(context, state.tensors, client.size)
        return self._message(client, tensors, state.masks.get(key(client.size), {}))

    def _message(self, client: Client, tensors: Tensors, bits: Tensors) -> SubModel:
        """Algorithm 1, line 10: the weights that the mask keeps, and the mask."""
        named = {_MASK + name: own for name, own in bits.items()}
        depth, mask = client.size.depth, client.size.mask
        known = not any(own.is_meta for own in bits.values())
        sent = (sparse(tensors, bits) if known else self._sparse_shapes(tensors, bits, mask)) | named
        return sub_model(client, sent, width=client.size.width, depth=depth, mask=mask)

    def _sparse_shapes(self, tensors: Tensors, bits: Tensors, mask: float) -> Tensors:
        """The shapes of what travels under masks that are not known: as many values in all as under any, or more."""
        counts = {name: tensors[name].numel() for name in bits}
        if self.masks == "each":  # a part of one mask may keep any number of weights, in the end all
            counts = left_by(mask, counts, self.scope)
        plain = {name: tensor for name, tensor in tensors.items() if name not in bits}
        return plain | {_VALUES + n: torch.empty(c, dtype=tensors[n].dtype, device="meta") for n, c in counts.items()}

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        skeleton = context.skeleton(sub_model.width, sub_model.ticket.more["depth"])
        bits = masks_in(sub_model)
        network = filled(skeleton, dense(sub_model.tensors, bits, dict(named_tensors(skeleton))))
        for name, own in bits.items():
            weight = network.get_parameter(name)
            if weight.requires_grad and not own.is_meta:
                # Without a gradient, momentum stays zero too, and zero does not decay: a masked weight stays zero.
                weight.register_hook(_Masked(unpack(own, weight.shape)))  # type: ignore[no-untyped-call]
        return network

    def trained(self, module: nn.Module, sub_model: SubModel) -> int:
        trained = {name: p.numel() for name, p in module.named_parameters() if p.requires_grad}
        sent = {name: sub_model.tensors[_VALUES + name].numel() for name in masks_in(sub_model)}
        return sum(sent.get(name, count) for name, count in trained.items())

    def pack(self, module: nn.Module, sub_model: SubModel) -> Update:
        """The weights that the mask keeps; the server has the mask."""
        tensors = {name: tensor.detach().contiguous() for name, tensor in named_tensors(module)}
        bits = masks_in(sub_model)
        if any(own.is_meta for own in bits.values()):
            values = {name: tensor for name, tensor in sub_model.tensors.items() if name.startswith(_VALUES)}
            return Update({n: t for n, t in tensors.items() if n not in bits} | values, sub_model.ticket)
        return Update(sparse(tensors, bits), sub_model.ticket)

    def aggregate(self, context: Context, state: ELFState, updates: Iterable[Update]) -> ELFState:
        """Algorithm 1, line 13: the mean of the restored networks."""
        mean = context.average(state.tensors, context.axes.head)
        held: set[str] = set()
        for update in checked(context, updates):
            size = _trained(context, update)
            bits = state.masks.get(key(size), {})
            tensors = dense(update.tensors, bits, self._cut(context, state.tensors, size))
            held |= set(tensors)
            entries = {name: unpack(own, tensors[name].shape) for name, own in bits.items()}
            if self.average == "all":
                tensors, entries = tensors | self._restored(context, update, size, tensors), {}
            kept = context.axes.kept(size.width)
            index = {name: context.axes.index(name, kept) for name in tensors}
            weight, classes = update.weight(context.tricks), class_weights(context, update)
            mean.add(tensors, weight, index, classes, entries)
        after = mean.result()
        return ELFState(
            {name: after[name] if name in held else old for name, old in state.tensors.items()}, state.masks
        )

    def _restored(self, context: Context, update: Update, size: Size, tensors: Tensors) -> Tensors:
        """phi^{-1}: the tensors that replace the removed blocks, except running statistics."""
        buffers = {name for name, _ in context.template.named_buffers()}
        missing = {n: t for n, t in context.start().items() if n not in tensors and n not in buffers}
        random = generator(context.seed, update.ticket.round, update.ticket.client, "fill")
        return restored(tensors, cut(context, missing, size.width), context.stages, size.depth, self.fill, random)

    def customize(self, context: Context, state: ELFState, size: Size) -> nn.Module:
        bits = state.masks.get(key(size), {})
        trained = sorted({s.width for s in context.sizes})
        if size.width not in trained or (size.mask and not bits):
            known = "; ".join(f"{s.label}: depth {s.depth}, width {s.width:g}, mask {s.mask:g}" for s in context.sizes)
            asked = f"depth {size.depth or 'full'}, width {size.width:g}, mask {size.mask:g}"
            raise MethodError(f"elf has no network of {asked}; it trained {known}")
        tensors = self._cut(context, state.tensors, size)
        masked = {name: tensors[name] * unpack(own, tensors[name].shape) for name, own in bits.items()}
        return filled(context.skeleton(size.width, size.depth), tensors | masked)

    def notices(self, context: Context) -> list[str]:
        if context.table is None:
            return []
        found = [
            f"elf: masks and choices come from {self.proxy:.0%} of the training data in use, which the server must hold"
        ]
        return found + few_samples(context.table)

    def _depths(self, context: Context) -> list[int]:
        """The depths that may be trained, smallest first; refuses a model without removable blocks."""
        full = full_depth(context.stages)
        if full == 1 and set(self.widths) == {1.0}:
            raise MethodError(f"elf: {why_none(context.template)}")
        wrong = [depth for depth in self.depths if depth > full]
        if wrong:
            raise MethodError(f"elf: depths = {list(self.depths)}; the longest stage of the model has {full} blocks")
        return sorted(set(self.depths)) or list(range(1, full + 1))

    def _shapes(self, context: Context) -> list[Size]:
        """Every depth and width, without a mask."""
        return [Size(float(width), depth=depth) for depth in self._depths(context) for width in sorted(self.widths)]

    def _cut(self, context: Context, tensors: Mapping[str, Tensor], size: Size) -> Tensors:
        """phi: the tensors of a network of that depth and width."""
        names = (name for name, _ in named_tensors(context.skeleton(size.width, size.depth)) if name in tensors)
        return cut(context, {name: tensors[name] for name in names}, size.width)


def few_samples(table: Table) -> list[str]:
    """Says how little a table tells if the accuracies in it come from few samples; else nothing.

    >>> few_samples(Table((), trained=80, judged=20))[0][:78]
    'elf: every accuracy in the look-up table comes from 20 samples, after training'
    >>> few_samples(Table((), trained=4000, judged=1000))
    []
    """
    if not 0 < table.judged < _FEW:
        return []
    error = 50 / math.sqrt(table.judged)
    return [
        f"elf: every accuracy in the look-up table comes from {table.judged} samples, after training on "
        f"{table.trained}: its standard error is up to {error:.0f} points, and closer sizes are told apart by chance; "
        "a larger method.proxy judges better"
    ]


def _entry(size: Size, sparsity: float, masks: Masks, accuracy: float) -> Entry:
    return Entry(replace(size, mask=sparsity), accuracy, {name: pack(mask) for name, mask in masks.items()})


def key(size: Size) -> str:
    """The key of a size's mask in the state.

    >>> key(Size(1.0, depth=2, mask=0.5))
    '2 1.0 0.5'
    """
    return f"{size.depth or 'full'} {size.width!r} {size.mask!r}"


def sparse(tensors: Tensors, bits: Tensors) -> Tensors:
    """The tensors as a message holds them: of a masked tensor only the values that stay."""
    plain = {name: tensor for name, tensor in tensors.items() if name not in bits}
    return plain | {_VALUES + name: take_values(tensors[name], own) for name, own in bits.items()}


def dense(tensors: Mapping[str, Tensor], bits: Tensors, like: Mapping[str, Tensor]) -> Tensors:
    """The tensors of a message, with zeros where a mask dropped values: the inverse of `sparse`.

    Args:
        tensors: the message's tensors.
        bits: the packed masks.
        like: tensors with the full shapes.
    """
    missing = [name for name in bits if _VALUES + name not in tensors]
    if missing:
        raise MethodError(f"elf: an update lacks the values of {', '.join(missing)}")
    plain = {name: tensor for name, tensor in tensors.items() if not name.startswith((_VALUES, _MASK))}
    return plain | {name: put_values(tensors[_VALUES + name], own, like[name].shape) for name, own in bits.items()}


def masks_in(message: SubModel) -> Tensors:
    """The packed masks of a message by the names of their weights."""
    return under(_MASK, message.tensors)


def _trained(context: Context, update: Update) -> Size:
    """The size that an update claims; refuses a size that this fleet does not train."""
    sizes = {size.label: size for size in context.sizes}
    if update.label not in sizes:
        raise MethodError(f"elf: client {update.ticket.client} sent size '{update.label}'; trained: {', '.join(sizes)}")
    return sizes[update.label]


@dataclass(frozen=True)
class _Masked:
    """A hook that sets the gradient of masked weights to zero."""

    mask: Tensor

    def __call__(self, gradient: Tensor) -> Any:
        return gradient * self.mask
