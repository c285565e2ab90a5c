"""The workload of streams. Its verification compares the facts that were committed with the effects of each reader.

The only positions that it uses are those that readers report. Verified rows are deleted, so that a simulation may run
without end. Facts and effects are in two databases, and each may be restored from a backup. Then the deleted rows are
deleted again before another process sees them (`services_go_back`, `readers_go_back`).
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

from tidemark.app.simulation import sql_readers, tables
from tidemark.app.simulation.script import OF_DATABASES, SimulatedStream, Successor
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
    """A row of a fact, as its writer committed it."""

    id: int
    writer: str
    mark: Hashable


class DeliveredRow(NamedTuple):
    """A row that a reader got. `late`: for a late completion."""

    id: int
    writer: str
    mark: Hashable
    late: bool = False


class ReaderPosition(NamedTuple):
    """The position that a reader reports."""

    linear: int
    positions: Mapping[str, int]

    def passed(self, row: FactRow) -> bool:
        return row.id <= self.positions.get(row.writer, self.linear)


class PlacesPosition(NamedTuple):
    """The positions of the places of a reader in SQL."""

    sql_places: Mapping[SqlPlace, int]

    @property
    def linear(self) -> int:
        return min(self.sql_places.values())

    def passed(self, row: FactRow) -> bool:
        return all(row.id <= position for sql_place, position in self.sql_places.items() if sql_place.holds(row.writer))


@dataclass(frozen=True, slots=True)
class StreamsCount(ReadCount):
    """Counts of one reader, over all streams.

    `doubled`: facts of which the reader got more rows than exist. `disordered`: rows below an earlier row (in vector
    mode: of the same writer). Facts of a database that was restored count separately: `late` came with their late
    completion, `again` are the late ones that had been read before, and `lost` were read and no longer exist."""

    late: int = 0
    again: int = 0
    lost: int = 0

    def __str__(self) -> str:
        stopping = (
            f"{self.reader}: {self.written} facts written, {self.read} read, {self.missed} missed,"
            f" {self.doubled} doubled, {self.disordered} out of order"
        )
        explained = {"late": self.late, "again": self.again, "lost": self.lost}
        return ", ".join([stopping, *(f"{count} {kind}" for kind, count in explained.items() if count)])


@dataclass(frozen=True)
class Comparison:
    """One stream and one reader. `handed` has the rows in the order of delivery. `back`: the ID beyond which a
    restored database sends its facts again; None if it was never restored. Facts beyond `back` may be late, so they
    are not `missed` until `final`. `times`: how often the database was restored."""

    reader: str
    facts: Sequence[FactRow]
    delivered: Sequence[DeliveredRow]
    stand: ReaderPosition | PlacesPosition
    back: int | None
    final: bool = False
    times: int = 1

    def count(self) -> StreamsCount:
        return StreamsCount(
            self.reader,
            len({row.id for row in self.facts}),
            len({row.id for row in self.facts} - self._unread),
            len({row.id for row in self.facts if row.id in self._unread and self._missed(row)}),
            len(self._doubled - self._again) + (0 if self.back is not None else len(self.strangers)),
            self._disordered(),
            len({row.id for row in self.delivered if row.late}),
            len(self._again),
            0 if self.back is None else len(self.strangers),
        )

    def up_to(self, id: int) -> "Comparison":
        facts = [row for row in self.facts if row.id <= id]
        return replace(self, facts=facts, delivered=[row for row in self.delivered if row.id <= id])

    @property
    def marks(self) -> set[Hashable]:
        """The rows that were handed over."""
        return {row.mark for row in self.delivered}

    @cached_property
    def strangers(self) -> set[int]:
        """IDs that were handed over with rows that do not exist."""
        marks = {row.mark for row in self.facts}
        return {row.id for row in self.delivered if row.mark not in marks}

    @cached_property
    def _unread(self) -> set[int]:
        delivered = self.marks
        return {row.id for row in self.facts if row.mark not in delivered}

    def _missed(self, row: FactRow) -> bool:
        excused = self.back is not None and row.id > self.back and not self.final
        return self.stand.passed(row) and not excused

    @cached_property
    def _doubled(self) -> set[int]:
        return _more_often(1, self.delivered)

    @cached_property
    def _again(self) -> set[int]:
        """The doubled facts that restores explain: handed over once in order, and at most once late for each
        restore."""
        if self.back is None:
            return set()
        wrong = _more_often(1, (row for row in self.delivered if not row.late))
        wrong |= _more_often(self.times, (row for row in self.delivered if row.late))
        return {id for id in self._doubled - wrong if id > self.back}

    def _disordered(self) -> int:
        reached: dict[str, int] = {}
        below = 0
        for row in self.delivered:
            if not row.late:
                line = self._line(row.writer)
                below += row.id < reached.get(line, 0)
                reached[line] = max(row.id, reached.get(line, 0))
        return below

    def _line(self, writer: str) -> str:
        """What has one order: the facts of a writer, of a partition, or all."""
        if self.reader == "vector":
            return writer
        sql_places = sql_readers.places_of(self.reader) if self.reader in sql_readers.READERS else []
        return next((sql_place.name for sql_place in sql_places if sql_place.holds(writer)), "")


def _more_often(times: int, rows: Iterable[DeliveredRow]) -> set[int]:
    counted = Counter((row.id, row.mark) for row in rows)
    return {id for (id, _), count in counted.items() if count > times}


LIBRARY_READERS: tuple[Mode, ...] = ("vector", "linear")
READERS = (*LIBRARY_READERS, *sql_readers.READERS)
SQL_PROCESSES = ("sql-1", "sql-2")
APPLICATION = "tidemark simulate --verify"


class EffectsDiffer(TidemarkError):
    """Some reader missed, doubled or disordered facts."""

    def __init__(self, counts: Sequence[ReadCount]) -> None:
        wrong = "; ".join(str(count) for count in counts if not count.is_right)
        super().__init__(f"what was read is not what was written: {wrong}")
        self.counts = counts


class LossUnreported(TidemarkError):
    """A database was restored, facts that readers had read no longer exist, and nothing reports the loss."""

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"facts of {stream} were read and then lost with their database, and their IDs were given out again:"
            " there is neither a late completion nor a new timeline"
        )
        self.stream = stream


class StreamsVerification(Verification):
    """`facts` and `effects` are the DSNs of the services' database and of the readers'. `timelines` asks Tidemark for
    the number of each stream's timeline."""

    columns = ("LATE", "AGAIN", "LOST")

    def __init__(
        self,
        facts: str,
        effects: str,
        streams: Sequence[SimulatedStream],
        timelines: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._timelines = timelines
        self._first_timelines = timelines()
        self._facts = session_of(facts, APPLICATION)
        self._effects = session_of(effects, APPLICATION)
        self._streams = streams
        self._lock = Lock()
        self._compared: dict[str, set[Hashable]] = {stream.name: set() for stream in streams}
        """Marks of verified rows, which are deleted or will be."""
        self._deleted: dict[str, list[Hashable]] = {}
        """The verified rows that the services' database may still have."""
        self._forgotten: dict[tuple[str, str], StreamsCount] = {}
        self._back: dict[str, int] = {}
        """By stream, the ID beyond which a restored database sends its facts again."""
        self._times: Counter[str] = Counter()
        self._heads: dict[str, int] = {}
        """By stream, the ID beyond which a restored database gives out IDs again."""
        self.lost: set[str] = set()
        """Streams whose database may give IDs out again that readers have read."""
        self.late: set[str] = set()
        """Streams of which readers were handed late completions after their database went back."""

    def __exit__(self, *error: object) -> None:
        self._facts.close()
        self._effects.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause comparisons while the block runs. Only the thread in the block may call the next two methods."""
        with self._lock:
            yield

    def services_go_back(self, server: str, how: Successor) -> None:
        """`server` is the DSN of the next server of the services, which no other process uses yet."""
        dsn = tables.own_database(server)
        with closing(session_of(dsn, APPLICATION)) as session, session.use() as connection:
            self.restored_in_place(connection, tables.reached(connection))
            for marks in self._compared.values():
                _delete(connection, _EFFECTS, [*marks])

    def restored_in_place(self, connection: psycopg.Connection, reached: Mapping[str, tuple[int, int]]) -> None:
        """The tables of `connection` are already restored; no other process sees them yet.

        Args:
            connection: of the services' database.
            reached: by stream, its floor and the head of its sequence.
        """
        for stream, marks in self._compared.items():
            _delete(connection, _facts_of(stream), [*marks])
        for stream, (floor, head) in reached.items():
            self.sequence_goes_back(stream, floor)
            self._heads[stream] = min(head, self._heads.get(stream, head))

    def sequence_goes_back(self, stream: str, id: int) -> None:
        """The facts beyond `id` (a magnitude) may be sent again from now on, and IDs beyond it may be given out
        again."""
        self._times[stream] += 1
        self._back[stream] = min(id, self._back.get(stream, id))

    def readers_go_back(self, server: str) -> None:
        """The same for the readers', with their places."""
        with closing(session_of(tables.own_database(server), APPLICATION)) as session, session.use() as connection:
            for marks in self._compared.values():
                _delete(connection, _EFFECTS, [*marks])

    def final_counts(self) -> list[StreamsCount]:
        return self.counts(final=True)

    def is_complete(self, counts: Sequence[ReadCount]) -> bool:
        return bool(counts) and all(count.is_complete for count in counts)

    def difference(self, counts: Sequence[ReadCount]) -> TidemarkError:
        return EffectsDiffer(counts)

    def require_reported(self) -> None:
        """Raise `LossUntold` for the first stream whose database gave out IDs again that readers had read, without a
        report of it."""
        now = self._timelines()
        for stream in sorted(self.lost - self.late):
            if now.get(stream, 1) == self._first_timelines.get(stream, 1):
                raise LossUnreported(stream)

    def counts(self, *, final: bool = False) -> list[StreamsCount]:
        """The counts of each reader over all streams since the database was created; nothing before the first reader
        has begun. With `final`, no fact counts as late. Rows that all readers have read and the linear reader has
        passed are forgotten; if a reader gets one of them again, it counts as doubled."""
        with self._lock:
            with self._effects.use() as connection, connection.transaction():
                connection.execute("set transaction isolation level repeatable read")
                if not _begun(connection):
                    return [StreamsCount(reader, 0, 0) for reader in READERS]
                self._load(connection)
                reached_by: dict[tuple[str, str], ReaderPosition | PlacesPosition] = {}
                delivered: dict[tuple[str, str], list[DeliveredRow]] = {}
                for key in self._keys(LIBRARY_READERS):
                    reached_by[key] = _reader_position(connection, *key)
                    delivered[key] = _delivered(connection, *key)
            with self._facts.use() as connection:
                for stream, marks in [*self._deleted.items()]:
                    with connection.transaction():
                        _delete(connection, _facts_of(stream), marks)
                        _delete(connection, _EFFECTS, marks)
                    del self._deleted[stream]
                with connection.transaction():
                    connection.execute("set transaction isolation level repeatable read")
                    for key in self._keys(sql_readers.READERS):
                        reached_by[key] = _places_position(connection, *key)
                        delivered[key] = _delivered(connection, *key)
                # Read after the effects: all facts that a reader has passed were committed before.
                facts = {stream.name: _committed(connection, stream.name) for stream in self._streams}
            counts = {reader: StreamsCount(reader, 0, 0) for reader in READERS}
            for stream, rows in facts.items():
                comparisons = [
                    Comparison(
                        *(reader, rows, delivered[reader, stream], reached_by[reader, stream]),
                        *(self._back.get(stream), final, self._times[stream]),
                    )
                    for reader in READERS
                ]
                self._note_lost(stream, [item for item in comparisons if item.reader in LIBRARY_READERS])
                results = [comparison.count() for comparison in comparisons]
                for comparison, count in zip(comparisons, results, strict=True):
                    counts[comparison.reader] += count + self._forgotten[comparison.reader, stream]
                if all(count.is_right for count in results):
                    self._forget(stream, comparisons)
        return [*counts.values()]

    def _keys(self, readers: Iterable[str]) -> list[tuple[str, str]]:
        return [(reader, stream.name) for reader in readers for stream in self._streams]

    def _note_lost(self, stream: str, comparisons: Sequence[Comparison]) -> None:
        head = self._heads.get(stream)
        if head is not None:
            if any(id > head for comparison in comparisons for id in comparison.strangers):
                self.lost.add(stream)
            if any(row.late for comparison in comparisons for row in comparison.delivered):
                self.late.add(stream)

    def _forget(self, stream: str, comparisons: Sequence[Comparison]) -> None:
        reached = min(comparison.stand.linear for comparison in comparisons if comparison.reader != "vector")
        done = [comparison.up_to(reached) for comparison in comparisons]
        counts = {
            comparison.reader: self._forgotten[comparison.reader, stream] + comparison.count() for comparison in done
        }
        if not done[0].facts or not all(count.is_complete for count in counts.values()):
            return
        rows = {row.mark for row in done[0].facts}
        marks = [*rows.union(*(comparison.marks for comparison in done))]
        with self._effects.use() as connection, connection.transaction():
            _delete(connection, _EFFECTS, marks)
            for reader, count in counts.items():
                connection.execute(
                    "insert into demo.compared (reader, stream, facts) values (%s, %s, %s)"
                    " on conflict (reader, stream) do update set facts = excluded.facts",
                    [reader, stream, count.written],
                )
        self._forgotten.update({(reader, stream): count for reader, count in counts.items()})
        self._compared[stream].update(marks)
        self._deleted[stream] = marks

    def _load(self, connection: Connection) -> None:
        """Load the comparisons of earlier simulations, which a restored database does not have."""
        if not self._forgotten:
            rows = connection.execute("select reader, stream, facts from demo.compared").fetchall()
            stored = {(reader, stream): facts for reader, stream, facts in rows}
            for key in self._keys(READERS):
                self._forgotten[key] = StreamsCount(key[0], stored.get(key, 0), stored.get(key, 0))


_EFFECTS = sql.Identifier("demo", "effects")


def _facts_of(stream: str) -> sql.Identifier:
    return sql.Identifier("demo", stream)


def _delete(connection: Connection, table: sql.Identifier, marks: Sequence[Hashable]) -> None:
    connection.execute(sql.SQL("delete from {} where mark = any(%s)").format(table), [marks])


def _begun(connection: Connection) -> bool:
    """Whether any reader has made its table of places."""
    row = connection.execute("select to_regclass('tidemark_reader.places') is not null").fetchone()
    return row is not None and bool(row[0])


def _reader_position(connection: Connection, reader: str, stream: str) -> ReaderPosition:
    row: tuple[int, Mapping[str, Any]] | None = connection.execute(
        "select linear, positions from tidemark_reader.places where reader = %s and stream = %s", [reader, stream]
    ).fetchone()
    return (
        ReaderPosition(abs(row[0]), {writer: abs(id) for writer, id in row[1].items()})
        if row
        else ReaderPosition(0, {})
    )


def _places_position(connection: Connection, reader: str, stream: str) -> PlacesPosition:
    rows = connection.execute("select reader, linear from tidemark_reader.places where stream = %s", [stream])
    linear = {name: abs(id) for name, id in rows.fetchall()}
    return PlacesPosition({sql_place: linear.get(sql_place.name, 0) for sql_place in sql_readers.places_of(reader)})


def _delivered(connection: Connection, reader: str, stream: str) -> list[DeliveredRow]:
    rows = connection.execute(
        "select abs(stream_id), writer, mark, late is not null from demo.effects"
        " where reader = %s and stream = %s order by number",
        [reader, stream],
    )
    return [DeliveredRow(*row) for row in rows]


def _committed(connection: Connection, stream: str) -> list[FactRow]:
    rows = connection.execute(sql.SQL("select abs(stream_id), writer, mark from {}").format(_facts_of(stream)))
    return [FactRow(*row) for row in rows]


class StreamsWorkload(Workload):
    """Services that write rows with `tidemark.append`, readers of the reader's library, and readers in SQL."""

    database = "demo"
    readers = (*LIBRARY_READERS, *SQL_PROCESSES)

    @property
    def streams(self) -> Sequence[SimulatedStream]:
        return self.plan.writer_plan.stream_list()

    def make_tables(self, facts: str, effects: str) -> None:
        tables.make_facts(facts, self.streams)
        for dsn in (facts, effects):
            tables.make_effects(dsn)

    def service(self, databases: SimulationDatabases, name: str, incarnation: int) -> ProcessRole:
        writer_plan, seed = self.plan.writer_plan, f"{self.plan.seed} {name} {incarnation}"
        role = ServiceRole(name, self.streams, self.plan.faults, writer_plan.rate / writer_plan.writers, seed)
        return ProcessRole(databases.facts, databases.effects, service=role)

    def reader(self, databases: SimulationDatabases, name: str, incarnation: int) -> ProcessRole:
        if name in SQL_PROCESSES:
            return ProcessRole(databases.readers, databases.effects, sql_reader=SqlReaderRole(self.streams))
        role = ReaderRole("linear" if name == "linear" else "vector", self.plan.writer_plan.stream_names())
        return ProcessRole(databases.readers, databases.effects, reader=role)

    def verification(self, databases: SimulationDatabases, tidemark: str) -> StreamsVerification:
        timelines = partial(_timelines, tidemark) if self.plan.faults & OF_DATABASES else dict
        return StreamsVerification(databases.facts, databases.effects, self.streams, timelines)


def _timelines(dsn: str) -> dict[str, int]:
    """The number of each stream's timeline, as Tidemark's Postgres has it."""
    with Postgres(PostgresConfig(lambda: dsn)) as postgres:
        return {stream: decode(data).timeline for stream, data in postgres.states().items()}
