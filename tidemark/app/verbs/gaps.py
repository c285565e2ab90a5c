"""`tidemark gaps`: the open IDs that block positions, and what to do about them."""

import shlex
import time
from collections.abc import Iterator, Sequence

import click

from tidemark.app.commands import CHECK_FAILED, CommandFailed, Utf8Command, load_settings, unknown_stream_text
from tidemark.app.diagnosis import open_ranges
from tidemark.app.diagnosis.open_ranges import OpenRange, shell_arguments
from tidemark.app.output import count, duration, echo, id_range, ids, join_escaped, json_text
from tidemark.sinks.postgres.store import Postgres, PostgresConfig

MAX_SHOWN = 10  # gaps of one writer in the text; the JSON has all
NO_GAPS = "no gaps: nothing is blocked"


def to_json(open_gaps: Sequence[OpenRange]) -> str:
    return json_text({"gaps": open_gaps})


def to_text(open_gaps: Sequence[OpenRange], now: float) -> str:
    """The open ranges as text. For each writer in an epoch: a line for each of the first `MAX_SHOWN` ranges, the number
    of further ranges, and the remedy."""
    lines: list[str] = []
    writers: dict[tuple[str, str, int], list[OpenRange]] = {}
    for gap in open_gaps:
        writers.setdefault((gap.stream, gap.writer, gap.epoch), []).append(gap)
    for ranges in writers.values():
        lines += [_range_line(gap, now) for gap in ranges[:MAX_SHOWN]]
        if len(ranges) > MAX_SHOWN:
            lines.append(f"{ranges[0].stream}: {ranges[0].writer}: {count(len(ranges) - MAX_SHOWN, 'more gap')}")
        lines += _remedy_lines(ranges[0])
    return join_escaped(lines)


def _range_line(gap: OpenRange, now: float) -> str:
    age = "" if gap.since is None else f" for {duration(now - gap.since.timestamp())}"
    writer = gap.writer
    if gap.low is None:
        writer, state = f"{gap.writer} (epoch {gap.epoch})", f"has not joined{age}"
    elif gap.top is None and gap.verdict in ("no heartbeat", "blocked"):
        return f"{gap.stream}: {writer}: {gap.verdict}{age}; position {gap.low}"
    elif gap.top is None:
        state = f"no record beyond ID {gap.low}{age}"
    else:
        state = f"{ids(gap.low, gap.top)} open{age}"
    pending = ""
    if gap.waiting:
        facts = f", {gap.facts} with facts" if gap.facts < gap.waiting else ""
        pending = f"; {count(gap.waiting, 'complete ID')} {'is' if gap.waiting == 1 else 'are'} pending{facts}"
    return f"{gap.stream}: {writer}: {state}; {_verdict_text(gap, now)}{pending}"


def _verdict_text(gap: OpenRange, now: float) -> str:
    """The verdict on the writer as text, with the age of its newest record."""
    if gap.last_seen is None:
        return "no record was ever read"
    age = duration(now - gap.last_seen.timestamp())
    match gap.verdict:
        case "silent":
            return f"no record for {age}"
        case "no heartbeat":
            return f"no heartbeat for {age}"
        case "open transaction":
            return f"transaction open, last record {age} ago"
        case "unknown":
            return f"last record {age} ago"
    return f"{gap.verdict}, last record {age} ago"


def _remedy_lines(gap: OpenRange) -> Iterator[str]:
    yield from (f"    open transaction: {transaction}" for transaction in gap.transactions)
    yield f"    {gap.advice} {gap.verb}".rstrip()
    if gap.verdict in ("silent", "fenced") and gap.low is not None and gap.top is not None:
        words = shlex.join(shell_arguments(gap.stream, gap.writer, id_range(gap.low, gap.top)))
        command = f'tidemark skip --by "$USER" --why "lost" {words}'
        yield f"    If the writer runs and will never complete these IDs: {command}"


@click.command("gaps", cls=Utf8Command)
@click.argument("stream", required=False)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.option("--check", is_flag=True, help="End with exit code 3 if there is a gap or a silent writer.")
@click.pass_context
def gaps(context: click.Context, stream: str | None, *, as_json: bool, check: bool) -> None:
    """Show the gaps and silent writers of all streams, or of STREAM, and what to do about each of them."""
    settings = load_settings()
    with Postgres(PostgresConfig(settings.postgres)) as postgres:
        postgres.check_readable()
        stored = postgres.states(None if stream is None else [stream])
        if stream is not None and not stored:
            raise CommandFailed(unknown_stream_text(stream, postgres.streams()))
        open_gaps = open_ranges.read_open_ranges(postgres, stored, time.time(), settings.policy_defaults)
    if as_json:
        click.echo(to_json(open_gaps))
    else:
        echo(to_text(open_gaps, time.time()) if open_gaps else NO_GAPS)
    if check and open_gaps:
        context.exit(CHECK_FAILED)
