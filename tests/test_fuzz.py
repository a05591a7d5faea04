"""Changed files and messages of every format: refused by name, or accepted with the meaning that they state."""

from __future__ import annotations

import contextlib
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
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import ConfigRecord, RecordDict

import bundles
import small
from anysize import config as configs
from anysize import onnx_runtime, runtime, wire
from anysize.data import sources
from anysize.data.files import read_npz
from anysize.deploy.device_file import Limits
from anysize.deploy.gate import Gate
from anysize.deploy.guard import Guard
from anysize.engines.base import Absence
from anysize.engines.flower_records import note_in
from anysize.engines.inprocess import InProcess
from anysize.errors import CheckpointError, ConfigError, DataError, TrustError
from anysize.experiment import lookup
from anysize.methods.messages import Client, SubModel, Ticket, Update
from anysize.methods.table import Table
from anysize.records import checkpoint, directory, events
from anysize.report import record
from anysize.runs.experiment import Experiment
from fuzzing import (
    REFUSALS,
    Twice,
    altered,
    bounded,
    broken,
    cases,
    damaged,
    every,
    joined,
    parts_of,
    places,
    refused,
    rewritten,
    same,
    strict,
    written,
)

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


def experiments(dice: Random) -> bytes:
    lines = [f"{json.dumps(str(key))} = {toml(value)}\n" for key, value in altered(dice, TABLES).items()]
    text = "".join(lines)
    if dice.randint(0, 9) == 0:
        text = text.replace(dice.choice(["1", '"flanc"', "0.05", "16"]), dice.choice(DATES))
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
            value = float(value) if type(value) is int and isinstance(leaf, float) else value
            assert isinstance(value, dict | list) or same(value, leaf), f"{place}: {value!r} became {leaf!r}"
        assert configs.loads(configs.dumps(config)).to_dict() == found

    holds(original.encode())
    every(count, lambda dice: experiments(dice) if change == "tree" else broken(dice, original.encode()), holds)


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
    """What the bytes of a file say, read without the package: type, shape and bytes of each tensor, and the note."""
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
        assert {n: (t.shape, t.dtype) for n, t in outline.items()} == {
            n: (t.shape, t.dtype) for n, t in tensors.items()
        }

    holds(MESSAGE)
    every(count, lambda dice: rewritten(dice, MESSAGE) if change == "tree" else broken(dice, MESSAGE), holds)


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
    sent = made.method.extract(
        made.context, made.method.init(made.context), Client(1, 0, made.context.sizes[-1], 3, 10, 0, job)
    )
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
    every(count, lambda dice: rewritten(dice, honest), holds)


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
        assert said_by(wire.dump(taken.tensors, {})) == said_by(content) | {"/note": {}}

    holds((honest, ticket))

    def changed(dice: Random) -> tuple[bytes, str]:
        if dice.choice([False, True]):
            return rewritten(dice, honest), ticket
        return honest, written(altered(dice, {"ticket": json.loads(ticket)}).get("ticket"))

    every(count, changed, holds)


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


def logs(dice: Random, content: bytes) -> bytes:
    """Events with a change in one of them, one twice, gone or at another place."""
    lines = [json.loads(line) for line in content.splitlines()]
    place, other = (dice.randint(0, len(lines) - 1) for _ in range(2))
    match dice.choice(["tree"] * 6 + ["twice", "drop", "swap"]):
        case "tree":
            lines[place] = altered(dice, {"event": lines[place]}).get("event")
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
        assert all(
            value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in numbers
        )
        if progress is not None:
            assert type(progress["round"]) is int
            assert all(value is None or type(value) in (int, float) for value in progress["latest"].values())

    holds(original)
    assert len(events.read_events(path)) == len(original.splitlines())
    every(count, lambda dice: logs(dice, original) if change == "tree" else broken(dice, original), holds)


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
    with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError, RecursionError):
        note = note | {"checksum": checksum(header, strict(written(note)), data)}
    return joined(header, note, data)


@cases
@pytest.mark.parametrize("file", ["state.safetensors", "kept"])
@pytest.mark.parametrize("change", ["resealed", "damaged"])
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
        else:  # a file without a checksum is an older version's, and so is one without a field that has a default
            stated["/note"]["checksum"] = said_by(again[path.name])["/note"]["checksum"]
            if file == "state.safetensors" and not stated["/note"]["state"].get("/empty"):
                stated["/note"]["state"]["/empty"] = ["own"]
            assert said_by(again[path.name]) == stated

    holds(original)
    every(
        count,
        lambda dice: rewritten(dice, original, resealed) if change == "resealed" else damaged(dice, original),
        holds,
    )


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
@pytest.mark.parametrize("change", ["resealed", "damaged"])
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
        absent = {"depth": None, "mask": 0.0, "robustness": None}
        assert same(again["/note"]["entries"], [absent | row for row in stated["/note"]["entries"]])
        assert same(again["/note"]["samples"], stated["/note"].get("samples", {"trained": 0, "judged": 0}))
        assert {name: again[name] for name in again if name != "/note"} == {
            name: stated[name] for name in stated if name != "/note"
        }

    holds(original)
    every(
        count,
        lambda dice: rewritten(dice, original, resealed) if change == "resealed" else damaged(dice, original),
        holds,
    )


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
    *(
        "1_000",
        "٣",
        "½",
        "board",
        "phone",
        '"',
        '""',
        '"a""b"',
        "a,b",
        "a\nb",
        "\x00",
        "é",
        "\u2028",
        "=1+1",
        "x" * 200_000,
    ),
]


def sheets(dice: Random, text: str) -> bytes:
    """A sheet with other cells, rows or columns, written with or without quotes."""
    rows = list(csv.reader(io.StringIO(text)))
    for _ in range(dice.choice([1, 1, 2, 3])):
        row = dice.randint(0, len(rows) - 1)
        column = dice.randint(0, max(len(rows[row]) - 1, 0))
        match dice.choice(["cell", "cell", "cell", "cell", "drop", "twice", "wide", "narrow", "swap"]):
            case "drop" if len(rows) > 1:
                del rows[row]
            case "twice":
                rows.insert(row, list(rows[row]))
            case "wide":
                rows[row].insert(column, dice.choice(CELLS))
            case "narrow" if rows[row]:
                del rows[row][column]
            case "swap":
                other = dice.randint(0, len(rows) - 1)
                rows[row], rows[other] = rows[other], rows[row]
            case _ if rows[row]:
                rows[row][column] = dice.choice(CELLS)
    if dice.choice([False, True]):
        return "\n".join(",".join(row) for row in rows).encode()
    made = io.StringIO()
    csv.writer(made, quoting=dice.choice([csv.QUOTE_ALL, csv.QUOTE_MINIMAL])).writerows(rows)
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
        config = refused(path, lambda: small.config(devices=of_sheet(key, path)), "devices.groups:")  # of all together
        if config is None:
            return
        stated = [
            {
                name: cell if name in ("name", "group", "method", "network", "latencies") else value_of(cell)
                for name, cell in row.items()
            }
            for row in cells_of(content)
        ]
        assert sorted(map(plain, rows_in(key, config.devices))) == sorted(map(plain, stated))

    holds(CSV[key].encode())
    assert small.config(devices=of_sheet(key, path))
    every(count, lambda dice: sheets(dice, CSV[key]) if change == "cells" else broken(dice, CSV[key].encode()), holds)


# Data files -----------------------------------------------------------------------------------------

ARRAYS: dict[str, Any] = {
    "x_train": np.arange(2 * 12 * 16, dtype=np.uint8).reshape(24, 4, 4, 1),
    "y_train": np.arange(24) % 3,
    "x_test": np.arange(6 * 16, dtype=np.uint8).reshape(6, 4, 4, 1),
    "y_test": np.arange(6) % 3,
    "group_train": np.array(["a", "b"] * 12),
    "class_names": np.array(["cat", "dog", "é"]),
}
DTYPES = ["u1", "i1", "i8", "u8", "f2", "f4", "f8", "c8", "?", "U3", "S3", "M8[s]", ">f4", ">i2"]


def zipped(members: list[tuple[str, bytes]], packed: bool = False) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, archive.compression)
    return made.getvalue()


def npy(array: Any, shape: tuple[int, ...] | None = None) -> bytes:
    """The array as numpy writes it; the header can claim another shape."""
    made = io.BytesIO()
    about = np.lib.format.header_data_from_array_1_0(np.ascontiguousarray(array))
    np.lib.format.write_array_header_1_0(made, about if shape is None else about | {"shape": shape})
    return made.getvalue() + np.ascontiguousarray(array).tobytes()


@cache
def bomb(beside: bool) -> bytes:
    """Some 300 kB that would be 300 MB: an array of zeros, or zeros beside an array."""
    head = npy(np.zeros(1)) if beside else npy(np.zeros(0, np.uint8), (300_000_000,))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x_train.npy", "w") as file:
            file.write(head)
            for _ in range(300):
                file.write(bytes(1_000_000))
        archive.writestr("y_train.npy", npy(ARRAYS["y_train"]))
    return made.getvalue()


def archives(dice: Random, original: list[tuple[str, bytes]]) -> bytes:
    """An archive with other arrays, names and members."""
    members = list(original)
    for _ in range(dice.choice([1, 1, 2])):
        place = dice.randint(0, len(members) - 1)
        name, content = members[place]
        array = ARRAYS.get(name.removesuffix(".npy"), ARRAYS["y_train"])
        match dice.choice(["type", "shape", "claim", "value", "drop", "twice", "name", "bytes", "pickle", "bomb"]):
            case "type" if array.dtype.kind != "U":
                members[place] = name, npy(array.astype(dice.choice(DTYPES)))
            case "shape":
                shapes = (
                    [(-1,), (-1, 1), (2, -1), (1, -1), (1, 1, 1, 1, -1)] if array.size % 2 == 0 else [(-1,), (-1, 1)]
                )
                reshaped = [array.reshape(shape) for shape in shapes]
                members[place] = name, npy(dice.choice([array[:0], array[:1], array.flat[0], *reshaped]))
            case "claim":
                lie = dice.choice([(1 << 40,), (1 << 62, 4), (0,), (len(array) + 1,), (1,), (1, 1 << 30)])
                members[place] = name, npy(array, lie)
            case "value" if array.dtype.kind != "U":
                changed = array.astype("f8").reshape(-1).copy()
                changed[0] = dice.choice([math.nan, math.inf, -1.0, 1e30, 255.0, 2.0**40])
                members[place] = name, npy(changed.reshape(array.shape))
            case "drop" if len(members) > 1:
                del members[place]
            case "twice":
                members.insert(0, (name, dice.choice(original)[1]))
            case "name":
                other = dice.choice(["../x_train.npy", "/x.npy", "x_train", "", "é.npy", "x_train.npy", "a/b.npy"])
                members[place] = other, content
            case "bytes":
                members[place] = name, broken(dice, content)
            case "pickle":
                made = io.BytesIO()
                np.save(made, np.array([{}, None]), allow_pickle=True)
                members[place] = name, made.getvalue()
            case "bomb":
                return bomb(dice.choice([False, True]))
    return zipped(members, packed=dice.choice([False, True]))


def arrays_in(content: bytes) -> dict[str, Any]:
    """The arrays of an archive, read without numpy's reader of archives."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = archive.namelist()
        assert len(set(names)) == len(names)
        return {name.removesuffix(".npy"): np.load(io.BytesIO(archive.read(name))) for name in names}


@cases
@pytest.mark.parametrize("held_out", [0.0, 0.25])
@pytest.mark.parametrize("change", ["arrays", "bytes"])
def test_a_data_file_is_refused_or_has_the_arrays_that_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, held_out: float, count: int
) -> None:
    monkeypatch.setenv("ANYSIZE_DATA", str(tmp_path))
    path = tmp_path / "own.npz"

    def holds(content: bytes) -> None:
        path.write_bytes(content)
        data = refused(path, lambda: sources.stored("own", held_out=held_out))
        if data is None:
            return
        stated = arrays_in(content)
        index = torch.arange(len(data.train))
        x, y = data.train.batch(index)
        if not held_out:
            labels = torch.as_tensor(
                np.ascontiguousarray(stated["y_train"]).astype(stated["y_train"].dtype.newbyteorder("="))
            )
            assert torch.equal(y.double().reshape(-1), labels.double().reshape(-1))
            inputs = np.ascontiguousarray(stated["x_train"]).astype("f8")
            assert sorted(np.asarray(x.double()).reshape(-1)) == sorted(inputs.reshape(-1))  # channels may go first
        else:
            assert len(data.train) + len(data.test or ()) == len(stated["y_train"])
        names = stated.get("class_names")
        assert list(data.class_names or ()) == ([] if names is None else [str(name) for name in names])
        if change == "bytes":
            assert all(np.array_equal(stated[name], array) for name, array in arrays.items())

    arrays = {name: array for name, array in ARRAYS.items() if not held_out or "test" not in name}
    members = [(f"{name}.npy", npy(array)) for name, array in arrays.items()]
    original = zipped(members)
    path.write_bytes(original)
    assert sources.stored("own", held_out=held_out).class_names
    holds(original)
    every(count, lambda dice: archives(dice, members) if change == "arrays" else broken(dice, original), holds)


# Bundles --------------------------------------------------------------------------------------------

FIXTURES = Path(__file__).parent / "fixtures" / "bundles"
BUNDLES: dict[str, Callable[..., Any]] = {
    "heterofl": runtime.load,
    "heterofl-onnx": onnx_runtime.load,
    "heterofl-packed": runtime.load,
    "heterofl-onnx-packed": onnx_runtime.load,
}


def rehashed(header: Any, note: Any, data: bytes) -> bytes:
    """A bundle with the checksums that an attacker would make anew, where they can be made."""

    def plain(value: Any) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    try:
        note = dict(note)
        if "header" in note:
            note["header"] = hashlib.sha256(plain(header)).hexdigest()
        own = {key: value for key, value in note.items() if key not in ("sha256", "signature")}
        note["sha256"] = hashlib.sha256(plain(json.loads(written(own))) + data).hexdigest()
    except (TypeError, ValueError, RecursionError):
        pass
    return joined(header, note, data)


def outputs_of(name: str, path: Path, **options: Any) -> dict[str, Any]:
    """The outputs of every size, after everything that a device might do with a bundle."""
    network = BUNDLES[name](path, **options)
    x = torch.arange(2 * math.prod(network.input_shape)).reshape(2, *network.input_shape) % 17 / 16
    given = x if BUNDLES[name] is runtime.load else x.numpy()
    found = {size: np.asarray(network.switch(size)(given)) for size in network.sizes}
    _ = network.choices, network.predict(given)
    network.forget()
    return found


def says(content: bytes, outputs: dict[str, Any]) -> None:
    """Fail unless the note of a bundle names these sizes, and the shape of these outputs."""
    note = bundles.parts_of(content)[1]
    assert list(outputs) == [str(entry["size"]) for entry in note["networks"]]
    assert all(list(one.shape) == [2, *note["output_shape"]] for one in outputs.values())


@cases
@pytest.mark.parametrize("name", list(BUNDLES))
@pytest.mark.parametrize("change", ["rehashed", "damaged"])
def test_a_bundle_is_refused_or_gives_the_outputs_of_what_it_holds(
    tmp_path: Path, name: str, change: str, count: int
) -> None:
    path, original = tmp_path / "net.anysize", (FIXTURES / f"{name}.anysize").read_bytes()
    path.write_bytes(original)
    expected, parts = outputs_of(name, path), parts_of(original)

    def holds(content: bytes) -> None:
        path.write_bytes(content)
        found = refused("", lambda: outputs_of(name, path))
        if found is None:
            return
        says(content, found)
        header, note, _ = parts_of(content)
        if change != "rehashed":
            assert {**note, "signature": None} == {**parts[1], "signature": None}
            assert (header, parts_of(content)[2]) == (parts[0], parts[2])
            assert all(np.array_equal(found[size], expected[size]) for size in expected)

    every(
        count,
        lambda dice: rewritten(dice, original, rehashed) if change == "rehashed" else damaged(dice, original),
        holds,
    )


@cases
@pytest.mark.parametrize("name", ["heterofl", "heterofl-onnx"])
def test_a_changed_note_is_refused_or_gives_what_it_says_when_it_is_compressed(
    tmp_path: Path, name: str, count: int
) -> None:
    header, note, data = parts_of((FIXTURES / f"{name}.anysize").read_bytes())
    path = tmp_path / "net.anysize"
    note["format"] = note["format"].replace("-1", "-3")

    def repacked(header: Any, note: Any, data: bytes) -> bytes:
        return rehashed(
            *(bundles.packed(header, note, data, written) if isinstance(note, dict) else (header, note, data))
        )

    def holds(content: bytes) -> None:
        path.write_bytes(content)
        found = refused("", lambda: outputs_of(name, path))
        if found is not None:
            says(content, found)

    original = bundles.assembled(header, note, data)
    path.write_bytes(original)
    assert len(outputs_of(name, path)) == 3
    every(count, lambda dice: rewritten(dice, joined(header, note, data), repacked), holds)


@cases
@pytest.mark.parametrize("name", list(BUNDLES))
def test_no_change_of_a_signed_bundle_is_accepted(tmp_path: Path, name: str, count: int) -> None:
    key, private = tmp_path / "key.pub", Ed25519PrivateKey.from_private_bytes(bytes(32))
    key.write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    header, note, data = parts_of((FIXTURES / f"{name}.anysize").read_bytes())
    blank = rehashed(header, note | {"signature": "0" * 128}, data)
    signature = private.sign(b"anysize bundle\0" + hashlib.sha256(blank).digest()).hex()
    signed, path = blank.replace(b"0" * 128, signature.encode()), tmp_path / "net.anysize"
    path.write_bytes(signed)
    outputs_of(name, path, key=key)

    def holds(content: bytes) -> None:
        path.write_bytes(content)
        assert content == signed or refused(path, lambda: BUNDLES[name](path, key=key, verify=False)) is None

    def changed(dice: Random) -> bytes:
        return rewritten(dice, signed, rehashed) if dice.choice([False, True]) else broken(dice, signed)

    every(count, changed, holds)


# What the cases found -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ['{"a":NaN}', '{"a":1e999}', '{"a":1,"a":2}', f'{{"a":-{10**309}}}', '{"\\ud800":1}', '{"a":["\\udC00"]}']
)
def test_a_note_with_what_json_does_not_have_is_refused(text: str) -> None:
    header, _, data = parts_of(MESSAGE)
    head = written({"__metadata__": {"anysize": text}, **header}).encode()
    with pytest.raises(
        TrustError, match=r"not a finite number|comes twice|310 digits is too large|surrogates not allowed"
    ):
        wire.load(len(head).to_bytes(8, "little") + head + data)


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 5000])
def test_a_list_without_end_or_a_number_of_thousands_of_digits_is_no_toml(tmp_path: Path, value: str) -> None:
    (tmp_path / "deep.toml").write_text(f"seed = {value}")
    with pytest.raises(ConfigError, match=r"deep\.toml: cannot be read as TOML"):
        configs.load(tmp_path / "deep.toml")


def test_a_changed_round_in_a_checkpoint_is_noticed(tmp_path: Path, run: Path) -> None:
    folder = copied(run, tmp_path / "run")
    path = folder / "state.safetensors"
    path.write_bytes(path.read_bytes().replace(b'\\"round\\":2', b'\\"round\\":1'))
    with pytest.raises(CheckpointError, match="its checksum does not match"):
        checkpoint.round_of(folder)


@pytest.mark.parametrize("state", [[], {"/empty": ["own", "own"]}, {"/empty": "own"}])
def test_a_state_that_no_run_writes_is_refused(tmp_path: Path, run: Path, state: Any) -> None:
    folder = copied(run, tmp_path / "run")
    path = folder / "state.safetensors"
    header, note, data = parts_of(path.read_bytes())
    path.write_bytes(resealed(header, note | {"state": state}, data))
    experiment = Experiment.from_config(configs.load(run / "config.toml"))
    with pytest.raises(CheckpointError, match=r"its state is \[\]|empty mappings are|of other types"):
        checkpoint.restore_from(folder, experiment.method.init(experiment.context))


def test_a_changed_norm_that_a_client_keeps_is_noticed(tmp_path: Path, run: Path) -> None:
    folder = copied(run, tmp_path / "run")
    path = sorted((folder / "kept").iterdir())[0]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    experiment = Experiment.from_config(configs.load(run / "config.toml"))
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged: its checksum does not match"):
        checkpoint.restore_from(folder, experiment.method.init(experiment.context))


@pytest.mark.parametrize("beside", [False, True])
def test_a_small_data_file_of_a_large_array_is_refused_before_it_is_unpacked(tmp_path: Path, beside: bool) -> None:
    (tmp_path / "bomb.npz").write_bytes(bomb(beside))
    with bounded(), pytest.raises(DataError, match=r"bomb\.npz cannot be read: .*300000\d+ bytes, out of"):
        read_npz(tmp_path / "bomb.npz")


def test_a_table_that_counts_half_of_its_samples_is_refused(tmp_path: Path, searched: tuple[Experiment, Path]) -> None:
    header, note, data = parts_of(searched[1].read_bytes())
    (tmp_path / "table.safetensors").write_bytes(resealed(header, note | {"samples": {"trained": 24}}, data))
    with pytest.raises(CheckpointError, match=r"its samples are \{'trained': 24\}"):
        lookup.read(tmp_path / "table.safetensors", searched[0])


def test_a_data_file_that_counts_more_arrays_than_it_lists_is_refused(tmp_path: Path) -> None:
    """The length of its list is shorter, so that zipfile and numpy leave out the last arrays."""
    content = bytearray(zipped([(f"{name}.npy", npy(array)) for name, array in ARRAYS.items()]))
    last = content.rindex(b"PK\x01\x02")
    length = int.from_bytes(content[-10:-6], "little") - (len(content) - 22 - last)
    (tmp_path / "own.npz").write_bytes(content[:last] + content[-22:-10] + length.to_bytes(4, "little") + content[-6:])
    assert len(np.load(tmp_path / "own.npz").files) == len(ARRAYS) - 1
    with pytest.raises(DataError, match=r"own\.npz cannot be read: .*it counts 6 arrays and lists 5"):
        read_npz(tmp_path / "own.npz")


@pytest.mark.parametrize("point", [0x110000, 0xD800])
def test_names_of_characters_that_do_not_exist_are_refused(tmp_path: Path, point: int) -> None:
    array = npy(np.frombuffer(np.array([97, point], "<u4").tobytes(), "<U2"))
    (tmp_path / "own.npz").write_bytes(zipped([("class_names.npy", array)]))
    with pytest.raises(DataError, match=r"own\.npz cannot be read: .*class_names has characters that do not exist"):
        read_npz(tmp_path / "own.npz")


@pytest.mark.parametrize("shape", [(24, 1), (24, 4, 4, 1)])
def test_groups_that_are_no_list_are_refused_before_a_part_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setenv("ANYSIZE_DATA", str(tmp_path))
    arrays = {name: array for name, array in ARRAYS.items() if "test" not in name}
    wrong = arrays | {"group_train": np.zeros(shape, np.uint8)}
    (tmp_path / "own.npz").write_bytes(zipped([(f"{name}.npy", npy(array)) for name, array in wrong.items()]))
    with pytest.raises(DataError, match="group_train has shape"):
        sources.stored("own", held_out=0.25)


@pytest.mark.parametrize("shape", [(24, 1), (24, 2)])
def test_a_part_is_held_out_also_if_targets_are_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setenv("ANYSIZE_DATA", str(tmp_path))
    arrays = {"x_train": ARRAYS["x_train"], "y_train": np.arange(24 * shape[1]).reshape(shape) % 3}
    (tmp_path / "own.npz").write_bytes(zipped([(f"{name}.npy", npy(array)) for name, array in arrays.items()]))
    data = sources.stored("own", held_out=0.25)
    assert data.test is not None
    assert (len(data.train), len(data.test)) == (18, 6)


@pytest.mark.parametrize("cell", ["9" * 400, "1e999"])
def test_a_limit_too_large_for_a_number_is_not_no_limit(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "sheet.csv"
    path.write_text(f"round,group,macs\n1,board,{cell}\n")
    with pytest.raises(ConfigError, match=r"sheet\.csv, line 2: macs: given '.*', must be a number above 0"):
        small.config(devices=of_sheet("devices.budgets", path))


def test_damaged_rows_of_clients_are_named_when_a_run_is_resumed(tmp_path: Path, run: Path) -> None:
    folder = copied(run, tmp_path / "run")
    (folder / "clients.csv").write_bytes(b"round,client\n\xff\n")
    with pytest.raises(CheckpointError, match=r"clients\.csv is damaged"):
        directory.rewind(folder, 1)


@pytest.mark.parametrize("name", ["heterofl", "heterofl-onnx"])
@pytest.mark.parametrize("size", [10**400, 1 << 63, 1 << 40], ids=["10^400", "2^63", "2^40"])
def test_a_bundle_with_an_input_that_no_memory_holds_is_refused(tmp_path: Path, name: str, size: int) -> None:
    header, note, data = parts_of((FIXTURES / f"{name}.anysize").read_bytes())
    path = tmp_path / "net.anysize"
    changed = note | {"input_shape": [size, 8, 8]}
    path.write_bytes(bundles.assembled(header, changed, data))
    with pytest.raises(REFUSALS, match=r"net\.anysize is damaged .*is a shape of more than 1073741824 entries"):
        BUNDLES[name](path, verify=False)


@pytest.mark.parametrize("name", list(BUNDLES))
def test_a_signature_of_half_a_character_is_refused(tmp_path: Path, name: str) -> None:
    key, private = tmp_path / "key.pub", Ed25519PrivateKey.from_private_bytes(bytes(32))
    key.write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    header, note, data = parts_of((FIXTURES / f"{name}.anysize").read_bytes())
    path = tmp_path / "net.anysize"
    path.write_bytes(rehashed(header, note | {"signature": "\ud800"}, data))
    with pytest.raises(REFUSALS, match=r"net\.anysize was changed, or signed with another key"):
        BUNDLES[name](path, key=key)
