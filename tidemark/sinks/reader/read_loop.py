"""The program behind `Reader`: follows a stream, reads the rows that its moves stand for, keeps the place. No sockets.

Every portion of rows goes with the place after it in one transaction of the reader's own database, which begins with a
lock on the place's row: so what comes of a portion is done once, whatever is killed, and however many copies run.

`plan` says what to read for a burst of events. Late completions are read before the ranges of the burst. A late range
has up to three parts:

- The part at or below the place: its rows are handed over as late.
- The part that the burst passes is `owed`: the table is read there whatever the evidence says.
- The part beyond the burst (of an incarnation that was thrown out) may never be passed. Its rows are handed over as
  late, and remembered, so that a place that does come there does not hand them over again.

A fact may be committed in time and announced late, after an operator skipped its ID. So facts that were read in a
skipped range are remembered until the writer's next epoch: from then on the writer is a zombie (docs/design.md 3).
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tidemark.common.backoff import WaitLog
from tidemark.common.errors import BadSetting, LateNeedsWriter, LateUnknown, Unavailable
from tidemark.sinks.reader.checkpoint import CheckpointStore, DeliveredFact, ReaderCheckpoint
from tidemark.sinks.reader.databases import caught_up
from tidemark.sinks.reader.events import Advance, Event, Late, LateLost, LinearMove, Place, Reread
from tidemark.sinks.reader.follow import CaughtUp, FollowProgram, Mode
from tidemark.sinks.reader.requests import (
    Answer,
    BeginTransaction,
    CloseSessions,
    CommitTransaction,
    Driver,
    Pause,
    Request,
    Row,
    RunSql,
    rows,
)
from tidemark.sinks.reader.table import Range, Table, TablePage, table_page
from tidemark.sinks.reader.token import ZERO, Token
from tidemark.streaming.values.direction import beyond, farther


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """`goal` is the place after the burst. `read` are the ranges that may hold facts, one per writer; the rest of the
    way is proven empty. `skipped` pairs an advance's epoch with the range of it that an operator may have skipped."""

    goal: Place
    read: tuple[Range, ...]
    skipped: tuple[tuple[int, Range], ...]
    late: tuple[Late, ...]
    lost: LateLost | None
    epochs: Mapping[str, int]
    owed: tuple[Range, ...] = ()

    def place(self, left: Sequence[Range]) -> Place:
        """The reader's place while `left` of the ranges has still to be read."""
        line = next((span.prev for span in left if span.writer is None), self.goal.linear)
        writers = {span.writer: span.prev for span in left if span.writer is not None}
        is_settled = self.goal.is_settled and all(span.writer is not None or span.has_null for span in left)
        return Place(line, {**self.goal.positions, **writers}, self.goal.late, is_settled)

    def with_null(self, kept: ReaderCheckpoint, facts_upto: int | None) -> "ReadPlan":
        """With the rows whose writer is NULL: no position is theirs but the linear one.

        `facts_upto` is the farthest ID that may hold a fact, as far as moves before this burst showed; None: not known.
        """
        span = Range(None, kept.place.linear, self.goal.linear, has_null=True)
        if any(it.writer is None for it in self.read) or not beyond(span.id, span.prev):
            return self
        farthest = [farther(facts_upto, span.prev)] if facts_upto is not None else [span.id]
        if not any(beyond(id, span.prev) for id in (*farthest, *(it.id for it in (*self.read, *self.owed)))):
            return self
        return replace(self, read=(*self.read, span))

    def doubtful(self, ids: Iterable[tuple[int, str | None]]) -> Iterator[DeliveredFact]:
        """Of the (ID, writer if the row tells it) those for which a late completion may still come."""
        for id, writer in ids:
            for epoch, span in self.skipped:
                if span.holds(id) and writer in {None, span.writer}:
                    assert span.writer is not None
                    yield DeliveredFact(id, span.writer, epoch)
                    break


def plan(kept: ReaderCheckpoint, events: Sequence[Event], goal: Place) -> ReadPlan:
    """`goal` is the follower's place after the `events`, which all come after the place that is `kept`."""
    moves = [event for event in events if isinstance(event, Advance | Reread | LinearMove)]
    lost = next((event for event in events if isinstance(event, LateLost)), None)
    owed = [*kept.owed, *(span for event in events if isinstance(event, Late) for span in owes(kept, event, goal))]
    spans: dict[str | None, Range] = {}
    needed: set[str | None] = set()
    for move in moves:
        whose = None if isinstance(move, LinearMove) else move.writer
        besides = move.besides if isinstance(move, Reread) else frozenset[str]()
        first = spans.get(whose)
        spans[whose] = Range(whose, first.prev if first else move.prev, move.id, besides)
        # A JOIN says of a table that is older than its stream that nothing is open there, not that it has no rows.
        if lost or not kept.place.is_settled or not move.proven_empty:
            needed.add(whose)
    for whose, span in spans.items():
        if any(_concerns(it, span) for it in owed):
            needed.add(whose)
    advances = [
        advance
        for move in moves
        for advance in (move.advances if isinstance(move, LinearMove) else (move,))
        if isinstance(advance, Advance)
    ]
    return ReadPlan(
        goal,
        tuple(span for whose, span in spans.items() if whose in needed),
        tuple((it.epoch, Range(it.writer, it.prev, it.id)) for it in advances if it.evidence.skipped),
        tuple(event for event in events if isinstance(event, Late)),
        lost,
        {it.writer: it.epoch for it in advances},
        tuple(owed),
    )


def owes(kept: ReaderCheckpoint, late: Late, goal: Place) -> Iterator[Range]:
    """The part of a late range that the burst passes."""
    yield from _parts(kept, late, goal)[1]


def hands_over(kept: ReaderCheckpoint, late: Late, goal: Place) -> Iterator[Range]:
    """The parts of a late range whose rows are handed over as late now, in order."""
    passed, _, beyond_it = _parts(kept, late, goal)
    for span in (*passed, *beyond_it):
        begun = kept.late_part if kept.late_part and kept.late_part[0] == late.number else None
        part = span.after(begun[1]) if begun else span
        if part is not None:
            yield part


def still_owed(owed: Iterable[Range], place: Place) -> tuple[Range, ...]:
    return tuple(span for span in owed if beyond(span.id, _at(place, span.writer)))


def _parts(kept: ReaderCheckpoint, late: Late, goal: Place) -> tuple[list[Range], list[Range], list[Range]]:
    """The parts that were passed, that the burst passes, and beyond; all empty where nothing but voids came late."""
    if not late.facts:
        return [], [], []
    span = Range(late.writer, late.prev, late.id)
    here, there = _at(kept.place, late.writer), _at(goal, late.writer)
    rest = span.after(here)
    between = rest.upto(there) if rest else None
    parts = (span.upto(here), between, span.after(farther(here, there)))
    passed, passing, ahead = ([part] if part else [] for part in parts)
    return passed, passing, ahead


def _at(place: Place, writer: str | None) -> int:
    return place.linear if writer is None else place.positions.get(writer, place.linear)


def _concerns(owed: Range, span: Range) -> bool:
    same = span.writer in {None, owed.writer} and owed.writer not in span.besides
    return same and beyond(owed.id, span.prev) and beyond(span.id, owed.prev)


RANGES = 64  # in one query


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """`reader` names the place; `since` is where it begins the first time. A portion has at most `rows` rows, or one
    fact. `replica`: the backing table is read from a replica, which has to catch up first."""

    stream: str
    table: Table
    reader: str
    mode: Mode
    since: Token
    rows: int
    replica: bool

    def __post_init__(self) -> None:
        if self.mode == "vector" and self.table.writer is None:
            raise BadSetting("table", "in vector mode, say which column names a row's writer: Table(..., writer=...)")
        if self.rows < 1:
            raise BadSetting("rows", "a batch has at least one row")


@dataclass(frozen=True, slots=True)
class Portion:
    """Rows to be handed over, in a transaction that is open and that ends when the program goes on. `late`: what they
    come late of, None for rows in their order."""

    rows: list[Row]
    late: Late | None


Steps = Generator[Request | Portion, Answer, None]


BUSY = 0.5  # seconds until a copy looks again whose place another one has in hand


class _PlaceMoved(Exception):
    """Another copy of the reader has moved the place, or (`busy`) has it in hand."""

    def __init__(self, *, busy: bool) -> None:
        self.busy = busy


class ReadProgram:
    """One reader of one stream. `steps` never ends; it raises errors of the kind `Stop`.

    `promised` is what it has read and committed, `usable` what is complete as far as it knows.
    """

    def __init__(self, config: ReadConfig) -> None:
        self._config = config
        self.ledger = CheckpointStore(config.reader, config.stream, config.mode)
        self._kept = ReaderCheckpoint()
        self._transaction = ""
        self._patience = WaitLog()
        self._facts_upto: int | None = None  # the farthest ID that may hold a fact of the table
        self.promised = self.usable = ZERO

    def steps(self) -> Steps:
        while True:
            try:
                yield from self._follow()
            except _PlaceMoved as moved:
                yield CommitTransaction()  # of nothing: it lets the place's row go
                if moved.busy:
                    yield Pause(BUSY)
            except Unavailable as problem:
                yield CloseSessions()
                yield Pause(self._patience.pause_after(problem))

    def _follow(self) -> Steps:
        """From the place that is kept, until it moves without us or a database fails."""
        self._kept = yield from self.ledger.load()
        since: Place | Token = self._kept.place
        if not self._kept.version and self._config.since != ZERO:
            since = self._config.since
            self._kept = ReaderCheckpoint(place=Place.after(since))
        self.promised = _least(self._kept.place)
        self._facts_upto = None
        following = FollowProgram(self._config.stream, self._config.mode, since, reads_table=True)
        driver: Driver[Event | CaughtUp] = Driver(following.steps())
        while True:
            events = yield from _burst(driver)
            assert following.place is not None
            self.usable = _token(following.place)
            if events:
                yield from self._read(following, events)
            self.promised = self.usable

    def _read(self, following: FollowProgram, events: Sequence[Event]) -> Steps:
        """Bring the place to where the follower is."""
        goal = following.place
        assert goal is not None
        work = plan(self._kept, events, goal)
        if self._config.mode == "vector":
            ends = [span.id for span in work.read]
            work = work.with_null(self._kept, self._facts_upto)
            before = _token(goal).farthest() if self._facts_upto is None else self._facts_upto
            self._facts_upto = max(before, *ends, key=abs) if ends else before
        if work.lost and self._kept.version:
            raise LateUnknown(self._config.stream, work.lost.after, work.lost.number)
        if self._config.replica and (work.read or work.late):
            yield from caught_up()
        for late in work.late:
            yield from self._read_late(late, goal, following.writers)
        left = [*work.read]
        while True:
            yield from self._lock()
            rest = left[RANGES:]
            found = (yield from self._page(left[:RANGES])) if left else TablePage([], [])
            left = [*found.left, *rest]
            new = [row for row in found.rows if row[self._config.table.id] not in self._kept.delivered]
            if new:
                yield Portion(new, None)
            doubtful = work.doubtful((row[self._config.table.id], self._writer(row)) for row in new)
            place = work.place(left)
            past = () if left else self._past(work.epochs, place)
            yield from self._save(replace(self._kept, place=place), doubtful, past)
            if not left:
                return

    def _read_late(self, late: Late, goal: Place, writers: int) -> Steps:
        before = self._kept
        left = [*hands_over(before, late, goal)]
        if self._config.table.writer is None:
            if writers > 1 and abs(late.id) - abs(late.prev) > 1 and late.facts:
                raise LateNeedsWriter(self._config.stream, late.writer, late.prev, late.id)
        elif left and (yield from self._may_be_of_null(late)):
            left = [replace(span, has_null=True) for span in left]
        while left:
            yield from self._lock()
            found = yield from self._page(left[:1])
            done = found.left[0].prev if found.left else left[0].id
            left = [*found.left, *left[1:]]
            rows = found.rows
            if late.why == "skipped":
                rows = [row for row in rows if row[self._config.table.id] not in self._kept.delivered]
            if rows:
                yield Portion(rows, late)
            stands = before.place.positions.get(late.writer, before.place.linear)
            ids = [row[self._config.table.id] for row in rows]
            remembered = [id for id in ids if late.why == "skipped" or beyond(id, stands)]
            delivered = (DeliveredFact(id, late.writer, late.epoch) for id in remembered)
            yield from self._save(replace(self._kept, late_part=(late.number, done)), delivered)
        yield from self._lock()
        place = replace(self._kept.place, late=late.number)
        owed = (*self._kept.owed, *owes(before, late, goal))
        yield from self._save(replace(self._kept, place=place, owed=owed, late_part=None))

    def _may_be_of_null(self, late: Late) -> Generator[Request, Answer, bool]:
        """Whether rows whose writer is NULL are the facts that came late. Raises `LateNeedsWriter` if some are not."""
        span = Range(late.writer, late.prev, late.id)
        (found,) = yield from rows(RunSql("source", self._config.table.count_of_writer(span)))
        if not found["have_none"] or found["have_writer"] >= late.facts:
            return False
        if found["have_writer"] + found["have_none"] > late.facts:
            raise LateNeedsWriter(self._config.stream, late.writer, late.prev, late.id)
        return True

    def _page(self, ranges: Sequence[Range]) -> Generator[Request, Answer, TablePage]:
        return table_page(self._config.table, ranges, self._config.rows)

    def _writer(self, row: Row) -> str | None:
        writer = None if self._config.table.writer is None else row[self._config.table.writer]
        return None if writer is None else str(writer)

    def _past(self, epochs: Mapping[str, int], place: Place) -> Iterator[int]:
        """IDs handed over of which no late completion can come any more: their writer is in a later epoch."""
        for it in self._kept.delivered.values():
            stands = place.positions.get(it.writer, place.linear)
            if epochs.get(it.writer, it.epoch) > it.epoch and not beyond(it.id, stands):
                yield it.id

    def _lock(self) -> Generator[Request, Answer, None]:
        """Begin a transaction in which nobody else moves the place. Raises `_PlaceMoved`."""
        yield BeginTransaction()
        locked = yield from self.ledger.lock()
        if locked is None or locked[0] != self._kept.version:
            raise _PlaceMoved(busy=locked is None)
        self._transaction = locked[1]

    def _save(
        self, kept: ReaderCheckpoint, more: Iterable[DeliveredFact] = (), past: Iterable[int] = ()
    ) -> Generator[Request, Answer, None]:
        """Write the place and commit it, with all that was done in the transaction."""
        added, gone = {it.id: it for it in more}, {*past}
        delivered = {id: it for id, it in {**kept.delivered, **added}.items() if id not in gone}
        kept = replace(kept, owed=still_owed(kept.owed, kept.place), delivered=delivered)
        version = yield from self.ledger.save(kept, added.values(), gone, self._transaction)
        yield CommitTransaction()
        self._kept = replace(kept, version=version)
        self.promised = _least(kept.place)
        self._patience.succeeded()


def _token(place: Place) -> Token:
    return Token.of(place.linear, place.positions)


def _least(place: Place) -> Token:
    """Of a place among ranges that are still to be read: writers may stand below its linear position."""
    return Token.of(min((place.linear, *place.positions.values()), key=abs), place.positions)


def _burst(driver: Driver[Event | CaughtUp]) -> Generator[Request, Answer, list[Event]]:
    """All events up to where there is nothing to do but wait."""
    events: list[Event] = []
    while True:
        step = driver.step()
        assert step is not None
        if isinstance(step, Request):
            try:
                answer = yield step
            except Unavailable as problem:
                driver.failed(problem)
            else:
                driver.answered(answer)
            continue
        driver.handed_over()
        if isinstance(step, CaughtUp):
            return events
        events.append(step)
