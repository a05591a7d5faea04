"""A run's connection to its devices: the connected ones, messages to them, their replies."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

import httpx
from flwr.app import Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

Kind = Literal["query", "train", "evaluate"]

_TYPES = {"query": MessageType.QUERY, "train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE}
_ERRORS = {
    ErrorCode.MESSAGE_UNAVAILABLE: "too late: its message had expired",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "too late: its answer had expired",
    ErrorCode.NODE_UNAVAILABLE: "disappeared: its heartbeat stopped",
    ErrorCode.CLIENT_APP_CRASHED: "crashed",
}
_PARTIAL = "objects are unavailable"  # Flower has one code for this and for a message that expired


@dataclass(frozen=True)
class Node:
    """A device that is connected.

    Attributes:
        id: Flower's number for it.
        name: the name of its key; empty on an insecure SuperLink.
        since: when it connected.
    """

    id: int
    name: str = ""
    since: str = ""


@dataclass(frozen=True)
class Reply:
    """A reply: records, or why there are none."""

    content: RecordDict | None
    error: str = ""


class Link(Protocol):
    """What an engine needs from a connection."""

    def nodes(self) -> list[Node]:
        """The devices that are connected now."""

    def send(self, node: int, kind: Kind, content: RecordDict, round: int, seconds: float | None) -> str | None:
        """Send a message that is valid for some seconds, and return its id; None if it cannot be sent."""

    def replies(self, sent: Collection[str]) -> dict[str, Reply]:
        """The new replies to sent messages, by the ids of the messages; each is returned once."""


class GridLink:
    """The connection that Flower gives a ServerApp."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> list[Node]:
        """The devices that are connected now."""
        found = self._grid.get_nodes()
        return [Node(int(node.node_id), str(node.name), str(node.last_activated_at)) for node in found]

    def send(self, node: int, kind: Kind, content: RecordDict, round: int, seconds: float | None) -> str | None:
        """Send a message that is valid for some seconds, and return its id; None if it cannot be sent."""
        message = Message(content, node, _TYPES[kind], ttl=seconds, group_id=str(round))
        return next(iter(self._grid.push_messages([message])), None) or None

    def replies(self, sent: Collection[str]) -> dict[str, Reply]:
        """The new replies to sent messages; an error names the message it replies to."""
        return {message: reply for message in sent for reply in self._replies(message)}

    def _replies(self, message: str) -> list[Reply]:
        """The reply to one message, if it has come. Asked one by one, a reply that cannot be read costs no other."""
        try:
            return [_reply(came) for came in self._grid.pull_messages([message])]
        except httpx.HTTPError:  # the server's own connection
            raise
        except Exception as error:
            return [Reply(None, f"sent an answer that cannot be read ({type(error).__name__})")]


def _reply(message: Message) -> Reply:
    if not message.has_error():
        return Reply(message.content)
    error = message.error
    if error.code == ErrorCode.MESSAGE_UNAVAILABLE and _PARTIAL in (error.reason or ""):
        return Reply(None, "sent an answer that did not arrive whole")
    return Reply(None, _ERRORS.get(error.code) or error.reason or f"failed with Flower's error {error.code}")
