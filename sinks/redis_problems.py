"""What Redis's client raises, told apart by who must act."""

from dataclasses import dataclass

from redis import exceptions as problems

from streaming.errors import Refused, TidemarkError, Unavailable

_WAITED_FOR = (
    problems.ConnectionError,  # also: loading its data, too many clients
    problems.TimeoutError,
    problems.ReadOnlyError,  # a replica that is about to be promoted
    problems.OutOfMemoryError,
    problems.ClusterDownError,  # also: replica without its master
    problems.TryAgainError,
)


@dataclass(frozen=True, slots=True)
class Remedies:
    """What to do when Redis does not let us in (`access`), and when it does not let us do something (`rights`)."""

    access: str
    rights: str


def explained(error: problems.RedisError, where: str, remedies: Remedies) -> TidemarkError | problems.RedisError:
    """The error to raise instead; `error` itself where it is none of the server's."""
    problem = (str(error).splitlines() or [type(error).__name__])[0]
    # An authentication error is a connection error too, so it comes first.
    if isinstance(error, problems.AuthenticationError | problems.AuthorizationError):
        return Refused("Redis", where, problem, remedies.access)
    if isinstance(error, _WAITED_FOR):
        return Unavailable("Redis", where, problem)
    if isinstance(error, problems.ResponseError):
        return Refused("Redis", where, problem, remedies.rights)
    return error
