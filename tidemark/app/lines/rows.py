"""Buffers rows from Kafka until positions pass the rows' IDs, and makes announcements of positions with these rows.
Pure.

The pipeline decides whether a row counts (`streaming.core.stream`), and its advances show the decision. `RowBuffer`
matches each advance with the edges that were read. Rows are announced only if edges of the advance's epoch, or of
earlier epochs, cover the advance exactly, with the advance's number of facts. Otherwise the rows are `LOST`, and
clients fetch them. So rows of zombies, rows of IDs that were settled without them, and incomplete facts are never
announced. If the buffer is full, the rows of the writers with the most rows are dropped, and clients fetch them too.

An announcement has rows, or is empty, or makes clients fetch. All clients get the same announcements in the same order.
The announcements of a writer have no gaps: the `prev` of each is the `id` of the one before. If rows were not read yet,
their advance and later advances of the writer are delayed briefly. On a Redis channel, one sidecar after the other is
the leader: `AnnouncedPositions` connects their announcements.

IDs are signed; "beyond" means farther from 0.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from typing import Literal

from tidemark.sinks.reader import Advance
from tidemark.streaming.values.direction import farther, is_beyond
from tidemark.streaming.wire import records
from tidemark.streaming.wire.line_protocol import PositionCommand, RdataCommand

EDGE_OVERHEAD_BYTES = 200  # about, without the rows

Writer = tuple[str, str]
"""A stream and the name of one of its writers."""


class MissingRows(Enum):
    """Why the rows of an advance are not available."""

    NOT_YET = "an edge was not read yet"
    LOST = "the rows cannot be read any more"


@dataclass(frozen=True, slots=True)
class UnannouncedFact:
    """A fact with one or more rows, in order. Each row is JSON in one line."""

    id: int
    rows: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Edge:
    """The edge `(prev, id]`. `prev` is the key of the edge in `UnannouncedRows`.

    Attributes:
        rows: the rows of the fact; empty if the edge has no fact; None if some rows of the fact may be unread.
    """

    id: int
    epoch: int
    rows: Sequence[str] | None


class UnannouncedRows:
    """Edges and rows of one writer of one stream, beyond its announced position.

    Attributes:
        size_bytes: the approximate size.
        farthest_named_id: the farthest ID that any record of the writer named, or `highest_named_id` if that is
            farther.

    Args:
        position: the announced position.
        highest_named_id: the highest ID that earlier, unread records may have named. A fact up to this ID may lack
            rows: the record with its ID may be a repetition, and its first rows may be in unread records.
        has_first_record: whether the first record of the writer will be added too. If not, the first fact may lack
            rows.
    """

    def __init__(self, position: int, highest_named_id: int, *, has_first_record: bool) -> None:
        self.size_bytes = EDGE_OVERHEAD_BYTES
        self.farthest_named_id = highest_named_id
        self._position = position
        self._highest_named_id = highest_named_id
        self._has_first_record = has_first_record
        self._epoch: int | None = None  # the epoch of the last JOIN that was read
        self._edges: dict[int, _Edge] = {}  # `prev` of an edge -> the edge
        self._ends: list[tuple[int, int]] = []  # a heap of edges: the magnitude of `id`, and `prev`
        # Epoch -> the rows of a fact whose ID was not read yet; None if earlier rows of the fact may be unread.
        self._incomplete_facts: dict[int, list[str] | None] = {}

    def add(self, record: records.Record) -> None:
        """Add the next record of the writer, in the order of its partition. Ignores records of zombies and
        duplicates."""
        if self._epoch is not None and record.epoch < self._epoch:
            return  # a zombie
        match record:
            case records.Rdata(id="batch"):
                batch = self._incomplete_fact(record.epoch)
                if batch is not None:
                    batch.append(records.format_row(record.row))
                    self.size_bytes += len(batch[-1])
            case records.Rdata(id=int() as id):
                batch = self._incomplete_fact(record.epoch) if is_beyond(id, self._highest_named_id) else None
                rows = None if batch is None else (*batch, records.format_row(record.row))
                self._begin_fact(record.epoch)
                self._add_edge(records.effective_prev(record), _Edge(id, record.epoch, rows))
            case records.Void() | records.Position():
                self._begin_fact(record.epoch)
                self._add_edge(record.prev, _Edge(record.id, record.epoch, ()))
            case records.Join():
                self._join(record)
            case records.Retire():
                self._add_empty_edges(record.id, record.epoch)

    def find_facts(self, advance: Advance) -> Sequence[UnannouncedFact] | MissingRows:
        """Find the facts of an advance, in order; or return why their rows are missing. The facts stay in the buffer
        until `remove_up_to`. The caller has checked that every ID of the advance is a fact or empty."""
        facts: list[UnannouncedFact] = []
        at = advance.prev
        while at != advance.id:
            edge = self._edges.get(at)
            if edge is None:
                return MissingRows.NOT_YET
            if edge.epoch < advance.epoch and (self._epoch is None or self._epoch < advance.epoch):
                return MissingRows.NOT_YET  # until a JOIN of this epoch or of a later one is read
            if edge.rows is None or edge.epoch > advance.epoch or is_beyond(edge.id, advance.id):
                return MissingRows.LOST
            if edge.rows:
                facts.append(UnannouncedFact(edge.id, edge.rows))
            at = edge.id
        return facts if len(facts) == advance.evidence.facts else MissingRows.LOST

    def remove_up_to(self, position: int) -> None:
        """Remove all edges up to `position`, which was announced."""
        self._position = farther(position, self._position)
        while self._ends and self._ends[0][0] <= abs(self._position):
            _, prev = heappop(self._ends)
            edge = self._edges.get(prev)
            if edge is not None and not is_beyond(edge.id, self._position):
                self._drop_edge(prev)

    def _incomplete_fact(self, epoch: int) -> list[str] | None:
        """The rows so far of the next fact of this epoch, as a list to which rows are added. None if rows of the fact
        may be in unread earlier records."""
        return self._incomplete_facts.setdefault(epoch, [] if self._has_first_record else None)

    def _begin_fact(self, epoch: int) -> None:
        batch = self._incomplete_facts.get(epoch)
        if batch:
            self.size_bytes -= sum(map(len, batch))
        self._incomplete_facts[epoch] = []

    def _add_edge(self, prev: int, edge: _Edge) -> None:
        self.farthest_named_id = farther(edge.id, self.farthest_named_id)
        if not is_beyond(edge.id, self._position):
            return
        known = self._edges.get(prev)
        if known is not None:
            # A repeated edge is a duplicate. An edge of an older epoch is from a zombie.
            if edge.epoch < known.epoch or (edge.epoch == known.epoch and known.rows is not None):
                return
            self._drop_edge(prev)
        self._edges[prev] = edge
        heappush(self._ends, (abs(edge.id), prev))
        self.size_bytes += _edge_bytes(edge)

    def _drop_edge(self, prev: int) -> None:
        self.size_bytes -= _edge_bytes(self._edges.pop(prev))

    def _join(self, join: records.Join) -> None:
        if self._epoch is not None and join.epoch <= self._epoch:
            return
        self._epoch = join.epoch
        for epoch in [epoch for epoch in self._incomplete_facts if epoch < join.epoch]:
            self._begin_fact(epoch)
            del self._incomplete_facts[epoch]
        self._begin_fact(join.epoch)
        for prev, edge in list(self._edges.items()):
            if edge.epoch < join.epoch and is_beyond(edge.id, join.id):
                self._drop_edge(prev)  # the database of the writer was restored to an earlier state
        if not join.unseen:
            self._add_empty_edges(join.id, join.epoch)

    def _add_empty_edges(self, end: int, epoch: int) -> None:
        """Add empty edges for the open IDs up to `end`."""
        at = self._position
        for prev, edge in sorted(self._edges.items(), key=lambda item: abs(item[0])):
            if is_beyond(prev, end):
                break
            if is_beyond(prev, at):
                self._add_edge(at, _Edge(prev, epoch, ()))
            at = farther(edge.id, at)
        if is_beyond(end, at):
            self._add_edge(at, _Edge(end, epoch, ()))


def _edge_bytes(edge: _Edge) -> int:
    return EDGE_OVERHEAD_BYTES + sum(map(len, edge.rows or ()))


class RowBuffer:
    """Buffers the rows of all writers until positions pass the rows' IDs.

    Args:
        limit_bytes: the approximate largest size.
        announced_positions: the last announced position of each writer; the `Announcer` changes it.
    """

    def __init__(self, limit_bytes: int, announced_positions: Mapping[Writer, int]) -> None:
        self.size_bytes = 0
        self.dropped_count = 0
        """How many times the rows of a writer were dropped. The caller resets the count."""
        self._limit_bytes = limit_bytes
        self._announced_positions = announced_positions
        self._writers: dict[Writer, UnannouncedRows] = {}
        self._home_partition_by_stream: dict[str, int] = {}
        self._has_first_record_by_partition: Mapping[int, bool] = {}
        self._highest_named_id_by_stream: dict[str, int] = {}

    def begin_read(
        self, has_first_record_by_partition: Mapping[int, bool], highest_named_id_by_stream: Mapping[str, int]
    ) -> None:
        """Begin a new read of the topic.

        Args:
            has_first_record_by_partition: partition -> whether the read begins at the first record of the partition.
            highest_named_id_by_stream: stream -> the highest ID that earlier records, which are not read, may have
                named.
        """
        self.clear()
        self._has_first_record_by_partition = has_first_record_by_partition
        self._highest_named_id_by_stream = dict(highest_named_id_by_stream)

    def clear(self) -> None:
        """Remove all rows. Until the next `begin_read`, all rows count as lost."""
        self._writers.clear()
        self._home_partition_by_stream.clear()
        self._has_first_record_by_partition = {}
        self.size_bytes = 0

    def add(self, partition: int, record: records.Record) -> Writer | None:
        """Add the next record of `partition`.

        Returns:
            The writer of the record; None if the record is ignored.
        """
        if self._home_partition_by_stream.setdefault(record.stream, partition) != partition:
            return None  # a stream is in one partition (docs/design.md 3)
        writer = record.stream, record.writer
        buffered = self._writers.get(writer)
        if buffered is None:
            has_first_record = self._has_first_record_by_partition[partition]
            buffered = self._add_writer(
                writer,
                0 if has_first_record else self._highest_named_id_by_stream.get(record.stream, 0),
                has_first_record=has_first_record,
            )
        before = buffered.size_bytes
        buffered.add(record)
        self.size_bytes += buffered.size_bytes - before
        if self.size_bytes > self._limit_bytes:
            self._evict()
        return writer

    def find_facts(self, stream: str, advance: Advance) -> Sequence[UnannouncedFact] | MissingRows:
        """Find the facts of `advance`, in order (see `UnannouncedRows.find_facts`). Returns LOST if the advance
        has unseen or skipped IDs, or is a part of a stored advance.
        """
        evidence = advance.evidence
        if advance.proven_empty:
            return ()
        if (
            evidence.unseen
            or evidence.skipped
            or advance.evidence_prev != advance.prev
            or not self._has_first_record_by_partition
        ):
            return MissingRows.LOST
        buffered = self._writers.get((stream, advance.writer))
        return MissingRows.NOT_YET if buffered is None else buffered.find_facts(advance)

    def remove_up_to(self, writers: Iterable[Writer]) -> None:
        """Remove the rows of these writers up to their announced positions."""
        for writer in writers:
            if buffered := self._writers.get(writer):
                before = buffered.size_bytes
                buffered.remove_up_to(self._announced_positions[writer])
                self.size_bytes += buffered.size_bytes - before

    def _add_writer(self, writer: Writer, highest_named_id: int, *, has_first_record: bool) -> UnannouncedRows:
        buffered = self._writers[writer] = UnannouncedRows(
            self._announced_positions.get(writer, 0), highest_named_id, has_first_record=has_first_record
        )
        self.size_bytes += buffered.size_bytes
        return buffered

    def _evict(self) -> None:
        """Drop rows until half of the limit is free, the writers with the most rows first."""
        for writer in sorted(self._writers, key=lambda writer: self._writers[writer].size_bytes, reverse=True):
            if self.size_bytes <= self._limit_bytes // 2:
                return
            before = self._writers.pop(writer)
            self.size_bytes -= before.size_bytes
            self._add_writer(writer, before.farthest_named_id, has_first_record=False)
            self.dropped_count += 1
        # There are too many writers: even without rows they need more than half of the limit.
        for (stream, _), buffered in self._writers.items():
            self._highest_named_id_by_stream[stream] = farther(
                buffered.farthest_named_id, self._highest_named_id_by_stream.get(stream, 0)
            )
        self._has_first_record_by_partition = dict.fromkeys(self._has_first_record_by_partition, False)
        self._writers.clear()
        self.size_bytes = 0


@dataclass(frozen=True, slots=True)
class Announcement:
    """The commands that move a subscriber of `writer` from `prev` to `id`. A subscriber whose position is not `prev`
    gets `fetch_command` instead.

    Attributes:
        kind: `rows`: the commands have all rows. `empty`: there are no rows. `fetch`: subscribers must fetch the rows.
    """

    stream: str
    writer: str
    prev: int
    id: int
    kind: Literal["rows", "empty", "fetch"]
    commands: Sequence[PositionCommand | RdataCommand]

    @property
    def fetch_command(self) -> PositionCommand:
        """A POSITION that makes a subscriber below `id` fetch the missing rows."""
        return PositionCommand(self.stream, self.writer, self.id, self.id)


@dataclass(frozen=True, slots=True)
class _DelayedAdvance:
    """An advance whose rows were not read yet. `deadline`: when it is announced without rows (seconds, monotonic)."""

    advance: Advance
    deadline: float


class Announcer:
    """Makes the announcements of all writers.

    Args:
        rows: the rows that were read from Kafka.
        announced_positions: the last announced position of each writer. This object changes the mapping.
        timeout_seconds: how long an advance is delayed if its rows were not read yet.

    The argument `now` of methods is the time of a monotonic clock, in seconds. A method that returns an iterator does
    its work, and moves announced positions, while the caller reads the iterator.
    """

    def __init__(self, rows: RowBuffer, announced_positions: dict[Writer, int], timeout_seconds: float) -> None:
        self._rows = rows
        self._announced_positions = announced_positions
        self._timeout_seconds = timeout_seconds
        self._delayed: dict[Writer, deque[_DelayedAdvance]] = {}

    def catch_up(self, stream: str, positions: Mapping[str, int]) -> Iterator[Announcement]:
        """Announce the writers that are below `positions` (writer -> position) or new, so that clients fetch the rows.
        Delayed advances of these writers are announced in the same way.
        """
        for writer, position in sorted(positions.items()):
            announced = self._announced_positions.get((stream, writer))
            if announced is None or is_beyond(position, announced):
                delayed = self._delayed.pop((stream, writer), None)
                id = farther(delayed[-1].advance.id, position) if delayed else position
                yield self._announce(stream, writer, id, id if announced is None else announced, None)

    def add_advance(self, stream: str, advance: Advance, now: float) -> Iterator[Announcement]:
        """Add the next advance of a writer, and make the announcements that are possible now."""
        self._delayed.setdefault((stream, advance.writer), deque()).append(
            _DelayedAdvance(advance, now + self._timeout_seconds)
        )
        yield from self.retry([(stream, advance.writer)], now)

    def retry(self, writers: Iterable[Writer], now: float) -> Iterator[Announcement]:
        """Announce the delayed advances of `writers` whose rows were read, or whose time-out has passed."""
        for writer in writers:
            delayed = self._delayed.get(writer)
            while delayed:
                announcement = self._next_announcement(writer, delayed[0], now)
                if announcement is MissingRows.NOT_YET:
                    break
                delayed.popleft()
                if announcement is not None:
                    yield announcement
            else:
                self._delayed.pop(writer, None)

    def announce_timed_out(self, now: float) -> Iterator[Announcement]:
        """Announce the delayed advances whose time-out has passed."""
        timed_out = [writer for writer, delayed in self._delayed.items() if delayed[0].deadline <= now]
        yield from self.retry(timed_out, now)

    def forget(self, writers: Iterable[Writer]) -> None:
        """Forget the writers that `Hub.removed_writers` returns, except writers with delayed advances. A forgotten
        writer that comes back counts as new."""
        for writer in writers:
            if writer not in self._delayed:
                self._announced_positions.pop(writer, None)

    def _next_announcement(
        self, writer: Writer, delayed: _DelayedAdvance, now: float
    ) -> Announcement | Literal[MissingRows.NOT_YET] | None:
        """Announce a delayed advance. Returns NOT_YET if the advance must be delayed further, and None if its IDs were
        announced before.
        """
        advance, (stream, name) = delayed.advance, writer
        announced = self._announced_positions.get(writer, advance.prev)
        if not is_beyond(advance.id, announced):
            return None
        if announced != advance.prev:  # an advance is missing, or this advance is partly announced
            return self._announce(stream, name, advance.id, announced, None)
        facts = self._rows.find_facts(stream, advance)
        if facts is MissingRows.NOT_YET and now < delayed.deadline:
            return MissingRows.NOT_YET
        return self._announce(stream, name, advance.id, announced, None if isinstance(facts, MissingRows) else facts)

    def _announce(
        self, stream: str, writer: str, id: int, prev: int, facts: Sequence[UnannouncedFact] | None
    ) -> Announcement:
        """Make an announcement, and move the announced position. `facts`: None if clients must fetch the rows."""
        known = (stream, writer) in self._announced_positions
        self._announced_positions[stream, writer] = id
        self._rows.remove_up_to([(stream, writer)])
        if facts is None:
            return Announcement(stream, writer, prev, id, "fetch", [PositionCommand(stream, writer, id, id)])
        commands: list[PositionCommand | RdataCommand] = []
        if facts and not known:  # clients ignore rows of a writer before its first POSITION
            commands.append(PositionCommand(stream, writer, prev, prev))
        for fact in facts:
            *first, last = fact.rows
            commands.extend(RdataCommand(stream, writer, None, row) for row in first)
            commands.append(RdataCommand(stream, writer, fact.id, last))
        end = facts[-1].id if facts else prev
        if end != id:
            commands.append(PositionCommand(stream, writer, end, id))
        return Announcement(stream, writer, prev, id, "rows" if facts else "empty", commands)


class AnnouncedPositions:
    """The positions of writers that were last announced on the channel, by this or another sidecar.

    This leader may have read less or more than the previous leader. Even then, a subscriber that receives all commands
    gets or fetches every row exactly once.
    """

    def __init__(self, positions: Mapping[Writer, int]) -> None:
        self._positions = dict(positions)

    @property
    def positions(self) -> Mapping[Writer, int]:
        return self._positions

    def forget(self, writers: Iterable[Writer]) -> None:
        """Forget the writers that `Hub.removed_writers` returns."""
        for writer in writers:
            self._positions.pop(writer, None)

    def reannounce(self, positions: Iterable[PositionCommand]) -> list[PositionCommand]:
        """Move the last announced position of each writer to its position in `positions`, but never back.

        Returns:
            A POSITION for every writer in `positions`. It makes subscribers at a lower position fetch the rows.
        """
        restated = []
        for position in positions:
            writer = position.stream, position.writer
            id = farther(position.id, self._positions.get(writer, position.id))
            self._positions[writer] = id
            restated.append(PositionCommand(*writer, id, id))
        return restated

    def announce(self, announcement: Announcement) -> Sequence[PositionCommand | RdataCommand]:
        """Move the last announced position of the writer to the ID of the announcement.

        Returns:
            The commands that move subscribers to this ID. Empty, without a move, if the ID was announced before.
        """
        writer = announcement.stream, announcement.writer
        announced = self._positions.get(writer, announcement.prev)
        if not is_beyond(announcement.id, announced):
            return ()
        self._positions[writer] = announcement.id
        return announcement.commands if announced == announcement.prev else (announcement.fetch_command,)
