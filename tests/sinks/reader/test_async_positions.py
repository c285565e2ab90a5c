"""What is only true of the asyncio form."""

import asyncio
from collections.abc import Generator
from contextlib import suppress

from tidemark.sinks.reader.async_positions import run_to_next_value
from tidemark.sinks.reader.requests import Answer, Driver, Pause, Request


def test_a_cancellation_that_a_client_swallows_ends_the_task_all_the_same() -> None:
    """redis-py may swallow the one that comes while it gives up a connection; what was answered is not lost."""
    answered = 0

    def program() -> Generator[Request | str, Answer, None]:
        nonlocal answered
        while True:
            yield Pause(0.01)
            answered += 1

    async def swallow(request: Request) -> Answer:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)
        return None

    async def main() -> bool:
        reading = run_to_next_value(Driver[str](program()), swallow, lambda: False)
        task = asyncio.create_task(reading)
        while answered < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task], timeout=60)
        return task.cancelled()

    assert asyncio.run(main())
