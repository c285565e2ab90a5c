"""Compiled code that scans records of the facts topic and writes their edges into columns.

The IDs of a RUN go directly into the column `ids`. The number of rows of each ID goes into the column `times` first;
`scan` overwrites it when the record is accepted.
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
    character,
    peek,
    plain_end,
    space,
    value,
    word,
)
from tidemark.streaming.ingest.record_batch import (
    Bytes,
    Edges,
    Incarnations,
    IncarnationTable,
    MissingIncarnation,
    RecordBatch,
)
from tidemark.streaming.values.intervals import Ids
from tidemark.streaming.wire.records import ANY_WRITER, LONGEST_NAME, ROW, Kind


def _word(text: str) -> int:
    return int.from_bytes(text.encode(), "little")


_KIND, _STREAM, _WRITER, _EPOCH = map(_word, ("kind", "stream", "writer", "epoch"))
_PREV, _ID, _IDS, _ROW, _ROWS = map(_word, ("prev", "id", "ids", "row", "rows"))
_BATCH = _word("batch")
_USUAL: Final = ("kind", "stream", "writer", "epoch", "prev", "id", "row")
_WORDS, _LENGTHS = np.array([*map(_word, _USUAL)]), np.array([*map(len, _USUAL)])
RDATA, VOID, POSITION, RUN = map(_word, ("RDATA", "VOID", "POSITION", "RUN"))
"""Values of `Fields.kind`: the kind's name as a little-endian number."""

# Bits of `Fields.has`.
HAS_KIND, HAS_STREAM, HAS_WRITER, HAS_EPOCH, HAS_PREV, HAS_ID, HAS_ROW, HAS_IDS, HAS_ROWS = (1 << at for at in range(9))

_DIGITS: Final = 18  # a number with this many digits always fits


class Fields(NamedTuple):
    """The fields of a record.

    `has` has a bit for each field that is present; 0 if the record is not certain to be valid. Names are given by the
    bounds of their bytes. `ids` and `lists` are the numbers of IDs and of lists of rows in a RUN.
    """

    has: int
    kind: int
    stream: int
    stream_end: int
    writer: int
    writer_end: int
    epoch: int
    prev: int
    id: int
    batch: bool
    ids: int
    lists: int


@compiled(inline=True)
def _short(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """The index after a string without escapes whose content begins at `at`, and the string as a number.

    The number is 0 if the string is longer than eight characters or not ASCII.
    """
    first, at = at, plain_end(data, at, end)
    short = word(data, first, at - first) if at - first <= 8 else 0
    while at < end and peek(data, at) != QUOTE:
        short, at = 0, character(data, at, end)
        if at < 0:
            return -1, 0
        at = plain_end(data, at, end)
    return (at + 1, short) if at < end else (-1, 0)


@compiled(inline=True)
def _integer(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """The index after an integer, and the integer. The caller checks the byte after it."""
    negative = at < end and peek(data, at) == MINUS
    if negative:
        at += 1
    first, number = at, 0
    while at < end and 0 <= peek(data, at) - ZERO <= 9:
        number = number * 10 + (peek(data, at) - ZERO)
        at += 1
    length = at - first
    if length == 0 or length > _DIGITS or (peek(data, first) == ZERO and (negative or length > 1)):
        return -1, 0
    return at, -number if negative else number


@compiled(inline=True)
def _item_end(data: Bytes, at: int, end: int) -> int:
    """The index of the comma or bracket after an item of a list; -1 if there is neither, or if `at` is -1."""
    at = space(data, at, end)
    if at < 0 or at >= end or (peek(data, at) != COMMA and peek(data, at) != CLOSE_LIST):
        return -1
    return at


@compiled()
def _integers(data: Bytes, at: int, end: int, ids: Ids, count: int) -> tuple[int, int]:
    """The index after a list of integers, and `count` plus their number. They are written to `ids`."""
    if peek(data, at) != OPEN_LIST:
        return -1, 0
    while True:
        at, ids[count] = _integer(data, space(data, at + 1, end), end)
        at = _item_end(data, at, end)
        if at < 0:
            return -1, 0
        count += 1
        if peek(data, at) == CLOSE_LIST:
            return at + 1, count


@compiled(inline=True)
def _length(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """The index after a list, and the number of its values."""
    if at >= end or peek(data, at) != OPEN_LIST:
        return -1, 0
    inside = space(data, at + 1, end)
    if inside < end and peek(data, inside) == CLOSE_LIST:
        return inside + 1, 0
    length = 0
    while True:
        at = _item_end(data, value(data, at + 1, end), end)
        if at < 0:
            return -1, 0
        length += 1
        if peek(data, at) == CLOSE_LIST:
            return at + 1, length


@compiled()
def _lengths(data: Bytes, at: int, end: int, lengths: Ids, count: int) -> tuple[int, int]:
    """The index after a list of lists, and `count` plus their number. Their lengths are written to `lengths`."""
    if peek(data, at) != OPEN_LIST:
        return -1, 0
    while True:
        at, lengths[count] = _length(data, space(data, at + 1, end), end)
        at = _item_end(data, at, end)
        if at < 0:
            return -1, 0
        count += 1
        if peek(data, at) == CLOSE_LIST:
            return at + 1, count


@compiled(inline=True)
def _field(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """The index of the value of the field whose name is at `at`, and the name as a number."""
    at = space(data, at, end)
    if at >= end or peek(data, at) != QUOTE:
        return -1, 0
    at, name = _short(data, at + 1, end)
    at = space(data, at, end)
    if not 0 <= at < end or peek(data, at) != COLON:
        return -1, 0
    at = space(data, at + 1, end)
    return (at, name) if at < end else (-1, 0)


@compiled(inline=True)
def _next(data: Bytes, at: int, end: int, index: int) -> tuple[int, int]:
    """Like `_field`, but faster if field number `index` has its usual name."""
    if index < len(_WORDS) and at + 10 < end:
        length = _LENGTHS[index]
        behind = at + 1 + length
        same = word(data, at + 1, length) == _WORDS[index]
        if same and peek(data, at) == QUOTE and peek(data, behind) == QUOTE and peek(data, behind + 1) == COLON:
            begin = space(data, behind + 2, end)
            return (begin, _WORDS[index]) if begin < end else (-1, 0)
    return _field(data, at, end)


@compiled()
def fields(data: Bytes, at: int, end: int, edges: Edges, count: int) -> Fields:
    """Scan a record. IDs and numbers of rows of a RUN are written to `edges.ids` and `edges.times` from `count` on."""
    has = kind = stream = stream_end = writer = writer_end = epoch = prev = id = ids = lists = 0
    batch = False
    at = space(data, at, end)
    more = at < end and peek(data, at) == OPEN_OBJECT
    index = 0
    while more:
        begin, name = _next(data, at + 1, end, index)
        index += 1
        if begin < 0:
            break
        bit = 0
        if name == _ROW:
            bit = HAS_ROW
            at = value(data, begin, end)
        elif name == _PREV:
            bit = HAS_PREV
            at, prev = _integer(data, begin, end)
        elif name == _EPOCH:
            bit = HAS_EPOCH
            at, epoch = _integer(data, begin, end)
        elif name == _IDS:
            bit = HAS_IDS
            at, ids = _integers(data, begin, end, edges.ids, count)
        elif name == _ROWS:
            bit = HAS_ROWS
            at, lists = _lengths(data, begin, end, edges.times, count)
        elif name == _ID and peek(data, begin) != QUOTE:
            bit = HAS_ID
            at, id = _integer(data, begin, end)
        elif name in (_KIND, _STREAM, _WRITER, _ID):
            at, short = _short(data, begin + 1, end) if peek(data, begin) == QUOTE else (-1, 0)
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
                batch = short == _BATCH
                at = at if batch else -1
        else:
            at = value(data, begin, end)
        at = space(data, at, end)
        if not 0 <= at < end or has & bit:
            break
        has |= bit
        more = peek(data, at) == COMMA
        if not more and (peek(data, at) != CLOSE_OBJECT or space(data, at + 1, end) < end):
            break
    else:
        ids, lists = ids - count, lists - count
        return Fields(has, kind, stream, stream_end, writer, writer_end, epoch, prev, id, batch, ids, lists)
    return Fields(0, 0, 0, 0, 0, 0, 0, 0, 0, False, 0, 0)  # noqa: FBT003


_SPACE, _DELETE, _STAR = ord(" "), 0x7F, ord(ANY_WRITER)
_LOW = 0xFFFFFFFF
# Odd, with bits in all bytes (splitmix64).
_ONE, _OTHER = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


@compiled(inline=True)
def _mixed(hashed: int, more: int) -> int:
    """Mix high bits into low ones twice. After one mix, names that differ in few high bits would have equal hashes."""
    hashed = (hashed ^ more) * _ONE
    hashed = (hashed ^ ((hashed >> 32) & _LOW)) * _OTHER
    return hashed ^ ((hashed >> 32) & _LOW)


@compiled(inline=True)
def _with_name(hashed: int, data: Bytes, at: int, end: int) -> int:
    while at < end:
        count = min(8, end - at)
        hashed = _mixed(hashed, word(data, at, count))
        at += count
    return hashed


@compiled(inline=True)
def hash_of(table: IncarnationTable, data: Bytes, record: Fields) -> int:
    """The hash of both names and the epoch."""
    hashed = _with_name(table.seed ^ (record.stream_end - record.stream), data, record.stream, record.stream_end)
    return _mixed(_with_name(hashed, data, record.writer, record.writer_end), record.epoch)


@compiled(inline=True)
def _is(table: IncarnationTable, number: int, data: Bytes, record: Fields) -> bool:
    stream, writer, end = table.bounds[number, 0], table.bounds[number, 1], table.bounds[number, 2]
    known: bool = table.bounds[number, 3] == record.epoch
    return (
        known
        and are_same(table.names, stream, writer, data, record.stream, record.stream_end)
        and are_same(table.names, writer, end, data, record.writer, record.writer_end)
    )


@compiled(inline=True)
def _copy_name(data: Bytes, at: int, stop: int, names: Bytes, to: int) -> bool:
    """Copy a name. Returns whether it is certain to be legal."""
    for index in range(at, stop):
        if not _SPACE < data[index] < _DELETE:
            return False
        names[to + index - at] = data[index]
    return 0 < stop - at <= LONGEST_NAME


@compiled()
def _add(table: IncarnationTable, data: Bytes, record: Fields, hashed: int, slot: int) -> int:
    """Add an incarnation. Returns its number, -1 if there is no room or if a name is not certain to be legal."""
    number: int = table.counts[0]
    begin: int = table.counts[1]
    middle = begin + record.stream_end - record.stream
    end = middle + record.writer_end - record.writer
    if number == len(table.hashes) or end > len(table.names):
        return -1
    if record.writer_end - record.writer == 1 and data[record.writer] == _STAR:
        return -1
    if not _copy_name(data, record.stream, record.stream_end, table.names, begin):
        return -1
    if not _copy_name(data, record.writer, record.writer_end, table.names, middle):
        return -1
    table.bounds[number, 0], table.bounds[number, 1], table.bounds[number, 2] = begin, middle, end
    table.bounds[number, 3] = record.epoch
    table.hashes[number] = hashed
    table.legal[number] = True
    table.slots[slot] = number
    table.counts[0], table.counts[1] = number + 1, end
    return number


@compiled(inline=True)
def number_of(table: IncarnationTable, data: Bytes, record: Fields, hashed: int) -> int:
    """The number of a known or new incarnation; -1 if `Incarnations.add` must add it."""
    mask = len(table.slots) - 1
    slot = (hashed ^ (hashed >> 32)) & mask
    while True:
        number: int = table.slots[slot]
        if number < 0:
            return _add(table, data, record, hashed, slot)
        if table.hashes[number] == hashed and _is(table, number, data, record):
            return number
        slot = (slot + 1) & mask


_RDATA, _VOID, _POSITION = int(Kind.RDATA), int(Kind.VOID), int(Kind.POSITION)
_MOST_BYTES: Final = 4 * LONGEST_NAME  # of UTF-8; a bound for the memory of the table
_NO_INCARNATION: Final = MissingIncarnation(0, 0, 0, 0, 0, 0)
_NAMED: Final = HAS_KIND | HAS_STREAM | HAS_WRITER


class ScanResult(NamedTuple):
    """Why and at which record a scan ended, and the total numbers of edges and undecided records."""

    why: int
    record: int
    edges: int
    undecided: int
    missing: MissingIncarnation


DONE: Final = 0
FULL: Final = 1
"""The columns have no room for the edges that the next record may have."""
NEW: Final = 2
"""`Incarnations.add` must add the incarnation of the next record."""


@compiled(inline=True)
def _is_beyond(prev: int, id: int) -> bool:
    """Whether the ID is farther from 0 than its `prev`, on the same side."""
    return 0 <= prev < id or 0 >= prev > id


@compiled(inline=True)
def _is_chain(prev: int, edges: Edges, first: int, stop: int) -> bool:
    for index in range(first, stop):
        if not _is_beyond(prev, edges.ids[index]):
            return False
        prev = edges.ids[index]
    return stop > first


@compiled(inline=True)
def _start(record: Fields) -> int:
    """The `prev` of an edge, the same as of `records.start`."""
    if record.kind != RDATA or record.has & HAS_PREV:
        return record.prev
    return record.id - 1 if record.id > 0 else record.id + 1


@compiled(inline=True)
def _is_good(fact: Fields, edges: Edges, count: int) -> bool:
    if fact.has & _NAMED != _NAMED or fact.epoch < 0:
        return False
    if fact.stream_end - fact.stream > _MOST_BYTES or fact.writer_end - fact.writer > _MOST_BYTES:
        return False
    if fact.kind == RUN:
        return (
            fact.has & HAS_PREV != 0 and fact.ids == fact.lists and _is_chain(fact.prev, edges, count, count + fact.ids)
        )
    if not fact.has & HAS_ID or not (fact.batch or _is_beyond(_start(fact), fact.id)):
        return False
    if fact.kind == RDATA:
        return fact.has & HAS_ROW != 0
    return fact.kind in (VOID, POSITION) and fact.has & HAS_PREV != 0 and not fact.batch


@compiled(inline=True)
def _put_edge(record: Fields, edges: Edges, count: int) -> int:
    edges.prevs[count], edges.ids[count] = _start(record), record.id
    kind = _RDATA
    if record.batch:
        kind = ROW
    elif record.kind != RDATA:
        kind = _VOID if record.kind == VOID else _POSITION
    edges.kinds[count] = kind
    return count + 1


@compiled(inline=True)
def _put_run(record: Fields, edges: Edges, count: int) -> int:
    """Complete the edges of a RUN, whose IDs are already written, and add a batch row for each additional row of an
    ID.
    """
    prev, stop = record.prev, count + record.ids
    for index in range(count, count + record.ids):
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
    fetched: RecordBatch,
    first: int,
    table: IncarnationTable,
    edges: Edges,
    count: int,
    undecided: Ids,
    left: int,
) -> ScanResult:
    """Scan records.

    Args:
        fetched: the records.
        first: the index of the first record.
        table: numbers of incarnations; new ones are added.
        edges: receives the edges, from `count` on.
        count: rows of `edges` in use.
        undecided: receives the indexes of records that `records.read` must decode, from `left` on.
        left: items of `undecided` in use.
    """
    data, keys = fetched.values, fetched.keys
    for at in range(first, len(fetched.offsets)):
        begin, end = fetched.value_bounds[at], fetched.value_bounds[at + 1]
        if count + (end - begin) // 2 + 1 > len(edges.ids):  # an ID and a row each take at least two bytes of JSON
            return ScanResult(FULL, at, count, left, _NO_INCARNATION)
        fact = fields(data, begin, end, edges, count)
        key, key_end = fetched.key_bounds[at], fetched.key_bounds[at + 1]
        legal = False
        if _is_good(fact, edges, count) and are_same(keys, key, key_end, data, fact.stream, fact.stream_end):
            hashed = hash_of(table, data, fact)
            number = number_of(table, data, fact, hashed)
            if number < 0:
                missing = MissingIncarnation(
                    fact.stream, fact.stream_end, fact.writer, fact.writer_end, fact.epoch, hashed
                )
                return ScanResult(NEW, at, count, left, missing)
            legal = table.legal[number]
        if not legal:
            undecided[left] = at
            left += 1
            continue
        stop = _put_run(fact, edges, count) if fact.kind == RUN else _put_edge(fact, edges, count)
        edges.incarnations[count:stop] = number
        edges.offsets[count:stop] = fetched.offsets[at]
        edges.times[count:stop] = fetched.times[at]
        count = stop
    return ScanResult(DONE, len(fetched.offsets), count, left, _NO_INCARNATION)


def compile_all() -> None:
    """Compile `scan` and all functions that it calls, or load them from the cache."""
    zero = np.zeros(1, np.int64)
    scan(RecordBatch.of([b""], [b""], zero, zero), 0, Incarnations().table, Edges.allocate(1), 0, zero, 0)
