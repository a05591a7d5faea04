"""Stopping early and keeping the best round, both by the clients' held-out data and never by test data.

Both remember nothing: they look at all evaluations of the run so far, which a resumed run has from its events. So a
run that was killed and resumed stops and keeps as one that was not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anysize.callbacks.base import Callback, RunView
from anysize.errors import ConfigError

if TYPE_CHECKING:
    from anysize.config.tables import ExperimentConfig


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """Stops a run when the mean metric on the clients' held-out data no longer improves.

    Attributes:
        patience: how many evaluations in a row may be no better than the best before them.
        min_delta: by how much more than this an evaluation must be better to count.
    """

    patience: int = 5
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        whole = isinstance(self.patience, int) and self.patience >= 1
        if not whole or not isinstance(self.min_delta, int | float) or not self.min_delta >= 0:
            raise ConfigError(
                f"EarlyStopping(patience={self.patience!r}, min_delta={self.min_delta!r}): patience must be a whole "
                "number, 1 or more, min_delta a number, 0 or more"
            )

    def check(self, config: ExperimentConfig) -> None:
        _need_held_out(config, "early stopping")

    def on_start(self, run: RunView) -> None:
        self.on_evaluation(run)

    def on_evaluation(self, run: RunView) -> None:
        best, waited = None, 0
        for evaluation in (evaluation for evaluation in run.evaluations if evaluation.held_out):
            if best is None or run.is_better(evaluation.held_out_mean, best.held_out_mean, self.min_delta):
                best, waited = evaluation, 0
            else:
                waited += 1
        if best is not None and waited >= self.patience:
            last = "last evaluation" if waited == 1 else f"last {waited} evaluations"
            were = "was" if waited == 1 else "were"
            run.stop(
                f"the {last} on held-out data {were} no better than round {best.round}, with {run.metric} "
                f"{best.held_out_mean:.4f}"
            )


@dataclass(frozen=True)
class KeepBest(Callback):
    """Keeps the state after the round whose mean metric on the clients' held-out data was best so far."""

    def check(self, config: ExperimentConfig) -> None:
        _need_held_out(config, "keeping the best round")

    def on_start(self, run: RunView) -> None:
        self.on_evaluation(run)  # a run may be killed between its checkpoint and the file of the best round

    def on_evaluation(self, run: RunView) -> None:
        best = run.best
        if best is not None and best.round == run.round != run.kept:
            run.keep(f"{run.metric} {best.held_out_mean:.4f} on held-out data, the best so far")


def _need_held_out(config: ExperimentConfig, what: str) -> None:
    if "clients" not in config.evaluation.on:
        raise ConfigError(
            f"{what} goes by the clients' held-out data, which nobody measures here (never by test data): add "
            '"clients" to evaluation.on, and set data.validation above 0'
        )
