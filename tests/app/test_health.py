"""How `tidemark status` tells of the pipeline from which positions come."""

import re
import shlex
import socket
import subprocess
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.sinks.given import advance, batch, stream
from tests.waiting import eventually
from tidemark.app.diagnosis import health
from tidemark.app.diagnosis.health import PipelineCondition
from tidemark.app.pipeline import kafka_lag, metrics
from tidemark.app.pipeline.kafka_lag import LagMonitor
from tidemark.app.pipeline.stream_metrics import StreamCollector
from tidemark.app.stack.processes import KafkaServer
from tidemark.app.stack.up import BROKER, JarList, fetch_jars
from tidemark.common.errors import Unavailable
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.status import Condition, LaggingPartition
from tidemark.sinks.postgres.store import Postgres, RememberedSetup
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import TopicPlan, Topics


def condition(owner: str | None = "host:7", lease: float = 9.0, quiet: float | None = 1.0) -> Condition:
    return Condition(owner, lease, quiet, [])


@pytest.mark.parametrize(
    ("how", "problems"),
    [
        (PipelineCondition(condition(), {("facts", 0): 0}, None), []),
        (PipelineCondition(condition(quiet=4000), {("facts", 0): 0}, None), []),
        (PipelineCondition(condition(), {("facts", 0): 900}, None), []),
        (
            PipelineCondition(condition(quiet=4000), {("facts", 0): 2, ("facts", 1): 3}, None),
            ["no batch for 66 min, although the Kafka lag is 5 records"],
        ),
        (
            PipelineCondition(condition(lease=0.0), {}, None),
            ["no pipeline is active; the last active pipeline was host:7"],
        ),
        (PipelineCondition(condition(None, 0.0, None), None, None), ["no pipeline has ever used this database"]),
        (
            PipelineCondition(condition(), {("facts", 1): -4}, None),
            ["the end of partition 1 of Kafka topic facts is 4 records below the committed offset: records were lost"],
        ),
        (
            PipelineCondition(condition(), {("facts", 0): 0}, None, "Redis is away"),
            ["Redis cannot be used from here, so positions may not be published: Redis is away"],
        ),
        (PipelineCondition(condition(), None, "gone"), ["the Kafka lag is unknown: gone"]),
    ],
)
def test_what_is_no_problem_and_what_is(how: PipelineCondition, problems: list[str]) -> None:
    """A quiet stream has none, nor a pipeline that is at work; a dead one has, however good its positions look."""
    assert how.problems() == problems
    assert how.to_json()["problems"] == problems


def test_a_problem_shows_a_time_as_every_verb_does() -> None:
    """In UTC with milliseconds, also if the time has another offset."""
    since = datetime(2026, 11, 27, 20, 0, 0, 5000, timezone(timedelta(hours=1)))
    lagging = [LaggingPartition("facts", 1, 5, since, 40, since)]
    how = PipelineCondition(Condition("host:7", 9.0, 1.0, [], lagging=lagging), {("facts", 1): 5}, None)
    assert "at offset 40 since 2026-11-27 19:00:00.005Z; 5 records cannot be read" in how.problems()[0]


def test_the_line_says_who_when_and_how_much() -> None:
    """One line of all that positions rest on; what is not known is not called 0."""
    well = PipelineCondition(condition(), {("facts", 0): 2}, None)
    assert well.line() == "pipeline: active on host:7, last batch 1 s ago, Kafka lag 2 records"
    dead = PipelineCondition(condition(lease=0.0, quiet=None), None, "gone")
    assert dead.line() == "pipeline: not running, no batch yet, Kafka lag unknown"


def test_lost_records_of_one_partition_do_not_reduce_the_lag_of_the_others() -> None:
    """Partition 1 ends below its committed offset. The Kafka lag is that of partition 0."""
    lossy = PipelineCondition(condition(quiet=4000), {("facts", 0): 3, ("facts", 1): -500}, None)
    assert lossy.unread_records == 3
    assert lossy.line().endswith("Kafka lag 3 records")
    assert lossy.problems()[1:] == ["no batch for 66 min, although the Kafka lag is 3 records"]
    assert lossy.to_json()["records_waiting"] == 3


def test_partitions_with_lag_are_shown_with_their_age() -> None:
    """The three that wait longest, each in a line; the number of the others in one."""
    now = datetime(2026, 11, 27, 20, 0, 0, tzinfo=UTC)

    def lag(partition: int, records: int, seconds: int) -> LaggingPartition:
        return LaggingPartition("facts", partition, records, now - timedelta(seconds=seconds))

    lagging = [lag(0, 4, 30), lag(1, 1, 900), lag(2, 0, 60), lag(3, 9, 30), lag(4, 9, 20)]
    how = PipelineCondition(Condition("host:7", 9.0, 1.0, [], lagging=lagging), {("facts", 1): 23}, None)
    assert how.lines(now) == [
        how.line(),
        "  partition 1 of facts: lag 1 record, the oldest has been unread for 15 min",
        "  partition 2 of facts: Kafka has not answered for 60 s",
        "  partition 3 of facts: lag 9 records, the oldest has been unread for 30 s",
        "  and 2 more partitions with lag",
    ]
    well = PipelineCondition(condition(), {("facts", 0): 2}, None)
    assert well.lines(now) == [well.line()]


def test_kafka_is_asked_what_nobody_read(
    store: Postgres, lease: Lease, kafka: KafkaServer, redis_url: str, prefix: str
) -> None:
    """Its end against the offset that the last batch left; more than it has is told, and so is a
    Kafka or a Redis that is gone."""
    connection = KafkaConnection(kafka.bootstrap_servers)
    Topics(connection).create_missing([TopicPlan(prefix, 1, 1000)])
    assert health.read_condition(store, connection, redis_url).unread_by_partition is None
    store.remember_setup(RememberedSetup(shard_count=1, topics={prefix: ("id", 1)}))
    store.set_offsets({prefix: {0: 0}})
    store.apply(batch(1, stream("s", advance("w", 0, 3)), token=lease.token))
    found = health.read_condition(store, connection, redis_url, 30.0)
    assert (found.unread_by_partition, found.kafka, found.condition.owner) == ({(prefix, 0): 0}, None, "test")
    store.set_offsets({prefix: {0: 5}})
    assert health.read_condition(store, connection, redis_url, 30.0).unread_by_partition == {(prefix, 0): -5}
    away = health.read_condition(store, KafkaConnection("127.0.0.1:1"), "redis://127.0.0.1:1", 0.5)
    assert away.unread_by_partition is None
    assert re.search(r"127\.0\.0\.1:1.* \(waited \d+ s\)$", str(away.kafka))
    assert "127.0.0.1:1" in str(away.redis)


def test_a_kafka_that_is_slow_is_asked_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Kafka at whose address nothing listens is not."""
    asked: list[float] = []

    class Slow:
        def __init__(self, kafka: KafkaConnection, timeout: float) -> None:
            asked.append(timeout)

        def end_offsets(self, _: object) -> dict[tuple[str, int], int]:
            if len(asked) == 1:
                raise Unavailable("Kafka", "127.0.0.1:9092", "Timed out")
            return {("facts", 0): 7}

    monkeypatch.setattr(health, "Topics", Slow)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert health._end_offsets(KafkaConnection(f"127.0.0.1:{port}"), {"facts": 1}, 3.0) == {("facts", 0): 7}
    assert asked == [3.0, 3.0]
    asked.clear()
    with pytest.raises(Unavailable):
        health._end_offsets(KafkaConnection("127.0.0.1:1"), {"facts": 1}, 3.0)
    assert asked == [3.0]


def test_a_transaction_that_hangs_is_named_with_the_commands_that_end_it(
    store: Postgres,
    kafka: KafkaServer,
    redis_url: str,
    prefix: str,
    java: str,
    jars: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else shows it: no gap, no stream. Both commands are executed as `status` prints them, and end it."""
    monkeypatch.setattr(kafka_lag, "CHECK_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(kafka_lag, "LAGGING_SECONDS", 0.2)
    connection = KafkaConnection(kafka.bootstrap_servers)
    topics = Topics(connection)
    topics.create_missing([TopicPlan(prefix, 1, 1000)])
    producer = Producer({**connection.client_settings(), "transactional.id": prefix})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(prefix, b"{}", on_delivery=lambda *_: None)
    producer.flush(30)
    board = StreamCollector()
    board.read_offsets[prefix, 0] = 0

    def blocked() -> list[str]:
        return [
            it for it in health.read_condition(store, connection, redis_url, 30.0).problems() if "transaction" in it
        ]

    with LagMonitor(topics, topics.identities([prefix]), board, store.note_lagging_partitions).running():
        eventually(blocked, 30, lambda: "the transaction that hangs")
        [problem] = blocked()
        assert f"an open Kafka transaction blocks partition 0 of {prefix} at offset 0 since " in problem
        assert "; 1 record cannot be read" in problem
        found = re.findall(
            r"kafka-transactions\.sh ([^:.]+(?:[:.][^:. ]+)+ (?:describe-producers|abort) [^.]+)", problem
        )
        assert [words.split()[2] for words in found] == ["describe-producers", "abort"]
        described, _ = (_kafka_transactions(java, jars, words.removesuffix(". If the")) for words in found)
        assert "CurrentTransactionStartOffset" in described.replace(" ", "")
        eventually(lambda: not blocked(), 30, lambda: "the end of the transaction")
    assert metrics.KAFKA_BLOCKED_SECONDS.labels(prefix, 0)._value.get() == 0


def _kafka_transactions(java: str, jars: Path, words: str) -> str:
    """What Kafka's script runs, with the arguments of a command that was printed."""
    description = Path(__file__).parents[1] / "services" / "ivy-kafka-tools.xml"
    fetch_jars(jars, java, say=lambda _: None, jar_list=JarList(description, ("kafka-tools",)))
    command = [
        java,
        "-cp",
        f"{jars / BROKER}/*:{jars}/kafka-tools/*",
        "org.apache.kafka.tools.TransactionsCommand",
        *shlex.split(words),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout
