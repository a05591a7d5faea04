"""A worker process, `python -m anysize.engines.worker ADDRESS`: told of the experiment, then of client after client.

It runs the very function that the in-process engine runs, with one thread, so that the same bits come out. It ends
when its server does.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch

from anysize.config import loads
from anysize.context import Size
from anysize.data import Data, TensorPart
from anysize.engines import shared
from anysize.engines.memory import hold_memory
from anysize.errors import AnysizeError
from anysize.experiment import Experiment, Signature
from anysize.methods.base import SubModel
from anysize.stacking import perform_any
from anysize.wire import Json, dump

KEY = "ANYSIZE_WORKER_KEY"


def main(address: str) -> None:
    """Serves one server, whose address is given as JSON, until it closes the connection."""
    where = json.loads(address)
    key = bytes.fromhex(os.environ.pop(KEY))
    server = os.getppid()
    torch.set_num_threads(1)
    hold_memory()
    home: str | None = None
    with Client(tuple(where) if isinstance(where, list) else where, authkey=key) as connection:
        try:
            connection.send_bytes(str(os.getpid()).encode())
            hello = json.loads(connection.recv_bytes())
            home = hello["home"]
            serve(connection, hello)
        except (EOFError, ConnectionError):
            pass  # the server is gone, and with it the reason to be here
    if home is not None and os.getppid() != server:
        shutil.rmtree(home, ignore_errors=True)  # it was killed and could not tidy up


def serve(connection: Connection[bytes, bytes], hello: Json) -> None:
    """Answers every message until the connection ends."""
    try:
        experiment = experiment_of(hello)
        context, method, shares = experiment.context.for_client(), experiment.method, experiment.shares
        for part in ("context", "model", "_template"):  # the full network's weights have no place on a client
            experiment.__dict__.pop(part, None)
    except Exception as error:
        connection.send_bytes(failure(error))
        return
    connection.send_bytes(b'{"ready":true}')
    slots: dict[str, torch.Tensor] = {}
    while True:
        message = json.loads(connection.recv_bytes())
        path = message["slot"]
        if path not in slots:
            slots[path] = shared.attach(Path(path))
        memory = slots[path]
        sub_model = SubModel(shared.get(message["layout"], memory), message["ticket"])
        kept = shared.get(message["kept"], memory)
        try:
            with experiment.blamed(f"round {sub_model.ticket['round']}, client {sub_model.ticket['client']}"):
                update = perform_any(context, method, sub_model, shares, kept)
        except Exception as error:
            connection.send_bytes(failure(error))
            continue
        need = shared.space(update.tensors) + shared.space(update.keep)
        if message["up"] + need > len(memory):
            blobs = (dump(update.tensors, update.ticket), dump(update.keep, {}))
            connection.send_bytes(b'{"blobs":true}')
            for blob in blobs:
                connection.send_bytes(blob)
            continue
        layout, end = shared.put(update.tensors, memory, message["up"])
        keep, _ = shared.put(update.keep, memory, end)
        connection.send_bytes(json.dumps({"layout": layout, "keep": keep, "ticket": update.ticket}).encode())


def experiment_of(hello: Json) -> Experiment:
    """The experiment that the server described, over the server's own data in shared memory."""
    sys.path[:] = list(dict.fromkeys([*sys.path, *hello["path"]]))
    folder = None if hello["folder"] is None else Path(hello["folder"])
    known = (Signature.from_json(hello["signature"]), tuple(Size(**size) for size in hello["sizes"]))
    data = None if hello["data"] is None else shared_data(hello["data"])
    return Experiment.from_config(loads(hello["config"], folder=folder), known, data=data)


def shared_data(about: Json) -> Data:
    """The training data as views of shared memory."""
    tensors = shared.get(about["layout"], shared.attach(Path(about["file"])))
    part = TensorPart(tensors["x"], tensors["y"], about["group"])
    return Data(train=part, classes=about["classes"], checksum=about["checksum"])


def failure(error: Exception) -> bytes:
    """What a worker says instead of an answer."""
    trace = "".join(traceback.format_exception(error))
    known = isinstance(error, AnysizeError)
    kind = type(error).__name__
    said: dict[str, Any] = {
        "error": str(error) if known else f"{kind}: {error}",
        "kind": kind if known else None,
        "trace": trace,
    }
    return json.dumps(said).encode()


if __name__ == "__main__":
    main(sys.argv[1])
