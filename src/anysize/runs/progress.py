"""The progress of a run: a bar in a notebook; elsewhere lines on standard error, on a terminal above a bar."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

err = Console(stderr=True, highlight=False, soft_wrap=True)

OnEvent = Callable[[dict[str, Any]], None]


@contextmanager
def watched(rounds: int, on_event: OnEvent | None, shown: bool | None) -> Iterator[OnEvent]:
    """Yield the function that a run calls with its events: it calls `on_event`, and shows the progress.

    Args:
        rounds: how many rounds the run has.
        on_event: another function to call with every event.
        shown: whether to show the progress; None: on a terminal and in a notebook, unless `on_event` is given.
    """
    if shown is None:
        shown = (err.is_terminal or in_notebook()) and on_event is None
    if not shown:
        yield on_event or (lambda event: None)
        return
    with bars() as progress:
        watch = Watch(progress, rounds)

        def tell(event: dict[str, Any]) -> None:
            watch(event)
            if on_event is not None:
                on_event(event)

        yield tell


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class NotebookBars:
    """Progress bars in the output of a notebook's cell, called as those of rich, which need a widget library there."""

    disable = False

    def __init__(self) -> None:
        from IPython.display import display

        self._began = time.monotonic()
        self._bars: list[dict[str, Any]] = []
        self._handle: Any = display(self, display_id=True)

    def __enter__(self) -> NotebookBars:
        return self

    def __exit__(self, *error: object) -> None:
        """The bars stay as they are."""

    def add_task(self, title: str, total: float, **fields: Any) -> TaskID:
        self._bars.append({"title": title, "total": total, "completed": 0, **fields})
        return TaskID(len(self._bars) - 1)

    def update(self, task: TaskID, **fields: Any) -> None:
        self._bars[task] |= fields
        self._handle.update(self)

    def _repr_html_(self) -> str:
        seconds = f"{time.monotonic() - self._began:.0f} s"
        lines = (
            f'<div>{html.escape(bar["title"])} {bar["completed"]}/{bar["total"]} <progress value="{bar["completed"]}" '
            f'max="{bar["total"]}"></progress> {seconds} {html.escape(bar["note"])}</div>'
            for bar in self._bars
        )
        return "".join(lines)


def bars() -> Progress | NotebookBars:
    """Progress bars, drawn on a terminal and in a notebook only."""
    if in_notebook():
        return NotebookBars()
    columns = [TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(bar_width=24), TimeElapsedColumn()]
    rest = [TextColumn("left"), TimeRemainingColumn()]
    return Progress(*columns, *rest, console=err, disable=not err.is_terminal)


class Watch:
    """Show a run's events as lines, or beside the bar of a notebook; `before` is its first round minus 1."""

    def __init__(self, progress: Progress | NotebookBars, rounds: int, title: str = "round") -> None:
        self.before = 0
        self._title = title
        self._progress = progress
        self._bar = progress.add_task(escape(title), total=rounds, note="")
        self._metric = "accuracy"

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "start":
            self._metric = event["metric"]
            print_notices(event["notices"])
        if kind == "notice":
            print_notices([event["text"]])
        if kind == "end" and "stopped" in event:
            print_notices([f"stopped after round {event['round']}: {event['stopped']}"])
        if kind == "resume":
            self.before = event["round"]
        if kind in ("resume", "round"):
            self._progress.update(self._bar, completed=event["round"])
        if kind == "round" and (self._metric in event or event.get("client_metrics")):
            self._show(event)
        if kind == "round" and event.get("missing"):
            listed = "; ".join(f"client {entry['client']}, {entry['why']}" for entry in event["missing"])
            print_notices([f"round {event['round']}{' changed nothing' if event.get('void') else ''}: {listed}"])

    def _show(self, event: Mapping[str, Any]) -> None:
        own = {group: values["mean"] for group, values in event.get("client_metrics", {}).items()}
        note = f"{self._metric} {by_size(event[self._metric])}" if self._metric in event else ""
        note = note or f"{self._metric} on the clients' own data {by_size(own)}"
        if isinstance(self._progress, NotebookBars):
            self._progress.update(self._bar, note=note)
        else:
            err.print(f"{self._title} {event['round']}: {note}", markup=False)


def print_notices(notices: Sequence[str]) -> None:
    """Print notices, a line for each."""
    for notice in notices:
        err.print(f"note: {notice}", style="yellow", markup=False)


def by_size(values: Mapping[str, float]) -> str:
    """A line of values.

    >>> by_size({"0.5": 0.91, "1.0": 0.95})
    '0.5: 0.910  1.0: 0.950'
    """
    return "  ".join(f"{label}: {value:.3f}" for label, value in values.items())
