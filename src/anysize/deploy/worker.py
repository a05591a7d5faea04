"""`python -m anysize.deploy.worker`: does a device's jobs, for the SuperNode on the same machine.

For every message, Flower would run the app that the server sends, in a new process. A device runs code only from its
own disk: this process does every job with the installed anysize, whatever app the server sent. It stays alive, so that
PyTorch is loaded once.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Context, Message
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from anysize.deploy.check import checked
from anysize.deploy.client import answerer
from anysize.deploy.join import CHECKED, REASON
from anysize.errors import AnysizeError

_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_POLL_SECONDS = 0.1
_HEARTBEAT_SECONDS = 15.0

log = logging.getLogger("anysize")

Answer = Callable[[Message, Context], Message]


def main(settings: Path) -> None:
    """Work until the process is stopped; `anysize join` writes the file of settings."""
    told = json.loads(settings.read_text())
    _check(Path(told["device"]), settings.with_name(CHECKED), settings.with_name(REASON))
    work(told["runtime"], bytes.fromhex(told["secret"]), answerer(Path(told["device"])))


def _check(device: Path, done: Path, reason: Path) -> None:
    """Try the device's code and data once; if they do not fit, say why in a file, and end."""
    if done.exists():  # this process was started again
        return
    try:
        log.info(checked(device))
    except AnysizeError as error:
        reason.write_text(str(error), encoding="utf-8")
        sys.exit(2)
    done.touch()


def work(address: str, secret: bytes, answer: Answer) -> None:
    """Take one message after another from the SuperNode at an address, and answer each.

    A thread fetches each message: if its run has ended meanwhile, it never arrives, and must not block the messages of
    the next run.
    """
    auth = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[_ACQUIRE])
    client = _client(address, "SuperExec", auth)
    arrived: queue.Queue[Task] = queue.Queue()
    while True:
        found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if found.HasField("task") and found.token:
            Task(address, found.token).fetch(arrived)
        try:
            task = arrived.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            continue
        task.end(answer)


class Task:
    """One message to the device: fetched and answered, or dropped if the answer cannot be delivered."""

    def __init__(self, address: str, token: str) -> None:
        self._client = _client(address, "flwr-clientapp", RuntimeTokenHttpInterceptor(token))
        self._done = threading.Event()
        self._input: tuple[Message, Context] | None = None

    def fetch(self, arrived: queue.Queue[Task]) -> None:
        """Fetch the message in a thread, and then put this task into the queue."""
        threading.Thread(target=self._fetch, args=(arrived,), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def end(self, answer: Answer) -> None:
        """Answer the message, with an error if necessary."""
        assert self._input is not None, "a task is ended once it has arrived"
        message, context = self._input
        try:
            push_message(self._client, answer(message, context), context)
        except (httpx.HTTPError, RuntimeError) as error:
            self._over(context, SubStatus.FAILED, str(error))
        else:
            self._over(context, SubStatus.COMPLETED)

    def _fetch(self, arrived: queue.Queue[Task]) -> None:
        try:
            message, context, _, _ = pull_task_input(self._client)
        except Exception as error:
            self._over(None, SubStatus.FAILED, str(error))
        else:
            self._input = message, context
            arrived.put(self)

    def _over(self, context: Context | None, status: str, why: str = "") -> None:
        self._done.set()
        if why:
            log.warning("a task was given up: %s", why)
        push_task_output(self._client, context, status, why)
        self._client.close()

    def _beat(self) -> None:
        """Send heartbeats while the task is in progress."""
        request = SendTaskHeartbeatRequest()
        while not self._done.wait(_HEARTBEAT_SECONDS):
            try:
                self._client.SendTaskHeartbeat(request)
            except httpx.HTTPError as error:
                log.warning("the SuperNode does not hear us: %s", error)


def _client(address: str, role: str, proof: Any) -> RuntimeHttpClient:
    """A connection to the SuperNode on this machine, without TLS."""
    version = RuntimeVersionHttpInterceptor(component_name=role)
    retry = make_simple_http_retry_invoker()
    return RuntimeHttpClient.from_server_address(
        address, True, None, interceptors=[version, proof], retry_invoker=retry
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    main(Path(sys.argv[1]))
