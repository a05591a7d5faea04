"""The memory of a training process, measured on the device: a process of its own answers messages and is looked at.

A process's highest peak cannot be reset everywhere and counts all that it did before, so every size gets a process. It
does what the worker does: it reads the device's data, and then puts a few messages together from their parts, trains a
few steps for each, and takes the answer apart.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anysize.deploy.affordable import Footprint, unmeasured
from anysize.deploy.process import ONE_ARENA, command
from anysize.errors import ConfigError
from anysize.methods.size import Size
from anysize.wire import Json, parsed

log = logging.getLogger("anysize")

STATUS = Path("/proc/self/status")
FOOTPRINTS = "memory.json"
"""The file beside a device's own that says how much memory the training of each size took on it."""
_SECONDS = 600.0
_KILLED = -9  # what the system does to the largest process when memory ends
_RAN_OUT = ("memoryerror", "bad_alloc", "allocate memory", "out of memory", "outofmemoryerror", "not enough memory")


def peak_bytes(file: Path, capacity: float) -> float | None:
    """The peak of a process that trains a few steps, above an idle one; None where the system does not tell.

    It is infinite if the process ran out of memory, or out of time, as it does where memory is on a disk.

    Args:
        file: the device's file, with the experiment beside it.
        capacity: whose size is trained.

    Raises:
        ConfigError: the process ended for another reason.
    """
    if not STATUS.is_file():
        return None
    run = command("trial", str(file.resolve()), repr(capacity))
    try:
        done = subprocess.run(
            run, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, env=os.environ | ONE_ARENA
        )
    except subprocess.TimeoutExpired:
        log.warning("capacity %g: a few training steps took more than %g s", capacity, _SECONDS)
        return math.inf
    if done.returncode == _KILLED or (done.returncode and ran_out(done.stderr)):
        return math.inf
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        why = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
        raise ConfigError(f"capacity {capacity:g}: the process that tried it failed: {why}")
    return int(parsed(lines[-1])["bytes"])


def ran_out(said: str) -> bool:
    """Whether a process says that there was not enough memory, in the words of Python, of C++ or of PyTorch.

    >>> ran_out("MemoryError"), ran_out("std::bad_alloc"), ran_out("no file ran_out.csv")
    (True, True, False)
    """
    return any(words in said.lower() for words in _RAN_OUT)


def written(step: Json, found: Mapping[Size, float]) -> bytes:
    """What was measured, as a file, with null for a size that ran out of memory; `noted` reads it."""
    sizes = [
        {"width": size.width, "depth": size.depth, "memory_bytes": most if math.isfinite(most) else None}
        for size, most in found.items()
    ]
    return (json.dumps({**step, "sizes": sizes}, indent=1) + "\n").encode()


def noted(path: Path, step: Json) -> Footprint:
    """What `anysize join --measure` wrote; nothing if the file is not there or is about another training step.

    Raises:
        ConfigError: the file is damaged.
    """
    if not path.is_file():
        return unmeasured
    try:
        about = parsed(path.read_text(encoding="utf-8"))
        same = all(about[key] == value for key, value in step.items())
        found = {(one["width"], one["depth"]): _amount(one["memory_bytes"]) for one in about["sizes"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({error}); measure again with `anysize join --measure`") from None
    if not same:
        log.warning("%s is about another training step; memory is predicted", path)
        return unmeasured
    return lambda size: found.get((size.width, size.depth))


def _amount(given: Any) -> float:
    if given is None:
        return math.inf
    if isinstance(given, bool) or not isinstance(given, int | float) or given <= 0:
        raise ValueError(f"memory_bytes = {given!r}, must be a number above 0")
    return float(given)
