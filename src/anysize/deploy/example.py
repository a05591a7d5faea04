"""Data for trying out a fleet: the bundled digits, divided among the devices of a list."""

from __future__ import annotations

import torch

from anysize.data import Share, SubsetPart, load
from anysize.errors import DataError
from anysize.rng import generator


def digits(device: str, devices: list[str]) -> Share:
    """The digits of one device: every n-th of a fixed shuffle.

    Args:
        device: the device's name.
        devices: the names of all devices, in the same order everywhere.

    >>> len(digits("cam", ["board", "cam", "van"]).train)
    479
    """
    if device not in devices:
        raise DataError(f"device '{device}' is not among the devices of the example: {', '.join(devices)}")
    data = load("digits", {})
    assert not callable(data)
    order = torch.randperm(len(data.train), generator=generator("example"))[devices.index(device) :: len(devices)]
    return Share(SubsetPart(data.train, order))
