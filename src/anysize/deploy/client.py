"""The device's side: it answers the server's messages, with its own data and code."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from flwr.app import Message, MessageType, RecordDict

from anysize.client.process import hold_memory
from anysize.cost.memory import available_bytes
from anysize.deploy import device_file, own_data
from anysize.deploy.device_file import DeviceConfig, Limits
from anysize.deploy.footprint import FOOTPRINTS, noted
from anysize.deploy.gate import Gate, accepted, refuse_foreign_weights, refuse_layers, refuse_upper_bounds
from anysize.deploy.introduction import Introduction, plain
from anysize.deploy.kept import Kept
from anysize.deploy.membership import Membership, digest
from anysize.deploy.summed import SUMMED, Summed
from anysize.deploy.timing import LATENCIES, noted_latency, own_latency
from anysize.elastic.skeleton import weightless
from anysize.engines.flower_records import blobs_in, note_in, record, with_note
from anysize.engines.service import ClientService
from anysize.errors import AnysizeError, short
from anysize.experiment.brief import Brief
from anysize.experiment.lookup import step_timed
from anysize.methods.capabilities import OnBase
from anysize.methods.messages import SubModel, Update
from anysize.wire import Json, dump

KEPT = "kept"

log = logging.getLogger("anysize")


def answerer(file: Path) -> Callable[[Message], Message]:
    """A function that answers messages to the device of a file; an error is an answer too."""
    service = _service(file.resolve())

    def answer(message: Message) -> Message:
        return Message(service.reply(message.metadata.message_type, message.content), reply_to=message)

    return answer


@lru_cache(maxsize=1)
def _service(file: Path) -> Service:
    return Service(file)


class Service:
    """What a device holds: its file, its data, and the last experiment."""

    def __init__(self, file: Path) -> None:
        hold_memory()
        self._file = file
        self._device = device_file.load(file)
        self._limits = device_file.check_limits(self._device)
        self._last: tuple[str, Knowledge] | None = None
        self._summed_in = Summed(self._device.path(SUMMED))

    def reply(self, kind: str, content: RecordDict) -> RecordDict:
        """The answer to a message of a kind, or why there is none, and what the device can afford next."""
        try:
            return self.answered(kind, content)
        except Exception as error:
            log.warning("could not answer", exc_info=error)
            return with_note({"failure": described(error), **self._told_anyway()}, record([]))

    def answered(self, kind: str, content: RecordDict) -> RecordDict:
        """The answer to a message of a kind."""
        note = note_in(content)
        known = self._known(note["hello"])
        known.limited(self._read_limits())
        if kind == MessageType.QUERY:
            return with_note(self.told(), record([]))
        if known.membership is not None:
            return self._summed(known, known.membership, note, blobs_in(content))
        updates = list(self._updates(known, note["tickets"], blobs_in(content)))
        blobs = [dump(update.tensors, {}) for update in updates]
        return with_note({"notes": [plain_numbers(update) for update in updates], **self.told()}, record(blobs))

    def told(self, measured: bool = True) -> Json:
        """What the device tells of itself with every answer: what it can afford next, as its file says now.

        Args:
            measured: whether to tell what sizes take on it, too; its server chooses by that.
        """
        limits = self._read_limits()
        known = self._last[1] if measured and self._last is not None else None
        times, amounts = ({}, {}) if known is None else (known.latencies(), known.footprints())
        return Introduction(self._device.name, limits.capacity, limits.budget, times, amounts).to_note()

    def _told_anyway(self) -> Json:
        """The same after a failure, whatever else fails."""
        try:
            return self.told()
        except Exception as error:
            log.warning("could not tell what sizes take", exc_info=error)
            return self.told(measured=False)

    def _read_limits(self) -> Limits:
        """What the device's file says now, since other programs may change it; as before if it cannot be read."""
        try:
            self._limits = device_file.check_limits(device_file.load(self._file))
        except AnysizeError as error:
            log.warning("the device's file cannot be read again; its limits stay as they were", exc_info=error)
        return self._limits

    def _updates(self, known: Knowledge, tickets: Sequence[Json], blobs: Sequence[bytes]) -> Iterator[Update]:
        for ticket, blob in zip(tickets, blobs, strict=True):
            yield known.answer(blob, ticket)

    def _summed(self, known: Knowledge, own: Membership, note: Json, blobs: Sequence[bytes]) -> RecordDict:
        """The answer if updates are summed securely: public keys after training, then those of the sum's steps."""
        if "sum" in note:
            said, tensors = own.step(note["sum"])
            return with_note({**said, **self.told()}, record([dump(tensors, {})] if tensors else []))
        (ticket,), (blob,) = note["tickets"], blobs
        return with_note({**known.learned(own, blob, ticket), **self.told()}, record([]))

    def _known(self, hello: Json) -> Knowledge:
        told = json.dumps(hello, sort_keys=True)
        if self._last is None or self._last[0] != told:
            self._last = None  # frees the previous one first
            self._last = (told, Knowledge(self._device, hello, self._summed_in))
        return self._last[1]


class Knowledge:
    """An experiment of a server, as a device runs it.

    Args:
        device: its file.
        hello: the run and the experiment, as the server tells them.
        summed: the secure sums that the device was part of; a new one is noted there.

    Attributes:
        membership: the device's part in secure sums; None if the experiment does not sum securely.
    """

    def __init__(self, device: DeviceConfig, hello: Json, summed: Summed) -> None:
        brief = Brief.from_json(hello["brief"], partial(accepted, device=device))
        config, experiment = brief.config, brief.experiment()
        refuse_upper_bounds(experiment.method)
        refuse_foreign_weights(experiment.method, config, device)
        refuse_layers(experiment, available_bytes())
        own = own_data.own_share(device, config, brief.known.signature)
        # A device makes the network without its weights, unless it must have them itself.
        with nullcontext() if isinstance(experiment.method, OnBase) else weightless():
            self._service = ClientService.of(experiment, lambda client: own, sends=True)
            step = step_timed(experiment)
        known = (self._service.context, experiment.method, experiment.example)
        latency = noted_latency(device.path(LATENCIES), step, own_latency(*known, device.memory_bytes))
        footprint = noted(device.path(FOOTPRINTS), step)
        self._gate = Gate(*known, device.limits, config.devices.capacity_of, latency, footprint)
        self._brief, run = hello["brief"], str(hello["run"])
        self._kept = Kept(device.folder / KEPT, run, config.checkpoint_every)
        threshold, tricks = config.aggregation.secure_threshold, experiment.context.tricks
        self.membership = None if threshold is None else Membership(threshold, tricks, run, summed)

    def limited(self, limits: Limits) -> None:
        """From now on, what comes is held against these limits."""
        self._gate.limits = limits

    def latencies(self) -> dict[str, float]:
        """How long sizes take on this device, if its budget limits that."""
        return self._gate.latencies()

    def footprints(self) -> dict[str, float]:
        """How much memory the training of sizes took on this device, if its budget limits that."""
        return self._gate.footprints()

    def answer(self, blob: bytes, ticket: Any) -> Update:
        """The update for a sub-model that the device can afford; saves the tensors that stay for the next turn."""
        return self._performed(self._gate(blob, ticket))

    def learned(self, own: Membership, blob: bytes, ticket: Any) -> Json:
        """The public keys for a sum over what was learned, which stays here."""
        sub_model = self._gate(blob, ticket)
        message = digest(self._brief, sub_model.ticket, blob)
        own.check(sub_model.ticket, message)
        return own.begin(sub_model, self._performed(sub_model), message)

    def _performed(self, sub_model: SubModel) -> Update:
        round = sub_model.ticket.round
        update = self._service.answer(sub_model, self._kept.before(round))
        if sub_model.ticket.job == "train":
            self._kept.put(round, update.keep)
        return update


def plain_numbers(update: Update) -> Json:
    """The note of an update; an error if it has a number that no message can hold."""
    note = update.to_json()
    try:
        json.dumps(note, allow_nan=False)
    except ValueError:
        raise AnysizeError(
            f"metrics that are not finite came of the network that it was sent: {short(update.sums)}"
        ) from None
    return note


def described(error: Exception) -> str:
    """What the server learns about an error: the full text if it is anysize's; else the type only, since the text may
    hold data."""
    if isinstance(error, AnysizeError):
        return plain(str(error))
    return f"raised {type(error).__name__}; the device's own log says where"
