"""A process with very many clients of `/v1/events`, on bare sockets, each of which checks every move that it is told.

Prints a line of JSON when all stand at their first snapshot; after a line on its input with the final positions it
waits until all have come there, and prints what they saw.
"""

import asyncio
import sys
import time
from array import array
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import msgspec
import uvloop

from tests.bench.crowd.talk import connected, final_positions, say, until


class Crowd(msgspec.Struct, frozen=True):
    """`each` clients follow one of `streams`, by turns; `all` clients follow all of them. `stamps`: where to leave
    batch and time of arrival of every piece of news, as pairs of float64."""

    port: int
    streams: list[str]
    each: int
    all: int
    stamps: str


class Saw(msgspec.Struct, frozen=True):
    """Over all clients: moves told, bytes taken, moves that did not join the ones before (`torn`), connections lost,
    and clients that did not come to the end (`short`)."""

    moves: int
    bytes: int
    torn: int
    lost: int
    short: int

    @classmethod
    def of(cls, clients: "Collection[FollowingClient]", final: dict[str, int]) -> Self:
        return cls(
            moves=sum(client.moves for client in clients),
            bytes=sum(client.bytes for client in clients),
            torn=sum(client.torn for client in clients),
            lost=sum(client.lost for client in clients),
            short=sum(not client.stands(final) for client in clients),
        )


class _Move(msgspec.Struct):
    stream: str
    writer: str | None = None
    prev: int = 0
    id: int = 0
    batch: int = 0


class _Snapshot(msgspec.Struct):
    stream: str
    vector: dict[str, int]


_move = msgspec.json.Decoder(_Move).decode
_snapshot = msgspec.json.Decoder(_Snapshot).decode


class FollowingClient(asyncio.Protocol):
    """`positions` by stream and writer."""

    def __init__(self, path: str, streams: int, stamps: "array[float]") -> None:
        self.positions: dict[str, dict[str, int]] = {}
        self.begun = asyncio.Event()
        self.moves = self.bytes = self.torn = 0
        self.lost = False
        self._path = path
        self._streams = streams
        self._stamps = stamps
        self._rest = b""

    def connection_made(self, transport: Any) -> None:
        transport.write(f"GET {self._path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def connection_lost(self, _: Exception | None) -> None:
        self.lost = True

    def data_received(self, data: bytes) -> None:
        self.bytes += len(data)
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        batch = 0
        for block in blocks:
            # Chunks of HTTP end where events do, so their sizes stand before the first line of an event.
            head, _, told = block.partition(b"data: ")
            if b"event: advance" in head or b"event: reread" in head:
                batch = max(batch, self._moved(_move(told)))
            elif b"event: snapshot" in head:
                snapshot = _snapshot(told)
                self.positions[snapshot.stream] = snapshot.vector
                if len(self.positions) == self._streams:
                    self.begun.set()
        if batch:
            self._stamps.extend((batch, time.time()))

    def _moved(self, move: _Move) -> int:
        self.moves += 1
        vector = self.positions.get(move.stream)
        if vector is None or move.writer is None or vector.get(move.writer) != move.prev:
            self.torn += 1
        else:
            vector[move.writer] = move.id
        return move.batch

    def stands(self, final: dict[str, int]) -> bool:
        return all(vector == final for vector in self.positions.values())


async def run(crowd: Crowd) -> None:
    stamps = array("d")
    clients = await connected(crowd.port, _clients(crowd, stamps))
    final = await final_positions()
    await until(lambda: all(client.stands(final) for client in clients))
    Path(crowd.stamps).write_bytes(stamps.tobytes())
    say(Saw.of(clients, final))


def _clients(crowd: Crowd, stamps: "array[float]") -> Iterator[FollowingClient]:
    for number in range(crowd.each + crowd.all):
        named = [] if number >= crowd.each else [crowd.streams[number % len(crowd.streams)]]
        path = "/v1/events?" + urlencode({"stream": named}, doseq=True)
        yield FollowingClient(path, len(named) or len(crowd.streams), stamps)


if __name__ == "__main__":
    uvloop.run(run(msgspec.json.decode(sys.argv[1], type=Crowd)))
