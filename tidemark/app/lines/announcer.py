"""Announcements of the moves of writers: with rows, as empty, or so that clients fetch. Pure.

All clients get the same announcements in the same order. The announcements of each writer join: the `prev` of one is
the `id` of the one before. An advance whose rows were not read yet waits for them, for a moment, and later advances of
the writer wait behind it.

On a Redis channel several sidecars announce one after the other: `AnnouncedPositions` joins what they announce.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tidemark.app.lines.rows import MissingRows, RowBuffer, UnannouncedFact, Writer
from tidemark.sinks.reader import Advance
from tidemark.streaming.values.direction import beyond, farther
from tidemark.streaming.wire.line_protocol import PositionCommand, RdataCommand


@dataclass(frozen=True, slots=True)
class Announcement:
    """The commands that move a subscriber from `prev` to `id`. A subscriber at another position needs `fetch`."""

    stream: str
    writer: str
    prev: int
    id: int
    how: Literal["rows", "empty", "fetch"]
    commands: Sequence[PositionCommand | RdataCommand]

    @property
    def fetch(self) -> PositionCommand:
        """Makes a subscriber below `id` fetch what it does not have."""
        return PositionCommand(self.stream, self.writer, self.id, self.id)


@dataclass(frozen=True, slots=True)
class _PendingAdvance:
    advance: Advance
    until: float


class Announcer:
    """Makes the announcements of all writers.

    Args:
        rows: the rows that were read from Kafka.
        announced: the last announced position of each writer. It is changed here.
        patience: seconds that an advance waits for its rows. Times are seconds of a clock that is passed in.
    """

    def __init__(self, rows: RowBuffer, announced: dict[Writer, int], patience: float) -> None:
        self._rows = rows
        self._announced = announced
        self._patience = patience
        self._waiting: dict[Writer, deque[_PendingAdvance]] = {}

    def catch_up(self, stream: str, positions: Mapping[str, int]) -> Iterator[Announcement]:
        """Announcements for writers that reached `positions` by unknown advances: clients fetch, what
        waited included."""
        for writer, position in sorted(positions.items()):
            announced = self._announced.get((stream, writer))
            if announced is None or beyond(position, announced):
                waiting = self._waiting.pop((stream, writer), None)
                id = farther(waiting[-1].advance.id, position) if waiting else position
                yield self._announce(stream, writer, id, id if announced is None else announced, None)

    def advance(self, stream: str, advance: Advance, now: float) -> Iterator[Announcement]:
        """Announcements that the next advance of a writer allows."""
        self._waiting.setdefault((stream, advance.writer), deque()).append(
            _PendingAdvance(advance, now + self._patience)
        )
        yield from self.retry([(stream, advance.writer)], now)

    def retry(self, writers: Iterable[Writer], now: float) -> Iterator[Announcement]:
        """Announcements of advances of `writers` whose rows have come, or did not come in time."""
        for writer in writers:
            waiting = self._waiting.get(writer)
            while waiting:
                announcement = self._next(writer, waiting[0], now)
                if announcement is MissingRows.NOT_YET:
                    break
                waiting.popleft()
                if announcement is not None:
                    yield announcement
            else:
                self._waiting.pop(writer, None)

    def overdue(self, now: float) -> Iterator[Announcement]:
        """Announcements of advances that have waited for their rows for long enough."""
        late = [writer for writer, waiting in self._waiting.items() if waiting[0].until <= now]
        yield from self.retry(late, now)

    def forget(self, writers: Iterable[Writer]) -> None:
        """These writers have left (`Hub.left_writers`). A writer that comes back is introduced like a new one."""
        for writer in writers:
            if writer not in self._waiting:
                self._announced.pop(writer, None)

    def _next(
        self, writer: Writer, waiting: _PendingAdvance, now: float
    ) -> Announcement | Literal[MissingRows.NOT_YET] | None:
        advance, (stream, name) = waiting.advance, writer
        announced = self._announced.get(writer, advance.prev)
        if not beyond(advance.id, announced):
            return None
        if announced != advance.prev:  # the IDs between were not seen, or a part of them was announced
            return self._announce(stream, name, advance.id, announced, None)
        facts = self._rows.take(stream, advance)
        if facts is MissingRows.NOT_YET and now < waiting.until:
            return MissingRows.NOT_YET
        return self._announce(stream, name, advance.id, announced, None if isinstance(facts, MissingRows) else facts)

    def _announce(
        self, stream: str, writer: str, id: int, prev: int, facts: Sequence[UnannouncedFact] | None
    ) -> Announcement:
        """`facts` None: clients must fetch."""
        known = (stream, writer) in self._announced
        self._announced[stream, writer] = id
        self._rows.passed([(stream, writer)])
        if facts is None:
            return Announcement(stream, writer, prev, id, "fetch", [PositionCommand(stream, writer, id, id)])
        commands: list[PositionCommand | RdataCommand] = []
        if facts and not known:  # clients drop rows of writers that were never introduced to them
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
    """How far writers were announced on the channel, by any sidecar.

    A subscriber that gets all commands misses nothing and gets nothing twice, although this sidecar may be behind or
    ahead of its predecessor.
    """

    def __init__(self, positions: Mapping[Writer, int]) -> None:
        self._positions = dict(positions)

    @property
    def positions(self) -> Mapping[Writer, int]:
        return self._positions

    def forget(self, writers: Iterable[Writer]) -> None:
        """These writers have left (`Hub.left_writers`)."""
        for writer in writers:
            self._positions.pop(writer, None)

    def restate(self, positions: Iterable[PositionCommand]) -> list[PositionCommand]:
        """A POSITION for every writer, at its own position or at the announced one, whichever is farther. It makes
        subscribers below it fetch."""
        restated = []
        for position in positions:
            writer = position.stream, position.writer
            id = farther(position.id, self._positions.get(writer, position.id))
            self._positions[writer] = id
            restated.append(PositionCommand(*writer, id, id))
        return restated

    def next(self, announcement: Announcement) -> Sequence[PositionCommand | RdataCommand]:
        """The commands from the last position of subscribers to this announcement. Empty if they are past it."""
        writer = announcement.stream, announcement.writer
        announced = self._positions.get(writer, announcement.prev)
        if not beyond(announcement.id, announced):
            return ()
        self._positions[writer] = announcement.id
        return announcement.commands if announced == announcement.prev else (announcement.fetch,)
