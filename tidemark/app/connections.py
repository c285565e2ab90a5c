"""The settings with the addresses and credentials of Kafka, Postgres and Redis, and their validation.

`app.settings` reads these settings and the files of their secrets.
"""

import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from psycopg.conninfo import make_conninfo

from tidemark.common.postgres_address import parse_dsn
from tidemark.sources.kafka import KafkaConnection, OAuth

if TYPE_CHECKING:
    from tidemark.sinks.redis.client import RedisAddress

PREFIX = "TIDEMARK_"


def parse_host_port(text: str) -> tuple[str, int]:
    """Split an address such as `[::1]:9481` into host (without brackets) and port. Raises `ValueError` if the text is
    not such an address."""
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError("not an address such as 127.0.0.1:9481 or [::1]:9481")
    return host.strip("[]"), int(port)


LOOPBACK = ("127.0.0.1", "::1")
THIS_MACHINE = ("localhost", *LOOPBACK)


def host_name(field: str) -> str:
    """The host name in the value of a `Host` header, in lower case, without port and brackets."""
    text = field.lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is reachable only from this machine: `host` is `localhost`, ::1, or an
    address in 127.0.0.0/8."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def local_host_names(host: str) -> tuple[str, ...]:
    """The host names that a request to a server may name in `Host`, if only this machine reaches the address `host` of
    the server. Empty otherwise: then any name is allowed. The check is against DNS rebinding: a web page may use a host
    name that resolves to this machine."""
    return (*THIS_MACHINE, host.lower()) if is_loopback(host) else ()


class SecretStr:
    """The text of a secret, which `repr` and `str` do not show."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def get_secret_value(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"SecretStr('{self}')"

    def __str__(self) -> str:
        return "**********"


def _check_conninfo(secret: SecretStr) -> None:
    parse_dsn(secret.get_secret_value())


def _check_redis_url(secret: SecretStr) -> None:
    if not re.match(r"(rediss?(\+(sentinel|cluster))?|unix)://", secret.get_secret_value()):
        raise ValueError("not a Redis URL (redis://, rediss:// or unix://, redis+sentinel:// or redis+cluster://)")


_URL_PASSWORD = re.compile(r"(:/{1,2}[^:/?#]*:).*@")  # one slash: `Path` replaces // by /
_NAMED_PASSWORD = re.compile(r"((?:password|secret)\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&]+)", re.IGNORECASE)


def mask_passwords(text: str) -> str:
    """Replace the password in a URL, and the passwords and secrets in key=value words, by `***`. The rest of the text
    is unchanged."""
    return _NAMED_PASSWORD.sub(r"\1***", _URL_PASSWORD.sub(r"\1***@", text))


def _without_path(text: str) -> str:
    parts = urlsplit(text)
    rest = parts.path.strip("/") or parts.query or parts.fragment
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{'/***' if rest else ''}"


def mask_url(text: str) -> str:
    """The URL of a web service with only scheme, host and port, because the other parts may contain a key.

    User and password are removed. Path, query and fragment become `/***`. A URL that cannot be parsed becomes `***`.
    """
    try:
        return _without_path(text)
    except ValueError:
        return "***"


def _check_web_url(secret: SecretStr) -> None:
    if not re.match(r"https?://", secret.get_secret_value()):
        raise ValueError("not a URL that begins with https:// or http://")


@dataclass(frozen=True, slots=True)
class Maskable:
    """Marks a secret setting that is an address. The address may be shown after `mask_passwords`; if `is_web_url`, only
    after `mask_url`."""

    is_web_url: bool = False


# In the metadata of a type, a text describes the setting. A function checks the value of the setting, and raises
# `ValueError` if the value is not allowed. The description of a `Meta` with a pattern names the allowed values.
WebUrl = Annotated[SecretStr, _check_web_url, Maskable(is_web_url=True)]
PostgresDsn = Annotated[SecretStr, _check_conninfo, Maskable()]
RedisUrl = Annotated[SecretStr, _check_redis_url, Maskable()]
NonEmpty = Annotated[str, Meta(min_length=1)]
Positive = Annotated[int, Meta(ge=1)]
AnyPort = Annotated[int, Meta(ge=0, le=65535)]
HostPort = Annotated[str, parse_host_port]
TopicName = Annotated[
    str,
    Meta(
        pattern=r"^[a-zA-Z0-9._-]{1,249}\Z",
        description="1 to 249 characters of a-z, A-Z, 0-9, dot, hyphen and underscore",
    ),
]

_LOGIN_SETTINGS = ("kafka_sasl_mechanism", "kafka_username", "kafka_password")
_OAUTHBEARER_SETTINGS = tuple(
    f"kafka_sasl_oauthbearer_{part}" for part in ("token_endpoint_url", "client_id", "client_secret")
)


class Connections(msgspec.Struct, frozen=True, kw_only=True):
    kafka_bootstrap_servers: Annotated[NonEmpty, "Kafka brokers, host:port[,...]."] = "localhost:9092"
    kafka_facts_topic: Annotated[TopicName, "Topic of the writers' records."] = "tidemark.facts"
    kafka_control_topic: Annotated[TopicName, "Topic of operator overrides."] = "tidemark.control"
    kafka_dead_letters_topic: Annotated[TopicName, "Topic to which rejected records are written."] = (
        "tidemark.dead-letters"
    )
    kafka_positions_topic: Annotated[
        TopicName | None, "Compacted topic to which positions are also published. Default: none."
    ] = None
    kafka_create_topics: Annotated[bool, "Create missing topics. The local stack sets this."] = False
    kafka_partitions: Annotated[
        Positive, "Number of partitions of a facts topic that Tidemark creates; it can never change."
    ] = 4
    kafka_security_protocol: Annotated[
        Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"], "Protocol of the connections to the brokers."
    ] = "PLAINTEXT"
    kafka_sasl_mechanism: Annotated[
        Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None,
        "Login mechanism, if the protocol has SASL.",
    ] = None
    kafka_username: Annotated[str | None, "User name for PLAIN and SCRAM."] = None
    kafka_password: Annotated[SecretStr | None, "Password for PLAIN and SCRAM."] = None
    kafka_sasl_oauthbearer_token_endpoint_url: Annotated[
        WebUrl | None, "OAUTHBEARER: URL of the token endpoint, https://..."
    ] = None
    kafka_sasl_oauthbearer_client_id: Annotated[str | None, "OAUTHBEARER: client ID."] = None
    kafka_sasl_oauthbearer_client_secret: Annotated[SecretStr | None, "OAUTHBEARER: client secret."] = None
    kafka_sasl_oauthbearer_scope: Annotated[str | None, "OAUTHBEARER: scope of the token."] = None
    kafka_ca_file: Annotated[Path | None, "PEM file of the authority that signed the brokers' certificates."] = None
    kafka_ssl_certificate_file: Annotated[Path | None, "PEM file of the client certificate, for mutual TLS."] = None
    kafka_ssl_key_file: Annotated[Path | None, "PEM file of the key of the client certificate."] = None

    postgres_dsn: Annotated[PostgresDsn, "Postgres URL or key=value words."] = SecretStr(
        "postgresql://localhost:5432/tidemark"
    )
    postgres_password: Annotated[SecretStr | None, "Password; it replaces a password in the address."] = None
    readers_dsn: Annotated[
        PostgresDsn | None, "Database with the places of readers. Default: TIDEMARK_POSTGRES_DSN."
    ] = None
    redis_url: Annotated[RedisUrl, "Redis URL: redis, rediss (TLS), unix, redis[s]+sentinel, redis[s]+cluster."] = (
        SecretStr("redis://localhost:6379/0")
    )
    redis_password: Annotated[SecretStr | None, "Password; it replaces a password in the URL."] = None
    redis_sentinel_password: Annotated[SecretStr | None, "Password of the Sentinels, if they have one."] = None
    redis_ca_file: Annotated[Path | None, "PEM file of the authority that signed Redis's certificates."] = None
    synapse_dsn: Annotated[PostgresDsn | None, "`tidemark synapse`: address of Synapse's own database."] = None
    synapse_redis_url: Annotated[
        RedisUrl | None, "`tidemark synapse`: URL of the Redis over which Synapse's processes replicate."
    ] = None

    otlp_url: Annotated[
        WebUrl | None, "Collector (http://host:4318) to which a trace of each batch is sent, in OTLP over HTTP."
    ] = None

    def __post_init__(self) -> None:
        needed = _OAUTHBEARER_SETTINGS if self.kafka_sasl_mechanism == "OAUTHBEARER" else _LOGIN_SETTINGS
        missing = [name for name in needed if getattr(self, name) is None]
        if self.kafka_security_protocol.startswith("SASL") and missing:
            raise ValueError(
                f"{PREFIX}KAFKA_SECURITY_PROTOCOL={self.kafka_security_protocol} also needs "
                + ", ".join(map(variable, missing))
            )
        require_both(self, "kafka_ssl_certificate_file", "kafka_ssl_key_file")

    @property
    def kafka(self) -> KafkaConnection:
        """The settings of connections to Kafka, with the current contents of the secret files."""
        return KafkaConnection(
            bootstrap=self.kafka_bootstrap_servers,
            protocol=self.kafka_security_protocol,
            mechanism=self.kafka_sasl_mechanism,
            username=self.kafka_username,
            password=self.secret("kafka_password"),
            ca_file=_path_text(self.kafka_ca_file),
            certificate_file=_path_text(self.kafka_ssl_certificate_file),
            key_file=_path_text(self.kafka_ssl_key_file),
            oauth=self._kafka_oauth(),
        )

    def _kafka_oauth(self) -> OAuth | None:
        if self.kafka_sasl_mechanism != "OAUTHBEARER":
            return None
        return OAuth(
            token_url=self.secret("kafka_sasl_oauthbearer_token_endpoint_url") or "",
            client_id=self.kafka_sasl_oauthbearer_client_id or "",
            client_secret=self.secret("kafka_sasl_oauthbearer_client_secret") or "",
            scope=self.kafka_sasl_oauthbearer_scope,
        )

    @property
    def redis(self) -> "RedisAddress":
        from tidemark.sinks.redis.client import RedisAddress  # noqa: PLC0415 - a writer's installation has no redis

        return RedisAddress(
            self.redis_url.get_secret_value(),
            password=partial(self.secret, "redis_password"),
            sentinel_password=partial(self.secret, "redis_sentinel_password"),
            ca_file=_path_text(self.redis_ca_file),
            name="TIDEMARK_REDIS_URL",
        )

    def postgres(self) -> str:
        """The DSN of Postgres with its password. Reads the secret files at each call (see `secret`)."""
        dsn = self.secret("postgres_dsn") or ""
        password = self.secret("postgres_password")
        return dsn if password is None else make_conninfo(dsn, password=password)

    def readers(self) -> str:
        """The DSN of the database with the places of readers: `readers_dsn`, or else the DSN of `postgres`."""
        return self.secret("readers_dsn") or self.postgres()

    def secret(self, name: str) -> str | None:
        """The current value of the secret setting `name`; None if the setting is not set.

        If the secret is in a file, reads the file at each call. If the file cannot be read or is not text, returns the
        value at the time when the settings were loaded.
        """
        path = os.environ.get(f"{variable(name)}_FILE")
        with suppress(OSError, UnicodeDecodeError):
            if path:
                return read_secret(Path(path))
        known: SecretStr | None = getattr(self, name)
        return None if known is None else known.get_secret_value()


def read_secret(path: Path) -> str:
    return path.read_text().rstrip("\r\n")


def variable(name: str) -> str:
    """The name of the environment variable of the setting `name`. Ignores aliases: see `settings.variable_of`."""
    return f"{PREFIX}{name.upper()}"


def require_both(settings: Connections, *pair: str) -> None:
    """Raise `ValueError` if only one of the two settings with the names `pair` is set."""
    missing = [name for name in pair if getattr(settings, name) is None]
    if len(missing) == 1:
        raise ValueError(f"set both {' and '.join(map(variable, pair))}, or neither; {variable(missing[0])} is not set")


def _path_text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def accepts_connections(where: str) -> bool:
    """Whether a process accepts connections at `where`: `host:port`, optionally followed by `/path`.

    If `where` is a list separated by commas, only the first address is tried. False if `where` is not such an address.
    Blocks for at most a second for each IP address of the host.
    """
    try:
        socket.create_connection(parse_host_port(where.partition(",")[0].partition("/")[0]), timeout=1.0).close()
    except (OSError, ValueError):
        return False
    return True
