"""`tidemark trace`: the life of one ID, from its record in Kafka to the position that shows it.

Postgres says in which batch it was settled, and so between which offsets its record lies; there Kafka is read, and a
record that retention removed is said to be gone. Only its record says whose an ID is: every writer's position passes
it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal

from tidemark.app.behind import moment
from tidemark.common.errors import BadRecord, TidemarkError
from tidemark.sinks.dead_letters import DeadLetter
from tidemark.sinks.postgres.inspect import BatchAdvance, IdPast, LateFact, LinePassed, OffsetRange, PastGap
from tidemark.sinks.postgres.operators import ListedAct
from tidemark.sources.kafka_lookup import Recorded, RecordedMessage
from tidemark.streaming.core import codec as state
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.wire import records

KEPT: Final = 100  # records
LONGEST: Final = 16_384  # characters of a record

Says = Literal["fact", "void", "announced", "settled", "passed", "mentions"]
Stands = Literal["complete", "owed", "silent", "unknown"]


@dataclass(frozen=True, slots=True)
class TracedRecord:
    """A record that says something of the ID. `text` is its value; `cut`: of a longer one the beginning."""

    topic: str
    partition: int
    offset: int
    time: datetime
    kind: str | None
    writer: str | None
    epoch: int | None
    says: Says
    text: str
    cut: bool


@dataclass(frozen=True, slots=True)
class WriterStand:
    """Where an active writer is with the ID: `complete` waits for the gap `(low, top]` below it, `owed` lies in that
    gap, a `silent` one has told nothing beyond `low`, and an `unknown` one never joined."""

    writer: str
    epoch: int
    stands: Stands
    low: int | None = None
    top: int | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Looked:
    """Where in Kafka: offsets `[first, end)` of a partition, of which `[wanted, end)` may hold the record, and from
    `kept` on retention left what there was."""

    topic: str
    partition: int
    first: int
    end: int
    wanted: int
    kept: int


@dataclass(slots=True)
class IdTrace:
    """All that is known of one ID. `linear`: the line now; `highest`: the highest ID that any record named. `writer` is
    whose it is, where a record says so; `unread` the first offset that no batch has read. `published` (Redis's clock)
    is when that writer's position passed it there. `unknown` says in sentences what could not be asked."""

    stream: str
    id: int
    linear: int
    highest: int
    known: bool
    passed: bool
    writer: str | None = None
    unread: int = 0
    records: list[TracedRecord] = field(default_factory=list)
    looked: Looked | None = None
    settled: list[BatchAdvance] = field(default_factory=list)
    offsets: list[OffsetRange] = field(default_factory=list)
    standing: list[WriterStand] = field(default_factory=list)
    gaps: list[PastGap] = field(default_factory=list)
    line: LinePassed | None = None
    late: list[LateFact] = field(default_factory=list)
    acts: list[ListedAct] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    published: datetime | None = None
    unknown: list[str] = field(default_factory=list)


def of_postgres(past: IdPast, stream: str, encoded: bytes, id: int) -> IdTrace:
    """What Postgres tells."""
    now = state.decode(encoded)
    signed = now.direction.signed
    known = not now.direction.opposes(Direction.of(id)) and abs(id) <= now.allocated
    passed = known and abs(id) <= now.line.position
    it = IdTrace(stream, id, signed(now.line.position), signed(now.allocated), known, passed)
    if not known:
        return it
    it.settled = past.settled(stream, id)
    if it.settled:
        it.line = past.passed(stream, id, it.settled[0].time)
    it.standing = [*_standing(now, id)]
    it.late, it.acts = past.late(stream, id), past.acts_about(stream, id)
    return it


def _standing(now: StreamState, id: int) -> Iterator[WriterStand]:
    signed, at = now.direction.signed, abs(id)
    for (name, epoch), held in sorted(now.held.items()):
        yield WriterStand(name, epoch, "unknown", since=moment(held.since))
    for name, known in sorted(now.writers.items()):
        if known.retired is not None or known.position >= at:
            continue
        chain = known.chain
        gap = next(((low, top, since) for low, top, since in reversed([*chain.gaps()]) if low < at), None)
        if gap is None or chain.reach < at:
            yield WriterStand(name, known.epoch, "silent", signed(max(chain.reach, 0)))
            continue
        low, top, since = gap
        yield WriterStand(
            name, known.epoch, "owed" if at <= top else "complete", signed(low), signed(top), moment(since)
        )


def home(encoded: bytes) -> int | None:
    """The partition in which the stream's records lie; None: not known yet."""
    return state.decode(encoded).home


def of_kafka(it: IdTrace, past: IdPast, kafka: Recorded, topic: str, partition: int, most: int) -> None:
    """Add what at most `most` records of the partition tell, and what follows from whose ID it is."""
    kept, end = kafka.bounds(topic, partition)
    it.unread = past.next_offset(topic, partition) or 0
    first, last = _range(it, past, topic, partition)
    end = min(end, end if last is None else last)
    wanted = first or 0
    begin = max(wanted, kept, end - most)
    key = it.stream.encode()
    for message in kafka.between(topic, partition, begin, end):
        if message.key == key and (found := told(message, it.id)) is not None and len(it.records) < KEPT:
            it.records.append(found)
    it.looked = Looked(topic, partition, begin, max(begin, end), wanted, kept)
    completing = [found for found in it.records if found.says in ("fact", "void") and found.offset < it.unread]
    if completing:
        it.writer = completing[0].writer
        it.settled = [move for move in it.settled if move.writer == it.writer]
        it.standing = [one for one in it.standing if one.writer == it.writer or one.stands == "unknown"]
    it.gaps = _gaps(it, past, min((found.time for found in completing), default=None))
    if it.settled:
        it.offsets = past.offsets(it.settled[0].batch, it.settled[0].time)


def _range(it: IdTrace, past: IdPast, topic: str, partition: int) -> tuple[int | None, int | None]:
    """Between which offsets its record lies, as far as the batches that are noted tell; without an end where it may be
    the next to come."""
    if not it.known:
        return it.unread, None
    times = [*(move.time for move in it.settled[:1]), *(gap.opened for gap in _gaps(it, past, None))]
    first = past.read_before(topic, partition, min(times)) if times else None
    if it.standing or not it.settled:
        return first, None
    ends = {
        read.last + 1
        for move in {move.batch: move for move in it.settled}.values()
        for read in past.offsets(move.batch, move.time)
        if (read.topic, read.partition) == (topic, partition)
    }
    return first, max(ends, default=it.unread)


def _gaps(it: IdTrace, past: IdPast, arrived: datetime | None) -> list[PastGap]:
    """Those that it lies in, and those below it that were open when it was complete, which was at `arrived` if that is
    known."""
    settled = min((move.time for move in it.settled), default=None)
    since = min((time for time in (settled, arrived) if time is not None), default=None)
    known = {move.writer for move in it.settled} | {one.writer for one in it.standing}
    writers = known if it.writer is None else {it.writer}
    found = past.below(it.stream, it.id, writers, since)
    return [gap for gap in found if gap.closed is None or settled is None or gap.opened <= settled]


def told(message: RecordedMessage, id: int) -> TracedRecord | None:
    """What a message says of the ID; None: nothing."""
    value = message.value or b""
    kind = writer = epoch = None
    try:
        record = records.decode(message.value)
    except BadRecord:
        says: Says | None = "mentions" if _has_number(value, id) else None
    else:
        says = said(record, id)
        kind, writer = records.kind_of(record).name, record.writer
        epoch = max(record.epoch, 0)
    if says is None:
        return None
    text = value.decode(errors="replace")
    place = message.topic, message.partition, message.offset, moment(max(message.time, 0))
    return TracedRecord(*place, kind, writer, epoch, says, text[:LONGEST], cut=len(text) > LONGEST)


def _has_number(value: bytes, id: int) -> bool:
    text = str(id).encode()
    at = value.find(text)
    while at >= 0:
        around = value[max(at - 1, 0) : at] + value[at + len(text) : at + len(text) + 1]
        if not any(chr(it).isdigit() or it == ord("-") for it in around):
            return True
        at = value.find(text, at + 1)
    return False


def said(record: records.Record, id: int) -> Says | None:
    """What a record of the stream says of the ID."""
    match record:
        case records.Rdata(id=int(top)):
            return _edge(records.start(record), top, id, "fact")
        case records.Void():
            return _edge(record.prev, record.id, id, "void")
        case records.FactRun():
            for prev, top, rows in zip([record.prev, *record.ids], record.ids, record.rows, strict=False):
                if (found := _edge(prev, top, id, "fact" if rows else "void")) is not None:
                    return found
        case records.Position():
            return "announced" if _holds(record.prev, record.id, id) else None
        case records.Skip():
            return "settled" if _holds(record.prev, record.id, id) else None
        case records.Join() | records.Retire():
            return "settled" if _holds(0, record.id, id) else None
    return None


def _edge(prev: int, top: int, id: int, completed: Says) -> Says | None:
    if top == id:
        return completed
    return "passed" if _holds(prev, top, id) else None


def _holds(prev: int, top: int, id: int) -> bool:
    return (id > 0) == (top > 0) and abs(prev) < abs(id) <= abs(top)


def of_letters(it: IdTrace, letters: Sequence[DeadLetter]) -> None:
    """Add the dead letters of the stream that say something of the ID."""
    for letter in letters:
        if letter.stream != it.stream or len(it.dead_letters) == KEPT:
            continue
        message = RecordedMessage("", letter.partition, letter.offset, letter.time, letter.key, letter.value)
        found = told(message, it.id)
        if found is not None and found.says not in ("passed", "settled"):
            it.dead_letters.append(letter)


def of_redis(it: IdTrace, published: Callable[[str, str, int], int | None]) -> None:
    """Add when it was published: when its writer's position passed it; of one whose writer is not known, the last."""
    writer = it.settled[-1].writer if it.settled and (it.passed or it.writer is not None) else None
    if writer is not None and (time := published(it.stream, writer, it.id)) is not None:
        it.published = moment(time)


def asking(it: IdTrace, what: str, ask: Callable[[], None]) -> None:
    """Note where a server does not answer: what the others tell is worth having."""
    try:
        ask()
    except TidemarkError as problem:
        it.unknown.append(f"{what}: {problem}")
