"""Shares reads between concurrent requests, and refuses requests to failed servers for a while (circuit breaker).

A thousand requests per second cause only a few reads. Each request gets an answer whose read began after the
request."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

from tidemark.common.errors import Slow, Stop, TidemarkError, Unavailable
from tidemark.common.log import get_logger

MAX_SMALL_KEYS = 16  # a request for more keys is a large one
MAX_KEYS_PER_READ = 200

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Read = Callable[[Collection[K]], Awaitable[Mapping[K, T]]]


class _SharedRead(Generic[K, T]):
    def __init__(self) -> None:
        self.keys: set[K] = set()
        self.waiting_request_count = 0
        self.answer: asyncio.Future[Mapping[K, T]] = asyncio.get_running_loop().create_future()


class ReadCoalescer(Generic[K, T]):
    """Combines the keys of concurrent requests into few calls of `read`. Keys that are requested during a call are read
    by the next call. For one event loop.

    At most two calls run at a time: one for small requests, and one for large requests, so a small request never waits
    for a large request. A call reads at most `MAX_KEYS_PER_READ` keys. A call is skipped if all its requests are
    cancelled before the call begins.
    """

    def __init__(self, read: Read[K, T]) -> None:
        self._small, self._large = _ReadQueue(read), _ReadQueue(read)

    async def get(self, requested: Collection[K]) -> Mapping[K, T]:
        """Read the keys, in reads that begin after this call. The result may contain other keys too. Raises the errors
        of `read`.
        """
        if len(requested) <= MAX_SMALL_KEYS:
            return await self._small.get(requested)
        keys, answers = [*requested], dict[K, T]()
        for start in range(0, len(keys), MAX_KEYS_PER_READ):
            answers |= await self._large.get(keys[start : start + MAX_KEYS_PER_READ])
        return answers


class _ReadQueue(Generic[K, T]):
    """Runs reads one at a time, in order of request. A request joins the last waiting read if that read has room for
    its keys.
    """

    def __init__(self, read: Read[K, T]) -> None:
        self._read = read
        self._reads: deque[_SharedRead[K, T]] = deque()
        self._read_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, requested: Collection[K]) -> Mapping[K, T]:
        if not self._reads or len(self._reads[-1].keys.union(requested)) > MAX_KEYS_PER_READ:
            self._reads.append(_SharedRead())
            task = asyncio.create_task(self._run_next())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        last_read = self._reads[-1]
        last_read.keys.update(requested)
        last_read.waiting_request_count += 1
        try:
            # Shielded, so that a disconnected client does not cancel the read of other clients.
            return await asyncio.shield(last_read.answer)
        finally:
            last_read.waiting_request_count -= 1

    async def _run_next(self) -> None:
        async with self._read_lock:
            reading = self._reads.popleft()
            if not reading.waiting_request_count:
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

MIN_PAUSE_SECONDS = 0.5
PAUSE_FACTOR = 2  # the pause after a failure, as a multiple of its duration; so few requests wait for a time-out


class CircuitBreaker:
    """Refuses requests to a server for a while after a failure, so that callers need not wait for time-outs. Each
    server has its own circuit breaker.

    A server that refuses the user counts as a failure. A slow query (`Slow`) does not.
    """

    def __init__(self, name: str, now: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._now = now
        self._refuse_until = 0.0
        self.problem: TidemarkError | None = None
        """The error of the last query; None if that query succeeded, or there was none. `Slow` errors do not count."""

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Guard the block, which queries the server.

        Raises:
            Unavailable, Stop: the error of the block. Soon after such an error, the same error again, without running
                the block.
        """
        if self.problem is not None and self._now() < self._refuse_until:
            raise self.problem
        began = self._now()
        try:
            yield
        except Slow:
            raise
        except (Unavailable, Stop) as problem:
            if self.problem is None:
                log.warning(f"{self._name} does not answer, or refuses the request", problem=str(problem))
            self.problem = problem
            now = self._now()
            self._refuse_until = now + max(MIN_PAUSE_SECONDS, PAUSE_FACTOR * (now - began))
            raise
        if self.problem is not None:
            log.info(f"{self._name} answers again")
        self.problem = None
