"""What a relay that waits says in its log, and how long it waits before it tries again."""

import itertools
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from structlog.testing import capture_logs

from tests.fix_servers import away
from tests.sources.relay.judge import Judge
from tests.sources.relay.running import Run, append, settled
from tests.waiting import eventually
from tidemark.app.stack.postgres import PostgresServer, postgres_program
from tidemark.app.stack.processes import LOOPBACK, KafkaServer, free_port
from tidemark.common.errors import Unavailable
from tidemark.sources import run_loop
from tidemark.sources.producer import RecordProducer


def test_a_relay_that_waits_for_another_names_it(sql: psycopg.Connection, run: Run) -> None:
    """One line with the session that works, and one when its own work begins."""
    first = run()
    eventually(lambda: first.metric("tidemark_relay_active") == 1)
    with capture_logs() as logs:
        second = run()
        eventually(lambda: second.metric("tidemark_relay_standby") == 1)
        row = sql.execute(
            "select pid from pg_locks join pg_stat_activity using (pid)"
            " where locktype = 'advisory' and granted and application_name = 'tidemark relay' and objid = 0"
            " and datname = current_database()"
        ).fetchone()
        assert row is not None
        time.sleep(2.5)
        first.stop()
        eventually(lambda: second.metric("tidemark_relay_active") == 1)
    waiting = "Another process has the locks of this relay or bridge; waiting as standby until the locks are free"
    begins = [it for it in logs if it["event"] == waiting]
    assert len(begins) == 1
    assert begins[0]["blockers"].startswith(f"pid {row[0]} (user postgres, session named tidemark relay, ")
    assert [it["event"] for it in logs].count("The locks are free; this process takes over") == 1


def test_a_relay_that_waits_for_kafka_says_so(
    sql: psycopg.Connection, run: Run, kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line when Kafka has acknowledged nothing for a while, and one when it does again; none in between."""
    monkeypatch.setattr(run_loop, "SILENCE_LOGGED_AFTER_SECONDS", 0.5)
    run()
    append(sql)
    eventually(lambda: settled(sql))
    with capture_logs() as logs:
        with away(kafka):
            append(sql)
            eventually(lambda: any(it["event"] == "Waiting for Kafka" for it in logs))
            append(sql)
            time.sleep(2)
        eventually(lambda: settled(sql))
        eventually(lambda: any(it["event"] == "Kafka acknowledges records again" for it in logs))
    found = [it["event"] for it in logs if "Kafka" in it["event"]]
    assert found == ["Waiting for Kafka", "Kafka acknowledges records again"]
    assert logs[0]["kafka"] == kafka.bootstrap_servers


def test_a_relay_that_starts_while_the_database_is_away_waits(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long: it has sent nothing yet, and has nobody in whose name it could report that."""
    monkeypatch.setattr(run_loop, "FAILURE_REPORTED_AFTER_SECONDS", 0.0)
    with capture_logs() as logs:
        waiting = run(dsn=f"postgresql://postgres@{LOOPBACK}:{free_port()}/orders")
        eventually(
            lambda: any(it["event"] == "Cannot send facts; they stay in the database; trying again" for it in logs)
        )
        time.sleep(1)
        waiting.stop()
    assert waiting.failure is None


def test_pauses_grow_though_each_attempt_gets_a_little_further(
    sql: psycopg.Connection, run: Run, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails again and again is not tried five times a second, and it goes on when the fault has gone."""
    attempts = list[float]()

    def refuse(*_: object) -> None:
        attempts.append(time.monotonic())
        raise Unavailable("Kafka", "here", "no")

    append(sql)
    with capture_logs() as logs:
        with monkeypatch.context() as patched:
            patched.setattr(RecordProducer, "send_all", refuse)
            run()
            eventually(lambda: len(attempts) == 5)
        eventually(lambda: settled(sql))
        eventually(lambda: any(it["event"] == "Facts are sent again" for it in logs))
    pauses = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    assert all(pause >= run_loop.FIRST_PAUSE_SECONDS * 2**at for at, pause in enumerate(pauses))
    events = [it["event"] for it in logs]
    assert events.count("Cannot send facts; they stay in the database; trying again") == 1
    assert events.count("Facts are sent again") == 1
    assert judge.verdict().announced == {"orders": {1}}


def test_who_has_locked_a_table_is_named(
    ready: str, sql: psycopg.Connection, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay whose statements time out behind a lock says whose lock that is."""
    monkeypatch.setattr(run_loop, "LOCK_TIMEOUT", "100ms")
    relay = run()
    append(sql)
    eventually(lambda: settled(sql))
    with capture_logs() as logs, psycopg.connect(ready, application_name="migration") as owner:
        owner.execute("lock table tidemark.append_outbox")
        append_later = psycopg.connect(ready, autocommit=True)
        append_later.execute("select nextval('tidemark.append_ids_1')")
        append_later.close()
        eventually(lambda: relay.metric("tidemark_relay_active") == 0)
        pid = owner.info.backend_pid
        eventually(
            lambda: any(f"locked by pid {pid} (user postgres, session named migration" in str(it) for it in logs)
        )
    eventually(lambda: settled(sql))


@pytest.mark.parametrize("is_in_place", [True, False], ids=["in place", "in a new database"])
def test_a_relay_waits_while_pg_restore_works(
    ready: str, postgres: PostgresServer, run: Run, judge: Judge, tmp_path: Path, is_in_place: bool
) -> None:
    """Meanwhile the tables of the relay exist and are empty, and nobody is advised to migrate them. Afterwards the
    relay goes on by itself, and the IDs that are given out again are late."""
    dump = tmp_path / "dump"
    with psycopg.connect(ready, autocommit=True) as sql:
        sql.execute("select tidemark.create_stream('orders')")
        # The restore of this row waits for the test, before the rows of the schema tidemark.
        sql.execute(
            "create function gate(integer) returns boolean language plpgsql as"
            " $$ begin perform pg_catalog.pg_advisory_xact_lock_shared(38); return true; end $$;"
            "create table gated (id integer check (public.gate(id))); insert into gated values (1)"
        )
        relay = run()
        append(sql, 3)
        eventually(lambda: settled(sql))
        subprocess.run([postgres_program("pg_dump"), "-Fc", "-f", dump, ready], check=True)
        assert append(sql, 2) == {4, 5}
        eventually(lambda: settled(sql))
    with capture_logs() as logs:
        if not is_in_place:
            database = str(conninfo_to_dict(ready)["dbname"])
            with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as admin:
                admin.execute(f"drop database {database} with (force)".encode())
                admin.execute(f"create database {database}".encode())
        with psycopg.connect(ready, autocommit=True) as gate:
            gate.execute("select pg_advisory_lock(38)")
            options = ["--clean", "--if-exists"] if is_in_place else []
            command = [postgres_program("pg_restore"), "--exit-on-error", *options, "-d", ready, str(dump)]
            restores = [subprocess.Popen(command)]
            try:
                while eventually(lambda: is_waiting(gate) or restores[-1].poll()) is not True:
                    restores.append(subprocess.Popen(command))  # after a deadlock with the relay
                count = gate.execute("select count(*) from tidemark.relay_schema_version").fetchone()
                assert count == (0,)
                # A relay whose rounds were before and after the moment without tables sees a database without streams.
                until = time.monotonic() + 5.0
                eventually(lambda: has_noticed(logs) or (is_in_place and time.monotonic() > until))
                eventually(lambda: not has_noticed(logs) or relay.metric("tidemark_relay_active") == 0)
                assert relay.failure is None
                gate.execute("select pg_advisory_unlock(38)")
                assert restores[-1].wait(60) == 0
            finally:
                restores[-1].kill()
                restores[-1].wait()
    assert not any("migrate" in str(it.get("problem")) for it in logs if is_in_place)
    with psycopg.connect(ready, autocommit=True) as sql:
        assert append(sql, 2) == {4, 5}
        eventually(lambda: relay.metric("tidemark_relay_active") == 1 and settled(sql))
    late = judge.verdict().effects["orders"].late
    assert {id for it in late for id in range(it.prev + 1, it.id + 1) if it.facts} == {4, 5}


def has_noticed(logs: Sequence[Mapping[str, object]]) -> bool:
    """Whether the relay has said that it waits for pg_restore."""
    return any("pg_restore (process" in str(it.get("problem")) for it in logs)


def is_waiting(gate: psycopg.Connection) -> bool:
    """Whether pg_restore waits for the advisory lock of the test."""
    query = """
        select exists (select from pg_locks join pg_stat_activity using (pid) where locktype = 'advisory'
            and not granted and datname = current_database() and application_name = 'pg_restore')
    """
    return gate.execute(query).fetchone() == (True,)
