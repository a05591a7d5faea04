"""Sums of clipped updates with Gaussian noise: the average under differential privacy of clients.

A client's update is clipped to norm C over all entries that its size has, so that it moves the sum of all updates by at
most C. Noise with deviation z C on every trained entry of the sum hides it (McMahan et al. 2018). The sum is divided by
the number of clients *expected* to hold the entry, which no client's presence changes. So an entry that few hold
gets the same noise in the sum, and more in the mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anysize.methods.averaging import put, taken
from anysize.methods.mean import Average, Index
from anysize.rng import generator
from anysize.wire import Tensors


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
class Mechanism:
    """What the server does to the updates of a private round.

    Attributes:
        clip: the largest norm of an update.
        noise: the deviation of the noise on a sum, in clips.
        expected: for each average that the method makes in a round, in order: by tensor, the expected holders.
        seed: of the run, from which the noise follows.
    """

    clip: float
    noise: float
    expected: Sequence[Mapping[str, Tensor]]
    seed: int

    def round(self, number: int) -> PrivateRound:
        """The mechanism in one round."""
        return PrivateRound(self, number)


@dataclass
class PrivateRound:
    """Makes the averages of one round; `Context.averages` calls it."""

    mechanism: Mechanism
    number: int
    _made: int = 0
    _drawn: Counter[str] = field(default_factory=Counter)

    def __call__(self, before: Mapping[str, Tensor], head: Mapping[str, int]) -> NoisySum:
        own, place = self.mechanism, self._made
        self._made += 1
        return NoisySum(before, head, own.expected[place], own.noise * own.clip, self._random)

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
