"""The line protocol over TCP: many connections, none of which may hold up the others or fill the memory.

For one event loop. A client gets announcements once it has sent REPLICATE, and relayed commands always.
"""

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress

import structlog

from tidemark.app.eviction import AllTaken, Places
from tidemark.app.lines.announcer import Announcement
from tidemark.app.lines.connection import LineConnection, LineServerConfig
from tidemark.app.lines.hub import Hub
from tidemark.app.logs import RepeatedLog
from tidemark.app.read_side import metrics
from tidemark.app.read_side.tasks import ended
from tidemark.app.tls_listener import AcceptingServer, Acceptor
from tidemark.streaming.wire.line_protocol import RelayedCommand, encoded

log = structlog.get_logger(__name__)

A_TURN = 100
"""What is done at most before the event loop looks after all else: lines taken, and lines relayed to a client."""
PAUSE = 0.001  # seconds after a turn that left some: a flood is no reason for the event loop never to rest
_LAST_SECONDS = 0.5  # that clients have to read that the server stops
AT_ONCE = 50  # of it for one client, before the next one has its turn


class LineServer:
    """`on_relayed` is called with every command that a client sent for all others: they have it by then."""

    def __init__(self, hub: Hub, config: LineServerConfig) -> None:
        self.config = config
        self.on_relayed: Callable[[RelayedCommand], None] = lambda _: None
        self.log = RepeatedLog(log)
        self._hub = hub
        self._places: Places[LineConnection] = Places(config.connections)
        self._listening: AcceptingServer | None = None
        self._connections: set[LineConnection] = set()
        self._replicating: set[LineConnection] = set()  # since they sent REPLICATE
        self._unanswered: set[LineConnection] = set()
        self._answering: asyncio.Task[None] | None = None
        self._busy: deque[LineConnection] = deque()  # with lines that are not taken yet

    @asynccontextmanager
    async def serving(self, listening: socket.socket, acceptor: Acceptor) -> AsyncIterator[None]:
        """Serve on a socket that listens. Clients that are connected at the end are told so."""
        self._listening = acceptor.serve(listening, lambda: LineConnection(self))
        clock = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            await ended(clock)
            self.stop()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_SECONDS):
                    while self._connections:
                        await asyncio.sleep(0.01)
            for connection in [*self._connections]:
                connection.cut()

    def stop(self) -> None:
        """Take no more clients, and tell those that are there. May be called again."""
        if self._listening is not None:
            self._listening.close()
        for connection in [*self._connections]:
            connection.end()

    def relay(self, command: RelayedCommand, sender: LineConnection | None = None) -> int:
        """Send it to every client but its sender; gives how many these are."""
        others = self._connections - {sender}
        self._send(others, encoded([command]), 1)
        return len(others)

    # -- for connections

    def admit(self, connection: LineConnection) -> bool:
        """Whether there is a place for it. If all are taken, one of the address that has most gives way: one that never
        sent a line, if there is one."""
        try:
            displaced = self._places.take(connection, connection.address, lambda it: not it.has_spoken)
        except AllTaken:
            return False
        if displaced is not None:
            displaced.give_way()
        self._connections.add(connection)
        metrics.CLIENTS.set(len(self._connections))
        return True

    def remove(self, connection: LineConnection) -> None:
        self._connections.discard(connection)
        self._places.leave(connection)
        metrics.CLIENTS.set(len(self._connections))
        self._unanswered.discard(connection)
        if connection in self._replicating:
            self._replicating.remove(connection)
            if not self._replicating:
                self._hub.unsubscribe(self._announce)

    def replicate(self, connection: LineConnection) -> None:
        """Answer it with all positions, and send it announcements from then on."""
        if not self._replicating:
            self._hub.subscribe(self._announce)
        self._replicating.add(connection)
        self._unanswered.add(connection)
        if self._answering is None:
            self._answering = asyncio.create_task(self._answer())

    def relay_on(self, command: RelayedCommand, sender: LineConnection) -> int:
        sent = self.relay(command, sender)
        self.on_relayed(command)
        return sent

    def take_turns(self, connection: LineConnection) -> None:
        """Let it work on its lines, by turns with all others that have some, and with the rest of the process."""
        self._busy.append(connection)
        if len(self._busy) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    # --

    def _turn(self) -> None:
        left = A_TURN
        while self._busy and left > 0:
            connection = self._busy.popleft()
            left -= connection.work(min(left, AT_ONCE))
            if connection.has_lines:
                self._busy.append(connection)
        if self._busy:
            asyncio.get_running_loop().call_later(PAUSE, self._turn)

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

    def _send(self, connections: Iterable[LineConnection], text: bytes, lines: int) -> None:
        for connection in [*connections]:
            connection.send(text, lines)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.tick)
            now = time.monotonic()
            for connection in [*self._connections]:
                connection.tick(now)
            self._drop_those_who_read_least()
            self.log.flush()

    def _drop_those_who_read_least(self) -> None:
        waiting = sorted(((it.unread, id(it), it) for it in self._connections if it.unread), reverse=True)
        left = sum(unread for unread, _, _ in waiting)
        for unread, _, connection in waiting:
            if left <= self.config.unread_by_all:
                return
            connection.drop()
            left -= unread
