"""The streams workload. Its verification compares the facts that were committed with the effects of each reader.

The verification deletes verified rows, so that a simulation can run forever. Facts, and effects of the readers in SQL,
are in the services' database. The other effects are in the readers' database. A restored database has the verified rows
again. They are deleted again before another process can read the database (`prepare_services_server`,
`prepare_readers_server`).
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import Lock
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from tidemark.app.simulation import sql_readers, workload
from tidemark.app.simulation.script import DATABASE_FAULTS, SimulatedStream, Successor
from tidemark.app.simulation.services import ReaderRole, ServiceRole
from tidemark.app.simulation.sql_readers import SqlPlace, SqlReaderRole
from tidemark.app.simulation.workload import ProcessRole, ReadCount, SimulationDatabases, Verification, Workload
from tidemark.common.errors import TidemarkError
from tidemark.common.postgres_session import Connection
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sinks.reader import Mode
from tidemark.sources.relay.queries import session_of
from tidemark.streaming.core.codec import decode


class FactRow(NamedTuple):
    """A row of a fact, as its writer committed it.

    Attributes:
        id: the stream ID, a magnitude.
        writer: the name of the writer.
        mark: a unique value, which also distinguishes the row from a row that had the same ID before a restore.
    """

    id: int
    writer: str
    mark: Hashable


class DeliveredRow(NamedTuple):
    """A row that a reader received: the fields of `FactRow`, and whether it came with a late completion (`is_late`)."""

    id: int
    writer: str
    mark: Hashable
    is_late: bool = False


class ReaderPosition(NamedTuple):
    """The stored place of a reader, in magnitudes.

    Attributes:
        linear: the linear position.
        positions: writer -> position, for writers beyond `linear`.
    """

    linear: int
    positions: Mapping[str, int]

    def covers(self, row: FactRow) -> bool:
        """Whether the row is at or below the reader's position for the writer of the row."""
        return row.id <= self.positions.get(row.writer, self.linear)


class PlacesPosition(NamedTuple):
    """The stored places of a reader in SQL.

    Attributes:
        sql_places: place -> linear position, a magnitude; 0 for a place that is not stored.
    """

    sql_places: Mapping[SqlPlace, int]

    @property
    def linear(self) -> int:
        """The lowest linear position of all places."""
        return min(self.sql_places.values())

    def covers(self, row: FactRow) -> bool:
        """Whether the row is at or below the position of the place that includes the row's writer."""
        return all(
            row.id <= position for sql_place, position in self.sql_places.items() if sql_place.has_writer(row.writer)
        )


@dataclass(frozen=True, slots=True)
class StreamsCount(ReadCount):
    """Counts of one reader. `late`, `received_again` and `lost` are no errors: restores and sequences that are set back
    cause them.

    Attributes:
        duplicated: facts of which the reader received a row twice. Before the first restore, also facts of which the
            reader received a row that does not exist.
        disordered: rows that came after a row with a higher ID. In vector mode, only rows of the same writer count.
        late: facts that came with a late completion.
        received_again: facts that the reader received again because of a restore.
        lost: facts that the reader received, and that no longer exist after a restore.
    """

    late: int = 0
    received_again: int = 0
    lost: int = 0

    def __str__(self) -> str:
        text = (
            f"{self.reader}: {self.written} facts written, {self.read} read, {self.missed} missed,"
            f" {self.duplicated} duplicated, {self.disordered} out of order"
        )
        restored = {"late": self.late, "again": self.received_again, "lost": self.lost}
        return ", ".join([text, *(f"{count} {kind}" for kind, count in restored.items() if count)])


@dataclass(frozen=True)
class Comparison:
    """Compares the rows that one reader received from one stream with the facts of the stream.

    Attributes:
        reader: the name of the reader.
        facts: the rows in the services' table.
        delivered: the rows that the reader received, in order.
        position: the place of the reader.
        resent_above_id: the ID (a magnitude) beyond which facts may be sent again, because the database was restored or
            the sequence was set back; None if neither has happened.
        is_final: whether all late completions have arrived. If False, facts beyond `resent_above_id` do not count as
            missed.
        restore_count: how often the database was restored or the sequence was set back.
    """

    reader: str
    facts: Sequence[FactRow]
    delivered: Sequence[DeliveredRow]
    position: ReaderPosition | PlacesPosition
    resent_above_id: int | None
    is_final: bool = False
    restore_count: int = 1

    def count(self) -> StreamsCount:
        """Compare, and return the counts."""
        return StreamsCount(
            self.reader,
            len({row.id for row in self.facts}),
            len({row.id for row in self.facts} - self._unread),
            len({row.id for row in self.facts if row.id in self._unread and self._is_missed(row)}),
            len(self._duplicated - self._received_again)
            + (0 if self.resent_above_id is not None else len(self.nonexistent)),
            self._count_disordered(),
            len({row.id for row in self.delivered if row.is_late}),
            len(self._received_again),
            0 if self.resent_above_id is None else len(self.nonexistent),
        )

    def up_to(self, id: int) -> "Comparison":
        """Return the same comparison with only the facts and received rows up to the ID `id`, a magnitude."""
        facts = [row for row in self.facts if row.id <= id]
        return replace(self, facts=facts, delivered=[row for row in self.delivered if row.id <= id])

    @property
    def marks(self) -> set[Hashable]:
        """The marks of the rows that the reader received."""
        return {row.mark for row in self.delivered}

    @cached_property
    def nonexistent(self) -> set[int]:
        """The IDs of received rows that are not in the services' table."""
        marks = {row.mark for row in self.facts}
        return {row.id for row in self.delivered if row.mark not in marks}

    @cached_property
    def _unread(self) -> set[int]:
        """The IDs of the facts of which at least one row was not received."""
        delivered = self.marks
        return {row.id for row in self.facts if row.mark not in delivered}

    def _is_missed(self, row: FactRow) -> bool:
        """Whether an unread row counts as missed: the reader's position covers the row, and the row will not come with
        a late completion."""
        may_come_late = self.resent_above_id is not None and row.id > self.resent_above_id and not self.is_final
        return self.position.covers(row) and not may_come_late

    @cached_property
    def _duplicated(self) -> set[int]:
        return _received_more_than(1, self.delivered)

    @cached_property
    def _received_again(self) -> set[int]:
        """The IDs of the facts that the reader received several times because of restores. This is no error.

        A fact may come once in order, and for each restore once with a late completion.
        """
        if self.resent_above_id is None:
            return set()
        wrong = _received_more_than(1, (row for row in self.delivered if not row.is_late))
        wrong |= _received_more_than(self.restore_count, (row for row in self.delivered if row.is_late))
        return {id for id in self._duplicated - wrong if id > self.resent_above_id}

    def _count_disordered(self) -> int:
        highest: dict[str, int] = {}
        disordered = 0
        for row in self.delivered:
            if not row.is_late:
                scope = self._order_scope(row.writer)
                disordered += row.id < highest.get(scope, 0)
                highest[scope] = max(row.id, highest.get(scope, 0))
        return disordered

    def _order_scope(self, writer: str) -> str:
        """The name of the set in which the facts of `writer` must be in order: a writer, a place, or '' (all facts)."""
        if self.reader == "vector":
            return writer
        sql_places = sql_readers.places_of(self.reader) if self.reader in sql_readers.READERS else []
        return next((sql_place.name for sql_place in sql_places if sql_place.has_writer(writer)), "")


def _received_more_than(times: int, rows: Iterable[DeliveredRow]) -> set[int]:
    """The IDs of the rows that are in `rows` more than `times` times."""
    counted = Counter((row.id, row.mark) for row in rows)
    return {id for (id, _), count in counted.items() if count > times}


LIBRARY_READERS: tuple[Mode, ...] = ("vector", "linear")
READERS = (*LIBRARY_READERS, *sql_readers.READERS)
SQL_PROCESSES = ("sql-1", "sql-2")
APPLICATION_NAME = "tidemark simulate --verify"


class EffectsDiffer(TidemarkError):
    """The effects of a reader are wrong or incomplete.

    Args:
        counts: the counts of all readers. The message has only readers whose effects are wrong or incomplete.
    """

    def __init__(self, counts: Sequence[ReadCount]) -> None:
        wrong = "; ".join(str(count) for count in counts if not (count.is_correct and count.is_complete))
        super().__init__(f"what the readers read differs from what was written: {wrong}")
        self.counts = counts


class LossUnreported(TidemarkError):
    """Facts that readers had read were lost when a database was restored, and Tidemark did not report the loss."""

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"facts of stream {stream} were read, then lost when the database was restored, and their IDs were given"
            " out again, but Tidemark reported neither a late completion nor a new timeline"
        )
        self.stream = stream


class StreamsVerification(Verification):
    """Compares the facts in the services' tables with the effects of each reader.

    Args:
        facts_dsn: the DSN of the services' database.
        effects_dsn: the DSN of the readers' database.
        streams: the streams to compare.
        read_timelines: returns stream -> number of the stream's timeline in Tidemark.
    """

    columns = ("LATE", "AGAIN", "LOST")

    def __init__(
        self,
        facts_dsn: str,
        effects_dsn: str,
        streams: Sequence[SimulatedStream],
        read_timelines: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._read_timelines = read_timelines
        self._first_timelines = read_timelines()
        self._facts_session = session_of(facts_dsn, APPLICATION_NAME)
        self._effects_session = session_of(effects_dsn, APPLICATION_NAME)
        self._streams = streams
        self._lock = Lock()
        self._verified_marks: dict[str, set[Hashable]] = {stream.name: set() for stream in streams}
        """Stream -> the marks of all verified rows, which are deleted again after a restore."""
        self._marks_to_delete: dict[str, list[Hashable]] = {}
        """Stream -> the marks of verified rows that are not deleted yet from the services' database."""
        self._verified_counts: dict[tuple[str, str], StreamsCount] = {}
        """(reader, stream) -> the counts of the verified rows."""
        self._resent_above: dict[str, int] = {}
        """Stream -> the ID (a magnitude) beyond which facts may be sent again, because the database was restored or the
        sequence was set back."""
        self._restore_counts: Counter[str] = Counter()
        """Stream -> how often the database was restored or the sequence was set back."""
        self._restored_heads: dict[str, int] = {}
        """Stream -> the ID (a magnitude) beyond which the sequence of a restored database gives out IDs again."""
        self.lost_streams: set[str] = set()
        """Streams of which a reader has received facts that a restored database lacks, with IDs that the database gives
        out again."""
        self.late_streams: set[str] = set()
        """Streams of which a reader received a late completion, and whose database was restored."""

    def __exit__(self, *error: object) -> None:
        self._facts_session.close()
        self._effects_session.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait until the running comparison has ended, and pause comparisons while the block runs. Only the thread in
        the block may call the methods `prepare_*` and `note_sequence_set_back`."""
        with self._lock:
            yield

    def prepare_services_server(self, server_dsn: str, successor: Successor) -> None:
        """Delete verified rows on a new server of the services, and note the IDs beyond which facts may come again.

        Args:
            server_dsn: the DSN of the new server. No other process uses this server yet.
            successor: not used.
        """
        dsn = workload.make_simulation_dsn(server_dsn)
        with closing(session_of(dsn, APPLICATION_NAME)) as session, session.use() as connection:
            self.prepare_restored_tables(connection, workload.read_floors_and_heads(connection))
            for marks in self._verified_marks.values():
                _delete_marks(connection, _EFFECTS_TABLE, [*marks])

    def prepare_restored_tables(
        self, connection: psycopg.Connection, floors_and_heads: Mapping[str, tuple[int, int]]
    ) -> None:
        """Delete verified rows from restored tables, and note the IDs beyond which facts may come again.

        Args:
            connection: a connection to the services' database, which has restored the tables. No other transaction can
                read the restored rows yet.
            floors_and_heads: stream -> (floor, last ID that the sequence gave out), as magnitudes.
        """
        for stream, marks in self._verified_marks.items():
            _delete_marks(connection, _facts_table(stream), [*marks])
        for stream, (floor, head) in floors_and_heads.items():
            self.note_sequence_set_back(stream, floor)
            self._restored_heads[stream] = min(head, self._restored_heads.get(stream, head))

    def note_sequence_set_back(self, stream: str, id: int) -> None:
        """Record that IDs beyond `id` (a magnitude) may be given out again, and their facts may be sent again."""
        self._restore_counts[stream] += 1
        self._resent_above[stream] = min(id, self._resent_above.get(stream, id))

    def prepare_readers_server(self, server_dsn: str) -> None:
        """Delete the effects of verified rows on a new server of the readers' database.

        Args:
            server_dsn: the DSN of the new server. No other process uses this server yet.
        """
        with (
            closing(session_of(workload.make_simulation_dsn(server_dsn), APPLICATION_NAME)) as session,
            session.use() as connection,
        ):
            for marks in self._verified_marks.values():
                _delete_marks(connection, _EFFECTS_TABLE, [*marks])

    def final_counts(self) -> list[StreamsCount]:
        return self.counts(is_final=True)

    def is_complete(self, counts: Sequence[ReadCount]) -> bool:
        return bool(counts) and all(count.is_complete for count in counts)

    def error_for(self, counts: Sequence[ReadCount]) -> TidemarkError:
        return EffectsDiffer(counts)

    def require_loss_reported(self) -> None:
        """Raise `LossUnreported` if the loss of a stream of `lost_streams` was not reported. The error names the first
        such stream in alphabetical order.

        A late completion that a reader received, or a new timeline of the stream, is a report.
        """
        now = self._read_timelines()
        for stream in sorted(self.lost_streams - self.late_streams):
            if now.get(stream, 1) == self._first_timelines.get(stream, 1):
                raise LossUnreported(stream)

    def counts(self, *, is_final: bool = False) -> list[StreamsCount]:
        """Compare all streams, and return the counts of each reader since the databases were created.

        All counts are 0 before the first reader has begun. With `is_final`, facts that may still come late count as
        missed. For each stream with correct counts, deletes the rows that all readers have read (see
        `_delete_verified`). If a reader receives a deleted row again, the row counts as duplicated, or as lost after a
        restore. Waits while the verification is paused.
        """
        with self._lock:
            with self._effects_session.use() as connection, connection.transaction():
                connection.execute("set transaction isolation level repeatable read")
                if not _has_begun(connection):
                    return [StreamsCount(reader, 0, 0) for reader in READERS]
                self._load_verified(connection)
                positions: dict[tuple[str, str], ReaderPosition | PlacesPosition] = {}
                delivered: dict[tuple[str, str], list[DeliveredRow]] = {}
                for key in self._reader_streams(LIBRARY_READERS):
                    positions[key] = _read_reader_position(connection, *key)
                    delivered[key] = _read_delivered_rows(connection, *key)
            with self._facts_session.use() as connection:
                for stream, marks in [*self._marks_to_delete.items()]:
                    with connection.transaction():
                        _delete_marks(connection, _facts_table(stream), marks)
                        _delete_marks(connection, _EFFECTS_TABLE, marks)
                    del self._marks_to_delete[stream]
                with connection.transaction():
                    connection.execute("set transaction isolation level repeatable read")
                    for key in self._reader_streams(sql_readers.READERS):
                        positions[key] = _read_places_position(connection, *key)
                        delivered[key] = _read_delivered_rows(connection, *key)
                # Facts are read after the effects, so that they include all facts that a reader has passed.
                facts = {stream.name: _read_committed_rows(connection, stream.name) for stream in self._streams}
            counts = {reader: StreamsCount(reader, 0, 0) for reader in READERS}
            for stream, rows in facts.items():
                comparisons = [
                    Comparison(
                        *(reader, rows, delivered[reader, stream], positions[reader, stream]),
                        *(self._resent_above.get(stream), is_final, self._restore_counts[stream]),
                    )
                    for reader in READERS
                ]
                self._update_lost_and_late(stream, [item for item in comparisons if item.reader in LIBRARY_READERS])
                results = [comparison.count() for comparison in comparisons]
                for comparison, count in zip(comparisons, results, strict=True):
                    counts[comparison.reader] += count + self._verified_counts[comparison.reader, stream]
                if all(count.is_correct for count in results):
                    self._delete_verified(stream, comparisons)
        return [*counts.values()]

    def _reader_streams(self, readers: Iterable[str]) -> list[tuple[str, str]]:
        return [(reader, stream.name) for reader in readers for stream in self._streams]

    def _update_lost_and_late(self, stream: str, comparisons: Sequence[Comparison]) -> None:
        """Update `lost_streams` and `late_streams`. Does nothing if the stream's database was never restored."""
        head = self._restored_heads.get(stream)
        if head is not None:
            if any(id > head for comparison in comparisons for id in comparison.nonexistent):
                self.lost_streams.add(stream)
            if any(row.is_late for comparison in comparisons for row in comparison.delivered):
                self.late_streams.add(stream)

    def _delete_verified(self, stream: str, comparisons: Sequence[Comparison]) -> None:
        """Verify the rows up to the lowest linear position of the readers except `vector`. Does nothing if there are no
        such rows, or a reader has not received each of these rows correctly.

        Stores the counts of the verified rows, and deletes the rows from the readers' database. The next comparison
        deletes the rows from the services' database.
        """
        lowest = min(comparison.position.linear for comparison in comparisons if comparison.reader != "vector")
        verified = [comparison.up_to(lowest) for comparison in comparisons]
        counts = {
            comparison.reader: self._verified_counts[comparison.reader, stream] + comparison.count()
            for comparison in verified
        }
        if not verified[0].facts or not all(count.is_complete for count in counts.values()):
            return
        rows = {row.mark for row in verified[0].facts}
        marks = [*rows.union(*(comparison.marks for comparison in verified))]
        with self._effects_session.use() as connection, connection.transaction():
            _delete_marks(connection, _EFFECTS_TABLE, marks)
            for reader, count in counts.items():
                connection.execute(
                    "insert into demo.compared (reader, stream, facts) values (%s, %s, %s)"
                    " on conflict (reader, stream) do update set facts = excluded.facts",
                    [reader, stream, count.written],
                )
        self._verified_counts.update({(reader, stream): count for reader, count in counts.items()})
        self._verified_marks[stream].update(marks)
        self._marks_to_delete[stream] = marks

    def _load_verified(self, connection: Connection) -> None:
        """Load the counts of earlier simulations, at the first call only: a restored database may lack new counts."""
        if not self._verified_counts:
            rows = connection.execute("select reader, stream, facts from demo.compared").fetchall()
            stored = {(reader, stream): facts for reader, stream, facts in rows}
            for key in self._reader_streams(READERS):
                self._verified_counts[key] = StreamsCount(key[0], stored.get(key, 0), stored.get(key, 0))


_EFFECTS_TABLE = sql.Identifier("demo", "effects")


def _facts_table(stream: str) -> sql.Identifier:
    return sql.Identifier("demo", stream)


def _delete_marks(connection: Connection, table: sql.Identifier, marks: Sequence[Hashable]) -> None:
    connection.execute(sql.SQL("delete from {} where mark = any(%s)").format(table), [marks])


def _has_begun(connection: Connection) -> bool:
    """Whether a reader has created the table of the readers' places."""
    row = connection.execute("select to_regclass('tidemark_reader.places') is not null").fetchone()
    return row is not None and bool(row[0])


def _read_reader_position(connection: Connection, reader: str, stream: str) -> ReaderPosition:
    row: tuple[int, Mapping[str, Any]] | None = connection.execute(
        "select linear, positions from tidemark_reader.places where reader = %s and stream = %s", [reader, stream]
    ).fetchone()
    return (
        ReaderPosition(abs(row[0]), {writer: abs(id) for writer, id in row[1].items()})
        if row
        else ReaderPosition(0, {})
    )


def _read_places_position(connection: Connection, reader: str, stream: str) -> PlacesPosition:
    rows = connection.execute("select reader, linear from tidemark_reader.places where stream = %s", [stream])
    linear = {name: abs(id) for name, id in rows.fetchall()}
    return PlacesPosition({sql_place: linear.get(sql_place.name, 0) for sql_place in sql_readers.places_of(reader)})


def _read_delivered_rows(connection: Connection, reader: str, stream: str) -> list[DeliveredRow]:
    rows = connection.execute(
        "select abs(stream_id), writer, mark, late is not null from demo.effects"
        " where reader = %s and stream = %s order by number",
        [reader, stream],
    )
    return [DeliveredRow(*row) for row in rows]


def _read_committed_rows(connection: Connection, stream: str) -> list[FactRow]:
    rows = connection.execute(sql.SQL("select abs(stream_id), writer, mark from {}").format(_facts_table(stream)))
    return [FactRow(*row) for row in rows]


class StreamsWorkload(Workload):
    """Services that append with `tidemark.Writer` or the SQL functions, readers that use the reader library, and
    readers in SQL."""

    database_suffix = "demo"
    readers = (*LIBRARY_READERS, *SQL_PROCESSES)

    @property
    def streams(self) -> Sequence[SimulatedStream]:
        return self.plan.writer_plan.stream_list()

    def make_tables(self, facts_dsn: str, effects_dsn: str) -> None:
        workload.make_fact_tables(facts_dsn, self.streams)
        for dsn in (facts_dsn, effects_dsn):
            workload.make_effect_tables(dsn)

    def make_service_role(self, databases: SimulationDatabases, name: str, start_number: int) -> ProcessRole:
        writer_plan, seed = self.plan.writer_plan, f"{self.plan.seed} {name} {start_number}"
        role = ServiceRole(
            name, self.streams, self.plan.faults, writer_plan.transactions_per_second / writer_plan.writer_count, seed
        )
        return ProcessRole(databases.facts_dsn, databases.effects_dsn, service=role)

    def make_reader_role(self, databases: SimulationDatabases, name: str, start_number: int) -> ProcessRole:
        if name in SQL_PROCESSES:
            return ProcessRole(databases.readers_dsn, databases.effects_dsn, sql_reader=SqlReaderRole(self.streams))
        role = ReaderRole("linear" if name == "linear" else "vector", self.plan.writer_plan.stream_names())
        return ProcessRole(databases.readers_dsn, databases.effects_dsn, reader=role)

    def make_verification(self, databases: SimulationDatabases, tidemark_dsn: str) -> StreamsVerification:
        read_timelines = partial(_read_timelines, tidemark_dsn) if self.plan.faults & DATABASE_FAULTS else dict
        return StreamsVerification(databases.facts_dsn, databases.effects_dsn, self.streams, read_timelines)


def _read_timelines(dsn: str) -> dict[str, int]:
    """Read stream -> number of the stream's timeline from Tidemark's Postgres."""
    with Postgres(PostgresConfig(lambda: dsn)) as postgres:
        return {stream: decode(data).timeline_number for stream, data in postgres.states().items()}
