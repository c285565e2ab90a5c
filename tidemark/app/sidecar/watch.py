"""Reads all streams and the state of the pipeline for `/v1/watch`, at most once a second while there are watchers. The
texts are encoded once for all watchers. Also queries the state of the pipeline for each request of `/v1/pipeline`.

A watcher gets the streams that changed since its last text. So a slow watcher gets fewer and newer texts, and needs no
queue. The text of a stream contains times and no ages, so an equal text means that nothing changed.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import astuple, replace

from tidemark.app.diagnosis.open_ranges import LinearLagAnswer, Name, StreamId, Verdict, lag_answer, last_seen, moment
from tidemark.app.read_side import ReadSide
from tidemark.app.read_side.postgres_reader import Details
from tidemark.app.read_side.snapshots import KnownPositions, Snapshot
from tidemark.app.sidecar.answers import Source, State
from tidemark.app.sidecar.event_stream import encode_event
from tidemark.common.errors import Stop, Unavailable
from tidemark.common.log import get_logger
from tidemark.common.tasks import cancel_until_done
from tidemark.sinks.postgres.status import Condition
from tidemark.streaming.core.effects import Blocker
from tidemark.streaming.values.direction import farther, is_beyond

MAX_GAPS_PER_WRITER = 50

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]


class GapAnswer(msgspec.Struct, frozen=True):
    """The IDs in `(low, top]` are open. `since`: when the pipeline first saw this gap."""

    low: StreamId
    top: StreamId
    since: datetime


class WatchedWriterAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One writer of a stream. `epoch` and `retired` are null until Postgres answers for the first time. Until then, the
    writer also has no gaps."""

    writer: Name
    epoch: Count | None
    retired: bool | None
    position: StreamId
    reach: Annotated[StreamId, Meta(description="The highest settled ID of the writer, which may be above gaps.")]
    waiting: Annotated[int, Meta(ge=0, description="The number of completed IDs of the writer above a gap.")]
    gaps: Annotated[list[GapAnswer], Meta(description="The gaps of the writer, nearest first; at most 50.")]
    hidden: Annotated[int, Meta(ge=0, description="The number of gaps that are not listed.")]
    transactions: Annotated[
        list[str], Meta(description="The transactions with open IDs of the writer, if the writer reports them.")
    ]
    deferred: Annotated[
        bool, Meta(description="Whether the writer has deferred records, or records that are being read again.")
    ]
    gone: Annotated[int, Meta(ge=0, description="At most this many deferred records of the writer are lost.")]
    last_seen: Annotated[
        datetime | None, Meta(description="When the pipeline read the writer's newest record; null if not known.")
    ]


class UnknownWriterAnswer(msgspec.Struct, frozen=True):
    """An epoch of a writer that never joined. The records of the epoch are buffered, and the writer blocks the linear
    position. `since`: when the pipeline read the first of these records."""

    writer: Name
    epoch: Count
    since: datetime


class RemedyAnswer(msgspec.Struct, frozen=True):
    """The remedy for one epoch of a writer, as `tidemark gaps` prints it."""

    writer: Name
    epoch: Count
    since: Annotated[datetime | None, Meta(description="Since when the writer has blocked; null if not known.")]
    verdict: Verdict
    advice: str
    command: Annotated[
        str, Meta(description="The command to run in a shell, or in the writer's database. May be empty.")
    ]


class LateSummaryAnswer(msgspec.Struct, frozen=True):
    count: Annotated[int, Meta(ge=1, description="The number of late completions; 100 means 100 or more.")]
    newest: datetime


class CopiesAnswer(msgspec.Struct, frozen=True):
    """The linear positions of a stream in Redis and in Postgres, if they differ. `since`: when the difference began.
    The sidecar reads them one after the other, so a short difference is normal."""

    redis: StreamId
    postgres: StreamId
    since: datetime


class WatchedStreamAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="stream"):
    """One stream with its writers. `source` and `linear` are null, and `writers` is empty, while the stream is
    recovering."""

    stream: Name
    state: State
    source: Source | None
    linear: StreamId | None
    allocated: Annotated[StreamId | None, Meta(description="The highest ID that any record named, if known.")]
    writers: list[WatchedWriterAnswer]
    unknown_writers: list[UnknownWriterAnswer]
    linear_lag: Annotated[
        LinearLagAnswer | None,
        Meta(
            description="What blocks the linear position. Null if the linear position has reached the highest allocated"
            " ID and every writer has joined. Also null until Postgres answers for the first time."
        ),
    ]
    remedies: Annotated[
        list[RemedyAnswer],
        Meta(
            description="One for each epoch of a writer that blocks a position. A writer without a gap is listed after"
            " ten seconds."
        ),
    ]
    late: LateSummaryAnswer | None
    bridged: Annotated[
        bool,
        Meta(
            description="Whether `tidemark synapse` sends the stream. If so, its commands settle open IDs of the"
            " stream."
        ),
    ]
    copies: Annotated[
        CopiesAnswer | None,
        Meta(
            description="The linear positions in Redis and in Postgres, if they differ; otherwise null. A difference"
            " during one batch is normal."
        ),
    ]


class OverrideAnswer(msgspec.Struct, frozen=True):
    """An operator override. The operator wrote the texts `by` and `why`; `seen_as` is the operator's Postgres user."""

    number: Count
    kind: str
    stream: str
    writer: str
    by: str
    why: str
    seen_as: str
    time: datetime
    outcome: str | None


class NotShownAnswer(msgspec.Struct, frozen=True):
    """A stream that `sink` cannot publish, although `sink` publishes other streams."""

    sink: str
    stream: str
    problem: str
    since: datetime


class LaggingAnswer(msgspec.Struct, frozen=True):
    """A Kafka partition with lag. `since`: since when its oldest record has been unread, or Kafka has not answered.
    `records` is 0 if Kafka does not answer. If an open transaction blocks the partition, records from `blocked_offset`
    on cannot be read; otherwise `blocked_offset` and `blocked_since` are null."""

    topic: str
    partition: Count
    records: int
    since: datetime
    blocked_offset: Count | None
    blocked_since: datetime | None


class DeadLettersAnswer(msgspec.Struct, frozen=True):
    """The number of distinct records that were rejected for `reason` since the database was created. `newest`: the time
    of the newest rejected record."""

    reason: str
    records: Count
    newest: datetime


class PipelineAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="pipeline"):
    """The state of the pipeline, which computes positions. All fields except `time` and `problems` are null while
    Postgres does not answer."""

    time: Annotated[datetime, Meta(description="The clock of this sidecar.")]
    owner: Annotated[
        str | None,
        Meta(description="The process that has the lease, or had it last; null if no pipeline has ever run."),
    ]
    lease_seconds: Annotated[Seconds | None, Meta(description="Seconds until the lease expires; 0: no process has it.")]
    quiet_seconds: Annotated[
        Seconds | None, Meta(description="Seconds since the last batch was applied; null if no batch was ever applied.")
    ]
    dead_letters: list[DeadLettersAnswer] | None
    overrides: Annotated[
        list[OverrideAnswer] | None, Meta(description="The overrides of the last day, newest first; at most 5.")
    ]
    not_shown: Annotated[list[NotShownAnswer] | None, Meta(description="Streams that a sink cannot publish.")]
    lagging: Annotated[
        list[LaggingAnswer] | None,
        Meta(
            description="Kafka partitions with records that have been unread for ten seconds or longer, or from which"
            " Kafka has not answered for ten seconds or longer."
        ),
    ]
    problems: Annotated[
        list[str],
        Meta(description="A message for each server that does not answer or refuses this sidecar, for people."),
    ]


def watched_stream_answer(snapshot: Snapshot) -> WatchedStreamAnswer:
    known, details = snapshot.positions, snapshot.details
    gaps: dict[str, list[Blocker]] = {}
    for gap in details.gaps if details else ():
        if not gap.is_unknown:
            gaps.setdefault(gap.writer, []).append(gap)
    return WatchedStreamAnswer(
        stream=snapshot.stream,
        state="recovering" if known is None else "known",
        source=None if known is None else known.source,
        linear=None if known is None else known.linear,
        allocated=None if known is None else known.allocated,
        writers=[]
        if known is None
        else [
            _writer_answer(name, position, details, _gap_answers(gaps.get(name, ()), _gaps_start(name, known, details)))
            for name, position in sorted(known.vector.items())
        ],
        unknown_writers=[] if details is None else _unknown_writer_answers(details),
        linear_lag=None if details is None else lag_answer(details.linear_lag),
        remedies=[] if details is None else _remedy_answers(details),
        late=None
        if details is None or details.late is None
        else LateSummaryAnswer(details.late.count, details.late.newest),
        bridged=details is not None and details.is_bridged,
        copies=None
        if (difference := snapshot.divergence) is None
        else CopiesAnswer(difference.redis, difference.postgres, moment(int(difference.since * 1000))),
    )


def pipeline_answer(condition: Condition | None, problems: Sequence[str], now: datetime) -> PipelineAnswer:
    """Convert the condition of the pipeline.

    Args:
        condition: None if Postgres does not answer.
        problems: messages about servers that do not answer.
        now: the current time of the sidecar's clock.
    """
    answer = PipelineAnswer(
        time=now,
        owner=None,
        lease_seconds=None,
        quiet_seconds=None,
        dead_letters=None,
        overrides=None,
        not_shown=None,
        lagging=None,
        problems=list(problems),
    )
    if condition is None:
        return answer
    return replace(
        answer,
        owner=condition.owner,
        lease_seconds=round(condition.lease_seconds, 1),
        quiet_seconds=None if condition.seconds_since_batch is None else round(condition.seconds_since_batch, 1),
        dead_letters=[DeadLettersAnswer(entry.reason, entry.records, entry.newest) for entry in condition.dead_letters],
        overrides=[OverrideAnswer(*astuple(entry)) for entry in condition.overrides],
        not_shown=[NotShownAnswer(entry.sink, entry.stream, entry.problem, entry.since) for entry in condition.faults],
        lagging=[LaggingAnswer(*astuple(lag)) for lag in condition.lagging],
    )


def _writer_answer(name: str, position: int, details: Details | None, gaps: list[GapAnswer]) -> WatchedWriterAnswer:
    requeues = [requeue for requeue in details.requeues if requeue.writer == name] if details else []
    return WatchedWriterAnswer(
        writer=name,
        epoch=None if details is None else details.epochs.get(name),
        retired=None if details is None else name in details.retired_writers,
        position=position,
        reach=farther(details.highest_settled_ids.get(name, position), position) if details and gaps else position,
        waiting=details.pending_by_writer.get(name, 0) if details and gaps else 0,
        gaps=gaps[:MAX_GAPS_PER_WRITER],
        hidden=max(0, len(gaps) - MAX_GAPS_PER_WRITER),
        transactions=details.transactions.get(name, []) if details else [],
        deferred=details is not None
        and name
        in {requeue for requeue, _ in details.deferred_writer_epochs} | {requeue.writer for requeue in requeues},
        gone=sum(requeue.gone for requeue in requeues),
        last_seen=last_seen(details.last_seen.get(name, 0)) if details else None,
    )


def _gaps_start(name: str, known: KnownPositions, details: Details | None) -> int:
    """The position beyond which gaps of the writer `name` in `details` are still open: the writer's position, or the
    linear position if the writer has regressed. `details` may be older than `known`."""
    return known.linear if details and name in details.regressed_writers else known.vector[name]


def _gap_answers(blockers: Iterable[Blocker], start: int) -> list[GapAnswer]:
    gaps = [
        GapAnswer(farther(gap.low, start), gap.top, moment(gap.since)) for gap in blockers if is_beyond(gap.top, start)
    ]
    return sorted(gaps, key=lambda gap: abs(gap.low))


def _remedy_answers(details: Details) -> list[RemedyAnswer]:
    by_incarnation = {(open_range.writer, open_range.epoch): open_range for open_range in reversed(details.open_ranges)}
    return [
        RemedyAnswer(writer, epoch, open_range.since, open_range.verdict, open_range.advice, open_range.verb)
        for (writer, epoch), open_range in sorted(by_incarnation.items())
    ]


def _unknown_writer_answers(details: Details) -> list[UnknownWriterAnswer]:
    return [UnknownWriterAnswer(gap.writer, gap.epoch, moment(gap.since)) for gap in details.gaps if gap.is_unknown]


log = get_logger(__name__)

MIN_ROUND_PAUSE_SECONDS = 1.0  # the shortest pause between two rounds
PAUSE_FACTOR = 10  # the pause after a long round, as a multiple of its duration: for very many streams


class Watcher:
    """A client of `/v1/watch`. `last_round`: the number of the last round whose texts the client got; 0: none."""

    def __init__(self) -> None:
        self.last_round = 0


class Watch:
    """Reads all streams in rounds while there are watchers. One per process, for one event loop."""

    def __init__(self, read_side: ReadSide) -> None:
        self._read_side = read_side
        self._watcher_count = 0
        self._has_watchers = asyncio.Event()
        self._round_ended = asyncio.Condition()
        self._round_number = 0
        # Stream -> the last round in which its text changed, and the text.
        self._texts: dict[str, tuple[int, bytes]] = {}
        self._pipeline_text = b""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the rounds during the block."""
        task = asyncio.create_task(self._run_again_after_failures())
        try:
            yield
        finally:
            await cancel_until_done(task)

    async def _run_again_after_failures(self) -> None:
        """Run the rounds until the task is cancelled. They begin again after any failure, because watchers cannot
        distinguish a failure from idle streams."""
        while True:
            try:
                await self._run()
            except Exception as problem:  # noqa: BLE001
                log.error("Reading the streams for /v1/watch failed; trying again", problem=repr(problem))
                await asyncio.sleep(MIN_ROUND_PAUSE_SECONDS)

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        """Register a new watcher for the duration of the block."""
        self._watcher_count += 1
        self._has_watchers.set()
        try:
            yield Watcher()
        finally:
            self._watcher_count -= 1
            if not self._watcher_count:
                self._has_watchers.clear()

    async def next_text(self, watcher: Watcher) -> bytes:
        """Wait until a round has ended that is newer than `watcher.last_round`, and set `watcher.last_round`.

        Returns an event for each stream that changed since the watcher's last text, and an event for the pipeline. The
        first text of a watcher has an event for every stream.
        """
        async with self._round_ended:
            await self._round_ended.wait_for(lambda: self._round_number > watcher.last_round)
        changed = [text for number, text in self._texts.values() if number > watcher.last_round]
        watcher.last_round = self._round_number
        return b"".join([*changed, self._pipeline_text])

    async def read_pipeline(self) -> PipelineAnswer:
        """Query the state of the pipeline. If a server does not answer, the answer names the problem."""
        condition: Condition | None = None
        with suppress(Unavailable, Stop):
            condition = await self._read_side.postgres_reader.condition()
        breakers = self._read_side.redis_reader.circuit_breaker, self._read_side.postgres_reader.circuit_breaker
        problems = [str(breaker.problem) for breaker in breakers if breaker.problem is not None]
        return pipeline_answer(condition, problems, datetime.now(UTC))

    async def _run(self) -> None:
        pause = MIN_ROUND_PAUSE_SECONDS
        while True:
            await self._has_watchers.wait()
            began = time.monotonic()
            if await self._run_round():
                pause = max(MIN_ROUND_PAUSE_SECONDS, PAUSE_FACTOR * (time.monotonic() - began))
            await asyncio.sleep(pause)

    async def _run_round(self) -> bool:
        """Read and encode all streams and the state of the pipeline, and wake the watchers.

        Returns False if a server did not answer. Then the duration of the round includes time-outs, and must not
        lengthen the pause.
        """
        names = await self._read_side.snapshots.names()
        streams = [watched_stream_answer(snapshot) for snapshot in await self._read_side.snapshots.get(sorted(names))]
        pipeline = await self.read_pipeline()
        async with self._round_ended:
            self._round_number += 1
            for stream in streams:
                text = encode_event(stream)
                before = self._texts.get(stream.stream)
                if before is None or before[1] != text:
                    self._texts[stream.stream] = self._round_number, text
            self._pipeline_text = encode_event(pipeline)
            self._round_ended.notify_all()
        return not pipeline.problems
