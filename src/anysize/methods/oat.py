"""OAT: one network learns many balances of accuracy and robustness at once; its norms depend on the chosen balance.

Wang, Chen, Gui, Hu, Liu, Wang. "Once-for-All Adversarial Training: In-Situ Tradeoff between Robustness and Accuracy for
Free". NeurIPS 2020. Hong et al. (Split-Mix, ICLR 2022, section 5.2) use it as a baseline, federated by FedAvg; so does
this, at the width that the weakest device can train.

    paper           here                            shape
    lambda          OAT.robustness, one per sample  scalar from 0 (accurate) to 1 (robust)
    S               the values of lambda            (6,) by default
    encoding        codes()                         (values, OAT.encoding)
    gamma, beta     elastic.film.Film.film          (samples, 2 channels)
    BN_c, BN_a      Dual.network, Dual.noise        a batch-norm each

Index: the objective, (1 - lambda) L(f(x), y) + lambda L(f(x + delta), y) over samples and lambda -> `OAT.loss`;
sampling lambda -> `drawn`; the conditional layer gamma BN(x) + beta -> `elastic.film.Film`; dual batch-norm, BN_c for
lambda = 0 and BN_a for all others -> `Conditional.given`; the network at one lambda -> `elastic.film.conditioned`.

Departures: as in the authors' code, the number of samples of a batch with lambda = 0 is fixed, not drawn, and those
samples are not attacked. A conditional layer follows every batch-norm of a network; in the authors' networks, every one
except those of shortcuts. It begins as the identity, so that training can go on from learned weights; theirs begins at
random and also passes gamma and beta through one more LeakyReLU. The attack's step is [tricks] attack_step, theirs
min(1.25 epsilon, epsilon + 4/255) / steps. If one sample goes through a batch-norm alone, its batch holds it twice. A
network customised for one lambda has one ordinary batch-norm for both parts, which changes no more than rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from anysize.config.values import Count, UpToOne, ascending
from anysize.elastic.film import Conditional, conditional_names, conditional_tensors, conditioned
from anysize.elastic.norm import batch_norms
from anysize.elastic.skeleton import fill
from anysize.errors import MethodError
from anysize.methods.base import Method
from anysize.methods.capabilities import Adjustable
from anysize.methods.context import Context
from anysize.methods.kit import checked, class_weights, first_tensors, sub_model
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.size import Levels, Size
from anysize.methods.training import Batch, Step, Tricks
from anysize.rng import generator
from anysize.wire import Tensors


@dataclass(frozen=True)
class OATState:
    """The tensors of the conditional network."""

    tensors: Tensors


def codes(count: int, length: int, random: torch.Generator) -> Tensor:
    """The encoding of lambda: `count` random orthonormal vectors, (count, length).

    >>> found = codes(2, 8, torch.Generator())
    >>> torch.allclose(found @ found.T, torch.eye(2), atol=1e-6)
    True
    """
    # In double precision, so that the rounded numbers are the same on every machine.
    whole = torch.randn(length, length, generator=random, dtype=torch.float64)
    orthogonal, _ = torch.linalg.qr(whole)
    rows: Tensor = orthogonal[:count].float()
    return rows


def drawn(values: Sequence[float], samples: int, random: torch.Generator) -> list[int]:
    """Which of the `values` of lambda each sample of a batch gets, ascending, since batches are shuffled already.

    As many samples get 0 as each other value gets on average, rounded up; the rest are drawn.

    >>> drawn([0.0, 1.0], 5, torch.Generator())
    [0, 0, 0, 1, 1]
    """
    zeros = math.ceil(samples / len(values)) if values[0] == 0 else 0
    above = [place for place, value in enumerate(values) if value > 0]
    picks = torch.randint(len(above), (samples - zeros,), generator=random).tolist() if above else []
    return [0] * zeros + sorted(above[pick] for pick in picks)


def weighed(
    outputs: Tensor, batch: Batch, places: Sequence[int], weight: Callable[[int], float], step: Step
) -> Tensor | float:
    """One side of the objective: the mean over samples of the sample's loss times the weight of its lambda.

    Args:
        outputs: the outputs of one pass over all samples.
        batch: the samples.
        places: which value of lambda each sample has, ascending.
        weight: the weight of the value at a place.
        step: its objective, a mean over samples, is computed once for each value.
    """
    total: Tensor | float = 0.0
    for place in sorted(set(places)):
        rows = slice(places.index(place), places.index(place) + places.count(place))
        part = weight(place) * places.count(place) / len(places)
        if part:
            total = total + part * step.objective(_Said(outputs[rows]), Batch(batch.x[rows], batch.y[rows]))
    return total


@dataclass(frozen=True)
class OAT(Method[OATState], Adjustable):
    """One network for all clients, whose robustness is chosen when it is customised.

    Attributes:
        robustness: the values of lambda, the weight of the loss under attack, that are trained side by side, ascending;
            a customised network has one of them.
        encoding: how many numbers encode one such value.
    """

    robustness: Annotated[
        Sequence[UpToOne], Field(min_length=1, description="ascending numbers from 0 to 1"), AfterValidator(ascending)
    ] = (0.0, 0.1, 0.2, 0.3, 0.4, 1.0)
    encoding: Count = 128

    summary = "one network for all with layers that depend on the robustness asked for (Wang et al. 2020)"
    paper = Tricks(batch_norm="tracked")
    exceptions = MappingProxyType({"pretrained_start": "batch-norms are folded, which gives other tensors"})

    def conflicts(self) -> Iterable[str]:
        if self.encoding < len(self.robustness):
            yield f"encoding = {self.encoding}; allowed: at least one number for each value of robustness"

    def sizes(self, context: Context) -> Sequence[Size]:
        return context.sizes[:1]

    def init(self, context: Context) -> OATState:
        self._check(context)
        tensors = first_tensors(context, context.sizes[0].width)
        return OATState(conditional_tensors(tensors, self._structure(context), generator(context.seed, "film")))

    def extract(self, context: Context, state: OATState, client: Client) -> SubModel:
        return sub_model(client, state.tensors, width=context.sizes[0].width)

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        if sub_model.finished:
            return self._network(context, sub_model.tensors, None)
        return fill(self._structure(context), sub_model.tensors)

    def loss(self, module: nn.Module, batch: Batch, step: Step) -> Tensor:
        """The objective; each sample goes through the batch-norm for its lambda."""
        assert isinstance(module, Conditional)
        assert step.attack is not None
        samples = len(batch.y)
        places = drawn(self.robustness, samples, step.generator)
        zeros = sum(self.robustness[place] == 0 for place in places)
        total: Tensor | float = 0.0
        if zeros:
            some, own = _paired(Batch(batch.x[:zeros], batch.y[:zeros]), places[:zeros])
            total = zeros / samples * step.objective(module.given(own, noisy=False), some)
        if zeros < samples:
            some, own = _paired(Batch(batch.x[zeros:], batch.y[zeros:]), places[zeros:])
            branch = module.given(own, noisy=True)
            changed = step.attack(branch, some.x, lambda x: step.objective(branch, Batch(x, some.y)))
            attacked = weighed(branch(changed), some, own, lambda place: self.robustness[place], step)
            clean = weighed(branch(some.x), some, own, lambda place: 1 - self.robustness[place], step)
            total = total + (1 - zeros / samples) * (clean + attacked)
        assert isinstance(total, Tensor)
        return total

    def aggregate(self, context: Context, state: OATState, updates: Iterable[Update]) -> OATState:
        """FedAvg's mean."""
        names = conditional_names(self._structure(context))
        head = {f"dual.network.{names.get(name, name)}": axis for name, axis in context.axes.head.items()}
        mean = context.average(state.tensors, head)
        for update in checked(context, updates):
            mean.add(update.tensors, update.weight(context.tricks), classes=class_weights(context, update))
        return OATState(mean.result())

    def customize(self, context: Context, state: OATState, size: Size) -> nn.Module:
        if size.width != context.sizes[0].width:
            trained = context.sizes[0].width
            raise MethodError(
                f"oat has no network of width {size.width:g}; it trained {trained:g}, the fleet's smallest"
            )
        return self._network(context, state.tensors, size.robustness)

    def levels(self, context: Context) -> Levels | None:
        return Levels(tuple(self.robustness))

    def _structure(self, context: Context) -> Conditional:
        random = generator(context.seed, "encoding of robustness")
        encoded = codes(len(self.robustness), self.encoding, random)
        return Conditional(context.skeleton(context.sizes[0].width), encoded)

    def _network(self, context: Context, tensors: Tensors, level: float | None) -> nn.Module:
        """The ordinary network at a value of lambda, by default the first."""
        value = self.robustness[0] if level is None else level
        if value not in self.robustness:
            raise MethodError(f"oat: robustness {value:g} was asked for; it trained {Levels(tuple(self.robustness))}")
        network = fill(self._structure(context), tensors)
        assert isinstance(network, Conditional)
        return conditioned(network, list(self.robustness).index(value), noisy=value > 0)

    def _check(self, context: Context) -> None:
        tricks, template = context.tricks, context.template
        problems = [
            problem
            for wrong, problem in (
                (
                    not batch_norms(template),
                    f"the model {type(template).__name__} has no batch-norm to make conditional",
                ),
                (not context.axes.found.example[0].is_floating_point(), "inputs are tokens, which cannot be attacked"),
                (
                    tricks.adversarial > 0,
                    "tricks.adversarial is one weight for all; leave it out, set method.robustness",
                ),
                (tricks.batch_norm != "tracked", f'tricks.batch_norm = "{tricks.batch_norm}"; set it to "tracked"'),
                (tricks.server_momentum > 0, "tricks.server_momentum would move statistics; leave it out"),
                (tricks.max_entropy > 0, "tricks.max_entropy looks at one pass for one loss; leave it out"),
            )
            if wrong
        ]
        if problems:
            raise MethodError("oat: " + "; ".join(problems))


class _Said(nn.Module):
    """Returns outputs that a network has already computed, so that an objective can judge some of them."""

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._outputs


def _paired(batch: Batch, places: list[int]) -> tuple[Batch, list[int]]:
    """The samples; a single one twice, since alone it has no batch statistics. Means over samples do not change."""
    if len(places) > 1:
        return batch, places
    return Batch(torch.cat([batch.x, batch.x]), torch.cat([batch.y, batch.y])), places * 2
