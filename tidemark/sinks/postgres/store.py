"""Postgres, the durable source of truth: writes of the pipeline, and reads for its start, its sinks and the sidecar.

Batches (the thread of foreachBatch), requeues, and all other work (such as maintenance and probes) have a session each,
so that none of the three waits for another.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Self

import msgspec

from tidemark.common.log import get_logger
from tidemark.common.postgres_session import Dsn, fetch_value
from tidemark.sinks.port import Batch, CommitResult
from tidemark.sinks.postgres import history, retention, transaction
from tidemark.sinks.postgres.database import OLDEST_READABLE_VERSION, SCHEMA, execute, session_of
from tidemark.sinks.postgres.history import (
    ChangesSince,
    DurableMark,
    FullChanges,
    PageBounds,
    StoredAdvance,
    StoredLate,
    StoredPage,
)
from tidemark.sinks.postgres.operators import PolicyTable
from tidemark.sinks.postgres.positions import (
    PendingRequeue,
    add_requeues,
    forget_retired,
    give_up_requeues,
    note_requeue,
    pending_requeues,
    stored_positions,
)
from tidemark.sinks.postgres.retention import Retention, RetentionClock
from tidemark.sinks.postgres.status import SELECT_STATES, ConditionReader, note_faults, note_lagging_partitions
from tidemark.sinks.postgres.transaction import BatchWait, UnsentDeadLetters, apply
from tidemark.streaming.core.effects import RequeuedRange
from tidemark.streaming.values.limits import Bounds, EncodedState

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PostgresConfig:
    """The address of Tidemark's database (may contain a password), and the retention periods."""

    dsn: Dsn = field(repr=False)
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True, slots=True)
class RememberedSetup:
    """The setup of the last start, with which the next start must agree.

    Attributes:
        shard_count: the number of shards; None before the first start.
        topics: name -> (Kafka's topic ID, number of partitions); empty before the first start.
    """

    shard_count: int | None
    topics: dict[str, tuple[str, int]]


class StreamPositions(msgspec.Struct, frozen=True, gc=False):
    """The committed positions of a stream.

    Attributes:
        linear: the linear position.
        allocated: the highest ID that any record has named.
        last_late_number: the number of the newest late completion; 0 if there is none.
        positions: writer -> position. Forgotten writers are left out.
        forgotten_writers: writers that retired long ago. They must not be in Redis.
    """

    linear: int
    allocated: int
    last_late_number: int
    positions: dict[str, int]
    forgotten_writers: frozenset[str]


class Postgres:
    """The pipeline's access to Postgres. A context manager that closes its sessions. Thread-safe.

    All methods raise `Unavailable` (call again) and `Refused`.

    Attributes:
        where: the address without user and password, for messages.
        batch_wait: finds out what a running batch waits for in Postgres.
        conditions: reads the status of the pipeline.
        policies: reads and changes policies.
        clock: the clock for retention.
    """

    def __init__(self, config: PostgresConfig) -> None:
        self._config = config
        self._batches = session_of(config.dsn, "tidemark batches")
        self._reads = session_of(config.dsn, "tidemark reads")
        self._requeues = session_of(config.dsn, "tidemark requeues")
        self.batch_wait = BatchWait(session_of(config.dsn, "tidemark waits"))
        self.where = self._batches.where
        self.conditions = ConditionReader(self._reads)
        self.policies = PolicyTable(self._reads)
        self.clock = RetentionClock(self._reads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._batches.close()
        self._reads.close()
        self._requeues.close()
        self.batch_wait.close()

    def check_writable(self) -> None:
        """Raise an error unless this Tidemark can write in the schema: see `Migrations.check_writable`."""
        with self._reads.use() as connection:
            SCHEMA.check_writable(connection)

    def check_readable(self) -> None:
        """Raise an error unless this Tidemark can read the schema: see `Migrations.check_readable`."""
        with self._reads.use() as connection:
            SCHEMA.check_readable(connection, OLDEST_READABLE_VERSION)

    def pipeline_version(self) -> str:
        """The version of the pipeline that acquired the lease last; empty if no pipeline has acquired the lease."""
        return self._reads.fetch_value("select version from tidemark.query_lease") or ""

    def apply(self, batch: Batch) -> CommitResult:
        """Commit the batch: see `transaction.apply`.

        After `Unavailable`, the commit may have succeeded. Call again: the next call detects a committed batch.

        Raises:
            LeaseLost, ChainBroken: see `transaction.apply`.
            psycopg.Error: the server refuses the content of the batch (`transaction.is_about_content`).
        """
        with self._batches.use() as connection, self.batch_wait.track(connection):
            return apply(connection, batch)

    def find_refusal(self, batch: Batch) -> str | None:
        """Try to write the batch, roll back, and return an error about its content: see `transaction.find_refusal`."""
        with self._batches.use() as connection, self.batch_wait.track(connection):
            return transaction.find_refusal(connection, batch)

    def set_late_numbers_ahead(self) -> None:
        """Raise the next number of a late completion to the clock (microseconds since 1970), unless it is higher.

        A new owner of the lease calls this before its first batch. Without this call, a restored database would repeat
        numbers that readers already have.
        """
        self._batches.execute(
            "select setval('tidemark.late_completions_number_seq', greatest(last_value,"
            " (extract(epoch from clock_timestamp()) * 1000000)::bigint))"
            " from tidemark.late_completions_number_seq"
        )

    def unsent_dead_letters(self) -> list[UnsentDeadLetters]:
        """Read the rejected records whose dead letters may not be in Kafka yet."""
        with self._reads.use() as connection:
            return transaction.unsent_dead_letters(connection)

    def delete_unsent_dead_letters(self, query: str, batch: int) -> None:
        """Delete the rejected records of a batch, after its dead letters have been written to Kafka."""
        with self._batches.use() as connection:
            transaction.delete_unsent_dead_letters(connection, query, batch)

    def pending_requeues(self) -> list[PendingRequeue]:
        """Delete obsolete requeues, and return the pending ones: see `positions.pending_requeues`."""
        with self._requeues.use() as connection:
            return pending_requeues(connection)

    def note_requeue(self, requeue: PendingRequeue, problem: str | None = None) -> None:
        """Store the progress and the problem of a requeue: see `positions.note_requeue`."""
        with self._requeues.use() as connection:
            note_requeue(connection, requeue, problem)

    def give_up_requeues(self, deferred_ranges: Iterable[tuple[str, RequeuedRange]], why: str) -> None:
        """Store the deferred records as requeues, and give up all requeues, because their offsets are no longer valid.

        Args:
            deferred_ranges: (stream, range of offsets).
            why: the problem to store with each requeue.
        """
        with self._batches.use() as connection, connection.transaction():
            add_requeues(connection, deferred_ranges)
            give_up_requeues(connection, why)

    def note_lagging_partitions(
        self, partitions: Sequence[tuple[str, int, int, float, int | None, float | None]]
    ) -> None:
        """Replace the stored lagging partitions: see `status.note_lagging_partitions`."""
        with self._reads.use() as connection:
            note_lagging_partitions(connection, partitions)

    def note_faults(self, faults: Mapping[tuple[str, str], str]) -> None:
        """Replace the stored faults of the sinks by `faults`: (sink, stream) -> problem."""
        with self._reads.use() as connection:
            note_faults(connection, faults)

    def last_batch(self) -> tuple[str, int] | None:
        """(query, number) of the batch that was applied last; None before the first batch."""
        with self._reads.use() as connection:
            return connection.execute(
                "select query, batch from tidemark.applied_batches order by number desc limit 1"
            ).fetchone()

    def states(self, streams: Collection[str] | None = None) -> dict[str, bytes]:
        """Read stream -> encoded state. `streams`: None for all streams, which a query without a checkpoint needs."""
        names = None if streams is None else list(streams)
        return dict(self._reads.fetch_tuples(SELECT_STATES, {"streams": names}))

    def replace_states(self, states: Mapping[str, EncodedState]) -> None:
        """Replace the states of existing streams outside a batch. Only after an operator has accepted a loss."""
        with self._batches.use() as connection, connection.transaction():
            execute(
                connection,
                "update tidemark.streams s set state = given.state, retired = given.retired"
                " from unnest(%s::text[], %s::bytea[], %s::bytea[]) as given (stream, state, retired)"
                " where s.stream = given.stream",
                ((stream, state.state, state.retired_table) for stream, state in states.items()),
            )

    def offsets(self) -> dict[str, dict[int, int]]:
        """Topic -> partition -> the first offset whose record is not in the states."""
        offsets: dict[str, dict[int, int]] = {}
        rows = self._reads.fetch_tuples("select topic, partition, next from tidemark.kafka_offsets order by 1, 2")
        for topic, partition, following in rows:
            offsets.setdefault(topic, {})[partition] = following
        return offsets

    def set_offsets(self, offsets: dict[str, dict[int, int]]) -> None:
        """Replace all offsets of the topics in `offsets`. Only after an operator has accepted a loss.

        `offsets`: topic -> partition -> the next offset to read, which may be lower than the stored one.
        """
        with self._batches.use() as connection, connection.transaction():
            connection.execute("delete from tidemark.kafka_offsets where topic = any(%s)", (list(offsets),))
            execute(
                connection,
                "insert into tidemark.kafka_offsets select * from unnest(%s::text[], %s::int[], %s::bigint[])",
                ((topic, partition, offset) for topic, seen in offsets.items() for partition, offset in seen.items()),
            )

    def remembered_setup(self) -> RememberedSetup:
        """The setup that `remember_setup` stored last."""
        with self._reads.use() as connection:
            shards = fetch_value(connection, "select shards from tidemark.pipeline")
            topics = connection.execute("select topic, topic_id, partitions from tidemark.topics")
            return RememberedSetup(shards, {topic: (topic_id, partitions) for topic, topic_id, partitions in topics})

    def remember_setup(self, remembered: RememberedSetup) -> None:
        """Store the setup. Keeps stored topics that `remembered` lacks; None as `shard_count` keeps the stored
        number."""
        with self._batches.use() as connection, connection.transaction():
            if remembered.shard_count is not None:
                connection.execute(
                    "insert into tidemark.pipeline (shards) values (%s)"
                    " on conflict (singleton) do update set shards = excluded.shards",
                    (remembered.shard_count,),
                )
            execute(
                connection,
                "insert into tidemark.topics select * from unnest(%s::text[], %s::text[], %s::int[])"
                " on conflict (topic) do update set topic_id = excluded.topic_id, partitions = excluded.partitions",
                ((topic, topic_id, partitions) for topic, (topic_id, partitions) in remembered.topics.items()),
            )

    def streams(self) -> list[str]:
        """The names of all streams, sorted."""
        return [stream for (stream,) in self._reads.fetch_tuples("select stream from tidemark.streams order by 1")]

    def positions(self, streams: Collection[str]) -> dict[str, StreamPositions]:
        """Read stream -> positions, for `streams`. Unknown streams are left out. No position is older than the call."""
        condition = " where stream = any(string_to_array(%s, ' '))"  # no name has a space
        names = (" ".join(streams),)
        positions: dict[str, dict[str, int]] = {}
        forgotten: dict[str, list[str]] = {}
        with self._reads.use() as connection:
            # Linear positions first: a linear position must not be newer than the positions of the writers.
            rows = connection.execute(f"select stream, linear, head from tidemark.streams{condition}", names).fetchall()
            late = dict(
                connection.execute(
                    f"select stream, max(number) from tidemark.late_completions{condition} group by stream", names
                )
            )
            for stream, writer, position, is_forgotten in stored_positions(connection, streams):
                if is_forgotten:
                    forgotten.setdefault(stream, []).append(writer)
                elif (known := positions.get(stream)) is None:
                    positions[stream] = {writer: position}
                else:
                    known[writer] = position
        return {
            stream: StreamPositions(
                linear, allocated, late.get(stream, 0), positions.get(stream, {}), frozenset(forgotten.get(stream, ()))
            )
            for stream, linear, allocated in rows
        }

    def page_after(
        self, stream: str, position_of: Callable[[str], int], last_late_number: int, bounds: PageBounds
    ) -> StoredPage:
        """Read the next page of a stream's history for a reader: see `history.page_after`."""
        with self._reads.use() as connection:
            return history.page_after(connection, stream, position_of, last_late_number, bounds)

    def advances_since(
        self, known_positions: Iterable[tuple[str, str, int]], per_writer: int
    ) -> dict[tuple[str, str], list[StoredAdvance]]:
        """Read the advances of writers beyond given positions: see `history.advances_since`."""
        with self._reads.use() as connection:
            return history.advances_since(connection, known_positions, per_writer)

    def changes_since(self, since: DurableMark | None, streams: Collection[str] | None) -> ChangesSince:
        """Read the streams that changed since a mark: see `history.changes_since`."""
        with self._reads.use() as connection:
            return history.changes_since(connection, since, streams)

    def full_changes_since(self, since: DurableMark, limit: int, timeout: float) -> FullChanges | None:
        """Read all advances and late completions since a mark: see `history.full_changes_since`."""
        with self._reads.use() as connection:
            return history.full_changes_since(connection, since, limit, timeout)

    def late_since(self, known_numbers: Iterable[tuple[str, int]], limit: int) -> dict[str, list[StoredLate]]:
        """Read late completions of streams after given numbers: see `history.late_since`."""
        with self._reads.use() as connection:
            return history.late_since(connection, known_numbers, limit)

    def apply_retention(self, now: datetime) -> bool:
        """Create the history's partitions of today and tomorrow, delete expired history, and forget retired writers.

        Call this about every hour. Batches continue meanwhile. May wait some seconds for locks.

        Args:
            now: the result of `self.clock.retention_limit()`.

        Returns:
            Whether all expired partitions were dropped. A partition that is being read is not dropped.
        """
        today = now.astimezone(UTC).date()
        with self._reads.use() as connection:
            oldest = retention.oldest_stored_day(connection, today, self._config.retention)
            for day in (today, today + timedelta(days=1)):
                connection.execute("select tidemark.make_history_day(%s)", (day,))
        # A separate session, because the drop may wait for readers of the history.
        with session_of(self._config.dsn, "tidemark tidy") as session, session.use() as connection:
            result = retention.drop_before(connection, oldest)
        with self._reads.use() as connection:
            retention.delete_expired(connection, today, self._config.retention)
            forget_retired(connection, now - timedelta(milliseconds=Bounds().retirement_ms))
        if result.dropped_partitions:
            log.info("Dropped history that is past its retention", partitions=result.dropped_partitions)
        if result.sessions_by_partition:
            log.info(
                "History past its retention is still being read; dropping it later",
                readers=result.sessions_by_partition,
            )
        return not result.sessions_by_partition
