"""Sharing of reads between concurrent requests, and circuit breakers of servers.

A thousand requests a second cost a few reads, and each request gets an answer that was read after the request began.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from tidemark.common.errors import Slow, Stop, TidemarkError, Unavailable
from tidemark.common.log import get_logger

SMALL = 16  # keys; a request for more is a large one
PIECE = 200  # the largest number of keys of one read

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Read = Callable[[Collection[K]], Awaitable[Mapping[K, T]]]


class _SharedRead(Generic[K, T]):
    def __init__(self) -> None:
        self.keys: set[K] = set()
        self.waiting = 0
        self.answer: asyncio.Future[Mapping[K, T]] = asyncio.get_running_loop().create_future()


class ReadCoalescer(Generic[K, T]):
    """Collects the keys that are requested during a read, and reads them in the next read. For one event loop.

    At most two calls of `read` run at a time: one for small requests and one for large ones. Each is for at most
    `PIECE` keys, so a request for few keys never waits for one for many. Keys of cancelled requests are not read.
    """

    def __init__(self, read: Read[K, T]) -> None:
        self._small, self._large = _Queue(read), _Queue(read)

    async def get(self, keys_wanted: Collection[K]) -> Mapping[K, T]:
        """The result of a read that begins after this call, perhaps with more keys. Raises the errors of `read`."""
        if len(keys_wanted) <= SMALL:
            return await self._small.get(keys_wanted)
        keys, answers = [*keys_wanted], dict[K, T]()
        for start in range(0, len(keys), PIECE):
            answers |= await self._large.get(keys[start : start + PIECE])
        return answers


class _Queue(Generic[K, T]):
    """Reads, one at a time and in order. A request joins the last waiting read while that has room for its keys."""

    def __init__(self, read: Read[K, T]) -> None:
        self._read = read
        self._rounds: deque[_SharedRead[K, T]] = deque()
        self._reading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, asked: Collection[K]) -> Mapping[K, T]:
        if not self._rounds or len(self._rounds[-1].keys.union(asked)) > PIECE:
            self._rounds.append(_SharedRead())
            task = asyncio.create_task(self._go())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        last_read = self._rounds[-1]
        last_read.keys.update(asked)
        last_read.waiting += 1
        try:
            # Shielded, so that a disconnected client does not cancel the read of other clients.
            return await asyncio.shield(last_read.answer)
        finally:
            last_read.waiting -= 1

    async def _go(self) -> None:
        async with self._reading:
            reading = self._rounds.popleft()
            if not reading.waiting:
                return
            try:
                reading.answer.set_result(await self._read(reading.keys))
            except Exception as problem:  # noqa: BLE001 - the requests raise it
                reading.answer.set_exception(problem)
                reading.answer.exception()  # mark as retrieved: every request may have been cancelled
            except BaseException:
                reading.answer.cancel()
                raise


log = get_logger(__name__)

REST_SECONDS = 0.5
REST_TIMES = 2  # pause after a failure, as a multiple of its duration, so that few requests wait for a time-out


class CircuitBreaker:
    """Pauses requests to a server after a failure, so that callers need not wait for time-outs. One per server.

    A refused user is a failure; a single slow query is not.
    """

    def __init__(self, name: str, now: Callable[[], float] = time.monotonic) -> None:
        self._what = name
        self._now = now
        self._until = 0.0
        self.problem: TidemarkError | None = None
        """Why the server did not answer the last time; None: it answered."""

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Guard the block, which queries the server. Raises `Unavailable` at once after a recent failure, and the
        block's `Unavailable` and `Stop`.
        """
        if self.problem is not None and self._now() < self._until:
            raise self.problem
        began = self._now()
        try:
            yield
        except Slow:
            raise
        except (Unavailable, Stop) as problem:
            if self.problem is None:
                log.warning(f"{self._what} does not answer", problem=str(problem))
            self.problem = problem
            now = self._now()
            self._until = now + max(REST_SECONDS, REST_TIMES * (now - began))
            raise
        if self.problem is not None:
            log.info(f"{self._what} answers again")
        self.problem = None


AGAIN = 0.1  # seconds


async def cancel_until_done(task: asyncio.Task[Any]) -> None:
    """Cancel a task repeatedly until it has ended, because redis-py treats a cancellation during a connection attempt
    as a failed connection.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=AGAIN)
    if not task.cancelled():
        task.exception()
