"""Where a replay begins of a stream whose first records, or first days of history, are gone: behind a batch after which
nothing was open, with each writer where the history has it.

Such a state can be made of positions alone, but for the IDs that were complete above the line then: so lines are held
against the history once the replay has passed all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tidemark.app.verbs.replayed import Replayed
from tidemark.common.errors import BadRecord
from tidemark.sinks.postgres.inspect import BatchAdvance, PastBatch, PastStream
from tidemark.sources.kafka_lookup import RecordedMessage
from tidemark.streaming.values.direction import beyond
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import FactRun, Join, Rdata, Record, Retire, Topic


@dataclass(frozen=True, slots=True)
class SeedWriter:
    """As far as a history tells it of one batch; `later`: by what came behind it, and so may the epoch."""

    writer: str
    epoch: int
    position: int
    later: bool


@dataclass(frozen=True, slots=True)
class ReplayStart:
    """Batches up to the first `skipped` are not compared, the last of them is `after`. Lines are from where the replay
    has passed `highest`, and each writer of `joining` has joined."""

    skipped: int
    after: PastBatch
    replayed: Replayed
    highest: int
    joining: Mapping[str, int]

    def tells_line(self, now: Replayed) -> bool:
        return not beyond(self.highest, now.linear) and all(
            now.positions.get(writer, position) != position for writer, position in self.joining.items()
        )


def start_of(
    past: PastStream, stream: str, facts: Sequence[RecordedMessage], bounds: Bounds, *, cut: bool
) -> ReplayStart | None:
    """The earliest; None where there is none. `cut`: records before the first of `facts` are missing. So it is to be a
    batch that is known to have read beyond them."""
    told = {fact for it in facts for fact in _facts(_record(it))} if cut else set()
    read = not cut
    for number, batch in enumerate(past.batches, 1):
        # All facts: what a JOIN or an operator settled may have come without its record.
        read = read or any(
            (move.writer, move.id) in told and not any(move.evidence.counts[1:]) for move in batch.advances
        )
        if read and not any(
            it.opened <= batch.time and (it.closed is None or it.closed > batch.time) for it in past.gaps
        ):
            return _seeded(past, stream, facts, bounds, number)
    return None


def _seeded(
    past: PastStream, stream: str, facts: Sequence[RecordedMessage], bounds: Bounds, skipped: int
) -> ReplayStart:
    after, marks = past.batches[skipped - 1], dict[str, Record]()
    heard = [_record(it) for it in facts]
    for record in heard:
        if record is not None:
            marks.setdefault(record.writer, record)
    joins = {(it.writer, it.epoch): it.id for it in heard if isinstance(it, Join)}
    joined, retired, joining = list[Join](), list[Retire](), dict[str, int]()
    for it in _standing(past, skipped):
        if it.later and not it.position and (it.writer, it.epoch) in joins:
            continue
        # The JOIN of an epoch that began behind the batch is still to come.
        comes = it.later and not beyond(it.position, joins.get((it.writer, it.epoch), 0))
        epoch = it.epoch - 1 if comes and it.epoch else it.epoch
        joined.append(Join(stream=stream, writer=it.writer, epoch=epoch, id=it.position))
        first = marks.get(it.writer)
        if isinstance(first, Join) and first.epoch > epoch:
            joining[it.writer] = it.position
        elif first is None and it.writer in past.retired:
            retired.append(Retire(stream=stream, writer=it.writer, epoch=epoch, id=it.position))
    joined.sort(key=lambda it: (abs(it.id), it.writer))  # a JOIN above the others would let the line pass them
    marked: list[Join | Retire] = [*joined, *retired]
    topic = facts[0].topic if facts else ""
    seeds = [
        RecordedMessage(topic, 0, offset, 0, stream.encode(), records.encode(it)) for offset, it in enumerate(marked)
    ]
    now = Replayed(stream, bounds).fed(seeds, {topic: Topic.FACTS}, int(after.time.timestamp() * 1000))
    highest = max((it.id for it in joined), key=abs, default=0)
    return ReplayStart(skipped, after, now.counting_anew(), highest, joining)


def _standing(past: PastStream, skipped: int) -> Iterator[SeedWriter]:
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


def _record(it: RecordedMessage) -> Record | None:
    try:
        return records.read(it.value, it.key, Topic.FACTS)
    except BadRecord:
        return None


def _facts(record: Record | None) -> Iterator[tuple[str, int]]:
    if isinstance(record, Rdata) and isinstance(record.id, int):
        yield record.writer, record.id
    elif isinstance(record, FactRun):
        yield from ((record.writer, id) for id, rows in zip(record.ids, record.rows, strict=True) if rows)
