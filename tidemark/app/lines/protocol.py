"""The server's side of the line protocol on one connection: what to send, and when to disconnect. No socket.

Times are seconds of a clock that only goes forward, and are passed in.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tidemark.app.logs import shortened
from tidemark.common.errors import BadCommand
from tidemark.streaming.wire import line_protocol
from tidemark.streaming.wire.line_protocol import (
    Command,
    ErrorCommand,
    NameCommand,
    PingCommand,
    RelayedCommand,
    ReplicateCommand,
    ServerCommand,
)


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Seconds: `interval` between two lines that the server sends, at most; `timeout` without a line from a client that
    has sent a PING."""

    interval: float = 5.0
    timeout: float = 15.0


@dataclass(frozen=True, slots=True)
class SendCommand:
    command: Command


@dataclass(frozen=True, slots=True)
class SendPositions:
    """The client asked for all positions, and gets what moves them from now on."""


@dataclass(frozen=True, slots=True)
class RelayOn:
    """A command for all other clients."""

    command: RelayedCommand


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection once everything before is sent. `problem` is for people."""

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
        """Something was sent to the client."""
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
        """The client sent an invalid command. What it meant is unknown, so no later line can be trusted."""
        if not self._is_over:
            yield SendCommand(ErrorCommand(str(problem)))
            yield from self._disconnect("bad", str(problem))

    def tick(self, now: float, ahead: float) -> Iterator[Reaction]:
        """The reactions to time alone. Call it at least every `ahead` seconds."""
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
