"""Connections to Kafka: one description of a connection, in the two dialects of its clients.

librdkafka (our producers, consumers and admin clients) and the JVM client inside Spark name the same things
differently. This module knows both; it opens no connection and knows nothing of topics' contents.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tidemark.streaming.errors import BadSetting

EARLIEST = -2
"""Spark's word for "the oldest record of the partition" among starting offsets."""

Offsets: TypeAlias = dict[str, dict[int, int]]
"""The next offset to read, by topic and partition; may be `EARLIEST`."""

_SECURITY = "org.apache.kafka.common.security"
_LOGIN_MODULES = {
    "PLAIN": f"{_SECURITY}.plain.PlainLoginModule",
    "SCRAM-SHA-256": f"{_SECURITY}.scram.ScramLoginModule",
    "SCRAM-SHA-512": f"{_SECURITY}.scram.ScramLoginModule",
    "OAUTHBEARER": f"{_SECURITY}.oauthbearer.OAuthBearerLoginModule",
}


@dataclass(frozen=True, slots=True)
class OAuth:
    """Client credentials of OAuth 2: where tokens come from (`token_url`), and who we are there."""

    token_url: str
    client_id: str
    client_secret: str = field(repr=False)
    scope: str | None = None


@dataclass(frozen=True, slots=True)
class KafkaConnection:
    """The brokers' address, and the means to be let in. Files are PEM; without `ca_file` the system's roots count.

    `protocol` is one of PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL; `mechanism` one of PLAIN, SCRAM-SHA-256,
    SCRAM-SHA-512, OAUTHBEARER, and the last needs `oauth` (app/settings.py checks them). With `certificate_file` and
    `key_file` (PKCS#8, without a password) the brokers know us by our certificate.
    """

    bootstrap: str
    protocol: str = "PLAINTEXT"
    mechanism: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    oauth: OAuth | None = None

    def client(self) -> dict[str, str]:
        """Settings of any librdkafka client. Holds the password: never log it."""
        settings = {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": self.protocol,
            "client.id": "tidemark",
            # A broker that is away is reported once, by our own errors, and not on stderr at every attempt.
            "log_level": "2",
            "reconnect.backoff.max.ms": "2000",
        }
        optional = {
            "sasl.mechanism": self.mechanism,
            "sasl.username": self.username,
            "sasl.password": self.password,
            "ssl.ca.location": self.ca_file,
            "ssl.certificate.location": self.certificate_file,
            "ssl.key.location": self.key_file,
        }
        if self.oauth is not None:
            optional |= {
                "sasl.oauthbearer.method": "oidc",
                "sasl.oauthbearer.token.endpoint.url": self.oauth.token_url,
                "sasl.oauthbearer.client.id": self.oauth.client_id,
                "sasl.oauthbearer.client.secret": self.oauth.client_secret,
                "sasl.oauthbearer.scope": self.oauth.scope,
            }
        return settings | {name: value for name, value in optional.items() if value is not None}

    def carried(self) -> dict[str, str]:
        """The same for clients on other hosts, with certificates and keys in place of the names of their files; two
        readings are equal until a secret rotates. Never log it. Raises `BadSetting` for a file that cannot be read.
        """
        settings = self.client()
        for part in ("ca", "certificate", "key"):
            if (path := settings.pop(f"ssl.{part}.location", None)) is not None:
                settings[f"ssl.{part}.pem"] = _pem(path)
        return settings

    def producer(self) -> dict[str, str]:
        """Settings of every producer of ours: nothing lost, doubled or reordered inside a partition."""
        return self.client() | {
            "enable.idempotence": "true",
            "acks": "all",
            # librdkafka's own default (crc32) would send a stream to another partition than Java producers do.
            "partitioner": "murmur2_random",
            "compression.type": "lz4",
            "linger.ms": "5",
        }

    def jvm(self) -> dict[str, str]:
        """The same connection for the JVM's Kafka client, without Spark's `kafka.` prefix. Never log it.

        Certificates and keys are in it, not the names of their files: executors on other hosts need no files, and two
        readings are equal until a secret rotates. Raises `BadSetting` for a file that cannot be used.
        """
        settings = {"bootstrap.servers": self.bootstrap, "security.protocol": self.protocol}
        if self.mechanism is not None:
            settings |= {"sasl.mechanism": self.mechanism, "sasl.jaas.config": self._jaas()}
        if self.oauth is not None:
            settings |= {
                "sasl.login.callback.handler.class": f"{_SECURITY}.oauthbearer.OAuthBearerLoginCallbackHandler",
                "sasl.oauthbearer.token.endpoint.url": self.oauth.token_url,
            }
        if self.ca_file is not None:
            settings |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": _pem(self.ca_file)}
        if self.certificate_file is not None and self.key_file is not None:
            settings |= {
                "ssl.keystore.type": "PEM",
                "ssl.keystore.certificate.chain": _pem(self.certificate_file),
                "ssl.keystore.key": _private_key(self.key_file),
            }
        return settings

    def _jaas(self) -> str:
        if self.oauth is not None:
            options = {"clientId": self.oauth.client_id, "clientSecret": self.oauth.client_secret}
            options |= {} if self.oauth.scope is None else {"scope": self.oauth.scope}
        else:
            options = {"username": self.username or "", "password": self.password or ""}
        module = _LOGIN_MODULES[self.mechanism or ""]
        return f"{module} required {' '.join(f'{name}={_jaas_quoted(text)}' for name, text in options.items())};"


def _pem(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting("Kafka's certificates", f"cannot read {path}: {error}") from None


def _private_key(path: str) -> str:
    key = _pem(path)
    if "BEGIN PRIVATE KEY" not in key:
        raise BadSetting(
            "TIDEMARK_KAFKA_SSL_KEY_FILE",
            f"{path} holds no key in the form PKCS#8, which Spark needs; convert it: openssl pkcs8 -topk8 -nocrypt",
        )
    return key


def _jaas_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


_FETCHED_BYTES = 256 << 20
"""What the consumers of all partitions may hold of what they fetched ahead, about: it is a part of the JVM's heap."""
_FETCHED_BYTES_OF_PARTITION = 1 << 20, 16 << 20
_FETCHING = {
    # 500 rows a poll (the default), 1 MiB a partition and 64 KiB of socket buffer cost a quarter of the source's
    # throughput; so do checksums that TCP and the broker have already checked: docs/engine.md 2 (0.95 to 1.31 M
    # records/s).
    "kafka.max.poll.records": "10000",
    "kafka.fetch.max.bytes": str(64 << 20),
    "kafka.receive.buffer.bytes": str(4 << 20),
    "kafka.check.crcs": "false",
    # Spark asks for the partition's bounds after every poll, on the connection on which the client has by then asked
    # for more records; a broker answers in turn, so that question would wait for the next record, or 500 ms. At 4
    # records/s it took the latency from 210 to 1,050 ms (`python -m tests.bench latency --rate 4`).
    "kafka.fetch.max.wait.ms": "1",
}


def source_options(
    connection: KafkaConnection, starting: Mapping[str, Mapping[int, int]], records_per_batch: int
) -> dict[str, str]:
    """Options of `spark.readStream.format("kafka")` that read the topics of `starting`.

    `starting` names every partition of every topic: Spark refuses to start where one is left out. It counts only
    while the checkpoint is empty; a checkpoint brings its own offsets.
    """
    least, most = _FETCHED_BYTES_OF_PARTITION
    partitions = sum(map(len, starting.values()))
    return {
        "subscribe": ",".join(sorted(starting)),
        "startingOffsets": json.dumps(
            {topic: {str(p): offset for p, offset in sorted(by.items())} for topic, by in sorted(starting.items())}
        ),
        # Records that went before they were read must stop the query and not be passed over (docs/design.md 3).
        "failOnDataLoss": "true",
        # A writer may use Kafka's transactions: what it aborted never happened, and is no evidence
        # (docs/design.md, rule 1).
        "kafka.isolation.level": "read_committed",
        # Bounds the memory of a batch, and the time that a stop or a takeover waits for one.
        "maxOffsetsPerTrigger": str(records_per_batch),
        "kafka.max.partition.fetch.bytes": str(max(least, min(most, _FETCHED_BYTES // partitions))),
        **_FETCHING,
        **{f"kafka.{name}": value for name, value in connection.jvm().items()},
    }
