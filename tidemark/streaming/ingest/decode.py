"""Decodes Kafka's records into columns of edges, some thousand records at a time, and collects rejected records.

If there are many records, compiled code decodes the records with edges (`ingest.field_scan`). `records.read` decodes
all other records one by one. Only `records.read` rejects a record for its content. If both accept a record, the results
are equal.
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
from tidemark.streaming.ingest.jit_loader import get_module, load_field_scan
from tidemark.streaming.ingest.record_batch import Edges, RecordBatch, WriterEpochs
from tidemark.streaming.values.limits import Reason
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import MAX_ID, ROW, Kind, Topic, is_name, is_writer_name
from tidemark.streaming.wire.runs import UNBOUNDED, PossibleFacts

_ABSENT: Final = Raw(b"null")


class _AnyRecord(msgspec.Struct):
    """The fields of any record, each as undecoded JSON."""

    kind: Raw = _ABSENT
    stream: Raw = _ABSENT
    writer: Raw = _ABSENT
    epoch: Raw = _ABSENT
    id: Raw = _ABSENT
    ids: Raw = _ABSENT
    by: Raw = _ABSENT


_object_decoder: Final = msgspec.json.Decoder(_AnyRecord)
_text_decoder: Final = msgspec.json.Decoder(str)
_integer_decoder: Final = msgspec.json.Decoder(int)
_integers_decoder: Final = msgspec.json.Decoder(list[int])

_EDGE_KINDS: Final = {Kind.RDATA.name, Kind.VOID.name, Kind.POSITION.name}


def possible_facts(value: bytes, key: bytes, topic: Topic, offset: int) -> Iterator[PossibleFacts]:
    """Yield the facts that a rejected record may contain, for the stream in its value and for the stream in its key.

    Yields nothing for a SKIP, RETIRE or OPEN, and for an operator's JOIN, because they contain no fact. A writer's own
    JOIN contains no fact either. But it is yielded with `reach` 0, because the writer may reserve IDs after the JOIN.
    """
    try:
        fields = _object_decoder.decode(value)
    except (ValueError, RecursionError):
        fields = _AnyRecord()
    kind = _decode_string(fields.kind)
    by_operator = fields.by is not _ABSENT or (topic is Topic.CONTROL and fields.epoch is _ABSENT)
    if kind in (Kind.SKIP.name, Kind.RETIRE.name, Kind.OPEN.name) or (kind == Kind.JOIN.name and by_operator):
        return
    stream, key_stream = _decode_string(fields.stream), _decode_utf8(key)
    if is_name(stream):
        writer, epoch = _decode_string(fields.writer), 0 if fields.epoch is _ABSENT else _decode_integer(fields.epoch)
        if is_writer_name(writer) and epoch is not None and 0 <= epoch <= MAX_ID:
            yield PossibleFacts(stream, writer, epoch, _reach(kind, fields), offset)
        else:
            yield PossibleFacts(stream, None, 0, UNBOUNDED, offset)
    if key_stream != stream and is_name(key_stream):
        yield PossibleFacts(key_stream, None, 0, UNBOUNDED, offset, is_key_only=is_name(stream))


def _reach(kind: str, fields: _AnyRecord) -> int:
    """The highest ID of the facts in a record, as a magnitude; `UNBOUNDED` if that ID is not known; 0 for a JOIN."""
    if kind == Kind.JOIN.name:
        return 0
    number = 0
    if kind == Kind.RUN.name:
        with suppress(ValueError):
            number = max(map(abs, _integers_decoder.decode(fields.ids)), default=0)
    elif kind in _EDGE_KINDS:
        number = abs(_decode_integer(fields.id) or 0)
    return number if 0 < number <= MAX_ID else UNBOUNDED


def _decode_string(raw: Raw) -> str:
    """The decoded string; the empty string if the value is not a string. The empty string is not a legal name."""
    try:
        return _text_decoder.decode(raw)
    except ValueError:
        return ""


def _decode_integer(raw: Raw) -> int | None:
    try:
        return _integer_decoder.decode(raw)
    except ValueError:
        return None


def _decode_utf8(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return ""


RECORD_SECONDS, BYTE_SECONDS = 12e-6, 50e-9
"""Estimates of the seconds that decoding takes without compiled code: for a record, and for each byte of its value."""


class Decoder:
    """Decodes the records of one range, batch by batch. For one thread.

    Args:
        topic: the topic of the records.
        not_storable: offsets of records to reject with the reason `not_storable`, regardless of their content.

    Attributes:
        writer_epochs: the numbers of the writer epochs in `edges()`.
        markers: the markers as `(record, offset, time)`, with the Kafka time in ms since 1970.
        rejected_offsets: reason -> offsets of rejected records.
        possible_facts: the facts that rejected records may contain.
        next_offset: one more than the highest offset that was added; 0 before the first batch.
    """

    MIN_COMPILED_BYTES: ClassVar[int] = 64 << 10
    """A batch with fewer bytes of values is decoded record by record, in 1 to 4 ms, without loading compiled code."""

    def __init__(self, topic: Topic, not_storable: Collection[int] = ()) -> None:
        self.topic = topic
        self._not_storable = frozenset(not_storable)
        self.writer_epochs = WriterEpochs()
        self.markers: list[tuple[records.OverridableRecord | records.Open, int, int]] = []
        self.rejected_offsets: dict[Reason, list[int]] = defaultdict(list)
        self.possible_facts: list[PossibleFacts] = []
        self.next_offset = 0
        self._scanned_edges = Edges.allocate(0)
        self._scanned_edge_count = 0  # rows of `_scanned_edges` in use
        self._decoded_edges: list[tuple[int, int, int, int, int, int]] = []

    @property
    def size(self) -> int:
        """The number of edges and batch rows decoded so far."""
        return self._scanned_edge_count + len(self._decoded_edges)

    def edges(self) -> Edges:
        """All edges and batch rows decoded so far, in the order of their offsets."""
        edges = self._scanned_edges.take(slice(self._scanned_edge_count))
        if self._decoded_edges:
            edges = edges.concatenate(Edges.of(self._decoded_edges))
        if np.any(edges.offsets[1:] < edges.offsets[:-1]):
            return edges.take(np.argsort(edges.offsets, kind="stable"))
        return edges

    def split(self, min_edges: int) -> "Decoder":
        """Move the records with the lowest offsets to a new decoder.

        If the same records were added in other batches, the same records are moved.

        Args:
            min_edges: the number of edges and batch rows to move, at least 1 and at most `size`. More are moved if they
                belong to the last record, because records are not divided.

        Returns:
            The new decoder. It shares `writer_epochs` with this decoder, so do not add batches to it.
        """
        edges = self.edges()
        end = int(edges.offsets[min_edges - 1]) + 1
        count = int(np.searchsorted(edges.offsets, end))
        oldest, rest = Decoder(self.topic), edges.take(slice(count, None))
        oldest.writer_epochs, oldest.next_offset = self.writer_epochs, end
        oldest._scanned_edges, oldest._scanned_edge_count = edges.take(slice(count)), count
        self._scanned_edges, self._scanned_edge_count = rest.with_room(rest.size, count), rest.size
        self._decoded_edges = []
        oldest.markers = [marker for marker in self.markers if marker[1] < end]
        self.markers = [marker for marker in self.markers if marker[1] >= end]
        oldest.possible_facts = [facts for facts in self.possible_facts if facts.first_offset < end]
        self.possible_facts = [facts for facts in self.possible_facts if facts.first_offset >= end]
        rejected, self.rejected_offsets = self.rejected_offsets, defaultdict(list)
        for reason, offsets in rejected.items():
            for offset in offsets:
                (oldest if offset < end else self).rejected_offsets[reason].append(offset)
        return oldest

    def add(self, batch: RecordBatch) -> None:
        """Decode a batch of at least one record."""
        indexes: Iterable[int] = range(batch.size)
        has_not_storable = bool(self._not_storable) and not self._not_storable.isdisjoint(batch.offsets.tolist())
        if self.topic is Topic.FACTS and len(batch.values) >= self.MIN_COMPILED_BYTES and not has_not_storable:
            indexes = self._scan(batch)
        for index in indexes:
            self._decode_one(batch, index)
        self.next_offset = max(self.next_offset, int(batch.offsets.max()) + 1)

    def _scan(self, batch: RecordBatch) -> Iterable[int]:
        """Decode records with compiled code, and store their edges.

        Returns:
            The indexes of the records that `records.read` must decode; all indexes if compiled code is not loaded.
        """
        scan = get_module(load_field_scan, batch.size * RECORD_SECONDS + len(batch.values) * BYTE_SECONDS)
        if scan is None:
            return range(batch.size)
        self.writer_epochs.prefetch(batch.size)
        undecided = np.empty(batch.size, np.int64)
        status, first, count = scan.NEW_WRITER_EPOCH, 0, 0
        while status != scan.DONE:
            status, first, self._scanned_edge_count, count, missing = scan.scan(
                batch, first, self.writer_epochs.table, self._scanned_edges, self._scanned_edge_count, undecided, count
            )
            if status == scan.NEW_WRITER_EPOCH:
                self.writer_epochs.add(missing, batch.values)
            elif status == scan.FULL:
                self._scanned_edges = self._scanned_edges.with_room(
                    self._scanned_edge_count, len(batch.value(first)) + 1
                )
        indexes: list[int] = undecided[:count].tolist()
        return indexes

    def _decode_one(self, batch: RecordBatch, index: int) -> None:
        """Decode one record with `records.read`. Stores its edges or its marker, or rejects the record."""
        value, key, offset, time = (
            batch.value(index),
            batch.key(index),
            int(batch.offsets[index]),
            int(batch.times[index]),
        )
        try:
            if offset in self._not_storable:
                raise BadRecord(Reason.NOT_STORABLE, "the database cannot store the effects of the record")
            record = records.read(value, key, self.topic)
        except BadRecord as error:
            self.rejected_offsets[Reason(error.reason)].append(offset)
            self.possible_facts.extend(possible_facts(value, key, self.topic, offset))
            return
        if isinstance(record, records.OverridableRecord | records.Open):
            self.markers.append((record, offset, time))
            return
        number = self.writer_epochs.find_or_add(record.stream, record.writer, record.epoch)
        match record:
            case records.Rdata(id="batch"):
                edges = [(ROW, 0, 0)]
            case records.Rdata(id=int(id)):
                edges = [(int(Kind.RDATA), records.effective_prev(record), id)]
            case records.FactRun():
                kinds = [int(Kind.RDATA if rows else Kind.VOID) for rows in record.rows]
                edges = [(kind, *edge) for kind, edge in zip(kinds, pairwise([record.prev, *record.ids]), strict=True)]
                edges += [(ROW, 0, 0)] * sum(len(rows) - 1 for rows in record.rows if rows)
            case records.Void() | records.Position():
                edges = [(int(records.kind_of(record)), record.prev, record.id)]
        self._decoded_edges += [(number, kind, prev, id, offset, time) for kind, prev, id in edges]
