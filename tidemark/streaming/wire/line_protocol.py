"""The commands of the line protocol: values that are parsed from a line and printed as one. Pure.

A line is UTF-8 without control characters but the tab; its first word is the command. What another process will
interpret (the relayed commands) is checked for its form and passed on letter by letter.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tidemark.common.errors import BadCommand
from tidemark.streaming.wire.records import MAX_ID, is_name


class LineSplitter:
    """Cuts the bytes of a connection into lines. `longest` is how many bytes a line may have without its newline; no
    more than that is ever kept of one that is incomplete."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._begun = b""

    def lines(self, data: bytes) -> Iterator[bytes]:
        """The lines that `data` ends, without their newlines. Raises `BadCommand` for one that is too long: what comes
        after it cannot be told from it, so the connection is of no use any more. Take all lines before the next call;
        each is cut as it is taken.
        """
        at = 0
        while (end := data.find(b"\n", at)) >= 0:
            begun, self._begun = self._begun, b""
            yield self._within(begun + data[at:end])
            at = end + 1
        self._begun = self._within(self._begun + data[at:])

    def _within(self, line: bytes) -> bytes:
        if len(line) > self._longest:
            raise BadCommand(f"a line is longer than {self._longest} bytes")
        return line


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """The first line on a connection: which server this is."""

    name: str

    def __str__(self) -> str:
        return f"SERVER {self.name}"


@dataclass(frozen=True, slots=True)
class PingCommand:
    """A sign of life; `time` is the sender's clock (ms since 1970), which nobody needs to believe."""

    time: str

    def __str__(self) -> str:
        return f"PING {self.time}"


@dataclass(frozen=True, slots=True)
class NameCommand:
    """What the connection is called, for people."""

    text: str

    def __str__(self) -> str:
        return f"NAME {self.text}"


@dataclass(frozen=True, slots=True)
class ReplicateCommand:
    """Asks for the position of every stream."""

    def __str__(self) -> str:
        return "REPLICATE"


@dataclass(frozen=True, slots=True)
class PositionCommand:
    """No row of `writer` lies in `(prev, id]`; a client that stands below `prev` has missed some."""

    stream: str
    writer: str
    prev: int
    id: int

    def __str__(self) -> str:
        return f"POSITION {self.stream} {self.writer} {self.prev} {self.id}"


@dataclass(frozen=True, slots=True)
class RdataCommand:
    """One row, as JSON without newlines; `id` None: more rows of the same fact follow, the last with its ID."""

    stream: str
    writer: str
    id: int | None
    row: str

    def __str__(self) -> str:
        return f"RDATA {self.stream} {self.writer} {'batch' if self.id is None else self.id} {self.row}"


@dataclass(frozen=True, slots=True)
class ErrorCommand:
    text: str

    def __str__(self) -> str:
        return f"ERROR {self.text}"


@dataclass(frozen=True, slots=True)
class RelayedCommand:
    """A command that passes between clients; we only carry it."""

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

# What must follow the word; the last four belong to the workers alone.
RELAYED: Final = {
    "USER_SYNC": re.compile(r"\S+ \S+ (\S+ )?(start|end) [0-9]+( \S+)?"),  # the device is here or there, or nowhere
    "CLEAR_USER_SYNC": re.compile(r"\S+"),
    "FEDERATION_ACK": re.compile(r"\S+ -?[0-9]+"),
    "REMOTE_SERVER_UP": re.compile(r"\S+"),
    "USER_IP": re.compile(r".*"),
    "LOCK_RELEASED": re.compile(r".*"),
    "NEW_ACTIVE_TASK": re.compile(r".*"),
    "CANCEL_TASK": re.compile(r".*"),
}
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f]")  # not U+007F, which JSON allows as it is
_ID = re.compile(r"-?[0-9]{1,19}")


def encoded(commands: Iterable[Command]) -> bytes:
    """Lines as they go over a connection."""
    return "".join(f"{command}\n" for command in commands).encode()


def parse(line: bytes) -> Command | None:
    """What a line without its newline says; None for a blank one. Raises `BadCommand`."""
    try:
        text = line.decode().removesuffix("\r")
    except UnicodeDecodeError:
        raise BadCommand("the line is not UTF-8") from None
    if not text.strip():
        return None
    if _CONTROL.search(text):
        raise BadCommand("the line has control characters")
    word, _, rest = text.partition(" ")
    if form := RELAYED.get(word):
        if not form.fullmatch(rest):
            raise BadCommand(f"{word} is not followed by what it needs")
        return RelayedCommand(text)
    match word:
        case "PING":
            return PingCommand(rest)
        case "NAME":
            return NameCommand(rest)
        case "REPLICATE":
            return ReplicateCommand()
        case "POSITION":
            return _position(rest)
        case "RDATA":
            return _rdata(rest)
        case "ERROR":
            return ErrorCommand(rest)
        case "SERVER" if is_name(rest):
            return ServerCommand(rest)
        case "SERVER":
            raise BadCommand("SERVER is not followed by one name")
    raise BadCommand(f"there is no command {word[:40]!r}")


def _position(rest: str) -> PositionCommand:
    words = rest.split(" ")
    if len(words) != 4:
        raise BadCommand("POSITION is not followed by stream, writer, prev and new position")
    return PositionCommand(_named(words[0]), _named(words[1]), _id(words[2]), _id(words[3]))


def _rdata(rest: str) -> RdataCommand:
    words = rest.split(" ", 3)
    if len(words) != 4:
        raise BadCommand("RDATA is not followed by stream, writer, token and row")
    stream, writer, token, row = words
    return RdataCommand(_named(stream), _named(writer), None if token == "batch" else _id(token), row)


def _named(word: str) -> str:
    if not is_name(word):
        raise BadCommand(f"{word[:40]!r} is not the name of a stream or a writer")
    return word


def _id(word: str) -> int:
    if not _ID.fullmatch(word) or abs(int(word)) > MAX_ID:
        raise BadCommand(f"{word[:40]!r} is not a stream ID")
    return int(word)
