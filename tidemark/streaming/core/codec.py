"""The stored form of a stream's state: what Spark keeps, and what Postgres holds to seed a query.

Nested msgpack arrays, led by the format's number; intervals only, so that a million pending IDs behind one gap are a
few bytes. A format that this Tidemark does not know stops it; older ones are read.

The table of retired writers stands last. It may have ten thousand rows, and few batches change it: so it can be cut off
and kept apart (`Encoded`).
"""

from collections.abc import Iterator

import msgspec
import numpy as np

from tidemark.common.errors import StateTooNew
from tidemark.streaming.core.chain import Chain
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
    unpacked,
)
from tidemark.streaming.core.writer_table import Writers
from tidemark.streaming.core.writers import HeldWriter, HeldWriters
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.intervals import Intervals, last_of
from tidemark.streaming.values.limits import Encoded
from tidemark.streaming.wire.runs import EVERYTHING

FORMAT = 8


class _Held(msgspec.Struct, array_like=True, frozen=True, gc=False):
    name: str
    epoch: int
    chain: StoredChain
    since: int
    retire: int | None
    doubt: bool  # up to format 2: whether anything may have been refused of it
    seen: int = 0  # since format 6


class StoredTable(msgspec.Struct, array_like=True, frozen=True, gc=False):
    columns: bytes
    rows: bytes

    @classmethod
    def of(cls, table: PackedTable) -> "StoredTable | None":
        return cls(table.columns.tobytes(), table.rows) if len(table) else None


class _Leader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    format: int


class _Common(_Leader, array_like=True, frozen=True, gc=False):
    direction: int
    home: int | None
    line: int
    completed: bytes | Pairs  # pairs up to format 4, then packed from the first bound on up to format 6
    writers: list[StoredWriter]
    held: list[_Held]
    timeline: int = 1
    database: str | None = None
    ended: int | None = None  # since format 3, like what follows
    active: StoredTable | None = None
    retired: StoredTable | None = None  # of format 3
    refused: int = 0
    began: int = 0
    here: int | None = None
    transactions: dict[str, list[str]] = {}
    waiting: list[WaitingWriter] = []


class StoredStream(_Common, array_like=True, frozen=True, gc=False):
    """A state as it is stored. `line` is a position; `completed` is packed as of `Intervals`."""

    heads: Pairs = []  # since format 6
    apart: StoredTable | None = None  # since format 4, the retired; stays last, so that a new field needs a new format


class _Older(_Common, array_like=True, frozen=True, gc=False):
    """Up to format 5."""

    apart: StoredTable | None = None
    heads: Pairs = []


_encoder = msgspec.msgpack.Encoder()
_leader = msgspec.msgpack.Decoder(_Leader)
_decoder = msgspec.msgpack.Decoder(StoredStream)
_older = msgspec.msgpack.Decoder(_Older)
_OLDER_SHAPE, _PACKED_FROM_FIRST = 5, 6  # the last formats with these


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
            stream.line.position,
            stream.line.completed.pack(),
            [StoredWriter.of(name, writer) for name, writer in writers.items()],
            [
                _Held(name, epoch, StoredChain.of(held.chain), held.since, held.retire, doubt=False, seen=held.seen)
                for (name, epoch), held in sorted(stream.held.items())
            ],
            stream.timeline,
            stream.database,
            stream.ended,
            StoredTable.of(active),
            None,
            stream.refused,
            stream.began,
            stream.here,
            dict(sorted(stream.transactions.items())),
            waiting,
            stream.line.heads,
        ),
        table,
    )
    return encoded if retired is stream.writers.stored else encoded._replace(retired=_encoder.encode(table))


def encode_stored(stored: StoredStream, retired: StoredTable | None) -> Encoded:
    """`stored` is without the table of the retired, which is as it was."""
    state = _encoder.encode(stored)
    return Encoded(state if retired is None else state[:-1] + _encoder.encode(retired), state, None)


def decode_stored(data: bytes) -> StoredStream | None:
    """None for a state of another format."""
    return _decoder.decode(data) if _leader.decode(data).format == FORMAT else None


def decode(data: bytes) -> StreamState:
    """Raises StateTooNew for a format that a later Tidemark wrote."""
    stored = decode_stored(data) or _older_stored(data)
    writers = {writer.name: writer.writer() for writer in stored.writers}
    ended = stored.ended
    if ended is None:
        ended = max((writer.position for writer in writers.values() if writer.retired is not None), default=0)
    here = stored.here
    if here is None:
        here = sum(writer.retired is None and writer.timeline == stored.timeline for writer in writers.values())
    joined = Writers(writers, _table(stored.active), _table(stored.apart or stored.retired), stored.waiting)
    if stored.retired is not None:
        joined.stored = None
    return StreamState(
        Direction(stored.direction),
        stored.home,
        LinearPosition(stored.line, _completed(stored), stored.heads),
        joined,
        HeldWriters({(it.name, it.epoch): HeldWriter(_chain(it), it.since, it.retire, it.seen) for it in stored.held}),
        stored.timeline,
        stored.database,
        ended,
        stored.refused,
        stored.began,
        here,
        stored.transactions,
    )


def _completed(stored: StoredStream | _Older) -> Intervals:
    packed = stored.completed
    if isinstance(packed, bytes) and packed and stored.format <= _PACKED_FROM_FIRST:
        steps = np.frombuffer(packed, f"<u{packed[0]}", offset=9).astype(np.int64)
        bounds = last_of(packed) + np.cumsum(np.concatenate(([0], steps)))
        return Intervals(bounds[::2], bounds[1::2])
    return unpacked(packed)


def _chain(held: _Held) -> Chain:
    chain = held.chain.chain()
    if held.doubt:
        chain.refuse(EVERYTHING)
    return chain


def _table(stored: StoredTable | None) -> PackedTable:
    return PackedTable(stored.columns, stored.rows) if stored else EMPTY


def _older_stored(data: bytes) -> StoredStream | _Older:
    # The format first: a later one may well look like this one with more behind.
    return (_older if _format(data) <= _OLDER_SHAPE else _decoder).decode(data)


def _format(data: bytes) -> int:
    found = _leader.decode(data).format
    if found > FORMAT:
        raise StateTooNew(found, FORMAT)
    return found


def homeless(data: bytes) -> Encoded:
    """The same state for a stream that may have moved to another Kafka partition, with all its parts."""
    stream = decode(data)
    stream.home = None
    stream.forget_offsets()
    return _anew(stream)


def doubtful(data: bytes) -> Encoded:
    """The same state for a stream of which records may have gone before they were read, with all its parts."""
    stream = decode(data)
    stream.doubt()
    stream.forget_offsets()
    return _anew(stream)


def put_off(data: bytes) -> Iterator[Recall]:
    """What is to come again once there is room."""
    stream = decode(data)
    stream.writers.open_waiting()
    chains = [(name, it.epoch, it.chain) for name, it in stream.writers.open.items()]
    for name, epoch, chain in chains + [(name, epoch, it.chain) for (name, epoch), it in stream.held.items()]:
        for it in chain.put_off:
            yield Recall(name, epoch, stream.home or 0, it.first, it.last)


def is_older(data: bytes) -> bool:
    """Whether an earlier Tidemark wrote it. Raises StateTooNew where it was a later one."""
    return _format(data) < FORMAT


def rewritten(data: bytes) -> Encoded:
    """The same state in today's format, with all its parts."""
    return _anew(decode(data))


def _anew(stream: StreamState) -> Encoded:
    stream.writers.stored = None
    return encode_apart(stream)
