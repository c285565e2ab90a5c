"""Publishes a computed batch to Postgres, then to the sinks, then to the dead letters (docs/design.md 5, rule 4).

One batch is published at a time, on any thread. A step is retried until its server answers. If the answer to a commit
is lost, the next attempt detects the commit. The other steps are idempotent. If the process is killed, the next query
begins after the last commit, and the sinks are refilled from Postgres (`sinks.background`).
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
from tidemark.sinks.dead_letters import DeadLetterResult, DeadLetters
from tidemark.sinks.port import Batch, CommitResult, Sink
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres
from tidemark.sinks.postgres.transaction import is_about_content
from tidemark.streaming.core.effects import ShardEffects

log = get_logger(__name__)

T = TypeVar("T")

CONTENT_ATTEMPTS = 3  # refusals for the same reason before the content of a batch counts as refused
CONTENT_PAUSE_SECONDS = 0.2  # between two attempts to commit a refused batch


@dataclass(frozen=True, slots=True)
class PublishResult:
    """The outcome of publishing a batch.

    Attributes:
        batch: the number of the batch.
        is_repeat: whether Postgres had already applied the batch.
        stream_count: the number of streams that changed for readers: the largest number of all sinks.
        dead_lettered: the numbers of records that were sent to the dead letters.
        published_at: when the last sink had the whole batch, in seconds since 1970.
        seconds: step -> its duration in seconds, including outages. The steps are `postgres`, the name of each sink,
            and `dead_letters`.
    """

    batch: int
    is_repeat: bool
    stream_count: int
    dead_lettered: DeadLetterResult
    published_at: float
    seconds: Mapping[str, float]


class Publisher:
    """Publishes batches.

    The steps of `publish` are `commit`, `publish_to_sink` for each sink, and `dead_letter`. Each step may be repeated.

    Args:
        postgres: commits the batches.
        sinks: publish copies of Postgres.
        dead_letters: send the rejected records to their topic.
        lease: the lease of this pipeline, which is checked before each attempt of a step.
        stopping: once this event is set, waits end with `Stopping`.
        on_unavailable: called with each `Unavailable` that an attempt has raised, before the next attempt.
    """

    def __init__(
        self,
        postgres: Postgres,
        sinks: Sequence[Sink],
        dead_letters: DeadLetters,
        lease: Lease,
        stopping: threading.Event,
        on_unavailable: Callable[[Unavailable], object] = lambda _: None,
    ) -> None:
        self._postgres = postgres
        self._sinks = sinks
        self._dead_letters = dead_letters
        self._lease = lease
        self._stopping = stopping
        self._on_unavailable = on_unavailable

    def publish(
        self,
        query: str,
        number: int,
        effects: Sequence[ShardEffects],
        previous_batch: tuple[str, int] | EllipsisType | None = ...,
    ) -> PublishResult:
        """Publish batch `number` of `query` to Postgres, the sinks and the dead letters.

        Waits without a limit while a server is unavailable. After an error the query cannot continue, and must be
        started again.

        Args:
            query: the name of the query, one for each start of the pipeline.
            number: the number of the batch in its query.
            effects: the effects of the batch for each shard.
            previous_batch: the batch that Postgres must have applied last; see `port.Batch`.

        Raises:
            Stopping: the event `stopping` was set during a wait.
            LeaseLost: another process has the lease.
            ContentRefused: Postgres refuses the content of the batch.
            ChainBroken: Postgres has not applied the batch `previous_batch` last, or lacks an earlier advance.
            Stop: a person must act, for example if a server refuses the login or the topic of dead letters is missing.
        """
        batch = Batch(query, number, self._lease.token, effects, previous_batch)
        seconds: dict[str, float] = {}
        committed, seconds["postgres"] = self._with_retries(lambda: self._commit_content(batch))
        streams = 0
        for sink in self._sinks:
            changed, seconds[sink.name] = self._with_retries(partial(self.publish_to_sink, sink, batch, committed))
            streams = max(streams, changed)
        published_at = time.time()
        dead_lettered, seconds["dead_letters"] = self._with_retries(lambda: self.dead_letter(batch))
        return PublishResult(number, committed.is_repeat, streams, dead_lettered, published_at, seconds)

    def _commit_content(self, batch: Batch) -> CommitResult:
        """Call `commit`, and repeat it if Postgres refuses the content of the batch.

        Raises `ContentRefused` after `CONTENT_ATTEMPTS` refusals in succession for the same reason, and `Stopping`.
        """
        problems: list[str] = []
        while True:
            try:
                return self.commit(batch)
            except psycopg.Error as error:
                if not is_about_content(error):
                    raise
                problem = first_line(error)
                problems = [*(earlier for earlier in problems if earlier == problem), problem]
                if len(problems) >= CONTENT_ATTEMPTS:
                    records = sum(sum(s.counts.values()) for _, s in batch.streams())
                    raise ContentRefused(batch.number, problem, max(1, records // 2)) from error
                log.warning(
                    "Postgres refuses the content of a batch; trying again", batch=batch.number, problem=problem
                )
            if self._stopping.wait(CONTENT_PAUSE_SECONDS):
                raise Stopping("stopped while Postgres refused a batch")

    def commit(self, batch: Batch) -> CommitResult:
        """Apply the batch in a transaction in Postgres, without a retry. Errors: see `Postgres.apply`."""
        committed = self._postgres.apply(batch)
        if committed.is_repeat:
            log.info("The batch was committed before; repeating the steps after the commit", batch=batch.number)
        return committed

    def publish_to_sink(self, sink: Sink, batch: Batch, committed: CommitResult) -> int:
        """Publish the batch to one sink. Returns the number of streams that changed for readers."""
        return sink.publish(batch, committed)

    def dead_letter(self, batch: Batch) -> DeadLetterResult:
        """Send the rejected records of the batch to the dead letters, then delete these records from Postgres."""
        rejected_records = batch.rejected_records()
        result = self._dead_letters.send(rejected_records)
        if rejected_records:
            self._postgres.delete_unsent_dead_letters(batch.query, batch.number)
        return result

    def send_unsent_dead_letters(self) -> None:
        """Send the dead letters that earlier queries committed to Postgres but may not have sent.

        The batches of earlier queries are not repeated, so nothing else sends these dead letters. Waits while Kafka is
        unavailable. Raises `Unavailable` if Postgres is unavailable, `Stopping`, `LeaseLost` and `Stop`.
        """
        for unsent in self._postgres.unsent_dead_letters():
            self._with_retries(partial(self._dead_letters.send, unsent.rejected))
            self._postgres.delete_unsent_dead_letters(unsent.query, unsent.batch)
            log.info("Sent the dead letters of an earlier query", query=unsent.query, batch=unsent.batch)

    def _with_retries(self, step: Callable[[], T]) -> tuple[T, float]:
        """Repeat `step` until its server answers. Returns the result, and the duration in seconds.

        Raises `LeaseLost` before an attempt if the lease is lost, and `Stopping`.
        """

        def run_step() -> T:
            self._lease.check()
            try:
                return step()
            except LeaseLost as error:
                self._lease.note_lost(error.newest)
                raise

        began = time.monotonic()
        return wait_out(run_step, self._stopping, on_failure=self._on_unavailable), time.monotonic() - began
