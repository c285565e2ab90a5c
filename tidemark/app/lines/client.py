"""`tidemark listen`: a client of the line protocol, for people and for pipes.

It sends the protocol's keep-alives, and reconnects after a loss of the connection. It fetches no rows: the first
POSITION after a loss shows the move of each stream. Lines are printed in colours, or as JSON.
"""

import socket
import ssl
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import suppress

import click
import msgspec

from tidemark.app.serving.tls_listener import CA
from tidemark.common.backoff import WaitLog
from tidemark.common.errors import BadCommand, Stop, Unavailable
from tidemark.streaming.wire.line_protocol import (
    Command,
    ErrorCommand,
    LineSplitter,
    NameCommand,
    PingCommand,
    PositionCommand,
    RdataCommand,
    RelayedCommand,
    ReplicateCommand,
    ServerCommand,
    encoded,
    parse,
)

PING_EVERY = 4.0  # seconds; the protocol requires 5
SILENCE = 15.0  # seconds without a line after which the server counts as dead
LONGEST = 16 << 20  # bytes of a line; rows may be large

_DIM, _MOVE, _WARN, _BAD = "bright_black", "green", "yellow", "red"


def wanted(command: Command, streams: Collection[str]) -> bool:
    """Whether to print the command. `streams`: the requested streams; empty: all. PINGs are never printed."""
    match command:
        case PingCommand():
            return False
        case PositionCommand(stream=stream) | RdataCommand(stream=stream):
            return not streams or stream in streams
    return True


def coloured(command: Command) -> str:
    """The received line, with colours by the action that a client must take."""
    match command:
        case RdataCommand(stream, writer, id, row):
            token = "batch" if id is None else str(id)
            return f"RDATA {_styled(stream, writer)} {click.style(token, fg=_MOVE, bold=True)} {row}"
        case PositionCommand(stream, writer, prev, id):
            fetch = prev == id
            colour = _WARN if fetch else _MOVE
            return f"POSITION {_styled(stream, writer)} {click.style(f'{prev} {id}', fg=colour, bold=not fetch)}"
        case ErrorCommand():
            return click.style(str(command), fg=_BAD)
    return click.style(str(command), fg=_DIM)


def as_json(command: Command) -> str:
    """The command as one line of JSON; the field `command` is its first word."""
    match command:
        case RdataCommand(stream, writer, id, row):
            fields = {"stream": stream, "writer": writer, "id": id, "row": msgspec.Raw(row.encode())}
        case PositionCommand(stream, writer, prev, id):
            fields = {"stream": stream, "writer": writer, "prev": prev, "id": id}
        case ServerCommand(text) | NameCommand(text) | ErrorCommand(text) | PingCommand(text):
            fields = {"text": text}
        case RelayedCommand(line):
            fields = {"text": line.partition(" ")[2]}
        case ReplicateCommand():
            fields = {}
    word = str(command).partition(" ")[0]
    return msgspec.json.encode({"command": word, **fields}).decode()


def _styled(stream: str, writer: str) -> str:
    return f"{click.style(stream, bold=True)} {click.style(writer, fg='cyan')}"


class WrongServer(Stop):
    def __init__(self, where: str, expected: str, reported: str) -> None:
        super().__init__(f"{where} is server {reported} and not {expected}: check the address")
        self.found = reported


class CertificateRefused(Stop):
    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"the certificate of {where} is refused ({problem}): check {CA} and the address")


class LinesClient:
    """A client of the line protocol.

    Args:
        address: host and port.
        server: the required name in SERVER; None: any.
        trust: makes the TLS context of each connection; None: no TLS.
    """

    def __init__(
        self,
        address: tuple[str, int],
        server: str | None = None,
        trust: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._address = address
        self._where = f"{address[0]}:{address[1]}"
        self._server = server
        self._trust = trust

    def commands(self) -> Generator[Command, None, None]:
        """The commands of the server, without end, with a new connection after each loss. Raises `WrongServer` and
        `CertificateRefused`."""
        patience = WaitLog()
        while True:
            try:
                connected = time.monotonic()
                for command in self._connected():
                    if (
                        time.monotonic() - connected >= PING_EVERY
                    ):  # prevents fast retries if the server closes the connection at once
                        patience.succeeded()
                    yield command
                problem = "it closed the connection"
            except ssl.SSLCertVerificationError as error:
                raise CertificateRefused(self._where, error.verify_message) from None
            except OSError as error:
                problem = str(error)
            except BadCommand as error:
                problem = f"it does not speak the line protocol: {error}"
            time.sleep(patience.pause_after(Unavailable("the sidecar", self._where, problem)))

    def _connected(self) -> Iterator[Command]:
        """The commands of one connection."""
        splitter = LineSplitter(LONGEST)
        with self._encrypted(socket.create_connection(self._address, timeout=SILENCE)) as connection:
            _send(connection, NameCommand("tidemark listen"), _ping(), ReplicateCommand())
            received = pinged = time.monotonic()
            while True:
                connection.settimeout(max(0.01, pinged + PING_EVERY - time.monotonic()))
                data = None
                with suppress(TimeoutError):
                    data = connection.recv(1 << 16)
                if data == b"":
                    return
                if data:
                    received = time.monotonic()
                    yield from self._parsed(splitter.lines(data))
                now = time.monotonic()
                if now - received >= SILENCE:
                    raise TimeoutError(f"nothing was received for {SILENCE:g} s")
                if now - pinged >= PING_EVERY:
                    pinged = now
                    _send(connection, _ping())

    def _encrypted(self, connection: socket.socket) -> socket.socket:
        if self._trust is None:
            return connection
        try:
            return self._trust().wrap_socket(connection, server_hostname=self._address[0])
        except BaseException:
            connection.close()
            raise

    def _parsed(self, lines: Iterable[bytes]) -> Iterator[Command]:
        for line in lines:
            command = parse(line)
            if isinstance(command, ServerCommand) and self._server not in {None, command.name}:
                raise WrongServer(self._where, str(self._server), command.name)
            if command is not None:
                yield command


def _send(connection: socket.socket, *commands: Command) -> None:
    connection.sendall(encoded(commands))


def _ping() -> PingCommand:
    return PingCommand(str(round(time.time() * 1000)))
