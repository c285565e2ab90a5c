"""The topic of positions, beside Redis: what consumers see while pipelines are killed and Kafka is away."""

import json
from contextlib import closing

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from tests.fix_pipeline import Site
from tests.waiting import eventually
from tidemark.common.kafka import ErrorListener, PartitionReader
from tidemark.sources.topics import Topics, positions_plan
from tidemark.streaming.wire.records import Join, Rdata, encode_row

KILLS = 2


def records(site: Site, topic: str, isolation: str = "read_committed") -> list[dict[str, object]]:
    """Every value in the topic, in its order."""
    reader = PartitionReader(site.kafka.client_settings(), ErrorListener(""), 30, isolation)
    with closing(reader):
        found = []
        for record in reader.read(topic, 0, 0):
            if record is None:
                break
            found.append(json.loads(record.value() or b""))
            assert (record.key() or b"").decode() == found[-1]["stream"]
        return found


def fact(id: int) -> Rdata:
    return Rdata(stream="orders", writer="shop", epoch=1, id=id, prev=id - 1, row=encode_row(None))


@pytest.mark.slow
def test_positions_in_the_topic_never_go_back(site: Site) -> None:
    """Pipelines are killed while facts arrive. Each consumer, also one that reads uncommitted records, sees every
    stream move forward only, and at the end it has what Redis has."""
    topic = f"{site.database}.positions"
    settings = {"kafka_positions_topic": topic, "kafka_create_topics": "true"}
    site.send(Join(stream="orders", writer="shop", epoch=1, id=0))
    for kill in range(KILLS):
        running = site.start(**settings)
        first = 20 * kill + 1
        site.send(*map(fact, range(first, first + 10)))
        site.reaches("orders", shop=first + 9)
        site.send(*map(fact, range(first + 10, first + 20)))
        running.process.kill()
        running.process.wait(60)
    site.start(**settings)
    site.reaches("orders", shop=20 * KILLS, linear=20 * KILLS)
    last = 20 * KILLS
    wanted = {"stream": "orders", "linear": last, "vector": {"shop": last}, "token": f"m{last}"}
    eventually(lambda: records(site, topic)[-1:] == [wanted], 120, lambda: str(records(site, topic)[-3:]))
    for isolation in ("read_committed", "read_uncommitted"):
        linear = [record["linear"] for record in records(site, topic, isolation)]
        assert linear == sorted(linear)  # type: ignore[type-var]
    assert Topics(site.kafka).describe([topic])[topic].policy == "compact"


def test_a_topic_that_is_not_compacted_is_refused(site: Site) -> None:
    """The message has the command that repairs it."""
    topic = f"{site.database}.positions"
    Topics(site.kafka).create_missing([positions_plan(topic)])
    wrong = ConfigEntry("cleanup.policy", "delete", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[wrong])
    admin = AdminClient(site.kafka.client_settings())
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(60)
    ended = site.refused(kafka_positions_topic=topic)
    assert ended.code == 2
    assert f"--topic {topic} --add-config cleanup.policy=compact" in ended.lines[-1]
