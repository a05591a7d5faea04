"""A data set divided among clients; each client's share is made only when the client is drawn.

A partition is one array of sample indices, ordered by client, and the offset at which each client begins; a
client that is never drawn costs eight bytes. Every choice follows from the seed and depends on nothing else.

The splits:

| name | each client has |
| --- | --- |
| iid | equally many samples, drawn from all (sizes differ by at most one) |
| classes | samples of exactly k classes, equally many of each |
| dirichlet | a mix of classes drawn from Dirichlet(alpha), in equal or unequal sizes |
| natural | the samples of one data group, or of several: writers, roles or domains |
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from anysize.data.parts import Data, Share, SubsetPart, classes_in, groups_of, has_classes
from anysize.errors import DataError, unknown
from anysize.rng import derive

Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

SMALLEST_SHARE = 10
"""With unequal Dirichlet sizes no client has fewer samples, unless an equal share is smaller."""


class Shares(ABC):
    """Each client's data, made only when the client is drawn.

    >>> shares = split(Data(train=(np.zeros((10, 2)), [0, 1] * 5)), clients=5)
    >>> len(shares), shares.samples(0)
    (5, 2)
    """

    @abstractmethod
    def __len__(self) -> int:
        """The number of clients."""

    @abstractmethod
    def share(self, client: int) -> Share:
        """The data of one client."""

    @abstractmethod
    def samples(self, client: int) -> int:
        """The number of training samples of one client."""

    @abstractmethod
    def group_of(self, client: int) -> str | None:
        """The name of the one data group (writer, role, domain) that a client has in a natural split, else None."""

    @property
    def used(self) -> Tensor:
        """The numbers of the samples that any client has, sorted; an error where there is no one data set."""
        raise DataError("every device has data of its own, so that no data set is in use")


class PartitionedShares(Shares):
    """Shares of one data set, from an index array ordered by client and the offset at which each client begins.

    Args:
        data: the data set.
        index: (n,) sample indices, client after client.
        offsets: (clients + 1,), client c has `index[offsets[c]:offsets[c + 1]]`.
        validation: the fraction of each share that is held out.
        seed: together with the client's number, decides which samples are held out.
        groups: the name of each client's data group, in a natural split where a client has one.
    """

    def __init__(
        self,
        data: Data,
        index: Indices,
        offsets: Indices,
        validation: float = 0.0,
        seed: int = 0,
        groups: tuple[str, ...] | None = None,
    ) -> None:
        self._data = data
        self._index = index
        self._offsets = offsets
        self._validation = validation
        self._seed = seed
        self._groups = groups

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def used(self) -> Tensor:
        """The numbers of the samples that any client has, sorted."""
        return torch.from_numpy(np.unique(self._index))

    def share(self, client: int) -> Share:
        """The data of one client, as views without copies."""
        start, end = self._bounds(client)
        own = self._index[start:end]
        held = self._held_out(len(own))
        if not held:
            return Share(SubsetPart(self._data.train, own))
        chosen = np.zeros(len(own), dtype=bool)
        chosen[_rng(self._seed, client, "validation").permutation(len(own))[:held]] = True
        return Share(SubsetPart(self._data.train, own[~chosen]), SubsetPart(self._data.train, own[chosen]))

    def samples(self, client: int) -> int:
        """The number of training samples of one client, without drawing any."""
        start, end = self._bounds(client)
        return end - start - self._held_out(end - start)

    def group_of(self, client: int) -> str | None:
        """The name of a client's data group in a natural split, else None."""
        return None if self._groups is None else self._groups[_checked(client, len(self))]

    def _held_out(self, own: int) -> int:
        if not self._validation or own < 2:
            return 0
        return min(max(1, round(self._validation * own)), own - 1)

    def _bounds(self, client: int) -> tuple[int, int]:
        _checked(client, len(self))
        return int(self._offsets[client]), int(self._offsets[client + 1])


class DeviceShares(Shares):
    """Shares that devices load: `loader(device)` returns one, and is called only for devices that are drawn.

    >>> shares = DeviceShares(lambda device: Share(train=([[0.0]], [device])), clients=3)
    >>> shares.share(2).train.labels().tolist()
    [2]
    """

    def __init__(self, loader: Callable[[int], Share], clients: int) -> None:
        if clients < 1:
            raise DataError(f"clients is {clients}; at least 1 is needed")
        self._loader = loader
        self._clients = clients
        self._samples: dict[int, int] = {}

    def __len__(self) -> int:
        return self._clients

    def share(self, client: int) -> Share:
        """The share that the loader returns for this device."""
        share = self._loader(_checked(client, len(self)))
        self._samples[client] = len(share.train)
        return share

    def samples(self, client: int) -> int:
        """The number of training samples of one device; loads its share."""
        if client not in self._samples:
            self.share(client)
        return self._samples[client]

    def group_of(self, client: int) -> str | None:
        """None: devices have no data groups."""
        return None


class RemoteShares(Shares):
    """Shares on remote devices: nothing is known about them here, not even their size.

    >>> RemoteShares(3).samples(0)
    1
    """

    def __init__(self, clients: int) -> None:
        self._clients = clients

    def __len__(self) -> int:
        return self._clients

    def share(self, client: int) -> Share:
        """Always an error: the data never leaves its device."""
        raise DataError(
            f"the data of client {client} stays on its device; whatever needs it must run on the fleet "
            '(data.name = "devices")'
        )

    def samples(self, client: int) -> int:
        """One, since the number of samples is unknown; so all clients count equally."""
        return 1

    def group_of(self, client: int) -> str | None:
        """None: devices have no data groups."""
        return None


def split(
    data: Data,
    clients: int | None,
    split: str = "iid",
    *,
    classes_per_client: int | None = None,
    unbalance: float = 1.0,
    alpha: float | None = None,
    equal: bool = True,
    groups_per_client: int = 1,
    domains: Sequence[str] = (),
    validation: float = 0.0,
    fraction: float = 1.0,
    seed: int = 0,
) -> Shares:
    """The training samples divided among `clients` clients; the same seed gives the same shares.

    Args:
        data: the data set; its test part is not touched.
        clients: how many; may be None in a natural split, which then has one for each data group.
        split: "iid", "classes", "dirichlet" or "natural".
        classes_per_client: for "classes": how many distinct classes each client has.
        unbalance: for "classes": each client has one class whole and this fraction of each other (LotteryFL).
        alpha: for "dirichlet": small is skewed (0.1), large is even (100).
        equal: for "dirichlet": all clients have equally many samples.
        groups_per_client: for "natural": at most so many data groups to a client; if there are too few for all
            clients, they are dealt evenly.
        domains: for "natural": the names of the data groups that are used, in the order in which clients get them;
            empty: all, sorted.
        validation: the fraction of each share that the client holds out, at least one sample of two.
        fraction: the fraction of the training samples that is used at all.
        seed: every choice follows from it.

    >>> data = Data(train=(np.zeros((60, 2)), np.arange(60) % 6))
    >>> shares = split(data, 10, "classes", classes_per_client=2, seed=1)
    >>> [len(shares.share(client).train.labels().unique()) for client in range(10)] == [2] * 10
    True
    """
    problems = _setting_problems(data, clients, split, classes_per_client, alpha, validation, fraction)
    if split == "natural" and not problems:
        problems = _natural_problems(_groups(data), clients, groups_per_client, domains)
    if problems:
        raise DataError("\n".join(problems))
    rng = _rng(seed, "partition", split)
    if split == "natural":
        names, members = _members(_groups(data), fraction, domains, rng)
        if groups_per_client > 1:
            index, offsets = _several_groups(members, clients, groups_per_client, rng)
            return PartitionedShares(data, index, offsets, validation, seed)
        index, offsets, owned = _one_group(names, members, clients, rng)
        return PartitionedShares(data, index, offsets, validation, seed, owned)
    assert clients is not None  # `_setting_problems` refuses None for every split but the natural one
    used = _used(len(data.train), fraction, rng)
    if clients > len(used):
        raise DataError(f"{clients} clients cannot share {len(used)} samples; use at most {len(used)} clients")
    if split == "iid":
        return PartitionedShares(data, used, _even_offsets(len(used), clients), validation, seed)
    labels = data.train.labels().numpy()[used]
    supply = np.bincount(labels)
    if split == "classes":
        assert classes_per_client is not None
        counts = class_shares(supply, clients, classes_per_client, rng)
        counts = counts if unbalance == 1 else unbalanced(counts, unbalance, rng)
    else:
        assert alpha is not None
        counts = (equal_mixes if equal else dealt_classes)(supply, clients, alpha, rng)
    order, offsets = deal(labels, counts)
    return PartitionedShares(data, used[order], offsets, validation, seed)


SPLITS = ("classes", "dirichlet", "iid", "natural")
"""The names that `split` knows."""


def class_shares(supply: Indices, clients: int, per_client: int, rng: np.random.Generator) -> Indices:
    """How many samples of each class each client has, (clients, classes): `per_client` classes each, in equal lots.

    Client after client takes one lot of each of the `per_client` classes with the most lots left, ties broken at
    random (the rule of FLANC's authors). Taking from the fullest classes always leaves distinct classes for the
    remaining clients if that is possible at all. Lots are as large as they can be while there are enough for all
    clients, given that a client takes at most one lot of a class.

    >>> class_shares(np.array([4, 4]), 4, 1, np.random.default_rng(0)).sum(axis=0).tolist()
    [4, 4]
    """
    size = _largest_share(supply, clients, per_client)
    left = np.minimum(supply // size, clients)
    counts = np.zeros((clients, len(supply)), dtype=np.int64)
    for client in range(clients):
        fullest_first = np.lexsort((rng.random(len(left)), -left))
        taken = fullest_first[:per_client]
        left[taken] -= 1
        counts[client, taken] = size
    return counts


def unbalanced(counts: Indices, rate: float, rng: np.random.Generator) -> Indices:
    """The counts, with one class of each client whole and its others cut to `rate`: the quantity skew of LotteryFL.

    LotteryFL draws shards of one class each and may give a client two of the same class; here a client's classes are
    distinct. Samples that are cut off stay unused in both.

    >>> unbalanced(np.array([[10, 10, 0]]), 0.5, np.random.default_rng(0)).sum()
    np.int64(15)
    """
    whole = (rng.random(counts.shape) * (counts > 0)).argmax(axis=1)  # one of the classes that the client has
    cut: Indices = np.minimum(counts, np.maximum(1, np.floor(counts * rate).astype(np.int64)))
    rows = np.arange(len(counts))
    cut[rows, whole] = counts[rows, whole]
    return cut


def equal_mixes(supply: Indices, clients: int, alpha: float, rng: np.random.Generator) -> Indices:
    """How many samples of each class each client has, (clients, classes): equal sizes, mixes from Dirichlet(alpha).

    Each client draws a mix of classes and then its samples from that mix; if a class has run out, the rest is drawn
    from the classes that are left. Clients draw in random order, since late ones have fewer samples to choose from.

    >>> equal_mixes(np.array([50, 50]), 4, 0.5, np.random.default_rng(0)).sum(axis=1).tolist()
    [25, 25, 25, 25]
    """
    left = supply.copy()
    sizes = np.diff(_even_offsets(int(supply.sum()), clients))
    mixes = rng.dirichlet(np.full(len(supply), alpha), clients) * (supply > 0)
    counts = np.zeros((clients, len(supply)), dtype=np.int64)
    for client in rng.permutation(clients):
        while (wanted := sizes[client] - counts[client].sum()) > 0:
            taken = np.minimum(rng.multinomial(wanted, _open_mix(mixes[client], left)), left)
            counts[client] += taken
            left -= taken
    return counts


def dealt_classes(supply: Indices, clients: int, alpha: float, rng: np.random.Generator) -> Indices:
    """How many samples of each class each client has, (clients, classes): each class divided by Dirichlet(alpha).

    Clients get unequal sizes. A client with too few samples takes some from the client that has most.

    >>> dealt_classes(np.array([50, 50]), 4, 0.5, np.random.default_rng(0)).sum()
    np.int64(100)
    """
    proportions = rng.dirichlet(np.full(clients, alpha), len(supply))  # (classes, clients)
    ends = np.rint(np.cumsum(proportions, axis=1) * supply[:, None]).astype(np.int64)
    ends[:, -1] = supply
    counts = np.diff(ends, axis=1, prepend=0).T.copy()  # (clients, classes)
    smallest = min(SMALLEST_SHARE, int(supply.sum()) // clients)
    sizes = counts.sum(axis=1)
    while sizes.min() < smallest:
        poorest, richest = int(sizes.argmin()), int(sizes.argmax())
        source = int(counts[richest].argmax())
        moved = min(smallest - sizes[poorest], counts[richest, source], sizes[richest] - smallest)
        counts[[poorest, richest], source] += [moved, -moved]
        sizes[[poorest, richest]] += [moved, -moved]
    return counts


def deal(labels: Indices, counts: Indices) -> tuple[Indices, Indices]:
    """Positions in `labels` ordered by client, and each client's offset, so that each client gets its `counts`.

    Within a class, samples are dealt in the order of `labels`: shuffle before calling this.

    >>> deal(np.array([0, 1, 0, 1]), np.array([[1, 0], [1, 2]]))
    (array([0, 2, 1, 3]), array([0, 1, 4]))
    """
    by_class = np.argsort(labels, kind="stable")
    starts = np.cumsum(np.bincount(labels, minlength=counts.shape[1]))
    columns = zip(np.split(by_class, starts[:-1]), counts.T)
    given = np.concatenate([members[: column.sum()] for members, column in columns])
    clients = np.tile(np.arange(len(counts)), counts.shape[1])
    owner = np.repeat(clients, counts.T.reshape(-1))
    return given[np.argsort(owner, kind="stable")], _offsets(counts.sum(axis=1))


def _members(
    groups: Any, fraction: float, domains: Sequence[str], rng: np.random.Generator
) -> tuple[list[str], list[Indices]]:
    """The names of the data groups of `domains`, or of all, sorted, and the samples of each, shuffled."""
    names, code = np.unique(groups, return_inverse=True)
    shuffled = rng.permutation(len(code))
    members = np.split(shuffled[np.argsort(code[shuffled], kind="stable")], np.cumsum(np.bincount(code))[:-1])
    members = [own[: max(1, round(fraction * len(own)))] for own in members]
    by_name = {str(name): own for name, own in zip(names, members)}
    order = list(domains) or list(by_name)
    return order, [by_name[name] for name in order]


def _one_group(
    names: list[str], members: list[Indices], clients: int | None, rng: np.random.Generator
) -> tuple[Indices, Indices, tuple[str, ...]]:
    """Samples by client, offsets and the group of each client; clients share a group if they are more than groups."""
    wanted = len(names) if clients is None else clients
    if wanted < len(names):
        chosen = np.sort(rng.permutation(len(names))[:wanted])
        names, members = [names[g] for g in chosen], [members[g] for g in chosen]
    users = np.diff(_even_offsets(wanted, len(names)))  # clients of each data group
    short = [f"{n} ({len(m)} samples, {u} clients)" for n, m, u in zip(names, members, users) if len(m) < u]
    if short:
        raise DataError(f"data groups with fewer samples than clients: {', '.join(short[:5])}; use fewer clients")
    shares = [share for own, count in zip(members, users) for share in np.array_split(own, count)]
    offsets = _offsets(np.array([len(share) for share in shares]))
    return np.concatenate(shares), offsets, tuple(np.repeat(names, users).tolist())


def _several_groups(
    members: list[Indices], clients: int | None, each: int, rng: np.random.Generator
) -> tuple[Indices, Indices]:
    """Samples by client and offsets: groups drawn at random and dealt evenly, at most `each` to a client."""
    wanted = -(-len(members) // each) if clients is None else clients
    chosen = rng.permutation(len(members))[: wanted * each]
    bounds = _even_offsets(len(chosen), wanted)
    shares = [np.concatenate([members[g] for g in chosen[a:b]]) for a, b in itertools.pairwise(bounds)]
    return np.concatenate(shares), _offsets(np.array([len(share) for share in shares]))


def _largest_share(supply: Indices, clients: int, per_client: int) -> int:
    def enough(size: int) -> bool:
        return int(np.minimum(supply // size, clients).sum()) >= clients * per_client

    if not enough(1):
        scarce = ", ".join(f"{c} ({n})" for c, n in enumerate(supply) if 0 < n < clients)
        raise DataError(
            f"there are too few samples for {clients} clients of {per_client} classes each; classes with fewer "
            f"samples than clients: {scarce or 'none'}; use fewer clients or classes_per_client, "
            "or split = 'dirichlet'"
        )
    low, high = 1, int(supply.sum()) + 1  # enough(low), not enough(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low


def _open_mix(mix: Any, left: Indices) -> Any:
    """A client's mix over the classes that have samples left; if none of its classes has, the mix of what is left."""
    open_mix = mix * (left > 0)
    total = open_mix.sum()
    # Division by a denormal sum would not give probabilities that add up to one.
    return open_mix / total if total > 1e-12 else left / left.sum()


def _setting_problems(
    data: Data,
    clients: int | None,
    split: str,
    classes_per_client: int | None,
    alpha: float | None,
    validation: float,
    fraction: float,
) -> list[str]:
    if split not in SPLITS:
        return [unknown("split", split, SPLITS)]
    problems = []
    if clients is None and split != "natural":
        problems.append(f"clients is not given; split = '{split}' needs it")
    if clients is not None and clients < 1:
        problems.append(f"clients is {clients}; at least 1 is needed")
    if not 0 <= validation < 1:
        problems.append(f"validation is {validation}; allowed: a fraction from 0 to below 1")
    if not 0 < fraction <= 1:
        problems.append(f"fraction is {fraction}; allowed: a fraction above 0 up to 1")
    if split == "natural" and groups_of(data.train) is None:
        problems.append("split = 'natural' needs data with groups (writers, roles, domains); this data has none")
    if split in ("classes", "dirichlet") and not has_classes(data.train.labels()):
        problems.append(
            f"split = '{split}' needs one class per sample; these labels are not classes; use iid or natural"
        )
        return problems
    if split == "classes":
        problems += _classes_problems(data, classes_per_client)
    if split == "dirichlet" and (alpha is None or not 0 < alpha < float("inf")):
        problems.append(f"alpha is {alpha}; split = 'dirichlet' needs a number above 0, such as 0.5")
    return problems


def _natural_problems(groups: Any, clients: int | None, each: int, domains: Sequence[str]) -> list[str]:
    present = [str(name) for name in np.unique(groups)]
    used, problems = len(domains or present), []
    if each < 1:
        problems.append(f"groups_per_client is {each}; at least 1 is needed")
    elif each > 1 and clients is not None and clients > used:
        problems.append(
            f"groups_per_client is {each}, but there are {clients} clients and only {used} data groups; "
            "use fewer clients, or one group per client, which clients then share"
        )
    strange = [name for name in domains if name not in present]
    if strange or len(set(domains)) < len(domains):
        shown = ", ".join(present[:10]) + (", ..." if len(present) > 10 else "")
        wrong = f"there is no {', '.join(strange)}" if strange else "one is there twice"
        problems.append(f"domains is {list(domains)}, but {wrong}; name data groups of the data once each: {shown}")
    return problems


def _classes_problems(data: Data, classes_per_client: int | None) -> list[str]:
    present = len(classes_in(data.train.labels()))
    if classes_per_client is None:
        return ["classes_per_client is not given; split = 'classes' needs it"]
    if not 1 <= classes_per_client <= present:
        return [f"classes_per_client is {classes_per_client}; allowed: 1 to {present}, since {present} classes exist"]
    return []


def _groups(data: Data) -> Any:
    groups = groups_of(data.train)
    assert groups is not None  # `_setting_problems` refuses data without groups
    return groups


def _used(samples: int, fraction: float, rng: np.random.Generator) -> Indices:
    return rng.permutation(samples)[: max(1, round(fraction * samples))]


def _even_offsets(samples: int, clients: int) -> Indices:
    each, rest = divmod(samples, clients)
    client = np.arange(clients + 1)
    return client * each + np.minimum(client, rest)


def _offsets(sizes: Indices) -> Indices:
    return np.concatenate([[0], np.cumsum(sizes)])


def _rng(*names: int | str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(derive(*names)))


def _checked(client: int, clients: int) -> int:
    if not 0 <= client < clients:
        raise DataError(f"client {client} does not exist; there are {clients}, numbered from 0")
    return client
