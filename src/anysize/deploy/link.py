"""A run's connection to its devices: who is there, messages to them, their replies."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

Kind = Literal["query", "train", "evaluate"]

_TYPES = {"query": MessageType.QUERY, "train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE}


@dataclass(frozen=True)
class Node:
    """A device that is connected.

    Attributes:
        id: Flower's number for it.
        name: under which its key is on the list; empty on an insecure SuperLink, which has none.
        since: when it connected.
    """

    id: int
    name: str = ""
    since: str = ""


@dataclass(frozen=True)
class Reply:
    """What came back: records, or why there are none."""

    content: RecordDict | None
    error: str = ""


class Link(Protocol):
    """What an engine needs of a connection."""

    def nodes(self) -> list[Node]:
        """Who is connected now."""

    def send(self, node: int, kind: Kind, content: RecordDict, round: int, seconds: float | None) -> str | None:
        """Sends a message that is good for some seconds and gives its id; None if it cannot be sent."""

    def replies(self, sent: Collection[str]) -> dict[str, Reply]:
        """Those replies to sent messages that have come, by the messages' ids; each is given once."""


class GridLink:
    """The connection that Flower gives a ServerApp."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> list[Node]:
        """Who is connected now."""
        found = self._grid.get_nodes()
        return [Node(int(node.node_id), str(node.name), str(node.last_activated_at)) for node in found]

    def send(self, node: int, kind: Kind, content: RecordDict, round: int, seconds: float | None) -> str | None:
        """Sends a message that is good for some seconds and gives its id; None if it cannot be sent."""
        message = Message(content, node, _TYPES[kind], ttl=seconds, group_id=str(round))
        return next(iter(self._grid.push_messages([message])), None) or None

    def replies(self, sent: Collection[str]) -> dict[str, Reply]:
        """Those replies to sent messages that have come; an error tells by itself what it replies to."""
        return {m.metadata.reply_to_message_id: _reply(m) for m in self._grid.pull_messages(list(sent))}


def _reply(message: Message) -> Reply:
    if message.has_error():
        return Reply(None, message.error.reason or f"Flower's error {message.error.code}")
    return Reply(message.content)
