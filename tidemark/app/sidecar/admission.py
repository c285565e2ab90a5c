"""Limits the connections and requests of the web server, so that no client exhausts memory or blocks other clients.

uvicorn's parser limits neither the size nor the duration of a request head, and counts an idle connection as a request.
This module limits the size, the number of fields and the duration of a head. Each request needs a slot, except probes.
If there are as many connections as slots, a new connection causes the eviction of idle connections. The slots are
divided fairly between client addresses, and requests start round-robin by address. So a client with many connections
delays neither probes nor other clients.
"""

import time
from asyncio import AbstractEventLoop, Future, Protocol, TimerHandle, Transport
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any, cast

from starlette.types import Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidemark.app.serving.tls_listener import EVICTION_DIVISOR, FairQueue, NoFreeSlot, SlotPool, network_of
from tidemark.app.sidecar.answers import Busy, reason_phrase, status_response

_SLOW_ITERATION_SECONDS = 0.002
_ITERATIONS_AFTER_SLOW_ONE = 8  # enough for a small request to end before the next large request starts


class AdmissionQueue:
    """Starts waiting requests, at most one per iteration of the event loop, round-robin by client address.

    A slow iteration (over `_SLOW_ITERATION_SECONDS`) indicates a large request: then no request starts for
    `_ITERATIONS_AFTER_SLOW_ONE` iterations, so that small requests can end first. For one event loop.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._queue = FairQueue()
        self._now = now
        self._iteration_began = 0.0
        self._iterations_to_wait = 0

    async def wait_for_start(self, loop: AbstractEventLoop, address: str) -> None:
        """Wait until the request of the client at `address` may start: in the next iteration of `loop` if no other
        request waits and the current iteration is not slow.
        """
        start: Future[None] = loop.create_future()
        if not self._queue:
            loop.call_soon(self._start_next, loop)
            self._iteration_began, self._iterations_to_wait = self._now(), 0
        self._queue.add(address, start)
        await start

    def _start_next(self, loop: AbstractEventLoop) -> None:
        now = self._now()
        if now - self._iteration_began > _SLOW_ITERATION_SECONDS:
            self._iterations_to_wait = _ITERATIONS_AFTER_SLOW_ONE
        self._iteration_began = now
        if self._iterations_to_wait:
            self._iterations_to_wait -= 1
        else:
            self._queue.start_next()
        if self._queue:
            loop.call_soon(self._start_next, loop)


PATHS_WITHOUT_SLOT = (b"/livez", b"/readyz", b"/metrics")  # probes, and scrapes of Prometheus
SPARE_CONNECTIONS = 64  # connections beyond the slots, for probes and for refusals
_WRITE_BUFFER_BYTES = 16 << 10  # per client; small, because there are thousands of clients
_MAX_PIPELINED_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Limits of connections and request heads.

    Attributes:
        slots: the largest number of concurrent requests. `SPARE_CONNECTIONS` more connections may be open.
        max_head_bytes: the largest request head, and the largest body.
        max_head_fields: the largest number of fields in a head.
        head_timeout_seconds: how long a head may take to arrive. Then the connection is closed without an answer.
        trusted_proxies: addresses and networks whose `X-Forwarded-For` is used (as uvicorn's `forwarded_allow_ips`).
    """

    slots: int = 5000
    max_head_bytes: int = 64 << 10
    max_head_fields: int = 100
    head_timeout_seconds: float = 10.0
    trusted_proxies: Sequence[str] = ()


def create_protocol_factory(limits: AdmissionConfig) -> type[Protocol]:
    """Create the protocol factory for uvicorn's option `http`. All connections of the factory share `limits.slots`."""
    return cast(
        type[Protocol],
        partial(AdmittedConnection, limits, SlotPool(limits.slots), AdmissionQueue(), ConnectionsByNetwork()),
    )


class _AdmittedRequest:
    """A request with a slot. `is_started` is true after `AdmissionQueue` has started the request."""

    def __init__(self, connection: "AdmittedConnection") -> None:
        self.connection = connection
        self.is_started = False
        self.is_evicted = False

    def evict(self) -> None:
        """Give up the slot to a client of another address: abort the connection if the request has started. Otherwise,
        the request is refused (429) when its turn comes.
        """
        self.is_evicted = True
        if self.is_started:
            self.connection.abort()


class AdmittedConnection(HttpToolsProtocol):
    """An HTTP connection. `idle_since`: when the last response ended, or the connection was made (seconds of the loop's
    clock). None from the end of a request head to the end of a response.
    """

    def __init__(
        self,
        limits: AdmissionConfig,
        slots: "SlotPool[_AdmittedRequest]",
        queue: AdmissionQueue,
        by_network: "ConnectionsByNetwork",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._by_network = by_network
        self.idle_since: float | None = None
        self._limits = limits
        self._slots = slots
        self._queue = queue
        self._admission_app: Any = self._admit_and_serve
        if limits.trusted_proxies:
            self._admission_app = ProxyHeadersMiddleware(cast(Any, self._admit_and_serve), [*limits.trusted_proxies])
        self._deadline: TimerHandle | None = None
        self._received_head_bytes = self._parsed_head_bytes = self._body_bytes = 0
        self._field_count = self._host_field_count = 0
        self._refusal: HTTPStatus | None = None
        self._is_body_refused = False
        self._is_refusal_pending = False  # whether `_refusal` is sent after the answers to earlier requests

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._limits.slots:
            self._by_network.evict(self._limits.slots)
        super().connection_made(transport)
        if self.client:  # a dual-stack socket gives ::ffff:IPv4, which is in no IPv4 network of trusted proxies
            self.client = (self.client[0].removeprefix("::ffff:"), self.client[1])
        self._by_network.add(self)
        transport.set_write_buffer_limits(_WRITE_BUFFER_BYTES)
        self._mark_idle()
        self._deadline = self.loop.call_later(self._limits.head_timeout_seconds, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._mark_busy()
        self._by_network.remove(self)
        super().connection_lost(exc)

    def abort(self) -> None:
        self.connections.discard(self)
        self._by_network.remove(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:  # later bytes are not parsed
            return
        if self.idle_since is not None:
            self._received_head_bytes += len(data)
            if self._deadline is None:
                self._deadline = self.loop.call_later(self._limits.head_timeout_seconds, self.abort)
        super().data_received(data)
        if self._received_head_bytes > self._limits.max_head_bytes and not self.transport.is_closing():
            self._refusal = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._parsed_head_bytes = self._field_count = self._body_bytes = self._host_field_count = 0

    def on_url(self, url: bytes) -> None:
        self._count_head_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._field_count += 1
        self._count_head_bytes(len(name) + len(value))
        super().on_header(name, value)
        if name.lower() == b"host":
            self._host_field_count += 1
            if self._host_field_count > 1:  # RFC 9112: a proxy could use another one of the fields
                self._refuse(HTTPStatus.BAD_REQUEST)
        if name.lower() == b"content-length" and int(value) > self._limits.max_head_bytes:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)

    def on_body(self, body: bytes) -> None:
        """Refuse a body above `max_head_bytes`, or close the connection if the response has started. No operation reads
        bodies."""
        self._body_bytes += len(body)
        if self._body_bytes <= self._limits.max_head_bytes:
            super().on_body(body)
        elif self.cycle.response_started:
            self.transport.close()
        else:
            self._is_body_refused = True
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)

    def _count_head_bytes(self, size: int) -> None:
        """Count bytes of a head, and refuse a head that is too large or has too many fields."""
        self._parsed_head_bytes += size
        if self._parsed_head_bytes > self._limits.max_head_bytes or self._field_count > self._limits.max_head_fields:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _refuse(self, status: HTTPStatus) -> None:
        """Store the status of the refusal, and raise `ValueError`. uvicorn's parser then calls `send_400_response`."""
        self._refusal = status
        raise ValueError(status.phrase)

    def on_headers_complete(self) -> None:
        self._mark_busy()
        if len(self.pipeline) >= _MAX_PIPELINED_REQUESTS:
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS)
        if not self._host_field_count and self.parser.get_http_version() == "1.1":
            self._refuse(HTTPStatus.BAD_REQUEST)
        needs_slot = self.url.partition(b"?")[0] not in PATHS_WITHOUT_SLOT
        if not needs_slot:
            self.app = self.config.loaded_app
        else:
            self.app = self._admission_app
        super().on_headers_complete()

    async def _admit_and_serve(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            await self._queue.wait_for_start(self.loop, address)
            if request.is_evicted:
                await _refuse_busy(scope, receive, send)
                return
            request.is_started = True
            await self.config.loaded_app(scope, receive, send)
        finally:
            self._slots.release(request)

    def on_response_complete(self) -> None:
        was_last = not self.pipeline
        if was_last:  # otherwise uvicorn starts the next pipelined request
            self._mark_idle()
        super().on_response_complete()
        if self._is_refusal_pending and was_last and not self.transport.is_closing():
            self._send_refusal()

    def send_400_response(self, msg: str) -> None:
        """Send the refusal (400, or the status of an earlier refusal), now or after the answers to earlier requests.
        Overrides uvicorn's method. `msg` is not used."""
        self._refusal = self._refusal or HTTPStatus.BAD_REQUEST
        queued = self.pipeline and self.pipeline[0][0] is self.cycle
        if self._is_body_refused and queued:
            self.pipeline.popleft()
        if queued if self._is_body_refused else self._has_unanswered_request:
            self._is_refusal_pending = True
            self.flow.pause_reading()
        else:
            self._send_refusal()

    @property
    def _has_unanswered_request(self) -> bool:
        """Whether a received request is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _send_refusal(self) -> None:
        status = self._refusal or HTTPStatus.BAD_REQUEST
        body = status_response(status)
        head = [f"HTTP/1.1 {status.value} {reason_phrase(status)}", "connection: close"]
        head += [f"{name.decode()}: {value.decode()}" for name, value in body.raw_headers]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + bytes(body.body))
        self.transport.close()

    def _mark_idle(self) -> None:
        self.idle_since, self._received_head_bytes = self.loop.time(), 0
        self._by_network.mark_idle(self)

    def _mark_busy(self) -> None:
        self.idle_since, self._received_head_bytes = None, 0
        self._by_network.mark_busy(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class ConnectionsByNetwork:
    """Connections grouped by client network, to evict from the network with the most connections. For one thread."""

    def __init__(self) -> None:
        self._all_by_network: dict[str, dict[AdmittedConnection, None]] = {}
        self._idle_by_network: dict[str, dict[AdmittedConnection, None]] = {}  # the longest idle first
        self._count = 0

    def add(self, connection: AdmittedConnection) -> None:
        self._all_by_network.setdefault(network_of(connection.address), {})[connection] = None
        self._count += 1

    def remove(self, connection: AdmittedConnection) -> None:
        self.mark_busy(connection)
        self._count -= _remove_from(self._all_by_network, connection)

    def mark_idle(self, connection: AdmittedConnection) -> None:
        """Mark the connection as waiting for its next request."""
        self.mark_busy(connection)
        self._idle_by_network.setdefault(network_of(connection.address), {})[connection] = None

    def mark_busy(self, connection: AdmittedConnection) -> None:
        _remove_from(self._idle_by_network, connection)

    def evict(self, slots: int) -> None:
        """Make room for a new connection: close the longest idle connections of the network with the most connections.

        Closes at most 1/64 of `slots` connections, or one if `slots` is small. If the network has no idle connection,
        closes its newest connection, but only if the spare connections beyond `slots` are used up too.
        """
        network, largest = max(self._all_by_network.items(), key=lambda item: len(item[1]), default=("", {}))
        victims = [*islice(self._idle_by_network.get(network, ()), max(1, slots // EVICTION_DIVISOR))]
        if not victims and self._count >= slots + SPARE_CONNECTIONS:
            victims = [next(reversed(largest))]
        for victim in victims:
            victim.abort()


def _remove_from(by_network: dict[str, dict[AdmittedConnection, None]], connection: AdmittedConnection) -> bool:
    """Remove the connection from `by_network`. Returns False if `by_network` did not contain the connection."""
    network = network_of(connection.address)
    connections = by_network.get(network, {})
    was_present = connections.pop(connection, ...) is None
    if not connections:
        by_network.pop(network, None)
    return was_present


async def _refuse_busy(scope: Scope, receive: Receive, send: Send) -> None:
    problem = Busy("this sidecar has reached its limit of concurrent requests; ask another sidecar, or try again")
    await problem.response()(scope, receive, send)
