"""Choosing tuned values by the runs that tried them, on clients' held-out data alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anysize.comparisons import outcomes
from anysize.comparisons.cells import Cell, Trial
from anysize.records.directory import EVENTS
from anysize.records.events import read_events


@dataclass(frozen=True)
class Choice:
    """What was chosen for a method in a setting.

    Attributes:
        values: the best values, by dotted key; empty where nothing is tuned.
        scores: of every trial, the mean of the metric over all clients, each on its own held-out data.
        seed: of the trials.
        rounds: that they had.
    """

    values: Mapping[str, Any]
    scores: tuple[tuple[Mapping[str, Any], float], ...] = ()
    seed: int = 0
    rounds: int = 0


def chosen(cell: Cell, folder: Path) -> Choice | None:
    """The best values by the cell's trials, the first of several; None as long as one of them is not finished."""
    if not cell.trials:
        return Choice({})
    if any(not is_finished(folder, trial) for trial in cell.trials):
        return None
    scores = tuple((trial.values, outcomes.held_out(folder / trial.path)) for trial in cell.trials)
    sign = 1.0 if _higher_is_better(folder / cell.trials[0].path) else -1.0
    # A run that has diverged is the worst, whichever way the metric goes.
    best = max(scores, key=lambda entry: sign * entry[1] if math.isfinite(entry[1]) else -math.inf)
    first = cell.trials[0].config
    return Choice(best[0], scores, first.seed, first.rounds)


def is_finished(folder: Path, trial: Trial) -> bool:
    """Whether a trial has had its last round."""
    return outcomes.is_finished(folder / trial.path, trial.config.rounds)


def _higher_is_better(directory: Path) -> bool:
    start = next(event for event in read_events(directory / EVENTS) if event["event"] == "start")
    return bool(start["higher_is_better"])
