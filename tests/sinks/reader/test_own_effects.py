"""The database of a service as the service uses it: sessions of SQLAlchemy, Django's connection, and a pool."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import BigInteger, create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker
from sqlalchemy.pool import NullPool

from tests.sinks.reader.given import Pipeline
from tests.sinks.reader.service import ReadingService
from tidemark.common.errors import BadSetting, TransactionEnded
from tidemark.sinks.reader import AsyncPositions, AsyncReader, Positions, Reader


class Base(DeclarativeBase):
    pass


class Booked(Base):
    __tablename__ = "booked"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)


@pytest.fixture
def three(service: ReadingService, pipeline: Pipeline) -> ReadingService:
    """With three facts to be read, and a table for their effects."""
    service.write(1, 2, 3)
    pipeline.move("w", 0, 3)
    service.sql.execute("create table booked (id bigint primary key check (id <> 2))")
    return service


def booked(service: ReadingService) -> list[tuple[int]]:
    return service.sql.execute("select id from booked order by id").fetchall()


def url(dsn: str) -> str:
    return dsn.replace("postgresql://", "postgresql+psycopg://")


@pytest.mark.parametrize("kind", ["engine", "session maker"])
def test_batch_has_a_session_of_sqlalchemy(three: ReadingService, kind: str) -> None:
    """Its objects commit with the place. A fact that fails is parked. A batch that is left is rolled back."""
    engine = create_engine(url(three.dsn), poolclass=NullPool)
    effects = engine if kind == "engine" else sessionmaker(engine)
    with Positions(three.redis) as positions, Reader(positions, "s", **three.arguments(effects=effects)) as reader:
        for batch in reader:
            batch.connection.add(Booked(id=1))
            batch.connection.flush()
            break
        assert booked(three) == []
        batch = next(iter(reader))
        for id, _ in batch.facts():
            with batch.parking(id, Exception):
                batch.connection.add(Booked(id=id))
        reader._stopping.set()
        assert next(reader, None) is None
    assert booked(three) == [(1,), (3,)]
    assert three.place().linear == 3
    assert three.sql.execute("select id from tidemark_reader.parked").fetchall() == [(2,)]
    engine.dispose()


def test_session_that_is_committed_by_the_handler_stops_the_reader(three: ReadingService) -> None:
    """The place is not stored, so no fact is passed whose effects may be missing."""
    engine = create_engine(url(three.dsn), poolclass=NullPool)
    with Positions(three.redis) as positions, Reader(positions, "s", **three.arguments(effects=engine)) as reader:
        next(reader).connection.commit()
        with pytest.raises(TransactionEnded, match="COMMIT or ROLLBACK"):
            next(reader)
    assert three.place().linear == 0
    engine.dispose()


def test_batch_has_an_async_session_of_sqlalchemy(three: ReadingService) -> None:
    """The same for asyncio."""

    async def main() -> None:
        engine = create_async_engine(url(three.dsn), poolclass=NullPool)
        arguments = three.arguments(effects=async_sessionmaker(engine))
        async with AsyncPositions(three.redis) as positions, AsyncReader(positions, "s", **arguments) as reader:
            async for batch in reader:
                for id, _ in batch.facts():
                    async with batch.parking(id, Exception):
                        batch.connection.add(Booked(id=id))
                reader._stopping.set()
        await engine.dispose()

    asyncio.run(main())
    assert booked(three) == [(1,), (3,)]
    assert three.place().linear == 3


DJANGO = """
import os, sys
import django
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

at = conninfo_to_dict(os.environ["DSN"])
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": at["dbname"],
    "USER": at["user"], "PASSWORD": at["password"], "HOST": at["host"], "PORT": at["port"]}})
django.setup()
from django.db import IntegrityError, connection, models
from tidemark import Positions, Reader, Table

class Booked(models.Model):
    id = models.BigIntegerField(primary_key=True)
    class Meta:
        app_label, db_table = "shop", "booked"

with Positions(os.environ["REDIS"]) as positions, Reader(
    positions, "s", Table("facts"), name="copier", source=os.environ["DSN"], effects=connection
) as reader:
    for batch in reader:
        for id, rows in batch.facts():
            with batch.parking(id, IntegrityError):
                Booked.objects.create(id=id)
        reader._stopping.set()
"""


def test_django_writes_in_the_transaction_of_the_batch(three: ReadingService) -> None:
    """Models are saved by Django's own connection, with the place."""
    environment = {**os.environ, "DSN": three.dsn, "REDIS": three.redis}
    subprocess.run([sys.executable, "-c", DJANGO], env=environment, check=True, timeout=120)
    assert booked(three) == [(1,), (3,)]
    assert three.place().linear == 3


class Pool:
    """The methods of psycopg_pool that a reader uses."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def getconn(self) -> Any:
        raise AssertionError

    @contextmanager
    def connection(self) -> Iterator[Any]:
        with psycopg.connect(self._dsn) as connection:
            yield connection


class AsyncPool(Pool):
    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:  # type: ignore[override]
        async with await psycopg.AsyncConnection.connect(self._dsn) as connection:
            yield connection


@pytest.mark.parametrize("form", ["threads", "asyncio"])
def test_batch_has_a_connection_of_a_pool(three: ReadingService, form: str) -> None:
    """Each batch takes one, and gives it back."""
    three.form = form
    three.until(
        lambda: three.place().linear == 3, rows=1, effects=(Pool if form == "threads" else AsyncPool)(three.dsn)
    )
    assert three.ids() == [1, 2, 3]


def test_what_is_no_database_is_refused(three: ReadingService) -> None:
    """Before anything is read; so is an engine whose driver is another one."""
    with Positions(three.redis) as positions:
        with pytest.raises(BadSetting, match="is a int"):
            Reader(positions, "s", **three.arguments(effects=3))
        engine = create_engine("sqlite://")
        with (
            pytest.raises(BadSetting, match="its connections are of sqlite3: give an object that uses psycopg 3"),
            Reader(positions, "s", **three.arguments(effects=engine)) as reader,
        ):
            next(reader)
        engine.dispose()
