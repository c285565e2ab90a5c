"""Facts that the topic is too small for: their stream waits and is named, and no other does (docs/design.md 4b)."""

import random
import time
from collections import Counter

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from structlog.testing import capture_logs

from tests.sources.relay.judge import Judge
from tests.sources.relay.running import Run, settled
from tests.waiting import eventually
from tidemark.sources import run_loop
from tidemark.streaming.wire.records import Rdata


def limited(admin: AdminClient, topic: str, max_bytes: int) -> None:
    """Set the topic's `max.message.bytes`."""
    entry = ConfigEntry("max.message.bytes", str(max_bytes), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(60)


def incompressible(size: int) -> str:
    return random.Random(1).randbytes(size // 2).hex()


def of_stream(judge: Judge, stream: str) -> Counter[tuple[int | str, bool]]:
    """How often each fact of the stream is on Kafka, and whether it is large."""
    rows = (it for it in judge.verdict().records if isinstance(it, Rdata) and it.stream == stream)
    return Counter((it.id, len(it.row) > 1000) for it in rows)


def test_too_large(
    sql: psycopg.Connection,
    run: Run,
    judge: Judge,
    admin: AdminClient,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fact above the topic's limit is named once and holds its stream; facts of others, and those above it, are sent
    once. It goes out by itself once the topic takes it."""
    monkeypatch.setattr(run_loop, "FIRST_LIMIT_PAUSE_SECONDS", 0.5)
    monkeypatch.setattr(run_loop, "LONGEST_LIMIT_PAUSE_SECONDS", 1.0)
    limited(admin, topic, 200_000)
    sql.execute("select tidemark.create_stream('small')")
    with capture_logs() as logs:
        relay = run()
        sql.execute("select tidemark.append('orders', '1')")
        sql.execute("select tidemark.append('orders', '1', to_jsonb(%s::text), '2')", [incompressible(500_000)])
        sql.execute("select tidemark.append('orders', to_jsonb(repeat('x', 500000)))")
        sql.execute("select tidemark.append('orders', '4')")
        for number in range(50):
            sql.execute("select tidemark.append('small', to_jsonb(%s::text))", [f"{number:0100}"])
        expected = Counter({(id, False): 1 for id in range(1, 51)})
        eventually(lambda: of_stream(judge, "small") == expected)
        eventually(lambda: of_stream(judge, "orders") == Counter({(1, False): 1, (4, False): 1}))
        time.sleep(3)
        assert of_stream(judge, "small") == expected
        assert of_stream(judge, "orders") == Counter({(1, False): 1, (4, False): 1})
        assert judge.verdict().position("orders", "shop") == 1
        assert judge.verdict().position("small", "shop") == 50
        assert relay.metric("tidemark_relay_oversized_facts", stream="orders") == 2
        named = [
            it
            for it in logs
            if it["event"] == "A record is too large for the Kafka topic; its stream is blocked, other streams go on"
        ]
        assert [(it["stream"], it["id"], it["limit"]) for it in named] == [
            ("orders", 2, 200_000),
            ("orders", 3, 200_000),
        ]
        eventually(lambda: judge.verdict().blocked("orders").startswith("fact 3 is too large for the Kafka topic"))
        assert judge.verdict().blocked("small") == ""
        limited(admin, topic, max(it["bytes"] for it in named))
        eventually(lambda: settled(sql))
        eventually(lambda: judge.verdict().blocked("orders") == "")
    assert of_stream(judge, "small") == expected
    assert judge.verdict().position("orders", "shop") == 4
    assert judge.verdict().rejected == {}
    assert relay.metric("tidemark_relay_oversized_facts", stream="orders") == 0
    assert not any(it["event"] == "Cannot send facts; they stay in the database; trying again" for it in logs)


def test_small_facts_share_no_batch_that_the_topic_refuses(
    sql: psycopg.Connection, run: Run, judge: Judge, admin: AdminClient, topic: str
) -> None:
    """A broker refuses a batch above the limit with every record in it; each of these is far below."""
    limited(admin, topic, 20_000)
    relay = run(most_facts=200)
    sql.execute(
        "select tidemark.append_many('orders', array_agg(to_jsonb(md5(i::text) || md5((-i)::text))))"
        " from generate_series(1, 5000) as i"
    )
    eventually(lambda: settled(sql))
    assert relay.failure is None
    verdict = judge.verdict()
    assert verdict.announced == {"orders": set(range(1, 5001))}
    assert sum(move.facts for move in verdict.effects["orders"].advances) == 5000


def test_a_limit_that_is_lowered_while_the_relay_runs(
    sql: psycopg.Connection, run: Run, judge: Judge, admin: AdminClient, topic: str
) -> None:
    """The broker refuses the large row, and nothing that follows it in the partition: else the last row, with the ID,
    would make a fact look complete that lacks a row. Then the fact is held as any other."""
    relay = run()
    sql.execute("select tidemark.append('orders', '1')")
    eventually(lambda: settled(sql))
    limited(admin, topic, 200_000)
    sql.execute("select tidemark.append('orders', to_jsonb(%s::text), '2')", [incompressible(500_000)])
    eventually(lambda: relay.metric("tidemark_relay_oversized_facts", stream="orders") == 1)
    sql.execute("select tidemark.append('orders', '3')")
    eventually(lambda: of_stream(judge, "orders")[3, False] == 1)
    assert of_stream(judge, "orders") == Counter({(1, False): 1, (3, False): 1})
    assert judge.verdict().position("orders", "shop") == 1
