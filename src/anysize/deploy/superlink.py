"""`python -m anysize.deploy.superlink`: Flower's SuperLink; other machines reach only what devices need.

A SuperLink answers three kinds of callers on one port: devices, its own processes, and users who start runs or register
keys. It checks the keys of devices only. So that nobody from outside can run code on the server or register a key, it
accepts the other two kinds of requests from this machine only. Users elsewhere connect through `ssh -L`.

Flower passes every request through nine layers, most of which concern one kind of caller, and a round of a fleet
consists of requests. So requests go past the layers of other callers, which saves a third of their processor time.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

_DEVICES = "/v1/fleet/"
SPEED = "/v1/fleet/anysize-speed"
"""The path that a device uses to measure its bandwidth."""
SPEED_BYTES = 1 << 20
_CONCERNS = {
    "ControlSensitiveResponseMiddleware": "/v1/control/",
    "ControlAuthenticationMiddleware": "/v1/control/",
    "ControlLicenseMiddleware": "/v1/control/",
    "ControlEventLogMiddleware": "/v1/control/",
    "NodeAuthMiddleware": _DEVICES,
    "FleetEventLogMiddleware": _DEVICES,
    "RuntimeTracingMiddleware": "/v1/runtime/",
}
"""Flower's layers that pass on, unchanged, every request whose path does not begin so."""


class OnlyDevicesFromOutside:
    """Refuses requests from other machines, except those of devices, and answers bandwidth measurements."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == SPEED:
            await _speed(scope, receive, send)
            return
        if scope["type"] == "lifespan" or allowed(str(scope.get("path", "")), scope.get("client")):
            await self._app(scope, receive, send)
            return
        refusal = PlainTextResponse("only devices may call from another machine", status_code=403)
        await refusal(scope, receive, send)


class Only:
    """A layer that sees requests with one beginning of the path; the others go past it.

    Args:
        app: what is below the layer.
        layer: makes the layer.
        prefix: of the paths.
    """

    def __init__(self, app: ASGIApp, layer: Callable[[ASGIApp], ASGIApp], prefix: str) -> None:
        self._below, self._layer, self._prefix = app, layer(app), prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        concerned = str(scope.get("path", "")).startswith(self._prefix)
        await (self._layer if concerned else self._below)(scope, receive, send)


def only_concerned(layers: list[Middleware]) -> list[Middleware]:
    """The same layers, of which each known one sees only the requests that concern it."""
    prefixes = [_CONCERNS.get(getattr(layer.cls, "__name__", "")) for layer in layers]
    return [
        layer if prefix is None else Middleware(Only, layer=layer.cls, prefix=prefix)
        for layer, prefix in zip(layers, prefixes)
    ]


async def _speed(scope: Scope, receive: Receive, send: Send) -> None:
    """Receive and discard up to a megabyte, or send one."""
    request, came = Request(scope, receive), 0
    async for part in request.stream():
        came += len(part)
        if came > SPEED_BYTES:
            await PlainTextResponse("too much", status_code=413)(scope, receive, send)
            return
    content = bytes(SPEED_BYTES) if request.method == "GET" else b""
    await Response(content, media_type="application/octet-stream")(scope, receive, send)


def allowed(path: str, caller: Any) -> bool:
    """Whether a caller, as (address, port), may request a path.

    >>> allowed("/v1/fleet/pull-messages", ("10.0.0.7", 4711)), allowed("/v1/control/start-run", ("10.0.0.7", 4711))
    (True, False)
    >>> allowed("/v1/control/start-run", ("127.0.0.1", 4711)), allowed("/v1/fleet/../control/x", ("10.0.0.7", 1))
    (True, False)
    """
    if path.startswith(_DEVICES) and ".." not in path and "//" not in path:
        return True
    try:
        return caller is not None and ipaddress.ip_address(str(caller[0]).partition("%")[0]).is_loopback
    except ValueError:
        return False


def main() -> None:
    """Start the SuperLink; takes the same options as `flower-superlink`."""
    from flwr.superlink import extensions
    from flwr.superlink import main as superlink
    from flwr.superlink.cli.flower_superlink import flower_superlink

    others, made = extensions.get_middleware, superlink.create_app
    extensions.get_middleware = lambda: (Middleware(OnlyDevicesFromOutside), *others())

    def create_app(*arguments: Any) -> Any:
        app = made(*arguments)
        app.user_middleware = only_concerned(app.user_middleware)
        return app

    superlink.create_app = create_app  # type: ignore[assignment]
    flower_superlink()


if __name__ == "__main__":
    main()
