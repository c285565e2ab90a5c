"""The errors of redis-py, told apart by who must act."""

import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from redis import exceptions as problems

from tidemark.common.errors import Refused, TidemarkError, Unavailable

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
