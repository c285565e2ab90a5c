"""Facts in real transactions of every shape, and what comes of them on a real topic."""

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import psycopg
import pytest
from prometheus_client import CollectorRegistry
from psycopg.rows import dict_row

from tests.sources.writer.conftest import Make
from tests.sources.writer.judge import Judge
from tests.waiting import eventually
from tidemark.app.stack.servers import KafkaServer
from tidemark.streaming.errors import FactWithoutRow, RowTooLarge, Stopping
from tidemark.streaming.records import Rdata

Connection = psycopg.Connection


def order(connection: Connection, id: int) -> None:
    connection.execute("insert into orders (id) values (%s)", [id])


def test_each_committed_fact_is_announced_and_each_rollback_is_void(
    make: Make, connection: Connection, sql: Connection, judge: Judge
) -> None:
    """Three transactions, the middle one of which rolls back."""
    with make() as writer:
        for fail in (False, True, False):
            with writer.transaction(connection) as facts:
                order(connection, facts.append("orders", {"total": 40}))
                if fail:
                    raise psycopg.Rollback
    verdict = judge.agrees(sql)
    assert verdict.kinds() == [("JOIN", 1, 0), ("RDATA", 1, 1), ("VOID", 1, 2), ("RDATA", 1, 3)]


def test_rows_of_a_fact_keep_their_order_and_the_last_carries_the_number(
    make: Make, connection: Connection, sql: Connection, judge: Judge
) -> None:
    """Two facts whose rows are given in turns, more than are read from the outbox at once."""
    with make() as writer, writer.transaction(connection) as facts:
        first, second = facts.reserve_many("orders", 2)
        facts.add("orders", second, "a")
        facts.add("orders", first, *range(400))
        facts.add("orders", second, *range(400))
        order(connection, first)
        order(connection, second)
    verdict = judge.agrees(sql)
    rows = [bytes(record.row) for record in verdict.records if isinstance(record, Rdata)]
    assert rows == [str(n).encode() for n in range(400)] + [b'"a"'] + [str(n).encode() for n in range(400)]
    assert verdict.kinds()[400] == ("RDATA", 1, first)
    assert verdict.kinds()[801] == ("RDATA", 1, second)


def test_what_a_savepoint_took_back_is_no_fact(
    make: Make, connection: Connection, sql: Connection, judge: Judge
) -> None:
    """Its row was given, so the program believes in it; the outbox knows better."""
    with make() as writer, writer.transaction(connection) as facts:
        order(connection, facts.append("orders", {}))
        with suppress(RuntimeError), connection.transaction():
            order(connection, facts.append("orders", {}))
            raise RuntimeError
        order(connection, facts.append("orders", {}))
    verdict = judge.agrees(sql)
    assert verdict.announced["orders"] == {1, 3}


@pytest.mark.parametrize("commit", [True, False])
def test_inside_a_transaction_of_the_caller_its_end_decides(
    make: Make, dsn: str, connection: Connection, judge: Judge, commit: bool
) -> None:
    """The block is over and the transaction goes on: nothing is said until that has ended."""
    with make() as writer:
        connection.execute("select 1")
        with writer.transaction(connection) as facts:
            order(connection, facts.append("orders", {}))
        with make(instance="shop-2") as other, psycopg.connect(dsn) as second, other.transaction(second) as facts:
            order(second, facts.append("orders", {}))
        assert ("RDATA", 1, 2) in judge.verdict().kinds()
        assert ("RDATA", 1, 1) not in judge.verdict().kinds()
        (connection.commit if commit else connection.rollback)()
    verdict = judge.verdict()
    assert verdict.announced["orders"] == ({1, 2} if commit else {2})
    assert verdict.position("orders") >= 1


@pytest.mark.parametrize("when", ["open", "committing"])
def test_a_connection_that_dies_leaves_nothing_in_doubt(
    make: Make, dsn: str, sql: Connection, judge: Judge, when: str
) -> None:
    """The answer to a COMMIT never came, or it was never sent: the server is asked, and what it says is announced."""
    with make() as writer:
        if when == "committing":
            # The commit waits in a deferred trigger; its connection is cut while it does, and then it may go on.
            sql.execute(
                "create function slow() returns trigger language plpgsql as"
                " 'begin perform pg_advisory_xact_lock(1); return null; end'"
            )
            sql.execute(
                "create constraint trigger slow after insert on orders deferrable initially deferred"
                " for each row execute function slow()"
            )
            sql.execute("select pg_advisory_lock(1)")
        connection = psycopg.connect(dsn)

        def write() -> None:
            with writer.transaction(connection) as facts:
                order(connection, facts.append("orders", {}))
                if when == "open":
                    connection.execute("select pg_terminate_backend(pg_backend_pid())")

        errors: list[Exception] = []
        thread = threading.Thread(target=lambda: _caught(write, errors))
        thread.start()
        if when == "committing":
            eventually(
                lambda: sql.execute("select 1 from pg_locks where locktype = 'advisory' and not granted").fetchone()
            )
            cut(connection)
            thread.join()
            sql.execute("select pg_advisory_unlock(1)")
        thread.join()
        assert isinstance(errors[0], psycopg.OperationalError)
        connection.close()
    verdict = judge.agrees(sql)
    assert verdict.announced.get("orders", set()) == (set() if when == "open" else {1})


def _caught(act: Callable[[], None], errors: list[Exception]) -> None:
    try:
        act()
    except psycopg.Error as error:
        errors.append(error)


def cut(connection: Connection) -> None:
    """Take the network away from under a connection; the server notices when it answers."""
    import os
    import socket

    with socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)


def test_an_id_without_row_is_not_committed_unless_it_is_void(
    make: Make, connection: Connection, sql: Connection, judge: Judge
) -> None:
    """A row that was forgotten would be announced as nothing and be missed by every reader."""
    with make() as writer:

        def write() -> None:
            with writer.transaction(connection) as facts:
                order(connection, facts.reserve("orders"))

        with pytest.raises(FactWithoutRow) as caught:
            write()
        assert (caught.value.stream, caught.value.ids) == ("orders", [1])
        with writer.transaction(connection) as facts:
            facts.void("orders", facts.reserve("orders"))
    assert judge.agrees(sql).kinds() == [("JOIN", 1, 0), ("VOID", 1, 1), ("VOID", 1, 2)]


def test_what_is_wrong_is_said_at_once(make: Make, connection: Connection) -> None:
    """A stream of another writer, an ID that is not ours, a row that Kafka would not take, a row that is no JSON."""
    with make() as writer, writer.transaction(connection) as facts:
        with pytest.raises(KeyError, match="orders"):
            facts.reserve("order")
        with pytest.raises(ValueError, match="not reserved"):
            facts.add("orders", 7, {})
        with pytest.raises(RowTooLarge):
            facts.append("orders", "x" * 1_000_000)
        with pytest.raises(TypeError):
            facts.append("orders", object())


def test_an_answer_that_was_lost_forbids_the_commit(
    make: Make, dsn: str, sql: Connection, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C hits between the server's answer and its being noted: a row stands there whose ID nobody knows."""
    with make() as writer, psycopg.connect(dsn) as connection:

        def write() -> None:
            with writer.transaction(connection) as facts:
                with monkeypatch.context() as patch:
                    patch.setattr(psycopg.Cursor, "fetchone", _interrupted)
                    with suppress(KeyboardInterrupt):  # the service goes on as if nothing had been
                        facts.append("orders", {})
                connection.execute("insert into orders (id) select last_value from orders_id_seq")

        with pytest.raises(KeyboardInterrupt):
            write()
        with writer.transaction(connection) as facts:
            order(connection, facts.append("orders", {}))
    assert judge.agrees(sql).announced["orders"] == {2}


def _interrupted(cursor: object) -> None:
    raise KeyboardInterrupt


def test_threads_share_a_writer(make: Make, dsn: str, sql: Connection, judge: Judge) -> None:
    """Eight connections at once, every fifth transaction rolls back."""
    with make() as writer:

        def work(seed: int) -> None:
            with psycopg.connect(dsn) as connection:
                for number in range(40):
                    with writer.transaction(connection) as facts:
                        order(connection, facts.append("orders", number))
                        if (seed + number) % 5 == 0:
                            raise psycopg.Rollback

        threads = [threading.Thread(target=work, args=[seed]) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    verdict = judge.agrees(sql)
    assert len(verdict.announced["orders"]) == 8 * 32
    assert verdict.effects["orders"].linear == verdict.position("orders") == 320


def test_a_backward_stream_goes_down(make: Make, connection: Connection, judge: Judge) -> None:
    """IDs -1, -2, ...: committed, rolled back, announced."""
    with make(streams=["history"], direction="backward") as writer:
        for fail in (False, True, False):
            with writer.transaction(connection) as facts:
                facts.append("history", {})
                if fail:
                    raise psycopg.Rollback
    verdict = judge.verdict()
    assert verdict.kinds("history") == [("JOIN", 1, 0), ("RDATA", 1, -1), ("VOID", 1, -2), ("RDATA", 1, -3)]
    assert verdict.effects["history"].linear == -3


def test_an_idle_writer_announces_what_others_took(make: Make, connection: Connection, judge: Judge) -> None:
    """Its heartbeat carries its position, and the line with it, past IDs that are not its own."""
    with make() as busy, make(instance="idle"):
        with busy.transaction(connection) as facts:
            facts.append("orders", {})
        eventually(lambda: ("POSITION", 1, 1) in judge.verdict().kinds())
        assert judge.verdict().effects["orders"].linear == 1


def test_connections_may_be_of_any_kind(make: Make, dsn: str, sql: Connection, judge: Judge) -> None:
    """Another row factory, autocommit, a pipeline of the caller's."""
    with make() as writer, psycopg.connect(dsn, row_factory=dict_row, autocommit=True) as connection:
        with writer.transaction(connection) as facts:
            connection.execute("insert into orders (id) values (%s)", [facts.append("orders", {})])
        with connection.pipeline(), writer.transaction(connection) as facts:
            connection.execute("insert into orders (id) values (%s)", [facts.append("orders", {})])
    assert judge.agrees(sql).announced["orders"] == {1, 2}


def test_stop_waits_for_transactions_and_then_refuses_new_ones(
    make: Make, dsn: str, sql: Connection, judge: Judge
) -> None:
    """One is open as the block ends: its fact is told before the writer retires, and nothing follows."""
    opened, close = threading.Event(), threading.Event()
    refused: list[Exception] = []

    def work() -> None:
        with psycopg.connect(dsn) as connection:
            with writer.transaction(connection) as facts:
                order(connection, facts.append("orders", {}))
                opened.set()
                close.wait(10)
            try:
                with writer.transaction(connection):
                    pass
            except Stopping as error:
                refused.append(error)

    with make() as writer:
        writer.retire()
        thread = threading.Thread(target=work)
        thread.start()
        opened.wait(10)
        threading.Timer(0.3, close.set).start()
    thread.join()
    assert judge.agrees(sql).kinds() == [("JOIN", 1, 0), ("RDATA", 1, 1), ("RETIRE", 1, 1)]
    assert len(refused) == 1


def test_metrics_say_what_is_in_flight_and_what_waits(make: Make, connection: Connection) -> None:
    """While a transaction is open its ID is in flight; once it is told, nothing is."""
    registry = CollectorRegistry()
    labels = {"instance": "shop-1", "stream": "orders"}

    def value(name: str) -> float:
        found = registry.get_sample_value(f"tidemark_writer_{name}", labels)
        assert found is not None
        return found

    with make(registry=registry) as writer:
        with writer.transaction(connection) as facts:
            facts.append("orders", {})
            assert value("in_flight") == 1
            assert value("oldest_in_flight_seconds") > 0
        eventually(lambda: value("outbox_ids") == 0)
        assert value("in_flight") == value("oldest_in_flight_seconds") == value("outbox_age_seconds") == 0
        assert value("reservation_seconds_count") == 1


FORKED = """
import os, sys, psycopg
from prometheus_client import CollectorRegistry
from tidemark.sources.writer import Writer

dsn, kafka, topic = sys.argv[1:]
with Writer(dsn, kafka, instance="shop-1", streams=["orders"], topic=topic, registry=CollectorRegistry()) as writer:
    child = os.fork()
    if not child:
        try:
            with psycopg.connect(dsn) as connection, writer.transaction(connection):
                os._exit(1)
        except RuntimeError as error:
            os._exit(7 if "fork" in str(error) else 2)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_writer_that_was_copied_by_a_fork_refuses_to_write(dsn: str, kafka: KafkaServer, topic: str) -> None:
    """Nobody would announce what the copy reserves, and its parent's heartbeat would say that nothing is there."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED, dsn, kafka.bootstrap_servers, topic]
    assert subprocess.run(command, timeout=60, check=False).returncode == 7
