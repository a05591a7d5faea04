"""`python -m anysize.deploy.superlink`: Flower's SuperLink, all but the devices' door of it for this machine only.

A SuperLink answers three kinds of callers on one port: devices, whose keys it checks, and its own processes and
whoever starts runs or registers keys, whom it does not ask who they are. So that nobody from outside can run code on
the server or put a key on the list, only requests from this machine reach the latter two. From elsewhere one goes
through `ssh -L`.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_DEVICES = "/v1/fleet/"


class OnlyDevicesFromOutside:
    """Refuses requests from other machines, except those that devices make."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or allowed(str(scope.get("path", "")), scope.get("client")):
            await self._app(scope, receive, send)
            return
        refusal = PlainTextResponse("only devices may call from another machine", status_code=403)
        await refusal(scope, receive, send)


def allowed(path: str, caller: Any) -> bool:
    """Whether a caller, as (address, port), may ask for a path.

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
    """Starts the SuperLink that the command line describes; the same options as `flower-superlink`."""
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink

    others = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(OnlyDevicesFromOutside), *others())
    flower_superlink()


if __name__ == "__main__":
    main()
