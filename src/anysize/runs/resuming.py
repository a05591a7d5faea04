"""What a resumed run goes on with: what the experiment says now, and where it says nothing, as the run was begun.

A run's directory holds every value, so that a default that has changed since then changes no run that was begun before.
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

MAY_CHANGE = ("rounds", "evaluate_every", "checkpoint_every", "engine", "evaluation")
"""The tables and keys in which a resumed run may differ from what it was."""

_OF_THE_MACHINE = ("engine.name", "engine.workers", "engine.accelerator")
"""Where a run goes on: what this machine has, and not what it was begun on."""


def begun(experiment: Experiment, saved: ExperimentConfig) -> ExperimentConfig:
    """The complete config of a run that a directory holds, what the directory lacks by today's defaults."""
    parts = ("data", "model", "method")
    if any(getattr(saved, part).name != getattr(experiment.config, part).name for part in parts):
        return saved  # another experiment, whose code need not be here
    return experiment.anew(saved).complete


def fixed(keys: Collection[str]) -> list[str]:
    """Those of the dotted keys in which a resumed run may not differ."""
    return [key for key in keys if re.split(r"[.\[]", key)[0] not in MAY_CHANGE]


def resumed(experiment: Experiment, saved: ExperimentConfig, directory: Path) -> tuple[Experiment, list[str]]:
    """The experiment with which the run in a directory goes on, and which of its values are the run's alone, in lines.

    Args:
        experiment: as it is given now.
        saved: the config in the directory.
        directory: for the error.

    Raises:
        CheckpointError: if the experiment says something else than the run, and it may not.
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
    """The tables with other values at dotted keys of one table; None takes a key away."""
    for key, value in values.items():
        table, _, name = key.rpartition(".")
        place = tables[table] if table else tables
        place.pop(name, None)
        if value is not None:
            place[name] = value
    return tables
