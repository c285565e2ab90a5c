"""Compiled code that scans records of the facts topic and writes their edges into columns.

The functions `_scan_...` return -1 as the index if the bytes are not certain to be valid JSON of the expected type.

`scan_fields` writes the IDs of a RUN into the column `ids`, and the number of rows of each ID into the column `times`.
If the record is accepted, `scan` overwrites `times` with the time of the record.
"""

from typing import Final, NamedTuple

import numpy as np

from tidemark.streaming.ingest.jit_cache import cached, compiled
from tidemark.streaming.ingest.kernels import (
    CLOSE_LIST,
    CLOSE_OBJECT,
    COLON,
    COMMA,
    MINUS,
    OPEN_LIST,
    OPEN_OBJECT,
    QUOTE,
    ZERO,
    are_same,
    load_word,
    peek,
    skip_character,
    skip_plain,
    skip_space,
    skip_value,
)
from tidemark.streaming.ingest.record_batch import (
    Bytes,
    Edges,
    MissingWriterEpoch,
    RecordBatch,
    WriterEpochs,
    WriterEpochTable,
)
from tidemark.streaming.values.intervals import Ids
from tidemark.streaming.wire.records import ANY_WRITER, MAX_NAME_LENGTH, ROW, Kind


def _encode_word(text: str) -> int:
    return int.from_bytes(text.encode(), "little")


_KIND, _STREAM, _WRITER, _EPOCH = map(_encode_word, ("kind", "stream", "writer", "epoch"))
_PREV, _ID, _IDS, _ROW, _ROWS = map(_encode_word, ("prev", "id", "ids", "row", "rows"))
_BATCH = _encode_word("batch")
_USUAL_FIELDS: Final = ("kind", "stream", "writer", "epoch", "prev", "id", "row")
_USUAL_WORDS, _USUAL_LENGTHS = np.array([*map(_encode_word, _USUAL_FIELDS)]), np.array([*map(len, _USUAL_FIELDS)])
RDATA, VOID, POSITION, RUN = map(_encode_word, ("RDATA", "VOID", "POSITION", "RUN"))
"""Values of `Fields.kind`: the name of the kind as a little-endian number."""

# Bits of `Fields.present_mask`.
HAS_KIND, HAS_STREAM, HAS_WRITER, HAS_EPOCH, HAS_PREV, HAS_ID, HAS_ROW, HAS_IDS, HAS_ROWS = (1 << at for at in range(9))

_MAX_DIGITS: Final = 18  # a number with this many digits always fits into 64 bits


class Fields(NamedTuple):
    """The fields of a scanned record.

    Attributes:
        present_mask: a bit (`HAS_...`) for each field that occurs; 0 if the record is not certain to be valid JSON.
        kind: `RDATA`, `VOID`, `POSITION`, `RUN`, or another value for all other kinds.
        stream_begin, stream_end: the bounds of the stream's name in the array of bytes.
        writer_begin, writer_end: the bounds of the writer's name.
        is_batch_row: True if `id` is `"batch"`.
        id_count: the length of `ids` in a RUN.
        row_list_count: the length of `rows` in a RUN.
    """

    present_mask: int
    kind: int
    stream_begin: int
    stream_end: int
    writer_begin: int
    writer_end: int
    epoch: int
    prev: int
    id: int
    is_batch_row: bool
    id_count: int
    row_list_count: int


@compiled(inline=True)
def _scan_short_string(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """The index after a string and its closing quote, and the string as a little-endian number.

    `at` is the index after the opening quote. The number is 0 if the string has more than eight characters or is not
    ASCII. The index is -1 if the string has an escape.
    """
    first, at = at, skip_plain(data, at, end)
    short = load_word(data, first, at - first) if at - first <= 8 else 0
    while at < end and peek(data, at) != QUOTE:
        short, at = 0, skip_character(data, at, end)
        if at < 0:
            return -1, 0
        at = skip_plain(data, at, end)
    return (at + 1, short) if at < end else (-1, 0)


@compiled(inline=True)
def _scan_integer(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """The index after an integer, and the integer. Does not check the byte at this index."""
    negative = at < end and peek(data, at) == MINUS
    if negative:
        at += 1
    first, number = at, 0
    while at < end and 0 <= peek(data, at) - ZERO <= 9:
        number = number * 10 + (peek(data, at) - ZERO)
        at += 1
    length = at - first
    if length == 0 or length > _MAX_DIGITS or (peek(data, first) == ZERO and (negative or length > 1)):
        return -1, 0
    return at, -number if negative else number


@compiled(inline=True)
def _item_end(data: Bytes, at: int, end: int) -> int:
    """The index of the comma or bracket after an item of a list; -1 if there is neither, or if `at` is -1."""
    at = skip_space(data, at, end)
    if at < 0 or at >= end or (peek(data, at) != COMMA and peek(data, at) != CLOSE_LIST):
        return -1
    return at


@compiled()
def _scan_integers(data: Bytes, at: int, end: int, ids: Ids, count: int) -> tuple[int, int]:
    """Write a list of at least one integer to `ids`, from index `count` on.

    Returns the index after the list, and `count` plus the number of integers.
    """
    if peek(data, at) != OPEN_LIST:
        return -1, 0
    while True:
        at, ids[count] = _scan_integer(data, skip_space(data, at + 1, end), end)
        at = _item_end(data, at, end)
        if at < 0:
            return -1, 0
        count += 1
        if peek(data, at) == CLOSE_LIST:
            return at + 1, count


@compiled(inline=True)
def _scan_list_length(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """The index after a list, and the length of the list."""
    if at >= end or peek(data, at) != OPEN_LIST:
        return -1, 0
    inside = skip_space(data, at + 1, end)
    if inside < end and peek(data, inside) == CLOSE_LIST:
        return inside + 1, 0
    length = 0
    while True:
        at = _item_end(data, skip_value(data, at + 1, end), end)
        if at < 0:
            return -1, 0
        length += 1
        if peek(data, at) == CLOSE_LIST:
            return at + 1, length


@compiled()
def _scan_list_lengths(data: Bytes, at: int, end: int, lengths: Ids, count: int) -> tuple[int, int]:
    """Write the lengths of a list's inner lists, of which there is at least one, to `lengths`, from index `count` on.

    Returns the index after the outer list, and `count` plus the number of inner lists.
    """
    if peek(data, at) != OPEN_LIST:
        return -1, 0
    while True:
        at, lengths[count] = _scan_list_length(data, skip_space(data, at + 1, end), end)
        at = _item_end(data, at, end)
        if at < 0:
            return -1, 0
        count += 1
        if peek(data, at) == CLOSE_LIST:
            return at + 1, count


@compiled(inline=True)
def _scan_name(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """The index of a field's value, and the field's name as a little-endian number. White space may come first."""
    at = skip_space(data, at, end)
    if at >= end or peek(data, at) != QUOTE:
        return -1, 0
    at, name = _scan_short_string(data, at + 1, end)
    at = skip_space(data, at, end)
    if not 0 <= at < end or peek(data, at) != COLON:
        return -1, 0
    at = skip_space(data, at + 1, end)
    return (at, name) if at < end else (-1, 0)


@compiled(inline=True)
def _scan_usual_name(data: Bytes, at: int, end: int, index: int) -> tuple[int, int]:
    """Like `_scan_name`, but faster if the field is `_USUAL_FIELDS[index]`."""
    if index < len(_USUAL_WORDS) and at + 10 < end:
        length = _USUAL_LENGTHS[index]
        after = at + 1 + length
        is_usual = load_word(data, at + 1, length) == _USUAL_WORDS[index]
        if is_usual and peek(data, at) == QUOTE and peek(data, after) == QUOTE and peek(data, after + 1) == COLON:
            begin = skip_space(data, after + 2, end)
            return (begin, _USUAL_WORDS[index]) if begin < end else (-1, 0)
    return _scan_name(data, at, end)


@compiled()
def scan_fields(data: Bytes, at: int, end: int, edges: Edges, count: int) -> Fields:
    """Scan the bytes of a record, from the index `at` up to `end`. The result is not certain to be a valid record.

    Writes the IDs of a RUN to `edges.ids`, and the number of rows of each ID to `edges.times`, both from index `count`
    on.
    """
    present = kind = stream = stream_end = writer = writer_end = epoch = prev = id = ids = lists = 0
    is_batch_row = False
    at = skip_space(data, at, end)
    more = at < end and peek(data, at) == OPEN_OBJECT
    index = 0
    while more:
        begin, name = _scan_usual_name(data, at + 1, end, index)
        index += 1
        if begin < 0:
            break
        bit = 0
        if name == _ROW:
            bit = HAS_ROW
            at = skip_value(data, begin, end)
        elif name == _PREV:
            bit = HAS_PREV
            at, prev = _scan_integer(data, begin, end)
        elif name == _EPOCH:
            bit = HAS_EPOCH
            at, epoch = _scan_integer(data, begin, end)
        elif name == _IDS:
            bit = HAS_IDS
            at, ids = _scan_integers(data, begin, end, edges.ids, count)
        elif name == _ROWS:
            bit = HAS_ROWS
            at, lists = _scan_list_lengths(data, begin, end, edges.times, count)
        elif name == _ID and peek(data, begin) != QUOTE:
            bit = HAS_ID
            at, id = _scan_integer(data, begin, end)
        elif name in (_KIND, _STREAM, _WRITER, _ID):
            at, short = _scan_short_string(data, begin + 1, end) if peek(data, begin) == QUOTE else (-1, 0)
            if name == _KIND:
                bit = HAS_KIND
                kind = short
            elif name == _STREAM:
                bit = HAS_STREAM
                stream, stream_end = begin + 1, at - 1
            elif name == _WRITER:
                bit = HAS_WRITER
                writer, writer_end = begin + 1, at - 1
            else:
                bit = HAS_ID
                is_batch_row = short == _BATCH
                at = at if is_batch_row else -1
        else:
            at = skip_value(data, begin, end)
        at = skip_space(data, at, end)
        if not 0 <= at < end or present & bit:
            break
        present |= bit
        more = peek(data, at) == COMMA
        if not more and (peek(data, at) != CLOSE_OBJECT or skip_space(data, at + 1, end) < end):
            break
    else:
        ids, lists = ids - count, lists - count
        return Fields(present, kind, stream, stream_end, writer, writer_end, epoch, prev, id, is_batch_row, ids, lists)
    return Fields(0, 0, 0, 0, 0, 0, 0, 0, 0, False, 0, 0)  # noqa: FBT003


_SPACE, _DELETE, _STAR = ord(" "), 0x7F, ord(ANY_WRITER)
_LOW_32_BITS = 0xFFFFFFFF
# Multipliers of the hash: odd, with bits in all bytes (from splitmix64).
_FACTOR_1, _FACTOR_2 = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


@compiled(inline=True)
def _mix(hashed: int, more: int) -> int:
    """Add the number `more` to a hash, and return the new hash. Mixes high bits into low bits twice.

    After a single mix, names that differ in few high bits could have equal hashes.
    """
    hashed = (hashed ^ more) * _FACTOR_1
    hashed = (hashed ^ ((hashed >> 32) & _LOW_32_BITS)) * _FACTOR_2
    return hashed ^ ((hashed >> 32) & _LOW_32_BITS)


@compiled(inline=True)
def _mix_name(hashed: int, data: Bytes, at: int, end: int) -> int:
    """Add the bytes of a name to a hash, and return the new hash."""
    while at < end:
        count = min(8, end - at)
        hashed = _mix(hashed, load_word(data, at, count))
        at += count
    return hashed


@compiled(inline=True)
def hash_of(table: WriterEpochTable, data: Bytes, record: Fields) -> int:
    """The hash of a record's writer epoch, which depends on both names and the epoch."""
    hashed = _mix_name(
        table.seed ^ (record.stream_end - record.stream_begin), data, record.stream_begin, record.stream_end
    )
    return _mix(_mix_name(hashed, data, record.writer_begin, record.writer_end), record.epoch)


@compiled(inline=True)
def _matches(table: WriterEpochTable, number: int, data: Bytes, record: Fields) -> bool:
    stream, writer, end = table.bounds[number, 0], table.bounds[number, 1], table.bounds[number, 2]
    known: bool = table.bounds[number, 3] == record.epoch
    return (
        known
        and are_same(table.names, stream, writer, data, record.stream_begin, record.stream_end)
        and are_same(table.names, writer, end, data, record.writer_begin, record.writer_end)
    )


@compiled(inline=True)
def _copy_name(data: Bytes, at: int, stop: int, names: Bytes, to: int) -> bool:
    """Copy a name to `names`, from index `to` on. Returns True if the name is certain to be legal."""
    for index in range(at, stop):
        if not _SPACE < data[index] < _DELETE:
            return False
        names[to + index - at] = data[index]
    return 0 < stop - at <= MAX_NAME_LENGTH


@compiled()
def _add(table: WriterEpochTable, data: Bytes, record: Fields, hashed: int, slot: int) -> int:
    """Add the writer epoch of a record to the table, and put its number into the free slot `slot`.

    Returns the number; -1 if the table has no room, or if a name is not certain to be legal.
    """
    number: int = table.counts[0]
    begin: int = table.counts[1]
    middle = begin + record.stream_end - record.stream_begin
    end = middle + record.writer_end - record.writer_begin
    if number == len(table.hashes) or end > len(table.names):
        return -1
    if record.writer_end - record.writer_begin == 1 and data[record.writer_begin] == _STAR:
        return -1
    if not _copy_name(data, record.stream_begin, record.stream_end, table.names, begin):
        return -1
    if not _copy_name(data, record.writer_begin, record.writer_end, table.names, middle):
        return -1
    table.bounds[number, 0], table.bounds[number, 1], table.bounds[number, 2] = begin, middle, end
    table.bounds[number, 3] = record.epoch
    table.hashes[number] = hashed
    table.are_legal[number] = True
    table.slots[slot] = number
    table.counts[0], table.counts[1] = number + 1, end
    return number


@compiled(inline=True)
def find_or_add(table: WriterEpochTable, data: Bytes, record: Fields, hashed: int) -> int:
    """Return the number of a record's writer epoch. Adds a new writer epoch to the table.

    Returns -1 if `WriterEpochs.add` must add the writer epoch.
    """
    mask = len(table.slots) - 1
    slot = (hashed ^ (hashed >> 32)) & mask
    while True:
        number: int = table.slots[slot]
        if number < 0:
            return _add(table, data, record, hashed, slot)
        if table.hashes[number] == hashed and _matches(table, number, data, record):
            return number
        slot = (slot + 1) & mask


_RDATA, _VOID, _POSITION = int(Kind.RDATA), int(Kind.VOID), int(Kind.POSITION)
_MAX_NAME_BYTES: Final = 4 * MAX_NAME_LENGTH  # in UTF-8; bounds the memory of the table
_NO_WRITER_EPOCH: Final = MissingWriterEpoch(0, 0, 0, 0, 0, 0)
_REQUIRED: Final = HAS_KIND | HAS_STREAM | HAS_WRITER


class ScanResult(NamedTuple):
    """The result of `scan`.

    Attributes:
        status: why the scan ended: `DONE`, `FULL` or `NEW_WRITER_EPOCH`.
        next_record: the index of the next record to scan.
        edge_count: the new value for the argument `edge_count`.
        undecided_count: the new value for the argument `undecided_count`.
        missing: the writer epoch to add; has no meaning unless `status` is `NEW_WRITER_EPOCH`.
    """

    status: int
    next_record: int
    edge_count: int
    undecided_count: int
    missing: MissingWriterEpoch


DONE: Final = 0
"""All records are scanned."""
FULL: Final = 1
"""The columns have no room for the edges that the next record may have."""
NEW_WRITER_EPOCH: Final = 2
"""`WriterEpochs.add` must add the writer epoch of the next record."""


@compiled(inline=True)
def _is_valid_range(prev: int, id: int) -> bool:
    """Whether `id` is farther from 0 than `prev`, on the same side of 0."""
    return 0 <= prev < id or 0 >= prev > id


@compiled(inline=True)
def _is_chain(prev: int, edges: Edges, first: int, stop: int) -> bool:
    """Whether the IDs at the indexes `first .. stop - 1` are a chain of at least one edge, which begins at `prev`."""
    for index in range(first, stop):
        if not _is_valid_range(prev, edges.ids[index]):
            return False
        prev = edges.ids[index]
    return stop > first


@compiled(inline=True)
def _prev_of(record: Fields) -> int:
    """The `prev` of a record. For an RDATA without this field, the result of `records.effective_prev`."""
    if record.kind != RDATA or record.present_mask & HAS_PREV:
        return record.prev
    return record.id - 1 if record.id > 0 else record.id + 1


@compiled(inline=True)
def _is_valid(record: Fields, edges: Edges, count: int) -> bool:
    """Whether the record is a valid edge, batch row or RUN. Does not check whether its names are legal, or its key."""
    if record.present_mask & _REQUIRED != _REQUIRED or record.epoch < 0:
        return False
    if (
        record.stream_end - record.stream_begin > _MAX_NAME_BYTES
        or record.writer_end - record.writer_begin > _MAX_NAME_BYTES
    ):
        return False
    if record.kind == RUN:
        return (
            record.present_mask & HAS_PREV != 0
            and record.id_count == record.row_list_count
            and _is_chain(record.prev, edges, count, count + record.id_count)
        )
    if not record.present_mask & HAS_ID or not (record.is_batch_row or _is_valid_range(_prev_of(record), record.id)):
        return False
    if record.kind == RDATA:
        return record.present_mask & HAS_ROW != 0
    return record.kind in (VOID, POSITION) and record.present_mask & HAS_PREV != 0 and not record.is_batch_row


@compiled(inline=True)
def _put_edge(record: Fields, edges: Edges, count: int) -> int:
    """Write an edge or a batch row to row `count`. Returns the number of rows in use."""
    edges.prevs[count], edges.ids[count] = _prev_of(record), record.id
    kind = _RDATA
    if record.is_batch_row:
        kind = ROW
    elif record.kind != RDATA:
        kind = _VOID if record.kind == VOID else _POSITION
    edges.kinds[count] = kind
    return count + 1


@compiled(inline=True)
def _put_run(record: Fields, edges: Edges, count: int) -> int:
    """Complete the edges of a RUN from row `count` on. Then add a batch row for each row of a fact after its first row.

    `edges.ids` already has the IDs, and `edges.times` the number of rows of each ID. Returns the number of rows in use.
    """
    prev, stop = record.prev, count + record.id_count
    for index in range(count, count + record.id_count):
        edges.prevs[index] = prev
        prev = edges.ids[index]
        edges.kinds[index] = _RDATA if edges.times[index] else _VOID
        for _ in range(edges.times[index] - 1):
            edges.prevs[stop] = edges.ids[stop] = 0
            edges.kinds[stop] = ROW
            stop += 1
    return stop


@cached
@compiled()
def scan(
    batch: RecordBatch,
    first: int,
    table: WriterEpochTable,
    edges: Edges,
    edge_count: int,
    undecided: Ids,
    undecided_count: int,
) -> ScanResult:
    """Scan the records of a batch, up to its end or to a record for which the caller must first make room.

    Args:
        batch: the records.
        first: the index of the first record to scan.
        table: the numbers of writer epochs; receives new ones.
        edges: receives the edges, from `edge_count` on.
        edge_count: rows of `edges` in use.
        undecided: receives the indexes of records that `records.read` must decode, from `undecided_count` on.
        undecided_count: items of `undecided` in use.
    """
    data, keys = batch.values, batch.keys
    for at in range(first, len(batch.offsets)):
        begin, end = batch.value_bounds[at], batch.value_bounds[at + 1]
        # An ID takes at least two bytes of JSON, and so does a row.
        if edge_count + (end - begin) // 2 + 1 > len(edges.ids):
            return ScanResult(FULL, at, edge_count, undecided_count, _NO_WRITER_EPOCH)
        record = scan_fields(data, begin, end, edges, edge_count)
        key, key_end = batch.key_bounds[at], batch.key_bounds[at + 1]
        is_legal = False
        if _is_valid(record, edges, edge_count) and are_same(
            keys, key, key_end, data, record.stream_begin, record.stream_end
        ):
            hashed = hash_of(table, data, record)
            number = find_or_add(table, data, record, hashed)
            if number < 0:
                missing = MissingWriterEpoch(
                    record.stream_begin, record.stream_end, record.writer_begin, record.writer_end, record.epoch, hashed
                )
                return ScanResult(NEW_WRITER_EPOCH, at, edge_count, undecided_count, missing)
            is_legal = table.are_legal[number]
        if not is_legal:
            undecided[undecided_count] = at
            undecided_count += 1
            continue
        stop = _put_run(record, edges, edge_count) if record.kind == RUN else _put_edge(record, edges, edge_count)
        edges.writer_epochs[edge_count:stop] = number
        edges.offsets[edge_count:stop] = batch.offsets[at]
        edges.times[edge_count:stop] = batch.times[at]
        edge_count = stop
    return ScanResult(DONE, len(batch.offsets), edge_count, undecided_count, _NO_WRITER_EPOCH)


def compile_all() -> None:
    """Compile `scan` and all functions that it calls, or load them from the cache."""
    zero = np.zeros(1, np.int64)
    scan(RecordBatch.of([b""], [b""], zero, zero), 0, WriterEpochs().table, Edges.allocate(1), 0, zero, 0)
