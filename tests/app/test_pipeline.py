"""A running pipeline, seen from outside: what a reader, an operator and an orchestrator see."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import psycopg
import pytest
import redis
from click.testing import CliRunner
from confluent_kafka import Producer
from msgspec.structs import replace
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client import CollectorRegistry
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.app.collector import Collector, attributes, collecting
from tests.app.prometheus import IS_THERE, scraping
from tests.app.proofs import dead_letters
from tests.app.running import PATIENCE
from tests.app.sidecar.given import sidecar
from tests.fix_pipeline import PARTITIONS, Site, made_site
from tests.helm.tools import CHART, alert_rules
from tests.waiting import eventually
from tidemark.app import relay
from tidemark.app.cli import main
from tidemark.app.read_side import ReadSideConfig
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import KafkaServer, RedisServer, free_port
from tidemark.common.environment import child_environment
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sources.producer import RecordProducer
from tidemark.sources.synapse.bridge import BridgeMetrics
from tidemark.streaming.wire.records import FactRun, Join, Position, Rdata, Record, Void, encode, encode_row

NOTHING = encode_row({})


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def shared(
    collector: Collector,
    kafka: KafkaServer,
    postgres: PostgresServer,
    redis_server: RedisServer,
    warm_jvm: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    """A site whose pipeline runs for all tests of this module; each has streams of its own."""
    with made_site(kafka, postgres, redis_server, tmp_path_factory.mktemp("shared")) as site:
        site.start(otlp_url=collector.address).ready()
        yield site


def fact(stream: str, id: int, writer: str = "first") -> Record:
    return Rdata(stream=stream, writer=writer, id=id, row=NOTHING)


def test_the_worked_example(shared: Site) -> None:
    """Rule 1: reserve 2 to 6 and complete 3, 2, 5, 4, 6: the position goes 1, 1, 3, 3, 5, 6, in Redis and in order."""
    for id, position in ((1, 1), (3, 1), (2, 3), (5, 3), (4, 5), (6, 6)):
        shared.send(fact("example", id))
        shared.reaches("example", first=position, linear=position)
    with redis.Redis.from_url(shared.redis_url, decode_responses=True) as client:
        assert client.get("tidemark:{example}:token") == "m6"
        assert client.sismember("tidemark:streams", "example")


def test_one_writer_holds_the_line_and_not_the_other(shared: Site) -> None:
    """B announces 5 while A's 5 is in flight: B's position moves, the line stays at 4 until A completes."""
    shared.send(
        Join(stream="pair", writer="A", epoch=1, id=0),
        Join(stream="pair", writer="B", epoch=1, id=0),
        Rdata(stream="pair", writer="A", epoch=1, prev=0, id=4, row=NOTHING),
        Position(stream="pair", writer="B", epoch=1, prev=0, id=5),
    )
    shared.reaches("pair", A=4, B=5, linear=4)
    shared.send(Void(stream="pair", writer="A", epoch=1, prev=4, id=5))
    shared.reaches("pair", A=5, B=5, linear=5)


def test_a_batch_that_waits_for_a_lock_is_named(shared: Site) -> None:
    """Readiness and `tidemark status` turn red with who holds it, and green again; advisory locks hold nobody back."""
    with psycopg.connect(make_conninfo(shared.dsn, application_name="nightly-job"), autocommit=True) as other:
        other.execute("select pg_advisory_lock(hashtextextended('tidemark.history', 0))")
        shared.send(fact("locked", 1))
        shared.reaches("locked", first=1)
        other.execute("begin; lock table tidemark.stream_positions in exclusive mode")
        shared.send(fact("locked", 2))
        eventually(lambda: shared.first.metric("tidemark_pipeline_ready") == 0)
        eventually(lambda: "nightly-job" in CliRunner(env=shared.variables).invoke(main, ["status"]).stdout)
        assert CliRunner(env=shared.variables).invoke(main, ["status", "--check"]).exit_code == 3
        other.execute("rollback")
        shared.reaches("locked", first=2)
        eventually(lambda: shared.first.metric("tidemark_pipeline_ready") == 1)
    shared.first.says("session named nightly-job")


def test_facts_that_come_in_one_record_count_one_by_one(shared: Site) -> None:
    """Of a RUN the edges that are known are duplicates, the others move the position, and a hole holds it."""
    run = partial(FactRun, stream="runs", writer="w")
    shared.send(
        Rdata(stream="runs", writer="w", id=2, row=NOTHING), run(prev=0, ids=[1, 2, 3], rows=[[NOTHING], [], []])
    )
    shared.reaches("runs", w=3, linear=3)
    shared.send(run(prev=4, ids=[6, 7], rows=[[NOTHING, NOTHING], []]))
    shared.send(run(prev=3, ids=[4], rows=[[NOTHING]]))
    shared.reaches("runs", w=7, linear=7)


def test_a_backlog_of_more_facts_than_memory_has_room_for_is_read_in_parts(shared: Site) -> None:
    """Rules 3 and 5: 5.4 million facts in 540 records, all there at once: a batch ends where a task holds enough, the
    query begins anew behind it with fewer records a batch, and every fact counts once."""
    together, count = 10_000, 540
    producer = Producer({**shared.kafka.producer_settings(), "transactional.id": "backlog"})
    producer.init_transactions(30)
    producer.begin_transaction()
    for first in range(1, together * count, together):
        run = FactRun(
            stream="backlog", writer="w", prev=first - 1, ids=[*range(first, first + together)], rows=[[]] * together
        )
        producer.produce(shared.facts, key=b"backlog", value=encode(run))
    producer.commit_transaction(30)
    shared.reaches("backlog", w=together * count, linear=together * count)
    assert shared.first.log().count("had more facts than fit into memory") == 1
    shared.send(Void(stream="backlog", writer="w", prev=together * count, id=together * count + 1))
    shared.reaches("backlog", w=together * count + 1)
    (empty,) = shared.sql("select sum(empty)::bigint from tidemark.position_advances where stream = 'backlog'")
    assert empty == (together * count + 1,)


BAD = {
    "not_json": (b"strange", b"{not json"),
    "not_an_object": (b"strange", b"[]"),
    "unknown_kind": (b"strange", b'{"kind":"RUMOUR","stream":"strange","writer":"w","id":1}'),
    "missing_field": (b"strange", b'{"kind":"VOID","stream":"strange","writer":"w","id":1}'),
    "wrong_type": (b"strange", b'{"kind":"VOID","stream":"strange","writer":"w","prev":0,"id":"one"}'),
    "out_of_64_bits": (
        b"strange",
        b'{"kind":"VOID","stream":"strange","writer":"w","prev":0,"id":9223372036854775808}',
    ),
    "id_not_beyond_prev": (b"strange", b'{"kind":"VOID","stream":"strange","writer":"w","prev":2,"id":2}'),
    "negative_epoch": (b"strange", b'{"kind":"JOIN","stream":"strange","writer":"w","epoch":-1,"id":2}'),
    "bad_name": (b"a b", b'{"kind":"JOIN","stream":"a b","writer":"w","epoch":1,"id":2}'),
    "key_mismatch": (b"other", b'{"kind":"JOIN","stream":"strange","writer":"w","epoch":1,"id":2}'),
    "wrong_topic": (b"strange", b'{"kind":"SKIP","stream":"strange","writer":"w","prev":0,"id":2}'),
    "uneven_run": (b"strange", b'{"kind":"RUN","stream":"strange","writer":"w","prev":0,"ids":[1,2],"rows":[[]]}'),
    "mixed_sign": (b"strange", b'{"kind":"VOID","stream":"strange","writer":"w","prev":-1,"id":2}'),
    "zombie": (b"undead", b'{"kind":"RDATA","stream":"undead","writer":"w","epoch":1,"id":9,"row":null}'),
    "conflict": (b"undead", b'{"kind":"VOID","stream":"undead","writer":"w","epoch":2,"prev":5,"id":8}'),
    "unknown_writer": (
        b"undead",
        b'{"kind":"SKIP","stream":"undead","writer":"x","prev":0,"id":2,"by":"me","why":"so"}',
    ),
    "bad_text": (
        b"undead",
        b'{"kind":"SKIP","stream":"undead","writer":"w","prev":6,"id":7,"by":"me","why":"x\\u0000y"}',
    ),
}
"""Of each reason that one record alone, or one after the good ones below, may have: key and value."""


def test_every_kind_of_bad_record_arrives_unchanged_in_the_dead_letters(shared: Site) -> None:
    """Rule 5: key, value and headers are those of the record, byte for byte, with reason, topic, partition and offset;
    a record without a value keeps having none, and the good record behind them all is applied."""
    shared.send(
        Join(stream="undead", writer="w", epoch=2, id=4),
        Rdata(stream="undead", writer="w", epoch=2, prev=4, id=6, row=NOTHING),
    )
    shared.reaches("undead", w=6)
    producer = Producer(shared.kafka.producer_settings())
    sent = {**BAD, "no value": (b"strange", None)}
    for reason, (key, value) in sent.items():
        topic = shared.control if reason in ("unknown_writer", "bad_text") else shared.facts
        producer.produce(topic, key=key, value=value, headers=[("trace", reason.encode()), ("raw", b"\x00\xff")])
    assert producer.flush(30) == 0
    shared.send(Join(stream="strange", writer="first", epoch=1, id=1))  # it is no stream's only writer after all that
    shared.reaches("strange", first=1)

    def arrived() -> dict[str, tuple[str, bytes | None, bytes | None]] | None:
        found = {}
        for origin, letter in dead_letters(shared):
            headers = dict(letter.headers())
            if "trace" not in headers:  # another test's
                continue
            assert headers["raw"] == b"\x00\xff"
            found[headers["trace"].decode()] = origin.reason, letter.key(), letter.value()
        return found if len(found) == len(sent) else None

    assert eventually(arrived, PATIENCE, lambda: "all dead letters") == {
        trace: ("not_json" if trace == "no value" else trace, key, value) for trace, (key, value) in sent.items()
    }


def act(site: Site, *words: str, **variables: str) -> tuple[int, str]:
    """By an operator at no terminal; its exit code, and all that it says."""
    done = CliRunner(env={**site.variables, **variables}).invoke(main, [*words, "--by", "ada", "--why", "host is gone"])
    return done.exit_code, done.output


def test_an_operator_skips_a_gap_and_takes_back_a_skip_that_went_too_far(shared: Site) -> None:
    """Rules 1 and 2: the position that was published stands, what comes below it is late, and the line waits again.
    Each act is asked for, waits for its effect, and is noted with the user that Postgres saw."""
    edge = Rdata(stream="forced", writer="A", epoch=1, prev=3, id=4, row=NOTHING)
    shared.send(
        *(Join(stream="forced", writer=name, epoch=1, id=0) for name in "AB"),
        replace(edge, prev=0, id=2),
        edge,
        replace(edge, writer="B", prev=0, id=5),
    )
    shared.reaches("forced", A=2, B=5, linear=2)
    code, said = act(shared, "skip", "forced", "A", "3", "--yes")
    assert (code, "A is alive" in said) == (1, True)
    code, said = act(shared, "skip", "forced", "A", "3", "--force")
    assert (code, "add --yes" in said) == (2, True)
    assert act(shared, "skip", "forced", "A", "3", "--force", "--dry-run")[0] == 0
    assert shared.sql("select 1 from tidemark.overrides where stream = 'forced'") == []
    code, said = act(shared, "skip", "forced", "A", "3", "--force", "--yes")
    assert (code, said.splitlines()[-1]) == (0, "applied: A is at 4, linear position 5")
    code, said = act(shared, "skip", "forced", "A", "5..2000000000", "--beyond", "--force", "--yes", "--json")
    told = json.loads(said[said.index("{") :])
    assert (code, told["outcome"], told["advances"][0]["id"]) == (0, "applied", 2_000_000_000)
    code, said = act(shared, "join", "forced", "A", "--id", "4", "--yes")
    assert (code, "IDs of A beyond 4 are open again" in said) == (0, True)
    noted = (
        'select kind, id, seen_as = session_user, outcome, "offset" is null from tidemark.overrides where stream = %s'
    )
    assert shared.sql(noted + " order by number", "forced") == [
        ("SKIP", 3, True, "applied", False),
        ("SKIP", 2_000_000_000, True, "applied", False),
        ("JOIN", 4, True, "applied", False),
    ]
    shared.send(replace(edge, writer="B", prev=5, id=8), replace(edge, prev=4, id=6))
    shared.reaches("forced", linear=6)
    assert shared.positions("forced") == {"A": 2_000_000_000, "B": 8, "linear": 6}
    late = "select writer, prev, id, facts, why from tidemark.late_completions where stream = 'forced'"
    assert shared.sql(late) == [("A", 4, 6, 1, "regressed")]


def test_a_writer_that_cannot_be_stopped_is_fenced(shared: Site) -> None:
    """Rule 1: what it left open is settled by the act, nothing counts any more that its old process sends, and its next
    start goes on. A writer with a record within TIDEMARK_SILENT_SECONDS is left alone, whatever is forced."""
    edge = Rdata(stream="fenced", writer="A", epoch=1, prev=3, id=4, row=NOTHING)
    joins = [Join(stream="fenced", writer=name, epoch=1, id=0) for name in "AB"]
    shared.send(*joins, replace(edge, prev=0, id=2), edge, replace(edge, writer="B", prev=0, id=5))
    shared.reaches("fenced", A=2, B=5, linear=2)
    code, said = act(shared, "fence", "fenced", "A", "--yes", "--force")
    assert (code, "A is alive" in said) == (1, True)
    time.sleep(1.0)
    code, said = act(shared, "fence", "fenced", "A", "--yes", TIDEMARK_SILENT_SECONDS="1")
    assert (code, said.splitlines()[-1]) == (0, "applied: A is at 4, linear position 5"), said
    with Postgres(PostgresConfig(shared.dsn)) as postgres:
        assert {it for it in postgres.conditions.epochs_begun_by_operators() if it[0] == "fenced"} == {
            ("fenced", "A", 2)
        }
    shared.send(replace(edge, prev=4, id=6), Join(stream="fenced", writer="A", epoch=3, id=5))
    shared.send(replace(edge, epoch=3, prev=5, id=7), replace(edge, writer="B", prev=5, id=8))
    shared.reaches("fenced", A=7, B=8, linear=8)
    code, said = act(shared, "fence", "fenced", "A", "--yes", "--force")
    assert (code, "A is alive" in said) == (1, True)
    assert shared.sql("select kind, epoch, id, outcome from tidemark.overrides where stream = 'fenced'") == [
        ("JOIN", 2, 4, "applied")
    ]

    def reasons() -> list[str]:
        return [origin.reason for origin, letter in dead_letters(shared) if letter.key() == b"fenced"]

    assert eventually(reasons, PATIENCE, lambda: "a dead letter") == ["zombie"]  # sent after its batch was published


def test_a_dead_letter_is_replayed_once_and_counts(shared: Site) -> None:
    """Rule 5: what stood in the wrong partition is listed, shown, and sent again to where its key leads; its position
    moves, the act is noted, and the same record is refused from then on."""
    producer = RecordProducer(shared.kafka, shared.facts, give_up_after=PATIENCE)
    producer.send("strayed", encode(fact("strayed", 1)))
    producer.deliver(PATIENCE)
    assert producer.last_acknowledged is not None
    shared.reaches("strayed", first=1)
    elsewhere = Producer(shared.kafka.producer_settings())
    elsewhere.produce(
        shared.facts,
        partition=(producer.last_acknowledged[0] + 1) % PARTITIONS,
        key=b"strayed",
        value=encode(fact("strayed", 2)),
    )
    assert elsewhere.flush(30) == 0

    def listed() -> list[dict[str, object]]:
        done = CliRunner(env=shared.variables).invoke(main, ["dead-letters", "list", "strayed", "--json"])
        assert done.exit_code == 0, done.output
        found: list[dict[str, object]] = json.loads(done.stdout)["dead_letters"]
        return found

    (letter,) = eventually(listed, PATIENCE, lambda: "the dead letter")
    place = str(letter["offset"])
    assert letter["reason"] == "wrong_partition"
    shown = CliRunner(env=shared.variables).invoke(main, ["dead-letters", "show", place])
    assert "reason: wrong_partition" in shown.stdout
    assert CliRunner(env=shared.variables).invoke(main, ["dead-letters", "show", "999999"]).exit_code == 1
    assert act(shared, "dead-letters", "replay", place, "--dry-run")[0] == 0
    assert act(shared, "dead-letters", "replay", place)[0] == 2
    code, said = act(shared, "dead-letters", "replay", place, "--yes")
    assert (code, said.splitlines()[-1]) == (0, "applied: first is at 2, linear position 2")
    noted = "select number, seen_as = session_user, outcome from tidemark.overrides where kind = 'REPLAY'"
    ((number, proved, outcome),) = shared.sql(noted)
    assert (proved, outcome) == (True, "applied")
    assert [it["replay_override"] for it in listed()] == [number]
    code, said = act(shared, "dead-letters", "replay", place, "--yes")
    assert (code, "there is nothing to replay" in said) == (1, True)


def test_a_flushed_redis_is_filled_without_traffic(shared: Site) -> None:
    """Everything a reader looks at comes back from Postgres: names, positions, line, token and advances."""
    shared.send(fact("flushed", 1), fact("flushed", 2))
    shared.reaches("flushed", first=2, linear=2)
    with redis.Redis.from_url(shared.redis_url, decode_responses=True) as client:
        client.flushdb()
        shared.reaches("flushed", first=2, linear=2)
        assert client.get("tidemark:{flushed}:token") == "m2"
        assert client.sismember("tidemark:streams", "flushed")
        assert client.xlen("tidemark:{flushed}:advances") >= 1


def test_what_a_writer_aborted_is_no_evidence(shared: Site) -> None:
    """Rule 1: fact 2 was taken back by its writer's own Kafka transaction, so 3 waits until 2 is there for good."""
    producer = Producer(shared.kafka.producer_settings() | {"transactional.id": shared.facts})
    producer.init_transactions(30)
    for id, keep in ((1, True), (2, False), (3, True)):
        producer.begin_transaction()
        producer.produce(shared.facts, key=b"aborted", value=encode(fact("aborted", id)))
        if keep:
            producer.commit_transaction(30)
        else:
            producer.flush(30)
            producer.abort_transaction(30)

    def pending() -> object:
        return shared.sql("select 1 from tidemark.stream_gaps where stream = 'aborted' and closed_at is null")

    eventually(pending, PATIENCE, lambda: "the gap")
    shared.reaches("aborted", first=1, linear=1)
    shared.send(fact("aborted", 2))
    shared.reaches("aborted", first=3, linear=3)


def test_a_batch_is_traced_from_kafka_to_the_dead_letters(shared: Site, collector: Collector) -> None:
    """As a collector receives it: what Spark did, then what each server took, one after the other."""
    began = time.time_ns()
    shared.send(fact("traced", 1))
    shared.reaches("traced", first=1)
    order = ["read", "state", "postgres", "redis", "dead_letters"]

    def found() -> dict[str, Span] | None:
        whole = (it for it in collector.traces() if {*it} == {"batch", *order})
        recent = (it for it in whole if it["batch"].start_time_unix_nano > began)
        # The first batch of a query reads nothing.
        return next((it for it in recent if attributes(it["batch"])["tidemark.streams"]), None)

    spans = eventually(found, PATIENCE, lambda: f"a trace among {[[*it] for it in collector.traces()]}")
    root = spans["batch"]
    told = attributes(root)
    applied = "select 1 from tidemark.applied_batches where (query, batch) = (%s, %s)"
    assert shared.sql(applied, told["tidemark.query"], told["tidemark.batch"]) == [(1,)]
    named = "select encode(substr(sha256(convert_to(%s || '/' || %s, 'UTF8')), 1, 16), 'hex')"  # docs/how-to/deploy.md
    assert shared.sql(named, told["tidemark.query"], str(told["tidemark.batch"])) == [(root.trace_id.hex(),)]
    assert shared.sql("select token from tidemark.query_lease")[0][0] >= told["tidemark.lease_token"]
    assert told["tidemark.streams"] >= 1
    for before, after in pairwise(order):
        assert spans[before].end_time_unix_nano <= spans[after].start_time_unix_nano + 1_000_000, (before, after)
    assert all(spans[name].parent_span_id == root.span_id for name in order)
    assert spans["dead_letters"].end_time_unix_nano <= root.end_time_unix_nano + 1_000_000
    assert collector.strange == []


def test_a_policy_is_followed_without_a_restart(shared: Site) -> None:
    """What alerts compare with at once, bounds in a query that begins anew: past them records are put off, and come
    again when the gap is closed. Nothing is lost, and the history joins."""
    shared.send(fact("own", 1))
    shared.reaches("own", first=1)
    assert act(shared, "policy", "set", "own", "gap_seconds=5", "pending_bound=2", "--yes")[0] == 0
    shared.first.says("the query starts again: bounds of streams changed")
    shared.send(*(fact("own", id) for id in (3, 5, 7, 9)))

    def deferred() -> bool:
        return "deferred" in CliRunner(env=shared.variables).invoke(main, ["status", "own"]).stdout

    eventually(deferred, PATIENCE, lambda: "records are deferred")
    eventually(lambda: shared.first.metric('tidemark_policy_gap_seconds{stream="own"}') == 5)
    shared.send(*(fact("own", id) for id in (2, 4, 6, 8)))
    shared.reaches("own", first=9, linear=9)
    moved = (
        "select sum(facts)::int, count(*) = count(distinct prev) from tidemark.position_advances where stream = 'own'"
    )
    assert shared.sql(moved) == [(9, True)]


# Asked for by alerts and panels, and there only in trouble, or beside a relay.
SELDOM = {
    "tidemark_reader_lag_seconds",
    "tidemark_reader_linear_position",
    "tidemark_source_silent_seconds",
    "tidemark_source_blocked_seconds",
    "tidemark_relay_blocked_streams",
    "tidemark_relay_oversized_facts",
    "tidemark_bound_used_ratio",
    "tidemark_linear_blocked_seconds",
    "tidemark_blocker_last_seen_seconds",
    "tidemark_policy_linear_lag_ids",
    "tidemark_policy_linear_lag_seconds",
    "tidemark_retries_total",
}


@contextmanager
def relaying(site: Site) -> Iterator[int]:
    """A relay of a service's database, in which a transaction is open; gives the port of its metrics."""
    name, port = f"{site.database}_service", free_port()
    with psycopg.connect(site.postgres.dsn("postgres"), autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    dsn = site.postgres.dsn(name)
    relay.migrate(dsn, ["relayed"], "forward", lambda _: None)
    append = "select tidemark.append('relayed', '{}')"
    command = [sys.executable, "-m", "tidemark", "relay", "--dsn", dsn, "--metrics", f"127.0.0.1:{port}"]
    with psycopg.connect(dsn) as service, subprocess.Popen(command, env=child_environment(site.variables)) as process:
        try:
            service.execute(append)
            service.rollback()
            service.execute(append)
            service.commit()
            # With one open before that, the relay would wait with its JOIN.
            eventually(lambda: site.positions("relayed")["linear"] == 2, PATIENCE, lambda: "what was committed")
            service.execute(append)
            yield port
        finally:
            process.terminate()


def test_a_relay_that_is_killed_is_missed(shared: Site) -> None:
    """A stream is complete only as long as its relay sends something: `status`, `gaps`, the page's own answer and the
    metrics say so, and until it runs again. What a running relay holds back has its cause in the same places."""
    name = f"{shared.database}_watched"
    with psycopg.connect(shared.postgres.dsn("postgres"), autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    dsn = shared.postgres.dsn(name)
    relay.migrate(dsn, ["watched"], "forward", lambda _: None)
    variables = child_environment({**shared.variables, "TIDEMARK_HEARTBEAT_SECONDS": "1"})

    def started() -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-m", "tidemark", "relay", "--dsn", dsn], env=variables)

    def told(*words: str) -> str:
        return CliRunner(env=shared.variables).invoke(main, [*words, "watched"]).stdout

    def complete() -> bool:
        return told("gaps").strip() == "no gaps: nothing is blocked" and f"the relay {name}" not in told("status")

    def shows(metric: str) -> bool:
        return shared.first.metric(f'{metric}{{stream="watched",writer="{name}"}}') is not None

    process = started()
    try:
        with (
            psycopg.connect(dsn, autocommit=True) as service,
            sidecar(ReadSideConfig(shared.redis_url, shared.dsn)) as client,
        ):
            service.execute("select tidemark.append('watched', '1')")
            eventually(lambda: shared.positions("watched").get("linear") == 1, PATIENCE, lambda: "the first fact")
            eventually(complete, PATIENCE)
            service.execute("alter sequence tidemark.append_ids_1 cache 20")
            eventually(lambda: f"the relay {name} has sent nothing new for" in told("status"), PATIENCE)
            assert "alter sequence" in told("gaps").lower()
            eventually(lambda: shows("tidemark_source_blocked_seconds"))
            service.execute("alter sequence tidemark.append_ids_1 cache 1")
            eventually(complete, PATIENCE)
            process.kill()
            process.wait()
            service.execute("select tidemark.append('watched', '2')")
            eventually(lambda: f"no heartbeat from the relay {name} for" in told("status"), PATIENCE)
            assert f"Start the relay of {name}" in told("gaps")
            eventually(lambda: shows("tidemark_source_silent_seconds"))
            with client.stream("GET", "/v1/watch") as watch:
                lines = watch.iter_lines()
                data = next(it for it in lines if it.startswith("data:") and '"stream":"watched"' in it)
            assert '"verdict":"no heartbeat"' in data
            process = started()
            eventually(complete, PATIENCE)
            assert shared.positions("watched")["linear"] == 2
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.skipif(not IS_THERE, reason="there is no Prometheus: Debian's package prometheus has it")
def test_prometheus_answers_what_alerts_and_dashboard_ask(shared: Site, tmp_path: Path) -> None:
    """Of a pipeline, a sidecar and a relay that it scrapes: every metric is there, every rule is evaluated, and a panel
    shows series that have the labels by which it calls them."""
    shared.send(fact("asked", 1), fact("asked", 2))
    shared.reaches("asked", first=2, linear=2)
    panels = json.loads((CHART / "files/dashboard.json").read_text())["panels"]
    targets = [target for panel in panels for target in panel["targets"]]
    rules = alert_rules()
    asked = set(re.findall(r"\btidemark_\w+", rules + "".join(target["expr"] for target in targets)))
    families = [*BridgeMetrics(CollectorRegistry()).registry.collect()]
    bridge = {name for it in families for name in (it.name, f"{it.name}_total")}  # it has no server here
    with sidecar(ReadSideConfig(shared.redis_url, shared.dsn)) as client, relaying(shared) as relayed:
        client.json("/v1/streams/asked")
        pods = {
            "tidemark-pipeline-0": shared.first.metrics_port,
            "tidemark-sidecar-0": client.base_url.port or 0,
            "tidemark-relay-shop-5d4f-x7kqz": relayed,
        }
        with scraping(tmp_path, rules, pods) as prometheus:
            there = {*prometheus.ask("label/__name__/values")}
            assert asked <= there | SELDOM | bridge, asked - there - SELDOM - bridge
            for target in targets:
                found = prometheus.query(target["expr"].replace("$namespace", "streams"))
                names = set(re.findall(r"\w+", target["expr"])) & asked
                assert found or names & SELDOM or "> 0" in target["expr"], target
                called = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                assert all(called <= labels.keys() for labels in found), (target, found)
            groups = prometheus.ask("rules")["groups"]
            assert {(it["health"], it.get("lastError")) for group in groups for it in group["rules"]} == {("ok", None)}
            assert {it["state"] for group in groups for it in group["rules"] if "RelaySilent" in it["name"]} == {
                "inactive"
            }


def test_a_taken_port_is_named(shared: Site) -> None:
    """The port of the metrics is in the line, with the setting that changes it."""
    taken = shared.first.metrics_port
    ended = shared.refused(metrics_port=taken)
    assert ended.code == 2
    assert f"{taken}" in ended.lines[0]
    assert "TIDEMARK_METRICS_PORT" in ended.lines[0]


def test_a_second_process_in_one_place_waits_and_leaves_when_told(shared: Site) -> None:
    """Whatever its database is, it touches nothing, says what it waits for, and ends at SIGTERM with code 0."""
    second = shared.start()
    second.says("Waiting for the lock on the checkpoint")
    second.terminate()
