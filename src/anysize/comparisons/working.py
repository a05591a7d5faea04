"""Bringing cells to their end in this process, beside any others that do the same in the same folder."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from anysize import config as configs
from anysize import interrupts
from anysize.comparisons import locks
from anysize.comparisons.cells import Cell
from anysize.comparisons.outcomes import is_finished
from anysize.comparisons.tuning import chosen
from anysize.config.tables import ExperimentConfig
from anysize.engines.workers.pool import WorkerPool
from anysize.errors import AnysizeError, CheckpointError
from anysize.experiment.experiment import Experiment
from anysize.methods import Method
from anysize.records import directory as directories
from anysize.report import write as write_report
from anysize.runs.resuming import begun
from anysize.runs.runner import run
from anysize.wire import Json

OnRunEvent = Callable[[str, Json], None]
Done = Literal["finished", "failed", "busy"]

_WAIT_SECONDS = 0.5  # between two looks at cells that other processes run
_MAY_DIFFER = ("name", "engine", "checkpoint_every", "track")
"""In what a cell may differ from the run in its folder: its name, where and how safely it runs, who is told of it."""


@dataclass
class Workshop:
    """What every cell of a comparison is made with.

    Attributes:
        folder: of the comparison.
        on_event: called with a cell's path and each of its events.
        pool: worker processes for the clients of one cell after another; None: as each cell's engine says.
        engine: in place of the cells' own, such as "inprocess" where every core has a cell.
        methods: by their labels, those that were given as objects.
        last: the experiment of the cell before, or that with the live objects of all: the next shares its data.
    """

    folder: Path
    on_event: OnRunEvent = lambda path, event: None
    pool: WorkerPool | None = None
    engine: str | None = None
    methods: Mapping[str, Method[Any]] = field(default_factory=dict)
    last: Experiment | None = None

    def experiment(self, config: ExperimentConfig, label: str) -> Experiment:
        """The experiment of a cell."""
        method = self.methods.get(label)
        if self.last is None:
            self.last = Experiment.from_config(config, method=method)
        else:
            self.last = self.last.beside(config, method)
        return self.last

    def placed(self, config: ExperimentConfig) -> ExperimentConfig:
        """The experiment on the engine that all cells run on."""
        if self.engine is None:
            return config
        return config.replaced(engine=config.engine.model_copy(update={"name": self.engine}))


def work(cells: Sequence[Cell], shop: Workshop) -> None:
    """Returns when every cell is finished or has failed, whoever ran it.

    Cells are taken in their order. One that another process runs is left to it and looked at again at the end: should
    that process die, its lock dies with it, and the cell goes on here.
    """
    pending = list(cells)
    while pending:
        states = [(cell, bring(cell, shop)) for cell in pending]
        pending = [cell for cell, state in states if state == "busy"]
        if pending:
            interrupts.pause(_WAIT_SECONDS)


def bring(cell: Cell, shop: Workshop) -> Done:
    """Brings a cell to its end, its trials first; "busy" if another process has some of it."""
    interrupts.check()
    if locks.failure(shop.folder, cell.path) is not None:
        return "failed"
    for trial in cell.trials:
        tried = _run(trial.path, trial.config, cell.label, shop, with_report=False)
        if tried == "failed":
            why = locks.failure(shop.folder, trial.path) or ""
            locks.note_failure(shop.folder, cell.path, f"its tuning run {trial.path} has failed: {why}")
            return "failed"
    choice = chosen(cell, shop.folder)
    if choice is None:
        return "busy"
    return _run(cell.path, cell.tuned(choice.values), cell.label, shop, with_report=True)


def _run(path: str, config: ExperimentConfig, label: str, shop: Workshop, with_report: bool) -> Done:
    """Runs a cell or a trial to its end unless it is there already, or another process is at it."""
    if locks.failure(shop.folder, path) is not None:
        return "failed"
    if is_finished(shop.folder / path, config.rounds):
        return "finished"
    with locks.held(shop.folder, path) as ours:
        if not ours:
            return "busy"
        if is_finished(shop.folder / path, config.rounds):  # by whom we have just waited for
            return "finished"
        try:
            _to_the_end(shop.experiment(shop.placed(config), label), shop.folder / path, path, shop)
            if with_report:
                write_report(shop.folder / path)
        except Exception as error:
            ours_to_mend = not isinstance(error, AnysizeError | OSError)
            text = "".join(traceback.format_exception(error)) if ours_to_mend else str(error)
            locks.note_failure(shop.folder, path, text)
            shop.on_event(path, {"event": "failed", "error": text})
            return "failed"
    return "finished"


def _to_the_end(experiment: Experiment, directory: Path, path: str, shop: Workshop) -> None:
    there = directories.holds_run(directory)
    listed = _differences(experiment, directory)
    if listed:
        raise CheckpointError(_refusal([directory], listed))
    watch = partial(shop.on_event, path)
    run(experiment, out=directory, resume=there, on_event=watch, pool=shop.pool)


def _differences(experiment: Experiment, directory: Path) -> str:
    """In what the run in a directory is of another experiment, in lines; empty if it is not, or there is none."""
    if not directories.holds_run(directory):
        return ""
    changed = configs.changes(begun(experiment, directories.saved_config(directory)), experiment.complete)
    other = {key: pair for key, pair in changed.items() if key.split(".")[0] not in _MAY_DIFFER}
    return "\n  ".join(configs.differences(other))


def _refusal(places: Sequence[Path], listed: str) -> str:
    more = f", and so {'does' if len(places) == 2 else 'do'} {len(places) - 1} more" if len(places) > 1 else ""
    return (
        f"{places[0]} holds a run of another experiment{more}; choose another folder with out=, or run all again with "
        f"overwrite=True. The differences:\n  {listed}"
    )


def check(cells: Sequence[Cell], shop: Workshop) -> None:
    """Refuses, before anything runs, runs of other experiments in the places of the cells."""
    problems: dict[str, list[Path]] = {}
    for cell in cells:
        choice = chosen(cell, shop.folder)
        begun_ones = [(trial.path, trial.config) for trial in cell.trials]
        begun_ones += [] if choice is None else [(cell.path, cell.tuned(choice.values))]
        for path, config in begun_ones:
            listed = _differences(shop.experiment(config, cell.label), shop.folder / path)
            if listed:
                problems.setdefault(listed, []).append(shop.folder / path)
    if problems:
        raise CheckpointError("\n".join(_refusal(list(dict.fromkeys(p)), listed) for listed, p in problems.items()))


def clear(cells: Sequence[Cell], folder: Path) -> None:
    """Deletes the runs of all cells."""
    for path in dict.fromkeys(path for cell in cells for path in (cell.path, *(t.path for t in cell.trials))):
        if not directories.holds_run(folder / path):
            continue
        with locks.held(folder, path) as ours:
            if not ours:
                raise CheckpointError(f"another process is running in {folder / path}; wait until it ends")
            directories.clear(folder / path)
            with suppress(OSError):
                os.rmdir(folder / path)
