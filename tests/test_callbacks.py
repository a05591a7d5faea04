"""Callbacks: what they see, how they stop a run, which round they keep, and what trackers are told."""

from __future__ import annotations

import csv
import inspect
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import anysize as az
import small
from anysize.callbacks import Callback, EarlyStopping, Evaluation, KeepBest, RunView, Wishes
from anysize.callbacks.tracking import Tracker
from anysize.comparisons.outcomes import is_finished
from anysize.errors import AnysizeError, CheckpointError, ConfigError
from anysize.experiment.brief import Brief
from anysize.records import checkpoint as checkpoints
from anysize.records.events import read_events, status
from anysize.report import write as write_report
from anysize.tasks import Classification
from anysize.wire import flatten

JUDGED: dict[str, Any] = {"evaluation": {"on": ["test", "clients"]}}


class KilledError(BaseException):
    """Nothing catches this, as nothing catches a kill."""


@dataclass
class Listener(Callback):
    """Notes what it is told, and asks for what it is made with."""

    stop_at: int | None = None
    keep_at: int | None = None
    heard: list[tuple[str, RunView]] = field(default_factory=list)

    def on_start(self, run: RunView) -> None:
        self.heard.append(("start", run))

    def on_round(self, run: RunView) -> None:
        self.heard.append(("round", run))
        if run.round == self.stop_at:
            run.stop("I have\nseen enough")
        if run.round == self.keep_at:
            run.keep("I like it")

    def on_evaluation(self, run: RunView) -> None:
        self.heard.append(("evaluation", run))

    def on_end(self, run: RunView) -> None:
        self.heard.append(("end", run))

    @property
    def moments(self) -> list[tuple[str, int]]:
        return [(moment, run.round) for moment, run in self.heard]


@dataclass(frozen=True)
class Downhill(Classification):
    """The metric that falls while the network learns counts as better, so that an early round is the best."""

    higher_is_better = False


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(directory / "events.jsonl") if event["event"] == kind]


def held_out_means(directory: Path) -> dict[int, float]:
    """By round the mean accuracy over all clients, from the lines of clients.csv."""
    rows = list(csv.DictReader((directory / "clients.csv").open()))
    by_round: dict[int, list[float]] = {}
    for row in rows:
        by_round.setdefault(int(row["round"]), []).append(float(row["accuracy"]))
    return {number: sum(values) / len(values) for number, values in by_round.items()}


# What a callback sees


def test_a_callback_is_called_at_every_moment_with_the_metrics_of_every_size(tmp_path: Path) -> None:
    listener = Listener()
    run = small.experiment(evaluate_every=2, **JUDGED).run(tmp_path / "run", callbacks=[listener])
    assert listener.moments == [
        ("start", 0), ("round", 1), ("round", 2), ("evaluation", 2), ("round", 3), ("evaluation", 3), ("end", 3)
    ]  # fmt: skip
    view = listener.heard[3][1]
    (evaluation,) = view.evaluations
    assert evaluation.test == run.history[1]["metrics"]
    assert set(evaluation.held_out) == {"0.5", "1.0"}
    assert evaluation.held_out_mean == pytest.approx(held_out_means(run.directory)[2])
    assert (view.metric, view.higher_is_better, view.config.rounds) == ("accuracy", True, 3)
    assert view.event["clients"] == run.history[1]["clients"]
    assert len({view.id for _, view in listener.heard}) == 1


def test_what_a_callback_does_to_its_view_changes_nothing(tmp_path: Path) -> None:
    class Vandal(Callback):
        def on_round(self, run: RunView) -> None:
            run.event["clients"].clear()
            for evaluation in run.evaluations:
                evaluation.held_out.clear()  # type: ignore[attr-defined]
            with pytest.raises(AttributeError):
                run.round = 7  # type: ignore[misc]

    listener = Listener()
    run = small.experiment(rounds=1, evaluate_every=1, **JUDGED).run(tmp_path / "run", callbacks=[Vandal(), listener])
    assert set(listener.heard[-1][1].evaluations[0].held_out) == {"0.5", "1.0"}
    assert len(run.history[0]["clients"]) == len(listener.heard[1][1].event["clients"]) == 6


def test_whatever_is_no_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"derived from anysize\.callbacks\.Callback"):
        small.experiment().run(tmp_path / "run", callbacks=[Listener])  # type: ignore[list-item]
    assert not (tmp_path / "run").exists()


def test_callbacks_of_the_file_are_found_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hooks_of_mine.py").write_text(
        "from anysize.callbacks import Callback\n"
        "class Enough(Callback):\n"
        "    def on_round(self, run):\n"
        "        run.stop('enough')\n"
        "enough, number = Enough(), 3\n"
    )
    for name in ("Enough", "enough"):
        file = small.file(tmp_path, callbacks={"own": [f"hooks_of_mine:{name}"]})
        assert az.run(file, out=tmp_path / name).round == 1
    with pytest.raises(ConfigError, match=r"'hooks_of_mine:number' is a int"):
        az.run(small.file(tmp_path, callbacks={"own": ["hooks_of_mine:number"]}), out=tmp_path / "no")
    (tmp_path / "broken_hooks.py").write_text("\nraise ValueError('no camera')\n")
    with pytest.raises(ConfigError, match=r"'broken_hooks:x': ValueError: no camera \(.*broken_hooks.py, line 2\)"):
        az.run(small.file(tmp_path, callbacks={"own": ["broken_hooks:x"]}), out=tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_a_failing_callback_is_named_with_its_line_and_its_round_is_saved(tmp_path: Path) -> None:
    class Failing(Callback):
        def on_round(self, run: RunView) -> None:
            if run.round == 2:
                raise ValueError("disk is full")  # the line that the error names

    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "disk is full" in text)
    experiment = small.experiment(checkpoint_every=3)
    with pytest.raises(AnysizeError) as error:
        experiment.run(tmp_path / "run", callbacks=[Failing()])
    assert "your callback Failing, on_round, after round 2: ValueError: disk is full" in str(error.value)
    assert f"({__file__}, line {line})" in str(error.value)
    assert isinstance(error.value.__cause__, ValueError)
    assert checkpoints.round_of(tmp_path / "run") == 2
    resumed = experiment.run(tmp_path / "run", resume=True)
    assert [event["round"] for event in resumed.history] == [1, 2, 3]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("not even this")


@pytest.mark.parametrize(
    "error, said",
    [(ConfigError("no licence"), "ConfigError: no licence"), (Unspeakable(), "Unspeakable: .its text cannot be read.")],
)
def test_an_error_of_any_kind_names_the_callback_that_raised_it(tmp_path: Path, error: Exception, said: str) -> None:
    class Failing(Callback):
        def on_round(self, run: RunView) -> None:
            raise error

    class Strict(Callback):
        def check(self, config: Any) -> None:
            raise error

    with pytest.raises(AnysizeError, match=f"your callback Failing, on_round, after round 1: {said}"):
        small.experiment(rounds=1).run(tmp_path / "run", callbacks=[Failing()])
    with pytest.raises(ConfigError, match=f"your callback Strict, check: {said}"):
        small.experiment(rounds=1).run(tmp_path / "other", callbacks=[Strict()])


def test_keeping_a_round_when_the_run_has_ended_is_refused_by_name(tmp_path: Path) -> None:
    class Late(Callback):
        def on_end(self, run: RunView) -> None:
            run.keep("the last one")

    with pytest.raises(AnysizeError, match=r"your callback Late, on_end.*keep\(\) in on_end comes too late"):
        small.experiment(rounds=1).run(tmp_path / "run", callbacks=[Late()])


def test_a_tracker_of_ones_own_needs_no_package(tmp_path: Path) -> None:
    class Printer(Tracker):
        def open(self, run: RunView) -> None:
            self.seen: list[int] = []

        def log(self, values: Any, round: int) -> None:
            self.seen.append(round)

        def close(self) -> None:
            self.closed = True

    printer = Printer()
    small.experiment(rounds=1).run(tmp_path / "run", callbacks=[printer])
    assert (printer.seen, printer.closed) == ([1, 1], True)


# Stopping


class Leaving(Callback):
    def on_round(self, run: RunView) -> None:
        sys.exit(0)


class Wrong(Callback):
    def check(self, config: Any) -> None:
        raise ZeroDivisionError("no")


def test_a_callback_that_ends_the_process_is_named_and_its_round_is_saved(tmp_path: Path) -> None:
    with pytest.raises(AnysizeError, match="your callback Leaving, on_round, after round 1: SystemExit"):
        small.experiment().run(tmp_path / "run", callbacks=[Leaving()])
    assert az.load(tmp_path / "run").round == 1


def test_callbacks_may_come_from_an_iterator_and_one_alone_is_refused(tmp_path: Path) -> None:
    listener = Listener(stop_at=1)
    assert small.experiment().run(tmp_path / "run", callbacks=iter([listener])).round == 1  # type: ignore[arg-type]
    for wrong in (listener, None):
        with pytest.raises(ConfigError, match="give a list of callbacks"):
            small.experiment().run(tmp_path / "other", callbacks=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="your callback Wrong, check: ZeroDivisionError: no"):
        small.experiment().run(tmp_path / "other", callbacks=[Wrong()])
    assert not (tmp_path / "other").exists()


def test_a_wrong_folder_of_a_tracker_is_found_before_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    run = small.experiment(rounds=1).run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    for folder in (5, "", str(tmp_path / "file")):
        track = {"name": "tensorboard", "options": {"folder": folder}}
        with pytest.raises(ConfigError, match=r"track\.options\.folder"):
            small.experiment(rounds=1, track=track).run(tmp_path / "run", overwrite=True)
    assert az.load(run.directory).round == 1


def test_a_run_whose_start_was_not_written_whole_is_resumed_with_a_new_one(tmp_path: Path) -> None:
    run = small.experiment(rounds=1).run(tmp_path / "run")
    events = run.directory / "events.jsonl"
    events.write_bytes(events.read_bytes()[:40])
    again = small.experiment(rounds=2, **JUDGED).run(run.directory, resume=True, callbacks=[KeepBest()])
    assert next(event["event"] for event in read_events(events)) == "start"
    assert again.round == 2
    assert "Plot" in repr(again.plot())


def test_a_damaged_best_round_says_that_the_run_itself_is_intact(tmp_path: Path) -> None:
    run = small.experiment(rounds=1, **JUDGED).run(tmp_path / "run", callbacks=[KeepBest()])
    best = run.directory / checkpoints.BEST
    best.write_bytes(best.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"delete best\.safetensors to go on without it"):
        small.experiment(rounds=2, **JUDGED).run(run.directory, resume=True, callbacks=[KeepBest()])
    best.unlink()
    assert small.experiment(rounds=2, **JUDGED).run(run.directory, resume=True, callbacks=[KeepBest()]).round == 2


def test_reasons_are_printable(tmp_path: Path) -> None:
    wishes = Wishes(round=1)
    view = RunView("id", tmp_path, small.config(), "accuracy", True, 1, {}, (), None, None, wishes)
    view.stop("\ud800 \x1b[31mred")
    assert wishes.stop == "[31mred"
    for ask in (view.stop, view.keep):
        with pytest.raises(AnysizeError, match="give the reason as text"):
            ask(None)  # type: ignore[arg-type]


def test_a_stopped_run_is_a_finished_run_that_says_why(tmp_path: Path) -> None:
    listener = Listener(stop_at=2)
    run = small.experiment(rounds=9, evaluate_every=5).run(tmp_path / "run", callbacks=[listener])
    assert listener.moments[-2:] == [("evaluation", 2), ("end", 2)]
    assert listener.heard[-1][1].stopped == "I have seen enough"
    assert events(run.directory, "end")[-1]["stopped"] == "I have seen enough"
    assert [event["round"] for event in run.history] == [1, 2]
    assert set(run.history[-1]["accuracy"]) == {"0.5", "1.0"}, "its last round is evaluated, due or not"
    assert run.round == checkpoints.round_of(run.directory) == 2
    found = status(run.directory)
    assert (found["state"], found["stopped"], found["round"], found["rounds"]) == (
        "finished",
        "I have seen enough",
        2,
        9,
    )
    assert is_finished(run.directory, 9)
    assert "stopped" in write_report(run.directory).read_text()
    assert sum(p.numel() for p in run.customize(0.5).parameters()) < sum(
        p.numel() for p in run.customize().parameters()
    )


def test_a_stopped_run_goes_on_when_nobody_stops_it_and_equals_one_that_was_never_stopped(tmp_path: Path) -> None:
    experiment = small.experiment(evaluate_every=2)
    experiment.run(tmp_path / "run", callbacks=[Listener(stop_at=1)])
    experiment.run(tmp_path / "run", resume=True)
    whole = experiment.run(tmp_path / "whole")
    assert (tmp_path / "run/state.safetensors").read_bytes() == (whole.directory / "state.safetensors").read_bytes()
    assert "stopped" not in events(tmp_path / "run", "end")[-1]


def test_stopping_in_the_last_round_or_before_the_first_is_possible(tmp_path: Path) -> None:
    class Never(Callback):
        def on_start(self, run: RunView) -> None:
            run.stop("not today")

    run = small.experiment(rounds=2).run(tmp_path / "last", callbacks=[Listener(stop_at=2)])
    assert "stopped" not in events(run.directory, "end")[-1], "it has done all its rounds"
    run = small.experiment(rounds=2).run(tmp_path / "first", callbacks=[Never()])
    assert (run.round, run.history, events(run.directory, "end")[-1]["stopped"]) == (0, [], "not today")


def test_a_method_that_finishes_its_state_does_so_when_it_is_stopped_and_in_what_is_kept(tmp_path: Path) -> None:
    tables = {"method": {"name": "splitmix", "sort_bases": True}, "devices": {"capacities": [0.5, 1.0]}}
    short = small.experiment(rounds=2, **tables).run(tmp_path / "short")
    stopped = small.experiment(rounds=9, **tables).run(tmp_path / "run", callbacks=[Listener(stop_at=2, keep_at=2)])
    assert stopped.state.order == short.state.order == az.load(stopped.directory, best=True).state.order
    assert (stopped.directory / "state.safetensors").read_bytes() == (
        short.directory / "state.safetensors"
    ).read_bytes()


# Early stopping


def view(
    scores: Sequence[float | None], higher_is_better: bool = True, kept: int | None = None
) -> tuple[RunView, Wishes]:
    """A run with these means on held-out data, one a round; None: nobody answered."""
    wishes = Wishes(round=len(scores))
    evaluations = tuple(
        Evaluation(n, held_out={} if s is None else {"1.0": s}, held_out_mean=math.nan if s is None else s)
        for n, s in enumerate(scores, 1)
    )
    config = small.config()
    made = RunView("id", Path(), config, "accuracy", higher_is_better, len(scores), {}, evaluations, kept, None, wishes)
    return made, wishes


@pytest.mark.parametrize(
    "scores, options, higher_is_better, stops",
    [
        ([0.5, 0.6, 0.6], {"patience": 1}, True, True),
        ([0.5, 0.6, 0.6], {"patience": 2}, True, False),
        ([0.5, 0.4, 0.6, 0.5], {"patience": 2}, True, False),
        ([0.6, 0.5, 0.55, 0.61], {"patience": 2}, True, False),
        ([0.5, 0.505, 0.51], {"patience": 2, "min_delta": 0.02}, True, True),
        ([0.5, 0.505, 0.53], {"patience": 2, "min_delta": 0.02}, True, False),
        ([9.0, 8.0, 7.0], {"patience": 1}, False, False),
        ([7.0, 8.0], {"patience": 1}, False, True),
        ([0.5, None, None], {"patience": 1}, True, False),
        ([0.5, math.nan], {"patience": 1}, True, True),
        ([math.nan, 0.1], {"patience": 1}, True, False),
        ([], {"patience": 1}, True, False),
    ],
)
def test_early_stopping_counts_evaluations_since_the_best(
    scores: list[float | None], options: dict[str, Any], higher_is_better: bool, stops: bool
) -> None:
    run, wishes = view(scores, higher_is_better)
    EarlyStopping(**options).on_evaluation(run)
    assert (wishes.stop is not None) == stops


def test_a_killed_run_stops_early_where_an_undisturbed_one_does_and_a_resumed_one_stays_stopped(tmp_path: Path) -> None:
    # Nothing is better by more than 1, so the first evaluation stays the best.
    experiment = small.experiment(rounds=9, callbacks={"patience": 2, "min_delta": 1.0}, **JUDGED)

    def kill(event: dict[str, Any]) -> None:
        if event["event"] == "client" and event["round"] == 3:
            raise KilledError

    with pytest.raises(KilledError):
        experiment.run(tmp_path / "run", on_event=kill)
    for _ in range(2):
        run = experiment.run(tmp_path / "run", resume=True)
        assert run.round == 3
        assert "no better than round 1, with accuracy" in events(run.directory, "end")[-1]["stopped"]
    longer = small.experiment(rounds=4, callbacks={"patience": 9, "min_delta": 1.0}, **JUDGED)
    assert longer.run(tmp_path / "run", resume=True).round == 4


@pytest.mark.parametrize("callbacks", [{"patience": 2}, {"keep_best": True}])
def test_nothing_is_chosen_on_test_data(tmp_path: Path, callbacks: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r'add "clients" to evaluation\.on'):
        small.experiment(callbacks=callbacks).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_senseless_patience_is_refused() -> None:
    with pytest.raises(ConfigError, match="patience must be a whole number, 1 or more"):
        EarlyStopping(patience=0)
    with pytest.raises(ConfigError, match=r"callbacks\.min_delta: given without callbacks\.patience"):
        small.config(callbacks={"min_delta": 0.1})


# The best round


def test_the_best_round_on_held_out_data_is_kept_with_the_bits_of_a_run_that_ended_there(tmp_path: Path) -> None:
    tables: dict[str, Any] = {"callbacks": {"keep_best": True}, **JUDGED}
    run = az.Experiment.from_config(small.config(**tables), task=Downhill()).run(tmp_path / "run")
    means = held_out_means(run.directory)
    best = min(means, key=lambda number: (means[number], number))
    assert best < 3, "otherwise this shows nothing"
    kept = az.load(run.directory, best=True, task=Downhill())
    assert (kept.round, run.round, status(run.directory)["best"]) == (best, 3, best)
    until = az.Experiment.from_config(small.config(rounds=best, **tables), task=Downhill()).run(tmp_path / "short")
    assert (run.directory / "best.safetensors").read_bytes() == (until.directory / "state.safetensors").read_bytes()
    assert kept.evaluate() == run.history[best - 1]["metrics"]


def test_a_run_killed_before_its_best_round_is_written_ends_with_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = small.experiment(checkpoint_every=3, callbacks={"keep_best": True}, **JUDGED)
    whole = experiment.run(tmp_path / "whole")
    kept, count = checkpoints.keep, len(events(whole.directory, "kept"))
    assert count >= 2, "otherwise this shows nothing"
    for number in range(count):
        left = iter([None] * number)

        def killing(*arguments: Any, left: Any = left) -> None:
            for _ in left:
                kept(*arguments)
                return
            raise KilledError

        directory = tmp_path / f"run-{number}"
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "keep", killing)
            with pytest.raises(KilledError):
                experiment.run(directory)
        experiment.run(directory, resume=True)
        for name in ("best.safetensors", "state.safetensors"):
            assert (directory / name).read_bytes() == (whole.directory / name).read_bytes()


def test_tensors_that_clients_keep_stay_as_long_as_the_best_round_names_them(tmp_path: Path) -> None:
    tables = {"model": {"name": "small-cnn", "options": {"channels": [4, 8]}}, "tricks": {"batch_norm": "local"}}
    run = small.experiment(method={"name": "heterofl"}, **tables).run(tmp_path / "run", callbacks=[Listener(keep_at=1)])
    files = {path.name for path in (run.directory / "kept").iterdir()}
    assert files == {f"{client}-{turn}.safetensors" for client in range(6) for turn in (1, 3)}
    like = run.experiment.method.init(run.experiment.context)
    best = checkpoints.restore_from(run.directory, like, checkpoints.BEST)
    assert (best.round, set(best.turns.values())) == (1, {1})


def test_a_round_can_be_kept_only_while_it_is_the_last(tmp_path: Path) -> None:
    listener = Listener(keep_at=1)
    run = small.experiment(rounds=2).run(tmp_path / "run", callbacks=[listener])
    with pytest.raises(AnysizeError, match=r"keep\(\) of round 1 comes too late"):
        listener.heard[1][1].keep("now")
    assert [event["why"] for event in events(run.directory, "kept")] == ["I like it"]


def test_a_run_without_a_best_round_says_how_to_get_one(tmp_path: Path) -> None:
    run = small.experiment(rounds=1).run(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"has no best round .*callbacks\.keep_best = true"):
        az.load(run.directory, best=True)


def test_overwriting_a_run_removes_its_best_round(tmp_path: Path) -> None:
    small.experiment(rounds=1).run(tmp_path / "run", callbacks=[Listener(keep_at=1)])
    small.experiment(rounds=1).run(tmp_path / "run", overwrite=True)
    assert not (tmp_path / "run/best.safetensors").exists()


def test_the_command_line_takes_the_best_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small.experiment(rounds=2).run(tmp_path / "run", callbacks=[Listener(keep_at=1)])
    found = {}
    for flags in ((), ("--best",)):
        code, out, _ = small.call(monkeypatch, capsys, "evaluate", run.directory, "--json", *flags)
        assert code == 0
        found[flags] = json.loads(out)["accuracy"]
    assert found == {(): run.history[1]["accuracy"], ("--best",): run.history[0]["accuracy"]}
    to = tmp_path / "net.safetensors"
    code, out, _ = small.call(monkeypatch, capsys, "customize", run.directory, "--best", "--size", "0.5", "--to", to)
    assert (code, "the best round on held-out data: 1" in out) == (0, True)
    assert "best round, which --best takes: 1" in small.call(monkeypatch, capsys, "status", run.directory)[1]


def test_the_best_of_a_run_is_the_first_of_equals() -> None:
    run, wishes = view([0.5, 0.7, 0.7, math.nan])
    assert run.best is not None
    assert run.best.round == 2
    KeepBest().on_evaluation(run)
    assert wishes.keep is None
    for kept, wanted in ((1, True), (2, False)):
        run, wishes = view([0.5, 0.7], kept=kept)
        KeepBest().on_evaluation(run)
        assert (wishes.keep is not None) == wanted
    assert view([None, None])[0].best is None


# What others know of it


def test_callbacks_do_not_change_what_is_learned(tmp_path: Path) -> None:
    plain = small.experiment(**JUDGED).run(tmp_path / "plain")
    tables = {"callbacks": {"keep_best": True, "patience": 9}}
    watched = small.experiment(**JUDGED, **tables).run(tmp_path / "watched", callbacks=[Listener()])
    same, other = flatten(plain.state)[0], flatten(watched.state)[0]
    assert all(torch.equal(same[name], other[name]) for name in same)


def test_workers_and_devices_are_not_told_of_callbacks() -> None:
    tables = {"callbacks": {"own": ["mine:Callback"]}, "track": {"name": "wandb"}}
    told = Brief.of(small.experiment(**tables)).config
    assert (told.callbacks.own, told.track.name) == ((), "none")


# Trackers


def tracked(directory: Path, name: str, **options: Any) -> tuple[az.Run, dict[str, dict[int, float]]]:
    """A run of three rounds, killed in the third and resumed, and what a tracker must know of it."""
    tables = {"evaluate_every": 2, "track": {"name": name, "options": options}, **JUDGED}

    def kill(event: dict[str, Any]) -> None:
        if event["event"] == "client" and event["round"] == 3:
            raise KilledError

    with pytest.raises(KilledError):
        small.experiment(**tables).run(directory, on_event=kill)
    run = small.experiment(**tables).run(directory, resume=True)
    means = held_out_means(directory)
    wanted = {"train_loss": {event["round"]: event["train_loss"] for event in run.history}}
    evaluated = {event["round"]: event for event in run.history if "accuracy" in event}
    assert sorted(evaluated) == [2, 3]
    wanted["held_out/accuracy/mean"] = means
    for size in ("0.5", "1.0"):
        wanted[f"test/accuracy/{size}"] = {number: event["accuracy"][size] for number, event in evaluated.items()}
    return run, wanted


def test_tensorboard_reads_what_a_run_measured(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, wanted = tracked(tmp_path / "run", "tensorboard")
    reader: Any = EventAccumulator(str(run.directory / "tensorboard")).Reload()
    for name, values in wanted.items():
        read = [(point.step, point.value) for point in reader.Scalars(name)]
        assert read == [(step, pytest.approx(value, rel=1e-6)) for step, value in sorted(values.items())], name
    (text,) = reader.Tensors("experiment/text_summary")
    assert b'name = "flanc"' in text.tensor_proto.string_val[0]


@pytest.mark.slow
def test_mlflow_keeps_what_a_run_measured_in_its_file_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask for it
    store = (tmp_path / "store").as_uri()
    _, wanted = tracked(tmp_path / "run", "mlflow", tracking_uri=store, experiment="mine")
    client: Any = MlflowClient(store)
    (entry,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])  # resumed, it is still one
    assert entry.info.status == "FINISHED"
    assert entry.data.params["method.name"] == "flanc"
    for name, values in wanted.items():
        read = {metric.step: metric.value for metric in client.get_metric_history(entry.info.run_id, name)}
        assert read == pytest.approx(values), name


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """The records of a log of LevelDB, after W&B's header of seven bytes: blocks of 32 KiB hold parts of records."""
    place, whole = 7, b""
    while place + 7 <= len(log):
        if 32768 - place % 32768 < 7:  # too little for a part: filled with zeros
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(log[place + 4 : place + 6], "little"), log[place + 6]
        whole += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


@pytest.mark.slow
def test_weights_and_biases_writes_a_run_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    run, wanted = tracked(tmp_path / "run", "wandb", mode="offline")
    found: dict[str, dict[int, float]] = {}
    ids = set()
    for path in sorted((run.directory / "wandb").glob("offline-run-*/*.wandb")):
        for data in leveldb_records(path.read_bytes()):
            record: Any = wandb_internal_pb2.Record.FromString(data)
            ids |= {record.run.run_id} - {""}
            values = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            for name, value in values.items():
                found.setdefault(name, {})[values["_step"]] = value
    assert len(ids) == 1, "a resumed run is the same run"
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values), name


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anysize.config.extras.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs mlflow, not installed: pip install"):
        small.experiment(track={"name": "mlflow"}).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_options_of_no_tracker_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"track\.options: given without track\.name"):
        small.config(track={"options": {"folder": "x"}})


def test_unknown_options_of_a_tracker_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"track\.options: .*'colour'; 'wandb' knows: project, entity, mode"):
        small.experiment(track={"name": "wandb", "options": {"colour": 1}}).run(tmp_path / "run")


def test_no_tracker_is_imported_unless_asked_for() -> None:
    code = (
        "import sys, anysize.callbacks\n"
        "assert not {'torch', 'tensorboard', 'mlflow', 'wandb', 'pandas'} & set(sys.modules), sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


class Late(Callback):
    async def on_round(self, run: RunView) -> None:  # type: ignore[override]
        run.stop("never said")


class Deaf(Callback):
    def on_evaluation(self) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    "callback, words",
    [
        (Late(), "your callback Late: on_round is 'async def'"),
        (Deaf(), "your callback Deaf: on_evaluation is called with one argument, the run"),
    ],
)
def test_a_callback_that_cannot_be_called_is_refused_before_the_run(
    tmp_path: Path, callback: Callback, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        small.experiment(rounds=1).run(tmp_path / "run", callbacks=[callback])
    assert not (tmp_path / "run").exists()


def test_a_callback_may_be_a_function_in_c_that_does_not_tell_its_arguments(tmp_path: Path) -> None:
    callback = Callback()
    callback.on_round = bool  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(bool)
    assert small.experiment(rounds=1).run(tmp_path / "run", callbacks=[callback]).round == 1


@pytest.mark.parametrize("options", [{"patience": 1.5}, {"patience": "3"}, {"patience": 2, "min_delta": "0.1"}])
def test_early_stopping_takes_numbers_alone(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="patience must be a whole number"):
        EarlyStopping(**options)
