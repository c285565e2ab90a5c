"""Cancels asyncio tasks."""

import asyncio
from typing import Any

from tidemark.common.log import get_logger

log = get_logger(__name__)

CANCEL_INTERVAL_SECONDS = 0.1
CANCELLATIONS_UNTIL_LOGGED = 50  # about 5 s


async def cancel_until_done(task: asyncio.Task[Any]) -> None:
    """Cancel a task repeatedly until the task has ended, without a time limit. An exception of the task is ignored.

    One call of `cancel` may have no effect: redis-py treats a cancellation during a connection attempt as a failed
    connection. After `CANCELLATIONS_UNTIL_LOGGED` calls, logs the functions in which the task waits.
    """
    cancellations = 0
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_INTERVAL_SECONDS)
        cancellations += 1
        if cancellations == CANCELLATIONS_UNTIL_LOGGED:
            log.warning("A task does not end although it was cancelled", waits_in=_await_chain(task.get_coro()))
    if not task.cancelled():
        task.exception()


def _await_chain(waiting: Any) -> list[str]:
    """The functions in which the coroutine `waiting` waits, outermost first, with line numbers."""
    chain = list[str]()
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        chain.append(repr(waiting) if frame is None else f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return chain
