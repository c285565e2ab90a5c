"""The line protocol over TCP: many connections, told the same, none of which may hold up the others or fill the memory.

For one event loop. A client hears what moves streams once it has sent REPLICATE, and relayed commands always.
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
from tidemark.app.lines.commands import Command, ErrorCommand, RelayedCommand, Splitter, said
from tidemark.app.lines.conversation import Act, Answer, Conversation, KeepAlive, Leave, RelayOn, Say
from tidemark.app.lines.hub import Hub
from tidemark.app.read_side import metrics
from tidemark.app.read_side.tasks import ended
from tidemark.streaming.errors import BadCommand

log = structlog.get_logger(__name__)

Why = Literal["slow", "silent", "bad", "crowded"]


@dataclass(frozen=True, slots=True)
class LineServerConfig:
    """`name` is what SERVER says. `unread` is how many bytes may wait for a client that does not read, `longest` how
    many a line of a client may have, `tick` how often (s) clocks are looked at."""

    name: str = "tidemark"
    connections: int = 1000
    unread: int = 8 << 20
    longest: int = 64 << 10
    keep_alive: KeepAlive = field(default_factory=KeepAlive)
    tick: float = 1.0


class LineServer:
    """`passed_on` is called with every command that a client sent for all others: they have it by then."""

    def __init__(self, hub: Hub, terms: LineServerConfig) -> None:
        self.terms = terms
        self.passed_on: Callable[[RelayedCommand], None] = lambda _: None
        self._hub = hub
        self._connections: set[_Connection] = set()
        self._following: set[_Connection] = set()
        self._asking: set[_Connection] = set()
        self._answering: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def serving(self, listening: socket.socket) -> AsyncIterator[None]:
        """Serve on a socket that listens. Connections that are open at the end are cut."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(self), sock=listening, backlog=1024)
        clock = asyncio.create_task(self._look_at_clocks())
        try:
            yield
        finally:
            await ended(clock)
            server.close()
            for connection in [*self._connections]:
                connection.cut()

    def relay(self, command: RelayedCommand, sender: "_Connection | None" = None) -> None:
        """Give it to everybody but its sender."""
        self._send(self._connections - {sender}, said([command]), 1)

    # -- what connections tell

    def came(self, connection: "_Connection") -> bool:
        """Whether there is room for it."""
        if len(self._connections) >= self.terms.connections:
            return False
        self._connections.add(connection)
        metrics.CLIENTS.set(len(self._connections))
        return True

    def went(self, connection: "_Connection") -> None:
        self._connections.discard(connection)
        metrics.CLIENTS.set(len(self._connections))
        self._asking.discard(connection)
        if connection in self._following:
            self._following.remove(connection)
            if not self._following:
                self._hub.leave(self._hear)

    def asked(self, connection: "_Connection") -> None:
        """It sent REPLICATE."""
        if not self._following:
            self._hub.listen(self._hear)
        self._following.add(connection)
        self._asking.add(connection)
        if self._answering is None:
            self._answering = asyncio.create_task(self._answer())

    def relayed(self, command: RelayedCommand, sender: "_Connection") -> None:
        self.relay(command, sender)
        self.passed_on(command)

    # --

    async def _answer(self) -> None:
        """All that ask now, and those that come while we wait, are told at once."""
        await self._hub.begun()
        asking, self._asking, self._answering = self._asking, set(), None
        positions = self._hub.positions()
        self._send(asking, said(positions), len(positions))
        for connection in asking:
            connection.follows = True

    def _hear(self, announcements: Sequence[Announcement]) -> None:
        told = [connection for connection in self._following if connection.follows]
        if told:
            commands = [command for announcement in announcements for command in announcement.commands]
            self._send(told, said(commands), len(commands))

    def _send(self, connections: Iterable["_Connection"], text: bytes, lines: int) -> None:
        for connection in [*connections]:
            connection.send(text, lines)

    async def _look_at_clocks(self) -> None:
        while True:
            await asyncio.sleep(self.terms.tick)
            now = time.monotonic()
            for connection in [*self._connections]:
                connection.tick(now)


class _Connection(asyncio.Protocol):
    """`follows`: it had an answer to REPLICATE."""

    def __init__(self, server: LineServer) -> None:
        self.follows = False
        self._server = server
        self._terms = server.terms
        self._splitter = Splitter(self._terms.longest)
        self._conversation = Conversation(self._terms.keep_alive, time.time, time.monotonic())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._server.came(self):
            self._do(self._conversation.begin(self._terms.name))
        else:
            self._say(ErrorCommand("as many clients are connected as may be: ask another sidecar, or try again"))
            self._leave("crowded")

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        try:
            for line in self._splitter.lines(data):
                metrics.HEARD.inc()
                self._do(self._conversation.hear(line, now))
        except BadCommand as problem:
            self._do(self._conversation.refuse(problem))

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.went(self)

    def tick(self, now: float) -> None:
        self._do(self._conversation.tick(now, self._terms.tick))

    def _say(self, command: Command) -> None:
        self.send(said([command]), 1)

    def send(self, text: bytes, lines: int) -> None:
        """Whole lines, or none. A client that has not read what it was sent before is left."""
        if not text or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > self._terms.unread:
            log.warning("A client of the line protocol did not read and was dropped", client=self._label)
            metrics.LEFT.labels("slow").inc()
            self.cut()
            return
        self._transport.write(text)
        self._conversation.said(time.monotonic())
        metrics.SAID.inc(lines)

    def cut(self) -> None:
        """Without waiting for anything."""
        self._transport.abort()

    def _do(self, acts: Iterable[Act]) -> None:
        for act in acts:
            match act:
                case Say(command):
                    self._say(command)
                case Answer():
                    self._server.asked(self)
                case RelayOn(command):
                    self._server.relayed(command, self)
                case Leave(why, problem):
                    log.info("Left a client of the line protocol", client=self._label, problem=problem)
                    self._leave(why)

    def _leave(self, why: Why) -> None:
        metrics.LEFT.labels(why).inc()
        self._transport.close()
        asyncio.get_running_loop().call_later(self._terms.keep_alive.hear, self._transport.abort)

    @property
    def _label(self) -> str:
        peer = self._transport.get_extra_info("peername")
        return self._conversation.name or str(peer)
