"""The queue of a listener, and the items that a follower puts into it. All listeners share batches of events."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tidemark.sinks.postgres.history import DurableMark
from tidemark.sinks.reader import Event, Place
from tidemark.streaming.values.direction import is_beyond

T = TypeVar("T")

MAX_QUEUED_ITEMS = 20_000  # per listener
MAX_QUEUE_SECONDS = 20.0  # how long an item may be in a queue; this limits the memory, because queues share batches


@dataclass(frozen=True, eq=False)
class FollowerStarted:
    """The follower of a stream is at `place`. The next items of the stream begin after `place`.

    Attributes:
        by_place: results that were computed from this item, for listeners at other places.
    """

    place: Place
    by_place: "PlaceCache" = field(default_factory=dict, init=False, repr=False)


PlaceCache = dict[int, tuple[Place, Any]]
"""A cache of results that depend on a listener's place: `id(place)` -> (place, result). The value keeps the place
alive, so that its `id` stays unique."""


@dataclass(frozen=True, slots=True)
class StreamAdded:
    """Tells a listener that it is now subscribed to a new stream. The stream did not exist when the listener subscribed
    to all streams."""


@dataclass(frozen=True, eq=False)
class EventBatch:
    """The events that moved `stream` from `place_before` to `place_after`. `place_before` is the `place_after` of the
    previous batch.

    Attributes:
        created_at: when the batch was created (seconds, monotonic).
        by_place: results that were computed from this item, for listeners that are not at `place_before`.
    """

    stream: str
    place_before: Place
    place_after: Place
    events: Sequence[Event]
    created_at: float = field(default_factory=time.monotonic)
    by_place: PlaceCache = field(default_factory=dict, init=False, repr=False)
    _result_by_function: dict[Callable[["EventBatch"], Any], Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def linear(self) -> int | None:
        """The linear position after the events; None if it did not move."""
        return self.place_after.linear if is_beyond(self.place_after.linear, self.place_before.linear) else None

    def encode_once(self, encode: Callable[["EventBatch"], T]) -> T:
        """Call `encode(self)`, once for all listeners, and return the result."""
        if encode not in self._result_by_function:
            self._result_by_function[encode] = encode(self)
        result: T = self._result_by_function[encode]
        return result


@dataclass(frozen=True, slots=True)
class Watermark:
    """The listener has received everything that Postgres published up to `mark`, in all its streams."""

    mark: DurableMark


Item = FollowerStarted | StreamAdded | EventBatch | Watermark


class Listener:
    """The queue of one listener. For one event loop.

    Args:
        wake: completes the future of the task that waits for an item, now or later; None: `complete_future`.
        now: a monotonic clock, in seconds.

    Attributes:
        disconnect_signal: done when the listener must end, because it was too slow, its follower failed, or its slot
            went to another client. No more items follow.
        receives_watermarks: whether the listener gets `Watermark` items.
    """

    def __init__(
        self,
        wake: Callable[["asyncio.Future[None]"], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.disconnect_signal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.receives_watermarks = False
        self._wake = wake or complete_future
        self._now = now
        self._items: deque[tuple[float, str, Item]] = deque()
        self._waiter: asyncio.Future[None] | None = None  # of the task that waits

    def put(self, stream: str, item: Item) -> None:
        """Add an item, and wake the waiting task. If the queue is full, or its first item is too old, clear the queue
        and disconnect the listener instead. Does nothing for a disconnected listener.
        """
        if self.disconnect_signal.done():
            return
        now = self._now()
        if self._items and (len(self._items) >= MAX_QUEUED_ITEMS or now - self._items[0][0] > MAX_QUEUE_SECONDS):
            self._items.clear()
            complete_future(self.disconnect_signal)
        else:
            self._items.append((now, stream, item))
            if self._waiter is not None:
                waiter, self._waiter = self._waiter, None  # wake it only once
                self._wake(waiter)

    async def wait_for_item(self, seconds: float) -> bool:
        """Wait for an item, up to `seconds`. Returns False if the queue is still empty. Only one task may wait at a
        time."""
        if not self._items:
            # Thousands of tasks wait here several times a second, and asyncio's time-outs need several times more CPU.
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = loop.call_later(seconds, complete_future, waiter)
            try:
                await waiter
            finally:
                self._waiter = None
                timer.cancel()
        return bool(self._items)

    def take(self, limit: int) -> list[tuple[str, Item]]:
        """Remove and return at most `limit` items, each with its stream."""
        return [self._items.popleft()[1:] for _ in range(min(limit, len(self._items)))]


def complete_future(future: "asyncio.Future[None]") -> None:
    """Set the result of the future, unless it is done already."""
    if not future.done():
        future.set_result(None)
