"""The [compare] table of an experiment file: which methods, seeds and settings are run against each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from anysize.config.table import Table, raise_problems
from anysize.config.values import Count, Name, Names, Options, distinct, plain
from anysize.errors import unknown

_OWN_KEYS = ("name", "label", "options", "settings", "tune", "overrides")
_NOT_HERE = ("name", "seed", "method", "compare")
"""What a setting or an entry cannot change: a comparison sets it itself."""
_NOT_TUNED = ("name", "seed", "compare", "data", "devices", "task", "evaluation")
"""What would change the question rather than the answer."""


def _candidates(table: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys, each with a list of values to choose from."""
    flat = {".".join(key): value for key, value in leaves(table)}
    wrong = [key for key, values in flat.items() if not isinstance(values, list) or not values]
    if wrong:
        raise ValueError(f"must give each key a list of values; {', '.join(wrong)} has none")
    return flat


def _settings(table: dict[str, Any]) -> dict[str, Any]:
    """Named tables of changes."""
    wrong = [name for name, changes in table.items() if not isinstance(changes, dict)]
    if wrong:
        raise ValueError(f'must hold tables, such as {{ "data.split" = "iid" }}; {", ".join(wrong)} is none')
    return table


Tune = Annotated[Options, AfterValidator(_candidates)]
Seed = Annotated[int, Field(ge=0)]


class CompareMethod(Table):
    """One method of a comparison: a name, or a table.

    Any other table or key of the file, such as `tricks` or `training`, changes the experiment for this entry alone.

    >>> CompareMethod(name="fedavg", label="bound", options={"width": "each"}, tricks={"masked_loss": True}).overrides
    {'tricks': {'masked_loss': True}}
    """

    table: ClassVar[str] = "compare.methods"
    name: Name
    """A method's name, or `"module:Class"`."""
    label: Name | None = None
    """What the entry is called in tables and folders; absent: the name. Labels must differ."""
    options: Options = Field(default_factory=dict)
    """The method's hyperparameters; those of the file's own `[method]` go on counting for its method."""
    settings: Names | None = None
    """The settings in which the entry runs; absent: all."""
    tune: Tune | None = None
    """In place of `compare.tune`; an empty table: nothing is tuned."""
    overrides: Options = Field(default_factory=dict)
    """Changes of the experiment for this entry alone; they may also stand beside the name, as `tricks = {...}`."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, given: Any) -> Any:
        """The entry as a table, with all that is not its own moved into the overrides."""
        if isinstance(given, str):
            return {"name": given}
        if not isinstance(given, dict) or not isinstance(given.get("overrides", {}), dict):
            return given
        own = {key: value for key, value in given.items() if key in _OWN_KEYS}
        more = {key: plain(value, str(key)) for key, value in given.items() if key not in _OWN_KEYS}
        return own | {"overrides": own.get("overrides", {}) | more}

    @property
    def title(self) -> str:
        """The label, or the name."""
        return self.label or self.name


class CompareConfig(Table):
    """Methods, seeds and settings that `anysize compare` runs, and how it judges them.

    >>> CompareConfig(methods=["flanc", {"name": "fedavg", "label": "bound"}]).labels
    ['flanc', 'bound']
    """

    table: ClassVar[str] = "compare"
    methods: Annotated[tuple[CompareMethod, ...], Field(strict=False)] = ()
    """Names, or tables with a name, a label, options, and changes of the experiment; absent: the file's method."""
    seeds: Annotated[tuple[Seed, ...], Field(strict=False), AfterValidator(distinct)] = ()
    """The seeds with which every method runs; absent: the file's."""
    settings: Annotated[Options, AfterValidator(_settings)] = Field(default_factory=dict)
    """Named sets of changes, such as `iid = { "data.split" = "iid" }`; every method runs in each of them."""
    tune: Tune = Field(default_factory=dict)
    """Keys with the values to choose from, per method and setting, on clients' held-out data and the first seed."""
    tune_rounds: Count | None = None
    """Rounds of the runs that choose; absent: as many as the experiment's."""
    baseline: Name | None = None
    """The label from which every other's difference is taken, seed by seed."""
    target: float | None = None
    """The metric whose cost is told: rounds, bytes and training multiply-adds until it is reached."""

    @field_validator("methods", mode="before")
    @classmethod
    def _as_tables(cls, given: Any) -> Any:
        """Names as tables, so that an error says what is wrong with an entry, not with its type."""
        if not isinstance(given, list | tuple):
            return given
        return tuple({"name": entry} if isinstance(entry, str) else entry for entry in given)

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_problems(self._problems())
        return self

    @property
    def labels(self) -> list[str]:
        """What the methods are called."""
        return [method.title for method in self.methods]

    def candidates(self, method: CompareMethod) -> Mapping[str, Sequence[Any]]:
        """What is tuned for a method: dotted keys, each with its values."""
        return self.tune if method.tune is None else method.tune

    def _problems(self) -> Iterator[str]:
        labels = self.labels
        for label in sorted({label for label in labels if labels.count(label) > 1}):
            yield f"compare.methods: '{label}' occurs more than once; give each a label of its own"
        if self.baseline is not None and labels and self.baseline not in labels:
            yield f"compare.baseline: '{self.baseline}' is none of the labels: {', '.join(labels)}"
        for method in self.methods:
            for name in sorted(set(method.settings or ()) - set(self.settings)):
                yield f"compare.methods, {method.title}: settings: {unknown('setting', name, self.settings)}"
        changes = {f"compare.settings.{name}": table for name, table in self.settings.items()}
        changes |= {f"compare.methods, {method.title}": method.overrides for method in self.methods}
        for place, table in changes.items():
            for key in sorted({key[0] for key, _ in leaves(table)} & set(_NOT_HERE)):
                yield f"{place}: {key} cannot be changed here; methods, labels and seeds are lists of [compare]"
        tuned = {"compare.tune": self.tune}
        tuned |= {f"compare.methods, {method.title}: tune": method.tune or {} for method in self.methods}
        for place, key in ((place, key) for place, table in tuned.items() for key in table):
            if key.split(".")[0] in _NOT_TUNED:
                yield f"{place}: {key} cannot be chosen; tune what is trained with, such as training.learning_rate"


def leaves(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value of nested tables with its key's parts; a key may itself be dotted.

    >>> list(leaves({"data.split": "iid", "tricks": {"masked_loss": True}}))
    [(('data', 'split'), 'iid'), (('tricks', 'masked_loss'), True)]
    """
    for key, value in table.items():
        path = (*above, *key.split("."))
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value
