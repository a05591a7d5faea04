"""`device.toml`: what one device of a fleet is, what data it has, and what it can afford.

The file stays on the device. It alone says which code runs there: the function that gives its data, and the names of
code that an experiment may use besides what anysize brings.

    load(path) / loads(text)  ->  DeviceConfig  ->  dumps(device)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from anysize import config as configs
from anysize.config import BudgetConfig, ExperimentConfig, Name, Options, Positive, Table
from anysize.config import Part as Fraction
from anysize.data import Part, Share, SubsetPart, from_function, to_input
from anysize.devices import Budget
from anysize.errors import ConfigError, DataError
from anysize.experiment import Signature
from anysize.imports import by_name, look_in
from anysize.rng import generator


def _code_name(text: str) -> str:
    """The text, which names a function as "module:function"."""
    module, _, attribute = text.partition(":")
    if not module or not attribute or module.startswith("."):
        raise ValueError('must be "package.module:function"')
    return text


def _address(text: str) -> str:
    """The text, which is a host and a port."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError('must be "host:port"')
    return text


Code = Annotated[Name, AfterValidator(_code_name)]


class DeviceConfig(Table):
    """One device of a fleet.

    >>> device = DeviceConfig(name="cam", server="10.0.0.1:9092", data="shop.frames:load", capacity=0.25)
    >>> device.limits.capacity
    0.25
    """

    whole: ClassVar[str] = "the device's file"
    name: Name
    """What the device is called; a device that comes back under its name is the client that it was."""
    server: Annotated[Name, AfterValidator(_address)]
    """Where the server is: `"host:port"`."""
    data: Code
    """The function that gives the device's data: `"package.module:function"`, called with the device's name and
    `options`."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of that function."""
    capacity: Fraction | None = None
    """The part of the full model that the device can train."""
    budget: BudgetConfig | None = None
    """What it can afford, in units, in place of a capacity; without either, `anysize join --measure` finds one."""
    memory_bytes: Positive | None = None
    """Memory that a task may take; absent: what is free when it comes."""
    key: Name | None = None
    """The file of its private key, relative to this one."""
    certificate: Name | None = None
    """The file of the certificate of the authority that the server's is checked against, relative to this one."""
    allow: Annotated[tuple[Code, ...], Field(strict=False)] = ()
    """Names of models, methods and tasks of your own, `"module:name"`, that an experiment may use on this device."""
    _folder: Path | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.capacity is not None and self.budget is not None:
            raise ValueError("must have a capacity or a budget, not both")
        return self

    @property
    def folder(self) -> Path:
        """The folder of the file, or the current one."""
        return self._folder or Path()

    @property
    def limits(self) -> Limits:
        """What the device can afford."""
        budget = None if self.budget is None else Budget(**self.budget.model_dump())
        return Limits(self.capacity, budget, self.memory_bytes)

    def path(self, name: str) -> Path:
        """The file that the device's file calls `name`: relative names start at its folder."""
        return self.folder / name


@dataclass(frozen=True)
class Limits:
    """What a device can afford.

    Attributes:
        capacity: the part of the full model, or None.
        budget: in units, or None.
        memory_bytes: what a task may take; None for what is free.

    >>> str(Limits(0.25)), str(Limits(budget=Budget(macs=1e6)))
    ('capacity, 0.25,', 'budget, macs = 1e+06,')
    """

    capacity: float | None = None
    budget: Budget | None = None
    memory_bytes: float | None = None

    def __str__(self) -> str:
        if self.budget is None:
            return f"capacity, {self.capacity:g},"
        return "budget, " + ", ".join(f"{unit} = {limit:g}" for unit, limit in self.budget.limits().items()) + ","


def load(path: str | Path) -> DeviceConfig:
    """The device in a TOML file; its folder becomes importable, since its data's function may lie there.

    Raises:
        ConfigError: with a line for each problem.
    """
    file = Path(path)
    device = configs.checked(DeviceConfig, configs.read(file, "device's file"), str(file))
    device._folder = file.resolve().parent
    look_in(device._folder)
    return device


def loads(text: str) -> DeviceConfig:
    """The device in a TOML text.

    >>> loads('name = "cam"\\nserver = "localhost:9092"\\ndata = "shop:load"\\ncapcity = 0.5')
    Traceback (most recent call last):
    anysize.errors.ConfigError: the device's file: top level: unknown key 'capcity'; did you mean 'capacity'? ...
    """
    return configs.checked(DeviceConfig, configs.parse(text, DeviceConfig.whole), DeviceConfig.whole)


def dumps(device: DeviceConfig) -> str:
    """The complete TOML of a device; `loads` gives an equal one back.

    >>> text = dumps(DeviceConfig(name="cam", server="localhost:9092", data="shop:load", budget={"macs": 1e6}))
    >>> loads(text).budget.macs
    1000000.0
    """
    return configs.written(device.model_dump(exclude_none=True))


# The device's own data ------------------------------------------------------------------------------


def own_share(device: DeviceConfig, config: ExperimentConfig, signature: Signature) -> Share:
    """The device's own data, checked against what the experiment's network takes.

    Where its function holds nothing out, `data.validation` of it is, the same samples every time.

    Raises:
        DataError: with a line for each problem.
    """
    loader = from_function(device.data, by_name(device.data, "data set", ()), device.options)
    if not callable(loader):
        raise DataError(f"data = '{device.data}': its first parameter must be `device`, and it must give an az.Share")
    share: Share = loader(device.name)
    parts = {"train": share.train} | ({} if share.held_out is None else {"held_out": share.held_out})
    problems = [
        f"data = '{device.data}': {name}: {line}" for name, part in parts.items() for line in unfit(part, signature)
    ]
    if problems:
        raise DataError("\n".join(problems))
    return share if share.held_out is not None else held_apart(share, config.data.validation, device.name)


def held_apart(share: Share, part: float, name: str) -> Share:
    """The share with a part of its samples held out, at least one of two.

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
    """Why a part of the data does not fit the network; nothing if it does."""
    if len(part) == 0:
        return ["there are no samples"]
    x, y = part.batch(torch.zeros(1, dtype=torch.int64))
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
    """What is wrong with the values of samples that have the right form; each is looked at once."""
    problems: dict[str, None] = {}
    for index in torch.split(torch.arange(len(part)), _AT_ONCE):
        x, y = part.batch(index)
        for name, values in (("inputs", x), ("targets", y)):
            if values.is_floating_point() and not bool(values.isfinite().all()):
                problems[f"{name} hold values that are not finite"] = None
        known = signature.classes
        for name, values in (("classes", y), *((("tokens", x),) if tokens and signature.target_shape else ())):
            outside = known is not None and not values.is_floating_point() and not _within(values, known)
            if outside:
                problems[f"{name} lie outside 0 to {(known or 0) - 1}, which the network knows"] = None
    return list(problems)


_AT_ONCE = 512  # samples that are looked at together


def _within(values: Any, count: int) -> bool:
    return int(values.min()) >= 0 and int(values.max()) < count


def check_limits(device: DeviceConfig) -> Limits:
    """What the device can afford; an error if its file does not say."""
    if device.capacity is None and device.budget is None:
        raise ConfigError(
            f"device '{device.name}': give its file a capacity or a budget, or let `anysize join --measure` find one"
        )
    return device.limits
