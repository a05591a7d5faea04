"""The cells of a comparison: which runs it has, where each lies, and the experiment of each.

Cells differ in nothing but the setting, the method and the seed: with equal seeds all methods see the same partition,
participants, capacities and first weights. Options of the file's [method] table are its own method's alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anysize.config.compare import CompareConfig, CompareMethod, leaves
from anysize.config.files import from_dict
from anysize.config.overrides import changed
from anysize.config.tables import ExperimentConfig
from anysize.errors import ConfigError

TUNING = "tuning"
_LONGEST = 100
"""Bytes of a folder's name; file systems end at 255, and other names are made of several of these."""


@dataclass(frozen=True)
class Trial:
    """A run that helps to choose tuned values; it is judged on clients' held-out data and never sees the test set.

    Attributes:
        path: of its directory, in the comparison's folder.
        values: the values that it tries, by dotted key.
        config: its experiment.
    """

    path: str
    values: Mapping[str, Any]
    config: ExperimentConfig


@dataclass(frozen=True)
class Cell:
    """One method in one setting with one seed.

    Attributes:
        path: of its run directory, in the comparison's folder.
        setting: its name; empty in a comparison without settings.
        label: what the method is called.
        seed: of the run.
        config: its experiment, without tuned values.
        trials: the runs that choose those; none where nothing is tuned.
    """

    path: str
    setting: str
    label: str
    seed: int
    config: ExperimentConfig
    trials: tuple[Trial, ...] = ()

    def tuned(self, values: Mapping[str, Any]) -> ExperimentConfig:
        """The experiment with tuned values.

        >>> from anysize.config import loads
        >>> cell, = cells(loads('data = { name = "digits", clients = 4 }\\nmodel.name = "mlp"\\nmethod.name = "flanc"'))
        >>> cell.path, cell.tuned({"training.learning_rate": 0.5}).training.learning_rate
        ('flanc/seed-0', 0.5)
        """
        return _with(self.config, values, f"cell {self.path}") if values else self.config


def cells(config: ExperimentConfig) -> list[Cell]:
    """The cells of an experiment with a [compare] table: all of the first seed, then all of the second, and so on.

    Raises:
        ConfigError: with the problems of all cells.
    """
    asked = config.compare or CompareConfig()
    methods = asked.methods or (CompareMethod(name=config.method.name),)
    settings = asked.settings or {"": {}}
    seeds = asked.seeds or (config.seed,)
    base = said(config)
    found: list[Cell] = []
    problems = [*_same_folder("settings", settings), *_same_folder("methods", [method.title for method in methods])]
    for setting, method in itertools.product(settings, methods):
        if method.settings is not None and setting not in method.settings:
            continue
        try:
            own = _of_method(base, settings[setting], setting, method, config)
            found += [_cell(asked, own, setting, method, seed, seeds[0]) for seed in seeds]
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return sorted(found, key=lambda cell: seeds.index(cell.seed))


def said(config: ExperimentConfig) -> dict[str, Any]:
    """The tables with what the file itself says, so that what depends on other keys is filled in anew for each cell."""
    tables: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if isinstance(value, Mapping) and name != "method":
            tables[name] = {key: part for key, part in value.items() if config.gives(f"{name}.{key}")}
        elif config.gives(name):
            tables[name] = value
    tables.pop("compare", None)
    return tables


def plan_tables(config: ExperimentConfig) -> dict[str, Any]:
    """The tables of an experiment with its [compare] table, from which `cells` makes the same cells."""
    asked = {} if config.compare is None else config.compare.model_dump(exclude_none=True)
    return {**said(config), "compare": asked}


def slug(text: str) -> str:
    """The text as the name of a folder; a long one is cut, and ends with a fingerprint of the whole.

    >>> slug("FedAvg, each width"), slug("mine:Mean")
    ('FedAvg-each-width', 'mine.Mean')
    """
    name = re.sub(r"[^\w.=+-]+", "-", text.replace(":", ".")).strip("-.") or "-"
    if len(name.encode()) <= _LONGEST:
        return name
    start = name.encode()[: _LONGEST // 2].decode(errors="ignore")
    return f"{start}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _of_method(
    base: Mapping[str, Any],
    setting: Mapping[str, Any],
    name: str,
    method: CompareMethod,
    config: ExperimentConfig,
) -> ExperimentConfig:
    """The experiment of one method in one setting, with the file's seed."""
    # A file without [method] has the first method of its comparison there, whose options are no other entry's.
    own = config.method.options if config.gives("method") and method.name == config.method.name else {}
    changes = dict(leaves(setting)) | dict(leaves(method.overrides))
    tables, problems = changed({**base, "method": {"name": method.name, **own, **method.options}}, changes)
    where = f"compare: {method.title}" + (f" in {name}" if name else "")
    if problems:
        raise ConfigError(f"{where}: {'; '.join(problems)}")
    return from_dict(tables, folder=config.folder, source=where)


def _cell(
    asked: CompareConfig, own: ExperimentConfig, setting: str, method: CompareMethod, seed: int, first: int
) -> Cell:
    home = f"{slug(setting)}/{slug(method.title)}" if setting else slug(method.title)
    path = f"{home}/seed-{seed}"
    config = own.replaced(seed=seed, name=path.replace("/", "-"))
    return Cell(path, setting, method.title, seed, config, _trials(asked, method, own, home, first))


def _trials(
    asked: CompareConfig, method: CompareMethod, own: ExperimentConfig, home: str, seed: int
) -> tuple[Trial, ...]:
    """The runs that choose the tuned values of a method in a setting: every combination, on one seed."""
    candidates = asked.candidates(method)
    if not candidates:
        return ()
    if own.data.validation == 0 and ":" not in own.data.name and own.data.name != "devices":
        raise ConfigError(f"compare: {method.title} is tuned on clients' held-out data; set data.validation above 0")
    found = []
    for chosen in itertools.product(*candidates.values()):
        values = dict(zip(candidates, chosen))
        short = ",".join(f"{key.rpartition('.')[2]}={_text(value)}" for key, value in values.items())
        path = f"{home}/{TUNING}/{slug(short.replace(',', '+'))}"
        tried = _with(own, values, f"compare.tune, {method.title}")
        rounds = asked.tune_rounds or own.rounds
        judged = tried.evaluation.model_copy(update={"on": ("clients",), "attack": "none"})
        changes: dict[str, Any] = {"seed": seed, "rounds": rounds, "evaluate_every": rounds, "evaluation": judged}
        found.append(Trial(path, values, tried.replaced(name=path.replace("/", "-"), **changes)))
    return tuple(found)


def _with(config: ExperimentConfig, values: Mapping[str, Any], where: str) -> ExperimentConfig:
    """The experiment with other values at dotted keys."""
    tables, problems = changed(config.to_dict(), {tuple(key.split(".")): value for key, value in values.items()})
    if problems:
        raise ConfigError(f"{where}: {'; '.join(problems)}")
    return from_dict(tables, folder=config.folder, source=where).replaced()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _same_folder(key: str, names: Iterable[str]) -> Sequence[str]:
    """A line for each name that would have the folder of another."""
    by_folder: dict[str, list[str]] = {}
    for name in names:
        by_folder.setdefault(slug(name).lower(), []).append(name)
    return [
        f"compare.{key}: {' and '.join(map(repr, same))} would share a folder; name them further apart"
        for same in by_folder.values()
        if len(same) > 1
    ]
