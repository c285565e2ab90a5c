"""The errors of redis-py, told apart by who must act."""

import ssl
from collections.abc import Iterator
from dataclasses import dataclass

from redis import exceptions as problems

from tidemark.streaming.errors import Refused, TidemarkError, Unavailable

FOREIGN = (problems.RedisError, problems.RedisClusterException)
"""All that redis-py raises."""

_WAITED_FOR = (
    problems.ConnectionError,  # also: loading its data, too many clients, no Sentinel knows the primary
    problems.TimeoutError,
    problems.ReadOnlyError,  # a replica that is about to be promoted
    problems.OutOfMemoryError,
    problems.ClusterError,  # also: replica without its master
    problems.RedisClusterException,
    problems.TryAgainError,
    problems.NoScriptError,  # a restart between two calls
)


@dataclass(frozen=True, slots=True)
class Remedies:
    """Advice for people where Redis does not let us in (`access`), where the two sides do not understand or trust each
    other (`transport`), and where it refuses a command (`rights`)."""

    access: str
    transport: str
    rights: str


def redis_error(error: Exception, where: str, remedies: Remedies) -> TidemarkError | Exception:
    """The error to raise instead of one of `FOREIGN`; `error` itself where it is none of the server's."""
    problem = (str(error).splitlines() or [type(error).__name__])[0]
    causes = list(_causes(error))
    # An authentication error is a connection error too, and may be behind the one that a Cluster's client raises.
    for cause in causes:
        if isinstance(cause, problems.AuthenticationError | problems.AuthorizationError):
            return Refused("Redis", where, str(cause), remedies.access)
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return Refused("Redis", where, problem, remedies.transport)
    if isinstance(error, _WAITED_FOR):
        return Unavailable("Redis", where, problem)
    if isinstance(error, problems.ResponseError):
        return Refused("Redis", where, problem, remedies.rights)
    return error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
