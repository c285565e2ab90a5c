"""The batch at which a replay starts, if the first records or the first days of the history are missing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tidemark.app.diagnosis.replayed import Replayed, fact_ids, read_fact_record
from tidemark.sinks.postgres.inspect import BatchAdvance, StoredBatch, StreamBatches
from tidemark.sources.kafka_lookup import RecordedMessage
from tidemark.streaming.values.direction import beyond
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Join, Record, Retire, Topic


@dataclass(frozen=True, slots=True)
class SeedWriter:
    """A writer after one batch, according to the history. `later`: only rows of later batches name the writer, so its
    epoch may be a later one."""

    writer: str
    epoch: int
    position: int
    later: bool


@dataclass(frozen=True, slots=True)
class ReplayStart:
    """The batch at which a comparison starts, if older records or older history are missing.

    Attributes:
        uncompared_batches: number of batches that are not compared.
        last_skipped_batch: the last of these batches.
        replayed: the state of the stream after that batch.
        highest: the highest position in that state.
        joining: by writer that joins later, its position in that state.
    """

    uncompared_batches: int
    last_skipped_batch: StoredBatch
    replayed: Replayed
    highest: int
    joining: Mapping[str, int]

    def has_linear(self, now: Replayed) -> bool:
        """Whether the linear position of the replay can be compared: the replay has passed `highest`, and each
        writer of `joining` has joined."""
        return not beyond(self.highest, now.linear) and all(
            now.positions.get(writer, position) != position for writer, position in self.joining.items()
        )


def find_start(
    past: StreamBatches, stream: str, facts: Sequence[RecordedMessage], bounds: Bounds, *, is_truncated: bool
) -> ReplayStart | None:
    """Find the first batch after which no gap was open.

    Args:
        past: the stored history of the stream.
        stream: its name.
        facts: the records of the facts topic.
        bounds: the limits with which the pipeline ran.
        is_truncated: records before the first of `facts` are missing. Then this batch or an earlier one must have read
            one of `facts`.

    Returns:
        The start after this batch; None if there is no such batch.
    """
    recorded = {fact for message in facts for fact in fact_ids(read_fact_record(message))} if is_truncated else set()
    has_read = not is_truncated
    for number, batch in enumerate(past.batches, 1):
        # Only facts count: IDs that a JOIN or an operator settled may have no record.
        has_read = has_read or any(
            (move.writer, move.id) in recorded and not any(move.evidence.counts[1:]) for move in batch.advances
        )
        if has_read and not any(
            gap.opened <= batch.time and (gap.closed is None or gap.closed > batch.time) for gap in past.gaps
        ):
            return _start_after(past, stream, facts, bounds, number)
    return None


def _start_after(
    past: StreamBatches, stream: str, facts: Sequence[RecordedMessage], bounds: Bounds, uncompared: int
) -> ReplayStart:
    """Make the state after the first `uncompared` batches: a JOIN of each writer, and a RETIRE of each retired
    writer."""
    after, first_records = past.batches[uncompared - 1], dict[str, Record]()
    parsed = [record for message in facts if (record := read_fact_record(message)) is not None]
    for record in parsed:
        first_records.setdefault(record.writer, record)
    joins = {(join.writer, join.epoch): join.id for join in parsed if isinstance(join, Join)}
    joined, retired, joining = list[Join](), list[Retire](), dict[str, int]()
    for writer in _writers_at(past, uncompared):
        if writer.later and not writer.position and (writer.writer, writer.epoch) in joins:
            continue
        # If the epoch began after the batch, the recording has its JOIN: seed the writer with the epoch before.
        joins_later = writer.later and not beyond(writer.position, joins.get((writer.writer, writer.epoch), 0))
        epoch = writer.epoch - 1 if joins_later and writer.epoch else writer.epoch
        joined.append(Join(stream=stream, writer=writer.writer, epoch=epoch, id=writer.position))
        first = first_records.get(writer.writer)
        if isinstance(first, Join) and first.epoch > epoch:
            joining[writer.writer] = writer.position
        elif first is None and writer.writer in past.retired:
            retired.append(Retire(stream=stream, writer=writer.writer, epoch=epoch, id=writer.position))
    joined.sort(
        key=lambda join: (abs(join.id), join.writer)
    )  # ascending: a high JOIN first would let the linear position pass other writers
    markers: list[Join | Retire] = [*joined, *retired]
    topic = facts[0].topic if facts else ""
    seeds = [
        RecordedMessage(topic, 0, offset, 0, stream.encode(), records.encode(marker))
        for offset, marker in enumerate(markers)
    ]
    now = Replayed(stream, bounds).apply(seeds, {topic: Topic.FACTS}, int(after.time.timestamp() * 1000))
    highest = max((join.id for join in joined), key=abs, default=0)
    return ReplayStart(uncompared, after, now.without_counts(), highest, joining)


def _writers_at(past: StreamBatches, uncompared: int) -> Iterator[SeedWriter]:
    """The writers of the stream after the first `uncompared` batches."""
    before, later = dict[str, BatchAdvance](), dict[str, tuple[int, int]]()
    for batch in past.batches[:uncompared]:
        before |= {move.writer: move for move in batch.advances}
    for batch in past.batches[uncompared:]:
        for move in batch.advances:
            later.setdefault(move.writer, (move.epoch, move.prev))
    for writer, position in past.positions.items():
        if writer in before:
            yield SeedWriter(writer, before[writer].epoch, before[writer].id, later=False)
        else:
            epoch, at = later.get(writer, (past.epochs[writer], position))
            yield SeedWriter(writer, epoch, at, later=True)
