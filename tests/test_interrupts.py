"""Ctrl-C and SIGTERM: whenever they come, a run ends between two steps, its last checkpoint whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import anysize as az
import small
from anysize import interrupts
from anysize.engines.workers.engine import Processes
from anysize.server.round import run_round
from test_engines import clients, experiment
from test_pool import MARK, linux, marked, until
from test_resume import files, numbers

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]

# The command line, which gets a signal inside a destructor after its second round: there Python cannot raise.
_IN_A_DESTRUCTOR = """
import os, signal, sys
from anysize.records import directory
number = int(sys.argv[1])
class Dying:
    def __del__(self):
        os.kill(os.getpid(), number)
        [None for _ in range(100)]  # by now the handler has run
written = directory.append_event
def append(folder, event):
    written(folder, event)
    if event["event"] == "round" and event["round"] == 2:
        Dying()
directory.append_event = append
"""
# One that is in its first round and will be for minutes.
_BUSY = """
import sys, time
from anysize.records import directory
written = directory.append_event
def append(folder, event):
    written(folder, event)
    if event["event"] == "round":
        print("busy", flush=True)
        time.sleep(600)
directory.append_event = append
"""
_COMMAND = """
from anysize.__main__ import main
sys.argv = ["anysize", "run", *sys.argv[2:]]
main()
"""


def start(program: list[str], mark: object = "") -> subprocess.Popen[str]:
    """A Python program in another process; what it starts carries the mark in its environment."""
    environment = os.environ | {MARK: str(mark)}
    command = [sys.executable, *program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a program."""
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def hears(process: subprocess.Popen[str]) -> bool:
    """Whether a process catches SIGTERM, as Python by itself does not: the first lines of ours have run."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (caught,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(caught & (1 << (signal.SIGTERM - 1)))


def is_clean(errors: str) -> bool:
    """Whether nothing went wrong where nobody could raise it."""
    return "Traceback" not in errors and "Exception ignored" not in errors


def dying(number: int) -> None:
    """Sends this process a signal where Python cannot raise."""

    class Dying:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)
            [None for _ in range(100)]

    Dying()


def after(round: int, does: Callable[[], None]) -> Callable[[dict[str, Any]], None]:
    """What to do at the event of a round."""
    return lambda event: does() if event["event"] == "round" and event["round"] == round else None


@pytest.mark.parametrize("number, code", [pytest.param(*SIGNALS[0], marks=pytest.mark.slow), SIGNALS[1]])
def test_a_signal_that_comes_in_a_destructor_ends_the_run_after_its_step(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    source = small.file(tmp_path, rounds=4)
    program = ["-c", _IN_A_DESTRUCTOR + _COMMAND, str(int(number)), str(source), "--out", str(tmp_path / "run")]
    found, _, errors = ended(start(program))
    assert found == code, errors
    assert is_clean(errors)
    assert "stopping after this step" in errors
    assert "the checkpoint is complete, continue with --resume" in errors
    assert az.load(tmp_path / "run").round == 2
    run = az.run(source, out=tmp_path / "run", resume=True)
    whole = az.run(source, out=tmp_path / "whole")
    assert files(run.directory) == files(whole.directory)
    assert numbers(run) == numbers(whole)


@linux
@pytest.mark.parametrize("number, code", [SIGNALS[0], pytest.param(*SIGNALS[1], marks=pytest.mark.slow)])
def test_a_second_signal_ends_a_busy_run_at_once_with_its_workers_and_its_memory(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    source = small.file(tmp_path, engine={"name": "processes", "workers": 2})
    process = start(["-c", _BUSY + _COMMAND, "", str(source), "--out", str(tmp_path / "run")], tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        while process.stdout.readline() != "busy\n":
            assert process.poll() is None, process.stderr.read()
        commands = marked(tmp_path)
        assert len(commands) == 5  # the run, its guard, what forks, two workers
        (home,) = (Path(command.split()[-1]) for command in commands if "rmtree" in command)
        assert home.is_dir()
        process.send_signal(number)
        while "stopping after this step" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(number)
        began = time.monotonic()
        assert process.wait(20) == code
        assert time.monotonic() - began < 5
        assert "stopped" in process.stderr.read()
    assert until(lambda: not marked(tmp_path), 5), marked(tmp_path)
    assert not home.exists()
    assert az.load(tmp_path / "run").round == 0


@linux
@pytest.mark.parametrize("number, code", SIGNALS)
def test_a_signal_while_modules_are_loaded_ends_the_command_in_one_line(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    source = small.file(tmp_path)
    process = start(["-m", "anysize", "run", str(source), "--out", str(tmp_path / "run")])
    assert until(lambda: hears(process))
    process.send_signal(number)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == code
    assert errors == "stopped\n"
    assert not (tmp_path / "run").exists()


def test_a_run_in_a_program_raises_keyboard_interrupt_and_can_go_on_there(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stop = after(2, lambda: dying(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        small.experiment(rounds=4).run(tmp_path / "run", on_event=stop)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert az.load(tmp_path / "run").round == 2
    assert small.experiment(rounds=4).run(tmp_path / "run", resume=True).round == 4


def test_ctrl_c_after_the_last_step_is_not_lost(tmp_path: Path) -> None:
    stop = after(2, lambda: dying(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        small.experiment(rounds=2).run(tmp_path / "run", on_event=stop)
    assert az.load(tmp_path / "run").round == 2


_SCRIPT = """
import signal, sys
sys.path.insert(0, sys.argv[1])
import small
from test_interrupts import after, dying
engine = {"name": "processes", "workers": 1}
small.experiment(rounds=3, engine=engine).run(sys.argv[2], on_event=after(1, lambda: dying(signal.SIGTERM)))
print("not reached")
"""


@linux
def test_sigterm_still_ends_a_script_once_its_run_has_stopped(tmp_path: Path) -> None:
    code, out, errors = ended(start(["-c", _SCRIPT, str(Path(__file__).parent), str(tmp_path / "run")], tmp_path))
    assert code == -signal.SIGTERM, errors
    assert out == ""
    assert is_clean(errors)
    assert marked(tmp_path) == []  # it had the time to stop them
    assert az.load(tmp_path / "run").round == 1


_FORK = """
import os, signal, time
from anysize import interrupts
with interrupts.deferred():
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(there, b"!")
        time.sleep(600)
    os.read(here, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a fork")
def test_a_fork_of_a_running_process_is_ended_by_sigterm_as_any_other() -> None:
    assert ended(start(["-c", _FORK])) == (0, f"{-signal.SIGTERM}\n", "")


_IGNORED = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from anysize import interrupts
interrupts.command()
with interrupts.deferred():
    os.kill(os.getpid(), signal.SIGINT)
    interrupts.check()
print("goes on")
"""


def test_a_signal_that_the_process_was_told_to_ignore_is_ignored() -> None:
    assert ended(start(["-c", _IGNORED])) == (0, "goes on\n", "")


def test_handlers_of_others_are_left_alone_unless_their_turn_is_to_come_later() -> None:
    heard: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts.deferred():
            interrupted(heard)
        assert heard == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt), interrupts.deferred(host=True):
            interrupted(heard)
        assert heard == [signal.SIGINT, signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    interrupts.check()


def interrupted(heard: list[int]) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    interrupts.check()
    assert heard == [signal.SIGINT]  # else it has been put off


def test_a_run_outside_the_main_thread_touches_no_handler(tmp_path: Path) -> None:
    seen: list[Any] = []
    look = after(1, lambda: seen.append(signal.getsignal(signal.SIGINT)))
    made = small.experiment(rounds=1)
    thread = threading.Thread(target=lambda: made.run(tmp_path / "run", on_event=look))
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


@linux
def test_an_interrupt_ends_the_wait_for_a_busy_worker() -> None:
    made = experiment()
    state = made.method.init(made.context)
    with Processes(made, {}, workers=1) as engine:
        os.kill(engine._workers[0].process.pid, signal.SIGSTOP)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt), interrupts.deferred():
            run_round(made.context, made.method, state, clients(made), engine, 0.05)
        timer.join()


@linux
@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"name": "inprocess"}, {"name": "processes", "workers": 2}])
def test_signals_at_random_moments_end_runs_with_their_code_and_a_whole_checkpoint(
    tmp_path: Path, engine: dict[str, Any]
) -> None:
    chosen = random.Random(0)
    model = {"name": "small-cnn", "options": {"channels": [4, 8]}}
    tables = {"engine": engine, "model": model, "method": {"name": "heterofl"}}
    source = small.file(tmp_path, rounds=40, evaluation={"on": ["test", "clients"]}, **tables)

    def begun(out: Path, *more: str) -> subprocess.Popen[str]:
        process = start(["-m", "anysize", "run", str(source), "--out", str(out), *more])
        assert until(lambda: hears(process))
        return process

    whole, began = begun(tmp_path / "whole"), time.monotonic()
    assert ended(whole)[0] == 0
    seconds = time.monotonic() - began
    for i in range(40):
        (number, code), run = chosen.choice(SIGNALS), tmp_path / f"run-{i}"
        process = begun(run)
        time.sleep(chosen.uniform(0, seconds))
        process.send_signal(number)
        found, out, errors = ended(process)
        over = found in (0, -number) and "the report:" in out  # all was done, and Python no longer runs handlers
        assert found == code or over, errors
        assert is_clean(errors)
        if i % 8 == 0:
            assert ended(begun(run, "--resume"))[0] == 0
            assert files(run) == files(tmp_path / "whole")
