"""Clients in worker processes, one thread each; the same bits as in one process.

Workers get clients in the order of aggregation, by predicted cost, largest first, so that they finish a round together.
At most twice as many clients as workers are ahead of the aggregation. Each has a *slot*, a block of shared memory that
holds its sub-model and then its update, so the memory of a round does not grow with its clients. The shards of an
evaluation go the same way; the state that they measure is in shared memory once.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch import Tensor

from anysize import errors, interrupts
from anysize.client.shards import Evaluation, Shard
from anysize.data import Part, TensorPart
from anysize.engines.base import Engine
from anysize.engines.workers import shared_memory as shared
from anysize.engines.workers.pool import Process, WorkerPool
from anysize.errors import AnysizeError
from anysize.experiment.brief import Brief
from anysize.experiment.experiment import Experiment
from anysize.inputs import named
from anysize.methods.messages import SubModel, Update
from anysize.profiling import stage
from anysize.tasks import Sums
from anysize.wire import Json, Tensors, copies, load

_ATTEMPTS = 3  # workers that may die while they train one client
_SPARE = 1 << 16  # bytes in a slot beside twice the sub-model
_LOOK_SECONDS = 0.2  # between checks for an interrupt


@dataclass
class _Worker:
    """A process and its current assignment."""

    process: Process
    connection: Connection[bytes, bytes]
    task: _Task | None = None


@dataclass
class _Task:
    """One client's work, or a shard: its place in the order, its slot, what was sent, and what to call it."""

    position: int
    slot: int
    message: bytes
    name: str
    attempts: int = 0


@dataclass
class _Slot:
    """A block of shared memory."""

    path: Path
    memory: Tensor


@dataclass
class _Flow:
    """One pass over clients or shards: what waits, what has been answered, what is next."""

    source: Iterator[Any]
    told: Callable[[Any, int], tuple[str, Json]]
    again: deque[_Task] = field(default_factory=deque)
    done: dict[int, tuple[_Task, Any]] = field(default_factory=dict)
    sent: int = 0
    out: int = 0
    exhausted: bool = False


class Processes(Engine):
    """Runs clients in worker processes.

    Args:
        experiment: one that other processes can load (see `obstacle`).
        kept: the tensors that stay with each client, by its id.
        workers: how many; by default one per core.
        pool: the worker pool, if it is already started; then its owner closes it.
    """

    def __init__(
        self,
        experiment: Experiment,
        kept: Mapping[int, Tensors],
        workers: int | None = None,
        pool: WorkerPool | None = None,
    ) -> None:
        self._kept = kept
        self._owns_pool = pool is None
        self._pool = pool or WorkerPool(workers)
        self._workers: list[_Worker] = []
        count = self._pool.count
        self._slots: list[_Slot | None] = [None] * (2 * count)
        self._names = 0
        self._greeted = 0
        self._free = deque(range(2 * count))
        self._home = Path(tempfile.mkdtemp(dir=self._pool.home.path))
        try:
            self._test = _testable(experiment)
            self._batch_size = experiment.config.evaluation.batch_size
            self._hello = described(experiment, self._home)
            self._pool.start()
            self._workers = self._briefed(count)
        except BaseException:
            self.close()
            raise

    def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update]:
        return self._stream(_Flow(iter(sub_models), self._client_message))

    def evaluate(self, evaluation: Evaluation) -> Iterator[Sums]:
        """The sums of each shard, in the order given; measured in this process if workers cannot load state or data."""
        wired = evaluation.subject.to_wire()
        same = evaluation.part is self._test and evaluation.batch_size == self._batch_size
        if wired is None or not same:
            yield from super().evaluate(evaluation)
            return
        tensors, about = wired
        self._names += 1
        path = self._home / f"state-{self._names}"
        layout, _ = shared.put(tensors, shared.create(path, shared.space(tensors)))
        subject = {"file": str(path), "layout": layout, "about": about}
        try:
            yield from self._stream(_Flow(iter(evaluation.shards), partial(_shard_message, subject)))
        finally:
            path.unlink(missing_ok=True)

    def _stream(self, flow: _Flow) -> Iterator[Any]:
        while True:
            self._hand_out(flow)
            if flow.out in flow.done:
                task, answer = flow.done.pop(flow.out)
                try:
                    yield answer
                finally:  # also if the caller stops early
                    self._free.append(task.slot)
                flow.out += 1
            elif flow.out == flow.sent and flow.exhausted:
                return
            else:
                self._collect(flow)

    def close(self) -> None:
        """End the workers, whatever they are doing, and free the shared memory."""
        for worker in self._workers:
            worker.connection.close()
        self._workers = []
        if self._owns_pool:
            self._pool.close()
        else:
            self._pool.release()
        self._slots = []
        shutil.rmtree(self._home, ignore_errors=True)

    def _hand_out(self, flow: _Flow) -> None:
        for worker in self._workers:
            if worker.task is None:
                task = flow.again.popleft() if flow.again else self._next(flow)
                if task is None:
                    return
                self._send(worker, task, flow)

    def _next(self, flow: _Flow) -> _Task | None:
        """The next client as a task in a free slot, or None if there is none or no room."""
        if flow.exhausted or not self._free:
            return None
        item = next(flow.source, None)
        if item is None:
            flow.exhausted = True
            return None
        number = self._free.popleft()
        with stage("send"):
            name, message = flow.told(item, number)
            task = _Task(flow.sent, number, json.dumps(message).encode(), name)
        flow.sent += 1
        return task

    def _client_message(self, sub_model: SubModel, number: int) -> tuple[str, Json]:
        """The message to a worker about a client; puts the client's tensors into the slot of that number."""
        client = sub_model.ticket.client
        kept = self._kept.get(client, {})
        down = shared.space(sub_model.tensors) + shared.space(kept)
        slot = self._slot(number, 2 * down + _SPARE)
        layout, end = shared.put(sub_model.tensors, slot.memory)
        stays, up = shared.put(kept, slot.memory, end)
        place = {"slot": number, "file": str(slot.path), "layout": layout, "kept": stays, "up": up}
        return f"client {client}", place | {"ticket": sub_model.ticket.to_json()}

    def _slot(self, number: int, size: int) -> _Slot:
        """The slot of that number, replaced if it is too small."""
        slot = self._slots[number]
        if slot is None or len(slot.memory) < size:
            self._names += 1
            path = self._home / f"slot-{self._names}"
            old, slot = slot, _Slot(path, shared.create(path, size))
            self._slots[number] = slot
            if old is not None:
                old.path.unlink(missing_ok=True)
        return slot

    def _send(self, worker: _Worker, task: _Task, flow: _Flow) -> None:
        worker.task = task
        try:
            worker.connection.send_bytes(task.message)
        except (OSError, EOFError):
            task.attempts -= 1  # the worker died before it saw this client
            self._replace(worker, flow)

    def _collect(self, flow: _Flow) -> None:
        """Wait for at least one answer, and take all that have arrived."""
        busy = {worker.connection: worker for worker in self._workers if worker.task is not None}
        if not busy:
            if flow.again:  # all went to workers that had died, and must be sent again
                return
            raise RuntimeError("an earlier pass over this engine was not finished; close it and start another")
        for connection in _ready(list(busy)):
            worker = busy[connection]
            try:
                answer = self._answer(worker)
            except (OSError, EOFError):
                self._replace(worker, flow)
                continue
            task, worker.task = worker.task, None
            assert task is not None
            flow.done[task.position] = (task, answer)

    def _answer(self, worker: _Worker) -> Update | Sums:
        answer = json.loads(worker.connection.recv_bytes())
        if "error" in answer:
            raise raised(answer)
        if "sums" in answer:
            sums: Sums = answer["sums"]
            return sums
        if "blobs" in answer:
            (tensors, note), (keep, _) = (load(worker.connection.recv_bytes()) for _ in range(2))
            return Update.from_json(tensors, note, keep)
        assert worker.task is not None
        slot = self._slots[worker.task.slot]
        assert slot is not None
        keep = copies(shared.get(answer["keep"], slot.memory))
        update = Update.from_json(shared.get(answer["layout"], slot.memory), answer["note"], keep)
        # A training update is aggregated before its slot is reused; copy what must live longer.
        return replace(update, tensors=copies(update.tensors)) if update.ticket.job == "calibrate" else update

    def _replace(self, worker: _Worker, flow: _Flow) -> None:
        """Replace a process that died; its client is trained again."""
        worker.connection.close()
        code = worker.process.wait()
        task = worker.task
        assert task is not None
        task.attempts += 1
        if task.attempts == _ATTEMPTS:
            raise AnysizeError(
                f"{_ATTEMPTS} workers ended with code {code} over {task.name}; is there enough memory? "
                'engine.name = "inprocess" shows its error'
            )
        self._pool.replace()
        fresh = self._briefed(1)[0]
        worker.process, worker.connection, worker.task = fresh.process, fresh.connection, None
        flow.again.append(task)

    def _briefed(self, count: int) -> list[_Worker]:
        """The next workers, after sending them the experiment; they start in parallel."""
        workers = []
        for _ in range(count):
            workers.append(_Worker(*self._pool.arrived()))
            workers[-1].connection.send_bytes(json.dumps(self._hello | {"worker": self._greeted}).encode())
            self._greeted += 1
        for worker in workers:
            _ready([worker.connection])
            try:
                answer = json.loads(worker.connection.recv_bytes())
            except (EOFError, OSError):
                code = worker.process.wait()
                raise AnysizeError(
                    f"a worker ended with code {code} while it started; is there enough memory?"
                ) from None
            if "error" in answer:
                raise raised(answer)
        return workers


def _ready(connections: Sequence[Connection[bytes, bytes]]) -> list[Any]:
    """The connections with data, as soon as there is one; an interrupt ends the wait."""
    while True:
        interrupts.check()
        found = wait(connections, _LOOK_SECONDS)
        if found:
            return found


def obstacle(experiment: Experiment) -> str | None:
    """Why other processes cannot load the experiment, or None if they can."""
    for kind in ("model", "task"):
        if experiment.is_live(kind):
            return f"the {kind} is a live object that no name leads to"
    if experiment.config.method.name.startswith("__main__:"):
        return "the method's class is defined in the main script"
    if experiment.is_live("data") and _tensor_part(experiment) is None:
        return "the data is a live object that is not in memory as tensors"
    return None


def described(experiment: Experiment, home: Path) -> Json:
    """Everything that another process must know about an experiment; puts training data into a file in `home`."""
    folder = experiment.config.folder
    part = _tensor_part(experiment)
    data: Json | None = None
    if part is not None and experiment.data is not None:
        arrays = _arrays(part, "")
        test = experiment.data.test
        if isinstance(test, TensorPart):
            arrays |= _arrays(test, "test ")
        path = home / "data"
        layout, _ = shared.put(arrays, shared.create(path, shared.space(arrays)))
        group = None if part.group is None else part.group.tolist()
        about = {"classes": experiment.data.classes, "checksum": experiment.data.checksum or "shared"}
        data = {"file": str(path), "layout": layout, "group": group, **about}
    return {
        "path": sys.path,
        "folder": None if folder is None else str(folder.resolve()),
        "brief": Brief.of(experiment).to_json(),
        "data": data,
    }


def _arrays(part: TensorPart, prefix: str) -> dict[str, Tensor]:
    """A part's tensors; several inputs have their names in the tensors' names."""
    inputs = {f"{prefix}x {name}".rstrip(): tensor.contiguous() for name, tensor in named(part.x)}
    return inputs | {f"{prefix}y": part.y.contiguous()}


def _tensor_part(experiment: Experiment) -> TensorPart | None:
    data = experiment.data
    return data.train if data is not None and isinstance(data.train, TensorPart) else None


def _testable(experiment: Experiment) -> Part | None:
    """The test samples, if workers have them too, in shared memory or by name."""
    data = experiment.data
    if data is None or (isinstance(data.train, TensorPart) and not isinstance(data.test, TensorPart)):
        return None
    return data.test


def _shard_message(subject: Json, shard: Shard, number: int) -> tuple[str, Json]:
    size = shard.size
    asked = {"size": asdict(size), "first": shard.first, "last": shard.last}
    return f"the evaluation of size {size.label}", {"shard": asked, "subject": subject}


def raised(answer: Json) -> Exception:
    """The worker's error, as this process would have raised it."""
    kind = getattr(errors, answer["kind"] or "", None)
    if isinstance(kind, type) and issubclass(kind, AnysizeError):
        return kind(answer["error"])
    return RuntimeError(f"in a worker: {answer['error']}\n{answer['trace']}")
