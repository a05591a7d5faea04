"""A run's checkpoint: everything a run needs to go on, in one file that is replaced in one step.

Tensors that stay with clients (local batch-norm) lie beside it, a file for each client and round, so that a client's turn
costs a client's bytes; the checkpoint names the files that belong to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from anysize.elastic.norm import Statistics
from anysize.errors import CheckpointError
from anysize.wire import Json, Tensors, dump, flatten, load, restore, write

FILE = "state.safetensors"
KEPT = "kept"
_FORMAT = 1


@dataclass
class Checkpoint:
    """The state after a round, and all else that the next round depends on.

    Attributes:
        round: the last finished round; 0 before the first.
        state: the method's state.
        momentum: the server's momentum, by the names of the flattened state.
        statistics: batch-norm statistics by size label, if they were estimated for this very state.
        kept: what stayed with each client.
        turns: the round in which each of those clients last took part.
    """

    round: int
    state: Any
    momentum: Tensors = field(default_factory=dict)
    statistics: dict[str, Statistics] = field(default_factory=dict)
    kept: dict[int, Tensors] = field(default_factory=dict)
    turns: dict[int, int] = field(default_factory=dict)


def save(directory: Path, checkpoint: Checkpoint, about: Json) -> None:
    """Replaces the directory's checkpoint; `about` is what `peek` tells of it."""
    state, note = flatten(checkpoint.state)
    tensors = {f"state/{name}": tensor for name, tensor in state.items()}
    tensors |= {f"momentum/{name}": tensor for name, tensor in checkpoint.momentum.items()}
    for label, statistics in checkpoint.statistics.items():
        tensors |= {f"statistics/{label}/{name}": tensor for name, tensor in statistics.tensors().items()}
    _save_kept(directory, checkpoint)
    header = {
        "format": _FORMAT,
        "round": checkpoint.round,
        "state": note,
        "turns": {str(client): turn for client, turn in sorted(checkpoint.turns.items())},
        "about": about,
    }
    write(directory / FILE, dump(tensors, header))
    _drop_stale(directory, checkpoint)


def peek(directory: Path) -> Json:
    """What `save` was told about the run, without building anything."""
    return dict(_read(directory)[1]["about"])


def restore_from(directory: Path, kind: type[Any]) -> Checkpoint:
    """The directory's checkpoint, with a state of that kind."""
    tensors, header = _read(directory)
    turns = {int(client): int(turn) for client, turn in header["turns"].items()}
    labels = {name.split("/")[1] for name in tensors if name.startswith("statistics/")}
    return Checkpoint(
        round=int(header["round"]),
        state=restore(kind, _under(tensors, "state/"), header["state"]),
        momentum=_under(tensors, "momentum/"),
        statistics={label: Statistics.of(_under(tensors, f"statistics/{label}/")) for label in sorted(labels)},
        kept={client: _load_kept(directory, client, turn) for client, turn in turns.items()},
        turns=turns,
    )


def _read(directory: Path) -> tuple[Tensors, Json]:
    path = directory / FILE
    try:
        blob = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{directory} holds no checkpoint ({FILE}); is it a run directory?") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    tensors, header = load(blob, str(path))
    if header.get("format") != _FORMAT or not {"round", "state", "turns", "about"} <= set(header):
        raise CheckpointError(f"{path} has format {header.get('format')!r}; this version reads format {_FORMAT}")
    return tensors, header


def _under(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _kept_file(directory: Path, client: int, turn: int) -> Path:
    return directory / KEPT / f"{client}-{turn}.safetensors"


def _save_kept(directory: Path, checkpoint: Checkpoint) -> None:
    fresh = [client for client, turn in checkpoint.turns.items() if turn == checkpoint.round]
    if fresh:
        (directory / KEPT).mkdir(exist_ok=True)
    for client in fresh:
        write(_kept_file(directory, client, checkpoint.round), dump(checkpoint.kept[client], {"client": client}))


def _load_kept(directory: Path, client: int, turn: int) -> Tensors:
    path = _kept_file(directory, client, turn)
    if not path.is_file():
        raise CheckpointError(f"{path}, which the checkpoint needs, is missing")
    return load(path.read_bytes(), str(path))[0]


def _drop_stale(directory: Path, checkpoint: Checkpoint) -> None:
    wanted = {_kept_file(directory, client, turn).name for client, turn in checkpoint.turns.items()}
    for path in (directory / KEPT).glob("*.safetensors"):
        if path.name not in wanted:
            path.unlink(missing_ok=True)
