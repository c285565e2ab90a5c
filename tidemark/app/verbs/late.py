"""`tidemark late`: list completions that came after their range was settled, and mark them as resolved."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from tidemark.app.commands import (
    CHECK_FAILED,
    CommandFailed,
    CommandGroup,
    add_change_options,
    load_settings,
    require_confirmation,
)
from tidemark.app.output import count, duration, id_range, join_escaped, json_text, table
from tidemark.sinks.postgres.database import session_of
from tidemark.sinks.postgres.inspect import LateCompletions

if TYPE_CHECKING:
    from tidemark.sinks.postgres.inspect import LateCompletions, StoredLateCompletion

HEADINGS: Final = ("NUMBER", "AGE", "STREAM", "WRITER", "EPOCH", "IDS", "FACTS", "WHY", "RESOLVED")

_as_json = click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")


@click.group("late", cls=CommandGroup)
def late() -> None:
    """List facts that completed after readers may have passed them, and mark them as resolved."""


@late.command("list")
@click.argument("stream", required=False)
@click.option("--all", "with_resolved", is_flag=True, help="Also list resolved late completions.")
@click.option(
    "--limit", type=click.IntRange(1), default=20, show_default=True, help="Largest number of completions to show."
)
@click.option("--check", is_flag=True, help="End with exit code 3 if any late completion is not resolved.")
@_as_json
def late_list(stream: str | None, limit: int, *, with_resolved: bool, check: bool, as_json: bool) -> None:
    """List the newest unresolved late completions of all streams, or of STREAM, newest first."""
    with _open_late_completions() as stored:
        completions = stored.newest(stream, limit, with_resolved=with_resolved)
        unresolved = stored.newest(stream, 1, with_resolved=False)
    if as_json:
        click.echo(json_text({"late": completions}))
    else:
        nothing = "no late completions" if with_resolved else "no unresolved late completions"
        click.echo(_table(completions, time.time()) if completions else nothing)
    if check and unresolved:
        raise SystemExit(CHECK_FAILED)


@late.command("resolve")
@click.argument("stream")
@click.argument("numbers", type=click.IntRange(1), nargs=-1, required=True, metavar="NUMBER...")
@add_change_options
def late_resolve(
    stream: str, numbers: Sequence[int], by: str, why: str, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Mark the late completions of STREAM with these numbers as resolved.

    Use this command if readers have processed the facts, or need not process them. The command changes no position and
    notifies no reader.
    """
    with _open_late_completions() as stored:
        completions = stored.with_numbers(stream, numbers)
        missing = sorted({*numbers} - {completion.number for completion in completions})
        if missing:
            raise CommandFailed(
                f"stream {stream} has no late completion with number {', '.join(map(str, missing))}:"
                " `tidemark late list --all` shows the numbers"
            )
        click.echo(_table(completions, time.time()), err=as_json)
        if not dry_run:
            require_confirmation(stream, "the stream's name", yes=yes)
            completions = stored.resolve(completions, by, why)
    if as_json:
        click.echo(json_text({"late": completions}))
    elif not dry_run:
        click.echo(
            f"resolved {count(len(completions), 'late completion')}, logged as override"
            f" {', '.join(str(completion.act) for completion in completions)}"
        )


@contextmanager
def _open_late_completions() -> "Iterator[LateCompletions]":
    settings = load_settings()
    with session_of(settings.postgres, "tidemark late") as session:
        yield LateCompletions(session)


def _table(completions: "Sequence[StoredLateCompletion]", now: float) -> str:
    rows = [
        (
            str(completion.number),
            duration(now - completion.time.timestamp()),
            completion.stream,
            completion.writer,
            str(completion.epoch),
            id_range(completion.prev, completion.id),
            str(completion.facts),
            completion.why,
            "" if completion.act is None else f"override {completion.act}",
        )
        for completion in completions
    ]
    return join_escaped(table(HEADINGS, rows))
