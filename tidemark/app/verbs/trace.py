"""`tidemark trace`: the history of one ID, from its record in Kafka to the published position that has passed the ID.

Postgres has the batch that settled the ID, and so the range of offsets that contains its record. This range is read
from Kafka. If retention removed the record, the output shows this. Only the record shows to which writer an ID belongs,
because the positions of all writers pass the ID.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

import click

from tidemark.app.commands import MAX_ID, CommandFailed, Utf8Command, load_settings, unknown_stream_text
from tidemark.app.diagnosis.open_ranges import moment
from tidemark.app.output import count, duration, echo, field_values, id_range, ids, join_escaped, json_text, progress
from tidemark.app.settings import Settings
from tidemark.app.verbs.dead_letters import MAX_SEARCHED
from tidemark.app.verbs.dead_letters import json_fields as dead_letter_fields
from tidemark.app.verbs.explain import CLOSED_TEXTS, evidence_text, offsets_text
from tidemark.common.errors import BadRecord, TidemarkError
from tidemark.common.timestamps import timestamp
from tidemark.sinks.dead_letters import DeadLetter, DeadLetterReader, DeadLettersConfig
from tidemark.sinks.postgres.inspect import (
    BatchAdvance,
    IdInspection,
    LinearPassed,
    OffsetRange,
    StoredGap,
    StoredLateCompletion,
)
from tidemark.sinks.postgres.operators import OverrideEntry
from tidemark.sinks.redis.publish import Redis, RedisConfig
from tidemark.sources.kafka_lookup import RecordedMessage, RecordReader
from tidemark.sources.topics import Topics
from tidemark.streaming.core import codec
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.values.direction import Direction, is_beyond
from tidemark.streaming.wire import records

MAX_RECORDS: Final = 100  # records, and dead letters, in the result
MAX_RECORD_CHARS: Final = 16_384  # of the value of a record in the result

RecordMeaning = Literal["fact", "void", "announced", "settled", "passed", "mentions"]
IdState = Literal["complete", "open", "silent", "unknown"]


@dataclass(frozen=True, slots=True)
class TracedRecord:
    """A record that is about the ID.

    Attributes:
        time: the timestamp of the record in Kafka.
        kind, writer, epoch: None if the record is unreadable.
        meaning: see `meaning_of`; `mentions` if an unreadable record contains the ID.
        text: the value of the record, at most 16,384 characters.
        cut: whether `text` has only the beginning of the value.
    """

    topic: str
    partition: int
    offset: int
    time: datetime
    kind: str | None
    writer: str | None
    epoch: int | None
    meaning: RecordMeaning
    text: str
    cut: bool


@dataclass(frozen=True, slots=True)
class WriterAtId:
    """A writer that has not passed the ID, and the state of the ID for the writer. IDs are signed.

    Attributes:
        state: `complete` (the ID is above the open gap), `open` (the ID is in the gap), `silent` (the writer sent
            nothing beyond `low`), or `unknown` (the writer has not joined).
        low: lower end of the gap `(low, top]`; if `silent`, the highest ID that the writer has settled; if `unknown`,
            None.
        top: upper end of the gap; None if `silent` or `unknown`.
        since: when the gap opened; if `unknown`, when the first buffered record was read; if `silent`, None.
    """

    writer: str
    epoch: int
    state: IdState
    low: int | None = None
    top: int | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class SearchedRange:
    """The offsets of a partition that were searched for records about the ID.

    Attributes:
        topic: the facts topic.
        partition: the partition of the stream.
        first: the first offset that was read.
        end: the offset after the last one that was read.
        wanted: the first offset that the record of the ID can have; 0 if unknown.
        retained: the first offset that Kafka still has.
    """

    topic: str
    partition: int
    first: int
    end: int
    wanted: int
    retained: int


@dataclass(slots=True)
class IdTrace:
    """Everything that is known about one ID. IDs are signed.

    Attributes:
        linear: the current linear position.
        highest: the highest allocated ID of the stream.
        known: whether the ID is allocated.
        passed: whether the linear position has passed the ID.
        writer: the writer of the ID; None if no record names the writer.
        unread: the first offset of the stream's partition that no batch has read; 0 if unknown.
        records: the records that are about the ID, at most `MAX_RECORDS`.
        searched: the offsets that were searched; None if Kafka was not read.
        settled: the advances that passed the ID, oldest first.
        offsets: the offsets that the batch of the first of these advances has read.
        writers: the writers that have not passed the ID.
        gaps: the gaps that contain the ID, and lower gaps that delayed the ID.
        linear_passed: the batch after which the linear position had passed the ID; None if unknown.
        late: late completions that contain the ID.
        overrides: operator overrides that contain the ID.
        dead_letters: rejected records that are about the ID, at most `MAX_RECORDS`.
        published: when the position in Redis passed the ID, by Redis's clock; None if unknown. The position is that of
            the ID's writer, or of another writer if the ID's writer is unknown.
        unknown: a line of text for each query that failed.
    """

    stream: str
    id: int
    linear: int
    highest: int
    known: bool
    passed: bool
    writer: str | None = None
    unread: int = 0
    records: list[TracedRecord] = field(default_factory=list)
    searched: SearchedRange | None = None
    settled: list[BatchAdvance] = field(default_factory=list)
    offsets: list[OffsetRange] = field(default_factory=list)
    writers: list[WriterAtId] = field(default_factory=list)
    gaps: list[StoredGap] = field(default_factory=list)
    linear_passed: LinearPassed | None = None
    late: list[StoredLateCompletion] = field(default_factory=list)
    overrides: list[OverrideEntry] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    published: datetime | None = None
    unknown: list[str] = field(default_factory=list)


def read_from_postgres(history: IdInspection, stream: str, encoded_state: bytes, id: int) -> IdTrace:
    """Make a trace from the data in Postgres. `encoded_state`: the current state of the stream."""
    current = codec.decode(encoded_state)
    signed = current.direction.signed
    is_allocated = not current.direction.opposes(Direction.of(id)) and abs(id) <= current.allocated
    has_passed = is_allocated and abs(id) <= current.linear.position
    linear, allocated = signed(current.linear.position), signed(current.allocated)
    trace = IdTrace(stream, id, linear, allocated, is_allocated, has_passed)
    if not is_allocated:
        return trace
    trace.settled = history.advances_containing(stream, id)
    if trace.settled:
        trace.linear_passed = history.first_batch_reaching(stream, id, trace.settled[0].time)
    trace.writers = [*_writers_below(current, id)]
    trace.late, trace.overrides = history.late_containing(stream, id), history.overrides_containing(stream, id)
    return trace


def _writers_below(current: StreamState, id: int) -> Iterator[WriterAtId]:
    """The writers that never joined, then the active writers whose position is below the ID; each part by name."""
    signed, magnitude = current.direction.signed, abs(id)
    for (name, epoch), buffered in sorted(current.unjoined.items()):
        yield WriterAtId(name, epoch, "unknown", since=moment(buffered.since))
    for name, known in sorted(current.writers.items()):
        if known.retired_at is not None or known.position >= magnitude:
            continue
        chain = known.chain
        gap = next(((low, top, since) for low, top, since in reversed([*chain.gaps()]) if low < magnitude), None)
        if gap is None or chain.highest_settled < magnitude:
            yield WriterAtId(name, known.epoch, "silent", signed(max(chain.highest_settled, 0)))
            continue
        low, top, since = gap
        state: IdState = "open" if magnitude <= top else "complete"
        yield WriterAtId(name, known.epoch, state, signed(low), signed(top), moment(since))


def home_partition(encoded_state: bytes) -> int | None:
    """The number of the Kafka partition with the stream's records; None if no record has been read yet."""
    return codec.decode(encoded_state).home_partition


def add_records(
    trace: IdTrace, history: IdInspection, kafka: RecordReader, topic: str, partition: int, max_records: int
) -> None:
    """Read the offsets of the partition that may contain the record of the ID, and add the records about the ID.

    Of more than `max_records` offsets, only the last ones are read. If a record names the writer of the ID, the
    advances and states of other joined writers are removed from the trace. Also adds the gaps, and the offsets of the
    batch, from Postgres. Shows the progress.
    """
    retained, end = kafka.offset_range(topic, partition)
    trace.unread = history.next_offset(topic, partition) or 0
    first, last = _record_range(trace, history, topic, partition)
    end = min(end, end if last is None else last)
    wanted = first or 0
    begin = max(wanted, retained, end - max_records)
    key = trace.stream.encode()
    for message in _with_progress(kafka.between(topic, partition, begin, end), end - begin):
        if (
            message.key == key
            and (record := record_about(message, trace.id)) is not None
            and len(trace.records) < MAX_RECORDS
        ):
            trace.records.append(record)
    trace.searched = SearchedRange(topic, partition, begin, max(begin, end), wanted, retained)
    completing = [
        record for record in trace.records if record.meaning in ("fact", "void") and record.offset < trace.unread
    ]
    if completing:
        trace.writer = completing[0].writer
        trace.settled = [move for move in trace.settled if move.writer == trace.writer]
        trace.writers = [
            writer for writer in trace.writers if writer.writer == trace.writer or writer.state == "unknown"
        ]
    trace.gaps = _read_gaps(trace, history, min((record.time for record in completing), default=None))
    if trace.settled:
        trace.offsets = history.offsets(trace.settled[0].batch, trace.settled[0].time)


def _with_progress(messages: Iterable[RecordedMessage], number: int) -> Iterator[RecordedMessage]:
    """Yield the messages, and show the progress on a terminal."""
    with progress("reading Kafka", number, "record") as advance:
        for message in messages:
            yield message
            advance(1)


def _record_range(trace: IdTrace, history: IdInspection, topic: str, partition: int) -> tuple[int | None, int | None]:
    """The offsets from `first` to before `end` that contain the record of the ID, according to the stored batches.

    `first` is None if unknown. `end` is None if the record may be at any later offset, or may still be sent.
    """
    if not trace.known:
        return trace.unread, None
    times = [*(move.time for move in trace.settled[:1]), *(gap.opened for gap in _read_gaps(trace, history, None))]
    first = history.offset_before(topic, partition, min(times)) if times else None
    if trace.writers or not trace.settled:
        return first, None
    ends = {
        read.last + 1
        for move in {move.batch: move for move in trace.settled}.values()
        for read in history.offsets(move.batch, move.time)
        if (read.topic, read.partition) == (topic, partition)
    }
    return first, max(ends, default=trace.unread)


def _read_gaps(trace: IdTrace, history: IdInspection, record_time: datetime | None) -> list[StoredGap]:
    """Read the gaps that contain the ID, and the gaps below the ID that were open when the ID completed.

    `record_time`: the time of the record with the ID; None if unknown.
    """
    settled = min((move.time for move in trace.settled), default=None)
    since = min((time for time in (settled, record_time) if time is not None), default=None)
    known = {move.writer for move in trace.settled} | {writer.writer for writer in trace.writers}
    writers = known if trace.writer is None else {trace.writer}
    gaps = history.gaps_below(trace.stream, trace.id, writers, since)
    return [gap for gap in gaps if gap.closed is None or settled is None or gap.opened <= settled]


def record_about(message: RecordedMessage, id: int) -> TracedRecord | None:
    """Decode a message. Returns None if the record is not about the ID."""
    value = message.value or b""
    kind = writer = epoch = None
    try:
        record = records.decode(message.value)
    except BadRecord:
        meaning: RecordMeaning | None = "mentions" if _has_number(value, id) else None
    else:
        meaning = meaning_of(record, id)
        kind, writer = records.kind_of(record).name, record.writer
        epoch = max(record.epoch, 0)
    if meaning is None:
        return None
    text = value.decode(errors="replace")
    origin = message.topic, message.partition, message.offset, moment(max(message.time, 0))
    is_cut = len(text) > MAX_RECORD_CHARS
    return TracedRecord(*origin, kind, writer, epoch, meaning, text[:MAX_RECORD_CHARS], is_cut)


def _has_number(value: bytes, id: int) -> bool:
    """Whether `value` contains the ID as a whole number, not as a part of a longer number."""
    text = str(id).encode()
    at = value.find(text)
    while at >= 0:
        neighbours = value[max(at - 1, 0) : at] + value[at + len(text) : at + len(text) + 1]
        if not any(chr(character).isdigit() or character == ord("-") for character in neighbours):
            return True
        at = value.find(text, at + 1)
    return False


def meaning_of(record: records.Record, id: int) -> RecordMeaning | None:
    """What a record means for the ID: `fact` or `void` if the ID is an edge's `id`, `passed` if the ID is between an
    edge's `prev` and `id`, `announced` by a POSITION, `settled` by a SKIP, JOIN or RETIRE. None if the record is not
    about the ID."""
    match record:
        case records.Rdata(id=int(top)):
            return _edge_meaning(records.effective_prev(record), top, id, "fact")
        case records.Void():
            return _edge_meaning(record.prev, record.id, id, "void")
        case records.FactRun():
            for prev, top, rows in zip([record.prev, *record.ids], record.ids, record.rows, strict=False):
                if (meaning := _edge_meaning(prev, top, id, "fact" if rows else "void")) is not None:
                    return meaning
        case records.Position():
            return "announced" if _is_within(record.prev, record.id, id) else None
        case records.Skip():
            return "settled" if _is_within(record.prev, record.id, id) else None
        case records.Join() | records.Retire():
            return "settled" if _is_within(0, record.id, id) else None
    return None


def _edge_meaning(prev: int, top: int, id: int, meaning_at_top: RecordMeaning) -> RecordMeaning | None:
    """What the edge `(prev, top]` means for the ID: `meaning_at_top` if the ID is `top`, `passed` if the ID is between
    the two, otherwise None."""
    if top == id:
        return meaning_at_top
    return "passed" if _is_within(prev, top, id) else None


def _is_within(prev: int, top: int, id: int) -> bool:
    """Whether the ID is in `(prev, top]`. All three are signed."""
    return (id > 0) == (top > 0) and abs(prev) < abs(id) <= abs(top)


def add_dead_letters(trace: IdTrace, dead_letters: Sequence[DeadLetter]) -> None:
    """Add the dead letters of the stream that complete, announce or mention the ID, at most `MAX_RECORDS`."""
    for dead_letter in dead_letters:
        if dead_letter.stream != trace.stream or len(trace.dead_letters) == MAX_RECORDS:
            continue
        origin = dead_letter.partition, dead_letter.offset, dead_letter.time
        record = record_about(RecordedMessage("", *origin, dead_letter.key, dead_letter.value), trace.id)
        if record is not None and record.meaning not in ("passed", "settled"):
            trace.dead_letters.append(dead_letter)


def add_published(trace: IdTrace, read_move_time: Callable[[str, str, int], int | None]) -> None:
    """Add the time at which the position of the ID's writer in Redis passed the ID.

    If the writer of the ID is unknown, but the linear position has passed the ID, the last writer that passed the ID is
    used.

    Args:
        trace: the trace.
        read_move_time: returns the time in milliseconds since 1970, for stream, writer and ID; None if unknown.
    """
    writer = trace.settled[-1].writer if trace.settled and (trace.passed or trace.writer is not None) else None
    if writer is not None and (time := read_move_time(trace.stream, writer, trace.id)) is not None:
        trace.published = moment(time)


def try_to_add(trace: IdTrace, server: str, add: Callable[[], None]) -> None:
    """Call `add`. If it raises a `TidemarkError`, note the error in the trace, so that the other results are shown."""
    try:
        add()
    except TidemarkError as problem:
        trace.unknown.append(f"{server}: {problem}")


MAX_SHOWN: Final = 10  # lines of each kind in the text; the JSON has all
MAX_SHOWN_CHARS: Final = 300  # of a record in the text

_MEANINGS: Final[dict[RecordMeaning, str]] = {
    "fact": "has the fact of this ID",
    "void": "the ID was rolled back",
    "announced": "this writer has no fact with this ID",
    "settled": "settles the open IDs of this writer in a range with this ID",
    "passed": "the ID does not belong to this writer",
    "mentions": "unreadable, but contains the number",
}
_STATES: Final[dict[IdState, str]] = {
    "complete": "has completed the ID; below the ID, {range} is open since {since}",
    "open": "the ID is in {range}, open since {since}",
    "silent": "no record beyond ID {low}",
    "unknown": "has not joined; its records are buffered since {since}",
}


def to_json(trace: IdTrace) -> str:
    dead_letters = [dead_letter_fields(dead_letter, {}) for dead_letter in trace.dead_letters]
    return json_text(field_values(trace) | {"dead_letters": dead_letters})


def to_text(trace: IdTrace) -> str:
    lines = [f"{trace.stream} {trace.id}: {_headline(trace)}"]
    parts = (_record_lines, _settled_lines, _writer_lines, _linear_lines, _related_lines)
    lines += [f"  {line}" for lines_of in parts for line in lines_of(trace)]
    return join_escaped([*lines, *(f"  unknown: {problem}" for problem in trace.unknown)])


def _headline(trace: IdTrace) -> str:
    if trace.known:
        passed = "has passed this ID" if trace.passed else "has not passed this ID yet"
        return f"the linear position {trace.linear} {passed}"
    if is_beyond(trace.id, trace.highest):
        return f"not allocated; highest ID {trace.highest}, linear position {trace.linear}"
    return f"wrong sign: the highest ID is {trace.highest}"


def _first_lines(lines: Iterable[str], number: int, noun: str) -> Iterator[str]:
    """The first `MAX_SHOWN` of `number` lines, and a line with the number of further lines."""
    for line, _ in zip(lines, range(MAX_SHOWN), strict=False):
        yield line
    if number > MAX_SHOWN:
        yield f"and {count(number - MAX_SHOWN, f'more {noun}')}: use --json"


def _record_lines(trace: IdTrace) -> Iterator[str]:
    for record, _ in zip(trace.records, range(MAX_SHOWN), strict=False):
        yield _record_line(record) + (", not read by a batch yet" if record.offset >= trace.unread else "")
        yield f"    {record.text[:MAX_SHOWN_CHARS]}" + (
            "..." if record.cut or len(record.text) > MAX_SHOWN_CHARS else ""
        )
    if len(trace.records) > MAX_SHOWN:
        yield f"and {count(len(trace.records) - MAX_SHOWN, 'more record')}: use --json"
    offsets = trace.searched if trace.known else None
    if offsets is None or any(record.meaning in ("fact", "void") for record in trace.records):
        return
    partition = f"{offsets.topic}/{offsets.partition}"
    span = f"offsets {offsets.first}..{offsets.end - 1}" if offsets.first < offsets.end else "no offset"
    yield f"no record of {partition} has the ID ({span} read)"
    if offsets.wanted < offsets.retained:
        yield f"retention removed offsets below {offsets.retained}, which may have contained the record"
    if max(offsets.wanted, offsets.retained) < offsets.first:
        unread = f"{max(offsets.wanted, offsets.retained)}..{offsets.first - 1}"
        yield f"offsets {unread} were not read, and may contain the record: raise --records"


def _record_line(record: TracedRecord) -> str:
    subject = "record" if record.kind is None else f"{record.kind} of {record.writer or ''} (epoch {record.epoch})"
    origin = f"{record.topic}/{record.partition} {record.offset}"
    return f"{timestamp(record.time)} {subject} at {origin}: {_MEANINGS[record.meaning]}"


def _settled_lines(trace: IdTrace) -> Iterator[str]:
    verb = "settled" if trace.writer is not None or trace.passed else "passed by a writer"
    moves = (
        f"{timestamp(move.time)} {verb} in batch {move.batch}: {move.writer} (epoch {move.epoch}) moved from"
        f" {move.prev} to {move.id}: {evidence_text(move.evidence)}"
        for move in trace.settled
    )
    yield from _first_lines(moves, len(trace.settled), "writer")
    if trace.offsets:
        yield f"  the batch read {', '.join(map(offsets_text, trace.offsets))}"
    if trace.passed and not trace.settled:
        yield "the stored history does not show when the ID was settled"
    yield from _first_lines((_gap_line(trace, gap) for gap in trace.gaps), len(trace.gaps), "gap")


def _gap_line(trace: IdTrace, gap: StoredGap) -> str:
    inside = abs(gap.low) < abs(trace.id) <= abs(gap.top)
    relation = "in the gap" if inside else "above the gap"
    opened = f"{relation} {id_range(gap.low, gap.top)} of {gap.writer}, open from {timestamp(gap.opened)}"
    if gap.closed is None:
        return f"{opened} until now"
    lasted = duration((gap.closed - gap.opened).total_seconds())
    return f"{opened} to {timestamp(gap.closed)} ({lasted}): {CLOSED_TEXTS.get(gap.closed_by or '', gap.closed_by)}"


def _writer_lines(trace: IdTrace) -> Iterator[str]:
    if trace.passed:
        return
    yield from _first_lines(map(_writer_line, trace.writers), len(trace.writers), "writer")
    if trace.writers:
        yield f"to see the remedy: tidemark gaps {shlex.quote(trace.stream)}"


def _writer_line(writer: WriterAtId) -> str:
    since = "" if writer.since is None else timestamp(writer.since)
    span = "" if writer.low is None or writer.top is None else id_range(writer.low, writer.top)
    state = _STATES[writer.state].format(range=span, low=writer.low, since=since)
    return f"{writer.writer} (epoch {writer.epoch}) {state}"


def _linear_lines(trace: IdTrace) -> Iterator[str]:
    stream = shlex.quote(trace.stream)
    if trace.linear_passed is not None:
        passed = trace.linear_passed
        yield f"{timestamp(passed.time)} the linear position passed the ID in batch {passed.batch}, to {passed.linear}"
        if trace.settled and trace.linear_passed.time > trace.settled[0].time:
            at = timestamp(trace.settled[0].time).replace(" ", "T")
            yield f"  to see what blocked the stream until then: tidemark explain {stream} --at {at}"
    elif trace.passed:
        yield "the stored history does not show when the linear position passed the ID"
    if trace.published is not None:
        yield f"{timestamp(trace.published)} published in Redis (by its clock)"
    elif trace.settled and not trace.unknown and (trace.passed or trace.writer is not None):
        yield "Redis no longer has the time at which the ID was published"


def _related_lines(trace: IdTrace) -> Iterator[str]:
    late = (
        f"{timestamp(fact.time)} late completion {fact.number} of {fact.writer} (epoch {fact.epoch}):"
        f" {ids(fact.prev, fact.id)}, facts {fact.facts} ({fact.why}); "
        + ("not resolved" if fact.act is None else f"resolved by override {fact.act}")
        for fact in trace.late
    )
    yield from _first_lines(late, len(trace.late), "late completion")
    overrides = (
        f"{timestamp(override.time)} {override.kind} of {override.writer} (epoch {override.epoch}),"
        f" {id_range(override.prev, override.id)}, by {override.by}: {override.why}"
        + ("" if override.number is None else f" (override {override.number} of {override.seen_as})")
        for override in trace.overrides
    )
    yield from _first_lines(overrides, len(trace.overrides), "override")
    dead_letter_lines = (
        "rejected as {}: {}/{} {}; tidemark dead-letters show {}".format(
            dead_letter.reason, *dead_letter.origin, dead_letter.display_offset
        )
        for dead_letter in trace.dead_letters
    )
    yield from _first_lines(dead_letter_lines, len(trace.dead_letters), "dead letter")


class StreamIdType(click.ParamType[int]):
    """A signed stream ID, other than 0."""

    name = "ID"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            id = int(str(value))
        except ValueError:
            id = 0
        if not 0 < abs(id) <= MAX_ID:
            self.fail(f"{value!r} is not an ID such as 17, or -17 in a backward stream", param, ctx)
        return id


@click.command("trace", cls=Utf8Command, context_settings={"ignore_unknown_options": True})
@click.argument("stream")
@click.argument("id", type=StreamIdType(), metavar="ID")
@click.option(
    "--records",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    help="Maximum number of records to read from Kafka. Of more records, the newest are read.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.pass_context
def trace(context: click.Context, stream: str, id: int, records: int, *, as_json: bool) -> None:
    """Show the history of one ID of STREAM: the record in Kafka, the batch, what blocked the ID, and its publication.

    Exit code 1 if the ID is not allocated.
    """
    settings = load_settings()
    with IdInspection(settings.postgres, "tidemark trace") as history:
        encoded = history.state(stream)
        if encoded is None:
            raise CommandFailed(unknown_stream_text(stream, history.stream_names()))
        trace = read_from_postgres(history, stream, encoded, id)
        home = home_partition(encoded)
        with RecordReader(settings.kafka) as kafka, Redis(RedisConfig(settings.redis)) as redis:
            if home is not None:
                topic = settings.kafka_facts_topic
                try_to_add(trace, "records", lambda: add_records(trace, history, kafka, topic, home, records))
            try_to_add(
                trace, "dead letters", lambda: add_dead_letters(trace, _newest_dead_letters(settings, MAX_SEARCHED))
            )
            try_to_add(trace, "Redis", lambda: add_published(trace, redis.read_move_time))
    if as_json:
        click.echo(to_json(trace))
    else:
        echo(to_text(trace))
    if not trace.known:
        context.exit(1)


def _newest_dead_letters(settings: Settings, max_per_partition: int) -> list[DeadLetter]:
    """Read the newest dead letters of each partition from Kafka."""
    kafka, topic = settings.kafka, settings.kafka_dead_letters_topic
    partitions = Topics(kafka).describe([topic])[topic].partitions
    with DeadLetterReader(DeadLettersConfig(topic, kafka.client_settings(), kafka.producer_settings())) as reader:
        return reader.newest(range(len(partitions)), max_per_partition)
