"""`tidemark explain`: why a stream's line stood where it stood, out of the history, in sentences.

The history has advances, gaps and operators' acts. It does not have who was there without an advance: a writer that had
not joined shows only by what it did later, and that is said so.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from tidemark.app import open_ranges
from tidemark.app.commands import CommandFailed, OurCommand, loaded, no_stream
from tidemark.app.lag_json import moment as moment_of
from tidemark.app.output import as_object, duration, id_range, sanitize, timestamp
from tidemark.app.verbs import gaps
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
from tidemark.streaming.core.linear_lag import HELD_AFTER
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.values.direction import beyond
from tidemark.streaming.values.limits import Evidence

STANDS = 20  # between two times: the first ones
SHOWN = 10  # writers and gaps of one of them

EVIDENCE = {
    "facts": "seen",
    "empty": "void, or announced to be",
    "unseen": "settled by a JOIN; facts may be there that nobody announced",
    "skipped": "settled by an operator",
}
CLOSED = {
    "completed": "its IDs completed",
    "joined": "its writer joined again",
    "retired": "its writer retired",
    "skipped": "an operator settled it",
}


@dataclass(frozen=True, slots=True)
class PastHolder:
    """A writer that had not passed the line, with the nearest gap of it that was open; None: it had told nothing beyond
    its position. `retired`: when it did, before anything else let the line go."""

    writer: str
    epoch: int
    position: int
    gap: StoredGap | None
    retired: datetime | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """`held_by` of a line that waited; none where nothing beyond it was known to be given out (`idle`). `moved`,
    `retired` and `acts` are of the batch that let it go, which took `offsets`; `joined` are those of its writers that
    told something for the first time."""

    stream: str
    stand: LinearStay
    idle: bool
    held_by: list[PastHolder]
    moved: list[BatchAdvance]
    joined: list[str]
    retired: list[str]
    acts: list[AppliedOverride]
    batch: int | None
    offsets: list[OffsetRange]


def explain_at(past: StreamInspection, stream: str, encoded: bytes, when: datetime) -> Explanation | None:
    """Of the time `when`; None where the history that is kept does not go as far back."""
    stand, now = past.stand(stream, when), codec.decode(encoded)
    if stand is None:
        return None
    line = now.direction.signed(now.linear.position)
    if stand.until is None and beyond(line, stand.linear):
        stand = replace(stand, went_to=line)
    return _explained(past, stream, now, stand, when)


def _retirements(now: StreamState, stand: LinearStay) -> dict[str, datetime]:
    """Of writers that had not passed the line while it stood, as far as the state keeps them."""
    return {
        name: time
        for name, known in now.writers.items()
        if known.retired is not None and known.position <= abs(stand.linear)
        if stand.since < (time := moment_of(known.retired)) and (stand.until is None or time <= stand.until)
    }


def explain_between(
    past: StreamInspection, stream: str, encoded: bytes, since: datetime, until: datetime
) -> list[Explanation]:
    """Of every place where the line waited for ten seconds or longer between the two times."""
    times = [since, *past.moves(stream, since, until, timedelta(seconds=HELD_AFTER))]
    found: dict[int, Explanation] = {}
    for time in times:
        it = explain_at(past, stream, encoded, time)
        if it is not None and not it.idle and _seconds(it.stand, until) >= HELD_AFTER:
            found.setdefault(it.stand.linear, it)
        if len(found) == STANDS:
            break
    return [*found.values()]


def _explained(past: StreamInspection, stream: str, now: StreamState, stand: LinearStay, when: datetime) -> Explanation:
    # Just before it was let go all that held it is known; of a line that stands still, now.
    moment = when if stand.until is None else stand.until - timedelta(microseconds=1)
    gaps: dict[str, StoredGap] = {}
    for gap in past.gaps(stream, moment if stand.until is None else stand.until):
        if gap.opened <= moment:
            gaps.setdefault(gap.writer, gap)
    retired = _retirements(now, stand)
    alone = None if stand.until is None else past.lone_move(stream, stand.until)
    epochs = {} if alone is None else alone.retired
    if alone is not None and stand.until is not None:
        retired |= dict.fromkeys(alone.retired, stand.until)
    holders = [
        PastHolder(it.writer, epochs.get(it.writer, it.epoch), it.position, gaps.get(it.writer), retired.get(it.writer))
        for it in past.behind(stream, moment, stand.linear)
        if it.writer in retired or _was_there(it, now, moment, gaps)
    ]
    moved = [] if stand.until is None else past.batch(stream, stand.until)
    batch = moved[0].batch if moved else None if alone is None else alone.batch
    return Explanation(
        stream,
        stand,
        not beyond(past.farthest(stream, moment), stand.linear),
        holders,
        [it for it in moved if beyond(it.id, stand.linear)],
        [it.writer for it in moved if it.prev == 0 and it.writer not in {holder.writer for holder in holders}],
        sorted(name for name, time in retired.items() if time == stand.until),
        [] if stand.until is None else past.acts(stream, stand.until),
        batch,
        [] if batch is None or stand.until is None else past.offsets(batch, stand.until),
    )


def _was_there(it: EarlierWriter, now: StreamState, moment: datetime, gaps: dict[str, StoredGap]) -> bool:
    """Whether the line waited for a writer that had not passed it: not for one that had retired, nor for one that was
    not there, as far as can be told."""
    known = now.writers.get(it.writer)
    if (
        known is not None
        and known.retired is not None
        and it.next is None
        and known.retired <= moment.timestamp() * 1000
    ):
        return False
    return not it.first or it.writer in gaps


def _seconds(stand: LinearStay, until: datetime) -> float:
    return ((stand.until or until) - stand.since).total_seconds()


def to_json(found: Sequence[Explanation]) -> str:
    return as_object({"stands": found})


def to_text(found: Sequence[Explanation], now: datetime) -> str:
    return sanitize(line for it in found for line in _lines(it, now))


def _lines(it: Explanation, now: datetime) -> Iterator[str]:
    stand = it.stand
    since = timestamp(stand.since)
    if stand.until is None and stand.went_to is not None:
        yield f"{it.stream}: the line stood at {stand.linear} from {since} to a time that the history does not tell"
    else:
        until = "now" if stand.until is None else timestamp(stand.until)
        lasted = duration(_seconds(stand, now))
        yield f"{it.stream}: the line stood at {stand.linear} from {since} to {until}, for {lasted}"
    if it.idle:
        yield "  nothing held it: no ID beyond it was known to be given out"
    else:
        yield from (f"  held by {_holder(one)}" for one in it.held_by[:SHOWN])
        if len(it.held_by) > SHOWN:
            yield f"  and by {len(it.held_by) - SHOWN} more"
        if not it.held_by:
            yield "  held by nobody whom the history knows: a writer that had not joined, or one that retired meanwhile"
    yield from _let_go(it)


def _holder(it: PastHolder) -> str:
    if it.gap is None:
        until = "" if it.retired is None else f", until it retired at {timestamp(it.retired)}"
        return f"{it.writer} (epoch {it.epoch}), which had told nothing beyond {it.position}{until}"
    gap = it.gap  # of the epoch that owed it: the writer's next advance may be of a later one
    what = f"{it.writer} (epoch {gap.epoch}), which owed {id_range(gap.low, gap.top)} since {timestamp(gap.opened)}"
    if gap.closed is None:
        return f"{what} and owes it still"
    return f"{what} until {timestamp(gap.closed)}: {CLOSED.get(gap.closed_by or '', gap.closed_by)}"


def _let_go(it: Explanation) -> Iterator[str]:
    if it.stand.until is None:
        if it.stand.went_to is not None:
            yield f"  the line went to {it.stand.went_to}, and nothing that is kept tells when or why"
        return
    read = ", ".join(map(offsets, it.offsets))
    yield f"  let go by batch {it.batch}{f', offsets {read}' if read else ''}: the line went to {it.stand.went_to}"
    yield from (f"    {_move(one)}" for one in it.moved[:SHOWN])
    if it.retired:
        yield f"    {', '.join(it.retired[:SHOWN])} retired, so the line waits for them no longer"
    if it.joined:
        yield f"    for the first time something was told by {', '.join(it.joined[:SHOWN])}"
    for act in it.acts:
        yield f"    {act.kind} of {act.writer} in epoch {act.epoch} up to {act.id}, by {act.by}: {act.why}"


def offsets(it: OffsetRange) -> str:
    if it.first is None:
        return f"{it.topic}/{it.partition} up to {it.last}"
    return f"{it.topic}/{it.partition} {it.first}" + (f"..{it.last}" if it.last > it.first else "")


def _move(it: BatchAdvance) -> str:
    return f"{it.writer} (epoch {it.epoch}) moved from {it.prev} to {it.id}: {evidence(it.evidence)}"


def evidence(counts: Evidence) -> str:
    """In the words of docs/design.md 1."""
    told = [f"{name} {count} ({EVIDENCE[name]})" for name, count in zip(EVIDENCE, counts.counts, strict=True) if count]
    return ", ".join(told) or "nothing told again"


class Moment(click.ParamType[datetime]):
    """ISO 8601, or a time of today; in UTC where nothing else is said."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        now = datetime.now(UTC)
        try:
            found = datetime.fromisoformat(f"{now.date()}T{value}" if re.match(r"\d\d:\d\d", value) else value)
        except ValueError:
            self.fail(f"{value!r} is no time such as 10:03, 2026-11-22T10:03:05Z or 2026-11-22T10:03+01:00", param, ctx)
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)


@click.command("explain", cls=OurCommand)
@click.argument("stream")
@click.option("--at", type=Moment(), help="Of this time; without it of now.")
@click.option(
    "--between", type=Moment(), nargs=2, metavar="A B", help="Of every stand of ten seconds or longer between the two."
)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
def explain(stream: str, at: datetime | None, between: tuple[datetime, datetime] | None, *, as_json: bool) -> None:
    """Show why the line of STREAM stood where it stood: who held it, from when to when, and what let it go."""
    if at is not None and between is not None:
        raise click.UsageError("--at and --between cannot be given together")
    settings = loaded()
    now = datetime.now(UTC)
    if min(between or [at or now]) > now:
        raise click.UsageError("that time is still to come: is it in UTC?")
    with StreamInspection(settings.postgres) as past:
        encoded = past.state(stream)
        if encoded is None:
            raise CommandFailed(no_stream(stream))
        if between is not None:
            since, until = min(between), min(max(between), now)
            begins = past.begins(stream)
            if begins is None or begins > until:
                raise CommandFailed(f"the history of {stream} that is kept does not go back to then")
            found = explain_between(past, stream, encoded, since, until)
            if len(found) == STANDS and (last := found[-1].stand.until) is not None:
                click.echo(f"these are the first {len(found)}; ask again from {last.isoformat()} on", err=True)
            if begins > since:
                click.echo(f"the history of {stream} that is kept begins at {timestamp(begins)}", err=True)
        else:
            found = [it for it in [explain_at(past, stream, encoded, at or now)] if it is not None]
    if not found and between is None:
        raise CommandFailed(f"the history of {stream} that is kept does not go back to then")
    if as_json:
        click.echo(to_json(found))
        return
    click.echo(to_text(found, now) if found else "the line never waited for ten seconds or longer")
    if at is None and between is None:
        with Postgres(PostgresConfig(settings.postgres)) as postgres:
            open_now = open_ranges.of(postgres, {stream: encoded}, now.timestamp(), settings.policy_defaults)
        if open_now:
            click.echo(gaps.to_text(open_now, now.timestamp()))
