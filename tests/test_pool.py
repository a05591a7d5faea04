"""Worker processes: they start before PyTorch is loaded, come back when asked, and end with their server."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing import Pipe
from pathlib import Path

import pytest

import small
from anysize.cli import commands
from anysize.engines.inprocess import InProcess
from anysize.engines.workers import pool as pools
from anysize.engines.workers.engine import Processes
from anysize.engines.workers.pool import WorkerPool
from anysize.errors import AnysizeError
from anysize.server.round import run_round
from test_engines import bits, clients, experiment

MARK = "ANYSIZE_TEST"
linux = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


def parent(pid: int) -> int:
    """The process that started another."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def arrived(pool: WorkerPool) -> list[int]:
    """The numbers of all workers of a pool, whose connections are left open until they are forgotten."""
    here = [pool.arrived() for _ in range(pool.count)]
    return [process.pid for process, _ in here]


def runs(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def marked(mark: object) -> list[str]:
    """The commands of living processes that carry a mark in their environment."""
    wanted, found = f"{MARK}={mark}\0".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            about, command = (path / "environ").read_bytes(), (path / "cmdline").read_bytes()
        except OSError:
            continue
        if wanted in about + b"\0" and runs(int(path.name)):
            found.append(command.decode().replace("\0", " ").strip())
    return found


def until(true: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether something has become true in time."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


_EARLY = """
import sys
from anysize.engines.workers import pool
class Seen(Exception): ...
class Early:
    def __init__(self, count):
        raise Seen(f"{count} workers, torch {'torch' in sys.modules}")
pool.WorkerPool = Early
import anysize.cli
sys.argv = ["anysize", *sys.argv[1:]]
anysize.cli.commands.main()
"""


@pytest.mark.parametrize("command", [["run"], ["compare", "--methods", "fedavg"]])
def test_the_command_line_starts_the_workers_before_it_loads_pytorch(tmp_path: Path, command: list[str]) -> None:
    file = small.file(tmp_path, engine={"name": "processes", "workers": 3})
    program = [sys.executable, "-c", _EARLY, *command, str(file), "--out", str(tmp_path / "run")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert "Seen: 3 workers, torch False" in done.stderr


def test_the_command_line_starts_no_workers_for_an_experiment_that_has_none() -> None:
    assert isinstance(commands._pool(small.config(engine={"name": "inprocess", "workers": 3})), nullcontext)
    assert isinstance(commands._pool(small.config(engine={"name": "flower", "workers": 3})), nullcontext)


@linux
def test_one_process_forks_all_workers_and_goes_on_forking_for_the_next_run() -> None:
    with WorkerPool(3) as pool:
        first = arrived(pool)
        forkserver = {parent(pid) for pid in first}
        assert len(forkserver) == 1
        assert os.getpid() not in forkserver
        assert os.getsid(0) not in map(os.getsid, [*first, *forkserver])  # so that Ctrl-C is the server's alone
        pool.release()
        assert not any(map(runs, first))
        pool.start()
        pool.start()
        second = arrived(pool)
        assert {parent(pid) for pid in second} == forkserver
        assert not set(first) & set(second)
    assert not any(map(runs, [*second, *forkserver]))


def test_a_crew_that_is_still_loading_ends_at_once() -> None:
    pool = WorkerPool(2)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 1
    pool.close()


def test_processes_that_cannot_start_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with WorkerPool(2) as pool, pytest.raises(AnysizeError, match="ended with code 1 before it started"):
        pool.arrived()


@linux
def test_a_run_goes_on_with_the_same_bits_when_the_process_that_forks_is_killed() -> None:
    made = experiment()
    state = made.method.init(made.context)
    inside = InProcess(made.context, made.method, made.shares, {})
    expected, _ = run_round(made.context, made.method, state, clients(made), inside, 0.05)
    with Processes(made, {}, workers=2) as engine:
        before = [worker.process.pid for worker in engine._workers]
        os.kill(parent(before[0]), signal.SIGKILL)
        assert until(lambda: not any(map(runs, before)))  # its workers end with it
        assert engine._workers[0].process.poll() == -signal.SIGKILL
        found, _ = run_round(made.context, made.method, state, clients(made), engine, 0.05)
        after = [worker.process.pid for worker in engine._workers]
    assert bits(found) == bits(expected)
    assert not any(map(runs, after))


@pytest.mark.parametrize("way", ["subprocesses", "a thread in the process that forks"])
def test_where_a_fork_is_not_safe_each_worker_loads_by_itself(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "subprocesses":
        monkeypatch.setattr(pools, "_ForkServer", pools._Subprocesses)
    else:
        program = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        (tmp_path / "sitecustomize.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    made = experiment()
    state = made.method.init(made.context)
    inside = InProcess(made.context, made.method, made.shares, {})
    expected, _ = run_round(made.context, made.method, state, clients(made), inside, 0.05)
    with WorkerPool(2) as pool, Processes(made, {}, pool=pool) as engine:
        pids = [worker.process.pid for worker in engine._workers]
        commands = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in pids if sys.platform == "linux"]
        assert all("anysize.engines.workers.main" in command for command in commands)
        engine._workers[0].process.kill()
        engine._workers[0].process.wait()
        found, _ = run_round(made.context, made.method, state, clients(made), engine, 0.05)
    assert bits(found) == bits(expected)
    assert not any(map(runs, pids))


def test_several_runs_share_a_crew_and_end_in_the_same_files(tmp_path: Path) -> None:
    engine = {"name": "processes", "workers": 2}
    with WorkerPool(2) as pool:
        for name in ("first", "second"):
            small.experiment(rounds=1, engine=engine).run(tmp_path / name, pool=pool)
    small.experiment(rounds=1, engine={"name": "inprocess"}).run(tmp_path / "alone", pool=None)
    files = [(tmp_path / name / "state.safetensors").read_bytes() for name in ("first", "second", "alone")]
    assert files[0] == files[1] == files[2]


def test_an_engine_of_another_kind_leaves_a_crew_alone(tmp_path: Path) -> None:
    with WorkerPool(1) as pool:
        run = small.experiment(rounds=1, engine={"name": "inprocess"}).run(tmp_path / "run", pool=pool)
        assert run.round == 1
        assert len(arrived(pool)) == 1


_SERVER = """
import json, sys, time
from test_engines import experiment
from anysize.engines.workers.engine import Processes
made = experiment()
engine = Processes(made, {}, workers=2)
print(json.dumps([str(engine._pool.home.path), [worker.process.pid for worker in engine._workers]]), flush=True)
time.sleep(600)
"""


@linux
def test_a_killed_server_takes_everything_with_it() -> None:
    tests = Path(__file__).parent
    program = [sys.executable, "-c", _SERVER]
    server = subprocess.Popen(program, stdout=subprocess.PIPE, cwd=tests)
    assert server.stdout is not None
    with server.stdout:
        home, pids = json.loads(server.stdout.readline())
    everything = [*pids, parent(pids[0])]
    assert all(map(runs, everything))
    os.kill(pids[0], signal.SIGSTOP)  # one that is busy and does not look
    server.kill()
    server.wait()
    assert until(lambda: not any(map(runs, everything)), 1)
    assert until(lambda: not Path(home).exists(), 1)


_LOADING = """
import os, sys, time
from anysize.engines.workers import pool
if sys.argv[1] == "subprocesses":
    pool._ForkServer = pool._Subprocesses
kept = pool.WorkerPool(2)
print(kept.home.path, flush=True)
time.sleep(600)
"""


@linux
@pytest.mark.parametrize("way", ["forks", "subprocesses"])
def test_a_server_killed_while_its_workers_are_still_loading_leaves_no_process_and_no_file(
    way: str, tmp_path: Path
) -> None:
    environment = os.environ | {MARK: str(tmp_path), "TMPDIR": str(tmp_path)}
    server = subprocess.Popen([sys.executable, "-c", _LOADING, way], stdout=subprocess.PIPE, env=environment)
    assert server.stdout is not None
    with server.stdout:
        home = Path(server.stdout.readline().decode().strip())
    assert home.is_dir()
    loading = {"forks": 1, "subprocesses": 2}[way]
    assert until(lambda: sum("-m anysize.engines" in command for command in marked(tmp_path)) == loading)
    server.kill()
    server.wait()
    assert until(lambda: not marked(tmp_path), 1 if way == "forks" else 5), marked(tmp_path)
    assert not home.exists()
    assert list(tmp_path.iterdir()) == []


@linux
def test_what_forks_workers_loads_nothing_for_a_server_that_has_ended_meanwhile() -> None:
    ours, theirs = Pipe()
    ours.send_bytes(pools.FORK)
    ours.close()
    with theirs:
        handle = theirs.fileno()
        module = "anysize.engines.workers.forkserver"
        command = [sys.executable, "-X", "importtime", "-m", module, str(handle), '"nowhere"']
        told = os.environ | {pools.KEY: "00"}
        done = subprocess.run(command, pass_fds=(handle,), capture_output=True, text=True, env=told)
    assert done.returncode == 0, done.stderr
    assert "anysize.engines.workers.main" in done.stderr
    assert "torch" not in done.stderr


_ENDLESS = """
import os, subprocess, sys, time
worker = "import sys, threading; from anysize.engines.workers.main import end_with\\n"
worker += "threading.Thread(target=end_with, args=(int(sys.argv[1]),), daemon=True).start()\\n"
worker += "print(flush=True)\\nwhile True: pass"
subprocess.Popen([sys.executable, "-c", worker, str(os.getpid())])
time.sleep(600)
"""


@linux
def test_a_worker_that_is_no_fork_ends_with_its_server_in_the_middle_of_a_long_step(tmp_path: Path) -> None:
    environment = os.environ | {MARK: str(tmp_path)}
    server = subprocess.Popen([sys.executable, "-c", _ENDLESS], stdout=subprocess.PIPE, env=environment)
    assert server.stdout is not None
    with server.stdout:
        assert server.stdout.readline() == b"\n"
    server.kill()
    server.wait()
    assert until(lambda: not marked(tmp_path), 1)


@linux
@pytest.mark.slow
def test_on_a_busy_machine_too_a_killed_server_is_gone_with_all_that_it_had_within_a_second(tmp_path: Path) -> None:
    chosen = random.Random(0)
    training = {"learning_rate": 0.01}  # with the usual one it diverges in round 6
    source = small.file(tmp_path, rounds=1_000_000, training=training, engine={"name": "processes", "workers": 2})
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {MARK: str(tmp_path), "TMPDIR": str(temporary)}
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for i in range(30):
            run = tmp_path / f"run-{i}"
            command = [sys.executable, "-m", "anysize", "run", str(source), "--out", str(run)]
            server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            if i % 2:  # in some round; else while it starts
                assert until((run / "events.jsonl").exists, 120)
            time.sleep(chosen.uniform(0, 4))
            homes = {path.split()[-1] for path in marked(tmp_path) if "rmtree" in path}
            server.kill()
            server.wait()
            assert until(lambda: not marked(tmp_path), 1), marked(tmp_path)
            assert not any(Path(home).exists() for home in homes)
            assert list(temporary.iterdir()) == []
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
