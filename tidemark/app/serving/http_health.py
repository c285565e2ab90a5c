"""The health of a process over HTTP: `/metrics`, and `/livez` and `/readyz` for an orchestrator.

`Health` supplies the answers. A process is alive if none of its loops hangs. Waiting for a server or for a lock counts
as alive, because a restart would not help.

Each connection has a thread and one request. The number of connections and their time are bounded, so that an idle
client cannot exhaust threads or memory, or block probes.
"""

import io
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, cast
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from tidemark.app.connections import THIS_MACHINE, host_name, host_port, is_loopback
from tidemark.app.serving.tls_listener import IdleConnection, pick_victims
from tidemark.common.errors import BadSetting

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


class Health(Protocol):
    """The health of a process. Threads of the HTTP server call the methods at any time."""

    @property
    def registry(self) -> CollectorRegistry: ...

    def hangs(self, now: float) -> str | None:
        """The reason to end the process; None while it is alive. `now`: seconds since 1970."""

    def lacks(self) -> str | None:
        """The reason why the process is not ready; None while it works."""


@dataclass(frozen=True, slots=True)
class HealthServerConfig:
    """Bounds of the server.

    Attributes:
        connections: the largest number of connections.
        bytes: the largest request head.
        request_timeout: seconds until the request must have arrived.
        answer_timeout: seconds until it must have been answered.
    """

    connections: int = 32
    bytes: int = 16 << 10
    request_timeout: float = 5.0
    answer_timeout: float = 15.0


@contextmanager
def served(
    setting: str,
    address: tuple[str, int],
    health: Health,
    now: Callable[[], float] = time.time,
    bounds: HealthServerConfig | None = None,
) -> Iterator[int]:
    """Serve at `address` from separate threads during the block. Yields the port.

    Raises `BadSetting` about `setting`, the source of the address.
    """
    host, port = address
    try:
        server = _HealthServer(address, bounds or HealthServerConfig())
    except OSError as error:
        raise BadSetting(setting, f"cannot listen on {host}:{port}: {error.strerror}") from None
    server.set_app(_application(health, now, is_local=is_loopback(host)))
    thread = threading.Thread(target=server.serve_forever, name="probes", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def metrics_address(text: str) -> tuple[str, int]:
    try:
        return host_port(text)
    except ValueError as problem:
        raise BadSetting("--metrics", f"{text!r} is {problem}") from None


def reading(gauge: Gauge) -> float:
    """The value of a gauge without labels."""
    [family] = gauge.collect()
    return float(family.samples[0].value)


def _application(health: Health, now: Callable[[], float], *, is_local: bool) -> "WSGIApplication":
    scrape = _rested(make_wsgi_app(health.registry))

    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> "Iterable[bytes]":
        match environ["PATH_INFO"]:
            case "/livez":
                return _verdict(start_response, health.hangs(now()))
            case "/readyz":
                return _verdict(start_response, health.lacks())
            case _ if is_local and host_name(environ.get("HTTP_HOST", "localhost")) not in THIS_MACHINE:
                # DNS rebinding: a foreign site in a local browser, through a host name that resolves to this machine.
                start_response("421 Misdirected Request", [("Content-Type", "text/plain; charset=utf-8")])
                return [b"unknown host name\n"]
            case _:
                return scrape(environ, start_response)

    return answer


REST = 4  # the pause after a scrape, as a multiple of its duration: clients may scrape without end


def _rested(scrape: "WSGIApplication") -> "WSGIApplication":
    """Serialise scrapes, with a pause after each. Probes do not wait."""
    turn, next_scrape = threading.Lock(), 0.0

    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> "Iterable[bytes]":
        nonlocal next_scrape
        with turn:
            time.sleep(max(0.0, next_scrape - time.monotonic()))
            began = time.monotonic()
            text = scrape(environ, start_response)
            ended = time.monotonic()
            next_scrape = ended + REST * (ended - began)
        return text

    return answer


def _verdict(start_response: "StartResponse", problem: str | None) -> list[bytes]:
    status = HTTPStatus.OK if problem is None else HTTPStatus.SERVICE_UNAVAILABLE
    start_response(f"{status.value} {status.phrase}", [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{problem or 'ok'}\n".encode()]


@dataclass(slots=True)
class _HealthConnection:
    address: str
    since: float
    request_came: bool = False


class _HealthServer(ThreadingWSGIServer):
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], bounds: HealthServerConfig) -> None:
        self.address_family = socket.getaddrinfo(address[0], None, type=socket.SOCK_STREAM)[0][0]
        self.bounds = bounds
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, _HealthConnection] = {}
        super().__init__(address, _OneShotHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._connections) >= self.bounds.connections:
                self._make_room()
            self._connections[request] = _HealthConnection(client_address[0], time.monotonic())
        super().process_request(request, client_address)

    def request_came(self, request: socket.socket) -> None:
        """Note that the request head has arrived."""
        with self._lock:
            if request in self._connections:
                self._connections[request].request_came = True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called about twice a second."""
        now = time.monotonic()
        with self._lock:
            for request, connection in [*self._connections.items()]:
                if now - connection.since >= (
                    self.bounds.answer_timeout if connection.request_came else self.bounds.request_timeout
                ):
                    self._cut(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the errors of disconnected clients."""

    def _make_room(self) -> None:
        connections = self._connections.items()
        silent = [
            IdleConnection(request, connection.address, connection.since)
            for request, connection in connections
            if not connection.request_came
        ]
        for request in pick_victims(silent, self.bounds.connections) or [next(iter(self._connections))]:
            self._cut(request)

    def _cut(self, request: socket.socket) -> None:
        """Close the connection, which ends its thread."""
        del self._connections[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _BoundedHead(io.RawIOBase):
    """Reads the bytes of a connection up to a bound, and then signals its end."""

    def __init__(self, connection: socket.socket, remaining: int) -> None:
        self._connection = connection
        self._remaining = remaining

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = self._connection.recv_into(buffer, min(len(buffer), self._remaining)) if self._remaining else 0
        self._remaining -= read
        return read


class _OneShotHandler(WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self._health_server = cast(_HealthServer, self.server)
        self.rfile = io.BufferedReader(_BoundedHead(self.connection, self._health_server.bounds.bytes))

    def parse_request(self) -> bool:
        is_one = super().parse_request()
        self._health_server.request_came(self.connection)
        return is_one

    def log_message(self, *_: object) -> None:
        """Log nothing, because every probe would be a log line."""
