"""A process with very many clients of `/v1/events`, on bare sockets, each of which checks every move that it is told.

Prints a line of JSON when all stand at their first snapshot; after a line on its input with the final positions it
waits until all have come there, and prints what they saw.
"""

import asyncio
import re
import sys
import time
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
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


class ToldMove(msgspec.Struct):
    stream: str
    writer: str | None = None
    prev: int = 0
    id: int = 0
    batch: int = 0


class ToldSnapshot(msgspec.Struct):
    stream: str
    vector: dict[str, int]


_move = msgspec.json.Decoder(ToldMove).decode
_snapshot = msgspec.json.Decoder(ToldSnapshot).decode


@dataclass(frozen=True, slots=True)
class ToldChunk:
    """What a chunk of HTTP says, which is whole events: moves, snapshots, and the last ID."""

    moves: list[ToldMove]
    snapshots: list[ToldSnapshot]
    last_id: bytes | None


@lru_cache(4096)
def _told(chunk: bytes) -> ToldChunk:
    """Once for all clients that are sent the same: reading it again for each would take more than the sidecar does."""
    told = ToldChunk([], [], None)
    for block in chunk.split(b"\n\n"):
        head, _, data = block.partition(b"data: ")
        if b"event: advance" in head or b"event: reread" in head:
            told.moves.append(_move(data))
        elif b"event: snapshot" in head:
            told.snapshots.append(_snapshot(data))
    ids = re.findall(rb"^id: (.*)$", chunk, re.MULTILINE)
    return replace(told, last_id=ids[-1] if ids else None)


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
        self._in_body = False

    def connection_made(self, transport: Any) -> None:
        transport.write(f"GET {self._path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def connection_lost(self, _: Exception | None) -> None:
        self.lost = True

    def data_received(self, data: bytes) -> None:
        self.bytes += len(data)
        text, at = self._rest + data, 0
        if not self._in_body:
            at = text.find(b"\r\n\r\n") + 4
            if at < 4:
                self._rest = text
                return
            self._in_body = True
        while (end := text.find(b"\r\n", at)) >= 0 and end + 4 + (size := int(text[at:end], 16)) <= len(text):
            self._take(_told(text[end + 2 : end + 2 + size]))
            at = end + 4 + size
        self._rest = text[at:]

    def _take(self, told: ToldChunk) -> None:
        for snapshot in told.snapshots:
            self.positions[snapshot.stream] = dict(snapshot.vector)
            if len(self.positions) == self._streams:
                self.begun.set()
        batch = 0
        for move in told.moves:
            batch = max(batch, self._moved(move))
        if batch:
            self._stamps.extend((batch, time.time()))

    def _moved(self, move: ToldMove) -> int:
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
