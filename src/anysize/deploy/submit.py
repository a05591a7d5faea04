"""`anysize run FILE --engine flower --superlink X`: starts the run on the server and follows it to its end."""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from anysize import config as configs
from anysize import interrupts
from anysize.config.tables import ExperimentConfig
from anysize.deploy import folder as layout
from anysize.deploy.control import COMPLETED, Control
from anysize.deploy.folder import Address
from anysize.errors import AnysizeError, ConfigError, unknown
from anysize.wire import Json

MARK = "anysize: "
"""Begins a line in the server's log that holds an event."""


def submit(
    config: ExperimentConfig,
    superlink: str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: Callable[[Json], None] = lambda event: None,
) -> str:
    """Run an experiment on a fleet to its end, and return the run directory on the server's disk.

    Args:
        config: the experiment. Code that it names must be in the fleet's folder on the server.
        superlink: the fleet's folder, on the server's machine; or a name in Flower's config.toml.
        resume: continue the run on the server.
        overwrite: replace it.
        on_event: called with every event as it happens.
    """
    address = located(superlink)
    with (
        interrupts.immediate(),
        Control(address) as control,
        tempfile.TemporaryDirectory(prefix="anysize-app-") as folder,
    ):
        app = layout.write_app(Path(folder) / "app")
        values = {"experiment": configs.dumps(config), "resume": resume, "overwrite": overwrite}
        run = control.start(app, values)
        ended = _followed(control, run, on_event)
        outcome, details = control.outcome(run)
    errors = [event["text"] for event in ended if event["event"] == "error"]
    if errors or outcome != COMPLETED or not ended:
        raise AnysizeError(errors[-1] if errors else f"the run {outcome} on the server: {details or 'it was ended'}")
    return str(ended[-1]["directory"])


def _followed(control: Control, run: int, on_event: Callable[[Json], None]) -> list[Json]:
    """The error events of a run; passes on every event as it comes. An interrupt here stops the run."""
    ended: list[Json] = []
    try:
        for event in filter(None, map(event_in, control.lines(run))):
            interrupts.check()
            ended += [event] if event["event"] in ("done", "error") else []
            on_event(event)
    except BaseException:
        control.stop(run)
        raise
    return ended


def located(superlink: str) -> Address:
    """The address of a SuperLink, from a fleet's folder or a name in Flower's config.toml."""
    folder = Path(superlink)
    if folder.is_dir():
        return connection(folder / layout.FLOWER / "config.toml", layout.NAME)
    from flwr.supercore.utils import get_flwr_home

    return connection(Path(get_flwr_home()) / "config.toml", superlink)


def connection(file: Path, name: str) -> Address:
    """The SuperLink of that name in Flower's config.toml."""
    try:
        known: Mapping[str, Any] = tomllib.loads(file.read_text(encoding="utf-8")).get("superlink", {})
    except FileNotFoundError:
        raise ConfigError(
            f"{file} does not exist: --superlink takes the folder that `anysize deploy init` made, or a name in it"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None
    about = known.get(name)
    if not isinstance(about, dict):
        names = [key for key, value in known.items() if isinstance(value, dict)]
        raise ConfigError(f"--superlink: {unknown('SuperLink', name, names)} ({file})")
    if not isinstance(about.get("address"), str):
        raise ConfigError(f"{file}: superlink.{name} has no address")
    certificate = about.get("root-certificates")
    if not about.get("insecure", False) and not isinstance(certificate, str):
        raise ConfigError(f"{file}: superlink.{name} needs root-certificates, or insecure = true")
    secured = None if about.get("insecure", False) else (file.parent / str(certificate)).resolve()
    return Address(about["address"], secured)


def event_in(line: str) -> Json | None:
    """The event in a line of the server's log, if it holds one.

    >>> event_in('anysize: {"event": "round", "round": 1}'), event_in("INFO : hello")
    ({'event': 'round', 'round': 1}, None)
    """
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        event = json.loads(text)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
