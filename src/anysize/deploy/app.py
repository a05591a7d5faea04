"""The Flower app of a fleet: on the server a run of anysize, on a device the client's side of it.

The app that `flwr run` ships only imports this module; server and devices have anysize installed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from anysize import config as configs
from anysize import interrupts
from anysize.deploy import folder as layout
from anysize.deploy.client import answerer
from anysize.deploy.engine import Devices
from anysize.deploy.gate import refuse_upper_bounds
from anysize.deploy.guard import Guard
from anysize.deploy.link import GridLink, Link
from anysize.deploy.roster import Roster
from anysize.deploy.server import HOME
from anysize.deploy.submit import MARK
from anysize.engines.base import Engine
from anysize.errors import AnysizeError, ConfigError
from anysize.experiment.experiment import Experiment
from anysize.report import write as write_report
from anysize.runs.runner import run
from anysize.wire import Json, Tensors

_WATCH_SECONDS, _GRACE_SECONDS = 0.5, 5.0

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """One run: rounds, checkpoints and events as on one machine, in the fleet's folder."""
    values = context.run_config
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        home = Path(os.environ[HOME])
    except KeyError:
        raise ConfigError(
            "the SuperLink was not started with `anysize server`, which names the fleet's folder"
        ) from None
    try:
        with interrupts.deferred(host=True):  # Flower's handlers raise at any instruction
            run_on(GridLink(grid), home, str(values["experiment"]), bool(values["resume"]), bool(values["overwrite"]))
    except AnysizeError as error:
        tell({"event": "error", "text": str(error)})
        raise


def _end_with_parent() -> None:
    """End this process soon after its parent: Flower's shutdown may wait for a server that has ended.

    A run can end at any time, since its checkpoint is replaced in one step.
    """
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    time.sleep(_GRACE_SECONDS)
    os._exit(1)


def run_on(link: Link, home: Path, text: str, resume: bool, overwrite: bool) -> None:
    """Run an experiment, by default the folder's, on the devices at the other end of a link."""
    config = configs.loads(text, folder=home) if text else configs.load(home / layout.EXPERIMENT)
    directory = home / layout.RUNS / config.name
    made = Experiment.from_config(config)
    refuse_upper_bounds(made.method)

    def engine(experiment: Experiment, kept: Mapping[int, Tensors]) -> Engine:
        roster = Roster.at(directory, layout.device_keys(home), fresh=not resume)
        return Devices(experiment, link, roster, Guard.of(experiment), tell)

    run(made, out=directory, resume=resume, overwrite=overwrite, on_event=tell, engine=engine)
    write_report(directory)
    tell({"event": "done", "directory": str(directory)})


def tell(event: Json) -> None:
    """Print an event to the run's log."""
    sys.stdout.write(f"{MARK}{json.dumps(event)}\n")
    sys.stdout.flush()


@client_app.query()
def introduce(message: Message, context: Context) -> Message:
    """The device's introduction."""
    return _answer(message, context)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """The update after local training."""
    return _answer(message, context)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Sums of the metrics on the device's holdout, or statistics for batch-norm."""
    return _answer(message, context)


def _answer(message: Message, context: Context) -> Message:
    """For a SuperNode that `anysize join` did not start: its --node-config names the device's file."""
    file = context.node_config.get("device")
    if not isinstance(file, str):
        raise ConfigError('--node-config must name the device\'s file: device="/path/to/device.toml"')
    return answerer(Path(file))(message)
