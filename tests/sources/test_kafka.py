"""The connection in librdkafka's and in the JVM's words, and the options of the Spark source."""

import json
from pathlib import Path

import pytest

from tidemark.sources.kafka import EARLIEST, KafkaConnection, source_options
from tidemark.streaming.errors import BadSetting

SECURE = KafkaConnection("k:9093", "SASL_SSL", "SCRAM-SHA-512", "tide", 'a"b\\c')


def test_the_password_is_not_in_the_text_of_the_connection() -> None:
    """A connection that lands in a log or an error gives nothing away."""
    assert 'a"b' not in repr(SECURE)


def test_both_dialects_say_the_same() -> None:
    """User and password reach librdkafka as they are, and the JVM quoted inside its JAAS line."""
    client, jvm = SECURE.client(), SECURE.jvm()
    assert client["sasl.password"] == 'a"b\\c'
    assert jvm["sasl.jaas.config"] == (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="tide" password="a\\"b\\\\c";'
    )


def test_certificates_travel_with_the_jvms_settings(tmp_path: Path) -> None:
    """Executors on other hosts have no files of ours; librdkafka in the driver has."""
    contents = ["ca", "chain", "-----BEGIN PRIVATE KEY-----"]
    files = [tmp_path / str(number) for number in range(3)]
    for file, content in zip(files, contents, strict=True):
        file.write_text(content)
    ca, certificate, key = map(str, files)
    connection = KafkaConnection("k:9093", "SSL", ca_file=ca, certificate_file=certificate, key_file=key)
    assert connection.client()["ssl.key.location"] == key
    jvm = connection.jvm()
    named = ("truststore.certificates", "keystore.certificate.chain", "keystore.key")
    assert [jvm[f"ssl.{name}"] for name in named] == contents
    carried = connection.carried()
    assert [carried[f"ssl.{part}.pem"] for part in ("ca", "certificate", "key")] == contents
    files[0].write_text("another")
    assert connection.jvm() != jvm
    assert connection.carried() != carried


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """With its path, before any broker is asked."""
    with pytest.raises(BadSetting, match=r"cannot read .*nowhere"):
        KafkaConnection("k:9093", "SSL", ca_file=str(tmp_path / "nowhere")).jvm()


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
