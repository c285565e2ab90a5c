"""What may be asked of a process over HTTP: `/metrics`, and for an orchestrator `/livez` and `/readyz`.

Of which process, its `Health` says. Alive: not caught in a loop that no longer goes round. Waiting for a server or for
one's turn is life: ending a process that waits mends nothing.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from tidemark.streaming.errors import BadSetting

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


class Health(Protocol):
    """Asked from threads of the server's own, at any time."""

    @property
    def registry(self) -> CollectorRegistry: ...

    def hangs(self, now: float) -> str | None:
        """Why the process should be ended, None while it lives; `now` in seconds since 1970."""

    def lacks(self) -> str | None:
        """What it waits for, None while it does what it is for."""


@contextmanager
def served(
    setting: str, address: tuple[str, int], health: Health, now: Callable[[], float] = time.time
) -> Iterator[int]:
    """Answer at `address` from threads of our own, as long as this is entered; the port.

    Raises `BadSetting` for `setting`, which the address comes from.
    """
    host, port = address
    try:
        server = make_server(host, port, _application(health, now), _server_class(host), handler_class=_Silent)
    except OSError as error:
        raise BadSetting(setting, f"cannot listen on {host}:{port}: {error.strerror}") from None
    thread = threading.Thread(target=server.serve_forever, name="probes", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reading(gauge: Gauge) -> float:
    """The value of a gauge without labels."""
    [family] = gauge.collect()
    return float(family.samples[0].value)


def _application(health: Health, now: Callable[[], float]) -> "WSGIApplication":
    scrape = make_wsgi_app(health.registry)

    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> list[bytes]:
        match environ["PATH_INFO"]:
            case "/livez":
                return _verdict(start_response, health.hangs(now()))
            case "/readyz":
                return _verdict(start_response, health.lacks())
            case _:
                answered: list[bytes] = scrape(environ, start_response)
                return answered

    return answer


def _verdict(start_response: "StartResponse", problem: str | None) -> list[bytes]:
    status = HTTPStatus.OK if problem is None else HTTPStatus.SERVICE_UNAVAILABLE
    start_response(f"{status.value} {status.phrase}", [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{problem or 'ok'}\n".encode()]


def _server_class(host: str) -> type[ThreadingWSGIServer]:
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    return type("ProbesServer", (ThreadingWSGIServer,), {"address_family": family})


class _Silent(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Every probe would be a line."""
