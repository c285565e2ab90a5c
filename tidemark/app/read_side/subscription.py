"""The items that a follower gives to its listeners: batches of events of a stream, shared by all listeners."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tidemark.sinks.postgres.history import DurableMark
from tidemark.sinks.reader import Event, Place
from tidemark.streaming.values.direction import beyond

T = TypeVar("T")

BUFFER = 20_000  # batches in the queue of a listener
PATIENCE = 20.0  # seconds that a batch may wait for a listener; bounds the memory, because batches are shared


@dataclass(frozen=True, eq=False)
class Started:
    """The follower is at `place`, and every later item continues from there."""

    place: Place
    by_place: "PlaceCache" = field(default_factory=dict, init=False, repr=False)


PlaceCache = dict[int, tuple[Place, Any]]
"""A cache of results for listeners at other places, by the identity of the place, which is kept alive."""


@dataclass(frozen=True, slots=True)
class StreamAdded:
    """A stream that did not exist when the listener subscribed."""


@dataclass(frozen=True, eq=False)
class EventBatch:
    """The events that moved `stream` from `before` to `after`, joined."""

    stream: str
    before: Place
    after: Place
    events: Sequence[Event]
    at: float = field(default_factory=time.monotonic)
    by_place: PlaceCache = field(default_factory=dict, init=False, repr=False)
    _encoded: dict[Callable[["EventBatch"], Any], Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def linear(self) -> int | None:
        """The linear position after the events; None if it did not move."""
        return self.after.linear if beyond(self.after.linear, self.before.linear) else None

    def once(self, encode: Callable[["EventBatch"], T]) -> T:
        """The result of `encode(self)`, computed once and shared by all listeners."""
        if encode not in self._encoded:
            self._encoded[encode] = encode(self)
        encoded: T = self._encoded[encode]
        return encoded


@dataclass(frozen=True, slots=True)
class Watermark:
    """All earlier items include everything that Postgres published up to `mark` in the streams of the listener."""

    mark: DurableMark


Item = Started | StreamAdded | EventBatch | Watermark


class Listener:
    """The queue of one listener. For one event loop. `cut_off` is done if the listener was too slow; no more items
    follow then.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.cut_off: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.wants_watermarks = False
        """Whether it gets `Watermark` items."""
        self._now = now
        self._items: deque[tuple[float, str, Item]] = deque()
        self._waiter: asyncio.Future[None] | None = None  # of the task that waits

    def put(self, stream: str, item: Item) -> None:
        if self.cut_off.done():
            return
        now = self._now()
        if self._items and (len(self._items) >= BUFFER or now - self._items[0][0] > PATIENCE):
            self._items.clear()
            settle(self.cut_off)
        else:
            self._items.append((now, stream, item))
            if self._waiter is not None:
                settle(self._waiter)

    async def waited(self, seconds: float) -> bool:
        """Wait until there is an item (True), or for `seconds` (False). For one task at a time."""
        if not self._items:
            # Thousands of tasks wait here several times a second; asyncio's time-outs would cost several times as much.
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(seconds, settle, self._waiter)
            try:
                await self._waiter
            finally:
                self._waiter = None
                timer.cancel()
        return bool(self._items)

    def take(self, most: int) -> list[tuple[str, Item]]:
        """Remove and return at most `most` items."""
        return [self._items.popleft()[1:] for _ in range(min(most, len(self._items)))]


def settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
