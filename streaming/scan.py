"""The facts in Kafka's records, taken from their JSON into edges by compiled code.

A shortcut: what is said here of a record is what `records.read` says. It is made for records as programs write them, in
any order of their fields and with any spaces. What is strange but legal (escapes in names, a field twice) is left
undecided, like all that is wrong and all that is no fact.
"""

from typing import Final, NamedTuple

from tidemark.streaming.edges import Edges
from tidemark.streaming.fetched import Bytes, Fetched
from tidemark.streaming.incarnations import Met, Table
from tidemark.streaming.intervals import Ids
from tidemark.streaming.json_values import (
    CLOSE_LIST,
    CLOSE_OBJECT,
    COLON,
    COMMA,
    MINUS,
    OPEN_LIST,
    OPEN_OBJECT,
    PLAIN,
    QUOTE,
    ZERO,
    character,
    compiled,
    number,
    space,
    value,
)
from tidemark.streaming.records import EVERYBODY, ROW, Kind


class Stop(NamedTuple):
    """Why a scan ended, and with how many edges, undecided records and records in all."""

    why: int
    at: int
    count: int
    left: int
    met: Met


DONE: Final = 0
FULL: Final = 1
"""The edges have no room for what the next record may hold."""
NEW: Final = 2
"""The incarnation of the next record is for others to put into the table."""


def _word(text: str) -> int:
    return int.from_bytes(text.encode())


_KIND, _STREAM, _WRITER, _EPOCH = map(_word, ("kind", "stream", "writer", "epoch"))
_PREV, _ID, _IDS, _ROW, _ROWS = map(_word, ("prev", "id", "ids", "row", "rows"))
_RDATA, _VOID, _POSITION, _RUN = map(_word, ("RDATA", "VOID", "POSITION", "RUN"))
_BATCH = _word("batch")
_RDATA_CODE, _VOID_CODE, _POSITION_CODE, _ROW_CODE = int(Kind.RDATA), int(Kind.VOID), int(Kind.POSITION), ROW

# Which fields a record has.
_NAMED, _HAS_KIND, _HAS_STREAM, _HAS_WRITER = 7, 1, 2, 4
_HAS_PREV, _HAS_ID, _HAS_EPOCH, _HAS_ROW, _HAS_IDS, _HAS_ROWS = 8, 16, 32, 64, 128, 256

_SPACE, _DELETE, _STAR = ord(" "), 0x7F, ord(EVERYBODY)
_DIGITS: Final = 18  # of a number that fits, whatever they are


class _Fields(NamedTuple):
    """What a record says; `has` is 0 where that is not certain. Names are where their bytes are."""

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
    """Behind a string without escapes whose content begins here, and that as a number: 0 where it is longer than eight
    characters or not ASCII.
    """
    first, word = at, 0
    while at < end and PLAIN[data[at]]:
        word = (word << 8) | data[at]
        at += 1
    if at - first > 8:
        word = 0
    while at < end and data[at] != QUOTE:
        word = 0
        at = at + 1 if PLAIN[data[at]] else character(data, at, end)
        if at < 0:
            return -1, 0
    return (at + 1, word) if at < end else (-1, 0)


@compiled(inline=True)
def _integer(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """Behind an integer, and the integer. What follows is for the caller to judge."""
    negative = at < end and data[at] == MINUS
    if negative:
        at += 1
    first, found = at, 0
    while at < end and 0 <= data[at] - ZERO <= 9:
        found = found * 10 + (data[at] - ZERO)
        at += 1
    digits = at - first
    if digits == 0 or digits > _DIGITS or (data[first] == ZERO and (negative or digits > 1)):
        return -1, 0
    return at, -found if negative else found


@compiled()
def _integers(data: Bytes, at: int, end: int, found: Ids, count: int) -> tuple[int, int]:
    """Behind a list of integers, and how many are found in all, with `count` before."""
    if data[at] != OPEN_LIST:
        return -1, 0
    while True:
        at, found[count] = _integer(data, space(data, at + 1, end), end)
        if at < 0:
            return -1, 0
        count += 1
        at = space(data, at, end)
        if at >= end or (data[at] != COMMA and data[at] != CLOSE_LIST):
            return -1, 0
        if data[at] == CLOSE_LIST:
            return at + 1, count


@compiled(inline=True)
def _length(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """Behind a list of any values, and how many there are."""
    if at >= end or data[at] != OPEN_LIST:
        return -1, 0
    inside = space(data, at + 1, end)
    if inside < end and data[inside] == CLOSE_LIST:
        return inside + 1, 0
    length = 0
    while True:
        at = value(data, at + 1, end)
        if at < 0:
            return -1, 0
        length += 1
        at = space(data, at, end)
        if at >= end or (data[at] != COMMA and data[at] != CLOSE_LIST):
            return -1, 0
        if data[at] == CLOSE_LIST:
            return at + 1, length


@compiled()
def _lengths(data: Bytes, at: int, end: int, found: Ids, count: int) -> tuple[int, int]:
    """Behind a list of lists, and how many lengths of them are found in all, with `count` before."""
    if data[at] != OPEN_LIST:
        return -1, 0
    while True:
        at, found[count] = _length(data, space(data, at + 1, end), end)
        if at < 0:
            return -1, 0
        count += 1
        at = space(data, at, end)
        if at >= end or (data[at] != COMMA and data[at] != CLOSE_LIST):
            return -1, 0
        if data[at] == CLOSE_LIST:
            return at + 1, count


@compiled()
def _fields(data: Bytes, at: int, end: int, edges: Edges, count: int) -> _Fields:
    """The IDs and the numbers of rows of a RUN are put into `ids` and `times`, from `count` on."""
    has = twice = kind = stream = stream_end = writer = writer_end = epoch = prev = id = ids = lists = 0
    batch = False
    at = space(data, at, end)
    more = at < end and data[at] == OPEN_OBJECT
    while more:
        at = space(data, at + 1, end)
        if at >= end or data[at] != QUOTE:
            break
        at, field = _short(data, at + 1, end)
        if at < 0:
            break
        at = space(data, at, end)
        if at >= end or data[at] != COLON:
            break
        at = space(data, at + 1, end)
        if at >= end:
            break
        begin, bit, short = at + 1, 0, 0
        if field == _ROW:
            bit = _HAS_ROW
            at = value(data, at, end)
        elif field == _PREV:
            bit = _HAS_PREV
            at, prev = _integer(data, at, end)
        elif field == _EPOCH:
            bit = _HAS_EPOCH
            at, epoch = _integer(data, at, end)
        elif field == _IDS:
            bit = _HAS_IDS
            at, ids = _integers(data, at, end, edges.ids, count)
        elif field == _ROWS:
            bit = _HAS_ROWS
            at, lists = _lengths(data, at, end, edges.times, count)
        elif field == _ID and data[at] != QUOTE:
            bit = _HAS_ID
            at, id = _integer(data, at, end)
        elif field == _KIND or field == _STREAM or field == _WRITER or field == _ID:
            if data[at] != QUOTE:
                break
            at, short = _short(data, begin, end)
            if field == _KIND:
                bit = _HAS_KIND
                kind = short
            elif field == _STREAM:
                bit = _HAS_STREAM
                stream, stream_end = begin, at - 1
            elif field == _WRITER:
                bit = _HAS_WRITER
                writer, writer_end = begin, at - 1
            else:
                bit = _HAS_ID
                batch = short == _BATCH
                at = at if batch else -1
        else:
            at = value(data, at, end)
        if at < 0:
            break
        twice |= has & bit
        has |= bit
        at = space(data, at, end)
        if at >= end or (data[at] != COMMA and data[at] != CLOSE_OBJECT):
            break
        more = data[at] == COMMA
        if not more and (twice or space(data, at + 1, end) < end):
            break
    else:
        return _Fields(has, kind, stream, stream_end, writer, writer_end, epoch, prev, id, batch, ids - count, lists - count)
    return _Fields(0, 0, 0, 0, 0, 0, 0, 0, 0, False, 0, 0)


@compiled(inline=True)
def _is_beyond(prev: int, id: int) -> bool:
    """Whether the ID is farther from 0 than its `prev`, on the same side."""
    return 0 <= prev < id or 0 >= prev > id


@compiled(inline=True)
def _is_chain(prev: int, edges: Edges, first: int, stop: int) -> bool:
    for place in range(first, stop):
        if not _is_beyond(prev, edges.ids[place]):
            return False
        prev = edges.ids[place]
    return stop > first


@compiled(inline=True)
def _are_same(left: Bytes, left_at: int, right: Bytes, right_at: int, length: int) -> bool:
    for place in range(length):
        if left[left_at + place] != right[right_at + place]:
            return False
    return True


@compiled(inline=True)
def _hash(seed: int, data: Bytes, it: _Fields) -> int:
    """FNV-1a of both names and the epoch."""
    found = seed
    for place in range(it.stream, it.stream_end):
        found = (found ^ data[place]) * 0x100000001B3
    found = (found ^ 0xFF) * 0x100000001B3
    for place in range(it.writer, it.writer_end):
        found = (found ^ data[place]) * 0x100000001B3
    return (found ^ it.epoch) * 0x100000001B3


@compiled(inline=True)
def _slot(table: Table, data: Bytes, it: _Fields, hashed: int) -> int:
    """Where the incarnation is, or would be, in the hash table."""
    mask = len(table.slots) - 1
    slot = (hashed ^ (hashed >> 32)) & mask
    while True:
        number = table.slots[slot]
        if number < 0:
            return slot
        if table.hashes[number] == hashed and table.places[number, 3] == it.epoch:
            stream, writer, end = table.places[number, 0], table.places[number, 1], table.places[number, 2]
            length, rest = it.stream_end - it.stream, it.writer_end - it.writer
            if writer - stream == length and end - writer == rest:
                if _are_same(table.names, stream, data, it.stream, length):
                    if _are_same(table.names, writer, data, it.writer, rest):
                        return slot
        slot = (slot + 1) & mask


@compiled(inline=True)
def _copy_name(data: Bytes, at: int, stop: int, names: Bytes, to: int) -> bool:
    """Whether it is certain to be legal."""
    for place in range(at, stop):
        if not _SPACE < data[place] < _DELETE:
            return False
        names[to + place - at] = data[place]
    return 0 < stop - at <= 255


@compiled()
def _add(table: Table, data: Bytes, it: _Fields, hashed: int, slot: int) -> bool:
    """Whether it was added: where there is room, and its names are surely legal."""
    number, begin = table.held[0], table.held[1]
    middle = begin + it.stream_end - it.stream
    end = middle + it.writer_end - it.writer
    if number == len(table.hashes) or end > len(table.names):
        return False
    if it.writer_end - it.writer == 1 and data[it.writer] == _STAR:
        return False
    if not _copy_name(data, it.stream, it.stream_end, table.names, begin):
        return False
    if not _copy_name(data, it.writer, it.writer_end, table.names, middle):
        return False
    table.places[number, 0], table.places[number, 1], table.places[number, 2] = begin, middle, end
    table.places[number, 3] = it.epoch
    table.hashes[number] = hashed
    table.legal[number] = True
    table.slots[slot] = number
    table.held[0], table.held[1] = number + 1, end
    return True


@compiled()
def scan(fetched: Fetched, first: int, table: Table, edges: Edges, count: int, undecided: Ids, left: int) -> Stop:
    """Scan records from the `first` on; put their edges into `edges` from `count` on, and into `undecided` from
    `left` on the places of those that it leaves.
    """
    data, keys, nothing = fetched.values, fetched.keys, Met(0, 0, 0, 0, 0, 0)
    for at in range(first, len(fetched.value_bounds) - 1):
        begin, end = fetched.value_bounds[at], fetched.value_bounds[at + 1]
        if count + (end - begin) // 2 + 1 > len(edges.ids):  # an ID takes two bytes of JSON, and so does a row
            return Stop(FULL, at, count, left, nothing)
        it = _fields(data, begin, end, edges, count)
        good, prev, run, stop = False, it.prev, it.kind == _RUN, count + 1
        if it.has & _NAMED == _NAMED and it.epoch >= 0:
            if it.kind == _RDATA:
                if not it.has & _HAS_PREV:
                    prev = it.id - 1 if it.id > 0 else it.id + 1
                good = it.has & _HAS_ID != 0 and it.has & _HAS_ROW != 0 and (it.batch or _is_beyond(prev, it.id))
            elif it.kind == _VOID or it.kind == _POSITION:
                good = it.has & _HAS_ID != 0 and it.has & _HAS_PREV != 0 and not it.batch and _is_beyond(prev, it.id)
            elif run:
                stop = count + it.ids
                good = it.has & _HAS_PREV != 0 and it.ids == it.lists and _is_chain(prev, edges, count, stop)
            key, length = fetched.key_bounds[at], it.stream_end - it.stream
            good = good and fetched.key_bounds[at + 1] - key == length and _are_same(keys, key, data, it.stream, length)
        number = -1
        if good:
            hashed = _hash(table.seed, data, it)
            slot = _slot(table, data, it, hashed)
            if table.slots[slot] < 0 and not _add(table, data, it, hashed, slot):
                met = Met(it.stream, it.stream_end, it.writer, it.writer_end, it.epoch, hashed)
                return Stop(NEW, at, count, left, met)
            number = table.slots[slot]
        if number < 0 or not table.legal[number]:
            undecided[left] = at
            left += 1
            continue
        if run:
            rows = stop
            for place in range(count, stop):
                edges.prevs[place] = prev
                prev = edges.ids[place]
                edges.kinds[place] = _RDATA_CODE if edges.times[place] else _VOID_CODE
                for _ in range(edges.times[place] - 1):
                    edges.prevs[rows] = edges.ids[rows] = 0
                    edges.kinds[rows] = _ROW_CODE
                    rows += 1
            stop = rows
        else:
            edges.prevs[count], edges.ids[count] = prev, it.id
            kind = _RDATA_CODE
            if it.batch:
                kind = _ROW_CODE
            elif it.kind == _VOID:
                kind = _VOID_CODE
            elif it.kind == _POSITION:
                kind = _POSITION_CODE
            edges.kinds[count] = kind
        edges.incarnations[count:stop] = number
        edges.offsets[count:stop] = fetched.offsets[at]
        edges.times[count:stop] = fetched.times[at]
        count = stop
    return Stop(DONE, len(fetched.value_bounds) - 1, count, left, nothing)
