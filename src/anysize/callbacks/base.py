"""The contract between a run and its callbacks: four moments, one frozen view of the run, two things to ask for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anysize.errors import AnysizeError

if TYPE_CHECKING:
    from anysize.config.tables import ExperimentConfig

_LONGEST_REASON = 500  # characters; the last event of a run is one short line


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation measured, by the labels of the sizes.

    Attributes:
        round: the round after which it was measured.
        test: every metric of each size on the server's test set; empty if that is not evaluated.
        held_out: the task's metric of each size, the mean over its clients on their own held-out data; empty if the
            clients are not asked, or none has answered.
        held_out_mean: that metric as a mean over all clients that answered, whatever their size; NaN if none has.
    """

    round: int
    test: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    held_out: Mapping[str, float] = field(default_factory=dict)
    held_out_mean: float = math.nan


@dataclass
class Wishes:
    """What callbacks have asked for.

    Attributes:
        round: the last finished round; only this one can be kept.
        stop: why the run shall stop; None: it goes on.
        keep: why the state after this round shall be kept; None: it need not.
        settled: the run has ended, and nothing can be kept any more.
    """

    round: int = 0
    stop: str | None = None
    keep: str | None = None
    settled: bool = False


@dataclass(frozen=True)
class RunView:
    """A run as a callback sees it at one moment; it cannot be changed, only stopped.

    Attributes:
        id: the same for a run and for its continuation with `resume`, another for every other run.
        directory: the run directory.
        config: the complete experiment.
        metric: the task's metric.
        higher_is_better: whether a larger value of it is better.
        round: the last finished round; 0 before the first.
        event: a copy of that round's event, as in events.jsonl; empty before the first round.
        evaluations: every evaluation so far, oldest first; those from before a `resume` are among them.
        kept: the round whose state is kept as the best, or None.
        stopped: why the run stops before its last round, or None.
    """

    id: str
    directory: Path
    config: ExperimentConfig
    metric: str
    higher_is_better: bool
    round: int
    event: Mapping[str, Any]
    evaluations: tuple[Evaluation, ...]
    kept: int | None
    stopped: str | None
    _wishes: Wishes = field(repr=False)

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the best mean on the clients' held-out data, the first of equals; None without any."""
        found: Evaluation | None = None
        for evaluation in self.evaluations:
            if self.is_better(evaluation.held_out_mean, math.nan if found is None else found.held_out_mean):
                found = evaluation
        return found

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Whether a value of the metric is better than another by more than `by`; any is better than NaN."""
        if math.isnan(value) or math.isnan(than):
            return not math.isnan(value)
        return value - than > by if self.higher_is_better else than - value > by

    def stop(self, reason: str) -> None:
        """End the run after this round: it is evaluated and saved, and its last event gives the reason."""
        line = _line("stop", reason)
        self._wishes.stop = self._wishes.stop or line  # the first reason counts

    def keep(self, reason: str) -> None:
        """Save the state after this round beside the last one, in place of what was kept before.

        `anysize.load(directory, best=True)` gives it back. Never choose the round on test data.
        """
        if self._wishes.round != self.round:
            raise AnysizeError(f"keep() of round {self.round} comes too late: round {self._wishes.round} has ended")
        if self._wishes.settled:
            raise AnysizeError("keep() in on_end comes too late; keep a round in on_round or on_evaluation")
        self._wishes.keep = _line("keep", reason)


class Callback:
    """What a run calls; every method does nothing unless it is overridden.

    An exception ends the run with an error that names the callback and the line; the round before it is saved. A run
    that is resumed from an older checkpoint repeats rounds, and calls its callbacks for them again.

    >>> class Loss(Callback):
    ...     def on_round(self, run: RunView) -> None:
    ...         print(run.round, run.event["train_loss"])
    """

    def check(self, config: ExperimentConfig) -> None:
        """Before anything is written: raise an error if this callback cannot serve the experiment."""

    def on_start(self, run: RunView) -> None:
        """Before the first round of a run, and before the next one of a run that is resumed."""

    def on_round(self, run: RunView) -> None:
        """After every round."""

    def on_evaluation(self, run: RunView) -> None:
        """After every round that is evaluated; `run.evaluations[-1]` has its metrics."""

    def on_end(self, run: RunView) -> None:
        """When the run has ended, by itself or stopped; not after an error or Ctrl-C, since it can be resumed."""


def _line(verb: str, reason: str) -> str:
    if not isinstance(reason, str):
        raise AnysizeError(f"{verb}({reason!r}): give the reason as text, such as {verb}('the loss is low enough')")
    words = "".join(letter if letter.isprintable() else " " for letter in reason)
    return " ".join(words.split())[:_LONGEST_REASON] or "no reason given"
