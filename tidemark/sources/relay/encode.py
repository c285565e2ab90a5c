"""The Kafka records of a decision (docs/design.md 3). Every relay makes the same edges of the same IDs.

Only the number of edges in a record may differ, which does not change the meaning.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
from msgspec import Raw

from tidemark.common.errors import MalformedFact
from tidemark.sources.producer import RecordProducer
from tidemark.sources.relay.decider import Decision
from tidemark.sources.relay.evidence import EmptyRange, ids_of
from tidemark.sources.relay.queries import AppendedFact
from tidemark.streaming.values.intervals import EMPTY, Intervals
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import FactRun, Position, Rdata, Void

MOST_FACTS = 200
MOST_BYTES = 256 * 1024
"""Bytes of a RUN record. A larger fact has a record of its own."""
_VOID_BYTES = 30
_decoder = msgspec.json.Decoder(Raw)


@dataclass(frozen=True, slots=True)
class _RecordEdge:
    """The edge `(id - 1, id]`. A void has no rows. `bytes`: its approximate size in a record."""

    writer: str
    id: int
    rows: Sequence[Raw]
    bytes: int


def encode_decision(decided: Decision, most: int = 1, most_bytes: int = MOST_BYTES) -> Iterator[bytes]:
    """One record for each row of each fact, the last one with the ID, one for each void, and one for each announced
    range.

    IDs of facts and voids ascend. Neighbouring IDs of one writer share a record.

    Args:
        decided: the decision.
        most: the largest number of edges of a record.
        most_bytes: the largest size of a record of several edges.

    Raises:
        MalformedFact: a row is not JSON. The fact cannot be sent, and its ID is not void.
    """
    stream_epoch, stream = decided.stream_epoch, decided.stream_epoch.stream.name
    signed = stream_epoch.stream.towards.signed

    for chain in _chains(decided, most, most_bytes):
        writer, epoch = chain[0].writer, stream_epoch.writers[chain[0].writer].epoch
        prev, ids = signed(chain[0].id - 1), [signed(edge.id) for edge in chain]
        if len(chain) > 1:
            rows = [list(edge.rows) for edge in chain]
            yield records.encode(FactRun(stream=stream, writer=writer, epoch=epoch, prev=prev, ids=ids, rows=rows))
        elif not chain[0].rows:
            yield records.encode(Void(stream=stream, writer=writer, epoch=epoch, prev=prev, id=ids[0]))
        else:
            *first, last = chain[0].rows
            for row in first:
                yield records.encode(Rdata(stream=stream, writer=writer, epoch=epoch, id="batch", row=row))
            yield records.encode(Rdata(stream=stream, writer=writer, epoch=epoch, id=ids[0], row=last))
    for gap in [*_emptied(decided), *decided.announced]:
        epoch = stream_epoch.writers[gap.writer].epoch
        prev, id = signed(gap.prev), signed(gap.id)
        yield records.encode(Position(stream=stream, writer=gap.writer, epoch=epoch, prev=prev, id=id))


def _emptied(decided: Decision) -> Iterator[EmptyRange]:
    """Ranges without a row among the IDs that were published before the database went back. They may have had facts, so
    no ID is void.

    A single writer had one edge for each of these IDs, so it does not matter how they are cut now.
    """
    for low, high in decided.emptied:
        cuts = [low, high] if len(decided.stream_epoch.writers) == 1 else range(low, high + 1)
        yield from (EmptyRange(decided.stream_epoch.own, prev, id) for prev, id in pairwise(cuts))


def _chains(decided: Decision, most: int, most_bytes: int) -> Iterator[list[_RecordEdge]]:
    chain: list[_RecordEdge] = []
    size = 0
    for edge in _edges(decided):
        if chain:
            joins = edge.writer == chain[0].writer and edge.id == chain[-1].id + 1
            if not (joins and len(chain) < most and size + edge.bytes <= most_bytes):
                yield chain
                chain, size = [], 0
        chain.append(edge)
        size += edge.bytes
    if chain:
        yield chain


def _edges(decided: Decision) -> Iterator[_RecordEdge]:
    """The edges of facts and voids, by their IDs."""
    voids = ids_of(decided.voids)
    next_void = next(voids, None)
    for fact in decided.facts:
        while next_void is not None and next_void < fact.id:
            yield _RecordEdge(decided.stream_epoch.own, next_void, (), _VOID_BYTES)
            next_void = next(voids, None)
        try:
            rows = () if fact.is_void else [*map(_decoder.decode, fact.rows)]
        except (msgspec.DecodeError, TypeError, RecursionError) as error:
            stream = decided.stream_epoch.stream
            raise MalformedFact(stream.name, stream.towards.signed(fact.id), str(error)) from None
        yield _RecordEdge(decided.stream_epoch.name_of(fact.writer), fact.id, rows, fact.bytes)
    while next_void is not None:
        yield _RecordEdge(decided.stream_epoch.own, next_void, (), _VOID_BYTES)
        next_void = next(voids, None)


_VOIDS_AT_ONCE = 10_000
_VOID_RECORD_BYTES = 200
_AROUND_BYTES = 3000
"""Bytes of a record of several facts, without the facts: the names of stream and writer, and the JSON around the
facts."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A decision that was sent, without its rows. `left`: its records that are not acknowledged. `size`: bytes."""

    decided: Decision
    size: int
    left: int = 0

    def note_acknowledged(self) -> None:
        self.left -= 1

    def counted(self, values: Iterable[bytes]) -> Iterator[bytes]:
        """Count each value as a record that waits for an acknowledgement, and return the values."""
        for value in values:
            self.left += 1
            yield value


def send(producer: RecordProducer, decided: Decision, most_facts: int) -> InFlight:
    """Encode and send the records of `decided` one by one. In a backlog, a record has up to `most_facts` facts."""
    name = decided.stream_epoch.stream.name
    size = sum(fact.bytes for fact in decided.facts)
    size += _VOID_RECORD_BYTES * (decided.voids.width() + len(decided.announced))
    most_bytes = min(MOST_BYTES, producer.max_value_bytes(name) - _AROUND_BYTES)
    # `left` begins with 1, so that the decision is not acknowledged before all records are sent.
    parcel = InFlight(decided.without_rows(), size, 1)
    producer.send_all(name, parcel.counted(encode_decision(decided, most_facts, most_bytes)), parcel.note_acknowledged)
    parcel.note_acknowledged()
    return parcel


def parts(decided: Decision) -> Iterator[Decision]:
    """The same decision in parts that need little memory: a range of voids becomes one record for each ID."""
    if decided.facts or decided.announced or decided.emptied:
        yield Decision(decided.stream_epoch, decided.facts, EMPTY, decided.announced, decided.emptied)
    for low, high in decided.voids:
        for start in range(low, high, _VOIDS_AT_ONCE):
            yield Decision(decided.stream_epoch, [], Intervals.of([(start, min(high, start + _VOIDS_AT_ONCE))]))


def largest_record(decided: Decision, fact: AppendedFact) -> int:
    """Bytes of the largest record of the fact."""
    signed, writer = decided.stream_epoch.stream.towards.signed, decided.stream_epoch.name_of(fact.writer)
    around = Rdata(
        stream=decided.stream_epoch.stream.name,
        writer=writer,
        epoch=decided.stream_epoch.writers[writer].epoch,
        prev=signed(fact.id - 1),
        id=signed(fact.id),
        row=Raw(b""),
    )
    return len(records.encode(around)) + max(map(len, fact.rows), default=0)
