"""`tidemark acts`: who did what, as whom Postgres knew them, and what came of it."""

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

HEADINGS: Final = ("ACT", "AGE", "USER", "BY", "KIND", "STREAM", "WRITER", "IDS", "OUTCOME", "WHY")

_as_json = click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")


@click.group("acts", cls=CommandGroup)
def acts() -> None:
    """What operators did: which user of Postgres, when, why, and what came of it."""


@acts.command("list")
@click.argument("stream", required=False)
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="So many, the newest.")
@_as_json
def acts_list(stream: str | None, limit: int, *, as_json: bool) -> None:
    """List the newest acts on all streams, or STREAM; also those that came to the control topic by other means."""
    with _database() as database:
        found = database.newest(stream, limit)
        if stream is not None and not found and not database.is_stream(stream):
            raise CommandFailed(f"there is no act on {stream}, and no such stream; `tidemark status` shows all")
    if as_json:
        click.echo(as_object({"acts": found}))
    else:
        click.echo(sanitize(_table(found, time.time())) if found else "no acts")


@acts.command("show")
@click.argument("number", type=click.IntRange(1))
@_as_json
def acts_show(number: int, *, as_json: bool) -> None:
    """Show all of the act NUMBER."""
    with _database() as database:
        found = database.numbered(number)
    if found is None:
        raise CommandFailed(f"there is no act {number}; `tidemark acts list` shows the newest")
    click.echo(as_object(found) if as_json else sanitize(_whole(found)))


@contextmanager
def _database() -> "Iterator[OverrideLog]":
    settings = loaded()
    with session_of(settings.postgres, "tidemark acts") as session:
        yield OverrideLog(session)


def _ids(it: "OverrideEntry") -> str:
    if not it.id:
        return ""
    return id_range(it.prev, it.id) if it.prev else f"up to {it.id}"


def _outcome(it: "OverrideEntry") -> str:
    if it.outcome is not None:
        return it.outcome
    return "not sent" if it.topic is None else "not seen"


def _table(found: "Sequence[OverrideEntry]", now: float) -> list[str]:
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
        for it in found
    ]
    return table(HEADINGS, rows, {"ACT"})


def _whole(it: "OverrideEntry") -> Iterator[str]:
    stream = "all streams" if it.stream == EVERY_STREAM else it.stream
    whose = f"{it.writer} in epoch {it.epoch} of {stream}" if it.writer else stream
    yield f"{it.kind} of {whose} {_ids(it)}".rstrip()
    yield f"when: {timestamp(it.time)}"
    yield f"who: {it.seen_as} as Postgres knew it, from {it.seen_from or 'a local socket'}; by {it.by}, as they said"
    yield f"why: {it.why}"
    if it.writer:  # else it is none of a writer's, and goes nowhere
        yield "sent: " + ("not known to be" if it.topic is None else f"{it.topic}/{it.partition} {it.offset}")
    yield f"outcome: {_outcome(it)}"
