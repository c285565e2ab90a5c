"""What a record on the facts topic says, field by field, by compiled code.

What a RUN lists is put where there is room for its edges: its IDs where they belong, and how many rows each has among
the times, until those are known to be wanted.
"""

from typing import Final, NamedTuple

import numpy as np

from tidemark.streaming.ingest.edges import Edges
from tidemark.streaming.ingest.jit_cache import compiled
from tidemark.streaming.ingest.json_scan import (
    CLOSE_LIST,
    CLOSE_OBJECT,
    COLON,
    COMMA,
    MINUS,
    OPEN_LIST,
    OPEN_OBJECT,
    ZERO,
    character,
    plain_end,
    space,
    value,
)
from tidemark.streaming.ingest.native_bytes import QUOTE, peek, word
from tidemark.streaming.ingest.record_batch import Bytes
from tidemark.streaming.values.intervals import Ids


def _word(text: str) -> int:
    return int.from_bytes(text.encode(), "little")


_KIND, _STREAM, _WRITER, _EPOCH = map(_word, ("kind", "stream", "writer", "epoch"))
_PREV, _ID, _IDS, _ROW, _ROWS = map(_word, ("prev", "id", "ids", "row", "rows"))
_BATCH = _word("batch")
_USUAL: Final = ("kind", "stream", "writer", "epoch", "prev", "id", "row")
_WORDS, _LENGTHS = np.array([*map(_word, _USUAL)]), np.array([*map(len, _USUAL)])
RDATA, VOID, POSITION, RUN = map(_word, ("RDATA", "VOID", "POSITION", "RUN"))
"""What `Fields.kind` may be."""

# Which fields a record has.
HAS_KIND, HAS_STREAM, HAS_WRITER, HAS_EPOCH, HAS_PREV, HAS_ID, HAS_ROW, HAS_IDS, HAS_ROWS = (1 << at for at in range(9))

_DIGITS: Final = 18  # of a number that fits, whatever they are


class Fields(NamedTuple):
    """`has` is 0 where it is not certain what the record says. Names are where their bytes are; `ids` and `lists` are
    how many a RUN has.
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
    """Behind a string without escapes whose content begins here, and that as a number: 0 where it is longer than eight
    characters or not ASCII.
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
    """Behind an integer, and the integer. What follows is for the caller to judge."""
    negative = at < end and peek(data, at) == MINUS
    if negative:
        at += 1
    first, found = at, 0
    while at < end and 0 <= peek(data, at) - ZERO <= 9:
        found = found * 10 + (peek(data, at) - ZERO)
        at += 1
    length = at - first
    if length == 0 or length > _DIGITS or (peek(data, first) == ZERO and (negative or length > 1)):
        return -1, 0
    return at, -found if negative else found


@compiled(inline=True)
def _item_end(data: Bytes, at: int, end: int) -> int:
    """Where the comma or the bracket is that follows an item of a list; -1 where neither does, or is given."""
    at = space(data, at, end)
    if at < 0 or at >= end or (peek(data, at) != COMMA and peek(data, at) != CLOSE_LIST):
        return -1
    return at


@compiled()
def _integers(data: Bytes, at: int, end: int, found: Ids, count: int) -> tuple[int, int]:
    """Behind a list of integers, and how many are found in all, with `count` before."""
    if peek(data, at) != OPEN_LIST:
        return -1, 0
    while True:
        at, found[count] = _integer(data, space(data, at + 1, end), end)
        at = _item_end(data, at, end)
        if at < 0:
            return -1, 0
        count += 1
        if peek(data, at) == CLOSE_LIST:
            return at + 1, count


@compiled(inline=True)
def _length(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """Behind a list of any values, and how many there are."""
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
def _lengths(data: Bytes, at: int, end: int, found: Ids, count: int) -> tuple[int, int]:
    """Behind a list of lists, and how many lengths of them are found in all, with `count` before."""
    if peek(data, at) != OPEN_LIST:
        return -1, 0
    while True:
        at, found[count] = _length(data, space(data, at + 1, end), end)
        at = _item_end(data, at, end)
        if at < 0:
            return -1, 0
        count += 1
        if peek(data, at) == CLOSE_LIST:
            return at + 1, count


@compiled(inline=True)
def _field(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """Where the value of a field begins that is named here, and its name as a number."""
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
def _next(data: Bytes, at: int, end: int, place: int) -> tuple[int, int]:
    """As `_field`, but the name is only compared where it is the one that programs mostly write in this place."""
    if place < len(_WORDS) and at + 10 < end:
        length = _LENGTHS[place]
        behind = at + 1 + length
        same = word(data, at + 1, length) == _WORDS[place]
        if same and peek(data, at) == QUOTE and peek(data, behind) == QUOTE and peek(data, behind + 1) == COLON:
            begin = space(data, behind + 2, end)
            return (begin, _WORDS[place]) if begin < end else (-1, 0)
    return _field(data, at, end)


@compiled()
def fields(data: Bytes, at: int, end: int, edges: Edges, count: int) -> Fields:
    """The IDs and the numbers of rows of a RUN are put into `ids` and `times`, from `count` on."""
    has = kind = stream = stream_end = writer = writer_end = epoch = prev = id = ids = lists = 0
    batch = False
    at = space(data, at, end)
    more = at < end and peek(data, at) == OPEN_OBJECT
    place = 0
    while more:
        begin, name = _next(data, at + 1, end, place)
        place += 1
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
