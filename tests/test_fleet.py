"""Fleets without a network: what is laid out, who is which client, what an answer may be, what a device keeps."""

from __future__ import annotations

import asyncio
import csv
import importlib
import math
import re
import signal
import ssl
import stat
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import small
from anysize import config as configs
from anysize.client.work import needs_calibration
from anysize.data import DeviceShares
from anysize.deploy import device_file, own_data
from anysize.deploy.footprint import FOOTPRINTS, written
from anysize.deploy.guard import Guard
from anysize.deploy.own_files import copy_into, own_files, undefined
from anysize.engines.base import Absence
from anysize.engines.inprocess import InProcess
from anysize.errors import AnysizeError, CheckpointError, ConfigError, TrustError
from anysize.experiment.lookup import step_timed
from anysize.methods import HeteroFL
from anysize.methods.messages import Client
from anysize.methods.size import Size
from anysize.runs.experiment import Experiment
from anysize.runs.runner import run
from anysize.server.calibration import calibrated
from anysize.server.round import run_round
from anysize.wire import dump, flatten
from pages import page_of, rows

pytest.importorskip("flwr", reason="Flower is an extra")
app = importlib.import_module("anysize.deploy.app")
certificates = importlib.import_module("anysize.deploy.certificates")
check = importlib.import_module("anysize.deploy.check")
children = importlib.import_module("anysize.deploy.children")
client = importlib.import_module("anysize.deploy.client")
engine = importlib.import_module("anysize.deploy.engine")
example = importlib.import_module("anysize.deploy.example")
flower = importlib.import_module("flwr.app")
introduction = importlib.import_module("anysize.deploy.introduction")
layout = importlib.import_module("anysize.deploy.folder")
link = importlib.import_module("anysize.deploy.link")
loopback = importlib.import_module("loopback")
messages = importlib.import_module("anysize.engines.flower_records")
roster = importlib.import_module("anysize.deploy.roster")
submit = importlib.import_module("anysize.deploy.submit")
superlink = importlib.import_module("anysize.deploy.superlink")

NAMES = loopback.DEVICES
EXPERIMENT = loopback.experiment(rounds=2, min_clients=1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def laid_out(folder: Path, names: dict[str, float] | None = None, text: str = EXPERIMENT) -> Path:
    file = folder / "own.toml"
    file.write_text(text)
    wanted = {name: {"capacity": capacity} for name, capacity in (names or NAMES).items()}
    home = folder / "fleet"
    layout.lay_out(home, layout.planned(file, wanted, [], 18000, None))
    return home


class Wire:
    """Devices in this process in place of a network; `faults` change what a device would answer."""

    def __init__(self, home: Path, *names: str) -> None:
        self.home = home
        self.there = {100 + place: name for place, name in enumerate(names or sorted(layout.device_keys(home)))}
        self.faults: dict[str, Callable[[str, Any, Any], Any]] = {}
        self.sent: list[tuple[str, str, Any]] = []
        self._desks: dict[str, Any] = {}
        self._replies: dict[str, Any] = {}

    def nodes(self) -> list[Any]:
        return [link.Node(number, name, "now") for number, name in self.there.items()]

    def send(self, node: int, kind: str, content: Any, round: int, seconds: float | None) -> str | None:
        name = self.there[node]
        self.sent.append((name, kind, content))
        number = f"m{len(self.sent)}"
        if name not in self._desks:
            self._desks[name] = client.Service(self.home / "devices" / name / "device.toml")
        answer = self._desks[name].reply(kind, content)
        fault = self.faults.get(name)
        reply = link.Reply(answer) if fault is None else fault(kind, content, answer)
        if reply is not None:
            self._replies[number] = reply
        return number

    def replies(self, sent: Collection[str]) -> dict[str, Any]:
        return {number: self._replies.pop(number) for number in sent if number in self._replies}


def made(home: Path, wire: Wire, folder: Path, *changes: str) -> tuple[Experiment, Any]:
    experiment = Experiment.from_config(configs.load(home / "experiment.toml", changes))
    book = roster.Roster.at(folder, layout.device_keys(home))
    return experiment, engine.Devices(experiment, wire, book, Guard.of(experiment))


def test_private_keys_are_for_their_owner_alone_and_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    home = laid_out(tmp_path)
    private = [*home.glob("certificates/*.key"), *home.glob("devices/*/key")]
    assert len(private) == 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in [*private]} == {0o600}
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="already holds a fleet"):
        laid_out(tmp_path)
    with pytest.raises(ConfigError, match="not empty"):
        layout.lay_out(tmp_path, layout.planned(None, None, [], 1, None))


def test_device_files_are_complete_and_hold_no_key_of_the_server(tmp_path: Path) -> None:
    home = laid_out(tmp_path)
    for name, capacity in NAMES.items():
        folder = home / "devices" / name
        device = device_file.load(folder / "device.toml")
        assert (device.name, device.capacity, device.server) == (name, capacity, "127.0.0.1:18000")
        assert device.path(device.key or "").is_file()
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            ["authority.crt", "device.toml", "experiment.toml", "key", "key.pub"]
        )


def test_devices_added_later_leave_the_others_keys_alone(tmp_path: Path) -> None:
    home = laid_out(tmp_path)
    before = {path: path.read_bytes() for path in home.glob("devices/*/key")}
    layout.extend(home, layout.named(["late=0.5"]), None)
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(layout.device_keys(home)) == sorted([*NAMES, "late"])
    with pytest.raises(ConfigError, match="exists already"):
        layout.extend(home, layout.named(["late=0.5"]), None)


def test_mistakes_in_a_layout_are_all_named_at_once(tmp_path: Path) -> None:
    plan = layout.planned(None, {"../up": {"capacity": 0.5}}, ["http://x"], 99999, None)
    with pytest.raises(ConfigError) as refused:
        layout.lay_out(tmp_path / "fleet", plan)
    assert [word in str(refused.value) for word in ("'../up'", "'http://x'", "99999")] == [True] * 3
    assert not (tmp_path / "fleet").exists()
    simulated = small.file(tmp_path)
    with pytest.raises(ConfigError, match=r'data\.name = "devices"'):
        layout.planned(simulated, None, [], 1, None)


def test_the_server_certificate_is_good_for_its_hosts_and_for_no_other(tmp_path: Path) -> None:
    signer = certificates.authority("tests", 2)
    server = certificates.server_certificate(signer, ["localhost", "127.0.0.1"], 1)
    stranger = certificates.authority("strangers", 2)
    for name, content in (("crt", server.public), ("key", server.private)):
        (tmp_path / f"server.{name}").write_bytes(content)

    def shakes_hands(authority: bytes, host: str) -> bool:
        ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
        serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        serving.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
        asking = ssl.create_default_context(cadata=authority.decode())
        a = asking.wrap_bio(theirs, ours, server_hostname=host)
        b = serving.wrap_bio(ours, theirs, server_side=True)
        for _ in range(4):
            for side in (a, b):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLCertVerificationError:
                    return False
        return True

    assert shakes_hands(signer.public, "localhost")
    assert shakes_hands(signer.public, "127.0.0.1")
    assert not shakes_hands(signer.public, "example.org")
    assert not shakes_hands(stranger.public, "localhost")


def test_device_keys_are_what_ssh_and_flower_read(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    pair = certificates.device_key()
    key = serialization.load_ssh_private_key(pair.private, None)
    public = serialization.load_ssh_public_key(pair.public)
    assert key.public_key().public_numbers() == public.public_numbers()  # type: ignore[union-attr]
    (tmp_path / "key.pub").write_bytes(pair.public)
    control = importlib.import_module("anysize.deploy.control")
    assert control.public_key(tmp_path / "key.pub")
    (tmp_path / "key.pub").write_text("rubbish")
    with pytest.raises(ConfigError, match="not a public key"):
        control.public_key(tmp_path / "key.pub")


def test_only_devices_reach_the_server_from_another_machine() -> None:
    async def fine(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def status(path: str, host: str) -> int:
        said: list[Any] = []

        async def send(message: Any) -> None:
            said.append(message)

        scope = {"type": "http", "path": path, "client": (host, 4711)}
        asyncio.run(superlink.OnlyDevicesFromOutside(fine)(scope, None, send))
        return int(said[0]["status"])

    paths = ("/v1/fleet/pull-messages", "/v1/control/start-run", "/v1/runtime/acquire-task")
    assert [status(path, "10.0.0.7") for path in paths] == [200, 403, 403]
    assert [status(path, "127.0.0.1") for path in paths] == [200, 200, 200]


def test_a_request_passes_only_the_layers_of_flower_that_concern_it() -> None:
    made = importlib.import_module("flwr.superlink.main")._get_middleware()
    passed: list[str] = []

    def noting(name: str) -> Any:
        class Layer:
            def __init__(self, app: Any, **options: Any) -> None:
                self._app = app

            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                passed.append(name)
                await self._app(scope, receive, send)

        return type(name, (Layer,), {})

    async def end(scope: Any, receive: Any, send: Any) -> None:
        passed.append("end")

    def layers(path: str) -> list[str]:
        app: Any = end
        for layer in reversed(
            superlink.only_concerned(
                [importlib.import_module("starlette.middleware").Middleware(noting(m.cls.__name__)) for m in made]
            )
        ):
            app = layer.cls(app, **layer.kwargs)
        passed.clear()
        asyncio.run(app({"type": "http", "path": path}, None, None))
        return [*passed]

    always = ["BaseHTTPMiddleware", "ProtobufTranslationMiddleware"]  # the first turns errors into answers
    assert layers("/v1/fleet/pull-messages") == [*always, "NodeAuthMiddleware", "FleetEventLogMiddleware", "end"]
    assert layers("/v1/runtime/pull-messages") == [*always, "RuntimeTracingMiddleware", "end"]
    control = layers("/v1/control/start-run")
    assert [name for name in control if "Control" in name] == [
        *("ControlSensitiveResponseMiddleware", "ControlAuthenticationMiddleware"),
        *("ControlLicenseMiddleware", "ControlEventLogMiddleware"),
    ]
    assert {*always, "end"} < set(control)


def test_a_small_message_is_three_objects_for_flower_and_a_large_one_shares_its_arrays() -> None:
    inflatable = importlib.import_module("flwr.supercore.inflatable.inflatable_object")
    small, large = ([b"a" * size, b"b"] for size in (1000, 1_000_000))
    for blobs in ([], small, large):
        content = messages.with_note({"round": 1}, messages.record(blobs))
        assert messages.note_in(content) == {"round": 1}
        assert messages.blobs_in(content) == blobs
    content = messages.with_note({"round": 1}, messages.record(small))
    assert len(inflatable.get_all_nested_objects(content)) == 2  # the third is the message
    record = messages.record(large)
    assert messages.with_note({}, record)["arrays"] is messages.with_note({"round": 1}, record)["arrays"]
    foreign = flower.RecordDict({"note": flower.ConfigRecord({"json": "{}", "0000": 1.0})})
    with pytest.raises(AnysizeError, match="blobs are not bytes"):
        messages.blobs_in(foreign)


def test_a_device_that_comes_back_is_the_client_that_it_was(tmp_path: Path) -> None:
    first = roster.Roster.at(tmp_path, ["van", "cam"])
    first.enter(["board"])
    again = roster.Roster.at(tmp_path, [])
    again.enter(["cam", "board", "phone"])
    assert again.clients == {"cam": 0, "van": 1, "board": 2, "phone": 3}
    assert again.run == first.run
    assert roster.Roster.at(tmp_path, [], fresh=True).run != first.run
    (tmp_path / roster.FILE).write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        roster.Roster.at(tmp_path, [])


def test_a_fleet_ends_in_the_bits_of_one_process(tmp_path: Path) -> None:
    """The oracle: the same shares in a simulation, with the norm layers that stay on the devices."""
    home = laid_out(tmp_path)
    wire = Wire(home)

    def on_wire(experiment: Experiment, kept: Any) -> Any:
        book = roster.Roster.at(tmp_path / "there", layout.device_keys(home))
        return engine.Devices(experiment, wire, book, Guard.of(experiment))

    experiment = Experiment.from_config(configs.load(home / "experiment.toml"))
    there = run(experiment, out=tmp_path / "there", engine=on_wire)
    here = simulated(tmp_path, experiment.config)
    assert dump(*flatten(there.state)) == dump(*flatten(here.state))
    told = [[{k: v for k, v in c.items() if k != "samples"} for c in r["clients"]] for r in there.history]
    assert told == [[{k: v for k, v in c.items() if k != "samples"} for c in r["clients"]] for r in here.history]
    assert {kind for _, kind, _ in wire.sent} == {"query", "train", "evaluate"}


def test_devices_are_told_every_value_and_follow_no_defaults_of_their_own(tmp_path: Path) -> None:
    home = laid_out(tmp_path)
    wire = Wire(home)
    experiment, ours = made(home, wire, tmp_path)
    ours.fleet(1, experiment.fleet)
    told = tomllib.loads(messages.note_in(wire.sent[0][2])["hello"]["brief"]["config"])
    assert told["tricks"] == asdict(experiment.tricks)
    assert told["method"] == {"name": "heterofl", **asdict(HeteroFL())}


@pytest.mark.parametrize("case", small.fast_if(lambda case: "," not in case or "first" in case, small.METHODS))
def test_devices_of_unequal_capacity_take_part_in_every_method(tmp_path: Path, case: str) -> None:
    """The server's own messages, through all that a device does with them, but for Flower's processes."""
    home = laid_out(tmp_path, {"board": 0.5, "van": 1.0}, configs.dumps(configs.from_dict(small.fleet_tables(case))))
    wire = Wire(home)

    def on_wire(experiment: Experiment, kept: Any) -> Any:
        book = roster.Roster.at(tmp_path / "there", layout.device_keys(home))
        return engine.Devices(experiment, wire, book, Guard.of(experiment))

    experiment = Experiment.from_config(configs.load(home / "experiment.toml"))
    there = run(experiment, out=tmp_path / "there", engine=on_wire)
    assert [sorted(entry["client"] for entry in r["clients"]) for r in there.history] == [[0, 1]] * 2
    assert [r.get("missing", []) for r in there.history] == [[], []]
    asked = [ticket["job"] for _, _, content in wire.sent for ticket in messages.note_in(content).get("tickets", [])]
    calibrates = needs_calibration(experiment.context)
    assert {*asked} == {"train", "evaluate"} | ({"calibrate"} if calibrates else set())
    assert set(there.history[-1]["client_metrics"]) == {"0.5", "1.0"}


def test_a_method_that_sends_more_than_devices_can_train_is_refused_on_both_sides(tmp_path: Path) -> None:
    home = laid_out(tmp_path, {"board": 0.5}, configs.dumps(configs.from_dict(small.fleet_tables("fedavg"))))
    experiment, ours = made(home, Wire(home), tmp_path, "method.width=each")
    refused = "FedAvg with these options sends devices more than they can train"
    board = client.Service(home / "devices" / "board" / "device.toml")
    with pytest.raises(TrustError, match=refused):
        board.answered("query", messages.with_note({"hello": ours._hello}, messages.record([])))
    before = home / "runs" / "fleet"
    before.mkdir(parents=True)
    (before / "notes.txt").write_text("mine")
    with pytest.raises(TrustError, match=refused):
        app.run_on(Wire(home), home, configs.dumps(experiment.config), resume=False, overwrite=True)
    assert [path.name for path in before.iterdir()] == ["notes.txt"]


def test_the_report_and_the_status_of_a_fleet_name_its_devices_and_what_they_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = laid_out(tmp_path, text=EXPERIMENT.replace("evaluate_every = 2", "evaluate_every = 1"))
    wire = Wire(home)
    wire.faults["phone"] = lambda kind, content, answer: link.Reply(answer if kind == "query" else None, "lost its way")

    def on_wire(experiment: Experiment, kept: Any) -> Any:
        book = roster.Roster.at(tmp_path / "there", layout.device_keys(home))
        return engine.Devices(experiment, wire, book, Guard.of(experiment))

    run(Experiment.from_config(configs.load(home / "experiment.toml")), out=tmp_path / "there", engine=on_wire)
    with (tmp_path / "there" / "clients.csv").open(newline="") as file:
        own = {(row["round"], row["client"]): row["accuracy"] for row in csv.DictReader(file)}
    assert {client for _, client in own} == {"0", "1", "3"}
    page = page_of(tmp_path / "there")
    assert "4 devices" in page.text
    assert "No evaluation yet" not in page.text
    found = {row["device"]: row for row in rows(tmp_path / "there", "devices")}
    assert {name: row["group"] for name, row in found.items()} == {n: repr(capacity) for n, capacity in NAMES.items()}
    last = {name: own["2", found[name]["client"]] for name in ("board", "cam", "van")}
    assert {name: row["accuracy"] for name, row in found.items()} == last | {"phone": ""}
    assert (found["phone"]["took_part"], found["phone"]["missing"]) == ("0", "4")
    over = {(row["round"], row["size"]): row["accuracy"] for row in rows(tmp_path / "there", "over-rounds")}
    assert over == {(number, repr(NAMES[name])): own[number, found[name]["client"]] for number in "12" for name in last}
    code, told, _ = small.call(monkeypatch, capsys, "status", tmp_path / "there")
    assert code == 0
    told = " ".join(told.split())
    means = "  ".join(f"{NAMES[name]!r}: {float(last[name]):.3f}" for name in sorted(last, key=NAMES.__getitem__))
    assert f"accuracy on the clients' own data at round 2: {' '.join(means.split())}" in told
    assert "4 devices: board (0.5), cam (0.25), phone (0.75), van (1.0)" in told
    assert "phone, client 2 (train): lost its way" in told


def test_devices_are_asked_once_and_get_the_largest_size_that_they_can_train(tmp_path: Path) -> None:
    names = {"a-quarter": 0.25, "b-between": 0.6, "c-whole": 1.0, "d-tiny": 0.1}
    home = laid_out(tmp_path, names)
    file = home / "devices" / "a-quarter" / "device.toml"
    text = file.read_text().replace("capacity = 0.25\n", "")
    experiment = Experiment.from_config(configs.load(home / "experiment.toml"))
    half = experiment.cost(experiment.size_of_group["0.5"])
    file.write_text(f"{text}\n[budget]\nparameters = {half.parameters}\n")
    said: list[str] = []
    wire = Wire(home)
    book = roster.Roster.at(tmp_path, layout.device_keys(home))
    ours = engine.Devices(experiment, wire, book, Guard.of(experiment), lambda event: said.append(event["text"]))
    fleet = ours.fleet(1, experiment.fleet)
    assert {c: fleet.group_of(c, 1).name for c in fleet.participants(1)} == {0: "0.5", 1: "0.5", 2: "1.0"}
    assert any("d-tiny cannot take part" in text and "below the smallest" in text for text in said)
    before = len(wire.sent)
    ours.fleet(2, experiment.fleet)
    assert len(wire.sent) == before


def with_budget(home: Path, name: str, **budget: float) -> None:
    """Gives a device a budget in place of what its file says."""
    file = home / "devices" / name / "device.toml"
    kept = file.read_text().split("[budget]")[0]
    lines = [line for line in kept.splitlines() if not line.startswith("capacity")]
    limits = "\n".join(f"{unit} = {limit}" for unit, limit in budget.items())
    file.write_text("\n".join(lines) + f"\n[budget]\n{limits}\n")


def rounds_of(experiment: Experiment, ours: Any) -> Callable[[int], dict[int, Any]]:
    """A function that gives, for a round, the size that each of two clients is sent and its answer."""
    state = experiment.method.init(experiment.context)

    def answers(number: int) -> dict[int, Any]:
        fleet = ours.fleet(number, experiment.fleet)
        sizes = {c: experiment.size_of_group[fleet.group_of(c, number).name] for c in (0, 1)}
        sent = [
            experiment.method.extract(experiment.context, state, Client(c, c, size, number, 8, 0))
            for c, size in sizes.items()
        ]
        asked = (replace(m, ticket=replace(m.ticket, rate=0.1)) for m in sent)
        return {c: (sizes[c].label, answer) for c, answer in zip(sizes, ours.perform(asked))}

    return answers


def test_a_device_whose_budget_falls_says_so_and_gets_a_smaller_model_in_the_next_round(tmp_path: Path) -> None:
    home = laid_out(tmp_path, {"a-cam": 1.0, "b-van": 1.0})
    experiment, ours = made(home, wire := Wire(home), tmp_path)
    costs = {name: experiment.cost(size).parameters for name, size in experiment.size_of_group.items()}
    assert ours.fleet(1, experiment.fleet).group_of(0, 1).name == "1.0"
    answers = rounds_of(experiment, ours)
    with_budget(home, "a-cam", parameters=costs["0.25"])
    first = answers(1)
    assert isinstance(first[0][1], Absence)  # what was sent is more than it can afford now
    assert first[1][0] == "1.0"
    second = answers(2)
    assert second[0][0] == "0.25"
    assert not isinstance(second[0][1], Absence)
    with_budget(home, "a-cam", parameters=costs["1.0"])
    answers(3)
    assert answers(4)[0][0] == "1.0"
    assert [kind for _, kind, _ in wire.sent].count("query") == 2


def test_a_budget_of_memory_that_falls_is_held_against_what_the_device_measured(tmp_path: Path) -> None:
    """Predicted are more than 40 MB for every size: by that, nothing would fit."""
    home = laid_out(tmp_path, {"a-cam": 1.0, "b-van": 1.0})
    with_budget(home, "a-cam", memory_bytes=35e6)
    experiment, ours = made(home, Wire(home), tmp_path)
    took = {Size(0.25): 20e6, Size(0.5): 30e6, Size(0.75): 60e6, Size(1.0): math.inf}
    (home / "devices" / "a-cam" / FOOTPRINTS).write_bytes(written(step_timed(experiment), took))
    answers = rounds_of(experiment, ours)
    assert answers(1)[0][0] == "0.5"
    with_budget(home, "a-cam", memory_bytes=25e6)
    refused = answers(2)
    assert (refused[0][0], type(refused[0][1])) == ("0.5", Absence)
    third = answers(3)
    assert third[0][0] == "0.25"
    assert not isinstance(third[0][1], Absence)


def test_a_budget_of_time_is_held_against_what_the_device_measured_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a clock that says ten milliseconds for every quarter of the width."""
    home = laid_out(tmp_path, {"a-cam": 1.0, "b-van": 1.0})
    monkeypatch.setattr(client, "own_latency", lambda *known: lambda size: 40 * size.width)
    with_budget(home, "a-cam", latency_ms=25)
    experiment, ours = made(home, wire := Wire(home), tmp_path)
    fleet = ours.fleet(1, experiment.fleet)
    assert [fleet.group_of(c, 1).name for c in (0, 1)] == ["0.5", "1.0"]
    state = experiment.method.init(experiment.context)
    size = experiment.size_of_group["1.0"]
    message = experiment.method.extract(experiment.context, state, Client(0, 0, size, 1, 8, 0))
    message = replace(message, ticket=replace(message.ticket, rate=0.1))
    [answer] = list(ours.perform([message]))
    assert isinstance(answer, Absence)
    assert "budget, latency_ms = 25, allows" in answer.why
    assert wire.sent


def test_a_device_that_comes_later_joins_from_the_next_round(tmp_path: Path) -> None:
    home = laid_out(tmp_path)
    wire = Wire(home, "van", "cam")
    experiment, ours = made(home, wire, tmp_path)
    assert ours.fleet(1, experiment.fleet).participants(1) == [1, 3]
    wire.there[500] = "board"
    del wire.there[100]
    ours.fleet(2, experiment.fleet)  # it is asked now
    assert ours.fleet(3, experiment.fleet).participants(3) == [0, 1]


def test_a_key_speaks_for_no_other_device(tmp_path: Path) -> None:
    home = laid_out(tmp_path)
    wire = Wire(home, "cam", "van")

    def pretend(kind: str, content: Any, answer: Any) -> Any:
        return link.Reply(messages.with_note(introduction.Introduction("van", 1.0).to_note(), messages.record([])))

    wire.faults["cam"] = pretend
    experiment, ours = made(home, wire, tmp_path)
    fleet = ours.fleet(1, experiment.fleet)
    assert fleet.participants(1) == [3]
    assert ours._here.nodes[3].name == "van"


@pytest.mark.parametrize(
    "note, why",
    [
        ({}, "did not say its name"),
        ({"device": {"name": "cam\x1b[31m", "capacity": 0.5}}, "not a short plain name"),
        ({"device": {"name": "cam"}}, "capacity or a budget"),
        ({"device": {"name": "cam", "capacity": 2.0}}, "at most 1"),
        ({"device": {"name": "cam", "capacity": True}}, "at most 1"),
        ({"device": {"name": "cam", "budget": {"pigs": 3}}}, "unknown units"),
        ({"device": {"name": "cam", "budget": {"macs": -3}}}, "above 0"),
        ({"failure": "no\x1b[31mdata"}, r"says: no \[31mdata"),
    ],
)
def test_introductions_that_make_no_sense_are_refused(note: Any, why: str) -> None:
    with pytest.raises(AnysizeError, match=why):
        introduction.Introduction.of(note)


def test_whatever_goes_wrong_costs_one_device_its_update_and_is_named(tmp_path: Path) -> None:
    home = laid_out(tmp_path)
    wire = Wire(home)
    experiment, ours = made(home, wire, tmp_path, "engine.round_timeout=0.3")
    planned = ours.fleet(1, experiment.fleet)
    state = experiment.method.init(experiment.context)
    wire.faults = {
        "board": lambda kind, content, answer: None,  # 0: never answers
        "cam": lambda kind, content, answer: link.Reply(None, "Node Unavailable"),  # 1: error 5
        "phone": lambda kind, content, answer: link.Reply(messages.RecordDict({})),  # 2: rubbish
    }
    sizes = {c: experiment.size_of_group[planned.group_of(c, 1).name] for c in range(4)}
    everybody = [Client(c, c, sizes[c], 1, 1, 0) for c in (3, 2, 1, 0)]
    after, tally = run_round(experiment.context, experiment.method, state, everybody, ours, 0.05)
    assert [client["client"] for client in tally.clients] == [3]
    why = {entry["client"]: entry["why"] for entry in tally.missing}
    assert "too late" in why[0]
    assert why[1] == "Node Unavailable"
    assert "invalid" in why[2]
    alone, _ = run_round(experiment.context, experiment.method, state, everybody[:1], ours, 0.05)
    assert dump(*flatten(after)) == dump(*flatten(alone))
    del wire.there[103]
    ours.fleet(2, experiment.fleet)
    _, tally = run_round(experiment.context, experiment.method, state, everybody[:1], ours, 0.05)
    assert tally.missing[0]["why"] == "is not connected"


@pytest.mark.parametrize(
    "answer, why",
    [
        (lambda note, blobs: (note, []), "0 answers to 1"),
        (lambda note, blobs: ({"notes": [3]}, blobs), "3 is not a ticket"),
        (lambda note, blobs: ({"notes": "no"}, blobs), "answers to"),
        (lambda note, blobs: (note, [b"rubbish"]), "damaged"),
        (lambda note, blobs: (note, [blobs[0][:-1]]), "damaged"),
        (lambda note, blobs: ({"failure": {"a": ["b"] * 999}}, blobs), r"\.\.\.$"),
    ],
)
def test_answers_that_cannot_be_read_are_absences(tmp_path: Path, answer: Any, why: str) -> None:
    home = laid_out(tmp_path)
    wire = Wire(home, "cam")

    def change(kind: str, content: Any, came: Any) -> Any:
        note, blobs = answer(messages.note_in(came), messages.blobs_in(came))
        return link.Reply(messages.with_note(note, messages.record(blobs)))

    experiment, ours = made(home, wire, tmp_path)
    ours.fleet(1, experiment.fleet)
    wire.faults["cam"] = change
    size = experiment.size_of_group["0.25"]
    message = experiment.method.extract(
        experiment.context, experiment.method.init(experiment.context), Client(1, 0, size, 1, 1, 0)
    )
    (came,) = ours.perform([replace(message, ticket=replace(message.ticket, job="train", rate=0.1))])
    assert isinstance(came, Absence)
    assert re.search(why, came.why)


def test_clients_of_one_size_share_one_record_and_sizes_are_calibrated_in_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_SMALL_BYTES", 0)
    home = laid_out(tmp_path, {"one": 1.0, "two": 1.0})
    wire = Wire(home)
    experiment, ours = made(home, wire, tmp_path, "tricks.batch_norm=batch")
    planned = ours.fleet(1, experiment.fleet)
    context, method = experiment.context, experiment.method
    state, size = method.init(context), experiment.size_of_group["1.0"]
    wire.sent.clear()
    run_round(context, method, state, [Client(c, c, size, 1, 1, 0) for c in (0, 1)], ours, 0.05)
    records = [content["arrays"] for _, _, content in wire.sent]
    assert records[0] is records[1]
    wire.sent.clear()
    who = (planned, experiment.size_of_group, 1, 4)
    missing: list[Absence] = []
    found = calibrated(context, method, state, ours, *who, samples=16, missing=missing)
    assert missing == []
    assert set(found) == {"0.25", "0.5", "0.75", "1.0"}
    assert len(wire.sent) == 2 * 2  # two devices in two passes
    inside = InProcess(context, method, shares_of(home, experiment), {})
    here = calibrated(context, method, state, inside, *who, samples=16)
    assert {k: dump(v.tensors(), {}) for k, v in found.items()} == {k: dump(v.tensors(), {}) for k, v in here.items()}


def shares_of(home: Path, experiment: Experiment) -> Any:
    """The devices' shares, by client."""
    files = [home / "devices" / name / "device.toml" for name in layout.device_keys(home)]
    load = lambda c: own_data.own_share(device_file.load(files[c]), experiment.config, experiment.signature)  # noqa: E731
    return DeviceShares(load, len(files))


def test_the_first_round_waits_for_enough_devices_and_says_so(tmp_path: Path) -> None:
    home = laid_out(tmp_path)
    wire = Wire(home, "cam")
    said: list[str] = []
    experiment = Experiment.from_config(configs.load(home / "experiment.toml", ["engine.min_clients=2"]))
    book = roster.Roster.at(tmp_path, layout.device_keys(home))
    ours = engine.Devices(experiment, wire, book, Guard.of(experiment), lambda event: said.append(event["text"]))
    threading.Timer(1.5, lambda: wire.there.update({200: "van"})).start()
    assert ours.fleet(1, experiment.fleet).participants(1) == [1, 3]
    assert [line for line in said if line.startswith("waiting for 2 devices; there: cam; not connected: ")]


def test_a_run_that_waits_says_who_cannot_take_part_and_why_and_who_is_away(tmp_path: Path) -> None:
    home = laid_out(tmp_path)
    wire = Wire(home, "cam", "phone", "board")
    wire.faults["cam"] = lambda kind, content, answer: link.Reply(
        messages.with_note({"failure": "data = 'frames:load': there are no samples"}, messages.record([]))
    )
    wire.faults["board"] = lambda kind, content, answer: None
    _, ours = made(home, wire, tmp_path)
    ours._muster(0.0)
    assert ours._waiting(3) == (
        "waiting for 3 devices; there: phone; cam cannot take part: it says: data = 'frames:load': there are no "
        "samples; asked, without an answer yet: board; not connected: van"
    )


OWN_CODE = """
import torch
import helping
from torch import nn

import anysize as az


def network(input_shape, classes):
    return helping.small(input_shape, classes)


def load(device, samples=30):
    x = torch.rand(samples, 1, 8, 8, generator=torch.Generator().manual_seed(len(device)))
    return az.Share(train=(x, (x.mean((1, 2, 3)) > 0.5).long()))
"""
HELPING = """
from torch import nn


def small(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, classes))
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a fleet whose network and data are the user's, laid out for one device."""
    user = tmp_path / "user"
    user.mkdir()
    (user / "mine.py").write_text(OWN_CODE)
    (user / "helping.py").write_text(HELPING)
    (user / "other.py").write_text("raise SystemExit")
    text = EXPERIMENT.replace('name = "small-cnn"', 'name = "mine:network"')
    (user / "own.toml").write_text(re.sub(r"^options = .*\n", "", text, flags=re.MULTILINE))
    monkeypatch.setattr(sys, "path", list(sys.path))
    home = tmp_path / "fleet"
    plan = layout.planned(user / "own.toml", {"cam": {"capacity": 0.5}}, [], 18000, "mine:load")
    assert (plan.files, plan.absent) == (["helping.py", "mine.py"], [])
    layout.lay_out(home, plan)
    yield home
    for name in ("mine", "helping"):
        sys.modules.pop(name, None)


def test_a_fleet_with_an_own_model_gets_its_files_and_may_run_them(own_code: Path) -> None:
    folder = own_code / "devices" / "cam"
    assert {path.name for path in own_code.glob("*.py")} == {path.name for path in folder.glob("*.py")}
    assert device_file.load(folder / "device.toml").allow == ("mine:network",)
    said = check.checked(folder / "device.toml")
    assert said == "cam: 24 samples to train, 6 held out; can train size 0.5"
    wire = Wire(own_code)
    experiment, ours = made(own_code, wire, own_code)
    assert ours.fleet(1, experiment.fleet).participants(1) == [0]
    layout.extend(own_code, layout.named(["van=1"]), "mine:load")
    assert check.checked(own_code / "devices" / "van" / "device.toml").endswith("can train size 1.0")


def test_a_misspelt_function_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "frames.py").write_text("from shop import load\n\n\ndef open_camera(device): ...\n")
    (tmp_path / "any.py").write_text("from shop import *\n")
    (tmp_path / "late.py").write_text("def __getattr__(name): ...\n")
    (tmp_path / "torn.py").write_text("def (\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("if True:\n    load = open\n")
    assert undefined("frames:laod", [tmp_path]) == tmp_path / "frames.py"
    assert undefined("pack:laod", [tmp_path]) == tmp_path / "pack" / "__init__.py"
    fine = ["frames:load", "frames:open_camera", "any:laod", "late:laod", "torn:laod", "pack:load", "absent:x"]
    assert [name for name in fine if undefined(name, [tmp_path])] == []
    file = tmp_path / "experiment.toml"
    file.write_text(layout.planned(None, 1, [], 0, None).experiment)
    with pytest.raises(ConfigError, match=r"--data frames:laod: .*frames.py has no 'laod'"):
        layout.planned(file, 1, [], 0, "frames:laod")


def test_own_files_pass_over_what_is_no_source_and_read_every_encoding(tmp_path: Path) -> None:
    (tmp_path / "net" / "sub.py").mkdir(parents=True)
    (tmp_path / "net" / "__init__.py").write_bytes(b"# coding: latin-1\nname = '\xe4'\nimport helper\n")
    (tmp_path / "net" / ".#lock.py").symlink_to("user@host.1:2")
    (tmp_path / "helper.py").write_bytes(b"\xef\xbb\xbfimport other\n")
    (tmp_path / "other.py").write_text("x = " + "+".join(["1"] * 30_000))
    found, absent = own_files(["net:make"], [tmp_path])
    assert ([path.name for path in found], absent) == (["net", "helper.py", "other.py"], [])
    (tmp_path / "there").mkdir()
    copy_into(tmp_path / "there", found)
    assert sorted(path.name for path in (tmp_path / "there").rglob("*.py")) == ["__init__.py", "helper.py", "other.py"]


def test_a_key_that_is_appended_to_a_devices_file_is_the_devices(own_code: Path) -> None:
    path = own_code / "devices" / "cam" / "device.toml"
    path.write_text(f"{path.read_text()}memory_bytes = 1e9\n")
    assert device_file.load(path).memory_bytes == 1e9


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('allow = ["mine:network"]', "allow = []", "names code that this device does not allow: .model.name"),
        ('data = "mine:load"', 'data = "mine:lod"', "mine has no 'lod'"),
        ("options = {}", "options = { samples = 0 }", "there are no samples"),
        ("options = {}", "options = { samples = 'x' }", r"TypeError: .*mine\.py, line 14"),
        ("capacity = 0.5", "budget = { parameters = 9 }", "allows none of the sizes"),
    ],
)
def test_a_device_that_could_not_take_part_is_told_at_once_why(own_code: Path, old: str, new: str, why: str) -> None:
    path = own_code / "devices" / "cam" / "device.toml"
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=f"(?s)device 'cam' could not take part: .*{why}.*Checked against"):
        check.checked(path)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (None, "def network(:", r"SyntaxError: .*mine\.py"),
        (None, "def again(): again()\nagain()", "RecursionError"),
        (None, "import sys\nsys.exit(3)", "SystemExit: 3"),
        ("return helping.small(input_shape, classes)", "return 'net'", "returned a str; it must return an nn.Module"),
        ("return az.Share(", "return dict(", "returned a dict; for a device it must return an anysize.Share"),
        ("def load(", "load = 7\ndef other(", "is a int; it must be a function"),
    ],
)
def test_a_device_with_broken_code_is_told_why_it_could_not_take_part(
    own_code: Path, old: str | None, new: str, why: str
) -> None:
    file = own_code / "devices" / "cam" / "mine.py"
    text = file.read_text()
    assert old is None or text.count(old) == 1
    file.write_text(new if old is None else text.replace(old, new))
    with pytest.raises(ConfigError, match=f"(?s)device 'cam' could not take part: .*{why}"):
        check.checked(file.with_name("device.toml"))


def test_a_worker_that_ends_is_started_again_after_a_growing_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining = importlib.import_module("anysize.deploy.join")
    clock, started, said = [0.0], list[float](), list[str]()

    def pause(seconds: float) -> None:
        clock[0] += seconds

    processes = SimpleNamespace(
        start=lambda name, command, more: started.append(clock[0]),
        ended=lambda: [("worker", 9)] if len(said) < len(started) and clock[0] - started[-1] >= 1 else [],
    )
    monkeypatch.setattr(joining.interrupts, "pause", pause)
    monkeypatch.setattr(joining.time, "monotonic", lambda: clock[0])
    joining.keep_up(processes, ["worker"], {}, said.append, lambda: len(started) > 3, tmp_path)
    assert started == [0.0, 2.0, 5.0, 10.0]  # a second of life each, and pauses of 1, 2 and 4 seconds
    assert said == [f"the worker ended with code 9; it is started again in {pause} s" for pause in (1, 2, 4)]


def test_a_fleet_is_laid_out_only_for_an_experiment_that_could_run_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, home = tmp_path / "own.toml", tmp_path / "fleet"
    file.write_text(EXPERIMENT.replace("classwise_head = false\n", ""))
    init = ("deploy", "init", home, file, "--device", "cam=0.5", "--port", "0")
    code, _, err = small.call(monkeypatch, capsys, *init)
    assert (code, "classwise_head" in err, home.exists()) == (2, True, False)
    file.write_text(EXPERIMENT)
    code, said, _ = small.call(monkeypatch, capsys, *init)
    assert (code, "no --data given, so every device gets a part of the example's" in said) == (0, True)


@pytest.mark.slow
def test_join_ends_with_the_reason_when_the_device_could_not_take_part(
    own_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining = importlib.import_module("anysize.deploy.join")
    path = own_code / "devices" / "cam" / "device.toml"
    path.write_text(path.read_text().replace("options = {}", "options = { samples = 0 }"))
    deadline = time.monotonic() + 120
    with pytest.raises(ConfigError, match="there are no samples"):
        joining.join(path, say=lambda line: None, until=lambda: time.monotonic() > deadline)


def test_an_error_of_a_strangers_code_tells_the_server_no_data() -> None:
    assert client.described(ValueError("patient Smith")) == "raised ValueError; the device's own log says where"
    assert client.described(ConfigError("model.name: unknown")) == "model.name: unknown"


def test_children_end_with_the_command_however_it_ends(tmp_path: Path) -> None:
    code = (
        "import sys, time; from anysize.deploy.children import Children; from anysize.interrupts import immediate\n"
        "with immediate(), Children() as children:\n"
        "    child = children.start('sleep', [sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    print(child.pid, flush=True); time.sleep(600)\n"
    )
    for number in (signal.SIGTERM, signal.SIGKILL):
        parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.send_signal(number)
        parent.wait(30)
        deadline = time.monotonic() + 10
        while alive(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(child)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_superlink_is_found_by_its_folder_or_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = laid_out(tmp_path)
    found = submit.located(str(home))
    assert (found.place, found.authority) == ("127.0.0.1:18000", home / "certificates" / "authority.crt")
    monkeypatch.setenv("FLWR_HOME", str(home / "flower"))
    assert submit.located("fleet") == found
    with pytest.raises(ConfigError, match="did you mean 'fleet'"):
        submit.located("flet")
    (home / "flower" / "config.toml").write_text('[superlink.fleet]\naddress = "x:1"\n')
    with pytest.raises(ConfigError, match="root-certificates"):
        submit.located("fleet")


def test_errors_of_flower_are_told_in_plain_words() -> None:
    def came(code: int) -> Any:  # messages of Flower's own can be made in a run only
        return SimpleNamespace(has_error=lambda: True, error=SimpleNamespace(code=code, reason="long story"))

    said = {code: link._reply(came(code)).error for code in (1, 3, 5)}
    assert said == {1: "long story", 3: "too late: its message had expired", 5: "disappeared: its heartbeat stopped"}


def test_the_commands_lay_out_a_fleet_and_say_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "fleet"
    code, said, _ = small.call(monkeypatch, capsys, "deploy", "init", home, "--device", "cam=0.25", "--port", "0")
    assert code == 0
    assert f"anysize server {home}" in said.replace("\n", " ")
    port = layout.read(home).port
    assert device_file.load(home / "devices" / "cam" / "device.toml").server == f"127.0.0.1:{port}"
    code, _, err = small.call(monkeypatch, capsys, "deploy", "init", home)
    assert (code, "--overwrite" in err) == (2, True)
    code, _, err = small.call(monkeypatch, capsys, "deploy", "add", home, "van=2")
    assert (code, "at most 1" in err) == (2, True)
    code, _, err = small.call(monkeypatch, capsys, "run", home / "experiment.toml", "--superlink", home)
    assert (code, "anysize server" in err) == (2, True)
    code, _, err = small.call(monkeypatch, capsys, "server", tmp_path)
    assert (code, "deploy init" in err) == (2, True)


def test_the_example_of_a_new_fleet_is_an_experiment_that_every_device_can_join(tmp_path: Path) -> None:
    layout.lay_out(tmp_path / "fleet", layout.planned(None, 5, ["fleet.example.org"], 8400, None))
    wire = Wire(tmp_path / "fleet")
    experiment, ours = made(tmp_path / "fleet", wire, tmp_path)
    fleet = ours.fleet(1, experiment.fleet)
    assert [fleet.group_of(c, 1).name for c in range(5)] == ["0.25", "0.5", "0.75", "1.0", "0.25"]
    assert layout.read(tmp_path / "fleet").listen == "0.0.0.0"


def simulated(folder: Path, config: Any) -> Any:
    """The run of the fleet's experiment in this process: each client has its device's share and capacity."""
    names = sorted(NAMES)
    tables = config.to_dict()
    tables["devices"] = {
        "assignment": "order",
        "groups": [{"name": repr(NAMES[name]), "clients": 1, "capacity": NAMES[name]} for name in names],
    }
    tables["data"] |= {"name": "example", "clients": len(names)}
    tables["tricks"]["weighting"] = "clients"
    tables["engine"] = {"name": "inprocess"}
    signature = Experiment.from_config(config).signature

    def load(device: int) -> Any:
        file = folder / "fleet" / "devices" / names[device] / "device.toml"
        return own_data.own_share(device_file.load(file), config, signature)

    made = Experiment.from_config(configs.from_dict(tables), data=load)
    made.signature = signature
    return made.run(folder / "here")
