"""A process with many clients of the line protocol, on bare sockets.

Each hears every move of every stream; a few check each line of it, the others only take it, because to read it all
would need more cores than the sidecar. Prints a line of JSON when all have heard where the streams stand; after a line
on its input with the final positions every client asks again, and must be told exactly those.
"""

import asyncio
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from tests.bench.crowd.talk import connected, final_positions, say, until

KEEP_ALIVE = 4.0  # seconds between two signs of life


class Lines(msgspec.Struct, frozen=True):
    """`checking` of the `clients` check. IDs of `writers` take turns, so that they tell their batch."""

    port: int
    streams: int
    writers: int
    clients: int
    checking: int
    stamps: str


class LinesHeard(msgspec.Struct, frozen=True):
    """Over all clients: bytes taken, lines that were checked, those that went back (`torn`), connections lost, and
    clients that were told other positions in the end (`short`)."""

    bytes: int
    lines: int
    torn: int
    lost: int
    short: int


class LineReader(asyncio.Protocol):
    def __init__(self, lines: Lines, stamps: "array[float] | None") -> None:
        self.bytes = self.lines = self.torn = 0
        self.lost = False
        self.begun = asyncio.Event()
        self.positions: dict[tuple[bytes, bytes], int] = {}
        self._reading = True
        self._wanted = lines.streams * lines.writers
        self._writers = lines.writers
        self._stamps = stamps
        self._rest = b""
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.say(b"PING 0\nREPLICATE\n")

    def connection_lost(self, _: Exception | None) -> None:
        self.lost = True
        self._transport = None

    def say(self, lines: bytes) -> None:
        if self._transport is not None:
            self._transport.write(lines)

    def ask_again(self) -> None:
        self.positions = {}
        self._reading = True
        self.say(b"REPLICATE\n")

    def data_received(self, data: bytes) -> None:
        self.bytes += len(data)
        if not self._reading:
            self._rest = data[data.rfind(b"\n") + 1 :] if b"\n" in data else self._rest + data
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        newest = max(map(self._heard, lines), default=0)
        if self.begun.is_set() and self._stamps is not None and newest:
            self._stamps.extend(((newest - 1) // self._writers + 1, time.time()))
        if len(self.positions) == self._wanted and not self.begun.is_set():
            self.begun.set()
            self._reading = self._stamps is not None

    def _heard(self, line: bytes) -> int:
        if not line.startswith(b"POSITION "):
            return 0
        _, stream, writer, prev, new = line.split(b" ")
        id = int(new)
        stood = self.positions.get((stream, writer), 0)
        self.lines += 1
        self.torn += id < stood or (int(prev) != stood and prev != new)
        self.positions[stream, writer] = id
        return id


async def run(lines: Lines) -> None:
    stamps = array("d")
    clients = [LineReader(lines, stamps if number < lines.checking else None) for number in range(lines.clients)]
    alive = asyncio.create_task(_stay_alive(clients))
    await connected(lines.port, clients)
    final = {writer.encode(): id for writer, id in (await final_positions()).items()}
    checked, torn = sum(client.lines for client in clients), sum(client.torn for client in clients)
    for client in clients:
        client.ask_again()
    await until(lambda: all(_stands(client, final, lines) for client in clients))
    alive.cancel()
    Path(lines.stamps).write_bytes(stamps.tobytes())
    say(
        LinesHeard(
            bytes=sum(client.bytes for client in clients),
            lines=checked,
            torn=torn,
            lost=sum(client.lost for client in clients),
            short=sum(not _stands(client, final, lines) for client in clients),
        )
    )


async def _stay_alive(clients: list[LineReader]) -> None:
    while True:
        await asyncio.sleep(KEEP_ALIVE)
        for client in clients:
            client.say(b"PING 0\n")


def _stands(client: LineReader, wanted: dict[bytes, int], lines: Lines) -> bool:
    told = client.positions
    return len(told) == lines.streams * lines.writers and all(id == wanted[writer] for (_, writer), id in told.items())


if __name__ == "__main__":
    uvloop.run(run(msgspec.json.decode(sys.argv[1], type=Lines)))
