"""Redis, as this process reads it: the positions of many streams in one round trip, and the names of streams."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from redis.exceptions import ResponseError

from tidemark.app.read_side.single_flight import CircuitBreaker, ReadCoalescer
from tidemark.common.errors import Refused
from tidemark.sinks.reader import (
    REMEDIES,
    ReadKeys,
    ReadList,
    ReadNewest,
    StreamKeys,
    queue_commands,
    read_reply,
    send_request,
    translated,
)
from tidemark.sinks.redis.client import STREAMS, RedisAddress, StreamFault, aclose, sound

TIMEOUT = 2.0  # seconds for a connection or an answer; after that Postgres is asked
TOGETHER = 200  # streams in one transaction: bounds how long other clients of Redis wait
REPLIES = 5  # of the commands of `queue_commands`, for each stream

RedisRequest = ReadKeys | ReadList | ReadNewest


class RedisReader:
    """For one event loop. Methods raise `Unavailable` and `Refused`; all may be called again."""

    def __init__(self, address: RedisAddress) -> None:
        """Raises `BadSetting`."""
        self.circuit_breaker = CircuitBreaker("Redis")
        self._reads: ReadCoalescer[RedisRequest, StreamKeys | Refused] = ReadCoalescer(self._read)
        self.client: Any = address.async_client(TIMEOUT)
        self._clustered = address.is_cluster
        self._where = address.where

    async def aclose(self) -> None:
        await aclose(self.client)

    async def ping(self) -> None:
        with self.circuit_breaker.guarding(), translated(self.client):
            await self.client.ping()

    async def names(self) -> set[str]:
        """The streams that Redis knows."""
        with self.circuit_breaker.guarding(), translated(self.client):
            return set(await self.client.smembers(STREAMS))

    async def keys(self, streams: Collection[str]) -> dict[str, StreamKeys]:
        """The keys of each stream at one moment, without streams whose keys hold what Tidemark does not write."""
        replies = await self._read([ReadKeys(name) for name in streams])
        return {request.stream: keys for request, keys in replies.items() if isinstance(keys, StreamKeys)}

    async def read(self, request: ReadList | ReadNewest) -> StreamKeys:
        """In one round trip with what others request meanwhile. `Refused` may be about this stream alone."""
        keys = (await self._reads.get([request]))[request]
        if isinstance(keys, Refused):
            raise keys
        return keys

    async def _read(self, keys: Collection[RedisRequest]) -> dict[RedisRequest, StreamKeys | Refused]:
        requests = list(keys)
        answers: dict[RedisRequest, StreamKeys | Refused] = {}
        with self.circuit_breaker.guarding(), translated(self.client):
            for start in range(0, len(requests), TOGETHER):
                chunk = requests[start : start + TOGETHER]
                # A transaction in a Cluster is of one server.
                replies = await (self._each(chunk) if self._clustered else self._at_once(chunk))
                # In this loop, so that other tasks run after each chunk: thousands of replies take a while.
                answers |= {request: self._seen(request, reply) for request, reply in zip(chunk, replies, strict=True)}
        return answers

    def _seen(self, request: RedisRequest, replies: Sequence[Any]) -> StreamKeys | Refused:
        try:
            answers = [sound(reply) for reply in replies]
        except StreamFault as fault:
            return Refused("Redis", self._where, f"stream {request.stream}: {fault}", REMEDIES.rights)
        try:
            return read_reply(request, answers)
        except ResponseError as fault:
            return Refused("Redis", self._where, str(fault), REMEDIES.rights)

    async def _at_once(self, requests: Sequence[RedisRequest]) -> list[Any]:
        pipe = self.client.pipeline(transaction=True)
        for request in requests:
            queue_commands(pipe, request)
        replies = await pipe.execute(raise_on_error=False)
        return [replies[number * REPLIES : (number + 1) * REPLIES] for number in range(len(requests))]

    async def _each(self, requests: Sequence[RedisRequest]) -> list[Any]:
        replies = await asyncio.gather(
            *(send_request(self.client, request) for request in requests), return_exceptions=True
        )
        return [[reply] if isinstance(reply, BaseException) else reply for reply in replies]
