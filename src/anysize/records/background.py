"""Files written beside the work that goes on: a checkpoint while the next round trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class Background:
    """Does one thing at a time in a thread of its own; the next call raises what went wrong there.

    Leaving its block waits for what has begun, so a process that ends in order leaves nothing half done.

    >>> done = []
    >>> with Background() as background:
    ...     background.start(lambda: done.append("written"))
    >>> done
    ['written']
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Background:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception:
            if error is None:  # otherwise what ended the block says more
                raise

    def start(self, task: Callable[[], None]) -> None:
        """Begin `task` after the one before it, which must be finished first."""
        self.wait()
        self._thread = threading.Thread(target=self._do, args=(task,), name="anysize-background")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is under way; raises what went wrong since the last call."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _do(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            self._error = error
