"""The simulated schedule does what the engine does, and what can be worked out by hand."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from anysize.engines.workers import engine as engines
from anysize.engines.workers.engine import Processes

PATH = Path(__file__).parents[1] / "benchmarks" / "schedule.py"


@pytest.fixture(scope="module")
def schedule() -> ModuleType:
    spec = importlib.util.spec_from_file_location("schedule", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_without_a_servers_time_a_round_is_as_long_as_its_work_allows(schedule: ModuleType) -> None:
    round = [schedule.Work(train, 0.0, 0.0) for train in (8.0, 4.0, 4.0, 2.0, 2.0)]
    assert schedule.simulated(round, 1)[0] == 20.0
    assert schedule.simulated(round, 2)[0] == 10.0  # 8 + 2, beside 4 + 4 + 2
    assert schedule.simulated(round, 64)[0] == 8.0


def test_a_fold_that_takes_longer_than_training_is_the_limit(schedule: ModuleType) -> None:
    round = [schedule.Work(train=1.0, send=0.0, fold=3.0)] * 10
    seconds, busy = schedule.simulated(round, 8)
    assert seconds == 1.0 + 10 * 3.0
    assert busy == pytest.approx(30 / 31)


def test_no_more_than_twice_as_many_as_workers_are_ahead_of_the_fold(schedule: ModuleType) -> None:
    # The first is slow, so nothing can be folded: with one slot to spare the other worker does one more and waits.
    round = [schedule.Work(10.0, 0.0, 0.0)] + [schedule.Work(1.0, 0.0, 0.0)] * 5
    assert schedule.simulated(round, 2)[0] == 11.0  # three of the five beside it, and two when it is folded
    assert schedule.simulated(round, 2, ahead=10)[0] == 10.0


class Clock:
    """Workers and a server that only let time pass, in place of the engine's own parts."""

    def __init__(self, round: list[tuple[float, float, float]]) -> None:
        self.now, self.round = 0.0, round
        self.ends: dict[int, float] = {}

    def run(self, workers: int) -> float:
        engine = Processes.__new__(Processes)
        engine._workers = [engines._Worker(None, None) for _ in range(workers)]  # type: ignore[arg-type]
        engine._free = engines.deque(range(2 * workers))
        clock = self

        def told(item: int, slot: int) -> tuple[str, dict[str, int]]:
            clock.now += clock.round[item][1]
            return "client", {}

        def send(worker: engines._Worker, task: engines._Task, flow: engines._Flow) -> None:
            worker.task = task
            clock.ends[task.position] = clock.now + clock.round[task.position][0]

        def collect(flow: engines._Flow) -> None:
            busy = [worker for worker in engine._workers if worker.task is not None]
            clock.now = max(clock.now, min(clock.ends[worker.task.position] for worker in busy if worker.task))
            for worker in busy:
                if worker.task is not None and clock.ends[worker.task.position] <= clock.now:
                    flow.done[worker.task.position], worker.task = (worker.task, None), None

        engine._send, engine._collect = send, collect  # type: ignore[method-assign]

        def items() -> Iterator[int]:
            yield from range(len(self.round))

        for place, _ in enumerate(engine._stream(engines._Flow(items(), told))):
            clock.now += clock.round[place][2]
        return clock.now


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_the_simulation_takes_as_long_as_the_engines_own_loop(schedule: ModuleType, workers: int) -> None:
    round = [(float(7 - i % 5), 0.25, 0.5 + i % 3) for i in range(17)]
    found = schedule.simulated([schedule.Work(*work) for work in round], workers)[0]
    assert found == pytest.approx(Clock(round).run(workers))
