"""Redis as one process reads it, for all of its clients."""

import asyncio
from typing import Any

import pytest

from tidemark.app.read_side.redis_reader import STREAMS_PER_TRANSACTION, RedisReader
from tidemark.common.errors import Refused
from tidemark.sinks.reader.requests import ReadNewest, StreamKeys
from tidemark.sinks.redis.client import redis_address


def test_reading_of_many_streams_lets_others_have_their_turn(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are asked for at once, the event loop looks after all else every few hundred."""
    turns = 0
    made: list[int] = []

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def read() -> None:
        redis_reader = RedisReader(redis_address(redis_url))
        seen = redis_reader._parse_replies

        def noted(request: Any, replies: Any) -> StreamKeys | Refused:
            made.append(turns)
            return seen(request, replies)

        # This one alone: sidecars of other tests may run in this process.
        monkeypatch.setattr(redis_reader, "_parse_replies", noted)
        others = asyncio.create_task(turn())
        await asyncio.gather(
            *(redis_reader.read(ReadNewest(f"s{number}")) for number in range(5 * STREAMS_PER_TRANSACTION))
        )
        others.cancel()
        await redis_reader.aclose()

    asyncio.run(read())
    assert len(made) == 5 * STREAMS_PER_TRANSACTION
    assert max(made.count(it) for it in made) <= STREAMS_PER_TRANSACTION
