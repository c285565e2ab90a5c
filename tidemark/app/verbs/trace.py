"""`tidemark trace`: the history of one ID, from its record in Kafka to the position that shows it.

Postgres has the batch that settled the ID, and so the offsets between which its record lies. Kafka is read there, and
if retention removed the record, the output says so. Only the record tells which writer an ID belongs to, because the
positions of all writers pass it.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

import click

from tidemark.app.commands import MOST_ID, CommandFailed, OurCommand, loaded, no_stream
from tidemark.app.diagnosis.open_ranges import moment
from tidemark.app.output import as_object, count, duration, echo, id_range, ids, plain, progress, sanitize, timestamp
from tidemark.app.settings import Settings
from tidemark.app.verbs import dead_letters as letters
from tidemark.app.verbs.dead_letters import LOOKED
from tidemark.app.verbs.explain import CLOSED, evidence, offsets
from tidemark.common.errors import BadRecord, TidemarkError
from tidemark.sinks.dead_letters import DeadLetter, DeadLetterReader, DeadLettersConfig
from tidemark.sinks.postgres.inspect import BatchAdvance, IdInspection, LateFact, LinearPassed, OffsetRange, StoredGap
from tidemark.sinks.postgres.operators import OverrideEntry
from tidemark.sinks.redis.publish import Redis, RedisConfig
from tidemark.sources.kafka_lookup import RecordedMessage, RecordReader
from tidemark.sources.topics import Topics
from tidemark.streaming.core import codec
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.values.direction import Direction, beyond
from tidemark.streaming.wire import records

KEPT: Final = 100  # records
LONGEST: Final = 16_384  # characters of a record

Says = Literal["fact", "void", "announced", "settled", "passed", "mentions"]
Stands = Literal["complete", "owed", "silent", "unknown"]


@dataclass(frozen=True, slots=True)
class TracedRecord:
    """A record that is about the ID. `text` is its value; `cut`: only the beginning of the value."""

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
    """The state of the ID at an active writer: `complete` (above the open gap `(low, top]`), `owed` (in that gap),
    `silent` (the writer sent nothing beyond `low`) or `unknown` (the writer never joined)."""

    writer: str
    epoch: int
    stands: Stands
    low: int | None = None
    top: int | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Looked:
    """The offsets `[first, end)` of a partition that were read. The record can be in `[wanted, end)`; retention removed
    all offsets below `kept`."""

    topic: str
    partition: int
    first: int
    end: int
    wanted: int
    kept: int


@dataclass(slots=True)
class IdTrace:
    """All that is known of one ID. `linear`: the linear position now; `highest`: the allocated ID. `writer`: the ID's
    writer, if a record names it; `unread`: the first offset that no batch has read. `published`: when that writer's
    position passed the ID in Redis, by Redis's clock. `unknown`: sentences about servers that did not answer."""

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
    gaps: list[StoredGap] = field(default_factory=list)
    line: LinearPassed | None = None
    late: list[LateFact] = field(default_factory=list)
    acts: list[OverrideEntry] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    published: datetime | None = None
    unknown: list[str] = field(default_factory=list)


def of_postgres(past: IdInspection, stream: str, encoded: bytes, id: int) -> IdTrace:
    """What is in Postgres."""
    now = codec.decode(encoded)
    signed = now.direction.signed
    known = not now.direction.opposes(Direction.of(id)) and abs(id) <= now.allocated
    passed = known and abs(id) <= now.linear.position
    it = IdTrace(stream, id, signed(now.linear.position), signed(now.allocated), known, passed)
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
    for (name, epoch), held in sorted(now.unjoined.items()):
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


def home_partition(encoded: bytes) -> int | None:
    """The partition of the stream's records; None if it is not known yet."""
    return codec.decode(encoded).home


def of_kafka(it: IdTrace, past: IdInspection, kafka: RecordReader, topic: str, partition: int, most: int) -> None:
    """Add what at most `most` records of the partition say, and what follows from the ID's writer."""
    kept, end = kafka.bounds(topic, partition)
    it.unread = past.next_offset(topic, partition) or 0
    first, last = _range(it, past, topic, partition)
    end = min(end, end if last is None else last)
    wanted = first or 0
    begin = max(wanted, kept, end - most)
    key = it.stream.encode()
    for message in _shown(kafka.between(topic, partition, begin, end), end - begin):
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


def _shown(messages: Iterable[RecordedMessage], number: int) -> Iterator[RecordedMessage]:
    """The messages, of which a terminal sees the progress."""
    with progress("reading Kafka", number, "record") as advance:
        for message in messages:
            yield message
            advance(1)


def _range(it: IdTrace, past: IdInspection, topic: str, partition: int) -> tuple[int | None, int | None]:
    """The offsets between which the record lies, from the stored batches; without an end if the record may still
    come."""
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


def _gaps(it: IdTrace, past: IdInspection, arrived: datetime | None) -> list[StoredGap]:
    """The gaps that contain the ID, and the gaps below it that were open when it completed (at `arrived`, if known)."""
    settled = min((move.time for move in it.settled), default=None)
    since = min((time for time in (settled, arrived) if time is not None), default=None)
    known = {move.writer for move in it.settled} | {one.writer for one in it.standing}
    writers = known if it.writer is None else {it.writer}
    found = past.below(it.stream, it.id, writers, since)
    return [gap for gap in found if gap.closed is None or settled is None or gap.opened <= settled]


def told(message: RecordedMessage, id: int) -> TracedRecord | None:
    """What a message says about the ID; None if it says nothing."""
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
    """What a record of the stream says about the ID."""
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
    """Add the dead letters of the stream that are about the ID."""
    for letter in letters:
        if letter.stream != it.stream or len(it.dead_letters) == KEPT:
            continue
        message = RecordedMessage("", letter.partition, letter.offset, letter.time, letter.key, letter.value)
        found = told(message, it.id)
        if found is not None and found.says not in ("passed", "settled"):
            it.dead_letters.append(letter)


def of_redis(it: IdTrace, published: Callable[[str, str, int], int | None]) -> None:
    """Add when the ID was published: when the position of its writer passed it, or if that is unknown the last."""
    writer = it.settled[-1].writer if it.settled and (it.passed or it.writer is not None) else None
    if writer is not None and (time := published(it.stream, writer, it.id)) is not None:
        it.published = moment(time)


def asking(it: IdTrace, what: str, ask: Callable[[], None]) -> None:
    """Note that a server does not answer, and go on: the answers of the others are still useful."""
    try:
        ask()
    except TidemarkError as problem:
        it.unknown.append(f"{what}: {problem}")


SHOWN: Final = 10  # of each kind; the JSON has all
LINE: Final = 300  # characters of a record

_SAYS: Final[dict[Says, str]] = {
    "fact": "it has the fact",
    "void": "the ID was rolled back",
    "announced": "this writer has no fact there",
    "settled": "settles all IDs of this writer up to a higher ID",
    "passed": "the ID is not of this writer",
    "mentions": "unreadable, but contains the number",
}
_STANDS: Final[dict[Stands, str]] = {
    "complete": "has completed the ID and waits for {range} since {since}",
    "owed": "the ID is in {range}, open since {since}",
    "silent": "no record beyond ID {low}",
    "unknown": "has not joined; its records are buffered since {since}",
}


def to_json(it: IdTrace) -> str:
    return as_object(plain(it) | {"dead_letters": [letters.plain(one, {}) for one in it.dead_letters]})


def to_text(it: IdTrace) -> str:
    lines = [f"{it.stream} {it.id}: {_headline(it)}"]
    parts = (_told(it), _settled(it), _standing_lines(it), _line(it), _beside(it))
    lines += [f"  {line}" for part in parts for line in part]
    return sanitize([*lines, *(f"  unknown: {problem}" for problem in it.unknown)])


def _headline(it: IdTrace) -> str:
    if it.known:
        passed = "passed" if it.passed else "not passed yet"
        return f"{passed}; linear position {it.linear}"
    if beyond(it.id, it.highest):
        return f"not allocated; highest ID {it.highest}, linear position {it.linear}"
    return f"wrong sign: the highest ID is {it.highest}"


def _some(lines: Iterable[str], number: int, what: str) -> Iterator[str]:
    for line, _ in zip(lines, range(SHOWN), strict=False):
        yield line
    if number > SHOWN:
        yield f"and {count(number - SHOWN, f'more {what}')}: use --json"


def _told(it: IdTrace) -> Iterator[str]:
    for record, _ in zip(it.records, range(SHOWN), strict=False):
        yield _record(record) + (", not read by a batch yet" if record.offset >= it.unread else "")
        yield f"    {record.text[:LINE]}" + ("..." if record.cut or len(record.text) > LINE else "")
    if len(it.records) > SHOWN:
        yield f"and {count(len(it.records) - SHOWN, 'more record')}: use --json"
    looked = it.looked if it.known else None
    if looked is None or any(one.says in ("fact", "void") for one in it.records):
        return
    place = f"{looked.topic}/{looked.partition}"
    searched = f"offsets {looked.first}..{looked.end - 1}" if looked.first < looked.end else "no offset"
    yield f"no record has the ID in {place}, {searched}"
    if looked.wanted < looked.kept:
        yield f"retention removed offsets below {looked.kept}, which may have had its record"
    if max(looked.wanted, looked.kept) < looked.first:
        yield f"offsets {max(looked.wanted, looked.kept)}..{looked.first - 1} may have it: raise --records"


def _record(it: TracedRecord) -> str:
    record = "record" if it.kind is None else f"{it.kind} of {it.writer or ''} (epoch {it.epoch})"
    return f"{timestamp(it.time)} {record} at {it.topic}/{it.partition} {it.offset}: {_SAYS[it.says]}"


def _settled(it: IdTrace) -> Iterator[str]:
    how = "settled" if it.writer is not None or it.passed else "passed"
    moves = (
        f"{timestamp(one.time)} {how} in batch {one.batch}: {one.writer} (epoch {one.epoch}) moved from"
        f" {one.prev} to {one.id}: {evidence(one.evidence)}"
        for one in it.settled
    )
    yield from _some(moves, len(it.settled), "writer")
    if it.offsets:
        yield f"  the batch read {', '.join(map(offsets, it.offsets))}"
    if it.passed and not it.settled:
        yield "the stored history does not say when it was settled"
    yield from _some((_gap(it, gap) for gap in it.gaps), len(it.gaps), "gap")


def _gap(it: IdTrace, gap: StoredGap) -> str:
    inside = abs(gap.low) < abs(it.id) <= abs(gap.top)
    what = "in the gap" if inside else "above the gap"
    opened = f"{what} {id_range(gap.low, gap.top)} of {gap.writer}, open from {timestamp(gap.opened)}"
    if gap.closed is None:
        return f"{opened} until now"
    lasted = duration((gap.closed - gap.opened).total_seconds())
    return f"{opened} to {timestamp(gap.closed)} ({lasted}): {CLOSED.get(gap.closed_by or '', gap.closed_by)}"


def _standing_lines(it: IdTrace) -> Iterator[str]:
    if it.passed:
        return
    yield from _some(map(_stand, it.standing), len(it.standing), "writer")
    if it.standing:
        yield f"to see what to do: tidemark gaps {shlex.quote(it.stream)}"


def _stand(it: WriterStand) -> str:
    since = "" if it.since is None else timestamp(it.since)
    span = "" if it.low is None or it.top is None else id_range(it.low, it.top)
    return f"{it.writer} (epoch {it.epoch}) " + _STANDS[it.stands].format(range=span, low=it.low, since=since)


def _line(it: IdTrace) -> Iterator[str]:
    stream = shlex.quote(it.stream)
    if it.line is not None:
        yield f"{timestamp(it.line.time)} the linear position passed it in batch {it.line.batch}, to {it.line.linear}"
        if it.settled and it.line.time > it.settled[0].time:
            at = it.settled[0].time.isoformat(timespec="milliseconds")
            yield f"  to see what blocked it until then: tidemark explain {stream} --at {at}"
    elif it.passed:
        yield "the stored history does not say when the linear position passed it"
    if it.published is not None:
        yield f"{timestamp(it.published)} published in Redis (by its clock)"
    elif it.settled and not it.unknown and (it.passed or it.writer is not None):
        yield "Redis no longer has the time at which it was published"


def _beside(it: IdTrace) -> Iterator[str]:
    late = (
        f"{timestamp(one.time)} late completion {one.number} of {one.writer} (epoch {one.epoch}):"
        f" {ids(one.prev, one.id)}, facts {one.facts} ({one.why}); "
        + ("not resolved" if one.act is None else f"resolved by override {one.act}")
        for one in it.late
    )
    yield from _some(late, len(it.late), "late completion")
    acts = (
        f"{timestamp(one.time)} {one.kind} of {one.writer} (epoch {one.epoch}),"
        f" {id_range(one.prev, one.id)}, by {one.by}: {one.why}"
        + ("" if one.number is None else f" (override {one.number} of {one.seen_as})")
        for one in it.acts
    )
    yield from _some(acts, len(it.acts), "override")
    refused = (
        "rejected as {}: {}/{} {}; tidemark dead-letters show {}".format(one.reason, *one.origin, one.place)
        for one in it.dead_letters
    )
    yield from _some(refused, len(it.dead_letters), "dead letter")


class StreamIdType(click.ParamType[int]):
    name = "ID"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            found = int(str(value))
        except ValueError:
            found = 0
        if not 0 < abs(found) <= MOST_ID:
            self.fail(f"{value!r} is not an ID such as 17, or -17 of a stream that counts down", param, ctx)
        return found


@click.command("trace", cls=OurCommand, context_settings={"ignore_unknown_options": True})
@click.argument("stream")
@click.argument("id", type=StreamIdType(), metavar="ID")
@click.option(
    "--records",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    help="Read at most this many Kafka records.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.pass_context
def trace(context: click.Context, stream: str, id: int, records: int, *, as_json: bool) -> None:
    """Show the history of one ID of STREAM: its Kafka record, its batch, what blocked it, when it was published.

    Exit code 1 if the ID is not allocated.
    """
    settings = loaded()
    with IdInspection(settings.postgres, "tidemark trace") as past:
        encoded = past.state(stream)
        if encoded is None:
            raise CommandFailed(no_stream(stream))
        it = of_postgres(past, stream, encoded, id)
        home = home_partition(encoded)
        with RecordReader(settings.kafka) as kafka, Redis(RedisConfig(settings.redis)) as redis:
            if home is not None:
                topic = settings.kafka_facts_topic
                asking(it, "records", lambda: of_kafka(it, past, kafka, topic, home, records))
            asking(it, "dead letters", lambda: of_letters(it, _letters(settings, LOOKED)))
            asking(it, "Redis", lambda: of_redis(it, redis.published))
    if as_json:
        click.echo(to_json(it))
    else:
        echo(to_text(it))
    if not it.known:
        context.exit(1)


def _letters(settings: Settings, most: int) -> list[DeadLetter]:
    kafka, topic = settings.kafka, settings.kafka_dead_letters_topic
    partitions = Topics(kafka).describe([topic])[topic].partitions
    with DeadLetterReader(DeadLettersConfig(topic, kafka.client(), kafka.producer())) as letters:
        return letters.newest(range(len(partitions)), most)
