"""The client of the SQL functions: what it sends, refuses and explains, on connections of every kind."""

import asyncio
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from tests.sources.relay.world import prepared_schema
from tidemark import AsyncWriter, Writer, errors


@pytest.fixture
def dsn(database: str) -> str:
    """A database with the functions, and a stream that goes up and one that goes down."""
    with prepared_schema(database), psycopg.connect(database, autocommit=True) as sql:
        sql.execute("select tidemark.create_stream('orders'), tidemark.create_stream('history', 'backward')")
    return database


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection]:
    """A connection of a service; what it leaves open is rolled back."""
    with psycopg.connect(dsn) as connection:
        yield connection
        connection.rollback()


def outbox(dsn: str) -> list[tuple[int, str, list[str]]]:
    with psycopg.connect(dsn) as sql:
        return sql.execute("select id, writer, rows from tidemark.append_outbox order by abs(id)").fetchall()


def test_what_it_writes_is_there_when_the_caller_commits(dsn: str, connection: psycopg.Connection) -> None:
    """A fact of one row, of none, of several; many at once; and one that was reserved: nothing before the commit."""
    writer = Writer("web")
    assert writer.append(connection, "orders", {"order": 17}) == 1
    assert writer.append(connection, "orders") == 2
    assert writer.append(connection, "orders", 1, "two", None, [True]) == 3
    assert writer.append_many(connection, "orders", [{"n": n} for n in range(3)]) == [4, 5, 6]
    assert writer.append_many(connection, "orders", []) == []
    id = writer.reserve(connection, "orders")
    writer.complete(connection, "orders", id, {'é\\"\n{},': "NULL"}, "second")
    assert Writer().append_many(connection, "history", iter([1, 2])) == [-1, -2]
    assert outbox(dsn) == []
    connection.commit()
    assert [row for row in outbox(dsn) if row[0] > 0] == [
        (1, "web", ['{"order": 17}']),
        (2, "web", []),
        (3, "web", ["1", '"two"', "null", "[true]"]),
        (4, "web", ['{"n": 0}']),
        (5, "web", ['{"n": 1}']),
        (6, "web", ['{"n": 2}']),
        (7, "web", [r'{"é\\\"\n{},": "NULL"}', '"second"']),
    ]
    assert [row for row in outbox(dsn) if row[0] < 0] == [(-1, "", ["1"]), (-2, "", ["2"])]


def test_the_order_of_many_is_that_of_their_ids(dsn: str, connection: psycopg.Connection) -> None:
    """Twenty thousand in one statement, which Python's side does not make long."""
    ids = Writer().append_many(connection, "orders", ({"n": n} for n in range(20_000)))
    assert ids == [*range(1, 20_001)]
    connection.commit()
    assert all(rows == [f'{{"n": {id - 1}}}'] for id, _, rows in outbox(dsn))


def test_values_that_json_has_no_word_for(dsn: str, connection: psycopg.Connection) -> None:
    """What msgspec writes as text is written so: times, UUIDs."""
    Writer().append(connection, "orders", {"at": datetime(2026, 1, 1, tzinfo=UTC), "key": UUID(int=1)})
    connection.commit()
    assert outbox(dsn)[0][2] == ['{"at": "2026-01-01T00:00:00Z", "key": "00000000-0000-0000-0000-000000000001"}']


def _nested(depth: int) -> list[object]:
    made: list[object] = [1]
    for _ in range(depth - 1):
        made = [made]
    return made


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (math.nan, "NaN"),
        ({"a": [None, {"b": -math.inf}]}, "Infinity"),
        ({"a": (1.0, math.nan)}, "NaN"),
        (_nested(256), "nested 256 deep"),
        (_nested(100_000), "not JSON"),
        ("x" * 900_001, "900003 bytes"),
        (object(), "not JSON"),
        ("\ud800", "not JSON"),
        (msgspec.Raw(b'"\xff"'), "not JSON"),
        ('{"order": 17}', "would be stored as a string"),
        (" [1]", "would be stored as a string"),
        (b"{}", "it is bytes"),
    ],
    ids=[
        "nan",
        "infinity",
        "in a tuple",
        "deep",
        "bottomless",
        "large",
        "object",
        "surrogate",
        "bytes",
        "text",
        "array",
        "binary",
    ],
)
def test_a_row_that_could_not_be_told_is_not_sent(connection: psycopg.Connection, row: object, says: str) -> None:
    """It is said at once, whichever way it is given, and the transaction goes on."""
    writer = Writer()
    id = writer.reserve(connection, "orders")
    for act in (
        lambda: writer.append(connection, "orders", 1, row),
        lambda: writer.append_many(connection, "orders", [1, row]),
        lambda: writer.complete(connection, "orders", id, row),
    ):
        with pytest.raises(errors.BadRow, match=says):
            act()
    writer.complete(connection, "orders", id, _nested(255), None, "null", "[" * 300, '"]' * 300)
    connection.commit()


def test_a_fact_has_a_bound(connection: psycopg.Connection) -> None:
    """Found before it is sent, so that the transaction goes on; as many facts the same rows are taken."""
    writer = Writer()
    id = writer.reserve(connection, "orders")
    rows = ["x" * 700_000] * 24
    for act in (
        lambda: writer.append(connection, "orders", *rows),
        lambda: writer.complete(connection, "orders", id, *rows),
    ):
        with pytest.raises(
            errors.BadRow, match="with this row the fact has 16804848 bytes, and a fact may have 16777216"
        ):
            act()
    writer.complete(connection, "orders", id, *rows[:23])
    assert len(writer.append_many(connection, "orders", rows)) == 24


def test_what_the_server_finds_wrong_in_a_row_is_the_row(connection: psycopg.Connection) -> None:
    """NUL is JSON, and nothing that Postgres can keep; and of JSON that is given as it is nobody else knows."""
    for row in ("\0", {"raw": msgspec.Raw(b"[null, NaN]")}):
        with pytest.raises(errors.BadRow, match=r"stream orders: a row is rejected: .*(Unicode|json)"):
            Writer().append(connection, "orders", row)
        connection.rollback()
    assert Writer().append(connection, "orders", msgspec.Raw(b'{"told": null}')) == 1


@pytest.mark.parametrize("name", ["", "*", "two words", "x" * 256])
def test_names_that_kafka_would_not_take(connection: psycopg.Connection, name: str) -> None:
    """Of writers and of streams, before anything is sent."""
    with pytest.raises(errors.BadSetting, match=r"writer: .*255 characters"):
        Writer(name)
    with pytest.raises(errors.BadSetting, match="writer"):
        AsyncWriter(name)
    if name != "*":
        with pytest.raises(errors.BadSetting, match=r"stream: .*255 characters"):
            Writer().append(connection, name, 1)


@pytest.mark.parametrize("rows", [{"order": 17}, "order", b"order"])
def test_one_row_is_not_many(connection: psycopg.Connection, rows: object) -> None:
    """A mapping would be taken for its keys, a text for its letters."""
    with pytest.raises(TypeError, match="takes rows"):
        Writer().append_many(connection, "orders", rows)  # type: ignore[arg-type]


def test_a_stream_that_is_not_there(connection: psycopg.Connection) -> None:
    """Who must act is a person, who is told what to do."""
    with pytest.raises(errors.Refused, match=r"stream 'order' does not exist.*create_stream\('order'\)"):
        Writer().append(connection, "order", 1)


def test_a_database_without_the_functions(database: str) -> None:
    """Says the command that brings them; also where another part of Tidemark has its schema there."""
    with psycopg.connect(database, autocommit=True) as connection:
        for _ in range(2):
            with pytest.raises(errors.Refused, match="run `tidemark relay migrate`"):
                Writer().append(connection, "orders", 1)
            connection.execute("create schema if not exists tidemark")


def test_who_may_not_append(dsn: str) -> None:
    """Says the role; the address has no password in it."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("drop role if exists stranger")
        connection.execute("create role stranger")
        connection.execute("set role stranger")
        with pytest.raises(errors.Refused, match="grant the user the role tidemark_append") as refused:
            Writer().append(connection, "orders", 1)
        assert connection.info.password not in str(refused.value)
        connection.execute("reset role")
        connection.execute("drop role stranger")


def test_an_id_that_was_not_reserved_here(dsn: str) -> None:
    """In autocommit the transaction of the reservation is over; and nobody else's ID can be completed."""
    writer = Writer()
    with psycopg.connect(dsn, autocommit=True) as connection:
        id = writer.reserve(connection, "orders")
        with pytest.raises(errors.NotReserved) as caught:
            writer.complete(connection, "orders", id, 1)
    assert (caught.value.stream, caught.value.id) == ("orders", id)


def test_other_errors_are_the_drivers(dsn: str) -> None:
    """Whoever repeats transactions goes by them: a lost connection, a transaction that has failed."""
    with psycopg.connect(dsn) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("select 1 / 0")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            Writer().append(connection, "orders", 1)
        connection.rollback()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select pg_terminate_backend(pg_backend_pid())")
        with pytest.raises(psycopg.OperationalError):
            Writer().append(connection, "orders", 1)


def test_connections_may_be_of_any_kind(dsn: str) -> None:
    """Other rows, other cursors, a pipeline of the caller's; what it sends is never prepared."""
    writer = Writer()
    for cursors in (psycopg.Cursor, psycopg.ClientCursor, psycopg.RawCursor):
        with psycopg.connect(dsn, row_factory=dict_row, cursor_factory=cursors, prepare_threshold=0) as connection:
            assert writer.append(connection, "orders", 1) > 0
            with connection.pipeline():
                assert len(writer.append_many(connection, "orders", [1, 2])) == 2
            ours = "select count(*) as prepared from pg_prepared_statements where statement ~ 'tidemark[.]'"
            assert connection.execute(ours).fetchone() == {"prepared": 0}
    assert len(outbox(dsn)) == 9


def test_sqlalchemy_decides_when_its_transaction_ends(dsn: str) -> None:
    """Its sessions and connections begin as they do with a statement of their own, and nothing is left open."""
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    writer = Writer()
    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as session, session.begin():
        assert writer.append(session, "orders", "session") == 1
    with Session(engine) as session:
        writer.append(session, "orders", "rolled back")
        session.rollback()
        with session.begin_nested():
            writer.append(session, "orders", "nested")
        session.commit()
    with engine.connect() as connection:
        writer.append(connection, "orders", "connection")
        connection.commit()
        writer.append(connection, "orders", "never committed")
    with engine.begin() as connection:
        writer.append(connection, "orders", "begin")
    engine.dispose()
    assert [rows for _, _, rows in outbox(dsn)] == [['"session"'], ['"nested"'], ['"connection"'], ['"begin"']]


def test_asyncio(dsn: str) -> None:
    """The same on psycopg's connections for it, and on SQLAlchemy's."""
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    writer = AsyncWriter("web")

    async def write() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            assert await writer.append(connection, "orders", "psycopg") == 1
            assert await writer.append_many(connection, "orders", [1, 2]) == [2, 3]
            await writer.complete(connection, "orders", await writer.reserve(connection, "orders"), "reserved")
            with pytest.raises(errors.BadRow):
                await writer.append(connection, "orders", math.nan)
        engine = create_async_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
        async with AsyncSession(engine) as session:
            async with session.begin():
                await writer.append(session, "orders", "session")
            await writer.append(session, "orders", "never committed")
        async with engine.connect() as alone:
            await writer.append(alone, "orders", "connection")
            await alone.commit()
        with pytest.raises(errors.Refused, match="does not exist"):
            async with engine.begin() as begun:
                await writer.append(begun, "order", 1)
        await engine.dispose()

    asyncio.run(write())
    told = [(writer, *rows) for _, writer, rows in outbox(dsn)]
    assert told == [("web", row) for row in ('"psycopg"', "1", "2", '"reserved"', '"session"', '"connection"')]


def test_a_connection_that_it_cannot_use(dsn: str) -> None:
    """Says what to do instead."""

    async def mistaken() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            with pytest.raises(TypeError, match="use AsyncWriter"):
                Writer().append(connection, "orders", 1)

    asyncio.run(mistaken())
    with psycopg.connect(dsn) as connection, pytest.raises(TypeError, match=r"use Writer"):
        asyncio.run(AsyncWriter().append(connection, "orders", 1))
    with pytest.raises(TypeError, match=r"builtins.str is not a psycopg\.Connection"):
        Writer().append(dsn, "orders", 1)


FORKED = """
import os, sys, psycopg
from tidemark import Writer

writer = Writer("web")
with psycopg.connect(sys.argv[1]) as connection:
    writer.append(connection, "orders", os.getpid())
children = []
for _ in range(4):
    if child := os.fork():
        children.append(child)
        continue
    with psycopg.connect(sys.argv[1]) as connection:
        for _ in range(50):
            writer.append(connection, "orders", os.getpid())
            connection.commit()
    os._exit(0)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_workers_that_are_forked_after_its_first_use_share_a_name(dsn: str) -> None:
    """`Writer` has no state of its own, so each process continues in the same name."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED, dsn], timeout=60, check=True)
    found = outbox(dsn)
    assert [id for id, _, _ in found] == [*range(1, 202)]
    assert {writer for _, writer, _ in found} == {"web"}


@pytest.mark.parametrize("kind", ["connection", "pool", "sqlalchemy session", "sqlalchemy connection"])
def test_asyncpg_writes_in_its_transaction(dsn: str, kind: str) -> None:
    """Committed facts are there, facts of a rolled back transaction are not; what is refused is explained."""
    writer, url = AsyncWriter("web"), dsn.replace("postgresql://", "postgresql+asyncpg://")

    @asynccontextmanager
    async def transaction() -> AsyncIterator[Any]:
        if kind == "connection":
            connection = await asyncpg.connect(dsn)
            try:
                async with connection.transaction():
                    yield connection
            finally:
                await connection.close()
        elif kind == "pool":
            async with (
                asyncpg.create_pool(dsn, min_size=1) as pool,
                pool.acquire() as connection,
                connection.transaction(),
            ):
                yield connection
        else:
            engine = create_async_engine(url)
            try:
                async with AsyncSession(engine) if kind.endswith("session") else engine.connect() as connection:
                    yield connection
                    await connection.commit()
            finally:
                await engine.dispose()

    async def main() -> None:
        async with transaction() as connection:
            assert await writer.append(connection, "orders", {"order": 17}, 'quoted "\\') == 1
            assert await writer.append_many(connection, "orders", [{"n": 1}, {"n": 2}]) == [2, 3]
            id = await writer.reserve(connection, "orders")
            await writer.complete(connection, "orders", id, None)
        with suppress(KeyError):
            async with transaction() as connection:
                await writer.append(connection, "orders", 1)
                raise KeyError
        with pytest.raises(errors.Refused, match="create_stream"):
            async with transaction() as connection:
                await writer.append(connection, "none", 1)

    asyncio.run(main())
    assert outbox(dsn) == [
        (1, "web", ['{"order": 17}', r'"quoted \"\\"']),
        (2, "web", ['{"n": 1}']),
        (3, "web", ['{"n": 2}']),
        (4, "web", ["null"]),
    ]
