"""Clients on real devices: each message goes to the client's device, and a missing answer is an absence."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from anysize import interrupts
from anysize.deploy.affordable import Costs, Footprint, Latency
from anysize.deploy.device_file import Limits
from anysize.deploy.guard import Guard
from anysize.deploy.introduction import Introduction, plain
from anysize.deploy.link import Kind, Link, Node
from anysize.deploy.masking import Collector
from anysize.deploy.roster import Roster
from anysize.deploy.spool import Spool
from anysize.deploy.sums import Class, answers_of
from anysize.devices.fleet import Fleet, enrolled
from anysize.engines.base import Absence, Engine
from anysize.engines.flower_records import blobs_in, note_in, record, with_note
from anysize.errors import AnysizeError
from anysize.experiment.brief import Brief
from anysize.experiment.experiment import Experiment
from anysize.methods.messages import SubModel, Ticket, Update
from anysize.methods.sums import class_of
from anysize.profiling import stage
from anysize.wire import Json, dump, load

_POLL_SECONDS = 0.1
_SLOWEST_POLL_SECONDS = 1.0
_GROWTH = 1.25  # of the pause from one question to the next: an answer waits at most a quarter of the time since
_INTRODUCTION_SECONDS = 20.0  # the longest that a round waits for devices that have just connected
_RETURN_SECONDS = 120.0  # the longest that a round waits for enough devices, without engine.round_timeout
_QUERY_LIFE_SECONDS = 600.0


@dataclass
class _Attendance:
    """The devices that have joined, and those that are connected.

    Attributes:
        asked: message ids of open introductions, each with its node.
        known: each node's introduction, or why it cannot take part.
        groups: the device group's name of every client that ever joined.
        nodes: the node of each client that is connected now.
    """

    asked: dict[str, Node] = field(default_factory=dict)
    known: dict[Node, Introduction | str] = field(default_factory=dict)
    groups: dict[int, str] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)


@dataclass
class _Request:
    """One message to one device: its sub-models, then the answer to each.

    Attributes:
        client: the receiver.
        tickets: a ticket for each sub-model.
        blobs: the names of their tensors in the spool.
        message: its id, or None if it could not be sent.
        why: the reason in that case.
        answers: the answers, in the order of the tickets; None while it is open.
    """

    client: int
    tickets: list[Ticket] = field(default_factory=list)
    blobs: list[str] = field(default_factory=list)
    message: str | None = None
    why: str = ""
    answers: list[Update | Absence] | None = None


class Devices(Engine):
    """Runs each client on its device.

    Args:
        experiment: one that devices can load.
        link: the connection.
        roster: which device is which client.
        check: checks every update before anything else uses it.
        on_event: called with notices: which devices joined, which cannot take part.
    """

    def __init__(
        self,
        experiment: Experiment,
        link: Link,
        roster: Roster,
        check: Guard,
        on_event: Callable[[Json], None] = lambda event: None,
    ) -> None:
        self._experiment, self._link, self._roster = experiment, link, roster
        self._check, self._on_event = check, on_event
        self._options = experiment.config.engine
        self._hello = {"run": roster.run, "brief": Brief.of(experiment).to_json()}
        self._here = _Attendance()
        self._last: tuple[list[str], ArrayRecord | ConfigRecord] | None = None
        context, method = experiment.context.for_client(), experiment.method
        self._costs = Costs(context, method, experiment.example, experiment.config.devices.capacity_of)
        self._began = False

    def fleet(self, round: int, planned: Fleet) -> Fleet:
        """The connected devices; waits for `engine.min_clients`, in the first round without limit."""
        least = self._options.min_clients or 1
        patience = self._options.round_timeout or _RETURN_SECONDS
        began, told = time.monotonic(), -1.0
        self._muster(0.0 if self._began else _INTRODUCTION_SECONDS)
        while len(self._here.nodes) < least:
            waited = time.monotonic() - began
            if self._began and waited > patience:
                break
            if told < 0 or waited > 2 * told + 10:
                told = waited
                self._notice(self._waiting(least))
            interrupts.pause(_SLOWEST_POLL_SECONDS)
            self._muster(0.0)
        self._began = True
        names = {client: name for name, client in self._roster.clients.items()}
        return enrolled(planned, self._experiment.config.devices, self._here.groups, self._here.nodes, names)

    def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update | Absence]:
        threshold = self._experiment.config.aggregation.secure_threshold
        if threshold is not None:
            yield from self._summed(sub_models, threshold)
            return
        deadline = self._deadline()
        with Spool() as spool:
            order = list(self._posted(sub_models, spool))
            self._last = None
            for request, place in order:
                if request.answers is None:
                    request.answers = self._answers(request, deadline, spool)
                yield request.answers[place]
                request.answers[place] = Absence(request.client, "was given already")  # frees the update

    def _summed(self, sub_models: Iterable[SubModel], threshold: int) -> Iterator[Update | Absence]:
        """The mean of every class of clients, and an absence for each client that is in none."""
        with Spool() as spool:
            requests = {request.client: request for request, _ in self._posted(sub_models, spool)}
            self._last = None
            classes: dict[tuple[str, str], Class] = {}
            for client, request in requests.items():
                (ticket,), (blob,) = request.tickets, request.blobs  # a blob's name tells its tensors
                message = partial(spool.sub_model, blob, ticket)
                own = Class(ticket.round, [], message, Collector(threshold))
                classes.setdefault((class_of(SubModel({}, ticket)), blob), own).clients.append(client)
            first = self._gathered({client: (request.message, request.why) for client, request in requests.items()})
            yield from answers_of(classes.values(), first, self._asked, self._check.mean)

    def _asked(self, notes: Mapping[int, Json]) -> dict[int, tuple[Json, list[bytes]] | str]:
        """The answers of clients to a step of their sum."""
        sent: dict[int, tuple[str | None, str]] = {}
        for client, note in notes.items():
            node, seconds = self._here.nodes.get(client), self._options.round_timeout
            content = with_note({"hello": self._hello, "sum": note}, record([]))
            with stage("send"):
                message = None if node is None else self._link.send(node.id, "train", content, note["round"], seconds)
            sent[client] = message, "could not be reached"
        return self._gathered(sent)

    def _gathered(self, sent: Mapping[int, tuple[str | None, str]]) -> dict[int, tuple[Json, list[bytes]] | str]:
        """By client, the note and the blobs of its answer, or why there is none; waits for them.

        Args:
            sent: by client the message's id, or None and why it was not sent.
        """
        found = {client: why for client, (message, why) in sent.items() if message is None}
        came: dict[int, tuple[Json, list[bytes]] | str] = {**found}
        waiting = {message: client for client, (message, _) in sent.items() if message is not None}
        deadline, pause = self._deadline(), _POLL_SECONDS
        while waiting:
            over = deadline is not None and time.monotonic() > deadline
            for message, reply in self._link.replies(list(waiting)).items():
                client = waiting.pop(message)
                came[client] = plain(reply.error) if reply.content is None else self._read(client, reply.content)
            if over:
                return came | {client: self._late() for client in waiting.values()}
            if waiting:
                interrupts.pause(pause)
                pause = min(_SLOWEST_POLL_SECONDS, pause * _GROWTH)
        return came

    def _read(self, client: int, content: RecordDict) -> tuple[Json, list[bytes]] | str:
        """The note and the blobs of an answer, or what is wrong with it."""
        try:
            note = note_in(content)
            self._hear(client, note)
            return plain(note["failure"]) if "failure" in note else (note, blobs_in(content))
        except AnysizeError as error:
            return f"invalid: {plain(str(error))}"

    def _deadline(self) -> float | None:
        """Until when answers to what is sent now count."""
        timeout = self._options.round_timeout
        return None if timeout is None else time.monotonic() + timeout

    def _late(self) -> str:
        return f"too late: no answer within {self._options.round_timeout:g} s"

    def _posted(self, sub_models: Iterable[SubModel], spool: Spool) -> Iterator[tuple[_Request, int]]:
        """For each sub-model its request and its place there; all requests are sent at the end.

        One request asks a device for the statistics of several sizes, since each request waits for Flower's polling.
        Networks to train are sent as they are drawn, so that the server holds one at a time.
        """
        collected: dict[int, _Request] = {}
        for sub_model in sub_models:
            client = sub_model.ticket.client
            together = sub_model.ticket.job == "calibrate"
            request = collected.setdefault(client, _Request(client)) if together else _Request(client)
            request.tickets.append(sub_model.ticket)
            request.blobs.append(spool.put(dump(sub_model.tensors, {})))
            if not together:
                self._send(request, spool)
            yield request, len(request.tickets) - 1
        for request in collected.values():
            self._send(request, spool)

    def _send(self, request: _Request, spool: Spool) -> None:
        node = self._here.nodes.get(request.client)
        if node is None:
            request.why = "is not connected"
            return
        ticket, seconds = request.tickets[0], self._options.round_timeout
        kind: Kind = "train" if ticket.job == "train" else "evaluate"
        with stage("send"):
            note = {"hello": self._hello, "tickets": [ticket.to_json() for ticket in request.tickets]}
            content = with_note(note, self._record(request.blobs, spool))
            request.message = self._link.send(node.id, kind, content, ticket.round, seconds)
        request.why = "could not be reached"

    def _record(self, blobs: list[str], spool: Spool) -> ArrayRecord | ConfigRecord:
        """The record of blobs; consecutive clients of one size often get the same blobs."""
        if self._last is None or self._last[0] != blobs:
            self._last = (list(blobs), record([spool.blob(name) for name in blobs]))
        return self._last[1]

    def _answers(self, request: _Request, deadline: float | None, spool: Spool) -> list[Update | Absence]:
        """The answer to each ticket of a request; waits for them."""
        pause = _POLL_SECONDS
        while request.message is not None:
            over = deadline is not None and time.monotonic() > deadline
            reply = self._link.replies([request.message]).get(request.message)
            if reply is not None and reply.content is not None:
                return self._opened(request, reply.content, spool)
            if reply is not None:
                return _absent(request, plain(reply.error))
            if over:
                return _absent(request, self._late())
            interrupts.pause(pause)
            pause = min(_SLOWEST_POLL_SECONDS, pause * _GROWTH)
        return _absent(request, request.why)

    def _opened(self, request: _Request, content: RecordDict, spool: Spool) -> list[Update | Absence]:
        """The updates in an answer, or an absence for each if the answer is not valid."""
        try:
            note, blobs = note_in(content), blobs_in(content)
            self._hear(request.client, note)
            if "failure" in note:
                return _absent(request, plain(note["failure"]))
            notes = note.get("notes")
            if not isinstance(notes, list) or not len(notes) == len(blobs) == len(request.tickets):
                return _absent(request, f"invalid: sent {len(blobs)} answers to {len(request.tickets)} tickets")
            sent = [spool.sub_model(name, ticket) for name, ticket in zip(request.blobs, request.tickets)]
            return [self._check(asked, load(blob)[0], note) for asked, blob, note in zip(sent, blobs, notes)]
        except AnysizeError as error:
            return _absent(request, f"invalid: {plain(str(error))}")

    def _muster(self, seconds: float) -> None:
        """Ask new nodes for their introductions, wait some seconds, and note which clients are connected."""
        connected = self._link.nodes()
        known = {*self._here.known, *self._here.asked.values()}
        for node in (node for node in connected if node not in known):
            content = with_note({"hello": self._hello}, record([]))
            message = self._link.send(node.id, "query", content, 0, _QUERY_LIFE_SECONDS)
            if message is not None:
                self._here.asked[message] = node
        self._here.asked = {message: node for message, node in self._here.asked.items() if node in set(connected)}
        deadline = time.monotonic() + seconds
        while True:
            self._gather()
            self._note_present(connected)
            if not self._here.asked or time.monotonic() > deadline:
                return
            interrupts.pause(_POLL_SECONDS)

    def _gather(self) -> None:
        """Take the introductions that have arrived, by name, so that ids do not depend on which was faster."""
        if not self._here.asked:
            return
        came = self._link.replies(list(self._here.asked))
        for message in sorted(came, key=lambda message: self._here.asked[message].name):
            self._meet(self._here.asked.pop(message), came[message].content, came[message].error)

    def _note_present(self, connected: Sequence[Node]) -> None:
        told = {node: about for node in connected if isinstance(about := self._here.known.get(node), Introduction)}
        self._here.nodes = {self._roster.clients[about.name]: node for node, about in told.items()}

    def _meet(self, node: Node, content: RecordDict | None, error: str) -> None:
        """Note a device's introduction, or why it cannot take part."""
        try:
            about = _introduced(node, content, error)
            group = self._group(about)
        except AnysizeError as refused:
            self._here.known[node] = str(refused)
            self._notice(f"device {node.name or node.id} cannot take part: it {refused}")
            return
        told = {n: old.name for n, old in self._here.known.items() if isinstance(old, Introduction)}
        for other in (n for n, name in told.items() if name == about.name):
            del self._here.known[other]  # it has reconnected
        self._here.known[node] = about
        self._roster.enter([about.name])
        client = self._roster.clients[about.name]
        self._here.groups[client] = group
        self._notice(f"device {about.name} takes part as client {client}, size {group}")

    def _hear(self, client: int, note: Json) -> None:
        """Notes what a device says that it can afford from now on; the next round sends it what fits."""
        node = self._here.nodes.get(client)
        before = None if node is None else self._here.known.get(node)
        if node is None or "device" not in note or not isinstance(before, Introduction):
            return
        about = Introduction.of({"device": note["device"]})
        if about.name != before.name or (about.capacity, about.budget) == (before.capacity, before.budget):
            return
        try:
            group = self._group(about)
        except AnysizeError as error:
            self._notice(f"device {about.name} {error}; it is asked again with what it had")
            return
        self._here.known[node], self._here.groups[client] = about, group
        self._notice(f"device {about.name} says that it can train {about.can()}: size {group} from the next round")

    def _group(self, about: Introduction) -> str:
        """The device group with the largest size that a device can train."""
        times = about.latency_ms
        latency: Latency | None = (lambda size: times.get(size.label, math.inf)) if times else None
        amounts = about.memory_bytes
        footprint: Footprint = lambda size: amounts.get(size.label)  # noqa: E731
        limits, size_of_group = Limits(about.capacity, about.budget), self._experiment.size_of_group
        for group in reversed(self._experiment.fleet.groups):
            own = [size_of_group[group.key]] if group.key in size_of_group else []
            if any(self._costs.allowed(limits, own, latency, footprint)):
                return group.name
        least = self._costs.least(limits, size_of_group.values(), latency, footprint)
        raise AnysizeError(
            f"can train {about.can()}, which is below the smallest size that the experiment trains{least}"
        )

    def _waiting(self, least: int) -> str:
        """For how many devices the run waits, who is there, who cannot take part and why, and who has not answered."""
        parts = [f"waiting for {least} devices; there: {', '.join(self._names()) or 'none'}"]
        refused = {node.name or str(node.id): why for node, why in self._here.known.items() if isinstance(why, str)}
        parts += [f"{name} cannot take part: it {why}" for name, why in sorted(refused.items())]
        silent = sorted(node.name or str(node.id) for node in self._here.asked.values())
        parts += [f"asked, without an answer yet: {', '.join(silent)}"] if silent else []
        away = sorted(set(self._roster.clients) - {*self._names(), *refused, *silent})
        return "; ".join([*parts, *([f"not connected: {', '.join(away)}"] if away else [])])

    def _names(self) -> list[str]:
        names = {client: name for name, client in self._roster.clients.items()}
        return sorted(names[client] for client in self._here.nodes)

    def _notice(self, text: str) -> None:
        self._on_event({"event": "notice", "text": text})


def _absent(request: _Request, why: str) -> list[Update | Absence]:
    return [Absence(request.client, why) for _ in request.tickets]


def _introduced(node: Node, content: RecordDict | None, error: str) -> Introduction:
    """A device's introduction; an error if it is not valid, or names another device."""
    if content is None:
        raise AnysizeError(f"did not answer: {plain(error)}")
    about = Introduction.of(note_in(content))
    if node.name and about.name != node.name:
        raise AnysizeError(f"calls itself {plain(about.name)}, and its key belongs to {node.name}")
    return about
