"""Clients on real devices: each message goes to the device that is the client, and what does not come is an absence."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord

from anysize import config as configs
from anysize.deploy.link import Link, Node
from anysize.deploy.roster import Roster
from anysize.devices import Budget, Fleet, enrolled
from anysize.engines.base import Absence, Engine
from anysize.engines.messages import arrays, note_in, packed, unpacked, with_note
from anysize.errors import AnysizeError
from anysize.methods.base import SubModel, Update
from anysize.profiling import stage
from anysize.wire import Json, dump

if TYPE_CHECKING:
    from anysize.experiment import Experiment

_POLL_SECONDS = 0.1
_SLOWEST_POLL_SECONDS = 1.0
_INTRODUCTION_SECONDS = 20.0  # the most that a round waits for devices that have just come
_RETURN_SECONDS = 120.0  # the most that a round waits for enough devices, where engine.round_timeout says nothing
_QUERY_LIFE_SECONDS = 600.0
_LONGEST = 300  # characters of what a device says about itself
_SLACK = 1e-9


@dataclass(frozen=True)
class Introduction:
    """What a device tells of itself before it takes part.

    Attributes:
        name: the device's.
        capacity: the part of the full model that it can train, or None with a budget.
        budget: what it can afford in units, or None with a capacity.
        samples: how many samples it trains on; None where that does not leave it.
    """

    name: str
    capacity: float | None = None
    budget: Budget | None = None
    samples: int | None = None

    @classmethod
    def of(cls, note: Json) -> Introduction:
        """The introduction in a note, refused in plain words if it is none."""
        if "failure" in note:
            raise AnysizeError(plain(note["failure"]))
        about = note.get("device")
        if not isinstance(about, dict) or not isinstance(about.get("name"), str) or not about["name"]:
            raise AnysizeError("did not say its name")
        capacity, budget, samples = about.get("capacity"), about.get("budget"), about.get("samples")
        if (capacity is None) == (budget is None):
            raise AnysizeError("must tell a capacity or a budget, one of the two")
        if capacity is not None and not (_is_number(capacity) and 0 < capacity <= 1):
            raise AnysizeError(f"has capacity {plain(capacity)}; it must be above 0 and at most 1")
        if samples is not None and not (type(samples) is int and 0 < samples < 2**53):
            raise AnysizeError(f"has {plain(samples)} samples; a whole number above 0 is needed")
        try:
            limits = None if budget is None else Budget(**budget)
        except TypeError:
            raise AnysizeError(f"has a budget in unknown units: {plain(budget)}") from None
        return cls(about["name"], capacity, limits, samples)

    def to_note(self) -> Json:
        """As a note; `of` is the inverse."""
        budget = None if self.budget is None else self.budget.limits()
        about = {"name": self.name, "capacity": self.capacity, "budget": budget, "samples": self.samples}
        return {"device": about}


@dataclass
class _Attendance:
    """Who has come, and who is there.

    Attributes:
        asked: message ids of open introductions, each with its node.
        known: what each node told, or why it cannot take part.
        groups: the group's name of every client that ever came.
        nodes: the node of each client that is there now.
    """

    asked: dict[str, Node] = field(default_factory=dict)
    known: dict[Node, Introduction | str] = field(default_factory=dict)
    groups: dict[int, str] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Sent:
    """A message on its way: to whom, its id or why there is none, and what was sent."""

    client: int
    message: str | None
    why: str
    sub_model: SubModel


class Devices(Engine):
    """Runs each client on the device that it is.

    Args:
        experiment: one that devices can be told about.
        link: the connection.
        roster: which device is which client.
        on_event: called with notices: who came, who cannot take part.
        check: what looks at every update before anything else may use it.
    """

    def __init__(
        self,
        experiment: Experiment,
        link: Link,
        roster: Roster,
        on_event: Callable[[Json], None] = lambda event: None,
        check: Callable[[SubModel, Update], Update | Absence] = lambda sub_model, update: update,
    ) -> None:
        self._experiment, self._link, self._roster = experiment, link, roster
        self._on_event, self._check = on_event, check
        self._options = experiment.config.engine
        self._hello = {
            "run": roster.run,
            "config": configs.dumps(experiment.config),
            "signature": experiment.signature.to_json(),
            "sizes": [vars(size) for size in experiment.sizes],
        }
        self._here = _Attendance()
        self._last: tuple[bytes, ArrayRecord] | None = None
        self._began = False

    def fleet(self, round: int, planned: Fleet) -> Fleet:
        """Who is there; waits for `engine.min_clients`, in the first round as long as it takes."""
        least = self._options.min_clients or 1
        patience = self._options.round_timeout or _RETURN_SECONDS
        began, told = time.monotonic(), 0.0
        self._muster(_INTRODUCTION_SECONDS)
        while len(self._here.nodes) < least:
            waited = time.monotonic() - began
            if self._began and waited > patience:
                break
            if not told or waited > 2 * told:
                told = max(waited, 1.0)
                there = ", ".join(sorted(self._names())) or "nobody"
                self._notice(f"waiting for {least} devices; there: {there}")
            time.sleep(_SLOWEST_POLL_SECONDS)
            self._muster(0.0)
        self._began = True
        return enrolled(planned, self._experiment.config.devices, self._here.groups, self._here.nodes)

    def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update | Absence]:
        began, timeout = time.monotonic(), self._options.round_timeout
        sent = [self._send(sub_model) for sub_model in sub_models]
        self._last = None
        deadline = None if timeout is None else began + timeout
        for message in sent:
            yield self._answer(message, deadline)

    def _send(self, sub_model: SubModel) -> _Sent:
        client = int(sub_model.ticket["client"])
        node = self._here.nodes.get(client)
        if node is None:
            return _Sent(client, None, "is not connected", sub_model)
        with stage("send"):
            note = {"hello": self._hello, "ticket": sub_model.ticket}
            content = with_note(note, self._record(dump(sub_model.tensors, {})))
            kind = "train" if sub_model.ticket["task"] == "train" else "evaluate"
            number, seconds = int(sub_model.ticket["round"]), self._options.round_timeout
            message = self._link.send(node.id, kind, content, number, seconds)  # type: ignore[arg-type]
        return _Sent(client, message, "could not be reached" if message is None else "", sub_model)

    def _record(self, blob: bytes) -> ArrayRecord:
        """The record of the tensors; clients of one size follow each other and often get the same ones."""
        if self._last is None or self._last[0] != blob:
            self._last = (blob, arrays(blob, dump({}, {})))
        return self._last[1]

    def _answer(self, sent: _Sent, deadline: float | None) -> Update | Absence:
        if sent.message is None:
            return Absence(sent.client, sent.why)
        pause = _POLL_SECONDS
        while True:
            over = deadline is not None and time.monotonic() > deadline
            reply = self._link.replies([sent.message]).get(sent.message)
            if reply is not None and reply.content is None:
                return Absence(sent.client, plain(reply.error))
            if reply is not None:
                return self._judged(sent, reply.content)
            if over:
                return Absence(sent.client, f"too late: no answer within {self._options.round_timeout:g} s")
            time.sleep(pause)
            pause = min(_SLOWEST_POLL_SECONDS, pause * 1.5)

    def _judged(self, sent: _Sent, content: Any) -> Update | Absence:
        """The update in an answer, or why it is none that may be used."""
        try:
            note, tensors, _ = unpacked(content)
        except AnysizeError as error:
            return Absence(sent.client, f"sent rubbish: {plain(error)}")
        if "failure" in note:
            return Absence(sent.client, plain(note["failure"]))
        ticket = note.get("ticket")
        if not isinstance(ticket, dict):
            return Absence(sent.client, "sent rubbish: an answer without a ticket")
        return self._check(sent.sub_model, Update(tensors, ticket))

    def _muster(self, seconds: float) -> None:
        """Asks who is new, takes the answers that come within some seconds, and notes who is there."""
        connected = self._link.nodes()
        known = {*self._here.known, *self._here.asked.values()}
        for node in (node for node in connected if node not in known):
            note = {"hello": self._hello}
            message = self._link.send(node.id, "query", packed(note), 0, _QUERY_LIFE_SECONDS)
            if message is not None:
                self._here.asked[message] = node
        self._gather(connected, seconds)
        there = {node: about for node in connected if isinstance(about := self._here.known.get(node), Introduction)}
        self._roster.enter(about.name for about in there.values())
        self._here.nodes = {self._roster.clients[about.name]: node for node, about in there.items()}

    def _gather(self, connected: Iterable[Node], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        here = set(connected)
        while self._here.asked:
            for message, reply in self._link.replies(list(self._here.asked)).items():
                node = self._here.asked.pop(message)
                self._meet(node, reply.content, reply.error)
            self._here.asked = {message: node for message, node in self._here.asked.items() if node in here}
            if not self._here.asked or time.monotonic() > deadline:
                return
            time.sleep(_POLL_SECONDS)

    def _meet(self, node: Node, content: Any, error: str) -> None:
        """Notes what a device tells of itself, or why it cannot take part."""
        try:
            if content is None:
                raise AnysizeError(plain(error))
            about = Introduction.of(note_in(content))
            if node.name and about.name != node.name:
                raise AnysizeError(f"calls itself {plain(about.name)}, and its key belongs to another name")
            group = self._group(about)
        except AnysizeError as refused:
            self._here.known[node] = str(refused)
            self._notice(f"device {node.name or node.id} cannot take part: it {refused}")
            return
        taken = [other for other, old in self._here.known.items() if isinstance(old, Introduction) and old.name == about.name]
        for other in taken:  # it has connected anew
            del self._here.known[other]
        self._here.known[node] = about
        self._roster.enter([about.name])
        client = self._roster.clients[about.name]
        self._here.groups[client] = group
        if about.samples is not None:
            self._here.samples[client] = about.samples
        self._notice(f"device {about.name} takes part as client {client}, size {group}")

    def _group(self, about: Introduction) -> str:
        """The largest of the experiment's groups that a device can train."""
        experiment = self._experiment
        for group in reversed(experiment.fleet.groups):
            size = experiment.size_of_group[group.name]
            if about.budget is None:
                needs = size.width if group.capacity is None else group.capacity
                if needs <= (about.capacity or 0.0) + _SLACK:
                    return group.name
            elif about.budget.fits({"latency_ms": 0.0} | self._units(group.name)):
                return group.name
        can = f"capacity {about.capacity:g}" if about.budget is None else f"a budget of {about.budget.limits()}"
        raise AnysizeError(f"has {can}, which is below the smallest size that the experiment trains")

    def _units(self, group: str) -> Mapping[str, float]:
        return self._experiment.cost(self._experiment.size_of_group[group]).units()

    def _names(self) -> list[str]:
        ids = {client: name for name, client in self._roster.clients.items()}
        return [ids[client] for client in self._here.nodes]

    def _notice(self, text: str) -> None:
        self._on_event({"event": "notice", "text": text})


def plain(text: object) -> str:
    """What a device says, as one short line without control signs.

    >>> plain("no\\x1b[31m memory\\nTraceback ...")
    'no [31m memory Traceback ...'
    """
    line = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text if isinstance(text, str) else json.dumps(text, default=str))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
