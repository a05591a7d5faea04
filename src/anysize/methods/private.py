"""Sums of clipped updates with Gaussian noise: the average under differential privacy of clients.

A client's update is clipped to norm C over all entries that its size has, so that it moves the sum of all updates by at
most C. Noise with deviation z C on every trained entry of the sum hides it (McMahan et al. 2018). The sum is divided by
the number of clients *expected* to hold the entry, which no client's presence changes. So an entry that few hold
gets the same noise in the sum, and more in the mean.

C may follow the norms of the updates (Andrew, Thakkar, McMahan, Ramaswamy. "Differentially Private Learning with
Adaptive Clipping". NeurIPS 2021). b_i says whether an update of n expected ones is within C:

    b = 1/2 + (sum of (b_i - 1/2) + noise of deviation s) / n        C <- C exp(-0.2 (b - quantile))

A client moves that sum by 1/2. With noise of z' C on the updates, where 1/z'^2 + 1/(2 s)^2 = 1/z^2, sum and count
together are one Gaussian mechanism of noise z (their Theorem 1), and cost what the sum alone costs with z.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anysize.methods.averaging import put, taken
from anysize.methods.mean import Average, Index
from anysize.methods.steps import clipped, norm_of, step_of
from anysize.rng import generator
from anysize.wire import Tensors

_RATE = 0.2  # of the clip's steps, that of the paper


class NoisySum(Average):
    """The old values, and to each entry the sum of all updates with noise, over its expected number of holders.

    >>> average = NoisySum({"w": torch.tensor([1.0, 5.0])}, {}, {"w": torch.tensor([4.0, 0.0])})
    >>> average.add({"w": torch.tensor([3.0])}, 1.0, {"w": (torch.tensor([0]),)})
    >>> average.result()["w"].tolist()
    [1.5, 5.0]
    """

    def __init__(
        self,
        before: Mapping[str, Tensor],
        head: Mapping[str, int] | None = None,
        expected: Mapping[str, Tensor] | None = None,
        deviation: float = 0.0,
        random: Callable[[str, Tensor], torch.Generator] = lambda name, tensor: torch.Generator(),
    ) -> None:
        """Start from the values before the round.

        Args:
            before: the tensors, with their old values.
            head: names of the classifier's tensors and their class axis.
            expected: by tensor, how many clients are expected to hold each entry; where 0, it does not change.
            deviation: of the noise on every entry of the sum.
            random: gives the generator of a tensor's noise.
        """
        super().__init__(before, head)
        self._expected = expected or {}
        self._deviation, self._random = deviation, random
        self.sums: Tensors = {}

    def _take(
        self, name: str, tensor: Tensor, at: Index, weight: float, classes: Tensor | None, held: Tensor | None
    ) -> None:
        """Add what the client moved in one tensor; its weight is not used."""
        if not tensor.is_floating_point():
            return
        old = self._before[name]
        sums = self.sums.setdefault(name, torch.zeros(old.shape, dtype=torch.float64))
        holds = self._holds(name, tensor, classes, held).expand(tensor.shape)
        put(sums, at, taken(sums, at) + holds * (tensor.double() - taken(old, at).double()))

    def result(self) -> Tensors:
        return {name: self._moved(name, old) for name, old in self._before.items()}

    def _moved(self, name: str, old: Tensor) -> Tensor:
        expected = self._expected.get(name)
        if expected is None or not bool((expected > 0).any()):
            return old
        total = self.sums.get(name, torch.zeros(old.shape, dtype=torch.float64))
        if self._deviation:
            noise = torch.randn(old.shape, generator=self._random(name, old), dtype=torch.float64)
            total = total + self._deviation * noise
        step = torch.where(expected > 0, total / expected.clamp_min(1e-300), 0.0)
        return (old.double() + step).to(old.dtype)


@dataclass(frozen=True)
class Quantile:
    """How a clip follows the norms of the updates.

    Attributes:
        target: the share of the updates that are to be within the clip.
        noise: the deviation of the noise on their count, in clients.
        clients: how many are expected in a round.
    """

    target: float
    noise: float
    clients: float

    def left_of(self, noise: float) -> float:
        """The noise on the sum of updates, in clips, if sum and count together are to tell as much as noise `noise`.

        >>> round(Quantile(0.5, 5.0, 100.0).left_of(1.0), 4)
        1.005
        """
        return float((noise**-2 - (2 * self.noise) ** -2) ** -0.5)

    def moved(self, clip: float, within: int, others: int, noise: float) -> float:
        """The clip of the next round, from how many updates were within it, how many were not, and noise.

        >>> Quantile(0.5, 5.0, 10.0).moved(2.0, 5, 5, 0.0), round(Quantile(0.5, 5.0, 10.0).moved(1.0, 10, 0, 0.0), 4)
        (2.0, 0.9048)
        """
        share = 0.5 + ((within - others) / 2 + noise) / self.clients
        return clip * math.exp(-_RATE * (share - self.target))


@dataclass(frozen=True)
class Mechanism:
    """What the server does to the updates of a private round.

    Attributes:
        clip: the largest norm of an update, in the first round.
        noise: the deviation of the noise on a sum, in clips.
        expected: for each average that the method makes in a round, in order: by tensor, the expected holders.
        seed: of the run, from which the noise follows.
        quantile: how the clip moves from round to round; None if it stays.
    """

    clip: float
    noise: float
    expected: Sequence[Mapping[str, Tensor]]
    seed: int
    quantile: Quantile | None = None

    def round(self, number: int, clip: float | None = None) -> PrivateRound:
        """The mechanism in one round.

        Args:
            number: the round.
            clip: the largest norm of an update in it; that of the first round if none is given.
        """
        return PrivateRound(self, number, self.clip if clip is None else clip)

    @property
    def sum_noise(self) -> float:
        """The deviation of the noise on the sum of updates, in clips."""
        return self.noise if self.quantile is None else self.quantile.left_of(self.noise)


@dataclass
class PrivateRound:
    """Clips the updates of one round and makes its averages; `Context.averages` calls it.

    Attributes:
        mechanism: of the run.
        number: the round.
        clip: the largest norm of an update.
    """

    mechanism: Mechanism
    number: int
    clip: float
    _within: int = 0
    _others: int = 0
    _made: int = 0
    _drawn: Counter[str] = field(default_factory=Counter)

    def __call__(self, before: Mapping[str, Tensor], head: Mapping[str, int]) -> NoisySum:
        own, place = self.mechanism, self._made
        self._made += 1
        return NoisySum(before, head, own.expected[place], own.sum_noise * self.clip, self._random)

    def clipped(self, sent: Mapping[str, Tensor], learned: Mapping[str, Tensor]) -> Tensors:
        """A client's answer with a step no longer than the clip; counts whether it was within.

        No factor makes a step short that is not finite: such a client, whose training diverged, adds nothing.
        """
        step = step_of(sent, learned)
        norm = norm_of(step)
        within = norm <= self.clip
        self._within, self._others = self._within + within, self._others + (not within)
        if not math.isfinite(norm):
            return {**learned, **{name: sent[name] for name in step}}
        return clipped(sent, learned, self.clip)

    def next_clip(self) -> float:
        """The clip of the next round."""
        quantile = self.mechanism.quantile
        if quantile is None:
            return self.clip
        random = generator(self.mechanism.seed, self.number, "privacy", "count")
        noise = quantile.noise * float(torch.randn((), generator=random, dtype=torch.float64))
        return quantile.moved(self.clip, self._within, self._others, noise)

    def _random(self, name: str, tensor: Tensor) -> torch.Generator:
        """Follows from what the tensor is, not from the order of a state, which a checkpoint may change."""
        what = f"{name} {tuple(tensor.shape)}"
        self._drawn[what] += 1
        return generator(self.mechanism.seed, self.number, self._drawn[what], what, "privacy")


@dataclass
class Recorder:
    """Makes averages that leave the state as it was, and keeps them; `Context.averages` calls it."""

    made: list[NoisySum] = field(default_factory=list)

    def __call__(self, before: Mapping[str, Tensor], head: Mapping[str, int]) -> NoisySum:
        self.made.append(NoisySum(before, head))
        return self.made[-1]

    def moved(self) -> float:
        """The squared norm of all that was added."""
        return sum(float(own.square().sum()) for average in self.made for own in average.sums.values())

    def held(self) -> list[dict[str, Tensor]]:
        """For each average, a 1 for every entry that moved."""
        return [{name: (own != 0).double() for name, own in average.sums.items()} for average in self.made]
