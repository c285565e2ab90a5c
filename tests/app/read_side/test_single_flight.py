"""Reads that are asked for together, without a server."""

import asyncio
from collections.abc import Collection, Mapping

import pytest

from tidemark.app.read_side.single_flight import MAX_KEYS_PER_READ, MAX_SMALL_KEYS, ReadCoalescer


def test_what_a_read_raises_is_raised_to_all_who_asked() -> None:
    """Of whatever kind: a cancelled answer would say that they had gone."""

    async def fail(_: Collection[str]) -> Mapping[str, int]:
        raise ValueError("a state that nobody can read")

    async def ask() -> None:
        reads = ReadCoalescer(fail)
        for answer in await asyncio.gather(reads.get(["a"]), reads.get(["b"]), return_exceptions=True):
            assert isinstance(answer, ValueError)
        with pytest.raises(ValueError, match="nobody can read"):
            await reads.get(["a"])

    asyncio.run(ask())


def test_nothing_is_read_for_those_who_have_gone() -> None:
    """Who asks while a read is under way, and goes before the next one begins, costs nothing; who stays, or comes
    then, is answered."""
    asked: list[set[str]] = []

    async def ask() -> None:
        go = asyncio.Event()

        async def read(names: Collection[str]) -> Mapping[str, int]:
            asked.append({*names})
            await go.wait()
            return dict.fromkeys(names, 1)

        reads = ReadCoalescer(read)
        first = asyncio.create_task(reads.get(["a"]))
        await asyncio.sleep(0)
        gone = [asyncio.create_task(reads.get(["b"])) for _ in range(3)]
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await asyncio.wait(gone)
        go.set()
        assert await first == {"a": 1}
        assert await reads.get(["c"]) == {"c": 1}

    asyncio.run(ask())
    assert asked[0] == {"a"}
    assert "c" in asked[-1]
    assert len(asked) == 2


def test_small_requests_never_wait_for_large_ones() -> None:
    """Many keys are read in pieces, in a queue of their own: a request for one key is answered while they are under
    way, and no read is for more than a piece."""
    sizes: list[int] = []

    async def ask() -> None:
        go = asyncio.Event()

        async def read(names: Collection[str]) -> Mapping[str, int]:
            sizes.append(len(names))
            if len(names) > MAX_SMALL_KEYS:
                await go.wait()
            return dict.fromkeys(names, 1)

        reads = ReadCoalescer(read)
        many = [f"x{number}" for number in range(2 * MAX_KEYS_PER_READ + 1)]
        others = [f"y{number}" for number in range(MAX_KEYS_PER_READ)]
        large = [asyncio.create_task(reads.get(asked)) for asked in (many, many, others)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(reads.get(["a"]), 5) == {"a": 1}
        go.set()
        for task, asked in zip(large, (many, many, others), strict=True):
            assert {*asked} <= (await task).keys()

    asyncio.run(ask())
    assert max(sizes) <= MAX_KEYS_PER_READ
    assert len(sizes) <= 6  # two who ask for the same are read for together
