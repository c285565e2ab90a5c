"""The way of a batch outside Spark: Postgres, then the sinks, then the dead letters (docs/design.md 5; rule 4).

One batch at a time, on whatever thread. A step is tried again until its server answers: a commit whose answer was lost
is found there and not made twice, and the others change nothing by being repeated. After a kill the next query begins
behind the last commit; what the sinks lack of it is filled in from Postgres (`sinks.background`).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import TypeVar

import psycopg

from tidemark.common.backoff import wait_out
from tidemark.common.errors import ContentRefused, LeaseLost, Stopping, Unavailable
from tidemark.common.log import get_logger
from tidemark.common.postgres_session import first_line
from tidemark.sinks.dead_letters import DeadLettered, DeadLetters
from tidemark.sinks.port import Batch, Committed, Sink
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres
from tidemark.sinks.postgres.transaction import is_about_content
from tidemark.streaming.core.effects import ShardEffects

log = get_logger(__name__)

T = TypeVar("T")

CONTENT_ATTEMPTS = 3  # of which Postgres refuses each for the same reason
CONTENT_PAUSE = 0.2  # seconds between two of them


@dataclass(frozen=True, slots=True)
class Published:
    """The outcome of a batch.

    `repeated`: Postgres had it already. `streams` changed for readers. `published_at` is the time (seconds since
    1970) at which every sink had all of it. `seconds`, by step (`postgres`, each sink by its name, `dead_letters`),
    include the waiting for a server that was away.
    """

    batch: int
    repeated: bool
    streams: int
    dead_lettered: DeadLettered
    published_at: float
    seconds: Mapping[str, float]


class Publisher:
    """`commit`, `show` for each sink in turn, and `dead_letter` are the steps of `publish`; each may be repeated.

    `failed` is told of each attempt that a server did not answer.
    """

    def __init__(
        self,
        postgres: Postgres,
        sinks: Sequence[Sink],
        dead_letters: DeadLetters,
        lease: Lease,
        stopping: threading.Event,
        failed: Callable[[Unavailable], object] = lambda _: None,
    ) -> None:
        self._postgres = postgres
        self._sinks = sinks
        self._dead_letters = dead_letters
        self._lease = lease
        self._stopping = stopping
        self._failed = failed

    def publish(
        self,
        query: str,
        number: int,
        effects: Sequence[ShardEffects],
        after: tuple[str, int] | EllipsisType | None = ...,
    ) -> Published:
        """Bring batch `number` of `query` to all sinks, waiting out those that are away for as long as it takes.

        Raises `Stopping` soon after the event is set while it waits, `LeaseLost` once another query owns the lease, and
        errors of the kind `Stop`. Raises `ContentRefused` if Postgres refuses the content of the batch.
        Raises `ChainBroken` where Postgres has not applied `after` last (`port.Batch`). The
        query must begin anew after each of them.
        """
        batch = Batch(query, number, self._lease.token, effects, after)
        seconds: dict[str, float] = {}
        committed, seconds["postgres"] = self._patiently(lambda: self._commit_content(batch))
        streams = 0
        for sink in self._sinks:
            changed, seconds[sink.name] = self._patiently(partial(self.show, sink, batch, committed))
            streams = max(streams, changed)
        published_at = time.time()
        dead_lettered, seconds["dead_letters"] = self._patiently(lambda: self.dead_letter(batch))
        return Published(number, committed.repeated, streams, dead_lettered, published_at, seconds)

    def _commit_content(self, batch: Batch) -> Committed:
        """`commit`; raises `ContentRefused` if Postgres refuses what is in the batch, for the same reason each time."""
        problems: list[str] = []
        while True:
            try:
                return self.commit(batch)
            except psycopg.Error as error:
                if not is_about_content(error):
                    raise
                problem = first_line(error)
                problems = [*(it for it in problems if it == problem), problem]
                if len(problems) >= CONTENT_ATTEMPTS:
                    records = sum(sum(s.counts.values()) for _, s in batch.streams())
                    raise ContentRefused(batch.number, problem, max(1, records // 2)) from error
                log.warning("Postgres refuses the content of a batch", batch=batch.number, problem=problem)
            if self._stopping.wait(CONTENT_PAUSE):
                raise Stopping("told to stop while Postgres refused a batch")

    def commit(self, batch: Batch) -> Committed:
        committed = self._postgres.apply(batch)
        if committed.repeated:
            log.info("This batch was committed before; repeating what comes after", batch=batch.number)
        return committed

    def show(self, sink: Sink, batch: Batch, committed: Committed) -> int:
        return sink.publish(batch, committed)

    def dead_letter(self, batch: Batch) -> DeadLettered:
        rejected = batch.rejected()
        dead_lettered = self._dead_letters.send(rejected)
        if rejected:
            self._postgres.dead_letters_sent(batch.query, batch.number)
        return dead_lettered

    def send_unsent(self) -> None:
        """Send the dead letters that earlier queries left: nobody brings their batches again. Waits and raises as
        `publish` does.
        """
        for left in self._postgres.unsent_dead_letters():
            self._patiently(partial(self._dead_letters.send, left.rejected))
            self._postgres.dead_letters_sent(left.query, left.batch)
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
        return wait_out(checked, self._stopping, failed=self._failed), time.monotonic() - began
