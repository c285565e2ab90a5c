"""`tidemark replay`: apply recorded records again, without Spark, and compare the positions with the stored history.

The positions do not depend on how records are divided into batches. So a batch of the history ends at the first record
with which the replay reaches the batch's positions; there both must be equal.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Final

import click
import msgspec
import numpy as np

from tidemark.app.commands import CommandFailed, OurCommand, loaded, no_stream
from tidemark.app.output import as_object, count, echo, plain, sanitize, timestamp
from tidemark.app.verbs.explain import evidence
from tidemark.app.verbs.kafka_records import read_file, read_topics, to_line
from tidemark.app.verbs.kafka_records import to_text as record_text
from tidemark.common.errors import BadRecord
from tidemark.sinks.postgres.inspect import AppliedOverride, BatchAdvance, BatchHistory, StoredBatch, StreamBatches
from tidemark.sources.kafka_lookup import RecordedMessage
from tidemark.streaming.core.batch import advance
from tidemark.streaming.core.store import States
from tidemark.streaming.ingest.compact import pack
from tidemark.streaming.ingest.decode import Decoder
from tidemark.streaming.ingest.record_batch import RecordBatch
from tidemark.streaming.values.direction import beyond
from tidemark.streaming.values.limits import Bounds, Evidence, Policies
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import FactRun, Join, Rdata, Record, Retire, Topic
from tidemark.streaming.wire.runs import Packet

NOTHING: Final = Evidence()


class _Named(msgspec.Struct):
    stream: str = ""


_named = msgspec.json.Decoder(_Named)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The state of a stream in a replay; `counts` are the sums of each writer's evidence."""

    stream: str
    bounds: Bounds
    encoded: bytes | None = None
    linear: int = 0
    positions: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, Evidence] = field(default_factory=dict)

    def fed(self, messages: Sequence[RecordedMessage], roles: Mapping[str, Topic], now: int) -> "Replayed":
        """The stream after more records, as one batch at `now` (ms)."""
        if not messages:
            return self
        states = {} if self.encoded is None else {self.stream: self.encoded}
        effects = advance(0, States(states), packed(messages, roles), now, self.bounds)
        for done in effects.streams:
            if done.stream == self.stream:
                positions, counts = dict(self.positions), dict(self.counts)
                for move in done.advances:
                    positions[move.writer] = move.id
                    counts[move.writer] = counts.get(move.writer, NOTHING) + move.evidence
                return replace(
                    self, encoded=states[self.stream], linear=done.linear, positions=positions, counts=counts
                )
        return self

    def with_new_counts(self) -> "Replayed":
        return replace(self, counts={})

    def reaches(self, batch: StoredBatch) -> bool:
        """Whether all positions are at least those after that batch."""
        return not beyond(self.linear if batch.linear is None else batch.linear, self.linear) and not any(
            beyond(move.id, self.positions.get(move.writer, 0)) for move in batch.advances
        )


def by_stream(messages: Iterable[RecordedMessage]) -> dict[str, list[RecordedMessage]]:
    """The records in their order, by the stream of the key and by the stream of the value: a rejected record may belong
    to either."""
    streams: dict[str, list[RecordedMessage]] = defaultdict(list)
    for message in messages:
        keyed = (message.key or b"").decode(errors="replace")
        try:
            named = _named.decode(message.value or b"").stream or keyed
        except (ValueError, RecursionError):
            named = keyed
        for stream in {keyed, named}:
            streams[stream].append(message)
    return streams


def packed(messages: Iterable[RecordedMessage], roles: Mapping[str, Topic]) -> list[Packet]:
    """Packets as the pipeline makes them of records of any partitions; `roles` has the role of each topic."""
    parted: dict[tuple[str, int], list[RecordedMessage]] = defaultdict(list)
    for message in messages:
        parted[message.topic, message.partition].append(message)
    packets: list[Packet] = []
    for (topic, partition), records_of in parted.items():
        decoder = Decoder(roles[topic])
        decoder.add(_fetched(records_of))
        packets += [packet for _, packet in pack(topic, partition, decoder, 1)]
    return packets


def _fetched(messages: Sequence[RecordedMessage]) -> RecordBatch:
    numbers = np.array([(message.offset, message.time) for message in messages], np.int64)
    return RecordBatch.of([message.key for message in messages], [message.value for message in messages], *numbers.T)


@dataclass(frozen=True, slots=True)
class SeedWriter:
    """A writer after one batch, by the history. `later`: known only from later rows, as its epoch may be."""

    writer: str
    epoch: int
    position: int
    later: bool


@dataclass(frozen=True, slots=True)
class ReplayStart:
    """The first `skipped` batches are not compared; `after` is the last of them. Linear positions are compared once the
    replay has passed `highest` and each writer of `joining` has joined."""

    skipped: int
    after: StoredBatch
    replayed: Replayed
    highest: int
    joining: Mapping[str, int]

    def tells_line(self, now: Replayed) -> bool:
        return not beyond(self.highest, now.linear) and all(
            now.positions.get(writer, position) != position for writer, position in self.joining.items()
        )


def start_of(
    past: StreamBatches, stream: str, facts: Sequence[RecordedMessage], bounds: Bounds, *, cut: bool
) -> ReplayStart | None:
    """The earliest start; None if there is none. `cut`: records before the first of `facts` are missing, so the start
    is a batch that certainly read beyond them."""
    seen = {fact for message in facts for fact in _facts(_record(message))} if cut else set()
    read = not cut
    for number, batch in enumerate(past.batches, 1):
        # Only facts count: IDs that a JOIN or an operator settled may have no record.
        read = read or any(
            (move.writer, move.id) in seen and not any(move.evidence.counts[1:]) for move in batch.advances
        )
        if read and not any(
            gap.opened <= batch.time and (gap.closed is None or gap.closed > batch.time) for gap in past.gaps
        ):
            return _seeded(past, stream, facts, bounds, number)
    return None


def _seeded(
    past: StreamBatches, stream: str, facts: Sequence[RecordedMessage], bounds: Bounds, skipped: int
) -> ReplayStart:
    after, marks = past.batches[skipped - 1], dict[str, Record]()
    parsed = [record for message in facts if (record := _record(message)) is not None]
    for record in parsed:
        marks.setdefault(record.writer, record)
    joins = {(join.writer, join.epoch): join.id for join in parsed if isinstance(join, Join)}
    joined, retired, joining = list[Join](), list[Retire](), dict[str, int]()
    for writer in _writers_at(past, skipped):
        if writer.later and not writer.position and (writer.writer, writer.epoch) in joins:
            continue
        # The JOIN of an epoch that began after the batch is still to come.
        comes = writer.later and not beyond(writer.position, joins.get((writer.writer, writer.epoch), 0))
        epoch = writer.epoch - 1 if comes and writer.epoch else writer.epoch
        joined.append(Join(stream=stream, writer=writer.writer, epoch=epoch, id=writer.position))
        first = marks.get(writer.writer)
        if isinstance(first, Join) and first.epoch > epoch:
            joining[writer.writer] = writer.position
        elif first is None and writer.writer in past.retired:
            retired.append(Retire(stream=stream, writer=writer.writer, epoch=epoch, id=writer.position))
    joined.sort(key=lambda join: (abs(join.id), join.writer))  # else a high JOIN lets the linear position pass others
    marked: list[Join | Retire] = [*joined, *retired]
    topic = facts[0].topic if facts else ""
    seeds = [
        RecordedMessage(topic, 0, offset, 0, stream.encode(), records.encode(marker))
        for offset, marker in enumerate(marked)
    ]
    now = Replayed(stream, bounds).fed(seeds, {topic: Topic.FACTS}, int(after.time.timestamp() * 1000))
    highest = max((join.id for join in joined), key=abs, default=0)
    return ReplayStart(skipped, after, now.with_new_counts(), highest, joining)


def _writers_at(past: StreamBatches, skipped: int) -> Iterator[SeedWriter]:
    before, then = dict[str, BatchAdvance](), dict[str, tuple[int, int]]()
    for batch in past.batches[:skipped]:
        before |= {move.writer: move for move in batch.advances}
    for batch in past.batches[skipped:]:
        for move in batch.advances:
            then.setdefault(move.writer, (move.epoch, move.prev))
    for writer, position in past.positions.items():
        if writer in before:
            yield SeedWriter(writer, before[writer].epoch, before[writer].id, later=False)
        else:
            epoch, at = then.get(writer, (past.epochs[writer], position))
            yield SeedWriter(writer, epoch, at, later=True)


def _record(message: RecordedMessage) -> Record | None:
    try:
        return records.read(message.value, message.key, Topic.FACTS)
    except BadRecord:
        return None


def _facts(record: Record | None) -> Iterator[tuple[str, int]]:
    if isinstance(record, Rdata) and isinstance(record.id, int):
        yield record.writer, record.id
    elif isinstance(record, FactRun):
        yield from ((record.writer, id) for id, rows in zip(record.ids, record.rows, strict=True) if rows)


AT_ONCE: Final = 4096  # records that are tried together while the history is far ahead


@dataclass(frozen=True, slots=True)
class Parting:
    """The first divergence of a stream, at `record` (None: after the last record). The position of `writer` (None: the
    linear position) is `replayed`, and `history` after the batch of that number and time (None: at the end). If the
    positions are equal, `evidence` has the counts of both."""

    stream: str
    record: RecordedMessage | None
    writer: str | None
    history: int | None
    replayed: int | None
    batch: int | None
    time: datetime | None
    evidence: tuple[Evidence, Evidence] | None = None


@dataclass(frozen=True, slots=True)
class PartCompared:
    """Which part of a stream was compared. `after`: the comparison begins after this batch, because records before
    `offset` or older history are missing; linear positions are compared beyond `line_from` (None: not at all). `upto`:
    the batch at which the records end; `behind`: batches after it."""

    after: StoredBatch | None = None
    offset: int = 0
    line_from: int | None = None
    upto: StoredBatch | None = None
    behind: int = 0


@dataclass(slots=True)
class ReplayReport:
    """`parts`: streams that were compared in part and are equal there. `unknown`: why a stream could not be compared.
    `absent`: streams without a record."""

    records: int = 0
    batches: int = 0
    alike: list[str] = field(default_factory=list)
    parted: list[Parting] = field(default_factory=list)
    parts: dict[str, PartCompared] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Compared:
    """`batches` that are equal, up to `last`. Without a `parting` all are equal, or the records end."""

    batches: int
    last: StoredBatch | None
    parting: Parting | None = None
    line: bool = True


def report(
    past: BatchHistory,
    messages: Sequence[RecordedMessage],
    roles: Mapping[str, Topic],
    bounds: Bounds,
    only: str | None = None,
) -> ReplayReport:
    """Compare all streams, or `only` one, as far as batches have read the records."""
    upto = past.read_up_to()
    read = [
        message
        for message in messages
        if message.offset < upto.get((message.topic, message.partition), message.offset + 1)
    ]
    firsts: dict[tuple[str, int], int] = {}
    lasts = {(message.topic, message.partition): message for message in read}
    for message in read:
        firsts.setdefault((message.topic, message.partition), message.offset)
    result, streams = ReplayReport(records=len(read)), by_stream(read)
    result.absent = [name for name in past.streams() if name not in streams and only in (None, name)]
    for stream, of_stream in sorted(streams.items()):
        history = past.stream(stream)
        if history is None:
            continue  # nothing of it was ever taken: its records are in the dead letters
        keys = {(message.topic, message.partition) for message in of_stream if roles[message.topic] is Topic.FACTS}
        begins = max((firsts[key] for key in keys), default=0)
        # A batch that is older than the last record cannot have read beyond it, so the replay must reach the batch.
        ends = min((lasts[key].time for key in keys if lasts[key].offset + 1 < upto.get(key, 0)), default=None)
        _compare(result, history, stream, of_stream, roles, bounds, begins, ends)
    return result


def _compare(
    result: ReplayReport,
    past: StreamBatches,
    stream: str,
    messages: Sequence[RecordedMessage],
    roles: Mapping[str, Topic],
    bounds: Bounds,
    begins: int,
    ends: int | None,
) -> None:
    start, done = None, None
    if past.whole:
        done = compared(past, stream, messages, roles, bounds, ends)
    if not past.whole or (begins and done is not None and done.parting is not None):
        facts = [message for message in messages if roles[message.topic] is Topic.FACTS]
        start = start_of(past, stream, facts, bounds, cut=begins > 0)
        missing = f"the recording begins at offset {begins}" if begins else "the first days of the history were dropped"
        if start is None or start.skipped == len(past.batches):
            result.unknown[stream] = f"{missing}, and after every later batch some ID was open"
            return
        done = compared(past, stream, messages, roles, bounds, ends, start)
        if done.parting is not None and done.parting.record is None:
            result.unknown[stream] = (
                f"{missing}, and the records do not continue from {named(done.last or start.after)}"
            )
            return
    assert done is not None
    batches = len(past.batches) - (start.skipped if start else 0)
    if done.parting is not None:
        result.batches += batches
        result.parted.append(done.parting)
        return
    result.batches += done.batches
    result.alike.append(stream)
    left = batches - done.batches
    if start is not None or left:
        result.parts[stream] = PartCompared(
            start.after if start else None,
            begins,
            start.highest if start is not None and done.line else None,
            done.last if left else None,
            left,
        )


def named(batch: StoredBatch) -> str:
    return f"batch {batch.batch} of {timestamp(batch.time)}"


def compared(
    past: StreamBatches,
    stream: str,
    messages: Sequence[RecordedMessage],
    roles: Mapping[str, Topic],
    bounds: Bounds,
    ends: int | None = None,
    start: ReplayStart | None = None,
) -> _Compared:
    """Compare a stream up to its first divergence. `messages` are all records of the stream that batches have read; if
    `ends` (ms) is given, all up to that time."""
    facts = [message for message in messages if roles[message.topic] is Topic.FACTS]
    acts = _applied([message for message in messages if roles[message.topic] is Topic.CONTROL], past.acts)
    now, stored = Replayed(stream, bounds), dict[str, Evidence]()
    batches, last, at = past.batches, None, 0
    if start is not None:
        now, batches = start.replayed, batches[start.skipped :]
        acts = [act for act in acts if act[1] > start.after.time]
    for number, batch in enumerate(batches):
        for move in batch.advances:
            stored[move.writer] = stored.get(move.writer, NOTHING) + move.evidence
        due = [acts.pop(0)[0] for _ in [*acts] if acts[0][1] <= batch.time]
        time = int(batch.time.timestamp() * 1000)
        goal = batch if start is None or start.tells_line(now) else replace(batch, linear=None)
        taken, now = _to(goal, now, facts[at:], due, roles, time)
        at += taken
        if ends is not None and time >= ends and not now.reaches(goal) and not _beyond(now, past):
            return _Compared(number, last, line=goal is batch)
        divergence = _differs(stream, now, goal, stored)
        if divergence is not None:
            record = facts[at - 1] if at and now.reaches(goal) else None
            return _Compared(number, last, replace(divergence, record=record))
        last = batch
    line = start is None or start.tells_line(now)
    parting = _ends(past, stream, now, facts[at:], [act for act, _ in acts], roles)
    if parting is not None and (parting.writer is not None or (line and ends is None)):
        return _Compared(len(batches), last, parting)
    return _Compared(len(batches), last, line=line)


def _beyond(now: Replayed, past: StreamBatches) -> bool:
    return any(beyond(at, past.positions.get(writer, 0)) for writer, at in now.positions.items())


def _to(
    batch: StoredBatch,
    now: Replayed,
    facts: Sequence[RecordedMessage],
    acts: Sequence[RecordedMessage],
    roles: Mapping[str, Topic],
    time: int,
) -> tuple[int, Replayed]:
    """Apply the fewest records of `facts`, and then `acts`, with which the replay reaches the batch, else all. Returns
    how many records, and the replay after them."""

    def tried(base: Replayed, more: Sequence[RecordedMessage]) -> Replayed:
        return base.fed(more, roles, time).fed(acts, roles, time)

    low, step = 0, 1  # `now` has `low` records, which are too few
    done = tried(now, [])
    if done.reaches(batch):
        return 0, done
    while low < len(facts):
        chunk = facts[low : low + step]
        done = tried(now, chunk)
        if not done.reaches(batch):
            now, low, step = now.fed(chunk, roles, time), low + len(chunk), min(2 * step, AT_ONCE)
            continue
        missing, enough = 0, len(chunk)  # `few` are too few, `many` are enough
        while enough - missing > 1:
            middle = (missing + enough) // 2
            attempt = tried(now, chunk[:middle])
            missing, enough, done = (missing, middle, attempt) if attempt.reaches(batch) else (middle, enough, done)
        return low + enough, done
    return low, tried(now, [])


def _differs(stream: str, now: Replayed, batch: StoredBatch, stored: Mapping[str, Evidence]) -> Parting | None:
    for move in batch.advances:
        replayed = now.positions.get(move.writer, 0)
        counts = stored[move.writer], now.counts.get(move.writer, NOTHING)
        if replayed != move.id or counts[0] != counts[1]:
            evidence = counts if replayed == move.id else None
            return Parting(stream, None, move.writer, move.id, replayed, batch.batch, batch.time, evidence)
    if batch.linear is not None and now.linear != batch.linear:
        return Parting(stream, None, None, batch.linear, now.linear, batch.batch, batch.time)
    return None


def _ends(
    past: StreamBatches,
    stream: str,
    now: Replayed,
    facts: Sequence[RecordedMessage],
    acts: Sequence[RecordedMessage],
    roles: Mapping[str, Topic],
) -> Parting | None:
    """Check that the remaining records move nothing, except the linear position if a writer retired."""
    time = max([message.time for message in (*facts, *acts)], default=0)
    end = now.fed(facts, roles, time).fed(acts, roles, time)
    moved = next((writer for writer in end.positions if end.positions[writer] != past.positions.get(writer)), None)
    if moved is None:
        if end.linear == past.linear:
            return None
        return Parting(stream, None, None, past.linear, end.linear, None, None)
    for number in range(1, len(facts) + 1):
        if now.fed(facts[:number], roles, time).positions.get(moved) != now.positions.get(moved):
            return Parting(
                stream, facts[number - 1], moved, past.positions.get(moved), end.positions[moved], None, None
            )
    return Parting(stream, None, moved, past.positions.get(moved), end.positions[moved], None, None)


def _applied(
    messages: Sequence[RecordedMessage], audit: Sequence[AppliedOverride]
) -> list[tuple[RecordedMessage, datetime]]:
    """The override records that were applied, each with the time of its batch. A refused one does nothing."""
    left, applied = [*audit], []
    for message in messages:
        try:
            record = records.read(message.value, message.key, Topic.CONTROL)
        except BadRecord:
            continue
        assert isinstance(record, records.Marker)
        for act in left:
            prev = record.prev if isinstance(record, records.Skip) else act.prev
            stated = (records.kind_of(record).name, record.writer, prev, record.id, record.by, record.why)
            if (act.kind, act.writer, act.prev, act.id, act.by, act.why) == stated:
                left.remove(act)
                applied.append((message, act.time))
                break
    return sorted(applied, key=lambda pair: pair[1])


SHOWN: Final = 10  # streams; the JSON has all


def to_json(result: ReplayReport) -> str:
    parted = [
        plain(parting) | {"record": None if parting.record is None else msgspec.Raw(to_line(parting.record).encode())}
        for parting in result.parted
    ]
    return as_object(plain(result) | {"parted": parted})


def to_text(report: ReplayReport) -> str:
    lines = [line for parting in report.parted[:SHOWN] for line in _parting(parting)]
    if len(report.parted) > SHOWN:
        lines.append(f"{count(len(report.parted) - SHOWN, 'more stream')} differ from their history")
    unknown = [f"{stream}: not compared: {why}" for stream, why in report.unknown.items()]
    parts = [f"{stream}: equal in part: {_part(part)}" for stream, part in report.parts.items()]
    for shown, result in ((unknown, "not compared"), (parts, "equal in part")):
        lines += shown[:SHOWN]
        if len(shown) > SHOWN:
            lines.append(f"{count(len(shown) - SHOWN, 'more stream')} {result}")
    if report.absent:
        names = ", ".join(report.absent[:SHOWN]) + (", ..." if len(report.absent) > SHOWN else "")
        lines.append(f"without a record: {count(len(report.absent), 'stream')}: {names}")
    every = len(report.alike) + len(report.parted) + len(report.unknown)
    lines.append(
        f"{count(report.records, 'record')} give the stored history of {len(report.alike)} of {count(every, 'stream')}"
        f" ({count(report.batches, 'batch')})"
    )
    return sanitize(lines)


def _part(part: PartCompared) -> str:
    clauses = []
    if part.after is not None:
        missing = f"the recording begins at offset {part.offset}" if part.offset else "older history was dropped"
        line = "no linear position" if part.line_from is None else f"linear positions beyond {part.line_from}"
        clauses.append(f"after {named(part.after)}, because {missing}; {line}")
    if part.behind:
        upto = "no batch" if part.upto is None else named(part.upto)
        clauses.append(f"up to {upto}, where the recording ends ({part.behind} later)")
    return ", and ".join(clauses)


def _parting(parting: Parting) -> Iterator[str]:
    where = "after the last record" if parting.record is None else "at the record below"
    when = "at the end" if parting.time is None else f"after batch {parting.batch} of {timestamp(parting.time)}"
    whose = "the linear position" if parting.writer is None else parting.writer
    stored, replayed = str(parting.history), str(parting.replayed)
    if parting.evidence is not None:
        before, now = map(evidence, parting.evidence)
        stored, replayed = f"{parting.history} by {before}", f"by {now}"
    yield f"{parting.stream}: differs {where}: {when} {whose} is {stored} in the history and {replayed} in the replay"
    if parting.record is not None:
        yield f"    {record_text(parting.record)}"


@click.command("replay", cls=OurCommand)
@click.argument("source", metavar="[TOPIC or FILE]", required=False)
@click.option("--stream", help="Only this stream.")
@click.option(
    "--records", type=click.IntRange(1), default=1_000_000, show_default=True, help="Kafka records to read at most."
)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.pass_context
def replay(context: click.Context, source: str | None, stream: str | None, records: int, *, as_json: bool) -> None:
    """Apply recorded records again, without Spark, and compare the positions with the history in Postgres.

    The records come from a FILE that `tidemark tail --all --json` wrote (-: standard input), or from Kafka: from TOPIC,
    or without it from the facts topic. Exit code 1 if the positions differ, 3 if a stream could not be compared.
    """
    settings = loaded()
    file = source is not None and (source == "-" or Path(source).is_file())
    if source is not None and not file and re.fullmatch(r"[\w.-]{1,249}", source, re.ASCII) is None:
        raise click.BadParameter(
            f"{source!r} is neither an existing file nor the name of a topic", param_hint="TOPIC or FILE"
        )
    facts = settings.kafka_facts_topic if source is None or file else source
    roles = {facts: Topic.FACTS, settings.kafka_control_topic: Topic.CONTROL}
    if len(roles) == 1:
        raise click.UsageError(f"{facts} is the control topic: name the facts topic; its overrides are read too")
    with BatchHistory.open(settings.postgres) as past:
        if stream is not None and stream not in past.streams():
            raise CommandFailed(no_stream(stream))
        read = read_file(source or "-") if file else read_topics(settings, facts, records)
        messages = {}
        for message in read:
            if message.topic not in roles:
                raise CommandFailed(
                    f"{message.topic} is neither TIDEMARK_KAFKA_FACTS_TOPIC nor TIDEMARK_KAFKA_CONTROL_TOPIC"
                )
            if stream is None or message.key == stream.encode():
                messages[message.topic, message.partition, message.offset] = (
                    message  # a file may contain two recordings
                )
        bounds = Policies(past.policies(), settings.policy_defaults).bounds()
        result = report(past, [messages[offset] for offset in sorted(messages)], roles, bounds, stream)
    if as_json:
        click.echo(to_json(result))
    else:
        echo(to_text(result))
    if result.parted or result.unknown or not result.alike:
        context.exit(1 if result.parted else 3)
