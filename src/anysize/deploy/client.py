"""The device's side: what it answers to the server's questions, with its own data and code."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message, MessageType, RecordDict

from anysize.config import loads
from anysize.context import Size
from anysize.data import Share
from anysize.deploy.engine import Introduction, plain
from anysize.deploy.kept import Kept
from anysize.elastic.skeleton import weightless
from anysize.engines.inprocess import one_thread
from anysize.engines.memory import hold_memory
from anysize.engines.messages import note_in, packed, unpacked
from anysize.engines.worker import client_context
from anysize.errors import AnysizeError
from anysize.experiment import Experiment, Signature
from anysize.local import perform
from anysize.methods.base import SubModel, Update
from anysize.wire import Json, Tensors

KEPT = "kept"

log = logging.getLogger("anysize")


def answerer(file: Path) -> Callable[[Message, Context], Message]:
    """What answers the messages to the device that a file describes; an error is an answer too."""
    desk = _desk(file.resolve())

    def answer(message: Message, context: Context) -> Message:
        try:
            content = desk.answered(message.metadata.message_type, message.content)
        except Exception as error:
            log.warning("could not answer", exc_info=error)
            content = packed({"failure": described(error)})
        return Message(content, reply_to=message)

    return answer


@lru_cache(maxsize=1)
def _desk(file: Path) -> Desk:
    return Desk(file)


class Desk:
    """What a device has before it: its own file, its data, and the experiment that it was told of last."""

    def __init__(self, file: Path) -> None:
        hold_memory()
        self._file = file
        self._device = read_device(file)
        self._last: tuple[str, Knowledge] | None = None

    def answered(self, kind: str, content: RecordDict) -> RecordDict:
        """The answer to a message of a kind."""
        if kind == MessageType.QUERY:
            return packed(self.introduced(note_in(content)).to_note())
        note, tensors, _ = unpacked(content)
        update = self.performed(note, tensors)
        return packed({"ticket": update.ticket}, update.tensors)

    def introduced(self, note: Json) -> Introduction:
        """What it tells of itself for an experiment."""
        known = self._known(note)
        samples = len(known.share.train)
        return Introduction(self._device["name"], self._device["capacity"], None, samples)

    def performed(self, note: Json, tensors: Tensors) -> Update:
        """What it makes of a sub-model; what stays here is kept for its next turn."""
        known, sub_model = self._known(note), SubModel(tensors, note["ticket"])
        number = int(sub_model.ticket["round"])
        with one_thread(), known.experiment.blamed(f"round {number}, device {self._device['name']}"):
            update = perform(known.context, known.experiment.method, sub_model, known.share, known.kept.before(number))
        if sub_model.ticket["task"] == "train":
            known.kept.put(number, update.keep)
        return update

    def _known(self, note: Json) -> Knowledge:
        hello = json.dumps(note["hello"], sort_keys=True)
        if self._last is None or self._last[0] != hello:
            self._last = (hello, Knowledge(self._device, note["hello"], self._file.parent))
        return self._last[1]


class Knowledge:
    """What a device makes of an experiment that a server tells it of."""

    def __init__(self, device: Json, hello: Json, folder: Path) -> None:
        config = loads(hello["config"], folder=folder)
        sizes = tuple(Size(**size) for size in hello["sizes"])
        self.experiment = Experiment.from_config(config, (Signature.from_json(hello["signature"]), sizes))
        with weightless():
            self.context = client_context(self.experiment)
        self.share = own_share(device)
        self.kept = Kept(folder / KEPT, str(hello["run"]), config.checkpoint_every)


def described(error: Exception) -> str:
    """What the server is told of an error: our own errors in full, of others the kind alone, since they may hold data."""
    if isinstance(error, AnysizeError):
        return plain(str(error))
    return f"raised {type(error).__name__} (its own log says more)"


def read_device(file):
    import tomllib
    return tomllib.loads(file.read_text())


def own_share(device):
    from anysize.imports import by_name
    return by_name(device["data"],"data",{})(device["name"], **device.get("options",{}))
