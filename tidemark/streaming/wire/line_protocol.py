"""The commands of the line protocol, parsed from lines and formatted as lines. Pure.

A line is UTF-8, without characters below U+0020 except the tab. The first word of a line is the command. Some commands
are relayed from client to client. This module checks only their syntax, and keeps their text unchanged.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tidemark.common.errors import BadCommand
from tidemark.streaming.wire.records import MAX_ID, is_name


class LineSplitter:
    """Splits the bytes that a connection receives into lines.

    Args:
        max_bytes: the largest number of bytes of a line, without its newline. Also applies to an incomplete line.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._partial = b""

    def split(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes. Exhaust the iterator before the next call.

        Yields:
            The lines that `data` completes, without their newlines.

        Raises:
            BadCommand: a line has more than `max_bytes` bytes. Close the connection: its next line cannot be found.
        """
        at = 0
        while (end := data.find(b"\n", at)) >= 0:
            partial, self._partial = self._partial, b""
            yield self._check_length(partial + data[at:end])
            at = end + 1
        self._partial = self._check_length(self._partial + data[at:])

    def _check_length(self, line: bytes) -> bytes:
        if len(line) > self._max_bytes:
            raise BadCommand(f"a line is longer than {self._max_bytes} bytes")
        return line


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """The name of the server. This is the first line that a server sends on a connection."""

    name: str

    def __str__(self) -> str:
        return f"SERVER {self.name}"


@dataclass(frozen=True, slots=True)
class PingCommand:
    """A heartbeat. `time`: the sender's clock, usually ms since 1970. Any text is accepted; `time` is not used."""

    time: str

    def __str__(self) -> str:
        return f"PING {self.time}"


@dataclass(frozen=True, slots=True)
class NameCommand:
    """A name that a client gives to its connection, for people."""

    text: str

    def __str__(self) -> str:
        return f"NAME {self.text}"


@dataclass(frozen=True, slots=True)
class ReplicateCommand:
    """A client's request for the positions of all streams."""

    def __str__(self) -> str:
        return "REPLICATE"


@dataclass(frozen=True, slots=True)
class PositionCommand:
    """`writer` has no row in `(prev, id]`, and has reached `id`. IDs are signed.

    A client whose position of this writer is nearer to 0 than `prev` has missed rows.
    """

    stream: str
    writer: str
    prev: int
    id: int

    def __str__(self) -> str:
        return f"POSITION {self.stream} {self.writer} {self.prev} {self.id}"


@dataclass(frozen=True, slots=True)
class RdataCommand:
    """One row of a fact, as JSON without newlines. If `id` is None, more rows follow, and the last row has the ID."""

    stream: str
    writer: str
    id: int | None
    row: str

    def __str__(self) -> str:
        return f"RDATA {self.stream} {self.writer} {'batch' if self.id is None else self.id} {self.row}"


@dataclass(frozen=True, slots=True)
class ErrorCommand:
    """An error message. The sender usually closes the connection after this command."""

    text: str

    def __str__(self) -> str:
        return f"ERROR {self.text}"


@dataclass(frozen=True, slots=True)
class RelayedCommand:
    """A command from a client to other clients, which the server relays. `line`: the whole command, unchanged."""

    line: str

    def __str__(self) -> str:
        return self.line


Command = (
    ServerCommand
    | PingCommand
    | NameCommand
    | ReplicateCommand
    | PositionCommand
    | RdataCommand
    | ErrorCommand
    | RelayedCommand
)

# Relayed command -> syntax of its arguments. Only Synapse's workers use the last four.
RELAYED_COMMANDS: Final = {
    "USER_SYNC": re.compile(r"\S+ \S+ (\S+ )?(start|end) [0-9]+( \S+)?"),  # with or without a device
    "CLEAR_USER_SYNC": re.compile(r"\S+"),
    "FEDERATION_ACK": re.compile(r"\S+ -?[0-9]+"),
    "REMOTE_SERVER_UP": re.compile(r"\S+"),
    "USER_IP": re.compile(r".*"),
    "LOCK_RELEASED": re.compile(r".*"),
    "NEW_ACTIVE_TASK": re.compile(r".*"),
    "CANCEL_TASK": re.compile(r".*"),
}
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0a-\x1f]")  # not U+007F, which JSON allows unescaped
_ID_PATTERN = re.compile(r"-?[0-9]{1,19}")


def encode_commands(commands: Iterable[Command]) -> bytes:
    """Encode commands as lines in UTF-8, each with its newline."""
    return "".join(f"{command}\n" for command in commands).encode()


def parse(line: bytes) -> Command | None:
    """Parse a line without its newline. A carriage return at its end is ignored.

    Returns:
        The command; None for a blank line.

    Raises:
        BadCommand: the line is not UTF-8, has a control character, or is not a command with valid arguments.
    """
    try:
        text = line.decode().removesuffix("\r")
    except UnicodeDecodeError:
        raise BadCommand("the line is not UTF-8") from None
    if not text.strip():
        return None
    if _CONTROL_CHARACTER.search(text):
        raise BadCommand("the line has control characters")
    word, _, rest = text.partition(" ")
    if syntax := RELAYED_COMMANDS.get(word):
        if not syntax.fullmatch(rest):
            raise BadCommand(f"{word} has wrong arguments")
        return RelayedCommand(text)
    match word:
        case "PING":
            return PingCommand(rest)
        case "NAME":
            return NameCommand(rest)
        case "REPLICATE":
            return ReplicateCommand()
        case "POSITION":
            return _parse_position(rest)
        case "RDATA":
            return _parse_rdata(rest)
        case "ERROR":
            return ErrorCommand(rest)
        case "SERVER" if is_name(rest):
            return ServerCommand(rest)
        case "SERVER":
            raise BadCommand("SERVER needs one name")
    raise BadCommand(f"unknown command {word[:40]!r}")


def _parse_position(rest: str) -> PositionCommand:
    words = rest.split(" ")
    if len(words) != 4:
        raise BadCommand("POSITION needs a stream, a writer, a previous ID and an ID")
    return PositionCommand(_parse_name(words[0]), _parse_name(words[1]), _parse_id(words[2]), _parse_id(words[3]))


def _parse_rdata(rest: str) -> RdataCommand:
    words = rest.split(" ", 3)
    if len(words) != 4:
        raise BadCommand("RDATA needs a stream, a writer, an ID or batch, and a row")
    stream, writer, token, row = words
    return RdataCommand(_parse_name(stream), _parse_name(writer), None if token == "batch" else _parse_id(token), row)


def _parse_name(word: str) -> str:
    if not is_name(word):
        raise BadCommand(f"{word[:40]!r} is not the name of a stream or a writer")
    return word


def _parse_id(word: str) -> int:
    if not _ID_PATTERN.fullmatch(word) or abs(int(word)) > MAX_ID:
        raise BadCommand(f"{word[:40]!r} is not a stream ID")
    return int(word)
