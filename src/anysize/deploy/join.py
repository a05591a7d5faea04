"""`anysize join device.toml`: the device's worker, started again whenever it ends, for as long as the command runs."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from anysize import interrupts
from anysize.deploy import device_file
from anysize.deploy.certificates import write_private
from anysize.deploy.children import Children
from anysize.deploy.device_file import DeviceConfig, check_limits
from anysize.deploy.process import ONE_ARENA, command
from anysize.errors import ConfigError

_WATCH_SECONDS = 0.5
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds before a process that ended is started again
_STEADY_SECONDS = 120.0  # a process that ran this long ended for a new reason

REASON, OPEN = "reason", "open"
"""Files beside the worker's settings: why the device could not take part; the message that it is answering."""

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
    check_limits(device)
    with (
        interrupts.immediate(),
        tempfile.TemporaryDirectory(prefix="anysize-device-") as home,
        Children() as children,
    ):
        folder, settings = Path(home), Path(home) / "worker.json"
        write_private(settings, json.dumps(address(device, file, insecure)).encode())
        say(f"{device.name} tries its code and data, and then joins {device.server}")
        more = {"FLWR_HOME": str(folder / "flower"), **ONE_ARENA}
        keep_up(children, command("worker", str(settings)), more, say, until, folder)


def address(device: DeviceConfig, file: Path, insecure: bool) -> dict[str, str | None]:
    """What the worker must know: its device's file, the server, and the files that make the connection safe."""
    certificate, key = (None, None) if insecure else (_file(device, "certificate"), _file(device, "key"))
    return {"device": str(file.resolve()), "server": device.server, "certificate": certificate, "key": key}


def keep_up(
    children: Children, command: Sequence[str], more: Mapping[str, str], say: Say, until: Until, folder: Path
) -> None:
    """Run the worker, and start it again after a growing pause if it ends.

    The network may be down for a while, and a training step may run out of memory: a device recovers by itself.

    Raises:
        ConfigError: the worker found that the device could not take part, and wrote why into `folder`.
    """
    reason = folder / REASON
    due, pause = time.monotonic(), _FIRST_PAUSE
    began: float | None = None
    while not until():
        if began is None and due <= time.monotonic():
            children.start("worker", command, more=more)
            began = time.monotonic()
        for name, code in children.ended():
            if reason.is_file():
                raise ConfigError(reason.read_text(encoding="utf-8"))
            if began is not None and time.monotonic() - began > _STEADY_SECONDS:
                pause = _FIRST_PAUSE
            say(f"the {name} ended with code {code}; it is started again in {pause:g} s")
            due, began = time.monotonic() + pause, None
            pause = min(_LONGEST_PAUSE, 2 * pause)
        interrupts.pause(_WATCH_SECONDS)


def _file(device: DeviceConfig, key: str) -> str:
    """The path that the device's file gives under a key; an error if there is none."""
    name = getattr(device, key)
    if name is None:
        raise ConfigError(f"device '{device.name}': its file names no {key}; `anysize deploy init` makes one")
    path = device.path(name)
    if not path.is_file():
        raise ConfigError(f"device '{device.name}': {key} = '{name}': {path} does not exist")
    return str(path)
