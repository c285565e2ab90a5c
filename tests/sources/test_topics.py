"""What a real broker says of topics, and what it says when it does not let us in."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import Producer, TopicCollection
from confluent_kafka.admin import AdminClient, NewTopic

from tidemark.app.stack.processes import KafkaServer, free_port
from tidemark.common.errors import Refused, TopicMissing, Unavailable, WrongCleanupPolicy
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import Partition, TopicPlan, Topics, require_policy, topic_plans


def test_missing_topics_are_made_once_with_the_planned_settings(connection: KafkaConnection, prefix: str) -> None:
    """A second call makes nothing; facts get their partitions, and no topic is compacted."""
    topics = Topics(connection)
    wanted = topic_plans(f"{prefix}.facts", f"{prefix}.control", f"{prefix}.dead", partitions=3)
    assert topics.create_missing(wanted) == [plan.name for plan in wanted]
    assert topics.create_missing(wanted) == []
    found = topics.describe(plan.name for plan in wanted)
    require_policy(found.values())
    assert [len(topic.partitions) for topic in found.values()] == [3, 1, 1]


def test_the_ends_of_a_partition_follow_what_is_written(connection: KafkaConnection, prefix: str) -> None:
    """`end` and `heads` are the offset of the next record to be written."""
    topics = Topics(connection)
    topics.create_missing([TopicPlan(prefix, 2, 1000)])
    producer = Producer(connection.producer_settings())
    for _ in range(3):
        producer.produce(prefix, partition=1, value=b"x")
    producer.flush(60)
    assert topics.describe([prefix])[prefix].partitions == (Partition(0, 0), Partition(0, 3))
    assert topics.end_offsets({prefix: 2}) == {(prefix, 0): 0, (prefix, 1): 3}


def test_a_topic_made_anew_has_another_id(connection: KafkaConnection, prefix: str) -> None:
    """Its name and its partition count may be the same: only the ID tells."""
    topics = Topics(connection)
    plan = [TopicPlan(prefix, 1, 1000)]
    topics.create_missing(plan)
    before = topics.describe([prefix])[prefix]
    admin = AdminClient(connection.client_settings())
    admin.delete_topics([prefix], operation_timeout=60)[prefix].result()
    while not _gone(admin, prefix):
        pass
    topics.create_missing(plan)
    after = topics.describe([prefix])[prefix]
    assert after.partitions == before.partitions
    assert after.id != before.id


def _gone(admin: AdminClient, name: str) -> bool:
    return admin.describe_topics(TopicCollection([name]))[name].exception() is not None


def test_a_compacted_topic_is_found_out(connection: KafkaConnection, prefix: str) -> None:
    """The policy comes from the broker, not from what we would have made."""
    admin = AdminClient(connection.client_settings())
    admin.create_topics([NewTopic(prefix, 1, config={"cleanup.policy": "compact"})])[prefix].result()
    topics = Topics(connection)
    assert topics.create_missing([TopicPlan(prefix, 1, 1000)]) == []
    with pytest.raises(WrongCleanupPolicy):
        require_policy(topics.describe([prefix]).values())


def test_of_several_that_start_at_once_one_made_the_topic(connection: KafkaConnection, prefix: str) -> None:
    """All ask for it before any has made it: the others go on with what is there, and do not call it theirs."""
    all_asked = threading.Barrier(4)

    def wanted() -> Iterator[TopicPlan]:
        yield TopicPlan(prefix, 1, 1000)
        all_asked.wait(60)

    with ThreadPoolExecutor(4) as several:
        started = [several.submit(Topics(connection).create_missing, wanted()) for _ in range(4)]
        assert sorted(one.result() for one in started) == [[], [], [], [prefix]]


def test_a_missing_topic_is_named(connection: KafkaConnection, prefix: str) -> None:
    """Describing never makes a topic, and says which one is not there."""
    with pytest.raises(TopicMissing, match=prefix):
        Topics(connection).describe([prefix])


def test_a_description_of_no_topic_asks_nobody() -> None:
    """A pipeline without a positions topic describes an empty list; no broker is there."""
    assert Topics(KafkaConnection("127.0.0.1:1"), timeout=0.1).describe([]) == {}


def test_a_broker_that_is_away_is_waited_for() -> None:
    """Nobody listens: the error asks for another try and says why the connection failed."""
    topics = Topics(KafkaConnection(f"127.0.0.1:{free_port()}"), timeout=1)
    with pytest.raises(Unavailable, match="refused"):
        topics.describe(["any"])


def test_a_broker_that_came_back_is_asked_as_if_it_had_never_gone(
    kafka: KafkaServer, connection: KafkaConnection, prefix: str
) -> None:
    """While it is away no offset is made up; once it answers, its offsets are known at once and not minutes later."""
    topics = Topics(connection, timeout=2)
    topics.create_missing([TopicPlan(prefix, 2, 1000)])
    assert _eventual_heads(topics, prefix) == {(prefix, 0): 0, (prefix, 1): 0}
    kafka.stop()
    try:
        for _ in range(2):
            with pytest.raises(Unavailable):
                topics.end_offsets({prefix: 2})
    finally:
        kafka.start()
    assert _eventual_heads(topics, prefix) == {(prefix, 0): 0, (prefix, 1): 0}


def _eventual_heads(topics: Topics, name: str) -> dict[tuple[str, int], int]:
    """A broker needs a moment before it leads its partitions."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return topics.end_offsets({name: 2})
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def test_a_refused_login_needs_a_person_and_is_told_at_once(kafka: KafkaServer) -> None:
    """A login that the broker does not take ends the request long before its time limit."""
    wrong = KafkaConnection(kafka.bootstrap_servers, "SASL_PLAINTEXT", "PLAIN", "tide", "wrong")
    with pytest.raises(Refused, match="password"):
        Topics(wrong, timeout=60).describe(["any"])


def test_an_unreadable_ca_file_needs_a_person() -> None:
    """A connection that cannot even be set up is not worth waiting for."""
    with pytest.raises(Refused, match="CA file"):
        Topics(KafkaConnection("127.0.0.1:1", "SSL", ca_file="/does/not/exist.pem"))
