"""The names by which a sidecar may be asked: a page of another site must not reach one on its reader's machine."""

from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from tidemark.app.connections import LOOPBACK
from tidemark.app.sidecar.admission import PROBES
from tidemark.app.sidecar.problems import WrongHost

THIS_MACHINE = ("localhost", *LOOPBACK)


class Hosts:
    """Refuses requests whose `Host` is none of `names`. Probes are asked by address, and tell nothing."""

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["raw_path"] not in PROBES:
            host = _name(dict(scope["headers"]).get(b"host", b""))
            if host not in self._names:
                problem = WrongHost(
                    f"this sidecar is not {host[:255]!r}; TIDEMARK_SIDECAR_HOSTS names what it is called"
                )
                await problem.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _name(host: bytes) -> str:
    """Without its port."""
    text = host.decode("ascii", "replace").lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
