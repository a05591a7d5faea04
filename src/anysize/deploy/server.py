"""`anysize server DIR`: a SuperLink for the fleet that a folder describes, for as long as the command runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from anysize import interrupts
from anysize.deploy import folder as layout
from anysize.deploy.children import Children, answers, is_free
from anysize.deploy.control import Control, public_key
from anysize.deploy.folder import Address
from anysize.errors import AnysizeError, ConfigError

HOME = "ANYSIZE_FLEET"
"""The variable that tells the server's processes which folder describes the fleet."""

_START_SECONDS = 60.0
_WATCH_SECONDS = 0.5

Say = Callable[[str], None]


def serve(
    home: Path,
    *,
    host: str | None = None,
    port: int | None = None,
    insecure: bool = False,
    say: Say = print,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Run a SuperLink until `until` returns true, or the process is told to stop.

    Args:
        home: the folder that `anysize deploy init` made.
        host: the address to listen on; by default the one in its fleet.toml.
        port: likewise.
        insecure: without TLS and without the list of keys: anyone who reaches the port can read and take part.
        say: called with lines for the user.
        until: called now and then; returns whether to stop.
    """
    home = home.resolve()
    fleet = layout.read(home)
    host, port = host or fleet.listen, port or fleet.port
    if not is_free(host, port):
        raise ConfigError(f"port {port} on {host} is taken; choose another with --port, and in each device.toml")
    address = layout.address(home, port, insecure)
    log = home / layout.LOGS / "superlink.log"
    log.parent.mkdir(exist_ok=True)
    with interrupts.immediate(), Children() as children, log.open("ab") as out:
        more = {"FLWR_HOME": str(home / layout.FLOWER), HOME: str(home)}
        superlink = children.start("SuperLink", command(home, host, port, insecure), out, more)
        deadline = time.monotonic() + _START_SECONDS
        while not answers(host, port):
            if superlink.poll() is not None or time.monotonic() > deadline:
                raise AnysizeError(f"the SuperLink did not start; its last words are in {log}:\n{last_lines(log)}")
            interrupts.pause(0.1)
        layout.write_connection(home, address)
        if insecure:
            say("INSECURE: no TLS, and any device that reaches the port may take part")
        else:
            say(admitted(home, address))
        say(f"ready on {host}:{port}; runs start with: anysize run FILE --engine flower --superlink {home}")
        while not until():
            for name, code in children.ended():
                raise AnysizeError(f"the {name} ended with code {code}; its last words:\n{last_lines(log)}")
            interrupts.pause(_WATCH_SECONDS)


def command(home: Path, host: str, port: int, insecure: bool) -> list[str]:
    """The command that starts the SuperLink."""
    certificates = home / layout.CERTIFICATES
    secure = [
        "--ssl-ca-certfile",
        str(certificates / layout.AUTHORITY),
        "--ssl-certfile",
        str(certificates / "server.crt"),
        "--ssl-keyfile",
        str(certificates / "server.key"),
        "--enable-supernode-auth",
    ]
    return [
        *(sys.executable, "-m", "anysize.deploy.superlink"),
        *(["--insecure"] if insecure else secure),
        *("--host", host, "--port", str(port), "--isolation", "subprocess"),
        *("--database", str(home / layout.DATABASE), "--disable-runtime-dependency-installation"),
    ]


def admitted(home: Path, address: Address) -> str:
    """Make the SuperLink's list of keys equal to the folder's, and return a line that lists the devices."""
    wanted = {public_key(path): name for name, path in layout.device_keys(home).items()}
    with Control(address) as control:
        listed = control.keys()
        for key, (node, name) in listed.items():
            if wanted.get(key) != name:
                control.release(node)
        for key, name in wanted.items():
            if key not in listed or listed[key][1] != name:
                control.admit(key, name)
    return f"{len(wanted)} devices may join: {', '.join(sorted(wanted.values())) or 'none yet'}"


def last_lines(path: Path, count: int = 12) -> str:
    """The end of a text file."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-count:])
