"""A device's data, checked before it trains."""

from __future__ import annotations

from typing import Any

import torch

from anysize.config.own_code import by_name
from anysize.config.tables import ExperimentConfig
from anysize.data import Part, Share, SubsetPart, from_function, to_input
from anysize.deploy.device_file import DeviceConfig
from anysize.errors import DataError
from anysize.experiment.signature import Signature
from anysize.inputs import Inputs, named, tensors_in
from anysize.rng import generator
from anysize.tasks import IGNORED


def own_share(device: DeviceConfig, config: ExperimentConfig, signature: Signature) -> Share:
    """The device's data, checked against the inputs and targets of the experiment.

    If its function provides no holdout, a fraction `data.validation` of the samples becomes the holdout: the same
    samples every time.

    Raises:
        DataError: with a line for each problem.
    """
    share = loaded(device)
    parts = {"train": share.train} | ({} if share.held_out is None else {"held_out": share.held_out})
    problems = [
        f"data = '{device.data}': {name}: {line}" for name, part in parts.items() for line in unfit(part, signature)
    ]
    if problems:
        raise DataError("\n".join(problems))
    return share if share.held_out is not None else held_apart(share, config.data.validation, device.name)


def loaded(device: DeviceConfig) -> Share:
    """What the device's own function returns.

    Raises:
        DataError: it cannot be called, or returns something else.
    """
    loader = from_function(device.data, by_name(device.data, "data set", ()), device.options)
    if not callable(loader):
        raise DataError(f"data = '{device.data}': its first parameter must be `device`, and it must return an az.Share")
    share: Share = loader(device.name)
    return share


def held_apart(share: Share, part: float, name: str) -> Share:
    """The share with a fraction of its samples as holdout: at least one, if there are two.

    >>> share = held_apart(Share(train=([[float(i)] for i in range(10)], [0] * 10)), 0.2, "cam")
    >>> len(share.train), len(share.held_out)
    (8, 2)
    """
    count = len(share.train)
    if not part or count < 2:
        return share
    held = min(max(1, round(part * count)), count - 1)
    order = torch.randperm(count, generator=generator("validation", name))
    return Share(
        SubsetPart(share.train, order[held:].sort().values), SubsetPart(share.train, order[:held].sort().values)
    )


def unfit(part: Part, signature: Signature) -> list[str]:
    """Why data does not fit the network; empty if it does."""
    if len(part) == 0:
        return ["there are no samples"]
    x, y = part.batch(torch.zeros(1, dtype=torch.int64))
    if isinstance(x, Inputs) or signature.names is not None:
        given, wanted = [name for name, _ in named(x)], signature.names or ["one without a name"]
        same = sorted(given) == sorted(wanted)
        return _values(part, signature, False) if same else [f"its inputs are {given}; the network takes {wanted}"]
    shape, tokens = tuple(to_input(x).shape[1:]), not to_input(x).is_floating_point()
    problems = []
    if shape != signature.input_shape:
        problems.append(f"a sample has shape {shape}; the network takes {signature.input_shape}")
    if tokens != signature.tokens:
        kinds = {True: "integers", False: "numbers"}
        problems.append(f"inputs are {kinds[tokens]}; the network takes {kinds[signature.tokens]}")
    if tuple(y.shape[1:]) != signature.target_shape:
        problems.append(f"a target has shape {tuple(y.shape[1:])}; the task takes {signature.target_shape}")
    if signature.labels and y.is_floating_point():
        problems.append("targets are numbers; the task takes classes")
    return problems or _values(part, signature, tokens)


def _values(part: Part, signature: Signature, tokens: bool) -> list[str]:
    """Problems with the values of samples of the right shape; reads each sample once."""
    problems: dict[str, None] = {}
    for index in torch.split(torch.arange(len(part)), _AT_ONCE):
        x, y = part.batch(index)
        for name, values in (*(("inputs", one) for one in tensors_in(x)), ("targets", y)):
            if values.is_floating_point() and not bool(values.isfinite().all()):
                problems[f"{name} hold values that are not finite"] = None
        known = signature.classes
        read = tensors_in(x) if tokens and signature.target_shape else ()
        for name, values in (("classes", y), *(("tokens", one) for one in read)):
            outside = known is not None and not values.is_floating_point() and not _within(values, known)
            if outside:
                problems[f"{name} lie outside 0 to {(known or 0) - 1}, which the network knows"] = None
    return list(problems)


_AT_ONCE = 512  # samples that are checked together


def _within(values: Any, count: int) -> bool:
    counted = values[values != IGNORED] if values.dim() > 1 else values
    return not counted.numel() or (int(counted.min()) >= 0 and int(counted.max()) < count)
