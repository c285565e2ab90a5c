"""Postgres: what is true and durable. The pipeline's writes, and its reads at a start and to refill the sinks.

Three sessions: one for the batches (the thread of foreachBatch), one for recalls, one for everything else (maintenance,
probes), so that none waits for another.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Self

import msgspec

from tidemark.common.log import get_logger
from tidemark.common.postgres_session import Dsn
from tidemark.sinks.port import Batch, Committed
from tidemark.sinks.postgres import changes as tail
from tidemark.sinks.postgres import deferred as recalls
from tidemark.sinks.postgres import history, transaction
from tidemark.sinks.postgres.audit import STATES
from tidemark.sinks.postgres.batch_wait import BatchWait
from tidemark.sinks.postgres.changes import ChangesSince, DurableMark, PastMoves
from tidemark.sinks.postgres.database import READABLE, SCHEMA, execute, session_of
from tidemark.sinks.postgres.deferred import KeptRecall
from tidemark.sinks.postgres.history import PageBounds, PastAdvance, PastLate, PastPage, Retention
from tidemark.sinks.postgres.operators import PolicyTable
from tidemark.sinks.postgres.retention import RetentionClock, drop_before
from tidemark.sinks.postgres.status import Conditions, note_faults, note_lagging
from tidemark.sinks.postgres.transaction import UnsentDeadLetters, apply, forget_retired
from tidemark.streaming.core.effects import Recall
from tidemark.streaming.values.limits import Bounds, Encoded

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PostgresConfig:
    """`dsn` may hold a password."""

    dsn: Dsn = field(repr=False)
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True, slots=True)
class RememberedSetup:
    """The setup that must not change behind the pipeline's back; None and {} before the first start.

    `topics`: name -> (Kafka's topic ID, count of partitions).
    """

    shards: int | None
    topics: dict[str, tuple[str, int]]


class StreamPositions(msgspec.Struct, frozen=True, gc=False):
    """A stream as committed. `forgotten` names writers that retired long ago and stand neither here nor in Redis;
    `late` is the number of its newest late completion, 0 for none."""

    linear: int
    allocated: int
    late: int
    positions: dict[str, int]
    forgotten: frozenset[str]


class Postgres:
    """All methods raise `Unavailable` (call again) and `Refused`; any thread may call them. A context manager."""

    def __init__(self, config: PostgresConfig) -> None:
        self._config = config
        self._batches = session_of(config.dsn, "tidemark batches")
        self._reads = session_of(config.dsn, "tidemark reads")
        self._recalls = session_of(config.dsn, "tidemark recalls")
        self.waits = BatchWait(session_of(config.dsn, "tidemark waits"))
        self.where = self._batches.where
        self.conditions = Conditions(self._reads)
        self.policies = PolicyTable(self._reads)
        self.clock = RetentionClock(self._reads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._batches.close()
        self._reads.close()
        self._recalls.close()
        self.waits.close()

    def check(self) -> None:
        """Raise `SchemaMismatch` unless this Tidemark can write in the schema."""
        with self._reads.use() as connection:
            SCHEMA.check(connection)

    def check_readable(self) -> None:
        """Raise `SchemaMismatch` unless this Tidemark can read the schema."""
        with self._reads.use() as connection:
            SCHEMA.check_from(connection, READABLE)

    def pipeline_version(self) -> str:
        """The version of the pipeline that acquired the lease last; empty if none did."""
        with self._reads.use() as connection:
            row = connection.execute("select version from tidemark.query_lease").fetchone()
        return row[0] if row else ""

    def apply(self, batch: Batch) -> Committed:
        """Commit the batch. After `Unavailable` the commit may have happened: calling again finds that out.

        Raises psycopg's error if the server refuses the batch's content (`transaction.is_about_content`).
        """
        with self._batches.use() as connection, self.waits.of(connection):
            return apply(connection, batch)

    def refusal(self, batch: Batch) -> str | None:
        """What the server says against the batch's content; None if it would take it. Writes nothing."""
        with self._batches.use() as connection, self.waits.of(connection):
            return transaction.refusal(connection, batch)

    def set_late_numbers_ahead(self) -> None:
        """For a new owner, before its first batch: a database that went back would give the numbers of late completions
        again that it has lost, and readers would take them for known. The clock is beyond all that were given."""
        with self._batches.use() as connection:
            connection.execute(
                "select setval('tidemark.late_completions_number_seq', greatest(last_value,"
                " (extract(epoch from clock_timestamp()) * 1000000)::bigint))"
                " from tidemark.late_completions_number_seq"
            )

    def unsent_dead_letters(self) -> list[UnsentDeadLetters]:
        """Rejected records that are not known to be in the dead letters."""
        with self._reads.use() as connection:
            return transaction.unsent(connection)

    def dead_letters_sent(self, query: str, batch: int) -> None:
        """The dead letters of this batch are in Kafka."""
        with self._batches.use() as connection:
            transaction.forget_unsent(connection, query, batch)

    def recalls(self) -> list[KeptRecall]:
        """Records that are to be produced again and are not yet, oldest first; last those that some problem hinders."""
        with self._recalls.use() as connection:
            return recalls.due(connection)

    def recalled(self, recall: KeptRecall, problem: str | None = None) -> None:
        """How far that one is, and what hinders the rest."""
        with self._recalls.use() as connection:
            recalls.note(connection, recall, problem)

    def give_up_recalls(self, deferred: Iterable[tuple[str, Recall]], why: str) -> None:
        """The offsets of these, and of all that are kept, mean nothing any more."""
        with self._batches.use() as connection, connection.transaction():
            recalls.add_recalls(connection, deferred)
            recalls.give_up(connection, why)

    def note_lagging(self, found: Sequence[tuple[str, int, int, float, int | None, float | None]]) -> None:
        """Replace the partitions that are noted as lagging: see `kafka_lag.note_lagging`."""
        with self._reads.use() as connection:
            note_lagging(connection, found)

    def note_faults(self, faults: Mapping[tuple[str, str], str]) -> None:
        """What sinks cannot show, by sink and stream: the problem. For people."""
        with self._reads.use() as connection:
            note_faults(connection, faults)

    def last_batch(self) -> tuple[str, int] | None:
        """Query and number of the batch that was applied last."""
        with self._reads.use() as connection:
            return connection.execute(
                "select query, batch from tidemark.applied_batches order by number desc limit 1"
            ).fetchone()

    def states(self, streams: Collection[str] | None = None) -> dict[str, bytes]:
        """The encoded state of `streams` (None: of all, the seed of a query without a checkpoint)."""
        names = None if streams is None else list(streams)
        with self._reads.use() as connection:
            return dict(connection.execute(STATES, {"streams": names}))

    def replace_states(self, states: Mapping[str, Encoded]) -> None:
        """Write states back that were changed outside a batch: only for what an operator accepted."""
        with self._batches.use() as connection, connection.transaction():
            execute(
                connection,
                "update tidemark.streams s set state = given.state, retired = given.retired"
                " from unnest(%s::text[], %s::bytea[], %s::bytea[]) as given (stream, state, retired)"
                " where s.stream = given.stream",
                ((stream, it.state, it.retired) for stream, it in states.items()),
            )

    def offsets(self) -> dict[str, dict[int, int]]:
        """Topic -> partition -> the first offset that is not counted into the states."""
        offsets: dict[str, dict[int, int]] = {}
        with self._reads.use() as connection:
            for topic, partition, following in connection.execute("select * from tidemark.kafka_offsets order by 1, 2"):
                offsets.setdefault(topic, {})[partition] = following
        return offsets

    def set_offsets(self, offsets: dict[str, dict[int, int]]) -> None:
        """Replace what is known of these topics, backwards too: only for what an operator accepted as lost."""
        with self._batches.use() as connection, connection.transaction():
            connection.execute("delete from tidemark.kafka_offsets where topic = any(%s)", (list(offsets),))
            execute(
                connection,
                "insert into tidemark.kafka_offsets select * from unnest(%s::text[], %s::int[], %s::bigint[])",
                ((topic, partition, offset) for topic, seen in offsets.items() for partition, offset in seen.items()),
            )

    def remembered(self) -> RememberedSetup:
        with self._reads.use() as connection:
            pipeline = connection.execute("select shards from tidemark.pipeline").fetchone()
            topics = connection.execute("select topic, topic_id, partitions from tidemark.topics")
            return RememberedSetup(
                shards=pipeline[0] if pipeline else None,
                topics={topic: (topic_id, partitions) for topic, topic_id, partitions in topics},
            )

    def remember(self, remembered: RememberedSetup) -> None:
        """Replace what is remembered; topics that are not named stay."""
        with self._batches.use() as connection, connection.transaction():
            if remembered.shards is not None:
                connection.execute(
                    "insert into tidemark.pipeline (shards) values (%s)"
                    " on conflict (singleton) do update set shards = excluded.shards",
                    (remembered.shards,),
                )
            execute(
                connection,
                "insert into tidemark.topics select * from unnest(%s::text[], %s::text[], %s::int[])"
                " on conflict (topic) do update set topic_id = excluded.topic_id, partitions = excluded.partitions",
                ((topic, topic_id, partitions) for topic, (topic_id, partitions) in remembered.topics.items()),
            )

    def streams(self) -> list[str]:
        with self._reads.use() as connection:
            return [stream for (stream,) in connection.execute("select stream from tidemark.streams order by 1")]

    def positions(self, streams: Collection[str]) -> dict[str, StreamPositions]:
        """The positions of `streams`, without those that are not known. Each is at most as old as the call."""
        of = " where stream = any(string_to_array(%s, ' '))"  # no name has a space
        names = (" ".join(streams),)
        positions: dict[str, dict[str, int]] = {}
        forgotten: dict[str, list[str]] = {}
        with self._reads.use() as connection:
            # The lines first: a line that is older than the positions claims too little, the other way too much.
            lines = connection.execute(f"select stream, linear, head from tidemark.streams{of}", names).fetchall()
            late = dict(
                connection.execute(
                    f"select stream, max(number) from tidemark.late_completions{of} group by stream", names
                )
            )
            for stream, writer, position, is_forgotten in connection.execute(
                f"select stream, writer, position, forgotten from tidemark.stream_positions{of}", names
            ).fetchall():
                if is_forgotten:
                    forgotten.setdefault(stream, []).append(writer)
                elif (known := positions.get(stream)) is None:
                    positions[stream] = {writer: position}
                else:
                    known[writer] = position
        return {
            stream: StreamPositions(
                linear, head, late.get(stream, 0), positions.get(stream, {}), frozenset(forgotten.get(stream, ()))
            )
            for stream, linear, head in lines
        }

    def page_after(self, stream: str, standing: Callable[[str], int], late: int, bounds: PageBounds) -> PastPage:
        with self._reads.use() as connection:
            return history.page_after(connection, stream, standing, late, bounds)

    def advances_since(
        self, known: Iterable[tuple[str, str, int]], newest: int
    ) -> dict[tuple[str, str], list[PastAdvance]]:
        with self._reads.use() as connection:
            return history.advances_since(connection, known, newest)

    def changes(self, since: DurableMark | None, streams: Collection[str] | None) -> ChangesSince:
        with self._reads.use() as connection:
            return tail.changes(connection, since, streams)

    def missed(self, since: DurableMark, most: int, seconds: float) -> PastMoves | None:
        with self._reads.use() as connection:
            return tail.missed(connection, since, most, seconds)

    def late_since(self, known: Iterable[tuple[str, int]], newest: int) -> dict[str, list[PastLate]]:
        with self._reads.use() as connection:
            return history.late_since(connection, known, newest)

    def tidy(self, now: datetime) -> bool:
        """Make the history's partitions of today and tomorrow, and drop what is past its time, retired
        writers too. For every hour or so, with the time of `clock`.

        Batches go on meanwhile. False where something could not be dropped, because somebody reads it.
        """
        today = now.astimezone(UTC).date()
        with self._reads.use() as connection:
            oldest = history.oldest_kept(connection, today, self._config.retention)
            for day in (today, today + timedelta(days=1)):
                connection.execute("select tidemark.make_history_day(%s)", (day,))
        # In a session of its own: it may wait for those who read the history.
        with session_of(self._config.dsn, "tidemark tidy") as session, session.use() as connection:
            tidied = drop_before(connection, oldest)
        with self._reads.use() as connection:
            history.forget(connection, today, self._config.retention)
            forget_retired(connection, now - timedelta(milliseconds=Bounds().retirement))
        if tidied.dropped:
            log.info("Dropped history that is past its time", partitions=tidied.dropped)
        if tidied.in_use:
            log.info("History that is past its time is still read; it is dropped later", readers=tidied.in_use)
        return not tidied.in_use
