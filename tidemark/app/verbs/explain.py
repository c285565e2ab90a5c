"""`tidemark explain`: why a stream was blocked at a given time, which writer blocked it, and what unblocked it.

The history contains advances, gaps and operator overrides, but nothing about a writer without an advance. So a writer
that had not joined at the given time is known only from its later advances.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from tidemark.app.commands import CommandFailed, Utf8Command, load_settings, unknown_stream_text
from tidemark.app.diagnosis import open_ranges
from tidemark.app.diagnosis.open_ranges import moment as moment_of
from tidemark.app.diagnosis.reader_lag import ReaderStatus, sentences
from tidemark.app.output import count, duration, echo, ids, join_escaped, json_text
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
from tidemark.streaming.core.effects import BRIEF_WAIT_SECONDS
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.values.direction import is_beyond
from tidemark.streaming.values.limits import Evidence

if TYPE_CHECKING:
    from tidemark.app.settings import Settings

MAX_STAYS = 20  # the largest number of stays that `explain_between` explains
MAX_SHOWN = 10  # writers and advances of one explanation in the text; the JSON has all

EVIDENCE_TEXTS = {
    "facts": "committed",
    "empty": "rolled back, or not used by this writer",
    "unseen": "settled by a JOIN; may contain facts that were never announced",
    "skipped": "settled by an operator",
}
CLOSED_TEXTS = {
    "completed": "its IDs completed",
    "joined": "its writer joined again",
    "retired": "its writer retired",
    "skipped": "an operator settled its IDs",
}


@dataclass(frozen=True, slots=True)
class PastBlocker:
    """A writer whose position kept the linear position from moving.

    Attributes:
        writer: the name of the writer.
        epoch: the epoch of the writer's next advance, or the current epoch if there is none.
        position: the position at the time, signed.
        gap: the writer's open gap that is nearest to 0; None if the writer had no gap.
        retired: the time at which the writer retired while the linear position stayed; None if it did not.
    """

    writer: str
    epoch: int
    position: int
    gap: StoredGap | None
    retired: datetime | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the linear position stayed at one ID.

    The fields after `blockers` describe the batch that moved the linear position. They are empty (`batch`: None) in two
    cases: no such batch is stored; or the stream was idle at the given time, and became blocked later.

    Attributes:
        stream: the name of the stream.
        stay: the linear position, and the times between which it stayed.
        idle: at the given time no higher ID was allocated, so there were no blockers.
        blockers: the writers that kept the linear position from moving.
        moved: the advances of the batch beyond the linear position.
        joined: the writers whose first advance is in the batch, without the `blockers`.
        retired: the writers that retired in the batch.
        overrides: the operator overrides that the batch applied.
        batch: the number of the batch; None if it is not stored.
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


def explain_at(history: StreamInspection, stream: str, encoded_state: bytes, when: datetime) -> Explanation | None:
    """Explain why a stream was blocked at the time `when`; None if the stored history begins later. `encoded_state`:
    the current state of the stream."""
    current = codec.decode(encoded_state)
    stay = _stay_at(history, stream, current, when)
    return None if stay is None else _explain_stay(history, stream, current, stay, when)


def _stay_at(history: StreamInspection, stream: str, current: StreamState, when: datetime) -> LinearStay | None:
    """Read the stay at the time `when`; None if the stored history begins later. If the history has no later move, but
    the current linear position is beyond the stay, `went_to` is the current linear position, and `until` is None."""
    stay, linear = history.linear_at(stream, when), current.direction.signed(current.linear.position)
    if stay is not None and stay.until is None and is_beyond(linear, stay.linear):
        return replace(stay, went_to=linear)
    return stay


def _retirements(current: StreamState, stay: LinearStay) -> dict[str, datetime]:
    """Writer -> time of its retirement, for the writers at or below the linear position that retired during the stay.
    Writers that have left the current state are left out."""
    return {
        name: time
        for name, known in current.writers.items()
        if known.retired_at is not None and known.position <= abs(stay.linear)
        if stay.since < (time := moment_of(known.retired_at)) and (stay.until is None or time <= stay.until)
    }


def explain_between(
    history: StreamInspection, stream: str, encoded_state: bytes, since: datetime, until: datetime
) -> list[Explanation]:
    """Explain the stays between two times in which the stream was blocked for `BRIEF_WAIT_SECONDS` or longer, oldest
    first; only the first `MAX_STAYS`. `encoded_state`: the current state of the stream."""
    current = codec.decode(encoded_state)
    explanations: dict[int, Explanation] = {}
    for time in [since, *history.linear_moves(stream, since, until, timedelta(seconds=BRIEF_WAIT_SECONDS))]:
        stay = _stay_at(history, stream, current, time)
        if stay is None or stay.linear in explanations or _blocked_seconds(stay, until) < BRIEF_WAIT_SECONDS:
            continue
        explanations[stay.linear] = _explain_stay(history, stream, current, stay, until)
        if len(explanations) == MAX_STAYS:
            break
    return [*explanations.values()]


def _blocked_seconds(stay: LinearStay, until: datetime) -> float:
    """How long the stream was blocked during the stay, up to `until` if the stay has not ended. 0 if the stream was not
    blocked, or became blocked after `until`."""
    if stay.blocked_since is None or stay.blocked_since > until:
        return 0.0
    return ((stay.until or until) - stay.blocked_since).total_seconds()


def _explain_stay(
    history: StreamInspection, stream: str, current: StreamState, stay: LinearStay, when: datetime
) -> Explanation:
    is_idle = stay.blocked_since is None or when < stay.blocked_since
    if is_idle and stay.blocked_since is not None:
        return Explanation(stream, stay, is_idle, [], [], [], [], [], None, [])
    # The blockers are those just before the stream was unblocked: only then are all of them known. If the stream is
    # still stuck, the blockers are those at the time `when`.
    moment = when if stay.until is None else stay.until - timedelta(microseconds=1)
    gaps: dict[str, StoredGap] = {}
    for gap in history.gaps_at(stream, moment if stay.until is None else stay.until):
        if gap.opened <= moment:
            gaps.setdefault(gap.writer, gap)
    retired = _retirements(current, stay)
    # The stay may end by a batch without an advance: the linear position moved because writers retired.
    linear_move = None if stay.until is None else history.move_without_advance(stream, stay.until)
    epochs = {} if linear_move is None else linear_move.retired_epochs
    if linear_move is not None and stay.until is not None:
        retired |= dict.fromkeys(linear_move.retired_epochs, stay.until)
    blockers = [
        PastBlocker(
            writer.writer,
            epochs.get(writer.writer, writer.epoch),
            writer.position,
            gaps.get(writer.writer),
            retired.get(writer.writer),
        )
        for writer in ([] if is_idle else history.writers_not_beyond(stream, moment, stay.linear))
        if writer.writer in retired or _was_blocker(writer, current, moment, gaps)
    ]
    moved = [] if stay.until is None else history.advances_at(stream, stay.until)
    batch = moved[0].batch if moved else None if linear_move is None else linear_move.batch
    return Explanation(
        stream,
        stay,
        is_idle,
        blockers,
        [advance for advance in moved if is_beyond(advance.id, stay.linear)],
        [
            advance.writer
            for advance in moved
            if advance.prev == 0 and advance.writer not in {blocker.writer for blocker in blockers}
        ],
        sorted(name for name, time in retired.items() if time == stay.until),
        [] if stay.until is None else history.overrides_at(stream, stay.until),
        batch,
        [] if batch is None or stay.until is None else history.offsets(batch, stay.until),
    )


def _was_blocker(writer: EarlierWriter, current: StreamState, moment: datetime, gaps: dict[str, StoredGap]) -> bool:
    """Whether a writer at or below the linear position blocked the stream at the time `moment`. False for a writer that
    had retired, and for a writer without a gap that made its first advance later, because it had not joined yet."""
    known = current.writers.get(writer.writer)
    if (
        known is not None
        and known.retired_at is not None
        and writer.next_advance is None
        and known.retired_at <= moment.timestamp() * 1000
    ):
        return False
    return not writer.is_first or writer.writer in gaps


def to_text(explanations: Sequence[Explanation], now: datetime) -> str:
    return join_escaped(line for explanation in explanations for line in _lines(explanation, now))


def _lines(explanation: Explanation, now: datetime) -> Iterator[str]:
    stay = explanation.stay
    if explanation.idle:
        until = stay.blocked_since or stay.until
        yield f"{explanation.stream}: idle at {stay.linear} from {_period_text(stay, stay.since, until, now)}"
        yield "  had nothing to wait for: no higher ID was allocated"
        if stay.blocked_since is not None:
            blocked_since = timestamp(stay.blocked_since).replace(" ", "T")
            yield f"  then blocked: tidemark explain {explanation.stream} --at {blocked_since}"
            return
    elif stay.blocked_since is None:
        age = duration((now - stay.since).total_seconds())
        yield (
            f"{explanation.stream}: stuck at {stay.linear}; the stored history shows only that the last advance was at"
            f" {timestamp(stay.since)} ({age} ago)"
        )
        return
    else:
        period = _period_text(stay, stay.blocked_since, stay.until, now)
        yield f"{explanation.stream}: stuck at {stay.linear} from {period}"
        if stay.blocked_since > stay.since:
            yield f"  idle before, from {timestamp(stay.since)}: no higher ID was allocated"
        yield from (
            f"  blocked by {_blocker_text(blocker, explanation)}" for blocker in explanation.blockers[:MAX_SHOWN]
        )
        if len(explanation.blockers) > MAX_SHOWN:
            yield f"  blocked by {count(len(explanation.blockers) - MAX_SHOWN, 'more writer')}"
        if not explanation.blockers:
            yield "  the history names no blocker: a writer had not joined yet, or has retired since"
    yield from _next_move_lines(explanation)


def _period_text(stay: LinearStay, begin: datetime, end: datetime | None, now: datetime) -> str:
    """The two times as text, with the duration between them. `end` is None if the state lasts until now, or until a
    time that is not stored."""
    since = timestamp(begin)
    if begin == stay.since and not stay.is_since_known:
        since += " or earlier (the stored history begins then)"
    if end is None and stay.went_to is not None:
        return f"{since} until an unknown time"
    until = "until now" if end is None else f"to {timestamp(end)}"
    return f"{since} {until} ({duration(((end or now) - begin).total_seconds())})"


def _blocker_text(blocker: PastBlocker, explanation: Explanation) -> str:
    if blocker.gap is None:
        until = "" if blocker.retired is None else f", until it retired at {timestamp(blocker.retired)}"
        return f"{blocker.writer} (epoch {blocker.epoch}): no record beyond ID {blocker.position}{until}"
    gap = blocker.gap  # has the epoch of the open IDs; `blocker.epoch` may be later
    span = f"{blocker.writer} (epoch {gap.epoch}): {ids(gap.low, gap.top)} open from {timestamp(gap.opened)}"
    if gap.closed is None:
        return f"{span} until now"
    return f"{span} to {timestamp(gap.closed)}: {_outcome_text(gap, explanation)}"


def _outcome_text(gap: StoredGap, explanation: Explanation) -> str:
    """How a gap was closed, as text. The evidence of an advance is a sum over its IDs: it shows what happened to the
    IDs of the gap only if the sum has one kind of evidence."""
    covering = [move for move in explanation.moved if move.writer == gap.writer and not is_beyond(gap.top, move.id)]
    if gap.closed_by == "completed" and covering and gap.closed == explanation.stay.until:
        facts, empty, *others = covering[0].evidence.counts
        if not any(others) and not (facts and empty):
            return "its IDs were committed" if facts else "its IDs were rolled back, or not used by this writer"
        return f"its IDs completed (tidemark trace {explanation.stream} {gap.top} shows how)"
    return CLOSED_TEXTS.get(gap.closed_by or "", str(gap.closed_by))


def _first_names(names: Sequence[str]) -> str:
    """The first `MAX_SHOWN` names as text, and the number of further names."""
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more


def _next_move_lines(explanation: Explanation) -> Iterator[str]:
    stay = explanation.stay
    if stay.until is None:
        if stay.went_to is not None:
            yield f"  the linear position moved to {stay.went_to}; the stored history does not show when or why"
        return
    offsets = ", ".join(map(offsets_text, explanation.offsets))
    verb = "moved" if explanation.idle else "unblocked"
    batch = f"batch {explanation.batch}{f' ({offsets})' if offsets else ''}"
    yield f"  {verb} by {batch}: the linear position moved to {stay.went_to}"
    yield from (f"    {_move_text(move)}" for move in explanation.moved[:MAX_SHOWN])
    if len(explanation.moved) > MAX_SHOWN:
        yield f"    {count(len(explanation.moved) - MAX_SHOWN, 'more advance')}"
    if explanation.retired:
        yield f"    retired: {_first_names(explanation.retired)}"
    if explanation.joined:
        yield f"    first record of {_first_names(explanation.joined)}"
    for override in explanation.overrides:
        subject = f"{override.kind} of {override.writer} (epoch {override.epoch})"
        yield f"    {subject} up to ID {override.id}, by {override.by}: {override.why}"


def offsets_text(span: OffsetRange) -> str:
    """The offsets that a batch read of one partition, as text."""
    if span.first is None:
        return f"{span.topic}/{span.partition} up to {span.last}"
    return f"{span.topic}/{span.partition} {span.first}" + (f"..{span.last}" if span.last > span.first else "")


def _move_text(move: BatchAdvance) -> str:
    return f"{move.writer} (epoch {move.epoch}) moved from {move.prev} to {move.id}: {evidence_text(move.evidence)}"


def evidence_text(evidence: Evidence) -> str:
    """The evidence of an advance as text, in the vocabulary of docs/design.md 1."""
    parts = [
        f"{name} {number} ({EVIDENCE_TEXTS[name]})"
        for name, number in zip(EVIDENCE_TEXTS, evidence.counts, strict=True)
        if number
    ]
    return ", ".join(parts) or "no new evidence"


def _read_reader_statuses(reader: str, stream: str) -> list[ReaderStatus]:
    from tidemark.app.verbs import readers  # noqa: PLC0415 - only readers need redis-py, which is slow to import

    with readers.open_databases(None) as databases:
        return databases.require_statuses(reader, stream)


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


@click.command("explain", cls=Utf8Command, context_settings={"allow_extra_args": True})
@click.argument("stream")
@click.option("--at", type=Moment(), help="Explain the stream at this time, in the format of --between. Default: now.")
@click.option(
    "--between",
    type=Moment(),
    nargs=2,
    metavar="A B",
    help=f"Explain the first {MAX_STAYS} waits of ten seconds or longer between the times A and B, such as 10:03"
    " (today) or 2026-11-22T10:03. UTC unless the time has an offset.",
)
@click.option("--reader", help="First show the state of this reader of STREAM, and why it lags.")
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
    """Show why STREAM was blocked at a given time, which writer blocked it, and what unblocked it."""
    if context.args:
        raise click.UsageError(
            f"unexpected argument {context.args[0]!r}: `tidemark explain` takes times, with --at or --between. For one"
            " ID, run: tidemark trace STREAM ID"
        )
    if at is not None and between is not None:
        raise click.UsageError("--at and --between cannot be given together")
    settings = load_settings()
    now = datetime.now(UTC)
    statuses = [] if reader is None else _read_reader_statuses(reader, stream)
    if min(between or [at or now]) > now:
        raise click.UsageError(
            "the time is in the future: give the time in UTC, or with a UTC offset, such as 2026-11-22T10:03+02:00"
        )
    with StreamInspection(settings.postgres) as history:
        encoded = history.state(stream)
        if encoded is None:
            raise CommandFailed(unknown_stream_text(stream, history.stream_names()))
        if between is not None:
            since, until = min(between), min(max(between), now)
            history_start = history.history_start(stream)
            if history_start is None or history_start > until:
                raise _history_error(stream, history_start)
            explanations = explain_between(history, stream, encoded, since, until)
            if len(explanations) == MAX_STAYS and (last := explanations[-1].stay.until) is not None:
                click.echo(
                    f"only the first {MAX_STAYS} waits are shown; for more, begin --between at {timestamp(last)}",
                    err=True,
                )
            if history_start > since:
                click.echo(f"the stored history of {stream} begins at {timestamp(history_start)}", err=True)
        else:
            explanation = explain_at(history, stream, encoded, at or now)
            if explanation is None:
                raise _history_error(stream, history.history_start(stream))
            explanations = [explanation]
    open_now = _read_open_ranges(settings, stream, encoded, now) if at is None and between is None else []
    if open_now and explanations[0].idle:  # the open range is not in the history: its writer has no gap and no advance
        explanations = [replace(explanations[0], idle=False)]
    if as_json:
        click.echo(json_text({"stays": explanations} | ({"readers": statuses} if statuses else {})))
        return
    for status in statuses:
        echo(join_escaped(sentences(status, duration, now)))
    echo(
        to_text(explanations, now)
        if explanations
        else "the stream was not blocked for ten seconds or longer in this time"
    )
    if open_now:
        echo(gaps.to_text(open_now, now.timestamp()))


def _read_open_ranges(
    settings: "Settings", stream: str, encoded_state: bytes, now: datetime
) -> list[open_ranges.OpenRange]:
    with Postgres(PostgresConfig(settings.postgres)) as postgres:
        return open_ranges.read_open_ranges(
            postgres, {stream: encoded_state}, now.timestamp(), settings.policy_defaults
        )


def _history_error(stream: str, history_start: datetime | None) -> CommandFailed:
    """The error for a time that the stored history does not cover."""
    if history_start is None:
        return CommandFailed(
            f"the stored history of {stream} has no move of the linear position: either it has never moved, or"
            f" retention has dropped the history. For the current state, run: tidemark gaps {stream}"
        )
    return CommandFailed(f"the stored history of {stream} begins at {timestamp(history_start)}, after the given time")
