"""The chain of one stream: what this process reserved or announced, what is in flight, what waits to be told to Kafka.

Pure: no socket, no clock of its own; magnitudes only. Edges tile the line from the JOIN on: every one begins at the ID
that was reserved or announced before it. What has ended is kept as spans of joined edges, never as single IDs, so that
an outage of Kafka costs no memory; which of their IDs are facts is in the outbox and nowhere else.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

VOIDS_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Span:
    """Joined edges `(prev, id]` whose transactions have all ended; `ids` of them were reserved.

    `since` is when the first of them ended (s, any zero).
    """

    prev: int
    id: int
    ids: int
    since: float

    def cut(self, at: int, ids: int) -> "tuple[Span, Span]":
        """The part up to the end of the edge `at`, which holds `ids` reserved IDs, and the rest."""
        return replace(self, id=at, ids=ids), replace(self, prev=at, ids=self.ids - ids)


@dataclass(frozen=True, slots=True)
class _Reserved:
    prev: int
    since: float
    life: int


class Chain:
    """Any thread may call; nothing here waits for anything but the others' bookkeeping.

    At most one `nextval` is in flight at a time: the caller sees to that, and brackets it by `begin` and either `took`
    or `missed`.
    """

    def __init__(self, start: int) -> None:
        self._lock = threading.Lock()
        self._last = start
        self._begun = 0
        self._reserving = False
        self._in_flight: dict[int, _Reserved] = {}
        self._starts: dict[int, Span] = {}
        self._ends: dict[int, Span] = {}
        self._voids: set[int] = set()
        self._life = 0
        self._untold = 0

    # -- reserving

    def begin(self) -> int:
        """A `nextval` is about to be sent. Gives the `prev` of what it will give."""
        with self._lock:
            self._reserving = True
            self._begun += 1
            return self._last

    def took(self, ids: Sequence[int], now: float) -> None:
        """It gave `ids`, ascending and beyond all that was reserved or announced; they are in flight."""
        with self._lock:
            self._reserving = False
            for id in ids:
                if id <= self._last:
                    raise ValueError(f"{id} was reserved after {self._last}")
                self._in_flight[id] = _Reserved(self._last, now, self._life)
                self._last = id

    def missed(self) -> None:
        """It failed, or its answer was lost. Should it have given an ID, or give one yet, no row will ever carry it.

        Its transaction cannot commit: it was aborted, or its connection is gone, or the library refuses to end it
        otherwise than by a rollback. So the next edge covers that ID rightly: nothing of ours is there.
        """
        with self._lock:
            self._reserving = False

    def prev(self, id: int) -> int:
        """What was reserved or announced before `id`, which is in flight."""
        with self._lock:
            return self._in_flight[id].prev

    def end(self, ids: Iterable[int], rowless: Iterable[int], now: float) -> None:
        """The transaction of `ids` has ended; of those that are `rowless` it is known that nothing was written."""
        with self._lock:
            void = set(rowless)
            for id in ids:
                reserved = self._in_flight.pop(id)
                self._untold += 1
                if id in void and reserved.life == self._life and len(self._voids) < VOIDS_KEPT:
                    self._voids.add(id)
                self._join(Span(reserved.prev, id, 1, now))

    # -- heartbeat

    def calm(self) -> int | None:
        """What to hand to `announce` with a `last_value` that is read after this call; None during a nextval."""
        with self._lock:
            return None if self._reserving else self._begun

    def announce(self, head: int, calm: int | None, now: float) -> bool:
        """Nothing of ours lies between the last ID and `head`, the sequence's `last_value`: an edge of its own.

        Whether there was anything to announce. Nothing is, where a nextval was in flight while `head` was read: it may
        be ours, and whoever reserved will complete it.
        """
        with self._lock:
            if self._reserving or calm != self._begun or head <= self._last:
                return False
            self._join(Span(self._last, head, 0, now))
            self._last = head
            return True

    # -- telling

    def take(self) -> list[Span]:
        """All that has ended and was not taken yet, in order. Each span comes back by `put_back` or goes by `told`."""
        with self._lock:
            spans = sorted(self._starts.values(), key=lambda span: span.prev)
            self._starts.clear()
            self._ends.clear()
            return spans

    def put_back(self, span: Span) -> None:
        with self._lock:
            self._join(span)

    def told(self, span: Span) -> None:
        """Kafka has acknowledged everything about `span`."""
        with self._lock:
            self._untold -= span.ids
            self._voids -= self._within(span)

    def voids(self, span: Span) -> list[int]:
        """IDs of `span` that are surely ours and without a fact, if the outbox has no row of them; may lack some."""
        with self._lock:
            return sorted(self._within(span))

    def doubt_voids(self) -> None:
        """The database may have crashed: it may give numbers again that it had given to us and nobody had committed.

        What we hold to be void may then be another writer's fact, so it must not count as a completed ID of the line
        (DESIGN 3): it is announced as an edge without an ID of its own.
        """
        with self._lock:
            self._life += 1
            self._voids.clear()

    # -- how it stands

    @property
    def last(self) -> int:
        with self._lock:
            return self._last

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def untold(self) -> int:
        """Reserved IDs whose transactions have ended and of which Kafka has not acknowledged what became of them."""
        return self._untold

    def oldest_in_flight(self) -> float | None:
        """When the oldest ID in flight was reserved."""
        with self._lock:  # IDs are reserved in order, and a dict keeps it
            return next((each.since for each in self._in_flight.values()), None)

    def oldest_ended(self) -> float | None:
        """When the oldest of what `take` would give ended."""
        with self._lock:
            return min((span.since for span in self._starts.values()), default=None)

    def _within(self, span: Span) -> set[int]:
        return {id for id in self._voids if span.prev < id <= span.id}

    def _join(self, span: Span) -> None:
        before, after = self._ends.pop(span.prev, None), self._starts.pop(span.id, None)
        for neighbour in (before, after):
            if neighbour is not None:
                self._starts.pop(neighbour.prev, None)
                self._ends.pop(neighbour.id, None)
                span = Span(
                    min(span.prev, neighbour.prev),
                    max(span.id, neighbour.id),
                    span.ids + neighbour.ids,
                    min(span.since, neighbour.since),
                )
        self._starts[span.prev] = self._ends[span.id] = span
