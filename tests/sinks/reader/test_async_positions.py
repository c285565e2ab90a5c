"""What is only true of the asyncio form."""

import asyncio
import time
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import pytest
import redis.asyncio

from tests.sinks.given import advance, stream
from tests.sinks.reader.given import Pipeline
from tidemark.common.errors import Refused
from tidemark.sinks.reader import AsyncPositions
from tidemark.sinks.reader.async_positions import run_to_next_value
from tidemark.sinks.reader.requests import Answer, Driver, Pause, Request
from tidemark.sinks.redis.client import key


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


def test_a_swallowed_cancellation_is_not_forgotten_at_the_next_value() -> None:
    """`AsyncFollow` takes values that it does not hand over, one after the other. The value itself is not lost."""

    def program() -> Generator[Request | str, Answer, None]:
        for number in range(10_000):
            yield Pause(0.01)
            yield f"caught up {number}"

    async def swallow(request: Request) -> Answer:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)
        return None

    async def main() -> tuple[list[str], str | None]:
        driver, values = Driver[str](program()), list[str]()

        async def take() -> None:
            while (value := await run_to_next_value(driver, swallow, lambda: False)) is not None:
                values.append(value)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(take(), 0.05)
        return values, await run_to_next_value(driver, swallow, lambda: False)

    values, following = asyncio.run(asyncio.wait_for(main(), 30))
    assert [*values, following] == [f"caught up {number}" for number in range(len(values) + 1)]


def test_five_hundred_waits_share_connections(pipeline: Pipeline, redis_url: str, keys: Any) -> None:
    """Of one stream and of many: a client with room for few connections is enough, and each wait ends in time."""
    names = [f"s{number}" for number in range(100)]
    pipeline.publish(*(stream(name, advance("w", 0, 3), linear=3) for name in names))

    async def main() -> int:
        client = redis.asyncio.Redis.from_url(redis_url, max_connections=6)
        async with AsyncPositions(client) as positions:
            waits = [
                asyncio.create_task(positions.wait(name, 3 + number, timeout=60))
                for name in names
                for number in range(1, 6)
            ]
            await asyncio.sleep(0.5)
            connections = len([each for each in keys.client_list() if each["cmd"] != "client|list"])
            for number in range(1, 6):
                moves = [stream(name, advance("w", 2 + number, 3 + number), linear=3 + number) for name in names]
                await asyncio.to_thread(pipeline.publish, *moves)
            reached = await asyncio.gather(*waits)
            assert all(position.linear >= 4 for position in reached)
        await client.aclose()
        return connections

    before = len(keys.client_list())
    assert asyncio.run(main()) <= before + 3


def test_wait_that_begins_during_another_one_is_woken_at_once(pipeline: Pipeline, redis_url: str) -> None:
    """The shared connection waits for another stream at that time."""
    pipeline.publish(stream("a", advance("w", 0, 3), linear=3), stream("b", advance("w", 0, 3), linear=3))

    async def main() -> float:
        async with AsyncPositions(redis_url) as positions:
            first = asyncio.create_task(positions.wait("a", 4, timeout=60))
            await asyncio.sleep(0.3)
            second = asyncio.create_task(positions.wait("b", 4, timeout=60))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            await asyncio.to_thread(pipeline.publish, stream("b", advance("w", 3, 4), linear=4))
            await second
            seconds = time.monotonic() - began
            await asyncio.to_thread(pipeline.publish, stream("a", advance("w", 3, 4), linear=4))
            await first
            return seconds

    assert asyncio.run(main()) < 5


def test_wait_that_is_cancelled_leaves_the_others(pipeline: Pipeline, redis_url: str) -> None:
    """Of two tasks that wait for one stream, one is cancelled, and the other one is woken."""
    pipeline.move("w", 0, 3)

    async def main() -> int:
        async with AsyncPositions(redis_url) as positions:
            cancelled, kept = (asyncio.create_task(positions.wait("s", 4, timeout=60)) for _ in range(2))
            await asyncio.sleep(0.2)
            cancelled.cancel()
            with suppress(asyncio.CancelledError):
                await cancelled
            await asyncio.to_thread(pipeline.move, "w", 3, 4)
            return (await kept).linear

    assert asyncio.run(main()) == 4


def test_one_stream_with_broken_keys_does_not_fail_the_others(pipeline: Pipeline, redis_url: str, keys: Any) -> None:
    """They are read in one transaction."""
    pipeline.move("w", 0, 3)
    keys.set(key("broken", "positions"), "no hash")

    async def main() -> tuple[Any, Any]:
        async with AsyncPositions(redis_url) as positions:
            return await asyncio.gather(positions.get("broken"), positions.get("s"), return_exceptions=True)

    broken, known = asyncio.run(main())
    assert isinstance(broken, Refused)
    assert known.linear == 3
