"""Decides what is said of each move of a writer: its rows, or that nothing is there, or that clients must fetch. Pure.

All clients are told the same, in the same order: of each writer the announcements join, the `prev` of one is the `id`
of the one before. An advance whose rows have not been read yet waits for them, for a moment, and the writer's later
advances wait behind it.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tidemark.app.lines.commands import Position, Rdata
from tidemark.app.lines.rows import Rows, Writer
from tidemark.app.lines.unannounced import Fact, Lacking
from tidemark.sinks.reader.events import Advance
from tidemark.sinks.reader.order import beyond, farther


@dataclass(frozen=True, slots=True)
class Announcement:
    """Moves who stands at `prev` to `id`; `commands` say so. Who stands elsewhere must be told `fetch` instead."""

    stream: str
    writer: str
    prev: int
    id: int
    how: Literal["rows", "empty", "fetch"]
    commands: Sequence[Position | Rdata]

    @property
    def fetch(self) -> Position:
        """Makes who stands below `id` fetch what it lacks."""
        return Position(self.stream, self.writer, self.id, self.id)


@dataclass(frozen=True, slots=True)
class _Waiting:
    advance: Advance
    until: float


class Announcer:
    """`announced` is changed here: how far each writer was announced. Times are seconds of a clock that is passed in;
    `patience` is how long an advance waits for its rows."""

    def __init__(self, rows: Rows, announced: dict[Writer, int], patience: float) -> None:
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

    def _said(self, stream: str, writer: str, id: int, prev: int, facts: Sequence[Fact] | None) -> Announcement:
        """`facts` None: clients must fetch."""
        known = (stream, writer) in self._announced
        self._announced[stream, writer] = id
        self._rows.passed([(stream, writer)])
        if facts is None:
            return Announcement(stream, writer, prev, id, "fetch", [Position(stream, writer, id, id)])
        commands: list[Position | Rdata] = []
        if facts and not known:  # clients drop rows of what was never introduced to them
            commands.append(Position(stream, writer, prev, prev))
        for fact in facts:
            *first, last = fact.rows
            commands.extend(Rdata(stream, writer, None, row) for row in first)
            commands.append(Rdata(stream, writer, fact.id, last))
        end = facts[-1].id if facts else prev
        if end != id:
            commands.append(Position(stream, writer, end, id))
        return Announcement(stream, writer, prev, id, "rows" if facts else "empty", commands)
