"""The services' ways to a database: all of them do the same, and say in one way that a transaction is lost."""

from collections.abc import Iterator
from contextlib import suppress

import psycopg
import pytest

from tidemark.app.simulation.script import SimulatedStream
from tidemark.app.simulation.services import (
    ConnectionLost,
    Driver,
    RolledBack,
    find_installed_drivers,
    open_asyncpg,
    open_psycopg,
    open_sqlalchemy,
)
from tidemark.app.simulation.workload import make_fact_tables, prepare_writing

DRIVERS = [open_psycopg, open_sqlalchemy, open_asyncpg]


@pytest.fixture
def sql(database: str) -> Iterator[psycopg.Connection]:
    prepare_writing(database)
    make_fact_tables(database, [SimulatedStream("events", "forward")])
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection


def test_all_drivers_are_there_for_the_tests() -> None:
    """If a driver is not installed, the simulation would do without this driver, and nobody would notice."""
    assert find_installed_drivers() == DRIVERS


@pytest.mark.parametrize("driver", DRIVERS)
def test_transactions_and_savepoints_are_the_caller_s(sql: psycopg.Connection, database: str, driver: Driver) -> None:
    """What is undone leaves nothing, what is around it stands; each way of writing gives facts."""
    with driver(database, "web") as connection:
        with connection.transaction():
            with suppress(RolledBack), connection.transaction():
                connection.insert("events", connection.append("events", {"part": 1}), 1)
                raise RolledBack
            with connection.transaction():
                for id in connection.append_many("events", [{"part": 1}, {"part": 1}]):
                    connection.insert("events", id, 1)
        with connection.transaction():
            id = connection.reserve("events")
            for part in (1, 2):
                connection.insert("events", id, part)
            connection.complete("events", id, {"part": 1}, {"part": 2})
    rows = sql.execute("select stream_id, part, writer from demo.events order by stream_id, part").fetchall()
    assert rows == [(2, 1, "web"), (3, 1, "web"), (4, 1, "web"), (4, 2, "web")]
    facts = sql.execute("select abs(id), cardinality(rows) from tidemark.append_outbox order by 1").fetchall()
    assert [(id, count) for id, count in facts if count] == [(2, 1), (3, 1), (4, 2)]


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("undone", [False, True])
def test_a_connection_that_is_cut_breaks_off(
    sql: psycopg.Connection, database: str, driver: Driver, undone: bool
) -> None:
    """Whether the transaction was to stand or not; and nothing of it stands."""

    def work() -> None:
        with driver(database, "web") as connection:
            for _ in range(2):  # where it was to be undone the next statement says so
                with suppress(RolledBack), connection.transaction():
                    connection.insert("events", connection.append("events", {"part": 1}), 1)
                    sql.execute(
                        "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
                        " where datname = current_database() and pid <> pg_backend_pid()"
                    )
                    if undone:
                        raise RolledBack

    with pytest.raises(ConnectionLost):
        work()
    assert sql.execute("select from demo.events").fetchall() == []
    with pytest.raises(ConnectionLost), driver("host=127.0.0.1 port=1 dbname=none user=none", "web"):
        pass


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_id_that_is_given_out_twice_breaks_off(sql: psycopg.Connection, database: str, driver: Driver) -> None:
    """As after a sequence was set back: the service tries again, and goes on behind the IDs that are there."""

    def reserve() -> int:
        with driver(database, "web") as connection, connection.transaction():
            return connection.reserve("events")

    assert reserve() == 1
    sql.execute("select setval('tidemark.append_ids_1', 1, false)")
    with pytest.raises(ConnectionLost):
        reserve()
    assert reserve() == 2
