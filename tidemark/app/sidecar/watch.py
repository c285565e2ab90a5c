"""Every stream once a second for all watchers, kept as text that is encoded once.

A watcher takes what changed since it last took something, however long ago that is: one that reads slowly gets fewer
and newer texts, and no queue is kept for it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime

import structlog

from tidemark.app.read_side.opened import ReadSide
from tidemark.app.read_side.tasks import ended
from tidemark.app.sidecar.sse import encode_event
from tidemark.app.sidecar.watched import PipelineAnswer, pipeline_answer, watched_stream_answer
from tidemark.common.errors import Stop, Unavailable
from tidemark.sinks.postgres.status import Condition

log = structlog.get_logger(__name__)

PACE = 1.0  # seconds between two rounds
SHARE = 10  # a round that takes long is followed by a pause of so many times that: very many streams are read less


class Watcher:
    """`seen` is the number of the round whose texts it took last."""

    def __init__(self) -> None:
        self.seen = 0


class Watch:
    """One per process, for one event loop. It reads while somebody watches."""

    def __init__(self, read_side: ReadSide) -> None:
        self._read_side = read_side
        self._running: asyncio.Task[None] | None = None
        self._watchers = 0
        self._wanted = asyncio.Event()
        self._ended_round = asyncio.Condition()
        self._number = 0
        self._texts: dict[str, tuple[int, bytes]] = {}  # by stream: the round that changed it
        self._pipeline = b""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._start()
        try:
            yield
        finally:
            if self._running is not None:
                await ended(self._running)

    def _start(self) -> None:
        self._running = asyncio.create_task(self._run())
        self._running.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Watchers must not take a task that broke for streams that are quiet for ever."""
        if not task.cancelled() and (problem := task.exception()) is not None:
            log.error("Reading the streams for those who watch broke off", problem=repr(problem))
            self._running = None
            asyncio.get_running_loop().call_later(PACE, self._start)

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        self._watchers += 1
        self._wanted.set()
        try:
            yield Watcher()
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._wanted.clear()

    async def news(self, watcher: Watcher) -> bytes:
        """The events of all that changed since the watcher took the last ones; all that there is at first."""
        async with self._ended_round:
            await self._ended_round.wait_for(lambda: self._number > watcher.seen)
        changed = [text for number, text in self._texts.values() if number > watcher.seen]
        watcher.seen = self._number
        return b"".join([*changed, self._pipeline])

    async def pipeline(self) -> PipelineAnswer:
        """Read now."""
        condition: Condition | None = None
        with suppress(Unavailable, Stop):
            condition = await self._read_side.durable.condition()
        breakers = self._read_side.live.circuit_breaker, self._read_side.durable.circuit_breaker
        problems = [str(it.problem) for it in breakers if it.problem is not None]
        return pipeline_answer(condition, problems, datetime.now(UTC))

    async def _run(self) -> None:
        pause = PACE
        while True:
            await self._wanted.wait()
            began = time.monotonic()
            if await self._round():
                pause = max(PACE, SHARE * (time.monotonic() - began))
            await asyncio.sleep(pause)

    async def _round(self) -> bool:
        """Whether every server answered: else the time went into waiting, and says nothing of how much there is."""
        names = await self._read_side.snapshots.names()
        found = [watched_stream_answer(snapshot) for snapshot in await self._read_side.snapshots.get(sorted(names))]
        shown = await self.pipeline()
        async with self._ended_round:
            self._number += 1
            for stream in found:
                text = encode_event(stream)
                before = self._texts.get(stream.stream)
                if before is None or before[1] != text:
                    self._texts[stream.stream] = self._number, text
            self._pipeline = encode_event(shown)
            self._ended_round.notify_all()
        return not shown.problems
