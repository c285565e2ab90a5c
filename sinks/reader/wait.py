"""Published positions of a stream, and the programs that read them or wait for them. No sockets."""

import math
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from tidemark.sinks.reader.io import LONGEST_WAIT, Answer, AwaitEntry, KeysFound, Pause, ReadKeys, Request
from tidemark.sinks.reader.token import Token
from tidemark.streaming.direction import beyond
from tidemark.streaming.errors import NotReached, TokenFromTheFuture, Unavailable

GRACE = 5.0
PAUSE = 0.2  # seconds until a Redis that is away is asked again


@dataclass(frozen=True, slots=True)
class Recovering:
    """Nothing is known of `stream`: it has no facts yet, or Redis lost its data and is being filled. Never 0."""

    stream: str


@dataclass(frozen=True, slots=True)
class Standing:
    """The published positions. `allocated` is the highest ID that any record of the stream named; None: unknown."""

    stream: str
    linear: int
    vector: Mapping[str, int]
    allocated: int | None = None

    @property
    def token(self) -> Token:
        return Token.of(self.linear, self.vector)

    def reached(self, token: Token) -> bool:
        """Whether all that `token` stands for is complete."""
        return self.token.covers(token)


def standing(stream: str, seen: KeysFound) -> Standing | Recovering:
    if seen.linear is None:
        return Recovering(stream)
    return Standing(stream, seen.linear, seen.positions, seen.allocated)


def getting(stream: str) -> Generator[Request | Standing | Recovering, Answer, None]:
    """Gives one `Standing` or `Recovering`."""
    seen = yield ReadKeys(stream)
    assert isinstance(seen, KeysFound)
    yield standing(stream, seen)


@dataclass(frozen=True, slots=True)
class WaitConfig:
    """Seconds to wait for a token: at most `timeout` (None: for ever), and at most `grace` while it is ahead of all
    that Tidemark has heard of. It may be so for a moment: what a writer reserved, its next heartbeat announces."""

    timeout: float | None
    grace: float


def waiting(
    stream: str, token: Token, config: WaitConfig, clock: Callable[[], float] = time.monotonic
) -> Generator[Request | Standing, Answer, None]:
    """Gives a `Standing` that has reached `token`. Raises `NotReached`, `TokenFromTheFuture` and, where Redis is away
    when the time is over, `Unavailable`."""
    began = clock()
    deadline = math.inf if config.timeout is None else began + config.timeout
    ahead_since: float | None = None
    while True:
        try:
            seen = yield ReadKeys(stream)
        except Unavailable:
            left = deadline - clock()
            if left <= 0:
                raise
            yield Pause(min(PAUSE, left))
            continue
        assert isinstance(seen, KeysFound)
        stands = standing(stream, seen)
        if isinstance(stands, Standing) and stands.reached(token):
            yield stands
            return
        now = clock()
        if seen.allocated is None or not beyond(token.farthest(), seen.allocated):
            ahead_since = None
        elif ahead_since is None:
            ahead_since = now
        elif now - ahead_since >= config.grace:
            raise TokenFromTheFuture(stream, str(token), seen.allocated)
        if now >= deadline:
            text = str(stands.token) if isinstance(stands, Standing) else None
            raise NotReached(stream, str(token), text, deadline - began)
        yield AwaitEntry(stream, seen.last, min(LONGEST_WAIT, deadline - now))


def target(until: Token | str | int, writer: str | None) -> Token:
    """The token that stands for `until`. Raises `BadToken`."""
    match until:
        case Token():
            return until
        case str():
            return Token.parse(until)
        case int() if writer is None:
            return Token(until)
        case int():
            return Token.of(0, {writer: until})
