"""The encoding of writers: a row per writer, and tables from which single rows are decoded. Pure.

A stream may have ten thousand writers, of which a batch touches a few. The columns of a table hold the numbers that a
batch needs of the others. Their rows are copied without being decoded (docs/design.md, rule 8).
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tidemark.streaming.core.chain import Chain, DeferredRange, Span
from tidemark.streaming.core.writers import WriterState
from tidemark.streaming.values.intervals import Ids, Intervals
from tidemark.streaming.values.limits import Evidence
from tidemark.streaming.wire.runs import UNBOUNDED

Pairs = list[tuple[int, int]]


class _Span(msgspec.Struct, array_like=True, frozen=True, gc=False):
    prev: int
    id: int
    facts: int
    empty: int
    unseen: int
    skipped: int
    edges: int
    since: int


class StoredChain(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A `Chain` as it is encoded. `empty` is packed as `Intervals.pack` does."""

    position: int
    refused: int
    pending: list[_Span]
    empty: bytes
    deferred: list[tuple[int, int, int]]

    @classmethod
    def of(cls, chain: Chain) -> "StoredChain":
        spans = [_Span(span.prev, span.id, *span.evidence.counts, span.edges, span.since) for span in chain.pending]
        return cls(chain.position, chain.refused, spans, chain.empty.pack(), list(chain.deferred))

    def chain(self) -> Chain:
        spans = [
            Span(
                span.prev,
                span.id,
                Evidence(span.facts, span.empty, span.unseen, span.skipped),
                span.edges,
                span.since,
            )
            for span in self.pending
        ]
        deferred = [DeferredRange(*numbers) for numbers in self.deferred]
        return Chain(self.position, spans, self.refused, Intervals.unpack(self.empty), deferred)


class StoredWriter(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A `WriterState` as it is encoded."""

    name: str
    epoch: int
    chain: StoredChain
    retired: int | None
    late: Pairs
    published: int
    timeline: int
    start: str | None
    seen: int
    joined: int

    @classmethod
    def of(cls, name: str, writer: WriterState) -> "StoredWriter":
        return cls(
            name,
            writer.epoch,
            StoredChain.of(writer.chain),
            writer.retired,
            list(writer.late),
            writer.published,
            writer.timeline,
            writer.start,
            writer.seen,
            writer.joined,
        )

    @property
    def position(self) -> int:
        return max(self.chain.position, self.published)

    def writer(self) -> WriterState:
        return WriterState(
            self.epoch,
            self.chain.chain(),
            self.retired,
            Intervals.of(self.late),
            self.published,
            self.timeline,
            self.start,
            self.seen,
            self.joined,
        )


class WaitingWriter(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An active writer with many pending spans: its encoded row, and what a batch that does not touch it asks for.

    Attributes:
        position: position of the chain.
        reach: the highest settled ID of the chain.
        edges: number of completed edges above the position.
        gaps: number of gaps.
        low: the oldest gap is `(low, top]`, open since `since` (ms).
        row: the encoded `StoredWriter`.
        deferred: True if records of the writer are deferred.
        seen: time (ms) of the batch that read the writer's newest record; 0 if unknown.
    """

    name: str
    epoch: int
    position: int
    reach: int
    edges: int
    gaps: int
    low: int
    top: int
    since: int
    row: bytes
    deferred: bool
    seen: int

    @classmethod
    def of(cls, name: str, writer: WriterState) -> "WaitingWriter":
        chain = writer.chain
        oldest = min(chain.gaps(), key=itemgetter(2))
        row = _encoder.encode(StoredWriter.of(name, writer))
        edges, gaps, deferred = chain.waiting, len(chain.pending), bool(chain.deferred)
        return cls(name, writer.epoch, chain.position, chain.reach, edges, gaps, *oldest, row, deferred, writer.seen)

    def writer(self) -> WriterState:
        return _rows.decode(self.row).writer()


class Straggler(NamedTuple):
    """An active writer that blocks the linear position; sorts by the position of its chain.

    Attributes:
        open_since: time (ms) since when its oldest gap is open; 0 if it has no gap.
        seen: time (ms) of the batch that read its newest record; 0 if unknown.
    """

    position: int
    name: str
    epoch: int
    open_since: int
    seen: int

    @classmethod
    def of(cls, name: str, writer: WriterState) -> "Straggler":
        open_since = min((since for _, _, since in writer.chain.gaps()), default=0)
        return cls(writer.chain.position, name, writer.epoch, open_since, writer.seen)


class _Name(msgspec.Struct, array_like=True, frozen=True, gc=False):
    name: str


_encoder = msgspec.msgpack.Encoder()
_names = msgspec.msgpack.Decoder(_Name)
_rows = msgspec.msgpack.Decoder(StoredWriter)

COLUMNS = np.dtype(
    [("length", "<u4"), ("uncertain", "?"), ("chain", "<i8"), ("position", "<i8"), ("retired", "<i8")], align=False
)
"""The columns of a table.

- `length`: bytes of the row.
- `uncertain`: True if any record of the writer may have been refused. This column has priority over the row.
- `chain`: position of the chain.
- `position`: position of the writer.
- `retired`: time (ms) at which the writer retired; 0 if it is active.
"""


class PackedTable:
    """An immutable table of writers without pending spans and deferred records, sorted by name."""

    def __init__(self, columns: bytes = b"", rows: bytes = b"") -> None:
        self.columns = np.frombuffer(columns, COLUMNS)
        self.rows = rows

    def __len__(self) -> int:
        return len(self.columns)

    @cached_property
    def _ends(self) -> Ids:
        return np.cumsum(self.columns["length"], dtype=np.int64)

    def find(self, name: str) -> int | None:
        """Row of the writer; None if there is no writer of this name."""
        row = self._place(name)
        return row if row < len(self) and self.name(row) == name else None

    def name(self, row: int) -> str:
        return _names.decode(self._encoded(row)).name

    def writer(self, row: int) -> WriterState:
        writer = _rows.decode(self._encoded(row)).writer()
        if self.columns["uncertain"][row]:
            writer.chain.refuse(UNBOUNDED)
        return writer

    def with_all_uncertain(self) -> "PackedTable":
        """The same table with all writers marked as uncertain."""
        columns = self.columns.copy()
        columns["uncertain"] = True
        return PackedTable(columns.tobytes(), self.rows)

    def changed(self, removed: Collection[int], added: Mapping[str, WriterState]) -> "PackedTable":
        """A table without the rows `removed`, and with the writers `added`.

        The cost depends on the number of both. The other rows are copied in blocks.
        """
        if not removed and not added:
            return self
        rows: list[bytes] = []
        columns: list[npt.NDArray[np.void]] = []
        insertions = [(self._place(name), 0, name) for name in sorted(added)]
        start = 0
        for row, width, name in sorted([*insertions, *((row, 1, "") for row in removed)]):
            rows.append(self.rows[self._start(start) : self._start(row)])
            columns.append(self.columns[start:row])
            if not width:
                writer = added[name]
                rows.append(_encoder.encode(StoredWriter.of(name, writer)))
                uncertain = writer.chain.refused == UNBOUNDED
                numbers = (len(rows[-1]), uncertain, writer.chain.position, writer.position, writer.retired or 0)
                columns.append(np.array([numbers], COLUMNS))
            start = row + width
        rows.append(self.rows[self._start(start) :])
        columns.append(self.columns[start:])
        return PackedTable(np.concatenate(columns).tobytes(), b"".join(rows))

    def _place(self, name: str) -> int:
        """The row of the writer, or the row before which it would be inserted."""
        return bisect_left(range(len(self)), name, key=self.name)

    def _start(self, row: int) -> int:
        return int(self._ends[row - 1]) if row else 0

    def _encoded(self, row: int) -> bytes:
        return self.rows[self._start(row) : self._start(row + 1)]


EMPTY = PackedTable()
