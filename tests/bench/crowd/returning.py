"""A process with very many clients of `/v1/events` that all lose their connection, and all come back at once.

Prints a line of JSON when all stand at their first snapshot. At a line on its input they go away, for `away` seconds;
when each has been told what it missed, it prints how long that took. At the next line, with the final positions, it
waits until all have come there, and prints what they saw.
"""

import asyncio
import sys
import time
from array import array
from typing import Any

import msgspec
import uvloop

from tests.bench.crowd.following import FollowingClient, Saw, ToldChunk, ToldMove
from tests.bench.crowd.talk import connected, final_positions, say, until


class Returning(msgspec.Struct, frozen=True):
    """`clients`, who follow one of `streams` each, by turns, but for `all`, who follow all of them."""

    port: int
    streams: list[str]
    clients: int
    all: int
    away: float


class Returned(msgspec.Struct, frozen=True):
    """`seconds` until each client had the first ID that covers what it missed; `failed`: clients without one."""

    seconds: list[float]
    failed: int


class ReturningClient(FollowingClient):
    """What came twice is left out: an advance at or below where the client stands."""

    def __init__(self, stream: str | None, streams: int) -> None:
        path = "/v1/events" if stream is None else f"/v1/events?stream={stream}"
        super().__init__(path, 1 if stream else streams, array("d"))
        self.last_id = b""
        self.back_after: float | None = None
        self._left = False
        self._came = 0.0
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._came = time.monotonic()
        last = b"Last-Event-ID: %s\r\n" % self.last_id if self.last_id else b""
        transport.write(b"GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % (self._path.encode(), last))

    def connection_lost(self, _: Exception | None) -> None:
        self.lost = self.lost or not self._left

    def leave(self) -> None:
        self._left = True
        self._rest, self._in_body = b"", False
        self._transport.abort()

    def come_back(self) -> "ReturningClient":
        self._left = False
        return self

    def _take(self, told: ToldChunk) -> None:
        super()._take(told)
        if told.last_id is not None:
            self.last_id = told.last_id
            if self.back_after is None:
                self.back_after = time.monotonic() - self._came

    def _moved(self, move: ToldMove) -> int:
        stood = self.positions.get(move.stream, {}).get(move.writer or "", 0)
        return 0 if move.id <= stood else super()._moved(move)


async def run(plan: Returning) -> None:
    streams: list[str | None] = [plan.streams[place % len(plan.streams)] for place in range(plan.clients - plan.all)]
    made = [ReturningClient(stream, len(plan.streams)) for stream in [*streams, *[None] * plan.all]]
    clients = await connected(plan.port, made)
    await until(lambda: all(client.last_id for client in clients))
    await asyncio.to_thread(sys.stdin.readline)
    for client in clients:
        client.back_after = None
        client.leave()
    await asyncio.sleep(plan.away)
    loop = asyncio.get_running_loop()
    came = [loop.create_connection(client.come_back, "127.0.0.1", plan.port) for client in clients]
    found = await asyncio.gather(*came, return_exceptions=True)
    await until(lambda: all(client.back_after is not None for client in clients))
    seconds = [client.back_after for client in clients if client.back_after is not None]
    say(Returned(seconds, len(clients) - len(seconds) + sum(isinstance(it, BaseException) for it in found)))
    final = await final_positions()
    await until(lambda: all(client.stands(final) for client in clients))
    say(Saw.of(clients, final))


if __name__ == "__main__":
    uvloop.run(run(msgspec.json.decode(sys.argv[1], type=Returning)))
