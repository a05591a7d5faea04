"""How far a comparison is, by what its runs have written: a live table on a terminal, lines elsewhere.

Only the folder is looked at, so that cells count which other processes run.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from anysize.comparisons import locks
from anysize.comparisons.cells import Cell
from anysize.comparisons.outcomes import scores
from anysize.records.directory import EVENTS
from anysize.runs.progress import by_size, err

_SECONDS = 0.5  # between two looks


@dataclass
class Follower:
    """Follows the events of one run as its file grows.

    Attributes:
        path: of the run, in the comparison's folder.
        rounds: that it will have.
        round: that it has reached.
        latest: the metric per size when it was last measured.
        state: "waiting", "running" (it has grown while we looked), "begun", "finished" or "failed".
        error: why it has failed.
    """

    folder: Path
    path: str
    rounds: int
    round: int = 0
    latest: dict[str, float] = field(default_factory=dict)
    state: str = "waiting"
    error: str = ""
    _start: dict[str, Any] = field(default_factory=dict)
    _offset: int = 0
    _looked: bool = False

    def look(self) -> bool:
        """Reads what is new; whether the state has changed."""
        if self.state == "finished":
            return False
        before = self.state
        self._read()
        error = locks.failure(self.folder, self.path) if self.state != "finished" else None
        if error is not None:
            self.state, self.error = "failed", error
        self._looked = True
        return self.state != before

    def _read(self) -> None:
        try:
            with (self.folder / self.path / EVENTS).open("rb") as file:
                size = file.seek(0, 2)
                self._offset = 0 if size < self._offset else self._offset  # it was begun anew
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._note(json.loads(line))
        if whole and self.state != "finished":
            self.state = "running" if self._looked else "begun"

    def _note(self, event: dict[str, Any]) -> None:
        if event["event"] == "start":
            self._start = event
        if event["event"] in ("round", "resume", "end"):
            self.round = event["round"]
        if event["event"] == "round" and self._start:
            on_test = self._start["metric"] in event
            self.latest = scores(event, self._start, "test" if on_test else "clients") or self.latest
        if event["event"] == "end" and (event["round"] >= self.rounds or "stopped" in event):
            self.state = "finished"

    @property
    def mean(self) -> float:
        """The mean over the sizes when it was last measured."""
        return sum(self.latest.values()) / len(self.latest) if self.latest else math.nan


class Watch:
    """Shows how far the cells are."""

    def __init__(self, cells: Sequence[Cell], folder: Path, live: Live | None) -> None:
        self._cells, self._live = cells, live
        self._runs = {cell.path: Follower(folder, cell.path, cell.config.rounds) for cell in cells}
        self._trials = {
            trial.path: Follower(folder, trial.path, trial.config.rounds) for cell in cells for trial in cell.trials
        }
        self._began = self._next = 0.0
        self._before = 0

    def begin(self) -> None:
        """Takes note of what is there already."""
        for follower in self._all():
            follower.look()
            if follower.state == "finished" and self._live is None and follower.path in self._runs:
                err.print(f"{follower.path}: finished before", markup=False)
        self._began, self._before = time.monotonic(), self._done()
        self._show()

    def __call__(self) -> None:
        """Looks again, unless that was just now."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SECONDS
            self.look()

    def look(self) -> None:
        for follower in self._all():
            if follower.look() and self._live is None:
                self._tell(follower)
        self._show()

    def _all(self) -> Iterator[Follower]:
        yield from self._trials.values()
        yield from self._runs.values()

    def _done(self) -> int:
        return sum(follower.round for follower in self._all())

    def _tell(self, follower: Follower) -> None:
        """A line for what has changed."""
        text = follower.state
        if text == "finished":
            text = f"finished, {by_size(follower.latest)}; {self._summary()}"
        if text == "failed":
            text = f"failed: {follower.error.strip().splitlines()[-1]}"
        err.print(f"{follower.path}: {text}", markup=False)

    def _summary(self) -> str:
        """How many cells are finished, and how long the rest may take."""
        over = sum(follower.state == "finished" for follower in self._runs.values())
        text = f"{over} of {len(self._runs)} cells finished"
        if self._trials:
            tried = sum(follower.state == "finished" for follower in self._trials.values())
            text += f", {tried} of {len(self._trials)} tuning runs"
        left = sum(follower.rounds - follower.round for follower in self._all() if follower.state != "failed")
        new, seconds = self._done() - self._before, time.monotonic() - self._began
        if left and new > 0:
            text += f", about {_short(left * seconds / new)} left"
        return text

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(Group(self._table(), Text(self._summary())))

    def _table(self) -> Table:
        """A line per setting and method, a column per seed; if they are too many, those where something happens."""
        seeds = list(dict.fromkeys(cell.seed for cell in self._cells))
        groups: dict[tuple[str, str], dict[int, Cell]] = {}
        for cell in self._cells:
            groups.setdefault((cell.setting, cell.label), {})[cell.seed] = cell
        room = max(4, err.size.height - 6)
        if len(groups) > room:
            busy = {key: own for key, own in groups.items() if any(self._is_busy(cell) for cell in own.values())}
            rest = {key: own for key, own in groups.items() if key not in busy}
            groups = dict([*busy.items(), *rest.items()][:room])
        with_settings, tuned = any(cell.setting for cell in self._cells), bool(self._trials)
        heads = [*(["setting"] if with_settings else []), "method", *(["tuning"] if tuned else [])]
        table = Table(*heads, *(f"seed {seed}" for seed in seeds), box=None, header_style="bold")
        for (setting, label), own in groups.items():
            lead = [*([escape(setting)] if with_settings else []), escape(label)]
            lead += [self._tuning(next(iter(own.values())))] if tuned else []
            table.add_row(*lead, *(self._text(own.get(seed)) for seed in seeds))
        return table

    def _is_busy(self, cell: Cell) -> bool:
        paths = [cell.path, *(trial.path for trial in cell.trials)]
        return any((self._runs | self._trials)[path].state == "running" for path in paths)

    def _tuning(self, cell: Cell) -> str:
        over = sum(self._trials[trial.path].state == "finished" for trial in cell.trials)
        return f"{over}/{len(cell.trials)}" if over < len(cell.trials) else "[green]done[/]" if over else ""

    def _text(self, cell: Cell | None) -> str:
        if cell is None:
            return ""
        follower = self._runs[cell.path]
        if follower.state == "finished":
            return f"[green]{follower.mean:.4f}[/]"
        if follower.state == "failed":
            return "[red]failed[/]"
        if follower.state == "waiting":
            return "[dim]·[/]"
        style = "yellow" if follower.state == "running" else "dim"
        return f"[{style}]{follower.round}/{follower.rounds}[/]"


@contextmanager
def watching(cells: Sequence[Cell], folder: Path, shown: bool) -> Iterator[Watch | None]:
    """Shows how far the cells are while the block lasts."""
    if not shown:
        yield None
        return
    live = Live(console=err, refresh_per_second=4, transient=True) if err.is_terminal else None
    watch = Watch(cells, folder, live)
    if live is None:
        watch.begin()
        yield watch
        return
    with live:
        watch.begin()
        yield watch


def _short(seconds: float) -> str:
    """A time in hours and minutes.

    >>> _short(40), _short(250), _short(9000)
    ('40 s', '4 min', '2 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
