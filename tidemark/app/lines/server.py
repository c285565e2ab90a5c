"""The line protocol over TCP: the server, and its connections.

Connections handle their lines in turns. A client that does not read is disconnected.

`ServerSession` is the protocol of one connection without a socket: what to send, and when to disconnect. Callers pass
in the time (s, monotonic).
"""

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, cast

from tidemark.app.lines.hub import Hub
from tidemark.app.lines.rows import Announcement
from tidemark.app.logs import RepeatedLog, shortened
from tidemark.app.read_side import metrics
from tidemark.app.read_side.single_flight import cancel_until_done
from tidemark.app.serving.tls_listener import ListenerConfig, NoFreeSlot, SlotPool, TlsListener
from tidemark.common.errors import BadCommand
from tidemark.common.log import get_logger
from tidemark.streaming.wire import line_protocol
from tidemark.streaming.wire.line_protocol import (
    Command,
    ErrorCommand,
    LineSplitter,
    NameCommand,
    PingCommand,
    RelayedCommand,
    ReplicateCommand,
    ServerCommand,
    encoded,
)


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Seconds. `interval`: the longest time between two lines of the server. `timeout`: time without a line after which
    a client that has sent a PING is disconnected.
    """

    interval: float = 5.0
    timeout: float = 15.0


@dataclass(frozen=True, slots=True)
class SendCommand:
    command: Command


@dataclass(frozen=True, slots=True)
class SendPositions:
    """Send all positions, and announcements afterwards."""


@dataclass(frozen=True, slots=True)
class RelayOn:
    """Relay a command to all other clients."""

    command: RelayedCommand


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection after everything else was sent. `problem` is for people."""

    why: Literal["silent", "bad"]
    problem: str


Reaction = SendCommand | SendPositions | RelayOn | Disconnect


class ServerSession:
    """The reactions to the lines of a client and to time. `wall` returns seconds since 1970, for the PINGs."""

    def __init__(self, keep_alive: KeepAlive, wall: Callable[[], float], now: float) -> None:
        self.name: str | None = None
        """The name that the client gave itself."""
        self._keep_alive = keep_alive
        self._wall = wall
        self._sent_at = self._received_at = now
        self._pinged = False
        self._is_over = False

    def begin(self, server: str) -> Iterator[Reaction]:
        yield SendCommand(ServerCommand(server))
        yield SendCommand(self._ping())

    def sent(self, now: float) -> None:
        """Note that something was sent to the client."""
        self._sent_at = now

    def receive(self, line: bytes, now: float) -> Iterator[Reaction]:
        """The reactions to a line of the client. None follow a `Disconnect`."""
        if self._is_over:
            return
        self._received_at = now
        try:
            command = line_protocol.parse(line)
        except BadCommand as problem:
            yield from self.refuse(problem)
            return
        match command:
            case None:
                return
            case PingCommand():
                self._pinged = True
            case NameCommand(text):
                self.name = shortened(text)
            case ReplicateCommand():
                yield SendPositions()
            case RelayedCommand():
                yield RelayOn(command)
            case ErrorCommand(text):
                yield from self._disconnect("bad", f"it sent ERROR {shortened(text)}")
            case _:
                word = str(command).partition(" ")[0]
                yield from self.refuse(BadCommand(f"{word} is a command of the server"))

    def refuse(self, problem: BadCommand) -> Iterator[Reaction]:
        """Reject an invalid command, after which no later line can be trusted."""
        if not self._is_over:
            yield SendCommand(ErrorCommand(str(problem)))
            yield from self._disconnect("bad", str(problem))

    def tick(self, now: float, ahead: float) -> Iterator[Reaction]:
        """The reactions to the passage of time. Call this at least every `ahead` seconds."""
        if self._is_over:
            return
        if self._pinged and now - self._received_at >= self._keep_alive.timeout:
            yield from self._disconnect("silent", f"it sent nothing for {self._keep_alive.timeout:g} s")
        elif now + ahead - self._sent_at >= self._keep_alive.interval:
            yield SendCommand(self._ping())

    def _disconnect(self, why: Literal["silent", "bad"], problem: str) -> Iterator[Reaction]:
        self._is_over = True
        yield Disconnect(why, problem)

    def _ping(self) -> PingCommand:
        return PingCommand(str(round(self._wall() * 1000)))


Why = Literal["slow", "silent", "bad", "crowded"]


@dataclass(frozen=True, slots=True)
class LineServerConfig:
    """Bounds of the server.

    Attributes:
        name: the server name in SERVER.
        connections: the largest number of clients.
        unread: the largest number of unread bytes of one client.
        unread_by_all: the largest number of unread bytes of all clients together.
        longest: the largest number of bytes of a client's line.
        tick: seconds between two checks of keep-alives.
    """

    name: str = "tidemark"
    connections: int = 1000
    unread: int = 8 << 20
    unread_by_all: int = 64 << 20
    longest: int = 64 << 10
    keep_alive: KeepAlive = field(default_factory=KeepAlive)
    tick: float = 1.0


class LineConnection(asyncio.Protocol):
    """One connection.

    Attributes:
        answered: its REPLICATE was answered, so announcements follow.
        has_lines: it may have sent unhandled lines; no more is read from it before they are handled.
        has_sent_line: it has sent a line.
    """

    def __init__(self, server: "LineServer") -> None:
        self.answered = False
        self.has_lines = False
        self.has_sent_line = False
        self.address = ""
        self._unparsed_lines: Iterator[bytes] = iter(())
        self._server = server
        self._config = server.config
        self._splitter = LineSplitter(self._config.longest)
        self._session = ServerSession(self._config.keep_alive, time.time, time.monotonic())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.address = (transport.get_extra_info("peername") or ("",))[0]
        if self._server.admit(self):
            self._do(self._session.begin(self._config.name))
        else:
            self._send(ErrorCommand("the limit of clients is reached: connect to another sidecar, or try again"))
            self._disconnect("crowded")

    def data_received(self, data: bytes) -> None:
        self._transport.pause_reading()
        self._unparsed_lines, self.has_lines = self._splitter.lines(data), True
        self._server.take_turns(self)

    def work(self, most: int) -> int:
        """Handle about `most` received lines. Returns the number of lines that were handled and relayed."""
        now, lines, others = time.monotonic(), 0, 0
        try:
            while lines + others < most and not self._transport.is_closing():
                if (line := next(self._unparsed_lines, None)) is None:
                    self.has_lines = False
                    self._transport.resume_reading()
                    break
                lines += 1
                self.has_sent_line = True
                others += self._do(self._session.receive(line, now))
            else:
                self.has_lines = not self._transport.is_closing()
        except BadCommand as problem:
            self._do(self._session.refuse(problem))
            self.has_lines = not self._transport.is_closing()
        metrics.LINES_RECEIVED.inc(lines)
        return lines + others

    @property
    def unread(self) -> int:
        """Bytes that were sent to the client and not read by it."""
        return self._transport.get_write_buffer_size()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.remove(self)

    def tick(self, now: float) -> None:
        self._do(self._session.tick(now, self._config.tick))

    def _send(self, command: Command) -> None:
        self.send(encoded([command]), 1)

    def send(self, text: bytes, lines: int) -> None:
        """Send whole lines, or none. A client with too many unread bytes is disconnected."""
        if not text or self._transport.is_closing():
            return
        if self.unread > self._config.unread:
            self.drop()
            return
        self._transport.write(text)
        self._session.sent(time.monotonic())
        metrics.LINES_SENT.inc(lines)

    def evict(self) -> None:
        """Disconnect: a client of another address gets the slot."""
        if not self._transport.is_closing():
            self._send(ErrorCommand("the limit of clients is reached, and another address has this slot: try again"))
            self._disconnect("crowded")

    def end(self) -> None:
        """Close the connection once the client has read everything."""
        self._send(ErrorCommand("server stopping"))
        self._transport.close()

    def drop(self) -> None:
        self._server.log.write(
            "warning", "Disconnected a client of the line protocol that did not read", client=self._label
        )
        metrics.CONNECTIONS_CLOSED.labels("slow").inc()
        self.cut()

    def cut(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _do(self, reactions: Iterable[Reaction]) -> int:
        """Perform the reactions to one line. Returns the number of clients to which a command was relayed."""
        others = 0
        for reaction in reactions:
            match reaction:
                case SendCommand(command):
                    self._send(command)
                case SendPositions():
                    self._server.replicate(self)
                case RelayOn(command):
                    others += self._server.relay_from(command, self)
                case Disconnect(why, problem):
                    self._server.log.write(
                        "info", "Disconnected a client of the line protocol", client=self._label, problem=problem
                    )
                    self._disconnect(why)
        return others

    def _disconnect(self, why: Why) -> None:
        metrics.CONNECTIONS_CLOSED.labels(why).inc()
        self._transport.close()
        asyncio.get_running_loop().call_later(self._config.keep_alive.timeout, self._transport.abort)

    @property
    def _label(self) -> str:
        peer = self._transport.get_extra_info("peername")
        return self._session.name or str(peer)


log = get_logger(__name__)

LINES_PER_TURN = 100
"""Lines that are handled, and lines that are relayed to a client, before other tasks run."""
PAUSE = 0.001  # seconds after a turn with lines left, so that a flood does not keep the event loop busy
_LAST_SECONDS = 0.5  # seconds for clients to read that the server is stopping
AT_ONCE = 50  # lines of one client before the next client's turn
REST = 4  # the pause after sending all positions, as a multiple of the time that it took: clients may ask repeatedly


class LineServer:
    """The server. `on_relayed` is called with every relayed command, after the other clients got it."""

    def __init__(self, hub: Hub, config: LineServerConfig) -> None:
        self.config = config
        self.on_relayed: Callable[[RelayedCommand], None] = lambda _: None
        self.log = RepeatedLog(log)
        self._hub = hub
        self._slots: SlotPool[LineConnection] = SlotPool(config.connections)
        self._listening: TlsListener | None = None
        self._connections: set[LineConnection] = set()
        self._replicating: set[LineConnection] = set()  # connections that sent REPLICATE
        self._unanswered: set[LineConnection] = set()
        self._answering: asyncio.Task[None] | None = None
        self._next_answer = 0.0  # s, monotonic
        self._with_lines: deque[LineConnection] = deque()  # connections with unhandled lines

    @asynccontextmanager
    async def serving(self, listening: socket.socket, acceptor: ListenerConfig) -> AsyncIterator[None]:
        """Serve on a listening socket. Clients that are connected at the end get an ERROR command."""
        self._listening = acceptor.serve(listening, lambda: LineConnection(self))
        clock = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            await cancel_until_done(clock)
            self.stop()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_SECONDS):
                    while self._connections:
                        await asyncio.sleep(0.01)
            for connection in [*self._connections]:
                connection.cut()

    def stop(self) -> None:
        """Accept no more clients, and send an ERROR to the connected ones. May be called again."""
        if self._listening is not None:
            self._listening.close()
        for connection in [*self._connections]:
            connection.end()

    def relay(self, command: RelayedCommand, sender: LineConnection | None = None) -> int:
        """Send a command to every client except its sender. Returns the number of clients."""
        others = self._connections - {sender}
        self._send(others, encoded([command]), 1)
        return len(others)

    # -- for connections

    def admit(self, connection: LineConnection) -> bool:
        """Whether there is a slot for the connection. If every slot is taken, a connection of the address with the most
        connections is evicted, preferably one that never sent a line.
        """
        try:
            evicted = self._slots.take(connection, connection.address, lambda other: not other.has_sent_line)
        except NoFreeSlot:
            return False
        if evicted is not None:
            evicted.evict()
        self._connections.add(connection)
        metrics.LINE_CLIENTS.set(len(self._connections))
        return True

    def remove(self, connection: LineConnection) -> None:
        self._connections.discard(connection)
        self._slots.leave(connection)
        metrics.LINE_CLIENTS.set(len(self._connections))
        self._unanswered.discard(connection)
        if connection in self._replicating:
            self._replicating.remove(connection)
            if not self._replicating:
                self._hub.unsubscribe(self._announce)

    def replicate(self, connection: LineConnection) -> None:
        """Answer REPLICATE with all positions, and send announcements from then on."""
        if not self._replicating:
            self._hub.subscribe(self._announce)
        self._replicating.add(connection)
        self._unanswered.add(connection)
        if self._answering is None:
            self._answering = asyncio.create_task(self._answer())

    def relay_from(self, command: RelayedCommand, sender: LineConnection) -> int:
        sent = self.relay(command, sender)
        self.on_relayed(command)
        return sent

    def take_turns(self, connection: LineConnection) -> None:
        """Schedule the connection to handle its lines. All connections with lines take turns, and other tasks run in
        between.
        """
        self._with_lines.append(connection)
        if len(self._with_lines) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    # --

    def _turn(self) -> None:
        left = LINES_PER_TURN
        while self._with_lines and left > 0:
            connection = self._with_lines.popleft()
            left -= connection.work(min(left, AT_ONCE))
            if connection.has_lines:
                self._with_lines.append(connection)
        if self._with_lines:
            asyncio.get_running_loop().call_later(PAUSE, self._turn)

    async def _answer(self) -> None:
        """Answer all connections that wait for positions, including ones that arrive meanwhile, together."""
        await asyncio.sleep(self._next_answer - time.monotonic())
        await self._hub.wait_until_started()
        began = time.monotonic()
        waiting, self._unanswered, self._answering = self._unanswered, set(), None
        positions = self._hub.positions()
        self._send(waiting, encoded(positions), len(positions))
        for connection in waiting:
            connection.answered = True
        ended = time.monotonic()
        self._next_answer = ended + REST * (ended - began)

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
            self._drop_slowest_readers()
            self.log.flush()

    def _drop_slowest_readers(self) -> None:
        waiting = sorted(
            ((connection.unread, id(connection), connection) for connection in self._connections if connection.unread),
            reverse=True,
        )
        left = sum(unread for unread, _, _ in waiting)
        for unread, _, connection in waiting:
            if left <= self.config.unread_by_all:
                return
            connection.drop()
            left -= unread
