"""The program behind `Reader`: follows a stream, reads the rows of its events, and stores the checkpoint. No sockets.

Each portion of rows is handed over in one transaction of the reader's own database. The same transaction stores the
checkpoint after the portion, and begins with a lock on the checkpoint's row. So the effects of a portion are written
exactly once, even if processes are killed or several copies run.

`plan` computes the ranges to read for a batch of events. Late completions are read before the ranges of the batch. A
late range has up to three parts:

- The part at or below the reader's place. Its rows are handed over as late.
- The part that the batch passes. The reader reads the table there regardless of the evidence (`must_read_ranges`).
- The part beyond the batch, which belongs to an earlier timeline or to an epoch that never joined. Its rows are handed
  over as late, and stored as `delivered`, so that they are not handed over again if the place reaches them.

A fact may be committed in time and announced late, after an operator skipped its ID. So facts that were read in a
skipped range are stored as `delivered` until the next epoch of the writer: then the old epoch is a zombie.
"""

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tidemark.common.backoff import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Backoff, WaitLog
from tidemark.common.errors import BadSetting, BatchTimedOut, LateNeedsWriter, LateUnknown, Unavailable
from tidemark.common.log import get_logger
from tidemark.sinks.reader.checkpoint import CheckpointStore, DeliveredFact, ReaderCheckpoint
from tidemark.sinks.reader.databases import wait_for_replica
from tidemark.sinks.reader.events import (
    Advance,
    Event,
    Late,
    LinearMove,
    MissingLateCompletions,
    Place,
    ReadProgress,
    Reread,
)
from tidemark.sinks.reader.follow import CaughtUp, FollowProgram, Mode
from tidemark.sinks.reader.requests import (
    Answer,
    BeginTransaction,
    CloseSessions,
    CommitTransaction,
    Driver,
    Pause,
    PlaceBusy,
    Request,
    Row,
    RunSql,
    fetch_rows,
)
from tidemark.sinks.reader.table import Range, Table, TablePage, absent_ranges, count_ids, read_table_page
from tidemark.sinks.reader.token import ZERO, Token
from tidemark.streaming.values.direction import farther, is_beyond

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What to read for a batch of events.

    Attributes:
        goal: the place after the batch.
        ranges: the ranges to read, one per writer. All other IDs up to `goal` are proven empty.
        skipped_ranges: (epoch, range) of each advance that has skipped IDs.
        late: the late completions of the batch, in order.
        missing_late_completions: late completions that no server lists; None if there are none.
        epochs: writer -> its newest epoch in the batch.
        must_read_ranges: the ranges in which the table is read regardless of the evidence.
    """

    goal: Place
    ranges: tuple[Range, ...]
    skipped_ranges: tuple[tuple[int, Range], ...]
    late: tuple[Late, ...]
    missing_late_completions: MissingLateCompletions | None
    epochs: Mapping[str, int]
    must_read_ranges: tuple[Range, ...] = ()

    def place_before(self, remaining: Sequence[Range]) -> Place:
        """Return the place of the reader while the ranges `remaining` are still to be read."""
        linear = next((span.prev for span in remaining if span.writer is None), self.goal.linear)
        writers = {span.writer: span.prev for span in remaining if span.writer is not None}
        is_settled = self.goal.is_settled and all(span.writer is not None or span.has_null for span in remaining)
        return Place(linear, {**self.goal.positions, **writers}, self.goal.late, is_settled)

    def with_null_writer(self, checkpoint: ReaderCheckpoint, facts_upto: int | None) -> "ReadPlan":
        """Return the plan with a range for rows whose writer is NULL, if such rows may exist up to `goal.linear`.

        `facts_upto`: the farthest ID that may have a fact, according to the events before this batch; None if unknown.
        """
        span = Range(None, checkpoint.place.linear, self.goal.linear, has_null=True)
        if any(span.writer is None for span in self.ranges) or not is_beyond(span.id, span.prev):
            return self
        farthest = [farther(facts_upto, span.prev)] if facts_upto is not None else [span.id]
        farthest += [span.id for span in (*self.ranges, *self.must_read_ranges)]
        if not any(is_beyond(id, span.prev) for id in farthest):
            return self
        return replace(self, ranges=(*self.ranges, span))

    def select_delivered(self, ids: Iterable[tuple[int, str | None]]) -> Iterator[DeliveredFact]:
        """Of facts given as (ID, writer or None), yield those that may complete late again, to store as `delivered`."""
        for id, writer in ids:
            for epoch, span in self.skipped_ranges:
                if span.contains(id) and writer in {None, span.writer}:
                    assert span.writer is not None
                    yield DeliveredFact(id, span.writer, epoch)
                    break


def plan(checkpoint: ReaderCheckpoint, events: Sequence[Event], goal: Place) -> ReadPlan:
    """Compute what to read for `events`, which follow the place of `checkpoint`. `goal` is the place after `events`."""
    moves = [event for event in events if isinstance(event, Advance | Reread | LinearMove)]
    missing_late_completions = next((event for event in events if isinstance(event, MissingLateCompletions)), None)
    must_read = [
        *checkpoint.must_read_ranges,
        *(span for event in events if isinstance(event, Late) for span in passed_by_events(checkpoint, event, goal)),
    ]
    spans: dict[str | None, Range] = {}
    needed: set[str | None] = set()
    for move in moves:
        writer = None if isinstance(move, LinearMove) else move.writer
        besides = move.besides if isinstance(move, Reread) else frozenset[str]()
        first = spans.get(writer)
        spans[writer] = Range(writer, first.prev if first else move.prev, move.id, besides)
        # In a table older than its stream, a JOIN proves that nothing is open below it, not that there are no rows.
        if missing_late_completions or not checkpoint.place.is_settled or not move.proven_empty:
            needed.add(writer)
    for writer, span in spans.items():
        if any(_overlaps(item, span) for item in must_read):
            needed.add(writer)
    advances = [
        advance
        for move in moves
        for advance in (move.advances if isinstance(move, LinearMove) else (move,))
        if isinstance(advance, Advance)
    ]
    return ReadPlan(
        goal,
        tuple(span for writer, span in spans.items() if writer in needed),
        tuple((item.epoch, Range(item.writer, item.prev, item.id)) for item in advances if item.evidence.skipped),
        tuple(event for event in events if isinstance(event, Late)),
        missing_late_completions,
        {item.writer: item.epoch for item in advances},
        tuple(must_read),
    )


def passed_by_events(checkpoint: ReaderCheckpoint, late: Late, goal: Place) -> Iterator[Range]:
    """Yield the part of a late range between the stored place and `goal`, the place after the batch of events."""
    yield from _split_late(checkpoint, late, goal)[1]


def late_parts(checkpoint: ReaderCheckpoint, late: Late, goal: Place) -> Iterator[Range]:
    """Yield the parts of a late range whose rows are still to be handed over as late, in order."""
    passed, _, ahead = _split_late(checkpoint, late, goal)
    for span in (*passed, *ahead):
        handed_over = checkpoint.late_part if checkpoint.late_part and checkpoint.late_part[0] == late.number else None
        part = span.after(handed_over[1]) if handed_over else span
        if part is not None:
            yield part


def unread_ranges(must_read: Iterable[Range], place: Place) -> tuple[Range, ...]:
    return tuple(span for span in must_read if is_beyond(span.id, _position_of(place, span.writer)))


def _split_late(checkpoint: ReaderCheckpoint, late: Late, goal: Place) -> tuple[list[Range], list[Range], list[Range]]:
    """Divide a late range into the part at or below the place, the part that the batch passes, and the part beyond.

    If no facts came late, the parts are empty, except the first one after a restore: its IDs may have had facts.
    """
    span = Range(late.writer, late.prev, late.id)
    reached, passed_to = _position_of(checkpoint.place, late.writer), _position_of(goal, late.writer)
    if not late.facts:
        part = span.upto(reached) if late.why == REGRESSED else None
        return [part] if part else [], [], []
    rest = span.after(reached)
    between = rest.upto(passed_to) if rest else None
    parts = (span.upto(reached), between, span.after(farther(reached, passed_to)))
    passed, passing, ahead = ([part] if part else [] for part in parts)
    return passed, passing, ahead


def _position_of(place: Place, writer: str | None) -> int:
    return place.linear if writer is None else place.positions.get(writer, place.linear)


def _overlaps(must_read: Range, span: Range) -> bool:
    same = span.writer in {None, must_read.writer} and must_read.writer not in span.besides
    return same and is_beyond(must_read.id, span.prev) and is_beyond(span.id, must_read.prev)


RANGES_PER_QUERY = 64  # the most ranges in one query of the table
REGRESSED = "regressed"  # `Late.why` after a restore of the source
IDS_PER_QUERY = 10_000  # the most IDs that one query returns to find the IDs of a late range without rows


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """The configuration of a reader.

    Attributes:
        reader: the name of the reader, with its partition if it has partitions.
        since: the token after which a reader without a stored place begins.
        rows: the largest number of rows of a portion, unless one fact has more.
        is_replica: whether the table is read from a replica, which must replay the published commits first.
        observe: called with the progress after each commit, and when everything is read. None to call nothing.
    """

    stream: str
    table: Table
    reader: str
    mode: Mode
    since: Token
    rows: int
    is_replica: bool
    observe: Callable[[ReadProgress], object] | None = None

    def __post_init__(self) -> None:
        if self.mode == "vector" and self.table.writer is None:
            raise BadSetting("table", "vector mode needs the column with the writer's name: Table(..., writer=...)")
        if self.rows < 1:
            raise BadSetting("rows", "give 1 or more")


@dataclass(frozen=True, slots=True)
class Portion:
    """Rows to hand over in the open transaction, which the program commits when it continues. See `ReadBatch`."""

    rows: list[Row]
    late: Late | None
    withdrawn: Sequence[tuple[int, int]] = ()
    is_retry: bool = False


Steps = Generator[Request | Portion, Answer, None]

BUSY_PAUSE_SECONDS = 0.5  # seconds until a copy tries again if another copy has locked the place
OPERATOR_QUERY_SECONDS = 5.0  # between two queries for changes by operators
PROGRESS_LOG_SECONDS = 10.0  # between two log lines of a reader that catches up


class CatchUpLog:
    """Logs the progress of a reader that needs longer than `PROGRESS_LOG_SECONDS` for one batch of events."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._began_at = self._logged_at = time.monotonic()
        self._rows = self._ids = 0
        self._is_logged = False

    def note_page(self, row_count: int, passed_ids: int, remaining_ids: int) -> None:
        """Add a committed page to the progress. Logs the progress once in `PROGRESS_LOG_SECONDS`, while IDs remain.

        Args:
            row_count: the number of rows of the page.
            passed_ids: the number of IDs by which the page moved the place.
            remaining_ids: the number of IDs still to read.
        """
        self._rows += row_count
        self._ids += passed_ids
        now = time.monotonic()
        if now - self._logged_at < PROGRESS_LOG_SECONDS or not remaining_ids:
            return
        self._logged_at, self._is_logged = now, True
        seconds = now - self._began_at
        log.info(
            "Catching up",
            stream=self._stream,
            rows=self._rows,
            rows_per_second=round(self._rows / seconds),
            remaining_ids=remaining_ids,
            remaining_seconds=round(remaining_ids * seconds / self._ids) if self._ids else None,
        )

    def end(self) -> None:
        if self._is_logged:
            seconds = time.monotonic() - self._began_at
            log.info("Caught up", stream=self._stream, rows=self._rows, seconds=round(seconds, 1))


class _PlaceMoved(Exception):
    """The stored place has changed, or is locked. `is_locked`: another copy has locked the place, or it was deleted."""

    def __init__(self, *, is_locked: bool) -> None:
        self.is_locked = is_locked


class ReadProgram:
    """The program of one reader of one stream. Use a `Driver` to run `steps`.

    `promised`: the token up to which the reader has read and committed. `complete_token`: the token up to which the
    stream was complete at the last read of positions."""

    partition: int | None = None
    """Always None. `PartitionedReadProgram.partition` is the partition of the current portion."""

    def __init__(self, config: ReadConfig) -> None:
        self._config = config
        self.checkpoint_store = CheckpointStore(config.reader, config.stream, config.mode)
        self._checkpoint = ReaderCheckpoint()
        self._transaction_id = ""
        self._wait_log = WaitLog()
        self._has_logged_since = False
        self.time_outs = 0  # consecutive transactions of batches that the server ended
        self._timed_out_pause = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        self._handed_over_at = 0.0
        self._current_portion: Portion | None = None
        self._facts_upto: int | None = None  # the farthest ID that may have a fact; None: unknown
        self.promised = self.complete_token = ZERO

    def steps(self) -> Steps:
        """Yield requests and portions. Never ends. Raises only errors of the kind `Stop`."""
        while True:
            try:
                yield from self._follow()
            except _PlaceMoved as moved:
                yield CommitTransaction()  # releases the lock; nothing was written
                if moved.is_locked:
                    yield PlaceBusy(BUSY_PAUSE_SECONDS)
            except BatchTimedOut as problem:
                self._log_timed_out(problem)
                yield CloseSessions()
                yield Pause(self._timed_out_pause.next())
            except Unavailable as problem:
                yield CloseSessions()
                yield Pause(self._wait_log.pause_after(problem))

    def _log_timed_out(self, problem: BatchTimedOut) -> None:
        self.time_outs += 1
        log.warning(
            "The server ended the transaction of a batch before the service did: the batch is read again",
            reader=self._config.reader,
            stream=self._config.stream,
            times=self.time_outs,
            seconds=round(time.monotonic() - self._handed_over_at, 1),
            problem=problem.problem,
            do=f"raise {problem.setting}, or read fewer rows in a batch: Reader(rows=...)",
        )

    def _follow(self) -> Steps:
        """Follow the stream from the stored place. Returns, or raises `_PlaceMoved`, if the place was changed."""
        yield BeginTransaction()
        self._checkpoint = yield from self.checkpoint_store.load()
        yield CommitTransaction()
        since: Place | Token = self._checkpoint.place
        if self._checkpoint.version and self._config.since != ZERO and not self._has_logged_since:
            self._has_logged_since = True
            log.info(
                "Continuing from the stored place: since= is only for a reader without a stored place",
                reader=self._config.reader,
                stream=self._config.stream,
                place=str(_lowest_token(self._checkpoint.place)),
                since=str(self._config.since),
            )
        if not self._checkpoint.version and self._config.since != ZERO:
            since = self._config.since
            self._checkpoint = ReaderCheckpoint(place=Place.after(since))
        self.promised = _lowest_token(self._checkpoint.place)
        self._facts_upto = None
        follower = FollowProgram(self._config.stream, self._config.mode, since, reads_table=True)
        driver: Driver[Event | CaughtUp] = Driver(follower.steps())
        queried_at = -math.inf
        while True:
            events = yield from _next_events(driver)
            assert follower.place is not None
            self.complete_token = _token(follower.place)
            if events:
                yield from self._read_events(follower, events)
            is_new, self.promised = self.promised != self.complete_token, self.complete_token
            if is_new:
                self._report()
            if self._checkpoint.version and time.monotonic() - queried_at >= OPERATOR_QUERY_SECONDS:
                if (yield from self._apply_operator_changes()):
                    return
                queried_at = time.monotonic()

    def _apply_operator_changes(self) -> Generator[Request | Portion, Answer, bool]:
        """Hand over the parked facts to retry, each in its own transaction.

        Returns True, and hands over nothing, if an operator or another copy has changed the stored place."""
        version, retries = yield from self.checkpoint_store.read_operator_changes()
        if version != self._checkpoint.version:
            return True
        for id in retries:
            fact = Range(None, id - 1 if id > 0 else id + 1, id)
            yield from self._lock()
            if (yield from self.checkpoint_store.unpark(id)):
                statement, id_column = self._config.table.select([fact]), self._config.table.id
                fact_rows = yield from fetch_rows(RunSql("source", statement, id_column))
                if fact_rows:
                    yield self._begin_portion(fact_rows, None, is_retry=True)
                else:
                    log.warning("Unparked a fact that has no rows any more", stream=self._config.stream, id=id)
            yield from self._save(self._checkpoint)
        return False

    def _read_events(self, follower: FollowProgram, events: Sequence[Event]) -> Steps:
        """Hand over the rows of the events, late rows first, and move the place to the follower's place."""
        goal = follower.place
        assert goal is not None
        read_plan = plan(self._checkpoint, events, goal)
        if self._config.mode == "vector":
            ends = [span.id for span in read_plan.ranges]
            read_plan = read_plan.with_null_writer(self._checkpoint, self._facts_upto)
            before = _token(goal).farthest() if self._facts_upto is None else self._facts_upto
            self._facts_upto = max(before, *ends, key=abs) if ends else before
        if read_plan.missing_late_completions and self._checkpoint.version:
            raise LateUnknown(
                self._config.stream, read_plan.missing_late_completions.after, read_plan.missing_late_completions.number
            )
        if self._config.is_replica and (read_plan.ranges or read_plan.late):
            yield from wait_for_replica()
        for late in read_plan.late:
            yield from self._read_late(late, goal, follower.writer_count)
        remaining = [*read_plan.ranges]
        progress = CatchUpLog(self._config.stream)
        while True:
            before = count_ids(remaining)
            yield from self._lock()
            rest = remaining[RANGES_PER_QUERY:]
            page = (yield from self._page(remaining[:RANGES_PER_QUERY])) if remaining else TablePage([], [])
            remaining = [*page.unread, *rest]
            new = [row for row in page.rows if row[self._config.table.id] not in self._checkpoint.delivered_facts]
            if new:
                yield self._begin_portion(new, None)
            delivered = read_plan.select_delivered((row[self._config.table.id], self._writer_of(row)) for row in new)
            reached = read_plan.place_before(remaining)
            expired = () if remaining else self._expired_deliveries(read_plan.epochs, reached)
            yield from self._save(replace(self._checkpoint, place=reached), delivered, expired)
            progress.note_page(len(new), before - count_ids(remaining), count_ids(remaining))
            if not remaining:
                progress.end()
                return

    def _read_late(self, late: Late, goal: Place, writer_count: int) -> Steps:
        """Hand over the rows of a late completion. Raises `LateNeedsWriter`. `writer_count`: of the stream."""
        before = self._checkpoint
        remaining = [*late_parts(before, late, goal)]
        if self._config.table.writer is None:
            if writer_count > 1 and abs(late.id) - abs(late.prev) > 1 and late.facts:
                raise LateNeedsWriter(self._config.stream, late.writer, late.prev, late.id)
        elif remaining and (yield from self._may_include_null_writer(late)):
            remaining = [replace(span, has_null=True) for span in remaining]
        while remaining:
            yield from self._lock()
            span = remaining[0]
            page = (yield from self._page([span])) if late.facts else TablePage([], [])
            done, rows = page.unread[0].prev if page.unread else span.id, page.rows
            withdrawn: Sequence[tuple[int, int]] = ()
            if late.why == REGRESSED and not is_beyond(span.id, _position_of(before.place, late.writer)):
                done, withdrawn = yield from self._find_withdrawn(replace(span, id=done), rows)
                rows = [row for row in rows if not is_beyond(row[self._config.table.id], done)]
            rest = span.after(done)
            remaining = [*([rest] if rest else []), *remaining[1:]]
            if late.why == "skipped":
                rows = [row for row in rows if row[self._config.table.id] not in self._checkpoint.delivered_facts]
            if rows or withdrawn:
                yield self._begin_portion(rows, late, withdrawn)
            position = before.place.positions.get(late.writer, before.place.linear)
            ids = [row[self._config.table.id] for row in rows]
            remembered = [id for id in ids if late.why == "skipped" or is_beyond(id, position)]
            delivered = (DeliveredFact(id, late.writer, late.epoch) for id in remembered)
            yield from self._save(replace(self._checkpoint, late_part=(late.number, done)), delivered)
        yield from self._lock()
        reached = replace(self._checkpoint.place, late=late.number)
        must_read = (*self._checkpoint.must_read_ranges, *passed_by_events(before, late, goal))
        yield from self._save(replace(self._checkpoint, place=reached, must_read_ranges=must_read, late_part=None))

    def _may_include_null_writer(self, late: Late) -> Generator[Request, Answer, bool]:
        """Query whether the late completion includes the facts of its range whose writer is NULL.

        Raises `LateNeedsWriter` if it can include only some of these facts."""
        span = Range(late.writer, late.prev, late.id)
        (counts,) = yield from fetch_rows(RunSql("source", self._config.table.count_of_writer(span)))
        if not counts["have_none"] or counts["have_writer"] >= late.facts:
            return False
        if counts["have_writer"] + counts["have_none"] > late.facts:
            raise LateNeedsWriter(self._config.stream, late.writer, late.prev, late.id)
        return True

    def _begin_portion(
        self,
        rows: list[Row],
        late: Late | None,
        withdrawn: Sequence[tuple[int, int]] = (),
        *,
        is_retry: bool = False,
    ) -> Portion:
        self._handed_over_at = time.monotonic()
        self._current_portion = Portion(rows, late, withdrawn, is_retry)
        return self._current_portion

    def _find_withdrawn(
        self, span: Range, own_rows: Sequence[Row]
    ) -> Generator[Request, Answer, tuple[int, Sequence[tuple[int, int]]]]:
        """Query the IDs whose earlier facts no longer exist: all IDs of `span` without rows of other writers.
        `own_rows`: rows of the late completion. Returns the ID up to which `span` was checked, and the
        `absent_ranges`."""
        column = self._config.table.id
        everything = replace(span, writer=None, besides=frozenset(), has_null=False)
        with_rows = yield from fetch_rows(RunSql("source", self._config.table.ids(everything, IDS_PER_QUERY)))
        present = [row[column] for row in with_rows]
        done = present[-1] if len(present) == IDS_PER_QUERY else span.id
        own_ids = {row[column] for row in own_rows}
        if self._config.table.where is not None:  # rows of the writer that `where` excludes
            writer_rows = yield from fetch_rows(RunSql("source", self._config.table.ids(span, IDS_PER_QUERY)))
            own_ids |= {row[column] for row in writer_rows}
        return done, absent_ranges(span.prev, done, [id for id in present if id not in own_ids])

    def _page(self, ranges: Sequence[Range]) -> Generator[Request, Answer, TablePage]:
        return read_table_page(self._config.table, ranges, self._config.rows)

    def _writer_of(self, row: Row) -> str | None:
        writer = None if self._config.table.writer is None else row[self._config.table.writer]
        return None if writer is None else str(writer)

    def _expired_deliveries(self, epochs: Mapping[str, int], place: Place) -> Iterator[int]:
        """Yield the delivered IDs that cannot be read again: passed by the place, and of an earlier epoch."""
        for fact in self._checkpoint.delivered_facts.values():
            position = place.positions.get(fact.writer, place.linear)
            if epochs.get(fact.writer, fact.epoch) > fact.epoch and not is_beyond(fact.id, position):
                yield fact.id

    def _lock(self) -> Generator[Request, Answer, None]:
        """Begin a transaction and lock the place, so that no other copy moves the place. Raises `_PlaceMoved`."""
        yield BeginTransaction()
        locked = yield from self.checkpoint_store.lock()
        if locked is None or locked[0] != self._checkpoint.version:
            raise _PlaceMoved(is_locked=locked is None)
        self._transaction_id = locked[1]

    def _save(
        self, checkpoint: ReaderCheckpoint, added_facts: Iterable[DeliveredFact] = (), expired_ids: Iterable[int] = ()
    ) -> Generator[Request, Answer, None]:
        """Store the checkpoint, commit the transaction, and report the progress."""
        new, removed = {fact.id: fact for fact in added_facts}, {*expired_ids}
        delivered = {id: fact for id, fact in {**checkpoint.delivered_facts, **new}.items() if id not in removed}
        must_read = unread_ranges(checkpoint.must_read_ranges, checkpoint.place)
        checkpoint = replace(checkpoint, must_read_ranges=must_read, delivered_facts=delivered)
        version = yield from self.checkpoint_store.save(checkpoint, new.values(), removed, self._transaction_id)
        yield CommitTransaction()
        self._checkpoint = replace(checkpoint, version=version)
        self.promised = _lowest_token(checkpoint.place)
        self._wait_log.note_success()
        self._report()
        self.time_outs = 0
        self._timed_out_pause.reset()
        self._current_portion = None

    def _report(self) -> None:
        if self._config.observe is None:
            return
        portion = self._current_portion
        progress = ReadProgress(
            self._config.reader,
            self._config.stream,
            self.promised,
            max(0, abs(self.complete_token.linear) - abs(self.promised.linear)),
            0 if portion is None else len(portion.rows),
            portion is not None and portion.late is not None,
            0.0 if portion is None else time.monotonic() - self._handed_over_at,
            self.time_outs,
        )
        try:
            self._config.observe(progress)
        except Exception as problem:  # noqa: BLE001 - metrics must not stop a reader
            log.warning("The function observe= of a reader failed", reader=self._config.reader, problem=repr(problem))


def _token(place: Place) -> Token:
    return Token.of(place.linear, place.positions)


def _lowest_token(place: Place) -> Token:
    """A token whose linear part is the lowest position of the place: a writer may be below `place.linear`."""
    return Token.of(min((place.linear, *place.positions.values()), key=abs), place.positions)


def _next_events(driver: Driver[Event | CaughtUp]) -> Generator[Request, Answer, list[Event]]:
    """Run the follower until its next `CaughtUp`. Returns the events before the `CaughtUp`."""
    events: list[Event] = []
    while True:
        step = driver.step()
        assert step is not None
        if isinstance(step, Request):
            try:
                answer = yield step
            except Unavailable as problem:
                driver.throw(problem)
            else:
                driver.send_answer(answer)
            continue
        driver.mark_handed_over()
        if isinstance(step, CaughtUp):
            return events
        events.append(step)
