"""A budget in units, and whether a cost fits it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from anysize.errors import ConfigError

SLACK = 1e-9  # 0.29 * 100 is 28.999999999999996, but means 29 clients


@dataclass(frozen=True)
class Budget:
    """What a device can afford, in units; absent units are not limited.

    >>> Budget(macs=1e6, inference_bytes=4_000_000).fits({"macs": 9e5, "inference_bytes": 3e6, "bytes": 1e9})
    True
    >>> Budget()
    Traceback (most recent call last):
    anysize.errors.ConfigError: a budget must limit at least one of parameters, macs, training_macs, ...
    """

    parameters: float | None = None
    macs: float | None = None
    training_macs: float | None = None
    activation_bytes: float | None = None
    memory_bytes: float | None = None
    bytes: float | None = None
    inference_bytes: float | None = None
    latency_ms: float | None = None
    nonzero_macs: float | None = None

    def __post_init__(self) -> None:
        limits = self.limits()
        if not limits:
            units = ", ".join(unit.name for unit in fields(self))
            raise ConfigError(f"a budget must limit at least one of {units}")
        wrong = [f"{unit} = {limit!r}" for unit, limit in limits.items() if not _positive(limit)]
        if wrong:
            raise ConfigError(f"a budget's limits must be finite numbers above 0; given {', '.join(wrong)}")

    def limits(self) -> dict[str, float]:
        """The units that are limited, each with its limit.

        >>> Budget(macs=1e6).limits()
        {'macs': 1000000.0}
        """
        return {unit: limit for unit, limit in asdict(self).items() if limit is not None}

    def fits(self, costs: Mapping[str, float]) -> bool:
        """Whether every limited cost is within its limit; the costs must include every limited unit."""
        unknown_costs = sorted(set(self.limits()) - set(costs))
        if unknown_costs:
            raise ConfigError(
                f"a budget limits {', '.join(unknown_costs)}, which was not measured; "
                f"measured were {', '.join(sorted(costs)) or 'none'}"
            )
        return all(costs[unit] <= limit for unit, limit in self.limits().items())


UNITS = tuple(unit.name for unit in fields(Budget) if unit.name not in ("latency_ms", "nonzero_macs"))
"""Every unit of a budget that can be counted without weights."""


def _positive(limit: object) -> bool:
    """Whether a limit is a finite number above 0; a bool is not."""
    return isinstance(limit, int | float) and not isinstance(limit, bool) and 0 < limit < math.inf
