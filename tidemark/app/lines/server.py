"""The line protocol over TCP: the server, and its connections.

Connections handle their lines round-robin. A client that does not read is disconnected.

`ServerSession` is the protocol of one connection without I/O: what to send, and when to disconnect. The argument `now`
of its methods is a monotonic time, in seconds.
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
from tidemark.app.logs import RepeatedLog, shorten
from tidemark.app.read_side import metrics
from tidemark.app.serving.tls_listener import ListenerConfig, NoFreeSlot, SlotPool, TlsListener
from tidemark.common.errors import BadCommand
from tidemark.common.log import get_logger
from tidemark.common.tasks import cancel_until_done
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
    encode_commands,
)


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """The keep-alive times of a connection.

    Attributes:
        interval_seconds: the longest time between two lines of the server.
        timeout_seconds: the longest time between two lines of a client. Clients that never send a PING have no limit.
    """

    interval_seconds: float = 5.0
    timeout_seconds: float = 15.0


@dataclass(frozen=True, slots=True)
class SendCommand:
    command: Command


@dataclass(frozen=True, slots=True)
class SendPositions:
    """Send all positions, and from then on every announcement."""


@dataclass(frozen=True, slots=True)
class RelayCommand:
    """Send a command to all other clients, also of other sidecars."""

    command: RelayedCommand


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection after the client has read everything. `problem`: the cause, as text for people."""

    reason: Literal["silent", "bad"]
    problem: str


Reaction = SendCommand | SendPositions | RelayCommand | Disconnect


class ServerSession:
    """Decides how the server reacts to the lines of a client and to the passage of time.

    Args:
        keep_alive: when to send PINGs, and when a client counts as silent.
        wall_clock: returns seconds since 1970, for the PINGs.
        now: here and in the methods, the monotonic time in seconds.
    """

    def __init__(self, keep_alive: KeepAlive, wall_clock: Callable[[], float], now: float) -> None:
        self.name: str | None = None
        """The name in the client's NAME command."""
        self._keep_alive = keep_alive
        self._wall_clock = wall_clock
        self._sent_at = self._received_at = now
        self._has_pinged = False
        self._has_ended = False

    def begin(self, server: str) -> Iterator[Reaction]:
        """Yield the reactions to a new connection. `server`: the name of the server."""
        yield SendCommand(ServerCommand(server))
        yield SendCommand(self._create_ping())

    def mark_sent(self, now: float) -> None:
        """Record that a line was sent to the client."""
        self._sent_at = now

    def receive(self, line: bytes, now: float) -> Iterator[Reaction]:
        """Yield the reactions to a line of the client; none after a `Disconnect`."""
        if self._has_ended:
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
                self._has_pinged = True
            case NameCommand(text):
                self.name = shorten(text)
            case ReplicateCommand():
                yield SendPositions()
            case RelayedCommand():
                yield RelayCommand(command)
            case ErrorCommand(text):
                yield from self._disconnect("bad", f"the client sent ERROR {shorten(text)}")
            case _:
                word = str(command).partition(" ")[0]
                yield from self.refuse(BadCommand(f"clients must not send {word}, which is a command of the server"))

    def refuse(self, problem: BadCommand) -> Iterator[Reaction]:
        """Yield the reactions to an invalid command. The connection ends, because later lines may be invalid too."""
        if not self._has_ended:
            yield SendCommand(ErrorCommand(str(problem)))
            yield from self._disconnect("bad", str(problem))

    def tick(self, now: float, tick_seconds: float) -> Iterator[Reaction]:
        """Yield the reactions to the passage of time. The caller must call this method again after at most
        `tick_seconds`."""
        if self._has_ended:
            return
        if self._has_pinged and now - self._received_at >= self._keep_alive.timeout_seconds:
            yield from self._disconnect("silent", f"the client sent nothing for {self._keep_alive.timeout_seconds:g} s")
        elif now + tick_seconds - self._sent_at >= self._keep_alive.interval_seconds:
            yield SendCommand(self._create_ping())

    def _disconnect(self, reason: Literal["silent", "bad"], problem: str) -> Iterator[Reaction]:
        self._has_ended = True
        yield Disconnect(reason, problem)

    def _create_ping(self) -> PingCommand:
        return PingCommand(str(round(self._wall_clock() * 1000)))


CloseReason = Literal["slow", "silent", "bad", "crowded"]


@dataclass(frozen=True, slots=True)
class LineServerConfig:
    """The configuration of the server.

    Attributes:
        name: the name in the SERVER command.
        max_connections: the largest number of clients.
        max_unread_bytes: the largest write buffer of one client. A client with a larger one is disconnected.
        max_total_unread_bytes: the largest size of all write buffers together. Beyond it, the clients with the largest
            write buffers are disconnected.
        max_line_bytes: the longest line of a client.
        keep_alive: the keep-alive times.
        tick_seconds: the time between two checks of the keep-alives.
    """

    name: str = "tidemark"
    max_connections: int = 1000
    max_unread_bytes: int = 8 << 20
    max_total_unread_bytes: int = 64 << 20
    max_line_bytes: int = 64 << 10
    keep_alive: KeepAlive = field(default_factory=KeepAlive)
    tick_seconds: float = 1.0


class LineConnection(asyncio.Protocol):
    """One connection.

    Attributes:
        has_positions: whether the client got all positions after its first REPLICATE. Only then does it get
            announcements.
        has_lines: whether there may be unhandled lines. Nothing is read from the connection until they are handled.
        has_sent_line: whether the client has sent a line.
    """

    def __init__(self, server: "LineServer") -> None:
        self.has_positions = False
        self.has_lines = False
        self.has_sent_line = False
        self.address = ""
        self._unparsed_lines: Iterator[bytes] = iter(())
        self._server = server
        self._config = server.config
        self._splitter = LineSplitter(self._config.max_line_bytes)
        self._session = ServerSession(self._config.keep_alive, time.time, time.monotonic())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.address = (transport.get_extra_info("peername") or ("",))[0]
        if self._server.admit(self):
            self._perform(self._session.begin(self._config.name))
        else:
            self._send(
                ErrorCommand("this sidecar has reached its limit of clients: connect to another sidecar, or try again")
            )
            self._disconnect("crowded")

    def data_received(self, data: bytes) -> None:
        self._transport.pause_reading()
        self._unparsed_lines, self.has_lines = self._splitter.split(data), True
        self._server.schedule(self)

    def handle_lines(self, limit: int) -> int:
        """Handle received lines until their cost reaches `limit`. The cost of a line is 1, plus the number of clients
        to which the line is relayed.

        Returns the cost of the handled lines, which may exceed `limit`.
        """
        now, lines, relayed = time.monotonic(), 0, 0
        try:
            while lines + relayed < limit and not self._transport.is_closing():
                if (line := next(self._unparsed_lines, None)) is None:
                    self.has_lines = False
                    self._transport.resume_reading()
                    break
                lines += 1
                self.has_sent_line = True
                relayed += self._perform(self._session.receive(line, now))
            else:
                self.has_lines = not self._transport.is_closing()
        except BadCommand as problem:
            self._perform(self._session.refuse(problem))
            self.has_lines = not self._transport.is_closing()
        metrics.LINES_RECEIVED.inc(lines)
        return lines + relayed

    @property
    def unread_bytes(self) -> int:
        """The number of bytes in the write buffer of the connection, which the client has not read yet."""
        return self._transport.get_write_buffer_size()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.remove(self)

    def tick(self, now: float) -> None:
        self._perform(self._session.tick(now, self._config.tick_seconds))

    def _send(self, command: Command) -> None:
        self.send(encode_commands([command]), 1)

    def send(self, text: bytes, lines: int) -> None:
        """Send complete lines. If the client has too many unread bytes, disconnect the client instead.

        Args:
            text: the encoded lines.
            lines: the number of lines, for the metrics.
        """
        if not text or self._transport.is_closing():
            return
        if self.unread_bytes > self._config.max_unread_bytes:
            self.drop_slow_reader()
            return
        self._transport.write(text)
        self._session.mark_sent(time.monotonic())
        metrics.LINES_SENT.inc(lines)

    def evict(self) -> None:
        """Disconnect the client, because another client gets the slot."""
        if not self._transport.is_closing():
            self._send(
                ErrorCommand("this sidecar has reached its limit of clients, and gave your slot to another client")
            )
            self._disconnect("crowded")

    def stop(self) -> None:
        """Send an ERROR command, and close the connection when the client has read everything."""
        self._send(ErrorCommand("server stopping"))
        self._transport.close()

    def drop_slow_reader(self) -> None:
        """Disconnect the client at once, because it does not read. Logs a warning."""
        self._server.log.write(
            "warning", "Disconnected a client of the line protocol that did not read", client=self._label
        )
        metrics.CONNECTIONS_CLOSED.labels("slow").inc()
        self.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _perform(self, reactions: Iterable[Reaction]) -> int:
        """Perform the reactions. Returns the number of clients to which a command was relayed."""
        relayed = 0
        for reaction in reactions:
            match reaction:
                case SendCommand(command):
                    self._send(command)
                case SendPositions():
                    self._server.replicate(self)
                case RelayCommand(command):
                    relayed += self._server.relay_from(command, self)
                case Disconnect(reason, problem):
                    self._server.log.write(
                        "info", "Disconnected a client of the line protocol", client=self._label, problem=problem
                    )
                    self._disconnect(reason)
        return relayed

    def _disconnect(self, reason: CloseReason) -> None:
        metrics.CONNECTIONS_CLOSED.labels(reason).inc()
        self._transport.close()
        asyncio.get_running_loop().call_later(self._config.keep_alive.timeout_seconds, self._transport.abort)

    @property
    def _label(self) -> str:
        peer = self._transport.get_extra_info("peername")
        return self._session.name or str(peer)


log = get_logger(__name__)

LINES_PER_ITERATION = 100
"""The cost of lines (see `handle_lines`) after which an iteration of the event loop handles no more lines."""
FLOOD_PAUSE_SECONDS = 0.001  # between two iterations, so that a flood of lines does not use the whole event loop
_STOP_TIMEOUT_SECONDS = 0.5  # for clients to read the last ERROR command
LINES_PER_CONNECTION = 50  # before lines of the next connection are handled
PAUSE_FACTOR = 4  # the pause after sending all positions, as a multiple of the duration: clients may request them often


class LineServer:
    """The server of the line protocol. `on_relayed` is called with every command of a client for others."""

    def __init__(self, hub: Hub, config: LineServerConfig) -> None:
        self.config = config
        self.on_relayed: Callable[[RelayedCommand], None] = lambda _: None
        self.log = RepeatedLog(log)
        self._hub = hub
        self._slots: SlotPool[LineConnection] = SlotPool(config.max_connections)
        self._listener: TlsListener | None = None
        self._connections: set[LineConnection] = set()
        self._replicating: set[LineConnection] = set()  # connections that have sent REPLICATE
        self._waiting_for_positions: set[LineConnection] = set()
        self._answer_task: asyncio.Task[None] | None = None
        self._next_answer_at = 0.0  # the time of the next answer (seconds, monotonic)
        self._connections_with_lines: deque[LineConnection] = deque()  # connections with unhandled lines

    @asynccontextmanager
    async def serving(self, listening: socket.socket, listener_config: ListenerConfig) -> AsyncIterator[None]:
        """Serve on a listening socket during the block. At its end, send an ERROR command to all clients, and close
        their connections. Connections that are still open after `_STOP_TIMEOUT_SECONDS` are aborted."""
        self._listener = listener_config.serve(listening, lambda: LineConnection(self))
        clock = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            await cancel_until_done(clock)
            self.stop()
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_TIMEOUT_SECONDS):
                    while self._connections:
                        await asyncio.sleep(0.01)
            for connection in [*self._connections]:
                connection.abort()

    def stop(self) -> None:
        """Accept no more clients, and disconnect all clients after an ERROR command. May be called again."""
        if self._listener is not None:
            self._listener.close()
        for connection in [*self._connections]:
            connection.stop()

    def relay(self, command: RelayedCommand, sender: LineConnection | None = None) -> int:
        """Send a command to every client of this sidecar except its sender. Returns the number of clients."""
        others = self._connections - {sender}
        self._send(others, encode_commands([command]), 1)
        return len(others)

    # Methods that connections call

    def admit(self, connection: LineConnection) -> bool:
        """Give a slot to the connection. If every slot is taken, evict another connection by the rules of `SlotPool`;
        connections that never sent a line are evicted first. Returns False if the connection gets no slot.
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
        self._slots.release(connection)
        metrics.LINE_CLIENTS.set(len(self._connections))
        self._waiting_for_positions.discard(connection)
        if connection in self._replicating:
            self._replicating.remove(connection)
            if not self._replicating:
                self._hub.unsubscribe(self._announce)

    def replicate(self, connection: LineConnection) -> None:
        """Send all positions to the connection soon, and from then on every announcement."""
        if not self._replicating:
            self._hub.subscribe(self._announce)
        self._replicating.add(connection)
        self._waiting_for_positions.add(connection)
        if self._answer_task is None:
            self._answer_task = asyncio.create_task(self._answer())

    def relay_from(self, command: RelayedCommand, sender: LineConnection) -> int:
        """Relay a command to the other clients, and to other sidecars. Returns the number of clients of this
        sidecar."""
        clients = self.relay(command, sender)
        self.on_relayed(command)
        return clients

    def schedule(self, connection: LineConnection) -> None:
        """Let the connection handle its lines, round-robin with other connections."""
        self._connections_with_lines.append(connection)
        if len(self._connections_with_lines) == 1:
            asyncio.get_running_loop().call_soon(self._handle_lines)

    def _handle_lines(self) -> None:
        remaining_lines = LINES_PER_ITERATION
        while self._connections_with_lines and remaining_lines > 0:
            connection = self._connections_with_lines.popleft()
            remaining_lines -= connection.handle_lines(min(remaining_lines, LINES_PER_CONNECTION))
            if connection.has_lines:
                self._connections_with_lines.append(connection)
        if self._connections_with_lines:
            asyncio.get_running_loop().call_later(FLOOD_PAUSE_SECONDS, self._handle_lines)

    async def _answer(self) -> None:
        """Wait for the pause after the last answer, then send all positions to all connections that have requested
        them.
        """
        await asyncio.sleep(self._next_answer_at - time.monotonic())
        await self._hub.wait_until_started()
        began = time.monotonic()
        waiting, self._waiting_for_positions, self._answer_task = self._waiting_for_positions, set(), None
        positions = self._hub.positions()
        self._send(waiting, encode_commands(positions), len(positions))
        for connection in waiting:
            connection.has_positions = True
        ended = time.monotonic()
        self._next_answer_at = ended + PAUSE_FACTOR * (ended - began)

    def _announce(self, announcements: Sequence[Announcement]) -> None:
        subscribers = [connection for connection in self._replicating if connection.has_positions]
        if subscribers:
            commands = [command for announcement in announcements for command in announcement.commands]
            self._send(subscribers, encode_commands(commands), len(commands))

    def _send(self, connections: Iterable[LineConnection], text: bytes, lines: int) -> None:
        for connection in [*connections]:
            connection.send(text, lines)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.tick_seconds)
            now = time.monotonic()
            for connection in [*self._connections]:
                connection.tick(now)
            self._drop_slow_readers()
            self.log.flush()

    def _drop_slow_readers(self) -> None:
        """Disconnect the clients with the most unread bytes until the limit of all clients is met."""
        unread = {connection: connection.unread_bytes for connection in self._connections}
        excess = sum(unread.values()) - self.config.max_total_unread_bytes
        if excess <= 0:
            return
        for connection in sorted(unread, key=unread.__getitem__, reverse=True):
            connection.drop_slow_reader()
            excess -= unread[connection]
            if excess <= 0:
                return
