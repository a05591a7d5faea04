"""Where the time of a round goes: named stages, each with the seconds spent in it but not in a stage inside it.

A method adds a stage with `with stage("svd"): ...` in code that runs on the server. Unless a run is profiled, that does
nothing. All that clients do is one stage, "train", on every engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

T = TypeVar("T")

STAGES = ("extract", "send", "train", "aggregate", "evaluate", "checkpoint")
"""The stages that every run has, in the order of a round."""
_OTHER = "other"
_off = nullcontext()


class Clock:
    """Seconds by stage. Stages nest; time counts for the innermost one."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._open: list[str] = [_OTHER]
        self._since = time.perf_counter()

    def take(self) -> dict[str, float]:
        """The seconds of every stage since the last call, with time outside all stages as "other"; resets to zero."""
        self._credit()
        found, self._seconds = self._seconds, {}
        names = [*STAGES, *(name for name in found if name not in (*STAGES, _OTHER)), _OTHER]
        return {name: round(found.get(name, 0.0), 6) for name in names}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time inside counts for `name`."""
        self._credit()
        self._open.append(name)
        try:
            yield
        finally:
            self._credit()
            self._open.pop()

    def _credit(self) -> None:
        now = time.perf_counter()
        name = self._open[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


_clock: Clock | None = None


def stage(name: str) -> AbstractContextManager[None]:
    """Time inside counts for the stage `name` of the round, if the run is profiled.

    >>> with stage("svd"):
    ...     pass
    """
    return _off if _clock is None else _clock.stage(name)


def staged(name: str, items: Iterable[T]) -> Iterator[T]:
    """The items; the time to get each counts for the stage `name`."""
    source = iter(items)
    while True:
        with stage(name):
            try:
                item = next(source)
            except StopIteration:
                return
        yield item
        del item  # its memory is free before the next one is made


@contextmanager
def measuring(clock: Clock | None) -> Iterator[None]:
    """Inside, `clock` records the stages; None records nothing."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before
