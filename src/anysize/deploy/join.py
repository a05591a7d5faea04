"""`anysize join device.toml`: a SuperNode and the worker beside it, for as long as the command runs."""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from anysize import interrupts
from anysize.deploy import device_file, own_data
from anysize.deploy.certificates import write_private
from anysize.deploy.children import Children, free_port
from anysize.deploy.device_file import DeviceConfig
from anysize.errors import ConfigError

_WATCH_SECONDS = 0.5
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds before a process that ended is started again
_STEADY_SECONDS = 120.0  # a process that ran this long ended for a new reason

CHECKED, REASON = "checked", "reason"
"""Files beside the worker's settings: it has tried the device's code and data; why the device could not take part."""

WORKER = "worker"

Say = Callable[[str], None]
Until = Callable[[], bool]


def join(file: Path, *, insecure: bool = False, say: Say = print, until: Until = lambda: False) -> None:
    """Take part in a fleet until `until` returns true, or the process is told to stop.

    Args:
        file: the device's file.
        insecure: without TLS and key, for a server that runs without them.
        say: called with lines for the user.
        until: called now and then; returns whether to stop.
    """
    device = device_file.load(file)
    own_data.check_limits(device)
    with (
        interrupts.immediate(),
        tempfile.TemporaryDirectory(prefix="anysize-device-") as home,
        Children() as children,
    ):
        folder, port = Path(home), free_port()
        secret = secrets.token_bytes(32)
        write_private(folder / "secret", secret)
        told = {"runtime": f"127.0.0.1:{port}", "secret": secret.hex(), "device": str(file.resolve())}
        write_private(folder / "worker.json", json.dumps(told).encode())
        commands = {
            "SuperNode": supernode(device, port, folder / "secret", insecure),
            WORKER: [sys.executable, "-m", "anysize.deploy.worker", str(folder / "worker.json")],
        }
        say(f"{device.name} tries its code and data, and then joins {device.server}")
        keep_up(children, commands, {"FLWR_HOME": str(folder / "flower")}, say, until, folder)


def keep_up(
    children: Children,
    commands: Mapping[str, Sequence[str]],
    more: Mapping[str, str],
    say: Say,
    until: Until,
    folder: Path,
) -> None:
    """Run the commands, and restart those that end, after a growing pause; only the worker runs before it has checked.

    The network may be down for a while, and a training step may run out of memory: a device recovers by itself.

    Raises:
        ConfigError: the worker found that the device could not take part, and wrote why into `folder`.
    """
    reason = folder / REASON
    began, pauses = dict.fromkeys(commands, 0.0), dict.fromkeys(commands, _FIRST_PAUSE)
    due = dict.fromkeys(commands, 0.0)
    while not until():
        may_connect = (folder / CHECKED).exists()
        for name in [n for n, when in due.items() if when <= time.monotonic() and (may_connect or n == WORKER)]:
            children.start(name, commands[name], more=more)
            began[name] = time.monotonic()
            del due[name]
        for name, code in children.ended():
            if reason.is_file():
                raise ConfigError(reason.read_text(encoding="utf-8"))
            if time.monotonic() - began[name] > _STEADY_SECONDS:
                pauses[name] = _FIRST_PAUSE
            say(f"the {name} ended with code {code}; it is started again in {pauses[name]:g} s")
            due[name] = time.monotonic() + pauses[name]
            pauses[name] = min(_LONGEST_PAUSE, 2 * pauses[name])
        interrupts.pause(_WATCH_SECONDS)


def supernode(device: DeviceConfig, port: int, secret: Path, insecure: bool) -> list[str]:
    """The command that starts the SuperNode of a device."""
    secure = [] if insecure else ["--root-certificates", _file(device, "certificate")]
    secure += [] if insecure else ["--auth-supernode-private-key", _file(device, "key")]
    return [
        "flower-supernode",
        *(["--insecure"] if insecure else secure),
        *("--superlink", device.server, "--isolation", "process"),
        *("--host", "127.0.0.1", "--port", str(port), "--superexec-auth-secret-file", str(secret)),
    ]


def _file(device: DeviceConfig, key: str) -> str:
    """The path that the device's file gives under a key; an error if there is none."""
    name = getattr(device, key)
    if name is None:
        raise ConfigError(f"device '{device.name}': its file names no {key}; `anysize deploy init` makes one")
    path = device.path(name)
    if not path.is_file():
        raise ConfigError(f"device '{device.name}': {key} = '{name}': {path} does not exist")
    return str(path)
