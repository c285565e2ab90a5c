"""How Tidemark reaches Kafka: one description of the connection, spoken in two dialects.

librdkafka (our producers, consumers and admin clients) and the JVM client inside Spark name the same things
differently. This module knows both; it opens no connection and knows nothing of topics' contents.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

EARLIEST = -2
"""Spark's word for "the oldest record of the partition" among starting offsets."""

Offsets: TypeAlias = dict[str, dict[int, int]]
"""The next offset to read, by topic and partition; may be `EARLIEST`."""

_LOGIN_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}


@dataclass(frozen=True, slots=True)
class KafkaConnection:
    """Where the brokers are and how to be let in. `ca_file` is a PEM file; without it the system's roots count.

    `protocol` is one of PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL; `mechanism` one of PLAIN, SCRAM-SHA-256,
    SCRAM-SHA-512 (app/settings.py checks both).
    """

    bootstrap: str
    protocol: str = "PLAINTEXT"
    mechanism: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None

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
        }
        return settings | {name: value for name, value in optional.items() if value is not None}

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
        """The same connection for the JVM's Kafka client, without Spark's `kafka.` prefix."""
        settings = {"bootstrap.servers": self.bootstrap, "security.protocol": self.protocol}
        if self.mechanism is not None:
            settings["sasl.mechanism"] = self.mechanism
            settings["sasl.jaas.config"] = (
                f"{_LOGIN_MODULES[self.mechanism]} required"
                f" username={_jaas_quoted(self.username or '')} password={_jaas_quoted(self.password or '')};"
            )
        if self.ca_file is not None:
            settings |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": self.ca_file}
        return settings


def _jaas_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


_FETCHED_BYTES = 256 << 20
"""What the consumers of all partitions may hold of what they fetched ahead, about: it is a part of the JVM's heap."""
_FETCHED_BYTES_OF_PARTITION = 1 << 20, 16 << 20
_FETCHING = {
    # 500 rows a poll (the default), 1 MiB a partition and 64 KiB of socket buffer cost a quarter of the source's
    # throughput; so do checksums that TCP and the broker have already checked: SPARK.md, 0.95 M -> 1.31 M records/s.
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
        # Records that went before they were read must stop the query and not be passed over (DESIGN 3).
        "failOnDataLoss": "true",
        # A writer may use Kafka's transactions: what it aborted never happened, and is no evidence (DESIGN 2, rule 1).
        "kafka.isolation.level": "read_committed",
        # Bounds the memory of a batch, and the time that a stop or a takeover waits for one.
        "maxOffsetsPerTrigger": str(records_per_batch),
        "kafka.max.partition.fetch.bytes": str(max(least, min(most, _FETCHED_BYTES // partitions))),
        **_FETCHING,
        **{f"kafka.{name}": value for name, value in connection.jvm().items()},
    }
