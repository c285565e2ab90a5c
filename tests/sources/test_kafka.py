"""The connection in librdkafka's words."""

from pathlib import Path

import pytest

from tidemark.common.errors import BadSetting
from tidemark.sources.kafka import KafkaConnection

SECURE = KafkaConnection("k:9093", "SASL_SSL", "SCRAM-SHA-512", "tide", 'a"b\\c')


def test_the_password_is_not_in_the_text_of_the_connection() -> None:
    """A connection that lands in a log or an error gives nothing away, and the client has the password as it is."""
    assert 'a"b' not in repr(SECURE)
    assert SECURE.client_settings()["sasl.password"] == 'a"b\\c'


def test_certificates_travel(tmp_path: Path) -> None:
    """Executors on other hosts have no files of ours; clients in the driver have."""
    contents = ["ca", "chain", "-----BEGIN PRIVATE KEY-----"]
    files = [tmp_path / str(number) for number in range(3)]
    for file, content in zip(files, contents, strict=True):
        file.write_text(content)
    ca, certificate, key = map(str, files)
    connection = KafkaConnection("k:9093", "SSL", ca_file=ca, certificate_file=certificate, key_file=key)
    assert connection.client_settings()["ssl.key.location"] == key
    carried = connection.portable_settings()
    assert [carried[f"ssl.{part}.pem"] for part in ("ca", "certificate", "key")] == contents
    files[0].write_text("another")
    assert connection.portable_settings() != carried


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """With its path, before any broker is asked."""
    with pytest.raises(BadSetting, match=r"cannot read .*nowhere"):
        KafkaConnection("k:9093", "SSL", ca_file=str(tmp_path / "nowhere")).portable_settings()


def test_a_plain_connection_sets_nothing_that_it_does_not_need() -> None:
    """No empty user, password or certificate, which the client would take for a wish."""
    assert not any(name.startswith(("sasl.", "ssl.")) for name in KafkaConnection("k:9092").portable_settings())
