"""`tidemark overrides`: what operators settled by hand: who, as which user of Postgres, why, and with which outcome."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from tidemark.app.commands import CommandFailed, CommandGroup, loaded
from tidemark.app.output import as_object, duration, id_range, sanitize, table, timestamp
from tidemark.sinks.postgres.database import session_of
from tidemark.sinks.postgres.operators import EVERY_STREAM, OverrideLog

if TYPE_CHECKING:
    from tidemark.sinks.postgres.operators import OverrideEntry, OverrideLog

HEADINGS: Final = ("NUMBER", "AGE", "USER", "BY", "KIND", "STREAM", "WRITER", "IDS", "OUTCOME", "WHY")

_as_json = click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")


@click.group("overrides", cls=CommandGroup)
def overrides() -> None:
    """List operator overrides: which user of Postgres, when, why, and with which outcome."""


@overrides.command("list")
@click.argument("stream", required=False)
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Newest entries to show.")
@_as_json
def overrides_list(stream: str | None, limit: int, *, as_json: bool) -> None:
    """List the newest overrides of all streams, or of STREAM, also those that other programs sent."""
    with _database() as database:
        entries = database.newest(stream, limit)
        if stream is not None and not entries and not database.is_stream(stream):
            raise CommandFailed(f"there is no stream {stream}, and no override of it; `tidemark status` shows all")
    if as_json:
        click.echo(as_object({"overrides": entries}))
    else:
        click.echo(sanitize(_table(entries, time.time())) if entries else "no overrides")


@overrides.command("show")
@click.argument("number", type=click.IntRange(1))
@_as_json
def overrides_show(number: int, *, as_json: bool) -> None:
    """Show the override NUMBER with all its fields."""
    with _database() as database:
        entry = database.numbered(number)
    if entry is None:
        raise CommandFailed(f"there is no override {number}; `tidemark overrides list` shows the newest")
    click.echo(as_object(entry) if as_json else sanitize(_whole(entry)))


@contextmanager
def _database() -> "Iterator[OverrideLog]":
    settings = loaded()
    with session_of(settings.postgres, "tidemark overrides") as session:
        yield OverrideLog(session)


def _ids(it: "OverrideEntry") -> str:
    if not it.id:
        return ""
    return id_range(it.prev, it.id) if it.prev else f"up to {it.id}"


def _outcome(it: "OverrideEntry") -> str:
    if it.outcome is not None:
        return it.outcome
    return "not sent" if it.topic is None else "not seen"


def _table(entries: "Sequence[OverrideEntry]", now: float) -> list[str]:
    rows = [
        (
            "" if it.number is None else str(it.number),
            duration(now - it.time.timestamp()),
            it.seen_as or "unknown",
            it.by,
            it.kind,
            it.stream,
            it.writer,
            _ids(it),
            _outcome(it),
            it.why,
        )
        for it in entries
    ]
    return table(HEADINGS, rows, {"NUMBER"})


def _whole(it: "OverrideEntry") -> Iterator[str]:
    stream = "all streams" if it.stream == EVERY_STREAM else it.stream
    whose = f"{it.writer} (epoch {it.epoch}) of {stream}" if it.writer else stream
    yield f"{it.kind} of {whose} {_ids(it)}".rstrip()
    yield f"when: {timestamp(it.time)}"
    yield f"who: {it.by}; user {it.seen_as} of Postgres, from {it.seen_from or 'a local socket'}"
    yield f"why: {it.why}"
    if it.writer:  # only an override of a writer is sent
        yield "sent: " + ("not known to be" if it.topic is None else f"{it.topic}/{it.partition} {it.offset}")
    yield f"outcome: {_outcome(it)}"
