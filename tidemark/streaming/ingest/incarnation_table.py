"""Incarnations found by their names as they stand in records, and added, by compiled code."""

from tidemark.streaming.ingest.field_scan import Fields
from tidemark.streaming.ingest.incarnations import IncarnationTable
from tidemark.streaming.ingest.jit_cache import compiled
from tidemark.streaming.ingest.json_scan import are_same
from tidemark.streaming.ingest.native_bytes import word
from tidemark.streaming.ingest.record_batch import Bytes
from tidemark.streaming.wire.records import EVERYBODY, LONGEST_NAME

_SPACE, _DELETE, _STAR = ord(" "), 0x7F, ord(EVERYBODY)
_LOW = 0xFFFFFFFF
# Odd, with bits in all bytes (splitmix64).
_ONE, _OTHER = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


@compiled(inline=True)
def _mixed(found: int, more: int) -> int:
    """Twice high bits to low ones: with once, names that differ in few high bits shared a hash whatever the seed."""
    found = (found ^ more) * _ONE
    found = (found ^ ((found >> 32) & _LOW)) * _OTHER
    return found ^ ((found >> 32) & _LOW)


@compiled(inline=True)
def _with_name(found: int, data: Bytes, at: int, end: int) -> int:
    while at < end:
        count = min(8, end - at)
        found = _mixed(found, word(data, at, count))
        at += count
    return found


@compiled(inline=True)
def hash_of(table: IncarnationTable, data: Bytes, it: Fields) -> int:
    """Of both names and the epoch."""
    found = _with_name(table.seed ^ (it.stream_end - it.stream), data, it.stream, it.stream_end)
    return _mixed(_with_name(found, data, it.writer, it.writer_end), it.epoch)


@compiled(inline=True)
def _is(table: IncarnationTable, number: int, data: Bytes, it: Fields) -> bool:
    stream, writer, end = table.places[number, 0], table.places[number, 1], table.places[number, 2]
    known: bool = table.places[number, 3] == it.epoch
    return (
        known
        and are_same(table.names, stream, writer, data, it.stream, it.stream_end)
        and are_same(table.names, writer, end, data, it.writer, it.writer_end)
    )


@compiled(inline=True)
def _copy_name(data: Bytes, at: int, stop: int, names: Bytes, to: int) -> bool:
    """Whether it is certain to be legal."""
    for place in range(at, stop):
        if not _SPACE < data[place] < _DELETE:
            return False
        names[to + place - at] = data[place]
    return 0 < stop - at <= LONGEST_NAME


@compiled()
def _add(table: IncarnationTable, data: Bytes, it: Fields, hashed: int, slot: int) -> int:
    """The number of a new one, where there is room and its names are surely legal."""
    number: int = table.held[0]
    begin: int = table.held[1]
    middle = begin + it.stream_end - it.stream
    end = middle + it.writer_end - it.writer
    if number == len(table.hashes) or end > len(table.names):
        return -1
    if it.writer_end - it.writer == 1 and data[it.writer] == _STAR:
        return -1
    if not _copy_name(data, it.stream, it.stream_end, table.names, begin):
        return -1
    if not _copy_name(data, it.writer, it.writer_end, table.names, middle):
        return -1
    table.places[number, 0], table.places[number, 1], table.places[number, 2] = begin, middle, end
    table.places[number, 3] = it.epoch
    table.hashes[number] = hashed
    table.legal[number] = True
    table.slots[slot] = number
    table.held[0], table.held[1] = number + 1, end
    return number


@compiled(inline=True)
def number_of(table: IncarnationTable, data: Bytes, it: Fields, hashed: int) -> int:
    """Of the incarnation, which may be new; -1 where it is for others to add (`Incarnations.meet`)."""
    mask = len(table.slots) - 1
    slot = (hashed ^ (hashed >> 32)) & mask
    while True:
        number: int = table.slots[slot]
        if number < 0:
            return _add(table, data, it, hashed, slot)
        if table.hashes[number] == hashed and _is(table, number, data, it):
            return number
        slot = (slot + 1) & mask
