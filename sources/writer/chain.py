"""The chain of one stream in this process: IDs reserved or announced, IDs in flight, and spans that await Kafka.

Pure: no socket, no clock of its own; magnitudes only. Edges tile the line from the JOIN on: every one begins at the ID
that was reserved or announced before it. What has ended is kept as spans of joined edges, never as single IDs, so that
an outage of Kafka costs no memory; which of their IDs are facts is in the outbox and nowhere else.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

VOIDS_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class SettledSpan:
    """Joined edges `(prev, id]` whose transactions have all ended; `ids` of them were reserved.

    `since` is when the first of them ended (s, any zero).
    """

    prev: int
    id: int
    ids: int
    since: float

    def cut(self, at: int, ids: int) -> "tuple[SettledSpan, SettledSpan]":
        """The part up to the end of the edge `at`, which holds `ids` reserved IDs, and the rest."""
        return replace(self, id=at, ids=ids), replace(self, prev=at, ids=self.ids - ids)


@dataclass(frozen=True, slots=True)
class NextvalCall:
    """A `nextval` on its way. It must give more than `floor`, or the sequence was set back."""

    number: int
    floor: int
    life: int


@dataclass(slots=True)
class _Reserved:
    """`prev` is None while the ID has no place yet."""

    since: float
    life: int
    prev: int | None = None


class ReservationChain:
    """Any thread may call; nothing here waits for anything but the others' bookkeeping.

    Several `nextval` may be on their way at once, and their answers come in any order. So an ID gets its place in the
    chain only when no call is out any more that was begun before the ID came: whatever begins later gives a higher one.
    """

    def __init__(self, start: int) -> None:
        self._lock = threading.Lock()
        self._last = start
        """The last ID with a place: where the next edge begins."""
        self._highest = start
        self._begun = 0
        self._out: dict[int, None] = {}
        self._came: deque[tuple[int, int]] = deque()
        """How many calls had begun when an ID came that has no place yet, and the ID."""
        self._loose: set[int] = set()
        self._ended_loose: dict[int, float] = {}
        self._in_flight: dict[int, _Reserved] = {}
        self._starts: dict[int, SettledSpan] = {}
        self._ends: dict[int, SettledSpan] = {}
        self._voids: set[int] = set()
        self._life = 0
        self._unacknowledged = 0

    # -- reserving

    def begin(self) -> NextvalCall:
        """A `nextval` is about to be sent; it ends with `took` or `missed`."""
        with self._lock:
            self._begun += 1
            self._out[self._begun] = None
            return NextvalCall(self._begun, self._highest, self._life)

    def took(self, call: NextvalCall, ids: Sequence[int], now: float) -> None:
        """The call gave `ids`, ascending; they are in flight."""
        with self._lock:
            if ids[0] <= call.floor:
                raise ValueError(f"{ids[0]} was reserved after {call.floor}")
            del self._out[call.number]
            for id in ids:
                self._in_flight[id] = _Reserved(now, call.life)
            self._highest = max(self._highest, ids[-1])
            self._came.append((self._begun, ids[-1]))
            self._loose.update(ids)
            self._place()

    def missed(self, call: NextvalCall) -> None:
        """The call failed, or its answer was lost. If it has given an ID, or gives one yet, no row will ever carry it.

        Its transaction cannot commit: it was aborted, or its connection is gone, or the library refuses to end it
        otherwise than by a rollback. So the edge that covers that ID says rightly that nothing of ours is there.
        """
        with self._lock:
            del self._out[call.number]
            self._place()

    def end(self, ids: Iterable[int], rowless: Iterable[int], now: float) -> None:
        """The transaction of `ids` has ended; of those that are `rowless` it is known that nothing was written."""
        with self._lock:
            void = set(rowless)
            for id in ids:
                reserved = self._in_flight.pop(id)
                self._unacknowledged += 1
                if id in void and reserved.life == self._life and len(self._voids) < VOIDS_KEPT:
                    self._voids.add(id)
                if reserved.prev is None:
                    self._ended_loose[id] = now
                else:
                    self._join(SettledSpan(reserved.prev, id, 1, now))

    # -- heartbeat

    def calm(self) -> int | None:
        """The argument `calm` of `announce`, for a `last_value` that is read after this call; None during a nextval."""
        with self._lock:
            return None if self._out else self._begun

    def announce(self, allocated: int, calm: int | None, now: float) -> bool:
        """Nothing of ours lies between the last ID and `allocated`, the sequence's `last_value`: an edge of its own.

        Whether there was anything to announce. Nothing is, where a nextval was in flight while `allocated` was read: it
        may be ours, and whoever reserved will complete it.
        """
        with self._lock:
            if calm != self._begun or allocated <= self._last:
                return False
            self._join(SettledSpan(self._last, allocated, 0, now))
            self._last = self._highest = allocated
            return True

    # -- telling

    def take(self) -> list[SettledSpan]:
        """What has ended and was not taken, in order. A span comes back by `put_back` or goes by `acknowledged`."""
        with self._lock:
            spans = sorted(self._starts.values(), key=lambda span: span.prev)
            self._starts.clear()
            self._ends.clear()
            return spans

    def put_back(self, span: SettledSpan) -> None:
        with self._lock:
            self._join(span)

    def acknowledged(self, span: SettledSpan) -> None:
        """Kafka has acknowledged everything about `span`."""
        with self._lock:
            self._unacknowledged -= span.ids
            self._voids -= self._within(span)

    def voids(self, span: SettledSpan) -> list[int]:
        """IDs of `span` that are surely ours and without a fact, if the outbox has no row of them; may lack some."""
        with self._lock:
            return sorted(self._within(span))

    def doubt_voids(self) -> None:
        """The database may have crashed: it may give numbers again that it had given to us and nobody had committed.

        What we hold to be void may then be another writer's fact, so it must not count as a completed ID of the line
        (docs/design.md 3): it is announced as an edge without an ID of its own.
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
    def unacknowledged(self) -> int:
        """Reserved IDs whose transactions have ended and of which Kafka has not acknowledged what became of them."""
        return self._unacknowledged

    def oldest_in_flight(self) -> float | None:
        """When the oldest ID in flight was reserved."""
        with self._lock:  # IDs are reserved in order, and a dict keeps it
            return next((each.since for each in self._in_flight.values()), None)

    def oldest_ended(self) -> float | None:
        """When the oldest of what `take` would give ended."""
        with self._lock:
            return min((span.since for span in self._starts.values()), default=None)

    def _within(self, span: SettledSpan) -> set[int]:
        return {id for id in self._voids if span.prev < id <= span.id}

    def _place(self) -> None:
        oldest_out = next(iter(self._out), self._begun + 1)
        top = 0
        while self._came and self._came[0][0] < oldest_out:
            top = max(top, self._came.popleft()[1])
        for id in sorted(id for id in self._loose if id <= top):
            self._loose.remove(id)
            prev, self._last = self._last, id
            if (ended := self._ended_loose.pop(id, None)) is None:
                self._in_flight[id].prev = prev
            else:
                self._join(SettledSpan(prev, id, 1, ended))

    def _join(self, span: SettledSpan) -> None:
        before, after = self._ends.pop(span.prev, None), self._starts.pop(span.id, None)
        for neighbour in (before, after):
            if neighbour is not None:
                self._starts.pop(neighbour.prev, None)
                self._ends.pop(neighbour.id, None)
                span = SettledSpan(
                    min(span.prev, neighbour.prev),
                    max(span.id, neighbour.id),
                    span.ids + neighbour.ids,
                    min(span.since, neighbour.since),
                )
        self._starts[span.prev] = self._ends[span.id] = span
