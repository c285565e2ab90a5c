"""The encoding of a stream's state in Spark's state store and in Postgres. Pure.

A state is encoded as nested msgpack arrays. The first element is the number of the format. A number above `FORMAT`
stops the pipeline. IDs are stored as intervals only, so a million pending IDs above one gap take a few bytes.

The table of retired writers is the last element. The table may have ten thousand rows, and few batches change it. So
the table can be cut off and stored separately (`EncodedState`).
"""

from collections.abc import Iterator

import msgspec

from tidemark.common.errors import StateTooNew
from tidemark.streaming.core.effects import RequeuedRange, SourceReport
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.core.writer_table import (
    EMPTY_TABLE,
    PackedTable,
    Pairs,
    StoredChain,
    StoredWriter,
    WaitingWriter,
    Writers,
)
from tidemark.streaming.core.writers import LinearPosition, UnjoinedWriter, UnjoinedWriters
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.intervals import Intervals
from tidemark.streaming.values.limits import EncodedState

FORMAT = 1
"""The number of the format that this version writes, and the highest number that it can read."""


class _StoredUnjoined(msgspec.Struct, array_like=True, frozen=True, gc=False):
    name: str
    epoch: int
    chain: StoredChain
    since: int
    retire_id: int | None
    last_seen: int


class StoredTable(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The encoded form of a `PackedTable`. For an empty table, None is stored instead."""

    columns: bytes
    rows: bytes

    @classmethod
    def of(cls, table: PackedTable) -> "StoredTable | None":
        return cls(table.columns.tobytes(), table.rows) if len(table) else None


class _FormatOnly(msgspec.Struct, array_like=True, frozen=True, gc=False):
    format: int


class StoredStream(_FormatOnly, array_like=True, frozen=True, gc=False):
    """The encoded form of a `StreamState`.

    `completed_ids` is packed by `Intervals.pack`. `writers`, `active`, `waiting` and `retired` are the four groups of
    `core.writer_table`.
    """

    direction: int
    home_partition: int | None
    linear: int
    completed_ids: bytes
    writers: list[StoredWriter]
    unjoined: list[_StoredUnjoined]
    timeline_number: int
    database: str | None
    highest_retired_position: int
    active: StoredTable | None
    uncertain_up_to: int
    timeline_start_id: int
    active_count: int
    transactions: dict[str, list[str]]
    reports: dict[str, SourceReport]
    waiting: list[WaitingWriter]
    heads: Pairs
    retired: StoredTable | None = None  # must be the last element, to be cut off


_encoder = msgspec.msgpack.Encoder()
_format_decoder = msgspec.msgpack.Decoder(_FormatOnly)
_decoder = msgspec.msgpack.Decoder(StoredStream)


def encode(stream: StreamState) -> bytes:
    """Encode a complete state. Equal states give equal bytes."""
    return encode_parts(stream).whole


def encode_parts(stream: StreamState) -> EncodedState:
    """Encode a state, whole and in parts. `retired` is None if the table of retired writers has not changed since the
    state was decoded.
    """
    writers, active, retired, waiting = stream.writers.pack()
    table = StoredTable.of(retired)
    encoded = encode_stored(
        StoredStream(
            FORMAT,
            stream.direction,
            stream.home_partition,
            stream.linear.position,
            stream.linear.completed_ids.pack(),
            [StoredWriter.of(name, writer) for name, writer in writers.items()],
            [
                _StoredUnjoined(
                    name, epoch, StoredChain.of(writer.chain), writer.since, writer.retire_id, writer.last_seen
                )
                for (name, epoch), writer in sorted(stream.unjoined.items())
            ],
            stream.timeline_number,
            stream.database,
            stream.highest_retired_position,
            StoredTable.of(active),
            stream.uncertain_up_to,
            stream.timeline_start_id,
            stream.active_count,
            dict(sorted(stream.transactions.items())),
            dict(sorted(stream.reports.items())),
            waiting,
            stream.linear.heads,
        ),
        table,
    )
    return (
        encoded if retired is stream.writers.stored_retired else encoded._replace(retired_table=_encoder.encode(table))
    )


def encode_stored(stored: StoredStream, retired: StoredTable | None) -> EncodedState:
    """Encode a state and the table of its retired writers, which the batch has not changed.

    Args:
        stored: the state without the table: `stored.retired` is None.
        retired: the table; None if it is empty.
    """
    state = _encoder.encode(stored)
    return EncodedState(state if retired is None else state[:-1] + _encoder.encode(retired), state, None)


def decode_stored(data: bytes) -> StoredStream:
    """Decode a state, but leave its tables of writers and its waiting writers encoded.

    Raises:
        StateTooNew: a later version of Tidemark wrote the state.
    """
    number = _format_decoder.decode(data).format
    if number > FORMAT:
        raise StateTooNew(number, FORMAT)
    return _decoder.decode(data)


def decode(data: bytes) -> StreamState:
    """Decode a state.

    Raises:
        StateTooNew: a later version of Tidemark wrote the state.
    """
    stored = decode_stored(data)
    return StreamState(
        Direction(stored.direction),
        stored.home_partition,
        LinearPosition(stored.linear, Intervals.unpack(stored.completed_ids), stored.heads),
        Writers(
            {writer.name: writer.decode() for writer in stored.writers},
            _decode_table(stored.active),
            _decode_table(stored.retired),
            stored.waiting,
        ),
        UnjoinedWriters(
            {
                (writer.name, writer.epoch): UnjoinedWriter(
                    writer.chain.decode(), writer.since, writer.retire_id, writer.last_seen
                )
                for writer in stored.unjoined
            }
        ),
        stored.timeline_number,
        stored.database,
        stored.highest_retired_position,
        stored.uncertain_up_to,
        stored.timeline_start_id,
        stored.active_count,
        stored.transactions,
        stored.reports,
    )


def _decode_table(stored: StoredTable | None) -> PackedTable:
    return PackedTable(stored.columns, stored.rows) if stored else EMPTY_TABLE


def forget_home(data: bytes) -> EncodedState:
    """Remove the home partition and the deferred offsets from a state, because the stream's partition may have changed.

    Returns:
        The new state. `retired_table` has the table of retired writers even if it has not changed.
    """
    stream = decode(data)
    stream.home_partition = None
    stream.forget_offsets()
    return _encode_all_parts(stream)


def mark_uncertain(data: bytes) -> EncodedState:
    """Mark all writers of a state as uncertain, including writers that are not yet known. Remove the deferred offsets.

    For a stream whose records may have been removed from Kafka before they were read.

    Returns:
        The new state. `retired_table` has the table of retired writers even if it has not changed.
    """
    stream = decode(data)
    stream.mark_uncertain()
    stream.forget_offsets()
    return _encode_all_parts(stream)


def deferred_ranges(data: bytes) -> Iterator[RequeuedRange]:
    """Decode a state, and yield all deferred ranges (`Chain.deferred`), with their writers."""
    stream = decode(data)
    stream.writers.decode_waiting()
    chains = [(name, writer.epoch, writer.chain) for name, writer in stream.writers.decoded.items()]
    chains += [(name, epoch, writer.chain) for (name, epoch), writer in stream.unjoined.items()]
    for name, epoch, chain in chains:
        for deferred_range in chain.deferred:
            yield RequeuedRange(
                name, epoch, stream.home_partition or 0, deferred_range.first_offset, deferred_range.last_offset
            )


def _encode_all_parts(stream: StreamState) -> EncodedState:
    stream.writers.stored_retired = None
    return encode_parts(stream)
