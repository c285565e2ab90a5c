"""A service that reads a stream with the library, in either form; its effect is a copy of every row."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg

from tests.waiting import eventually
from tidemark.sinks.reader import AsyncPositions, AsyncReader, Place, Positions, ReadBatch, Reader, Table

TABLE = Table("facts", writer="instance", then=("ordinal",))
Effect = tuple[int, str, int, bool]


@dataclass
class ReadingService:
    """A service whose effect is a copy of every row, with the order in which it came."""

    redis: str
    dsn: str
    sql: psycopg.Connection
    form: str = "threads"
    informed: bool = True
    given: dict[str, Any] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    withdrawn: list[list[tuple[int, int]]] = field(default_factory=list)

    def write(self, *ids: int, instance: str | None = "w", rows: int = 1) -> None:
        """Facts of `instance`, committed to the backing table."""
        self.sql.cursor().executemany(
            "insert into facts values (%s, %s, %s)", [(id, instance, n) for id in ids for n in range(rows)]
        )

    def effects(self, reader: str = "copier") -> list[Effect]:
        """In the order in which they came about."""
        query = "select stream_id, instance, ordinal, late from effects where reader = %s order by n"
        return self.sql.execute(query, (reader,)).fetchall()

    def ids(self, late: bool = False) -> list[int]:
        return [id for id, _, _, was in self.effects() if was == late]

    def place(self) -> Place:
        query = "select linear, positions, late from tidemark_reader.places where reader = 'copier'"
        try:
            row = self.sql.execute(query).fetchone()
        except psycopg.errors.UndefinedTable:
            row = None
        return Place(*row) if row else Place()

    def arguments(self, **more: Any) -> dict[str, Any]:
        given = {"table": TABLE, "name": "copier", "source": self.dsn, "effects": self.dsn}
        return {**given, **self.given, **more}

    def until(self, done: Callable[[], bool], stream: str = "s", **more: Any) -> None:
        """Run the service until `done`; what it raises is raised here."""
        with self.running(stream, **more) as alive:
            eventually(lambda: done() or not alive())

    @contextmanager
    def running(self, stream: str = "s", **more: Any) -> Iterator[Callable[[], bool]]:
        stopping = threading.Event()
        raised: list[BaseException] = []

        def run() -> None:
            try:
                if self.form == "threads":
                    self._run(stream, self.arguments(stopping=stopping, **more))
                else:
                    asyncio.run(self._run_async(stream, stopping, self.arguments(**more)))
            except Exception as error:  # noqa: BLE001 - raised again, on the test's thread
                raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield thread.is_alive
        finally:
            stopping.set()
            thread.join(60)
        assert not thread.is_alive()
        if raised:
            raise raised[0]

    def _run(self, stream: str, arguments: dict[str, Any]) -> None:
        with (
            Positions(self.redis, self.dsn if self.informed else None) as positions,
            Reader(positions, stream, **arguments) as reader,
        ):
            for batch in reader:
                self.sizes.append(len(batch.rows))
                self.withdrawn += [[*batch.withdrawn]] if batch.withdrawn else []
                for row in batch.rows:
                    batch.connection.execute(*effect(row, batch))

    async def _run_async(self, stream: str, stopping: threading.Event, arguments: dict[str, Any]) -> None:
        async def loop() -> None:
            async with (
                AsyncPositions(self.redis, self.dsn if self.informed else None) as positions,
                AsyncReader(positions, stream, **arguments) as reader,
            ):
                async for batch in reader:
                    self.sizes.append(len(batch.rows))
                    self.withdrawn += [[*batch.withdrawn]] if batch.withdrawn else []
                    for row in batch.rows:
                        await batch.connection.execute(*effect(row, batch))

        task = asyncio.create_task(loop())
        while not stopping.is_set() and not task.done():
            await asyncio.sleep(0.02)
        if not task.done():
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def effect(row: dict[str, Any], batch: ReadBatch[Any], reader: str = "copier") -> tuple[str, tuple[object, ...]]:
    values = (reader, row["stream_id"], row["instance"], row["ordinal"], batch.late is not None)
    return "insert into effects (reader, stream_id, instance, ordinal, late) values (%s, %s, %s, %s, %s)", values
