"""`tidemark gaps`: what holds positions back, as lines for people and as JSON for programs."""

import shlex
import time
from collections.abc import Iterator, Sequence

import click

from tidemark.app import open_ranges
from tidemark.app.commands import CHECK_FAILED, CommandFailed, OurCommand, loaded, no_stream
from tidemark.app.open_ranges import OpenRange
from tidemark.app.output import as_object, duration, id_range, sanitize
from tidemark.app.remedies import arguments
from tidemark.sinks.postgres.store import Postgres, PostgresConfig

SHOWN = 10  # gaps of one writer in the text; the JSON has all


def to_json(found: Sequence[OpenRange]) -> str:
    return as_object({"gaps": found})


def to_text(found: Sequence[OpenRange], now: float) -> str:
    """A line for each, and below the last one of a writer its transactions and the verb."""
    lines: list[str] = []
    writers: dict[tuple[str, str, int], list[OpenRange]] = {}
    for it in found:
        writers.setdefault((it.stream, it.writer, it.epoch), []).append(it)
    for ranges in writers.values():
        lines += [_line(it, now) for it in ranges[:SHOWN]]
        if len(ranges) > SHOWN:
            lines.append(f"{ranges[0].stream}: {ranges[0].writer} has {len(ranges) - SHOWN} gaps more")
        lines += _remedy(ranges[0])
    return sanitize(lines)


def _line(it: OpenRange, now: float) -> str:
    if it.low is None:
        what = "has not joined"
    elif it.top is None:
        what = f"has told nothing beyond {it.low}"
    else:
        what = f"owes {id_range(it.low, it.top)}"
    age = "" if it.since is None else f", for {duration(now - it.since.timestamp())}"
    seen = "never seen" if it.last_seen is None else f"last seen {duration(now - it.last_seen.timestamp())} ago"
    waits = f"; {it.waiting} IDs wait, {it.facts} with a fact" if it.waiting else ""
    return f"{it.stream}: {it.writer} (epoch {it.epoch}) {what}{age}: {it.verdict}, {seen}{waits}"


def _remedy(it: OpenRange) -> Iterator[str]:
    yield from (f"    open: {transaction}" for transaction in it.transactions)
    yield f"    {it.advice} {it.verb}".rstrip()
    if it.verdict in ("silent", "fenced") and it.low is not None and it.top is not None:
        words = shlex.join(arguments(it.stream, it.writer, id_range(it.low, it.top)))
        yield f'    If it lives on and these IDs are lost: tidemark skip --by "$USER" --why "lost" {words}'


@click.command("gaps", cls=OurCommand)
@click.argument("stream", required=False)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.option("--check", is_flag=True, help="End with exit code 3 where anything is held back.")
@click.pass_context
def gaps(context: click.Context, stream: str | None, *, as_json: bool, check: bool) -> None:
    """Show every gap and silent writer of all streams (or STREAM), and the command that would settle it."""
    settings = loaded()
    with Postgres(PostgresConfig(settings.postgres)) as postgres:
        postgres.check_readable()
        stored = postgres.states(None if stream is None else [stream])
        found = open_ranges.of(postgres, stored, time.time(), settings.policy_defaults)
    if stream is not None and not stored:
        raise CommandFailed(no_stream(stream))
    if as_json:
        click.echo(to_json(found))
    else:
        click.echo(to_text(found, time.time()) if found else "nothing is held back")
    if check and found:
        context.exit(CHECK_FAILED)
