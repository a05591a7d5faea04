"""How capacities are spread over a fleet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from anysize.config.devices import DevicesConfig
from anysize.devices.budget import SLACK
from anysize.errors import ConfigError


def capacity_shares(config: DevicesConfig) -> tuple[float, ...]:
    """The fraction of the clients that has each listed capacity, or is in each listed device group.

    A client that the distribution puts between two listed capacities gets the smaller one.

    >>> capacity_shares(DevicesConfig(distribution="exponential", capacities=[0.125, 0.5, 1.0]))
    (0.5, 0.25, 0.25)
    """
    if config.groups:
        even = 1.0 / len(config.groups)
        return tuple(even if group.fraction is None else group.fraction for group in config.groups)
    capacities = config.capacities or ()
    if config.fractions is not None:
        return config.fractions
    if config.distribution is None:
        return (1.0 / len(capacities),) * len(capacities)
    if config.distribution == "log-normal":
        return _log_normal_shares(config, capacities)
    return _listed_shares(_widths(config), capacities)


def _distribution_numbers(config: DevicesConfig) -> dict[str, Any]:
    """The parameters of the distribution, defaults included."""
    options = config.distribution_options
    return {} if options is None else options.model_dump(exclude_none=True)


def _widths(config: DevicesConfig) -> list[tuple[float, float]]:
    """The capacities of a distribution, each with its fraction of the clients."""
    numbers = _distribution_numbers(config)
    if config.distribution == "two-type":
        return [(numbers["strong"], numbers["share"]), (numbers["weak"], 1.0 - numbers["share"])]
    if config.distribution == "step":
        steps = math.floor(1.0 / numbers["step"] + SLACK)
        widths = [number * numbers["step"] for number in range(1, steps + 1)]
    else:
        widths = [1.0 / divisor for divisor in numbers["divisors"]]
    return [(width, 1.0 / len(widths)) for width in widths]


def _listed_shares(widths: Sequence[tuple[float, float]], capacities: Sequence[float]) -> tuple[float, ...]:
    """The fractions of the widths, each counted for the largest listed capacity that is not above the width."""
    smallest = min(capacities)
    below = sorted({width for width, _ in widths if width < smallest - SLACK})
    if below:
        raise ConfigError(
            f"devices.capacities: the smallest is {smallest:g}, but the distribution has devices that "
            f"can only train {', '.join(f'{width:g}' for width in below)}; list that capacity too"
        )
    shares = dict.fromkeys(capacities, 0.0)
    for width, share in widths:
        shares[max(capacity for capacity in capacities if capacity <= width + SLACK)] += share
    return tuple(shares.values())


def _log_normal_shares(config: DevicesConfig, capacities: Sequence[float]) -> tuple[float, ...]:
    """The probability of each bin between listed capacities; the outer bins reach to 0 and to infinity."""
    numbers = _distribution_numbers(config)
    ascending = sorted(capacities)
    scale = numbers["sigma"] * math.sqrt(2.0)
    inner = [(1.0 + math.erf(math.log(edge / numbers["median"]) / scale)) / 2.0 for edge in ascending[1:]]
    edges = [0.0, *inner, 1.0]
    shares = {capacity: edges[place + 1] - edges[place] for place, capacity in enumerate(ascending)}
    return tuple(shares[capacity] for capacity in capacities)
