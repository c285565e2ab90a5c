"""Every way to be let in by Kafka, on a broker that has them all."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from tests.fix_kafka import PASSWORD, USER, GuardedKafka, with_wrong_secret
from tests.fix_pipeline import Site, made_site
from tests.fix_tls import Authority
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import RedisServer
from tidemark.common.errors import Refused
from tidemark.common.kafka import ErrorListener, PartitionReader
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.producer import RecordProducer
from tidemark.sources.topics import TopicPlan, Topics
from tidemark.streaming.ingest.ranges import EndOffsets, RangeReader
from tidemark.streaming.ingest.record_batch import PlannedRange
from tidemark.streaming.wire.records import Rdata, Topic, encode, encode_row

WAYS = ["scram", "mutual", "tokens"]


@pytest.fixture(params=WAYS)
def connection(request: pytest.FixtureRequest, guarded_kafka: GuardedKafka) -> KafkaConnection:
    found: KafkaConnection = getattr(guarded_kafka, request.param)
    return found


def test_all_clients_are_let_in(connection: KafkaConnection, prefix: str) -> None:
    """Those of the driver, and those of a worker of Spark that has no file of ours, with one description of the
    connection."""
    Topics(connection).create_missing([TopicPlan(prefix, 1, 3_600_000)])
    producer = RecordProducer(connection, prefix, give_up_after=60)
    producer.send("s", b"hello")
    producer.deliver(60)
    carried = connection.portable_settings()
    assert not any(name.endswith(".location") for name in carried)
    assert EndOffsets(carried).fetch({prefix: {0: 0}}) == {prefix: {0: 1}}
    reader = RangeReader(carried, {Topic.FACTS: prefix}, patience=60)
    assert [part.values.tobytes() for _, part in reader.read([PlannedRange(Topic.FACTS, 0, 0, 1)])] == [b"hello"]
    reader.close()


def test_who_cannot_prove_who_he_is_is_refused_in_one_line(connection: KafkaConnection, stranger: Authority) -> None:
    """A wrong password, client secret or certificate stops us with what to check, long before a time limit."""
    with pytest.raises(Refused, match=r"; check .*(password|secret|certificate)") as caught:
        Topics(with_wrong_secret(connection, stranger), timeout=60).describe(["any"])
    assert "\n" not in str(caught.value)


@pytest.fixture
def _no_groups(guarded_kafka: GuardedKafka) -> Iterator[None]:
    """Our user may use no consumer group."""
    admin = AdminClient({"bootstrap.servers": guarded_kafka.bootstrap_servers})
    nobody = (ResourceType.GROUP, "*", ResourcePatternType.LITERAL, f"User:{USER}", "*", AclOperation.ALL)
    for made in admin.create_acls([AclBinding(*nobody, AclPermissionType.DENY)]).values():
        made.result(60)
    yield
    for gone in admin.delete_acls([AclBindingFilter(*nobody, AclPermissionType.DENY)]).values():
        gone.result(60)


@pytest.mark.usefixtures("_no_groups")
def test_a_user_who_may_use_no_group_reads(guarded_kafka: GuardedKafka, prefix: str) -> None:
    """What docs/how-to/deploy.md asks of brokers is enough."""
    connection = guarded_kafka.scram
    Topics(connection).create_missing([TopicPlan(prefix, 1, 3_600_000)])
    producer = RecordProducer(connection, prefix, give_up_after=60)
    for number in range(3):
        producer.send("s", b"%d" % number)
        producer.deliver(60)
    ends, reader = (
        EndOffsets(connection.portable_settings()),
        RangeReader(connection.portable_settings(), {Topic.FACTS: prefix}, patience=60),
    )
    assert ends.fetch({prefix: {0: 0}}) == {prefix: {0: 3}}
    for number in range(3):
        ((_, part),) = reader.read([PlannedRange(Topic.FACTS, 0, number, number + 1)])
        assert part.values.tobytes() == b"%d" % number
        reader.stop_fetching()
    reader.close()
    again = PartitionReader(connection.client_settings(), ErrorListener(connection.bootstrap), 60, "read_committed")
    assert [message and message.value() for message in again.read(prefix, 0, 0)] == [b"0", b"1", b"2", None]
    again.close()


def test_a_reader_that_cannot_prove_who_it_is_says_so(connection: KafkaConnection, stranger: Authority) -> None:
    """In Spark's workers as in the driver, and as soon."""
    wrong = with_wrong_secret(connection, stranger).portable_settings()
    with pytest.raises(Refused, match=r"; check .*(password|secret|certificate)"):
        EndOffsets(wrong, patience=60).fetch({"any": {0: 0}})
    reader = RangeReader(wrong, {Topic.FACTS: "any"}, patience=60)
    with pytest.raises(Refused, match=r"; check .*(password|secret|certificate)"):
        list(reader.read([PlannedRange(Topic.FACTS, 0, 0, 1)]))
    reader.close()


@pytest.mark.parametrize("way", ["scram", "mutual"])
def test_brokers_of_another_authority_are_not_talked_to(
    guarded_kafka: GuardedKafka, way: str, stranger: Authority
) -> None:
    """Brokers whose certificate we cannot verify get no password, and we say which file to check."""
    connection: KafkaConnection = getattr(guarded_kafka, way)
    with pytest.raises(Refused, match="CA file"):
        Topics(replace(connection, ca_file=str(stranger.ca_file)), timeout=60).describe(["any"])


@pytest.fixture
def guarded_site(
    guarded_kafka: GuardedKafka,
    postgres: PostgresServer,
    redis_server: RedisServer,
    warm_jvm: None,
    tmp_path: Path,
) -> Iterator[Site]:
    """A site whose pipelines log in with SCRAM over TLS, the password in a file."""
    with made_site(guarded_kafka, postgres, redis_server, tmp_path) as plain:
        scram = guarded_kafka.scram
        (tmp_path / "password").write_text(PASSWORD)
        secured = {
            "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": scram.bootstrap,
            "TIDEMARK_KAFKA_SECURITY_PROTOCOL": scram.protocol,
            "TIDEMARK_KAFKA_SASL_MECHANISM": str(scram.mechanism),
            "TIDEMARK_KAFKA_USERNAME": USER,
            "TIDEMARK_KAFKA_PASSWORD_FILE": str(tmp_path / "password"),
            "TIDEMARK_KAFKA_CA_FILE": str(scram.ca_file),
        }
        yield replace(plain, variables={**plain.variables, **secured})


def sender(kafka: GuardedKafka, topic: str) -> Callable[[int], None]:
    """Sends facts of `shop` by the port that is open to all."""
    producer = RecordProducer(KafkaConnection(kafka.bootstrap_servers), topic, give_up_after=60)

    def send(id: int) -> None:
        producer.send("orders", encode(Rdata(stream="orders", writer="shop", id=id, row=encode_row({}))))
        producer.deliver(60)

    return send


def test_a_pipeline_takes_up_a_new_password_by_itself(
    guarded_site: Site, guarded_kafka: GuardedKafka, tmp_path: Path
) -> None:
    """When the file changes the query starts anew with what it holds, in the same process, and goes on."""
    send = sender(guarded_kafka, guarded_site.facts)
    running = guarded_site.start().ready()
    send(1)
    guarded_site.reaches("orders", shop=1)
    try:
        guarded_kafka.set_password("another")
        (tmp_path / "password").write_text("another")
        running.says("the query starts again: a secret for Kafka changed")
        running.says("The query runs", times=2)
        send(2)
        guarded_site.reaches("orders", shop=2)
        running.terminate()
    finally:
        guarded_kafka.set_password(PASSWORD)


def test_a_wrong_password_ends_a_pipeline_with_one_line(guarded_site: Site, tmp_path: Path) -> None:
    """Exit code 2, and what to check."""
    (tmp_path / "password").write_text("wrong")
    ended = guarded_site.refused()
    assert ended.code == 2
    assert len(ended.lines) == 1
    assert "check the user name, the password" in ended.lines[0]
