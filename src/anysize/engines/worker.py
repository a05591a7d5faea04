"""A worker process, `python -m anysize.engines.worker ADDRESS`; see `anysize.engines.desk` for what it does.

It ends when its server does.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from multiprocessing.connection import Client

from anysize.start import quick_start

KEY = "ANYSIZE_WORKER_KEY"


def main(address: str) -> None:
    """Serves one server, whose address is given as JSON, until it closes the connection."""
    key = bytes.fromhex(os.environ.pop(KEY))
    load()
    work(address, key)


def load() -> None:
    """Loads all that a worker needs whatever it is told later."""
    quick_start()  # before anything imports torch
    import torch

    from anysize.engines.memory import hold_memory

    torch.set_num_threads(1)
    hold_memory()
    for module in ("anysize.engines.desk", "torch.fx.experimental.symbolic_shapes"):  # tracing needs the second
        importlib.import_module(module)


def work(address: str, key: bytes) -> None:
    """What a worker does once everything is loaded."""
    from anysize.engines.desk import serve

    where, parent = json.loads(address), os.getppid()
    home: str | None = None
    try:
        with Client(tuple(where) if isinstance(where, list) else where, authkey=key) as connection:
            connection.send_bytes(str(os.getpid()).encode())
            hello = json.loads(connection.recv_bytes())
            home = hello["home"]
            serve(connection, hello)
    except (EOFError, ConnectionError, FileNotFoundError):
        pass  # the server is gone, and with it the reason to be here
    if home is not None and os.getppid() != parent:
        shutil.rmtree(home, ignore_errors=True)  # it was killed and could not tidy up


if __name__ == "__main__":
    main(sys.argv[1])
