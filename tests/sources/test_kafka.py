"""The connection in librdkafka's and in the JVM's words, and the options of the Spark source."""

import json

import pytest

from sources.kafka import EARLIEST, KafkaConnection, source_options

SECURE = KafkaConnection("k:9093", "SASL_SSL", "SCRAM-SHA-512", "tide", 'a"b\\c', "/etc/ca.pem")


def test_the_password_is_not_in_the_text_of_the_connection() -> None:
    """A connection that lands in a log or an error gives nothing away."""
    assert 'a"b' not in repr(SECURE)


def test_both_dialects_say_the_same() -> None:
    """User, password and CA reach librdkafka as they are, and the JVM quoted inside its JAAS line."""
    client, jvm = SECURE.client(), SECURE.jvm()
    assert client["sasl.password"] == 'a"b\\c'
    assert client["ssl.ca.location"] == jvm["ssl.truststore.location"] == "/etc/ca.pem"
    assert jvm["sasl.jaas.config"] == (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="tide" password="a\\"b\\\\c";'
    )


def test_a_plain_connection_sets_nothing_that_it_does_not_need() -> None:
    """No empty user, password or truststore, which the clients would take for a wish."""
    assert KafkaConnection("k:9092").jvm() == {"bootstrap.servers": "k:9092", "security.protocol": "PLAINTEXT"}
    assert not any(name.startswith(("sasl.", "ssl.")) for name in KafkaConnection("k:9092").client())


def test_the_source_names_every_partition_and_stops_at_lost_records() -> None:
    """Spark gets the subscription, all starting offsets as JSON, and the connection under its own prefix."""
    options = source_options(SECURE, {"f": {1: 7, 0: EARLIEST}, "c": {0: 0}}, 500)
    assert options["subscribe"] == "c,f"
    assert json.loads(options["startingOffsets"]) == {"f": {"0": -2, "1": 7}, "c": {"0": 0}}
    assert options["failOnDataLoss"] == "true"
    assert options["maxOffsetsPerTrigger"] == "500"
    assert options["kafka.bootstrap.servers"] == "k:9093"


@pytest.mark.parametrize(("partitions", "mebibytes"), [(1, 16), (32, 8), (1000, 1)])
def test_what_is_fetched_ahead_does_not_grow_with_the_partitions(partitions: int, mebibytes: int) -> None:
    """Each partition has a consumer with a buffer of its own: many share what the JVM's heap can spare."""
    options = source_options(SECURE, {"f": dict.fromkeys(range(partitions), EARLIEST)}, 500)
    assert options["kafka.max.partition.fetch.bytes"] == str(mebibytes << 20)
