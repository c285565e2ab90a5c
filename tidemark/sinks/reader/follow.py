"""The program behind `follow`: takes a stream's list of advances, for as long as it lasts, into events. No sockets.

The list in Redis is a convenience that may be cut, emptied and begun anew at any time. So each reading of the list
begins with the entry that the last one ended with: where that entry is gone, the list is read from its start, and
Postgres is asked for what the list does not hold (or the reader is told to read the table). And whatever the list says,
a reading is over only when each writer stands where the positions say, which Redis gives in the same transaction.
"""

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
    ReadNewest,
    Request,
    StreamHistory,
    StreamKeys,
    patiently,
)
from tidemark.sinks.reader.token import Token

log = get_logger(__name__)

PAGE = 5000  # advances that Postgres is asked for at once: what is in hand is not let grow, and servers answer in time


class ListMerge:
    """Call `misses`, `remember` where it says so, then `take`, and `complete` where the list does not go on.

    `completed`: the reader stands where the positions said that came with the list's newest entry.
    """

    def __init__(self, joining: EventMerge, *, completed: bool) -> None:
        self._joining = joining
        self.recalled = False  # Postgres has told all that it knows
        self._completed = completed
        # The list has shown an entry that was handed over before: nothing was cut off behind it. One that was filled
        # anew has advances only where it has all late completions (sinks.redis.mirror).
        self._seam = False

    def misses(self, seen: StreamKeys, items: Sequence[Advance | Late | None]) -> bool:
        """Whether the list may lack evidence of what `seen` shows, so that Postgres should be asked before it is taken.
        `items` are its entries.

        True of every list at first: it holds neither what was cut off nor writers that came and went.
        """
        if not self._completed:
            return not self.recalled
        trial = EventMerge(self._joining.place)
        for item in items:
            if isinstance(item, Advance):
                if trial.leaves_hole(item):
                    return True
                all(trial.advance(item))
            elif item is not None:
                all(trial.complete(item))
        return not seen.more and trial.behind(seen.positions, seen.late)

    def remember(self, past: StreamHistory) -> Iterator[Event]:
        """Take in a page of what Postgres knows: with the last one, all that was published before it was asked."""
        self.recalled = not past.more
        for writer, (position, advances) in past.chains.items():
            for advance in advances:
                yield from self._joining.advance(advance)
            yield from self._joining.reach(writer, position)
        for late in past.late:
            yield from self._joining.complete(late)

    def take(self, items: Iterable[Advance | Late | None]) -> Iterator[Event]:
        for item in items:
            if isinstance(item, Advance):
                new = [*self._joining.advance(item)]
                self._seam = self._seam or not new
                yield from new
            elif item is not None:
                if not (self.recalled or self._completed or self._seam):
                    yield from self._joining.lose_late(item.number - 1)
                new_late = [*self._joining.complete(item)]
                self._seam = self._seam or not new_late
                yield from new_late

    def complete(self, seen: StreamKeys) -> Iterator[Event]:
        """Nothing is left on the list that was published when `seen` was read."""
        assert seen.linear is not None
        for writer, position in seen.positions.items():
            yield from self._joining.reach(writer, position)
        if not (self._completed or self._joining.is_settled):
            yield from self._joining.read_all(seen.linear, seen.positions)
        elif not (self.recalled or self._completed):
            yield from self._joining.sweep(seen.linear, seen.positions)
        yield from self._joining.lose_late(seen.late)
        self._joining.settle(seen.linear, seen.positions)
        self._completed = True


Mode = Literal["vector", "linear"]


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Everything published at the last reading has been handed over. For programs that build on this one."""


Steps = Generator[Request | Event | CaughtUp, Answer, None]


class FollowProgram:
    """`since` is what the reader has; None: what is published at the first reading.

    A token says nothing of late completions: those that are known at the first reading are not handed over then.
    `reads_table`: the caller reads a table, which may be older than the stream. Until its place `is_settled`, the
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
        self._joining: EventMerge | None = None
        self._lines: LinearEvidence | None = None
        self._said = False

    @property
    def place(self) -> Place | None:
        """The place after the last event handed over; None while Redis is recovering and we began nowhere."""
        if self._joining is None:
            return self._since if isinstance(self._since, Place) else None
        place = self._joining.place
        return Place(self._lines.linear, {}, place.late, is_settled=True) if self._lines else place

    @property
    def writers(self) -> int:
        """The number of known writers of the stream."""
        return len(self._joining.reached) if self._joining else 0

    def steps(self) -> Steps:
        while True:
            yield from self._follow_list()

    def _follow_list(self) -> Steps:
        """Until the list is not the one any more that we read so far."""
        # Of writers Postgres tells all that came before the list's end; the line needs what the list holds above it.
        ends = self._mode == "vector"
        fresh = self._joining is None and self._since is None
        seen = yield from self._seen_of(ReadNewest(self._stream) if ends else ReadList(self._stream, None))
        if self._joining is None and seen.linear is not None:
            while self._since is None and seen.more:
                seen = yield from self._seen_of(ReadList(self._stream, seen.entries[-1]))
            self._begin(seen)
        if self._joining is None or seen.linear is None:  # Redis knows nothing: it is recovering
            if not self._said:
                log.warning("Nothing is known of the stream yet; waiting for it", stream=self._stream)
            self._said = True
            yield from self._await_entry(seen)
            return
        if self._lines:
            self._lines.doubt()
        listing = ListMerge(self._joining, completed=ends and fresh)
        after: ListEntry | None = None
        if ends and not fresh:
            yield from self._recall(listing, self._joining)
            if self._joining.behind(seen.positions, seen.late) or not listing.recalled:
                seen = yield from self._seen_of(ReadList(self._stream, None))
        if seen.linear is None:
            return
        while True:
            items = [*map(parse_entry, seen.entries)]
            if listing.misses(seen, items):
                yield from self._recall(listing, self._joining)
            yield from self._handed(listing.take(items))
            if seen.entries:
                after = seen.entries[-1]
            if not seen.more:
                yield from self._handed(listing.complete(seen))
                if self._lines:
                    yield from self._lines.move(seen.linear, seen.positions)
                yield CaughtUp()
                yield from self._await_entry(seen)
            if after is None:  # an empty list gives no hold: it may have been longer, and cut, before we look again
                return
            seen = yield from self._seen_of(ReadList(self._stream, after))
            if seen.linear is None or not seen.joined:
                return

    def _begin(self, seen: StreamKeys) -> None:
        assert seen.linear is not None
        match self._since:
            case None:
                place = Place(seen.linear, seen.positions, seen.late, is_settled=True)
            case Token() as token:
                place = Place.after(token, seen.late)
            case Place() as place:
                pass
        if not self._reads_table:
            place = replace(place, is_settled=True)
        if self._mode == "linear":
            place = Place(place.linear, {}, place.late, is_settled=True)
            self._lines = LinearEvidence(place.linear)
        self._joining = EventMerge(place)

    def _handed(self, events: Iterable[Event]) -> Iterator[Event]:
        """In linear mode the writers' events are only noted."""
        for event in events:
            if self._lines and isinstance(event, Advance | Reread):
                self._lines.note(event)
            else:
                yield event

    def _seen_of(self, request: ReadList | ReadNewest) -> Generator[Request, Answer, StreamKeys]:
        seen = yield from patiently(request)
        assert isinstance(seen, StreamKeys)
        return seen

    def _recall(self, listing: ListMerge, joining: EventMerge) -> Generator[Request | Event, Answer, None]:
        """Ask Postgres, page after page."""
        while True:
            past = yield from patiently(ReadHistory(self._stream, joining.place, self._page))
            if past is None:
                return
            assert isinstance(past, StreamHistory)
            yield from self._handed(listing.remember(past))
            if not past.more:
                return

    def _await_entry(self, seen: StreamKeys) -> Generator[Request, Answer, None]:
        yield from patiently(AwaitEntry(self._stream, seen.last, LONGEST_WAIT))
