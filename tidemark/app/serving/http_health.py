"""The health of a process over HTTP: `/metrics`, and `/livez` and `/readyz` for an orchestrator.

An object with the methods of `Health` supplies the answers. A process is alive if none of its loops hangs. A process
that waits for a server or for a lock is alive, because a restart would not help.

Each connection has its own thread, and serves one request. The number and duration of connections are limited, so that
idle clients cannot exhaust threads or memory, or block probes.
"""

import io
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, cast
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from tidemark.app.connections import host_name, local_host_names, parse_host_port
from tidemark.app.serving.tls_listener import IdleConnection, pick_victims
from tidemark.common.errors import BadSetting

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


class Health(Protocol):
    """The health of a process. Threads of the HTTP server call the methods at any time."""

    @property
    def registry(self) -> CollectorRegistry: ...

    def liveness_problem(self, now: float) -> str | None:
        """Why the process must be restarted; None while the process is alive. `now`: seconds since 1970."""

    def readiness_problem(self) -> str | None:
        """Why the process is not ready; None while the process is ready."""


@dataclass(frozen=True, slots=True)
class HealthServerConfig:
    """Limits of the health server.

    Attributes:
        max_connections: the largest number of connections.
        max_head_bytes: the largest request head. No more bytes of a connection are read.
        request_timeout_seconds: how long after the start of a connection the request must have arrived.
        answer_timeout_seconds: how long after the start of a connection the answer must have been sent.
    """

    max_connections: int = 32
    max_head_bytes: int = 16 << 10
    request_timeout_seconds: float = 5.0
    answer_timeout_seconds: float = 15.0


@contextmanager
def serve_health(
    setting: str,
    address: tuple[str, int],
    health: Health,
    now: Callable[[], float] = time.time,
    limits: HealthServerConfig | None = None,
) -> Iterator[int]:
    """Serve the health of a process on separate threads during the block. Yields the port number.

    Args:
        setting: the name of the setting or option with the address, for the error.
        address: host and port; port 0 selects a free one.
        health: the answers.
        now: a clock, in seconds since 1970.
        limits: the limits of the server; None: the default limits.

    Raises:
        BadSetting: the process cannot listen on the address.
    """
    host, port = address
    try:
        server = _HealthServer(address, limits or HealthServerConfig())
    except OSError as error:
        raise BadSetting(setting, f"cannot listen on {host}:{port}: {error.strerror}") from None
    server.set_app(_application(health, now, local_host_names(host)))
    thread = threading.Thread(target=server.serve_forever, name="probes", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def parse_metrics_address(text: str) -> tuple[str, int]:
    """Parse the value of `--metrics` as host and port. Raises `BadSetting` if the value is not `host:port`."""
    try:
        return parse_host_port(text)
    except ValueError as problem:
        raise BadSetting("--metrics", f"{text!r} is {problem}") from None


def gauge_value(gauge: Gauge) -> float:
    """The current value of a gauge without labels."""
    [family] = gauge.collect()
    return float(family.samples[0].value)


def _application(health: Health, now: Callable[[], float], allowed_hosts: Collection[str]) -> "WSGIApplication":
    """The metrics and probes. `allowed_hosts`: see `local_host_names`."""
    scrape = _throttle(make_wsgi_app(health.registry))

    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> "Iterable[bytes]":
        match environ["PATH_INFO"]:
            case "/livez":
                return _probe_response(start_response, health.liveness_problem(now()))
            case "/readyz":
                return _probe_response(start_response, health.readiness_problem())
            case _ if allowed_hosts and host_name(environ.get("HTTP_HOST", "localhost")) not in allowed_hosts:
                start_response("421 Misdirected Request", [("Content-Type", "text/plain; charset=utf-8")])
                return [b"unknown host name\n"]
            case _:
                return scrape(environ, start_response)

    return answer


PAUSE_FACTOR = 4  # the pause after a scrape, as a multiple of its duration; scrapes use at most 1/5 of the time


def _throttle(scrape: "WSGIApplication") -> "WSGIApplication":
    """Wrap `scrape`, so that one scrape runs at a time, and the next scrape begins after a pause (`PAUSE_FACTOR`)."""
    lock, not_before = threading.Lock(), 0.0

    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> "Iterable[bytes]":
        nonlocal not_before
        with lock:
            time.sleep(max(0.0, not_before - time.monotonic()))
            began = time.monotonic()
            text = scrape(environ, start_response)
            ended = time.monotonic()
            not_before = ended + PAUSE_FACTOR * (ended - began)
        return text

    return answer


def _probe_response(start_response: "StartResponse", problem: str | None) -> list[bytes]:
    status = HTTPStatus.OK if problem is None else HTTPStatus.SERVICE_UNAVAILABLE
    start_response(f"{status.value} {status.phrase}", [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{problem or 'ok'}\n".encode()]


@dataclass(slots=True)
class _HealthConnection:
    address: str
    connected_at: float
    has_request: bool = False


class _HealthServer(ThreadingWSGIServer):
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], limits: HealthServerConfig) -> None:
        self.address_family = socket.getaddrinfo(address[0], None, type=socket.SOCK_STREAM)[0][0]
        self.limits = limits
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, _HealthConnection] = {}
        super().__init__(address, _SingleRequestHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._connections) >= self.limits.max_connections:
                self._evict()
            self._connections[request] = _HealthConnection(client_address[0], time.monotonic())
        super().process_request(request, client_address)

    def mark_request_received(self, request: socket.socket) -> None:
        """Record that the head of the request has arrived."""
        with self._lock:
            if request in self._connections:
                self._connections[request].has_request = True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that have timed out. `serve_forever` calls this method about twice a second."""
        now = time.monotonic()
        with self._lock:
            for request, connection in [*self._connections.items()]:
                if now - connection.connected_at >= (
                    self.limits.answer_timeout_seconds
                    if connection.has_request
                    else self.limits.request_timeout_seconds
                ):
                    self._close(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore all errors of a request. Most are errors of clients that disconnect."""

    def _evict(self) -> None:
        """Close the connections that `pick_victims` picks from those without a request. If every connection has a
        request, close the oldest connection."""
        idle = [
            IdleConnection(request, connection.address, connection.connected_at)
            for request, connection in self._connections.items()
            if not connection.has_request
        ]
        for request in pick_victims(idle, self.limits.max_connections) or [next(iter(self._connections))]:
            self._close(request)

    def _close(self, request: socket.socket) -> None:
        """Shut the connection down, which ends its thread."""
        del self._connections[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _LimitedReader(io.RawIOBase):
    """Reads at most `max_bytes` from a connection. Then reports the end of the stream."""

    def __init__(self, connection: socket.socket, max_bytes: int) -> None:
        self._connection = connection
        self._remaining = max_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = self._connection.recv_into(buffer, min(len(buffer), self._remaining)) if self._remaining else 0
        self._remaining -= read
        return read


class _SingleRequestHandler(WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self._health_server = cast(_HealthServer, self.server)
        self.rfile = io.BufferedReader(_LimitedReader(self.connection, self._health_server.limits.max_head_bytes))

    def parse_request(self) -> bool:
        is_valid = super().parse_request()
        self._health_server.mark_request_received(self.connection)
        return is_valid

    def log_message(self, *_: object) -> None:
        """Log nothing: probes come every few seconds."""
