"""Reads that are asked for together, without a server."""

import asyncio
from collections.abc import Collection, Mapping

import pytest

from tidemark.app.read_side.coalescer import Coalescer


def test_what_a_read_raises_is_raised_to_all_who_asked() -> None:
    """Of whatever kind: a cancelled answer would say that they had gone."""

    async def fail(_: Collection[str]) -> Mapping[str, int]:
        raise ValueError("a state that nobody can read")

    async def ask() -> None:
        reads = Coalescer(fail)
        for answer in await asyncio.gather(reads.get(["a"]), reads.get(["b"]), return_exceptions=True):
            assert isinstance(answer, ValueError)
        with pytest.raises(ValueError, match="nobody can read"):
            await reads.get(["a"])

    asyncio.run(ask())
