"""Decides what is said of each move of a writer: its rows, or that nothing is there, or that clients must fetch. Pure.

All clients are told the same, in the same order: of each writer the announcements join, the `prev` of one is the `id`
of the one before. An advance whose rows have not been read yet waits for them, for a moment, and the writer's later
advances wait behind it.

What was said on a channel of each writer's position, by whichever sidecar spoke, and what to say next. Pure.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tidemark.app.lines.commands import PositionCommand, RdataCommand
from tidemark.app.lines.rows import Lacking, RowBuffer, UnannouncedFact, Writer
from tidemark.sinks.reader.events import Advance
from tidemark.streaming.direction import beyond, farther


@dataclass(frozen=True, slots=True)
class Announcement:
    """Moves who stands at `prev` to `id`; `commands` say so. Who stands elsewhere must be told `fetch` instead."""

    stream: str
    writer: str
    prev: int
    id: int
    how: Literal["rows", "empty", "fetch"]
    commands: Sequence[PositionCommand | RdataCommand]

    @property
    def fetch(self) -> PositionCommand:
        """Makes who stands below `id` fetch what it lacks."""
        return PositionCommand(self.stream, self.writer, self.id, self.id)


@dataclass(frozen=True, slots=True)
class _Waiting:
    advance: Advance
    until: float


class Announcer:
    """`announced` is changed here: how far each writer was announced. Times are seconds of a clock that is passed in;
    `patience` is how long an advance waits for its rows."""

    def __init__(self, rows: RowBuffer, announced: dict[Writer, int], patience: float) -> None:
        self._rows = rows
        self._announced = announced
        self._patience = patience
        self._waiting: dict[Writer, deque[_Waiting]] = {}

    def stand(self, stream: str, positions: Mapping[str, int]) -> Iterator[Announcement]:
        """The writers stand there or further; nothing tells how they came there; what waits for rows waits no more."""
        for writer, position in sorted(positions.items()):
            here = self._announced.get((stream, writer))
            if here is None or beyond(position, here):
                waiting = self._waiting.pop((stream, writer), None)
                id = farther(waiting[-1].advance.id, position) if waiting else position
                yield self._said(stream, writer, id, id if here is None else here, None)

    def advance(self, stream: str, advance: Advance, now: float) -> Iterator[Announcement]:
        """A writer's position moved."""
        self._waiting.setdefault((stream, advance.writer), deque()).append(_Waiting(advance, now + self._patience))
        yield from self.retry([(stream, advance.writer)], now)

    def retry(self, writers: Iterable[Writer], now: float) -> Iterator[Announcement]:
        """What can be said now of those whose rows have come, or did not come in time."""
        for writer in writers:
            waiting = self._waiting.get(writer)
            while waiting:
                told = self._told(writer, waiting[0], now)
                if told is Lacking.NOT_YET:
                    break
                waiting.popleft()
                if told is not None:
                    yield told
            else:
                self._waiting.pop(writer, None)

    def overdue(self, now: float) -> Iterator[Announcement]:
        """Of those that have waited for long enough."""
        late = [writer for writer, waiting in self._waiting.items() if waiting[0].until <= now]
        yield from self.retry(late, now)

    def _told(self, writer: Writer, waiting: _Waiting, now: float) -> Announcement | Literal[Lacking.NOT_YET] | None:
        advance, (stream, name) = waiting.advance, writer
        here = self._announced.get(writer, advance.prev)
        if not beyond(advance.id, here):
            return None
        if here != advance.prev:  # we have not seen what lies between, or have told a part
            return self._said(stream, name, advance.id, here, None)
        found = self._rows.take(stream, advance)
        if found is Lacking.NOT_YET and now < waiting.until:
            return Lacking.NOT_YET
        return self._said(stream, name, advance.id, here, None if isinstance(found, Lacking) else found)

    def _said(
        self, stream: str, writer: str, id: int, prev: int, facts: Sequence[UnannouncedFact] | None
    ) -> Announcement:
        """`facts` None: clients must fetch."""
        known = (stream, writer) in self._announced
        self._announced[stream, writer] = id
        self._rows.passed([(stream, writer)])
        if facts is None:
            return Announcement(stream, writer, prev, id, "fetch", [PositionCommand(stream, writer, id, id)])
        commands: list[PositionCommand | RdataCommand] = []
        if facts and not known:  # clients drop rows of what was never introduced to them
            commands.append(PositionCommand(stream, writer, prev, prev))
        for fact in facts:
            *first, last = fact.rows
            commands.extend(RdataCommand(stream, writer, None, row) for row in first)
            commands.append(RdataCommand(stream, writer, fact.id, last))
        end = facts[-1].id if facts else prev
        if end != id:
            commands.append(PositionCommand(stream, writer, end, id))
        return Announcement(stream, writer, prev, id, "rows" if facts else "empty", commands)


class Told:
    """`positions`: how far each writer was told already. Whoever hears all of it misses nothing and hears nothing
    twice, although the sidecar that speaks now may stand before or behind the one that spoke first."""

    def __init__(self, positions: Mapping[Writer, int]) -> None:
        self._positions = dict(positions)

    def stand(self, standing: Iterable[PositionCommand]) -> list[PositionCommand]:
        """Where every writer is, for all who are below; from then on they were told so."""
        said = []
        for position in standing:
            writer = position.stream, position.writer
            id = farther(position.id, self._positions.get(writer, position.id))
            self._positions[writer] = id
            said.append(PositionCommand(*writer, id, id))
        return said

    def next(self, announcement: Announcement) -> Sequence[PositionCommand | RdataCommand]:
        """How to say it to those who were told what we know they were told; nothing where they are further."""
        writer = announcement.stream, announcement.writer
        here = self._positions.get(writer, announcement.prev)
        if not beyond(announcement.id, here):
            return ()
        self._positions[writer] = announcement.id
        return announcement.commands if here == announcement.prev else (announcement.fetch,)
