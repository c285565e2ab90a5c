"""A process that attacks a sidecar, in one way or in several at once. It prints a line when it is ready, begins at a
line on its input, ends at the next one, and prints how much of each it did.

Newlines without end on the line protocol; heads of requests without end, and half-open ones; small pages of a long
history; tokens of 60 KB; clients of events that come and go by the hundred; thousands of unknown names in one request;
scrapes of `/metrics`; all positions again and again on the line protocol; as many event streams, and connections of
the line protocol, as one address gets; names of 60 KB with a bad line.

All of it comes from one loopback address of its own, so that the sidecar can tell it from honest clients.
"""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import uvloop

from tests.bench.crowd.talk import say
from tidemark.app.sidecar.event_stream import encode_places
from tidemark.sinks.reader.events import Place

CROWD_PAUSE = 1.0  # seconds after which one of a crowd of hundreds comes back
PAUSE = 0.05  # seconds after an attack that was ended by the sidecar


class Attack(msgspec.Struct, frozen=True):
    port: int
    tcp: int
    streams: list[str]
    acts: list[str]
    """Of `ACTS` and `CROWDS`."""
    address: str = "127.0.0.2"
    crowd: int = 2500
    """How many connections each of `CROWDS` opens."""


@asynccontextmanager
async def opened(attack: Attack, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(attack.address, 0))
    try:
        yield reader, writer
    finally:
        writer.close()


async def newlines(attack: Attack, done: Counter[str]) -> None:
    async with opened(attack, attack.tcp) as (_, writer):
        while True:
            writer.write(b"\n" * 65536)
            await writer.drain()


async def endless_head(attack: Attack, done: Counter[str]) -> None:
    async with opened(attack, attack.port) as (_, writer):
        writer.write(b"GET /v1/streams HTTP/1.1\r\n")
        while True:
            writer.write(b"X-%d: %s\r\n" % (random.randrange(10**9), b"x" * 8000))
            await writer.drain()


async def half_open(attack: Attack, done: Counter[str]) -> None:
    async with opened(attack, attack.port) as (reader, writer):
        writer.write(b"GET /v1/streams HTTP/1.1\r\nHost: localhost\r\n")
        await reader.read()


async def page(attack: Attack, done: Counter[str]) -> None:
    await ask(attack, f"/v1/streams/{random.choice(attack.streams)}/advances?limit=1", done)


async def long_page(attack: Attack, done: Counter[str]) -> None:
    await ask(attack, f"/v1/streams/{random.choice(attack.streams)}/advances?limit=10000", done)


async def long_token(attack: Attack, done: Counter[str]) -> None:
    token = "m1" + "".join(f"~w{number}.{number + 2}" for number in range(5000))
    await ask(attack, f"/v1/streams/{attack.streams[0]}/wait?token={token[:60_000]}&timeout=0", done)


async def come_and_go(attack: Attack, done: Counter[str]) -> None:
    """From the beginning of time, so that there is something to read; half of them leave at once, half with 100 KB."""
    stream = random.choice(attack.streams)
    place = encode_places({stream: Place()})
    least = random.choice((1, 100_000))
    await ask(attack, f"/v1/events?stream={stream}", done, f"Last-Event-ID: {place}\r\n", least)


async def many_names(attack: Attack, done: Counter[str]) -> None:
    """Other ones each time, so that nobody shares them."""
    first = random.randrange(10**6)
    names = "&".join(f"stream=x{first + number}" for number in range(2000))
    await ask(attack, f"/v1/events?{names}", done)


async def long_name(attack: Attack, done: Counter[str]) -> None:
    async with opened(attack, attack.tcp) as (reader, writer):
        writer.write(b"NAME " + b"n" * 60_000 + b"\nno command\n")
        await reader.read()
        done["lines"] += 1


async def scrapes(attack: Attack, done: Counter[str]) -> None:
    await ask(attack, "/metrics", done, least=10**9)


async def all_positions(attack: Attack, done: Counter[str]) -> None:
    """Ask for more than the sidecar sends, and read all that it sends."""
    async with opened(attack, attack.tcp) as (reader, writer):
        while True:
            writer.write(b"REPLICATE\n" * 100)
            if not (read := await reader.read(2**20)):
                return
            done["lines"] += read.count(b"\n")


async def one_address(attack: Attack, done: Counter[str]) -> None:
    """Event streams that are read, one for each connection, for as long as the sidecar leaves them there."""
    stream = random.choice(attack.streams)
    async with opened(attack, attack.port) as (reader, writer):
        writer.write(f"GET /v1/events?stream={stream} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head = await reader.readline()
        done[head[9:12].decode() or "closed"] += 1
        while await reader.read(100_000):
            pass


async def silent_lines(attack: Attack, done: Counter[str]) -> None:
    """Connections of the line protocol that never send anything."""
    async with opened(attack, attack.tcp) as (reader, _):
        while line := await reader.readline():
            done[line.split(b" ")[0].decode()] += 1


async def named_lines(attack: Attack, done: Counter[str]) -> None:
    """The same, once they have said who they are."""
    async with opened(attack, attack.tcp) as (reader, writer):
        writer.write(b"NAME x\n")
        while line := await reader.readline():
            done[line.split(b" ")[0].decode()] += 1


async def ask(attack: Attack, path: str, done: Counter[str], more: str = "", least: int = 1) -> None:
    """Read `least` bytes of the answer, and what comes with them, where there are as many within 10 s."""
    async with opened(attack, attack.port) as (reader, writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{more}\r\n".encode())
        async with asyncio.timeout(10):  # `wait_for` may swallow that the attack is over
            head = await reader.readline()
            done[head[9:12].decode() or "closed"] += 1
            read = 0
            while read < least and (some := await reader.read(100_000)):
                read += len(some)


_MANY: dict[Callable[[Attack, Counter[str]], Awaitable[None]], int] = {
    newlines: 2,
    endless_head: 2,
    half_open: 60,
    page: 4,
    long_page: 1,
    long_token: 4,
    come_and_go: 20,
    many_names: 8,
    long_name: 4,
    scrapes: 8,
    all_positions: 4,
}
ACTS = tuple(act.__name__ for act in _MANY)
_CROWDS = (one_address, silent_lines, named_lines)
CROWDS = tuple(act.__name__ for act in _CROWDS)


async def again_and_again(
    act: Callable[[Attack, Counter[str]], Awaitable[None]], attack: Attack, done: Counter[str]
) -> None:
    while True:
        try:
            await act(attack, done)
        except (OSError, TimeoutError):
            done["cut off"] += 1
        await asyncio.sleep(CROWD_PAUSE if act in _CROWDS else PAUSE)


async def run(attack: Attack) -> None:
    say({})
    await asyncio.to_thread(sys.stdin.readline)
    done: dict[str, Counter[str]] = {name: Counter() for name in attack.acts}
    acts = [
        asyncio.create_task(again_and_again(act, attack, done[act.__name__]))
        for act, count in (_MANY | dict.fromkeys(_CROWDS, attack.crowd)).items()
        if act.__name__ in attack.acts
        for _ in range(count)
    ]
    await asyncio.to_thread(sys.stdin.readline)
    for task in acts:
        task.cancel()
    await asyncio.gather(*acts, return_exceptions=True)
    say(done)


if __name__ == "__main__":
    uvloop.run(run(msgspec.json.decode(sys.argv[1], type=Attack)))
