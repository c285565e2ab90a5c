"""What happens to a batch outside Spark: Postgres, then Redis, then the dead letters (docs/design.md 5; rule 4).

Called by foreachBatch, on one thread of the driver. A batch may come again after any failure, and after
a kill at any moment: what Postgres has is skipped there, and the rest is repeated, which changes nothing.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from tidemark.sinks.batch import Batch, Committed
from tidemark.sinks.dead_letters import DeadLettered, DeadLetters
from tidemark.sinks.mirror import Mirror
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres
from tidemark.sinks.retry import wait_out
from tidemark.streaming.effects import ShardEffects
from tidemark.streaming.errors import LeaseLost

log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Published:
    """What came of a batch. Seconds include the waiting for a sink that was away.

    `repeated`: Postgres had it already. `streams` changed for readers. `published_at` is the time (seconds since
    1970) at which Redis had all of it.
    """

    batch: int
    repeated: bool
    streams: int
    buried: DeadLettered
    published_at: float
    postgres_seconds: float
    redis_seconds: float
    dead_letters_seconds: float


class Publisher:
    """`commit`, `show` and `bury` are the steps of `publish`, in that order; each may be repeated."""

    def __init__(
        self, postgres: Postgres, mirror: Mirror, dead_letters: DeadLetters, lease: Lease, stopping: threading.Event
    ) -> None:
        self._postgres = postgres
        self._mirror = mirror
        self._dead_letters = dead_letters
        self._lease = lease
        self._stopping = stopping

    def publish(self, query: str, number: int, effects: Sequence[ShardEffects]) -> Published:
        """Bring batch `number` of `query` to all sinks, waiting out those that are away for as long as it takes.

        Raises `Stopping` soon after the event is set while it waits, `LeaseLost` once another query owns the lease, and
        errors of the kind `Stop`. The batch is to be published again after each of them.
        """
        batch = Batch(query, number, self._lease.token, effects)
        applied, postgres_seconds = self._patiently(lambda: self.commit(batch))
        streams, redis_seconds = self._patiently(lambda: self.show(batch, applied))
        published_at = time.time()
        buried, dead_letters_seconds = self._patiently(lambda: self.bury(batch))
        return Published(
            number,
            applied.repeated,
            streams,
            buried,
            published_at,
            postgres_seconds,
            redis_seconds,
            dead_letters_seconds,
        )

    def commit(self, batch: Batch) -> Committed:
        applied = self._postgres.apply(batch)
        if applied.repeated:
            log.info("This batch was committed before; repeating what comes after", batch=batch.number)
        return applied

    def show(self, batch: Batch, applied: Committed) -> int:
        return self._mirror.publish(batch, applied)

    def bury(self, batch: Batch) -> DeadLettered:
        rejected = batch.rejected()
        buried = self._dead_letters.send(rejected)
        if rejected:
            self._postgres.letters_sent(batch.query, batch.number)
        return buried

    def bury_left(self, query: str) -> None:
        """Send the dead letters of batches that no query will bring again, because their checkpoint is gone.

        `query` goes on, and repeats its last batch by itself. Waits and raises as `publish` does.
        """
        for left in self._postgres.unsent_letters():
            if left.query != query:
                self._patiently(partial(self._dead_letters.send, left.rejected))
                self._postgres.letters_sent(left.query, left.batch)
                log.info("Sent dead letters that an earlier query had left", query=left.query, batch=left.batch)

    def _patiently(self, step: Callable[[], T]) -> tuple[T, float]:
        def checked() -> T:
            self._lease.check()
            try:
                return step()
            except LeaseLost as error:
                self._lease.lose(error.now)
                raise

        began = time.monotonic()
        return wait_out(checked, self._stopping), time.monotonic() - began
