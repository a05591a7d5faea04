"""Tensors that stay on a device from turn to turn (local batch-norm), in files beside the device's file.

Flower's store for this ends with a run and with the SuperNode. A server that was killed continues with another run,
from a checkpoint that may be older than the device's last turn; so the files of all turns since that checkpoint stay.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from anysize.atomic import write
from anysize.errors import AnysizeError, CheckpointError
from anysize.wire import Tensors, dump, load

_RUNS = 3  # runs whose files stay; a device may serve several in turn


class Kept:
    """The tensors that a device keeps for one run, by the round of each turn.

    Args:
        folder: the folder of all runs.
        run: the run's id.
        checkpoint_every: rounds from one checkpoint of the server to the next.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kept = Kept(Path(folder), "ab12", checkpoint_every=1)
    ...     for round in (1, 2, 3):
    ...         kept.put(round, {"w": torch.full((1,), float(round))})
    ...     [kept.before(round).get("w") for round in (4, 3, 2)]  # when round 3 began, round 2 was saved
    [tensor([3.]), tensor([2.]), None]
    """

    def __init__(self, folder: Path, run: str, checkpoint_every: int) -> None:
        if re.fullmatch(r"[0-9a-f]{1,64}", run) is None:
            raise AnysizeError("the server's name for its run is not a hexadecimal number")
        self._runs, self._folder = folder, folder / run
        self._every = checkpoint_every

    def before(self, round: int) -> Tensors:
        """The tensors of the last turn before a round; a turn at or after it belongs to a run that was killed."""
        turns = self._turns()
        for turn in (turn for turn in turns if turn >= round):
            self._file(turn).unlink(missing_ok=True)
        earlier = [turn for turn in turns if turn < round]
        if not earlier:
            return {}
        file = self._file(earlier[-1])
        return load(file.read_bytes(), str(file), CheckpointError)[0]

    def put(self, round: int, tensors: Mapping[str, Tensor]) -> None:
        """Save the tensors of a turn, and delete those that no later checkpoint can need."""
        if not tensors:
            return
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write(self._file(round), dump(tensors, {"round": round}))
        saved = (round - 1) // self._every * self._every
        needed = [turn for turn in self._turns() if turn <= saved]
        for turn in needed[:-1]:
            self._file(turn).unlink(missing_ok=True)
        others = sorted((path for path in self._runs.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
        for path in others[:-_RUNS]:
            shutil.rmtree(path, ignore_errors=True)

    def _turns(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("*.safetensors") if path.stem.isdecimal())

    def _file(self, turn: int) -> Path:
        return self._folder / f"{turn}.safetensors"
