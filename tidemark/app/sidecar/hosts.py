"""The names by which a sidecar may be asked: a page of another site must not reach one on its reader's machine."""

from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from tidemark.app.connections import THIS_MACHINE, host_name
from tidemark.app.sidecar.problems import WrongHost

_PROBES = (b"/livez", b"/readyz")
__all__ = ["THIS_MACHINE", "Hosts"]


class Hosts:
    """Refuses requests whose `Host` is none of `names`. `/livez` and `/readyz` are asked by address, and tell
    nothing."""

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["raw_path"] not in _PROBES:
            host = host_name(dict(scope["headers"]).get(b"host", b"").decode("ascii", "replace"))
            if host not in self._names:
                problem = WrongHost(
                    f"this sidecar is not {host[:255]!r}; TIDEMARK_SIDECAR_ALLOWED_HOSTS names what it is called"
                )
                await problem.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
