"""Queries the running transactions and the history of a database server, and makes OPEN records.

The relay and the bridge use the queries as evidence that an ID will never be committed. OPEN records report the open
transactions that block a stream.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from prometheus_client import Gauge

from tidemark.common.errors import Unavailable
from tidemark.common.postgres_session import Connection
from tidemark.common.timestamps import timestamp
from tidemark.streaming.wire.records import MAX_HEARTBEAT_SECONDS, MAX_TRANSACTION_LENGTH, MAX_TRANSACTIONS, Open


@dataclass(frozen=True, slots=True)
class ServerHistory:
    """Identifies one uninterrupted run of a database server.

    Attributes:
        database: the system identifier, the timeline of the server, and the OIDs of the database and of one table. A
            restore from a dump changes the OIDs.
        server: the start time of the server, in seconds since 1970, as text. A restored disk image has the same
            `database`, but another `server`.
    """

    database: str
    server: str


def read_server_history(connection: Connection, where: str, table: str) -> ServerHistory:
    """Query the identity of the server's current history.

    Args:
        connection: a session of the database.
        where: the address of the server, for messages.
        table: a table that a restore from a dump creates again.

    Raises:
        Unavailable: the server is a standby.
    """
    row = connection.execute("select pg_is_in_recovery()").fetchone()
    if row is None or row[0]:
        raise Unavailable("Postgres", where, "it is a standby")
    # The timeline is the start of the WAL file's name: pg_control_checkpoint() shows a promotion only after the next
    # checkpoint.
    row = connection.execute(
        """
        select format('%%s/%%s/%%s/%%s', system_identifier, left(pg_walfile_name(pg_current_wal_insert_lsn()), 8),
            (select oid from pg_database where datname = current_database()),
            %s::regclass::oid), extract(epoch from pg_postmaster_start_time())::text
        from pg_control_system()
        """,
        [table],
    ).fetchone()
    assert row is not None
    return ServerHistory(*row)


def use_up_transaction_number(connection: Connection) -> None:
    """Use up a transaction number, so that later snapshots list every transaction that has a number now.

    A snapshot lists only running transactions with lower numbers than the last ended transaction. The connection must
    be in autocommit mode.
    """
    connection.execute("select pg_current_xact_id()")


def read_running_transactions(connection: Connection) -> frozenset[int]:
    """Query the numbers (64 bits) of the transactions that have not ended, including prepared transactions.

    Call `use_up_transaction_number` first. Otherwise the newest transactions may be missing.
    """
    row = connection.execute("select pg_current_snapshot()::text").fetchone()
    assert row is not None
    listed = str(row[0]).rpartition(":")[2]
    return frozenset(map(int, listed.split(","))) if listed else frozenset()


def flush_wal(connection: Connection) -> str:
    """Write a message to the write-ahead log and wait for the disk, so that all earlier changes are durable.

    Without this call, a crash of the server may lose a `nextval` or an asynchronous commit.

    Returns:
        The position of the message in the write-ahead log, as text.
    """
    row = connection.execute("select pg_logical_emit_message(true, 'tidemark', '')::text").fetchone()
    assert row is not None
    return str(row[0])


_LITERAL = re.compile(r"""[eE]?'(?:[^'\\]|''|\\.)*'?|\$(\w*)\$.*?(?:\$\1\$|$)|\b\d+(?:\.\d+)?\b""", re.DOTALL)
"""A literal in a query. An unterminated literal extends to the end of the query, which may be cut off."""


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """An open transaction that blocks a stream. Fields that this user may not see are empty.

    Attributes:
        stream: the name of the stream.
        writer: the writer of the transaction's facts; several names with ` or ` between them if the writers share a
            lock; empty if no fact of the writer was published.
        pid: the process ID of the session; None for a prepared transaction.
        gid: the name of a prepared transaction; None for a session.
        user: the database user.
        application: the `application_name` of the session. Behind a pooler, this may be the name of an earlier client.
        state: the state of the session, such as `idle in transaction`.
        since: the time at which the transaction began; None if this user may not see the time.
        query: the newest query of the session, up to 300 characters.
        database: the database of the transaction; empty if not queried.
    """

    stream: str
    writer: str
    pid: int | None
    gid: str | None
    user: str
    application: str
    state: str
    since: datetime | None
    query: str
    database: str = ""

    def age(self, now: datetime) -> float:
        """Seconds since the transaction began; 0 if this user may not see the time."""
        return 0.0 if self.since is None else (now - self.since).total_seconds()

    def __str__(self) -> str:
        writer = f"writer {self.writer or 'not published yet'}"
        return f"{self.stream}: {writer}, {self.process}" + (f": {self.query or '-'}" if self.pid is not None else "")

    @property
    def description(self) -> str:
        """Text for an OPEN record: the writer, the session and its query.

        Literals in the query are replaced by `?`, because they may be private data of the service.
        """
        query = f": {_LITERAL.sub('?', self.query)}" if self.pid is not None and self.query else ""
        return f"writer {self.writer or 'not published yet'}, {self.process}{query}"

    @property
    def process(self) -> str:
        """Text that names the session or the prepared transaction, without the query."""
        since = "" if self.since is None else f" since {timestamp(self.since)}"
        place = f" in database {self.database}" if self.database else ""
        if self.pid is None:
            return f"prepared transaction {self.gid or '?'}{place}{since}, user {self.user or '-'}"
        session = f"user {self.user or '-'}, session named {self.application or '-'}"
        return f"pid {self.pid}{place}{since}, {self.state or 'state not shown'}, {session}"

    @property
    def ending_statement(self) -> str:
        """The SQL statement that ends the transaction: rolls back a prepared transaction, or ends the session."""
        if self.pid is None:
            gid = (self.gid or "?").replace("'", "''")
            return f"rollback prepared '{gid}'"
        return f"select pg_terminate_backend({self.pid})"


REPORTED_AFTER = timedelta(seconds=2)
"""The shortest age of a transaction that OPEN records report."""


MAX_HEARTBEATS_PER_SECOND = 20
"""The largest number of heartbeats per second, over all streams. A heartbeat takes the pipeline about 0.5 ms."""


class SourceReports:
    """Makes the OPEN records of all streams when they are due.

    The record of a stream is due at the start, because another process may have sent a different record. It is due
    again when the transactions or the cause of the block change. With a heartbeat, the records of all streams are due
    together at regular times, so that Spark wakes up once.

    Args:
        reporters: stream -> the writer and the epoch that the stream's OPEN records name.
        heartbeat: the wanted number of seconds between two heartbeats of a stream; 0 for no heartbeats.
    """

    def __init__(self, reporters: Mapping[str, tuple[str, int]], heartbeat: int = 0) -> None:
        self.reporters = reporters
        self._heartbeat = heartbeat
        self._last_heartbeat: datetime | None = None
        self._last_reports: dict[str, tuple[list[str], str]] = {}

    @property
    def heartbeat(self) -> int:
        """Seconds between two heartbeats of a stream; 0 without heartbeats. Longer than wanted if there are many
        streams."""
        shortest = math.ceil(len(self.reporters) / MAX_HEARTBEATS_PER_SECOND)
        return min(max(self._heartbeat, shortest), MAX_HEARTBEAT_SECONDS) if self._heartbeat else 0

    def take_due_records(
        self, transactions: Sequence[OpenTransaction], now: datetime, blocked_reasons: Mapping[str, str] = {}
    ) -> Iterator[Open]:
        """Make the OPEN records to send now, and note them as sent.

        Args:
            transactions: the open transactions that block streams, the oldest first.
            now: the current time. If the clock was set back, the heartbeat is due.
            blocked_reasons: stream -> why no new facts are sent. Only blocked streams.
        """
        heartbeat = self.heartbeat
        is_due = bool(heartbeat) and not (
            self._last_heartbeat is not None
            and timedelta(0) <= now - self._last_heartbeat < timedelta(seconds=heartbeat)
        )
        if is_due:
            self._last_heartbeat = now
        for name, (writer, epoch) in self.reporters.items():
            old = [
                transaction
                for transaction in transactions
                if transaction.stream == name and is_reported(transaction, now)
            ]
            cause = blocked_reasons.get(name, "")[:MAX_TRANSACTION_LENGTH]
            known = (
                [transaction.process for transaction in old],
                cause,
            )  # without the query: the record has the query, but a new query alone makes no record due
            if is_due or self._last_reports.get(name) != known:
                self._last_reports[name] = known
                yield Open(
                    stream=name, writer=writer, epoch=epoch, transactions=_descriptions(old), blocked=cause,
                    heartbeat=heartbeat,
                )  # fmt: skip


class OldestOpenGauge:
    """Sets a gauge to the age of the oldest open transaction, for each set of labels."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._shown_labels: set[tuple[str, ...]] = set()

    def show(self, ages: Iterable[tuple[tuple[str, ...], float]]) -> None:
        """Set the gauge, and remove sets of labels that have no open transaction any more.

        Args:
            ages: the labels and the age in seconds of each open transaction.
        """
        oldest = dict(sorted(ages))
        for gone in self._shown_labels - oldest.keys():
            self._gauge.remove(*gone)
        for labels, age in oldest.items():
            self._gauge.labels(*labels).set(age)
        self._shown_labels = {*oldest}


def is_reported(transaction: OpenTransaction, now: datetime) -> bool:
    """Whether OPEN records report the transaction: its age is at least `REPORTED_AFTER`, or this user may not see its
    start."""
    return transaction.since is None or now - transaction.since >= REPORTED_AFTER


def _descriptions(old_transactions: Sequence[OpenTransaction]) -> list[str]:
    """The descriptions for an OPEN record. If there are too many, the last text is the number of the others."""
    lines = [transaction.description[:MAX_TRANSACTION_LENGTH] for transaction in old_transactions]
    if len(lines) <= MAX_TRANSACTIONS:
        return lines
    shown = lines[: MAX_TRANSACTIONS - 1]
    return [*shown, f"and {len(lines) - len(shown)} more"]
