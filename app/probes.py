"""What may be asked of the pipeline's process over HTTP: `/metrics`, and for an orchestrator `/livez` and `/readyz`.

Alive: not caught in a loop that no longer goes round. Waiting for a server or for the lease is life: ending a process
that waits mends nothing. Ready: the query runs and this process holds the lease.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import Gauge, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from tidemark.app import metrics
from tidemark.app.settings import Settings
from tidemark.streaming.errors import BadSetting

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

# The loop goes round twice a second; docs/metrics.md names the same bound.
STALE_SECONDS = 15.0


def alive(now: float) -> bool:
    return not ready() or now - _value(metrics.HEARTBEAT) < STALE_SECONDS


def ready() -> bool:
    return _value(metrics.READY) == 1


@contextmanager
def served(settings: Settings, now: Callable[[], float] = time.time) -> Iterator[int]:
    """Answer on `metrics_port` from threads of our own, as long as this is entered; the port. Raises BadSetting."""
    host, port = settings.metrics_host, settings.metrics_port
    try:
        server = make_server(host, port, application(now), _server_class(host), handler_class=_Silent)
    except OSError as error:
        raise BadSetting("TIDEMARK_METRICS_PORT", f"cannot listen on {host}:{port}: {error.strerror}") from None
    thread = threading.Thread(target=server.serve_forever, name="probes", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def application(now: Callable[[], float]) -> "WSGIApplication":
    scrape = make_wsgi_app(metrics.REGISTRY)

    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> list[bytes]:
        match environ["PATH_INFO"]:
            case "/livez":
                return _verdict(start_response, None if alive(now()) else "the loop stands still")
            case "/readyz":
                return _verdict(start_response, None if ready() else "starting, or waiting for a server or the lease")
            case _:
                answered: list[bytes] = scrape(environ, start_response)
                return answered

    return answer


def _value(gauge: Gauge) -> float:
    [family] = gauge.collect()
    return float(family.samples[0].value)


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
