"""Device groups: what their devices can train, how fast they are, and how long a round takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from anysize.config.latencies import LatenciesConfig
from anysize.devices.budget import Budget


@dataclass(frozen=True)
class Latencies:
    """How long a training step takes on a device, as measured there.

    Attributes:
        method: the method that trained.
        network: a checksum of the operations of the full network.
        batch_size: how many samples a step had.
        milliseconds: the time of every size that was timed, by width and depth.
    """

    method: str
    network: str
    batch_size: int
    milliseconds: Mapping[tuple[float, int | None], float]

    @classmethod
    def of(cls, config: LatenciesConfig) -> Latencies:
        """The latencies that a table describes."""
        sizes = zip(config.widths, (depth or None for depth in config.depths))
        return cls(config.method, config.network, config.batch_size, dict(zip(sizes, config.latency_ms)))

    def at(self, width: float, depth: int | None) -> float:
        """The milliseconds of a size; infinite if it was not timed, since memory did not suffice.

        >>> Latencies("fedavg", "5f3a", 32, {(0.5, None): 8.5}).at(0.5, None)
        8.5
        """
        return self.milliseconds.get((width, depth), math.inf)


@dataclass(frozen=True)
class DeviceGroup:
    """Devices of one kind.

    Attributes:
        name: What the group is called; for a plain capacity, its label.
        label: The size's name in every table: the capacity as given (`"0.25"`), or a budget's group name. Empty if the
            budget changes from round to round: then every size has a name of its own.
        capacity: The fraction of the full model that the device can train, or None with a budget.
        budget: What the device can afford in units, or None with a capacity.
        depth: How many blocks of every stage it trains, or None if not given.
        macs_per_second: Compute speed, or None if unknown.
        bytes_per_second_down: Bandwidth from the server, or None if unknown.
        bytes_per_second_up: Bandwidth to the server, or None if unknown.
        available: Probability that such a device can take part in a round.
        sparsity: Which fraction of its weights is masked, or None if not given.
        latencies: How long sizes take on such a device, or None if nobody measured it there.
        clients: How many clients are in the group; if groups are redrawn, the rounded mean.

    >>> DeviceGroup(name="0.5", label="0.5", capacity=0.5).available
    1.0
    """

    name: str
    label: str
    capacity: float | None = None
    budget: Budget | None = None
    macs_per_second: float | None = None
    bytes_per_second_down: float | None = None
    bytes_per_second_up: float | None = None
    available: float = 1.0
    clients: int = 0
    depth: int | None = None
    sparsity: float | None = None
    latencies: Latencies | None = field(default=None, repr=False)

    @property
    def key(self) -> str:
        """What its size goes by: the name, and the budget too if that changes from round to round.

        >>> DeviceGroup("board", "board", budget=Budget(macs=1e6)).key
        'board'
        >>> DeviceGroup("board", "", budget=Budget(macs=1e6)).key
        'board with macs = 1000000.0'
        """
        if self.label:
            return self.name
        limits = {} if self.budget is None else self.budget.limits()
        return f"{self.name} with {', '.join(f'{u} = {limit!r}' for u, limit in limits.items()) or 'no budget'}"


def round_seconds(group: DeviceGroup, macs: float, bytes_down: float, bytes_up: float) -> float | None:
    """The virtual time of one client's round: receive, compute, send. None if nothing is known about the device.

    A speed that is not known takes no time.

    >>> board = DeviceGroup("board", "0.25", 0.25, macs_per_second=1e9, bytes_per_second_down=1e6)
    >>> round_seconds(board, macs=2e9, bytes_down=5e5, bytes_up=5e5)
    2.5
    """
    work = (
        (bytes_down, group.bytes_per_second_down),
        (macs, group.macs_per_second),
        (bytes_up, group.bytes_per_second_up),
    )
    known = [amount / speed for amount, speed in work if speed is not None]
    return math.fsum(known) if known else None
