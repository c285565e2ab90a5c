"""Limits the connections of the web server before their requests are parsed, so that no client exhausts memory or
blocks others.

uvicorn's parser limits neither the size nor the duration of a request head, and counts an idle connection as a request.
This module limits the bytes, fields and seconds of a head. If every slot is taken, an idle connection is closed for a
new one. Probes are always answered. Slots are shared by address, and concurrent requests start round-robin by address,
so many connections of one client delay neither probes nor other clients.
"""

from asyncio import AbstractEventLoop, Future, Protocol, TimerHandle, Transport
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any, cast

from starlette.types import Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidemark.app.serving.tls_listener import SHARE, FairQueue, NoFreeSlot, SlotPool, network_of
from tidemark.app.sidecar.problems import Busy, phrase, response

_PER_TURN = 4  # requests that start in one turn of the event loop


class AdmissionQueue:
    """Schedules the start of requests, round-robin by address. For one event loop."""

    def __init__(self) -> None:
        self._queue = FairQueue()

    async def next(self, loop: AbstractEventLoop, address: str) -> None:
        """Wait for the caller's turn: with few requests, the next turn of the event loop."""
        turn: Future[None] = loop.create_future()
        if not self._queue:
            loop.call_soon(self._start, loop)
        self._queue.add(address, turn)
        await turn

    def _start(self, loop: AbstractEventLoop) -> None:
        for _ in range(_PER_TURN):
            if not self._queue:
                return
            self._queue.start_next()
        if self._queue:
            loop.call_soon(self._start, loop)


PROBES = (b"/livez", b"/readyz", b"/metrics")
SPARE = 64  # connections beyond the slots: for probes, and to answer clients that are refused
_UNSENT = 16 << 10  # unsent bytes of a client, besides one piece; small, because there are thousands of clients
_PIPELINED = 16  # requests that a client may send before the first one is answered


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Bounds of connections and request heads.

    Attributes:
        places: the largest number of concurrent requests, and of connections.
        bytes: the largest size of a request head.
        fields: the largest number of its fields.
        seconds: its time limit.
        trusted_proxies: addresses and networks whose `X-Forwarded-For` is used, in uvicorn's form.
    """

    places: int = 5000
    bytes: int = 64 << 10
    fields: int = 100
    seconds: float = 10.0
    trusted_proxies: Sequence[str] = ()


def admission(bounds: AdmissionConfig) -> type[Protocol]:
    """The connection class for uvicorn."""
    return cast(
        type[Protocol],
        partial(AdmittedConnection, bounds, SlotPool(bounds.places), AdmissionQueue(), ConnectionsByNetwork()),
    )


class _AdmittedRequest:
    """A request with a slot. `is_started`: its turn has come."""

    def __init__(self, connection: "AdmittedConnection") -> None:
        self.connection = connection
        self.is_started = False
        self.is_evicted = False

    def evict(self) -> None:
        """End the request for a client of another address. If it has started, its connection is closed."""
        self.is_evicted = True
        if self.is_started:
            self.connection.abort()


class AdmittedConnection(HttpToolsProtocol):
    """A connection. `waits_since`: since when it has waited for a request head (s, the loop's clock); None during a
    request.
    """

    def __init__(
        self,
        bounds: AdmissionConfig,
        places: "SlotPool[_AdmittedRequest]",
        queue: AdmissionQueue,
        by_network: "ConnectionsByNetwork",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._by_network = by_network
        self.waits_since: float | None = None
        self._bounds = bounds
        self._slots = places
        self._queue = queue
        self._admit: Any = self._admitted
        if bounds.trusted_proxies:
            self._admit = ProxyHeadersMiddleware(cast(Any, self._admitted), [*bounds.trusted_proxies])
        self._deadline: TimerHandle | None = None
        self._head_bytes = self._bytes = self._field_count = self._body = self._host_fields = 0
        self._refusal: HTTPStatus | None = None
        self._is_body_refused = False
        self._refuses_next = False  # after the earlier requests are answered

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._bounds.places:
            self._by_network.make_room(self._bounds.places)
        super().connection_made(transport)
        if self.client:  # a dual-stack socket maps IPv4 addresses, and trusted proxies are IPv4 networks
            self.client = (self.client[0].removeprefix("::ffff:"), self.client[1])
        self._by_network.add(self)
        transport.set_write_buffer_limits(_UNSENT)
        self._wait()
        self._deadline = self.loop.call_later(self._bounds.seconds, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._by_network.remove(self)
        super().connection_lost(exc)

    def abort(self) -> None:
        self.connections.discard(self)
        self._by_network.remove(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:  # later bytes are not parsed
            return
        if self.waits_since is not None:
            self._head_bytes += len(data)
            if self._deadline is None:
                self._deadline = self.loop.call_later(self._bounds.seconds, self.abort)
        super().data_received(data)
        if self._head_bytes > self._bounds.bytes and not self.transport.is_closing():
            self._refusal = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._bytes = self._field_count = self._body = self._host_fields = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._field_count += 1
        self._count(len(name) + len(value))
        super().on_header(name, value)
        if name.lower() == b"host":
            self._host_fields += 1
            if self._host_fields > 1:  # by RFC 9112, because proxies could use different ones
                self._refuse(HTTPStatus.BAD_REQUEST)
        if name.lower() == b"content-length" and int(value) > self._bounds.bytes:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)

    def on_body(self, body: bytes) -> None:
        """Reject a body, which no operation reads."""
        self._body += len(body)
        if self._body <= self._bounds.bytes:
            super().on_body(body)
        elif self.cycle.response_started:
            self.transport.close()
        else:
            self._is_body_refused = True
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)

    def _count(self, size: int) -> None:
        """Count bytes of a head. An error raised here reaches `send_400_response`."""
        self._bytes += size
        if self._bytes > self._bounds.bytes or self._field_count > self._bounds.fields:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _refuse(self, status: HTTPStatus) -> None:
        self._refusal = status
        raise ValueError(status.phrase)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        if len(self.pipeline) >= _PIPELINED:
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS)
        if not self._host_fields and self.parser.get_http_version() == "1.1":
            self._refuse(HTTPStatus.BAD_REQUEST)
        is_probe = self.url.partition(b"?")[0] in PROBES
        if is_probe:
            self.app = self.config.loaded_app
        else:
            self.app = self._admit
        super().on_headers_complete()

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = scope["client"][0] if scope["client"] else ""
        request = _AdmittedRequest(self)
        try:
            evicted = self._slots.take(request, address)
        except NoFreeSlot:
            await _refuse_busy(scope, receive, send)
            return
        if evicted is not None:
            evicted.evict()
        try:
            await self._queue.next(self.loop, address)
            if request.is_evicted:
                await _refuse_busy(scope, receive, send)
                return
            request.is_started = True
            await self.config.loaded_app(scope, receive, send)
        finally:
            self._slots.leave(request)

    def on_response_complete(self) -> None:
        self._wait()
        was_last = not self.pipeline
        super().on_response_complete()
        if self._refuses_next and was_last and not self.transport.is_closing():
            self._send_refusal()

    def send_400_response(self, msg: str) -> None:
        """Send the refusal after the answers to earlier requests."""
        self._refusal = self._refusal or HTTPStatus.BAD_REQUEST
        queued = self.pipeline and self.pipeline[0][0] is self.cycle
        if self._is_body_refused and queued:
            self.pipeline.popleft()
        if queued if self._is_body_refused else self._has_unanswered:
            self._refuses_next = True
            self.flow.pause_reading()
        else:
            self._send_refusal()

    @property
    def _has_unanswered(self) -> bool:
        """Whether a received request is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _send_refusal(self) -> None:
        status = self._refusal or HTTPStatus.BAD_REQUEST
        body = response(status)
        head = [f"HTTP/1.1 {status.value} {phrase(status)}", "connection: close"]
        head += [f"{name.decode()}: {value.decode()}" for name, value in body.raw_headers]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + bytes(body.body))
        self.transport.close()

    def _wait(self) -> None:
        self.waits_since, self._head_bytes = self.loop.time(), 0
        self._by_network.is_idle(self)

    def _stop_waiting(self) -> None:
        self.waits_since, self._head_bytes = None, 0
        self._by_network.is_busy(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class ConnectionsByNetwork:
    """The connections by network, for evictions from the network with the most connections. For one thread."""

    def __init__(self) -> None:
        self._all: dict[str, dict[AdmittedConnection, None]] = {}
        self._waiting: dict[str, dict[AdmittedConnection, None]] = {}  # the longest idle first
        self._count = 0

    def add(self, connection: AdmittedConnection) -> None:
        self._all.setdefault(network_of(connection.address), {})[connection] = None
        self._count += 1

    def remove(self, connection: AdmittedConnection) -> None:
        self.is_busy(connection)
        self._count -= _remove_from(self._all, connection)

    def is_idle(self, connection: AdmittedConnection) -> None:
        """Whether the connection waits for the head of its next request."""
        self.is_busy(connection)
        self._waiting.setdefault(network_of(connection.address), {})[connection] = None

    def is_busy(self, connection: AdmittedConnection) -> None:
        _remove_from(self._waiting, connection)

    def make_room(self, places: int) -> None:
        """Close the longest idle connections of the largest network. If the spare connections are used up too, close
        one that is not idle.
        """
        network, largest = max(self._all.items(), key=lambda item: len(item[1]), default=("", {}))
        victims = [*islice(self._waiting.get(network, ()), max(1, places // SHARE))]
        if not victims and self._count >= places + SPARE:
            victims = [next(reversed(largest))]
        for oldest in victims:
            oldest.abort()


def _remove_from(by_network: dict[str, dict[AdmittedConnection, None]], connection: AdmittedConnection) -> bool:
    network = network_of(connection.address)
    connections = by_network.get(network, {})
    was_there = connections.pop(connection, ...) is None
    if not connections:
        by_network.pop(network, None)
    return was_there


async def _refuse_busy(scope: Scope, receive: Receive, send: Send) -> None:
    problem = Busy("the limit of open requests is reached; ask another sidecar, or try again")
    await problem.response()(scope, receive, send)
