"""The program behind `follow`: turns a stream's list of advances into events, for as long as it runs. No sockets.

The list in Redis may be cut, emptied and begun again at any time. So each reading begins with the entry that the last
reading ended with. If that entry is gone, the list is read from its start, and Postgres is asked for what the list does
not hold; without Postgres the reader is told to read the table. And a reading is complete only when each writer is at
the position that Redis gives in the same transaction.
"""

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tidemark.common.log import get_logger
from tidemark.sinks.reader.events import Advance, Event, Late, Place, Reread
from tidemark.sinks.reader.merge import EventMerge, LinearEvidence
from tidemark.sinks.reader.redis import parse_entry
from tidemark.sinks.reader.requests import (
    LONGEST_WAIT,
    Answer,
    AwaitEntry,
    ListEntry,
    ReadHistory,
    ReadList,
    ReadName,
    ReadNewest,
    Request,
    StreamHistory,
    StreamKeys,
    patiently,
)
from tidemark.sinks.reader.token import Token

log = get_logger(__name__)

LOG_EVERY = 60.0  # seconds between two warnings that a stream is not known

PAGE = 5000  # advances that Postgres is asked for at once: bounds the memory, and the time of an answer


class ListMerge:
    """One list, merged into the events of a stream.

    Call `misses`, then `add_history` if it returns True, then `take`, and `complete` if the list has no more entries.

    Args:
        joining: the events so far.
        completed: the reader has everything up to the positions that came with the newest entry of the list.
    """

    def __init__(self, merge: EventMerge, *, completed: bool) -> None:
        self._merge = merge
        self.has_history = False  # everything that Postgres has was added
        self._completed = completed
        # The list has an entry that was handed over before: nothing after it was cut off. A list that was filled again
        # has advances only if it has all late completions (sinks.redis.mirror).
        self._overlaps = False

    def misses(self, keys: StreamKeys, items: Sequence[Advance | Late | None]) -> bool:
        """Whether the list may lack evidence of what `keys` shows, so that Postgres should be asked before the list is
        taken.

        True for every list at first: it has neither entries that were cut off nor writers that joined and retired
        meanwhile.

        Args:
            seen: the keys of the stream.
            items: their list entries, parsed.
        """
        if not self._completed:
            return not self.has_history
        trial = EventMerge(self._merge.place)
        for item in items:
            if isinstance(item, Advance):
                if trial.leaves_gap(item):
                    return True
                all(trial.advance(item))
            elif item is not None:
                all(trial.complete(item))
        return not keys.more and trial.is_behind(keys.positions, keys.late)

    def add_history(self, history: StreamHistory) -> Iterator[Event]:
        """Add a page of history from Postgres. With the last page, everything is there that was published before it was
        read."""
        self.has_history = not history.more
        for writer, (position, advances) in history.chains.items():
            for advance in advances:
                yield from self._merge.advance(advance)
            yield from self._merge.reach(writer, position)
        for late in history.late:
            yield from self._merge.complete(late)

    def take(self, items: Iterable[Advance | Late | None]) -> Iterator[Event]:
        for item in items:
            if isinstance(item, Advance):
                new = [*self._merge.advance(item)]
                self._overlaps = self._overlaps or not new
                yield from new
            elif item is not None:
                if not (self.has_history or self._completed or self._overlaps):
                    yield from self._merge.lose_late(item.number - 1)
                new_late = [*self._merge.complete(item)]
                self._overlaps = self._overlaps or not new_late
                yield from new_late

    def complete(self, keys: StreamKeys) -> Iterator[Event]:
        """Call this when the list has no entry left that was published before `keys` was read."""
        assert keys.linear is not None
        for writer, position in keys.positions.items():
            yield from self._merge.reach(writer, position)
        if not (self._completed or self._merge.is_settled):
            yield from self._merge.read_all(keys.linear, keys.positions)
        elif not (self.has_history or self._completed):
            yield from self._merge.sweep(keys.linear, keys.positions)
        yield from self._merge.lose_late(keys.late)
        self._merge.settle(keys.linear, keys.positions)
        self._completed = True


Mode = Literal["vector", "linear"]


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Everything published at the last reading was handed over. For programs that build on this one."""


Steps = Generator[Request | Event | CaughtUp, Answer, None]


class FollowProgram:
    """The program that follows one stream.

    A token says nothing about late completions: those that are known at the first reading are not handed over.

    Args:
        since: what the reader has; None: what is published at the first reading.
        page: how many advances Postgres is asked for at once.
        reads_table: the caller reads a table, which may be older than the stream. Until its place `is_settled`, the
            ranges of rows whose writers Tidemark does not know are handed over too.
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
        self._unknown_since = self._logged = 0.0

    @property
    def place(self) -> Place | None:
        """The place after the last event that was handed over. None while nothing is known, if no `since` was given."""
        if self._merge is None:
            return self._since if isinstance(self._since, Place) else None
        place = self._merge.place
        return Place(self._linear_evidence.linear, {}, place.late, is_settled=True) if self._linear_evidence else place

    @property
    def writers(self) -> int:
        """The number of known writers of the stream."""
        return len(self._merge.reached) if self._merge else 0

    def steps(self) -> Steps:
        while True:
            yield from self._follow_list()

    def _follow_list(self) -> Steps:
        """Runs until the list is not a continuation of what was read so far."""
        # Postgres has everything of writers up to the end of the list. Linear mode needs entries above it.
        ends = self._mode == "vector"
        fresh = self._merge is None and self._since is None
        keys = yield from self._read_keys(ReadNewest(self._stream) if ends else ReadList(self._stream, None))
        if self._merge is None and keys.linear is not None:
            while self._since is None and keys.more:
                keys = yield from self._read_keys(ReadList(self._stream, keys.entries[-1]))
            self._begin(keys)
        if self._merge is None or keys.linear is None:  # Redis does not know the stream: it is recovering
            yield from self._log_unknown()
            yield from self._await_entry(keys)
            return
        if self._linear_evidence:
            self._linear_evidence.mark_uncertain()
        list_merge = ListMerge(self._merge, completed=ends and fresh)
        last_entry: ListEntry | None = None
        if ends and not fresh:
            yield from self._add_history(list_merge, self._merge)
            if self._merge.is_behind(keys.positions, keys.late) or not list_merge.has_history:
                keys = yield from self._read_keys(ReadList(self._stream, None))
        if keys.linear is None:
            return
        while True:
            items = [*map(parse_entry, keys.entries)]
            if list_merge.misses(keys, items):
                yield from self._add_history(list_merge, self._merge)
            yield from self._writer_events(list_merge.take(items))
            if keys.entries:
                last_entry = keys.entries[-1]
            if not keys.more:
                yield from self._writer_events(list_merge.complete(keys))
                if self._linear_evidence:
                    yield from self._linear_evidence.move(keys.linear, keys.positions)
                yield CaughtUp()
                yield from self._await_entry(keys)
            if last_entry is None:  # after an empty list there is no entry to continue from
                return
            keys = yield from self._read_keys(ReadList(self._stream, last_entry))
            if keys.linear is None or not keys.joined:
                return

    def _log_unknown(self) -> Generator[Request, Answer, None]:
        """Log at once, and again every minute: the name may be mistyped."""
        now = time.monotonic()
        self._unknown_since = self._unknown_since or now
        if self._logged and now - self._logged < LOG_EVERY:
            return
        self._logged = now
        may_exist = yield from patiently(ReadName(self._stream))
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
                place = Place(keys.linear, keys.positions, keys.late, is_settled=True)
            case Token() as token:
                place = Place.after(token, keys.late)
            case Place() as place:
                pass
        if not self._reads_table:
            place = replace(place, is_settled=True)
        if self._mode == "linear":
            place = Place(place.linear, {}, place.late, is_settled=True)
            self._linear_evidence = LinearEvidence(place.linear)
        self._merge = EventMerge(place)

    def _writer_events(self, events: Iterable[Event]) -> Iterator[Event]:
        """In linear mode the events of writers are only noted."""
        for event in events:
            if self._linear_evidence and isinstance(event, Advance | Reread):
                self._linear_evidence.note(event)
            else:
                yield event

    def _read_keys(self, request: ReadList | ReadNewest) -> Generator[Request, Answer, StreamKeys]:
        keys = yield from patiently(request)
        assert isinstance(keys, StreamKeys)
        return keys

    def _add_history(self, list_merge: ListMerge, merge: EventMerge) -> Generator[Request | Event, Answer, None]:
        """Read the history in Postgres, page after page."""
        while True:
            history = yield from patiently(ReadHistory(self._stream, merge.place, self._page))
            if history is None:
                return
            assert isinstance(history, StreamHistory)
            yield from self._writer_events(list_merge.add_history(history))
            if not history.more:
                return

    def _await_entry(self, keys: StreamKeys) -> Generator[Request, Answer, None]:
        yield from patiently(AwaitEntry(self._stream, keys.last, LONGEST_WAIT))
