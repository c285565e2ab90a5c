"""The facts in Kafka's records, taken from their JSON into edges by compiled code.

A shortcut: what is said here of a record is what `records.read` says. It is made for records as programs write them, in
any order of their fields and with any spaces. What is strange but legal (escapes in names, a field twice) is left
undecided, like all that is wrong and all that is no fact.
"""

from typing import Final, NamedTuple

from tidemark.streaming.ingest.edges import Edges
from tidemark.streaming.ingest.field_scan import (
    HAS_ID,
    HAS_KIND,
    HAS_PREV,
    HAS_ROW,
    HAS_STREAM,
    HAS_WRITER,
    POSITION,
    RDATA,
    RUN,
    VOID,
    Fields,
    fields,
)
from tidemark.streaming.ingest.incarnation_table import hash_of, number_of
from tidemark.streaming.ingest.incarnations import IncarnationTable, Met
from tidemark.streaming.ingest.jit_cache import compiled, kept
from tidemark.streaming.ingest.json_scan import are_same
from tidemark.streaming.ingest.record_batch import Fetched
from tidemark.streaming.values.intervals import Ids
from tidemark.streaming.wire.records import LONGEST_NAME, ROW, Kind

_RDATA, _VOID, _POSITION = int(Kind.RDATA), int(Kind.VOID), int(Kind.POSITION)
_MOST_BYTES: Final = 4 * LONGEST_NAME  # of UTF-8; of longer names the table would keep what nobody bounds
_NOBODY: Final = Met(0, 0, 0, 0, 0, 0)
_NAMED: Final = HAS_KIND | HAS_STREAM | HAS_WRITER


class Scanned(NamedTuple):
    """Why a scan ended, and at which record, with how many edges and undecided records in all."""

    why: int
    at: int
    edges: int
    left: int
    met: Met


DONE: Final = 0
FULL: Final = 1
"""The edges have no room for what the next record may hold."""
NEW: Final = 2
"""The incarnation of the next record is for others to put into the table."""


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
def _start(it: Fields) -> int:
    """Where an edge begins, as `records.start` has it."""
    if it.kind != RDATA or it.has & HAS_PREV:
        return it.prev
    return it.id - 1 if it.id > 0 else it.id + 1


@compiled(inline=True)
def _is_good(it: Fields, edges: Edges, count: int) -> bool:
    if it.has & _NAMED != _NAMED or it.epoch < 0:
        return False
    if it.stream_end - it.stream > _MOST_BYTES or it.writer_end - it.writer > _MOST_BYTES:
        return False
    if it.kind == RUN:
        return it.has & HAS_PREV != 0 and it.ids == it.lists and _is_chain(it.prev, edges, count, count + it.ids)
    if not it.has & HAS_ID or not (it.batch or _is_beyond(_start(it), it.id)):
        return False
    if it.kind == RDATA:
        return it.has & HAS_ROW != 0
    return it.kind in (VOID, POSITION) and it.has & HAS_PREV != 0 and not it.batch


@compiled(inline=True)
def _put_edge(it: Fields, edges: Edges, count: int) -> int:
    edges.prevs[count], edges.ids[count] = _start(it), it.id
    kind = _RDATA
    if it.batch:
        kind = ROW
    elif it.kind != RDATA:
        kind = _VOID if it.kind == VOID else _POSITION
    edges.kinds[count] = kind
    return count + 1


@compiled(inline=True)
def _put_run(it: Fields, edges: Edges, count: int) -> int:
    """Beside its IDs, which are there, and after them its rows but the first of each."""
    prev, stop = it.prev, count + it.ids
    for place in range(count, count + it.ids):
        edges.prevs[place] = prev
        prev = edges.ids[place]
        edges.kinds[place] = _RDATA if edges.times[place] else _VOID
        for _ in range(edges.times[place] - 1):
            edges.prevs[stop] = edges.ids[stop] = 0
            edges.kinds[stop] = ROW
            stop += 1
    return stop


@kept
@compiled()
def scan(
    fetched: Fetched, first: int, table: IncarnationTable, edges: Edges, count: int, undecided: Ids, left: int
) -> Scanned:
    """Scan records from the `first` on; put their edges into `edges` from `count` on, and into `undecided` from
    `left` on the places of those that it leaves.
    """
    data, keys = fetched.values, fetched.keys
    for at in range(first, len(fetched.offsets)):
        begin, end = fetched.value_bounds[at], fetched.value_bounds[at + 1]
        if count + (end - begin) // 2 + 1 > len(edges.ids):  # an ID takes two bytes of JSON, and so does a row
            return Scanned(FULL, at, count, left, _NOBODY)
        it = fields(data, begin, end, edges, count)
        key, key_end = fetched.key_bounds[at], fetched.key_bounds[at + 1]
        legal = False
        if _is_good(it, edges, count) and are_same(keys, key, key_end, data, it.stream, it.stream_end):
            hashed = hash_of(table, data, it)
            number = number_of(table, data, it, hashed)
            if number < 0:
                met = Met(it.stream, it.stream_end, it.writer, it.writer_end, it.epoch, hashed)
                return Scanned(NEW, at, count, left, met)
            legal = table.legal[number]
        if not legal:
            undecided[left] = at
            left += 1
            continue
        stop = _put_run(it, edges, count) if it.kind == RUN else _put_edge(it, edges, count)
        edges.incarnations[count:stop] = number
        edges.offsets[count:stop] = fetched.offsets[at]
        edges.times[count:stop] = fetched.times[at]
        count = stop
    return Scanned(DONE, len(fetched.offsets), count, left, _NOBODY)
