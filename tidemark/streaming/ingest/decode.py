"""Kafka's records as columns of numbers: decoded some thousand at a time, each bad record set aside.

Where there are many, compiled code takes the facts from them (`ingest.scan`). What it leaves, and what are few,
goes one by one to `records.read`, which alone gives reasons. Both say the same of each record.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import ClassVar, Final

import msgspec
import numpy as np
from msgspec import Raw

from tidemark.common.errors import BadRecord
from tidemark.streaming.ingest.incarnations import Incarnations
from tidemark.streaming.ingest.jit_loader import load_field_scan
from tidemark.streaming.ingest.record_batch import Edges, Fetched
from tidemark.streaming.values.limits import Reason
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import MAX_ID, ROW, Kind, Topic, is_name, is_writer
from tidemark.streaming.wire.runs import UNBOUNDED, TurnedAway

_NOTHING: Final = Raw(b"null")


class _AnyRecord(msgspec.Struct):
    """The fields of any record, each as it stands."""

    kind: Raw = _NOTHING
    stream: Raw = _NOTHING
    writer: Raw = _NOTHING
    epoch: Raw = _NOTHING
    id: Raw = _NOTHING
    ids: Raw = _NOTHING
    by: Raw = _NOTHING


_object: Final = msgspec.json.Decoder(_AnyRecord)
_text: Final = msgspec.json.Decoder(str)
_number: Final = msgspec.json.Decoder(int)
_numbers: Final = msgspec.json.Decoder(list[int])

_EDGES: Final = {Kind.RDATA.name, Kind.VOID.name, Kind.POSITION.name}


def claims(value: bytes, key: bytes, topic: Topic, offset: int) -> Iterator[TurnedAway]:
    """Whose fact a refused record may be: that of the stream that it names, and of the one that its key names.

    None where it is certain to be no fact: a SKIP, a RETIRE, an OPEN, or a JOIN that an operator signed. A writer's own
    JOIN is none either, but that writer may have reserved IDs since.
    """
    try:
        found = _object.decode(value)
    except (ValueError, RecursionError):
        found = _AnyRecord()
    kind = _string(found.kind)
    by_operator = found.by is not _NOTHING or (topic is Topic.CONTROL and found.epoch is _NOTHING)
    if kind in (Kind.SKIP.name, Kind.RETIRE.name, Kind.OPEN.name) or (kind == Kind.JOIN.name and by_operator):
        return
    stream, keyed = _string(found.stream), _utf8(key)
    if is_name(stream):
        writer, epoch = _string(found.writer), 0 if found.epoch is _NOTHING else _integer(found.epoch)
        if is_writer(writer) and epoch is not None and 0 <= epoch <= MAX_ID:
            yield TurnedAway(stream, writer, epoch, _reach(kind, found), offset)
        else:
            yield TurnedAway(stream, None, 0, UNBOUNDED, offset)
    if keyed != stream and is_name(keyed):
        yield TurnedAway(keyed, None, 0, UNBOUNDED, offset, only_known=is_name(stream))


def _reach(kind: str, found: _AnyRecord) -> int:
    """Up to where the fact may be."""
    if kind == Kind.JOIN.name:
        return 0
    number = 0
    if kind == Kind.RUN.name:
        with suppress(ValueError):
            number = max(map(abs, _numbers.decode(found.ids)), default=0)
    elif kind in _EDGES:
        number = abs(_integer(found.id) or 0)
    return number if 0 < number <= MAX_ID else UNBOUNDED


def _string(raw: Raw) -> str:
    """Empty, which is no name, where it is no string."""
    try:
        return _text.decode(raw)
    except ValueError:
        return ""


def _integer(raw: Raw) -> int | None:
    try:
        return _number.decode(raw)
    except ValueError:
        return None


def _utf8(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return ""


class Decoder:
    """The records of a task from one Kafka partition, decoded batch by batch. Not for use by several threads.

    `markers` come with their offsets and times, `rejected` gives the offsets for each reason, `refused` those whose
    facts they may be. Records at the offsets that it is given as `refused` are rejected as not storable, whatever they
    say.
    """

    FEW: ClassVar[int] = 64 << 10
    """Bytes of records: fewer are read one by one in a millisecond and a half, and a process that never has more never
    loads what is compiled, which takes a second."""

    def __init__(self, topic: Topic, refused: Collection[int] = ()) -> None:
        self.topic = topic
        self._refused = frozenset(refused)
        self.incarnations = Incarnations()
        self.markers: list[tuple[records.Marker | records.Open, int, int]] = []
        self.rejected: dict[Reason, list[int]] = defaultdict(list)
        self.refused: list[TurnedAway] = []
        self.next_offset = 0
        self._scanned = Edges.room(0)
        self._count = 0  # of them
        self._read: list[tuple[int, int, int, int, int, int]] = []

    @property
    def size(self) -> int:
        """Edges and batch rows."""
        return self._count + len(self._read)

    def edges(self) -> Edges:
        """All edges and batch rows, in the order of their offsets."""
        edges = self._scanned.at(slice(self._count))
        if self._read:
            edges = edges.then(Edges.of(self._read))
        if np.any(edges.offsets[1:] < edges.offsets[:-1]):
            return edges.at(np.argsort(edges.offsets, kind="stable"))
        return edges

    def add(self, fetched: Fetched) -> None:
        """Decode what came of one partition, at least one record."""
        left: Iterable[int] = range(fetched.size)
        apart = bool(self._refused) and not self._refused.isdisjoint(fetched.offsets.tolist())
        if self.topic is Topic.FACTS and len(fetched.values) >= self.FEW and not apart:
            left = self._scan(fetched)
        for at in left:
            self._take(fetched, at)
        self.next_offset = max(self.next_offset, int(fetched.offsets.max()) + 1)

    def _scan(self, fetched: Fetched) -> Iterable[int]:
        """Take what compiled code understands. Returns the indexes of the other records, all if numba is missing."""
        scan = load_field_scan()
        if scan is None:
            return range(fetched.size)
        self.incarnations.warm(fetched.size)
        left = np.empty(fetched.size, np.int64)
        why, first, leaving = scan.NEW, 0, 0
        while why != scan.DONE:
            why, first, self._count, leaving, met = scan.scan(
                fetched, first, self.incarnations.table, self._scanned, self._count, left, leaving
            )
            if why == scan.NEW:
                self.incarnations.meet(met, fetched.values)
            elif why == scan.FULL:
                self._scanned = self._scanned.longer(self._count, len(fetched.value(first)) + 1)
        indexes: list[int] = left[:leaving].tolist()
        return indexes

    def _take(self, fetched: Fetched, at: int) -> None:
        """What `records.read` says of a record."""
        value, key, offset, time = fetched.value(at), fetched.key(at), int(fetched.offsets[at]), int(fetched.times[at])
        try:
            if offset in self._refused:
                raise BadRecord(Reason.NOT_STORABLE, "the database refused what followed from it")
            record = records.read(value, key, self.topic)
        except BadRecord as bad:
            self.rejected[Reason(bad.reason)].append(offset)
            self.refused.extend(claims(value, key, self.topic, offset))
            return
        if isinstance(record, records.Marker | records.Open):
            self.markers.append((record, offset, time))
            return
        number = self.incarnations.number(record.stream, record.writer, record.epoch)
        match record:
            case records.Rdata(id="batch"):
                found = [(ROW, 0, 0)]
            case records.Rdata(id=int(id)):
                found = [(int(Kind.RDATA), records.start(record), id)]
            case records.FactRun():
                kinds = [int(Kind.RDATA if rows else Kind.VOID) for rows in record.rows]
                found = [(kind, *edge) for kind, edge in zip(kinds, pairwise([record.prev, *record.ids]), strict=True)]
                found += [(ROW, 0, 0)] * sum(len(rows) - 1 for rows in record.rows if rows)
            case records.Void() | records.Position():
                found = [(int(records.kind_of(record)), record.prev, record.id)]
        self._read += [(number, kind, prev, id, offset, time) for kind, prev, id in found]
