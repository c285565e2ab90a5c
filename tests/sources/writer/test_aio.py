"""The writer for asyncio: the same behaviour on `AsyncConnection`."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import psycopg
import pytest
from prometheus_client import CollectorRegistry

from tests.sources.writer.judge import Judge
from tidemark.app.stack.servers import KafkaServer
from tidemark.sources.writer import AsyncWriter
from tidemark.streaming.errors import FactWithoutRow, WriterFenced

INSERT = "insert into orders (id) values (%s)"


@pytest.fixture
def writer(dsn: str, kafka: KafkaServer, topic: str) -> AsyncWriter:
    return AsyncWriter(
        dsn,
        kafka.bootstrap_servers,
        instance="shop-1",
        streams=["orders"],
        topic=topic,
        registry=CollectorRegistry(),
    )


def run(writer: AsyncWriter, act: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with writer:
            await act()

    asyncio.run(main())


def test_tasks_share_a_writer(writer: AsyncWriter, dsn: str, sql: psycopg.Connection, judge: Judge) -> None:
    """Several tasks at once, with a rollback, several rows, several IDs and a statement of their own."""

    async def work(seed: int) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            async with writer.transaction(connection) as facts:
                await connection.execute(INSERT, [await facts.append("orders", seed)])
            async with writer.transaction(connection) as facts:
                for id in await facts.reserve_many("orders", 2):
                    await connection.execute(INSERT, [id])
                    await facts.add("orders", id, 1, 2)
                facts.void("orders", await facts.reserve("orders"))
            async with writer.transaction(connection) as facts:
                await facts.write("orders", {}, "insert into orders (id) values (%(id)s)")
                raise psycopg.Rollback

    async def all_of_them() -> None:
        await asyncio.gather(*(work(seed) for seed in range(5)))

    run(writer, all_of_them)
    verdict = judge.agrees(sql)
    assert len(verdict.announced["orders"]) == 15
    assert verdict.effects["orders"].linear == 25


def test_a_cancelled_task_leaves_nothing_in_doubt(
    writer: AsyncWriter, dsn: str, sql: psycopg.Connection, judge: Judge
) -> None:
    """Cancelled while it waits for the fence, in the middle of a reservation; the loop never stood still."""

    async def act() -> None:
        async with (
            await psycopg.AsyncConnection.connect(dsn) as connection,
            await psycopg.AsyncConnection.connect(dsn) as fencer,
        ):
            await fencer.execute("select pg_advisory_xact_lock(tidemark.writer_lock('shop-1'))")

            async def write() -> None:
                async with writer.transaction(connection) as facts:
                    await connection.execute(INSERT, [await facts.append("orders", {})])

            task = asyncio.create_task(write())
            while not sql.execute("select 1 from pg_locks where locktype = 'advisory' and not granted").fetchone():
                await asyncio.sleep(0.02)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await fencer.rollback()
        async with await psycopg.AsyncConnection.connect(dsn) as connection, writer.transaction(connection) as facts:
            await connection.execute(INSERT, [await facts.append("orders", {})])

    run(writer, act)
    assert len(judge.agrees(sql).announced["orders"]) == 1


def test_its_errors_are_those_of_the_other(writer: AsyncWriter, dsn: str, sql: psycopg.Connection) -> None:
    """A forgotten row, and a successor."""

    async def act() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            with pytest.raises(FactWithoutRow):
                async with writer.transaction(connection) as facts:
                    await facts.reserve("orders")
            sql.execute("update tidemark.writers set epoch = epoch + 1")
            with pytest.raises(WriterFenced):
                async with writer.transaction(connection) as facts:
                    await facts.reserve("orders")

    run(writer, act)
