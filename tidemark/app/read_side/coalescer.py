"""A coalescer of reads: what is asked for while a read is under way goes into the next one, once, whoever asked.

So a thousand requests a second cost a few reads, and each still gets an answer that was read after it asked. What
nobody waits for any more when its turn comes is not read.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Read = Callable[[Collection[K]], Awaitable[Mapping[K, T]]]


class _Round(Generic[K, T]):
    def __init__(self) -> None:
        self.asked: set[K] = set()
        self.waiting = 0
        self.answer: asyncio.Future[Mapping[K, T]] = asyncio.get_running_loop().create_future()


class Coalescer(Generic[K, T]):
    """For one event loop. `read` is never called while a call of it is running."""

    def __init__(self, read: Read[K, T]) -> None:
        self._read = read
        self._next: _Round[K, T] | None = None
        self._reading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, asked: Collection[K]) -> Mapping[K, T]:
        """What a read that begins after this call says of `asked`, and perhaps of more. Raises what `read` raises."""
        if self._next is None:
            self._next = _Round()
            task = asyncio.create_task(self._go())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        ours = self._next
        ours.asked.update(asked)
        ours.waiting += 1
        try:
            # Shielded: who goes away must not take the answer from the others.
            return await asyncio.shield(ours.answer)
        finally:
            ours.waiting -= 1

    async def _go(self) -> None:
        async with self._reading:
            here, self._next = self._next, None
            assert here is not None
            if not here.waiting:
                return
            try:
                here.answer.set_result(await self._read(here.asked))
            except Exception as problem:  # noqa: BLE001 - whoever asked raises it
                here.answer.set_exception(problem)
                here.answer.exception()  # everybody who asked may be gone
            except BaseException:
                here.answer.cancel()
                raise
