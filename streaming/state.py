"""The stored form of a stream's state, versioned: what Spark keeps and Postgres can seed a query from.

Nested msgpack arrays, led by the format's number; intervals only, so that a million pending IDs behind one gap are a
few bytes. A format that this Tidemark does not know stops it; older ones are read.
"""

import msgspec

from streaming.chain import NOWHERE, Chain, Evidence, Span
from streaming.errors import StateTooNew
from streaming.intervals import Intervals
from streaming.line import Line
from streaming.positions import Stream
from streaming.writers import Held, Writer

FORMAT = 1

Pairs = list[tuple[int, int]]


class _Span(msgspec.Struct, array_like=True, frozen=True):
    prev: int
    id: int
    facts: int
    empty: int
    unseen: int
    skipped: int
    edges: int
    since: int


class _Writer(msgspec.Struct, array_like=True, frozen=True):
    name: str
    epoch: int
    position: int
    retired: int | None
    late: Pairs
    regressed: int
    refused: int
    pending: list[_Span]


class _Held(msgspec.Struct, array_like=True, frozen=True):
    name: str
    epoch: int
    since: int
    retire: int | None
    refused: int
    pending: list[_Span]


class _Leader(msgspec.Struct, array_like=True, frozen=True):
    format: int


class _Stream(_Leader, array_like=True, frozen=True):
    direction: int
    home: int | None
    line: int
    completed: Pairs
    writers: list[_Writer]
    held: list[_Held]


_encoder = msgspec.msgpack.Encoder()
_leader = msgspec.msgpack.Decoder(_Leader)
_decoder = msgspec.msgpack.Decoder(_Stream)


def encode(stream: Stream) -> bytes:
    """Equal streams give equal bytes."""
    return _encoder.encode(
        _Stream(
            FORMAT,
            stream.direction,
            stream.home,
            stream.line.position,
            list(stream.line.completed),
            [
                _Writer(
                    name,
                    writer.epoch,
                    writer.chain.position,
                    writer.retired,
                    list(writer.late),
                    writer.regressed,
                    writer.chain.refused,
                    _spans(writer.chain),
                )
                for name, writer in sorted(stream.writers.items())
            ],
            [
                _Held(name, epoch, held.since, held.retire, held.chain.refused, _spans(held.chain))
                for (name, epoch), held in sorted(stream.held.items())
            ],
        )
    )


def decode(data: bytes) -> Stream:
    """Raises StateTooNew for a format that a later Tidemark wrote."""
    stored = _decode(data)
    return Stream(
        stored.direction,
        stored.home,
        Line(stored.line, Intervals.of(stored.completed)),
        {
            writer.name: Writer(
                writer.epoch,
                _chain(writer.position, writer.pending, writer.refused),
                writer.retired,
                Intervals.of(writer.late),
                writer.regressed,
            )
            for writer in stored.writers
        },
        {
            (held.name, held.epoch): Held(_chain(NOWHERE, held.pending, held.refused), held.since, held.retire)
            for held in stored.held
        },
    )


def _spans(chain: Chain) -> list[_Span]:
    return [
        _Span(
            span.prev,
            span.id,
            span.evidence.facts,
            span.evidence.empty,
            span.evidence.unseen,
            span.evidence.skipped,
            span.edges,
            span.since,
        )
        for span in chain.pending
    ]


def _chain(position: int, spans: list[_Span], refused: int) -> Chain:
    return Chain(
        position,
        [
            Span(
                span.prev,
                span.id,
                Evidence(span.facts, span.empty, span.unseen, span.skipped),
                span.edges,
                span.since,
            )
            for span in spans
        ],
        refused,
    )


def _decode(data: bytes) -> _Stream:
    found = _leader.decode(data).format  # first: a later format may well look like this one with more behind
    if found > FORMAT:
        raise StateTooNew(found, FORMAT)
    return _decoder.decode(data)


def homeless(data: bytes) -> bytes:
    """The same state for a stream that may have moved to another Kafka partition."""
    stream = decode(data)
    stream.home = None
    return encode(stream)
