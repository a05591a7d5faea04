"""A killed run goes on to the end that it would have had, bit for bit, wherever it was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import anysize as az
import small
from anysize import atomic, wire
from anysize.errors import CheckpointError
from anysize.records import checkpoint as checkpoints
from anysize.runs.runner import environment

ROUNDS = 4
ENDLESS = 1_000_000
Undisturbed = tuple[dict[str, Any], az.Run]


class KilledError(BaseException):
    """Nothing catches this, as nothing catches a kill."""


def changes(**more: Any) -> dict[str, Any]:
    return {"rounds": ROUNDS, "evaluate_every": 2, "evaluation": {"on": ["test", "clients"]}, **more}


def killer(kind: str, number: int) -> Callable[[dict[str, Any]], None]:
    """Kills the run at an event: after a round's second client, or when its event is written but not its state."""

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == kind and event.get("round") == number and event.get("done", 2) == 2:
            raise KilledError

    return on_event


def files(directory: Path) -> dict[str, bytes]:
    """What must not differ between a run that was killed and one that was not."""
    names = ["config.toml", "clients.csv", "state.safetensors"]
    return {name: (directory / name).read_bytes() for name in names} | {
        path.name: path.read_bytes() for path in sorted((directory / "kept").glob("*"))
    }


def numbers(run: az.Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in event.items() if key != "seconds"} for event in run.history]


NORMALISED = {"name": "small-cnn", "options": {"channels": [4, 8]}}
TABLES: dict[str, dict[str, Any]] = {
    "flanc": {},
    "prism, calibrated": {"method": {"name": "prism"}, "model": NORMALISED, "tricks": {"batch_norm": "calibrated"}},
    "heterofl, local norms, server momentum": {
        "method": {"name": "heterofl"},
        "model": NORMALISED,
        "devices": {"clients_per_round": 3},
        "tricks": {"batch_norm": "local", "server_momentum": 0.5},
    },
}


@pytest.fixture(scope="module", params=list(TABLES))
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The tables of an experiment, and its run from beginning to end."""
    tables = changes(**TABLES[request.param])
    return tables, small.experiment(**tables).run(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize(
    "moment", [("start", None), ("client", 1), ("client", 3), ("round", 1), ("round", 2), ("round", 4)]
)
def test_a_run_killed_at_any_moment_ends_in_the_same_bits(
    tmp_path: Path, undisturbed: Undisturbed, moment: tuple[str, int | None]
) -> None:
    tables, whole = undisturbed
    with pytest.raises(KilledError):
        small.experiment(**tables).run(tmp_path / "run", on_event=killer(*moment))
    run = small.experiment(**tables).run(tmp_path / "run", resume=True)
    assert files(run.directory) == files(whole.directory)
    assert numbers(run) == numbers(whole)


def test_a_run_killed_twice_ends_in_the_same_bits(tmp_path: Path, undisturbed: Undisturbed) -> None:
    tables, whole = undisturbed
    for options, moment in (({}, ("round", 2)), ({"resume": True}, ("client", 3))):
        with pytest.raises(KilledError):
            small.experiment(**tables).run(tmp_path / "run", on_event=killer(*moment), **options)
    run = small.experiment(**tables).run(tmp_path / "run", resume=True)
    assert files(run.directory) == files(whole.directory)
    assert numbers(run) == numbers(whole)


@pytest.mark.parametrize("moment", [("client", 2), ("round", 2), ("client", 4), ("round", 3)])
def test_with_fewer_checkpoints_a_killed_run_repeats_rounds_and_ends_in_the_same_bits(
    tmp_path: Path, undisturbed: Undisturbed, moment: tuple[str, int]
) -> None:
    tables, whole = undisturbed
    with pytest.raises(KilledError):
        small.experiment(**tables, checkpoint_every=3).run(tmp_path / "run", on_event=killer(*moment))
    assert checkpoints.round_of(tmp_path / "run") == (3 if moment == ("client", 4) else 0)
    run = small.experiment(**tables, checkpoint_every=1).run(tmp_path / "run", resume=True)
    assert files(run.directory) == files(whole.directory)
    assert numbers(run) == numbers(whole)


def test_a_round_trains_while_the_checkpoint_before_it_is_written_and_is_logged_when_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, log = threading.Event(), list[str]()
    save = checkpoints.save

    def slow(directory: Path, checkpoint: checkpoints.Checkpoint, *more: Any) -> None:
        if checkpoint.round == 1:
            assert trained.wait(60), "the second round waited for the first one's checkpoint"
        save(directory, checkpoint, *more)
        log.append(f"checkpoint {checkpoint.round}")

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "client" and event["round"] == 2:
            trained.set()
        if event["event"] in ("round", "end"):
            log.append(f"{event['event']} {event['round']}")

    monkeypatch.setattr(checkpoints, "save", slow)
    small.experiment(rounds=2).run(tmp_path / "run", on_event=on_event)
    assert log == ["checkpoint 0", "round 1", "checkpoint 1", "round 2", "checkpoint 2", "end 2"]


def test_a_checkpoint_that_could_not_be_written_beside_a_round_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = checkpoints.save

    def full(directory: Path, checkpoint: checkpoints.Checkpoint, *more: Any) -> None:
        if checkpoint.round == 1:
            raise CheckpointError("no space")
        save(directory, checkpoint, *more)

    monkeypatch.setattr(checkpoints, "save", full)
    with pytest.raises(CheckpointError, match="no space"):
        small.experiment(rounds=3).run(tmp_path / "run")
    assert checkpoints.round_of(tmp_path / "run") == 0
    assert (tmp_path / "run/events.jsonl").read_text().count('"event": "round"') == 1


def test_a_torn_last_line_and_half_a_file_are_swept_away(tmp_path: Path, undisturbed: Undisturbed) -> None:
    tables, whole = undisturbed
    with pytest.raises(KilledError):
        small.experiment(**tables).run(tmp_path / "run", on_event=killer("client", 3))
    with (tmp_path / "run/events.jsonl").open("a") as file:
        file.write('{"event": "round", "round": 3, "accu')
    with (tmp_path / "run/clients.csv").open("a") as file:
        file.write("3,0,0.5,0.5,7,0.1")
    (tmp_path / "run/.state.safetensors.abc.part").write_bytes(b"half")
    run = small.experiment(**tables).run(tmp_path / "run", resume=True)
    assert files(run.directory) == files(whole.directory)
    assert numbers(run) == numbers(whole)
    assert not list((tmp_path / "run").glob(".*.part"))


@pytest.mark.parametrize("moment", ["config.toml", "environment.json", "clients.csv", "state.safetensors"])
def test_a_run_killed_while_its_first_files_are_written_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def write(path: Path, blob: bytes) -> None:
        if path.name == moment:
            raise KilledError
        atomic.write(path, blob)

    with monkeypatch.context() as patched:
        patched.setattr("anysize.records.directory.write", write)
        patched.setattr("anysize.records.checkpoint.write", write)
        with pytest.raises(KilledError):
            small.experiment(rounds=1).run(tmp_path / "run")
    events: list[Any] = []
    run = small.experiment(rounds=1).run(tmp_path / "run", resume=True, on_event=events.append)
    assert [event["round"] for event in run.history] == [1]
    assert told_to_begin(events, tmp_path / "run")


def told_to_begin(events: list[Any], directory: Path) -> bool:
    """Whether a notice says that there was nothing to go on with."""
    notices = [event["text"] for event in events if event["event"] == "notice"]
    return notices == [f"nothing was saved in {directory} yet, so the run starts with its first round"]


def leave_nothing(run: Path) -> None: ...


def leave_a_folder(run: Path) -> None:
    run.mkdir()


def leave_half_a_file(run: Path) -> None:
    run.mkdir()
    (run / ".environment.json.x1y2.part").write_text("{")


def leave_the_first_file(run: Path) -> None:
    leave_half_a_file(run)
    (run / "environment.json").write_text(json.dumps(environment()))


@pytest.mark.parametrize("leave", [leave_nothing, leave_a_folder, leave_half_a_file, leave_the_first_file])
@pytest.mark.parametrize("resume", [True, False])
def test_where_nothing_was_saved_yet_a_run_begins(tmp_path: Path, leave: Callable[[Path], None], resume: bool) -> None:
    leave(tmp_path / "run")
    events: list[Any] = []
    run = small.experiment(rounds=1).run(tmp_path / "run", resume=resume, on_event=events.append)
    assert run.round == 1
    assert told_to_begin(events, tmp_path / "run") == resume
    assert not list((tmp_path / "run").glob(".*"))


@pytest.mark.parametrize("name", ["thesis.txt", "config.toml", "environment.json", ".notes.part"])
@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_with_somebodys_files_is_left_alone(tmp_path: Path, name: str, resume: bool) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text('{"mine": 1}')
    with pytest.raises(CheckpointError, match="holds files that are not a run's"):
        small.experiment(rounds=1).run(tmp_path / "run", resume=resume)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [name]
    assert (tmp_path / "run" / name).read_text() == '{"mine": 1}'


def test_tensors_that_clients_keep_come_back(tmp_path: Path) -> None:
    model = {"name": "small-cnn", "options": {"channels": [4, 8]}}
    run = small.experiment(model=model, tricks={"batch_norm": "local"}, rounds=2).run(tmp_path / "run")
    method, context = run.experiment.method, run.experiment.context
    restored = checkpoints.restore_from(tmp_path / "run", method.init(context))
    assert set(restored.kept) == set(restored.turns) == set(range(6))
    assert all("running_mean" in " ".join(tensors) for tensors in restored.kept.values())
    (tmp_path / "run/kept/3-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"3-2.safetensors, which the checkpoint needs, is missing"):
        az.load(tmp_path / "run")


def test_a_finished_run_goes_on_to_more_rounds_and_equals_one_long_run(tmp_path: Path) -> None:
    small.experiment(rounds=2).run(tmp_path / "short")
    longer = small.experiment(rounds=4).run(tmp_path / "short", resume=True)
    whole = small.experiment(rounds=4).run(tmp_path / "long")
    assert files(longer.directory) == files(whole.directory)
    assert longer.config.rounds == 4
    again = small.experiment(rounds=4).run(tmp_path / "short", resume=True)
    assert files(again.directory) == files(whole.directory)
    with pytest.raises(CheckpointError, match=r"has finished 4 rounds already, and rounds = 3"):
        small.experiment(rounds=3).run(tmp_path / "short", resume=True)


def test_a_resumed_run_may_change_rounds_engine_and_evaluation_only(tmp_path: Path) -> None:
    small.experiment(rounds=1).run(tmp_path / "run")
    small.experiment(rounds=2, evaluate_every=5, evaluation={"batch_size": 7}).run(tmp_path / "run", resume=True)
    before = files(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"another experiment") as error:
        small.experiment(rounds=3, seed=1, training={"learning_rate": 0.5}).run(tmp_path / "run", resume=True)
    for line in ("seed: 0 -> 1", "training.learning_rate: 0.05 -> 0.5", "rounds: 2 -> 3"):
        assert line in str(error.value)
    assert files(tmp_path / "run") == before


def test_a_resumed_run_refuses_other_data(tmp_path: Path) -> None:
    import numpy as np

    def experiment(shift: float) -> az.Experiment:
        x = np.random.default_rng(0).random((30, 4), dtype=np.float32) + np.float32(shift)
        data = az.Data(train=(x, np.arange(30) % 3), test=(x, np.arange(30) % 3))
        return az.Experiment(data=data, model="mlp", method="fedavg", clients=4, rounds=1)

    experiment(0.0).run(tmp_path / "run")
    with pytest.raises(CheckpointError, match="the data is not what the run"):
        experiment(1.0).run(tmp_path / "run", resume=True)
    experiment(0.0).run(tmp_path / "run", resume=True)


def damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    turned = bytearray(whole)
    turned[-50] ^= 1
    contents = {
        "cut short": whole[: len(whole) // 2],
        "empty": b"",
        "foreign": wire.dump({}, {"hello": 1}),
        "not ours": b"PK\x03\x04 something else entirely",
        "one bit turned": bytes(turned),
    }
    path.write_bytes(contents[how])


@pytest.mark.parametrize("how", ["cut short", "empty", "foreign", "not ours", "one bit turned"])
def test_a_damaged_checkpoint_is_refused_and_left_as_it_is(tmp_path: Path, how: str) -> None:
    small.experiment(rounds=1).run(tmp_path / "run")
    damage(tmp_path / "run/state.safetensors", how)
    before = files(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"state.safetensors is damaged.*overwrite=True"):
        az.load(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"state.safetensors is damaged"):
        small.experiment(rounds=2).run(tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == before


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    small.experiment(rounds=1).run(tmp_path / "run")
    small.experiment(rounds=1, model={"options": {"hidden": [24, 8]}}).run(tmp_path / "wide")
    small.experiment(rounds=1, method={"name": "heterofl"}).run(tmp_path / "method")
    for other in ("wide", "method"):
        blob = (tmp_path / other / "state.safetensors").read_bytes()
        (tmp_path / "run/state.safetensors").write_bytes(blob)
        with pytest.raises(CheckpointError, match="does not fit the experiment in its folder"):
            small.experiment(rounds=2).run(tmp_path / "run", resume=True)


def test_a_full_disk_leaves_the_last_round_and_the_run_goes_on(tmp_path: Path) -> None:
    source = small.file(tmp_path)
    whole = az.run(source, out=tmp_path / "whole")
    size = (whole.directory / "state.safetensors").stat().st_size
    # The kernel itself refuses to let a file of this process grow beyond the limit.
    code = f"""
import resource, signal, sys
from anysize.cli.commands import main
import anysize.records.directory as directories
begun = directories.begin_rows
def limited(*arguments):
    begun(*arguments)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ({size - 100}, {size - 100}))
directories.begin_rows = limited
sys.argv = ["anysize", "run", {str(source)!r}, "--out", {str(tmp_path / "run")!r}]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert "could not write" in done.stderr
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr
    run = az.run(source, out=tmp_path / "run", resume=True)
    assert files(run.directory) == files(whole.directory)


def begun(source: Path, out: Path) -> subprocess.Popen[str]:
    """A run in another process that has finished a round, and will not end by itself."""
    command = [sys.executable, "-m", "anysize", "run", str(source), "--out", str(out), "--set", f"rounds={ENDLESS}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    events, deadline = out / "events.jsonl", time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        if events.is_file() and events.read_text().count('"event": "round"') >= 2:
            return process
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"the run did not begin: {process.communicate()}")


@pytest.mark.parametrize(
    "sign, code",
    [
        (signal.SIGKILL, -9),
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),  # `test_interrupts` sends it too
    ],
)
def test_a_real_kill_or_ctrl_c_loses_no_finished_round(tmp_path: Path, sign: signal.Signals, code: int) -> None:
    source = small.file(tmp_path, training={"learning_rate": 0.01})  # with the usual one it diverges in round 6
    process = begun(source, tmp_path / "run")
    os.kill(process.pid, sign)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == code
    assert "Traceback" not in errors
    if sign != signal.SIGKILL:
        assert "the checkpoint is complete, continue with --resume" in errors
    reached = az.load(tmp_path / "run").round
    assert reached >= 1
    rounds = reached + 2
    run = az.run(source, out=tmp_path / "run", overrides=[f"rounds={rounds}"], resume=True)
    whole = az.run(source, out=tmp_path / "whole", overrides=[f"rounds={rounds}"])
    assert files(run.directory) == files(whole.directory)
    assert numbers(run) == numbers(whole)


def test_resuming_with_other_rounds_says_that_a_schedule_over_all_rounds_changes(tmp_path: Path) -> None:
    events: list[Any] = []
    for schedule in ("constant", "cosine"):
        training = {"learning_rate": 0.05, "schedule": schedule}
        small.experiment(rounds=2, training=training).run(tmp_path / schedule)
        small.experiment(rounds=3, training=training).run(tmp_path / schedule, resume=True, on_event=events.append)
    texts = [event["text"] for event in events if event["event"] == "notice"]
    assert len(texts) == 1
    assert "rounds = 3 instead of 2" in texts[0]
