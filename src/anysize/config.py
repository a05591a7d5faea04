"""The experiment file: TOML in, checked; the complete TOML out.

One table per part of an experiment, one frozen class per table. Only `data.name`, `model.name` and
`method.name` have no default, and `data.clients` unless the data says who has what. Whatever is wrong with a
file is collected and raised once, as a `ConfigError` with a line for each problem: the dotted key, what was
given, what is allowed.

    load(path) / loads(text) / from_dict(tables)  ->  ExperimentConfig  ->  dumps(config)
"""

from __future__ import annotations

import copy
import csv
import datetime
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from anysize.errors import ConfigError, unknown

CONFIG, ENVIRONMENT = "config.toml", "environment.json"
"""The files in which a run's directory has the complete experiment, and what surrounded it."""

RESERVED_TABLES = ("compare", "privacy")
"""Names that no experiment may use yet, so that later versions can give them a meaning."""

UNITS = ("parameters", "macs", "training_macs", "activation_bytes", "bytes", "inference_bytes", "latency_ms")
"""What a device's budget may limit."""

NEEDS_LABELS = (
    'it needs to know which classes every device has; set devices.share = ["labels"], or tricks.classwise_head = false'
)
"""Why a class-wise trick is refused on a fleet."""

_PROBLEMS = "problems"  # the type of errors whose lines already say everything, key included

_Item = TypeVar("_Item")
Kind = TypeVar("Kind", bound="Table")


# Values -------------------------------------------------------------------------------------------


def _number(allowed: Callable[[float], bool], words: str) -> AfterValidator:
    """A check that a number is allowed; `words` completes the sentence "must be ..."."""

    def check(value: float) -> float:
        if not allowed(value):
            raise ValueError(f"must be {words}")
        return value

    return AfterValidator(check)


def _distinct(values: tuple[_Item, ...]) -> tuple[_Item, ...]:
    """The values, none of which occurs twice."""
    repeated = sorted({str(value) for value in values if values.count(value) > 1})
    if repeated:
        raise ValueError(f"must name each value once; {', '.join(repeated)} occurs more than once")
    return values


def _shares(values: tuple[float, ...]) -> tuple[float, ...]:
    """The values, which sum to 1."""
    if not math.isclose(math.fsum(values), 1.0, abs_tol=1e-6):
        raise ValueError(f"must sum to 1; these sum to {math.fsum(values):g}")
    return values


def _not_empty(values: tuple[_Item, ...]) -> tuple[_Item, ...]:
    """The values, of which there is at least one."""
    if not values:
        raise ValueError("must hold at least one value")
    return values


def _folder_name(text: str) -> str:
    """The text, which can be the name of a folder."""
    if not text.strip() or text in (".", "..") or re.search(r'[/\\:*?"<>|\x00-\x1f\x7f]', text):
        raise ValueError('must be usable as a folder name: not empty, none of / \\ : * ? " < > |')
    return text


def _not_blank(text: str) -> str:
    """The text, which says something."""
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def plain(value: Any, key: str) -> Any:
    """The value as TOML can hold it, tuples as lists; a `ValueError` naming the key otherwise."""
    if isinstance(value, Mapping):
        return {_plain_key(name, key): plain(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{key}[{place}]") for place, item in enumerate(value)]
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"must hold numbers; {key} is not a number (nan)")
    if type(value) not in (bool, int, float, str):
        advice = "leave it out instead" if value is None else "write a string, a number, a list or a table"
        raise ValueError(f"must hold what TOML can hold; {key} is a {type(value).__name__}: {advice}")
    return value


def _plain_key(name: object, key: str) -> str:
    """The name of an entry, which is a string."""
    if not isinstance(name, str):
        raise ValueError(f"must have strings as keys; {key} has {name!r}")
    return name


def _plain_table(table: dict[str, Any]) -> dict[str, Any]:
    """A copy of the table as TOML can hold it."""
    return {_plain_key(name, "it"): plain(value, str(name)) for name, value in table.items()}


def _one_or_list(allowed: Callable[[float], bool], words: str) -> PlainValidator:
    """A check for a number, or a list of numbers parallel to `capacities`."""

    def check(value: Any) -> float | tuple[float, ...] | None:
        if value is None:
            return None
        several = isinstance(value, list | tuple)
        numbers = list(value) if several else [value]
        if not numbers or not all(_is_number(number) and allowed(number) for number in numbers):
            raise ValueError(f"must be a number {words}, or a list of such numbers")
        return tuple(float(number) for number in numbers) if several else float(value)

    return PlainValidator(check)


def _is_number(value: object) -> bool:
    """Whether the value is a finite number, and not a bool in a number's place."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_above_zero: tuple[Callable[[float], bool], str] = (lambda value: value > 0, "above 0")
_unit_interval: tuple[Callable[[float], bool], str] = (lambda value: 0 < value <= 1, "above 0 and at most 1")

Name = Annotated[str, AfterValidator(_not_blank)]
Count = Annotated[int, _number(lambda value: value >= 1, "at least 1")]
Positive = Annotated[float, _number(*_above_zero)]
NotNegative = Annotated[float, _number(lambda value: value >= 0, "at least 0")]
Part = Annotated[float, _number(*_unit_interval)]
UpToOne = Annotated[float, _number(lambda value: 0 <= value <= 1, "at least 0 and at most 1")]
BelowOne = Annotated[float, _number(lambda value: 0 <= value < 1, "at least 0 and below 1")]
Options = Annotated[dict[str, Any], AfterValidator(_plain_table)]
Names = Annotated[tuple[Name, ...], Field(strict=False)]
Rate = Annotated[float | tuple[float, ...] | None, _one_or_list(*_above_zero)]
Probability = Annotated[float | tuple[float, ...] | None, _one_or_list(*_unit_interval)]


# Tables -------------------------------------------------------------------------------------------


class Table(BaseModel):
    """One table of the experiment file: frozen, strict about types, without unknown keys.

    Made by hand it raises a `ConfigError` too, with the same lines as a file would give.

    >>> TrainingConfig(batch_size=0, schedule="cosin")
    Traceback (most recent call last):
    anysize.errors.ConfigError: [training] has 2 problems:
      - training.batch_size: given 0, must be at least 1
      - training.schedule: unknown value 'cosin'; did you mean 'cosine'? Known: constant, cosine, step
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
    table: ClassVar[str] = ""
    """Where the table stands in the file, as a dotted key."""
    whole: ClassVar[str] = "the experiment"
    """What the file is that the table belongs to."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = list(_lines(error, type(self)))
        else:
            return
        _refuse(problems, f"[{self.table}]" if self.table else self.whole)

    # Tells pydantic that nested tables need not pass through `__init__`: they are checked together with
    # the whole file, so that the problems of all tables are collected.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def _raise_problems(problems: Iterable[str]) -> None:
    """Ends validation of a table if there are any problems; each line names its own key."""
    lines = list(problems)
    if lines:
        raise PydanticCustomError(_PROBLEMS, "{lines}", {"lines": "\n".join(lines)})


class DataConfig(Table):
    """What is learned from, and who has what.

    >>> DataConfig(name="digits", clients=20).split
    'iid'
    """

    table: ClassVar[str] = "data"
    name: Name
    """A data set's name, `"module:function"`, or `"devices"`: each device has its own."""
    test: Name | None = None
    """With name = "devices": a data set of the server's own, by name or `"module:function"`, whose test part tests."""
    clients: Count | None = None
    """How many clients share the data; needed unless the split is natural or each device has its own."""
    split: Literal["iid", "classes", "dirichlet", "natural"] = "iid"
    """How the training data is divided among the clients."""
    classes_per_client: Count | None = None
    """With split = "classes": how many classes one client has."""
    unbalance: Part | None = None
    """With split = "classes": the part of a share that a client has of its classes after the first; absent: all."""
    alpha: Positive | None = None
    """With split = "dirichlet": the concentration; smaller is more uneven."""
    equal_sizes: bool = True
    """With split = "dirichlet": whether every client has equally many samples."""
    fraction: Part = 1.0
    """The part of the training data that is used at all."""
    validation: BelowOne = 0.0
    """The part of each client's share that is held out on the client."""
    augment: Names = ()
    """Random changes to training images: "crop", "flip"."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the data set's function."""
    normalize: bool | None = None
    """Whether the model's first layer normalises its input; absent: where the data has a mean."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _raise_problems(self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        if self.clients is None and self.split != "natural" and self.name != "devices":
            yield 'data.clients: missing; give the number of clients, or split = "natural"'
        for key, split in (("classes_per_client", "classes"), ("alpha", "dirichlet")):
            given = getattr(self, key)
            if self.split == split and given is None:
                yield f'data.{key}: missing; split = "{split}" needs it'
            if self.split != split and given is not None:
                yield (
                    f'data.{key}: given {given}, but split = "{self.split}" does not use it; '
                    f'set split = "{split}" or leave it out'
                )
        if self.unbalance is not None and self.split != "classes":
            yield f'data.unbalance: given {self.unbalance}, but only split = "classes" uses it; leave it out'
        if self.name != "devices" and self.test is not None:
            yield 'data.test: only for name = "devices"; a data set brings its own test part'
        if self.name == "devices":
            given = {"split": self.split != "iid", "fraction": self.fraction != 1.0, "options": bool(self.options)}
            for key in (key for key, is_given in given.items() if is_given):
                yield f"data.{key}: every device has its own data, which the server does not divide; leave it out"


class ModelConfig(Table):
    """The network, as a name with options, and what of it may shrink.

    >>> ModelConfig(name="mlp", options={"hidden": (64, 32)}).options
    {'hidden': [64, 32]}
    """

    table: ClassVar[str] = "model"
    name: Name
    """A model's name, or `"module:function"` that returns any nn.Module."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the model's function."""
    weights: Name | None = None
    """A safetensors file to start from, relative to the experiment file."""
    keep: Names = ()
    """Patterns of parameters whose width group stays whole at every size."""
    frozen: Names = ()
    """Patterns of parameters that are not trained."""
    heads: Literal["within", "whole"] = "within"
    """Attention shrinks within every head, or by dropping whole heads."""
    input: Annotated[tuple[Count, ...], Field(strict=False)] | None = None
    """The shape of one sample as the network receives it; absent: as the data set says."""
    tokens: bool | None = None
    """Whether inputs are integers; absent: as the data set says, and false where the server has none."""
    blocks: Annotated[tuple[Names, ...], Field(strict=False)] = ()
    """Names of the modules that can be removed, a list for each stage; absent: found by tracing."""
    attributes: Options = Field(default_factory=dict)
    """Module attributes that hold a size and must shrink with it."""


class BudgetConfig(Table):
    """What a device can afford, in units; at least one.

    >>> BudgetConfig(activation_bytes=64_000_000).activation_bytes
    64000000.0
    """

    table: ClassVar[str] = "devices.groups.budget"
    parameters: Positive | None = None
    """Parameters that the device trains and sends."""
    macs: Positive | None = None
    """Multiply-adds of one forward pass of one sample."""
    training_macs: Positive | None = None
    """Multiply-adds of one training step, per sample."""
    activation_bytes: Positive | None = None
    """Memory of what a training step keeps for its backward pass."""
    bytes: Positive | None = None
    """Bytes on the wire in one round, down and up together."""
    inference_bytes: Positive | None = None
    """Tensors of the finished network as it ships, batch-norm statistics included."""
    latency_ms: Positive | None = None
    """Time of one training step, as measured when the method's table was made; only for methods with a table."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if all(getattr(self, unit) is None for unit in UNITS):
            raise ValueError(f"must limit at least one of {', '.join(UNITS)}")
        return self


class GroupConfig(Table):
    """Devices of one kind.

    >>> GroupConfig(name="board", clients=30, capacity=0.25).capacity
    0.25
    """

    table: ClassVar[str] = "devices.groups"
    name: Name
    """What the group is called in tables and reports."""
    clients: Count | None = None
    """How many clients are of this kind; one group may leave it out and gets the rest."""
    fraction: Part | None = None
    """Which part of the clients is of this kind, in place of a count."""
    capacity: Part | None = None
    """The part of the full model that the device can train."""
    budget: BudgetConfig | None = None
    """What the device can afford, in units, in place of a capacity."""
    depth: Count | None = None
    """How many blocks of every stage the device trains, in place of a capacity or beside a budget."""
    macs_per_second: Positive | None = None
    """Compute speed, for virtual time."""
    bytes_per_second: Positive | None = None
    """Bandwidth each way, for virtual time."""
    bytes_per_second_up: Positive | None = None
    """Bandwidth to the server."""
    bytes_per_second_down: Positive | None = None
    """Bandwidth from the server."""
    available: Part | None = None
    """Probability that such a device can take part in a round."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.capacity is None) == (self.budget is None and self.depth is None):
            raise ValueError(
                "must have a capacity or a budget, one of the two; a depth goes in place of either, or with a budget"
            )
        if self.clients is not None and self.fraction is not None:
            raise ValueError("must have clients (a count) or fraction, not both")
        if self.bytes_per_second is not None and (self.bytes_per_second_up or self.bytes_per_second_down):
            raise ValueError("must have bytes_per_second, or bytes_per_second_up and _down, not both")
        return self


class DistributionConfig(Table):
    """The numbers of a distribution of capacities; each distribution has its own and refuses the others'.

    >>> DistributionConfig(sigma=0.3).sigma
    0.3
    """

    table: ClassVar[str] = "devices.distribution_options"
    divisors: (
        Annotated[
            tuple[Annotated[float, _number(lambda value: value >= 1, "at least 1")], ...],
            Field(strict=False),
            AfterValidator(_not_empty),
        ]
        | None
    ) = None
    """exponential: equal groups of clients have width 1 / divisor; [1, 1, 2, 4] is a richer fleet."""
    step: Part | None = None
    """step: equal groups of clients have widths step, 2 step, ... up to 1."""
    median: Positive | None = None
    """log-normal: half of the clients can afford at least this."""
    sigma: Positive | None = None
    """log-normal: the standard deviation of the capacity's logarithm."""
    share: Annotated[float, _number(lambda value: 0 < value < 1, "above 0 and below 1")] | None = None
    """two-type: the part of the clients that is of the strong type A."""
    strong: Part | None = None
    """two-type: the capacity of type A."""
    weak: Part | None = None
    """two-type: the capacity of type B."""


_DISTRIBUTION_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "exponential": {"divisors": (1.0, 2.0, 4.0, 8.0)},
    "step": {"step": 0.25},
    "log-normal": {"median": 0.45, "sigma": 0.4},
    "two-type": {"share": 0.25, "strong": 1.0, "weak": 0.25},
}
_DISTRIBUTION_CAPACITIES: Mapping[str, tuple[float, ...]] = {
    "exponential": (1.0, 0.5, 0.25, 0.125),
    "step": (0.25, 0.5, 0.75, 1.0),
    "log-normal": (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0),
    "two-type": (1.0, 0.25),
}


class DevicesConfig(Table):
    """What the clients can afford, and who takes part in a round.

    Either `capacities` (with `fractions`, or a `distribution`), or `groups` with names, written in the file
    or read from a CSV `file`. The CSV's rows become `groups`, so that the complete file needs no CSV.

    >>> DevicesConfig().capacities
    (0.25, 0.5, 0.75, 1.0)
    >>> DevicesConfig(distribution="two-type").capacities
    (1.0, 0.25)
    """

    table: ClassVar[str] = "devices"
    capacities: (
        Annotated[
            tuple[Part, ...],
            Field(strict=False),
            AfterValidator(_not_empty),
            AfterValidator(_distinct),
        ]
        | None
    ) = None
    """The sizes that devices can train; absent: those of the distribution, or 0.25, 0.5, 0.75, 1.0."""
    fractions: Annotated[tuple[Part, ...], Field(strict=False), AfterValidator(_shares)] | None = None
    """The part of the clients that has each capacity; absent: equal parts."""
    capacity_of: Literal["width", "parameters", "macs", "activation_bytes", "bytes"] = "width"
    """What a capacity is a fraction of."""
    redraw: Literal["never", "round"] = "never"
    """Whether a client keeps its capacity or gets a new one every round."""
    cover: bool = False
    """With redraw = "round": draw again until every capacity occurs among the participants."""
    participation: Part | None = None
    """The part of the clients that takes part in a round; 1.0 unless clients_per_round is given."""
    clients_per_round: Count | Annotated[tuple[Count, ...], Field(strict=False)] | None = None
    """How many clients take part in a round; a list: how many of each capacity or group, as listed."""
    assignment: Literal["random", "order", "group"] = "random"
    """Which client has which capacity: shuffled, in blocks as listed, or by its data's group."""
    distribution: Literal["exponential", "step", "log-normal", "two-type"] | None = None
    """Where the fractions come from, in place of `fractions`."""
    distribution_options: DistributionConfig | None = None
    """The numbers of the distribution; those left out are filled in."""
    macs_per_second: Rate = None
    """Compute speed: one for all, or a list parallel to capacities."""
    bytes_per_second: Rate = None
    """Bandwidth each way: one for all, or a list parallel to capacities."""
    bytes_per_second_up: Rate = None
    """Bandwidth to the server: one for all, or a list parallel to capacities."""
    bytes_per_second_down: Rate = None
    """Bandwidth from the server: one for all, or a list parallel to capacities."""
    available: Probability = 1.0
    """Probability that a device can take part in a round: one for all, or a list parallel to capacities."""
    share: Annotated[tuple[Literal["samples", "labels"], ...], Field(strict=False), AfterValidator(_distinct)] = ()
    """With data.name = "devices": what a device may tell of its data, its number of samples or which classes it has."""
    file: Name | None = None
    """A CSV file of groups, relative to the experiment file; read at once and replaced by `groups`."""
    groups: Annotated[tuple[GroupConfig, ...], Field(strict=False)] = ()
    """Kinds of devices by name, in place of capacities."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any, info: ValidationInfo) -> Any:
        """The table with its file read and the defaults that depend on other keys filled in."""
        if not isinstance(given, dict):
            return given
        table = dict(given)
        if isinstance(table.get("file"), str) and not table.get("groups"):
            folder = (info.context or {}).get("folder") or Path()
            table["groups"] = read_groups(folder / table.pop("file"))
        if table.get("participation") is None and table.get("clients_per_round") is None:
            table["participation"] = 1.0
        distribution = str(table.get("distribution"))
        if distribution in _DISTRIBUTION_DEFAULTS:
            options = table.get("distribution_options")
            if isinstance(options, DistributionConfig):
                options = options.model_dump(exclude_none=True)
            if options is None or isinstance(options, dict):
                table["distribution_options"] = {**_DISTRIBUTION_DEFAULTS[distribution], **(options or {})}
        if table.get("capacities") is None and not table.get("groups"):
            table["capacities"] = _DISTRIBUTION_CAPACITIES.get(distribution, (0.25, 0.5, 0.75, 1.0))
        return table

    @model_validator(mode="after")
    def _check(self) -> Self:
        _raise_problems([*self._source_problems(), *self._list_problems(), *self._choice_problems()])
        return self

    def _source_problems(self) -> Iterator[str]:
        if self.groups:
            if self.file is not None:
                yield "devices.file: given together with devices.groups; give one of the two"
            for key in ("capacities", "fractions", "distribution"):
                if getattr(self, key) is not None:
                    yield f"devices.{key}: given together with devices.groups; give one of the two"
            yield from _group_problems(self.groups)
        if self.distribution is not None and self.fractions is not None:
            yield "devices.fractions: given together with devices.distribution; give one of the two"
        yield from self._distribution_problems()

    def _distribution_problems(self) -> Iterator[str]:
        if self.distribution_options is None:
            return
        if self.distribution is None:
            yield "devices.distribution_options: given without devices.distribution; give that too"
            return
        given = self.distribution_options.model_dump(exclude_none=True)
        allowed = _DISTRIBUTION_DEFAULTS[self.distribution]
        for key in sorted(set(given) - set(allowed)):
            yield (
                f'devices.distribution_options.{key}: distribution = "{self.distribution}" does not use it; '
                f"it uses {', '.join(allowed)}"
            )
        if given.get("weak", 0.0) >= given.get("strong", 2.0):
            yield "devices.distribution_options.weak: must be smaller than strong"

    def _list_problems(self) -> Iterator[str]:
        count = len(self.capacities or ())
        rates = ("macs_per_second", "bytes_per_second", "bytes_per_second_up", "bytes_per_second_down")
        for key in ("fractions", *rates, "available"):
            values = getattr(self, key)
            if not isinstance(values, tuple) or len(values) == count or (self.groups and key == "fractions"):
                continue
            if self.groups:
                yield f"devices.{key}: a list goes with capacities; with groups, give it in each group"
            else:
                yield (
                    f"devices.{key}: given {len(values)} values for {count} capacities; "
                    "give one for each, in the same order"
                )

    def _choice_problems(self) -> Iterator[str]:
        if self.participation is not None and self.clients_per_round is not None:
            yield "devices.participation: given together with devices.clients_per_round; give one of the two"
        if self.bytes_per_second is not None and (self.bytes_per_second_up or self.bytes_per_second_down):
            yield "devices.bytes_per_second: given together with bytes_per_second_up or _down; give one kind"
        if isinstance(self.clients_per_round, tuple):
            yield from self._per_group_problems(self.clients_per_round)
        if self.cover and self.redraw != "round":
            yield 'devices.cover: needs redraw = "round"; capacities that never change cannot be drawn again'
        if self.assignment != "group":
            return
        sized = any(group.clients is not None or group.fraction is not None for group in self.groups)
        if sized or self.fractions is not None or self.distribution is not None:
            yield (
                'devices.assignment: "group" gives every client the capacity of its data group; '
                "leave out fractions, distribution and the groups' clients"
            )
        if self.redraw == "round":
            yield 'devices.assignment: "group" needs redraw = "never"'

    def _per_group_problems(self, counts: Sequence[int]) -> Iterator[str]:
        kinds = len(self.groups or self.capacities or ())
        if len(counts) != kinds:
            yield f"devices.clients_per_round: given {len(counts)} counts for {kinds} groups; give one for each"
        if self.redraw == "round":
            yield 'devices.clients_per_round: a count for each group needs redraw = "never"'


def _group_problems(groups: Sequence[GroupConfig]) -> Iterator[str]:
    """What is wrong between groups that are each right by themselves."""
    names = [group.name for group in groups]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"devices.groups: the name '{name}' occurs {names.count(name)} times; names must differ"
    labels = {repr(group.capacity) for group in groups if group.capacity is not None}
    for name in sorted({group.name for group in groups if group.capacity is None} & labels):
        yield f"devices.groups: '{name}' is a budget's group and also a capacity; give the group another name"
    counted = [group for group in groups if group.clients is not None]
    parts = [group.fraction for group in groups if group.fraction is not None]
    if counted and parts:
        yield "devices.groups: some have clients and some fraction; give all of them the same"
    elif parts and len(parts) < len(groups):
        yield f"devices.groups: {len(parts)} of {len(groups)} have a fraction; give it to all or to none"
    elif parts and not math.isclose(math.fsum(parts), 1.0, abs_tol=1e-6):
        yield f"devices.groups: their fractions must sum to 1; these sum to {math.fsum(parts):g}"
    elif counted and len(counted) < len(groups) - 1:
        yield (
            f"devices.groups: {len(counted)} of {len(groups)} have clients; "
            "at most one may leave it out, and gets the rest"
        )


class MethodConfig(Table):
    """The method and its own options, which stand flat beside the name in the file.

    >>> MethodConfig(name="flanc", orthogonality=10.0).options
    {'orthogonality': 10.0}
    """

    table: ClassVar[str] = "method"
    name: Name
    """A method's name, or `"module:Class"`."""
    options: Options = Field(default_factory=dict)
    """The method's hyperparameters."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, given: Any) -> Any:
        """The table with every key but the name moved into the options."""
        if not isinstance(given, dict) or not isinstance(given.get("options", {}), dict):
            return given
        flat = {key: value for key, value in given.items() if key not in ("name", "options")}
        named = {"name": given["name"]} if "name" in given else {}
        return {**named, "options": {**given.get("options", {}), **flat}}


class TrainingConfig(Table):
    """What a client does with its sub-model in one round; the same defaults for every method.

    >>> TrainingConfig(schedule="step", milestones=[0.5]).rate(100, 200)
    0.001
    """

    table: ClassVar[str] = "training"
    optimizer: Literal["sgd", "adam"] = "sgd"
    """The client's optimizer, made anew every round."""
    local_epochs: Count | None = None
    """Passes over the client's data; 1 unless local_steps is given."""
    local_steps: Count | None = None
    """Optimizer steps, whatever the amount of data."""
    batch_size: Count = 32
    """Samples in a step."""
    learning_rate: Positive = 0.01
    """The learning rate of the first round."""
    momentum: BelowOne = 0.9
    """Momentum of sgd."""
    weight_decay: NotNegative = 1e-4
    """Decay of every parameter."""
    clip: Positive | None = None
    """The largest norm of the gradient of a parameter group (most methods have one); absent: no clipping."""
    stack: Count = 1
    """Clients of equal shape and amount of data that are trained together, in networks of linear and recurrent layers;
    1: each alone. Results differ in their last bits."""
    schedule: Literal["constant", "step", "cosine"] = "constant"
    """How the learning rate falls over the rounds."""
    milestones: Annotated[tuple[Positive, ...], Field(strict=False)] = ()
    """step: when the rate falls, in rounds; below 1: in fractions of all rounds."""
    gamma: Positive = 0.1
    """step: what the rate is multiplied by at each milestone."""
    final_learning_rate: NotNegative = 0.0
    """cosine: where the rate would arrive after the last round."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """The table with one local epoch unless it says otherwise."""
        if not isinstance(given, dict) or given.get("local_epochs") or given.get("local_steps"):
            return given
        return {"local_epochs": 1, **{key: value for key, value in given.items() if value is not None}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        _raise_problems(self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        if self.local_epochs is not None and self.local_steps is not None:
            yield "training.local_epochs: given together with training.local_steps; give one of the two"
        if self.schedule == "step" and not self.milestones:
            yield 'training.milestones: missing; schedule = "step" needs at least one, such as [0.5]'
        if self.final_learning_rate > self.learning_rate:
            yield (
                f"training.final_learning_rate: given {self.final_learning_rate:g}, "
                f"must be at most learning_rate, {self.learning_rate:g}"
            )

    def rate(self, round: int, rounds: int) -> float:
        """The learning rate of a round, counted from 0, in a run of `rounds` rounds.

        >>> training = TrainingConfig(learning_rate=0.1, schedule="cosine")
        >>> [round(training.rate(number, 4), 4) for number in range(4)]
        [0.1, 0.0854, 0.05, 0.0146]
        """
        if self.schedule == "constant":
            return self.learning_rate
        if self.schedule == "cosine":
            fall = (1.0 + math.cos(math.pi * round / rounds)) / 2.0
            return self.final_learning_rate + (self.learning_rate - self.final_learning_rate) * fall
        passed = sum(round >= _milestone_round(milestone, rounds) for milestone in self.milestones)
        return float(self.learning_rate * self.gamma**passed)


def _milestone_round(milestone: float, rounds: int) -> int:
    """The first round, counted from 0, at or after a milestone."""
    exact = milestone * rounds if milestone < 1 else milestone
    # 0.07 * 100 is 7.000000000000001: without the tolerance the milestone would come a round late.
    return math.ceil(exact - 1e-9)


class TaskConfig(Table):
    """What is learned.

    >>> TaskConfig().name
    'classification'
    """

    table: ClassVar[str] = "task"
    name: Name = "classification"
    """classification, next-token, regression, multilabel, or `"module:Task"`."""
    classes: Count | None = None
    """How many classes there are, or symbols; absent: as the data says."""
    target: Annotated[tuple[Count, ...], Field(strict=False)] | None = None
    """The shape of one sample's target, where the server has no data to see it in; absent: one class per sample, or per
    token."""


class TricksConfig(Table):
    """What may be added to any method; absent means as in the method's paper.

    >>> TricksConfig(masked_loss=True).batch_norm is None
    True
    """

    table: ClassVar[str] = "tricks"
    masked_loss: bool | None = None
    """Leave the classes that a client does not have out of its loss."""
    classwise_head: bool | None = None
    """Average a class's row of the classifier over the clients that have the class."""
    batch_norm: Literal["batch", "tracked", "calibrated", "local"] | None = None
    """Which statistics batch-norm uses."""
    weighting: Literal["samples", "clients"] | None = None
    """Weigh an update by its number of samples, or every client alike."""
    rescaled_init: bool | None = None
    """Start narrower networks of their own with the full network's smaller weights."""
    proximal: NotNegative | None = None
    """The strength of the pull towards the received weights."""
    proximal_form: Literal["sum", "mean"] | None = None
    """Whether that pull sums over a tensor's entries or takes their mean."""
    max_entropy: NotNegative | None = None
    """The strength of the pull of what enters the classifier towards the uniform distribution."""
    server_momentum: BelowOne | None = None
    """Momentum of the server's own step."""
    adversarial: UpToOne | None = None
    """The weight of the loss on inputs under attack; the rest is that on clean inputs."""
    attack_epsilon: Positive | None = None
    """How far the attack in training may move any entry of an input; inputs are in [0, 1]."""
    attack_step: Positive | None = None
    """How far one step of that attack moves it."""
    attack_steps: Count | None = None
    """How many steps that attack has."""


class EvaluationConfig(Table):
    """Where and how accuracy is measured.

    >>> EvaluationConfig().on
    ('test',)
    """

    table: ClassVar[str] = "evaluation"
    on: Annotated[
        tuple[Literal["test", "clients"], ...],
        Field(strict=False),
        AfterValidator(_not_empty),
        AfterValidator(_distinct),
    ] = ("test",)
    """The server's test set, and/or each client's held-out share."""
    batch_size: Count = 500
    """Samples in a forward pass."""
    by_domain: bool = False
    """Test every data group (domain, writer) by itself: no batch mixes two, and each one's metric is kept."""
    calibration_clients: Count = 20
    """How many clients re-estimate batch-norm statistics."""
    calibration_samples: Count = 64
    """How many of its training samples each of them takes for it, at most."""
    clients: Count | None = None
    """How many clients judge themselves where on has "clients"; absent: all."""
    attack: Literal["none", "pgd", "auto"] = "none"
    """Also measure under attack: by projected gradient descent, or by a library's stronger attacks."""
    attack_epsilon: Positive = 8 / 255
    """How far an attack may move any entry of an input; inputs are in [0, 1]."""
    attack_step: Positive = 2 / 255
    """How far one step of "pgd" moves it."""
    attack_steps: Count = 7
    """How many steps "pgd" has."""
    attack_samples: Count = 500
    """How many test samples are attacked at most."""
    robustness: Annotated[tuple[UpToOne, ...], Field(strict=False), AfterValidator(_distinct)] = (
        0.0,
        0.2,
        0.5,
        0.8,
        1.0,
    )
    """The levels of robustness that are measured under attack, where a method offers a choice."""


def _default_engine() -> Any:
    """The engine of a file that names none: ANYSIZE_ENGINE, else worker processes where they can help."""
    return os.environ.get("ANYSIZE_ENGINE") or ("processes" if (os.cpu_count() or 1) > 1 else "inprocess")


class EngineConfig(Table):
    """Where clients run.

    >>> EngineConfig(name="processes", workers=2).workers
    2
    """

    table: ClassVar[str] = "engine"
    name: Literal["inprocess", "processes", "flower"] = Field(default_factory=lambda: _default_engine())
    """In this process, in worker processes, or on Flower's simulation; absent: processes if there are several cores."""
    workers: Count | None = None
    """How many worker processes; absent: one per core."""
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where clients train and networks are tested; auto: cuda if there is one, else cpu."""
    round_timeout: Positive | None = None
    """On a fleet: seconds after which a round closes without the missing clients; absent: it waits for all."""
    min_clients: Count | None = None
    """How many clients must answer in a round; if fewer do, it changes nothing. Absent: one, on a fleet."""
    update_norm: Positive = 10.0
    """On a fleet: an update is refused if it changes the parameters by more than so many times their norm plus one."""
    max_samples: Count = 1_000_000
    """On a fleet: an update is refused if its device claims more samples, which are its weight."""
    void_rounds: Count = 5
    """On a fleet: the run stops after so many rounds in a row in which too few clients answered."""


class ExperimentConfig(Table):
    """A complete, checked experiment.

    >>> config = from_dict({"data": {"name": "digits", "clients": 20},
    ...                     "model": {"name": "small-cnn"}, "method": {"name": "flanc"}})
    >>> config.rounds, config.training.learning_rate, config.devices.participation
    (100, 0.01, 1.0)
    """

    name: Annotated[str, AfterValidator(_folder_name)] = "experiment"
    """What the run is called; its folder's name."""
    seed: Annotated[int, _number(lambda value: value >= 0, "at least 0")] = 0
    """Where every random choice starts."""
    rounds: Count = 100
    """How many rounds the run has."""
    evaluate_every: Count = 25
    """Rounds from one evaluation to the next."""
    checkpoint_every: Count = 1
    """Rounds from one checkpoint to the next; what was done since the last one is done again after a resume."""
    data: DataConfig
    model: ModelConfig
    devices: DevicesConfig = Field(default_factory=DevicesConfig)
    method: MethodConfig
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    tricks: TricksConfig = Field(default_factory=TricksConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    _folder: Path | None = PrivateAttr(default=None)
    _given: frozenset[str] | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """The file with what follows where every device has its own data: it is judged on the devices."""
        data = given.get("data") if isinstance(given, dict) else None
        if not isinstance(data, dict) or data.get("name") != "devices":
            return given
        evaluation = given.get("evaluation", {})
        if isinstance(evaluation, dict) and evaluation.get("on") is None:
            evaluation = {**evaluation, "on": ["clients"] if data.get("test") is None else ["test", "clients"]}
        held_out = {"validation": 0.1} if data.get("validation") is None else {}
        return {**given, "data": {**data, **held_out}, "evaluation": evaluation}

    @model_validator(mode="after")
    def _check(self) -> Self:
        _raise_problems(self._problems() if self.own_data else ())
        # A data set of the user's own may come with held-out shares, so only named sets can be judged here.
        named = ":" not in self.data.name and self.data.name != "devices"
        if named and "clients" in self.evaluation.on and self.data.validation == 0:
            _raise_problems(['evaluation.on: "clients" needs a held-out share; set data.validation above 0'])
        return self

    @property
    def own_data(self) -> bool:
        """Whether every device has its own data, which the server never sees."""
        return self.data.name == "devices"

    def tells(self, what: str) -> bool:
        """Whether a client tells the server its number of "samples", or its "labels": which classes it has.

        >>> tables = {"data": {"name": "devices"}, "model": {"name": "mlp"}, "method": {"name": "fedavg"}}
        >>> from_dict(tables).tells("samples"), from_dict(tables, ['devices.share=["samples"]']).tells("samples")
        (False, True)
        """
        return not self.own_data or what in self.devices.share

    def _problems(self) -> Iterator[str]:
        """What does not go together with data that only the devices have."""
        devices, own = self.devices, 'with data.name = "devices"'
        if devices.redraw != "never":
            yield f'devices.redraw: given "{devices.redraw}"; {own} a device has the capacity that it has'
        if devices.assignment == "group":
            yield f'devices.assignment: "group" goes by the data, which {own} the server does not know'
        if devices.available not in (None, 1.0) or any(g.available not in (None, 1.0) for g in devices.groups):
            yield f"devices.available: {own} devices are there or not; leave it out"
        if "test" in self.evaluation.on and self.data.test is None:
            yield f'evaluation.on: {own} the server has no test set; name one in data.test, or set on = ["clients"]'
        if self.tricks.weighting == "samples" and not self.tells("samples"):
            yield (
                'tricks.weighting: "samples" needs every device\'s number of samples; set devices.share = ["samples"], '
                'or weighting = "clients"'
            )
        if self.tricks.classwise_head and not self.tells("labels"):
            yield f"tricks.classwise_head: {NEEDS_LABELS}"
        if self.data.normalize and self.data.test is None:
            yield f"data.normalize: {own} nobody knows the data's mean; normalise in the model, or name a data.test"

    def __eq__(self, other: object) -> bool:
        """Whether two experiments say the same; where their files lie does not matter."""
        if not isinstance(other, ExperimentConfig):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    @property
    def folder(self) -> Path | None:
        """The experiment file's folder, or None for an experiment that was not read from a file."""
        return self._folder

    def path(self, name: str) -> Path:
        """The file that the experiment calls `name`: relative names start at the experiment file's folder.

        >>> from_dict({"data": {"name": "digits", "clients": 2}, "model": {"name": "mlp"},
        ...            "method": {"name": "fedavg"}}, folder=Path("/lab")).path("start.pt").as_posix()
        '/lab/start.pt'
        """
        return (self._folder or Path()) / name

    def gives(self, key: str) -> bool:
        """Whether the file itself says something of a dotted key, rather than leaving it to a default.

        An experiment that was not read from tables means all that it says.

        >>> config = from_dict({"data": {"name": "digits", "clients": 2}, "model": {"name": "mlp"},
        ...                     "method": {"name": "flanc", "layers": {"conv1": {"basis_size": 0.5}}}})
        >>> config.gives("data.clients"), config.gives("method.layers"), config.gives("training.learning_rate")
        (True, True, False)
        """
        return self._given is None or any(_within(key, other) or _within(other, key) for other in self._given)

    def replaced(self, **tables: Any) -> ExperimentConfig:
        """A copy with other tables, which means all that it says, whatever the file gave."""
        made = self.model_copy(update=tables)
        made._given = None
        return made

    def to_dict(self) -> dict[str, Any]:
        """The tables as the file has them: defaults filled in, absent values left out."""
        tables = self.model_dump(exclude_none=True)
        method = tables["method"]
        tables["method"] = {"name": method["name"], **method["options"]}
        return tables


# Reading ------------------------------------------------------------------------------------------


def read(path: Path, what: str) -> dict[str, Any]:
    """The tables of a TOML file; `what` it should be is for the errors."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such {what}; give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give the path of a TOML file") from None
    return parse(text, str(path))


def load(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """The experiment in a TOML file, with `key=value` overrides put in its place.

    A file without a `name` is called by its own. Code and weights are looked for in the file's folder; those of a run's
    config.toml in the folder of the file that the run was begun with. Raises a `ConfigError` with all problems at once.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "first.toml"
    ...     _ = file.write_text('data = { name = "digits", clients = 20 }\\n'
    ...                         'model.name = "mlp"\\nmethod.name = "fedavg"\\n')
    ...     config = load(file, ["training.learning_rate=0.1", "model.name=small-cnn"])
    >>> config.name, config.model.name, config.training.learning_rate
    ('first', 'small-cnn', 0.1)
    """
    file = Path(path)
    tables = read(file, "experiment file")
    tables.setdefault("name", file.stem)
    return from_dict(tables, overrides, folder=_home(file.resolve()), source=str(file))


def _home(file: Path) -> Path:
    """Where the names in an experiment file start."""
    begun = folder_of_run(file.parent) if file.name == CONFIG else None
    return begun if begun is not None and begun.is_dir() else file.parent


def folder_of_run(directory: Path) -> Path | None:
    """The folder of the experiment file that the run in a directory was begun with; None if it was none, or no run."""
    try:
        about = json.loads((directory / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    folder = about.get("folder") if isinstance(about, dict) else None
    return Path(folder) if isinstance(folder, str) else None


def loads(text: str, overrides: Sequence[str] = (), *, folder: Path | None = None) -> ExperimentConfig:
    """The experiment in a TOML text.

    >>> loads('data = { name = "devices" }\\nmodel.name = "mlp"\\nmethod.name = "fedavg"').seed
    0
    """
    source = "the experiment"
    return from_dict(parse(text, source), overrides, folder=folder, source=source)


def from_dict(
    tables: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    folder: Path | None = None,
    source: str = "the experiment",
) -> ExperimentConfig:
    """The experiment in nested mappings, as TOML would give them; they are left untouched.

    Raises:
        ConfigError: With a line for each problem in the tables and in the overrides.
    """
    merged, problems = _override(tables, overrides)
    config = checked(ExperimentConfig, merged, source, problems, folder)
    config._folder, config._given = folder, frozenset(_given(merged))
    return config


def _given(tables: Mapping[str, Any]) -> Iterator[str]:
    """The dotted keys of everything that tables say; a file of groups says the groups."""
    read = {"devices.file": "devices.groups"}
    for key, value in _flat(tables).items():
        if not isinstance(value, Mapping):  # such a leaf is empty
            yield read.get(key, re.sub(r"^method\.options\.", "method.", key))


def _within(key: str, table: str) -> bool:
    """Whether a dotted key is another, or below it."""
    return key == table or key.startswith((f"{table}.", f"{table}["))


def checked(
    kind: type[Kind], tables: Mapping[str, Any], source: str, problems: Sequence[str] = (), folder: Path | None = None
) -> Kind:
    """The tables as a checked whole; raises a `ConfigError` with a line for each problem, those given among them."""
    found = list(problems)
    try:
        made = kind.model_validate(tables, context={"folder": folder})
    except ValidationError as error:
        found.extend(_lines(error, kind))
    if found:
        _refuse(found, source)
    return made


def parse(text: str, source: str) -> dict[str, Any]:
    """The tables of a TOML text; a syntax error shows the line."""
    try:
        return tomllib.loads(f"{text}\n")  # so that a fault in the last line has a line number too
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        line = text.split("\n")[int(place[1]) - 1].strip() if place else ""
        shown = f"\n  > {line}" if line else ""
        advice = "; strings need quotes" if "Invalid value" in str(error) else ""
        raise ConfigError(f"{source}: not valid TOML: {error}{advice}{shown}") from None


def read_groups(path: Path) -> list[dict[str, Any]]:
    """The device groups of a CSV file, one a row, as the experiment file would have them.

    The columns are the keys of `[[devices.groups]]`, the units of a budget among them; an empty cell is a key
    left out.
    """
    allowed = [key for key in GroupConfig.model_fields if key != "budget"]
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, skipinitialspace=True, strict=True)
            columns = [column.strip() for column in reader.fieldnames or ()]
            reader.fieldnames = columns
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PydanticCustomError(
            _PROBLEMS, "{lines}", {"lines": f"devices.file: {path} cannot be read as CSV: {reason}"}
        ) from None
    wrong = [column for column in columns if column not in (*allowed, *UNITS)]
    problems = [f"devices.file: {path}: {unknown('column', column, (*allowed, *UNITS))}" for column in wrong]
    problems += [
        f"devices.file: {path}: row {number} has more cells than there are columns"
        for number, row in enumerate(rows, start=2)
        if None in row
    ]
    if not rows:
        problems.append(f"devices.file: {path} has no rows; give a line of column names and a line per group")
    _raise_problems(problems)
    return [_group_of_row(row) for row in rows]


def _group_of_row(row: Mapping[str, str | None]) -> dict[str, Any]:
    """One row's group, with numbers as numbers and the units gathered in a budget."""
    cells = {key: cell.strip() for key, cell in row.items() if cell is not None and cell.strip()}
    values = {key: cell if key == "name" else _cell(cell) for key, cell in cells.items()}
    budget = {key: value for key, value in values.items() if key in UNITS}
    group = {key: value for key, value in values.items() if key not in UNITS}
    return {**group, "budget": budget} if budget else group


def _cell(text: str) -> int | float | str:
    """The number in a cell, or the text where there is none."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# Overrides ----------------------------------------------------------------------------------------

# An override replaces what excludes it: `--set training.local_steps=10` on a file that has local_epochs.
_DISPLACES: Mapping[str, tuple[str, ...]] = {
    "training.local_steps": ("training.local_epochs",),
    "training.local_epochs": ("training.local_steps",),
    "devices.participation": ("devices.clients_per_round",),
    "devices.clients_per_round": ("devices.participation",),
    "devices.distribution": ("devices.distribution_options", "devices.fractions"),
    "devices.fractions": ("devices.distribution_options", "devices.distribution"),
    "data.split=iid": ("data.classes_per_client", "data.alpha"),
    "data.split=natural": ("data.classes_per_client", "data.alpha"),
    "data.split=classes": ("data.alpha",),
    "data.split=dirichlet": ("data.classes_per_client",),
}


def _override(tables: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """A copy of the tables with the overrides put in, and what was wrong with the overrides."""
    merged: dict[str, Any] = copy.deepcopy(dict(tables))
    changes: dict[tuple[str, ...], Any] = {}
    problems: list[str] = []
    for text in overrides:
        try:
            key, value = _assignment(text)
        except ValueError as error:
            problems.append(str(error))
        else:
            changes[key] = value
    for key in _displaced(merged, changes):
        merged[key[0]].pop(key[1], None)
    for key, value in changes.items():
        problem = _put(merged, key, value)
        problems.extend([problem] if problem else [])
    return merged, problems


def _displaced(tables: Mapping[str, Any], changes: Mapping[tuple[str, ...], Any]) -> set[tuple[str, ...]]:
    """The keys of the file that the changes exclude."""
    displaced: set[tuple[str, ...]] = set()
    for key, value in changes.items():
        dotted = ".".join(key)
        excluded = _DISPLACES.get(dotted, ()) + _DISPLACES.get(f"{dotted}={value}", ())
        displaced |= {tuple(name.split(".")) for name in excluded}
    method = tables.get("method")
    if isinstance(method, dict) and changes.get(("method", "name"), method.get("name")) != method.get("name"):
        displaced |= {("method", option) for option in method}  # one method's options mean nothing to another
    return {key for key in displaced if isinstance(tables.get(key[0]), dict)}


def _assignment(text: str) -> tuple[tuple[str, ...], Any]:
    """The key's parts and the value of one `key=value`; the value is TOML, or a bare word."""
    key_text, equals, value_text = text.partition("=")
    example = "such as training.learning_rate=0.1"
    if not equals or not key_text.strip() or not value_text.strip():
        raise ValueError(f"override {text!r}: must be key=value, {example}")
    try:
        node = tomllib.loads(f"{key_text} = 0")
    except tomllib.TOMLDecodeError:
        raise ValueError(f"override {text!r}: {key_text!r} is not a dotted key, {example}") from None
    parts: list[str] = []
    branch: Any = node
    while isinstance(branch, dict):
        parts.extend(branch)
        branch = branch[parts[-1]]
    return tuple(parts), _override_value(value_text.strip(), text)


def _override_value(value: str, text: str) -> Any:
    """The TOML value of an override, or the words themselves where they are not TOML."""
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError as error:
        if value[0] in "[{\"'" or "\n" in value:
            raise ValueError(f"override {text!r}: the value is not valid TOML: {error}") from None
        return value
    if len(parsed) > 1 or isinstance(parsed["value"], datetime.date | datetime.time):
        return value
    return parsed["value"]


def _put(tables: dict[str, Any], key: tuple[str, ...], value: Any) -> str | None:
    """Sets a nested key; a sentence saying why where that cannot be done."""
    node: Any = tables
    for depth, part in enumerate(key[:-1]):
        below = ".".join(key[: depth + 1])
        if isinstance(node, list):
            place = _place(part, node)
            if place is None:
                return f"override {'.'.join(key)}: {below} does not exist; there are {len(node)} entries, from 0"
            node = node[place]
        else:
            node = node.setdefault(part, {})
        if not isinstance(node, dict | list):
            return f"override {'.'.join(key)}: {below} is a value, not a table"
    if isinstance(node, list):
        place = _place(key[-1], node)
        if place is None:
            return f"override {'.'.join(key)}: there are {len(node)} entries, from 0"
        node[place] = value
    else:
        node[key[-1]] = value
    return None


def _place(text: str, entries: Sequence[Any]) -> int | None:
    """The place in a list that a key's part names, or None."""
    return int(text) if text.isdecimal() and int(text) < len(entries) else None


# Problems -----------------------------------------------------------------------------------------


def _refuse(problems: Sequence[str], source: str) -> NoReturn:
    """Raises all problems at once, a line each."""
    if len(problems) == 1:
        raise ConfigError(f"{source}: {problems[0]}")
    listed = "".join(f"\n  - {problem}" for problem in problems)
    raise ConfigError(f"{source} has {len(problems)} problems:{listed}")


_TYPES: Mapping[str, str] = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string, in quotes",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "finite_number": "a finite number",
}


def _lines(error: ValidationError, root: type[Table]) -> Iterator[str]:
    """A line for each problem: the dotted key, what was given, what is allowed."""
    for detail in error.errors(include_url=False):
        yield from _line(detail, root)


def _line(detail: ErrorDetails, root: type[Table]) -> list[str]:
    """The line or lines of one problem."""
    kind, given = detail["type"], detail["input"]
    key = _dotted(root.table, detail["loc"])
    context = detail.get("ctx", {})
    if kind == _PROBLEMS:
        return str(context["lines"]).split("\n")
    if kind == "extra_forbidden":
        return [_unknown_key(detail["loc"], root)]
    if kind == "missing":
        return [f"{key}: missing; {_how_to_give(detail['loc'], root)}"]
    if kind == "literal_error" and isinstance(given, str):
        allowed = re.findall(r"'([^']*)'", context["expected"])
        return [f"{key}: {unknown('value', given, allowed)}"]
    if kind == "literal_error":
        return [f"{key}: given {_shown(given)}, must be {context['expected']}"]
    if kind == "value_error":
        whole = isinstance(given, dict)  # a table as a whole: its content is in the file, no need to repeat it
        return [f"{key}: {context['error']}" if whole else f"{key}: given {_shown(given)}, {context['error']}"]
    wanted = f"must be {_TYPES[kind]}" if kind in _TYPES else detail["msg"]
    return [f"{key}: given {_shown(given)}, {wanted}"]


def _dotted(table: str, location: Sequence[int | str]) -> str:
    """A key as a reader writes it: `devices.groups[0].capacity`."""
    text = table
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def _shown(value: object) -> str:
    """A value as TOML would have it where it can, cut short."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _table_at(root: type[Table], location: Sequence[int | str]) -> type[Table]:
    """The class of the table at a location below a root."""
    found = root
    for part in location:
        field = found.model_fields.get(str(part)) if isinstance(part, str) else None
        found = next(_tables_in(field.annotation), found) if field else found
    return found


def _tables_in(annotation: Any) -> Iterator[type[Table]]:
    """The tables that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        yield annotation
    for argument in get_args(annotation):
        yield from _tables_in(argument)


def _unknown_key(location: Sequence[int | str], root: type[Table]) -> str:
    """The line for a key that its table does not have: the nearest match, or the table where it belongs."""
    *above, last = location
    key, table = str(last), _dotted(root.table, above)
    if not table and key in RESERVED_TABLES:
        return f"[{key}]: this table is reserved for a later version; remove it"
    keys = _table_at(root, above).model_fields
    line = f"{table or 'top level'}: {unknown('key', key, keys)}"
    tables = _keys_by_table() if root.whole == Table.whole else {}
    homes = [home for home, fields in tables.items() if key in fields and home != table]
    return f"{line}. '{key}' belongs to {' or '.join(homes)}" if homes else line


def _keys_by_table() -> dict[str, set[str]]:
    """The keys of every table of the file."""
    tables = {name: next(_tables_in(field.annotation), None) for name, field in _fields(ExperimentConfig)}
    top = {name for name, table in tables.items() if table is None}
    return {"the top level": top} | {f"[{name}]": set(table.model_fields) for name, table in tables.items() if table}


def _fields(table: type[Table]) -> Iterable[tuple[str, Any]]:
    """The names and fields of a table."""
    return table.model_fields.items()


def _how_to_give(location: Sequence[int | str], root: type[Table]) -> str:
    """What to write for a key that is missing."""
    *above, last = location
    field = _table_at(root, above).model_fields[str(last)]
    if next(_tables_in(field.annotation), None):
        return f'add a table [{last}] with name = "..."'
    return f'add {last} = "..." to [{_dotted(root.table, above)}]'


# Writing ------------------------------------------------------------------------------------------

_INLINE_WIDTH = 80


def dumps(config: ExperimentConfig) -> str:
    """The TOML of an experiment, every default of its tables written out; `loads` gives an equal experiment back.

    What the tables leave to the method, the network and the data set is in `Experiment.complete`.

    >>> text = dumps(from_dict({"data": {"name": "digits", "clients": 20}, "model": {"name": "mlp"},
    ...                         "method": {"name": "flanc", "orthogonality": 10.0}}))
    >>> print(text[text.index("[method]"):text.index("[training]")], end="")
    [method]
    name = "flanc"
    orthogonality = 10.0
    <BLANKLINE>
    >>> loads(text).method.options
    {'orthogonality': 10.0}
    """
    return written(config.to_dict())


def written(tables: Mapping[str, Any]) -> str:
    """Tables as TOML.

    >>> print(written({"name": "cam", "budget": {"macs": 1e6}}), end="")
    name = "cam"
    <BLANKLINE>
    [budget]
    macs = 1000000.0
    """
    return "\n".join(_table_lines(tables, ())).strip("\n") + "\n"


def _table_lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """The lines of a table's own values, then those of the tables below it."""
    below: dict[str, Any] = {}
    for key, value in table.items():
        if _needs_header(value, path):
            below[key] = value
        else:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in below.items():
        header = ".".join(_key(part) for part in (*path, key))
        several = not isinstance(value, Mapping)
        for entry in value if several else [value]:
            yield from ("", f"[[{header}]]" if several else f"[{header}]")
            yield from _table_lines(entry, (*path, key))


def _needs_header(value: Any, path: tuple[str, ...]) -> bool:
    """Whether a value is written as a table of its own rather than after an equals sign."""
    if isinstance(value, Mapping):
        return not path or len(_value(value)) > _INLINE_WIDTH
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _value(value: Any) -> str:
    """A value in TOML, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    return repr(value)


def _key(key: str) -> str:
    """A key, in quotes where TOML wants them."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _string(text: str) -> str:
    """A TOML string; JSON's escapes are TOML's, but for the delete character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# Comparing ----------------------------------------------------------------------------------------


def changes(before: ExperimentConfig, after: ExperimentConfig) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two experiments differ, with both values; None where a value is absent."""
    old, new = _flat(before.to_dict()), _flat(after.to_dict())
    keys = dict.fromkeys([*old, *new])
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def differences(changed: Mapping[str, tuple[Any, Any]], between: str = " -> ") -> list[str]:
    """A line for each key in which two experiments differ, with both values.

    >>> tables = {"data": {"name": "digits", "clients": 20},
    ...           "model": {"name": "mlp"}, "method": {"name": "flanc"}}
    >>> differences(changes(from_dict(tables), from_dict(tables, ["rounds=5", "engine.workers=2"])))
    ['rounds: 100 -> 5', 'engine.workers: absent -> 2']
    """
    return [
        f"{key}: {between.join('absent' if value is None else _value(value) for value in pair)}"
        for key, pair in changed.items()
    ]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf by its dotted key; an empty table or list is a leaf, and so is a list of plain values."""
    if isinstance(value, Mapping) and value:
        parts = [(f"{path}.{key}".lstrip("."), item) for key, item in value.items()]
    elif _needs_header(value, (path,)) and not isinstance(value, Mapping):
        parts = [(f"{path}[{place}]", item) for place, item in enumerate(value)]
    else:
        return {path: value}
    return {key: leaf for name, item in parts for key, leaf in _flat(item, name).items()}
