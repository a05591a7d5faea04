"""Fleets for real, on loopback: TLS, keys, four SuperNodes of four capacities, and what may befall them."""

from __future__ import annotations

import importlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import anysize as az
import small
from anysize import config as configs
from anysize.deploy import device_file, own_data
from anysize.runs.experiment import Experiment
from anysize.wire import dump, flatten

pytest.importorskip("flwr", reason="Flower is an extra")
loopback = importlib.import_module("loopback")
layout = importlib.import_module("anysize.deploy.folder")
certificates = importlib.import_module("anysize.deploy.certificates")

pytestmark = pytest.mark.slow

NAMES = loopback.DEVICES

HOSTILE = """
from dataclasses import replace

from anysize.deploy import example
from anysize.engines import service

honest = service.perform_any


def perform(context, method, sub_model, share, kept=None):
    update = honest(context, method, sub_model, share, kept)
    if sub_model.ticket.job != "train" or sub_model.ticket.round == 1:
        return update
    return replace(update, tensors={name: tensor * float("nan") for name, tensor in update.tensors.items()})


service.perform_any = perform


def load(device, devices):
    return example.digits(device, devices)
"""


def test_a_server_killed_in_a_round_goes_on_and_ends_in_the_bits_of_an_unbroken_run(tmp_path: Path) -> None:
    home = tmp_path / "fleet"
    with loopback.Loopback(home, loopback.experiment(rounds=8, min_clients=4), NAMES) as fleet:
        fleet.serve()
        fleet.join()
        fleet.run()
        fleet.wait(lambda: len(fleet.rounds("fleet")) >= 2, 180, "run")
        time.sleep(0.3)  # the next round has begun
        kill_tree(fleet.pid("server"))
        fleet.kill("run", signal.SIGKILL)
        fleet.wait(lambda: not named(home, "flwr-serverapp"), 30, "cam")
        done = len(fleet.rounds("fleet"))
        assert 2 <= done < 8
        fleet.serve()
        fleet.run("--resume")
        said = fleet.finished()
        events = fleet.events("fleet")
    assert "8 rounds" in said
    (resumed,) = [event["round"] for event in events if event["event"] == "resume"]
    assert resumed in (done, done - 1)  # the log may be a round ahead of the checkpoint
    assert [event["round"] for event in events if event["event"] == "round"] == [*range(1, 9)]
    assert not any(event.get("missing") for event in events)
    assert loopback.left_behind(home) == []
    there = az.load(home / "runs" / "fleet")
    assert dump(*flatten(there.state)) == dump(*flatten(unbroken(tmp_path, there.config).state))


def test_a_killed_device_a_liar_and_a_stranger_cost_their_own_updates_alone(tmp_path: Path) -> None:
    home = tmp_path / "fleet"
    text = loopback.experiment(rounds=600, min_clients=2, round_timeout=15.0)
    with loopback.Loopback(home, text, NAMES) as fleet:
        poison(home / "devices" / "phone")
        fleet.serve()
        layout.extend(home, layout.named(["zz-stranger=1.0"]), None)  # the server does not know its key
        fleet.join(*NAMES, "zz-stranger")
        fleet.run()
        fleet.wait(lambda: took_part(fleet.rounds("fleet")) >= {0, 1, 3}, 240, "run")
        kill_tree(fleet.pid("van"))
        fleet.wait(lambda: 3 in missing(fleet.rounds("fleet")), 120, "run")
        gone = fleet.rounds("fleet")[-1]["round"]
        fleet.join("van")
        fleet.wait(lambda: 3 in took_part(fleet.rounds("fleet")[gone:]), 240, "run")
        fleet.kill("run", signal.SIGTERM)
        rounds = fleet.rounds("fleet")
        assert "Failed to initialize the connection" in fleet.log("zz-stranger")
    told = {entry["why"] for r in rounds[1:] for entry in r.get("missing", []) if entry["client"] == 2}
    assert any("not finite" in why for why in told)
    assert all("not finite" in why or "too late" in why for why in told)
    assert not any(2 in took_part([r]) for r in rounds[1:])  # the liar's updates count in no round but the first
    assert set(missing(rounds)) <= {0, 1, 2, 3}
    assert all(took_part([r]) & {0, 1, 3} for r in rounds if not r.get("void"))
    state, _ = flatten(az.load(home / "runs" / "fleet").state)
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())
    assert loopback.left_behind(home) == []


BAD_LINE = """
from anysize.deploy import example, worker

worker.AGAIN = (0.1, 0.1)
deliver, fetched, open_ = worker.Node._deliver, worker.Node._fetched, []


def job(message):
    return message.metadata.message_type == "train"


def fetch(self, about, tree):
    if job(about):
        open_.append(tree)
        if len(open_) == 1 or 3 < len(open_) < 7:  # once in the first round, every time in the third
            raise OSError("no message")
    return fetched(self, about, tree)


def send(self, reply):
    if job(reply) and len(open_) == 3 and not reply.has_error():  # every time in the second round
        raise OSError("no answer")
    return deliver(self, reply)


worker.Node._fetched, worker.Node._deliver = fetch, send


def load(device, devices):
    return example.digits(device, devices)
"""


def test_a_transfer_that_fails_is_tried_again_and_then_missing_with_its_reason(tmp_path: Path) -> None:
    """Without a limit of a round's time, a message that was fetched in part would end all rounds."""
    home = tmp_path / "fleet"
    text = loopback.experiment(rounds=4, min_clients=2, round_timeout=200.0)
    with loopback.Loopback(home, text, {"board": 0.5, "van": 1.0}) as fleet:
        poison(home / "devices" / "van", BAD_LINE)
        fleet.serve()
        fleet.join()
        fleet.run()
        fleet.finished(180)
        rounds = fleet.rounds("fleet")
    why = [[entry["why"] for entry in r.get("missing", []) if entry["task"] == "train"] for r in rounds]
    assert why == [
        [],
        ["could not deliver its answer: OSError; its own log says more"],
        ["could not fetch its message: OSError; its own log says more"],
        [],
    ]
    assert [sorted(client["client"] for client in r["clients"]) for r in rounds] == [[0, 1], [0], [0], [0, 1]]
    assert loopback.left_behind(home) == []


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server, and two devices of which one can train half of what the other can."""
    home = tmp_path_factory.mktemp("unequal") / "fleet"
    text = configs.dumps(configs.from_dict(small.fleet_tables("heterofl")))
    with loopback.Loopback(home, text, {"board": 0.5, "van": 1.0}) as fleet:
        fleet.serve()
        fleet.join()
        yield fleet
    assert loopback.left_behind(home) == []


@pytest.mark.parametrize("case", [case for case in small.METHODS if "channels" in case or "," not in case])
def test_every_method_trains_on_devices_of_unequal_capacity(unequal: Any, case: str) -> None:
    name = re.sub(r"\W+", "-", case)
    text = configs.dumps(configs.from_dict(small.fleet_tables(case) | {"name": name}))
    (unequal.home / layout.EXPERIMENT).write_text(text)
    unequal.run()
    said = unequal.finished()
    rounds = unequal.rounds(name)
    assert [sorted(client["client"] for client in r["clients"]) for r in rounds] == [[0, 1]] * 2, said
    assert not any("missing" in r for r in rounds)
    assert set(rounds[-1]["client_metrics"]) == {"0.5", "1.0"}
    state, _ = flatten(az.load(unequal.home / layout.RUNS / name).state)
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())


def took_part(rounds: list[Any]) -> set[int]:
    """The clients whose updates counted in rounds."""
    return {client["client"] for r in rounds if not r.get("void") for client in r["clients"]}


def missing(rounds: list[Any]) -> list[int]:
    """The clients that were missing from rounds."""
    return [entry["client"] for r in rounds for entry in r.get("missing", [])]


def unbroken(folder: Path, config: Any) -> Any:
    """The same experiment in this process: each client has its device's share and capacity."""
    names = sorted(NAMES)
    tables = config.to_dict()
    groups = [{"name": repr(NAMES[name]), "clients": 1, "capacity": NAMES[name]} for name in names]
    tables["devices"] = {"assignment": "order", "groups": groups}
    tables["data"] |= {"name": "example", "clients": len(names)}
    tables["tricks"]["weighting"] = "clients"
    tables["engine"] = {"name": "inprocess"}
    signature = Experiment.from_config(config).signature
    files = [folder / "fleet" / "devices" / name / "device.toml" for name in names]

    def load(device: int) -> Any:
        return own_data.own_share(device_file.load(files[device]), config, signature)

    made = Experiment.from_config(configs.from_dict(tables), data=load)
    made.signature = signature
    return made.run(folder / "here")


def poison(folder: Path, code: str = HOSTILE) -> None:
    """Gives a device code of its own; by default it sends numbers that are none."""
    (folder / "hostile.py").write_text(code)
    file = folder / "device.toml"
    file.write_text(file.read_text().replace("anysize.deploy.example:digits", "hostile:load"))


def named(home: Path, command: str) -> list[int]:
    """Processes of a fleet that run a command."""
    return [pid for pid, arguments in loopback.processes_of(home) if any(command in text for text in arguments)]


def kill_tree(root: int) -> None:
    """Kills a process and all that descend from it, at once, as a machine does that loses its power."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    doomed = {root}
    while more := {pid for pid, parent in parents.items() if parent in doomed} - doomed:
        doomed |= more
    for pid in doomed:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
