"""What a follower hands to who listens: slices of a stream's moves, encoded once for all who stand where it stood."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from tidemark.app.sidecar import cursor, moves
from tidemark.app.sidecar.sse import block
from tidemark.sinks.reader.events import Event, Place
from tidemark.streaming.direction import beyond

BUFFER = 20_000  # slices that a listener may be behind
PATIENCE = 20.0  # seconds that a slice may wait for it: bounds the memory, because slices are shared


@dataclass(frozen=True, slots=True)
class Begun:
    """The follower stands at `place`, and all that comes now goes on from there."""

    place: Place


@dataclass(frozen=True, slots=True)
class Appeared:
    """A stream that was not there when the listener came."""


@dataclass(frozen=True, eq=False)
class Slice:
    """What moved `stream` from `before` to `after`, joined: whoever holds `before` itself stands at `after` itself when
    it has taken `text`."""

    stream: str
    before: Place
    after: Place
    events: Sequence[Event]
    at: float = field(default_factory=time.monotonic)

    @property
    def line(self) -> int | None:
        """The linear position, which is told after the events; None where it did not move."""
        return self.after.linear if beyond(self.after.linear, self.before.linear) else None

    @cached_property
    def blocks(self) -> tuple[bytes, bytes]:
        """As server-sent events, the last one apart from the others: it is the one that may carry an ID."""
        told = [block(moves.told(self.stream, event)) for event in self.events]
        if self.line is not None:
            told.append(block(moves.LinearMoveAnswer(stream=self.stream, linear=self.line)))
        return b"".join(told[:-1]), told[-1]

    @cached_property
    def id(self) -> bytes:
        """Where a client stands behind this slice that follows nothing but this stream."""
        return cursor.of_places({self.stream: self.after}).encode()


Item = Begun | Appeared | Slice


class Listener:
    """For one event loop. `cut_off` is set when it was too slow: nothing more comes then."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.cut_off = asyncio.Event()
        self._now = now
        self._items: deque[tuple[float, str, Item]] = deque()
        self._given = asyncio.Event()

    def give(self, stream: str, item: Item) -> None:
        if self.cut_off.is_set():
            return
        now = self._now()
        if self._items and (len(self._items) >= BUFFER or now - self._items[0][0] > PATIENCE):
            self._items.clear()
            self.cut_off.set()
        else:
            self._items.append((now, stream, item))
            self._given.set()

    async def waited(self, seconds: float) -> bool:
        """Return when there is something to take (True), or after `seconds`."""
        if not self._items:
            self._given.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._given.wait()
        return bool(self._items)

    def take(self, most: int) -> list[tuple[str, Item]]:
        """What was given and not taken yet, at most so many."""
        return [self._items.popleft()[1:] for _ in range(min(most, len(self._items)))]
