"""A sidecar that runs beside a test, and streams with a true state, so that it can tell who holds them back."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import redis
import uvicorn

from tests.sinks.given import NOW, advance, stream
from tests.waiting import eventually
from tidemark.app.read_side import ReadSideConfig
from tidemark.app.serving.serve import StoppableServer
from tidemark.app.serving.tls_listener import ListenerConfig
from tidemark.app.sidecar.admission import AdmissionConfig, create_protocol_factory
from tidemark.app.sidecar.app import AppConfig, create_app
from tidemark.streaming.core import codec
from tidemark.streaming.core.chain import Chain, DeferredRange, Span
from tidemark.streaming.core.effects import StreamEffects
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.core.writer_table import Writers
from tidemark.streaming.core.writers import LinearPosition, WriterState
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.intervals import NO_INTERVALS
from tidemark.streaming.values.limits import Evidence


class SidecarClient(httpx.Client):
    """Talks to one sidecar."""

    def json(self, path: str, status: int = 200, **more: Any) -> Any:
        """The answer's JSON, which must come with `status`."""
        answer = self.get(path, **more)
        assert answer.status_code == status, answer.text
        return answer.json()

    def held_open(self, operation: str) -> int:
        """How many requests of `operation` this process holds open, as its metrics say."""
        name = f'tidemark_sidecar_requests_in_flight{{operation="{operation}"}} '
        found = [line for line in self.get("/metrics").text.splitlines() if line.startswith(name)]
        return int(float(found[0].removeprefix(name))) if found else 0


@contextmanager
def sidecar(
    servers: ReadSideConfig, terms: AppConfig | None = None, port: int = 0, admitted: AdmissionConfig | None = None
) -> Iterator[SidecarClient]:
    """In a thread of this process; on a port of its own, or where another one was."""
    stopping = asyncio.Event()
    config = uvicorn.Config(
        create_app(servers, terms or AppConfig(), stopping),
        log_config=None,
        access_log=False,
        ws="none",
        proxy_headers=False,
        http=create_protocol_factory(admitted or AdmissionConfig()),
        timeout_graceful_shutdown=1,
    )
    server = StoppableServer(config, stopping, ListenerConfig())
    listening = socket.create_server(("127.0.0.1", port))
    host, port = listening.getsockname()
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started)
        with SidecarClient(base_url=f"http://{host}:{port}", timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@dataclass(frozen=True)
class At:
    """A writer that moved from `prev` to `id`; where `pending` is given, that ID waits above a gap of one ID or more,
    which is open since `since` (ms). `transactions` hold its open IDs, as it says. `deferred`: more found no room."""

    prev: int
    id: int
    pending: int | None = None
    since: int = NOW
    transactions: tuple[str, ...] = ()
    deferred: bool = False


def moved(name: str, linear: int, **writers: At) -> StreamEffects:
    """What a batch did to the stream, with the state that it left."""
    known = {writer: WriterState(1, _chain(at)) for writer, at in writers.items()}
    left = StreamState(Direction.FORWARD, 0, LinearPosition(linear, NO_INTERVALS), Writers(known))
    left.transactions = {writer: [*at.transactions] for writer, at in writers.items() if at.transactions}
    encoded = codec.encode(left)
    moves = [advance(writer, at.prev, at.id) for writer, at in writers.items() if at.id != at.prev]
    allocated = max(at.pending or at.id for at in writers.values())
    return stream(name, *moves, linear=linear, allocated=allocated, state=encoded)


def _chain(at: At) -> Chain:
    pending = [] if at.pending is None else [Span(at.pending - 1, at.pending, Evidence(facts=1), 1, at.since)]
    return Chain(at.id, pending, deferred=[DeferredRange(5, 8, at.pending or at.id)] if at.deferred else [])


@contextmanager
def set_back(redis_url: str, stream: str) -> Iterator[None]:
    """After the block Redis has the stream as it was before: a replica without the newest writes took over."""
    with redis.Redis.from_url(redis_url) as keys:
        before = {name: keys.dump(name) for name in keys.keys(f"tidemark:{{{stream}}}:*")}
        yield
        for name, value in before.items():
            keys.restore(name, 0, value, replace=True)
