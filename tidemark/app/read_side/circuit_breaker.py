"""A circuit breaker: a server that just failed is not asked for a moment, so that requests need not wait for it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from tidemark.common.errors import Slow, Stop, TidemarkError, Unavailable

log = structlog.get_logger(__name__)

SECONDS = 0.5
TIMES = 2  # as long as the failure took: so that a server that never answers costs few requests its time-out


class CircuitBreaker:
    """One per server. A server that refuses us is away too, as far as a request is concerned; one that was slow with
    one question is not."""

    def __init__(self, what: str, now: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._now = now
        self._until = 0.0
        self.problem: TidemarkError | None = None
        """Why the server could not be asked the last time; None: it answered."""

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Ask the server in this block. Raises `Unavailable` at once where it just failed, and what the block raises
        of `Unavailable` and `Stop`."""
        if self.problem is not None and self._now() < self._until:
            raise self.problem
        began = self._now()
        try:
            yield
        except Slow:
            raise
        except (Unavailable, Stop) as problem:
            if self.problem is None:
                log.warning(f"{self._what} is away", problem=str(problem))
            self.problem = problem
            now = self._now()
            self._until = now + max(SECONDS, TIMES * (now - began))
            raise
        if self.problem is not None:
            log.info(f"{self._what} answers again")
        self.problem = None
