"""Migrations beside sessions that hold locks: a nightly dump, a forgotten transaction, another migration."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import sql
from structlog.testing import capture_logs

from tests.waiting import eventually
from tidemark.app.cli import main
from tidemark.app.output import applied_migrations
from tidemark.common import migrations
from tidemark.common.errors import PrerequisitePending, SchemaMismatch
from tidemark.common.migrations import Migrations
from tidemark.common.postgres_session import describe_sessions
from tidemark.sinks.postgres import database as sink
from tidemark.sources.relay import queries
from tidemark.sources.rooms import tables
from tidemark.sources.synapse import state

SCHEMAS = [sink.SCHEMA, queries.SCHEMA, state.SCHEMA, tables.SCHEMA]


@pytest.fixture(params=SCHEMAS, ids=lambda schema: schema.table)
def schema(request: pytest.FixtureRequest, database: str) -> Migrations:
    """A schema of each owner, up to date in `database`."""
    found: Migrations = request.param
    assert migrate(found, database) == [*found.scripts]
    return found


def migrate(schema: Migrations, dsn: str) -> list[int]:
    with sink.session_of(dsn, "migration of the test") as session:
        return schema.migrate(session)


@contextmanager
def locked(dsn: str, table: str, mode: str) -> Iterator[psycopg.Connection]:
    """An open transaction that holds a lock on the table, as `pg_dump` holds ACCESS SHARE on every table."""
    with psycopg.connect(dsn, application_name="nightly dump") as connection:
        statement = sql.SQL("lock table {} in {} mode").format(sql.Identifier("tidemark", table), sql.SQL(mode))
        connection.execute(statement)
        yield connection


def test_migrate_with_nothing_to_do_takes_no_lock(schema: Migrations, database: str) -> None:
    """It returns at once beside a dump, and so does whoever checks the schema meanwhile."""
    with locked(database, schema.table, "access share"):
        began = time.monotonic()
        assert migrate(schema, database) == []
        with psycopg.connect(database, autocommit=True) as other:
            other.execute("set lock_timeout = '100ms'")
            schema.check_writable(other)
    assert time.monotonic() - began < 0.9 * migrations.LOCK_TIMEOUT_SECONDS


def test_migrate_beside_a_dump_applies_what_needs_no_table_of_the_dump(schema: Migrations, database: str) -> None:
    """Recording a version does not wait for readers of the table of versions."""
    with psycopg.connect(database, autocommit=True) as connection:
        name = sql.Identifier("tidemark", schema.table)
        connection.execute(sql.SQL("update {} set version = version - 1000").format(name))
        with locked(database, schema.table, "access share"), sink.session_of(database, "test") as session:
            more = _with_script(schema, "create table tidemark.of_the_test ()")
            assert more.migrate(session) == [1]


def _with_script(schema: Migrations, script: str) -> Migrations:
    found = Migrations(schema.package, schema.table, schema.command)
    vars(found)["scripts"] = {1: ("0001_test.sql", script)}
    return found


def test_what_must_lock_waits_briefly_and_names_the_holder(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that comes while the migration waits is served within the lock time-out; the migration goes on by itself
    once the holder has ended."""
    monkeypatch.setattr(migrations, "_FIRST_PAUSE_SECONDS", 0.1)
    migrate(queries.SCHEMA, database)
    applied = list[int]()
    with psycopg.connect(database, autocommit=True) as reader:
        reader.execute("delete from tidemark.relay_schema_version")
        more = _with_script(queries.SCHEMA, "alter table tidemark.append_streams add column of_the_test integer")

        def run() -> None:
            with sink.session_of(database, "migration of the test") as session:
                applied.extend(more.migrate(session))

        with capture_logs() as logs, locked(database, "append_streams", "access share") as holder:
            pid = holder.info.backend_pid
            thread = threading.Thread(target=run)
            thread.start()
            eventually(lambda: any(each["event"] == "Waiting for a lock" for each in logs))
            reader.execute("set lock_timeout = '10s'")
            reader.execute("select from tidemark.append_streams")
            assert applied == []
            holder.commit()
            thread.join(60)
    assert applied == [1]
    first = next(each for each in logs if each["event"] == "Waiting for a lock")
    assert first["step"] == "migration 0001_test.sql"
    expected = f"pid {pid} (user postgres, session named nightly dump, idle in transaction since 20"
    assert first["blockers"].startswith(expected)


def test_blockers_that_end_between_two_queries_leave_a_description(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session ends after Postgres has named its pid, and before its pid is looked up in pg_stat_activity."""
    migrate(queries.SCHEMA, database)
    described = list[str]()
    with (
        locked(database, queries.SCHEMA.table, "access exclusive") as holder,
        psycopg.connect(database, autocommit=True) as observer,
        sink.session_of(database, "test") as session,
    ):
        pid = holder.info.backend_pid

        def has_ended() -> bool:
            return observer.execute("select from pg_stat_activity where pid = %s", [pid]).fetchone() is None

        def describe_late(connection: psycopg.Connection, pids: list[int]) -> str:
            assert pids == [pid]
            holder.close()
            eventually(has_ended)
            described.append(describe_sessions(connection, pids))
            return described[-1]

        monkeypatch.setattr(migrations, "describe_sessions", describe_late)
        blockers = migrations._BlockerQuery(session)
        with session.use() as connection, connection.transaction(), blockers:
            blockers.begin(connection)
            connection.execute(
                sql.SQL("select from {}").format(sql.Identifier("tidemark", queries.SCHEMA.table))
            ).fetchall()
    assert described == [""]
    assert blockers.description == "a session that has ended since"


def test_a_lock_that_is_never_free_ends_the_attempt(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may not even read the table of versions is told whom it waits for, and nothing was changed."""
    monkeypatch.setattr(migrations, "_FIRST_PAUSE_SECONDS", 120.0)
    migrate(queries.SCHEMA, database)
    with (
        locked(database, queries.SCHEMA.table, "access exclusive") as holder,
        pytest.raises(
            PrerequisitePending, match=rf"waiting for a lock of pid {holder.info.backend_pid} \(user postgres"
        ),
    ):
        migrate(queries.SCHEMA, database)


def test_relay_migrate_behind_a_dump(database: str) -> None:
    """If its streams exist, it waits neither for a dump nor for a transaction that has locked their rows."""
    command = ["relay", "migrate", "--dsn", database, "--stream", "orders"]

    def said() -> str:
        done = CliRunner().invoke(main, command, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    assert said().endswith("created stream orders\n")
    with (
        locked(database, "relay_schema_version", "access share") as dump,
        psycopg.connect(database) as service,
    ):
        dump.execute("lock table tidemark.append_streams in access share mode")
        service.execute("select from tidemark.append_streams for update")
        assert said() == "the schema is up to date\nstream orders exists\n"


@contextmanager
def dumped(dsn: str) -> Iterator[set[str]]:
    """A transaction with the snapshot and the locks of `pg_dump` on both schemas; yields the names of the tables."""
    with psycopg.connect(dsn, application_name="nightly dump") as connection:
        connection.execute("set transaction isolation level repeatable read, read only")
        relations = connection.execute(
            "select oid::regclass::text, relkind::text from pg_class"
            " where relnamespace::regnamespace::text in ('tidemark', 'tidemark_reader') and relkind in ('r', 'p', 'S')"
        ).fetchall()
        tables = {name for name, kind in relations if kind != "S"}
        connection.execute(f"lock table {', '.join(sorted(tables))} in access share mode".encode())
        for name, kind in relations:
            if kind == "S":
                connection.execute(f"select last_value, is_called from {name}".encode())
        yield tables


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (
            ["relay", "migrate", "--stream", "orders", "--stream", "tills"],
            "the schema is up to date\nstream orders exists\nstream tills exists\n",
        ),
        (["follow", "migrate"], "the functions of readers are up to date\n"),
    ],
    ids=["relay", "follow"],
)
def test_a_dump_of_both_schemas_does_not_delay_a_migration_with_nothing_to_do(
    database: str, command: list[str], output: str
) -> None:
    """Neither waits for a lock, although the dump holds every table of `tidemark` and of `tidemark_reader`."""
    with sink.session_of(database, "migration of the test") as session:
        sink.SCHEMA.migrate(session)
        state.SCHEMA.migrate(session)

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(main, [*arguments, "--dsn", database], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    run("relay", "migrate", "--stream", "orders", "--stream", "tills")
    with capture_logs() as logs, dumped(database) as tables:
        assert {"tidemark.append_outbox", "tidemark.relay_schema_version", "tidemark_reader.positions"} <= tables
        assert run(*command) == output
    assert [entry for entry in logs if entry["event"] == "Waiting for a lock"] == []


def test_database_that_is_being_restored_is_waited_for(
    schema: Migrations, database: str, another_database: str
) -> None:
    """While pg_restore fills it, some tables may be there and others not: nobody is advised to migrate it."""

    def check(dsn: str) -> None:
        with sink.session_of(dsn, "test") as session, session.use() as connection:
            schema.check_writable(connection)

    for dsn in (database, another_database):
        with (
            psycopg.connect(dsn, application_name="pg_restore"),
            pytest.raises(PrerequisitePending, match="pg_restore"),
        ):
            check(dsn)
    check(database)
    with pytest.raises(SchemaMismatch):
        check(another_database)


@contextmanager
def noting(steps: list[int], total: int) -> Iterator[Callable[[int], None]]:
    steps.append(total)
    yield steps.append


@pytest.mark.parametrize("schema", SCHEMAS[:2], ids=lambda schema: schema.table)
def test_progress_of_the_migrations_that_are_missing(schema: Migrations, database: str) -> None:
    """How many there are, and one after the other. Nothing is shown if there is nothing to do."""
    steps = list[int]()
    with sink.session_of(database, "migration of the test") as session:
        schema.migrate(session, partial(noting, steps))
        assert steps == [len(schema.scripts), *[1] * len(schema.scripts)]
        schema.migrate(session, partial(noting, steps := []))
    assert steps == []


@pytest.mark.parametrize(
    ("versions", "text"),
    [([], "the schema is up to date"), ([7], "applied migration 7"), ([41, 42], "applied migrations 41, 42")],
)
def test_the_result_of_a_migration_names_its_numbers(versions: list[int], text: str) -> None:
    assert applied_migrations(versions) == text


def test_a_pipe_gets_no_bar(database: str) -> None:
    """`tidemark migrate` says what it has applied."""
    done = CliRunner(env={"TIDEMARK_POSTGRES_DSN": database, "TIDEMARK_LOG_LEVEL": "error"}).invoke(main, ["migrate"])
    assert done.output == f"{applied_migrations([*sink.SCHEMA.scripts])}\n"
