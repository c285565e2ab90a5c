"""The program behind `follow`: turns a stream's list of advances into events. No sockets.

The list in Redis may be cut, cleared and filled again at any time. So each read begins with the last entry of the
previous read. If that entry is gone, the list is read from its start, and Postgres is queried for missing advances;
without Postgres the reader must read the table. A read is complete only when each writer is at the position that Redis
returns in the same transaction.

`EventMerge` merges the lists, history and positions of a stream into one chain of events per writer. Its input may have
duplicates and gaps, and a list may start again. The events of each writer join exactly: the `prev` of an event is the
`id` of the event before (Rule 3), and no event is handed over twice. A writer that retired and joins again begins at
the linear position, like a new writer. `LinearEvidence` makes moves of the linear position from the events of writers.
"""

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tidemark.common.log import get_logger
from tidemark.sinks.reader.events import Advance, Event, Late, LateLost, LinearMove, Place, Reread
from tidemark.sinks.reader.redis import parse_entry
from tidemark.sinks.reader.requests import (
    LONGEST_WAIT,
    Answer,
    AwaitEntry,
    CheckStreamName,
    ListEntry,
    ReadHistory,
    ReadList,
    ReadNewest,
    Request,
    StreamHistory,
    StreamKeys,
    repeat_while_unavailable,
)
from tidemark.sinks.reader.token import Token
from tidemark.streaming.values.direction import beyond, farther


class LinearEvidence:
    """Turns moves of the linear position into `LinearMove` events.

    The linear position may pass an ID before the follower has the position of its writer. It may also pass IDs of
    writers that joined and retired unseen. So `known` is true only if the range begins beyond every position at the
    start, if every writer has passed the range, and if all its advances have their evidence.
    """

    def __init__(self, linear: int) -> None:
        self.linear = linear
        self._watched_from: int | None = None
        self._events: list[Advance | Reread] = []

    def add_event(self, event: Advance | Reread) -> None:
        """Add an event that moved the position of a writer."""
        if beyond(event.id, self.linear):
            self._events.append(event)

    def mark_uncertain(self) -> None:
        """Note that advances may have been missed."""
        self._watched_from = None

    def move(self, linear: int, writers: Mapping[str, int]) -> Iterator[LinearMove]:
        """Yield the move to the linear position `linear`, if it is beyond the last move.

        Every event up to the positions of `writers` must have been added.
        """
        if beyond(linear, self.linear):
            overlapping = [event for event in self._events if beyond(linear, event.prev)]
            known = (
                self._watched_from is not None
                and not beyond(self._watched_from, self.linear)
                and not any(beyond(linear, position) for position in writers.values())
                and not any(isinstance(event, Reread) for event in overlapping)
            )
            advances = tuple(event for event in overlapping if isinstance(event, Advance))
            prev, self.linear = self.linear, linear
            self._events = [event for event in self._events if beyond(event.id, linear)]
            yield LinearMove(prev, linear, advances, known)
        if self._watched_from is None:
            self._watched_from = max((linear, *writers.values()), key=abs)


class EventMerge:
    """Merges published advances and positions, in any order, and yields new events.

    The place moves when the caller takes an event from the iterator.
    """

    def __init__(self, place: Place) -> None:
        self._linear = place.linear
        self._positions = dict(place.positions)
        self._late = place.late
        self._is_settled = place.is_settled

    @property
    def place(self) -> Place:
        return Place(self._linear, dict(self._positions), self._late, self._is_settled)

    @property
    def is_settled(self) -> bool:
        """See `Place`."""
        return self._is_settled

    @property
    def linear(self) -> int:
        """The place of unknown writers."""
        return self._linear

    @property
    def late(self) -> int:
        return self._late

    @property
    def positions(self) -> Mapping[str, int]:
        """The place of each known writer."""
        return self._positions

    def position_of(self, writer: str) -> int:
        return self._positions.get(writer, self._linear)

    def leaves_gap(self, advance: Advance) -> bool:
        """Whether the advance begins beyond the place of its writer, so that the evidence for the IDs between is
        missing.
        """
        return beyond(advance.prev, self.position_of(advance.writer))

    def add_advance(self, advance: Advance) -> Iterator[Advance | Reread]:
        reached = self.position_of(advance.writer)
        if beyond(advance.id, reached):
            if self.leaves_gap(advance):
                yield from self.move_to(advance.writer, advance.prev)
            self._positions[advance.writer] = advance.id
            yield replace(advance, prev=reached) if beyond(reached, advance.prev) else advance

    def move_to(self, writer: str, position: int) -> Iterator[Reread]:
        """Move the writer to `position` without its advances, which are not available."""
        reached = self.position_of(writer)
        if beyond(position, reached):
            self._positions[writer] = position
            yield Reread(writer, reached, position)

    def add_late(self, late: Late) -> Iterator[Late]:
        if late.number > self._late:
            self._late = late.number
            yield late

    def note_late_lost(self, number: int) -> Iterator[LateLost]:
        """Pass the late completions up to `number`, which are not available."""
        if number > self._late:
            after, self._late = self._late, number
            yield LateLost(after, number)

    def reread_unlisted(self, linear: int, writers: Mapping[str, int]) -> Iterator[Reread]:
        """Hand over ranges up to `linear` of the writers that are not in `writers`: they retired, and their last
        advances are not available. A writer is removed only when the linear position has passed it, so it was not
        beyond `linear`.
        """
        for retired_writer in sorted(self._positions.keys() - writers.keys()):
            yield from self.move_to(retired_writer, linear)
        if beyond(linear, self._linear):
            self._add_writers(writers)
            prev, self._linear = self._linear, linear
            yield Reread(None, prev, linear, frozenset(self._positions))

    def reread_all(self, linear: int, writers: Mapping[str, int]) -> Iterator[Reread]:
        """On the first read of a stream, hand over every range up to `linear` that no event has named.

        The table may be older than the stream. Then it has rows of writers that Tidemark does not know, rows without a
        writer, and rows of known writers beyond their advances. All of them are committed, because they are below the
        linear position.
        """
        for writer in sorted(writers):
            yield from self.move_to(writer, linear)
        yield from self.reread_unlisted(linear, writers)

    def mark_settled(self, linear: int, writers: Iterable[str]) -> None:
        """Note that no other writers exist than the known ones and `writers`. A later writer begins beyond `linear`.

        A writer joins before it reserves, so the linear position cannot pass an ID of a writer that has not joined
        (docs/design.md 3). A writer that has left and that the linear position has passed is removed, so names do not
        accumulate.
        """
        listed = {*writers}
        self._is_settled = True
        self._add_writers(listed)
        self._linear = farther(linear, self._linear)
        for retired_writer in [
            writer
            for writer in self._positions
            if writer not in listed and not beyond(self._positions[writer], self._linear)
        ]:
            del self._positions[retired_writer]

    def _add_writers(self, writers: Iterable[str]) -> None:
        for writer in writers:
            self._positions.setdefault(writer, self._linear)

    def is_missing_any(self, positions: Mapping[str, int], late: int) -> bool:
        """Whether the merge lacks published positions or late completions."""
        return late > self._late or any(beyond(id, self.position_of(writer)) for writer, id in positions.items())


log = get_logger(__name__)

LOG_EVERY = 60.0  # seconds between two warnings that a stream is not known

PAGE = 5000  # advances of one query of Postgres: bounds memory and response time


class ListMerge:
    """One list, merged into the events of a stream.

    For each page of the list, call `may_lack_evidence`, then `add_history` if it returned True, then `add_entries`.
    After the last page, call `end`.

    Args:
        merge: the merge of the stream's events.
        is_complete: the reader has everything up to the positions that came with the newest entry of the list.
    """

    def __init__(self, merge: EventMerge, *, is_complete: bool) -> None:
        self._merge = merge
        self.has_history = False  # the whole history in Postgres was added
        self._is_complete = is_complete
        # The list has an entry that was handed over before, so no later entry was cut off. A refilled list has advances
        # only if it has all late completions (sinks.redis.mirror).
        self._has_overlap = False

    def may_lack_evidence(self, keys: StreamKeys, items: Sequence[Advance | Late | None]) -> bool:
        """Whether the list may lack evidence for the positions in `keys`, so that Postgres should be queried before
        `add_entries`.

        True for every list at first, because entries may have been cut off, and writers may have joined and retired.

        Args:
            keys: the keys of the stream.
            items: their list entries, parsed.
        """
        if not self._is_complete:
            return not self.has_history
        trial = EventMerge(self._merge.place)
        for item in items:
            if isinstance(item, Advance):
                if trial.leaves_gap(item):
                    return True
                all(trial.add_advance(item))
            elif item is not None:
                all(trial.add_late(item))
        return not keys.has_more and trial.is_missing_any(keys.positions, keys.late)

    def add_history(self, history: StreamHistory) -> Iterator[Event]:
        """Add a page of history from Postgres. After the last page, the merge has everything that was
        published before the query.
        """
        self.has_history = not history.has_more
        for writer, (position, advances) in history.chains.items():
            for advance in advances:
                yield from self._merge.add_advance(advance)
            yield from self._merge.move_to(writer, position)
        for late in history.late:
            yield from self._merge.add_late(late)

    def add_entries(self, items: Iterable[Advance | Late | None]) -> Iterator[Event]:
        for item in items:
            if isinstance(item, Advance):
                new = [*self._merge.add_advance(item)]
                self._has_overlap = self._has_overlap or not new
                yield from new
            elif item is not None:
                if not (self.has_history or self._is_complete or self._has_overlap):
                    yield from self._merge.note_late_lost(item.number - 1)
                new_late = [*self._merge.add_late(item)]
                self._has_overlap = self._has_overlap or not new_late
                yield from new_late

    def end(self, keys: StreamKeys) -> Iterator[Event]:
        """End the list. Call this when all entries that were published before `keys` were taken."""
        assert keys.linear is not None
        for writer, position in keys.positions.items():
            yield from self._merge.move_to(writer, position)
        if not (self._is_complete or self._merge.is_settled):
            yield from self._merge.reread_all(keys.linear, keys.positions)
        elif not (self.has_history or self._is_complete):
            yield from self._merge.reread_unlisted(keys.linear, keys.positions)
        yield from self._merge.note_late_lost(keys.late)
        self._merge.mark_settled(keys.linear, keys.positions)
        self._is_complete = True


Mode = Literal["vector", "linear"]


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A value that follows the last event of a read: everything that was published then is handed over."""


Steps = Generator[Request | Event | CaughtUp, Answer, None]


class FollowProgram:
    """The program that follows one stream.

    A token has no number of late completions. So if `since` is a token, late completions that are known at the first
    read are not handed over.

    Args:
        since: the reader's position; None: the positions at the first read.
        page: the number of advances of one query of Postgres.
        reads_table: the caller reads a table, which may be older than the stream. Until its place `is_settled`, ranges
            of unknown writers are handed over too.
    """

    def __init__(
        self, stream: str, mode: Mode, since: Place | Token | None, page: int = PAGE, *, reads_table: bool = False
    ) -> None:
        self._page = page
        self._reads_table = reads_table
        self._stream = stream
        self._mode = mode
        self._since = since
        self._merge: EventMerge | None = None
        self._linear_evidence: LinearEvidence | None = None
        self._unknown_since = self._logged_at = 0.0

    @property
    def place(self) -> Place | None:
        """The place after the last event that was handed over; None while the stream is unknown and no `since` was
        given.
        """
        if self._merge is None:
            return self._since if isinstance(self._since, Place) else None
        place = self._merge.place
        return Place(self._linear_evidence.linear, {}, place.late, is_settled=True) if self._linear_evidence else place

    @property
    def writers(self) -> int:
        """The number of known writers of the stream."""
        return len(self._merge.positions) if self._merge else 0

    def steps(self) -> Steps:
        while True:
            yield from self._follow_list()

    def _follow_list(self) -> Steps:
        """Follow one list until it is no continuation of the entries read before."""
        # Vector mode starts at the newest entry, because Postgres has all advances before. Linear mode reads the whole
        # list: entries beyond the linear position are the evidence of the next linear moves.
        starts_at_end = self._mode == "vector"
        is_new = self._merge is None and self._since is None
        keys = yield from self._read_keys(ReadNewest(self._stream) if starts_at_end else ReadList(self._stream, None))
        if self._merge is None and keys.linear is not None:
            while self._since is None and keys.has_more:
                keys = yield from self._read_keys(ReadList(self._stream, keys.entries[-1]))
            self._begin(keys)
        if self._merge is None or keys.linear is None:  # Redis does not know the stream: it is recovering
            yield from self._log_unknown()
            yield from self._await_entry(keys)
            return
        if self._linear_evidence:
            self._linear_evidence.mark_uncertain()
        list_merge = ListMerge(self._merge, is_complete=starts_at_end and is_new)
        last_entry: ListEntry | None = None
        if starts_at_end and not is_new:
            yield from self._add_history(list_merge, self._merge)
            if self._merge.is_missing_any(keys.positions, keys.late) or not list_merge.has_history:
                keys = yield from self._read_keys(ReadList(self._stream, None))
        if keys.linear is None:
            return
        while True:
            items = [*map(parse_entry, keys.entries)]
            if list_merge.may_lack_evidence(keys, items):
                yield from self._add_history(list_merge, self._merge)
            yield from self._writer_events(list_merge.add_entries(items))
            if keys.entries:
                last_entry = keys.entries[-1]
            if not keys.has_more:
                yield from self._writer_events(list_merge.end(keys))
                if self._linear_evidence:
                    yield from self._linear_evidence.move(keys.linear, keys.positions)
                yield CaughtUp()
                yield from self._await_entry(keys)
            if last_entry is None:  # after an empty list there is no entry to continue from
                return
            keys = yield from self._read_keys(ReadList(self._stream, last_entry))
            if keys.linear is None or not keys.is_continuous:
                return

    def _log_unknown(self) -> Generator[Request, Answer, None]:
        """Log at once, and again every minute, that the stream is unknown: the name may be misspelled."""
        now = time.monotonic()
        self._unknown_since = self._unknown_since or now
        if self._logged_at and now - self._logged_at < LOG_EVERY:
            return
        self._logged_at = now
        may_exist = yield from repeat_while_unavailable(CheckStreamName(self._stream))
        log.warning(
            "Waiting for a stream that is not known yet",
            stream=self._stream,
            seconds=round(now - self._unknown_since),
            why="no record of it was published: check its name" if may_exist is False else "Redis is recovering",
        )

    def _begin(self, keys: StreamKeys) -> None:
        assert keys.linear is not None
        match self._since:
            case None:
                begin = Place(keys.linear, keys.positions, keys.late, is_settled=True)
            case Token() as token:
                begin = Place.after(token, keys.late)
            case Place() as begin:
                pass
        if not self._reads_table:
            begin = replace(begin, is_settled=True)
        if self._mode == "linear":
            begin = Place(begin.linear, {}, begin.late, is_settled=True)
            self._linear_evidence = LinearEvidence(begin.linear)
        self._merge = EventMerge(begin)

    def _writer_events(self, events: Iterable[Event]) -> Iterator[Event]:
        """Pass on the events of writers; in linear mode only add them to the evidence."""
        for event in events:
            if self._linear_evidence and isinstance(event, Advance | Reread):
                self._linear_evidence.add_event(event)
            else:
                yield event

    def _read_keys(self, request: ReadList | ReadNewest) -> Generator[Request, Answer, StreamKeys]:
        keys = yield from repeat_while_unavailable(request)
        assert isinstance(keys, StreamKeys)
        return keys

    def _add_history(self, list_merge: ListMerge, merge: EventMerge) -> Generator[Request | Event, Answer, None]:
        """Add the history in Postgres, page by page."""
        while True:
            history = yield from repeat_while_unavailable(ReadHistory(self._stream, merge.place, self._page))
            if history is None:
                return
            assert isinstance(history, StreamHistory)
            yield from self._writer_events(list_merge.add_history(history))
            if not history.has_more:
                return

    def _await_entry(self, keys: StreamKeys) -> Generator[Request, Answer, None]:
        yield from repeat_while_unavailable(AwaitEntry(self._stream, keys.last, LONGEST_WAIT))
