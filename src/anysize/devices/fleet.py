"""The clients, the device group of each, and the participants of a round."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from anysize.config.devices import DevicesConfig, GroupConfig
from anysize.devices.budget import SLACK, Budget
from anysize.devices.distributions import capacity_shares
from anysize.devices.groups import DeviceGroup, Latencies
from anysize.devices.trace import Period, Trace, in_words
from anysize.errors import ConfigError
from anysize.rng import derive, generator

_RATES = ("macs_per_second", "bytes_per_second_down", "bytes_per_second_up")


_RAREST_COVER = 1e-3


@dataclass(frozen=True, eq=False)
class Fleet:
    """All registered clients: the device group of each, and the participants of every round.

    Attributes:
        groups: Smallest capacity first.
        clients: How many clients are registered; their ids are 0, 1, ...
        per_round: How many clients a round asks.
        seed: The seed of every draw.
        members: Each client's index in `groups`, if it does not change.
        shares: The probability of each group, if clients draw a new group every round.
        redrawn: Whether they do.
        cover: Whether they draw until every group occurs among the participants.
        per_group: How many clients of each group a round asks, in the order of `groups`; empty: any.
        present: On a fleet of real devices, the clients that are connected; None: all.
        names: On a fleet of real devices, the name of every client that ever joined.
        traces: Budgets that change from round to round, by a group's name or a client's id.
        idle: The keys of the groups that sit out, because no size fits their budget.
        independent: Whether every client takes part by a draw of its own (Poisson sampling), so that `per_round` is
            what to expect.

    >>> fleet = make_fleet(DevicesConfig(clients_per_round=3), clients=8, seed=0)
    >>> {group.name: group.clients for group in fleet.groups}
    {'0.25': 2, '0.5': 2, '0.75': 2, '1.0': 2}
    >>> len(fleet.participants(round=5))
    3
    """

    groups: tuple[DeviceGroup, ...]
    clients: int
    per_round: int
    seed: int
    members: npt.NDArray[np.int32] = field(repr=False)
    shares: tuple[float, ...] = ()
    redrawn: bool = False
    cover: bool = False
    per_group: tuple[int, ...] = ()
    present: frozenset[int] | None = None
    names: Mapping[int, str] = field(default_factory=dict)
    traces: Mapping[str | int, Trace] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()
    independent: bool = False
    _attempts: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def shuffled(self, round: int, purpose: str) -> Iterator[int]:
        """The clients in a random order that differs by round and purpose.

        With real devices, only those that are connected. Their order does not depend on the devices that joined before:
        after a restart the server may know fewer of them.
        """
        if self.present is not None:
            yield from sorted(self.present, key=lambda client: (derive(self.seed, round, client, purpose), client))
            return
        yield from _shuffled(self.clients, derive(self.seed, round, purpose))

    def group_of(self, client: int, round: int) -> DeviceGroup:
        """The group that a client belongs to in a round, with its budget in that round."""
        group = self._plain_group(client, round)
        for trace in (self.traces.get(client), self.traces.get(group.name)):
            budget = None if trace is None else trace.at(round)
            if budget is not None:
                return replace(group, budget=budget)
        return group

    def kinds(self) -> list[DeviceGroup]:
        """Every group with every budget that it has in some round, each once."""
        found: dict[str, DeviceGroup] = {}
        for group in self.groups:
            budgets = [budget for _, holders in self._held(group) for _, budget in holders]
            found |= {kind.key: kind for kind in (replace(group, budget=budget) for budget in budgets)}
        return list(found.values())

    def explained(self, reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Who has each reason, and when, in words, and the reason, which comes by the key of a group."""
        for group in self.groups:
            for who, held in self._held(group):
                when: dict[str, list[Period]] = {}
                for period, budget in held:
                    reason = reasons.get(replace(group, budget=budget).key)
                    if reason is not None:
                        when.setdefault(reason, []).append(period)
                for reason, periods in when.items():
                    yield (who if group.label else f"{who} {in_words(periods)}"), reason

    def _held(self, group: DeviceGroup) -> Iterator[tuple[str, list[tuple[Period, Budget | None]]]]:
        """The group and those of its clients that have budgets of their own, each with its budgets in all rounds."""
        place = self.groups.index(group)
        own = {client: trace for client, trace in self.traces.items() if self._may_be(client, place)}
        starts = [trace.rounds[0] for trace in own.values()]
        # Where all clients have budgets of their own, that of the group counts only before.
        everybody = len(own) == (self.clients if self.redrawn else group.clients)
        before = max(starts) if starts and everybody else math.inf
        common = self.traces.get(group.name)
        periods = [((1, None), group.budget)] if common is None else list(common.periods(group.budget))
        yield f"group '{group.name}'", [(period, budget) for period, budget in periods if period[0] < before]
        for client, trace in own.items():
            after = trace.periods()  # before its first round it has the group's
            yield f"client {client} of group '{group.name}'", [held for held in after if held[1] is not None]

    def _may_be(self, holder: str | int, place: int) -> bool:
        """Whether the holder of a budget is a client that is in a group in some round."""
        return isinstance(holder, int) and (self.redrawn or int(self.members[holder]) == place)

    def _plain_group(self, client: int, round: int) -> DeviceGroup:
        """The group that a client belongs to in a round, as the file describes it."""
        if not 0 <= client < self.clients:
            raise IndexError(f"client {client} is not among the {self.clients} clients, 0 to {self.clients - 1}")
        if self.present is not None and self.members[client] < 0:
            raise IndexError(f"client {client} has not joined yet, so its size is unknown")
        if not self.redrawn:
            return self.groups[int(self.members[client])]
        attempt = self._covering_attempt(round) if self.cover else 0
        return self.groups[self._draw(client, round, attempt)]

    def sits_out(self, client: int, round: int) -> bool:
        """Whether no size fits what a client can afford in a round: it then trains and evaluates nothing."""
        return bool(self.idle) and self.group_of(client, round).key in self.idle

    def participants(self, round: int) -> list[int]:
        """The distinct clients that take part in a round, in ascending order.

        They are drawn one by one, skipping clients that sit out or are not available in this round. If fewer than
        `per_round` are available, all of them take part; that may be nobody.
        """
        if self.independent:
            drawn = (c for c in range(self.clients) if self._drawn(c, round) < self.per_round / self.clients)
            return [client for client in drawn if not self.sits_out(client, round)]
        always = all(group.available >= 1 for group in self.groups)
        if always and self.per_round == self.clients and self.present is None:
            return [client for client in range(self.clients) if not self.sits_out(client, round)]
        chosen: list[int] = []
        left = list(self.per_group)
        for client in self.shuffled(round, "participants"):
            if len(chosen) == self.per_round:
                break
            able = not self.sits_out(client, round) and (always or self._available(client, round))
            if able and self._wanted(client, left):
                chosen.append(client)
        return sorted(chosen)

    def _drawn(self, client: int, round: int) -> float:
        """A client's number in [0, 1) of a round in which clients are drawn independently."""
        return _uniform(self.seed, round, client, "participants")

    def _wanted(self, client: int, left: list[int]) -> bool:
        """Whether the client's group still lacks participants; counts it if so."""
        if not left:
            return True
        place = int(self.members[client])
        left[place] -= 1
        return left[place] >= 0

    def _available(self, client: int, round: int) -> bool:
        """Whether a client can take part in a round."""
        return _uniform(self.seed, round, client, "available") < self._plain_group(client, round).available

    def _draw(self, client: int, round: int, attempt: int) -> int:
        """The index in `groups` that a client draws."""
        point = _uniform(self.seed, round, client, attempt, "capacity")
        reached = 0.0
        for place, share in enumerate(self.shares):
            reached += share
            if point < reached:
                return place
        return len(self.shares) - 1  # rounding may leave the sum of the shares below 1

    def _covering_attempt(self, round: int) -> int:
        """The first attempt at which every group occurs among the participants."""
        if round not in self._attempts:
            drawn = self.participants(round)
            attempt = 0
            while len({self._draw(client, round, attempt) for client in drawn}) < len(self.groups):
                attempt += 1
            self._attempts.clear()  # callers ask for one round at a time, client by client
            self._attempts[round] = attempt
        return self._attempts[round]


def _uniform(*names: int | str) -> float:
    """A number in [0, 1) derived from the names."""
    return derive(*names) / 2.0**63


def _shuffled(count: int, seed: int) -> Iterator[int]:
    """0, 1, ..., count - 1 in random order; time and memory grow with the numbers drawn, not with `count`."""
    draw = random.Random(seed).random
    moved: dict[int, int] = {}
    for place in range(count):
        other = place + int(draw() * (count - place))
        yield moved.get(other, other)
        moved[other] = moved.pop(place, place)


def make_fleet(config: DevicesConfig, clients: int, seed: int, domains: Sequence[int] | None = None) -> Fleet:
    """The fleet that a `[devices]` table describes, for a number of clients.

    Args:
        config: The table.
        clients: How many clients there are.
        seed: The experiment's seed.
        domains: For assignment = "group": each client's data group, counted from 0. Consecutive data groups
            share a capacity if there are more data groups than capacities.

    Raises:
        ConfigError: With a line for each problem.

    >>> fleet = make_fleet(DevicesConfig(distribution="exponential", assignment="order"), clients=8, seed=0)
    >>> [fleet.group_of(client, round=0).label for client in range(8)]
    ['1.0', '1.0', '0.5', '0.5', '0.25', '0.25', '0.125', '0.125']
    """
    if clients < 1:
        raise ConfigError(f"a fleet needs at least one client; given {clients}")
    kinds = _named_kinds(config) if config.groups else _capacity_kinds(config)
    problems: list[str] = []
    shares, blocks = _assigned(config, kinds, clients, domains, problems)
    per_round = _per_round(config, clients, problems)
    if config.cover and not problems:
        problems.extend(_cover_problems(kinds, shares, per_round))
    _raise_all(problems)
    if config.assignment == "random":
        blocks = _scattered(blocks, seed)
    occupied = [place for place, share in enumerate(shares) if share > 0]
    order = sorted(occupied, key=_by_size([kinds[place] for place in occupied], occupied))
    rank = np.full(len(kinds), -1, dtype=np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    sizes = np.bincount(blocks, minlength=len(kinds))
    changing = _changing(config, kinds, blocks)
    groups = (replace(kinds[place], clients=int(sizes[place])) for place in order)
    return Fleet(
        groups=tuple(replace(group, label="") if group.name in changing else group for group in groups),
        clients=clients,
        per_round=per_round,
        seed=seed,
        members=rank[blocks],
        shares=tuple(shares[place] for place in order),
        redrawn=config.redraw == "round",
        cover=config.cover,
        per_group=_per_group(config, [int(size) for size in sizes], order, kinds),
        traces={trace.holder: Trace.of(trace) for trace in config.budgets},
    )


def _changing(config: DevicesConfig, kinds: Sequence[DeviceGroup], blocks: npt.NDArray[np.int32]) -> set[str]:
    """The names of the groups in which some budget changes from round to round.

    Raises:
        ConfigError: a client that has budgets of its own does not exist, or is in a group with a capacity.
    """
    found = {trace.group for trace in config.budgets if trace.group is not None}
    problems = []
    for place, trace in enumerate(config.budgets):
        if trace.client is None:
            continue
        if trace.client >= len(blocks):
            problems.append(
                f"{trace.where(place)}: client {trace.client} is not among the {len(blocks)} clients, 0 to "
                f"{len(blocks) - 1}"
            )
            continue
        own = kinds if config.redraw == "round" else [kinds[int(blocks[trace.client])]]
        found |= {kind.name for kind in own}
        problems += [
            f"{trace.where(place)}: client {trace.client} can be in group '{kind.name}', which has a capacity, and "
            "only budgets change; give it a budget instead"
            for kind in own
            if kind.capacity is not None
        ]
    _raise_all(problems)
    return found


def open_fleet(config: DevicesConfig, seed: int) -> Fleet:
    """The device groups that a `[devices]` table describes, before any device has joined.

    >>> fleet = open_fleet(DevicesConfig(capacities=[1.0, 0.5]), seed=0)
    >>> [group.name for group in fleet.groups], fleet.clients
    (['0.5', '1.0'], 0)
    """
    kinds = _named_kinds(config) if config.groups else _capacity_kinds(config)
    places = list(range(len(kinds)))
    order = sorted(places, key=_by_size(kinds, places))
    asked = config.clients_per_round
    return Fleet(
        groups=tuple(kinds[place] for place in order),
        clients=0,
        per_round=0,
        seed=seed,
        members=np.zeros(0, dtype=np.int32),
        per_group=tuple(asked[place] for place in order) if isinstance(asked, tuple) else (),
        present=frozenset(),
    )


def enrolled(
    planned: Fleet,
    config: DevicesConfig,
    groups: Mapping[int, str],
    present: Collection[int],
    names: Mapping[int, str] | None = None,
) -> Fleet:
    """The fleet of the real devices that have joined so far.

    Args:
        planned: the fleet of the plan; its groups are the sizes that are trained.
        config: the experiment's `[devices]` table.
        groups: the group's name of every client that ever joined, by the client's id.
        present: the clients that are connected now.
        names: the devices' names.

    >>> planned = open_fleet(DevicesConfig(capacities=[0.5, 1.0]), seed=0)
    >>> fleet = enrolled(planned, DevicesConfig(capacities=[0.5, 1.0]), {0: "1.0", 1: "0.5", 2: "0.5"}, present=[0, 2])
    >>> fleet.participants(round=1), fleet.group_of(2, round=1).name
    ([0, 2], '0.5')
    """
    places = {group.name: place for place, group in enumerate(planned.groups)}
    members = np.full(max(groups, default=-1) + 1, -1, dtype=np.int32)
    for client, name in groups.items():
        members[client] = places[name]
    sizes = np.bincount(members[members >= 0], minlength=len(places))
    here = frozenset(present) & frozenset(groups)
    asked = config.clients_per_round
    if asked is None:
        part = 1.0 if config.participation is None else config.participation
        asked = max(1, math.floor(part * len(here) + SLACK))
    return replace(
        planned,
        groups=tuple(replace(group, clients=int(size)) for group, size in zip(planned.groups, sizes)),
        clients=len(members),
        per_round=asked if isinstance(asked, int) else sum(asked),
        members=members,
        present=here,
        names={client: names[client] for client in sorted(groups)} if names else {},
    )


def _raise_all(problems: Sequence[str]) -> None:
    """Raise a `ConfigError` if there are problems."""
    if problems:
        raise ConfigError("\n".join(problems))


def _capacity_kinds(config: DevicesConfig) -> list[DeviceGroup]:
    """A device group for each listed capacity, in the order listed, still without clients."""
    kinds = []
    for place, capacity in enumerate(config.capacities or ()):
        speeds = _speeds(config, place)
        kinds.append(DeviceGroup(name=repr(capacity), label=repr(capacity), capacity=capacity, **speeds))
    return kinds


def _named_kinds(config: DevicesConfig) -> list[DeviceGroup]:
    """A device group for each named one, in the order listed, still without clients."""
    return [_named_kind(group, _speeds(config, 0)) for group in config.groups]


def _named_kind(group: GroupConfig, defaults: Mapping[str, Any]) -> DeviceGroup:
    """The device group as written, completed by the fleet's defaults."""
    own = {name: getattr(group, name) for name in (*_RATES, "available")}
    if group.bytes_per_second is not None:
        own["bytes_per_second_down"] = own["bytes_per_second_up"] = group.bytes_per_second
    given = {name: value for name, value in own.items() if value is not None}
    return DeviceGroup(
        name=group.name,
        label=group.name if group.capacity is None else repr(group.capacity),
        capacity=group.capacity,
        budget=None if group.budget is None else Budget(**group.budget.model_dump()),
        depth=group.depth,
        sparsity=group.sparsity,
        latencies=None if group.latencies is None else Latencies.of(group.latencies),
        **{**defaults, **given},
    )


def _speeds(config: DevicesConfig, place: int) -> dict[str, Any]:
    """The speeds, bandwidths and availability that the table gives to the capacity at an index of its list."""
    both = config.bytes_per_second
    given: dict[str, float | tuple[float, ...] | None] = {
        "macs_per_second": config.macs_per_second,
        "bytes_per_second_down": config.bytes_per_second_down if both is None else both,
        "bytes_per_second_up": config.bytes_per_second_up if both is None else both,
        "available": 1.0 if config.available is None else config.available,
    }
    return {name: value[place] if isinstance(value, tuple) else value for name, value in given.items()}


def _by_size(kinds: Sequence[DeviceGroup], places: Sequence[int]) -> Any:
    """A sort key by capacity, or by budgets in the same units; otherwise the listed order stays."""
    sizes: dict[int, tuple[float, ...]] = {place: (float(place),) for place in places}
    units = {
        (*(kind.budget.limits() if kind.budget else ()), kind.depth is None, kind.sparsity is None) for kind in kinds
    }
    if len(units) == 1:
        sizes = {place: _size(kind) for place, kind in zip(places, kinds)}
    return lambda place: (sizes[place], place)


def _size(kind: DeviceGroup) -> tuple[float, ...]:
    """A group's depth or capacity, how many weights its sparsity leaves, and its budget's limits."""
    limits = kind.budget.limits().values() if kind.budget else ()
    return (float(kind.depth or kind.capacity or 0), 1 - (kind.sparsity or 0.0), *limits)


def _assigned(
    config: DevicesConfig,
    kinds: Sequence[DeviceGroup],
    clients: int,
    domains: Sequence[int] | None,
    problems: list[str],
) -> tuple[tuple[float, ...], npt.NDArray[np.int32]]:
    """Each kind's share, and the kind of each client in blocks as listed; problems are added to the list."""
    if config.assignment == "group":
        blocks = _by_domain(len(kinds), clients, domains, problems)
        sizes = np.bincount(blocks, minlength=len(kinds))
        return tuple(float(size) / clients for size in sizes), blocks
    if any(group.clients is not None for group in config.groups):
        counts = _given_counts(config.groups, clients, problems)
        shares = tuple(count / clients for count in counts)
    else:
        shares = capacity_shares(config)
        counts = _whole_counts(shares, clients)
        if config.redraw == "never" and config.distribution is None:
            problems.extend(_nobody(kinds, counts, shares, clients))
    if config.redraw == "never":
        shares = tuple(count / clients for count in counts)
    return shares, np.repeat(np.arange(len(kinds), dtype=np.int32), counts)


def _given_counts(groups: Sequence[GroupConfig], clients: int, problems: list[str]) -> list[int]:
    """The number of clients of each group; the group without one gets the rest."""
    rest = clients - sum(group.clients or 0 for group in groups)
    open_groups = [group for group in groups if group.clients is None]
    if rest < 0 or (rest == 0 and open_groups) or (rest > 0 and not open_groups):
        given = ", ".join(f"{group.name} {group.clients or 'the rest'}" for group in groups)
        problems.append(
            f"devices.groups: their clients ({given}) do not add up to the {clients} clients of the data; "
            "change them or data.clients"
        )
        return [0] * len(groups)
    return [rest if group.clients is None else group.clients for group in groups]


def _whole_counts(shares: Sequence[float], clients: int) -> list[int]:
    """Whole numbers of clients: kind g has those k of 1..K with share up to g-1 < k / K <= share up to g."""
    ends = [math.floor(math.fsum(shares[: place + 1]) * clients + SLACK) for place in range(len(shares))]
    ends[-1] = clients
    return [end - start for start, end in zip([0, *ends], ends)]


def _nobody(
    kinds: Sequence[DeviceGroup], counts: Sequence[int], shares: Sequence[float], clients: int
) -> Iterator[str]:
    """A line for each group whose share of the clients is nobody."""
    for kind, count, share in zip(kinds, counts, shares):
        if count == 0:
            yield (
                f"devices: {share:g} of {clients} clients is nobody, so no device could train {kind.name}; "
                "take more clients, a larger fraction, or leave it out"
            )


def _by_domain(kinds: int, clients: int, domains: Sequence[int] | None, problems: list[str]) -> npt.NDArray[np.int32]:
    """Each client's kind by its data group: the data groups divided evenly among the kinds, in order."""
    nobody = np.zeros(0, dtype=np.int32)
    if domains is None or len(domains) != clients:
        given = "this data has none" if domains is None else f"given {len(domains)} for {clients} clients"
        problems.append(f'devices.assignment: "group" needs the data group of every client; {given}')
        return nobody
    index = np.asarray(domains, dtype=np.int64)
    present = np.unique(index)
    if len(present) < kinds:
        problems.append(
            f'devices.assignment: "group" has {len(present)} data groups for {kinds} capacities; '
            "list at most as many capacities"
        )
        return nobody
    return (np.searchsorted(present, index) * kinds // len(present)).astype(np.int32)


def _scattered(blocks: npt.NDArray[np.int32], seed: int) -> npt.NDArray[np.int32]:
    """The same kinds, shuffled over the clients."""
    order = torch.randperm(len(blocks), generator=generator(seed, "capacities")).numpy()
    return np.take(blocks, order)


def _per_round(config: DevicesConfig, clients: int, problems: list[str]) -> int:
    """How many clients a round asks for; problems are added to the list."""
    if config.clients_per_round is not None:
        given = config.clients_per_round
        count = given if isinstance(given, int) else sum(given)
        if count > clients:
            problems.append(f"devices.clients_per_round: given {count}, but there are only {clients}")
        return count
    participation = 1.0 if config.participation is None else config.participation
    count = math.floor(participation * clients + SLACK)
    if count == 0:
        smallest = math.ceil(1e6 / clients) / 1e6
        problems.append(
            f"devices.participation: {participation:g} of {clients} clients selects nobody; "
            f"the smallest that selects one is {smallest:g}"
        )
    return count


def _per_group(
    config: DevicesConfig, sizes: Sequence[int], order: Sequence[int], kinds: Sequence[DeviceGroup]
) -> tuple[int, ...]:
    """How many clients of each group a round asks for, in the fleet's order; empty where that is not given."""
    if not isinstance(config.clients_per_round, tuple):
        return ()
    asked = config.clients_per_round
    _raise_all(
        [
            f"devices.clients_per_round: {asked[place]} of {kinds[place].name} are asked for, and there are {size}"
            for place, size in enumerate(sizes)
            if asked[place] > size
        ]
    )
    return tuple(asked[place] for place in order)


def _cover_problems(kinds: Sequence[DeviceGroup], shares: Sequence[float], per_round: int) -> Iterator[str]:
    """Why redrawing until every kind occurs would not end, or not soon."""
    wanted = [share for share in shares if share > 0]
    if any(kind.available < 1 for kind in kinds):
        yield "devices.cover: needs devices that are always available; leave out available or cover"
    elif per_round < len(wanted):
        yield (
            f"devices.cover: {per_round} clients a round cannot cover {len(wanted)} capacities; "
            f"take at least {len(wanted)}, better twice as many"
        )
    elif cover_probability(wanted, per_round) < _RAREST_COVER:
        yield (
            f"devices.cover: {per_round} clients a round cover all {len(wanted)} capacities in less than one "
            f"of {1 / _RAREST_COVER:g} draws; take more clients a round or larger fractions"
        )


def cover_probability(shares: Sequence[float], draws: int) -> float:
    """The probability that every kind occurs among independent draws; for over 100 draws, a lower bound.

    The coefficient of x^n in n! (e^(p1 x) - 1) (e^(p2 x) - 1) ...

    >>> round(cover_probability([0.5, 0.5], 2), 6)
    0.5
    """
    count = min(draws, 100)  # 170! is the last factorial that a float holds
    series = np.zeros(count + 1)
    series[0] = 1.0
    for share in shares:
        powers = np.array([share**power / math.factorial(power) for power in range(count + 1)])
        powers[0] = 0.0  # the kind occurs at least once
        series = np.convolve(series, powers)[: count + 1]
    return float(series[count] * math.factorial(count))
