"""The schema of Tidemark's database: migrated by whom it may, checked by whom it concerns."""

import threading
from collections.abc import Callable, Iterable

import psycopg
import pytest

from tidemark.common.errors import Refused, SchemaMismatch
from tidemark.common.migrations import Migrations
from tidemark.common.postgres_session import Connection
from tidemark.sinks.postgres.database import OLDEST_READABLE_VERSION, SCHEMA, migrate, session_of

WANTED = SCHEMA.target_version


def schema_of(versions: Iterable[int]) -> Migrations:
    """The schema with these versions. A version that does not exist yet makes a table."""
    schema = Migrations(SCHEMA.package, SCHEMA.table, SCHEMA.command)
    later = ("later.sql", "create table tidemark.of_the_test ()")
    vars(schema)["scripts"] = {version: SCHEMA.scripts.get(version, later) for version in versions}
    return schema


def check_readable(connection: Connection) -> None:
    SCHEMA.check_readable(connection, OLDEST_READABLE_VERSION)


def test_every_version_is_applied_once(database: str) -> None:
    """An empty database gets all versions in order, and a second call finds nothing to do."""
    assert migrate(database) == list(range(1, WANTED + 1))
    assert migrate(database) == []


def test_several_at_once_apply_each_version_once(database: str) -> None:
    """Of several migrations at the same time one does the work and the others wait for it."""
    applied: list[int] = []
    threads = [threading.Thread(target=lambda: applied.extend(migrate(database))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(applied) == list(range(1, WANTED + 1))


@pytest.mark.parametrize(("make", "found"), [("", 0), ("delete", WANTED - 1), ("newer", WANTED + 1)])
def test_another_schema_is_named_with_what_to_do(database: str, make: str, found: int) -> None:
    """A database without schema, with an older or a newer one is refused, and nothing is changed in it."""
    with psycopg.connect(database, autocommit=True) as connection:
        if make:
            migrate(database)
        if make == "delete":
            connection.execute("delete from tidemark.schema_version where version = %s", (WANTED,))
        if make == "newer":
            connection.execute("insert into tidemark.schema_version values (%s, 'x')", (WANTED + 1,))
        with pytest.raises(SchemaMismatch) as caught:
            SCHEMA.check_writable(connection)
    assert (caught.value.found, caught.value.wanted) == (found, WANTED)


@pytest.mark.parametrize("named", [SCHEMA.check_writable, check_readable])
def test_newer_schema_that_works_with_ours_is_left_as_it_is(database: str, named: Callable[[Connection], None]) -> None:
    """After a rollback the old Tidemark goes on in the schema of the new one, which says that it may."""
    migrate(database)
    with psycopg.connect(database, autocommit=True) as connection:
        newer = "insert into tidemark.schema_version (version, name, works_with) values (%s, 'x', %s)"
        connection.execute(newer, (WANTED + 1, WANTED))
        assert migrate(database) == []
        named(connection)
        connection.execute("update tidemark.schema_version set works_with = %s where name = 'x'", (WANTED + 1,))
        with pytest.raises(SchemaMismatch):
            named(connection)


def test_older_schema_can_be_read(database: str) -> None:
    """A newer sidecar may read the oldest readable schema. A newer pipeline may not write in it."""
    with session_of(database, "test") as session:
        schema_of(range(1, OLDEST_READABLE_VERSION + 1)).migrate(session)
    newer = schema_of(range(1, WANTED + 2))
    with psycopg.connect(database, autocommit=True) as connection:
        newer.check_readable(connection, OLDEST_READABLE_VERSION)
        with pytest.raises(SchemaMismatch):
            newer.check_writable(connection)
        with pytest.raises(SchemaMismatch):
            newer.check_readable(connection, OLDEST_READABLE_VERSION + 1)


def test_newer_schema_is_never_migrated(database: str) -> None:
    """An old Tidemark does not touch the schema of a newer one."""
    migrate(database)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("insert into tidemark.schema_version values (%s, 'x')", (WANTED + 1,))
    with pytest.raises(SchemaMismatch):
        migrate(database)


@pytest.fixture
def plain_user(database: str) -> str:
    """The DSN of a user who may use the database and nothing beyond."""
    name = database.rsplit("/", 1)[-1].split("?", maxsplit=1)[0]
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(b"drop role if exists plain")
        connection.execute(b"create role plain login password 'plain'")
        connection.execute(f"grant create on database {name} to plain".encode())
    return psycopg.conninfo.make_conninfo(database, user="plain", password="plain")


def test_user_without_createrole_can_migrate(plain_user: str) -> None:
    """The roles are a courtesy: who may not create them still gets the whole schema."""
    assert migrate(plain_user) == list(range(1, WANTED + 1))


def test_reader_sees_and_changes_nothing(database: str) -> None:
    """A member of tidemark_reader can read every table, history included, and write none."""
    migrate(database)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("set role tidemark_reader")
        connection.execute("select * from tidemark.position_advances, tidemark.streams, tidemark.stream_gaps")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("delete from tidemark.streams")


def test_owner_makes_and_drops_days_of_history(database: str) -> None:
    """A member of tidemark_owner can run the pipeline without owning the tables."""
    migrate(database)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("set role tidemark_owner")
        connection.execute("select tidemark.make_history_day('2026-01-01'), tidemark.make_history_day('2026-01-02')")
        dropped = connection.execute("select tidemark.drop_history_before('2026-01-02')").fetchall()
    assert dropped == [("packed_advances_20260101",)]


def test_right_that_is_missing_is_named(plain_user: str, database: str) -> None:
    """A user without any right on the schema is told which role to ask for."""
    migrate(database)
    user = session_of(plain_user, "test")
    with pytest.raises(Refused, match="tidemark_owner"), user.use() as connection:
        connection.execute("select * from tidemark.streams")
    user.close()
