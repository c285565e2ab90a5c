"""`tidemark listen`: a client of the line protocol, for people and for pipes.

The client sends the keep-alives of the protocol, and reconnects after a loss of the connection. It fetches no rows: the
first POSITION of each writer after a loss shows how far the writer has moved. Lines are printed in colours, or as JSON.
"""

import socket
import ssl
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import suppress

import click
import msgspec

from tidemark.app.serving.tls_listener import CA_VARIABLE
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
    encode_commands,
    parse,
)

PING_INTERVAL_SECONDS = 4.0  # the protocol requires a line every 5 s
SERVER_TIMEOUT_SECONDS = 15.0  # the client reconnects after so long without a line
MAX_LINE_BYTES = 16 << 20  # rows may be large

_OTHER_COLOUR, _MOVE_COLOUR, _FETCH_COLOUR, _ERROR_COLOUR = "bright_black", "green", "yellow", "red"


def should_print(command: Command, streams: Collection[str]) -> bool:
    """Whether to print the command. `streams`: the streams to print; empty: all. PINGs are never printed."""
    match command:
        case PingCommand():
            return False
        case PositionCommand(stream=stream) | RdataCommand(stream=stream):
            return not streams or stream in streams
    return True


def to_colored_text(command: Command) -> str:
    """The received line, with terminal colours: green for a move, yellow for a POSITION after which clients fetch rows,
    red for an ERROR."""
    match command:
        case RdataCommand(stream, writer, id, row):
            token = "batch" if id is None else str(id)
            return f"RDATA {_style_names(stream, writer)} {click.style(token, fg=_MOVE_COLOUR, bold=True)} {row}"
        case PositionCommand(stream, writer, prev, id):
            fetch = prev == id
            colour = _FETCH_COLOUR if fetch else _MOVE_COLOUR
            return f"POSITION {_style_names(stream, writer)} {click.style(f'{prev} {id}', fg=colour, bold=not fetch)}"
        case ErrorCommand():
            return click.style(str(command), fg=_ERROR_COLOUR)
    return click.style(str(command), fg=_OTHER_COLOUR)


def to_json(command: Command) -> str:
    """The command as one line of JSON. The field `command` is the first word of the line."""
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


def _style_names(stream: str, writer: str) -> str:
    return f"{click.style(stream, bold=True)} {click.style(writer, fg='cyan')}"


class WrongServer(Stop):
    def __init__(self, address: str, expected_name: str, reported_name: str) -> None:
        super().__init__(
            f"the server at {address} has the name {reported_name}, not {expected_name}: check the address"
        )
        self.reported_name = reported_name


class CertificateRefused(Stop):
    def __init__(self, address: str, problem: str) -> None:
        super().__init__(f"the certificate of {address} is not valid ({problem}): check {CA_VARIABLE} and the address")


class LinesClient:
    """A client of the line protocol.

    Args:
        address: host and port.
        server: the expected server name; None to accept any name.
        tls_context: returns the TLS context of a connection; None to connect without TLS.
    """

    def __init__(
        self,
        address: tuple[str, int],
        server: str | None = None,
        tls_context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._address = address
        self._where = f"{address[0]}:{address[1]}"
        self._server = server
        self._tls_context = tls_context

    def commands(self) -> Generator[Command, None, None]:
        """Yield the commands of the server, without end. Waits for commands, and reconnects after each loss of the
        connection.

        Raises:
            WrongServer: the server has another name.
            CertificateRefused: the certificate of the server is not valid.
        """
        wait_log = WaitLog()
        while True:
            try:
                connected = time.monotonic()
                for command in self._connection_commands():
                    # Not at once: a server that closes each new connection must not be contacted again and again.
                    if time.monotonic() - connected >= PING_INTERVAL_SECONDS:
                        wait_log.note_success()
                    yield command
                problem = "the server closed the connection"
            except ssl.SSLCertVerificationError as error:
                raise CertificateRefused(self._where, error.verify_message) from None
            except OSError as error:
                problem = str(error)
            except BadCommand as error:
                problem = f"the server does not use the line protocol: {error}"
            time.sleep(wait_log.pause_after(Unavailable("the sidecar", self._where, problem)))

    def _connection_commands(self) -> Iterator[Command]:
        """Connect to the server, and yield its commands until it closes the connection. Sends the keep-alives.

        Raises:
            OSError: the connection fails, or nothing is received for `SERVER_TIMEOUT_SECONDS`.
            BadCommand: a line is not of the line protocol.
            WrongServer: the server has another name.
        """
        splitter = LineSplitter(MAX_LINE_BYTES)
        with self._wrap_tls(socket.create_connection(self._address, timeout=SERVER_TIMEOUT_SECONDS)) as connection:
            _send(connection, NameCommand("tidemark listen"), _create_ping(), ReplicateCommand())
            received = pinged = time.monotonic()
            while True:
                connection.settimeout(max(0.01, pinged + PING_INTERVAL_SECONDS - time.monotonic()))
                data = None
                with suppress(TimeoutError):
                    data = connection.recv(1 << 16)
                if data == b"":
                    return
                if data:
                    received = time.monotonic()
                    yield from self._parse(splitter.split(data))
                now = time.monotonic()
                if now - received >= SERVER_TIMEOUT_SECONDS:
                    raise TimeoutError(f"nothing was received for {SERVER_TIMEOUT_SECONDS:g} s")
                if now - pinged >= PING_INTERVAL_SECONDS:
                    pinged = now
                    _send(connection, _create_ping())

    def _wrap_tls(self, connection: socket.socket) -> socket.socket:
        if self._tls_context is None:
            return connection
        try:
            return self._tls_context().wrap_socket(connection, server_hostname=self._address[0])
        except BaseException:
            connection.close()
            raise

    def _parse(self, lines: Iterable[bytes]) -> Iterator[Command]:
        for line in lines:
            command = parse(line)
            if isinstance(command, ServerCommand) and self._server not in {None, command.name}:
                raise WrongServer(self._where, str(self._server), command.name)
            if command is not None:
                yield command


def _send(connection: socket.socket, *commands: Command) -> None:
    connection.sendall(encode_commands(commands))


def _create_ping() -> PingCommand:
    return PingCommand(str(round(time.time() * 1000)))
