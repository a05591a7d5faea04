"""The files of a run directory: who may write there, how they grow, and what a crash may leave behind.

Every file is either replaced in one step (config, environment, checkpoint, report) or only appended to (events,
clients). Whenever a run is killed, its directory therefore holds the state after some finished round.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from anysize import atomic
from anysize import config as configs
from anysize.callbacks.tracking import FOLDER as TRACKED
from anysize.config import files as config_files
from anysize.errors import CheckpointError, ConfigError
from anysize.records.checkpoint import BEST, FILE, KEPT, write
from anysize.wire import Json, dump

if sys.platform != "win32":
    import fcntl

CONFIG, ENVIRONMENT = config_files.CONFIG, config_files.ENVIRONMENT
EVENTS, CLIENTS = "events.jsonl", "clients.csv"
ANALYSIS = "analysis"
REPORT, REPORT_FOLDER = "report.html", "report"
_FILES = (CONFIG, ENVIRONMENT, EVENTS, CLIENTS, FILE, BEST, REPORT)
_FOLDERS = (KEPT, ANALYSIS, REPORT_FOLDER, TRACKED)
_ROW = ("round", "client", "group", "size", "samples")


def check_free(directory: Path, overwrite: bool) -> None:
    """Refuse a directory that holds other files, or a run that must not be overwritten."""
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; choose another folder with out=")
    if not directory.is_dir() or _is_unused(directory):
        return
    if not holds_run(directory):
        raise CheckpointError(f"{directory} holds files that are not a run's; choose another folder with out=")
    if not overwrite:
        raise CheckpointError(
            f"{directory} already holds a run; continue it with resume=True, choose another folder with out=, or "
            "replace it with overwrite=True"
        )


def holds_run(directory: Path) -> bool:
    """Whether a run has started there: whether the two files exist that every run writes first."""
    return (directory / CONFIG).is_file() and (directory / ENVIRONMENT).is_file()


def has_progress(directory: Path) -> bool:
    """Whether a run there has reached its first checkpoint, so that it can be resumed."""
    return (directory / FILE).is_file() or (directory / EVENTS).is_file()


def _is_unused(directory: Path) -> bool:
    """Whether the directory holds at most what a run leaves that is killed while it writes its first files."""
    ours = {path.name for name in (CONFIG, ENVIRONMENT) for path in atomic.unfinished(directory, name)}
    ours |= {ENVIRONMENT} if "anysize" in saved_environment(directory) else set()
    return all(path.name in ours for path in directory.iterdir())


def make(directory: Path) -> None:
    """Create the directory if it does not exist."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {directory}: {error.strerror or error}") from None


def clear(directory: Path) -> None:
    """Delete the run in the directory; files that no run writes stay."""
    drop_partial(directory)
    for name in _FILES:
        (directory / name).unlink(missing_ok=True)
    for name in _FOLDERS:
        if (directory / name).is_dir():
            shutil.rmtree(directory / name)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the directory against a second run; the lock ends with the process, however that ends."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        _lock(handle, directory)
        yield
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    write(path, text.encode())


def append_event(directory: Path, event: Json) -> None:
    """Append an event as one line; NaN and infinity become null, since JSON cannot hold them."""
    _append(directory / EVENTS, json.dumps(finite_json(event), ensure_ascii=False) + "\n")


def write_analysis(directory: Path, round: int, arrays: Mapping[str, Tensor]) -> None:
    """Write the arrays that describe a method's state after a round, if there are any, to one file."""
    if arrays:
        (directory / ANALYSIS).mkdir(exist_ok=True)
        write(directory / ANALYSIS / f"{round:06d}.safetensors", dump(arrays, {"round": round}))


def begin_rows(directory: Path, metrics: Sequence[str]) -> None:
    """Write a clients.csv without rows: a line of column names."""
    write_text(directory / CLIENTS, _csv([*_ROW, *metrics], []))


def append_rows(directory: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append a line for each row."""
    _append(directory / CLIENTS, _csv(list(rows[0]), rows).split("\n", 1)[1])


def rewind(directory: Path, round: int) -> None:
    """Remove what a killed run wrote after its last checkpoint: torn lines, later rows, unfinished files."""
    drop_partial(directory)
    events, clients = directory / EVENTS, directory / CLIENTS
    if round == 0 and not events.is_file():
        write(events, b"")  # killed between the first checkpoint and the first event
    whole = events.read_bytes() if events.is_file() else b""
    if whole and not whole.endswith(b"\n"):
        write(events, whole[: whole.rfind(b"\n") + 1])
    for path in (directory / ANALYSIS).glob("*.safetensors"):
        if path.stem.isdecimal() and int(path.stem) > round:
            path.unlink()
    if not clients.is_file():
        return
    try:
        text = clients.read_text(encoding="utf-8")
        finished = text[: text.rfind("\n") + 1]
        reader = csv.DictReader(io.StringIO(finished, newline=""))
        columns, rows = list(reader.fieldnames or ()), list(reader)
        kept = [row for row in rows if row["round"].isdecimal() and int(row["round"]) <= round]
        left = _csv(columns, kept)
    except (ValueError, KeyError, AttributeError, csv.Error) as error:
        raise CheckpointError(f"{clients} is damaged ({error}); restore an intact copy of it, or delete it") from None
    if len(kept) < len(rows) or finished != text:
        write_text(clients, left)


def drop_partial(directory: Path) -> None:
    """Delete files that a killed run had not finished writing."""
    for folder in (directory, *(directory / name for name in _FOLDERS)):
        for path in atomic.unfinished(folder):
            path.unlink(missing_ok=True)


def saved_config(directory: Path) -> configs.ExperimentConfig:
    """The complete experiment of the run in a directory."""
    path = directory / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{directory} holds no run: {CONFIG} is missing")
    try:
        return configs.loads(path.read_text(encoding="utf-8"), folder=config_files.folder_of_run(directory))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def saved_environment(directory: Path) -> Json:
    """The content of environment.json; empty if it cannot be read."""
    try:
        found = json.loads((directory / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lock(handle: int, directory: Path) -> None:
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"another process is running in {directory}; wait until it ends, or choose another folder with out="
        ) from None
    except OSError:
        return  # some network file systems have no locks


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        raise CheckpointError(
            f"could not write {path}: {error.strerror or error}. The last checkpoint is untouched; solve that and "
            "continue with resume=True"
        ) from None


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def finite_json(value: Any) -> Any:
    """The value with None in the place of every number that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    return value
