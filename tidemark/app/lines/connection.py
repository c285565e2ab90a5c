"""One connection of the line protocol: its lines, by turns, and what waits for a client that does not read."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

from tidemark.app.lines.protocol import (
    Act,
    Conversation,
    Disconnect,
    KeepAlive,
    RelayOn,
    SendCommand,
    SendPositions,
)
from tidemark.app.read_side import metrics
from tidemark.common.errors import BadCommand
from tidemark.streaming.wire.line_protocol import Command, ErrorCommand, Splitter, encoded

if TYPE_CHECKING:
    from tidemark.app.lines.server import LineServer

Why = Literal["slow", "silent", "bad", "crowded"]


@dataclass(frozen=True, slots=True)
class LineServerConfig:
    """`name` stands in SERVER. `unread` is how many bytes may wait for a client that does not read, and `unread_by_all`
    for all of them together; `longest` how many a line of a client may have, `tick` how often (s) keep-alives are
    checked."""

    name: str = "tidemark"
    connections: int = 1000
    unread: int = 8 << 20
    unread_by_all: int = 64 << 20
    longest: int = 64 << 10
    keep_alive: KeepAlive = field(default_factory=KeepAlive)
    tick: float = 1.0


class LineConnection(asyncio.Protocol):
    """`answered`: its REPLICATE was answered, so announcements join what it has. `has_lines`: there may be some that it
    has sent and that are not taken yet; nothing more is read of it until they are. `has_spoken`: it has sent a line.
    """

    def __init__(self, server: "LineServer") -> None:
        self.answered = False
        self.has_lines = False
        self.has_spoken = False
        self.address = ""
        self._lines: Iterator[bytes] = iter(())
        self._server = server
        self._config = server.config
        self._splitter = Splitter(self._config.longest)
        self._conversation = Conversation(self._config.keep_alive, time.time, time.monotonic())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.address = (transport.get_extra_info("peername") or ("",))[0]
        if self._server.admit(self):
            self._do(self._conversation.begin(self._config.name))
        else:
            self._send(ErrorCommand("as many clients are connected as may be: ask another sidecar, or try again"))
            self._disconnect("crowded")

    def data_received(self, data: bytes) -> None:
        self._transport.pause_reading()
        self._lines, self.has_lines = self._splitter.lines(data), True
        self._server.take_turns(self)

    def work(self, most: int) -> int:
        """Take lines that were sent; gives how much that was, of which about `most` are allowed."""
        now, lines, others = time.monotonic(), 0, 0
        try:
            while lines + others < most and not self._transport.is_closing():
                if (line := next(self._lines, None)) is None:
                    self.has_lines = False
                    self._transport.resume_reading()
                    break
                lines += 1
                self.has_spoken = True
                others += self._do(self._conversation.receive(line, now))
            else:
                self.has_lines = not self._transport.is_closing()
        except BadCommand as problem:
            self._do(self._conversation.refuse(problem))
            self.has_lines = not self._transport.is_closing()
        metrics.LINES_IN.inc(lines)
        return lines + others

    @property
    def unread(self) -> int:
        """Bytes that it was sent and has not read."""
        return self._transport.get_write_buffer_size()

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
        if self.unread > self._config.unread:
            self.drop()
            return
        self._transport.write(text)
        self._conversation.sent(time.monotonic())
        metrics.LINES_OUT.inc(lines)

    def give_way(self) -> None:
        """To a client of another address: it has no place any more."""
        if not self._transport.is_closing():
            self._send(ErrorCommand("as many clients are connected as may be, and this one gave way: try again"))
            self._disconnect("crowded")

    def end(self) -> None:
        """Once it has read everything."""
        self._send(ErrorCommand("server stopping"))
        self._transport.close()

    def drop(self) -> None:
        self._server.log.write(
            "warning", "A client of the line protocol did not read and was dropped", client=self._label
        )
        metrics.CLOSED.labels("slow").inc()
        self.cut()

    def cut(self) -> None:
        """Without waiting for anything."""
        self._transport.abort()

    def _do(self, acts: Iterable[Act]) -> int:
        """Gives to how many other clients something was sent."""
        others = 0
        for act in acts:
            match act:
                case SendCommand(command):
                    self._send(command)
                case SendPositions():
                    self._server.replicate(self)
                case RelayOn(command):
                    others += self._server.relay_on(command, self)
                case Disconnect(why, problem):
                    self._server.log.write(
                        "info", "Disconnected a client of the line protocol", client=self._label, problem=problem
                    )
                    self._disconnect(why)
        return others

    def _disconnect(self, why: Why) -> None:
        metrics.CLOSED.labels(why).inc()
        self._transport.close()
        asyncio.get_running_loop().call_later(self._config.keep_alive.timeout, self._transport.abort)

    @property
    def _label(self) -> str:
        peer = self._transport.get_extra_info("peername")
        return self._conversation.name or str(peer)
