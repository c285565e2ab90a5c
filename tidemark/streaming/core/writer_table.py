"""The joined writers of a stream: a few decoded, the others packed. Pure.

Writers are stored in four groups:

- Active writers without pending spans and deferred records are rows of a packed table. A small table is not worth its
  cost: if a stream has at most `UNPACKED_MAX` of these writers, they are stored decoded.
- Retired writers without pending spans and deferred records are rows of another packed table.
- An active writer with `PACKED_SPANS_MIN` or more pending spans is stored as one encoded row (`WaitingWriter`).
- All other writers are stored decoded.

A batch decodes the writers that it uses. All other writers stay encoded. The columns of a table have the numbers of
these writers that every batch needs (docs/design.md, rule 8).
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
"""Encoded `Intervals` as `(low, high)`, or `LinearPosition.heads` as `(head, since)`."""


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
    """The encoded form of a `Chain`. `empty_ranges` is packed by `Intervals.pack`."""

    position: int
    uncertain_up_to: int
    pending: list[_Span]
    empty_ranges: bytes
    deferred: list[tuple[int, int, int]]

    @classmethod
    def of(cls, chain: Chain) -> "StoredChain":
        spans = [
            _Span(span.prev, span.id, *span.evidence.counts, span.edge_count, span.since) for span in chain.pending
        ]
        return cls(chain.position, chain.uncertain_up_to, spans, chain.empty_ranges.pack(), list(chain.deferred))

    def decode(self) -> Chain:
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
        return Chain(self.position, spans, self.uncertain_up_to, Intervals.unpack(self.empty_ranges), deferred)


class StoredWriter(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The encoded form of a `WriterState`."""

    name: str
    epoch: int
    chain: StoredChain
    retired_at: int | None
    late_ranges: Pairs
    published_position: int
    timeline_number: int
    start_token: str | None
    last_seen: int
    join_crc: int

    @classmethod
    def of(cls, name: str, writer: WriterState) -> "StoredWriter":
        return cls(
            name,
            writer.epoch,
            StoredChain.of(writer.chain),
            writer.retired_at,
            list(writer.late_ranges),
            writer.published_position,
            writer.timeline_number,
            writer.start_token,
            writer.last_seen,
            writer.join_crc,
        )

    @property
    def position(self) -> int:
        return max(self.chain.position, self.published_position)

    def decode(self) -> WriterState:
        return WriterState(
            self.epoch,
            self.chain.decode(),
            self.retired_at,
            Intervals.of(self.late_ranges),
            self.published_position,
            self.timeline_number,
            self.start_token,
            self.last_seen,
            self.join_crc,
        )


class WaitingWriter(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An active writer with many pending spans: its encoded row, and the fields that a batch needs without decoding it.

    Attributes:
        position: position of the chain.
        highest_settled: the highest settled ID of the chain.
        pending_edges: number of completed edges above the position.
        gap_count: number of gaps, which is also the number of pending spans.
        low: lower end of the oldest gap.
        top: upper end of the oldest gap.
        since: time (ms) at which the oldest gap appeared.
        row: the encoded `StoredWriter`.
        has_deferred: True if records of the writer are deferred.
        last_seen: time (ms) of the batch that read the writer's newest record; 0 if unknown.
    """

    name: str
    epoch: int
    position: int
    highest_settled: int
    pending_edges: int
    gap_count: int
    low: int
    top: int
    since: int
    row: bytes
    has_deferred: bool
    last_seen: int

    @classmethod
    def of(cls, name: str, writer: WriterState) -> "WaitingWriter":
        chain = writer.chain
        oldest = min(chain.gaps(), key=itemgetter(2))
        row = _encoder.encode(StoredWriter.of(name, writer))
        edges, gaps, deferred = chain.pending_edges, len(chain.pending), bool(chain.deferred)
        return cls(
            name,
            writer.epoch,
            chain.position,
            chain.highest_settled,
            edges,
            gaps,
            *oldest,
            row,
            deferred,
            writer.last_seen,
        )

    def decode(self) -> WriterState:
        return _row_decoder.decode(self.row).decode()


class BlockingWriter(NamedTuple):
    """An active writer that blocks the linear position. Sorts by `position`.

    Attributes:
        position: position of the writer's chain.
        open_since: time (ms) at which the oldest gap of the writer appeared; 0 if there is no gap.
        last_seen: time (ms) of the batch that read the writer's newest record; 0 if unknown.
    """

    position: int
    name: str
    epoch: int
    open_since: int
    last_seen: int

    @classmethod
    def of(cls, name: str, writer: WriterState) -> "BlockingWriter":
        open_since = min((since for _, _, since in writer.chain.gaps()), default=0)
        return cls(writer.chain.position, name, writer.epoch, open_since, writer.last_seen)


class _Name(msgspec.Struct, array_like=True, frozen=True, gc=False):
    name: str


_encoder = msgspec.msgpack.Encoder()
_name_decoder = msgspec.msgpack.Decoder(_Name)
_row_decoder = msgspec.msgpack.Decoder(StoredWriter)

COLUMNS = np.dtype(
    [("length", "<u4"), ("uncertain", "?"), ("chain", "<i8"), ("position", "<i8"), ("retired", "<i8")], align=False
)
"""The columns of a table.

- `length`: size of the row in bytes.
- `uncertain`: if True, the writer's `Chain.uncertain_up_to` is UNBOUNDED, and the row's value is ignored.
- `chain`: position of the chain.
- `position`: position of the writer.
- `retired`: time (ms) at which the writer retired; 0 if it is active.
"""


class PackedTable:
    """An immutable table of writers without pending spans and deferred records, sorted by name.

    `columns`: the numbers of all writers (`COLUMNS`). `rows`: the encoded `StoredWriter` of all writers, joined.
    """

    def __init__(self, columns: bytes = b"", rows: bytes = b"") -> None:
        self.columns = np.frombuffer(columns, COLUMNS)
        self.rows = rows

    def __len__(self) -> int:
        return len(self.columns)

    @cached_property
    def _ends(self) -> Ids:
        return np.cumsum(self.columns["length"], dtype=np.int64)

    def find(self, name: str) -> int | None:
        """The row number of the writer; None if the table has no writer of this name."""
        row = self._insertion_row(name)
        return row if row < len(self) and self.name(row) == name else None

    def name(self, row: int) -> str:
        return _name_decoder.decode(self._row_bytes(row)).name

    def writer(self, row: int) -> WriterState:
        writer = _row_decoder.decode(self._row_bytes(row)).decode()
        if self.columns["uncertain"][row]:
            writer.chain.mark_uncertain_up_to(UNBOUNDED)
        return writer

    def with_all_uncertain(self) -> "PackedTable":
        """A copy with all writers marked as uncertain."""
        columns = self.columns.copy()
        columns["uncertain"] = True
        return PackedTable(columns.tobytes(), self.rows)

    def with_changes(self, removed_rows: Collection[int], added_writers: Mapping[str, WriterState]) -> "PackedTable":
        """A copy without the rows with the numbers `removed_rows`, and with the writers `added_writers`.

        The number of Python steps depends on the number of changes only: other rows are copied in blocks.
        """
        if not removed_rows and not added_writers:
            return self
        rows: list[bytes] = []
        columns: list[npt.NDArray[np.void]] = []
        insertions = [(self._insertion_row(name), 0, name) for name in sorted(added_writers)]
        start = 0
        for row, width, name in sorted([*insertions, *((row, 1, "") for row in removed_rows)]):
            rows.append(self.rows[self._start(start) : self._start(row)])
            columns.append(self.columns[start:row])
            if not width:
                writer = added_writers[name]
                rows.append(_encoder.encode(StoredWriter.of(name, writer)))
                uncertain = writer.chain.uncertain_up_to == UNBOUNDED
                numbers = (len(rows[-1]), uncertain, writer.chain.position, writer.position, writer.retired_at or 0)
                columns.append(np.array([numbers], COLUMNS))
            start = row + width
        rows.append(self.rows[self._start(start) :])
        columns.append(self.columns[start:])
        return PackedTable(np.concatenate(columns).tobytes(), b"".join(rows))

    def _insertion_row(self, name: str) -> int:
        """The row number of the writer, or the row number at which the writer would be inserted."""
        return bisect_left(range(len(self)), name, key=self.name)

    def _start(self, row: int) -> int:
        return int(self._ends[row - 1]) if row else 0

    def _row_bytes(self, row: int) -> bytes:
        return self.rows[self._start(row) : self._start(row + 1)]


EMPTY_TABLE = PackedTable()


UNPACKED_MAX = 32
"""If a stream has more active writers without pending spans and deferred records than this, all of them are packed."""

PACKED_SPANS_MIN = 32
"""An active writer with this many pending spans or more is stored encoded."""


class Writers(MutableMapping[str, WriterState]):
    """Joined writers by name.

    `get`, `[]` and `in` decode the writer. `values` and `items` decode all writers. Code that makes a writer active
    again, or sets its chain back, must call `refresh_floor`.

    Attributes:
        decoded: writers that are decoded.
        waiting: active writers with many pending spans, encoded.
        decode_count: number of writers that were decoded on demand, for tests.
        before_batch: name -> epoch before the batch, and whether the writer was retired; for decoded writers only.
        stored_retired: the table of retired writers that is stored; None if the table must be stored again.
    """

    def __init__(
        self,
        decoded: Mapping[str, WriterState] | None = None,
        active: PackedTable | None = None,
        retired: PackedTable | None = None,
        waiting: Iterable[WaitingWriter] = (),
    ) -> None:
        self.decoded = dict(decoded or {})
        self.waiting = {writer.name: writer for writer in waiting}
        self.decode_count = 0
        self.before_batch = {
            name: (writer.epoch, writer.retired_at is not None) for name, writer in self.decoded.items()
        }
        self._active = _PackedWriters(active or EMPTY_TABLE)
        self._retired = _PackedWriters(retired or EMPTY_TABLE)
        self.stored_retired: PackedTable | None = retired or EMPTY_TABLE
        self._floor_heap: list[tuple[int, str]] | None = None
        """Heap of the decoded active writers by position. An entry may be too low, or of a writer that was removed."""

    def get(self, name: str, default: object = None) -> WriterState | None:  # type: ignore[override]
        return self.decoded.get(name) or self._decode(name)

    def __getitem__(self, name: str) -> WriterState:
        writer = self.get(name)
        if writer is None:
            raise KeyError(name)
        return writer

    def __setitem__(self, name: str, writer: WriterState) -> None:
        self.get(name)
        self.decoded[name] = writer
        self.refresh_floor(name)

    def __delitem__(self, name: str) -> None:
        removed = self.decoded.pop(name, None) or self.waiting.pop(name, None)
        if removed is None and not (self._active.drop(name) or self._retired.drop(name)):
            raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter([*self.decoded, *self.waiting, *self._active.names(), *self._retired.names()])

    def __len__(self) -> int:
        return len(self.decoded) + len(self.waiting) + len(self._active) + len(self._retired)

    def refresh_floor(self, name: str) -> None:
        """Update `floor` for a writer whose chain was set back, or that became active again."""
        if self._floor_heap is not None:
            heappush(self._floor_heap, (self.decoded[name].chain.position, name))

    def floor(self) -> int | None:
        """The lowest position of the chains of active writers; None if no writer is active."""
        if self._floor_heap is None:
            self._floor_heap = [
                (writer.chain.position, name) for name, writer in self.decoded.items() if writer.retired_at is None
            ]
            heapify(self._floor_heap)
        # Chains only advance unless `refresh_floor` is called, so an entry is never above its writer's position.
        while self._floor_heap:
            position, name = self._floor_heap[0]
            writer = self.decoded.get(name)
            if writer is None or writer.retired_at is not None:
                heappop(self._floor_heap)
            elif writer.chain.position > position:
                heapreplace(self._floor_heap, (writer.chain.position, name))
            else:
                break
        positions = [waiting.position for waiting in self.waiting.values()]
        if self._floor_heap:
            positions.append(self._floor_heap[0][0])
        if (packed := self._active.lowest_position()) is not None:
            positions.append(packed)
        return min(positions, default=None)

    def highest_settled(self) -> int:
        """The highest ID that is settled on any chain."""
        waiting = (writer.highest_settled for writer in self.waiting.values())
        decoded = (writer.chain.highest_settled for writer in self.decoded.values())
        return max([self._active.highest_position(), self._retired.highest_position(), *waiting, *decoded])

    def blocking_writers(self, linear: int, limit: int) -> tuple[list[BlockingWriter], int]:
        """Find the active writers whose chains are at or below the linear position `linear`.

        Returns:
            The writers with the lowest positions, ascending, at most `limit`; and the number of all such writers.
        """
        blocking_writers, more = self._active.blocking_writers(linear, limit)
        blocking_writers += [
            BlockingWriter.of(name, writer)
            for name, writer in self.decoded.items()
            if writer.retired_at is None and writer.chain.position <= linear
        ]
        blocking_writers += [
            BlockingWriter(writer.position, writer.name, writer.epoch, writer.since, writer.last_seen)
            for writer in self.waiting.values()
            if writer.position <= linear
        ]
        return sorted(blocking_writers)[:limit], len(blocking_writers) + more

    def find_beyond(self, id: int) -> Iterator[tuple[str, WriterState]]:
        """Decode and yield all writers that have settled an ID beyond `id`. May yield other writers too."""
        for packed in (self._active, self._retired):
            for name in packed.names_beyond(id):
                self._decode(name)
        for name in [writer.name for writer in self.waiting.values() if writer.highest_settled > id]:
            self._decode(name)
        yield from self.decoded.items()

    def decode_waiting(self) -> None:
        """Decode all writers of `waiting`."""
        for name in [*self.waiting]:
            self._decode(name)

    def mark_uncertain(self) -> None:
        """Mark all IDs of all writers as uncertain (`Chain.uncertain_up_to`)."""
        self.decode_waiting()
        for writer in self.decoded.values():
            writer.chain.mark_uncertain_up_to(UNBOUNDED)
        self._active.mark_uncertain()
        self._retired.mark_uncertain()

    def find_expired(self, linear: int, keep: int, retired_before: int, touched: Container[str]) -> list[str]:
        """The names of the retired writers to drop, in the order of retirement. Does not drop them.

        Args:
            linear: the linear position. A writer beyond this position is not dropped, and does not count for `keep`.
            keep: the largest number of writers to keep. If there are more, those that retired first are dropped.
            retired_before: writers that retired at this time (ms) or earlier are dropped.
            touched: writers that the batch has touched. They are not dropped, and do not count for `keep`.
        """
        decoded = sorted(
            (writer.retired_at, name)
            for name, writer in self.decoded.items()
            if writer.retired_at is not None and writer.position <= linear and name not in touched
        )
        if not decoded and not len(self._retired):
            return []
        packed, times = self._retired.retired_up_to(linear)
        too_old = int(np.count_nonzero(times <= retired_before)) + sum(since <= retired_before for since, _ in decoded)
        count = max(too_old, len(decoded) + len(packed) - keep)
        if count <= 0:
            return []
        first = np.argsort(times, kind="stable")[:count]
        retired = ((int(times[index]), self._retired.name(int(packed[index]))) for index in first)
        return [name for _, name in islice(merge(retired, decoded), count)]

    def pack(self) -> tuple[dict[str, WriterState], PackedTable, PackedTable, list[WaitingWriter]]:
        """Return the four groups as arguments of a new `Writers`: decoded, active, retired and waiting writers."""
        decoded, active, retired, waiting = {}, {}, {}, dict(self.waiting)
        for name, writer in sorted(self.decoded.items()):
            if len(writer.chain.pending) >= PACKED_SPANS_MIN and writer.retired_at is None:
                waiting[name] = WaitingWriter.of(name, writer)
            elif writer.chain.pending or writer.chain.deferred:
                decoded[name] = writer
            elif writer.retired_at is None:
                active[name] = writer
            else:
                retired[name] = writer
        if len(active) + len(self._active) <= UNPACKED_MAX:
            if len(self._active):
                active |= self._active.unpack()
            decoded, table = dict(sorted((decoded | active).items())), EMPTY_TABLE
        else:
            table = self._active.with_added(active)
        return decoded, table, self._retired.with_added(retired), sorted(waiting.values(), key=attrgetter("name"))

    def _decode(self, name: str) -> WriterState | None:
        waiting = self.waiting.pop(name, None)
        writer = waiting.decode() if waiting else self._active.pop(name) or self._retired.pop(name)
        if writer is not None:
            self.decode_count += 1
            self.decoded[name] = writer
            self.before_batch[name] = writer.epoch, writer.retired_at is not None
            if writer.retired_at is None:
                self.refresh_floor(name)
        return writer


_NO_ROWS: Ids = np.empty(0, np.int64)


class _PackedWriters:
    """A table of writers, without the rows that were decoded or dropped since the table was loaded."""

    def __init__(self, table: PackedTable) -> None:
        self._table = table
        self._removed_rows: set[int] = set()
        self._rows_by_position: Ids | None = None
        """Row numbers, sorted by position; None before the first call of `lowest_position`."""
        self._lowest_index = 0

    def __len__(self) -> int:
        return len(self._table) - len(self._removed_rows)

    def names(self) -> list[str]:
        return [self.name(row) for row in self._rows().tolist()]

    def name(self, row: int) -> str:
        return self._table.name(row)

    def pop(self, name: str) -> WriterState | None:
        """Remove the row of a writer, and return the decoded writer. None if the name is unknown."""
        row = self._find(name)
        if row is None:
            return None
        self._removed_rows.add(row)
        return self._table.writer(row)

    def drop(self, name: str) -> bool:
        """Remove the row of a writer. Returns False if the name is unknown."""
        row = self._find(name)
        if row is not None:
            self._removed_rows.add(row)
        return row is not None

    def lowest_position(self) -> int | None:
        """The lowest position of the writers' chains; None if there are no rows."""
        if not len(self):
            return None
        chains = self._table.columns["chain"]
        if self._rows_by_position is None:
            self._rows_by_position = np.argsort(chains)
        while int(self._rows_by_position[self._lowest_index]) in self._removed_rows:
            self._lowest_index += 1
        return int(chains[self._rows_by_position[self._lowest_index]])

    def highest_position(self) -> int:
        """The highest position of the writers' chains; 0 if there are no rows."""
        return int(self._column("chain").max()) if len(self) else 0

    def blocking_writers(self, linear: int, limit: int) -> tuple[list[BlockingWriter], int]:
        """Find the writers whose chains are at or below `linear`.

        Returns:
            The writers with the lowest positions, unsorted, at most `limit`; and how many writers were left out.
        """
        if not len(self):
            return [], 0
        chains = self._column("chain")
        rows, positions = self._rows()[chains <= linear], chains[chains <= linear]
        if more := max(0, len(rows) - limit):
            highest = np.partition(positions, limit - 1)[limit - 1]
            below = rows[positions < highest]
            rows = np.concatenate((below, rows[positions == highest][: limit - len(below)]))
        return [BlockingWriter.of(self.name(row), self._table.writer(row)) for row in rows.tolist()], more

    def names_beyond(self, id: int) -> list[str]:
        """The names of writers whose chains are beyond `id`."""
        if not len(self):
            return []
        return [self.name(row) for row in self._rows()[self._column("chain") > id].tolist()]

    def retired_up_to(self, linear: int) -> tuple[Ids, Ids]:
        """The row numbers of the writers with a position up to `linear`, and the times (ms) at which they retired."""
        if not len(self):
            return _NO_ROWS, _NO_ROWS
        passed = self._column("position") <= linear
        return self._rows()[passed], self._column("retired")[passed]

    def mark_uncertain(self) -> None:
        if len(self):
            self._table = self._table.with_all_uncertain()

    def with_added(self, added_writers: Mapping[str, WriterState]) -> PackedTable:
        """A copy of the table without the removed rows, and with the writers `added_writers`."""
        return self._table.with_changes(self._removed_rows, added_writers)

    def unpack(self) -> dict[str, WriterState]:
        return {self.name(row): self._table.writer(row) for row in self._rows().tolist()}

    def _find(self, name: str) -> int | None:
        row = self._table.find(name)
        return None if row is None or row in self._removed_rows else row

    def _rows(self) -> Ids:
        return np.flatnonzero(self._remaining()) if self._removed_rows else np.arange(len(self._table))

    def _column(self, name: str) -> Ids:
        column: Ids = self._table.columns[name]
        return column[self._remaining()] if self._removed_rows else column

    def _remaining(self) -> Mask:
        remaining = np.ones(len(self._table), np.bool_)
        remaining[list(self._removed_rows)] = False
        return remaining
