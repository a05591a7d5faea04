"""Reading an experiment file."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from anysize.config.overrides import overridden
from anysize.config.table import Kind, problem_lines, refuse
from anysize.config.tables import ExperimentConfig, given_keys
from anysize.config.toml import flat, written
from anysize.errors import ConfigError

CONFIG, ENVIRONMENT = "config.toml", "environment.json"
"""The files of a run directory that hold the complete experiment, and the versions and hardware."""


def read(path: Path, what: str) -> dict[str, Any]:
    """The tables of a TOML file; errors call the file `what`."""
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
    """The experiment in a TOML file, changed by `key=value` overrides.

    An experiment without a `name` gets the file's. Code and weights are looked up in the file's folder; for a run's
    config.toml, in the folder of the file that started the run. Raises one `ConfigError` that lists all problems.

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
    """The folder that names in an experiment file are relative to."""
    begun = folder_of_run(file.parent) if file.name == CONFIG else None
    return begun if begun is not None and begun.is_dir() else file.parent


def folder_of_run(directory: Path) -> Path | None:
    """The folder of the experiment file that started the run in a directory; None without a run or a file."""
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
    """The experiment in nested mappings such as TOML gives; does not change them.

    Raises:
        ConfigError: With a line for each problem in the tables and in the overrides.
    """
    merged, problems = overridden(tables, overrides)
    config = checked(ExperimentConfig, merged, source, problems, folder)
    config._folder, config._given = folder, frozenset(given_keys(merged))
    return config


def checked(
    kind: type[Kind],
    tables: Mapping[str, Any] | str,
    source: str,
    problems: Sequence[str] = (),
    folder: Path | None = None,
) -> Kind:
    """The checked experiment or, of tables that files can hold, what the named file has.

    Raises a `ConfigError` with a line for each problem, including those passed in.
    """
    found = list(problems)
    try:
        made = kind.model_validate(tables, context={"folder": folder})
    except ValidationError as error:
        found.extend(problem_lines(error, kind))
    if found:
        refuse(found, source)
    return made


def parse(text: str, source: str) -> dict[str, Any]:
    """The tables of a TOML text; a syntax error shows the line."""
    try:
        return tomllib.loads(f"{text}\n")  # so that an error in the last line has a line number too
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        line = text.split("\n")[int(place[1]) - 1].strip() if place else ""
        shown = f"\n  > {line}" if line else ""
        advice = "; strings need quotes" if "Invalid value" in str(error) else ""
        raise ConfigError(f"{source}: not valid TOML: {error}{advice}{shown}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists without end
        raise ConfigError(f"{source}: cannot be read as TOML: {error}") from None


def dumps(config: ExperimentConfig) -> str:
    """The TOML of an experiment with every default of its tables; `loads` returns an equal experiment.

    `Experiment.complete` also holds the defaults of the method, the network and the data set.

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


def changes(before: ExperimentConfig, after: ExperimentConfig) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two experiments differ, with both values; None where a value is absent."""
    old, new = flat(before.to_dict()), flat(after.to_dict())
    keys = dict.fromkeys([*old, *new])
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}
