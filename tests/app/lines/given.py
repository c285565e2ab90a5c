"""A line server that runs beside a test, and clients that are nothing but sockets."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass

import uvloop

from tidemark.app.lines.hub import Hub
from tidemark.app.lines.server import LineServer, LineServerConfig
from tidemark.app.read_side import ReadSide, ReadSideConfig, open_read_side
from tidemark.app.serving.tls_listener import ListenerConfig
from tidemark.app.stack.processes import free_port
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.kafka_lookup import Tail

Address = tuple[str, int]
NO_POSITION = ReadSideConfig("redis://127.0.0.1:1/0", "postgresql://127.0.0.1:1/none")
"""For a server that is to know of no stream."""
MIB = 1 << 20
RELAYED = [
    "USER_SYNC worker1 @a:b start 1500000000000",
    "CLEAR_USER_SYNC worker1",
    "FEDERATION_ACK master 1234",
    "REMOTE_SERVER_UP example.org",
    'USER_IP {"user": "@a:b"}',
    "LOCK_RELEASED worker1 name key",
    "NEW_ACTIVE_TASK 17",
    "CANCEL_TASK 17",
]


@dataclass(frozen=True)
class FactsTopic:
    """Where rows are read."""

    connection: KafkaConnection
    topic: str

    def tail(self) -> Tail:
        return Tail(self.connection, self.topic)


def no_facts() -> FactsTopic:
    """A Kafka that is not there."""
    return FactsTopic(KafkaConnection(f"127.0.0.1:{free_port()}"), "none")


@contextmanager
def served(
    servers: ReadSideConfig,
    terms: LineServerConfig | None = None,
    facts: FactsTopic | None = None,
    limit: int = MIB,
    port: int = 0,
    companion: Callable[[ReadSide, Hub, LineServer], AbstractAsyncContextManager[None]] | None = None,
    acceptor: ListenerConfig | None = None,
) -> Iterator[Address]:
    """In a thread of this process, on a port of its own unless told which, as the sidecar serves it."""
    listening = socket.create_server(("127.0.0.1", port))
    address = listening.getsockname()[:2]
    loop = uvloop.new_event_loop()
    over = asyncio.Event()
    started = threading.Event()

    @asynccontextmanager
    async def nothing(*_: object) -> AsyncIterator[None]:
        yield

    async def serve() -> None:
        async with open_read_side(servers) as read_side:
            hub = Hub(read_side, (facts or no_facts()).tail, limit)
            server = LineServer(hub, terms or LineServerConfig())
            async with (
                hub.open(),
                server.serving(listening, acceptor or ListenerConfig()),
                (companion or nothing)(read_side, hub, server),
            ):
                started.set()
                await over.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        assert started.wait(60)
        yield address
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(60)
        assert not thread.is_alive()


class LineClient:
    """A raw connection; what it reads are lines without their newlines."""

    def __init__(self, address: Address, patience: float = 60.0, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(patience)
        self.socket.connect(address)
        self._is_started = b""

    def send(self, *lines: str | bytes) -> None:
        for line in lines:
            self.socket.sendall((line if isinstance(line, bytes) else line.encode()) + b"\n")

    def line(self) -> str | None:
        """The next line; None: the server closed the connection, and no half line came."""
        while b"\n" not in self._is_started:
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                assert not self._is_started
                return None
            self._is_started += data
        line, _, self._is_started = self._is_started.partition(b"\n")
        return line.decode()

    def said(self) -> str | None:
        """The next line that is neither SERVER nor PING."""
        while (line := self.line()) is not None:
            if not line.startswith(("SERVER ", "PING ")):
                return line
        return None

    def lines(self, count: int) -> list[str | None]:
        return [self.said() for _ in range(count)]

    def quiet(self, seconds: float) -> bool:
        """Whether nothing but PINGs comes for so long."""
        until = time.monotonic() + seconds
        patience = self.socket.gettimeout()
        try:
            while (left := until - time.monotonic()) > 0:
                self.socket.settimeout(left)
                if not (line := self.line() or "").startswith(("SERVER ", "PING ")):
                    raise AssertionError(f"it said {line!r}")
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(patience)
        return True

    def close(self) -> None:
        self.socket.close()


@contextmanager
def client(
    address: Address, *first: str, patience: float = 60.0, receive_buffer: int | None = None
) -> Iterator[LineClient]:
    """Connected, with its `first` lines sent."""
    made = LineClient(address, patience, receive_buffer)
    try:
        made.send(*first)
        yield made
    finally:
        made.close()
