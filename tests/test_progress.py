"""How far a run is: shown where somebody looks, and nowhere else."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import small
from anysize.runs import progress


def ignored(event: dict[str, Any]) -> None:
    """Whoever listens and shows nothing."""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal shows."""
    written = io.StringIO()
    monkeypatch.setattr(progress, "err", Console(file=written, force_terminal=True, width=120))
    return written


def test_a_run_in_a_script_shows_nothing_unless_asked_and_then_a_line_for_each_evaluation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    experiment = small.experiment(rounds=2, evaluate_every=1, method={"name": "heterofl"})  # which has no notices
    experiment.run(tmp_path / "quiet")
    assert capfd.readouterr() == ("", "")
    heard: list[str] = []
    made = experiment.run(tmp_path / "shown", progress=True, on_event=lambda event: heard.append(event["event"]))
    out, err = capfd.readouterr()
    accuracies = [event["accuracy"] for event in made.history]
    lines = [f"round {n}: accuracy 0.5: {a['0.5']:.3f}  1.0: {a['1.0']:.3f}" for n, a in enumerate(accuracies, 1)]
    assert (out, err.splitlines()) == ("", lines)
    assert [kind for kind in heard if kind != "client"] == ["start", "round", "round", "end"]


def test_a_terminal_shows_a_bar_unless_not_wanted_or_somebody_listens(tmp_path: Path, terminal: io.StringIO) -> None:
    experiment = small.experiment(rounds=2)
    experiment.run(tmp_path / "run", progress=False)
    experiment.run(tmp_path / "run", overwrite=True, on_event=ignored)
    assert terminal.getvalue() == ""
    experiment.run(tmp_path / "run", overwrite=True)
    assert "2/2" in terminal.getvalue()


def test_a_terminal_of_80_columns_shows_every_evaluation_whole_and_the_bar_below(
    tmp_path: Path, terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "err", Console(file=terminal, force_terminal=True, width=80, highlight=False))
    run = small.experiment(rounds=2, evaluate_every=1).run(tmp_path / "run")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n").splitlines()
    for number, event in enumerate(run.history, 1):
        assert f"round {number}: accuracy {progress.by_size(event['accuracy'])}" in [line.rstrip() for line in shown]
    assert any(line.startswith("round 2/2 ") and " left " in line for line in shown)
