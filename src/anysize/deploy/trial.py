"""A device's process that trains a few steps of a size, and tells how much memory they took above an idle one's.

`footprint.peak_bytes` starts it. It imports what an idle worker has imported.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import RecordDict
from flwr.proto.message_pb2 import ObjectTree
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
from anysize.methods.messages import SubModel, Ticket
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
    with tempfile.TemporaryDirectory() as home:
        jobs = ("train", "evaluate") if share.held_out is not None else ("train",)
        train, *others = [_Parts.of(costs.message(size, job), Path(home, job)) for job in jobs]
        for message in (*(train,) * _MESSAGES, *others):
            update = service.answer(message.put_together())
            push_objects(get_all_nested_objects(packed({}, update.tensors)), lambda name, content: None)
            del update
    return _resident("VmHWM") - idle


@dataclass(frozen=True)
class _Parts:
    """A message as Flower transfers it: its parts in a folder."""

    folder: Path
    tree: ObjectTree
    ticket: Ticket

    @classmethod
    def of(cls, message: SubModel, folder: Path) -> _Parts:
        random = torch.Generator().manual_seed(0)
        sent = packed({}, {name: _numbers(tensor, random) for name, tensor in message.tensors.items()})
        folder.mkdir()
        for name, part in get_all_nested_objects(sent).items():
            (folder / name).write_bytes(part.deflate())
        return cls(folder, get_object_tree(sent), message.ticket)

    def put_together(self) -> SubModel:
        def pull(name: str) -> bytes:
            return (self.folder / name).read_bytes()

        came = pull_and_inflate_object_from_tree(self.tree, pull, lambda name: None, return_type=RecordDict)
        return SubModel(load(blobs_in(came)[0])[0], self.ticket)


def _numbers(tensor: Tensor, random: torch.Generator) -> Tensor:
    made = tensor.new_zeros(tensor.shape, device="cpu")
    return made.uniform_(0.0, 0.05, generator=random) if made.is_floating_point() else made


def main(file: str, capacity: str) -> None:
    """Print what training took, as JSON; an error in one line."""
    try:
        print(json.dumps({"bytes": _tried(Path(file), float(capacity))}))
    except Exception as error:
        sys.exit(told(error))
