"""`tidemark status`: where every stream stands, from Postgres, as a table for people or as JSON for programs."""

import curses
import itertools
import math
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import click
import msgspec

from tidemark.app import health, open_ranges
from tidemark.app.commands import CHECK_FAILED, Amount, CommandFailed, OurCommand, loaded, no_stream
from tidemark.app.health import PipelineCondition
from tidemark.app.lag_json import behind_answer, last_seen
from tidemark.app.output import as_object, duration, id_range, sanitize, table
from tidemark.app.verbs import gaps
from tidemark.common.errors import Unavailable
from tidemark.sinks.postgres.requeues import RequeueStatus
from tidemark.sinks.postgres.status import BridgeStatus, SinkFault
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.streaming.core import codec
from tidemark.streaming.core.effects import Blocker, Summary, summarize
from tidemark.streaming.core.linear_lag import Behind, Holder, is_brief

HEADINGS = ("STREAM", "LINEAR", "WRITER", "EPOCH", "POSITION", "PENDING", "LAST SEEN", "OLDEST GAP")
NUMBERS = {"LINEAR", "EPOCH", "POSITION", "PENDING"}


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """`last_seen` is when the pipeline read its newest record; None if none was noted."""

    writer: str
    epoch: int
    position: int
    retired: bool
    pending: int
    gaps: list[tuple[int, int]]
    last_seen: datetime | None


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """IDs are signed. `gaps` of a writer are open ranges `(low, top]`, nearest first. `faults`: sinks without it.
    `recalls`: what was put off and is on its way back. `bridge`: of a stream that `tidemark synapse` tells.
    """

    stream: str
    linear: int
    writers: list[WriterStatus]
    summary: Summary
    faults: list[SinkFault]
    recalls: list[RequeueStatus]
    bridge: BridgeStatus | None


def read(
    stored: Mapping[str, bytes],
    only: str | None = None,
    faults: Sequence[SinkFault] = (),
    recalls: Sequence[RequeueStatus] = (),
    bridges: Mapping[str, BridgeStatus] = {},
) -> list[StreamStatus]:
    """From the encoded states, by stream name."""
    return [
        _status(
            name,
            data,
            [it for it in faults if it.stream == name],
            [it for it in recalls if it.stream == name],
            bridges.get(name),
        )
        for name, data in sorted(stored.items())
        if only is None or name == only
    ]


def _status(
    name: str, data: bytes, faults: list[SinkFault], recalls: list[RequeueStatus], bridge: BridgeStatus | None
) -> StreamStatus:
    stream = codec.decode(data)
    signed = stream.direction.signed
    writers = [
        WriterStatus(
            writer,
            known.epoch,
            signed(known.position),
            known.retired is not None,
            known.chain.waiting,
            [(signed(low), signed(top)) for low, top, _ in known.chain.gaps()],
            last_seen(known.seen),
        )
        for writer, known in sorted(stream.writers.items())
    ]
    return StreamStatus(name, signed(stream.linear.position), writers, summarize(stream), faults, recalls, bridge)


def of(postgres: Postgres, stored: Mapping[str, bytes], only: str | None = None) -> list[StreamStatus]:
    """`read`, with what `postgres` tells of sinks without a stream, of what was put off, and of bridges."""
    asked = postgres.conditions
    return read(stored, only, asked.faults(), asked.requeues(), asked.bridges())


def to_json(streams: Sequence[StreamStatus], now: float, health: PipelineCondition) -> str:
    """One object; `now` (s since 1970) gives ages."""
    return as_object(plain(streams, now, health))


def plain(streams: Sequence[StreamStatus], now: float, health: PipelineCondition) -> dict[str, Any]:
    return {"pipeline": health.plain(), "streams": [_plain(stream, now) for stream in streams]}


def _plain(stream: StreamStatus, now: float) -> dict[str, Any]:
    oldest = stream.summary.oldest
    return {
        "stream": stream.stream,
        "linear": stream.linear,
        "writers": stream.writers,
        "pending": stream.summary.pending,
        "unknown_writers": stream.summary.unknown,
        "oldest_gap": None
        if oldest is None
        else {
            "writer": oldest.writer,
            "epoch": oldest.epoch,
            "low": None if oldest.unknown else oldest.low,
            "top": None if oldest.unknown else oldest.top,
            "unknown": oldest.unknown,
            "age_seconds": round(max(0.0, now - oldest.since / 1000), 1),
        },
        "behind": None if stream.summary.behind is None else _plain_behind(stream.summary.behind, now),
        "open_transactions": stream.summary.transactions,
        "deferred": stream.summary.deferred,
        "recalled": [
            {"writer": it.writer, "since": it.since, "gone": it.gone, "problem": it.problem} for it in stream.recalls
        ],
        "bridge": stream.bridge,
        "not_shown": [{"sink": it.sink, "since": it.since, "problem": it.problem} for it in stream.faults],
    }


def _plain_behind(behind: Behind, now: float) -> dict[str, Any]:
    """As the sidecar has it, and with ages."""
    plain: dict[str, Any] = msgspec.to_builtins(behind_answer(behind))
    sinces = [behind.since, *(it.since for it in behind.holders)]
    for it, since in zip([plain, *plain["held_by"]], sinces, strict=True):
        it["age_seconds"] = None if since is None else round(max(0.0, now - since / 1000), 1)
    return plain


def to_table(streams: Sequence[StreamStatus], now: float) -> str:
    """One line per writer; the stream's own figures stand on its first line. Below them whether a bridge tells it, who
    holds a line, the transactions that hold a stream, where its writer tells, what was put off of a writer, and sinks
    that lack a stream.
    """
    rows = [row for stream in streams for row in _rows(stream, now)]
    lines = table(HEADINGS, rows, NUMBERS)
    lines += [f"{it.stream}: {_told(it.bridge, it.writers, now)}" for it in streams if it.bridge is not None]
    lines += [f"{stream.stream}: {line}" for stream in streams for line in _held(stream.summary.behind, now)]
    lines += [
        f"{stream.stream}: open at {writer}: {transaction}"
        for stream in streams
        for writer, transactions in sorted(stream.summary.transactions.items())
        for transaction in transactions
    ]
    lines += [
        f"{stream.stream}: records of {name.rpartition('/')[0]} are put off: too much of it is pending; they come again"
        for stream in streams
        for name in stream.summary.deferred
    ]
    lines += [f"{it.stream}: {_recalled(it, now)}" for stream in streams for it in stream.recalls]
    lines += [
        f"{stream.stream} is not shown in {it.sink}, for {duration(now - it.since.timestamp())}: {it.problem}"
        for stream in streams
        for it in stream.faults
    ]
    return sanitize(lines)


def _told(bridge: BridgeStatus, writers: Sequence[WriterStatus], now: float) -> str:
    if bridge.speaks is None:
        return "told by a bridge to Synapse; only the primary of this Postgres knows whether it runs"
    if bridge.speaks:
        age = "" if bridge.since is None else f", for {duration(now - bridge.since.timestamp())}"
        return f"a bridge to Synapse tells it{age}"
    seen = max((it.last_seen.timestamp() for it in writers if it.last_seen), default=None)
    last = "nothing of it was noted" if seen is None else f"the last that it told is {duration(now - seen)} old"
    return f"no bridge to Synapse tells it now; {last}"


def _held(behind: Behind | None, now: float) -> Iterable[str]:
    """Nothing of a line that waits no longer than a transaction may take."""
    if behind is None or is_brief(behind.since, now):
        return
    age = "" if behind.since is None else f", for {duration(now - behind.since / 1000)}"
    yield f"the line is {behind.ids} {'ID' if behind.ids == 1 else 'IDs'} behind{age}"
    for holder in behind.holders:
        yield f"held by {held_by(holder, now)}"
    if (more := behind.count - len(behind.holders)) > 0:
        yield f"and by {more} more"


def held_by(holder: Holder, now: float) -> str:
    """The writer, why the line waits for it, and when it was last heard of."""
    why = {
        "unknown": "has not joined",
        "gap": f"owes IDs beyond {holder.position}",
        "transaction": f"has a transaction open beyond {holder.position}",
        "silent": f"has told nothing beyond {holder.position}",
    }[holder.reason]
    seen = f"last seen {duration(now - holder.seen / 1000)} ago" if holder.seen else "no record of it was noted"
    return f"{holder.writer} (epoch {holder.epoch}), which {why}; {seen}"


def _recalled(it: RequeueStatus, now: float) -> str:
    if it.gone:
        why = it.problem or "retention, or its limit of size"
        return (
            f"up to {it.gone} records of {it.writer} that were put off are gone from partition {it.partition} ({why});"
            " what is open waits for its next JOIN"
        )
    hindered = f": {it.problem}" if it.problem else ""
    return f"records of {it.writer} that were put off come again, for {duration(now - it.since.timestamp())}{hindered}"


def _rows(stream: StreamStatus, now: float) -> Iterable[tuple[str, ...]]:
    head = [stream.stream, str(stream.linear)]
    oldest = "" if stream.summary.oldest is None else described(stream.summary.oldest, now)
    for writer in stream.writers:
        epoch = f"{writer.epoch} retired" if writer.retired else str(writer.epoch)
        seen = "" if writer.last_seen is None else f"{duration(now - writer.last_seen.timestamp())} ago"
        yield (*head, writer.writer, epoch, str(writer.position), str(writer.pending), seen, oldest)
        head, oldest = ["", ""], ""
    for name in stream.summary.unknown:
        writer_name, _, epoch = name.rpartition("/")
        yield (*head, writer_name, epoch, "not joined", "", "", oldest)
        head, oldest = ["", ""], ""


def described(blocker: Blocker, now: float) -> str:
    """Who holds what back, and for how long."""
    age = duration(now - blocker.since / 1000)
    if blocker.unknown:
        return f"{blocker.writer} (epoch {blocker.epoch}) has not joined, for {age}"
    return f"{blocker.writer} owes {id_range(blocker.low, blocker.top)}, for {age}"


@click.command("status", cls=OurCommand)
@click.argument("stream", required=False)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.option(
    "--check", is_flag=True, help="End with exit code 3 where the pipeline behind the positions has problems."
)
@click.pass_context
def status(context: click.Context, stream: str | None, *, as_json: bool, check: bool) -> None:
    """Show how far every stream (or STREAM) and its writers are, who holds them back, and how the pipeline is."""
    settings = loaded()
    with Postgres(PostgresConfig(settings.postgres)) as postgres:
        postgres.check_readable()
        found = of(postgres, postgres.states(), stream)
        how = health.of(settings, postgres)
    if stream is not None and not found:
        raise CommandFailed(no_stream(stream))
    if as_json:
        click.echo(to_json(found, time.time(), how))
    else:
        click.echo(to_table(found, time.time()) if found else "no streams yet: nothing has been read from Kafka")
        click.echo("\n".join([how.line(), *(f"problem: {problem}" for problem in how.problems())]))
    if check and how.problems():
        context.exit(CHECK_FAILED)


@click.command("top", cls=OurCommand)
@click.argument("stream", required=False)
@click.option("--every", type=Amount(min=0.2), default=2.0, show_default=True, help="Seconds between looks.")
@click.option("--times", type=click.IntRange(1), help="End after so many looks; without it at Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="For programs: a JSON object per line and look.")
def top(stream: str | None, every: float, times: int | None, *, as_json: bool) -> None:
    """Show what `tidemark status` and `tidemark gaps` say, live; a server that is away is waited for."""
    settings = loaded()
    with Postgres(PostgresConfig(settings.postgres)) as postgres:
        postgres.check_readable()
        for look in itertools.count(1):
            try:
                stored = postgres.states(None if stream is None else [stream])
                how = health.of(settings, postgres)
                now = time.time()
                found = of(postgres, stored)
                held = open_ranges.of(postgres, stored, now, settings.policy_defaults)
            except Unavailable as problem:
                click.echo(str(problem), err=True)
            else:
                if stream is not None and not stored:
                    raise CommandFailed(no_stream(stream))
                if as_json:
                    click.echo(msgspec.json.encode({**plain(found, now, how), "gaps": held}))
                else:
                    problems = [f"problem: {problem}" for problem in how.problems()]
                    text = [how.line(), *problems, gaps.to_text(held, now) if held else "nothing is held back"]
                    _show([*text, "", to_table(found, now)])
            if look == times:
                break
            time.sleep(every)


def _show(parts: Sequence[str]) -> None:
    """On a terminal in the place of what was shown before, and no more than it has room for: what is held comes
    first."""
    lines = "\n".join(parts).splitlines()
    if sys.stdout.isatty():
        click.echo(_clearing(), nl=False)
        lines = fitting(lines, *shutil.get_terminal_size())
    click.echo("\n".join(lines))


def _clearing() -> str:
    """What clears this terminal; nothing for one that cannot be cleared, which shows one look below the other."""
    try:
        curses.setupterm()
    except curses.error:  # nobody knows it
        return "\033[2J\033[1;1H"
    return (curses.tigetstr("clear") or b"").decode()


def fitting(lines: Sequence[str], columns: int, rows: int) -> list[str]:
    """The first of them for which a terminal of that size, which breaks long ones, has room and a row left over."""
    taken = itertools.accumulate(max(1, math.ceil(len(line) / max(1, columns))) for line in lines)
    return [line for line, upto in zip(lines, taken, strict=True) if upto < rows]
