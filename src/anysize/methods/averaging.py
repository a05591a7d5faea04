"""Averages that lying clients cannot move at will: the rules of [aggregation], for sub-models of unequal size.

The entries of a state that the same clients hold make a *block*. Where widths are nested, the smallest width is a block
that all clients hold, and what each larger one adds is a block with fewer holders; where a classifier's rows are
averaged by class, a row is a block of the clients that have its class. Within a block every client has every entry, so
that each rule is the one of its paper, with the block's n holders for clients:

    rule                within a block                                              stands
    median              of every entry (Yin et al. 2018)                            (n - 1) / 2, rounded down
    trimmed-mean        of every entry, without the f smallest and f largest        f
    krum                the mean of the n - f clients with the n - f - 2 nearest    f, at most (n - 3) / 2
                        neighbours (multi-Krum, Blanchard et al. 2017)
    geometric-median    the point with the least sum of distances to all clients    (n - 1) / 2, rounded down
                        (Pillutla et al. 2022)

f is the assumed share of attackers times n, rounded up. What a client says about its samples is not believed: each
client counts once. Whole numbers, such as batch-norm's count of batches, get the lower median under every rule.

A rule needs all updates of a round at once, so that they are held until its end, and then compared tensor by tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from anysize.config.tables import AggregationConfig
from anysize.methods.mean import Average, Index, StreamingMean, grid, prefix
from anysize.wire import Tensors

STREAMED = ("mean", "norm-clip", "norm-filter")
"""The rules whose averages are means, folded in one by one; the last two change updates before they are averaged."""

BOUNDED = ("norm-clip", "norm-filter")
"""The rules that bound how far an update moves."""

Holders = tuple[int, ...]
"""Clients by their place in the round's order."""

_CODED = 62  # clients whose part in an entry fits into one whole number
_ITERATIONS = 1000  # of the geometric median, each a product with an (n, n) matrix


def averaging(options: AggregationConfig) -> Callable[[Mapping[str, Tensor], Mapping[str, int]], Average]:
    """What makes the average of a rule, from the tensors before the round and the class axes of the classifier's."""
    if options.rule in STREAMED:
        return StreamingMean
    return partial(HeldAverage, rule=options.rule, attackers=options.attackers)


def stands(rule: str, holders: int, attackers: float) -> int:
    """How many lying clients cannot move an entry at will that so many clients hold.

    >>> [stands("trimmed-mean", holders, 0.2) for holders in (1, 2, 3, 5, 20)]
    [0, 0, 1, 1, 4]
    >>> [stands("krum", holders, 0.2) for holders in (3, 5, 20)], stands("median", 3, 0.2), stands("mean", 9, 0.2)
    ([0, 1, 4], 1, 0)
    """
    if rule in STREAMED:
        return 0
    if rule in ("median", "geometric-median"):
        return (holders - 1) // 2
    most = (holders - 1) // 2 if rule == "trimmed-mean" else (holders - 3) // 2
    return max(0, min(math.ceil(attackers * holders - 1e-9), most))


def left_out(options: AggregationConfig, clients: int) -> int:
    """How many of the smallest and largest values are left out of a mean of so many clients' batch-norm statistics.

    >>> left_out(AggregationConfig(), 20), left_out(AggregationConfig(rule="krum"), 20)
    (0, 4)
    """
    return 0 if options.rule in ("mean", "norm-clip") else stands("trimmed-mean", clients, options.attackers)


class Counted(Average):
    """Counts the clients that hold each entry, and gives the old values.

    Args:
        client: says whose tensors come.
    """

    def __init__(self, before: Mapping[str, Tensor], head: Mapping[str, int] | None, client: Callable[[], int]) -> None:
        super().__init__(before, head)
        self._client = client
        self._counts: Tensors = {}
        self._held: list[tuple[int, str, Index, Tensor]] = []
        self.turns: list[int] = []

    def _begin(self) -> None:
        super()._begin()
        self.turns.append(self._client())

    def _take(
        self, name: str, tensor: Tensor, at: Index, weight: float, classes: Tensor | None, held: Tensor | None
    ) -> None:
        """Count the client at every entry that it holds."""
        holds = self._holds(name, tensor, classes, held).expand(tensor.shape)
        counts = self._counts.setdefault(name, torch.zeros(self._before[name].shape, dtype=torch.int32))
        put(counts, at, taken(counts, at) + holds)
        self._held.append((self.turns[-1], name, at, holds))

    def result(self) -> Tensors:
        return dict(self._before)

    def fewest(self, client: int) -> int | None:
        """The number of clients that hold the rarest entry of a client; None if it holds none here."""
        own = [taken(self._counts[name], at)[holds] for who, name, at, holds in self._held if who == client]
        return min((int(counts.min()) for counts in own if counts.numel()), default=None)


class HeldAverage(Average):
    """A rule over the clients that hold an entry; what they sent is held until the result is asked for.

    >>> average = HeldAverage({"w": torch.tensor([1.0, 5.0])}, rule="median", attackers=0.2)
    >>> for value in (2.0, 4.0, 1e6):
    ...     average.add({"w": torch.tensor([value])}, 1.0, {"w": (torch.tensor([0]),)})
    >>> average.result()["w"].tolist()
    [4.0, 5.0]
    """

    def __init__(
        self, before: Mapping[str, Tensor], head: Mapping[str, int] | None = None, *, rule: str, attackers: float
    ) -> None:
        super().__init__(before, head)
        self._rule = rule
        self._attackers = attackers
        self._sent: dict[str, list[_Sent]] = {}

    def _take(
        self, name: str, tensor: Tensor, at: Index, weight: float, classes: Tensor | None, held: Tensor | None
    ) -> None:
        """Copy one tensor; the client's weight is not used."""
        holds = self._holds(name, tensor, classes, held)
        self._sent.setdefault(name, []).append(_Sent(self._clients - 1, tensor.clone(), at, holds))

    def result(self) -> Tensors:
        choose = self._chosen() if self._rule in ("krum", "geometric-median") else None
        return {name: self._combined(name, choose) if name in self._sent else old for name, old in self._before.items()}

    def _combined(self, name: str, chosen: Mapping[Holders, Tensor] | None) -> Tensor:
        """One tensor after the round; `chosen` has the weights of a block's holders, if the rule weighs clients."""
        old = self._before[name]
        after = old.to(self._precision(name) if old.is_floating_point() else old.dtype, copy=True).reshape(-1)
        for holders, places, values in self._blocks(name):
            if not old.is_floating_point():
                after[places] = values.sort(dim=0).values[(len(holders) - 1) // 2]
            elif chosen is None:
                cut = stands(self._rule, len(holders), self._attackers)
                after[places] = _middle(values, cut)
            else:
                weights = chosen[holders].to(values.dtype)
                # From one client's values, so that clients that agree leave no rounding; not from those of one that
                # hardly counts, since they may be so large that they take the others' digits.
                base = values[int(weights.argmax())]
                after[places] = base + weights @ (values - base)
        return after.reshape(old.shape).to(old.dtype)

    def _chosen(self) -> dict[Holders, Tensor]:
        """Each holder's weight in each block, from the inner products of the holders' updates over the whole block."""
        products: dict[Holders, Tensor] = {}
        for name, old in self._before.items():
            if name not in self._sent or not old.is_floating_point():
                continue
            for holders, places, values in self._blocks(name):
                moved = (values - old.reshape(-1)[places].to(values.dtype)).double()
                products[holders] = products.get(holders, 0) + moved @ moved.T
        weigh = partial(krum, attackers=self._attackers) if self._rule == "krum" else geometric_median
        return {holders: weigh(found) for holders, found in products.items()}

    def _blocks(self, name: str) -> Iterator[tuple[Holders, Tensor, Tensor]]:
        """The blocks of one tensor: holders, the entries' places in the flat tensor, and values (holders, entries)."""
        old, sent = self._before[name], self._sent[name]
        kind = self._precision(name) if old.is_floating_point() else old.dtype
        if all(one.whole for one in sent):
            values = torch.stack([one.tensor.to(kind).reshape(-1) for one in sent])
            yield tuple(one.client for one in sent), torch.arange(old.numel()), values
            return
        values = torch.zeros(len(sent), *old.shape, dtype=kind)
        holds = torch.zeros(len(sent), *old.shape, dtype=torch.bool)
        for i, one in enumerate(sent):
            put(values[i], one.at, one.tensor.to(kind))
            put(holds[i], one.at, one.holds.expand(one.tensor.shape))
        values, holds = values.reshape(len(sent), -1), holds.reshape(len(sent), -1)
        kinds = patterns(holds)
        for places in torch.split(kinds.argsort(stable=True), torch.bincount(kinds).tolist()):
            rows = holds[:, places[0]].nonzero()[:, 0]
            if len(rows):
                yield tuple(sent[int(row)].client for row in rows), places, values[rows[:, None], places[None]]


@dataclass(frozen=True)
class _Sent:
    """What one client sent of one tensor.

    Attributes:
        client: its place in the round's order.
        tensor: the values.
        at: per axis, which entries they are.
        holds: of these, the entries that count, in a shape that broadcasts to the tensor's.
    """

    client: int
    tensor: Tensor
    at: Index
    holds: Tensor

    @property
    def whole(self) -> bool:
        """Whether the client holds every entry of the tensor."""
        return all(part is None for part in self.at) and bool(self.holds.all())


def patterns(holds: Tensor) -> Tensor:
    """For each entry, the number of its block, from 0: entries with equal columns of `holds` share it.

    Args:
        holds: (clients, entries), who holds what.

    >>> patterns(torch.tensor([[True, True, False], [True, True, True]])).tolist()
    [1, 1, 0]
    """
    found = torch.zeros(holds.shape[1], dtype=torch.int64)
    bits = _CODED - holds.shape[1].bit_length()  # the number of a block so far has its place beside them
    for first in range(0, len(holds), bits):
        for row in holds[first : first + bits]:
            found = found * 2 + row
        found = torch.unique(found, return_inverse=True)[1]
    return found


def krum(products: Tensor, attackers: float) -> Tensor:
    """Multi-Krum's weights of n clients from the inner products (n, n) of their updates: equal for those it keeps.

    It keeps the n - f clients with the least sum of squared distances to their n - f - 2 nearest neighbours; more where
    several are equally near.

    >>> krum(torch.tensor([1.0, 1.1, 0.9, 1.0, 9.0]).outer(torch.tensor([1.0, 1.1, 0.9, 1.0, 9.0])), 0.2).tolist()
    [0.25, 0.25, 0.25, 0.25, 0.0]
    """
    count = len(products)
    outside = stands("krum", count, attackers)
    if not outside:
        return torch.full((count,), 1 / count, dtype=products.dtype)
    nearest = _squared_distances(products).sort(dim=1).values[:, 1 : count - outside - 1]  # the first is its own
    scores = nearest.sum(dim=1)
    worst = scores.sort().values[count - outside - 1]
    kept = (scores <= worst * (1 + 1e-9)).to(products.dtype)
    return kept / kept.sum()


def geometric_median(products: Tensor) -> Tensor:
    """The weights whose mean is the geometric median, by Weiszfeld's rule, from the updates' inner products (n, n).

    >>> geometric_median(torch.tensor([0.0, 0.0, 1.0]).outer(torch.tensor([0.0, 0.0, 1.0])).double())[2].item() < 1e-3
    True
    """
    count = len(products)
    weights = torch.full((count,), 1 / count, dtype=products.dtype)
    squares = _squared_distances(products)
    if not bool(squares.any()):
        return weights
    # A client at the median would get all the weight, so that no distance counts as less than a trace of the smallest.
    least = 1e-12 * squares[squares > 0].min().sqrt()
    for _ in range(_ITERATIONS):
        # From distances rather than products: a far client's have no part in what is left of those of the near ones.
        away = squares @ weights - weights @ squares @ weights / 2
        closeness = 1 / away.clamp_min(0).sqrt().clamp_min(least)
        after = closeness / closeness.sum()
        if (after - weights).abs().max() < 1e-12:
            return after
        weights = after
    return weights


def _squared_distances(products: Tensor) -> Tensor:
    own = products.diagonal()
    return (own[:, None] + own[None] - 2 * products).clamp_min(0).fill_diagonal_(0)


def _middle(values: Tensor, cut: int) -> Tensor:
    """The mean of every column of (clients, entries) without its `cut` smallest and `cut` largest."""
    if not cut:
        return values[0] + (values - values[0]).mean(dim=0)
    kept = values.sort(dim=0).values[cut : len(values) - cut]
    return kept[0] + (kept - kept[0]).mean(dim=0)


def taken(tensor: Tensor, at: Index) -> Tensor:
    """The kept entries of a tensor."""
    view = prefix(tensor, at)
    return view if view is not None else tensor[grid(tensor.shape, at)]


def put(into: Tensor, at: Index, values: Tensor) -> None:
    """Writes values to the kept entries of a tensor."""
    view = prefix(into, at)
    if view is not None:
        view.copy_(values)
    else:
        into[grid(into.shape, at)] = values
