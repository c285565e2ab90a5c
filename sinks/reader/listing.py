"""Takes one list of advances, from its start and for as long as it lasts, into what is handed over. Pure."""

from collections.abc import Iterator, Sequence

from tidemark.sinks.reader.asks import Entry, Past, Seen
from tidemark.sinks.reader.entries import parse
from tidemark.sinks.reader.events import Advance, Event
from tidemark.sinks.reader.joining import Joining


class Listing:
    """Call `misses`, `remember` where it says so, then `take`, and `complete` where the list does not go on."""

    def __init__(self, joining: Joining) -> None:
        self._joining = joining
        self._recalled = False
        self._completed = False
        self._seam = False  # the list has shown an entry that was handed over before: nothing was cut off behind it

    def misses(self, seen: Seen) -> bool:
        """Whether the list may not tell all that `seen` shows, so that Postgres should be asked before it is taken.

        True of every list at first: it tells neither what was cut off nor of writers that came and went.
        """
        if not self._completed:
            return not self._recalled
        trial = Joining(self._joining.place)
        for item in map(parse, seen.entries):
            if isinstance(item, Advance):
                if trial.leaves_hole(item):
                    return True
                all(trial.advance(item))
            elif item is not None:
                all(trial.complete(item))
        return not seen.more and trial.behind(seen.positions, seen.late)

    def remember(self, past: Past) -> Iterator[Event]:
        """What Postgres knows: everything that was published before it was asked."""
        self._recalled = True
        for writer, (position, advances) in past.chains.items():
            for advance in advances:
                yield from self._joining.advance(advance)
            yield from self._joining.reach(writer, position)
        for late in past.late:
            yield from self._joining.complete(late)

    def take(self, entries: Sequence[Entry]) -> Iterator[Event]:
        for item in map(parse, entries):
            if isinstance(item, Advance):
                new = [*self._joining.advance(item)]
                self._seam = self._seam or not new
                yield from new
            elif item is not None:
                if not (self._recalled or self._completed or self._seam):
                    yield from self._joining.lose_late(item.number - 1)
                new_late = [*self._joining.complete(item)]
                self._seam = self._seam or not new_late
                yield from new_late

    def complete(self, seen: Seen) -> Iterator[Event]:
        """Nothing is left on the list that was published when `seen` was read."""
        assert seen.linear is not None
        for writer, position in seen.positions.items():
            yield from self._joining.reach(writer, position)
        if not (self._recalled or self._completed):
            yield from self._joining.sweep(seen.linear, seen.positions)
        yield from self._joining.lose_late(seen.late)
        self._joining.settle(seen.linear, seen.positions)
        self._completed = True
