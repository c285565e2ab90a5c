"""Settings for librdkafka clients, from the address and the credentials of Kafka. Opens no connection."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tidemark.common.errors import BadSetting

Offsets: TypeAlias = dict[str, dict[int, int]]
"""Topic -> partition -> the next offset to read."""


MAX_MESSAGE_BYTES = 1_048_588
"""Kafka's own default of a topic's `max.message.bytes`."""
_BATCH_BYTES = 1_000_000
"""librdkafka's default of `batch.size`."""


@dataclass(frozen=True, slots=True)
class OAuth:
    """OAuth 2 client credentials. `token_url`: the URL of the endpoint that issues tokens."""

    token_url: str
    client_id: str
    client_secret: str = field(repr=False)
    scope: str | None = None


@dataclass(frozen=True, slots=True)
class KafkaConnection:
    """The brokers' address and the credentials. `app/settings.py` checks the values.

    Attributes:
        bootstrap: the addresses of brokers, such as `one:9092,two:9092`.
        protocol: PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL.
        mechanism: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER; None if SASL is not used.
        username: the SASL user.
        password: the SASL password.
        ca_file: the PEM file of root certificates; None for the certificates of the system.
        certificate_file: the PEM file of the client's certificate; None if the client has no certificate.
        key_file: the PEM file of the certificate's key, without a password.
        oauth: the credentials for OAUTHBEARER.
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

    def client_settings(self) -> dict[str, str]:
        """Settings of any librdkafka client. The settings contain the password, so never log them."""
        settings = {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": self.protocol,
            "client.id": "tidemark",
            # Tidemark reports an unreachable broker once; librdkafka would write to stderr at every attempt.
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

    def portable_settings(self) -> dict[str, str]:
        """Settings of a librdkafka client on another host: the contents of the PEM files instead of their paths.

        Reads the files. The result is the same in every call until a file changes. The settings contain secrets, so
        never log them. Raises `BadSetting` if a file cannot be read.
        """
        settings = self.client_settings()
        for part in ("ca", "certificate", "key"):
            if (path := settings.pop(f"ssl.{part}.location", None)) is not None:
                settings[f"ssl.{part}.pem"] = _read_pem(path)
        return settings

    def producer_settings(self, max_bytes: int = MAX_MESSAGE_BYTES) -> dict[str, str]:
        """Settings of a producer. Its retries do not lose, duplicate or reorder records of a partition.

        Args:
            max_bytes: the topic's `max.message.bytes`. A broker refuses a larger batch with all records in the batch.
        """
        return self.client_settings() | {
            "enable.idempotence": "true",
            "acks": "all",
            # librdkafka's own default (crc32) would send a stream to another partition than Java producers do.
            "partitioner": "murmur2_random",
            "compression.type": "lz4",
            "linger.ms": "5",
            # librdkafka compares this limit with the size before compression, and the topic its limit with the size
            # after compression.
            "message.max.bytes": str(max(_BATCH_BYTES, max_bytes)),
            "batch.size": str(min(_BATCH_BYTES, max_bytes)),
        }


def _read_pem(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting("a certificate or key file of Kafka", f"cannot read {path}: {error}") from None
