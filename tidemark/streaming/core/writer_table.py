"""The joined writers of a stream: a few decoded, the others packed. Pure.

Writers are stored in four groups:

- A writer without pending spans is a row of a packed table, one for active and one for retired writers. Small tables
  are not worth their cost, so up to `UNPACKED_MAX` active writers are stored decoded.
- A writer with pending spans or deferred records is stored decoded.
- An active writer with `PACKED_SPANS_MIN` pending spans or more is stored as one encoded row (`WaitingWriter`).

A batch *opens* (decodes) the writers that it uses. All other writers stay encoded; the columns of a table have the
numbers that a batch needs about them (docs/design.md, rule 8).
"""

from bisect import bisect_left
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, MutableMapping
from functools import cached_property
from heapq import heapify, heappop, heappush, heapreplace, merge
from itertools import islice
from operator import attrgetter, itemgetter
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tidemark.streaming.core.chain import Chain, DeferredRange, Span
from tidemark.streaming.core.writers import WriterState
from tidemark.streaming.values.intervals import Ids, Intervals
from tidemark.streaming.values.limits import Evidence
from tidemark.streaming.wire.runs import UNBOUNDED, Mask

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
    """The encoded form of a `Chain`. `empty` is packed by `Intervals.pack`."""

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
    """The encoded form of a `WriterState`."""

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
    """An active writer with many pending spans: its encoded row, and the fields that a batch needs without decoding it.

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
        open_since: time (ms) at which its oldest gap opened; 0 without a gap.
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

- `length`: bytes of the row. - `uncertain`: True if any record of the writer may have been refused. Overrides the row.
- `chain`: position of the chain. - `position`: position of the writer. - `retired`: time (ms) at which the writer
retired; 0 if it is active.
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
            writer.chain.note_refused(UNBOUNDED)
        return writer

    def with_all_uncertain(self) -> "PackedTable":
        """A copy with all writers marked as uncertain."""
        columns = self.columns.copy()
        columns["uncertain"] = True
        return PackedTable(columns.tobytes(), self.rows)

    def changed(self, removed: Collection[int], added: Mapping[str, WriterState]) -> "PackedTable":
        """A copy without the rows `removed` and with the writers `added`.

        The cost depends on the number of changes; other rows are copied in blocks.
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


UNPACKED_MAX = 32
"""The largest number of active writers of a stream that are stored decoded. Beyond it, writers without pending spans
are packed.
"""

PACKED_SPANS_MIN = 32
"""The number of pending spans from which an active writer is stored encoded."""


class Writers(MutableMapping[str, WriterState]):
    """Joined writers by name.

    Reading one writer opens it. Iterating over all writers opens all of them. Code that makes a writer active again, or
    sets its chain back, must call `follow`.

    Attributes:
        open: writers that are decoded.
        waiting: active writers with many pending spans, encoded.
        opened: number of writers that were opened.
        before: for each open writer (epoch, is retired) at its opening.
        stored: the stored table of retired writers; None if it must be stored again.
    """

    def __init__(
        self,
        opened: Mapping[str, WriterState] | None = None,
        active: PackedTable | None = None,
        retired: PackedTable | None = None,
        waiting: Iterable[WaitingWriter] = (),
    ) -> None:
        self.open = dict(opened or {})
        self.waiting = {writer.name: writer for writer in waiting}
        self.opened = 0
        self.before = {name: (writer.epoch, writer.retired is not None) for name, writer in self.open.items()}
        self._active = _PackedWriters(active or EMPTY)
        self._retired = _PackedWriters(retired or EMPTY)
        self.stored: PackedTable | None = retired or EMPTY
        self._lowest: list[tuple[int, str]] | None = None
        """Heap of the open active writers by position. An entry may be too low, or of a writer that has retired."""

    def get(self, name: str, default: object = None) -> WriterState | None:  # type: ignore[override]
        return self.open.get(name) or self._open(name)

    def __getitem__(self, name: str) -> WriterState:
        writer = self.get(name)
        if writer is None:
            raise KeyError(name)
        return writer

    def __setitem__(self, name: str, writer: WriterState) -> None:
        self.get(name)
        self.open[name] = writer
        self.follow(name)

    def __delitem__(self, name: str) -> None:
        removed = self.open.pop(name, None) or self.waiting.pop(name, None)
        if removed is None and not (self._active.drop(name) or self._retired.drop(name)):
            raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter([*self.open, *self.waiting, *self._active.names(), *self._retired.names()])

    def __len__(self) -> int:
        return len(self.open) + len(self.waiting) + len(self._active) + len(self._retired)

    def follow(self, name: str) -> None:
        """Call this if a writer's chain was set back, or if the writer became active again."""
        if self._lowest is not None:
            heappush(self._lowest, (self.open[name].chain.position, name))

    def floor(self) -> int | None:
        """The lowest position of an active writer's chain; None if no writer is active."""
        if self._lowest is None:
            self._lowest = [
                (writer.chain.position, name) for name, writer in self.open.items() if writer.retired is None
            ]
            heapify(self._lowest)
        # Chains only advance unless `follow` is called, so an entry is never above its writer's position.
        while self._lowest:
            position, name = self._lowest[0]
            writer = self.open.get(name)
            if writer is None or writer.retired is not None:
                heappop(self._lowest)
            elif writer.chain.position > position:
                heapreplace(self._lowest, (writer.chain.position, name))
            else:
                break
        positions = [waiting.position for waiting in self.waiting.values()]
        if self._lowest:
            positions.append(self._lowest[0][0])
        if (packed := self._active.lowest()) is not None:
            positions.append(packed)
        return min(positions, default=None)

    def reach(self) -> int:
        """The highest ID that is settled on any chain."""
        waiting = (writer.reach for writer in self.waiting.values())
        opened = (writer.chain.reach for writer in self.open.values())
        return max([self._active.reach(), self._retired.reach(), *waiting, *opened])

    def stragglers(self, linear: int, most: int) -> tuple[list[Straggler], int]:
        """Active writers whose chains have not passed `linear`.

        Returns:
            Up to `most` of them, the lowest first, and their total number.
        """
        stragglers, more = self._active.stragglers(linear, most)
        stragglers += [
            Straggler.of(name, writer)
            for name, writer in self.open.items()
            if writer.retired is None and writer.chain.position <= linear
        ]
        stragglers += [
            Straggler(writer.position, writer.name, writer.epoch, writer.since, writer.seen)
            for writer in self.waiting.values()
            if writer.position <= linear
        ]
        return sorted(stragglers)[:most], len(stragglers) + more

    def beyond(self, id: int) -> Iterator[tuple[str, WriterState]]:
        """All writers that have settled an ID beyond `id`. May include others."""
        for packed in (self._active, self._retired):
            for name in packed.beyond(id):
                self._open(name)
        for name in [writer.name for writer in self.waiting.values() if writer.reach > id]:
            self._open(name)
        yield from self.open.items()

    def open_waiting(self) -> None:
        """Open all writers with many pending spans."""
        for name in [*self.waiting]:
            self._open(name)

    def mark_uncertain(self) -> None:
        """Mark all writers as uncertain."""
        self.open_waiting()
        for writer in self.open.values():
            writer.chain.note_refused(UNBOUNDED)
        self._active.mark_uncertain()
        self._retired.mark_uncertain()

    def expired(self, linear: int, most: int, before: int, touched: Container[str]) -> list[str]:
        """The names of retired writers to drop, in the order of retirement.

        Args:
            linear: only writers at or below this position are dropped.
            most: number of such writers to keep, the newest.
            before: writers that retired at this time (ms) or earlier are dropped too.
            touched: writers that the batch has touched, which are kept.
        """
        opened = sorted(
            (writer.retired, name)
            for name, writer in self.open.items()
            if writer.retired is not None and writer.position <= linear and name not in touched
        )
        if not opened and not len(self._retired):
            return []
        packed, times = self._retired.passed(linear)
        too_old = int(np.count_nonzero(times <= before)) + sum(since <= before for since, _ in opened)
        count = max(too_old, len(opened) + len(packed) - most)
        if count <= 0:
            return []
        first = np.argsort(times, kind="stable")[:count]
        retired = ((int(times[index]), self._retired.name(int(packed[index]))) for index in first)
        return [name for _, name in islice(merge(retired, opened), count)]

    def packed(self) -> tuple[dict[str, WriterState], PackedTable, PackedTable, list[WaitingWriter]]:
        """The four groups, as arguments of a new `Writers`: decoded, active, retired and waiting."""
        decoded, active, retired, waiting = {}, {}, {}, dict(self.waiting)
        for name, writer in sorted(self.open.items()):
            if len(writer.chain.pending) >= PACKED_SPANS_MIN and writer.retired is None:
                waiting[name] = WaitingWriter.of(name, writer)
            elif writer.chain.pending or writer.chain.deferred:
                decoded[name] = writer
            elif writer.retired is None:
                active[name] = writer
            else:
                retired[name] = writer
        if len(active) + len(self._active) <= UNPACKED_MAX:
            if len(self._active):
                active |= self._active.unpacked()
            decoded, table = dict(sorted((decoded | active).items())), EMPTY
        else:
            table = self._active.with_added(active)
        return decoded, table, self._retired.with_added(retired), sorted(waiting.values(), key=attrgetter("name"))

    def _open(self, name: str) -> WriterState | None:
        waiting = self.waiting.pop(name, None)
        writer = waiting.writer() if waiting else self._active.take(name) or self._retired.take(name)
        if writer is not None:
            self.opened += 1
            self.open[name] = writer
            self.before[name] = writer.epoch, writer.retired is not None
            if writer.retired is None:
                self.follow(name)
        return writer


_NO_ROWS: Ids = np.empty(0, np.int64)


class _PackedWriters:
    """The rows of a table that were neither opened nor dropped."""

    def __init__(self, table: PackedTable) -> None:
        self._table = table
        self._removed: set[int] = set()
        self._order: Ids | None = None
        """Rows by position, ascending; None until `lowest` is asked for."""
        self._lowest = 0

    def __len__(self) -> int:
        return len(self._table) - len(self._removed)

    def names(self) -> list[str]:
        return [self.name(row) for row in self._rows().tolist()]

    def name(self, row: int) -> str:
        return self._table.name(row)

    def take(self, name: str) -> WriterState | None:
        """Remove and return a writer."""
        row = self._find(name)
        if row is None:
            return None
        self._removed.add(row)
        return self._table.writer(row)

    def drop(self, name: str) -> bool:
        """Remove a writer. Returns False if the name is unknown."""
        row = self._find(name)
        if row is not None:
            self._removed.add(row)
        return row is not None

    def lowest(self) -> int | None:
        """The lowest position of a chain; None if there are no rows."""
        if not len(self):
            return None
        chains = self._table.columns["chain"]
        if self._order is None:
            self._order = np.argsort(chains)
        while int(self._order[self._lowest]) in self._removed:
            self._lowest += 1
        return int(chains[self._order[self._lowest]])

    def reach(self) -> int:
        """The highest position of a chain."""
        return int(self._column("chain").max()) if len(self) else 0

    def stragglers(self, linear: int, most: int) -> tuple[list[Straggler], int]:
        """Writers whose chains have not passed `linear`.

        Returns:
            Up to `most` of them, by position and name, and the number of the others.
        """
        if not len(self):
            return [], 0
        chains = self._column("chain")
        rows, positions = self._rows()[chains <= linear], chains[chains <= linear]
        if more := max(0, len(rows) - most):
            highest = np.partition(positions, most - 1)[most - 1]
            below = rows[positions < highest]
            rows = np.concatenate((below, rows[positions == highest][: most - len(below)]))
        return [Straggler.of(self.name(row), self._table.writer(row)) for row in rows.tolist()], more

    def beyond(self, id: int) -> list[str]:
        """Names of writers whose chains are beyond `id`."""
        if not len(self):
            return []
        return [self.name(row) for row in self._rows()[self._column("chain") > id].tolist()]

    def passed(self, linear: int) -> tuple[Ids, Ids]:
        """Rows of writers at or below `linear`, and the times (ms) at which they retired."""
        if not len(self):
            return _NO_ROWS, _NO_ROWS
        passed = self._column("position") <= linear
        return self._rows()[passed], self._column("retired")[passed]

    def mark_uncertain(self) -> None:
        if len(self):
            self._table = self._table.with_all_uncertain()

    def with_added(self, added: Mapping[str, WriterState]) -> PackedTable:
        """A copy of the table without the removed rows, and with the writers `added`."""
        return self._table.changed(self._removed, added)

    def unpacked(self) -> dict[str, WriterState]:
        return {self.name(row): self._table.writer(row) for row in self._rows().tolist()}

    def _find(self, name: str) -> int | None:
        row = self._table.find(name)
        return None if row is None or row in self._removed else row

    def _rows(self) -> Ids:
        return np.flatnonzero(self._remaining()) if self._removed else np.arange(len(self._table))

    def _column(self, name: str) -> Ids:
        column: Ids = self._table.columns[name]
        return column[self._remaining()] if self._removed else column

    def _remaining(self) -> Mask:
        remaining = np.ones(len(self._table), np.bool_)
        remaining[list(self._removed)] = False
        return remaining
