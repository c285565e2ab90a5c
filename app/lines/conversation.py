"""One connection as the server's side of the protocol sees it: what to say, and when to leave. Pure: no socket.

Times are seconds of a clock that only goes forward, and are passed in.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tidemark.app.lines import commands
from tidemark.app.lines.commands import (
    Command,
    ErrorCommand,
    NameCommand,
    PingCommand,
    RelayedCommand,
    ReplicateCommand,
    ServerCommand,
)
from tidemark.streaming.errors import BadCommand


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Seconds: how long we are silent at most, and how long a client that sent a PING may be."""

    say: float = 5.0
    hear: float = 15.0


@dataclass(frozen=True, slots=True)
class Say:
    command: Command


@dataclass(frozen=True, slots=True)
class Answer:
    """It asked for all positions, and is to hear what moves them from now on."""


@dataclass(frozen=True, slots=True)
class RelayOn:
    """To be passed on to all others."""

    command: RelayedCommand


@dataclass(frozen=True, slots=True)
class Leave:
    """Close the connection once what was said is sent. `problem` is for people."""

    why: Literal["silent", "bad"]
    problem: str


Act = Say | Answer | RelayOn | Leave


class Conversation:
    """`wall` gives seconds since 1970, for the PINGs alone."""

    def __init__(self, keep_alive: KeepAlive, wall: Callable[[], float], now: float) -> None:
        self.name: str | None = None
        """What the client calls itself."""
        self._keep_alive = keep_alive
        self._wall = wall
        self._said = self._heard = now
        self._pinged = False
        self._over = False

    def begin(self, server: str) -> Iterator[Act]:
        yield Say(ServerCommand(server))
        yield Say(self._ping())

    def said(self, now: float) -> None:
        """Something was sent."""
        self._said = now

    def hear(self, line: bytes, now: float) -> Iterator[Act]:
        """What follows from a line; nothing does after we left."""
        if self._over:
            return
        self._heard = now
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
                self.name = text
            case ReplicateCommand():
                yield Answer()
            case RelayedCommand():
                yield RelayOn(command)
            case ErrorCommand(text):
                yield from self._leave("bad", f"it said ERROR {text}")
            case _:
                word = str(command).partition(" ")[0]
                yield from self.refuse(BadCommand(f"{word} is for the server to say"))

    def refuse(self, problem: BadCommand) -> Iterator[Act]:
        """It said what cannot be understood: who knows what it meant, and what it means next."""
        if not self._over:
            yield Say(ErrorCommand(str(problem)))
            yield from self._leave("bad", str(problem))

    def tick(self, now: float, ahead: float) -> Iterator[Act]:
        """What time alone brings; to be called every `ahead` seconds or more often."""
        if self._over:
            return
        if self._pinged and now - self._heard >= self._keep_alive.hear:
            yield from self._leave("silent", f"nothing came for {self._keep_alive.hear:g} s")
        elif now + ahead - self._said >= self._keep_alive.say:
            yield Say(self._ping())

    def _leave(self, why: Literal["silent", "bad"], problem: str) -> Iterator[Act]:
        self._over = True
        yield Leave(why, problem)

    def _ping(self) -> PingCommand:
        return PingCommand(str(round(self._wall() * 1000)))
