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
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anysize.deploy.affordable import Costs, Footprint, unmeasured
from anysize.deploy.process import ONE_ARENA, command
from anysize.errors import ConfigError, told
from anysize.methods.size import Size
from anysize.wire import Json, parsed

log = logging.getLogger("anysize")

FOOTPRINTS = "memory.json"
"""The file beside a device's own that says how much memory the training of each size took on it."""
_STEPS = 4  # the heap still grows in the second and third step
_MESSAGES = 3  # and with the second and third message
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
    if not _STATUS.is_file():
        return None
    run = command("footprint", str(file.resolve()), repr(capacity))
    try:
        done = subprocess.run(
            run, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, env=os.environ | ONE_ARENA
        )
    except subprocess.TimeoutExpired:
        log.warning("capacity %g: %d training steps took more than %g s", capacity, _STEPS, _SECONDS)
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


_STATUS = Path("/proc/self/status")


def _resident(what: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = _STATUS.read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def _tried(file: Path, capacity: float) -> int:
    """The peak of this process, which has done nothing before, above what it holds once it has imported the worker."""
    from contextlib import nullcontext

    import torch
    from flwr.app import ArrayRecord
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
    from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects

    from anysize import config as configs
    from anysize.client.process import hold_memory
    from anysize.deploy import (
        device_file,
        own_data,
        worker,  # noqa: F401 - an idle worker has imported all that it needs
    )
    from anysize.deploy.folder import EXPERIMENT
    from anysize.elastic.skeleton import weightless
    from anysize.engines.flower_records import record
    from anysize.engines.service import ClientService
    from anysize.experiment.experiment import Experiment
    from anysize.experiment.sizes import sized
    from anysize.methods.capabilities import OnBase
    from anysize.methods.messages import SubModel
    from anysize.wire import dump, load

    idle = _resident("VmRSS")
    hold_memory()
    device = device_file.load(file)
    config = configs.load(device.path(EXPERIMENT))
    short = config.training.model_copy(update={"local_steps": _STEPS, "local_epochs": None})
    experiment = Experiment.from_config(config.model_copy(update={"training": short}))
    share = own_data.own_share(device, config, experiment.signature)
    with nullcontext() if isinstance(experiment.method, OnBase) else weightless():
        context = experiment.context_for((sized(experiment.method, experiment.context_for(()), capacity),)).for_client()
        service = ClientService(context, experiment.method, lambda client: share, experiment.blamed, sends=True)
        experiment.forget_weights()
    message = Costs(context, experiment.method, experiment.example).message(context.sizes[0], "train")
    random = torch.Generator().manual_seed(0)
    numbers = {name: _numbers(tensor, random) for name, tensor in message.tensors.items()}
    arrays = record([dump(numbers, {})])
    tree = get_object_tree(arrays)
    with tempfile.TemporaryDirectory() as home:
        for name, part in get_all_nested_objects(arrays).items():
            Path(home, name).write_bytes(part.deflate())
        del numbers, arrays, part

        def pull(name: str) -> bytes:
            return Path(home, name).read_bytes()

        for _ in range(_MESSAGES):
            came = pull_and_inflate_object_from_tree(tree, pull, lambda name: None, return_type=ArrayRecord)
            update = service.answer(SubModel(load(came["0000"].data)[0], message.ticket))
            del came
            left = get_all_nested_objects(record([dump(update.tensors, {})]))
            push_objects(left, lambda name, content: None)
    return _resident("VmHWM") - idle


def _numbers(tensor: Any, random: Any) -> Any:
    made = tensor.new_zeros(tensor.shape, device="cpu")
    return made.uniform_(0.0, 0.05, generator=random) if made.is_floating_point() else made


def main(file: str, capacity: str) -> None:
    """Print what training took, as JSON; an error in one line."""
    try:
        print(json.dumps({"bytes": _tried(Path(file), float(capacity))}))
    except Exception as error:
        sys.exit(told(error))
