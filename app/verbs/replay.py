"""`tidemark replay`: recorded records through the rules again, without Spark, held against the history in Postgres.

What a batch is does not matter to the rules, so no batch of the past is made again: one of the history ends with the
first record after which the replay has come as far as it went, and there both must be alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

import msgspec

from tidemark.app.printed import as_object, for_people, plain
from tidemark.app.verbs import recordings
from tidemark.app.verbs.explain import clock, evidence
from tidemark.app.verbs.replayed import NOTHING, Replayed, by_stream
from tidemark.sinks.postgres.past_batches import AppliedAct, PastBatch, PastBatches, PastStream
from tidemark.sources.recorded import RecordedMessage
from tidemark.streaming import records
from tidemark.streaming.errors import BadRecord
from tidemark.streaming.model import Bounds, Evidence
from tidemark.streaming.records import Topic

AT_ONCE: Final = 4096  # records that are tried together while the history is far ahead
SHOWN: Final = 10  # streams; the JSON has all


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


@dataclass(slots=True)
class ReplayReport:
    """`unknown`: streams of which it cannot be told, and why."""

    records: int = 0
    batches: int = 0
    alike: list[str] = field(default_factory=list)
    parted: list[Parting] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)


def report(
    past: PastBatches, messages: Sequence[RecordedMessage], roles: Mapping[str, Topic], bounds: Bounds
) -> ReplayReport:
    """Of all streams of the recording, as far as batches have read it."""
    upto = past.read_up_to()
    read = [it for it in messages if it.offset < upto.get((it.topic, it.partition), it.offset + 1)]
    firsts: dict[tuple[str, int], int] = {}
    for it in read:
        firsts.setdefault((it.topic, it.partition), it.offset)
    found = ReplayReport(records=len(read))
    for stream, of_stream in sorted(by_stream(read).items()):
        held = past.stream(stream)
        if held is None:
            continue  # nothing of it was ever taken: its records are in the dead letters
        found.batches += len(held.batches)
        if not held.whole:
            found.unknown[stream] = "the history no longer has its first days"
            continue
        parting = compared(held, stream, of_stream, roles, bounds)
        begins = max((firsts[it.topic, it.partition] for it in of_stream if roles[it.topic] is Topic.FACTS), default=0)
        if parting is None:
            found.alike.append(stream)
        elif begins:
            found.unknown[stream] = f"the recording begins at offset {begins}, and its first records are not in it"
        else:
            found.parted.append(parting)
    return found


def compared(
    past: PastStream, stream: str, messages: Sequence[RecordedMessage], roles: Mapping[str, Topic], bounds: Bounds
) -> Parting | None:
    """The first place where they part. `messages` are all that batches have read of the stream."""
    facts = [it for it in messages if roles[it.topic] is Topic.FACTS]
    acts = _applied([it for it in messages if roles[it.topic] is Topic.CONTROL], past.acts)
    now, told = Replayed(stream, bounds), dict[str, Evidence]()
    at = 0
    for batch in past.batches:
        for move in batch.advances:
            told[move.writer] = told.get(move.writer, NOTHING) + move.evidence
        due = [acts.pop(0)[0] for _ in [*acts] if acts[0][1] <= batch.time]
        time = int(batch.time.timestamp() * 1000)
        taken, now = _to(batch, now, facts[at:], due, roles, time)
        at += taken
        found = _differs(stream, now, batch, told)
        if found is not None:
            return replace(found, record=facts[at - 1] if at and now.reaches(batch) else None)
    return _ends(past, stream, now, facts[at:], [it for it, _ in acts], roles)


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
    if now.linear != batch.linear:
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


def as_json(found: ReplayReport) -> str:
    parted = [
        plain(it) | {"record": None if it.record is None else msgspec.Raw(recordings.as_line(it.record).encode())}
        for it in found.parted
    ]
    return as_object(plain(found) | {"parted": parted})


def as_text(found: ReplayReport) -> str:
    lines = [line for it in found.parted[:SHOWN] for line in _parting(it)]
    if len(found.parted) > SHOWN:
        lines.append(f"{len(found.parted) - SHOWN} streams more part from their history")
    unknown = [f"{stream}: it cannot be told: {why}" for stream, why in found.unknown.items()]
    lines += unknown[:SHOWN]
    if len(unknown) > SHOWN:
        lines.append(f"of {len(unknown) - SHOWN} streams more it cannot be told")
    said = f"{found.records} records give the history of {len(found.alike)} of"
    every = len(found.alike) + len(found.parted) + len(found.unknown)
    return for_people([*lines, f"{said} {every} stream{'' if every == 1 else 's'}: {found.batches} batches"])


def _parting(it: Parting) -> Iterator[str]:
    where = "after the last record" if it.record is None else "at the record below"
    when = "in the end" if it.time is None else f"after batch {it.batch} of {clock(it.time)}"
    whose = "the line" if it.writer is None else it.writer
    if it.evidence is None:
        yield (
            f"{it.stream}: they part {where}: {when} {whose} is at {it.history} in the history, and at"
            f" {it.replayed} in the replay"
        )
    else:
        told, now = map(evidence, it.evidence)
        yield (
            f"{it.stream}: they part {where}: {when} {whose} is at {it.history} by {told} in the history,"
            f" and by {now} in the replay"
        )
    if it.record is not None:
        yield f"    {recordings.as_text(it.record)}"
