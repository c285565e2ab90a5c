"""The transaction of a batch (docs/design.md 6): checks the token and the previous batch, and writes all effects.

The effects are states, positions, history, gaps, late completions, audit, rejected records, requeues, offsets and the
number of the batch.

The parameters of a statement are whole columns, so the number of statements does not depend on the number of streams.
The transaction takes two round trips. Locks are taken in the order of the functions in `apply`. Of a
rejected record, only its Kafka offset and the reason are stored, until its dead letter is in Kafka (docs/design.md,
rule 5).

A batch may have to wait for a lock of another session, or for a synchronous standby. The session of the batch is busy
meanwhile, so a second session queries the reason (`BatchWait`).
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import psycopg
from psycopg import Cursor
from psycopg.errors import LockNotAvailable
from psycopg.rows import TupleRow
from psycopg.types.json import Jsonb

from tidemark.common.errors import ChainBroken, LeaseLost
from tidemark.common.postgres_session import Connection, PostgresSession, describe_sessions, first_line
from tidemark.sinks.port import Batch, CommitResult
from tidemark.sinks.postgres.database import execute
from tidemark.sinks.postgres.lease import session_name
from tidemark.sinks.postgres.positions import add_requeues, corrected_advances, higher_positions, write_positions
from tidemark.streaming.values.limits import RejectedRecords

_decoder = msgspec.msgpack.Decoder(list[RejectedRecords])


@dataclass(frozen=True, slots=True)
class UnsentDeadLetters:
    """The rejected records of one batch. Their dead letters may not be in Kafka yet."""

    query: str
    batch: int
    rejected: list[RejectedRecords]


def store_unsent_dead_letters(connection: Connection, batch: Batch) -> None:
    """Store the rejected records of the batch. `connection` is in the batch's transaction."""
    if rejected_records := batch.rejected_records():
        connection.execute(
            "insert into tidemark.unsent_dead_letters (query, batch, rejected) values (%s, %s, %s)",
            (batch.query, batch.number, msgspec.msgpack.encode(rejected_records)),
        )


def unsent_dead_letters(connection: Connection) -> list[UnsentDeadLetters]:
    """Read the stored rejected records, one item for each batch, sorted by query and number of the batch."""
    rows = connection.execute("select query, batch, rejected from tidemark.unsent_dead_letters order by query, batch")
    return [UnsentDeadLetters(query, batch, _decoder.decode(data)) for query, batch, data in rows]


def delete_unsent_dead_letters(connection: Connection, query: str, batch: int) -> None:
    """Delete the rejected records of a batch, after its dead letters have been written to Kafka."""
    connection.execute("delete from tidemark.unsent_dead_letters where (query, batch) = (%s, %s)", (query, batch))


# The number of batches of each query in applied_batches, with which a retry detects a commit whose answer was lost.
MAX_STORED_BATCHES = 1000


def apply(connection: Connection, batch: Batch) -> CommitResult:
    """Commit `batch`, or detect that `batch` is already committed (`CommitResult.is_repeat`).

    After an error that is not listed here, call again: the next call detects a committed batch.

    Raises:
        LeaseLost: another query has the lease. Nothing is written.
        ChainBroken: `batch.previous_batch` was not applied last, or an advance begins beyond the stored position.
            Nothing is written.
        psycopg.Error: Postgres refuses the content of the batch (`is_about_content`). Nothing is written.
    """
    with connection.pipeline(), connection.transaction():
        if _lock_lease_and_detect_repeat(connection, batch):
            return CommitResult(is_repeat=True)
        _write_streams(connection, batch)
        positions = write_positions(connection, batch)
        _write_linear_moves(connection, batch)
        _write_gaps(connection, batch)
        late = _write_late(connection, batch)
        _write_overrides(connection, batch)
        _count_rejected(connection, batch)
        store_unsent_dead_letters(connection, batch)
        _write_requeues(connection, batch)
        _write_progress(connection, batch)
        changed = positions.fetchall() if positions else []
        return CommitResult(
            corrected_advances=corrected_advances(changed),
            higher_positions=higher_positions(changed),
            late_numbers=_late_numbers(late),
        )


def find_refusal(connection: Connection, batch: Batch) -> str | None:
    """Try to write `batch`, and roll back.

    Returns:
        The error of Postgres about the content of the batch; None if Postgres accepts the content.

    Raises:
        LeaseLost, ChainBroken: see `apply`.
    """
    try:
        with connection.transaction(force_rollback=True):
            apply(connection, batch)
            connection.execute("set constraints all immediate")
    except psycopg.Error as error:
        if is_about_content(error):
            return first_line(error)
        raise
    return None


# SQLSTATE classes: cardinality, data, constraints, check options, program limits, and PL/pgSQL (raised by triggers).
_CONTENT_SQLSTATE_CLASSES = ("21", "22", "23", "44", "54", "P0")


def is_about_content(error: psycopg.Error) -> bool:
    """Whether Postgres or psycopg refused the values to be written, so that another attempt would fail too."""
    if error.sqlstate is None:  # psycopg cannot send the value, such as a NUL character in a text
        return isinstance(error, psycopg.DataError)
    return error.sqlstate[:2] in _CONTENT_SQLSTATE_CLASSES


def _lock_lease_and_detect_repeat(connection: Connection, batch: Batch) -> bool:
    """Lock the lease, configure the transaction, and detect whether `batch` is already committed.

    The row of the lease is locked until the end of the transaction: no other query takes the lease during a batch.

    Returns:
        Whether the batch is already committed.

    Raises:
        LeaseLost: the token is not the newest one.
        ChainBroken: Postgres has not applied `batch.previous_batch` last.
    """
    # KEY SHARE does not block a renewal. It blocks a takeover, which changes the key.
    lease = connection.execute("select token from tidemark.query_lease for key share")
    known = connection.execute(
        "select 1 from tidemark.applied_batches where query = %s and batch >= %s limit 1", (batch.query, batch.number)
    )
    newest_batch = connection.execute("select query, batch from tidemark.applied_batches order by number desc limit 1")
    # If this process hangs from now on, the server ends the transaction after the time-out. Before the time-out, the
    # next owner may end the session, which it finds by this name. The batch must be durable before it is published
    # (rule 4), even if the server's default is asynchronous.
    connection.execute(
        "select set_config('application_name', %s, true),"
        " set_config('idle_in_transaction_session_timeout', '10s', true),"
        " set_config('synchronous_commit', case current_setting('synchronous_commit')"
        " when 'remote_apply' then 'remote_apply' else 'on' end, true)",
        (session_name(batch.token),),
    )
    row = lease.fetchone()
    newest = row[0] if row else 0
    if newest != batch.token:
        raise LeaseLost(batch.token, newest)
    if known.fetchone() is not None:
        return True
    last = newest_batch.fetchone()
    if batch.previous_batch is not ... and batch.previous_batch != last:
        raise ChainBroken(*("no batch" if b is None else f"batch {b[0]}/{b[1]}" for b in (batch.previous_batch, last)))
    return False


def _write_streams(connection: Connection, batch: Batch) -> None:
    execute(
        connection,
        """
        insert into tidemark.streams as old (stream, linear, head, direction, shard, state, retired, updated_at)
        select stream, linear, allocated, direction, shard, state, retired, to_timestamp(now / 1000.0)
        from unnest(%s::text[], %s::bigint[], %s::bigint[], %s::smallint[], %s::int[], %s::bytea[], %s::bytea[],
                %s::bigint[])
            as new (stream, linear, allocated, direction, shard, state, retired, now)
        on conflict (stream) do update set
            linear = case when abs(excluded.linear) > abs(old.linear) then excluded.linear else old.linear end,
            head = case when abs(excluded.head) > abs(old.head) then excluded.head else old.head end,
            direction = excluded.direction, shard = excluded.shard, state = excluded.state,
            retired = coalesce(excluded.retired, old.retired), updated_at = excluded.updated_at
        """,
        (
            (s.stream, s.linear, s.allocated, s.direction, shard.shard, s.state, s.retired_table, shard.now)
            for shard, s in batch.streams()
        ),
    )


def _write_linear_moves(connection: Connection, batch: Batch) -> None:
    """Write the moves of linear positions of streams without an advance in this batch."""
    execute(
        connection,
        """
        insert into tidemark.linear_moves (stream, prev, linear, retired, epochs, time, batch)
        select stream, prev, linear, string_to_array(retired, ' '), string_to_array(epochs, ' ')::bigint[],
            to_timestamp(now / 1000.0), batch
        from unnest(%s::text[], %s::bigint[], %s::bigint[], %s::text[], %s::text[], %s::bigint[])
            as new (stream, prev, linear, retired, epochs, now),
            (values (%s::bigint)) as b (batch)
        """,
        (
            (
                s.stream,
                s.linear_prev,
                s.linear,
                " ".join(w.writer for w in s.writers if w.is_retired),  # no name has a space
                " ".join(str(w.epoch) for w in s.writers if w.is_retired),
                shard.now,
            )
            for shard, s in batch.streams()
            if s.linear != s.linear_prev and not s.advances
        ),
        batch.number,
    )


def _write_gaps(connection: Connection, batch: Batch) -> None:
    execute(
        connection,
        """
        update tidemark.stream_gaps g set closed_at = to_timestamp(now / 1000.0), closed_by = how
        from unnest(%s::text[], %s::text[], %s::bigint[], %s::text[], %s::bigint[]) as c (stream, writer, top, how, now)
        where (g.stream, g.writer, g.top) = (c.stream, c.writer, c.top) and g.closed_at is null
        """,
        ((s.stream, c.writer, c.top, c.how, shard.now) for shard, s in batch.streams() for c in s.closed),
    )
    execute(
        connection,
        """
        insert into tidemark.stream_gaps as old (stream, writer, epoch, low, top, opened_at)
        select stream, writer, epoch, low, top, to_timestamp(since / 1000.0)
        from unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])
            as new (stream, writer, epoch, low, top, since)
        on conflict (stream, writer, top) where closed_at is null
            do update set low = excluded.low, epoch = excluded.epoch where abs(excluded.low) > abs(old.low)
        """,
        ((s.stream, g.writer, g.epoch, g.low, g.top, g.since) for _, s in batch.streams() for g in s.gaps),
    )


def _write_late(connection: Connection, batch: Batch) -> Cursor[TupleRow] | None:
    return execute(
        connection,
        """
        insert into tidemark.late_completions (stream, writer, epoch, prev, id, facts, why, time, batch)
        select stream, writer, epoch, prev, id, facts, why, to_timestamp(now / 1000.0), batch
        from unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::text[],
                %s::bigint[])
            with ordinality as new (stream, writer, epoch, prev, id, facts, why, now, place),
            (values (%s::bigint)) as b (batch)
        order by place
        returning stream, number
        """,
        (
            (s.stream, late.writer, late.epoch, late.prev, late.id, late.facts, late.why, shard.now)
            for shard, s in batch.streams()
            for late in s.late
        ),
        batch.number,
    )


def _write_overrides(connection: Connection, batch: Batch) -> None:
    execute(
        connection,
        """
        insert into tidemark.skips (stream, writer, epoch, kind, prev, id, by, why, time, batch)
        select stream, writer, epoch, kind, prev, id, by, why, to_timestamp(now / 1000.0), batch
        from unnest(%s::text[], %s::text[], %s::bigint[], %s::text[], %s::bigint[], %s::bigint[], %s::text[],
                %s::text[], %s::bigint[])
            as new (stream, writer, epoch, kind, prev, id, by, why, now),
            (values (%s::bigint)) as b (batch)
        """,
        (
            (s.stream, f.writer, f.epoch, f.kind, f.prev, f.id, f.by, f.why, shard.now)
            for shard, s in batch.streams()
            for f in s.overrides
        ),
        batch.number,
    )


def _count_rejected(connection: Connection, batch: Batch) -> None:
    execute(
        connection,
        """
        insert into tidemark.dead_letters as old (reason, records, newest_at)
        select reason, sum(records), to_timestamp(max(now) / 1000.0)
        from unnest(%s::text[], %s::bigint[], %s::bigint[]) as new (reason, records, now)
        group by reason order by reason
        on conflict (reason) do update set records = old.records + excluded.records,
            newest_at = greatest(old.newest_at, excluded.newest_at)
        """,
        ((rejected.reason, rejected.count, shard.now) for shard in batch.effects for rejected in shard.rejected),
    )


def _write_requeues(connection: Connection, batch: Batch) -> None:
    add_requeues(connection, ((s.stream, requeue) for _, s in batch.streams() for requeue in s.requeues))


def _write_progress(connection: Connection, batch: Batch) -> None:
    offsets = batch.offsets()
    execute(
        connection,
        """
        insert into tidemark.kafka_offsets as old (topic, partition, next)
        select * from unnest(%s::text[], %s::int[], %s::bigint[])
        on conflict (topic, partition) do update set next = excluded.next where excluded.next > old.next
        """,
        ((topic, partition, offset) for topic, seen in offsets.items() for partition, offset in seen.items()),
    )
    connection.execute(
        "insert into tidemark.applied_batches (query, batch, offsets) values (%s, %s, %s)",
        (batch.query, batch.number, Jsonb(offsets)),
    )
    connection.execute(
        "delete from tidemark.applied_batches where query = %s and batch <= %s",
        (batch.query, batch.number - MAX_STORED_BATCHES),
    )


def _late_numbers(late: Cursor[TupleRow] | None) -> dict[str, list[int]]:
    """Stream -> the numbers of its late completions, in the order of the batch. `late`: the result of `_write_late`."""
    numbers: dict[str, list[int]] = {}
    for stream, number in late or ():
        numbers.setdefault(stream, []).append(number)
    return numbers


REPORT_AFTER_SECONDS = 3.0
"""How long a batch may run before `BatchWait.find_problem` reports what the batch waits for."""


def describe_wait(connection: Connection, pid: int) -> str | None:
    """Describe the lock or the synchronous standby that the server process `pid` waits for; None if there is none."""
    row = connection.execute(
        "select wait_event, pg_blocking_pids(pid) from pg_stat_activity where pid = %s", (pid,)
    ).fetchone()
    if row is None:
        return None
    event, blockers = row
    if blockers:
        return f"a lock of another session: {describe_sessions(connection, blockers)}; end that session, or wait for it"
    if event == "SyncRep":
        row = connection.execute(
            "select current_setting('synchronous_standby_names'),"
            " (select count(*) from pg_stat_replication where state = 'streaming')"
        ).fetchone()
        names, streaming = row or ("", 0)
        return (
            f"a synchronous standby to commit: synchronous_standby_names is {names!r}, and {streaming} standbys"
            " are streaming; start the standby, or change this setting and reload Postgres"
        )
    return None


class BatchWait:
    """Tracks whether a batch is running in Postgres, and finds out what the batch waits for. Thread-safe."""

    def __init__(self, session: PostgresSession) -> None:
        """`session` must be another session than the one that writes batches."""
        self._session = session
        self._lock = threading.Lock()
        # A batch that is retried after a lock timeout has waited since its first attempt.
        self._since: float | None = None
        self._pid: int | None = None
        self._last_problem: str | None = None

    def close(self) -> None:
        self._session.close()

    @contextmanager
    def track(self, connection: Connection) -> Iterator[None]:
        """Mark a batch as running on `connection` during the block.

        If the block fails with a lock time-out, the batch counts as waiting until the next attempt.
        """
        with self._lock:
            self._since = time.monotonic() if self._since is None else self._since
            self._pid = connection.info.backend_pid
        is_waiting = False
        try:
            yield
        except LockNotAvailable:
            is_waiting = True
            raise
        finally:
            with self._lock:
                self._pid = None
                if not is_waiting:
                    self._since = self._last_problem = None

    def find_problem(self) -> str | None:
        """Describe what the running batch waits for. Queries Postgres.

        Returns:
            None if no batch has run for `REPORT_AFTER_SECONDS`, or if the batch waits for no lock and no standby. After
            a lock time-out, the last description from before the time-out.

        Raises:
            Unavailable, Refused: as for every use of the session.
        """
        with self._lock:
            since, pid = self._since, self._pid
        if since is None or time.monotonic() - since < REPORT_AFTER_SECONDS:
            return None
        if pid is not None:
            with self._session.use() as connection:
                wait = describe_wait(connection, pid)
            with self._lock:
                if self._pid == pid:
                    self._last_problem = wait and f"a batch waits in Postgres for {wait}"
        with self._lock:
            return self._last_problem

    def store_problem(self, token: int, problem: str | None) -> None:
        """Store a problem for `tidemark status`, with a short lock time-out and without waiting for a standby.

        Args:
            token: the token of this owner. If the database has a newer token, nothing is stored.
            problem: what a batch waits for; None if no batch waits.
        """
        with self._session.use() as connection, connection.transaction():
            connection.execute("set local synchronous_commit = local")
            connection.execute("set local lock_timeout = '1s'")
            connection.execute("update tidemark.query_lease set waits_for = %s where token = %s", (problem, token))
