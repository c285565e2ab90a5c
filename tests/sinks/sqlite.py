"""A sink of few lines, in a file of SQLite: what a third sink takes. It shows positions and keeps no history."""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from tidemark.common.errors import LeaseLost, Unavailable
from tidemark.sinks.port import Batch, CommitResult, Fence, RefillResult
from tidemark.sinks.postgres.store import Postgres

_SCHEMA = """
create table if not exists lines (stream text primary key, linear integer not null);
create table if not exists positions (
    stream text not null, writer text not null, position integer not null, primary key (stream, writer)
);
create table if not exists fence (only integer primary key check (only = 1), token integer not null);
create table if not exists stamp (only integer primary key check (only = 1), stamp text not null);
"""
_FARTHER = "set {0} = excluded.{0} where abs(excluded.{0}) > abs({0})"


class SqliteSink:
    """A `Sink`. Any thread may call: each call opens the file."""

    name = "sqlite"

    def __init__(self, postgres: Postgres, path: Path, fence: Fence) -> None:
        self._postgres = postgres
        self._path = path
        self._fence = fence
        self._stamps = 0
        self._compared = False
        self._lines: dict[str, tuple[int, int]] = {}
        self._faults: dict[str, str] = {}

    def check(self) -> None:
        with self._transaction():
            pass

    def publish(self, batch: Batch, committed: CommitResult) -> int:
        if committed.is_repeat or not self._compared or self._empty():
            return self.refill().stream_count
        with self._fenced() as database:
            changed = 0
            for _, stream in batch.streams():
                rows = {row.writer: row.position for row in stream.writers}
                rows |= {
                    writer: at for (name, writer), at in committed.higher_positions.items() if name == stream.stream
                }
                if stream.stream not in self._faults:
                    changed += self._write(database, stream.stream, stream.linear, rows, stream.dropped_writers)
        return changed

    def faults(self) -> Mapping[str, str]:
        return dict(self._faults)

    def compared_positions(self) -> Mapping[str, tuple[int, int]]:
        return self._lines

    def check_for_loss(self) -> bool:
        last = f"{self._fence.token}:{self._stamps}"
        self._stamps += 1
        with self._transaction() as database:
            found = database.execute("select stamp from stamp").fetchone()
            database.execute("replace into stamp values (1, ?)", [f"{self._fence.token}:{self._stamps}"])
        return bool(found != (last,))

    def refill(self) -> RefillResult:
        with self._fenced() as database:
            wanted = self._postgres.positions(self._postgres.streams()).items()
            shown = dict(database.execute("select stream, linear from lines"))
            self._lines = {name: (it.linear, shown[name]) for name, it in wanted if name in shown}
            behind = sum(
                self._write(database, name, it.linear, it.positions, it.forgotten_writers) for name, it in wanted
            )
        self._compared = True
        return RefillResult(behind)

    def _empty(self) -> bool:
        with self._transaction() as database:
            found: object = database.execute("select 1 from fence").fetchone()
        return found is None

    def _write(
        self, database: sqlite3.Connection, stream: str, linear: int, rows: Mapping[str, int], gone: Iterable[str]
    ) -> bool:
        before = database.total_changes
        database.execute("savepoint one")
        try:
            line = f"insert into lines values (?, ?) on conflict (stream) do update {_FARTHER.format('linear')}"
            database.execute(line, [stream, linear])
            database.executemany(
                "insert into positions values (?, ?, ?)"
                f" on conflict (stream, writer) do update {_FARTHER.format('position')}",
                [(stream, writer, position) for writer, position in rows.items()],
            )
            database.executemany(
                "delete from positions where stream = ? and writer = ?", [(stream, writer) for writer in gone]
            )
        except sqlite3.IntegrityError as error:
            database.execute("rollback to one")
            self._faults[stream] = str(error)
            return False
        self._faults.pop(stream, None)
        return database.total_changes > before

    @contextmanager
    def _fenced(self) -> Iterator[sqlite3.Connection]:
        self._fence.check()
        with self._transaction() as database:
            found = database.execute("select token from fence").fetchone()
            if found and found[0] > self._fence.token:
                raise LeaseLost(self._fence.token, found[0])
            database.execute("replace into fence values (1, ?)", [self._fence.token])
            yield database

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._path, isolation_level=None)) as database, database:
                database.executescript(_SCHEMA)
                database.execute("begin immediate")
                yield database
        except sqlite3.OperationalError as error:
            raise Unavailable("SQLite", str(self._path), str(error)) from error
