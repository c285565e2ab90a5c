"""Clients of Redis: one server, a primary that Sentinels name, or a Cluster, each from one address.

redis-py reads the URLs of a server; the two other forms are ours and are parsed here. `RedisSession` is a client for
threads that is made at its first use and raises our errors.
"""

import re
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

import redis
import redis.asyncio
from redis import exceptions as problems
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.retry import Retry

from tidemark.common.errors import BadSetting, Refused, TidemarkError, Unavailable

FOREIGN = (problems.RedisError, problems.RedisClusterException)
"""All that redis-py raises."""

_WAITED_FOR = (
    problems.ConnectionError,  # also: loading its data, too many clients, no Sentinel knows the primary
    problems.TimeoutError,
    problems.ReadOnlyError,  # a replica that is about to be promoted
    problems.OutOfMemoryError,
    problems.ClusterError,  # also: replica without its master
    problems.SlotNotCoveredError,
    problems.TryAgainError,
    problems.NoScriptError,  # a restart between two calls
)
# The same, of which redis-py makes no class of their own: a full disk, too few replicas, a script that runs too long.
_WAITED_FOR_CODES = ("MISCONF ", "NOREPLICAS ", "NOGOODSLAVE ", "BUSY ")
# A Cluster's client says in words alone that it does not find the Cluster, or not all of it. Its other complaints are
# about what it was given, and come again however long one waits.
_SEARCHING = re.compile(
    r"cannot be connected|not covered|could not agree|[Nn]o targets|doesn't exist in the cluster"
    r"|has no redis_connection"
)
_NO_CLUSTER = "Cluster mode is not enabled"
_FORM = "check that the server behind redis+cluster:// is a Cluster"

# What Redis says of one key, or of what it holds: no other stream is concerned.
_OF_STREAM = re.compile(r"WRONGTYPE |The stream has exhausted|.*\buser_script:\d")


@dataclass(frozen=True, slots=True)
class Remedies:
    """Advice for people where Redis does not let us in (`access`), where the two sides do not understand or trust each
    other (`transport`), and where it refuses a command (`rights`)."""

    access: str
    transport: str
    rights: str


def of_stream(error: Exception) -> bool:
    """Whether the answer to a call for one stream is about that stream alone."""
    return type(error) is problems.ResponseError and _OF_STREAM.match(str(error)) is not None


class StreamFault(Exception):
    """The fault of one stream, in the server's words; never leaves this package."""


def sound(answer: Any) -> Any:
    """The answer to a call for one stream, unless it is an error: then raises `StreamFault`, or the error itself where
    the stream is not to blame."""
    if isinstance(answer, Exception):
        raise StreamFault(str(answer)) if of_stream(answer) else answer
    return answer


def redis_error(error: Exception, where: str, remedies: Remedies) -> TidemarkError | Exception:
    """The error to raise instead of one of `FOREIGN`; `error` itself where it is none of the server's.

    Waited for is only what is known to be an outage.
    """
    problem = (str(error).splitlines() or [type(error).__name__])[0]
    # An authentication error is a connection error too, and may be behind the one that a Cluster's client raises.
    for cause in _causes(error):
        if isinstance(cause, problems.AuthenticationError | problems.AuthorizationError):
            return Refused("Redis", where, str(cause), remedies.access)
        if isinstance(cause, problems.NoPermissionError):
            return Refused("Redis", where, str(cause), remedies.rights)
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return Refused("Redis", where, problem, remedies.transport)
    if isinstance(error, _WAITED_FOR) or problem.startswith(_WAITED_FOR_CODES):
        return Unavailable("Redis", where, problem)
    if isinstance(error, problems.RedisClusterException):
        searching = _SEARCHING.search(problem) and _NO_CLUSTER not in problem
        return Unavailable("Redis", where, problem) if searching else Refused("Redis", where, problem, _FORM)
    if isinstance(error, problems.ResponseError):
        return Refused("Redis", where, problem, remedies.rights)
    if isinstance(error, problems.InvalidResponse):
        return Refused("Redis", where, problem, remedies.transport)
    return error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


Secret: TypeAlias = Callable[[], str | None]
"""Called at every new connection, because secrets rotate."""

_HOST = re.compile(r"(?P<host>\[[^\]]+\]|[^:\[\]]+)(:(?P<port>\d{1,5}))?")
_LOGIN = re.compile(r"(?<=://)[^/?]*@")
_PORTS = {"sentinel": 26379, "cluster": 6379}


def _none() -> None:
    return None


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """`url` is one of

    - `redis://user:password@host:6379/0`, `unix:///path`: as redis-py has it, with its options
    - `redis+sentinel://user:password@host:26379,host/name/0`: the primary that the Sentinels know as `name`
    - `redis+cluster://user:password@host:6379,host`: some nodes of a Cluster

    and `rediss` in place of `redis` for TLS. `password` wins over the URL's. `ca_file` is a PEM file; without it the
    system's roots count.
    """

    url: str = field(repr=False)
    password: Secret = field(default=_none, repr=False)
    sentinel_password: Secret = field(default=_none, repr=False)
    ca_file: str | None = None

    @property
    def clustered(self) -> bool:
        """Whether the keys of two streams may lie on two servers."""
        return self._kind == "cluster"

    @property
    def where(self) -> str:
        """Fit for a message: no user, no password."""
        parts = urlsplit(self.url)
        return parts.netloc.rpartition("@")[2] + parts.path

    def client(self, timeout: float) -> Any:
        """For threads; `timeout` in seconds for a connection or an answer. Raises `BadSetting`.

        For a Cluster it connects, and raises what redis-py raises. Never tries anything again by itself.
        """
        return self._made(redis, {**self._options(timeout), "retry": Retry(NoBackoff(), 0)}, timeout)

    def async_client(self, timeout: float) -> Any:
        """The same for asyncio; connects when it is first used."""
        # redis-py writes each message of a channel that comes by RESP3 into a text for its log, logged or not.
        options = {**self._options(timeout), "retry": AsyncRetry(NoBackoff(), 0), "protocol": 2}
        return self._made(redis.asyncio, options, timeout)

    def _made(self, library: Any, options: Mapping[str, Any], timeout: float) -> Any:
        match self._kind:
            case "sentinel":
                name, database = self._service()
                sentinels = library.Sentinel(self._hosts(), sentinel_kwargs=self._for_sentinels(timeout), **options)
                return sentinels.master_for(name, db=database)
            case "cluster":
                nodes = [library.cluster.ClusterNode(host, port) for host, port in self._hosts()]
                return library.RedisCluster(startup_nodes=nodes, **options)
            case _:
                return self._server(library.Redis, options)

    @property
    def _kind(self) -> str:
        """`sentinel`, `cluster`, or nothing: one server."""
        return urlsplit(self.url).scheme.partition("+")[2]

    def _server(self, kind: Any, options: Mapping[str, Any]) -> Any:
        try:
            return kind.from_url(
                _LOGIN.sub("", self.url), **{name: value for name, value in options.items() if name != "ssl"}
            )
        except ValueError:
            raise bad_address() from None

    def _options(self, timeout: float) -> dict[str, Any]:
        return {
            "decode_responses": True,
            "encoding_errors": "backslashreplace",  # what somebody else has put there must not end who reads it
            **self._transport(timeout),
            "credential_provider": self._credentials(),
        }

    def _transport(self, timeout: float) -> dict[str, Any]:
        options: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        if urlsplit(self.url).scheme.startswith("rediss"):
            options |= {"ssl": True} | ({"ssl_ca_certs": self.ca_file} if self.ca_file else {})
        return options

    def _credentials(self) -> "_Credentials | None":
        user, _, password = urlsplit(self.url).netloc.rpartition("@")[0].partition(":")
        if not user and not password and self.password() is None:
            return None
        return _Credentials(unquote(user), unquote(password), self.password)

    def _for_sentinels(self, timeout: float) -> dict[str, Any]:
        known = self.sentinel_password() is not None
        login = {"credential_provider": _Credentials("", "", self.sentinel_password)} if known else {}
        return {**self._transport(timeout), **login}

    def _hosts(self) -> list[tuple[str, int]]:
        found = []
        for text in urlsplit(self.url).netloc.rpartition("@")[2].split(","):
            match = _HOST.fullmatch(text)
            if match is None:
                raise bad_address()
            found.append((match["host"].strip("[]"), int(match["port"] or _PORTS[self._kind])))
        return found

    def _service(self) -> tuple[str, int]:
        """The primary's name among the Sentinels, and the database."""
        name, _, database = urlsplit(self.url).path.strip("/").partition("/")
        if not name or not (database or "0").isdigit():
            raise bad_address()
        return unquote(name), int(database or 0)


class _Credentials(CredentialProvider):
    """The provider that redis-py calls at every connection."""

    def __init__(self, user: str, password: str, current: Secret) -> None:
        self._user = user
        self._password = password
        self._current = current

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._current() or self._password
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def redis_address(of: str | RedisAddress) -> RedisAddress:
    return RedisAddress(of) if isinstance(of, str) else of


def bad_address() -> BadSetting:
    """Without the address, which may hold a password."""
    return BadSetting(
        "TIDEMARK_REDIS_URL",
        "is not a Redis address; write redis://user:password@host:6379/0, redis+sentinel://host:26379,host/name/0"
        " or redis+cluster://host:6379,host (rediss for TLS)",
    )


def close(client: Any) -> None:
    """Close one of ours for threads, and what redis-py leaves open: connections to Sentinels, or to the first nodes."""
    client.close()
    for sentinel in _sentinels(client):
        sentinel.close()
    if isinstance(client, redis.RedisCluster):
        for node in client.nodes_manager.startup_nodes.values():
            if node.redis_connection is not None:
                node.redis_connection.close()


async def aclose(client: Any) -> None:
    """The same for asyncio."""
    await client.aclose()
    for sentinel in _sentinels(client):
        await sentinel.aclose()


def _sentinels(client: Any) -> list[Any]:
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    return [] if manager is None else list(manager.sentinels)


def database_of(client: Any) -> int:
    """The number of the database of any of redis-py's clients; a Cluster has one."""
    pool = getattr(client, "connection_pool", None)
    return 0 if pool is None else int(pool.connection_kwargs.get("db") or 0)


def whereabouts(client: Any) -> str:
    """The address of any of redis-py's clients, fit for a message: no user, no password."""
    pool = getattr(client, "connection_pool", None)
    if pool is None:
        return ",".join(f"{node.host}:{node.port}" for node in client.nodes_manager.startup_nodes.values())
    if service := getattr(pool, "service_name", None):
        return f"Sentinel's {service}"
    options = pool.connection_kwargs
    return str(options.get("path") or f"{options.get('host')}:{options.get('port')}/{options.get('db', 0)}")


class RedisSession:
    """Any thread may use it, several at a time. Raises `BadSetting` at once where the address is none."""

    def __init__(self, address: RedisAddress, remedies: Remedies, timeout: float) -> None:
        self.where = address.where
        self._address = address
        self._remedies = remedies
        self._timeout = timeout
        self._lock = threading.Lock()
        # The client of a Cluster connects as it is made.
        self._client: Any = None if address.clustered else address.client(timeout)

    @contextmanager
    def use(self) -> Iterator[Any]:
        """The client. Turns what redis-py raises into `Unavailable` (do it again) and `Refused`."""
        try:
            with self._lock:
                if self._client is None:
                    self._client = self._address.client(self._timeout)
            yield self._client
        except FOREIGN as error:
            raise redis_error(error, self.where, self._remedies) from error

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                close(self._client)


STREAMS = "tidemark:streams"
SENTINEL = "tidemark:sentinel"


def tag(name: str) -> str:
    """The hash tag of `name`, with the braces around it. No two names have the same."""
    return "{" + name.replace("{", "{<").replace("}", "{>") + "}"


def key(stream: str, name: str) -> str:
    return f"{beside_keys(stream)}:{name}"


def beside_keys(stream: str) -> str:
    """What all keys of the stream begin with, and the channel too."""
    return f"tidemark:{tag(stream)}"


def in_database(channel: str, database: int) -> str:
    """The name of a channel for clients of one database of Redis, whose channels belong to the server as a whole."""
    return f"{channel}{database_suffix(database)}"


def database_suffix(database: int) -> str:
    return f"/{database}" if database else ""


def channel(stream: str, database: int = 0) -> str:
    return in_database(beside_keys(stream), database)


def channels(database: int = 0) -> str:
    """The pattern that the channels of all streams match, and nothing else of ours."""
    return in_database("tidemark:{*}", database)


def lines_channel(server: str, database: int = 0) -> str:
    """Where sidecars of the line protocol that call themselves `server` pass commands on to each other."""
    return in_database(f"tidemark:lines:{server}", database)


def stream_of(channel: str) -> str:
    """The stream of a channel that matches `channels`."""
    return channel.removeprefix("tidemark:{").rpartition("}")[0].replace("{>", "}").replace("{<", "{")
