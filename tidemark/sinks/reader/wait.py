"""Programs that read the published positions of a stream or wait for positions. No sockets.

`MonotonicPositions` stores the positions that were returned, so that positions never go back.
"""

import math
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from tidemark.common.errors import BadToken, NotReached, StreamNotKnown, Unavailable
from tidemark.common.log import get_logger
from tidemark.sinks.reader.requests import (
    LONGEST_WAIT_SECONDS,
    Answer,
    AwaitEntry,
    CheckStreamName,
    Pause,
    ReadKeys,
    Request,
    StreamKeys,
)
from tidemark.sinks.reader.token import Token, as_token
from tidemark.streaming.values.direction import farther, is_beyond

log = get_logger(__name__)

GRACE_SECONDS = 5.0  # the default of `WaitConfig.grace`, in seconds
WARNING_SECONDS = 60.0  # between two warnings that a token is beyond every known ID
RETRY_SECONDS = 0.2  # between two reads while no server answers


@dataclass(frozen=True, slots=True)
class Recovering:
    """The positions of a stream are unknown: the stream has no records yet, or Redis lost its data and is being filled.

    Attributes:
        stream: the name of the stream.
    """

    stream: str


@dataclass(frozen=True, slots=True)
class PositionSnapshot:
    """The published positions of a stream at one time.

    Attributes:
        stream: the name of the stream.
        linear: the ID up to which the stream is complete, for all writers.
        vector: writer -> the ID up to which everything of the writer is complete.
        allocated: the ID farthest from 0 that any record of the stream has named; None if unknown.
    """

    stream: str
    linear: int
    vector: Mapping[str, int]
    allocated: int | None = None

    @property
    def token(self) -> Token:
        """The positions as a token."""
        return Token.of(self.linear, self.vector)

    @property
    def promised(self) -> int:
        """The ID up to which the stream is complete for all writers: the same as `linear`.

        A service may promise this ID to processes that wait for an ID.
        """
        return self.linear

    @property
    def usable(self) -> int:
        """The farthest position of all writers.

        Beyond `promised`, a service may use the facts of each writer up to the position of that writer in `vector`.
        """
        return self.token.farthest()

    def reached(self, token: Token | str | int) -> bool:
        """Whether the stream is complete up to `token`: a token, its text, or an ID. Raises `BadToken`."""
        return self.token.covers(token)


def snapshot_of(stream: str, keys: StreamKeys) -> PositionSnapshot | Recovering:
    """Return the positions in `keys`; `Recovering` if the stream is unknown."""
    if keys.linear is None:
        return Recovering(stream)
    return PositionSnapshot(stream, keys.linear, keys.positions, keys.allocated)


@dataclass(frozen=True, slots=True)
class PublishedPositions:
    """The published positions of a stream, with the number of its newest late completion.

    Attributes:
        linear: the ID up to which the stream is complete, for all writers.
        vector: writer -> the ID up to which everything of the writer is complete.
        last_late_number: the number of the newest late completion; 0 if there is none.
        allocated: the ID farthest from 0 that any record of the stream has named; None if unknown.
    """

    linear: int
    vector: Mapping[str, int]
    last_late_number: int
    allocated: int | None


P = TypeVar("P", bound=PublishedPositions)


class MonotonicPositions(Generic[P]):
    """Stores the positions that were returned for each stream, so that returned positions never go back (Rule 2).

    The servers may return lower positions than before: Redis may lose its last writes or be restored from an older
    copy, and Postgres may be ahead of Redis. Thread-safe.
    """

    def __init__(self) -> None:
        self._farthest_positions: dict[str, P] = {}
        self._lock = threading.Lock()

    def __contains__(self, stream: str) -> bool:
        return stream in self._farthest_positions

    def get(self, stream: str) -> P | None:
        """The positions that `update` returned last for the stream; None if there are none."""
        return self._farthest_positions.get(stream)

    def items(self) -> Iterable[tuple[str, P]]:
        """Each stream, and the positions that `update` returned last for it."""
        return self._farthest_positions.items()

    def update(self, stream: str, published: P) -> P:
        """Store and return `published`. A position that is lower than the stored position is replaced by the latter."""
        with self._lock:
            before = self._farthest_positions.get(stream)
            farthest = self._farthest_positions[stream] = published if before is None else self.merge(before, published)
        return farthest

    def merge(self, before: P, published: P) -> P:
        """Return `published` with the farther position of each writer. Stores nothing.

        A writer of `before` that is not in `published` is left out if the linear position has passed the writer. The
        token is the same without this writer.
        """
        linear = farther(published.linear, before.linear)
        vector = {name: farther(id, before.vector.get(name, id)) for name, id in published.vector.items()} | {
            name: id for name, id in before.vector.items() if name not in published.vector and is_beyond(id, linear)
        }
        lower = published.allocated is None or is_beyond(before.allocated or 0, published.allocated)
        return replace(
            published,
            linear=linear,
            # Reuses an equal mapping, which may have thousands of writers, to save memory.
            vector=before.vector if vector == before.vector else vector,
            last_late_number=max(published.last_late_number, before.last_late_number),
            allocated=before.allocated if lower else published.allocated,
        )


def keep_keys_monotonic(monotonic: MonotonicPositions[PublishedPositions], stream: str, keys: StreamKeys) -> StreamKeys:
    """Store the positions in `keys`, and return `keys`. A position that is lower than the stored one is replaced by
    the latter.

    If the stream is unknown, `keys` is returned unchanged.
    """
    if keys.linear is None:
        return keys
    farthest = monotonic.update(
        stream, PublishedPositions(keys.linear, keys.positions, keys.last_late_number, keys.allocated)
    )
    return replace(keys, linear=farthest.linear, positions=farthest.vector, allocated=farthest.allocated)


def read_positions(stream: str) -> Generator[Request | PositionSnapshot | Recovering, Answer, None]:
    """Yield a request for the keys of the stream, and then one `PositionSnapshot` or `Recovering`."""
    keys = yield ReadKeys(stream)
    assert isinstance(keys, StreamKeys)
    yield snapshot_of(stream, keys)


@dataclass(frozen=True, slots=True)
class WaitConfig:
    """How long to wait for a token.

    Attributes:
        timeout: the longest wait, in seconds; None: no limit.
        grace: the longest wait, in seconds, while Tidemark has read no record of the stream.
    """

    timeout: float | None
    grace: float


def wait_for_token(
    stream: str, token: Token, config: WaitConfig, clock: Callable[[], float] = time.monotonic
) -> Generator[Request | PositionSnapshot, Answer, None]:
    """Wait until the stream has reached `token`, and yield the snapshot that has reached it.

    Also waits for a token beyond every known ID. The relay and the pipeline may have lag, so only the writer's database
    has the information whether the ID was given out (Rule 9).

    Args:
        stream: the name of the stream.
        token: the token to wait for.
        config: the limits of the wait.
        clock: returns the current time, in seconds.

    Raises:
        NotReached: the stream has not reached `token` after the time-out.
        StreamNotKnown: Tidemark has read no record of the stream for the grace period.
        BadToken: the IDs of `token` and of the stream have different signs.
        Unavailable: no server answers when the time-out ends.
    """
    began = clock()
    deadline = math.inf if config.timeout is None else began + config.timeout
    unknown_since: float | None = None
    next_log = began + GRACE_SECONDS
    while True:
        try:
            keys = yield ReadKeys(stream)
            assert isinstance(keys, StreamKeys)
            is_known = keys.linear is not None or bool((yield CheckStreamName(stream)))
        except Unavailable:
            remaining_seconds = deadline - clock()
            if remaining_seconds <= 0:
                raise
            yield Pause(min(RETRY_SECONDS, remaining_seconds))
            continue
        snapshot = snapshot_of(stream, keys)
        if isinstance(snapshot, PositionSnapshot) and snapshot.reached(token):
            yield snapshot
            return
        now = clock()
        if is_known:
            unknown_since = None
        else:
            unknown_since = now if unknown_since is None else unknown_since
            if now - unknown_since >= config.grace:
                raise StreamNotKnown(stream)
        is_ahead = keys.allocated is not None and is_beyond(token.farthest(), keys.allocated)
        if now >= deadline:
            text = str(snapshot.token) if isinstance(snapshot, PositionSnapshot) else None
            raise NotReached(stream, str(token), text, deadline - began, keys.allocated, is_ahead, is_known)
        if is_ahead and now >= next_log:
            next_log = now + WARNING_SECONDS
            log.warning(
                "Waiting for a token beyond every known ID",
                stream=stream,
                token=str(token),
                allocated=keys.allocated,
                seconds=round(now - began),
            )
        yield AwaitEntry(stream, keys.last_entry_name, min(LONGEST_WAIT_SECONDS, deadline - now))


def target_token(until: Token | str | int, writer: str | None) -> Token:
    """Convert `until` (a token, its text, or an ID) to a token.

    An ID means the position of `writer`, or the linear position if `writer` is None. Raises `BadToken`, also if `until`
    is a token and `writer` is given.
    """
    token = as_token(until)
    if writer is None:
        return token
    if not isinstance(until, int):
        raise BadToken(str(until), f"with the writer {writer!r}, give an ID instead of a token")
    return Token.of(0, {writer: until})
