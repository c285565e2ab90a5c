"""`tidemark overrides`: list operator overrides, with author, Postgres user, reason and outcome."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from tidemark.app.commands import CommandFailed, CommandGroup, load_settings
from tidemark.app.output import duration, id_range, join_escaped, json_text, table
from tidemark.common.timestamps import timestamp
from tidemark.sinks.postgres.database import session_of
from tidemark.sinks.postgres.operators import EVERY_STREAM, OverrideLog

if TYPE_CHECKING:
    from tidemark.sinks.postgres.operators import OverrideEntry, OverrideLog

HEADINGS: Final = ("NUMBER", "AGE", "USER", "BY", "KIND", "STREAM", "WRITER", "IDS", "OUTCOME", "WHY")

_as_json = click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")


@click.group("overrides", cls=CommandGroup)
def overrides() -> None:
    """List operator overrides: author, Postgres user, time, reason and outcome."""


@overrides.command("list")
@click.argument("stream", required=False)
@click.option(
    "--limit", type=click.IntRange(1), default=20, show_default=True, help="Largest number of overrides to show."
)
@_as_json
def overrides_list(stream: str | None, limit: int, *, as_json: bool) -> None:
    """List the newest overrides of all streams, or of STREAM, newest first. Includes overrides that other programs sent
    and the pipeline applied."""
    with _open_override_log() as override_log:
        entries = override_log.newest(stream, limit)
        if stream is not None and not entries and not override_log.has_stream(stream):
            raise CommandFailed(
                f"there is no stream {stream} and no override of it; `tidemark status` shows all streams"
            )
    if as_json:
        click.echo(json_text({"overrides": entries}))
    else:
        click.echo(join_escaped(_table(entries, time.time())) if entries else "no overrides")


@overrides.command("show")
@click.argument("number", type=click.IntRange(1))
@_as_json
def overrides_show(number: int, *, as_json: bool) -> None:
    """Show the override NUMBER with all its fields."""
    with _open_override_log() as override_log:
        entry = override_log.with_number(number)
    if entry is None:
        raise CommandFailed(f"there is no override {number}; `tidemark overrides list` shows the newest")
    click.echo(json_text(entry) if as_json else join_escaped(_detail_lines(entry)))


@contextmanager
def _open_override_log() -> "Iterator[OverrideLog]":
    settings = load_settings()
    with session_of(settings.postgres, "tidemark overrides") as session:
        yield OverrideLog(session)


def _ids_text(entry: "OverrideEntry") -> str:
    if not entry.id:
        return ""
    return id_range(entry.prev, entry.id) if entry.prev else f"up to {entry.id}"


def _outcome_text(entry: "OverrideEntry") -> str:
    if entry.outcome is not None:
        return entry.outcome
    return "not sent" if entry.topic is None else "not seen"


def _table(entries: "Sequence[OverrideEntry]", now: float) -> list[str]:
    rows = [
        (
            "" if entry.number is None else str(entry.number),
            duration(now - entry.time.timestamp()),
            entry.seen_as or "unknown",
            entry.by,
            entry.kind,
            entry.stream,
            entry.writer,
            _ids_text(entry),
            _outcome_text(entry),
            entry.why,
        )
        for entry in entries
    ]
    return table(HEADINGS, rows, {"NUMBER"})


def _detail_lines(entry: "OverrideEntry") -> Iterator[str]:
    stream = "all streams" if entry.stream == EVERY_STREAM else entry.stream
    subject = f"{entry.writer} (epoch {entry.epoch}) of {stream}" if entry.writer else stream
    yield f"{entry.kind} of {subject} {_ids_text(entry)}".rstrip()
    yield f"when: {timestamp(entry.time)}"
    yield f"who: {entry.by}; user {entry.seen_as} of Postgres, from {entry.seen_from or 'a local socket'}"
    yield f"why: {entry.why}"
    if entry.writer:  # only overrides of a writer are sent to Kafka
        yield "sent: " + ("unknown" if entry.topic is None else f"{entry.topic}/{entry.partition} {entry.offset}")
    yield f"outcome: {_outcome_text(entry)}"
