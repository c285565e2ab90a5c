"""Reads Postgres on threads: positions that Redis does not have, the history, and details of streams.

`StreamHistoryReader` reads the past hour of a stream, and the status of readers, for the live page and the metrics. It
has a thread of its own, so that reads of positions are not delayed. Charts and statuses are cached for a few seconds,
so that many open pages cause few queries."""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from tidemark.app.diagnosis import open_ranges
from tidemark.app.diagnosis.open_ranges import OpenRange
from tidemark.app.diagnosis.reader_lag import ReaderLag, ReaderStatus
from tidemark.app.read_side.single_flight import CircuitBreaker
from tidemark.app.versions import require_compatible
from tidemark.common.errors import Refused, Slow, StateTooNew, Unavailable
from tidemark.common.postgres_session import Dsn
from tidemark.sinks.postgres.database import session_of
from tidemark.sinks.postgres.history import ChangesSince, DurableMark, LagHistory, StreamHistoryChart
from tidemark.sinks.postgres.positions import RequeueStatus
from tidemark.sinks.postgres.status import Condition, LateCount, ReadStatus
from tidemark.sinks.postgres.store import Postgres, StreamPositions
from tidemark.sinks.reader import History, MissedChanges, ReaderPlaces, ReadHistory, StreamHistory
from tidemark.streaming.core import codec
from tidemark.streaming.core.effects import Blocker, LinearLag, blockers, summarize
from tidemark.streaming.core.fast_path import CaughtUpStream, read_if_caught_up
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.values.limits import Policies

T = TypeVar("T")

TIMEOUT_SECONDS = 2.0  # for a request; its thread continues
HISTORY_TIMEOUT_SECONDS = 10.0  # for a page of the history, which waits for the pages before it


@dataclass(frozen=True, slots=True)
class Details:
    """The state of a stream besides positions.

    Attributes:
        epochs: writer -> its current epoch.
        retired_writers: the writers that have retired.
        pending_count: the number of completed edges above the position of their writer.
        gaps: all gaps, and the writers that never joined, oldest first.
        highest_settled_ids: writer -> the highest settled ID, which may be above gaps.
        pending_by_writer: writer -> its share of `pending_count`.
        regressed_writers: writers whose source was restored. Their gaps below their position block the linear position.
        late: the number of late completions, and the time of the newest; None if there are none.
        transactions: writer -> the reported transactions with its open IDs.
        linear_lag: what blocks the linear position; None if there is no linear lag and all writers have joined.
        last_seen: writer -> the batch time of its newest record (milliseconds since 1970), if known.
        deferred_writer_epochs: the (writer, epoch) pairs with deferred records.
        requeues: deferred records that are read again from Kafka, or that are lost.
        is_bridged: whether `tidemark synapse` writes the stream.
        open_ranges: the ranges that block positions, with their remedies.
    """

    epochs: Mapping[str, int]
    retired_writers: frozenset[str]
    pending_count: int
    gaps: list[Blocker]
    highest_settled_ids: Mapping[str, int]
    pending_by_writer: Mapping[str, int]
    regressed_writers: frozenset[str]
    late: LateCount | None
    transactions: Mapping[str, list[str]]
    linear_lag: LinearLag | None
    last_seen: Mapping[str, int]
    deferred_writer_epochs: Sequence[tuple[str, int]]
    requeues: Sequence[RequeueStatus]
    is_bridged: bool
    open_ranges: Sequence[OpenRange] = ()


@dataclass(frozen=True, slots=True)
class TopicProgress:
    """The progress of the pipeline in a topic.

    Attributes:
        offsets: partition -> the next offset to read.
        allocated_ids: stream -> an upper bound of the IDs in records before these offsets.
    """

    offsets: Mapping[int, int]
    allocated_ids: Mapping[str, int]


class PostgresReader:
    """Reads Postgres, for one event loop. Methods raise `Unavailable` and `Refused`, and may be called again after an
    error. `history` and `missed_changes` also raise `Slow`.
    """

    def __init__(self, postgres: Postgres, history: History, policy_defaults: Mapping[str, int] = {}) -> None:
        self.circuit_breaker = CircuitBreaker("Postgres")
        self._postgres = postgres
        self._history = history
        self._policy_defaults = policy_defaults
        # A separate thread, so that reads of the history do not delay reads of positions.
        self._history_thread = ThreadPoolExecutor(1, "history")
        self._running_reads: set[asyncio.Future[Any]] = set()
        self._is_closed = False

    async def aclose(self) -> None:
        """Refuse further reads, and wait for all running reads, because a read could open a connection later."""
        self._is_closed = True
        if self._running_reads:
            await asyncio.wait(self._running_reads)
        self._history_thread.shutdown()

    async def check(self) -> None:
        """Raise `SchemaMismatch` or `VersionSkew` if this version cannot read the data of the pipeline's version."""
        await self._read(self._check)

    def _check(self) -> None:
        self._postgres.check_readable()
        require_compatible(self._postgres.pipeline_version())

    async def names(self) -> set[str]:
        """Read the names of all streams in Postgres."""
        return set(await self._read(self._postgres.streams))

    async def positions(self, streams: Collection[str]) -> dict[str, StreamPositions]:
        """Read the positions of `streams`, by stream. Leaves out streams that do not exist."""
        return await self._read(lambda: self._postgres.positions(streams))

    async def details(self, streams: Collection[str]) -> dict[str, Details]:
        """Read the details of `streams`, by stream. Leaves out streams that do not exist, and streams whose state has a
        later version.
        """
        return await self._read(lambda: _read_details(self._postgres, streams, self._policy_defaults))

    async def condition(self) -> Condition:
        """Read the condition of the pipeline."""
        return await self._read(self._postgres.conditions.current)

    async def topic_progress(self, topic: str) -> TopicProgress:
        """Read how far the pipeline has read `topic`."""
        return await self._read(lambda: _read_progress(self._postgres, topic))

    async def changes(self, since: DurableMark | None, streams: Collection[str] | None) -> ChangesSince:
        """Read the changes of streams since a mark.

        Args:
            since: the mark; None: read the positions of all `streams`.
            streams: the names of the streams; None: all streams.
        """
        return await self._read(lambda: self._postgres.changes_since(since, streams))

    async def history(self, request: ReadHistory) -> StreamHistory:
        """Read a page of a stream's history."""
        return await self._read_history(lambda: self._history.read_page(request))

    async def missed_changes(self, since: DurableMark, max_moves: int) -> MissedChanges | None:
        """Read the moves of all streams since a mark; None if they have more than `max_moves` advances, or are no
        longer stored."""
        return await self._read_history(lambda: self._history.read_missed_changes(since, max_moves))

    async def _read_history(self, read: Callable[[], T]) -> T:
        """Call `read` on the history thread. Raises `Slow` after `HISTORY_TIMEOUT_SECONDS`."""
        self._require_open()
        with self.circuit_breaker.guarding():
            future = self._history_thread.submit(read)
            try:
                return await asyncio.wait_for(
                    asyncio.shield(self._track(asyncio.wrap_future(future))), HISTORY_TIMEOUT_SECONDS
                )
            except TimeoutError:
                problem = f"the history was not read within {HISTORY_TIMEOUT_SECONDS:g} s; try again"
                raise Slow("Postgres", self._postgres.where, problem) from None
            finally:
                future.cancel()  # has no effect if the read has started

    async def _read(self, read: Callable[[], T]) -> T:
        self._require_open()
        with self.circuit_breaker.guarding():
            reading = self._track(asyncio.get_running_loop().run_in_executor(None, read))
            try:
                return await asyncio.wait_for(asyncio.shield(reading), TIMEOUT_SECONDS)
            except TimeoutError:
                problem = f"no answer within {TIMEOUT_SECONDS:g} s"
                raise Unavailable("Postgres", self._postgres.where, problem) from None

    def _require_open(self) -> None:
        if self._is_closed:
            raise Unavailable("Postgres", self._postgres.where, "this process is stopping")

    def _track(self, reading: "asyncio.Future[T]") -> "asyncio.Future[T]":
        self._running_reads.add(reading)
        reading.add_done_callback(self._on_read_done)
        return reading

    def _on_read_done(self, reading: asyncio.Future[Any]) -> None:
        self._running_reads.discard(reading)
        if not reading.cancelled():
            reading.exception()  # mark as retrieved, because the waiting request may have been cancelled


def _read_progress(postgres: Postgres, topic: str) -> TopicProgress:
    offsets = postgres.offsets().get(topic, {})  # before the allocated IDs, so that these are never too low
    allocated = {name: stored.allocated for name, stored in postgres.positions(postgres.streams()).items()}
    return TopicProgress(offsets, allocated)


def _read_details(postgres: Postgres, streams: Collection[str], defaults: Mapping[str, int]) -> dict[str, Details]:
    states, conditions = postgres.states(streams), postgres.conditions
    late, requeues, bridges = conditions.late(streams), conditions.requeues(), conditions.bridges()
    ranges = [*_open_ranges(postgres, states, bridges, defaults)]
    details = {}
    for name, stored in states.items():
        try:
            decoded = codec.decode(stored)
        except StateTooNew:
            continue
        details[name] = replace(
            _stream_details(
                decoded,
                late.get(name),
                [entry for entry in requeues if entry.stream == name],
                is_bridged=name in bridges,
            ),
            open_ranges=[entry for entry in ranges if entry.stream == name],
        )
    return details


def _open_ranges(
    postgres: Postgres, states: Mapping[str, bytes], bridges: Collection[str], defaults: Mapping[str, int]
) -> Iterator[OpenRange]:
    """Find the open ranges of the streams in `states`, by stream. Queries policies only if there may be open ranges."""
    quiet = {name: read_if_caught_up(stored) for name, stored in states.items()}
    has_sources = any(stream is not None and stream.sources for stream in quiet.values())
    reading, now = postgres.conditions.reading_status() if has_sources else None, time.time()
    busy = {name: states[name] for name, stream in quiet.items() if _may_be_blocked(stream, now, reading)}
    if not busy:
        return
    policies, starts = Policies(postgres.policies.read(), defaults), postgres.conditions.epochs_begun_by_operators()
    reading = reading or postgres.conditions.reading_status()
    for name, stored in busy.items():
        with suppress(StateTooNew):
            yield from open_ranges.find_open_ranges({name: stored}, now, policies, starts, bridges, reading)


def _may_be_blocked(stream: CaughtUpStream | None, now: float, reading: ReadStatus | None) -> bool:
    """Whether the stream may have open ranges. `stream`: None if the stream is not known to be caught up."""
    if stream is None:
        return True
    since = math.inf if reading is None else reading.since
    return any(source.report.blocked or source.overdue_seconds(now, since) is not None for source in stream.sources)


def _stream_details(
    stream: StreamState, late: LateCount | None, requeues: Sequence[RequeueStatus], *, is_bridged: bool
) -> Details:
    signed, summary = stream.direction.signed, summarize(stream)
    return Details(
        epochs={writer: known.epoch for writer, known in stream.writers.items()},
        retired_writers=frozenset(writer for writer, known in stream.writers.items() if known.retired_at is not None),
        pending_count=summary.pending_count,
        gaps=blockers(stream),
        highest_settled_ids={writer: signed(known.chain.highest_settled) for writer, known in stream.writers.items()},
        pending_by_writer={writer: known.chain.pending_edges for writer, known in stream.writers.items()},
        regressed_writers=frozenset(
            writer for writer, known in stream.writers.items() if known.chain.position < known.published_position
        ),
        late=late,
        transactions=stream.transactions,
        linear_lag=summary.linear_lag,
        last_seen={writer: known.last_seen for writer, known in stream.writers.items() if known.last_seen},
        deferred_writer_epochs=[
            (name, int(epoch)) for name, _, epoch in (entry.rpartition("/") for entry in summary.deferred_writers)
        ],
        requeues=requeues,
        is_bridged=is_bridged,
    )


CHART_SECONDS, CHART_STEPS = 3600, 120
CHART_CACHE_SECONDS = 10.0
READERS_CACHE_SECONDS = 5.0
PAST_HOUR_TIMEOUT_SECONDS = 10.0
MAX_CACHED_ANSWERS = 1000


class StreamHistoryReader:
    """Reads charts of the past hour, the status of readers, and last IDs. For one event loop. Methods raise
    `Unavailable`, `Refused` and `Slow`, and may be called again after an error.
    """

    def __init__(self, postgres: Dsn, readers: Dsn | None) -> None:
        self._session = session_of(postgres, "tidemark history")
        self._history = LagHistory(self._session)
        self._places = ReaderPlaces(postgres if readers is None else readers)
        self._are_places_in_other_database = readers is not None
        self._reader_lag = ReaderLag(self._history)
        self._thread = ThreadPoolExecutor(1, "stream history")
        self._answers: dict[Hashable, tuple[float, Any]] = {}
        self._breakers = {server: CircuitBreaker(server) for server in ("Postgres", "The database of the readers")}

    async def aclose(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
        self._session.close()
        self._places.close()

    async def chart(self, stream: str) -> StreamHistoryChart:
        """Read the chart of the past hour of the stream; it may be `CHART_CACHE_SECONDS` old."""
        return await self._read(
            "Postgres",
            stream,
            CHART_CACHE_SECONDS,
            lambda: self._history.chart(stream, datetime.now(UTC), CHART_SECONDS, CHART_STEPS),
        )

    async def readers(self) -> list[ReaderStatus]:
        """Read the status of the readers of all streams, sorted by stream and name; it may be `READERS_CACHE_SECONDS`
        old. Empty if no database of readers is configured and this user may not read the places."""
        return await self._read("The database of the readers", None, READERS_CACHE_SECONDS, self._read_readers)

    async def last_id(self, stream: str) -> int | None:
        """Read the last ID of the stream that the database of the readers has given out. The read begins after this
        call. None if the ID is not known (`ReaderPlaces.last_id`)."""
        key = ("last ID", stream)
        return await self._read("The database of the readers", key, 0.0, lambda: self._places.last_id(stream))

    def _read_readers(self) -> list[ReaderStatus]:
        try:
            stored = self._places.places()
        except Refused:
            if self._are_places_in_other_database:
                raise
            return []  # the user may not read the places, and no database of readers is configured
        return self._reader_lag.statuses(stored)

    async def _read(self, server: str, key: Hashable, max_age_seconds: float, read: Callable[[], T]) -> T:
        def read_once() -> T:
            """Use the cache, because another request may have read while this request waited for the thread."""
            if key in self._answers and time.monotonic() - self._answers[key][0] < max_age_seconds:
                remembered: T = self._answers[key][1]
                return remembered
            fresh = read()
            while len(self._answers) >= MAX_CACHED_ANSWERS:
                del self._answers[next(iter(self._answers))]
            self._answers[key] = time.monotonic(), fresh
            return fresh

        with self._breakers[server].guarding():
            future = self._thread.submit(read_once)
            try:
                return await asyncio.wait_for(asyncio.wrap_future(future), PAST_HOUR_TIMEOUT_SECONDS)
            except TimeoutError:
                where = self._session.where if server == "Postgres" else self._places.where
                raise Slow("Postgres", where, f"no answer within {PAST_HOUR_TIMEOUT_SECONDS:g} s; try again") from None
            finally:
                future.cancel()  # has no effect if the read has started
