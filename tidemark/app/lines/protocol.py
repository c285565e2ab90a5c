"""The server's side of the line protocol on one connection: what to send, and when to disconnect. Pure: no socket.

Times are seconds of a clock that only goes forward, and are passed in.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tidemark.app.logs import shortened
from tidemark.common.errors import BadCommand
from tidemark.streaming.wire import line_protocol as commands
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
    """Seconds: `interval` between two lines that we send, at most; `timeout` without a line from a client, once it has
    sent a PING."""

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


Act = SendCommand | SendPositions | RelayOn | Disconnect


class ServerSession:
    """The acts that follow from what a client sends and from time. `wall` gives seconds since 1970, for the PINGs."""

    def __init__(self, keep_alive: KeepAlive, wall: Callable[[], float], now: float) -> None:
        self.name: str | None = None
        """What the client calls itself."""
        self._keep_alive = keep_alive
        self._wall = wall
        self._sent_at = self._received_at = now
        self._pinged = False
        self._over = False

    def begin(self, server: str) -> Iterator[Act]:
        yield SendCommand(ServerCommand(server))
        yield SendCommand(self._ping())

    def sent(self, now: float) -> None:
        """Something was sent to the client."""
        self._sent_at = now

    def receive(self, line: bytes, now: float) -> Iterator[Act]:
        """What follows from a line of the client; nothing does after `Disconnect`."""
        if self._over:
            return
        self._received_at = now
        try:
            command = commands.parse(line)
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
                yield from self.refuse(BadCommand(f"{word} is for the server to say"))

    def refuse(self, problem: BadCommand) -> Iterator[Act]:
        """The client sent what is no command; what it meant is unknown, so nothing after it can be trusted."""
        if not self._over:
            yield SendCommand(ErrorCommand(str(problem)))
            yield from self._disconnect("bad", str(problem))

    def tick(self, now: float, ahead: float) -> Iterator[Act]:
        """What follows from time alone; to be called every `ahead` seconds or more often."""
        if self._over:
            return
        if self._pinged and now - self._received_at >= self._keep_alive.timeout:
            yield from self._disconnect("silent", f"nothing came for {self._keep_alive.timeout:g} s")
        elif now + ahead - self._sent_at >= self._keep_alive.interval:
            yield SendCommand(self._ping())

    def _disconnect(self, why: Literal["silent", "bad"], problem: str) -> Iterator[Act]:
        self._over = True
        yield Disconnect(why, problem)

    def _ping(self) -> PingCommand:
        return PingCommand(str(round(self._wall() * 1000)))
