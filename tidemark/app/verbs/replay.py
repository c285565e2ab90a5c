"""`tidemark replay`: recorded records through the rules again, without Spark, held against the history in Postgres.

What a batch is does not matter to the rules, so no batch of the past is made again: one of the history ends with the
first record after which the replay has come as far as it went, and there both must be alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from tidemark.app.verbs.explain import clock
from tidemark.app.verbs.replay_start import ReplayStart, start_of
from tidemark.app.verbs.replayed import NOTHING, Replayed, by_stream
from tidemark.common.errors import BadRecord
from tidemark.sinks.postgres.inspect import AppliedAct, PastBatch, PastBatches, PastStream
from tidemark.sources.kafka_lookup import RecordedMessage
from tidemark.streaming.values.direction import beyond
from tidemark.streaming.values.limits import Bounds, Evidence
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Topic

AT_ONCE: Final = 4096  # records that are tried together while the history is far ahead


@dataclass(frozen=True, slots=True)
class Parting:
    """Where the two part, at `record` (None: after the last one). `writer` stands at `replayed`, and at `history` after
    the batch of that number and time (None: at the end); None: the stream's line. `evidence` of both where they stand
    at the same place."""

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
    """What of a stream was compared, where it was not all. `after`: the batch behind which it begins, for want of
    records before `offset` or of history; lines from where `line_from` was passed (None: none). `upto`: where the
    records end, and so many batches came `behind` it."""

    after: PastBatch | None = None
    offset: int = 0
    line_from: int | None = None
    upto: PastBatch | None = None
    behind: int = 0


@dataclass(slots=True)
class ReplayReport:
    """`parts`: of streams that are alike as far as they were compared. `unknown`: streams of which nothing could be,
    and why. `absent`: those of which there is no record."""

    records: int = 0
    batches: int = 0
    alike: list[str] = field(default_factory=list)
    parted: list[Parting] = field(default_factory=list)
    parts: dict[str, PartCompared] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Compared:
    """`batches` that are alike, up to `last`. Without a `parting` all are, or the records end."""

    batches: int
    last: PastBatch | None
    parting: Parting | None = None
    line: bool = True


def report(
    past: PastBatches,
    messages: Sequence[RecordedMessage],
    roles: Mapping[str, Topic],
    bounds: Bounds,
    only: str | None = None,
) -> ReplayReport:
    """Of all streams, or `only` of one, as far as batches have read it."""
    upto = past.read_up_to()
    read = [it for it in messages if it.offset < upto.get((it.topic, it.partition), it.offset + 1)]
    firsts: dict[tuple[str, int], int] = {}
    lasts = {(it.topic, it.partition): it for it in read}
    for it in read:
        firsts.setdefault((it.topic, it.partition), it.offset)
    found, streams = ReplayReport(records=len(read)), by_stream(read)
    found.absent = [name for name in past.streams() if name not in streams and only in (None, name)]
    for stream, of_stream in sorted(streams.items()):
        held = past.stream(stream)
        if held is None:
            continue  # nothing of it was ever taken: its records are in the dead letters
        places = {(it.topic, it.partition) for it in of_stream if roles[it.topic] is Topic.FACTS}
        begins = max((firsts[place] for place in places), default=0)
        # A batch before the last record was made cannot have read beyond it: so it is to be reached.
        ends = min((lasts[it].time for it in places if lasts[it].offset + 1 < upto.get(it, 0)), default=None)
        _compare(found, held, stream, of_stream, roles, bounds, begins, ends)
    return found


def _compare(
    found: ReplayReport,
    past: PastStream,
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
        facts = [it for it in messages if roles[it.topic] is Topic.FACTS]
        start = start_of(past, stream, facts, bounds, cut=begins > 0)
        missing = f"the recording begins at offset {begins}" if begins else "the history no longer has its first days"
        if start is None or start.skipped == len(past.batches):
            found.unknown[stream] = f"{missing}, and behind no batch since was nothing open"
            return
        done = compared(past, stream, messages, roles, bounds, ends, start)
        if done.parting is not None and done.parting.record is None:
            found.unknown[stream] = (
                f"{missing}, and what is there does not lead on from {named(done.last or start.after)}"
            )
            return
    assert done is not None
    batches = len(past.batches) - (start.skipped if start else 0)
    if done.parting is not None:
        found.batches += batches
        found.parted.append(done.parting)
        return
    found.batches += done.batches
    found.alike.append(stream)
    left = batches - done.batches
    if start is not None or left:
        found.parts[stream] = PartCompared(
            start.after if start else None,
            begins,
            start.highest if start is not None and done.line else None,
            done.last if left else None,
            left,
        )


def named(it: PastBatch) -> str:
    return f"batch {it.batch} of {clock(it.time)}"


def compared(
    past: PastStream,
    stream: str,
    messages: Sequence[RecordedMessage],
    roles: Mapping[str, Topic],
    bounds: Bounds,
    ends: int | None = None,
    start: ReplayStart | None = None,
) -> _Compared:
    """Up to the first place where they part. `messages` are all that batches have read of the stream; where `ends` (ms)
    is given, all up to that time."""
    facts = [it for it in messages if roles[it.topic] is Topic.FACTS]
    acts = _applied([it for it in messages if roles[it.topic] is Topic.CONTROL], past.acts)
    now, told = Replayed(stream, bounds), dict[str, Evidence]()
    batches, last, at = past.batches, None, 0
    if start is not None:
        now, batches = start.replayed, batches[start.skipped :]
        acts = [it for it in acts if it[1] > start.after.time]
    for number, batch in enumerate(batches):
        for move in batch.advances:
            told[move.writer] = told.get(move.writer, NOTHING) + move.evidence
        due = [acts.pop(0)[0] for _ in [*acts] if acts[0][1] <= batch.time]
        time = int(batch.time.timestamp() * 1000)
        goal = batch if start is None or start.tells_line(now) else replace(batch, linear=None)
        taken, now = _to(goal, now, facts[at:], due, roles, time)
        at += taken
        if ends is not None and time >= ends and not now.reaches(goal) and not _beyond(now, past):
            return _Compared(number, last, line=goal is batch)
        found = _differs(stream, now, goal, told)
        if found is not None:
            record = facts[at - 1] if at and now.reaches(goal) else None
            return _Compared(number, last, replace(found, record=record))
        last = batch
    line = start is None or start.tells_line(now)
    parting = _ends(past, stream, now, facts[at:], [it for it, _ in acts], roles)
    if parting is not None and (parting.writer is not None or (line and ends is None)):
        return _Compared(len(batches), last, parting)
    return _Compared(len(batches), last, line=line)


def _beyond(now: Replayed, past: PastStream) -> bool:
    return any(beyond(at, past.positions.get(writer, 0)) for writer, at in now.positions.items())


def _to(
    batch: PastBatch,
    now: Replayed,
    facts: Sequence[RecordedMessage],
    acts: Sequence[RecordedMessage],
    roles: Mapping[str, Topic],
    time: int,
) -> tuple[int, Replayed]:
    """The fewest records of `facts` with which, and with `acts` behind them, the replay reaches the batch: how many,
    and what it is then. Where none do, all of them."""

    def tried(base: Replayed, more: Sequence[RecordedMessage]) -> Replayed:
        return base.fed(more, roles, time).fed(acts, roles, time)

    low, step = 0, 1  # `now` has taken `low` records, and does not reach
    done = tried(now, [])
    if done.reaches(batch):
        return 0, done
    while low < len(facts):
        chunk = facts[low : low + step]
        done = tried(now, chunk)
        if not done.reaches(batch):
            now, low, step = now.fed(chunk, roles, time), low + len(chunk), min(2 * step, AT_ONCE)
            continue
        few, many = 0, len(chunk)  # `few` are too few, `many` are enough
        while many - few > 1:
            middle = (few + many) // 2
            it = tried(now, chunk[:middle])
            few, many, done = (few, middle, it) if it.reaches(batch) else (middle, many, done)
        return low + many, done
    return low, tried(now, [])


def _differs(stream: str, now: Replayed, batch: PastBatch, told: Mapping[str, Evidence]) -> Parting | None:
    for move in batch.advances:
        here = now.positions.get(move.writer, 0)
        counts = told[move.writer], now.counts.get(move.writer, NOTHING)
        if here != move.id or counts[0] != counts[1]:
            evidence = counts if here == move.id else None
            return Parting(stream, None, move.writer, move.id, here, batch.batch, batch.time, evidence)
    if batch.linear is not None and now.linear != batch.linear:
        return Parting(stream, None, None, batch.linear, now.linear, batch.batch, batch.time)
    return None


def _ends(
    past: PastStream,
    stream: str,
    now: Replayed,
    facts: Sequence[RecordedMessage],
    acts: Sequence[RecordedMessage],
    roles: Mapping[str, Topic],
) -> Parting | None:
    """What is left moves nothing, but for the line where a writer retired."""
    time = max([it.time for it in (*facts, *acts)], default=0)
    end = now.fed(facts, roles, time).fed(acts, roles, time)
    moved = next((it for it in end.positions if end.positions[it] != past.positions.get(it)), None)
    if moved is None:
        if end.linear == past.linear:
            return None
        return Parting(stream, None, None, past.linear, end.linear, None, None)
    for count in range(1, len(facts) + 1):
        if now.fed(facts[:count], roles, time).positions.get(moved) != now.positions.get(moved):
            return Parting(stream, facts[count - 1], moved, past.positions.get(moved), end.positions[moved], None, None)
    return Parting(stream, None, moved, past.positions.get(moved), end.positions[moved], None, None)


def _applied(
    messages: Sequence[RecordedMessage], audit: Sequence[AppliedAct]
) -> list[tuple[RecordedMessage, datetime]]:
    """The operators' records that were applied, each with the time of its batch; what was refused does nothing."""
    left, found = [*audit], []
    for it in messages:
        try:
            record = records.read(it.value, it.key, Topic.CONTROL)
        except BadRecord:
            continue
        assert isinstance(record, records.Marker)
        for act in left:
            prev = record.prev if isinstance(record, records.Skip) else act.prev
            said = (records.kind_of(record).name, record.writer, prev, record.id, record.by, record.why)
            if (act.kind, act.writer, act.prev, act.id, act.by, act.why) == said:
                left.remove(act)
                found.append((it, act.time))
                break
    return sorted(found, key=lambda pair: pair[1])
