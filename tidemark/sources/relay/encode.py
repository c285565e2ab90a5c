"""Encodes decisions as Kafka records, and sends them (docs/design.md 3).

Every relay makes the same edges of the same IDs. Only the number of edges in a record may differ, which does not change
the meaning.
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
from tidemark.streaming.values.intervals import NO_INTERVALS, Intervals
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import FactRun, Position, Rdata, Void

MAX_RUN_FACTS = 200
MAX_RUN_BYTES = 256 * 1024
"""The largest size of a RUN record, in bytes. A larger fact gets records of its own."""
_VOID_BYTES = 30
"""The approximate size of a void in a RUN record."""
_decoder = msgspec.json.Decoder(Raw)


@dataclass(frozen=True, slots=True)
class _RecordEdge:
    """The edge `(id - 1, id]`. A void has no rows. `bytes`: its approximate size in a record."""

    writer: str
    id: int
    rows: Sequence[Raw]
    bytes: int


def encode_decision(decision: Decision, max_edges: int = 1, max_bytes: int = MAX_RUN_BYTES) -> Iterator[bytes]:
    """Encode the edges of facts and voids in ascending order of their IDs, then the ranges without a fact.

    Up to `max_edges` edges of one writer with neighbouring IDs share a RUN record. Otherwise a fact has one record for
    each of its rows, of which the last one has the ID, and a void has one record.

    Args:
        decision: the decision to encode.
        max_edges: the largest number of edges of a record.
        max_bytes: the largest size of a record of several edges.

    Raises:
        MalformedFact: a row is not JSON. The fact cannot be sent, and its ID is not void.
    """
    stream_epoch, stream = decision.stream_epoch, decision.stream_epoch.stream.name
    signed = stream_epoch.stream.direction.signed

    for chain in _chains(decision, max_edges, max_bytes):
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
    for empty_range in [*_previously_published_ranges(decision), *decision.announced]:
        epoch = stream_epoch.writers[empty_range.writer].epoch
        prev, id = signed(empty_range.prev), signed(empty_range.id)
        yield records.encode(Position(stream=stream, writer=empty_range.writer, epoch=epoch, prev=prev, id=id))


def _previously_published_ranges(decision: Decision) -> Iterator[EmptyRange]:
    """The ranges of `decision.previously_published`. They may have had facts, so no ID is declared void.

    If the stream has one writer, the writer's edges had one ID each, so a range of any size matches them.
    """
    for low, high in decision.previously_published:
        cuts = [low, high] if len(decision.stream_epoch.writers) == 1 else range(low, high + 1)
        yield from (EmptyRange(decision.stream_epoch.database_writer, prev, id) for prev, id in pairwise(cuts))


def _chains(decision: Decision, max_edges: int, max_bytes: int) -> Iterator[list[_RecordEdge]]:
    chain: list[_RecordEdge] = []
    size = 0
    for edge in _edges(decision):
        if chain:
            is_next = edge.writer == chain[0].writer and edge.id == chain[-1].id + 1
            if not (is_next and len(chain) < max_edges and size + edge.bytes <= max_bytes):
                yield chain
                chain, size = [], 0
        chain.append(edge)
        size += edge.bytes
    if chain:
        yield chain


def _edges(decision: Decision) -> Iterator[_RecordEdge]:
    """The edges of facts and voids, by their IDs."""
    voids = ids_of(decision.voids)
    next_void = next(voids, None)
    for fact in decision.facts:
        while next_void is not None and next_void < fact.id:
            yield _RecordEdge(decision.stream_epoch.database_writer, next_void, (), _VOID_BYTES)
            next_void = next(voids, None)
        try:
            rows = () if fact.is_void else [*map(_decoder.decode, fact.rows)]
        except (msgspec.DecodeError, TypeError, RecursionError) as error:
            stream = decision.stream_epoch.stream
            raise MalformedFact(stream.name, stream.direction.signed(fact.id), str(error)) from None
        yield _RecordEdge(decision.stream_epoch.kafka_name(fact.writer), fact.id, rows, fact.bytes)
    while next_void is not None:
        yield _RecordEdge(decision.stream_epoch.database_writer, next_void, (), _VOID_BYTES)
        next_void = next(voids, None)


_VOIDS_AT_ONCE = 10_000
_VOID_RECORD_BYTES = 200
_ENVELOPE_BYTES = 3000
"""The largest size of a RUN record without its facts: the names of stream and writer, and JSON syntax."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A decision that was sent, without its rows.

    Attributes:
        decision: the decision.
        size: approximate bytes of its records.
        unacknowledged: the number of its records that Kafka has not acknowledged.
    """

    decision: Decision
    size: int
    unacknowledged: int = 0

    def note_acknowledged(self) -> None:
        """Note that Kafka has acknowledged one record."""
        self.unacknowledged -= 1

    def count_records(self, values: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the values, and count each as a record that Kafka has not acknowledged."""
        for value in values:
            self.unacknowledged += 1
            yield value


def send(producer: RecordProducer, decision: Decision, max_run_facts: int) -> InFlight:
    """Encode and send the records of a decision one by one. A RUN record has up to `max_run_facts` facts."""
    name = decision.stream_epoch.stream.name
    size = sum(fact.bytes for fact in decision.facts)
    size += _VOID_RECORD_BYTES * (decision.voids.width() + len(decision.announced))
    max_bytes = min(MAX_RUN_BYTES, producer.max_value_bytes(name) - _ENVELOPE_BYTES)
    # `unacknowledged` begins with 1, so that the decision is not acknowledged before all records are sent.
    in_flight = InFlight(decision.without_rows(), size, 1)
    producer.send_all(
        name, in_flight.count_records(encode_decision(decision, max_run_facts, max_bytes)), in_flight.note_acknowledged
    )
    in_flight.note_acknowledged()
    return in_flight


def split_decision(decision: Decision) -> Iterator[Decision]:
    """Split a decision into parts that need little memory. A range of voids becomes one record for each ID."""
    if decision.facts or decision.announced or decision.previously_published:
        yield Decision(
            decision.stream_epoch, decision.facts, NO_INTERVALS, decision.announced, decision.previously_published
        )
    for low, high in decision.voids:
        for start in range(low, high, _VOIDS_AT_ONCE):
            yield Decision(decision.stream_epoch, [], Intervals.of([(start, min(high, start + _VOIDS_AT_ONCE))]))


def largest_record_bytes(decision: Decision, fact: AppendedFact) -> int:
    """The size of the largest record of the fact in bytes, if each row has a record."""
    signed, writer = decision.stream_epoch.stream.direction.signed, decision.stream_epoch.kafka_name(fact.writer)
    envelope = Rdata(
        stream=decision.stream_epoch.stream.name,
        writer=writer,
        epoch=decision.stream_epoch.writers[writer].epoch,
        prev=signed(fact.id - 1),
        id=signed(fact.id),
        row=Raw(b""),
    )
    return len(records.encode(envelope)) + max(map(len, fact.rows), default=0)
