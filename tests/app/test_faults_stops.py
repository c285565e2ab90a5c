"""What only a person can mend: one line that says what and how, exit code 2, no stack trace; and the mending works."""

import re
from collections.abc import Callable, Iterator, Sequence

import psycopg
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions

from tests.app.running import PATIENCE
from tests.fix_pipeline import PARTITIONS, Site
from tests.waiting import eventually
from tidemark.sinks.postgres.database import SCHEMA
from tidemark.sources.topics import Topics
from tidemark.streaming.wire.records import Join, Rdata, Record, encode, encode_row

pytestmark = pytest.mark.slow

NOTHING = encode_row({})


def admin(site: Site) -> AdminClient:
    return AdminClient(site.kafka.client_settings())


def fact(id: int, prev: int, epoch: int = 1) -> Record:
    return Rdata(stream="orders", writer="shop", epoch=epoch, prev=prev, id=id, row=NOTHING)


def wrong(url: str) -> str:
    """The same address with a login that nobody has."""
    return re.sub(r"://([^@]*@)?", "://nobody:wrong@", url)


def compacted(site: Site) -> dict[str, object]:
    policy = ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, site.facts, incremental_configs=[policy])
    kafka = admin(site)
    kafka.incremental_alter_configs([resource])[resource].result(30)
    return {}


def schema(difference: int) -> Callable[[Site], dict[str, object]]:
    def change(site: Site) -> dict[str, object]:
        site.sql("delete from tidemark.schema_version where version > %s", SCHEMA.target_version + difference)
        wanted = SCHEMA.target_version + difference
        site.sql(
            "update tidemark.schema_version set version = %s, works_with = %s where version = %s",
            wanted,
            wanted,
            SCHEMA.target_version,
        )
        return {}

    return change


@pytest.mark.parametrize(
    ("arrange", "named"),
    [
        (lambda site: {"kafka_facts_topic": "absent"}, ["topic absent does not exist", "TIDEMARK_KAFKA_CREATE_TOPICS"]),
        (compacted, ["cleanup.policy=compact", "--add-config cleanup.policy=delete"]),
        (lambda site: {"postgres_dsn": wrong(site.dsn)}, ["Postgres at", "password", "TIDEMARK_POSTGRES_DSN"]),
        (lambda site: {"postgres_dsn": site.dsn + "_no"}, ["Postgres at", "does not exist", "TIDEMARK_POSTGRES_DSN"]),
        (lambda site: {"redis_url": wrong(site.redis_url)}, ["Redis at", "password", "TIDEMARK_REDIS_URL"]),
        (
            schema(-1),
            [f"schema version {SCHEMA.target_version - 1}", f"needs {SCHEMA.target_version}", "tidemark migrate"],
        ),
        (schema(+1), [f"schema version {SCHEMA.target_version + 1}", f"needs {SCHEMA.target_version}", "upgrade"]),
        (lambda site: {"spark_jars": "/nowhere"}, ["TIDEMARK_SPARK_JARS", "/nowhere"]),
        (lambda site: {"shards": "many"}, ["TIDEMARK_SHARDS", "many"]),
        (
            lambda site: {
                "kafka_security_protocol": "SASL_PLAINTEXT",
                "kafka_sasl_mechanism": "PLAIN",
                "kafka_username": "tide",
                "kafka_password": "wrong",
            },
            ["Kafka at", "password"],
        ),
    ],
    ids=[
        "topic missing",
        "topic compacted",
        "Postgres password",
        "Postgres database",
        "Redis password",
        "schema too old",
        "schema too new",
        "no jars",
        "no number",
        "Kafka password",
    ],
)
def test_it_says_in_one_line_what_is_wrong_and_how_to_mend_it(
    site: Site, arrange: Callable[[Site], dict[str, object]], named: list[str]
) -> None:
    """Exit code 2 and a single line; it holds the names that a person looks for, and never a password."""
    ended = site.refused(**arrange(site))
    assert ended.code == 2, ended.lines
    (line,) = ended.lines
    assert line.startswith("Error: ")
    assert all(name in line for name in named), line
    assert "wrong" not in line
    assert str(psycopg.conninfo.conninfo_to_dict(site.dsn)["password"]) not in line


def test_each_disagreement_stops_until_it_is_accepted_and_is_then_mended(site: Site) -> None:
    """Rules 1, 5 and 9: records gone before they were read, another shard count, and another partition count while it
    runs and afterwards: each stops the pipeline and names what to accept. Accepted once, it need not be again; what
    was lost holds as a gap until the writer joins again, and then counts as unseen."""
    site.send(Join(stream="orders", writer="shop", epoch=1, id=0), *(fact(id, id - 1) for id in range(1, 6)))
    first = site.start()
    site.reaches("orders", shop=5, linear=5)
    first.terminate()

    site.send(*(fact(id, id - 1) for id in range(6, 9)))
    partition, end = next(iter(ends(site)))
    kafka = admin(site)
    for future in kafka.delete_records([TopicPartition(site.facts, partition, end)]).values():
        future.result(30)
    site.send(fact(9, 8))
    refuses(site, f"{site.facts}[{partition}]", f"begins at {end}", "--accept loss")
    refuses(site, "created with 16 shards", "TIDEMARK_SHARDS is 8", "--accept shards", accept=["loss"], shards=8)
    second = site.start("--accept", "loss", "--accept", "shards", shards=8, log_level="info")
    eventually(
        lambda: site.sql("select 1 from tidemark.stream_gaps where (low, top) = (5, 8)"), PATIENCE, lambda: "the gap"
    )
    assert site.positions("orders") == {"linear": 5, "shop": 5}
    site.send(Join(stream="orders", writer="shop", epoch=2, id=9))
    site.reaches("orders", shop=9, linear=9)
    assert site.sql("select facts, empty, unseen from tidemark.position_advances where id = 9") == [(1, 0, 3)]

    kafka.create_partitions([NewPartitions(site.facts, PARTITIONS + 1)])[site.facts].result(30)
    producer = Producer(site.kafka.producer_settings())
    producer.produce(site.facts, partition=PARTITIONS, key=b"orders", value=encode(fact(10, 9, epoch=2)))
    assert producer.flush(30) == 0
    assert second.ends() == 2
    changed = f"had {PARTITIONS} partitions and has {PARTITIONS + 1}"
    assert changed in second.log().splitlines()[-1]
    assert "Traceback" not in second.log()
    refuses(site, changed, "--accept partitions", shards=8)
    site.start("--accept", "partitions", shards=8)
    site.send(Join(stream="orders", writer="shop", epoch=3, id=10), fact(11, 10, epoch=3))
    site.reaches("orders", shop=11, linear=11)


def ends(site: Site) -> Iterator[tuple[int, int]]:
    """Partition and next offset to write of those that hold anything."""
    heads = Topics(site.kafka).end_offsets({site.facts: PARTITIONS})
    return ((partition, head) for (_, partition), head in heads.items() if head)


def refuses(site: Site, *named: str, accept: Sequence[str] = (), **changed: object) -> None:
    ended = site.refused(*(word for what in accept for word in ("--accept", what)), **changed)
    assert ended.code == 2, ended.lines
    (line,) = ended.lines
    assert all(name in line for name in named), line
