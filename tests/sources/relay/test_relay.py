"""The relay beside real servers: what arrives in Kafka, and what Tidemark makes of it, is what was committed."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import make_conninfo
from structlog.testing import capture_logs

from tests.fix_servers import away
from tests.services.pgbouncer import PgBouncer
from tests.sources.relay.judge import Judge
from tests.sources.relay.running import Run, agrees, append, settled
from tests.waiting import eventually
from tidemark.app.cli import main
from tidemark.app.stack.postgres import postgres_program
from tidemark.app.stack.processes import KafkaServer
from tidemark.common.environment import child_environment
from tidemark.common.errors import BadSetting, MalformedFact, Refused
from tidemark.sources import run_loop, transactions
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.relay import queries
from tidemark.sources.relay import relay as relaying
from tidemark.sources.relay.decider import Decider
from tidemark.sources.relay.queries import DEAD_CLIENT_WARNING_SECONDS, read_dead_client_timeout
from tidemark.sources.relay.relay import MAX_RUN_FACTS
from tidemark.sources.topics import TopicPlan, Topics
from tidemark.streaming.core import codec
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.wire.records import FactRun


def rolled_back(sql: psycopg.Connection) -> None:
    with sql.transaction(force_rollback=True):
        append(sql)


def waits(sql: psycopg.Connection) -> bool:
    """Whether `tidemark relay retire` has asked."""
    asked = (
        "select from pg_stat_activity where application_name = 'tidemark relay retire' and query ~ 'retire_writer'"
        " and datname = current_database()"
    )
    return sql.execute(asked.encode()).fetchone() is not None


@contextmanager
def open_transaction(dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(dsn, application_name="checkout") as connection:
        append(connection)
        yield connection


def test_positions_equal_the_truth(ready: str, sql: psycopg.Connection, run: Run, judge: Judge) -> None:
    """Facts of several rows, voids, an open transaction that others overtake, 20 000 at once, and a second relay that
    takes over from the first, which is killed at its database. It lets facts share a record, where the first sent some
    of them one by one.
    """
    first = run()
    facts = append(sql)
    rolled_back(sql)
    with open_transaction(ready) as held:
        facts |= append(sql, 20_000)
        row = sql.execute("select tidemark.append('orders', '1', %s::jsonb, '{}')", ["[" * 255 + "]" * 255]).fetchone()
        assert row is not None
        facts |= {row[0]}
        eventually(lambda: first.metric("tidemark_relay_facts_total", stream="orders") == 20_002)
        # It may own the ID that was rolled back too, for all that can be known from outside.
        eventually(lambda: first.metric("tidemark_relay_undecided_ids", stream="orders") in {1, 2})
        eventually(
            lambda: (first.metric("tidemark_relay_oldest_transaction_seconds", stream="orders", writer="shop") or 0) > 0
        )
        second = run(most_facts=MAX_RUN_FACTS)

        def takes_over() -> bool:
            """The first may be quicker when both connect again, so it is killed until it is not."""
            if second.metric("tidemark_relay_active") == 1:
                return True
            sql.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name = 'tidemark relay' and datname = current_database()"
            )
            time.sleep(2)
            return False

        eventually(takes_over)
        held.commit()
    facts |= {3} | append(sql, 20_000)
    rolled_back(sql)
    eventually(lambda: settled(sql))
    assert 1 in {first.metric("tidemark_relay_active"), second.metric("tidemark_relay_active")}
    agrees(judge, sql, facts)
    assert max(len(it.ids) for it in judge.verdict().records if isinstance(it, FactRun)) == MAX_RUN_FACTS


def test_a_stream_that_is_made_later_is_relayed_too(sql: psycopg.Connection, run: Run, judge: Judge) -> None:
    """It joins by itself, and the others go on."""
    run()
    facts = append(sql)
    eventually(lambda: settled(sql))
    sql.execute("select tidemark.create_stream('history', 'backward', -9)")
    sql.execute("select tidemark.append('history', '1')")
    facts |= append(sql)
    eventually(lambda: settled(sql))
    verdict = judge.verdict()
    assert verdict.announced == {"orders": facts, "history": {-10}}
    assert verdict.position("history", "shop") == 10


def test_each_writer_has_a_position(ready: str, sql: psycopg.Connection, run: Run, judge: Judge) -> None:
    """One that holds an ID open holds the line and nobody else's position; who is idle is told to be where all are."""
    run()
    append(sql)
    for writer in ("web", "till", "idle"):
        sql.execute("select tidemark.append_as(%s, 'orders', '1')", [writer])
    with psycopg.connect(ready) as held:
        held.execute("select tidemark.append_as('till', 'orders', '1')")
        last = sql.execute("select tidemark.append_as('web', 'orders', '1')").fetchone()
        assert last == (6,)
        eventually(lambda: judge.verdict().positions("orders").get("web", 0) >= 6)
        positions = judge.verdict().positions("orders")
        assert positions["till"] < 5
        assert positions["shop"] < 5
        held.commit()

    def told() -> bool:
        positions = judge.verdict().positions("orders")
        return len(positions) == 4 and min(positions.values()) > 6

    eventually(told)
    eventually(lambda: settled(sql))
    verdict = judge.verdict()
    assert verdict.rejected == {}
    assert verdict.announced == {"orders": {1, 2, 3, 4, 5, 6}}
    assert len({*verdict.positions("orders").values()}) == 1


def test_a_writer_that_is_retired_holds_nobody_back(
    ready: str, sql: psycopg.Connection, run: Run, judge: Judge
) -> None:
    """The command waits for what the name has open and the relay has to tell, and the line then for it no more; if it
    appends again it joins anew and is waited for again."""
    run()
    append(sql)
    sql.execute("select tidemark.append_as('pod-1', 'orders', '1')")
    eventually(lambda: settled(sql))

    def retire(*words: str) -> str:
        done = CliRunner().invoke(main, ["relay", "retire", "pod-1", *words, "--dsn", ready])
        assert done.exit_code in {0, 1}, done.output
        return done.output

    with psycopg.connect(ready) as held:
        held.execute("select tidemark.append_as('pod-1', 'orders', '1')")
        said = retire("orders", "--wait", "0")
        assert f"'pod-1' of stream 'orders' has an open transaction: pid {held.info.backend_pid}" in said
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(retire)
            eventually(lambda: waits(sql))
            held.commit()
            assert "pod-1 retires at ID " in waiting.result(60)

    def orders() -> StreamState:
        return codec.decode(judge.verdict().states["orders"])

    eventually(lambda: orders().writers["pod-1"].retired_at is not None)
    assert retire() == "no stream has an active writer pod-1\n"
    facts = append(sql)
    eventually(lambda: settled(sql))
    assert orders().linear.position >= max(facts)
    sql.execute("select tidemark.append_as('pod-1', 'orders', '1')")
    eventually(lambda: orders().writers["pod-1"].retired_at is None)
    eventually(lambda: settled(sql))
    assert judge.verdict().rejected == {}
    assert judge.verdict().effects["orders"].late == []


def test_who_holds_a_stream_is_told(
    ready: str, sql: psycopg.Connection, run: Run, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline learns which transaction keeps the position where it is, and when it does no more."""
    monkeypatch.setattr(transactions, "REPORTED_AFTER", timedelta(0))
    run()

    def open_transactions() -> list[str]:
        return judge.verdict().transactions("orders").get("shop", [])

    with open_transaction(ready) as held:
        append(sql)
        eventually(
            lambda: any(
                f"pid {held.info.backend_pid} in database {held.info.dbname} since" in line
                for line in open_transactions()
            )
        )
        held.commit()
    eventually(lambda: open_transactions() == [])
    eventually(lambda: settled(sql))
    agrees(judge, sql, {1, 2})


def test_while_kafka_is_away_memory_is_bounded(
    sql: psycopg.Connection, run: Run, judge: Judge, kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some is in flight, not more than a row of 800 kB beyond the bound; the rest waits in the database. Stopping does
    not wait for Kafka, and nothing is lost."""
    monkeypatch.setattr(relaying, "MAX_UNACKNOWLEDGED_BYTES", 2_000_000)
    first = run()
    facts = append(sql)
    eventually(lambda: settled(sql))
    with away(kafka):
        facts |= append(sql, 5000)
        for _ in range(12):
            row = sql.execute("select tidemark.append('orders', to_jsonb(repeat('x', 800000)))").fetchone()
            assert row is not None
            facts |= {row[0]}
        eventually(lambda: first.relay._free_bytes() <= 0)
        assert sum(each.size_bytes for each in first.relay._in_flight) < 2_000_000 + 900_000
        first.stop()
    run()
    eventually(lambda: settled(sql), 60)
    agrees(judge, sql, facts)


def test_a_stream_that_is_dropped_is_retired(
    ready: str, sql: psycopg.Connection, run: Run, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that stays open for long: the relay says that it waits, and goes on when it is over."""
    monkeypatch.setattr(run_loop, "LOCK_TIMEOUT", "100ms")
    relay = run()
    append(sql)
    eventually(lambda: settled(sql))
    with psycopg.connect(ready) as operator:
        operator.execute("select tidemark.drop_stream('orders')")
        eventually(lambda: relay.metric("tidemark_relay_active") == 0)
        operator.commit()
    eventually(lambda: judge.verdict().kinds()[-1][0] == "RETIRE")
    sql.execute("select tidemark.create_stream('orders')")
    facts = {1} | append(sql)
    assert facts == {1, 2}
    eventually(lambda: settled(sql))
    verdict = judge.verdict()
    assert [kind for kind, _, _ in verdict.kinds()] == ["JOIN", "RDATA", "RETIRE", "JOIN", "RDATA"]
    assert verdict.position("orders", "shop") == 2
    assert verdict.effects["orders"].late == []


def test_a_user_that_may_relay_and_nothing_else(ready: str, sql: psycopg.Connection, run: Run, judge: Judge) -> None:
    """The role is enough for all it does; who connects may change while it runs, as its password may."""
    for user in ("relay_one", "relay_two"):
        sql.execute(f"drop role if exists {user}".encode())
        sql.execute(f"create role {user} login password 'x' in role tidemark_relay".encode())
    now = ["relay_one"]
    run(dsn=lambda: make_conninfo(ready, user=now[0], password="x"))
    sql.execute("select tidemark.append_as('web', 'orders', '1')")
    eventually(lambda: settled(sql))
    sql.execute("select tidemark.retire_writer('web', 'orders')")
    eventually(lambda: settled(sql))
    now[0] = "relay_two"
    sql.execute("drop owned by relay_one")
    sql.execute("alter role relay_one nologin")
    sql.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'relay_one'")
    sql.execute("select tidemark.append('orders', '2')")
    eventually(lambda: settled(sql))
    assert sql.execute("select from pg_stat_activity where usename = 'relay_two'").fetchone() is not None
    verdict = judge.verdict()
    assert len(verdict.announced["orders"]) == 2
    assert verdict.rejected == {}


def secured(sql: psycopg.Connection, *, on: bool) -> None:
    """Row level security on every table of the schema, and no policy."""
    for (table,) in sql.execute("select tablename from pg_tables where schemaname = 'tidemark'").fetchall():
        how = "enable" if on else "disable"
        sql.execute(f"alter table tidemark.{table} {how} row level security".encode())


def test_row_level_security_holds_the_database(ready: str, sql: psycopg.Connection, run: Run, judge: Judge) -> None:
    """A relay that runs waits and is not ready, one that starts says what hides rows; nothing committed is void."""
    sql.execute("drop role if exists relay_filtered")
    sql.execute("create role relay_filtered login password 'x' in role tidemark_relay")
    filtered = make_conninfo(ready, user="relay_filtered", password="x")
    first = run(dsn=filtered)
    facts = append(sql, 3)
    eventually(lambda: settled(sql))
    secured(sql, on=True)
    facts |= append(sql, 3)
    eventually(lambda: first.metric("tidemark_relay_active") == 0)
    # What hides the rows is told to readers too, once it lasts.
    eventually(lambda: "row level security hides rows of table" in judge.verdict().blocked("orders"))
    failure = run(dsn=filtered).ended()
    assert isinstance(failure, Refused)
    assert "row level security hides rows of table" in str(failure)
    assert "relay_schema_version" in str(failure)
    assert 'ALTER ROLE "relay_filtered" BYPASSRLS' in str(failure)
    assert not settled(sql)
    secured(sql, on=False)
    eventually(lambda: settled(sql))
    eventually(lambda: judge.verdict().blocked("orders") == "")
    agrees(judge, sql, facts)
    sql.execute("drop owned by relay_filtered")
    first.stop()


def test_an_unfit_sequence_holds_its_stream_and_no_other(sql: psycopg.Connection, run: Run, judge: Judge) -> None:
    """CACHE hands IDs to sessions before their transactions take them: as voids they would be committed later."""
    relay = run()
    sql.execute("select tidemark.create_stream('history')")
    facts = append(sql)
    eventually(lambda: settled(sql))
    sql.execute("alter sequence tidemark.append_ids_1 cache 20")
    facts |= append(sql)
    eventually(lambda: relay.metric("tidemark_relay_blocked_streams", stream="orders") == 1)
    sql.execute("select tidemark.append('history', '1')")
    eventually(lambda: relay.metric("tidemark_relay_facts_total", stream="history") == 1)
    assert judge.verdict().announced["orders"] == {1}
    eventually(lambda: "alter sequence" in judge.verdict().blocked("orders").lower())
    assert judge.verdict().blocked("history") == ""
    facts |= append(sql)
    sql.execute("alter sequence tidemark.append_ids_1 cache 1")
    eventually(lambda: settled(sql))
    assert relay.metric("tidemark_relay_blocked_streams", stream="orders") == 0
    eventually(lambda: judge.verdict().blocked("orders") == "")
    agrees(judge, sql, facts)


def test_a_sequence_that_goes_back_under_a_relay_is_a_new_timeline(
    sql: psycopg.Connection, run: Run, judge: Judge
) -> None:
    """Within a look, and not once it has passed what was published."""
    run()
    append(sql, 30)
    eventually(lambda: settled(sql))
    sql.execute("select setval('tidemark.append_ids_1', 10)")
    again = append(sql, 5)
    eventually(lambda: settled(sql))
    late = judge.verdict().effects["orders"].late
    assert {id for it in late for id in range(it.prev + 1, it.id + 1) if it.facts} == again
    assert len(judge.verdict().effects["orders"].timelines) >= 1


def test_a_dump_that_is_restored_elsewhere_is_another_history(
    ready: str, sql: psycopg.Connection, run: Run, judge: Judge, another_database: str
) -> None:
    """Its IDs go on where those of the dump ended, whatever the sequence's number is there, and are told in a timeline
    of their own."""
    run()
    append(sql, 3)
    eventually(lambda: settled(sql))
    dump = subprocess.run([postgres_program("pg_dump"), ready], capture_output=True, check=True).stdout
    append(sql, 2)
    eventually(lambda: settled(sql))
    psql = [postgres_program("psql"), "-q", "-v", "ON_ERROR_STOP=1", another_database]
    subprocess.run(psql, input=dump, check=True, stdout=subprocess.DEVNULL)
    run(dsn=another_database)
    with psycopg.connect(another_database, autocommit=True) as restored:
        assert append(restored) == {4}
        eventually(lambda: settled(restored))
    verdict = judge.verdict()
    assert [id for kind, _, id in verdict.kinds() if kind == "JOIN"] == [0, 3]
    assert [(late.why, late.prev, late.id) for late in verdict.effects["orders"].late] == [("regressed", 3, 4)]


@pytest.mark.parametrize("rows", ["{", "1 2", None])
def test_a_fact_that_is_no_json_stops_the_relay(sql: psycopg.Connection, run: Run, rows: str | None) -> None:
    """No function put it there. It names the fact, and tells it neither so nor as void."""
    relay = run()
    eventually(lambda: relay.metric("tidemark_relay_active") == 1)
    values = "nextval('tidemark.append_ids_1'), array[%s], 0)"
    sql.execute(f"insert into tidemark.append_outbox (number, id, rows, bytes) values (1, {values}".encode(), [rows])
    failure = relay.ended()
    assert isinstance(failure, MalformedFact)
    assert str(failure).startswith("fact 1 of stream orders in tidemark.append_outbox is not JSON")
    assert not settled(sql)


def test_what_nobody_expected_ends_the_relay(
    sql: psycopg.Connection, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not go on with half of itself, and its metric says that it does not relay; nor with a table that somebody
    has changed."""
    relay = run()
    eventually(lambda: relay.metric("tidemark_relay_active") == 1)
    with monkeypatch.context() as patched:
        patched.setattr(Decider, "run_round", lambda *_: 1 / 0)
        assert isinstance(relay.ended(), ZeroDivisionError)
    assert relay.metric("tidemark_relay_active") == 0
    relay = run()
    eventually(lambda: relay.metric("tidemark_relay_active") == 1)
    sql.execute("alter table tidemark.append_progress rename column version to versions")
    append(sql)
    assert isinstance(relay.ended(), psycopg.Error)


def test_a_server_that_notices_no_dead_host_is_warned_of(ready: str, sql: psycopg.Connection) -> None:
    """By how long it would take; either setting is enough."""
    assert read_dead_client_timeout(sql) == 25

    def elsewhere(option: str, value: str) -> float:
        sql.execute(f"alter database {sql.info.dbname} set {option} = {value}".encode())
        with psycopg.connect(ready) as connection:
            return read_dead_client_timeout(connection)

    assert elsewhere("tcp_keepalives_idle", "7200") == 7215 > DEAD_CLIENT_WARNING_SECONDS
    assert elsewhere("idle_in_transaction_session_timeout", "'1min'") == 60


def test_a_relay_of_another_name_stops(sql: psycopg.Connection, run: Run) -> None:
    """Its facts would come twice, from two writers."""
    first = run()
    eventually(lambda: first.metric("tidemark_relay_active") == 1)
    first.stop()
    assert isinstance(run("store").ended(), BadSetting)


def test_whoever_keeps_a_relay_from_its_turn_is_named(sql: psycopg.Connection, run: Run) -> None:
    """Any login may hold the relay's lock, so the log tells which session does."""
    sql.execute("set application_name = 'attacker'")
    sql.execute("select pg_advisory_lock(%s, 0)", [queries.LOCK_KEY_BASE])
    with capture_logs() as logged:
        run()
        holder = eventually(lambda: next((it["blockers"] for it in logged if "Another process" in it["event"]), None))
    sql.execute("select pg_advisory_unlock_all()")
    assert f"pid {sql.info.backend_pid} (user " in holder
    assert "session named attacker" in holder


def test_command_line(ready: str, kafka: KafkaServer, topic: str, judge: Judge) -> None:
    """`migrate` makes streams once, `relay` sends until it is told to end, `blockers` names who holds a stream."""
    changes = {
        "TIDEMARK_POSTGRES_DSN": ready,
        "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "TIDEMARK_KAFKA_FACTS_TOPIC": topic,
    }

    def said(*words: str) -> str:
        done = CliRunner().invoke(main, ["relay", *words, "--dsn", ready], env=changes, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    assert said("migrate", "--stream", "orders") == "the schema is up to date\ncreated stream orders\n"
    assert said("migrate", "--stream", "orders") == "the schema is up to date\nstream orders exists\n"
    assert said("blockers") == "no open transaction blocks a stream\n"
    command = [sys.executable, "-m", "tidemark", "relay", "--writer", "shop", "--metrics", "127.0.0.1:0"]
    with subprocess.Popen(command, env=child_environment(changes)) as process:
        try:
            with open_transaction(ready) as held:
                line = said("blockers")
                assert line.startswith(
                    f"orders: writer not published yet, pid {held.info.backend_pid} in database {held.info.dbname}"
                    " since 20"
                )
                assert "idle in transaction, user postgres, session named checkout: select tidemark.append_many" in line
                words = ["relay", "blockers", "--dsn", ready, "--json"]
                [blocker] = json.loads(CliRunner().invoke(main, words, env=changes).stdout)["blockers"]
                assert (blocker["stream"], blocker["pid"]) == ("orders", held.info.backend_pid)
                assert blocker["ending_statement"] == f"select pg_terminate_backend({held.info.backend_pid})"
                held.commit()
                eventually(lambda: settled(held))
        finally:
            process.terminate()
        assert process.wait(60) == 0
    assert judge.verdict().announced == {"orders": {1}}


def test_a_relay_waits_for_whoever_makes_its_topic(ready: str, kafka: KafkaServer, prefix: str) -> None:
    """As where a chart starts it beside the pipeline; it says what it waits for."""
    settings = {
        "TIDEMARK_POSTGRES_DSN": ready,
        "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "TIDEMARK_KAFKA_FACTS_TOPIC": prefix,
    }
    command = [sys.executable, "-m", "tidemark", "relay"]
    with (
        psycopg.connect(ready, autocommit=True) as sql,
        subprocess.Popen(command, env=child_environment(settings), stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            sql.execute("select tidemark.create_stream('orders')")
            append(sql)
            assert process.stderr is not None
            assert any("Waiting for the facts topic" in line for line in process.stderr)
            Topics(KafkaConnection(kafka.bootstrap_servers)).create_missing([TopicPlan(prefix, 1, 3_600_000)])
            eventually(lambda: settled(sql))
        finally:
            process.terminate()
        assert process.wait(60) == 0


def test_the_name_of_a_session_behind_a_pooler_is_not_that_of_its_client(
    ready: str, pooler: PgBouncer, sql: psycopg.Connection
) -> None:
    """PgBouncer lends one session to many clients. A client without a name leaves the session the name of the client
    before, so it is reported as the name of the session. A name that the transaction sets is right."""

    def reported() -> str:
        [transaction] = queries.read_blockers(sql)
        return transaction.process.partition(", session named ")[2]

    with psycopg.connect(pooler.dsn(ready), application_name="checkout") as before:
        before.execute("select 1")
        before.commit()
        with psycopg.connect(pooler.dsn(ready)) as nameless:
            nameless.execute("select tidemark.append('orders', '1')")
            assert reported() == "checkout"
            nameless.rollback()
            nameless.execute("set local application_name = 'mailer'")
            nameless.execute("select tidemark.append('orders', '1')")
            assert reported() == "mailer"
            nameless.rollback()
            nameless.execute("select tidemark.append('orders', '1')")
            assert reported() == "checkout"
            nameless.rollback()
        with psycopg.connect(pooler.dsn(ready), application_name="mailer") as named:
            named.execute("select tidemark.append('orders', '1')")
            assert reported() == "mailer"
