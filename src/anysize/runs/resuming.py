"""The experiment of a resumed run: the values of the given file, completed by those that the run started with.

A run directory holds every value, so a default that has changed since does not change a run that has started.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from anysize import config as configs
from anysize.config.tables import ExperimentConfig
from anysize.errors import CheckpointError
from anysize.experiment.experiment import Experiment

MAY_CHANGE = ("rounds", "evaluate_every", "checkpoint_every", "engine", "evaluation", "callbacks", "track")
"""The tables and keys that a resumed run may change."""

_OF_THE_MACHINE = ("engine.name", "engine.workers", "engine.accelerator")
"""The table that describes this machine, not the one where the run started."""


def begun(experiment: Experiment, saved: ExperimentConfig) -> ExperimentConfig:
    """The complete config of the run in a directory; today's defaults fill in what its file lacks."""
    parts = ("data", "model", "method")
    if any(getattr(saved, part).name != getattr(experiment.config, part).name for part in parts):
        return saved  # another experiment, whose code may be missing here
    return experiment.anew(saved).complete


def fixed(keys: Collection[str]) -> list[str]:
    """Those of the dotted keys that a resumed run must not change."""
    return [key for key in keys if re.split(r"[.\[]", key)[0] not in MAY_CHANGE]


def resumed(experiment: Experiment, saved: ExperimentConfig, directory: Path) -> tuple[Experiment, list[str]]:
    """The experiment that continues the run in a directory, and a line for each value that comes from the run alone.

    Args:
        experiment: the experiment as given now.
        saved: the config in the directory.
        directory: for the error.

    Raises:
        CheckpointError: if the experiment gives a value that differs from the run's and must not.
    """
    before, now = begun(experiment, saved), experiment.complete
    changed = configs.changes(before, now)
    said = {key: values for key, values in changed.items() if experiment.config.gives(key)}
    if fixed(said):
        listed = "\n  ".join(configs.differences(said))
        raise CheckpointError(
            f"{directory} holds a run of another experiment; a resumed run may change {', '.join(MAY_CHANGE)} only. "
            f"The differences:\n  {listed}"
        )
    unsaid = {key: values for key, values in changed.items() if key not in said and key not in _OF_THE_MACHINE}
    if not unsaid:
        return experiment, []
    tables = _with(before.to_dict(), {key: values[1] for key, values in changed.items() if key not in unsaid})
    config = configs.from_dict(tables, folder=experiment.config.folder, source=f"the run in {directory}")
    return experiment.anew(config), configs.differences(unsaid, ", not ")


def _with(tables: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with other values at dotted keys of one table; None removes a key."""
    for key, value in values.items():
        table, _, name = key.rpartition(".")
        place = tables[table] if table else tables
        place.pop(name, None)
        if value is not None:
            place[name] = value
    return tables
