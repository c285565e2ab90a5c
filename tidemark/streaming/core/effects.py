"""Effects: the changes of a shard's streams by a batch, and their new states. The state machine has no other output.

IDs are signed. "Beyond" means farther from 0, so sinks compare magnitudes. Equal input gives equal bytes: lists are
sorted, and the only clock is the time of the batch (`now`, ms since 1970). The driver passes the effects to the sinks.

*Linear lag* is how far the linear position is below the highest allocated ID. Each active writer that has not settled
the next ID blocks the linear position, and so does each writer that never joined. A writer can block the linear
position without a gap: a gap appears only when the writer completes a higher ID.

`Summary` and `blockers` describe a stream's state for people. This module must not import numpy: services that only
read import this module, and do not need numpy.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.limits import Evidence, RejectedRecords

if TYPE_CHECKING:
    from tidemark.streaming.core.stream import StreamState
    from tidemark.streaming.core.writer_table import BlockingWriter

BlockReason = Literal["transaction", "gap", "silent", "unknown"]

BLOCKERS_MAX = 10
"""The largest number of blockers of a stream that are named (`LinearLag.blockers`)."""

BRIEF_WAIT_SECONDS = 10.0
"""Lags and blockers younger than this are not reported to people, because a normal transaction may take that long."""


class LinearBlocker(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A writer that blocks the linear position, with the reason, for people. IDs are signed.

    Attributes:
        reason: `transaction`: the writer reported an open transaction. `gap`: the writer completed IDs above open ones.
            `silent`: the writer has sent nothing beyond `position`. `unknown`: the writer never joined.
        position: position of the writer's chain; 0 if the writer never joined.
        since: time (ms) at which the writer began to block. This is the start of its oldest gap, or the first record of
            an unknown writer. For other writers it is the start of the linear lag; None if that is not known.
        last_seen: time (ms) of the batch that read the writer's newest record; 0 if unknown.
    """

    writer: str
    epoch: int
    reason: BlockReason
    position: int
    since: int | None
    last_seen: int


class LinearLag(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How far the linear position is below the allocated IDs.

    Attributes:
        id_count: the distance in IDs. It may be 0 if unknown writers block the linear position.
        since: start of the lag (ms since 1970): the time of the batch that allocated the first ID beyond the linear
            position. If this time is not stored: the earliest known time at which a blocker began to block. None if no
            blocker has a known time.
        blockers: up to `BLOCKERS_MAX` writers that block the linear position: unknown writers first, then the writers
            with the lowest positions.
        blocker_count: number of all writers that block the linear position.
    """

    id_count: int
    since: int | None
    blockers: list[LinearBlocker]
    blocker_count: int


def is_brief(since: int | None, now: float) -> bool:
    """True if at `now` (s) less than `BRIEF_WAIT_SECONDS` have passed since `since` (ms). False if `since` is None."""
    return since is not None and now - since / 1000 < BRIEF_WAIT_SECONDS


def linear_lag(stream: "StreamState") -> LinearLag | None:
    """The linear lag of a stream, with signed positions of blockers. None if the stream has neither a lag nor unknown
    writers."""
    ids = stream.allocated - stream.linear.position
    if ids <= 0 and not stream.unjoined:
        return None
    unknown = sorted((writer.since, name, epoch, writer.last_seen) for (name, epoch), writer in stream.unjoined.items())
    lowest, count = stream.writers.blocking_writers(stream.linear.position, BLOCKERS_MAX)
    heads = stream.linear.heads
    sinces = (
        [heads[0][1]]
        if heads
        else [*(first for first, *_ in unknown), *(writer.open_since for writer in lowest if writer.open_since)]
    )
    since = min(sinces, default=None)
    blockers = [
        LinearBlocker(name, epoch, "unknown", 0, first, seen) for first, name, epoch, seen in unknown[:BLOCKERS_MAX]
    ]
    blockers += [_blocker(stream, writer, since) for writer in lowest]
    return LinearLag(ids, since, blockers[:BLOCKERS_MAX], len(unknown) + count)


def _blocker(stream: "StreamState", writer: "BlockingWriter", since: int | None) -> LinearBlocker:
    reason: BlockReason = "gap" if writer.open_since else "silent"
    if writer.name in stream.transactions:
        reason = "transaction"
    position = stream.direction.signed(writer.position)
    return LinearBlocker(writer.name, writer.epoch, reason, position, writer.open_since or since, writer.last_seen)


class WriterAdvance(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The move of a writer's position from `prev` to `id`. At most one per writer, stream and batch.

    `facts`, `empty`, `unseen` and `skipped` are the evidence of the IDs in `(prev, id]`. `oldest` is the lowest Kafka
    time (ms) of the records that may have changed the writer's state in the batch.
    """

    writer: str
    epoch: int
    prev: int
    id: int
    facts: int
    empty: int
    unseen: int
    skipped: int
    oldest: int

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.facts, self.empty, self.unseen, self.skipped)


class WriterRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A joined writer after the batch. Only for writers whose position, epoch or retirement has changed."""

    writer: str
    epoch: int
    position: int
    is_retired: bool


class Gap(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The gap `(low, top]` of `writer`, open since `since` (ms). `low` may change; `top` identifies the gap."""

    writer: str
    epoch: int
    low: int
    top: int
    since: int


class ClosedGap(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The gap `top` of `writer` has closed. `how`: what closed the gap (`core.chain.SettledBy`)."""

    writer: str
    top: int
    how: str


class LateCompletion(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Late completions in `(prev, id]`: the range had been settled without them.

    Attributes:
        facts: number of facts among the completions.
        why: see `core.classify.LateReason`.
    """

    writer: str
    epoch: int
    prev: int
    id: int
    facts: int
    why: str


class RequeuedRange(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The offsets `first_offset` to `last_offset` (included) of a partition, with deferred records of a writer that now
    have room.

    The publisher produces the records of this writer and epoch in the range to the facts topic again.
    """

    writer: str
    epoch: int
    partition: int
    first_offset: int
    last_offset: int


class OperatorOverride(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A marker from the control topic that was not rejected, for the audit table. `kind`: SKIP, RETIRE or JOIN."""

    writer: str
    epoch: int
    kind: str
    prev: int
    id: int
    by: str
    why: str


class NewTimeline(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A timeline that began with a JOIN of `writer`, because a database was restored (docs/design.md 3).

    Attributes:
        id: IDs beyond this one may be given out again.
        position: the writer's position before the JOIN; 0 if it never joined.
        number: the number of the timeline.
        why: the evidence of the restore; see `core.classify.RollbackSignal`.
    """

    writer: str
    epoch: int
    id: int
    position: int
    number: int
    why: str


class Blocker(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What blocks a position since `since` (ms): a gap `(low, top]`, or a writer that never joined (`is_unknown`).

    `low` and `top` are 0 for a writer that never joined.
    """

    writer: str
    epoch: int
    low: int
    top: int
    since: int
    is_unknown: bool


class SourceReport(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the last OPEN of a writer reports, except open transactions.

    Attributes:
        heartbeat: seconds within which the writer sends the next record of the stream; 0: no promise.
        blocked: why the writer sends no new record of the stream; empty if it is not blocked.
        since: time (ms) of the batch that first read this reason; 0 if the writer is not blocked.
    """

    heartbeat: int
    blocked: str
    since: int


class Source(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A writer with a report. `last_seen`: time (ms) of the batch that read the writer's newest record."""

    writer: str
    last_seen: int
    report: SourceReport

    @property
    def heartbeat_timeout_seconds(self) -> float:
        """Seconds without a record after which the writer has missed its heartbeat; 0 if it promised no heartbeats."""
        return MISSED_HEARTBEATS * self.report.heartbeat + HEARTBEAT_SLACK_SECONDS if self.report.heartbeat else 0.0

    def overdue_seconds(self, now: float, reading_since: float) -> float | None:
        """Return the seconds since the writer's last record if the writer has missed its heartbeat, else None.

        Args:
            now: the time in seconds since 1970.
            reading_since: the time, in seconds since 1970, since which the pipeline has read records without a break.
        """
        silent = now - max(self.last_seen / 1000, reading_since)
        return now - self.last_seen / 1000 if 0 < self.heartbeat_timeout_seconds < silent else None


MISSED_HEARTBEATS = 2
"""A writer has missed its heartbeat after this many intervals without a record, and `HEARTBEAT_SLACK_SECONDS`."""

HEARTBEAT_SLACK_SECONDS = 5.0
"""Seconds that a record may take from its writer to the state, even on a busy machine."""


class Summary(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The summary of a stream's state for metrics and `tidemark status`.

    Attributes:
        pending_count: number of completed edges above the positions of their writers.
        gap_count: number of gaps of all writers.
        oldest_blocker: the oldest blocker; None if there is none.
        unknown_writers: writers that never joined, as `writer/epoch`.
        completed_interval_count: number of intervals of completed IDs above the linear position.
        linear_lag: how far the linear position is below the allocated IDs; None if there is no lag and no unknown
            writer.
        transactions: writer -> open transactions that its last OPEN reported.
        deferred_writers: writers with deferred records, as `writer/epoch`.
        max_span_count: the number of pending spans of the writer that has the most.
        sources: the writers with a report (`SourceReport`).
    """

    pending_count: int
    gap_count: int
    oldest_blocker: Blocker | None
    unknown_writers: list[str]
    completed_interval_count: int
    linear_lag: LinearLag | None
    transactions: dict[str, list[str]] = {}
    deferred_writers: list[str] = []
    max_span_count: int = 0
    sources: list[Source] = []


class StreamEffects(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The changes of one stream by a batch.

    Attributes:
        linear_prev: the linear position before the batch.
        linear: the linear position after the batch.
        allocated_prev: the highest allocated ID before the batch.
        allocated: the highest allocated ID after the batch.
        advances: the moves of writers' positions.
        writers: the writers whose position, epoch or retirement the batch changed.
        gaps: gaps that are new or have changed.
        closed: gaps that were closed.
        late: late completions.
        dropped_writers: retired writers that left the state.
        counts: outcome (`core.classify.Outcome`) -> number of records and of edges of RUNs, if not 0. Rejected records
            are in `ShardEffects.rejected`.
        state: the new state (`core.codec`) without the table of its retired writers.
        retired_table: the table of retired writers; None if the batch did not change it.
        requeues: deferred records to read again, because their edges now have room.
    """

    stream: str
    direction: Direction
    linear_prev: int
    linear: int
    allocated_prev: int
    allocated: int
    advances: list[WriterAdvance]
    writers: list[WriterRow]
    gaps: list[Gap]
    closed: list[ClosedGap]
    late: list[LateCompletion]
    overrides: list[OperatorOverride]
    timelines: list[NewTimeline]
    dropped_writers: list[str]
    counts: dict[str, int]
    summary: Summary
    state: bytes
    retired_table: bytes | None = None
    requeues: list[RequeuedRange] = []


class NextOffset(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The next offset to read of one Kafka partition."""

    topic: str
    partition: int
    offset: int


class ShardEffects(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The effects of a batch on one shard: one row of the query's output.

    Attributes:
        now: time (ms) of the batch.
        streams: the streams that had records, sorted by name.
        next_offsets: the next offset to read of each partition that the shard's packets name.
        is_cut_short: True if a task stopped before the offsets that Spark planned (`streaming.ingest.compact`).
        computation_start: time (ms) at which the computation of the shard began; 0 if it was not measured.
    """

    shard: int
    now: int
    streams: list[StreamEffects]
    rejected: list[RejectedRecords]
    next_offsets: list[NextOffset]
    is_cut_short: bool = False
    computation_start: int = 0


def encode(effects: ShardEffects) -> bytes:
    return msgspec.msgpack.encode(effects)


_decoder = msgspec.msgpack.Decoder(ShardEffects)


def decode(data: bytes) -> ShardEffects:
    return _decoder.decode(data)


def blockers(stream: "StreamState") -> list[Blocker]:
    """All gaps and unknown writers of `stream`, the oldest first, with signed IDs. Decodes the waiting writers."""
    stream.writers.decode_waiting()
    return sorted(_blockers(stream), key=_age_key)


def summarize(stream: "StreamState") -> Summary:
    """Describe a stream's state. Writers that are still encoded stay encoded, except writers with a report."""
    blocked = [*_blockers(stream)]
    waiting, signed = stream.writers.waiting.values(), stream.direction.signed
    chains = [writer.chain for writer in stream.writers.decoded.values()]
    chains += [writer.chain for writer in stream.unjoined.values()]
    oldest = [
        Blocker(writer.name, writer.epoch, signed(writer.low), signed(writer.top), writer.since, is_unknown=False)
        for writer in waiting
    ]
    return Summary(
        pending_count=sum(chain.pending_edges for chain in chains) + sum(writer.pending_edges for writer in waiting),
        gap_count=sum(not blocker.is_unknown for blocker in blocked) + sum(writer.gap_count for writer in waiting),
        oldest_blocker=min([*blocked, *oldest], key=_age_key, default=None),
        unknown_writers=sorted(f"{name}/{epoch}" for name, epoch in stream.unjoined),
        completed_interval_count=len(stream.linear.completed_ids),
        linear_lag=linear_lag(stream),
        transactions=stream.transactions,
        deferred_writers=sorted(
            [f"{name}/{writer.epoch}" for name, writer in stream.writers.decoded.items() if writer.chain.deferred]
            + [f"{name}/{epoch}" for (name, epoch), writer in stream.unjoined.items() if writer.chain.deferred]
            + [f"{writer.name}/{writer.epoch}" for writer in waiting if writer.has_deferred]
        ),
        max_span_count=max([0, *(len(chain.pending) for chain in chains), *(writer.gap_count for writer in waiting)]),
        sources=sources(stream),
    )


def sources(stream: "StreamState") -> list[Source]:
    """The writers with a report (`SourceReport`), sorted by name."""
    return [
        Source(name, stream.writers[name].last_seen, report)
        for name, report in sorted(stream.reports.items())
        if name in stream.writers
    ]


def _blockers(stream: "StreamState") -> Iterator[Blocker]:
    signed = stream.direction.signed
    for name, writer in stream.writers.decoded.items():
        for low, top, since in writer.chain.gaps():
            yield Blocker(name, writer.epoch, signed(low), signed(top), since, is_unknown=False)
    for (name, epoch), unjoined in stream.unjoined.items():
        yield Blocker(name, epoch, 0, 0, unjoined.since, is_unknown=True)


def _age_key(blocker: Blocker) -> tuple[int, str, int]:
    """The sort key that puts the oldest blocker first."""
    return blocker.since, blocker.writer, blocker.epoch
