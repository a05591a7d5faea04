"""The callbacks of a run: when they are called, what they see, and what they ask for."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from anysize.callbacks import Callback, Evaluation, RunView, Wishes
from anysize.config.tables import ExperimentConfig
from anysize.errors import AnysizeError, CheckpointError, ConfigError, told
from anysize.records import checkpoint as checkpoints
from anysize.records.directory import EVENTS, saved_environment
from anysize.records.events import evaluation_in, history, read_events
from anysize.wire import Json

Moment = Literal["on_start", "on_round", "on_evaluation", "on_end"]


class Hooks:
    """Calls a run's callbacks in their order, and remembers what they ask for.

    Attributes:
        wishes: what they have asked for.
        kept: the round that is kept as the best, or None.
    """

    def __init__(self, callbacks: Sequence[Callback], directory: Path) -> None:
        strangers = [callback for callback in callbacks if not isinstance(callback, Callback)]
        if strangers:
            raise ConfigError(
                f"callbacks: given {strangers[0]!r}; each must be an object of a class derived from "
                "anysize.callbacks.Callback"
            )
        for callback in callbacks:
            _check_methods(callback)
        self.wishes = Wishes()
        self.kept: int | None = None
        self._callbacks = callbacks
        self._directory = directory
        self._start: Json = {}
        self._event: Json = {}
        self._evaluations: list[Evaluation] = []

    def check(self, config: ExperimentConfig) -> None:
        """Refuse an experiment that a callback cannot serve."""
        for callback in self._callbacks:
            try:
                callback.check(config)
            except (Exception, SystemExit) as error:
                if _is_plain(callback, error):
                    raise
                raise ConfigError(f"{_whose(callback)}, check: {told(error)}") from error

    def begin(self, config: ExperimentConfig, round: int) -> None:
        """`on_start`, with the evaluations that a resumed run has made before."""
        if not self._callbacks:
            return
        self._config = config
        self._id = str(saved_environment(self._directory).get("id", self._directory.resolve()))
        self._start = next(event for event in read_events(self._directory / EVENTS) if event["event"] == "start")
        if (self._directory / checkpoints.BEST).is_file():
            self.kept = self._kept_round()
        for event in history(self._directory):
            self._note(event)
        self.wishes.round = round
        self._call("on_start")

    def _kept_round(self) -> int:
        try:
            return checkpoints.round_of(self._directory, checkpoints.BEST)
        except CheckpointError as error:
            advice = f"delete {checkpoints.BEST} to go on without it; the run itself is intact"
            raise CheckpointError(f"{error}. Or {advice}") from error

    def after_round(self, event: Json) -> None:
        """`on_round`, and `on_evaluation` if the round was evaluated."""
        if not self._callbacks:
            return
        self.wishes.round = event["round"]
        evaluated = self._note(event)
        self._call("on_round")
        if evaluated:
            self._call("on_evaluation")

    def after_evaluation(self, event: Json) -> None:
        """`on_evaluation` for a round that was evaluated later: it replaces what was known of that round."""
        self._evaluations = [known for known in self._evaluations if known.round < event["round"]]
        if self._note(event):
            self._call("on_evaluation")

    def end(self, stopped: str | None) -> None:
        """`on_end`; what the run leaves is settled by then."""
        self.wishes.settled = True
        self._call("on_end", stopped)

    def _note(self, event: Json) -> bool:
        """Take in a round's event; whether the round was evaluated."""
        self._event = event
        found = evaluation_in(event, self._start)
        self._evaluations += [] if found is None else [found]
        return found is not None

    def _call(self, moment: Moment, stopped: str | None = None) -> None:
        for callback in self._callbacks:
            try:
                getattr(callback, moment)(self._view(stopped))
            except (Exception, SystemExit) as error:
                if _is_plain(callback, error):
                    raise
                raise AnysizeError(
                    f"{_whose(callback)}, {moment}, after round {self.wishes.round}: "
                    f"{told(error)}. The run is saved as far as that; go on with resume=True"
                ) from error

    def _view(self, stopped: str | None) -> RunView:
        """The run at this moment; each callback gets its own copy of what it could change."""
        return RunView(
            id=self._id,
            directory=self._directory,
            config=self._config,
            metric=self._start["metric"],
            higher_is_better=self._start["higher_is_better"],
            round=self.wishes.round,
            event=copy.deepcopy(self._event),
            evaluations=tuple(copy.deepcopy(self._evaluations)),
            kept=self.kept,
            stopped=stopped,
            _wishes=self.wishes,
        )


def _check_methods(callback: Callback) -> None:
    """Refuse a callback that could not be called, before a round is lost to it."""
    for moment in get_args(Moment):
        method = getattr(callback, moment)
        if inspect.iscoroutinefunction(method):
            raise ConfigError(f"{_whose(callback)}: {moment} is 'async def', and nobody waits for it; write 'def'")
        try:
            inspect.signature(method).bind(None)
        except ValueError:  # a function in C that does not tell its arguments
            continue
        except TypeError as error:
            raise ConfigError(f"{_whose(callback)}: {moment} is called with one argument, the run: {error}") from None


def _is_plain(callback: Callback, error: BaseException) -> bool:
    """Whether an error says enough by itself: one of ours, from a callback of ours."""
    return isinstance(error, AnysizeError) and _is_ours(callback)


def _is_ours(callback: Callback) -> bool:
    return type(callback).__module__.startswith("anysize.")


def _whose(callback: Callback) -> str:
    whose = "anysize's" if _is_ours(callback) else "your"
    return f"{whose} callback {type(callback).__name__}"
