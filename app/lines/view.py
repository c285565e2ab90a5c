"""How a line of the protocol is shown to a person, or to a program as JSON. Pure."""

from collections.abc import Collection

import click
import msgspec

from tidemark.app.lines.commands import Command, Error, Name, Ping, Position, Rdata, Relayed, Replicate, Server

_DIM, _MOVE, _WARN, _BAD = "bright_black", "green", "yellow", "red"


def wanted(command: Command, streams: Collection[str]) -> bool:
    """Whether to show it to who asked for `streams` (none: all). PINGs are shown to nobody."""
    match command:
        case Ping():
            return False
        case Position(stream=stream) | Rdata(stream=stream):
            return not streams or stream in streams
    return True


def coloured(command: Command) -> str:
    """The line as it came, in colours that tell at a glance what it asks of a client."""
    match command:
        case Rdata(stream, writer, id, row):
            token = "batch" if id is None else str(id)
            return f"RDATA {_styled(stream, writer)} {click.style(token, fg=_MOVE, bold=True)} {row}"
        case Position(stream, writer, prev, id):
            fetch = prev == id
            colour = _WARN if fetch else _MOVE
            return f"POSITION {_styled(stream, writer)} {click.style(f'{prev} {id}', fg=colour, bold=not fetch)}"
        case Error():
            return click.style(str(command), fg=_BAD)
    return click.style(str(command), fg=_DIM)


def as_json(command: Command) -> str:
    """One object a line; `command` is its word."""
    match command:
        case Rdata(stream, writer, id, row):
            fields = {"stream": stream, "writer": writer, "id": id, "row": msgspec.Raw(row.encode())}
        case Position(stream, writer, prev, id):
            fields = {"stream": stream, "writer": writer, "prev": prev, "id": id}
        case Server(text) | Name(text) | Error(text) | Ping(text):
            fields = {"text": text}
        case Relayed(line):
            fields = {"text": line.partition(" ")[2]}
        case Replicate():
            fields = {}
    word = str(command).partition(" ")[0]
    return msgspec.json.encode({"command": word, **fields}).decode()


def _styled(stream: str, writer: str) -> str:
    return f"{click.style(stream, bold=True)} {click.style(writer, fg='cyan')}"
