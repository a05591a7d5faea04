"""`python -m anysize.deploy.process worker`: a device's connection to the server, and what does the server's jobs.

It speaks with the SuperLink as a SuperNode does, with Flower's own client functions, and runs no app. A SuperNode
runs the one that the server sends, in a new process for every message, or passes each message on to another process. A
device runs code only from its own disk, and PyTorch is loaded once.

A SuperNode that has found no message asks again after three seconds. This process asks again soon after it has
answered, and less and less often while nothing comes: a message waits at most a quarter of the time since the last
answer, and never longer than a SuperNode's would.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as Form
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from anysize import interrupts
from anysize.deploy.check import checked
from anysize.deploy.client import answerer
from anysize.deploy.join import OPEN, REASON
from anysize.errors import AnysizeError, told

_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.2, 3.0, 1.25  # seconds between two questions for a message, and their growth

AGAIN = (1.0, 4.0, 16.0)  # seconds until a transfer that failed is tried again

log = logging.getLogger("anysize")

T = TypeVar("T")
Answer = Callable[[Message], Message]


def main(file: str) -> None:
    """Work until the process is stopped; `anysize join` writes the file of settings."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    settings = Path(file)
    given = json.loads(settings.read_text())
    device = Path(given["device"])
    _check(device, settings.with_name(REASON), settings.with_name(OPEN))
    place = connection(given["server"], given["certificate"], given["key"])
    with suppress(KeyboardInterrupt), interrupts.immediate(), place as connected:  # a signal ends the connection too
        log.info("joined as node %d", connected[0])
        Node(connected, settings.with_name(OPEN)).work(answerer(device))


def _check(device: Path, reason: Path, unanswered: Path) -> None:
    """Try the device's code and data; if they do not fit, say why in a file, and end."""
    if unanswered.exists():  # this process was started again in the middle of a job, so they do fit
        return
    try:
        log.info(checked(device))
    except AnysizeError as error:
        reason.write_text(str(error), encoding="utf-8")
        sys.exit(2)


def connection(server: str, certificate: str | None, key: str | None) -> AbstractContextManager[Any]:
    """Flower's connection of a SuperNode: its id, and the functions that ask the SuperLink.

    Args:
        server: the SuperLink's address.
        certificate: the file of the authority's certificate; None: without TLS.
        key: the file of the device's private key; None: the device registers itself.
    """
    private: Any = None if key is None else load_ssh_private_key(Path(key).read_bytes(), None)
    keys = None if private is None else (private, private.public_key())
    return http_request_response(server, certificate is None, certificate, keys)


def pauses() -> Iterator[float]:
    """The seconds between questions after an answer: a quarter longer each time, up to a limit.

    >>> from itertools import islice
    >>> [round(pause, 3) for pause in islice(pauses(), 3)], [round(pause, 3) for pause in islice(pauses(), 20, 21)]
    ([0.2, 0.25, 0.312], [3.0])
    """
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(_LONGEST_PAUSE, pause * _GROWTH)


class Node:
    """A node of the fleet: it takes one message after another, and answers each.

    Args:
        connected: what `connection` gives.
        unanswered: a file that holds the message in work, so that a process that is started again can tell of its end.
    """

    def __init__(self, connected: Any, unanswered: Path) -> None:
        _, self._receive, self._send, _, _, self._pull, self._push, self._confirm = connected
        self._unanswered = unanswered

    def work(self, answer: Answer) -> None:
        """Answer messages for as long as this process lives."""
        self._report_crash()
        waits = pauses()
        while True:
            message = self._next()
            if message is None:
                time.sleep(next(waits))
                continue
            reply = answer(message)
            message.content = RecordDict()  # frees what came before the answer is packed
            self._reply(message, reply)
            waits = pauses()

    def _report_crash(self) -> None:
        """Tell the server of the message whose job ended this process before, if there is one."""
        if not self._unanswered.exists():
            return
        try:
            message = message_from_proto(Form.FromString(self._unanswered.read_bytes()))
        except Exception:  # the process ended while it wrote the file
            log.warning("the message that was in work cannot be read any more")
            self._unanswered.unlink()
            return
        why = Error(ErrorCode.CLIENT_APP_CRASHED, "the device's process ended")
        self._reply(message, Message(why, reply_to=message))

    def _next(self) -> Message | None:
        """The next message; None if there is none, if its run has ended, or if it cannot be fetched."""
        try:
            received = self._receive()
        except (Exception, RunNotRunningException) as error:
            log.warning("the server could not be asked for a message: %s", _why(error))
            return None
        if received is None:
            return None
        about, tree = received  # without its content
        self._unanswered.write_bytes(message_to_proto(about).SerializeToString())
        try:
            return tried(partial(self._fetched, about, tree))
        except RunNotRunningException as error:
            log.warning("a message could not be fetched: %s", _why(error))
            self._unanswered.unlink(missing_ok=True)
        except Exception as error:  # the server gives a message once, and waits for its answer
            self._fail(about, "could not fetch its message", error)
        return None

    def _fetched(self, about: Message, tree: Any) -> Message:
        """The message with its content."""
        run = about.metadata.run_id
        pull, confirm = partial(self._pull, run), partial(self._confirm, run)
        message: Message = pull_and_inflate_object_from_tree(tree, pull, confirm, return_type=Message)
        message.metadata.__dict__["_message_id"] = tree.object_id  # a message that is sent does not hold its own id
        return message

    def _reply(self, message: Message, reply: Message) -> None:
        """Send the answer to a message, or why there is none; without its run there is nobody to take it."""
        try:
            tried(partial(self._deliver, reply))
        except RunNotRunningException as error:
            log.warning("an answer could not be delivered: %s", _why(error))
        except Exception as error:
            if not reply.has_error():
                self._fail(message, "could not deliver its answer", error)
            else:
                log.warning("the server could not be told: %s", _why(error))
        self._unanswered.unlink(missing_ok=True)

    def _deliver(self, reply: Message) -> None:
        """Send an answer; sent again, it takes only what the server does not have yet."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            wanted, session = self._send(reply, get_object_tree(reply), 0.0)
            push = partial(self._push, reply.metadata.run_id, session)
            push_objects(get_all_nested_objects(reply), push, object_ids_to_push=wanted)

    def _fail(self, message: Message, what: str, error: Exception) -> None:
        """Tell the server why it gets no answer to a message; not what the error says, which may name files."""
        log.warning("this device %s: %s", what, _why(error))
        why = Error(ErrorCode.UNKNOWN, f"{what}: {type(error).__name__}; its own log says more")
        self._reply(message, Message(why, reply_to=message))


def tried(transfer: Callable[[], T]) -> T:
    """What a transfer gives; one that fails is tried again, a few times. Flower waits for a server that is away."""
    for pause in AGAIN:
        try:
            return transfer()
        except Exception as error:
            log.warning("a transfer failed: %s; again in %g s", _why(error), pause)
            time.sleep(pause)
    return transfer()


def _why(error: BaseException) -> str:
    """What went wrong between server and device; Flower's exception for a run that has ended has no words."""
    return "its run has ended" if isinstance(error, RunNotRunningException) else told(error)
