"""`tidemark listen`: the client's side of the line protocol, for people and for pipes.

It keeps the connection alive as the protocol asks of a client, and comes back when it is lost. It fetches nothing: what
went by while it was away is told by the first POSITION.
"""

import socket
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress

from tidemark.app.lines.commands import Command, Name, Ping, Replicate, Server, parse, said
from tidemark.app.lines.splitter import Splitter
from tidemark.sinks.patience import Patience
from tidemark.streaming.errors import BadCommand, Stop, Unavailable

PING_EVERY = 4.0  # seconds; the protocol asks for 5
SILENCE = 15.0  # seconds after which the server is gone
LONGEST = 16 << 20  # bytes of a line: rows may be large


class AnotherServer(Stop):
    def __init__(self, where: str, expected: str, found: str) -> None:
        super().__init__(f"{where} is server {found} and not {expected}: check the address")
        self.found = found


class Listening:
    """`server` is the name that SERVER must say; None: any."""

    def __init__(self, address: tuple[str, int], server: str | None = None) -> None:
        self._address = address
        self._where = f"{address[0]}:{address[1]}"
        self._server = server

    def commands(self) -> Generator[Command, None, None]:
        """Everything that the server says, over one connection after the other, without end. Raises `AnotherServer`."""
        patience = Patience()
        while True:
            try:
                for command in self._connected():
                    patience.succeeded()
                    yield command
                problem = "it closed the connection"
            except OSError as error:
                problem = str(error)
            except BadCommand as error:
                problem = f"it does not speak the line protocol: {error}"
            time.sleep(patience.pause_after(Unavailable("the sidecar", self._where, problem)))

    def _connected(self) -> Iterator[Command]:
        """What one connection says, until it ends."""
        splitter = Splitter(LONGEST)
        with socket.create_connection(self._address, timeout=SILENCE) as connection:
            _say(connection, Name("tidemark listen"), _ping(), Replicate())
            heard = pinged = time.monotonic()
            while True:
                connection.settimeout(max(0.01, pinged + PING_EVERY - time.monotonic()))
                data = None
                with suppress(TimeoutError):
                    data = connection.recv(1 << 16)
                if data == b"":
                    return
                if data:
                    heard = time.monotonic()
                    yield from self._heard(splitter.lines(data))
                now = time.monotonic()
                if now - heard >= SILENCE:
                    raise TimeoutError(f"nothing came for {SILENCE:g} s")
                if now - pinged >= PING_EVERY:
                    pinged = now
                    _say(connection, _ping())

    def _heard(self, lines: Iterable[bytes]) -> Iterator[Command]:
        for line in lines:
            command = parse(line)
            if isinstance(command, Server) and self._server not in {None, command.name}:
                raise AnotherServer(self._where, str(self._server), command.name)
            if command is not None:
                yield command


def _say(connection: socket.socket, *commands: Command) -> None:
    connection.sendall(said(commands))


def _ping() -> Ping:
    return Ping(str(round(time.time() * 1000)))
