"""The speed figures: `make bench` prints them and writes benchmarks/results.json. Ratios are taken within one run.

Machines are noisy, so every comparison alternates between the two sides and takes the median of several rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from anysize.client.objectives import make_objective
from anysize.client.process import hold_memory, one_thread
from anysize.client.work import perform
from anysize.config.files import from_dict
from anysize.data import Data, Share, to_input
from anysize.elastic.norm import Statistics
from anysize.engines.inprocess import InProcess
from anysize.engines.stacked import Stacked
from anysize.engines.workers.engine import Processes
from anysize.experiment.experiment import evaluation_part
from anysize.methods import FLANC, HeteroFL
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.kit import sub_model
from anysize.methods.messages import Client, SubModel, Ticket, Update
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step
from anysize.runs.experiment import Experiment
from anysize.server.calibration import calibrated
from anysize.server.judging import on_test
from anysize.server.round import run_round

RESULTS = Path(__file__).parent / "results.json"


def standard_job(method: str) -> Experiment:
    """Fashion-MNIST, small-cnn, 100 clients, 10 a round, four widths."""
    tables = {
        "data": {"name": "fashion-mnist", "clients": 100},
        "model": {"name": "small-cnn"},
        "devices": {"participation": 0.1},
        "method": {"name": method},
        "training": {"batch_size": 32, "learning_rate": 0.05},
    }
    return Experiment.from_config(from_dict(tables))


def round_clients(made: Experiment, number: int) -> list[Client]:
    """The round's participants, largest predicted cost first."""
    ids = made.fleet.participants(number)
    size = {c: made.size_of_group[made.fleet.group_of(c, number).name] for c in ids}
    order = sorted(ids, key=lambda c: (-size[c].width * made.shares.samples(c), c))
    return [Client(c, i, size[c], number, made.shares.samples(c), 0) for i, c in enumerate(order)]


def plain_round(made: Experiment, state: Any, clients: Iterable[Client]) -> None:
    """What one writes without a framework: the same sub-models in turn, torch's defaults, a DataLoader for each."""
    for client in clients:
        plain_training(made, made.method.extract(made.context, state, client))


def plain_training(made: Experiment, message: SubModel) -> dict[str, torch.Tensor]:
    """The tensors of one sub-model after an epoch on its client's data, trained by a plain PyTorch loop."""
    context, method = made.context, made.method
    module = method.build(context, message)
    share = made.shares.share(message.ticket.client)
    x, y = share.train.batch(torch.arange(len(share.train)))
    loader = DataLoader(TensorDataset(to_input(x), y), batch_size=32, shuffle=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    step = Step(0, torch.Generator(), {}, make_objective(context.task, context.tricks, None))
    module.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        method.loss(module, Batch(inputs, targets), step).backward()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def against_plain_torch(rounds: int) -> dict[str, Any]:
    """Seconds a round of the standard job, ours with two workers against the plain loop with default threads."""
    found = {}
    threads = torch.get_num_threads()
    for name in ("heterofl", "flanc"):
        made = standard_job(name)
        state = made.method.init(made.context)
        ours, plain = [], []
        with Processes(made, {}, workers=2) as engine:
            for number in range(1, rounds + 2):  # the first round warms up both sides
                clients = round_clients(made, number)
                torch.set_num_threads(1)
                ours.append(timed(partial(run_round, made.context, made.method, state, clients, engine, 0.05)))
                torch.set_num_threads(threads)
                plain.append(timed(partial(plain_round, made, state, clients)))
        a, b = statistics.median(ours[1:]), statistics.median(plain[1:])
        found[name] = {"ours_seconds": a, "plain_seconds": b, "times_faster": b / a}
    return found


@dataclass(frozen=True)
class IdleState:
    """One tensor of a million bytes."""

    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Idle(Method[IdleState]):
    """Clients that do nothing with a megabyte: what is left is the engine's own cost."""

    def sizes(self, context: Context) -> list[Size]:
        return list(context.sizes)

    def init(self, context: Context) -> IdleState:
        return IdleState({"w": torch.zeros(250_000)})

    def extract(self, context: Context, state: IdleState, client: Client) -> SubModel:
        return sub_model(client, dict(state.tensors), width=1.0)

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        module = nn.Module()
        module.w = nn.Parameter(sub_model.tensors["w"].clone())
        return module

    def aggregate(self, context: Context, state: IdleState, updates: Iterable[Update]) -> IdleState:
        total = torch.zeros(250_000)
        for update in updates:
            total += update.tensors["w"]
        return IdleState({"w": total / 100})

    def customize(self, context: Context, state: IdleState, size: Size) -> nn.Module:
        raise NotImplementedError


def idle_round(engine: Any, context: Context, method: Idle, state: IdleState, clients: int) -> None:
    """One round of clients that send back what they got."""
    tickets = (Ticket(client, 1, 0, "1.0", 1.0, "echo") for client in range(clients))
    messages = (SubModel(dict(state.tensors), ticket) for ticket in tickets)
    method.aggregate(context, state, engine.perform(messages))


def overhead() -> dict[str, Any]:
    """Seconds of a round of 100 clients that do nothing, 1 MB each way."""
    tables = {
        "data": {"name": "digits", "clients": 100},
        "model": {"name": "mlp"},
        "method": {"name": "benchmarks.bench:Idle"},
    }
    made = Experiment.from_config(from_dict(tables))
    method = Idle()
    state = method.init(made.context)
    found = {}
    with one_thread():
        inside = InProcess(made.context, method, made.shares, {})
        found["in_process_seconds"] = best(lambda: idle_round(inside, made.context, method, state, 100))
        with Processes(made, {}, workers=2) as engine:
            found["two_workers_seconds"] = best(lambda: idle_round(engine, made.context, method, state, 100))
    return found


def step_by_width() -> dict[str, Any]:
    """Milliseconds of one training step of the standard job's networks at batch 32, by width."""
    found: dict[str, Any] = {}
    for method in (HeteroFL(), FLANC()):
        made = standard_job("heterofl" if isinstance(method, HeteroFL) else "flanc")
        state = made.method.init(made.context)
        share = made.shares.share(0)
        few = Share(train=share.train.batch(torch.arange(320)))
        row = {}
        for size in made.sizes:
            message = made.method.extract(made.context, state, Client(0, 0, size, 1, 320, 0))
            message = replace(message, ticket=replace(message.ticket, rate=0.05))
            with one_thread():
                row[size.label] = best(partial(perform, made.context, made.method, message, few)) / 10 * 1000
        found[type(method).__name__.lower()] = row
    return found


def evaluation() -> dict[str, Any]:
    """Seconds to evaluate all widths on the whole test set, and its share of a run at the default interval.

    HeteroFL's batch-norm statistics are estimated on clients before, which is part of its evaluation.
    """
    return {name: evaluated(name) for name in ("heterofl", "flanc")}


def evaluated(name: str) -> dict[str, Any]:
    """The same for one method, both with two workers."""
    made = standard_job(name)
    context, method, state = made.context, made.method, made.method.init(made.context)
    test, options = evaluation_part(made), made.config.evaluation

    def evaluate(engine: Processes) -> None:
        found: dict[str, Statistics] = {}
        if context.tricks.batch_norm == "calibrated":
            how = (options.calibration_clients, None, options.calibration_samples)
            found = calibrated(context, method, state, engine, made.fleet, made.size_of_group, 1, *how)
        on_test(context, method, state, test, found, options.batch_size, engine=engine)

    with one_thread(), Processes(made, {}, workers=2) as engine:
        seconds = best(partial(evaluate, engine), 3)
        rounds = [round_clients(made, number) for number in range(1, 7)]  # who takes part changes what a round costs
        engine_rounds = [partial(run_round, context, method, state, clients, engine, 0.05) for clients in rounds]
        one = mean_seconds(engine_rounds)
    every = made.config.evaluate_every
    share = seconds / (every * one + seconds)
    return {"seconds": seconds, "round_seconds": one, "evaluate_every": every, "share_of_run": share}


def mean_seconds(rounds: list[Callable[[], Any]]) -> float:
    """The mean seconds of a round, after one that warms up."""
    rounds[0]()
    return statistics.mean(timed(one) for one in rounds)


def memory() -> dict[str, Any]:
    """Peak server memory in MB with 10, 100 and 1,000 clients in a round, and the start with a million registered."""
    found: dict[str, Any] = {}
    for count in (10, 100, 1000):
        found[f"round_of_{count}_mb"] = float(_in_new_process("_round_memory", str(count))[0])
    empty_seconds, empty_mb = map(float, _in_new_process("_start", "10"))
    seconds, mb = map(float, _in_new_process("_start", "1000000"))
    found["million_clients"] = {"start_seconds": seconds - empty_seconds, "above_empty_mb": mb - empty_mb}
    return found


def _round_memory(count: str) -> None:
    made = _generated(int(count))
    state = made.method.init(made.context)
    clients = [Client(c, c, made.sizes[-1], 1, 4, 0) for c in range(int(count))]
    engine = InProcess(made.context, made.method, made.shares, {})
    with one_thread():
        print(watched_peak(partial(run_round, made.context, made.method, state, clients, engine, 0.01)))


def watched_peak(function: Callable[[], Any]) -> float:
    """The most memory in MB that this process held while it ran `function`, looked at every few milliseconds."""
    held = [0.0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            held[0] = max(held[0], pages * os.sysconf("SC_PAGE_SIZE") / 2**20)

    watcher = threading.Thread(target=watch)
    watcher.start()
    function()
    done.set()
    watcher.join()
    return held[0]


def _start(count: str) -> None:
    began = time.perf_counter()
    made = _generated(int(count), per_round=min(1000, int(count)))
    made.context  # noqa: B018
    ids = made.fleet.participants(1)
    [made.fleet.group_of(client, 1) for client in ids]
    print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def _generated(clients: int, per_round: int | None = None) -> Experiment:
    """Clients whose data is made only when they are drawn."""
    tables = {
        "data": {"name": "benchmarks.bench:generated", "clients": clients, "options": {"classes": 10}},
        "model": {"name": "mlp", "options": {"hidden": [512, 512]}},
        "devices": {"clients_per_round": per_round or clients},
        "method": {"name": "heterofl"},
        "training": {"batch_size": 4},
        "evaluation": {"on": ["clients"]},
    }
    return Experiment.from_config(from_dict(tables))


def generated(device: int, classes: int = 10) -> Share:
    """Four random samples, other ones for every device."""
    random = np.random.default_rng(device)
    return Share(train=(random.random((4, 64), dtype=np.float32), random.integers(classes, size=4)))


def _in_new_process(function: str, argument: str) -> list[str]:
    command = [sys.executable, str(Path(__file__)), "--call", function, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


def timed(function: Callable[[], Any]) -> float:
    """Seconds of one call."""
    gc.collect()
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def best(function: Callable[[], Any], times: int = 5) -> float:
    """The shortest of several calls, after one that warms up."""
    function()
    return min(timed(function) for _ in range(times))


def machine() -> dict[str, Any]:
    """Where the figures were measured."""
    model = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()
    )
    return {"processor": model, "cores": os.cpu_count(), "torch": torch.__version__}


def _cpuinfo() -> Iterator[str]:
    try:
        yield from Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return


def stacking() -> dict[str, Any]:
    """Times by which a round in one process is faster with ten clients of equal shape trained together."""
    text = np.random.default_rng(0).integers(80, size=(640, 21))
    jobs = {
        "mlp": {
            "data": "digits",
            "clients": 40,
            "model": {"name": "mlp", "options": {"hidden": [64, 32]}},
            "training": {"batch_size": 10},
        },
        "lstm": {
            "data": Data(train=(text[:, :-1], text[:, 1:]), classes=80),
            "clients": 40,
            "model": {"name": "char-lstm", "options": {"hidden": 32}},
            "task": "next-token",
            "training": {"batch_size": 4},
        },
    }
    found = {}
    for name, job in jobs.items():
        made = Experiment(**job, method="heterofl", devices={"capacities": [0.5, 1.0]})
        state, clients = made.method.init(made.context), round_clients(made, 1)
        plain = InProcess(made.context, made.method, made.shares, {})
        engines = {"plain": plain, "stacked": Stacked(plain, 10, made.shares.samples)}
        with one_thread():
            row = {
                f"{key}_seconds": best(
                    partial(run_round, made.context, made.method, state, clients, engine, 0.05), times=3
                )
                for key, engine in engines.items()
            }
        found[name] = row | {"times_faster": row["plain_seconds"] / row["stacked_seconds"]}
    return found


def against_flower() -> dict[str, Any]:
    """The same job on Flower's simulation; see `benchmarks/flower_peer.py`."""
    from benchmarks.flower_peer import against_flower

    return against_flower()


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "overhead_100_idle_clients": overhead,
    "step_ms_by_width": step_by_width,
    "evaluation": evaluation,
    "memory": memory,
    "against_plain_torch": lambda: against_plain_torch(5),
    "against_flower": against_flower,
    "stacking": stacking,
}


def main() -> None:
    """Measures every part, or those named, and writes the file and the README's table."""
    sys.path.insert(0, str(Path(__file__).parents[1]))  # parts and their workers import benchmarks.*
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; by default all")
    parser.add_argument("--call", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.call:
        globals()[given.call[0]](given.call[1])
        return
    from benchmarks import table

    hold_memory()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() and given.parts else {}
    results["machine"] = machine()
    for name in given.parts or PARTS:
        print(f"{name} ...", flush=True)
        results[name] = PARTS[name]()
        results.setdefault("dates", {})[name] = time.strftime("%Y-%m-%d")
        print(json.dumps(results[name], indent=1), flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    table.write()
    print(f"written to {RESULTS} and into README.md")


if __name__ == "__main__":
    main()
