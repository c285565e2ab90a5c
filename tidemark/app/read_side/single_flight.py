"""A coalescer of reads: what is asked for while a read is under way goes into the next one, once, whoever asked.

So a thousand requests a second cost a few reads, and each still gets an answer that was read after it asked. What
nobody waits for any more when its turn comes is not read. A request for many keys is read in pieces, in a queue of its
own, so that a request for few keys never waits for it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from tidemark.common.errors import Slow, Stop, TidemarkError, Unavailable
from tidemark.common.log import get_logger

SMALL = 16  # keys: a request for more is a large one
PIECE = 200  # keys of one read at most

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Read = Callable[[Collection[K]], Awaitable[Mapping[K, T]]]


class _SharedRead(Generic[K, T]):
    def __init__(self) -> None:
        self.asked: set[K] = set()
        self.waiting = 0
        self.answer: asyncio.Future[Mapping[K, T]] = asyncio.get_running_loop().create_future()


class ReadCoalescer(Generic[K, T]):
    """For one event loop. At most two calls of `read` run at a time: one for small requests and one for large ones.
    Each is for at most `PIECE` keys."""

    def __init__(self, read: Read[K, T]) -> None:
        self._small, self._large = _Queue(read), _Queue(read)

    async def get(self, asked: Collection[K]) -> Mapping[K, T]:
        """What reads that begin after this call say of `asked`, and perhaps of more. Raises what `read` raises."""
        if len(asked) <= SMALL:
            return await self._small.get(asked)
        keys, found = [*asked], dict[K, T]()
        for start in range(0, len(keys), PIECE):
            found |= await self._large.get(keys[start : start + PIECE])
        return found


class _Queue(Generic[K, T]):
    """Rounds of reads, one at a time and in order. A request joins the last round while its keys have room there."""

    def __init__(self, read: Read[K, T]) -> None:
        self._read = read
        self._rounds: deque[_SharedRead[K, T]] = deque()
        self._reading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, asked: Collection[K]) -> Mapping[K, T]:
        if not self._rounds or len(self._rounds[-1].asked.union(asked)) > PIECE:
            self._rounds.append(_SharedRead())
            task = asyncio.create_task(self._go())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        ours = self._rounds[-1]
        ours.asked.update(asked)
        ours.waiting += 1
        try:
            # Shielded: a client that goes away must not take the answer from the others.
            return await asyncio.shield(ours.answer)
        finally:
            ours.waiting -= 1

    async def _go(self) -> None:
        async with self._reading:
            reading = self._rounds.popleft()
            if not reading.waiting:
                return
            try:
                reading.answer.set_result(await self._read(reading.asked))
            except Exception as problem:  # noqa: BLE001 - whoever asked raises it
                reading.answer.set_exception(problem)
                reading.answer.exception()  # everybody who asked may be gone
            except BaseException:
                reading.answer.cancel()
                raise


log = get_logger(__name__)

REST_SECONDS = 0.5
REST_TIMES = 2  # as long as the failure took: so that a server that never answers costs few requests its time-out


class CircuitBreaker:
    """One per server. A server that refuses us is away too, as far as a request is concerned; one that was slow with
    one question is not."""

    def __init__(self, what: str, now: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._now = now
        self._until = 0.0
        self.problem: TidemarkError | None = None
        """Why the server could not be asked the last time; None: it answered."""

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Ask the server in this block. Raises `Unavailable` at once where it just failed, and what the block raises
        of `Unavailable` and `Stop`."""
        if self.problem is not None and self._now() < self._until:
            raise self.problem
        began = self._now()
        try:
            yield
        except Slow:
            raise
        except (Unavailable, Stop) as problem:
            if self.problem is None:
                log.warning(f"{self._what} is away", problem=str(problem))
            self.problem = problem
            now = self._now()
            self._until = now + max(REST_SECONDS, REST_TIMES * (now - began))
            raise
        if self.problem is not None:
            log.info(f"{self._what} answers again")
        self.problem = None


AGAIN = 0.1  # seconds


async def cancel_until_done(task: asyncio.Task[Any]) -> None:
    """Cancel until it has ended, with whatever it ends. Once is not always enough: redis-py takes a cancellation that
    meets it while it connects for a mere failure."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=AGAIN)
    if not task.cancelled():
        task.exception()
