"""A process that asks for snapshots at an even rate, whether or not the earlier ones were answered.

Latency counts from when a request was due, so a server that falls behind shows it. Prints what it saw as JSON.
"""

import asyncio
import sys
import time
from collections import deque
from typing import Any

import msgspec
import uvloop

from tests.bench.crowd.talk import say

CONNECTIONS = 50
PATIENCE = 10.0  # seconds for the last answers


class Questions(msgspec.Struct, frozen=True):
    port: int
    streams: list[str]
    rate: float
    seconds: float


class Answers(msgspec.Struct, frozen=True):
    """`latencies` in seconds, of answers with status 200; `failed` counts all others."""

    latencies: list[float]
    failed: int


class Connection(asyncio.Protocol):
    """One request at a time; what is due meanwhile waits."""

    def __init__(self, idle: "deque[Connection]") -> None:
        self.latencies: list[float] = []
        self.failed = 0
        self._idle = idle
        self._transport: Any = None
        self._due = 0.0
        self._rest = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._idle.append(self)

    def ask(self, stream: str, due: float) -> None:
        self._due = due
        self._transport.write(f"GET /v1/streams/{stream} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        self._rest += data
        head, parted, body = self._rest.partition(b"\r\n\r\n")
        if not parted or len(body) < int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]):
            return
        self._rest = b""
        if head.startswith(b"HTTP/1.1 200"):
            self.latencies.append(time.monotonic() - self._due)
        else:
            self.failed += 1
        self._idle.append(self)


async def run(questions: Questions) -> None:
    loop = asyncio.get_running_loop()
    idle: deque[Connection] = deque()
    connections = []
    for _ in range(CONNECTIONS):
        _, connection = await loop.create_connection(lambda: Connection(idle), "127.0.0.1", questions.port)
        connections.append(connection)
    began = time.monotonic()
    total = round(questions.rate * questions.seconds)
    for number in range(total):
        due = began + number / questions.rate
        while (wait := due - time.monotonic()) > 0 or not idle:
            await asyncio.sleep(max(wait, 0.0005))
        idle.popleft().ask(questions.streams[number % len(questions.streams)], due)
    deadline = time.monotonic() + PATIENCE
    while len(idle) < CONNECTIONS and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    latencies = [latency for connection in connections for latency in connection.latencies]
    told = Answers(latencies, total - len(latencies))
    say(told)


if __name__ == "__main__":
    uvloop.run(run(msgspec.json.decode(sys.argv[1], type=Questions)))
