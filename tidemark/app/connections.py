"""The settings with the addresses and credentials of Kafka, Postgres and Redis, and their validation.

`app.settings` reads these settings and the files of their secrets.
"""

import re
import socket
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self
from urllib.parse import urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

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


def _check_host_port(text: str) -> str:
    parse_host_port(text)
    return text


def _check_conninfo(secret: SecretStr) -> SecretStr:
    try:
        conninfo_to_dict(secret.get_secret_value())
    except psycopg.ProgrammingError:  # the original error may quote the password
        raise ValueError("not a Postgres URL (postgresql://user:password@host:5432/database)") from None
    return secret


def _check_redis_url(secret: SecretStr) -> SecretStr:
    if not re.match(r"(rediss?(\+(sentinel|cluster))?|unix)://", secret.get_secret_value()):
        raise ValueError("not a Redis URL (redis://, rediss:// or unix://, redis+sentinel:// or redis+cluster://)")
    return secret


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


def _check_web_url(secret: SecretStr | None) -> SecretStr | None:
    if secret is not None and not re.match(r"https?://", secret.get_secret_value()):
        raise ValueError("not a URL (https://...)")
    return secret


@dataclass(frozen=True, slots=True)
class Maskable:
    """Marks a secret setting that is an address. The address may be shown after `mask_passwords`; if `is_web_url`, only
    after `mask_url`."""

    is_web_url: bool = False


def _check_optional_conninfo(secret: SecretStr | None) -> SecretStr | None:
    return None if secret is None else _check_conninfo(secret)


def _check_optional_redis_url(secret: SecretStr | None) -> SecretStr | None:
    return None if secret is None else _check_redis_url(secret)


OptionalWebUrl = Annotated[SecretStr | None, AfterValidator(_check_web_url), Maskable(is_web_url=True)]
PostgresDsn = Annotated[SecretStr, AfterValidator(_check_conninfo), Maskable()]
RedisUrl = Annotated[SecretStr, AfterValidator(_check_redis_url), Maskable()]
OptionalDsn = Annotated[SecretStr | None, AfterValidator(_check_optional_conninfo), Maskable()]
OptionalRedisUrl = Annotated[SecretStr | None, AfterValidator(_check_optional_redis_url), Maskable()]
Positive = Annotated[int, Field(ge=1)]
AnyPort = Annotated[int, Field(ge=0, le=65535)]
HostPort = Annotated[str, AfterValidator(_check_host_port)]
TopicName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,249}$")]

_LOGIN_SETTINGS = ("kafka_sasl_mechanism", "kafka_username", "kafka_password")
_OAUTHBEARER_SETTINGS = tuple(
    f"kafka_sasl_oauthbearer_{part}" for part in ("token_endpoint_url", "client_id", "client_secret")
)


class Connections(BaseModel):
    model_config = ConfigDict(defer_build=True)  # only the subclass `Settings` is used

    kafka_bootstrap_servers: str = Field("localhost:9092", min_length=1, description="Kafka brokers, host:port[,...].")
    kafka_facts_topic: TopicName = Field("tidemark.facts", description="Topic of the writers' records.")
    kafka_control_topic: TopicName = Field("tidemark.control", description="Topic of operator overrides.")
    kafka_dead_letters_topic: TopicName = Field(
        "tidemark.dead-letters", description="Topic to which rejected records are written."
    )
    kafka_positions_topic: TopicName | None = Field(
        None, description="Compacted topic to which positions are also published. Default: none."
    )
    kafka_create_topics: Annotated[bool, Field(description="Create missing topics. The local stack sets this.")] = False
    kafka_partitions: Positive = Field(
        4, description="Number of partitions of a facts topic that Tidemark creates; it can never change."
    )
    kafka_security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="Protocol of the connections to the brokers."
    )
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None = Field(
        None, description="Login mechanism, if the protocol has SASL."
    )
    kafka_username: str | None = Field(None, description="User name for PLAIN and SCRAM.")
    kafka_password: SecretStr | None = Field(None, description="Password for PLAIN and SCRAM.")
    kafka_sasl_oauthbearer_token_endpoint_url: OptionalWebUrl = Field(
        None, description="OAUTHBEARER: URL of the token endpoint, https://..."
    )
    kafka_sasl_oauthbearer_client_id: str | None = Field(None, description="OAUTHBEARER: client ID.")
    kafka_sasl_oauthbearer_client_secret: SecretStr | None = Field(None, description="OAUTHBEARER: client secret.")
    kafka_sasl_oauthbearer_scope: str | None = Field(None, description="OAUTHBEARER: scope of the token.")
    kafka_ca_file: Path | None = Field(
        None, description="PEM file of the authority that signed the brokers' certificates."
    )
    kafka_ssl_certificate_file: Path | None = Field(
        None, description="PEM file of the client certificate, for mutual TLS."
    )
    kafka_ssl_key_file: Path | None = Field(None, description="PEM file of the key of the client certificate.")

    postgres_dsn: PostgresDsn = Field(
        SecretStr("postgresql://localhost:5432/tidemark"), description="Postgres URL or key=value words."
    )
    postgres_password: SecretStr | None = Field(None, description="Password; it replaces a password in the address.")
    readers_dsn: OptionalDsn = Field(
        None,
        description="Database with the places of readers. Default: TIDEMARK_POSTGRES_DSN.",
    )
    redis_url: RedisUrl = Field(
        SecretStr("redis://localhost:6379/0"),
        description="Redis URL: redis, rediss (TLS), unix, redis[s]+sentinel, redis[s]+cluster.",
    )
    redis_password: SecretStr | None = Field(None, description="Password; it replaces a password in the URL.")
    redis_sentinel_password: SecretStr | None = Field(None, description="Password of the Sentinels, if they have one.")
    redis_ca_file: Path | None = Field(None, description="PEM file of the authority that signed Redis's certificates.")
    synapse_dsn: OptionalDsn = Field(None, description="`tidemark synapse`: address of Synapse's own database.")
    synapse_redis_url: OptionalRedisUrl = Field(
        None, description="`tidemark synapse`: URL of the Redis over which Synapse's processes replicate."
    )

    otlp_url: OptionalWebUrl = Field(
        None, description="Collector (http://host:4318) to which a trace of each batch is sent, in OTLP over HTTP."
    )

    @model_validator(mode="after")
    def _sasl_is_complete(self) -> Self:
        needed = _OAUTHBEARER_SETTINGS if self.kafka_sasl_mechanism == "OAUTHBEARER" else _LOGIN_SETTINGS
        missing = [name for name in needed if getattr(self, name) is None]
        if self.kafka_security_protocol.startswith("SASL") and missing:
            raise ValueError(
                f"{PREFIX}KAFKA_SECURITY_PROTOCOL={self.kafka_security_protocol} also needs "
                + ", ".join(map(variable, missing))
            )
        return self

    @model_validator(mode="after")
    def _certificate_has_its_key(self) -> Self:
        require_both(self, "kafka_ssl_certificate_file", "kafka_ssl_key_file")
        return self

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

    @abstractmethod
    def secret(self, name: str) -> str | None:
        """The current value of the secret setting `name`; None if the setting is not set."""


def variable(name: str) -> str:
    """The name of the environment variable of the setting `name`. Ignores aliases: see `settings.variable_of`."""
    return f"{PREFIX}{name.upper()}"


def require_both(settings: BaseModel, *pair: str) -> None:
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
