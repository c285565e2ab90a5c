"""Packets and runs: the form in which compaction passes records to the state function. Pure.

A packet has records of one offset range and one shard. A run is a chain of edges of one writer and epoch. All edges of
a run are in one *segment*: between two neighbouring JOIN, RETIRE or OPEN records of the stream.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.intervals import NO_INTERVALS, Ids, Intervals
from tidemark.streaming.values.limits import Evidence, RejectedRecords
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import MAX_ID, DatabaseStart, Kind, Topic

_RUN_FIELDS = "epoch", "direction", "start", "stop", "first_offset", "last_offset", "oldest", "newest"
RUN_DTYPE = np.dtype([(name, "<i8") for name in _RUN_FIELDS])
"""The numeric fields of a run, as one row of an array. `stop` is the index after the run's last edge in the list of the
edges of all runs. The other fields have the same meaning as in `PackedRun`.
"""


class PackedRun(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An encoded run. Its edges are in the order of their IDs, which may not be the order of their offsets.

    Attributes:
        epoch: the epoch of the writer.
        direction: the sign of the IDs, as the number of a `Direction`. All IDs of the run are magnitudes.
        start: the `prev` of the first edge.
        ids: the IDs of the edges, as little-endian int64.
        kinds: the kinds of the edges, as uint8.
        offsets: the Kafka offsets of the edges minus `first_offset`, as little-endian uint32.
        first_offset: the lowest offset.
        last_offset: the highest offset.
        oldest: the lowest Kafka time of the records, ms since 1970.
        newest: the highest Kafka time of the records, ms since 1970.
    """

    stream: str
    writer: str
    epoch: int
    direction: int  # a number, so that the garbage collector can skip runs
    start: int
    ids: bytes
    kinds: bytes
    offsets: bytes
    first_offset: int
    last_offset: int
    oldest: int
    newest: int


class PackedColumn(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Encoded numbers, one for each edge of a packet.

    The JVM copies packets several times, so packets are small. All integers are little-endian and unsigned, with the
    fewest of 1, 2, 4 and 8 bytes that fit all integers of the field.

    Attributes:
        width: the number of bytes of an integer in `values`.
        values: the numbers. If `repeats` is not empty, equal numbers of neighbouring edges are stored once.
        repeats: for each number in `values`, how many edges have it; empty if each number is for one edge.
    """

    width: int = 1
    values: bytes = b""
    repeats: bytes = b""

    @classmethod
    def of(cls, numbers: npt.NDArray[np.unsignedinteger]) -> "PackedColumn":
        """Encode at least one number."""
        is_change = numbers[1:] != numbers[:-1]
        if _MIN_REPEATS * (int(np.count_nonzero(is_change)) + 1) > len(numbers):
            return cls(*_narrow(numbers))
        firsts = np.concatenate(([0], np.flatnonzero(is_change) + 1))
        _, repeats = _narrow(np.diff(firsts, append=len(numbers)).view(np.uint64))
        return cls(*_narrow(numbers[firsts]), repeats)

    def decode(self) -> npt.NDArray[np.unsignedinteger]:
        numbers = np.frombuffer(self.values, f"<u{self.width}")
        if not self.repeats:
            return numbers
        return np.repeat(numbers, np.frombuffer(self.repeats, f"<u{len(self.repeats) // len(numbers)}"))


_MIN_REPEATS = 4  # equal numbers are stored once if each is for at least this many neighbouring edges on average


class PackedRuns(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The encoded runs of a packet. The edges of all runs are one after the other.

    Attributes:
        streams: the stream of each run.
        writers: the writer of each run.
        numbers: the numeric fields of each run, as an array of `RUN_DTYPE`.
        steps: for each edge its ID minus the ID before it in the run, or minus `start` if the edge is the first.
        kinds: the kind of each edge.
        offsets: for each edge its Kafka offset minus `first_offset`.
    """

    streams: list[str] = []
    writers: list[str] = []
    numbers: bytes = b""
    steps: PackedColumn = PackedColumn()
    kinds: PackedColumn = PackedColumn()
    offsets: PackedColumn = PackedColumn()

    @classmethod
    def of(cls, runs: Iterable[PackedRun]) -> "PackedRuns":
        """Join encoded runs, in the given order."""
        run_list = [*runs]
        stops = np.cumsum([len(run.kinds) for run in run_list], dtype=np.int64).tolist()
        rows = [
            (run.epoch, run.direction, run.start, stop, run.first_offset, run.last_offset, run.oldest, run.newest)
            for run, stop in zip(run_list, stops, strict=True)
        ]
        columns = RunColumns(
            [run.stream for run in run_list],
            [run.writer for run in run_list],
            np.array(rows, RUN_DTYPE),
            np.frombuffer(b"".join(run.ids for run in run_list), "<i8"),
            np.frombuffer(b"".join(run.kinds for run in run_list), np.uint8),
            np.frombuffer(b"".join(run.offsets for run in run_list), "<u4"),
        )
        return columns.pack(0, len(columns))

    def __len__(self) -> int:
        return len(self.streams)

    def __iter__(self) -> Iterator[PackedRun]:
        columns = RunColumns.of([self])
        return map(columns.run, range(len(self)))


def _narrow(numbers: npt.NDArray[np.unsignedinteger]) -> tuple[int, bytes]:
    """Return the smallest width in bytes that fits all numbers, and the numbers encoded with that width."""
    bits = int(numbers.max()).bit_length()
    width = 1 if bits <= 8 else 2 if bits <= 16 else 4 if bits <= 32 else 8
    return width, numbers.astype(f"<u{width}").tobytes()


def _join(columns: Iterable[PackedColumn], dtype: str) -> npt.NDArray[Any]:
    """Decode and concatenate columns of packets."""
    arrays = [column.decode() for column in columns]
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="unsafe")


@dataclass(frozen=True, slots=True)
class RunColumns:
    """The runs of one or several packets as columns. IDs are magnitudes.

    Attributes:
        streams: the stream of each run.
        writers: the writer of each run.
        rows: the numeric fields of each run (`RUN_DTYPE`).
        ids: the ID of each edge of all runs, one run after the other.
        kinds: the kind of each edge.
        offsets: the Kafka offset of each edge, relative to the `first_offset` of its run.
    """

    streams: list[str]
    writers: list[str]
    rows: npt.NDArray[np.void]
    ids: Ids
    kinds: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, parts: Sequence[PackedRuns]) -> Self:
        """Decode the runs of packets, and join them in the given order."""
        rows = np.frombuffer(b"".join([part.numbers for part in parts]), RUN_DTYPE).copy()
        runs = np.array([len(part) for part in parts if part], np.int64)
        edges = rows["stop"][np.cumsum(runs) - 1]
        rows["stop"] += np.repeat(np.cumsum(edges) - edges, runs)
        return cls(
            [name for part in parts for name in part.streams],
            [name for part in parts for name in part.writers],
            rows,
            _ids(rows, _join([part.steps for part in parts], "<i8")),
            _join([part.kinds for part in parts], "<u1"),
            _join([part.offsets for part in parts], "<u4"),
        )

    def __len__(self) -> int:
        return len(self.streams)

    @property
    def begins(self) -> Ids:
        """The index of the first edge of each run."""
        return _begins(self.rows)

    def run(self, index: int) -> PackedRun:
        """Encode the run at `index`."""
        epoch, direction, start, stop, *offsets_and_times = self.rows[index].item()
        begin = int(self.rows["stop"][index - 1]) if index else 0
        return PackedRun(
            self.streams[index],
            self.writers[index],
            epoch,
            direction,
            start,
            self.ids[begin:stop].tobytes(),
            self.kinds[begin:stop].tobytes(),
            self.offsets[begin:stop].tobytes(),
            *offsets_and_times,
        )

    def pack(self, first: int, stop: int) -> PackedRuns:
        """Encode the runs `first .. stop - 1`."""
        if first == stop:
            return PackedRuns()
        rows = self.rows[first:stop].copy()
        begin, end = int(self.rows["stop"][first - 1]) if first else 0, int(rows["stop"][-1])
        rows["stop"] -= begin
        ids, begins = self.ids[begin:end], _begins(rows)
        steps = np.diff(ids, prepend=0)
        steps[begins] = ids[begins] - rows["start"]
        return PackedRuns(
            self.streams[first:stop],
            self.writers[first:stop],
            rows.tobytes(),
            PackedColumn.of(steps.view(np.uint64)),
            PackedColumn.of(self.kinds[begin:end]),
            PackedColumn.of(self.offsets[begin:end]),
        )

    def divide(self, groups: Ids, max_edges: int) -> Iterator[tuple[int, PackedRuns]]:
        """Divide the runs into parts for packets. A part has runs of one group only, and runs are not split.

        Args:
            groups: for each run the number of its group, ascending.
            max_edges: the largest number of edges of a part. A single run with more edges is a part of its own.

        Yields:
            The number of a group, and encoded runs of the group.
        """
        stops = self.rows["stop"]
        first = edges = 0
        while first < len(self):
            group = int(groups[first])
            full = max(int(np.searchsorted(stops, edges + max_edges, side="right")), first + 1)
            stop = min(full, int(np.searchsorted(groups, group, side="right")))
            yield group, self.pack(first, stop)
            first, edges = stop, int(stops[stop - 1])


def _begins(rows: npt.NDArray[np.void]) -> Ids:
    begins = np.zeros(len(rows), np.int64)
    begins[1:] = rows["stop"][:-1]
    return begins


def _ids(rows: npt.NDArray[np.void], steps: Ids) -> Ids:
    """The ID of each edge, from the `steps` of `PackedRuns`. Writes the IDs into the array `steps` and returns it."""
    begins = _begins(rows)
    ids = np.cumsum(steps, out=steps)
    sums_before = ids[begins - 1]
    sums_before[:1] = 0
    # A sum over many runs may overflow. The difference of two sums is still right.
    ids += np.repeat(rows["start"] - sums_before, np.diff(rows["stop"], prepend=0))
    return ids


RDATA, VOID, POSITION = map(int, (Kind.RDATA, Kind.VOID, Kind.POSITION))
"""Codes in `Run.kinds`. Plain integers, because enum members make numpy ten times slower."""

UNBOUNDED = MAX_ID
"""The highest ID of the facts in rejected records (`PossibleFacts.reach`), if that ID is not known."""


class BatchRows(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Batch rows (`records.ROW`) of one writer and epoch. Batch rows are counted, but move no position.

    `offsets` are the Kafka offsets minus `first_offset`, ascending, as little-endian uint32.
    """

    stream: str
    writer: str
    epoch: int
    offsets: bytes
    first_offset: int
    last_offset: int


class Marker(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A JOIN, RETIRE, SKIP or OPEN. IDs are magnitudes.

    Attributes:
        epoch: `CURRENT_EPOCH` if an operator's record named no epoch.
        prev: 0 except for a SKIP.
        id: 0 for an OPEN.
        direction: the sign of the IDs; `UNKNOWN` if `id` is 0, and `published` is 0 or None.
        unseen: see `records.Join`; False for other kinds.
        by, why: None unless an operator sent the marker on the control topic.
        offset: Kafka offset of the record.
        time: Kafka time of the record, ms since 1970.
        timeline, published: see `records.Join`; None for other kinds. `published` is None for an operator's JOIN too.
        beyond: True if an operator's record may have an `id` beyond the stream's allocated IDs.
        transactions, blocked, heartbeat: see `records.Open`; empty or 0 for other kinds.
    """

    stream: str
    writer: str
    epoch: int
    kind: Kind
    prev: int
    id: int
    direction: Direction
    unseen: bool
    by: str | None
    why: str | None
    offset: int
    time: int
    timeline: DatabaseStart | None = None
    beyond: bool = False
    transactions: list[str] = []
    published: int | None = None
    blocked: str = ""
    heartbeat: int = 0

    @property
    def is_override(self) -> bool:
        """True if an operator sent the marker. Then the marker does not prove what the writer has completed."""
        return self.by is not None

    @property
    def no_reuse_up_to(self) -> int:
        """For a JOIN: IDs up to and including this one are not given out again, even if the database was restored."""
        return max(self.id, self.published or 0)

    @classmethod
    def of(cls, record: records.OverridableRecord | records.Open, offset: int, time: int) -> "Marker":
        if isinstance(record, records.Open):
            return cls(
                record.stream,
                record.writer,
                record.epoch,
                Kind.OPEN,
                prev=0,
                id=0,
                direction=Direction.UNKNOWN,
                unseen=False,
                by=None,
                why=None,
                offset=offset,
                time=time,
                transactions=record.transactions,
                blocked=record.blocked,
                heartbeat=record.heartbeat,
            )
        published = record.published if isinstance(record, records.Join) and record.by is None else None
        return cls(
            record.stream,
            record.writer,
            record.epoch,
            records.kind_of(record),
            abs(record.prev) if isinstance(record, records.Skip) else 0,
            abs(record.id),
            Direction.of(record.id or published or 0),
            record.unseen if isinstance(record, records.Join) else False,
            record.by,
            record.why,
            offset,
            time,
            record.timeline if isinstance(record, records.Join) else None,
            record.beyond,
            published=None if published is None else abs(published),
        )


class PossibleFacts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The facts that rejected records may contain. The records are between two neighbouring markers of the stream.

    Attributes:
        writer: the writer of the facts; None if they may be of any writer.
        epoch: the epoch of the writer; 0 if `writer` is None.
        reach: the highest ID of the facts, as a magnitude; `UNBOUNDED` if that ID is not known; 0 for a writer's JOIN.
        first_offset: the lowest Kafka offset of the records.
        is_key_only: True if only the key of the record names this stream, and its value names another stream.
    """

    stream: str
    writer: str | None
    epoch: int
    reach: int
    first_offset: int
    is_key_only: bool = False


class Packet(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Records of one shard and one offset range of a Kafka partition.

    One shard, `partition % shards`, gets the rejected records of the range. If the range has no record at all, this
    shard gets an empty packet.

    Attributes:
        topic: the name of the Kafka topic.
        role: whether the topic is the topic of facts or the control topic.
        next_offset: the next offset to read, equal in all packets of a range. If the packet is not cut short, this is
            the end of the range.
        rows: the batch rows.
        rejected: the rejected records. They are in the packets of the shard `partition % shards` only.
        possible_facts: the facts that rejected records may contain.
        is_cut_short: True if the task had too many facts, and left records of its ranges unread.
    """

    topic: str
    partition: int
    role: Topic
    next_offset: int
    runs: PackedRuns
    rows: list[BatchRows]
    markers: list[Marker]
    rejected: list[RejectedRecords]
    possible_facts: list[PossibleFacts] = []
    is_cut_short: bool = False


Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Run:
    """A chain of edges of one writer and epoch. Edge `i` is `(prevs[i], ids[i]]`, from the record at `offsets[i]`.

    Attributes:
        start: the `prev` of the first edge.
        ids: the IDs of the edges, as magnitudes, strictly ascending.
        kinds: the kind of each edge: `RDATA`, `VOID` or `POSITION`.
        first_offset: the lowest offset of the edges.
        oldest: the lowest Kafka time (ms) of the records. A part of a run keeps the value of the whole run.
    """

    writer: str
    epoch: int
    direction: Direction
    start: int
    ids: Ids
    kinds: npt.NDArray[np.uint8]
    offsets: Ids
    first_offset: int
    oldest: int

    @classmethod
    def unpack(cls, packed: PackedRun) -> "Run":
        offsets = np.frombuffer(packed.offsets, np.uint32).astype(np.int64) + packed.first_offset
        ids, kinds = np.frombuffer(packed.ids, np.int64), np.frombuffer(packed.kinds, np.uint8)
        return cls(
            packed.writer,
            packed.epoch,
            Direction(packed.direction),
            packed.start,
            ids,
            kinds,
            offsets,
            packed.first_offset,
            packed.oldest,
        )

    @property
    def end(self) -> int:
        return int(self.ids[-1])

    @property
    def prevs(self) -> Ids:
        return np.concatenate(([self.start], self.ids[:-1]))

    def __len__(self) -> int:
        return len(self.ids)

    def overlapping(self, low: int, high: int) -> tuple[int, int]:
        """The range `(first, stop)` of indexes: the edges `first .. stop - 1` overlap `(low, high]`.

        If `first >= stop`, no edge overlaps.
        """
        if self.start >= high:
            return 0, 0
        stop = min(int(np.searchsorted(self.ids, high, side="left")) + 1, len(self.ids))
        return int(np.searchsorted(self.ids, low, side="right")), stop

    def part(self, first: int, stop: int) -> "Run":
        """The edges `first .. stop - 1` as a run. There must be at least one."""
        if first == 0 and stop == len(self.ids):
            return self
        start = int(self.ids[first - 1]) if first else self.start
        offsets = self.offsets[first:stop]
        return replace(
            self,
            start=start,
            ids=self.ids[first:stop],
            kinds=self.kinds[first:stop],
            offsets=offsets,
            first_offset=int(offsets.min()),
        )

    def parts(self, chosen: Mask) -> Iterator["Run"]:
        """Yield the edges in the mask `chosen` as runs: one run for each group of neighbouring edges."""
        steps = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        for first, stop in zip(steps[::2].tolist(), steps[1::2].tolist(), strict=True):
            yield self.part(first, stop)

    def evidence(self) -> Evidence:
        """The evidence of the run: each fact counts 1, each void ID counts 1, and an announcement counts its width."""
        facts, announced = self.fact_count, self.kinds == POSITION
        empty = len(self) - facts
        if announced.any():
            empty += int((self.ids - self.prevs - 1)[announced].sum())
        return Evidence(facts, empty)

    @property
    def completes(self) -> Mask:
        """A mask of the edges that complete their ID: facts and voids. An announced ID may belong to another writer."""
        completes: Mask = self.kinds != POSITION
        return completes

    @property
    def fact_count(self) -> int:
        return int(np.count_nonzero(self.kinds == RDATA))

    def empty(self) -> Intervals:
        """The IDs in the run's range without a fact of the writer.

        These are void IDs, announced ranges, and the IDs between the `prev` and the `id` of an edge.
        """
        prevs, highs = self.prevs, self.ids - (self.kinds == RDATA)
        declared = prevs < highs
        return Intervals.from_bounds(prevs[declared], highs[declared]) if declared.any() else NO_INTERVALS

    def highest_empty(self, count: int) -> Intervals:
        """The `count` highest ranges of `empty`. Usually computed from the last edges only, which saves time."""
        tail = self.part(max(0, len(self) - 4 * count), len(self))
        ranges = tail.empty()
        # The edges before the tail may extend its lowest range, or have further ranges.
        if len(ranges) <= count and len(tail) < len(self):
            ranges = self.empty()
        return ranges.highest(count)
