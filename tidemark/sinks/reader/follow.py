"""The program that follows a stream: turns the stream's list of advances in Redis into events. No sockets.

The list of advances is a Redis Stream. Entries may be removed from the list, and the list may be deleted and filled
again, at any time. So each read begins with the last entry of the previous read. If that entry is gone, the program
reads the list from its start, and queries Postgres for missing advances. Without Postgres, the events name ranges that
a reader must read from the table (`Reread`). A read is complete only when each writer is at the position that Redis
returned in the same transaction.

`EventMerge` merges the list, the history and the positions of a stream into one chain of events per writer. Its input
may have duplicates and gaps. The output has neither: the `prev` of an event is the `id` of the writer's previous event
(Rule 3), and no event is handed over twice. A writer that retired and joins again begins at the linear position, like a
new writer. `LinearEvidence` makes the moves of the linear position from the events of writers.
"""

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tidemark.common.log import get_logger
from tidemark.sinks.reader.events import Advance, Event, Late, LinearMove, MissingLateCompletions, Place, Reread
from tidemark.sinks.reader.redis import parse_entry
from tidemark.sinks.reader.requests import (
    LONGEST_WAIT_SECONDS,
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
from tidemark.streaming.values.direction import farther, is_beyond


class LinearEvidence:
    """Turns moves of the linear position into `LinearMove` events.

    The linear position may pass an ID before the follower has read the position of the ID's writer. The linear position
    may also pass IDs of writers that joined and retired between two reads. So `LinearMove.known` is true only if all
    of these hold:

    - The range begins at or beyond every position at the end of the first read (or the first after `mark_uncertain`).
    - Every writer's position is at or beyond the end of the range.
    - No event that overlaps the range is a `Reread`.

    `linear` is the linear position after the last move.
    """

    def __init__(self, linear: int) -> None:
        self.linear = linear
        self._watched_from_id: int | None = None
        self._events: list[Advance | Reread] = []

    def add_event(self, event: Advance | Reread) -> None:
        """Add an event of a writer. The evidence of the event is used for later moves."""
        if is_beyond(event.id, self.linear):
            self._events.append(event)

    def mark_uncertain(self) -> None:
        """Record that advances may have been missed: the next moves are not `known`."""
        self._watched_from_id = None

    def move(self, linear: int, writers: Mapping[str, int]) -> Iterator[LinearMove]:
        """Yield the move to the linear position `linear`; nothing if `linear` is not beyond the last move.

        Args:
            linear: the published linear position.
            writers: writer -> its published position. Every event up to these positions must have been added.
        """
        if is_beyond(linear, self.linear):
            overlapping = [event for event in self._events if is_beyond(linear, event.prev)]
            known = (
                self._watched_from_id is not None
                and not is_beyond(self._watched_from_id, self.linear)
                and not any(is_beyond(linear, position) for position in writers.values())
                and not any(isinstance(event, Reread) for event in overlapping)
            )
            advances = tuple(event for event in overlapping if isinstance(event, Advance))
            prev, self.linear = self.linear, linear
            self._events = [event for event in self._events if is_beyond(event.id, linear)]
            yield LinearMove(prev, linear, advances, known)
        if self._watched_from_id is None:
            self._watched_from_id = max((linear, *writers.values()), key=abs)


class EventMerge:
    """Merges published advances, late completions and positions, in any order, and yields the new events.

    Methods that return an iterator do their work only when the caller takes the events. The place moves with each
    event.
    """

    def __init__(self, place: Place) -> None:
        self._linear = place.linear
        self._positions = dict(place.positions)
        self._last_late_number = place.late
        self._is_settled = place.is_settled

    @property
    def place(self) -> Place:
        return Place(self._linear, dict(self._positions), self._last_late_number, self._is_settled)

    @property
    def is_settled(self) -> bool:
        """See `Place.is_settled`."""
        return self._is_settled

    @property
    def linear(self) -> int:
        """The position up to which the IDs of every writer without an entry in `positions` were handed over."""
        return self._linear

    @property
    def last_late_number(self) -> int:
        return self._last_late_number

    @property
    def positions(self) -> Mapping[str, int]:
        """Each known writer -> the position up to which the IDs of the writer were handed over."""
        return self._positions

    def position_of(self, writer: str) -> int:
        return self._positions.get(writer, self._linear)

    def leaves_gap(self, advance: Advance) -> bool:
        """Whether the advance begins beyond the last position of its writer.

        If so, the evidence of the IDs between the two is missing.
        """
        return is_beyond(advance.prev, self.position_of(advance.writer))

    def add_advance(self, advance: Advance) -> Iterator[Advance | Reread]:
        """Yield the new part of the advance. If the advance leaves a gap, yield a `Reread` of the gap first.

        Yields nothing if no part is new.
        """
        reached = self.position_of(advance.writer)
        if is_beyond(advance.id, reached):
            if self.leaves_gap(advance):
                yield from self.move_to(advance.writer, advance.prev)
            self._positions[advance.writer] = advance.id
            yield replace(advance, prev=reached) if is_beyond(reached, advance.prev) else advance

    def move_to(self, writer: str, position: int) -> Iterator[Reread]:
        """Move the writer to `position` without advances, and yield the range as a `Reread`.

        Yields nothing if the writer is already at or beyond `position`.
        """
        reached = self.position_of(writer)
        if is_beyond(position, reached):
            self._positions[writer] = position
            yield Reread(writer, reached, position)

    def add_late(self, late: Late) -> Iterator[Late]:
        """Yield the late completion, if its number is higher than all numbers before."""
        if late.number > self._last_late_number:
            self._last_late_number = late.number
            yield late

    def note_missing_late_completions(self, number: int) -> Iterator[MissingLateCompletions]:
        """Yield the late completions up to `number` as one `MissingLateCompletions`: they are not available.

        Yields nothing if a late completion with this or a higher number was handed over.
        """
        if number > self._last_late_number:
            after, self._last_late_number = self._last_late_number, number
            yield MissingLateCompletions(after, number)

    def reread_without_advances(self, linear: int, writers: Mapping[str, int]) -> Iterator[Reread]:
        """Yield a `Reread` up to `linear` of each known writer that is not in `writers`, and of unknown writers.

        A known writer that is not in `writers` has retired, and its last advances are not available. Tidemark removes a
        writer only when the linear position has passed the writer. So no advance of the writer was beyond `linear`.
        Unknown writers may have joined and retired since the last read.
        """
        for retired_writer in sorted(self._positions.keys() - writers.keys()):
            yield from self.move_to(retired_writer, linear)
        if is_beyond(linear, self._linear):
            self._add_writers(writers)
            prev, self._linear = self._linear, linear
            yield Reread(None, prev, linear, frozenset(self._positions))

    def reread_all(self, linear: int, writers: Mapping[str, int]) -> Iterator[Reread]:
        """Yield a `Reread` for every range up to `linear` that no event has named. For the first read of a stream.

        The table may be older than the stream. Then the table has rows of writers that Tidemark does not know, rows
        without a writer, and rows of known writers beyond their advances. All these rows are committed, because their
        IDs are not beyond the linear position.
        """
        for writer in sorted(writers):
            yield from self.move_to(writer, linear)
        yield from self.reread_without_advances(linear, writers)

    def mark_settled(self, linear: int, writers: Iterable[str]) -> None:
        """Set the position of unknown writers to `linear`, set `is_settled`, and forget retired writers.

        Call this when everything up to `linear` was handed over. A new writer begins beyond `linear`: a writer joins
        before it reserves, so the linear position cannot pass an ID of a writer that has not joined (docs/design.md 3).

        Args:
            linear: the published linear position.
            writers: the names of the published writers. Any other writer that the linear position has passed is
                forgotten, so that names do not accumulate.
        """
        published_writers = {*writers}
        self._is_settled = True
        self._add_writers(published_writers)
        self._linear = farther(linear, self._linear)
        for retired_writer in [
            writer
            for writer in self._positions
            if writer not in published_writers and not is_beyond(self._positions[writer], self._linear)
        ]:
            del self._positions[retired_writer]

    def _add_writers(self, writers: Iterable[str]) -> None:
        for writer in writers:
            self._positions.setdefault(writer, self._linear)

    def is_missing_any(self, positions: Mapping[str, int], last_late_number: int) -> bool:
        """Whether something that was published is still to be handed over.

        Args:
            positions: writer -> its published position.
            last_late_number: the number of the newest published late completion.
        """
        return last_late_number > self._last_late_number or any(
            is_beyond(id, self.position_of(writer)) for writer, id in positions.items()
        )


log = get_logger(__name__)

WARNING_SECONDS = 60.0  # between two warnings that a stream is not known

HISTORY_PAGE_ADVANCES = 5000  # the most advances that one query of Postgres returns: bounds memory and response time


class ListMerge:
    """Merges one list of advances in Redis, and history from Postgres, into the events of a stream.

    For each page of the list, call `may_lack_evidence`. If the result is True, call `add_history` for each page of the
    history. Then call `add_entries`. After the last page of the list, call `end`.

    Args:
        merge: the merge of the stream's events.
        is_complete: whether `merge` is at the positions that Redis returned with the newest entry of the list, so that
            earlier entries are not needed.
    """

    def __init__(self, merge: EventMerge, *, is_complete: bool) -> None:
        self._merge = merge
        self.has_history = False  # the whole history in Postgres was added
        self._is_complete = is_complete
        # The list has an entry that was handed over before, so no later entry was cut off. A refilled list has advances
        # only if it has all late completions (sinks.redis.mirror).
        self._has_overlap = False

    def may_lack_evidence(self, keys: StreamKeys, items: Sequence[Advance | Late | None]) -> bool:
        """Whether the list may lack evidence for the positions in `keys`: then query Postgres before `add_entries`.

        Unless `is_complete` was given, True until all history was added: old entries may have been removed from the
        list, and writers may have joined and retired. Later, True only if this page leaves a gap, or if it is the last
        page and something that was published is still missing.

        Args:
            keys: the keys of the stream, with one page of the list.
            items: the entries of the page, parsed by `parse_entry`.
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
        return not keys.has_more and trial.is_missing_any(keys.positions, keys.last_late_number)

    def add_history(self, history: StreamHistory) -> Iterator[Event]:
        """Add a page of history from Postgres, and yield the new events.

        After the last page, the merge has everything that was published before the query.
        """
        self.has_history = not history.has_more
        for writer, (position, advances) in history.chains.items():
            for advance in advances:
                yield from self._merge.add_advance(advance)
            yield from self._merge.move_to(writer, position)
        for late in history.late:
            yield from self._merge.add_late(late)

    def add_entries(self, items: Iterable[Advance | Late | None]) -> Iterator[Event]:
        """Add the parsed entries of a page, and yield the new events. None (an unknown kind of entry) is left out."""
        for item in items:
            if isinstance(item, Advance):
                new = [*self._merge.add_advance(item)]
                self._has_overlap = self._has_overlap or not new
                yield from new
            elif item is not None:
                if not (self.has_history or self._is_complete or self._has_overlap):
                    yield from self._merge.note_missing_late_completions(item.number - 1)
                new_late = [*self._merge.add_late(item)]
                self._has_overlap = self._has_overlap or not new_late
                yield from new_late

    def end(self, keys: StreamKeys) -> Iterator[Event]:
        """Yield what the list lacks up to the positions in `keys`, as `Reread` and `MissingLateCompletions`.

        Call this after every entry has been added that was published before `keys` was read.
        """
        assert keys.linear is not None
        for writer, position in keys.positions.items():
            yield from self._merge.move_to(writer, position)
        if not (self._is_complete or self._merge.is_settled):
            yield from self._merge.reread_all(keys.linear, keys.positions)
        elif not (self.has_history or self._is_complete):
            yield from self._merge.reread_without_advances(keys.linear, keys.positions)
        yield from self._merge.note_missing_late_completions(keys.last_late_number)
        self._merge.mark_settled(keys.linear, keys.positions)
        self._is_complete = True


Mode = Literal["vector", "linear"]


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Yielded after the last event of a read: everything that was published when the list was read is handed over."""


Steps = Generator[Request | Event | CaughtUp, Answer, None]


class FollowProgram:
    """The program that follows one stream. Use a `Driver` to run `steps`.

    A token has no number of late completions. So if `since` is a token, late completions that were published before the
    first read are not handed over.

    Args:
        stream: the name of the stream.
        mode: "vector" for events of each writer, "linear" for moves of the linear position.
        since: the place or token after which to begin; None: the positions at the first read.
        page: the most advances that one query of Postgres returns.
        reads_table: whether the caller reads the table of the stream, which may be older than the stream. If so, and
            the place is not `is_settled`, the first read also hands over ranges of unknown writers.
    """

    def __init__(
        self,
        stream: str,
        mode: Mode,
        since: Place | Token | None,
        page: int = HISTORY_PAGE_ADVANCES,
        *,
        reads_table: bool = False,
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
        """The place after the last event that was handed over.

        While the stream is unknown: the `Place` that was given as `since`; None if `since` was not a `Place`.
        """
        if self._merge is None:
            return self._since if isinstance(self._since, Place) else None
        place = self._merge.place
        return Place(self._linear_evidence.linear, {}, place.late, is_settled=True) if self._linear_evidence else place

    @property
    def writer_count(self) -> int:
        """The number of known writers of the stream; 0 while the stream is unknown."""
        return len(self._merge.positions) if self._merge else 0

    def steps(self) -> Steps:
        """Yield requests, events, and a `CaughtUp` after each complete read. Never ends."""
        while True:
            yield from self._follow_list()

    def _follow_list(self) -> Steps:
        """Follow the list in Redis until it no longer has the entry that was read last."""
        # Vector mode starts at the newest entry, because Postgres has all advances before. Linear mode reads the whole
        # list: entries beyond the linear position are the evidence of the next linear moves.
        starts_at_end = self._mode == "vector"
        is_new = self._merge is None and self._since is None
        keys = yield from self._read_keys(ReadNewest(self._stream) if starts_at_end else ReadList(self._stream, None))
        if self._merge is None and keys.linear is not None:
            while self._since is None and keys.has_more:
                keys = yield from self._read_keys(ReadList(self._stream, keys.entries[-1]))
            self._begin(keys)
        if self._merge is None or keys.linear is None:  # the stream is unknown, or Redis is recovering
            yield from self._log_unknown()
            yield from self._await_entry(keys)
            return
        if self._linear_evidence:
            self._linear_evidence.mark_uncertain()
        list_merge = ListMerge(self._merge, is_complete=starts_at_end and is_new)
        last_entry: ListEntry | None = None
        if starts_at_end and not is_new:
            yield from self._add_history(list_merge, self._merge)
            if self._merge.is_missing_any(keys.positions, keys.last_late_number) or not list_merge.has_history:
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
        """Log that the stream is unknown, at the first call and then once a minute: the name may be misspelled."""
        now = time.monotonic()
        self._unknown_since = self._unknown_since or now
        if self._logged_at and now - self._logged_at < WARNING_SECONDS:
            return
        self._logged_at = now
        may_exist = yield from repeat_while_unavailable(CheckStreamName(self._stream))
        log.warning(
            "Waiting for a stream that is not known yet",
            stream=self._stream,
            seconds=round(now - self._unknown_since),
            why="no record of the stream was published: check the name"
            if may_exist is False
            else "Redis is recovering",
        )

    def _begin(self, keys: StreamKeys) -> None:
        """Create the merge at `since`, or at the positions in `keys`. In linear mode, also the linear evidence."""
        assert keys.linear is not None
        match self._since:
            case None:
                begin = Place(keys.linear, keys.positions, keys.last_late_number, is_settled=True)
            case Token() as token:
                begin = Place.after(token, keys.last_late_number)
            case Place() as begin:
                pass
        if not self._reads_table:
            begin = replace(begin, is_settled=True)
        if self._mode == "linear":
            begin = Place(begin.linear, {}, begin.late, is_settled=True)
            self._linear_evidence = LinearEvidence(begin.linear)
        self._merge = EventMerge(begin)

    def _writer_events(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events. In linear mode, add each `Advance` and `Reread` to the evidence instead of yielding it."""
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
        """Read the history in Postgres page by page, and yield its new events. Nothing without a Postgres."""
        while True:
            history = yield from repeat_while_unavailable(ReadHistory(self._stream, merge.place, self._page))
            if history is None:
                return
            assert isinstance(history, StreamHistory)
            yield from self._writer_events(list_merge.add_history(history))
            if not history.has_more:
                return

    def _await_entry(self, keys: StreamKeys) -> Generator[Request, Answer, None]:
        """Wait until the list has an entry after the last one in `keys`, or for `LONGEST_WAIT_SECONDS`."""
        yield from repeat_while_unavailable(AwaitEntry(self._stream, keys.last_entry_name, LONGEST_WAIT_SECONDS))
