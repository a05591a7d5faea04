"""A device's process that trains a few steps of a size, and tells how much memory they took above an idle one's.

`footprint.peak_bytes` starts it. It imports what an idle worker has imported.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from flwr.app import RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from torch import Tensor

from anysize import config as configs
from anysize.client.process import hold_memory
from anysize.deploy import (
    device_file,
    own_data,
    worker,  # noqa: F401 - an idle worker has imported all that it needs
)
from anysize.deploy.affordable import Costs
from anysize.deploy.check import checked
from anysize.deploy.folder import EXPERIMENT
from anysize.deploy.footprint import STATUS
from anysize.elastic.skeleton import weightless
from anysize.engines.flower_records import blobs_in, packed
from anysize.engines.service import ClientService
from anysize.errors import ConfigError, told
from anysize.experiment.experiment import Experiment
from anysize.experiment.sizes import sized
from anysize.methods.capabilities import OnBase
from anysize.methods.messages import SubModel
from anysize.wire import load

_STEPS = 4  # the heap still grows in the second and third step
_MESSAGES = 3  # and with the second and third message


def _resident(what: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = STATUS.read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def _tried(file: Path, capacity: float) -> int:
    """The peak of this process, which has done nothing before, above what it holds once it has imported the worker."""
    idle = _resident("VmRSS")
    hold_memory()
    with suppress(ConfigError):  # if no size fits by what is predicted, it is still measured
        checked(file)  # as a worker does before it joins
    device = device_file.load(file)
    config = configs.load(device.path(EXPERIMENT))
    short = config.training.model_copy(update={"local_steps": _STEPS, "local_epochs": None})
    experiment = Experiment.from_config(config.model_copy(update={"training": short}))
    share = own_data.own_share(device, config, experiment.signature)
    with nullcontext() if isinstance(experiment.method, OnBase) else weightless():
        context = experiment.context_for((sized(experiment.method, experiment.context_for(()), capacity),)).for_client()
        service = ClientService(context, experiment.method, lambda client: share, experiment.blamed, sends=True)
        experiment.forget_weights()
    costs, size = Costs(context, experiment.method, experiment.example), context.sizes[0]
    for job in (*("train",) * _MESSAGES, *(("evaluate",) if share.held_out is not None else ())):
        _answered(service, costs.message(size, job))
    return _resident("VmHWM") - idle


def _answered(service: ClientService, message: SubModel) -> None:
    """A message comes in the pieces of Flower's, and its answer goes in such pieces."""
    random = torch.Generator().manual_seed(0)
    numbers = {name: _numbers(tensor, random) for name, tensor in message.tensors.items()}
    sent = packed({}, numbers)
    tree = get_object_tree(sent)
    with tempfile.TemporaryDirectory() as home:
        for name, part in get_all_nested_objects(sent).items():
            Path(home, name).write_bytes(part.deflate())
        del numbers, sent, part

        def pull(name: str) -> bytes:
            return Path(home, name).read_bytes()

        came = pull_and_inflate_object_from_tree(tree, pull, lambda name: None, return_type=RecordDict)
        update = service.answer(SubModel(load(blobs_in(came)[0])[0], message.ticket))
        del came
        left = get_all_nested_objects(packed({}, update.tensors))
        push_objects(left, lambda name, content: None)


def _numbers(tensor: Tensor, random: torch.Generator) -> Tensor:
    made = tensor.new_zeros(tensor.shape, device="cpu")
    return made.uniform_(0.0, 0.05, generator=random) if made.is_floating_point() else made


def main(file: str, capacity: str) -> None:
    """Print what training took, as JSON; an error in one line."""
    try:
        print(json.dumps({"bytes": _tried(Path(file), float(capacity))}))
    except Exception as error:
        sys.exit(told(error))
