"""Writers as bytes: one as a row, many as a table from which single rows are read. Pure.

A stream may have ten thousand writers, and a batch has to do with a few. Of the others it needs what the columns of a
table hold as numbers; their rows are copied through unread (docs/design.md, rule 8).
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
    position: int
    refused: int
    pending: list[_Span]
    empty: bytes
    deferred: list[tuple[int, int, int]]

    @classmethod
    def of(cls, chain: Chain) -> "StoredChain":
        spans = [_Span(it.prev, it.id, *it.evidence.counts, it.edges, it.since) for it in chain.pending]
        return cls(chain.position, chain.refused, spans, chain.empty.pack(), list(chain.deferred))

    def chain(self) -> Chain:
        spans = [
            Span(it.prev, it.id, Evidence(it.facts, it.empty, it.unseen, it.skipped), it.edges, it.since)
            for it in self.pending
        ]
        deferred = [DeferredRange(*it) for it in self.deferred]
        return Chain(self.position, spans, self.refused, Intervals.unpack(self.empty), deferred)


class StoredWriter(msgspec.Struct, array_like=True, frozen=True, gc=False):
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
    """An active writer of which much is pending, as a row, and what a batch asks of it that has nothing to do with it:
    epoch, position and reach of its chain, the edges that wait and the gaps, the gap that is open longest, whether
    anything was put off, and when (ms) it was last seen.
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
    """An active writer by its chain: the position, and since when (ms) a gap of it is open, the longest; 0 for none.
    `seen` is the time (ms) of the batch that read its newest record."""

    position: int
    name: str
    epoch: int
    owing: int
    seen: int

    @classmethod
    def of(cls, name: str, writer: WriterState) -> "Straggler":
        owing = min((since for _, _, since in writer.chain.gaps()), default=0)
        return cls(writer.chain.position, name, writer.epoch, owing, writer.seen)


class _Name(msgspec.Struct, array_like=True, frozen=True, gc=False):
    name: str


_encoder = msgspec.msgpack.Encoder()
_names = msgspec.msgpack.Decoder(_Name)
_rows = msgspec.msgpack.Decoder(StoredWriter)

COLUMNS = np.dtype(
    [("length", "<u4"), ("uncertain", "?"), ("chain", "<i8"), ("position", "<i8"), ("retired", "<i8")], align=False
)
"""Of each row its bytes, whether anything may have been refused of its writer, the positions of its chain and its
writer, and when (ms) that one retired, 0 where it has not. What a column says of a writer goes before what its row
says."""


class PackedTable:
    """Writers by name, none of them with anything pending or put off. Never changes: `changed` gives a new one."""

    def __init__(self, columns: bytes = b"", rows: bytes = b"") -> None:
        self.columns = np.frombuffer(columns, COLUMNS)
        self.rows = rows

    def __len__(self) -> int:
        return len(self.columns)

    @cached_property
    def _ends(self) -> Ids:
        return np.cumsum(self.columns["length"], dtype=np.int64)

    def find(self, name: str) -> int | None:
        """Where the writer stands."""
        at = self._place(name)
        return at if at < len(self) and self.name(at) == name else None

    def name(self, at: int) -> str:
        return _names.decode(self._row(at)).name

    def writer(self, at: int) -> WriterState:
        writer = _rows.decode(self._row(at)).writer()
        if self.columns["uncertain"][at]:
            writer.chain.refuse(UNBOUNDED)
        return writer

    def doubted(self) -> "PackedTable":
        """All of them, marked as uncertain."""
        columns = self.columns.copy()
        columns["uncertain"] = True
        return PackedTable(columns.tobytes(), self.rows)

    def changed(self, gone: Collection[int], come: Mapping[str, WriterState]) -> "PackedTable":
        """Without the rows of `gone`, and with these writers: a step for each of them, and none for the others."""
        if not gone and not come:
            return self
        rows: list[bytes] = []
        columns: list[npt.NDArray[np.void]] = []
        added = [(self._place(name), 0, name) for name in sorted(come)]
        at = 0
        for place, width, name in sorted([*added, *((place, 1, "") for place in gone)]):
            rows.append(self.rows[self._start(at) : self._start(place)])
            columns.append(self.columns[at:place])
            if not width:
                writer = come[name]
                rows.append(_encoder.encode(StoredWriter.of(name, writer)))
                uncertain = writer.chain.refused == UNBOUNDED
                numbers = (len(rows[-1]), uncertain, writer.chain.position, writer.position, writer.retired or 0)
                columns.append(np.array([numbers], COLUMNS))
            at = place + width
        rows.append(self.rows[self._start(at) :])
        columns.append(self.columns[at:])
        return PackedTable(np.concatenate(columns).tobytes(), b"".join(rows))

    def _place(self, name: str) -> int:
        return bisect_left(range(len(self)), name, key=self.name)

    def _start(self, at: int) -> int:
        return int(self._ends[at - 1]) if at else 0

    def _row(self, at: int) -> bytes:
        return self.rows[self._start(at) : self._start(at + 1)]


EMPTY = PackedTable()
