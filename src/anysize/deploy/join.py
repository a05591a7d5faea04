"""`anysize join device.toml`: a SuperNode and the worker beside it, for as long as the command runs."""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from anysize.deploy.certificates import write_private
from anysize.deploy.children import Children, free_port, stoppable
from anysize.deploy.client import read_device
from anysize.errors import ConfigError

_WATCH_SECONDS = 0.5
_PAUSES = (1.0, 60.0)  # seconds before a part that ended is started again: the first, and the longest
_STEADY_SECONDS = 120.0  # a part that ran so long ended for a new reason


def join(
    file: Path,
    *,
    insecure: bool = False,
    say: Callable[[str], None] = print,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Takes part in a fleet until `until` says so, or the process is told to stop.

    Whatever ends is started again, after a pause that grows: the network may be down for a while, and a training step
    may run out of memory.

    Args:
        file: the device's own.
        insecure: without TLS and key, for a server that was started so.
        say: told what a user should know.
        until: asked now and then whether it is enough.
    """
    file = file.resolve()
    device = read_device(file)
    with tempfile.TemporaryDirectory(prefix="anysize-device-") as home, stoppable(), Children() as children:
        port, secret = free_port(), Path(home) / "secret"
        write_private(secret, secrets.token_bytes(32))
        settings = Path(home) / "worker.json"
        told = {"runtime": f"127.0.0.1:{port}", "secret": secret.read_bytes().hex(), "device": str(file)}
        write_private(settings, json.dumps(told).encode())
        commands = {
            "SuperNode": supernode(file, port, secret, insecure),
            "worker": [sys.executable, "-m", "anysize.deploy.worker", str(settings)],
        }
        more = {"FLWR_HOME": str(Path(home) / "flower")}
        began = dict.fromkeys(commands, 0.0)
        pauses = dict.fromkeys(commands, _PAUSES[0])
        due = dict.fromkeys(commands, 0.0)
        say(f"{device['name']} joins {device['server']}")
        while not until():
            for name in [name for name, when in due.items() if when <= time.monotonic()]:
                children.start(name, commands[name], more=more)
                began[name] = time.monotonic()
                del due[name]
            for name, code in children.ended():
                if time.monotonic() - began[name] > _STEADY_SECONDS:
                    pauses[name] = _PAUSES[0]
                say(f"the {name} ended with code {code}; it is started again in {pauses[name]:g} s")
                due[name] = time.monotonic() + pauses[name]
                pauses[name] = min(_PAUSES[1], 2 * pauses[name])
            time.sleep(_WATCH_SECONDS)


def supernode(file: Path, port: int, secret: Path, insecure: bool) -> list[str]:
    """What starts the SuperNode of a device."""
    device = read_device(file)
    secure = [
        *("--root-certificates", str(file.parent / device["certificate"])),
        *("--auth-supernode-private-key", str(file.parent / device["key"])),
    ]
    return [
        "flower-supernode",
        *(["--insecure"] if insecure else secure),
        *("--superlink", device["server"], "--isolation", "process"),
        *("--host", "127.0.0.1", "--port", str(port), "--superexec-auth-secret-file", str(secret)),
    ]
