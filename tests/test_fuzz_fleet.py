"""Fleets in which one side says anything: a run goes on whatever a device answers, and a device whatever it is sent."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from anysize.deploy.guard import Guard
from anysize.engines.base import Absence
from anysize.experiment.experiment import Experiment
from anysize.methods.messages import Client, SubModel, Update
from anysize.records import directory, events
from anysize.wire import dump
from fuzzing import altered, cases, every, rewritten, same, written

flwr = pytest.importorskip("flwr.app", reason="Flower is an extra")
messages = importlib.import_module("anysize.engines.flower_records")
fleet = importlib.import_module("test_fleet")
toml = importlib.import_module("test_fuzz").toml

DEVICE, OTHER = "van", "cam"
JOBS = ["query", *(pytest.param(job, marks=pytest.mark.slow) for job in ("train", "evaluate", "calibrate"))]
Said = tuple[str, list[bytes]]
"""A message's note as text, and its blobs."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def content_of(said: Said) -> Any:
    note = flwr.ConfigRecord({"json": said[0]})
    return flwr.RecordDict({"arrays": messages.record(said[1]), "note": note})


class Bench:
    """A server's engine, with two devices in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = fleet.laid_out(folder)
        self.wire = fleet.Wire(self.home, DEVICE, OTHER)
        self.experiment: Experiment = fleet.made(self.home, self.wire, folder)[0]
        self.guard, self.said = Guard.of(self.experiment), list[Any]()
        self.place = fleet.roster.Roster.at(folder, fleet.layout.device_keys(self.home)).clients[DEVICE]
        self.state = self.experiment.method.init(self.experiment.context)

    def engine(self) -> Any:
        """An engine to which no device has introduced itself; waits for none."""
        book = fleet.roster.Roster.at(self.folder, [])
        made = fleet.engine.Devices(self.experiment, self.wire, book, self.guard, self.said.append)
        made._began = True
        made._options = made._options.model_copy(update={"round_timeout": 1e-9})
        return made

    def message(self, job: str) -> SubModel:
        """What the device is sent."""
        client = Client(self.place, 0, self.experiment.context.sizes[-1], 1, 10, 0, job)
        made = self.experiment.method.extract(self.experiment.context, self.state, client)
        return replace(made, ticket=replace(made.ticket, rate=0.05)) if job == "train" else made

    def answers(self, said: Said) -> None:
        """From now on the device answers this."""
        self.wire.faults[DEVICE] = lambda kind, content, answer: fleet.link.Reply(content_of(said))

    def honest(self, engine: Any, job: str) -> Said:
        """What the device answers to a job."""
        kept: list[Said] = []

        def keep(kind: str, content: Any, answer: Any) -> Any:
            kept.append((written(messages.note_in(answer)), messages.blobs_in(answer)))
            return fleet.link.Reply(answer)

        self.wire.faults[DEVICE] = keep
        if job == "query":
            engine.fleet(1, self.experiment.fleet)
        else:
            (update,) = engine.perform([self.message(job)])
            assert isinstance(update, Update)
        del self.wire.faults[DEVICE]
        return kept[-1]


ABOUT = {
    "name": DEVICE,
    "capacity": None,
    "budget": {"macs": 1e9, "latency_ms": 5.0},
    "latency_ms": {"1.0": 3.0},
    "memory_bytes": {"1.0": 3e6},
}


def lies(dice: Random, said: Said) -> Said:
    """An answer with another note, other words of the device or other blobs."""
    note, blobs = json.loads(said[0]), said[1]
    kind = dice.choice(["note", "note", "device", "failure", "blob", "blobs"])
    if kind == "note":
        return written(altered(dice, {"note": note}).get("note")), blobs
    if kind == "device":
        return written(note | altered(dice, {"device": ABOUT})), blobs
    if kind == "failure":
        return written(note | altered(dice, {"failure": "no\x1b[31m memory"})), blobs
    if kind == "blob" and blobs:
        return said[0], [rewritten(dice, blobs[0]), *blobs[1:]]
    return said[0], blobs * dice.choice([0, 2])


@cases
@pytest.mark.parametrize("job", JOBS)
def test_whatever_a_device_answers_the_run_goes_on_and_says_what_came(tmp_path: Path, job: str, count: int) -> None:
    bench = Bench(tmp_path)
    ready, log = bench.engine(), tmp_path / events.EVENTS
    ready.fleet(1, bench.experiment.fleet)
    said, kind = bench.honest(bench.engine() if job == "query" else ready, job), "notice"

    def holds(answer: Said) -> None:
        bench.said.clear()
        bench.answers(answer)
        if job == "query":
            bench.engine().fleet(1, bench.experiment.fleet)
            mine = [event for event in bench.said if f"device {OTHER} " not in event["text"]]
            assert any(f"device {DEVICE} " in event["text"] for event in mine)
        else:
            (found,) = ready.perform([bench.message(job)])
            assert isinstance(found, Update | Absence)
            if isinstance(found, Absence):
                bench.said.append({"event": kind, "text": found.why})
        for event in bench.said:
            assert 0 < len(event["text"]) < 2000
            log.unlink(missing_ok=True)
            directory.append_event(tmp_path, event)
            assert events.read_events(log) == [event]

    holds(said)
    every(count, lambda dice: lies(dice, said), holds)


@pytest.mark.parametrize("words", ["\ud800", "\udfff memory"])
def test_half_a_character_from_a_device_is_no_answer(tmp_path: Path, words: str) -> None:
    """No file can hold it: written to the run's events, it would end the run."""
    bench = Bench(tmp_path)
    engine = bench.engine()
    engine.fleet(1, bench.experiment.fleet)
    bench.answers((json.dumps({"failure": words}), []))
    (found,) = engine.perform([bench.message("train")])
    assert isinstance(found, Absence)
    assert "a message is not one of anysize's (UnicodeEncodeError" in found.why
    directory.append_event(tmp_path, {"event": "notice", "text": found.why})


@pytest.mark.parametrize("words", ["", "\u200b\n"])
def test_a_device_that_fails_without_a_word_is_missing_with_a_reason(tmp_path: Path, words: str) -> None:
    bench = Bench(tmp_path)
    engine = bench.engine()
    engine.fleet(1, bench.experiment.fleet)
    bench.answers((json.dumps({"failure": words}), []))
    assert list(engine.perform([bench.message("train")])) == [Absence(bench.place, "(no words)")]


@pytest.mark.parametrize("unit", ["macs", "latency_ms", "memory_bytes"])
def test_a_device_whose_numbers_no_float_holds_cannot_take_part(tmp_path: Path, unit: str) -> None:
    bench = Bench(tmp_path)
    told: dict[str, Any] = {"name": DEVICE, "capacity": None, "budget": {"macs": 1e9}}
    told |= {"budget": {unit: 10**400}} if unit == "macs" else {unit: {"1.0": 10**400}}
    bench.answers((json.dumps({"device": told}), []))
    bench.engine().fleet(1, bench.experiment.fleet)
    (said,) = [event["text"] for event in bench.said if f"device {DEVICE} " in event["text"]]
    assert "cannot take part" in said
    assert "a number of 401 digits is too large" in said


def test_metrics_that_are_not_finite_are_told_as_such(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    engine = bench.engine()
    engine.fleet(1, bench.experiment.fleet)
    message = bench.message("evaluate")
    sent = {name: tensor * 1e30 if tensor.is_floating_point() else tensor for name, tensor in message.tensors.items()}
    (found,) = engine.perform([replace(message, tensors=sent)])
    assert isinstance(found, Absence)
    assert "metrics that are not finite" in found.why


# What a server sends


def sent_to(bench: Bench, job: str) -> tuple[dict[str, Any], list[bytes]]:
    """The note and the blobs of an honest message."""
    note: dict[str, Any] = {"hello": json.loads(json.dumps(bench.engine()._hello))}
    if job == "query":
        return note, []
    message = bench.message(job)
    return note | {"tickets": [message.ticket.to_json()]}, [dump(message.tensors, {})]


def with_config(note: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
    """The note with another experiment."""
    text = "".join(f"{json.dumps(str(key))} = {toml(value)}\n" for key, value in tables.items())
    return {**note, "hello": {**note["hello"], "brief": {**note["hello"]["brief"], "config": text}}}


@cases
@pytest.mark.parametrize("job", JOBS)
def test_whatever_a_server_sends_a_device_answers_and_goes_on(tmp_path: Path, job: str, count: int) -> None:
    bench = Bench(tmp_path)
    service = fleet.client.Service(bench.home / "devices" / DEVICE / "device.toml")
    note, blobs = sent_to(bench, job)
    tables = tomllib.loads(note["hello"]["brief"]["config"])
    kind = job if job in ("query", "train") else "evaluate"

    def answer(said: Said) -> Any:
        told = messages.note_in(service.reply(kind, content_of(said)))
        assert told["device"]["name"] == DEVICE
        return told

    honest = answer((written(note), blobs))
    assert "failure" not in honest

    def holds(said: Said) -> None:
        told = answer(said)
        assert "failure" not in told or 0 < len(told["failure"]) < 2000

    def changed(dice: Random) -> Said:
        match dice.choice(["config", "config", "brief", "note", "sum", "blob"]):
            case "config":
                return written(with_config(note, altered(dice, tables))), blobs
            case "brief":
                hello = note["hello"] | {"brief": altered(dice, note["hello"]["brief"])}
                return written(note | {"hello": hello}), blobs
            case "note":
                return written(altered(dice, {"note": note}).get("note")), blobs
            case "sum":
                asked = {"sum": {"step": "shares", "round": 1, "told": {"3": ["AA==", "AA=="]}}}
                return written(note | altered(dice, asked)), blobs
        return written(note), [rewritten(dice, blobs[0])] if blobs else [b"\x00"]

    every(count, changed, holds)
    assert same(answer((written(note), blobs)), honest)


MARK = "named_by_the_server"
LEADS = [f"{MARK}:load", f"{MARK}.csv", f"/tmp/{MARK}.npz", f"https://{MARK}.example/net"]
_touched: list[str] = []
_listening: list[bool] = []


@cache
def _installed() -> None:
    """Hooks cannot be removed, so that there is one, which listens where it is asked to."""
    sys.addaudithook(_hear)


def _hear(event: str, given: Any) -> None:
    if _listening and event in ("open", "import", "socket.getaddrinfo", "subprocess.Popen") and MARK in str(given):
        _touched.append(f"{event} {given}")


@pytest.mark.parametrize("lead", LEADS)
def test_a_device_opens_and_imports_nothing_that_a_server_names(tmp_path: Path, lead: str) -> None:
    bench = Bench(tmp_path)
    folder = bench.home / "devices" / DEVICE
    (folder / f"{MARK}.py").write_text("raise SystemExit")
    (folder / f"{MARK}.csv").write_text("name,capacity\nboard,0.5\n")
    service = fleet.client.Service(folder / "device.toml")
    note, _ = sent_to(bench, "query")
    tables = tomllib.loads(note["hello"]["brief"]["config"])
    places = {
        "data": {"test": lead},
        "model": {"weights": lead},
        "method": {"name": "elf", "table": lead},
        "task": {"name": lead},
        "callbacks": {"own": [lead]},
        "track": {"name": "mlflow", "options": {"uri": lead}},
        "devices": {"file": lead},
    }
    named = [tables | {table: tables.get(table, {}) | own} for table, own in places.items()]
    named += [tables | {table: tables[table] | {"name": lead}} for table in ("data", "model", "method")]
    named += [tables | {"devices": {"budgets": lead}}]
    named += [tables | {"devices": {"groups": [{"name": "board", "capacity": 0.5, "latencies": lead}]}}]
    _installed()
    _listening.append(True)
    try:
        for own in named:
            service.reply("query", content_of((written(with_config(note, own)), [])))
        assert _touched == []
        open(folder / f"{MARK}.csv").close()
        assert len(_touched) == 1  # it does hear
    finally:
        _listening.clear()
        _touched.clear()
