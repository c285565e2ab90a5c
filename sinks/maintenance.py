"""The thread that looks after the sinks while no batch runs: refills Redis, and tidies Postgres's history.

Spark runs no batch while no data comes, so an idle system needs this. The thread ends with the lease.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

import structlog

from tidemark.sinks.mirror import Mirror
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres
from tidemark.sinks.redis.publish import Redis
from tidemark.streaming.errors import LeaseLost, Stop, TidemarkError

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MaintenanceConfig:
    """Seconds between looks at the sentinel, between comparisons of everything, and between tidyings."""

    look: float = 1.0
    compare: float = 60.0
    tidy: float = 3600.0


class Maintenance:
    """A context manager. Problems are logged and tried again at the next look.

    `failure` is the `Stop` among them, for the thread that supervises.
    """

    def __init__(
        self, mirror: Mirror, postgres: Postgres, redis: Redis, lease: Lease, terms: MaintenanceConfig
    ) -> None:
        self._mirror = mirror
        self._postgres = postgres
        self._redis = redis
        self._lease = lease
        self._terms = terms
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._stamps = 0
        self._compared = -float("inf")
        self._tidied = -float("inf")
        self._trouble: dict[str, str] = {}
        self.failure: Stop | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._try("Redis", self._look)
                self._try("Postgres's history", self._tidy)
                self._closing.wait(self._terms.look)
        except LeaseLost as error:
            self._lease.lose(error.now)
            log.info("Another query looks after the sinks now")

    def _try(self, what: str, step: Callable[[], None]) -> None:
        try:
            self._lease.check()
            step()
        except LeaseLost:
            raise
        except Stop as problem:
            self.failure = problem
        except TidemarkError as problem:
            if self._trouble.get(what) != str(problem):  # once, not at every look
                log.warning(f"Could not look after {what}; trying again", problem=str(problem))
            self._trouble[what] = str(problem)
        else:
            if self._trouble.pop(what, None):
                log.info(f"Looking after {what} again")

    def _look(self) -> None:
        """Compare with Postgres where Redis does not remember our last stamp: it was flushed, restored or replaced."""
        ours = f"{self._lease.token}:{self._stamps}"
        self._stamps += 1
        due = time.monotonic() - self._compared >= self._terms.compare
        if self._redis.stamp(f"{self._lease.token}:{self._stamps}") != ours or due:
            # Should the refill fail, the next look must not take our new stamp for a sign of health.
            self._compared = -float("inf")
            self._mirror.refill()
            self._compared = time.monotonic()

    def _tidy(self) -> None:
        if time.monotonic() - self._tidied >= self._terms.tidy:
            self._postgres.tidy(datetime.now(UTC))
            self._tidied = time.monotonic()
