"""A run's checkpoint: everything that a run needs to continue, in one file that is replaced in one step.

A second file of the same kind may hold the best round. It is written after the checkpoint of its round, so it is never
newer than that.

Tensors that stay with clients (local batch-norm) are in separate files, one for each client and round, so that a round
writes only the bytes of the clients that took part; a checkpoint names the files that belong to it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from anysize import atomic
from anysize.elastic.norm import Statistics
from anysize.errors import CheckpointError, short
from anysize.wire import Json, Tensors, checksum, flatten, load, opened, restore, sealed, under

FILE = "state.safetensors"
BEST = "best.safetensors"
KEPT = "kept"
_FORMAT = 2
_OLD = 1  # its checksum was of the tensors alone
_WAY_OUT = "restore an intact copy of it, or start again with overwrite=True"
_READS = 3  # tries at reading a checkpoint that a run in another process may be replacing


@dataclass
class Checkpoint:
    """The state after a round, and everything else that the next round depends on.

    Attributes:
        round: the last finished round; 0 before the first.
        state: the method's state.
        momentum: the server's momentum, by the names of the flattened state.
        statistics: batch-norm statistics by size label, if they were estimated for this state.
        kept: the tensors that stay with each client.
        turns: the round in which each of those clients last took part.
        clip: the largest norm of an update in the next round, if that moves (`privacy.quantile`).
    """

    round: int
    state: Any
    momentum: Tensors = field(default_factory=dict)
    statistics: dict[str, Statistics] = field(default_factory=dict)
    kept: dict[int, Tensors] = field(default_factory=dict)
    turns: dict[int, int] = field(default_factory=dict)
    clip: float | None = None


def save(directory: Path, checkpoint: Checkpoint, about: Json, before: int | None = None) -> None:
    """Replace the directory's checkpoint.

    Args:
        directory: the run directory.
        checkpoint: the new checkpoint.
        about: facts about the run that `peek` returns.
        before: the round of the checkpoint that it replaces; by default the round before.
    """
    _save(directory / FILE, checkpoint, about, checkpoint.round - 1 if before is None else before)
    _drop_stale(directory, checkpoint)


def keep(directory: Path, checkpoint: Checkpoint, about: Json) -> None:
    """Replace the directory's best round by a checkpoint that `save` has just written."""
    _save(directory / BEST, checkpoint, about, checkpoint.round)


def _save(path: Path, checkpoint: Checkpoint, about: Json, before: int) -> None:
    state, note = flatten(checkpoint.state)
    tensors = _named(state, checkpoint.momentum, checkpoint.statistics)
    _save_kept(path.parent, checkpoint, before)
    header = {
        "format": _FORMAT,
        "round": checkpoint.round,
        "state": note,
        "statistics": list(checkpoint.statistics),
        "turns": {str(client): turn for client, turn in sorted(checkpoint.turns.items())},
        "about": about,
    } | ({} if checkpoint.clip is None else {"clip": checkpoint.clip})
    write(path, sealed(tensors, header))


def write(path: Path, content: bytes) -> None:
    """Replace a file of a run directory in one step."""
    atomic.write(path, content, CheckpointError, "free some space or allow writing there; then go on with resume=True")


def peek(directory: Path, file: str = FILE) -> Json:
    """The facts about the run that `save` received; builds nothing."""
    about: Json = _read(directory / file)[1]["about"]
    return about


def round_of(directory: Path, file: str = FILE) -> int:
    """The last finished round, or that of another checkpoint of the directory."""
    number = _read(directory / file)[1]["round"]
    if type(number) is not int or number < 0:
        raise _damaged(directory / file, f"its round is {number!r}")
    return number


def restore_from(directory: Path, like: Any, file: str = FILE) -> Checkpoint:
    """The directory's checkpoint; refuses a state whose type or shapes differ from those of `like`."""
    for _ in range(_READS - 1):
        try:
            return _restored(directory / file, like)
        except _MissingKeptError:
            continue  # a run in progress has just replaced the checkpoint that named these files
    return _restored(directory / file, like)


def _restored(path: Path, like: Any) -> Checkpoint:
    tensors, header = _read(path)
    wanted, noted = flatten(like)
    stored, momentum = under("state/", tensors), under("momentum/", tensors)
    _check_forms(path, stored, wanted)
    try:
        turns, number, note = _turns(header), _whole(header["round"], "its round"), header["state"]
        _demand(isinstance(note, dict), f"its state is {short(note)}")
        statistics = _statistics(header["statistics"], tensors)
        _demand(set(tensors) <= {*_named(stored, momentum, statistics)}, "it holds tensors that are no part of it")
        _demand(all(name in stored and momentum[name].shape == stored[name].shape for name in momentum), "its momentum")
        _demand(all(_alike(note[name], noted.get(name)) for name in note), "its state has values of other types")
        state, clip = restore(type(like), stored, note), header.get("clip")
        _demand(clip is None or (isinstance(clip, float) and 0 < clip < math.inf), f"its clip is {short(clip)}")
    except (LookupError, ValueError, TypeError, AttributeError, CheckpointError) as error:
        raise _damaged(path, str(error)) from None
    kept = {client: _load_kept(path.parent, client, turn) for client, turn in turns.items()}
    return Checkpoint(number, state, momentum, statistics, kept, turns, clip)


def _named(state: Tensors, momentum: Tensors, statistics: Mapping[str, Statistics]) -> Tensors:
    """The tensors of a checkpoint by the names that they have in its file."""
    tensors = {f"state/{name}": tensor for name, tensor in state.items()}
    tensors |= {f"momentum/{name}": tensor for name, tensor in momentum.items()}
    for place, one in enumerate(statistics.values()):  # labels may hold any character, so they cannot name tensors
        tensors |= {f"statistics/{place}/{name}": tensor for name, tensor in one.tensors().items()}
    return tensors


def _statistics(labels: Any, tensors: Tensors) -> dict[str, Statistics]:
    named = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    _demand(named and len(set(labels)) == len(labels), f"its sizes are {short(labels)}")
    return {label: Statistics.of(under(f"statistics/{i}/", tensors)) for i, label in enumerate(labels)}


def _whole(number: Any, what: str) -> int:
    _demand(type(number) is int and 0 <= number < 1 << 63, f"{what} is {short(number)}")
    return int(number)


def _alike(value: Any, other: Any) -> bool:
    """Whether a value of a state's note can stand where another stood."""
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (value, other))
    return (
        other is None or numbers or type(value) is type(other) or (isinstance(other, tuple) and isinstance(value, list))
    )


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


class _MissingKeptError(CheckpointError):
    """A file with the tensors that a client keeps is missing."""


def _check_forms(path: Path, stored: Tensors, wanted: Tensors) -> None:
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [
        f"{name} has shape {tuple(stored[name].shape)} and {stored[name].dtype}, not {tuple(tensor.shape)} and "
        f"{tensor.dtype}"
        for name, tensor in wanted.items()
        if name in stored and (stored[name].shape, stored[name].dtype) != (tensor.shape, tensor.dtype)
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{path} does not fit the experiment in its folder ({'; '.join(problems[:3])}{more}); "
            "another run wrote it, or the model's code has changed"
        )


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or was not written by anysize ({why}); {_WAY_OUT}")


def _old_checksum(tensors: Tensors) -> int:
    total = 0
    for name in sorted(tensors):
        flat = tensors[name].detach().contiguous().reshape(-1)
        total = zlib.crc32(flat.view(torch.uint8).numpy().data, total)
    return total


def _read(path: Path) -> tuple[Tensors, Json]:
    try:
        blob = path.read_bytes()
    except FileNotFoundError:
        if path.name == BEST and (path.parent / FILE).is_file():
            raise CheckpointError(
                f"{path.parent} has no best round ({BEST}): a run keeps one with callbacks.keep_best = true"
            ) from None
        raise CheckpointError(f"{path.parent} holds no checkpoint ({path.name}); is it a run directory?") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    try:
        tensors, header = load(blob, str(path), CheckpointError)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_WAY_OUT}") from None
    if set(header) - {"clip"} != {"format", "round", "state", "statistics", "turns", "about", "checksum"}:
        raise _damaged(path, "it is not a run's checkpoint")
    if not isinstance(header["about"], dict):
        raise _damaged(path, "it says nothing about its run")
    if header["format"] not in (_FORMAT, _OLD):
        raise CheckpointError(f"{path} has format {header['format']!r}; this version reads {_OLD} and {_FORMAT}")
    right = checksum(tensors, header) if header["format"] == _FORMAT else _old_checksum(tensors)
    if header["checksum"] != right:
        raise _damaged(path, "its checksum does not match")
    return tensors, header


def _kept_file(directory: Path, client: int, turn: int) -> Path:
    return directory / KEPT / f"{client}-{turn}.safetensors"


def _save_kept(directory: Path, checkpoint: Checkpoint, before: int) -> None:
    fresh = {client: turn for client, turn in checkpoint.turns.items() if turn > before}
    if fresh:
        (directory / KEPT).mkdir(exist_ok=True)
    for client, turn in fresh.items():
        write(_kept_file(directory, client, turn), sealed(checkpoint.kept[client], {"client": client}))


def _load_kept(directory: Path, client: int, turn: int) -> Tensors:
    path = _kept_file(directory, client, turn)
    if not path.is_file():
        raise _MissingKeptError(f"{path}, which the checkpoint needs, is missing")
    tensors, note = opened(path.read_bytes(), str(path), CheckpointError)
    if {**note, "checksum": None} != {"client": client, "checksum": None}:
        raise _damaged(path, f"it is not what client {client} keeps")
    return tensors


def _drop_stale(directory: Path, checkpoint: Checkpoint) -> None:
    """Delete the clients' tensors that neither the checkpoint nor the best round names."""
    stale = set((directory / KEPT).glob("*.safetensors")) - _kept_files(directory, checkpoint.turns)
    if stale and (directory / BEST).is_file():
        stale -= _kept_files(directory, _turns(_read(directory / BEST)[1]))
    for path in stale:
        path.unlink(missing_ok=True)


def _kept_files(directory: Path, turns: Mapping[int, int]) -> set[Path]:
    return {_kept_file(directory, client, turn) for client, turn in turns.items()}


def _turns(header: Json) -> dict[int, int]:
    turns = {int(client): _whole(turn, f"the turn of client {client}") for client, turn in header["turns"].items()}
    _demand(list(map(str, turns)) == list(header["turns"]), "its clients are not numbers")
    return turns
