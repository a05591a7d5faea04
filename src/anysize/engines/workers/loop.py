"""The loop of a worker process: it receives the experiment first, then one message after another.

It runs the very function that the in-process engine runs, with one thread, so that the same bits come out.
"""

from __future__ import annotations

import json
import sys
import traceback
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from anysize.client.accelerators import share_gpus
from anysize.client.shards import Evaluator, Shard, Subject
from anysize.config.files import loads
from anysize.data import Data, TensorPart
from anysize.engines.service import ClientService
from anysize.engines.workers import shared_memory as shared
from anysize.errors import AnysizeError
from anysize.experiment.brief import Brief
from anysize.experiment.experiment import Experiment, evaluation_part
from anysize.inputs import Input, Inputs
from anysize.methods.messages import SubModel, Ticket
from anysize.methods.size import Size
from anysize.wire import Json, Tensors, dump, under


def serve(connection: Connection[bytes, bytes], hello: Json) -> None:
    """Answer every message until the connection ends."""
    try:
        share_gpus(hello["worker"])
        service = Service(experiment_of(hello))
    except Exception as error:
        connection.send_bytes(failure(error))
        return
    connection.send_bytes(b'{"ready":true}')
    while True:
        message = json.loads(connection.recv_bytes())
        try:
            answers = service.evaluated(message) if "shard" in message else service.performed(message)
        except Exception as error:
            answers = [failure(error)]
        sys.stdout.flush()  # output of the user's code: a worker ends without warning
        for answer in answers:
            connection.send_bytes(answer)


class Service:
    """What a worker holds: the experiment without the network's weights, slots, and a state to evaluate."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._clients = ClientService.of(experiment)
        self._slots: dict[int, tuple[str, torch.Tensor]] = {}
        self._evaluator: Evaluator | None = None
        self._subject: tuple[str, Subject] | None = None

    def performed(self, message: Json) -> list[bytes]:
        """The answers about one client."""
        self._forget_state()
        memory = self._slot(message["slot"], message["file"])
        sub_model = SubModel(shared.get(message["layout"], memory), Ticket.from_json(message["ticket"]))
        update = self._clients.answer(sub_model, shared.get(message["kept"], memory))
        need = shared.space(update.tensors) + shared.space(update.keep)
        if message["up"] + need > len(memory):
            return [b'{"blobs":true}', dump(update.tensors, update.to_json()), dump(update.keep, {})]
        layout, end = shared.put(update.tensors, memory, message["up"])
        keep, _ = shared.put(update.keep, memory, end)
        return [json.dumps({"layout": layout, "keep": keep, "note": update.to_json()}).encode()]

    def evaluated(self, message: Json) -> list[bytes]:
        """The answer to one shard."""
        asked = message["shard"]
        shard = Shard(Size(**asked["size"]), asked["first"], asked["last"])
        with self._experiment.blamed("evaluation"):
            sums = self._judge().sit(self._state(message["subject"]), shard)
        return [json.dumps({"sums": sums}).encode()]

    def _slot(self, number: int, file: str) -> torch.Tensor:
        """The memory of a slot; releases the file that it had before, if that was too small."""
        if number not in self._slots or self._slots[number][0] != file:
            self._slots[number] = (file, shared.attach(Path(file)))
        return self._slots[number][1]

    def _judge(self) -> Evaluator:
        if self._evaluator is None:
            batch_size = self._experiment.config.evaluation.batch_size
            part, clients = evaluation_part(self._experiment), self._clients
            self._evaluator = Evaluator(clients.context, clients.method, part, batch_size)
        return self._evaluator

    def _state(self, told: Json) -> Subject:
        if self._subject is None or self._subject[0] != told["file"]:
            tensors = shared.get(told["layout"], shared.attach(Path(told["file"])))
            self._subject = (told["file"], Subject.of(tensors, told["about"]))
        return self._subject[1]

    def _forget_state(self) -> None:
        self._subject = None
        if self._evaluator is not None:
            self._evaluator.forget()


def experiment_of(hello: Json) -> Experiment:
    """The experiment that the server described, on the server's data in shared memory."""
    sys.path[:] = list(dict.fromkeys([*sys.path, *hello["path"]]))
    folder = None if hello["folder"] is None else Path(hello["folder"])
    data = None if hello["data"] is None else shared_data(hello["data"])
    return Brief.from_json(hello["brief"], partial(loads, folder=folder)).experiment(data=data)


def shared_data(about: Json) -> Data:
    """The data as views of shared memory."""
    tensors = shared.get(about["layout"], shared.attach(Path(about["file"])))
    part = TensorPart(_inputs(tensors, ""), tensors["y"], about["group"])
    test = TensorPart(_inputs(tensors, "test "), tensors["test y"]) if "test y" in tensors else None
    return Data(train=part, test=test, classes=about["classes"], checksum=about["checksum"])


def _inputs(tensors: Tensors, prefix: str) -> Input:
    """A part's inputs, one without a name or several by name."""
    named = under(f"{prefix}x ", tensors)
    return Inputs(named) if named else tensors[f"{prefix}x"]


def failure(error: Exception) -> bytes:
    """A worker's answer if an error was raised."""
    trace = "".join(traceback.format_exception(error))
    known = isinstance(error, AnysizeError)
    kind = type(error).__name__
    said: dict[str, Any] = {
        "error": str(error) if known else f"{kind}: {error}",
        "kind": kind if known else None,
        "trace": trace,
    }
    return json.dumps(said).encode()
