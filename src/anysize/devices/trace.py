"""Budgets that change from round to round."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from anysize.config.traces import TraceConfig
from anysize.devices.budget import Budget

_LISTED = 5  # periods that a sentence names

Period = tuple[int, int | None]
"""The first round and the last; None: no end."""


@dataclass(frozen=True)
class Trace:
    """Each budget counts from its round on, until the next.

    Attributes:
        rounds: the rounds, ascending.
        budgets: the budget from each of these rounds on.

    >>> trace = Trace((2, 5), (Budget(macs=10), Budget(macs=20)))
    >>> trace.at(1), trace.at(4).macs, trace.at(99).macs
    (None, 10, 20)
    """

    rounds: tuple[int, ...]
    budgets: tuple[Budget, ...]

    @classmethod
    def of(cls, config: TraceConfig) -> Trace:
        """The trace that a table describes."""
        return cls(config.rounds, tuple(Budget(**config.budget(place)) for place in range(len(config.rounds))))

    def at(self, round: int) -> Budget | None:
        """The budget in a round; None before the first."""
        place = bisect_right(self.rounds, round)
        return self.budgets[place - 1] if place else None

    def periods(self, before: Budget | None = None) -> Iterator[tuple[Period, Budget | None]]:
        """Every budget with the rounds in which it counts, the one before the first named round included."""
        if self.rounds[0] > 1:
            yield (1, self.rounds[0] - 1), before
        for (first, after), budget in zip(pairwise((*self.rounds, None)), self.budgets):
            assert first is not None
            yield (first, None if after is None else after - 1), budget


def in_words(periods: Iterable[Period]) -> str:
    """When: the rounds of ascending periods that do not overlap.

    >>> in_words([(3, 3)]), in_words([(1, 2), (3, 4), (9, None)])
    ('in round 3', 'in rounds 1 to 4, from round 9')
    """
    joined: list[Period] = []
    for first, last in periods:
        start = first
        if joined and joined[-1][1] == first - 1:
            start, _ = joined.pop()
        joined.append((start, last))
    words = [_period(first, last) for first, last in joined]
    more = len(words) - _LISTED
    return ", ".join([*words[:_LISTED], *([f"and {more} times more"] if more > 0 else [])])


def _period(first: int, last: int | None) -> str:
    if last is None:
        return f"from round {first}" if first > 1 else "in every round"
    return f"in round {first}" if first == last else f"in rounds {first} to {last}"
