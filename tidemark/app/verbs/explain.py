"""`tidemark explain`: why a stream was stuck at a given time, which writer blocked it, and what unblocked it.

The history contains advances, gaps and operator overrides, but nothing about a writer without an advance. So a writer
that had not joined at that time is known only from its later advances.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from tidemark.app.commands import CommandFailed, OurCommand, loaded, no_stream
from tidemark.app.diagnosis import open_ranges
from tidemark.app.diagnosis.open_ranges import moment as moment_of
from tidemark.app.diagnosis.reader_lag import ReaderStatus, sentences
from tidemark.app.output import as_object, count, duration, echo, ids, sanitize
from tidemark.app.verbs import gaps
from tidemark.common.timestamps import timestamp
from tidemark.sinks.postgres.inspect import (
    AppliedOverride,
    BatchAdvance,
    LinearStay,
    OffsetRange,
    StoredGap,
    StreamInspection,
)
from tidemark.sinks.postgres.positions import EarlierWriter
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.streaming.core import codec
from tidemark.streaming.core.effects import BRIEF_WAIT
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.values.direction import beyond
from tidemark.streaming.values.limits import Evidence

MAX_STAYS = 20  # between two times: the first ones are explained
MAX_SHOWN = 10  # writers and advances of one explanation

EVIDENCE = {
    "facts": "seen",
    "empty": "void or announced as empty",
    "unseen": "settled by a JOIN; may contain facts that were never announced",
    "skipped": "settled by an operator",
}
CLOSED = {
    "completed": "its IDs completed",
    "joined": "its writer joined again",
    "retired": "its writer retired",
    "skipped": "an operator settled it",
}


@dataclass(frozen=True, slots=True)
class PastBlocker:
    """A writer whose position kept the linear position from moving.

    Attributes:
        writer: its name.
        epoch: its epoch.
        position: its position at the time, signed.
        gap: its nearest open gap; None if it had sent nothing beyond its position.
        retired: when it retired, if that unblocked the stream.
    """

    writer: str
    epoch: int
    position: int
    gap: StoredGap | None
    retired: datetime | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the linear position stayed at one ID. The fields after `blockers` describe the batch that unblocked the
    stream.

    Attributes:
        stream: its name.
        stay: the linear position, and the times between which it stayed.
        idle: no higher ID was allocated, so there are no blockers.
        blockers: the writers that kept the linear position from moving.
        moved: the advances beyond the linear position.
        joined: the writers whose first advance is in the batch.
        retired: the writers that retired.
        overrides: the operator overrides.
        batch: the number of the batch.
        offsets: the offsets that the batch read.
    """

    stream: str
    stay: LinearStay
    idle: bool
    blockers: list[PastBlocker]
    moved: list[BatchAdvance]
    joined: list[str]
    retired: list[str]
    overrides: list[AppliedOverride]
    batch: int | None
    offsets: list[OffsetRange]


def explain_at(past: StreamInspection, stream: str, encoded: bytes, when: datetime) -> Explanation | None:
    """Explain why a stream was stuck at the time `when`; None if the stored history begins later. `encoded`: the
    current state of the stream."""
    stay, now = past.linear_at(stream, when), codec.decode(encoded)
    if stay is None:
        return None
    line = now.direction.signed(now.linear.position)
    if stay.until is None and beyond(line, stay.linear):
        stay = replace(stay, went_to=line)
    return _explain_stay(past, stream, now, stay, when)


def _retirements(now: StreamState, stay: LinearStay) -> dict[str, datetime]:
    """By writer at or below the linear position, the time at which it retired during the stay. Only writers that the
    current state still has."""
    return {
        name: time
        for name, known in now.writers.items()
        if known.retired_at is not None and known.position <= abs(stay.linear)
        if stay.since < (time := moment_of(known.retired_at)) and (stay.until is None or time <= stay.until)
    }


def explain_between(
    past: StreamInspection, stream: str, encoded: bytes, since: datetime, until: datetime
) -> list[Explanation]:
    """Explain each stay of `BRIEF_WAIT` or longer between two times. Idle stays are left out. At most `MAX_STAYS`."""
    times = [since, *past.linear_moves(stream, since, until, timedelta(seconds=BRIEF_WAIT))]
    explanations: dict[int, Explanation] = {}
    for time in times:
        explanation = explain_at(past, stream, encoded, time)
        if explanation is not None and not explanation.idle and _seconds(explanation.stay, until) >= BRIEF_WAIT:
            explanations.setdefault(explanation.stay.linear, explanation)
        if len(explanations) == MAX_STAYS:
            break
    return [*explanations.values()]


def _explain_stay(
    past: StreamInspection, stream: str, now: StreamState, stay: LinearStay, when: datetime
) -> Explanation:
    # Look just before the stream was unblocked: only then are all blockers known. At `when` if it is still stuck.
    moment = when if stay.until is None else stay.until - timedelta(microseconds=1)
    gaps: dict[str, StoredGap] = {}
    for gap in past.gaps_at(stream, moment if stay.until is None else stay.until):
        if gap.opened <= moment:
            gaps.setdefault(gap.writer, gap)
    retired = _retirements(now, stay)
    # The stay may end by a batch without an advance: the linear position moved because writers retired.
    linear_move = None if stay.until is None else past.move_without_advance(stream, stay.until)
    epochs = {} if linear_move is None else linear_move.retired
    if linear_move is not None and stay.until is not None:
        retired |= dict.fromkeys(linear_move.retired, stay.until)
    blockers = [
        PastBlocker(
            writer.writer,
            epochs.get(writer.writer, writer.epoch),
            writer.position,
            gaps.get(writer.writer),
            retired.get(writer.writer),
        )
        for writer in past.writers_not_beyond(stream, moment, stay.linear)
        if writer.writer in retired or _was_blocker(writer, now, moment, gaps)
    ]
    moved = [] if stay.until is None else past.advances_at(stream, stay.until)
    batch = moved[0].batch if moved else None if linear_move is None else linear_move.batch
    return Explanation(
        stream,
        stay,
        not beyond(past.highest_id(stream, moment), stay.linear),
        blockers,
        [advance for advance in moved if beyond(advance.id, stay.linear)],
        [
            advance.writer
            for advance in moved
            if advance.prev == 0 and advance.writer not in {blocker.writer for blocker in blockers}
        ],
        sorted(name for name, time in retired.items() if time == stay.until),
        [] if stay.until is None else past.overrides_at(stream, stay.until),
        batch,
        [] if batch is None or stay.until is None else past.offsets(batch, stay.until),
    )


def _was_blocker(writer: EarlierWriter, now: StreamState, moment: datetime, gaps: dict[str, StoredGap]) -> bool:
    """Whether a writer at or below the linear position blocked the stream at the time `moment`: it had not retired, and
    it had a gap, or its next advance was not its first one."""
    known = now.writers.get(writer.writer)
    if (
        known is not None
        and known.retired_at is not None
        and writer.next_advance is None
        and known.retired_at <= moment.timestamp() * 1000
    ):
        return False
    return not writer.is_first or writer.writer in gaps


def _seconds(stay: LinearStay, until: datetime) -> float:
    return ((stay.until or until) - stay.since).total_seconds()


def to_text(explanations: Sequence[Explanation], now: datetime) -> str:
    return sanitize(line for explanation in explanations for line in _lines(explanation, now))


def _lines(explanation: Explanation, now: datetime) -> Iterator[str]:
    stay = explanation.stay
    since = timestamp(stay.since)
    if stay.until is None and stay.went_to is not None:
        yield f"{explanation.stream}: stuck at {stay.linear} from {since} until an unknown time"
    else:
        until = "until now" if stay.until is None else f"to {timestamp(stay.until)}"
        yield f"{explanation.stream}: stuck at {stay.linear} from {since} {until} ({duration(_seconds(stay, now))})"
    if explanation.idle:
        yield "  not blocked: no higher ID was allocated"
    else:
        yield from (f"  blocked by {_blocker(blocker)}" for blocker in explanation.blockers[:MAX_SHOWN])
        if len(explanation.blockers) > MAX_SHOWN:
            yield f"  blocked by {count(len(explanation.blockers) - MAX_SHOWN, 'more writer')}"
        if not explanation.blockers:
            yield "  the history names no blocker: a writer had not joined yet, or has retired since"
    yield from _unblocked(explanation)


def _blocker(blocker: PastBlocker) -> str:
    if blocker.gap is None:
        until = "" if blocker.retired is None else f", until it retired at {timestamp(blocker.retired)}"
        return f"{blocker.writer} (epoch {blocker.epoch}): no record beyond ID {blocker.position}{until}"
    gap = blocker.gap  # has the epoch of the open IDs; `blocker.epoch` may be later
    span = f"{blocker.writer} (epoch {gap.epoch}): {ids(gap.low, gap.top)} open from {timestamp(gap.opened)}"
    if gap.closed is None:
        return f"{span} until now"
    return f"{span} to {timestamp(gap.closed)}: {CLOSED.get(gap.closed_by or '', gap.closed_by)}"


def _unblocked(explanation: Explanation) -> Iterator[str]:
    stay = explanation.stay
    if stay.until is None:
        if stay.went_to is not None:
            yield f"  the linear position moved to {stay.went_to}; the stored history does not say when or why"
        return
    read = ", ".join(map(offsets, explanation.offsets))
    yield f"  unblocked by batch {explanation.batch}{f' ({read})' if read else ''}: it moved to {stay.went_to}"
    yield from (f"    {_move(move)}" for move in explanation.moved[:MAX_SHOWN])
    if explanation.retired:
        yield f"    retired: {', '.join(explanation.retired[:MAX_SHOWN])}"
    if explanation.joined:
        yield f"    first record of {', '.join(explanation.joined[:MAX_SHOWN])}"
    for act in explanation.overrides:
        yield f"    {act.kind} of {act.writer} (epoch {act.epoch}) up to ID {act.id}, by {act.by}: {act.why}"


def offsets(span: OffsetRange) -> str:
    """The offsets that a batch read of one partition, as text."""
    if span.first is None:
        return f"{span.topic}/{span.partition} up to {span.last}"
    return f"{span.topic}/{span.partition} {span.first}" + (f"..{span.last}" if span.last > span.first else "")


def _move(move: BatchAdvance) -> str:
    return f"{move.writer} (epoch {move.epoch}) moved from {move.prev} to {move.id}: {evidence(move.evidence)}"


def evidence(counts: Evidence) -> str:
    """The evidence of an advance as text, in the vocabulary of docs/design.md 1."""
    parts = [
        f"{name} {number} ({EVIDENCE[name]})" for name, number in zip(EVIDENCE, counts.counts, strict=True) if number
    ]
    return ", ".join(parts) or "no new evidence"


def _reader(reader: str, stream: str) -> list[ReaderStatus]:
    from tidemark.app.verbs import readers  # noqa: PLC0415 - only readers need redis-py, which is slow to import

    with readers.open_databases(None) as databases:
        return databases.existing(reader, stream)


class Moment(click.ParamType[datetime]):
    """A time in ISO 8601, or a time of day of today. UTC unless the value has an offset."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        now = datetime.now(UTC)
        try:
            moment = datetime.fromisoformat(f"{now.date()}T{value}" if re.match(r"\d\d:\d\d", value) else value)
        except ValueError:
            self.fail(
                f"{value!r} is not a time such as 10:03, 2026-11-22T10:03:05Z or 2026-11-22T10:03+01:00", param, ctx
            )
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


@click.command("explain", cls=OurCommand, context_settings={"allow_extra_args": True})
@click.argument("stream")
@click.option("--at", type=Moment(), help="Explain this time. Default: now.")
@click.option(
    "--between",
    type=Moment(),
    nargs=2,
    metavar="A B",
    help="Explain every wait of ten seconds or longer between two times.",
)
@click.option("--reader", help="First show what this reader of STREAM waits for.")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.pass_context
def explain(
    context: click.Context,
    stream: str,
    at: datetime | None,
    between: tuple[datetime, datetime] | None,
    reader: str | None,
    *,
    as_json: bool,
) -> None:
    """Show why STREAM was stuck at a given time, which writer blocked it, and what unblocked it."""
    if context.args:
        raise click.UsageError(
            f"unexpected argument {context.args[0]!r}: `tidemark explain` takes times, with --at or --between. For one"
            " ID, run: tidemark trace STREAM ID"
        )
    if at is not None and between is not None:
        raise click.UsageError("--at and --between cannot be given together")
    settings = loaded()
    now = datetime.now(UTC)
    statuses = [] if reader is None else _reader(reader, stream)
    if min(between or [at or now]) > now:
        raise click.UsageError("the time is in the future: give it in UTC, or with its offset")
    with StreamInspection(settings.postgres) as past:
        encoded = past.state(stream)
        if encoded is None:
            raise CommandFailed(no_stream(stream, past.stream_names()))
        if between is not None:
            since, until = min(between), min(max(between), now)
            begins = past.history_start(stream)
            if begins is None or begins > until:
                raise CommandFailed(f"the stored history of {stream} begins after the given time")
            explanations = explain_between(past, stream, encoded, since, until)
            if len(explanations) == MAX_STAYS and (last := explanations[-1].stay.until) is not None:
                click.echo(
                    f"only the first {MAX_STAYS} waits are shown; for more, begin --between at {timestamp(last)}",
                    err=True,
                )
            if begins > since:
                click.echo(f"the stored history of {stream} begins at {timestamp(begins)}", err=True)
        else:
            explanations = [
                explanation for explanation in [explain_at(past, stream, encoded, at or now)] if explanation is not None
            ]
    if not explanations and between is None:
        raise CommandFailed(f"the stored history of {stream} begins after the given time")
    if as_json:
        click.echo(as_object({"stays": explanations} | ({"readers": statuses} if statuses else {})))
        return
    for status in statuses:
        echo(sanitize(sentences(status, duration, now)))
    echo(
        to_text(explanations, now)
        if explanations
        else "the stream was not blocked for ten seconds or longer in this time"
    )
    if at is None and between is None:
        with Postgres(PostgresConfig(settings.postgres)) as postgres:
            open_now = open_ranges.read_open_ranges(
                postgres, {stream: encoded}, now.timestamp(), settings.policy_defaults
            )
        if open_now:
            echo(gaps.to_text(open_now, now.timestamp()))
