"""How a process of the crowd brings its clients up and talks with the benchmark, in lines of JSON."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import msgspec

PATIENCE = 60.0  # seconds


class Begins(Protocol):
    """A client: `begun` is set when it has been told where all streams stand."""

    begun: asyncio.Event


C = TypeVar("C", bound=Begins)


async def connected(port: int, clients: Iterable[C]) -> list[C]:
    """Connect the clients, which are protocols of asyncio, one after the other, and say so when all have begun.

    Raises:
        TimeoutError: some had not begun after `PATIENCE`.
    """
    loop = asyncio.get_running_loop()
    crowd = []
    for client in clients:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
        crowd.append(client)
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(client.begun.wait() for client in crowd))
    say({})
    return crowd


async def final_positions() -> dict[str, int]:
    """The positions by writer at which every stream ends: what the benchmark says when it has published all."""
    return msgspec.json.decode(await asyncio.to_thread(sys.stdin.readline), type=dict[str, int])


async def until(there: Callable[[], bool]) -> None:
    """Wait, at most `PATIENCE`, until `there` says so."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not there():
        await asyncio.sleep(0.1)


def say(told: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.flush()
