"""The encoded state of a stream: what Spark keeps, and what Postgres holds to seed a query.

Nested msgpack arrays. The first element is the number of the format; an unknown format stops the pipeline. IDs are
stored as intervals only, so a million pending IDs behind one gap take a few bytes.

The table of retired writers is the last element. It may have ten thousand rows, and few batches change it. So it can be
cut off and stored separately (`Encoded`).
"""

from collections.abc import Iterator

import msgspec

from tidemark.common.errors import StateTooNew
from tidemark.streaming.core.effects import Recall
from tidemark.streaming.core.linear import LinearPosition
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.core.writer_codec import (
    EMPTY,
    PackedTable,
    Pairs,
    StoredChain,
    StoredWriter,
    WaitingWriter,
)
from tidemark.streaming.core.writer_table import Writers
from tidemark.streaming.core.writers import UnjoinedWriter, UnjoinedWriters
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.intervals import Intervals
from tidemark.streaming.values.limits import Encoded

FORMAT = 1


class _Held(msgspec.Struct, array_like=True, frozen=True, gc=False):
    name: str
    epoch: int
    chain: StoredChain
    since: int
    retire: int | None
    seen: int


class StoredTable(msgspec.Struct, array_like=True, frozen=True, gc=False):
    columns: bytes
    rows: bytes

    @classmethod
    def of(cls, table: PackedTable) -> "StoredTable | None":
        return cls(table.columns.tobytes(), table.rows) if len(table) else None


class _Leader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    format: int


class StoredStream(_Leader, array_like=True, frozen=True, gc=False):
    """A state as it is encoded. `linear` is the linear position; `completed` is packed as `Intervals.pack` does."""

    direction: int
    home: int | None
    linear: int
    completed: bytes
    writers: list[StoredWriter]
    unjoined: list[_Held]
    timeline: int
    database: str | None
    ended: int
    active: StoredTable | None
    refused: int
    began: int
    here: int
    transactions: dict[str, list[str]]
    waiting: list[WaitingWriter]
    heads: Pairs
    retired: StoredTable | None = None  # the last one, so that it can be cut off


_encoder = msgspec.msgpack.Encoder()
_leader = msgspec.msgpack.Decoder(_Leader)
_decoder = msgspec.msgpack.Decoder(StoredStream)


def encode(stream: StreamState) -> bytes:
    """Equal streams give equal bytes."""
    return encode_apart(stream).whole


def encode_apart(stream: StreamState) -> Encoded:
    writers, active, retired, waiting = stream.writers.packed()
    table = StoredTable.of(retired)
    encoded = encode_stored(
        StoredStream(
            FORMAT,
            stream.direction,
            stream.home,
            stream.linear.position,
            stream.linear.completed.pack(),
            [StoredWriter.of(name, writer) for name, writer in writers.items()],
            [
                _Held(name, epoch, StoredChain.of(held.chain), held.since, held.retire, held.seen)
                for (name, epoch), held in sorted(stream.unjoined.items())
            ],
            stream.timeline,
            stream.database,
            stream.ended,
            StoredTable.of(active),
            stream.refused,
            stream.began,
            stream.here,
            dict(sorted(stream.transactions.items())),
            waiting,
            stream.linear.heads,
        ),
        table,
    )
    return encoded if retired is stream.writers.stored else encoded._replace(retired=_encoder.encode(table))


def encode_stored(stored: StoredStream, retired: StoredTable | None) -> Encoded:
    """`stored` is without the table of the retired, which is as it was."""
    state = _encoder.encode(stored)
    return Encoded(state if retired is None else state[:-1] + _encoder.encode(retired), state, None)


def decode_stored(data: bytes) -> StoredStream:
    """Raises StateTooNew for a format that a later Tidemark wrote."""
    found = _leader.decode(data).format
    if found > FORMAT:
        raise StateTooNew(found, FORMAT)
    return _decoder.decode(data)


def decode(data: bytes) -> StreamState:
    """Raises StateTooNew for a format that a later Tidemark wrote."""
    stored = decode_stored(data)
    return StreamState(
        Direction(stored.direction),
        stored.home,
        LinearPosition(stored.linear, Intervals.unpack(stored.completed), stored.heads),
        Writers(
            {writer.name: writer.writer() for writer in stored.writers},
            _table(stored.active),
            _table(stored.retired),
            stored.waiting,
        ),
        UnjoinedWriters(
            {
                (it.name, it.epoch): UnjoinedWriter(it.chain.chain(), it.since, it.retire, it.seen)
                for it in stored.unjoined
            }
        ),
        stored.timeline,
        stored.database,
        stored.ended,
        stored.refused,
        stored.began,
        stored.here,
        stored.transactions,
    )


def _table(stored: StoredTable | None) -> PackedTable:
    return PackedTable(stored.columns, stored.rows) if stored else EMPTY


def without_home(data: bytes) -> Encoded:
    """The same state for a stream that may have moved to another Kafka partition, with all its parts."""
    stream = decode(data)
    stream.home = None
    stream.forget_offsets()
    return _anew(stream)


def marked_uncertain(data: bytes) -> Encoded:
    """The same state for a stream of which records may have gone before they were read, with all its parts."""
    stream = decode(data)
    stream.mark_uncertain()
    stream.forget_offsets()
    return _anew(stream)


def deferred(data: bytes) -> Iterator[Recall]:
    """What is to come again once there is room."""
    stream = decode(data)
    stream.writers.open_waiting()
    chains = [(name, it.epoch, it.chain) for name, it in stream.writers.open.items()]
    for name, epoch, chain in chains + [(name, epoch, it.chain) for (name, epoch), it in stream.unjoined.items()]:
        for it in chain.deferred:
            yield Recall(name, epoch, stream.home or 0, it.first, it.last)


def _anew(stream: StreamState) -> Encoded:
    stream.writers.stored = None
    return encode_apart(stream)
