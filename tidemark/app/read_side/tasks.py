"""Ends a task of ours, whatever it waits for."""

import asyncio
from typing import Any

AGAIN = 0.1  # seconds


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel until it has ended, with whatever it ends. Once is not always enough: redis-py takes a cancellation that
    meets it while it connects for a mere failure."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=AGAIN)
    if not task.cancelled():
        task.exception()
