"""The past hour of a stream, and the status of readers, for the live page and the metrics.

A separate thread reads both from Postgres, so that reads of positions are not delayed. Answers are cached for a few
seconds, so that many pages need few queries.
"""

import asyncio
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, TypeVar

from tidemark.app.diagnosis.reader_lag import ReaderLag, ReaderStatus
from tidemark.app.read_side.single_flight import CircuitBreaker
from tidemark.common.errors import Refused, Slow
from tidemark.common.postgres_session import Dsn
from tidemark.sinks.postgres.database import session_of
from tidemark.sinks.postgres.lag_history import LagHistory, StreamHistoryChart
from tidemark.sinks.reader import ReaderPlaces

CHART_SECONDS, CHART_STEPS = 3600, 120
CHART_CACHE_SECONDS = 10.0
READERS_CACHE_SECONDS = 5.0
TIMEOUT_SECONDS = 10.0
MAX_CACHED_ANSWERS = 1000

T = TypeVar("T")


class StreamHistoryReader:
    """Reads charts and the status of readers. For one event loop. Methods raise `Unavailable`, `Refused` and `Slow`."""

    def __init__(self, postgres: Dsn, readers: Dsn | None) -> None:
        self._session = session_of(postgres, "tidemark history")
        self._history = LagHistory(self._session)
        self._places = ReaderPlaces(postgres if readers is None else readers)
        self._has_own_database = readers is not None
        self._lag = ReaderLag(self._history)
        self._thread = ThreadPoolExecutor(1, "stream history")
        self._answers: dict[Hashable, tuple[float, Any]] = {}
        self._breakers = {server: CircuitBreaker(server) for server in ("Postgres", "The database of the readers")}

    async def aclose(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
        self._session.close()
        self._places.close()

    async def chart(self, stream: str) -> StreamHistoryChart:
        """The past hour of the stream."""
        return await self._read(
            "Postgres",
            stream,
            CHART_CACHE_SECONDS,
            lambda: self._history.chart(stream, datetime.now(UTC), CHART_SECONDS, CHART_STEPS),
        )

    async def readers(self) -> list[ReaderStatus]:
        """The readers of all streams, by stream and name."""
        return await self._read("The database of the readers", None, READERS_CACHE_SECONDS, self._read_readers)

    def _read_readers(self) -> list[ReaderStatus]:
        try:
            stored = self._places.places()
        except Refused:
            if self._has_own_database:
                raise
            return []  # the user may not read the places, and no database of readers is configured
        return self._lag.statuses(stored)

    async def _read(self, server: str, key: Hashable, max_age_seconds: float, read: Callable[[], T]) -> T:
        def read_once() -> T:
            """Use the cache, because another request may have read while this request waited for the thread."""
            if key in self._answers and time.monotonic() - self._answers[key][0] < max_age_seconds:
                remembered: T = self._answers[key][1]
                return remembered
            fresh = read()
            while len(self._answers) >= MAX_CACHED_ANSWERS:
                del self._answers[next(iter(self._answers))]
            self._answers[key] = time.monotonic(), fresh
            return fresh

        with self._breakers[server].guarding():
            future = self._thread.submit(read_once)
            try:
                return await asyncio.wait_for(asyncio.wrap_future(future), TIMEOUT_SECONDS)
            except TimeoutError:
                where = self._session.where if server == "Postgres" else self._places.where
                raise Slow("Postgres", where, f"no answer within {TIMEOUT_SECONDS:g} s; try again") from None
            finally:
                future.cancel()  # has no effect if the read has started
