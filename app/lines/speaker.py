"""One of the sidecars speaks on a channel of Redis: it answers REPLICATE there, and says what moves the streams.

Who speaks holds a lease in Redis, and every line goes out in a script that looks at it: so no two ever speak, also
where one was frozen and wakes up. The same script remembers how far writers were told. So a successor knows what the
dead one said, whatever of it was on its way: it begins by saying where every writer stands, and whoever is below that
fetches.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import msgspec
import structlog
from redis.asyncio.lock import Lock
from redis.exceptions import LockNotOwnedError, RedisError

from tidemark.app.lines.announcer import Announcement, Told
from tidemark.app.lines.commands import PositionCommand, RdataCommand
from tidemark.app.lines.hub import Hub
from tidemark.app.lines.rows import Writer
from tidemark.app.read_side import metrics
from tidemark.app.read_side.tasks import ended
from tidemark.sinks.reader.redis import translated
from tidemark.streaming.errors import Stop, Unavailable

log = structlog.get_logger(__name__)

AT_ONCE = 500  # lines of one script, about: others of Redis wait meanwhile
ANSWER_EVERY = 0.5  # seconds between answers: one answers all who asked before it

_SCRIPT = files("tidemark.app.lines").joinpath("speak.lua").read_text("utf-8")


@dataclass(frozen=True, slots=True)
class ChannelConfig:
    """`lease` in seconds: how long nobody speaks after the speaker was killed."""

    channel: str
    lease: float = 3.0


class _Silenced(Exception):
    """Another speaks."""


class Speaker:
    """For one event loop; `client` is of redis.asyncio. Waits to become the speaker, and speaks, until cancelled."""

    def __init__(self, hub: Hub, client: Any, terms: ChannelConfig) -> None:
        self._hub = hub
        self._client = client
        self._terms = terms
        self._token = uuid.uuid4().hex
        self._keys = [f"tidemark:lines:{{{terms.channel}}}:{name}" for name in ("speaker", "told")]
        self._lock = Lock(client, self._keys[0], timeout=terms.lease, blocking=False, thread_local=False)
        self._say_script = client.register_script(_SCRIPT)
        self._news: deque[Announcement] = deque()
        self._wake = asyncio.Event()
        self._asked = False
        self._answered = 0.0

    def asked(self) -> None:
        """Somebody sent REPLICATE."""
        self._asked = True
        self._wake.set()

    async def run(self) -> None:
        problem = None
        while True:
            try:
                with translated(self._client):
                    if await self._lock.acquire(token=self._token):
                        await self._speak()
                problem = None
            except _Silenced:
                log.info("Another sidecar speaks on the channel now", channel=self._terms.channel)
            except (Unavailable, Stop) as error:
                if problem is None:
                    log.warning("Nothing can be said on the channel of Redis", problem=str(error))
                problem = error
            await asyncio.sleep(self._terms.lease / 3)

    async def _speak(self) -> None:
        log.info("Speaking on the channel", channel=self._terms.channel)
        renewing = asyncio.create_task(self._renew())
        self._hub.listen(self._hear)
        metrics.SPEAKER.set(1)
        try:
            told = Told(await self._told())
            await self._hub.begun()
            self._news.clear()  # of what we now say where it stands
            await self._stand(told)
            while not renewing.done():
                self._wake.clear()
                while self._news:
                    await self._say(self._batch(told))
                if self._asked and time.monotonic() - self._answered >= ANSWER_EVERY:
                    await self._stand(told)
                await self._slept(renewing)
            renewing.result()
        finally:
            metrics.SPEAKER.set(0)
            self._hub.leave(self._hear)
            await ended(renewing)
            await self._release()

    def _hear(self, announcements: Sequence[Announcement]) -> None:
        self._news.extend(announcements)
        self._wake.set()

    async def _slept(self, renewing: asyncio.Task[None]) -> None:
        waking = asyncio.ensure_future(self._wake.wait())
        pause = ANSWER_EVERY if self._asked else None
        await asyncio.wait({waking, renewing}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        waking.cancel()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._terms.lease / 3)
            try:
                await self._lock.reacquire()
            except LockNotOwnedError:
                raise _Silenced from None

    async def _release(self) -> None:
        """So that a successor need not wait for the lease to end."""
        try:
            await self._lock.release()
        except RedisError as problem:
            log.info("The lease of the channel was not given back, it ends by itself", problem=str(problem))

    async def _told(self) -> dict[Writer, int]:
        stored = await self._client.hgetall(self._keys[1])
        return {(stream, writer): int(id) for name, id in stored.items() for stream, writer in [name.split(" ")]}

    async def _stand(self, told: Told) -> None:
        self._asked, self._answered = False, time.monotonic()
        for chunk in _chunks(told.stand(self._hub.positions())):
            await self._say([chunk])

    def _batch(self, told: Told) -> list[Sequence[PositionCommand | RdataCommand]]:
        """What is said next, each announcement whole."""
        found: list[Sequence[PositionCommand | RdataCommand]] = []
        while self._news and sum(map(len, found)) < AT_ONCE:
            found.append(told.next(self._news.popleft()))
        return found

    async def _say(self, commands: Iterable[Sequence[PositionCommand | RdataCommand]]) -> None:
        flat = [command for each in commands for command in each]
        if not flat:
            return
        told = {f"{it.stream} {it.writer}": str(it.id) for it in flat if it.id is not None}
        packed = msgspec.msgpack.encode(([str(it) for it in flat], [word for pair in told.items() for word in pair]))
        if not await self._say_script(keys=self._keys, args=[self._token, self._terms.channel, packed]):
            raise _Silenced
        metrics.SAID.inc(len(flat))


def _chunks(positions: Sequence[PositionCommand]) -> Iterator[Sequence[PositionCommand]]:
    return (positions[start : start + AT_ONCE] for start in range(0, len(positions), AT_ONCE))
