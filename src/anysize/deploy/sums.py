"""The server's side of secure sums over a fleet: the devices of each class, step by step, to the mean of the class.

A device that does not answer a step is out of the sum; a class with too few devices left learns nothing in the round.
All classes do a step at the same time, since every message waits for Flower's polling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from anysize.deploy.masking import Collector, Keys
from anysize.deploy.membership import asked, blobs_in, key_pair, key_texts, texts, words_in
from anysize.engines.base import Absence
from anysize.errors import AnysizeError
from anysize.methods.messages import SubModel, Update
from anysize.methods.sums import Words
from anysize.wire import Json, load

Answer = tuple[Json, list[bytes]]
Answers = Mapping[int, Answer | str]
"""By client, its note and its blobs, or why there are none."""

Ask = Callable[[Mapping[int, Json]], Answers]
"""Sends each client what it is asked, and gives the answers."""

Mean = Callable[[SubModel, Words, list[int]], Update | Absence]
"""Gives the mean of a sub-model's clients from the sum of their words, if it can be one."""


@dataclass
class Class:
    """The clients of one class, and how far their sum is.

    Attributes:
        round: from 1.
        clients: all of them.
        message: gives what they got.
        collector: their sum.
        lost: why clients are out of it.
        void: why there is no sum, if there is none.
    """

    round: int
    clients: list[int]
    message: Callable[[], SubModel]
    collector: Collector
    lost: dict[int, str] = field(default_factory=dict)
    void: str = ""

    def taken(self, answers: Answers, read: Callable[[Answer], Any]) -> dict[int, Any]:
        """What the clients told in a step; those that told nothing readable are out."""
        found: dict[int, Any] = {}
        for client in self.clients:
            if client not in answers or client in self.lost:
                continue
            answer = answers[client]
            try:
                if isinstance(answer, str):
                    raise AnysizeError(answer)
                found[client] = read(answer)
            except AnysizeError as error:
                self.lost[client] = str(error)
        return found


def answers_of(classes: Iterable[Class], first: Answers, ask: Ask, mean: Mean) -> Iterator[Update | Absence]:
    """The mean of every class, and an absence for each client that is in none.

    Args:
        classes: the clients that were asked to train.
        first: what they told then: their keys.
        ask: asks clients for a step.
        mean: makes the mean of a sum.
    """
    groups = list(classes)
    shares = ask(_asked(groups, "shares", lambda group: _met(group, first)))
    words = ask(_asked(groups, "words", lambda group: _passed_on(group, shares)))
    told = ask(_asked(groups, "unmask", lambda group: _added(group, words)))
    for group in groups:
        yield from _finished(group, told, mean)


def _asked(groups: list[Class], step: str, ready: Callable[[Class], dict[int, Any]]) -> dict[int, Json]:
    """What each client is asked next; a class that cannot go on is void."""
    notes: dict[int, Json] = {}
    for group in groups:
        if group.void:
            continue
        try:
            notes |= {client: asked(step, group.round, told) for client, told in ready(group).items()}
        except AnysizeError as error:
            group.void = str(error)
    return notes


def _met(group: Class, answers: Answers) -> dict[int, Any]:
    def read(answer: Answer) -> Keys:
        return key_pair(answer[0].get("keys"))

    keys = key_texts(group.collector.met(group.taken(answers, read)))
    return {int(client): keys for client in keys}


def _passed_on(group: Class, answers: Answers) -> dict[int, Any]:
    def read(answer: Answer) -> dict[int, bytes]:
        return blobs_in(answer[0].get("shares"))

    passed = group.collector.passed_on(group.taken(answers, read))
    return {client: texts(shares) for client, shares in passed.items()}


def _added(group: Class, answers: Answers) -> dict[int, Any]:
    def read(answer: Answer) -> Words:
        if len(answer[1]) != 1:
            raise AnysizeError(f"invalid: sent {len(answer[1])} blobs in the step that asks for words")
        return words_in(load(answer[1][0])[0])

    for client, words in group.taken(answers, read).items():
        try:
            group.collector.add(client, words)
        except AnysizeError as error:
            group.lost[client] = str(error)
    alive = group.collector.alive()
    return dict.fromkeys(alive, alive)


def _finished(group: Class, answers: Answers, mean: Mean) -> Iterator[Update | Absence]:
    """The mean of a class, or an absence for each of its clients."""

    def read(answer: Answer) -> dict[int, bytes]:
        return blobs_in(answer[0].get("shares"))

    found: Update | Absence | None = None
    try:
        if not group.void:
            members = group.collector.alive()
            total = group.collector.total(group.taken(answers, read))
            found = mean(group.message(), total, members)
    except AnysizeError as error:
        group.void = str(error)
    if isinstance(found, Update):
        yield found
        gone = [client for client in group.clients if client not in found.members]
        yield from (Absence(client, group.lost.get(client, "sent no shares for others of its size")) for client in gone)
        return
    why = group.void if found is None else found.why
    yield from (Absence(client, group.lost.get(client, why)) for client in group.clients)
