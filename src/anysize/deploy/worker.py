"""`python -m anysize.deploy.worker`: does what a device is asked, for the SuperNode beside it.

Flower would load and run the app that the server sends with every message, in a process of its own. A device takes
code from its own disk only: this process does every task with the anysize that is installed here, whatever app came
along, and stays, so that PyTorch is loaded once.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Context, Message
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_POLL_SECONDS = 0.1
_HEARTBEAT_SECONDS = 15.0

log = logging.getLogger("anysize")

Answer = Callable[[Message, Context], Message]


def main(settings: Path) -> None:
    """Works until the process is stopped; the settings are a file that `anysize join` writes."""
    told = json.loads(settings.read_text())
    from anysize.deploy.client import answerer

    work(told["runtime"], bytes.fromhex(told["secret"]), answerer(Path(told["device"])))


def work(address: str, secret: bytes, answer: Answer) -> None:
    """Takes task after task from the SuperNode at an address, and answers each."""
    auth = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[_ACQUIRE])
    client = _client(address, "SuperExec", auth)
    while True:
        found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if found.HasField("task") and found.token:
            perform(address, found.token, answer)
        else:
            time.sleep(_POLL_SECONDS)


def perform(address: str, token: str, answer: Answer) -> None:
    """One task: its message is answered, by an error if need be; what cannot be delivered is given up."""
    client = _client(address, "flwr-clientapp", RuntimeTokenHttpInterceptor(token))
    done = threading.Event()
    threading.Thread(target=_beat, args=(client, done), daemon=True).start()
    context: Context | None = None
    status, details = SubStatus.FAILED, ""
    try:
        message, context, _, _ = pull_task_input(client)
        push_message(client, answer(message, context), context)
        status = SubStatus.COMPLETED
    except (httpx.HTTPError, RuntimeError) as error:
        details = str(error)
        log.warning("a task was given up: %s", error)
    finally:
        done.set()
        push_task_output(client, context, status, details)
        client.close()


def _client(address: str, role: str, proof: Any) -> RuntimeHttpClient:
    """A connection to the SuperNode, which is on this machine: so without TLS."""
    version = RuntimeVersionHttpInterceptor(component_name=role)
    retry = make_simple_http_retry_invoker()
    return RuntimeHttpClient.from_server_address(
        address, True, None, interceptors=[version, proof], retry_invoker=retry
    )


def _beat(client: RuntimeHttpClient, done: threading.Event) -> None:
    """Says now and then that the task is still worked on."""
    beat = make_task_heartbeat_fn_http(client)
    while not done.wait(_HEARTBEAT_SECONDS):
        try:
            beat()
        except httpx.HTTPError as error:
            log.warning("the SuperNode does not hear us: %s", error)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(Path(sys.argv[1]))
