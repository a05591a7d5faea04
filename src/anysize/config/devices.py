"""The [devices] table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, model_validator

from anysize.config.latencies import LatenciesConfig
from anysize.config.rows import number, raise_listed, read_rows
from anysize.config.table import Table, problem_lines, raise_problems
from anysize.config.traces import TraceConfig, read_traces
from anysize.config.values import (
    UNITS,
    BelowOne,
    Count,
    Name,
    Part,
    Positive,
    Probability,
    Rate,
    UpToOne,
    distinct,
    not_empty,
    shares,
)
from anysize.errors import unknown

NEEDS_LABELS = (
    'it needs to know which classes every device has; set devices.share = ["labels"], or tricks.classwise_head = false'
)
"""Why a class-wise trick is refused on a fleet."""


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
    memory_bytes: Positive | None = None
    """Memory that a training process takes at its peak above one that has only imported anysize: weights, gradients,
    optimizer, messages, activations, and 48 MB that PyTorch loads when the device joins."""
    bytes: Positive | None = None
    """Bytes on the wire in one round, down and up together."""
    inference_bytes: Positive | None = None
    """Tensors of the finished network as it ships, batch-norm statistics included."""
    latency_ms: Positive | None = None
    """Time of one training step: of a group as its `latencies` say or, for a method with a table, as measured when the
    table was made; in a device's own file, as that device measures every size itself."""
    nonzero_macs: Positive | None = None
    """Those of `macs` whose weight is not zero, for hardware that skips zeros; before there are weights, all count."""

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
    """The fraction of the clients that is of this kind, in place of a count."""
    capacity: Part | None = None
    """The fraction of the full model that the device can train."""
    budget: BudgetConfig | None = None
    """What the device can afford, in units, in place of a capacity."""
    latencies: LatenciesConfig | None = None
    """How long sizes take on such a device: a table, or the CSV file that `anysize join --measure` wrote on one."""
    depth: Count | None = None
    """How many blocks of every stage the device trains, in place of a capacity or beside a budget."""
    sparsity: BelowOne | None = None
    """The fraction of its weights that a mask sets to zero, in place of a capacity or beside a budget or a depth."""
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
        if (self.capacity is None) == (self.budget is None and self.depth is None and self.sparsity is None):
            raise ValueError(
                "must have either a capacity or a budget; a depth or a sparsity can replace either, or go with a budget"
            )
        if self.clients is not None and self.fraction is not None:
            raise ValueError("must have clients (a count) or fraction, not both")
        if self.bytes_per_second is not None and (self.bytes_per_second_up or self.bytes_per_second_down):
            raise ValueError("must have bytes_per_second, or bytes_per_second_up and _down, not both")
        return self


class DistributionConfig(Table):
    """The parameters of a distribution of capacities; each distribution accepts only those it uses.

    >>> DistributionConfig(sigma=0.3).sigma
    0.3
    """

    table: ClassVar[str] = "devices.distribution_options"
    divisors: (
        Annotated[
            tuple[Annotated[float, Field(ge=1)], ...],
            Field(strict=False),
            AfterValidator(not_empty),
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
    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """two-type: the fraction of the clients that is of the strong type A."""
    strong: Part | None = None
    """two-type: the capacity of type A."""
    weak: Part | None = None
    """two-type: the capacity of type B."""


_DISTRIBUTION_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "exponential": {"divisors": (1.0, 2.0, 4.0, 8.0)},
    "step": {"step": 0.25},
    "log-normal": {"median": 0.4, "sigma": 0.5},
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
    or read from a CSV `file`. The CSV's rows become `groups`, so that the complete file needs no CSV. In the same
    way the rows of a CSV file that `budgets` names become tables.

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
            AfterValidator(not_empty),
            AfterValidator(distinct),
        ]
        | None
    ) = None
    """The sizes that devices can train; absent: those of the distribution, or 0.25, 0.5, 0.75, 1.0."""
    fractions: Annotated[tuple[Part, ...], Field(strict=False), AfterValidator(shares)] | None = None
    """The fraction of the clients that has each capacity; absent: equal fractions."""
    capacity_of: Literal["width", "parameters", "macs", "activation_bytes", "bytes"] = "width"
    """What a capacity is a fraction of."""
    redraw: Literal["never", "round"] = "never"
    """Whether a client keeps its capacity or gets a new one every round."""
    cover: bool = False
    """With redraw = "round": draw again until every capacity occurs among the participants."""
    participation: Part | None = None
    """The fraction of the clients that a round selects; 1.0 unless clients_per_round is given."""
    clients_per_round: Count | Annotated[tuple[Count, ...], Field(strict=False)] | None = None
    """How many clients a round selects; a list: how many of each capacity or device group, as listed."""
    assignment: Literal["random", "order", "group"] = "random"
    """Which client has which capacity: shuffled, in blocks as listed, or by the client's data group."""
    distribution: Literal["exponential", "step", "log-normal", "two-type"] | None = None
    """Where the fractions come from, in place of `fractions`."""
    distribution_options: DistributionConfig | None = None
    """The parameters of the distribution; those left out get defaults."""
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
    minimum_width: UpToOne = 0.0
    """The smallest width that is trained; a device group that cannot train it can train no size."""
    infeasible: Literal["error", "skip"] = "error"
    """A device group that can train no size: refuse the experiment, or let the group sit out."""
    share: Annotated[tuple[Literal["samples", "labels"], ...], Field(strict=False), AfterValidator(distinct)] = ()
    """With data.name = "devices": what a device may tell about its data: how many samples, which classes."""
    file: Name | None = None
    """A CSV file of device groups, relative to the experiment file; its rows become `groups`."""
    groups: Annotated[tuple[GroupConfig, ...], Field(strict=False)] = ()
    """Kinds of devices by name, in place of capacities."""
    budgets: Annotated[tuple[TraceConfig, ...], Field(strict=False)] = ()
    """Budgets that change from round to round: tables, or the name of a CSV file whose rows become these tables."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any, info: ValidationInfo) -> Any:
        """Read the file, and fill in the defaults that depend on other keys."""
        if not isinstance(given, dict):
            return given
        table = dict(given)
        folder = (info.context or {}).get("folder") or Path()
        if isinstance(table.get("file"), str) and not table.get("groups"):
            table["groups"] = read_groups(folder / table.pop("file"), folder)
        if isinstance(table.get("budgets"), str):
            table["budgets"] = read_traces(folder / table["budgets"])
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
        raise_problems([*self._source_problems(), *self._list_problems(), *self._choice_problems()])
        return self

    def _source_problems(self) -> Iterator[str]:
        if self.groups:
            if self.file is not None:
                yield "devices.file: given together with devices.groups; give one of the two"
            for key in ("capacities", "fractions", "distribution"):
                if getattr(self, key) is not None:
                    yield f"devices.{key}: given together with devices.groups; give one of the two"
            yield from _group_problems(self.groups)
        yield from self._trace_problems()
        if self.distribution is not None and self.fractions is not None:
            yield "devices.fractions: given together with devices.distribution; give one of the two"
        yield from self._distribution_problems()

    def _trace_problems(self) -> Iterator[str]:
        if self.budgets and not self.groups:
            yield "devices.budgets: needs devices.groups, with budgets; capacities do not change by a file"
            return
        names = [group.name for group in self.groups]
        fixed = {group.name for group in self.groups if group.capacity is not None}
        seen: dict[str | int, str] = {}
        for place, trace in enumerate(self.budgets):
            where, holder = trace.where(place), trace.holder
            if trace.group is not None and trace.group not in names:
                yield f"{where}: {unknown('group', trace.group, names)}"
            if holder in fixed:
                yield f"{where}: group '{holder}' has a capacity, and only budgets change; give it a budget instead"
            if holder in seen:
                yield f"{where}: names what {seen[holder]} names; give all of its rounds in one table"
            seen[holder] = where

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
        if self.cover and self.infeasible == "skip":
            yield 'devices.cover: needs infeasible = "error"; a group that sits out is never among the participants'
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
    """Conflicts between device groups that are each valid."""
    names = [group.name for group in groups]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"devices.groups: the name '{name}' occurs {names.count(name)} times; names must differ"
    labels = {repr(group.capacity) for group in groups if group.capacity is not None}
    for name in sorted({group.name for group in groups if group.capacity is None} & labels):
        yield f"devices.groups: '{name}' names a group with a budget and is also a capacity; rename the group"
    counted = [group for group in groups if group.clients is not None]
    parts = [group.fraction for group in groups if group.fraction is not None]
    if counted and parts:
        yield "devices.groups: some give clients and others a fraction; use one of the two in all of them"
    elif parts and len(parts) < len(groups):
        yield f"devices.groups: {len(parts)} of {len(groups)} have a fraction; give it to all or to none"
    elif parts and not math.isclose(math.fsum(parts), 1.0, abs_tol=1e-6):
        yield f"devices.groups: their fractions must sum to 1; these sum to {math.fsum(parts):g}"
    elif counted and len(counted) < len(groups) - 1:
        yield (
            f"devices.groups: {len(counted)} of {len(groups)} have clients; "
            "at most one may leave it out: that one gets the rest"
        )


def files_in(tables: Mapping[str, Any]) -> list[str]:
    """The keys of an experiment's tables that name files whose content belongs to it.

    >>> files_in({"devices": {"budgets": "budgets.csv", "groups": [{"name": "cam", "latencies": "cam.csv"}]}})
    ['devices.budgets', 'devices.groups.latencies']
    """
    devices = tables.get("devices")
    if not isinstance(devices, Mapping):
        return []
    groups = devices.get("groups")
    named = [group.get("latencies") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    found = [f"devices.{key}" for key in ("file", "budgets") if isinstance(devices.get(key), str)]
    return [*found, *(["devices.groups.latencies"] if any(isinstance(name, str) for name in named) else [])]


def read_groups(path: Path, folder: Path) -> list[GroupConfig]:
    """The device groups of a CSV file, one a row.

    The columns are the keys of `[[devices.groups]]`, the units of a budget among them; an empty cell is a key
    left out. A file that a row names is looked for in `folder`.
    """
    keys = [key for key in GroupConfig.model_fields if key != "budget"]
    groups: list[GroupConfig] = []
    problems: list[str] = []
    for line, row in read_rows(path, "devices.file", (*keys, *UNITS), (), "group"):
        try:
            groups.append(GroupConfig.model_validate(_group_of_row(row), context={"folder": folder}))
        except ValidationError as error:
            problems += [f"devices.file: {path}, line {line}: {text}" for text in problem_lines(error, GroupConfig)]
    raise_listed(problems)
    return groups


def _group_of_row(row: Mapping[str, str]) -> dict[str, Any]:
    """The group of one row: numbers are parsed, and the units collected in a budget."""
    values = {key: cell if key in ("name", "latencies") else number(cell) for key, cell in row.items()}
    budget = {key: value for key, value in values.items() if key in UNITS}
    group = {key: value for key, value in values.items() if key not in UNITS}
    return {**group, "budget": budget} if budget else group
