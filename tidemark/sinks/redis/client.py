"""Clients of Redis, names of keys and channels, and calls of Lua scripts.

A `RedisAddress` creates a client of one server, of a primary behind Sentinels, or of a Cluster. redis-py parses the URL
of one server. This module parses the two other forms of URL, which are Tidemark's own. `RedisSession` is a client for
threads that raises the errors of `common.errors`.

One call of a Lua script (`Script`) is for many streams. In a Cluster, all streams of a call are in one slot.
"""

import re
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from importlib.resources import files
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

import redis
import redis.asyncio
from redis import RedisCluster, exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.client import NEVER_DECODE
from redis.credentials import CredentialProvider
from redis.retry import Retry

from tidemark.common.errors import BadSetting, Refused, TidemarkError, Unavailable

REDIS_PY_ERRORS = (exceptions.RedisError, exceptions.RedisClusterException)
"""The base classes of the errors that redis-py raises."""

MAX_CONNECTIONS = 10_000  # of one client; redis-py's default is 100, and each waiting thread has a connection

_OUTAGES = (
    exceptions.ConnectionError,  # also: loading data, too many clients, no Sentinel knows the primary
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,  # a replica that is about to be promoted
    exceptions.OutOfMemoryError,
    exceptions.ClusterError,  # also: replica without its master
    exceptions.SlotNotCoveredError,
    exceptions.TryAgainError,
    exceptions.NoScriptError,  # a restart between two calls
)
# Outages without a class in redis-py: a full disk, too few replicas, a script that runs too long.
_OUTAGE_CODES = ("MISCONF ", "NOREPLICAS ", "NOGOODSLAVE ", "BUSY ")
# Messages of a Cluster's client that cannot find the Cluster or all of its slots. Other errors of the client are about
# arguments, so waiting does not help.
_CLUSTER_OUTAGE = re.compile(
    r"cannot be connected|not covered|could not agree|[Nn]o targets|doesn't exist in the cluster"
    r"|has no redis_connection"
)
_NOT_A_CLUSTER = "Cluster mode is not enabled"
_CLUSTER_REMEDY = "check that the server behind redis+cluster:// is a Cluster"

# Errors about the content of one key: other streams are not affected.
_STREAM_ERROR = re.compile(r"WRONGTYPE |The stream has exhausted|.*\buser_script:\d")


@dataclass(frozen=True, slots=True)
class Remedies:
    """Texts for error messages: what an operator can do about a refusal.

    Attributes:
        login: for a refused login.
        transport: for a failure of TLS or of the protocol.
        rights: for a refused command.
    """

    login: str
    transport: str
    rights: str


def is_about_stream(error: Exception) -> bool:
    """Whether the keys of one stream caused `error`, so that other streams are not affected."""
    return type(error) is exceptions.ResponseError and _STREAM_ERROR.match(str(error)) is not None


class StreamFault(Exception):
    """The keys of one stream have invalid content. The text is the server's message, or names the problem."""


def check_answer(answer: Any) -> Any:
    """Return the answer of a script for one stream, or raise the answer if it is an error.

    Raises:
        StreamFault: the answer is an error that only this stream has (`is_about_stream`). Other errors are raised
            unchanged.
    """
    if isinstance(answer, Exception):
        raise StreamFault(str(answer)) if is_about_stream(answer) else answer
    return answer


def explain_redis_error(error: Exception, where: str, remedies: Remedies) -> TidemarkError | Exception:
    """Convert an error of redis-py to `Unavailable` (known outages only) or `Refused`.

    Args:
        error: the error.
        where: the address for the message, without user and password.
        remedies: texts for a `Refused`.

    Returns:
        The converted error; `error` unchanged if it is of another kind, such as a wrong argument.
    """
    problem = (str(error).splitlines() or [type(error).__name__])[0]
    # Check the causes first: an authentication error is also a connection error, and may be the cause of a Cluster
    # client's error.
    for cause in _causes(error):
        if isinstance(cause, exceptions.AuthenticationError | exceptions.AuthorizationError):
            return Refused("Redis", where, str(cause), remedies.login)
        if isinstance(cause, exceptions.NoPermissionError):
            return Refused("Redis", where, str(cause), remedies.rights)
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return Refused("Redis", where, problem, remedies.transport)
    if isinstance(error, _OUTAGES) or problem.startswith(_OUTAGE_CODES):
        return Unavailable("Redis", where, problem)
    if isinstance(error, exceptions.RedisClusterException):
        is_outage = _CLUSTER_OUTAGE.search(problem) and _NOT_A_CLUSTER not in problem
        return Unavailable("Redis", where, problem) if is_outage else Refused("Redis", where, problem, _CLUSTER_REMEDY)
    if isinstance(error, exceptions.ResponseError):
        return Refused("Redis", where, problem, remedies.rights)
    if isinstance(error, exceptions.InvalidResponse):
        return Refused("Redis", where, problem, remedies.transport)
    return error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


Secret: TypeAlias = Callable[[], str | None]
"""Returns the current password, or None. Called for every new connection, because a password may change."""

_HOST = re.compile(r"(?P<host>\[[^\]]+\]|[^:\[\]]+)(:(?P<port>\d{1,5}))?")
_LOGIN = re.compile(r"(?<=://)[^/?]*@")
_PORTS = {"sentinel": 26379, "cluster": 6379}


def _no_secret() -> None:
    return None


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """An address of Redis.

    `url` has one of these forms, with `rediss` instead of `redis` for TLS:

    - `redis://user:password@host:6379/0`, `unix:///path`: a URL of redis-py, with the options of redis-py
    - `redis+sentinel://user:password@host:26379,host/name/0`: the primary that the Sentinels know as `name`
    - `redis+cluster://user:password@host:6379,host`: some nodes of a Cluster

    Attributes:
        url: the URL.
        password: a function that returns the password, or None for the password in the URL. Called for each new
            connection. If it returns None when a client is created, and the URL has no login, the client never logs in.
        sentinel_password: a function that returns the password for the Sentinels. If it returns None when a client is
            created, the client never logs in to the Sentinels.
        ca_file: a PEM file with the CA certificates for TLS; None: the system's certificates.
        name: the setting or argument that contains the URL, for messages.
    """

    url: str = field(repr=False)
    password: Secret = field(default=_no_secret, repr=False)
    sentinel_password: Secret = field(default=_no_secret, repr=False)
    ca_file: str | None = None
    name: str = "redis"

    @property
    def is_cluster(self) -> bool:
        """Whether the address is of a Cluster, in which two streams may be on different servers."""
        return self._kind == "cluster"

    @property
    def where(self) -> str:
        """The address without user and password, for messages."""
        parts = urlsplit(self.url)
        return parts.netloc.rpartition("@")[2] + parts.path

    def client(self, timeout: float) -> Any:
        """Create a redis-py client for threads, which never retries by itself.

        The client of a Cluster connects at once, so this method may raise errors of redis-py. Other clients connect at
        their first use.

        Args:
            timeout: seconds to wait for a connection, and for an answer.

        Raises:
            BadSetting: the URL is not an address of Redis.
        """
        return self._create_client(redis, {**self._options(timeout), "retry": Retry(NoBackoff(), 0)}, timeout)

    def async_client(self, timeout: float) -> Any:
        """Create a redis-py client for asyncio, which connects at its first use. Arguments and errors: see `client`."""
        # With RESP3, redis-py formats each channel message for its log, even if logging is off.
        options = {**self._options(timeout), "retry": AsyncRetry(NoBackoff(), 0), "protocol": 2}
        return self._create_client(redis.asyncio, options, timeout)

    def _create_client(self, library: Any, options: Mapping[str, Any], timeout: float) -> Any:
        match self._kind:
            case "sentinel":
                name, database = self._service()
                sentinels = library.Sentinel(self._hosts(), sentinel_kwargs=self._sentinel_options(timeout), **options)
                return sentinels.master_for(name, db=database)
            case "cluster":
                nodes = [library.cluster.ClusterNode(host, port) for host, port in self._hosts()]
                return library.RedisCluster(startup_nodes=nodes, **options)
            case _:
                return self._create_server_client(library.Redis, options)

    @property
    def _kind(self) -> str:
        """`sentinel`, `cluster`, or empty for one server."""
        return urlsplit(self.url).scheme.partition("+")[2]

    def _create_server_client(self, client_class: Any, options: Mapping[str, Any]) -> Any:
        try:
            return client_class.from_url(
                _LOGIN.sub("", self.url), **{name: value for name, value in options.items() if name != "ssl"}
            )
        except ValueError:
            raise _bad_address_error(self.name) from None

    def _options(self, timeout: float) -> dict[str, Any]:
        return {
            "decode_responses": True,
            "max_connections": MAX_CONNECTIONS,
            "encoding_errors": "backslashreplace",  # a value of another program must not end a reader
            **self._transport_options(timeout),
            "credential_provider": self._credentials(),
        }

    def _transport_options(self, timeout: float) -> dict[str, Any]:
        options: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        if urlsplit(self.url).scheme.startswith("rediss"):
            options |= {"ssl": True} | ({"ssl_ca_certs": self.ca_file} if self.ca_file else {})
        return options

    def _credentials(self) -> "_Credentials | None":
        user, _, password = urlsplit(self.url).netloc.rpartition("@")[0].partition(":")
        if not user and not password and self.password() is None:
            return None
        return _Credentials(unquote(user), unquote(password), self.password)

    def _sentinel_options(self, timeout: float) -> dict[str, Any]:
        has_password = self.sentinel_password() is not None
        login = {"credential_provider": _Credentials("", "", self.sentinel_password)} if has_password else {}
        return {**self._transport_options(timeout), **login}

    def _hosts(self) -> list[tuple[str, int]]:
        hosts = []
        for text in urlsplit(self.url).netloc.rpartition("@")[2].split(","):
            match = _HOST.fullmatch(text)
            if match is None:
                raise _bad_address_error(self.name)
            hosts.append((match["host"].strip("[]"), int(match["port"] or _PORTS[self._kind])))
        return hosts

    def _service(self) -> tuple[str, int]:
        """The name of the primary in the Sentinels' configuration, and the number of the database."""
        name, _, database = urlsplit(self.url).path.strip("/").partition("/")
        if not name or not (database or "0").isdigit():
            raise _bad_address_error(self.name)
        return unquote(name), int(database or 0)


class _Credentials(CredentialProvider):
    """The credentials for redis-py. redis-py requests them for every new connection, so a changed password is used."""

    def __init__(self, user: str, password: str, read_password: Secret) -> None:
        self._user = user
        self._password = password
        self._read_password = read_password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._read_password() or self._password
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def redis_address(address: str | RedisAddress) -> RedisAddress:
    """Convert a URL to an address. An address is returned unchanged."""
    return RedisAddress(address) if isinstance(address, str) else address


def _bad_address_error(name: str) -> BadSetting:
    """The error for an invalid address. The text does not quote the address, which may contain a password.

    `name`: the setting or argument that contains the address.
    """
    return BadSetting(
        name,
        "the value is not a Redis address; write redis://user:password@host:6379/0, redis+sentinel://host:26379,host/name/0"
        " or redis+cluster://host:6379,host (rediss for TLS)",
    )


def close(client: Any) -> None:
    """Close a client for threads, and its connections to Sentinels or start-up nodes, which redis-py leaves open."""
    client.close()
    for sentinel in _sentinels(client):
        sentinel.close()
    if isinstance(client, redis.RedisCluster):
        for node in client.nodes_manager.startup_nodes.values():
            if node.redis_connection is not None:
                node.redis_connection.close()


async def aclose(client: Any) -> None:
    """Close a client for asyncio, and its connections to Sentinels, which redis-py leaves open."""
    await client.aclose()
    for sentinel in _sentinels(client):
        await sentinel.aclose()


def _sentinels(client: Any) -> list[Any]:
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    return [] if manager is None else list(manager.sentinels)


def database_of(client: Any) -> int:
    """The database number of a redis-py client; 0 for a Cluster."""
    pool = getattr(client, "connection_pool", None)
    return 0 if pool is None else int(pool.connection_kwargs.get("db") or 0)


def display_address(client: Any) -> str:
    """The address of a redis-py client, without user and password, for messages."""
    pool = getattr(client, "connection_pool", None)
    if pool is None:
        return ",".join(f"{node.host}:{node.port}" for node in client.nodes_manager.startup_nodes.values())
    if service := getattr(pool, "service_name", None):
        return f"Sentinel's {service}"
    options = pool.connection_kwargs
    return str(options.get("path") or f"{options.get('host')}:{options.get('port')}/{options.get('db', 0)}")


class RedisSession:
    """A thread-safe client that connects at its first use.

    The constructor raises `BadSetting` for a bad address. For a Cluster, the first `use` raises this error instead.
    """

    def __init__(self, address: RedisAddress, remedies: Remedies, timeout: float) -> None:
        self.where = address.where
        self._address = address
        self._remedies = remedies
        self._timeout = timeout
        self._lock = threading.Lock()
        # A Cluster's client connects when it is created, so it is created at its first use.
        self._client: Any = None if address.is_cluster else address.client(timeout)

    @contextmanager
    def use(self) -> Iterator[Any]:
        """Yield the redis-py client, and convert errors of redis-py in the block: see `explain_redis_error`."""
        try:
            with self._lock:
                if self._client is None:
                    self._client = self._address.client(self._timeout)
            yield self._client
        except REDIS_PY_ERRORS as error:
            raise explain_redis_error(error, self.where, self._remedies) from error

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                close(self._client)


STREAMS_KEY = "tidemark:streams"  # the key of the set of names of all published streams
SENTINEL_KEY = "tidemark:sentinel"  # the key with which `Mirror.check_for_loss` detects a loss of data


def hash_tag(name: str) -> str:
    """The hash tag of a key: `name` in braces. Braces inside `name` are escaped as `{<` and `{>`."""
    return "{" + name.replace("{", "{<").replace("}", "{>") + "}"


def key(stream: str, name: str) -> str:
    """The key `name` of a stream, for example `tidemark:{sales}:positions`."""
    return f"{key_prefix(stream)}:{name}"


def key_prefix(stream: str) -> str:
    """The prefix of all keys of the stream, such as `tidemark:{sales}`; also the name of its channel in database 0."""
    return f"tidemark:{hash_tag(stream)}"


def channel_in_database(channel: str, database: int) -> str:
    """The name of `channel` in one Redis database. All databases of a server share channels, so the names differ."""
    return f"{channel}{database_suffix(database)}"


def database_suffix(database: int) -> str:
    """The suffix of channel names in a Redis database; empty for database 0."""
    return f"/{database}" if database else ""


def channel(stream: str, database: int = 0) -> str:
    """The name of the channel of a stream."""
    return channel_in_database(key_prefix(stream), database)


def channel_pattern(database: int = 0) -> str:
    """The pattern for PSUBSCRIBE that matches the channels of all streams, and no other channel of Tidemark."""
    return channel_in_database("tidemark:{*}", database)


def lines_channel(server: str, database: int = 0) -> str:
    """The channel on which sidecars with the same server name `server` relay replication commands to each other."""
    return channel_in_database(f"tidemark:lines:{server}", database)


def stream_of(channel: str) -> str:
    """The name of the stream to which `channel` belongs. `channel` must match a `channel_pattern`."""
    return channel.removeprefix("tidemark:{").rpartition("}")[0].replace("{>", "}").replace("{<", "{")


_Item = TypeVar("_Item")

ScriptCall = tuple[Sequence[str], Sequence[str | bytes]]
"""One call of a script: its streams, and its arguments after the keys."""

_KEYS = ("linear", "token", "advances", "fence", "allocated")
"""Names of the keys of a stream, besides the positions."""


class Script:
    """A Lua script of this folder: `call.lua`, followed by the file `file`."""

    def __init__(self, file: str) -> None:
        folder = files("tidemark.sinks.redis")
        self._text = "".join(folder.joinpath(name).read_text("utf-8") for name in ("call.lua", file))
        self._sha = sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    def call(self, client: Any, calls: Iterable[ScriptCall]) -> list[Any]:
        """Run the script for each call, in one pipeline. If a server lacks the script, load it, and repeat all calls.

        Returns:
            For each call, the answer or the error. Text is returned as bytes, because a key may contain any bytes.
        """
        calls = list(calls)
        answers = self._call_once(client, calls)
        if any(isinstance(answer, exceptions.NoScriptError) for answer in answers):
            client.script_load(self._text)  # a new or restarted server
            answers = self._call_once(client, calls)
        return answers

    def _call_once(self, client: Any, calls: Sequence[ScriptCall]) -> list[Any]:
        pipeline = client.pipeline(transaction=False)
        is_cluster = isinstance(client, RedisCluster)
        for streams, arguments in calls:
            keys = [key(stream, "positions") for stream in streams]
            # A node that lacks some of the listed keys, because a slot is moving, does not run the script.
            if is_cluster:
                keys += [key(stream, name) for stream in streams for name in _KEYS]
            # redis-py refuses `evalsha` in a Cluster's pipeline, although each call concerns one node.
            pipeline.execute_command("EVALSHA", self._sha, len(keys), *keys, *arguments, **{NEVER_DECODE: True})
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        return answers


def slot_function(client: Any) -> Callable[[str], int]:
    """Create a function that maps a stream to the slot of its keys. Without a Cluster, every slot is 0."""
    if isinstance(client, RedisCluster):
        keyslot: Callable[[str], int] = client.keyslot
        return lambda stream: keyslot(key(stream, "positions"))
    return lambda _: 0


def group_by_slot(
    items: Iterable[tuple[str, int, _Item]], slot: Callable[[str], int], max_size: int
) -> list[list[_Item]]:
    """Group items into calls, so that all streams of a call are in one slot. The order within a slot is kept.

    Args:
        items: (stream, size, item).
        slot: maps a stream to its slot.
        max_size: the largest total size of a call. An item with a larger size gets a call of its own.
    """
    calls: list[list[_Item]] = []
    newest: dict[int, tuple[list[_Item], int]] = {}
    for stream, size, item in items:
        number = slot(stream)
        call, total = newest.get(number, ([], max_size))
        if total + size > max_size:
            call, total = [], 0
            calls.append(call)
        call.append(item)
        newest[number] = call, total + size
    return calls
