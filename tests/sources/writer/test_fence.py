"""The fence: who is shut out, when, and what is found of the dead."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg import IsolationLevel
from structlog.testing import capture_logs

from tests.sources.writer.conftest import Make
from tests.sources.writer.judge import Judge
from tests.waiting import eventually
from tidemark.sources.writer import fence
from tidemark.sources.writer.database import session_of
from tidemark.streaming.errors import HistoryChanged, UnknownWriter, WriterFenced
from tidemark.streaming.records import Join

LOCK = "select pg_advisory_xact_lock(tidemark.writer_lock('shop-1'))"
LEVELS = [IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE]
SHUT_OUT = (WriterFenced, psycopg.errors.SerializationFailure)


def waits_for_lock(sql: psycopg.Connection) -> bool:
    row = sql.execute("select 1 from pg_locks where locktype = 'advisory' and not granted").fetchone()
    return row is not None


def left(sql: psycopg.Connection) -> tuple[int, int]:
    """Rows of the table and of the outbox."""
    row = sql.execute("select (select count(*) from orders), (select count(*) from tidemark.outbox)").fetchone()
    assert row is not None
    return row[0], row[1]


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name.lower())
@pytest.mark.parametrize("warm", [True, False], ids=["old snapshot", "fresh"])
def test_a_fence_that_is_waited_for_shuts_the_transaction_out(
    make: Make, dsn: str, sql: psycopg.Connection, level: IsolationLevel, warm: bool
) -> None:
    """While the lock is waited for, the epoch is raised: in no isolation may the old one be seen then."""
    with make() as writer, psycopg.connect(dsn) as connection, psycopg.connect(dsn) as fencer:
        connection.isolation_level = level
        fencer.execute(LOCK)

        def write() -> None:
            with writer.transaction(connection) as facts:
                if warm:
                    connection.execute("select count(*) from orders")
                connection.execute("insert into orders (id) values (%s)", [facts.append("orders", {})])

        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(write)
            eventually(lambda: waits_for_lock(sql))
            fencer.execute("update tidemark.writers set epoch = epoch + 1")
            fencer.commit()
            with pytest.raises(SHUT_OUT):
                written.result(timeout=10)
        assert left(sql) == (0, 0)
        with pytest.raises(SHUT_OUT):
            write()


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name.lower())
def test_a_fence_between_snapshot_and_reservation_shuts_the_transaction_out(
    make: Make, dsn: str, sql: psycopg.Connection, level: IsolationLevel
) -> None:
    """The whole fence happens after the transaction's first statement, which took no lock: its snapshot is too old."""
    with make() as writer, psycopg.connect(dsn) as connection:
        connection.isolation_level = level

        def write() -> None:
            with writer.transaction(connection) as facts:
                connection.execute("insert into orders (id) values (-1)")
                sql.execute("update tidemark.writers set epoch = epoch + 1")
                facts.reserve("orders")

        with pytest.raises(SHUT_OUT):
            write()
        assert left(sql) == (0, 0)


def test_rows_are_fenced_too_after_the_savepoint_of_their_id_is_gone(
    make: Make, dsn: str, sql: psycopg.Connection
) -> None:
    """A rolled-back savepoint takes the lock along. Whoever gives a row later waits for the fence and sees it."""
    with make() as writer, psycopg.connect(dsn) as connection, psycopg.connect(dsn) as fencer:

        def write() -> None:
            with writer.transaction(connection) as facts:
                try:
                    with connection.transaction():
                        id = facts.reserve("orders")
                        raise psycopg.DataError
                except psycopg.DataError:
                    pass
                fencer.execute(LOCK)
                facts.add("orders", id, {})

        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(write)
            eventually(lambda: waits_for_lock(sql))
            fencer.execute("update tidemark.writers set epoch = epoch + 1")
            fencer.commit()
            with pytest.raises(WriterFenced):
                written.result(timeout=10)
        assert left(sql) == (0, 0)


def test_a_fence_that_is_given_up_lets_the_writer_go_on(make: Make, dsn: str, sql: psycopg.Connection) -> None:
    """Who waited for the lock reserves once it is free and the epoch is still its own."""
    with make() as writer, psycopg.connect(dsn) as connection, psycopg.connect(dsn) as fencer:
        fencer.execute(LOCK)

        def write() -> int:
            with writer.transaction(connection) as facts:
                return facts.append("orders", {})

        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(write)
            eventually(lambda: waits_for_lock(sql))
            fencer.rollback()
            assert written.result(timeout=10) == 1


def test_a_successor_waits_for_open_transactions_and_names_them(
    make: Make, dsn: str, sql: psycopg.Connection, judge: Judge
) -> None:
    """The open transaction of the old epoch commits in peace, its fact is told, and only then the new epoch joins."""
    with make() as old, psycopg.connect(dsn, application_name="till") as connection:
        session = session_of(dsn, "test")
        started = threading.Event()

        def succeed() -> None:
            with make():
                started.set()

        with ThreadPoolExecutor(1) as pool:
            with old.transaction(connection) as facts:
                id = facts.append("orders", {})
                connection.execute("insert into orders (id) values (%s)", [id])
                successor = pool.submit(succeed)
                eventually(lambda: waits_for_lock(sql))
                (holder,) = fence.plan(session, "shop-1").holders
                assert (holder.pid, holder.application) == (connection.info.backend_pid, "till")
                assert holder.since is not None
                assert "insert into orders" in holder.query
                assert not started.is_set()
            successor.result(timeout=20)
        session.close()
        eventually(lambda: left(sql) == (1, 0))
        with pytest.raises(WriterFenced), old.transaction(connection) as facts:
            facts.reserve("orders")
    verdict = judge.agrees(sql)
    assert ("JOIN", 2, 1) in verdict.kinds()


def test_what_the_dead_left_is_told_in_its_epoch_before_the_join(
    make: Make, dsn: str, sql: psycopg.Connection, judge: Judge
) -> None:
    """Facts in the outbox, IDs that were given and never used: all settled, nothing unseen."""
    with make():
        pass
    for id in (2, 4):
        sql.execute("insert into tidemark.outbox values ('shop-1', 1, 'orders', %s, 0, '{}')", [id])
        sql.execute("insert into tidemark.outbox values ('shop-1', 1, 'orders', %s, 1, '{}')", [id])
        sql.execute("insert into orders values (%s)", [id])
    sql.execute("select setval('orders_id_seq', 5)")
    with make():
        pass
    verdict = judge.agrees(sql)
    rdata = [("RDATA", 1, "batch"), ("RDATA", 1, 2), ("RDATA", 1, "batch"), ("RDATA", 1, 4)]
    assert verdict.kinds() == [("JOIN", 1, 0), *rdata, ("JOIN", 2, 5)]


def test_a_stream_that_is_written_no_more_is_retired(make: Make, judge: Judge, sql: psycopg.Connection) -> None:
    """A new version of the service writes another stream: the one before does not wait for it for ever. Once that is
    written again its tokens join, though some starts knew nothing of it.
    """
    with make():
        pass
    for _ in range(2):
        with make(streams=["history"], direction="backward"):
            pass
    assert judge.verdict().kinds() == [("JOIN", 1, 0), ("JOIN", 2, 0), ("RETIRE", 2, 0)]
    assert fence.registered(sql, "shop-1").keys() == {"history"}
    with make():
        pass
    verdict = judge.verdict()
    assert verdict.kinds()[3:] == [("JOIN", 4, 0)]
    assert verdict.effects["orders"].timelines == verdict.effects["history"].timelines == []


def test_a_join_names_its_history_and_the_start_before_it(make: Make, sql: psycopg.Connection, judge: Judge) -> None:
    """System identifier, database and timeline; tokens are chained from start to start."""
    for _ in range(2):
        with make():
            pass
    first, second = (record.timeline for record in judge.verdict().records if isinstance(record, Join))
    assert first is not None
    assert second is not None
    assert sql.execute("select tidemark.history()").fetchone() == (first.database,)
    assert re.fullmatch(r"\d{19}/\d+/1", first.database or "")
    assert (second.database, second.after, first.after) == (first.database, first.start, None)


def test_a_history_that_may_not_be_read_is_said_and_not_invented(
    make: Make, sql: psycopg.Connection, judge: Judge
) -> None:
    """The schema's owner was denied pg_control_system(): the writer says so, goes on, and names no history."""
    sql.execute("create role keeper")
    sql.execute("alter function tidemark.history() owner to keeper")
    sql.execute("revoke execute on function pg_control_system() from public")
    with capture_logs() as logs, make():
        pass
    assert any("pg_control_system" in line.get("do", "") for line in logs)
    sql.execute("drop owned by keeper")
    sql.execute("drop role keeper")
    (join,) = (record for record in judge.verdict().records if isinstance(record, Join))
    assert join.timeline is not None
    assert join.timeline.database is None


def test_a_transaction_on_another_history_is_refused_and_the_writer_joins_anew(
    make: Make, connection: psycopg.Connection, sql: psycopg.Connection, judge: Judge
) -> None:
    """As on a standby that was promoted: the first transaction is told why, and one that is repeated comes through."""
    with make() as writer:

        def write() -> None:
            with writer.transaction(connection) as facts:
                connection.execute("insert into orders (id) values (%s)", [facts.append("orders", {})])

        write()
        eventually(lambda: left(sql) == (1, 0))
        sql.execute("update tidemark.writers set server = 'epoch', history = '1/2/3'")
        with pytest.raises(HistoryChanged, match="it joined in 1/2/3 and this is "):
            write()
        eventually(lambda: writer.epoch == 2)
        write()
    assert judge.agrees(sql).kinds() == [("JOIN", 1, 0), ("RDATA", 1, 1), ("JOIN", 2, 1), ("RDATA", 2, 2)]


def test_a_transaction_that_began_before_its_writer_joined_anew_may_be_repeated(
    make: Make, connection: psycopg.Connection, sql: psycopg.Connection
) -> None:
    """Its epoch is over by this process itself, so it is not told that another has taken over."""
    with make() as writer:

        def write() -> None:
            with writer.transaction(connection) as facts:
                sql.execute("update tidemark.writers set server = 'epoch', history = '1/2/3'")
                eventually(lambda: writer.epoch == 2)
                facts.append("orders", {})

        with pytest.raises(HistoryChanged, match="epoch 1 is over"):
            write()


def test_a_writer_that_would_join_anew_yields_to_a_process_that_did(
    make: Make, dsn: str, connection: psycopg.Connection, sql: psycopg.Connection
) -> None:
    """Its successor started on the other history meanwhile, and is not fenced by it."""
    with make() as writer, psycopg.connect(dsn) as fencer:
        fencer.execute(LOCK)
        sql.execute("update tidemark.writers set server = 'epoch', history = '1/2/3'")
        eventually(lambda: waits_for_lock(sql))
        fencer.execute("update tidemark.writers set epoch = 7")
        fencer.commit()

        def refused() -> bool:
            try:
                with writer.transaction(connection):
                    return False
            except HistoryChanged:
                return False
            except WriterFenced:
                return True

        eventually(refused)
    assert sql.execute("select epoch from tidemark.writers").fetchone() == (7,)


def test_epochs_rise_with_the_clock_and_without_it(make: Make, judge: Judge) -> None:
    """Milliseconds since 1970, so that a restored database does not repeat one; and one more where the clock lags."""
    for seconds in (1000.5, 999.0):
        with make(clock=lambda seconds=seconds: seconds):
            pass
    assert judge.verdict().kinds() == [("JOIN", 1_000_500, 0), ("JOIN", 1_000_501, 0)]


def test_a_writer_that_never_was_is_not_fenced(dsn: str, make: Make) -> None:
    """A typing error must not make a writer; the names there are help to find it."""
    with make():
        pass
    session = session_of(dsn, "test")
    with pytest.raises(UnknownWriter, match="shop-1"):
        fence.plan(session, "shop-l")
    session.close()


def test_a_relay_that_stands_still_at_the_outbox_is_named(make: Make, dsn: str, sql: psycopg.Connection) -> None:
    """Its process may be stopped right there; the rows that it holds would be waited for in silence."""
    sql.execute(
        "create function slowly() returns trigger language plpgsql as 'begin perform pg_sleep(2); return old; end'"
    )
    sql.execute("create trigger slowly before delete on tidemark.outbox for each row execute function slowly()")
    with make() as writer, psycopg.connect(dsn) as connection:
        with writer.transaction(connection) as facts:
            connection.execute("insert into orders (id) values (%s)", [facts.append("orders", {})])
        eventually(lambda: any("delete from" in it.query for it in fence.holders(sql, writer.instance)))
