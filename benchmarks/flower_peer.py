"""The standard job on Flower's own simulation and on ours, each in a process of its own.

Flower's side is what its users write: a ClientApp that trains with a plain PyTorch loop, and a ServerApp that sends a
round's clients in the order of their ids with `Grid.send_and_receive` and averages the replies. Server mathematics,
sub-models, clients and data are the same on both sides; so are two clients at a time. Which client goes first, and that
updates are folded in as they come, is what our engine does for its users, so Flower's side is not given it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from benchmarks.bench import plain_training, round_clients, standard_job

from anysize.client.process import hold_memory
from anysize.engines.workers.engine import Processes
from anysize.engines.workers.pool import WorkerPool
from anysize.methods.messages import Client, SubModel, Ticket, Update
from anysize.runs.experiment import Experiment
from anysize.server.round import run_round

MISSING = "Flower is not installed, so nothing is compared with it: make bench installs it, or pip install '.[bench]'"
ROUNDS = 10
TIMES = 2
WORKERS = 2
_RATE = 0.05
_ROOT = Path(__file__).parents[1]
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
_POLL_SECONDS = 0.01
_START = (
    "from anysize.engines.start import quick_start; quick_start(); from anysize.engines.workers.pool import WorkerPool"
)


def against_flower() -> dict[str, Any]:
    """Seconds of a round after the first, and of the whole job: a start, ten rounds and an end."""
    if find_spec("flwr") is None or find_spec("ray") is None:
        print(MISSING)
        return {"missing": MISSING}
    return {method: _compared(method) for method in ("heterofl", "flanc")}


def _compared(method: str) -> dict[str, float]:
    """Both sides in turn, several times; what else the machine does can only add time, so the shortest counts."""
    seen: dict[str, list[Timing]] = {"on_flower": [], "on_processes": []}
    for _ in range(TIMES):
        for side, timings in seen.items():
            timings.append(_measured(side, method))
    flower, ours = (_shortest(timings) for timings in seen.values())
    return {
        "ours_round_seconds": ours.round_seconds(),
        "flower_round_seconds": flower.round_seconds(),
        "times_faster": flower.round_seconds() / ours.round_seconds(),
        "ours_job_seconds": ours.job_seconds(),
        "flower_job_seconds": flower.job_seconds(),
        "times_faster_with_start": flower.job_seconds() / ours.job_seconds(),
    }


@dataclass(frozen=True)
class Timing:
    """Seconds of each round, of which the first warms up, and of all else from the start of a process to its end."""

    rounds: tuple[float, ...]
    rest: float

    def round_seconds(self) -> float:
        """The mean of ten rounds."""
        return statistics.mean(self.rounds[1:])

    def job_seconds(self) -> float:
        """A start, ten rounds and an end."""
        return self.rest + sum(self.rounds[:ROUNDS])


def _shortest(timings: Sequence[Timing]) -> Timing:
    """Part by part."""
    return Timing(tuple(map(min, zip(*(timing.rounds for timing in timings)))), min(timing.rest for timing in timings))


def on_flower(method: str) -> None:
    """Runs the standard job on Flower's simulation and prints each round's seconds as JSON."""
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    client, server = ClientApp(), ServerApp()
    client.train()(train)
    seconds: list[float] = []

    @server.main()
    def main(grid: Any, context: Any) -> None:
        made = standard_job(method)
        nodes = _nodes(grid, made.config.data.clients or 1)
        seconds.extend(_rounds(made, lambda state, clients: _round(grid, nodes, made, state, clients)))

    resources = {"init_args": {"num_cpus": WORKERS}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    clients = standard_job(method).config.data.clients or 1
    run_simulation(server, client, clients, backend_config=resources)
    print(json.dumps(seconds))


def on_processes(method: str, pool: WorkerPool) -> None:
    """Runs the standard job on our worker processes and prints each round's seconds as JSON."""
    hold_memory()
    torch.set_num_threads(1)
    with pool, Processes(made := standard_job(method), {}, pool=pool) as engine:
        seconds = _rounds(
            made, lambda state, clients: run_round(made.context, made.method, state, clients, engine, _RATE)[0]
        )
    print(json.dumps(seconds))


def train(message: Any, context: Any) -> Any:
    """One client: the sub-model that came, trained as one writes it without a framework."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

    told = message.content["config"]
    made, ticket = _known(told["method"]), Ticket.from_json(json.loads(told["ticket"]))
    sub_model = SubModel(dict(message.content["arrays"].to_torch_state_dict()), ticket)
    update = Update(plain_training(made, sub_model), ticket, samples=made.shares.samples(ticket.client))
    note = ConfigRecord({"note": json.dumps(update.to_json())})
    content = {"arrays": ArrayRecord(update.tensors), "config": note}
    return Message(RecordDict(content), reply_to=message)


@cache
def _known(method: str) -> Experiment:
    """The job as a client's process knows it, made once in each."""
    return standard_job(method)


def _rounds(made: Experiment, one: Callable[[Any, list[Client]], Any]) -> list[float]:
    """Seconds of every round, the state going from one to the next."""
    state, seconds = made.method.init(made.context), []
    for number in range(1, ROUNDS + 2):
        began = time.perf_counter()
        state = one(state, round_clients(made, number))
        seconds.append(time.perf_counter() - began)
    return seconds


def _round(grid: Any, nodes: list[int], made: Experiment, state: Any, clients: list[Client]) -> Any:
    """The state after one round on Flower."""
    by_id = sorted(clients, key=lambda client: client.id)
    answers = grid.send_and_receive(list(_messages(nodes, made, state, by_id)))
    return made.method.aggregate(made.context, state, map(_update, answers))


def _messages(nodes: list[int], made: Experiment, state: Any, clients: list[Client]) -> Iterator[Any]:
    from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

    records: dict[str, Any] = {}  # clients of one size get the same tensors: one record serves them all
    for client in clients:
        sub_model = made.method.extract(made.context, state, client)
        record = records.setdefault(client.size.label, ArrayRecord(dict(sub_model.tensors)))
        ticket = json.dumps(replace(sub_model.ticket, rate=_RATE).to_json())
        told = ConfigRecord({"ticket": ticket, "method": made.config.method.name})
        content = RecordDict({"arrays": record, "config": told})
        yield Message(content, dst_node_id=nodes[client.id], message_type=MessageType.TRAIN)


def _update(answer: Any) -> Update:
    """What a client sent back."""
    if answer.has_error():
        raise RuntimeError(f"a client failed on Flower: {answer.error.reason}")
    tensors = answer.content["arrays"].to_torch_state_dict()
    return Update.from_json(dict(tensors), json.loads(answer.content["config"]["note"]))


def _nodes(grid: Any, count: int) -> list[int]:
    """The ids of all nodes, as soon as they are there."""
    while len(nodes := list(grid.get_node_ids())) < count:
        time.sleep(_POLL_SECONDS)
    return nodes


def _measured(function: str, method: str) -> Timing:
    """What the job takes in a new process."""
    load = f"from benchmarks.flower_peer import {function}"
    if function == "on_processes":  # workers first, then PyTorch, and no collection at the end: as `anysize run` does
        program = (
            f"{_START}; pool = WorkerPool({WORKERS}); {load}; {function}({method!r}, pool); import gc; gc.freeze()"
        )
    else:
        program = f"{load}; {function}({method!r})"
    command = [sys.executable, "-c", program]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=_ROOT, env=os.environ | _QUIET, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{function}({method!r}) failed:\n{done.stderr[-4000:]}")
    job = time.perf_counter() - began
    rounds = json.loads(done.stdout.splitlines()[-1])
    return Timing(tuple(rounds), job - sum(rounds))
