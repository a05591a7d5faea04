"""Changed files and messages of every format: refused by name, or accepted with the meaning that they state."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import tomllib
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import ConfigRecord, RecordDict
from hypothesis import strategies as st

import small
from anysize import config as configs
from anysize import onnx_runtime, runtime, wire
from anysize.config.values import UNITS
from anysize.data import sources
from anysize.deploy.device_file import Limits
from anysize.deploy.gate import Gate
from anysize.deploy.guard import Guard
from anysize.engines.base import Absence
from anysize.engines.flower_records import note_in
from anysize.engines.inprocess import InProcess
from anysize.experiment import lookup
from anysize.methods.messages import Client, SubModel, Ticket, Update
from anysize.methods.table import Table
from anysize.records import checkpoint, events
from anysize.report import record
from anysize.runs.experiment import Experiment
from fuzzing import ODD, Twice, altered, broken, cases, every, joined, parts_of, places, refused, rewritten, same, strict, written

# Experiment files -----------------------------------------------------------------------------------

GROUPS = [
    {"name": "board", "clients": 2, "budget": {"macs": 4e6, "latency_ms": 20.0}, "available": 0.5},
    {"name": "phone", "capacity": 0.5},
]
TABLES: dict[str, Any] = tomllib.loads(
    configs.dumps(
        small.config(
            devices={"capacities": None, "groups": GROUPS},
            method={"name": "flanc", "input_fraction": {"default": 0.125, "layer1.0.conv1": 0.25}},
            training={"schedule": "step", "milestones": [0.5]},
        )
    )
)


def toml(value: Any) -> str:
    """A value as TOML; of what TOML cannot hold, something that is no TOML."""
    if isinstance(value, dict):
        pairs = [*value.items(), *([value.second] if isinstance(value, Twice) else [])]
        return "{" + ", ".join(f"{json.dumps(str(key))} = {toml(item)}" for key, item in pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return str(value) if isinstance(value, float) else written(value)


DATES = ("1979-05-27", "07:32:00", "1979-05-27T00:32:00-07:00")


@st.composite
def experiments(draw: st.DrawFn) -> bytes:
    lines = [f"{json.dumps(str(key))} = {toml(value)}\n" for key, value in draw(altered(TABLES)).items()]
    text = "".join(lines)
    if draw(st.integers(0, 9)) == 0:
        text = text.replace(draw(st.sampled_from(["1", '"flanc"', "0.05", "16"])), draw(st.sampled_from(DATES)))
    return text.encode()


@cases
@pytest.mark.parametrize("change", ["tree", "bytes"])
def test_an_experiment_file_is_refused_or_means_what_it_states(tmp_path: Path, change: str, count: int) -> None:
    path = tmp_path / "experiment.toml"
    original = "".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value in TABLES.items())

    def holds(content: bytes) -> None:
        path.write_bytes(content)
        config = refused(path, lambda: configs.load(path))
        if config is None:
            return
        stated, found = tomllib.loads(content.decode("utf-8-sig")), config.to_dict()
        for place in places(stated):
            value, leaf = stated, found
            for key in place:
                value, leaf = value[key], leaf[key]
            assert isinstance(value, dict | list) or same(value, leaf), f"{place}: {value!r} became {leaf!r}"
        assert configs.loads(configs.dumps(config)).to_dict() == found

    holds(original.encode())
    every(count, experiments() if change == "tree" else broken(original.encode()), holds)


# Messages -------------------------------------------------------------------------------------------

TENSORS = {
    "w": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor([True, False]),
    "n": torch.tensor(4),
    "empty": torch.zeros(0, 3),
    "half": torch.ones(5, dtype=torch.bfloat16),
}
MESSAGE = wire.dump(TENSORS, {"client": 3, "loss": 0.25, "sums": {"count": 4.0}, "classes": [0, 1]})


def said_by(content: bytes) -> dict[str, Any]:
    """What the bytes of a file of tensors say, read without the package: type, shape and bytes of each, and the note."""
    header, note, data = parts_of(content)
    return {
        name: (about["dtype"], about["shape"], data[slice(*about["data_offsets"])]) for name, about in header.items()
    } | {"/note": note}


@cases
@pytest.mark.parametrize("change", ["tree", "bytes"])
def test_a_message_is_refused_or_read_as_its_bytes_say(change: str, count: int) -> None:
    def holds(content: bytes) -> None:
        outline = refused("the message", lambda: wire.peek(content))
        read = refused("the message", lambda: wire.load(content))
        if read is None:
            return
        tensors, note = read
        assert said_by(wire.dump(tensors, note)) == said_by(content)
        assert outline is not None
        assert {n: (t.shape, t.dtype) for n, t in outline.items()} == {n: (t.shape, t.dtype) for n, t in tensors.items()}

    holds(MESSAGE)
    every(count, rewritten(MESSAGE) if change == "tree" else broken(MESSAGE), holds)


@cache
def exchanged(job: str) -> tuple[Experiment, SubModel, Update]:
    """An experiment, a message of it, and the honest answer."""
    made = small.experiment(
        method={"name": "heterofl"},
        model={"name": "small-cnn", "options": {"channels": [4, 4]}},
        data={"fraction": 0.1},
        tricks={"batch_norm": "tracked"},
        engine={"name": "inprocess"},
    )
    sent = made.method.extract(made.context, made.method.init(made.context), Client(1, 0, made.context.sizes[-1], 3, 10, 0, job))
    ticket = Ticket.from_json(sent.ticket.to_json() | {"job": job} | ({"rate": 0.05} if job == "train" else {}))
    sent = SubModel(sent.tensors, ticket)
    (answer,) = InProcess(made.context, made.method, made.shares, {}).perform([sent])
    return made, sent, answer


JOBS = ("train", "calibrate", "evaluate")


@cases
@pytest.mark.parametrize("job", JOBS)
def test_an_update_is_refused_or_the_answer_to_what_was_sent(job: str, count: int) -> None:
    experiment, sent, answer = exchanged(job)
    guard = Guard.of(experiment)
    honest = wire.dump(answer.tensors, answer.to_json())
    state = experiment.method.init(experiment.context)

    def holds(content: bytes) -> None:
        read = refused("the message", lambda: wire.load(content))
        if read is None:
            return
        judged = guard(sent, *read)
        if isinstance(judged, Absence):
            assert judged.client == 1
            assert 0 < len(judged.why) < 1000
            return
        assert judged.ticket == sent.ticket
        said = judged.to_json()
        assert all(same(said[name], read[1].get(name)) for name in said if said[name] is not None)
        assert wire.dump(judged.tensors, {}) == wire.dump(read[0], {})
        assert set(read[1]) <= set(answer.to_json())
        if job == "train":
            after = experiment.method.aggregate(experiment.context, state, iter([judged]))
            assert all(bool(tensor.isfinite().all()) for tensor in wire.flatten(after)[0].values())

    assert isinstance(guard(sent, *wire.load(honest)), Update)
    every(count, rewritten(honest), holds)


@cases
@pytest.mark.parametrize("job", JOBS)
def test_a_sub_model_is_refused_or_what_was_sent(job: str, count: int) -> None:
    experiment, sent, _ = exchanged(job)
    gate = Gate(experiment.context.for_client(), experiment.method, experiment.example, Limits(capacity=1.0))
    ticket = json.dumps(sent.ticket.to_json())
    honest = wire.dump(sent.tensors, {})

    def holds(change: tuple[bytes, str]) -> None:
        content, text = change
        note = refused("message", lambda: note_in(RecordDict({"note": ConfigRecord({"json": text})})))
        taken = None if note is None else refused("", lambda: gate(content, note))
        if taken is None:
            return
        said = taken.ticket.to_json()
        assert all(same(value, said.get(key)) for key, value in strict(text).items())
        assert said["job"] in JOBS
        assert said_by(wire.dump(taken.tensors, {})) == said_by(content)

    holds((honest, ticket))
    other_ticket = altered({"ticket": json.loads(ticket)}).map(lambda tree: (honest, written(tree.get("ticket"))))
    every(count, other_ticket | rewritten(honest).map(lambda content: (content, ticket)), holds)


# Events ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has every kind of file: clients that keep norms, momentum, metrics of clients."""
    tables = {
        "method": {"name": "heterofl"},
        "model": {"name": "small-cnn", "options": {"channels": [4, 4]}},
        "devices": {"clients_per_round": 3},
        "evaluation": {"on": ["test", "clients"]},
        "tricks": {"batch_norm": "local", "server_momentum": 0.5},
    }
    return small.experiment(rounds=2, **tables).run(tmp_path_factory.mktemp("fuzz") / "run").directory


def copied(run: Path, folder: Path) -> Path:
    """A directory with links to the run's files, so that one of them can be another."""
    (folder / "kept").mkdir(parents=True)
    for path in (*run.glob("*"), *run.glob("kept/*")):
        if path.is_file():
            (folder / path.relative_to(run)).write_bytes(path.read_bytes())
    return folder


@st.composite
def logs(draw: st.DrawFn, content: bytes) -> bytes:
    """Events with a change in one of them, one twice, gone or at another place."""
    lines = [json.loads(line) for line in content.splitlines()]
    place, other = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    match draw(st.sampled_from(["tree"] * 6 + ["twice", "drop", "swap"])):
        case "tree":
            lines[place] = draw(altered({"event": lines[place]})).get("event")
        case "twice":
            lines.insert(other, lines[place])
        case "drop":
            del lines[place]
        case _:
            lines[place], lines[other] = lines[other], lines[place]
    return b"".join(written(line).encode() + b"\n" for line in lines)


def stated_events(content: bytes) -> list[Any] | None:
    """The events that the lines state, without a torn last one; None if another is damaged."""
    lines = [line for line in content.split(b"\n") if line.strip()]
    found: list[Any] = []
    for place, line in enumerate(lines):
        try:
            event = strict(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            found.append(event)
        elif place < len(lines) - 1:
            return None
    return found


@cases
@pytest.mark.parametrize("change", ["tree", "bytes"])
def test_events_are_refused_or_read_as_they_are_written(tmp_path: Path, run: Path, change: str, count: int) -> None:
    folder = copied(run, tmp_path / "run")
    path = folder / "events.jsonl"
    original = path.read_bytes()

    def holds(content: bytes) -> None:
        path.write_bytes(content)
        found, stated = refused(path, lambda: events.read_events(path)), stated_events(content)
        assert (found is None) == (stated is None)
        assert found is None or (len(found) == len(stated or []) and all(map(same, found, stated or [])))
        progress = refused(path, lambda: events.status(folder))
        rows = refused(path, lambda: events.by_round_and_size(folder))
        shown = refused(folder, lambda: record.read(folder))  # or a file beside it does not fit them
        if found is None:
            assert progress is rows is shown is None
            return
        rounds = {event["round"]: event for event in found if event["event"] == "round"} if shown else {}
        for known in shown.rounds if shown else ():
            scores = rounds[known.round].get("accuracy") or {}
            assert all(same(known.scores[label], scores[label]) for label in scores)
        numbers = [value for row in rows or () for key, value in row.items() if key not in ("round", "size")]
        assert all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in numbers)
        if progress is not None:
            assert type(progress["round"]) is int
            assert all(value is None or type(value) in (int, float) for value in progress["latest"].values())

    holds(original)
    assert len(events.read_events(path)) == len(original.splitlines())
    every(count, logs(original) if change == "tree" else broken(original), holds)


# Checkpoints ----------------------------------------------------------------------------------------


def checksum(header: Any, note: Any, data: bytes) -> int:
    """The checksum of a file of a run: of what it says of its tensors, of its note, and of the tensors by name."""
    about = {name: [one["dtype"], one["shape"]] for name, one in header.items()}
    own = {key: value for key, value in note.items() if key != "checksum"}
    total = zlib.crc32(json.dumps([about, own], sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(header):
        total = zlib.crc32(data[slice(*header[name]["data_offsets"])], total)
    return total


def resealed(header: Any, note: Any, data: bytes) -> bytes:
    """A file with the checksum that somebody would make who wants to be believed, where one can be made."""
    try:
        note = note | {"checksum": checksum(header, strict(written(note)), data)}
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        pass
    return joined(header, note, data)


@cases
@pytest.mark.parametrize("file", ["state.safetensors", "kept"])
@pytest.mark.parametrize("change", ["resealed", "tree", "bytes"])
def test_a_checkpoint_is_refused_or_restored_as_it_was_saved(
    tmp_path: Path, run: Path, file: str, change: str, count: int
) -> None:
    folder = copied(run, tmp_path / "run")
    path = folder / file if file != "kept" else sorted((folder / "kept").iterdir())[0]
    experiment = Experiment.from_config(configs.load(run / "config.toml"))
    like, original = experiment.method.init(experiment.context), path.read_bytes()

    def saved(found: checkpoint.Checkpoint, about: Any) -> dict[str, bytes]:
        """What the run would write of this checkpoint."""
        (tmp_path / "again").mkdir(exist_ok=True)
        checkpoint.save(tmp_path / "again", found, about, before=-1)
        files = [tmp_path / "again" / "state.safetensors", *(tmp_path / "again" / "kept").iterdir()]
        return {one.name: one.read_bytes() for one in files}

    whole = saved(checkpoint.restore_from(folder, like), checkpoint.peek(folder))
    assert whole["state.safetensors"] == (folder / "state.safetensors").read_bytes()

    def holds(content: bytes) -> None:
        path.write_bytes(content)
        found = refused(folder, lambda: checkpoint.restore_from(folder, like))  # or a file beside it is missing
        if file == "state.safetensors":
            about = refused(path, lambda: checkpoint.peek(folder))
            number = refused(path, lambda: checkpoint.round_of(folder))
            assert found is None or (about is not None and number == found.round)
        if found is None:
            return
        again, stated = saved(found, checkpoint.peek(folder)), said_by(content)
        if change != "resealed" and "checksum" in stated["/note"]:
            assert again == whole
        else:  # a file without a checksum is an older version's
            stated["/note"]["checksum"] = said_by(again[path.name])["/note"]["checksum"]
            assert said_by(again[path.name]) == stated

    holds(original)
    made = {"resealed": rewritten(original, resealed), "tree": rewritten(original), "bytes": broken(original)}
    every(count, made[change], holds)


# Look-up tables -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Path]:
    """An experiment that reads its look-up table, and the table's file."""
    path = tmp_path_factory.mktemp("table") / "table.safetensors"
    method = {"name": "elf", "proxy": 0.2, "proxy_epochs": 1, "sparsities": [0.0, 0.5], "table": str(path)}
    made = small.experiment(
        method=method, model={"name": "resnet14", "options": {"channels": [4, 4]}}, data={"fraction": 0.1}
    )
    assert made.table is not None
    return made, path


@cases
@pytest.mark.parametrize("change", ["resealed", "tree", "bytes"])
def test_a_look_up_table_is_refused_or_read_as_it_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searched: tuple[Experiment, Path], change: str, count: int
) -> None:
    experiment, source = searched
    about = lookup.fingerprint(experiment)
    monkeypatch.setattr(lookup, "fingerprint", lambda setup: about)  # it takes long, and does not depend on the file
    path, original = tmp_path / "table.safetensors", source.read_bytes()

    def saved(table: Table) -> bytes:
        lookup.save(tmp_path / "again.safetensors", table, about)
        return (tmp_path / "again.safetensors").read_bytes()

    def holds(content: bytes) -> None:
        path.write_bytes(content)
        table = refused(path, lambda: lookup.read(path, experiment))
        if table is None:
            return
        again, stated = said_by(saved(table)), said_by(content)
        assert change == "resealed" or "checksum" not in stated["/note"] or saved(table) == original
        assert same(again["/note"]["entries"], stated["/note"]["entries"])
        assert same(again["/note"]["samples"], stated["/note"].get("samples", {"trained": 0, "judged": 0}))
        assert {name: again[name] for name in again if name != "/note"} == {
            name: stated[name] for name in stated if name != "/note"
        }

    holds(original)
    made = {"resealed": rewritten(original, resealed), "tree": rewritten(original), "bytes": broken(original)}
    every(count, made[change], holds)


# CSV files ------------------------------------------------------------------------------------------

CSV: dict[str, str] = {
    "devices.budgets": "round,group,client,macs,latency_ms\n1,board,,4e6,20\n3,board,,1000000,\n2,,1,5e5,12.5\n",
    "devices.file": "name,clients,available,macs,bytes\nboard,2,0.5,4e6,\nphone,,1.0,8000000,100000\n",
    "devices.groups.latencies": (
        "width,depth,latency_ms,method,network,batch_size\n0.5,,1.25,flanc,5f3a,16\n1.0,2,2.5,flanc,5f3a,16\n"
    ),
}
CELLS = [
    *("", " ", "0", "1", "-1", "1e3", "1e999", "9" * 400, "9" * 5000, "nan", "inf", "-inf", "0.0", "true", "0x10"),
    *("1_000", "٣", "½", "board", "phone", '"', '""', '"a""b"', "a,b", "a\nb", "\x00", "é", "\u2028", "=1+1", "x" * 200_000),
]


@st.composite
def sheets(draw: st.DrawFn, text: str) -> bytes:
    """A sheet with other cells, rows or columns, written with or without quotes."""
    rows = list(csv.reader(io.StringIO(text)))
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        row = draw(st.integers(0, len(rows) - 1))
        column = draw(st.integers(0, max(len(rows[row]) - 1, 0)))
        match draw(st.sampled_from(["cell", "cell", "cell", "cell", "drop", "twice", "wide", "narrow", "swap"])):
            case "drop" if len(rows) > 1:
                del rows[row]
            case "twice":
                rows.insert(row, list(rows[row]))
            case "wide":
                rows[row].insert(column, draw(st.sampled_from(CELLS)))
            case "narrow" if rows[row]:
                del rows[row][column]
            case "swap":
                other = draw(st.integers(0, len(rows) - 1))
                rows[row], rows[other] = rows[other], rows[row]
            case _ if rows[row]:
                rows[row][column] = draw(st.sampled_from(CELLS))
    if draw(st.booleans()):
        return "\n".join(",".join(row) for row in rows).encode()
    made = io.StringIO()
    csv.writer(made, quoting=draw(st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]))).writerows(rows)
    return made.getvalue().encode()


def of_sheet(key: str, path: Path) -> dict[str, Any]:
    """The devices of an experiment that names the sheet."""
    if key == "devices.budgets":
        return {"capacities": None, "groups": GROUPS, "budgets": str(path)}
    if key == "devices.file":
        return {"capacities": None, "file": str(path)}
    return {"capacities": None, "groups": [GROUPS[0] | {"latencies": str(path)}, GROUPS[1]]}


def cells_of(content: bytes) -> list[dict[str, str]]:
    """The cells that are not empty, by column, read without the package: with the grammar of RFC 4180."""
    text, rows, row, cell, at = content.decode("utf-8-sig") + "\n", [], [], "", 0
    while at < len(text):
        if not cell.strip() and text[at] == '"':  # a quoted cell ends at the next single quote
            at, cell = at + 1, ""
            while text[at] != '"' or text[at : at + 2] == '""':
                cell, at = cell + text[at], at + 1 + (text[at] == '"')
            at += 1
        if text[at] in ",\n\r":
            row, cell = [*row, cell.strip()], ""
            if text[at] != ",":
                rows, row = [*rows, row], []
        else:
            cell += text[at]
        at += 1
    filled = [row for row in rows if any(row)]
    return [{name: cell for name, cell in zip(filled[0], row) if cell} for row in filled[1:]]


def value_of(cell: str) -> Any:
    """The number in a cell, or its text."""
    try:
        return float(cell)
    except ValueError:
        return cell


def rows_in(key: str, devices: Any) -> list[dict[str, Any]]:
    """What the experiment holds in place of a sheet, as its rows would say it."""
    if key == "devices.budgets":
        return [
            {"round": number, "group": trace.group, "client": trace.client, **trace.budget(place)}
            for trace in devices.budgets
            for place, number in enumerate(trace.rounds)
        ]
    if key == "devices.file":
        named = [group.model_dump(exclude_unset=True) for group in devices.groups]
        return [{k: v for k, v in group.items() if k != "budget"} | (group.get("budget") or {}) for group in named]
    (own,) = [group.latencies for group in devices.groups if group.latencies is not None]
    alike = {"method": own.method, "network": own.network, "batch_size": own.batch_size}
    return [
        {"width": width, "depth": depth or None, "latency_ms": time, **alike}
        for width, depth, time in zip(own.widths, own.depths, own.latency_ms)
    ]


@cases
@pytest.mark.parametrize("key", list(CSV))
@pytest.mark.parametrize("change", ["cells", "bytes"])
def test_a_sheet_is_refused_or_means_what_its_cells_say(tmp_path: Path, key: str, change: str, count: int) -> None:
    path = tmp_path / "sheet.csv"

    def plain(row: dict[str, Any]) -> list[tuple[str, Any]]:
        units = {name: value for name, value in row.items() if value is not None and value != math.inf}
        return sorted((name, value if isinstance(value, str) else float(value)) for name, value in units.items())

    def holds(content: bytes) -> None:
        path.write_bytes(content)
        config = refused(path, lambda: small.config(devices=of_sheet(key, path)))
        if config is None:
            return
        stated = [
            {name: cell if name in ("name", "group", "method", "network", "latencies") else value_of(cell) for name, cell in row.items()}
            for row in cells_of(content)
        ]
        assert sorted(map(plain, rows_in(key, config.devices))) == sorted(map(plain, stated))

    holds(CSV[key].encode())
    assert small.config(devices=of_sheet(key, path))
    every(count, sheets(CSV[key]) if change == "cells" else broken(CSV[key].encode()), holds)
