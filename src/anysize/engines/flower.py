"""Clients on Flower's simulation.

In a simulation, Flower's virtual nodes are not particular clients: each node trains whichever client it receives, since
any process can load the experiment. So a million registered clients do not need a million nodes, and as many clients as
workers train at a time.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

from anysize import interrupts
from anysize.client.process import hold_memory
from anysize.config.extras import needs
from anysize.engines.base import Engine
from anysize.engines.folder import new_folder
from anysize.engines.service import ClientService
from anysize.engines.workers.engine import described, raised
from anysize.engines.workers.loop import experiment_of, failure
from anysize.errors import AnysizeError, ConfigError
from anysize.experiment.experiment import Experiment
from anysize.methods.messages import SubModel, Ticket, Update
from anysize.profiling import stage
from anysize.wire import Tensors

_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # with Ray's default, 15, workers starve on a busy machine
}
for _name, _value in _SETTINGS.items():  # flwr and ray read them when they are imported
    os.environ.setdefault(_name, _value)

if (_missing := needs("engine.name = 'flower'", "flower", "flwr", "ray")) is not None:
    raise ConfigError(_missing)

from flwr.app import Context, Message, MessageType, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402

from anysize.engines.flower_records import packed, unpacked  # noqa: E402

_START_SECONDS = 180
_POLL_SECONDS = 0.02

client_app = ClientApp()
"""What runs on every node: one function for all jobs."""


@client_app.train()
def perform_message(message: Message, context: Context) -> Message:
    """Do the job of the ticket, and answer with the update or the error."""
    note, tensors, kept = unpacked(message.content)
    try:
        update = _known(note["hello"]).answer(SubModel(tensors, Ticket.from_json(note["ticket"])), kept)
    except Exception as error:
        return Message(packed({"failure": json.loads(failure(error))}), reply_to=message)
    return Message(packed({"note": update.to_json()}, update.tensors, update.keep), reply_to=message)


@cache
def _known(text: str) -> ClientService:
    """What a node's process does for the clients of an experiment."""
    hold_memory()
    hello = json.loads(text)
    if hello["data"] is not None and not Path(hello["data"]["file"]).exists():
        hello = hello | {"data": None}  # on another machine of the cluster, load the data by name
    return ClientService.of(experiment_of(hello))


class Flower(Engine):
    """Runs clients on Flower's simulation: on this machine, or on the Ray cluster that RAY_ADDRESS names.

    Networks are tested in this process: a node would need the whole state with every shard.

    Args:
        experiment: one that other processes can load.
        kept: the tensors that stay with each client, by its id.
        workers: how many clients train at a time; by default one per core.
    """

    def __init__(self, experiment: Experiment, kept: Mapping[int, Tensors], workers: int | None = None) -> None:
        self._kept = kept
        self._home = new_folder()
        self._hello = json.dumps(described(experiment, self._home.path))
        self._simulation = _Simulation(workers or os.cpu_count() or 1)
        try:
            self._grid, self._nodes = self._simulation.started()
        except BaseException:
            self.close()
            raise

    def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update]:
        free, waiting = deque(self._nodes), deque[tuple[str, int]]()
        came: dict[str, Update] = {}
        source = iter(sub_models)
        more = True
        while more or waiting:
            while more and free:
                sub_model = next(source, None)
                more = sub_model is not None
                if sub_model is not None:
                    node = free.popleft()
                    waiting.append((self._send(sub_model, node), node))
            if not waiting:
                return
            wanted, node = waiting[0]
            while wanted not in came:
                self._collect([sent for sent, _ in waiting if sent not in came], came)
            waiting.popleft()
            yield came.pop(wanted)
            free.append(node)

    def close(self) -> None:
        """End the simulation and every process that it started."""
        self._simulation.stop()
        self._home.remove()

    def _send(self, sub_model: SubModel, node: int) -> str:
        with stage("send"):
            kept = self._kept.get(sub_model.ticket.client)
            content = packed({"hello": self._hello, "ticket": sub_model.ticket.to_json()}, sub_model.tensors, kept)
            (sent,) = self._grid.push_messages([Message(content, dst_node_id=node, message_type=MessageType.TRAIN)])
        return sent

    def _collect(self, sent: list[str], came: dict[str, Update]) -> None:
        """Take the answers that have arrived, or wait a moment for one."""
        answers = list(self._grid.pull_messages(sent))
        if not answers:
            self._simulation.check()
            interrupts.pause(_POLL_SECONDS)
        for answer in answers:
            came[answer.metadata.reply_to_message_id] = _update_of(answer)


def _update_of(answer: Message) -> Update:
    """The update in an answer; an error if the node failed."""
    if answer.has_error():
        raise AnysizeError(f"a node of Flower failed: {answer.error.reason}")
    return update_in(answer.content)


def update_in(content: RecordDict) -> Update:
    """The update in a node's records; raises what was raised on the node."""
    note, tensors, kept = unpacked(content)
    if "failure" in note:
        raise raised(note["failure"])
    return Update.from_json(tensors, note["note"], kept)


class _Simulation:
    """Flower's simulation in a thread; its server app passes on its grid and waits for `close`."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._done = threading.Event()
        self._grids: queue.Queue[Grid] = queue.Queue()
        self._error: BaseException | None = None
        self._path = os.environ.get("PYTHONPATH")
        self._thread = threading.Thread(target=self._run, name="flower", daemon=True)
        self._thread.start()

    def started(self) -> tuple[Grid, list[int]]:
        """The grid and the ids of its nodes, two for each worker, as soon as they are ready."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            interrupts.check()
            self.check()
            try:
                grid = self._grids.get(timeout=0.1)
            except queue.Empty:
                continue
            while len(nodes := sorted(grid.get_node_ids())) < 2 * self._workers:
                self.check()
                interrupts.pause(_POLL_SECONDS)
            return grid, nodes
        raise AnysizeError(f"Flower's simulation did not start within {_START_SECONDS} s")

    def check(self) -> None:
        """Raise an error if the simulation has ended too early."""
        if self._error is not None or not self._thread.is_alive():
            raise AnysizeError(f"Flower's simulation ended: {self._error}") from self._error

    def stop(self) -> None:
        """Let the server app end, and wait until Flower has stopped."""
        self._done.set()
        self._thread.join()
        # Flower puts all of sys.path into the environment for its processes; other processes should not inherit that.
        if self._path is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = self._path

    def _run(self) -> None:
        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            self._grids.put(grid)
            self._done.wait()

        cluster = "RAY_ADDRESS" in os.environ
        options: dict[str, Any] = {
            "init_args": {} if cluster else {"num_cpus": self._workers},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        }
        getLogger("flwr").setLevel(ERROR)
        try:
            run_simulation(server, client_app, 2 * self._workers, backend_config=options)
        except BaseException as error:
            self._error = error
