"""The line protocol over TCP: many connections, none of which may hold up the others or fill the memory.

For one event loop. A client gets announcements once it has sent REPLICATE, and relayed commands always.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, cast

import structlog

from tidemark.app.lines.announcer import Announcement
from tidemark.app.lines.commands import Command, ErrorCommand, RelayedCommand, Splitter, encoded
from tidemark.app.lines.conversation import (
    Act,
    Conversation,
    Disconnect,
    KeepAlive,
    RelayOn,
    SendCommand,
    SendPositions,
)
from tidemark.app.lines.hub import Hub
from tidemark.app.read_side import metrics
from tidemark.app.read_side.tasks import ended
from tidemark.streaming.errors import BadCommand

log = structlog.get_logger(__name__)

Why = Literal["slow", "silent", "bad", "crowded"]


@dataclass(frozen=True, slots=True)
class LineServerConfig:
    """`name` stands in SERVER. `unread` is how many bytes may wait for a client that does not read, `longest` how many
    a line of a client may have, `tick` how often (s) keep-alives are checked."""

    name: str = "tidemark"
    connections: int = 1000
    unread: int = 8 << 20
    longest: int = 64 << 10
    keep_alive: KeepAlive = field(default_factory=KeepAlive)
    tick: float = 1.0


class LineServer:
    """`on_relayed` is called with every command that a client sent for all others: they have it by then."""

    def __init__(self, hub: Hub, config: LineServerConfig) -> None:
        self.config = config
        self.on_relayed: Callable[[RelayedCommand], None] = lambda _: None
        self._hub = hub
        self._connections: set[_Connection] = set()
        self._replicating: set[_Connection] = set()  # since they sent REPLICATE
        self._unanswered: set[_Connection] = set()
        self._answering: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def serving(self, listening: socket.socket) -> AsyncIterator[None]:
        """Serve on a socket that listens. Connections that are open at the end are cut."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(self), sock=listening, backlog=1024)
        clock = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            await ended(clock)
            server.close()
            for connection in [*self._connections]:
                connection.cut()

    def relay(self, command: RelayedCommand, sender: "_Connection | None" = None) -> None:
        """Send it to every client but its sender."""
        self._send(self._connections - {sender}, encoded([command]), 1)

    # -- for connections

    def admit(self, connection: "_Connection") -> bool:
        """Whether there is room for it."""
        if len(self._connections) >= self.config.connections:
            return False
        self._connections.add(connection)
        metrics.CLIENTS.set(len(self._connections))
        return True

    def remove(self, connection: "_Connection") -> None:
        self._connections.discard(connection)
        metrics.CLIENTS.set(len(self._connections))
        self._unanswered.discard(connection)
        if connection in self._replicating:
            self._replicating.remove(connection)
            if not self._replicating:
                self._hub.unsubscribe(self._announce)

    def replicate(self, connection: "_Connection") -> None:
        """Answer it with all positions, and send it announcements from then on."""
        if not self._replicating:
            self._hub.subscribe(self._announce)
        self._replicating.add(connection)
        self._unanswered.add(connection)
        if self._answering is None:
            self._answering = asyncio.create_task(self._answer())

    def relay_on(self, command: RelayedCommand, sender: "_Connection") -> None:
        self.relay(command, sender)
        self.on_relayed(command)

    # --

    async def _answer(self) -> None:
        """Answer all connections that wait for positions now, and those that come meanwhile, at once."""
        await self._hub.begun()
        waiting, self._unanswered, self._answering = self._unanswered, set(), None
        positions = self._hub.positions()
        self._send(waiting, encoded(positions), len(positions))
        for connection in waiting:
            connection.answered = True

    def _announce(self, announcements: Sequence[Announcement]) -> None:
        subscribers = [connection for connection in self._replicating if connection.answered]
        if subscribers:
            commands = [command for announcement in announcements for command in announcement.commands]
            self._send(subscribers, encoded(commands), len(commands))

    def _send(self, connections: Iterable["_Connection"], text: bytes, lines: int) -> None:
        for connection in [*connections]:
            connection.send(text, lines)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.tick)
            now = time.monotonic()
            for connection in [*self._connections]:
                connection.tick(now)


class _Connection(asyncio.Protocol):
    """`answered`: its REPLICATE was answered, so announcements join what it has."""

    def __init__(self, server: LineServer) -> None:
        self.answered = False
        self._server = server
        self._config = server.config
        self._splitter = Splitter(self._config.longest)
        self._conversation = Conversation(self._config.keep_alive, time.time, time.monotonic())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._server.admit(self):
            self._do(self._conversation.begin(self._config.name))
        else:
            self._send(ErrorCommand("as many clients are connected as may be: ask another sidecar, or try again"))
            self._disconnect("crowded")

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        try:
            for line in self._splitter.lines(data):
                metrics.LINES_IN.inc()
                self._do(self._conversation.receive(line, now))
        except BadCommand as problem:
            self._do(self._conversation.refuse(problem))

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.remove(self)

    def tick(self, now: float) -> None:
        self._do(self._conversation.tick(now, self._config.tick))

    def _send(self, command: Command) -> None:
        self.send(encoded([command]), 1)

    def send(self, text: bytes, lines: int) -> None:
        """Whole lines, or none. A client that has not read what it was sent before is disconnected."""
        if not text or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > self._config.unread:
            log.warning("A client of the line protocol did not read and was dropped", client=self._label)
            metrics.CLOSED.labels("slow").inc()
            self.cut()
            return
        self._transport.write(text)
        self._conversation.sent(time.monotonic())
        metrics.LINES_OUT.inc(lines)

    def cut(self) -> None:
        """Without waiting for anything."""
        self._transport.abort()

    def _do(self, acts: Iterable[Act]) -> None:
        for act in acts:
            match act:
                case SendCommand(command):
                    self._send(command)
                case SendPositions():
                    self._server.replicate(self)
                case RelayOn(command):
                    self._server.relay_on(command, self)
                case Disconnect(why, problem):
                    log.info("Disconnected a client of the line protocol", client=self._label, problem=problem)
                    self._disconnect(why)

    def _disconnect(self, why: Why) -> None:
        metrics.CLOSED.labels(why).inc()
        self._transport.close()
        asyncio.get_running_loop().call_later(self._config.keep_alive.timeout, self._transport.abort)

    @property
    def _label(self) -> str:
        peer = self._transport.get_extra_info("peername")
        return self._conversation.name or str(peer)
