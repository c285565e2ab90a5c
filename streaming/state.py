"""The stored form of a stream's state: what Spark keeps, and what Postgres holds to seed a query.

Nested msgpack arrays, led by the format's number; intervals only, so that a million pending IDs behind one gap are a
few bytes. A format that this Tidemark does not know stops it; older ones are read.
"""

import msgspec

from tidemark.streaming.chain import Chain, Span
from tidemark.streaming.direction import Direction
from tidemark.streaming.errors import StateTooNew
from tidemark.streaming.intervals import Intervals
from tidemark.streaming.linear import LinearPosition
from tidemark.streaming.model import Evidence
from tidemark.streaming.stream import StreamState
from tidemark.streaming.writers import HeldWriter, WriterState

FORMAT = 2

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


class _Chain(msgspec.Struct, array_like=True, frozen=True):
    position: int
    refused: int
    pending: list[_Span]
    empty: Pairs = []  # since format 2


class _Writer(msgspec.Struct, array_like=True, frozen=True):
    name: str
    epoch: int
    chain: _Chain
    retired: int | None
    late: Pairs
    published: int  # in format 1: up to where the database had gone back
    again: _Chain | None  # of format 1: the IDs that came again, in place of a chain that begins again
    doubt: bool
    timeline: int = 1  # since format 2, like what follows
    start: str | None = None


class _Held(msgspec.Struct, array_like=True, frozen=True):
    name: str
    epoch: int
    chain: _Chain
    since: int
    retire: int | None
    doubt: bool


class _Leader(msgspec.Struct, array_like=True, frozen=True):
    format: int


class _Stream(_Leader, array_like=True, frozen=True):
    direction: int
    home: int | None
    line: int
    completed: Pairs
    writers: list[_Writer]
    held: list[_Held]
    timeline: int = 1
    database: str | None = None


_encoder = msgspec.msgpack.Encoder()
_leader = msgspec.msgpack.Decoder(_Leader)
_decoder = msgspec.msgpack.Decoder(_Stream)


def encode(stream: StreamState) -> bytes:
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
                    _stored(writer.chain),
                    writer.retired,
                    list(writer.late),
                    writer.published,
                    None,
                    writer.doubt,
                    writer.timeline,
                    writer.start,
                )
                for name, writer in sorted(stream.writers.items())
            ],
            [
                _Held(name, epoch, _stored(held.chain), held.since, held.retire, held.doubt)
                for (name, epoch), held in sorted(stream.held.items())
            ],
            stream.timeline,
            stream.database,
        )
    )


def decode(data: bytes) -> StreamState:
    """Raises StateTooNew for a format that a later Tidemark wrote."""
    stored = _decode(data)
    return StreamState(
        Direction(stored.direction),
        stored.home,
        LinearPosition(stored.line, Intervals.of(stored.completed)),
        {writer.name: _writer(writer) for writer in stored.writers},
        {
            (held.name, held.epoch): HeldWriter(_chain(held.chain), held.since, held.retire, held.doubt)
            for held in stored.held
        },
        stored.timeline,
        stored.database,
    )


def _writer(stored: _Writer) -> WriterState:
    chain, published = _chain(stored.chain), stored.published
    if stored.again is not None:
        chain, followed = _chain(stored.again), chain
        published = followed.position
        chain.adopt(followed, published)
    return WriterState(
        stored.epoch,
        chain,
        stored.retired,
        Intervals.of(stored.late),
        published,
        stored.doubt,
        stored.timeline,
        stored.start,
    )


def _stored(chain: Chain) -> _Chain:
    spans = [
        _Span(
            span.prev,
            span.id,
            *span.evidence.counts,
            span.edges,
            span.since,
        )
        for span in chain.pending
    ]
    return _Chain(chain.position, chain.refused, spans, list(chain.empty))


def _chain(stored: _Chain) -> Chain:
    return Chain(
        stored.position,
        [
            Span(
                span.prev,
                span.id,
                Evidence(span.facts, span.empty, span.unseen, span.skipped),
                span.edges,
                span.since,
            )
            for span in stored.pending
        ],
        stored.refused,
        Intervals.of(stored.empty),
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


def doubtful(data: bytes) -> bytes:
    """The same state for a stream of which records may have gone before they were read."""
    stream = decode(data)
    stream.doubt()
    return encode(stream)
