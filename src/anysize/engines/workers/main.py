"""A worker process, `python -m anysize.engines.workers.main ADDRESS PARENT`; `loop` says what it does.

It ends when its parent ends.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from multiprocessing.connection import Client

from anysize.engines.start import quick_start

KEY = "ANYSIZE_WORKER_KEY"
_LOOK_SECONDS = 0.2  # between checks of the parent


def main(address: str, parent: str) -> None:
    """Serve the server at a JSON address until it closes the connection or the parent ends."""
    key = bytes.fromhex(os.environ.pop(KEY))
    if sys.platform != "win32":  # there, a virtual environment's python is a process in between
        threading.Thread(target=end_with, args=(int(parent),), daemon=True).start()
    load()
    work(address, key)


def load() -> None:
    """Load everything that a worker needs for any experiment."""
    quick_start()  # before anything imports torch
    import torch

    from anysize.client.process import hold_memory

    torch.set_num_threads(1)
    hold_memory()
    for module in ("anysize.engines.workers.loop", "torch.fx.experimental.symbolic_shapes"):  # tracing needs the second
        importlib.import_module(module)


def work(address: str, key: bytes) -> None:
    """Connect to the server and serve it; everything is loaded."""
    from anysize.engines.workers.loop import serve

    where = json.loads(address)
    try:
        with Client(tuple(where) if isinstance(where, list) else where, authkey=key) as connection:
            connection.send_bytes(str(os.getpid()).encode())
            serve(connection, json.loads(connection.recv_bytes()))
    except (EOFError, ConnectionError, FileNotFoundError):
        pass  # the server has ended


def end_with(parent: int) -> None:
    """End this process soon after its parent, whatever it is doing."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
