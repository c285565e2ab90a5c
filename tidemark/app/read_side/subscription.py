"""What a follower gives to its listeners: slices of a stream's moves, the same object to all of them."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tidemark.sinks.postgres.changes import DurableMark
from tidemark.sinks.reader import Event, Place
from tidemark.streaming.values.direction import beyond

T = TypeVar("T")

BUFFER = 20_000  # slices that a listener may be behind
PATIENCE = 20.0  # seconds that a slice may wait for a listener: bounds the memory, because slices are shared


@dataclass(frozen=True, eq=False)
class Started:
    """The follower stands at `place`, and all that comes now goes on from there."""

    place: Place
    joins: "Joins" = field(default_factory=dict, init=False, repr=False)


Joins = dict[int, tuple[Place, Any]]
"""What was computed for listeners that stand elsewhere: by the identity of their place, which is kept for that."""


@dataclass(frozen=True, slots=True)
class StreamAdded:
    """A stream that was not there when the listener came."""


@dataclass(frozen=True, eq=False)
class EventBatch:
    """What moved `stream` from `before` to `after`, joined: whoever holds `before` itself stands at `after` itself when
    it has taken `events`."""

    stream: str
    before: Place
    after: Place
    events: Sequence[Event]
    at: float = field(default_factory=time.monotonic)
    joins: Joins = field(default_factory=dict, init=False, repr=False)
    _encoded: dict[Callable[["EventBatch"], Any], Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def linear(self) -> int | None:
        """The linear position after the events; None where it did not move."""
        return self.after.linear if beyond(self.after.linear, self.before.linear) else None

    def once(self, encode: Callable[["EventBatch"], T]) -> T:
        """`encode(self)`, computed for the first listener that asks and remembered for all others."""
        if encode not in self._encoded:
            self._encoded[encode] = encode(self)
        encoded: T = self._encoded[encode]
        return encoded


@dataclass(frozen=True, slots=True)
class Watermark:
    """All that Postgres published up to `mark`, of every stream that the listener follows, was given before."""

    mark: DurableMark


Item = Started | StreamAdded | EventBatch | Watermark


class Listener:
    """For one event loop. `cut_off` is done when it was too slow: nothing more comes then."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.cut_off: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.marks = False
        """Whether it is given `Watermark` items."""
        self._now = now
        self._items: deque[tuple[float, str, Item]] = deque()
        self._given: asyncio.Future[None] | None = None  # of the one who waits

    def give(self, stream: str, item: Item) -> None:
        if self.cut_off.done():
            return
        now = self._now()
        if self._items and (len(self._items) >= BUFFER or now - self._items[0][0] > PATIENCE):
            self._items.clear()
            settle(self.cut_off)
        else:
            self._items.append((now, stream, item))
            if self._given is not None:
                settle(self._given)

    async def waited(self, seconds: float) -> bool:
        """Return when there is something to take (True), or after `seconds`. For one task at a time."""
        if not self._items:
            # Thousands wait so, some times a second: a time-out of asyncio costs several times as much.
            loop = asyncio.get_running_loop()
            self._given = loop.create_future()
            timer = loop.call_later(seconds, settle, self._given)
            try:
                await self._given
            finally:
                self._given = None
                timer.cancel()
        return bool(self._items)

    def take(self, most: int) -> list[tuple[str, Item]]:
        """What was given and not taken yet, at most so many."""
        return [self._items.popleft()[1:] for _ in range(min(most, len(self._items)))]


def settle(given: "asyncio.Future[None]") -> None:
    if not given.done():
        given.set_result(None)
