"""A device's own file: where its server is, what it can afford, which code it may run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from anysize import config as configs
from anysize.config import files as config_files
from anysize.config import toml as config_toml
from anysize.config.devices import BudgetConfig
from anysize.config.own_code import look_in
from anysize.config.table import Table
from anysize.config.values import Name, Options, Positive
from anysize.config.values import Part as Fraction
from anysize.devices.budget import Budget
from anysize.errors import ConfigError

_HEADING = "# Each line is a key of the device; append more in any order. docs/trust.md says what there is."


def _code_name(text: str) -> str:
    """The text; raises unless it names a function as "module:function"."""
    module, _, attribute = text.partition(":")
    if not module or not attribute or module.startswith("."):
        raise ValueError('must be "package.module:function"')
    return text


def _address(text: str) -> str:
    """The text; raises unless it is a host and a port."""
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
    """The name of the device; a device that rejoins under its name stays the same client."""
    server: Annotated[Name, AfterValidator(_address)]
    """Where the server is: `"host:port"`."""
    data: Code
    """The function that returns the device's data: `"package.module:function"`, called with the device's name and
    `options`."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of that function."""
    capacity: Fraction | None = None
    """The fraction of the full model that the device can train."""
    budget: BudgetConfig | None = None
    """What it can afford, in units, in place of a capacity; without either, `anysize join --measure` finds one."""
    memory_bytes: Positive | None = None
    """The memory that a job may take; absent: what is free when its message arrives."""
    key: Name | None = None
    """The file of its private key, relative to this one."""
    certificate: Name | None = None
    """The certificate of the authority that signed the server's certificate: a file, relative to this one."""
    allow: Annotated[tuple[Code, ...], Field(strict=False)] = ()
    """Your own models, methods and tasks, `"module:name"`, that an experiment may use on this device."""
    secure_threshold: Annotated[int, Field(ge=2)] | None = None
    """The device takes part only in experiments that sum updates securely, over at least so many devices."""
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
        """The path of a file that the device's file names; relative names start at its folder."""
        return self.folder / name


@dataclass(frozen=True)
class Limits:
    """What a device can afford.

    Attributes:
        capacity: the fraction of the full model, or None.
        budget: in units, or None.
        memory_bytes: the memory that a job may take; None: what is free.

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


def check_limits(device: DeviceConfig) -> Limits:
    """What the device can afford; an error if its file does not say."""
    if device.capacity is None and device.budget is None:
        raise ConfigError(
            f"device '{device.name}': give its file a capacity or a budget, or let `anysize join --measure` find one"
        )
    return device.limits


def load(path: str | Path) -> DeviceConfig:
    """The device in a TOML file; its folder becomes importable, since it may hold the function for the data.

    Raises:
        ConfigError: with a line for each problem.
    """
    file = Path(path)
    device = config_files.checked(DeviceConfig, config_files.read(file, "device's file"), str(file))
    device._folder = file.resolve().parent
    look_in(device._folder)
    return device


def loads(text: str) -> DeviceConfig:
    """The device in a TOML text.

    >>> loads('name = "cam"\\nserver = "localhost:9092"\\ndata = "shop:load"\\ncapcity = 0.5')
    Traceback (most recent call last):
    anysize.errors.ConfigError: the device's file: top level: unknown key 'capcity'; did you mean 'capacity'? ...
    """
    return config_files.checked(DeviceConfig, configs.parse(text, DeviceConfig.whole), DeviceConfig.whole)


def dumps(device: DeviceConfig) -> str:
    """The complete TOML of a device; `loads` returns an equal one.

    >>> text = dumps(DeviceConfig(name="cam", server="localhost:9092", data="shop:load", budget={"macs": 1e6}))
    >>> loads(text).budget.macs
    1000000.0
    """
    return written(device.model_dump(exclude_none=True))


def written(values: Mapping[str, Any]) -> str:
    """A device's file: every key is one line, so that a key that somebody appends is the device's, not a table's.

    >>> print(written({"name": "cam", "options": {"folder": "/data"}, "capacity": 0.25}), end="")
    # Each line is a key of the device; append more in any order. docs/trust.md says what there is.
    name = "cam"
    options = { folder = "/data" }
    capacity = 0.25
    """
    lines = [f"{key} = {config_toml.inline(value)}" for key, value in values.items()]
    return "\n".join([_HEADING, *lines, ""])
