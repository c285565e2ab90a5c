"""How the library connects to Redis, in both forms: what a client is made with, and what its errors mean."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tidemark.sinks.redis_address import whereabouts
from tidemark.sinks.redis_problems import FOREIGN, Remedies, explained

TIMEOUT = 5.0  # seconds for a connection or an answer

REMEDIES = Remedies(
    access="check user and password of the Redis address",
    transport="check that the Redis address begins with rediss, its host name, and the CA file",
    rights="allow the user to read the keys tidemark:* (+@read +multi +exec)",
)


@contextmanager
def translated(client: Any) -> Iterator[None]:
    """Turn what `client`, of either form, raises into `Unavailable` (ask again) and `Refused`."""
    try:
        yield
    except FOREIGN as error:
        raise explained(error, whereabouts(client), REMEDIES) from error
