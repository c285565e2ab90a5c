"""How the library connects to Redis, in both forms: what a client is made with, and what its errors mean."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from redis import exceptions as problems

from sinks.redis import address
from sinks.redis_problems import Remedies, explained
from streaming.errors import BadSetting

TIMEOUT = 5.0  # seconds for a connection or an answer

OPTIONS: Mapping[str, Any] = {"decode_responses": True, "socket_timeout": TIMEOUT, "socket_connect_timeout": TIMEOUT}

_REMEDIES = Remedies(
    access="check user and password of the Redis address",
    rights="allow the user to read the keys tidemark:* (+@read +multi +exec)",
)


def bad_address() -> BadSetting:
    """Without the address, which may hold a password."""
    return BadSetting("redis", "is not a Redis address; write redis://user:password@host:6379/0")


@contextmanager
def translated(client: Any) -> Iterator[None]:
    """Turn what `client`, of either form, raises into `Unavailable` (ask again) and `Refused`."""
    try:
        yield
    except problems.RedisError as error:
        raise explained(error, address(client.connection_pool.connection_kwargs), _REMEDIES) from error
