"""What more workers would give: a simulation of the engine's schedule, calibrated here and held against two.

    python benchmarks/schedule.py             # some minutes; writes benchmarks/schedule.json
    python benchmarks/schedule.py --table     # prints it for the docs

What is measured, in CPU time of one thread, the least of several turns: a client's turn at each size and two numbers of
samples, and what the server does for a client of each size (extract and put into shared memory; fold the update in). A
turn is taken to last a constant, and a time for each step, and for each multiply-add that the cost model counts.

What is simulated: the server hands clients out in the order of predicted cost, largest first, to workers as they become
free, at most twice as many clients as workers ahead of the fold, and folds answers in that order; it does one thing at
a time, and every worker has a core of its own. `held against` is a round of the standard job on this machine with two
workers as a share of one with one worker, both in turns, and the same share in the simulation.
"""

from __future__ import annotations

import heapq
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from anysize.client.process import hold_memory, one_thread
from anysize.client.work import perform
from anysize.config.files import from_dict
from anysize.data import Data, Share
from anysize.engines.workers import shared_memory as shared
from anysize.engines.workers.engine import Processes
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.size import Size
from anysize.runs.experiment import Experiment
from anysize.runs.runner import environment
from anysize.server.round import run_round

OUT = Path(__file__).with_suffix(".json")
WORKERS = (1, 2, 8, 16, 64)
ROUNDS = (10, 100, 1000)
TURNS, FEW, MORE = 3, 2, 8  # turns of a measurement; steps of a short and of a longer turn
STANDARD = {"data": {"name": "fashion-mnist", "clients": 100}, "model": {"name": "small-cnn"}}
LARGE = {
    "data": {"name": "schedule:made_up", "clients": 100, "split": "iid"},
    "model": {"name": "resnet18", "options": {"channels": [32, 64, 128, 256]}},
    "tricks": {"batch_norm": "batch"},
}
JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "standard, heterofl": (STANDARD, "heterofl"),
    "standard, flanc": (STANDARD, "flanc"),
    "resnet18, heterofl": (LARGE, "heterofl"),
}
HELD_AGAINST = 2  # rounds with 1 and with 2 workers, in turns


def made_up() -> Data:
    """Images of CIFAR-10's shape, 500 for each of 100 clients."""
    x = torch.zeros(50_000, 3, 32, 32, dtype=torch.uint8)
    y = torch.arange(len(x)) % 10
    return Data(train=(x, y), test=(x[:100], y[:100]), classes=10)


def experiment(job: str) -> Experiment:
    """The job: batches of 32, four widths, 10 of 100 clients in a round."""
    tables, method = JOBS[job]
    rest = {"devices": {"participation": 0.1}, "method": {"name": method}, "training": {"batch_size": 32}}
    return Experiment.from_config(from_dict(tables | rest))


class Work(NamedTuple):
    """What one client costs, in seconds: its worker, and the server before and after."""

    train: float
    send: float
    fold: float


def simulated(round: Sequence[Work], workers: int, ahead: int = 2, after: float = 0.0) -> tuple[float, float]:
    """The seconds of a round, and the share of them in which the server works.

    Args:
        round: its clients, in the order in which they are handed out and folded.
        workers: how many train at a time.
        ahead: how many clients may be ahead of the fold, as a multiple of the workers.
        after: what the server does when all are folded.

    >>> one = Work(train=4.0, send=0.0, fold=1.0)
    >>> simulated([one] * 4, 1)
    (17.0, 0.23529411764705882)
    >>> simulated([one] * 4, 4)[0]  # all train at once, and the server folds one after another
    8.0
    >>> simulated([one] * 4, 2)[0]  # the second pair starts before the first is folded
    10.0
    """
    now, busy, folded, sent = 0.0, 0.0, 0, 0
    training: list[tuple[float, int]] = []  # when it is done, and which client
    done: set[int] = set()
    while folded < len(round):
        while sent < len(round) and len(training) < workers and sent - folded < ahead * workers:
            now += round[sent].send
            busy += round[sent].send
            heapq.heappush(training, (now + round[sent].train, sent))
            sent += 1
        if folded in done:
            now += round[folded].fold
            busy += round[folded].fold
            folded += 1
            continue
        now = max(now, training[0][0])
        while training and training[0][0] <= now:
            done.add(heapq.heappop(training)[1])
    return now + after, (busy + after) / (now + after)


def least(function: Callable[[], object], turns: int = TURNS) -> float:
    """The least CPU time of several calls, after one that warms up."""
    function()
    times = []
    for _ in range(turns):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return min(times)


def message_of(made: Experiment, state: Any, size: Size) -> SubModel:
    """What a client of that size receives."""
    sent = made.method.extract(made.context, state, Client(0, 0, size, 1, 32, 0))
    return replace(sent, ticket=replace(sent.ticket, rate=0.01))


def turns_of(made: Experiment, state: Any) -> tuple[np.ndarray[Any, Any], float]:
    """Seconds of a turn, of a step and of a billion multiply-adds that fit best, and the largest error of the fit."""
    rows, times = [], []
    part = made.shares.share(0).train
    for size in made.sizes:
        message, macs = message_of(made, state, size), made.cost(size, state=state).training_macs
        for steps in (FEW, MORE):
            share = Share(train=part.batch(torch.arange(32 * steps)))
            times.append(least(partial(perform, made.context, made.method, message, share)))
            rows.append([1.0, steps, 32 * steps * macs / 1e9])
    weights = 1 / np.array(times)  # relative errors count
    found, *_ = np.linalg.lstsq(np.array(rows) * weights[:, None], np.ones(len(times)), rcond=None)
    return found, float(np.abs(np.array(rows) @ found * weights - 1).max())


def server_of(made: Experiment, state: Any, folder: Path) -> tuple[dict[str, tuple[float, float]], float]:
    """Seconds to send to and to fold in a client of each size, and what aggregation costs beside."""
    method, context, found = made.method, made.context, {}
    for size in made.sizes:
        message = message_of(made, state, size)
        memory = shared.create(folder / f"slot-{size.label}", shared.space(message.tensors))
        update = Update(message.tensors, message.ticket, samples=32, loss=0.0)

        def send(size: Size = size, memory: torch.Tensor = memory) -> None:
            shared.put(message_of(made, state, size).tensors, memory)

        def fold(count: int, update: Update = update) -> None:
            method.aggregate(context, state, iter([update] * count))

        one, more = least(partial(fold, 2)), least(partial(fold, 10))
        found[size.label] = (least(send), max(more - one, 0.0) / 8)
        rest = max(one - 2 * found[size.label][1], 0.0)
    return found, rest


def works(made: Experiment, count: int, calibrated: dict[str, Any]) -> list[Work]:
    """A round of so many clients, each size as often as in the fleet, largest predicted cost first."""
    constant, step, mac = calibrated["turn"]
    macs_of = {size.label: made.cost(size).training_macs for size in made.sizes}
    clients = []
    for i in range(count):
        size = made.size_of_group[made.fleet.group_of(i % len(made.shares), 1).name]
        samples = made.shares.samples(i % len(made.shares))
        macs = macs_of[size.label] * samples
        train = constant + step * -(-samples // 32) + mac * macs / 1e9
        clients.append((-macs, i, Work(train, *calibrated["server"][size.label])))
    return [work for *_, work in sorted(clients, key=lambda entry: entry[:2])]


def measured_share(made: Experiment, state: Any) -> dict[str, float]:
    """A round of ten clients with two workers as a share of one with one worker, least of each, in turns."""
    ids = list(made.fleet.participants(1))
    size = {c: made.size_of_group[made.fleet.group_of(c, 1).name] for c in ids}
    ids.sort(key=lambda c: (-size[c].width * made.shares.samples(c), c))
    clients = [Client(c, i, size[c], 1, made.shares.samples(c), 0) for i, c in enumerate(ids)]
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with Processes(made, {}, workers=1) as one, Processes(made, {}, workers=2) as two:
        for _ in range(HELD_AGAINST + 1):
            for count, engine in ((1, one), (2, two)):
                began = time.perf_counter()
                run_round(made.context, made.method, state, clients, engine, 0.01)
                seconds[count].append(time.perf_counter() - began)
    first, second = (min(own[1:]) for own in seconds.values())
    return {"one_seconds": first, "two_seconds": second, "share": second / first}


def of_job(job: str, folder: Path) -> dict[str, Any]:
    """All figures of a job."""
    made = experiment(job)
    state = made.method.init(made.context)
    turn, error = turns_of(made, state)
    server, after = server_of(made, state, folder)
    found: dict[str, Any] = {"turn": turn.tolist(), "fit_error": error, "server": server, "after": after}
    calibrated = found | {"turn": turn}
    found["rounds"] = {}
    for count in ROUNDS:
        round = works(made, count, calibrated)
        runs = {workers: simulated(round, workers, after=after) for workers in WORKERS}
        found["rounds"][count] = {
            "seconds": {workers: seconds for workers, (seconds, _) in runs.items()},
            "server": {workers: busy for workers, (_, busy) in runs.items()},
            "longest": max(work.train for work in round),
            "limit": statistics.fmean(w.train for w in round) / statistics.fmean(w.send + w.fold for w in round),
        }
    if JOBS[job][0] is STANDARD:
        few = works(made, ROUNDS[0], calibrated)
        predicted = simulated(few, 2, after=after)[0] / simulated(few, 1, after=after)[0]
        found["held_against"] = measured_share(made, state) | {"simulated_share": predicted}
    return found


def table(found: dict[str, Any]) -> str:
    """Rounds by the number of workers, as Markdown."""
    heads = [f"{workers} workers" for workers in WORKERS[1:]]
    lines = [
        f"| job | clients | 1 worker | {' | '.join(heads)} | server busy at {WORKERS[-1]} | server is the limit from |",
        "| --- " + "| ---: " * (4 + len(heads)) + "|",
    ]
    for job, about in found["jobs"].items():
        for count, row in about["rounds"].items():
            one = row["seconds"]["1"]
            times = " | ".join(f"{one / row['seconds'][str(workers)]:.1f} x" for workers in WORKERS[1:])
            busy = f"{100 * row['server'][str(WORKERS[-1])]:.0f} %"
            lines.append(f"| {job} | {int(count):,} | {one:.1f} s | {times} | {busy} | {row['limit']:.0f} workers |")
    return "\n".join(lines)


def main() -> None:
    """Measures and simulates every job, and writes it down."""
    import tempfile

    hold_memory()
    found: dict[str, Any] = {"environment": environment(), "jobs": {}}
    with one_thread(), tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for job in JOBS:
            found["jobs"][job] = of_job(job, Path(folder))
            print(job, found["jobs"][job], flush=True)
    found = json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.4g}"))
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    if "--table" in sys.argv:
        print(table(json.loads(OUT.read_text())))
    else:
        main()
