"""Where the time of a round goes: stages that nest, events that say so, and nothing where nobody asked."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import small
from anysize.profiling import STAGES, Clock, measuring, stage, staged
from anysize.records.events import read_events
from anysize.report import write


def test_time_counts_for_the_innermost_stage() -> None:
    clock = Clock()
    with measuring(clock), stage("aggregate"):
        time.sleep(0.02)
        with stage("svd"):
            time.sleep(0.05)
        time.sleep(0.02)
    spent = clock.take()
    assert 0.05 <= spent["svd"] < 0.2
    assert 0.04 <= spent["aggregate"] < 0.2
    assert clock.take()["aggregate"] == 0.0


def test_all_time_is_some_stages() -> None:
    clock = Clock()
    began = time.perf_counter()
    with measuring(clock):
        for _ in staged("train", range(3)):
            time.sleep(0.01)
    spent = clock.take()
    assert sum(spent.values()) == pytest.approx(time.perf_counter() - began, abs=0.01)
    assert spent["other"] >= 0.03


def test_a_stage_outside_a_profiled_run_does_nothing() -> None:
    assert stage("svd") is stage("train")
    clock = Clock()
    with measuring(clock), measuring(None), stage("svd"):
        pass
    assert "svd" not in clock.take()


@pytest.mark.parametrize("engine", ["inprocess", "processes"])
def test_a_profiled_run_says_where_every_round_went(engine: str, tmp_path: Path) -> None:
    made = small.experiment(rounds=2, evaluate_every=2, engine={"name": engine})
    run = made.run(tmp_path / "run", profile=True)
    first, second = run.history
    for event in (first, second):
        assert set(STAGES) | {"other"} == set(event["profile"])
        assert event["profile"]["train"] > 0
        assert sum(event["profile"].values()) >= event["seconds"] * 0.9
    assert first["profile"]["evaluate"] == 0.0 < second["profile"]["evaluate"]
    assert second["profile"]["checkpoint"] > 0
    end = read_events(tmp_path / "run" / "events.jsonl")[-1]
    assert end["event"] == "end"
    assert end["profile"]["checkpoint"] > 0


def test_the_report_shows_the_stages_of_a_profiled_run_and_of_no_other(tmp_path: Path) -> None:
    run = small.experiment(rounds=2, engine={"name": "inprocess"}).run(tmp_path / "profiled", profile=True)
    page = write(run.directory).read_text()
    assert "Where the time went" in page
    lines = (run.directory / "report" / "profile-rounds.csv").read_text().splitlines()
    assert lines[0] == "round,stage,seconds"
    assert len(lines) == 1 + 2 * 7
    stages = (run.directory / "report" / "profile.csv").read_text().splitlines()
    assert stages[1].startswith("extract,")
    shares = [float(line.split(",")[-1]) for line in stages[1:]]
    assert sum(shares) == pytest.approx(1.0)
    plain = small.experiment(rounds=2, engine={"name": "inprocess"}).run(tmp_path / "plain")
    assert all("profile" not in event for event in read_events(plain.directory / "events.jsonl"))
    assert "Where the time went" not in write(plain.directory).read_text()
