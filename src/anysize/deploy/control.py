"""Control of a SuperLink: which keys may join, and runs to start, follow and stop."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from anysize.config.extras import needs
from anysize.deploy.folder import Address
from anysize.errors import AnysizeError, ConfigError

if (_missing := needs("a fleet", "fleet", "flwr")) is not None:
    raise ConfigError(_missing)

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.cli.build import build_fab_from_disk
from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

FINISHED, COMPLETED = "finished", "completed"


class Control:
    """Talks to a SuperLink; a context manager."""

    def __init__(self, address: Address) -> None:
        self._address = address
        try:
            trusted = None if address.authority is None else address.authority.read_bytes()
        except OSError as error:
            raise ConfigError(f"{address.authority}: {error.strerror}; `anysize deploy init` makes it") from None
        self._client = ControlHttpClient.from_server_address(
            address.place,
            trusted is None,
            trusted,
            interceptors=[CliClientHttpInterceptor(), RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )

    def keys(self) -> dict[bytes, tuple[int, str]]:
        """The keys that may join, each with its node's id and name."""
        nodes = self._asked(self._client.ListNodes, ListNodesRequest()).nodes_info
        return {bytes(node.public_key): (int(node.node_id), str(node.name)) for node in nodes}

    def admit(self, key: bytes, name: str) -> None:
        """Add a key to the list, under its device's name."""
        self._asked(self._client.RegisterNode, RegisterNodeRequest(public_key=key, name=name))

    def release(self, node: int) -> None:
        """Remove a node's key from the list."""
        self._asked(self._client.UnregisterNode, UnregisterNodeRequest(node_id=node))

    def start(self, app: Path, values: Mapping[str, Any]) -> int:
        """Start a run of an app, and return its number."""
        bundle = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})
        request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(values)))
        answer = self._asked(self._client.StartRun, request)
        if not answer.HasField("run_id"):
            raise AnysizeError(f"the SuperLink at {self._address.place} did not start the run")
        return int(answer.run_id)

    def lines(self, run: int) -> Iterator[str]:
        """The lines that a run prints, as they come, until it ends."""
        rest = ""
        for part in self._asked(self._client.StreamLogs, StreamLogsRequest(run_id=run, after_timestamp=0.0)):
            *whole, rest = (rest + part.log_output).split("\n")
            yield from whole
        yield from [rest] if rest else []

    def stop(self, run: int) -> None:
        """Stops a run."""
        self._asked(self._client.StopRun, StopRunRequest(run_id=run))

    def outcome(self, run: int) -> tuple[str, str]:
        """The outcome of a run and its details: ("completed", ""), ("failed", why), or ("running", "")."""
        answer = self._asked(self._client.ListRuns, ListRunsRequest(run_id=run))
        status = answer.run_dict[run].status
        return (status.sub_status, status.details) if status.status == FINISHED else (status.status, status.details)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _asked(self, call: Any, request: Any) -> Any:
        try:
            return call(request)
        except httpx.HTTPStatusError as error:
            told = FlowerError.from_json(error.response.text)
            why = error.response.text if told is None else f"{told.message} {told.public_details or ''}".strip()
            raise AnysizeError(f"the SuperLink at {self._address.place} refused: {why}") from None
        except httpx.HTTPError as error:
            raise AnysizeError(
                f"no SuperLink answers at {self._address.place} ({error}); is `anysize server` running there?"
            ) from None


def public_key(path: Path) -> bytes:
    """The public key in a file, as a SuperLink lists it; an error if Flower does not accept it."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a public key in the format of OpenSSH ({error})") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path} is a {type(key).__name__}; an elliptic-curve key is needed: ssh-keygen -t ecdsa")
    return bytes(public_key_to_bytes(key))
