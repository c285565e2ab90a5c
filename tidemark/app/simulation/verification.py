"""Holds what readers did against the truth: the facts that were committed, and the effects of each reader.

It knows nothing of positions but where a reader says that it stands. What was found to be right is deleted, so that a
play may go on for ever. Facts and effects are in two databases, and each may go back: then what was deleted is deleted
again, before anybody else sees it (`services_go_back`, `readers_go_back`).
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from threading import Lock
from typing import Any, Self

from psycopg import sql

from tidemark.app.simulation.comparison import Comparison, Count, FactRow, HandedRow, Stand
from tidemark.common.errors import TidemarkError
from tidemark.common.postgres_session import Connection
from tidemark.sinks.reader import Mode
from tidemark.sources.relay.queries import session_of
from tidemark.sources.simulator import tables
from tidemark.sources.simulator.script import PlayedStream, Successor

READERS: tuple[Mode, ...] = ("vector", "linear")
APPLICATION = "tidemark simulate --verify"


class EffectsDiffer(TidemarkError):
    """Some reader missed, doubled or disordered facts."""

    def __init__(self, counts: Sequence[Count]) -> None:
        wrong = "; ".join(str(count) for count in counts if not count.right)
        super().__init__(f"what was read is not what was written: {wrong}")
        self.counts = counts


class Verification:
    """A context manager. `facts` and `effects` are the DSNs of the services' database and of the readers'.

    Any thread may call it. Methods raise `Unavailable` where a database does not answer.
    """

    def __init__(self, facts: str, effects: str, streams: Sequence[PlayedStream]) -> None:
        self._facts = session_of(facts, APPLICATION)
        self._effects = session_of(effects, APPLICATION)
        self._streams = streams
        self._lock = Lock()
        self._compared: dict[str, set[Hashable]] = {stream.name: set() for stream in streams}
        """Marks of rows that were found to be right, and deleted; or are to be."""
        self._deleted: dict[str, list[Hashable]] = {}
        """Those of them that the services' database may still hold."""
        self._forgotten: dict[tuple[Mode, str], Count] = {}
        self._back: dict[str, int] = {}
        """Behind which the facts of a database that went back are told again."""
        self._times = 0
        self._heads: dict[str, int] = {}
        """Behind which its IDs are given out again."""
        self.lost: set[str] = set()
        """Streams whose database may give IDs out again that readers have read."""
        self.late: set[str] = set()
        """Streams of which readers were handed late completions after their database went back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._facts.close()
        self._effects.close()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is compared meanwhile; for the thread that calls the next two."""
        with self._lock:
            yield

    def services_go_back(self, server: str, how: Successor) -> None:
        """At the DSN `server` is what the services' server is going to be; nobody else uses it yet."""
        dsn = tables.own_database(server)
        found = tables.reached(dsn)
        self._times += 1
        with closing(session_of(dsn, APPLICATION)) as session, session.use() as connection:
            for stream, marks in self._compared.items():
                _delete(connection, _facts_of(stream), [*marks])
        self._back = {stream: min(floor, self._back.get(stream, floor)) for stream, (floor, _) in found.items()}
        self._heads = {stream: min(head, self._heads.get(stream, head)) for stream, (_, head) in found.items()}

    def readers_go_back(self, server: str) -> None:
        """The same for the readers', with their places."""
        with closing(session_of(tables.own_database(server), APPLICATION)) as session, session.use() as connection:
            for marks in self._compared.values():
                _delete(connection, _EFFECTS, [*marks])

    def counts(self, *, final: bool = False) -> list[Count]:
        """How each reader does, over all streams, since the database was made; nothing before the first has begun.

        With `final` nothing is late any more. Forgets what all readers have read and the linear one has passed:
        whoever is handed some of it again is handed what is not there, which counts as doubled.
        """
        with self._lock:
            with self._effects.use() as connection, connection.transaction():
                connection.execute("set transaction isolation level repeatable read")
                if not _begun(connection):
                    return [Count(reader, 0, 0) for reader in READERS]
                self._load(connection)
                stands = {key: _stand(connection, *key) for key in self._forgotten}
                handed = {key: _handed(connection, *key) for key in self._forgotten}
            # Later than the effects: whatever a reader has passed by then was committed before.
            with self._facts.use() as connection:
                for stream, marks in [*self._deleted.items()]:
                    _delete(connection, _facts_of(stream), marks)
                    del self._deleted[stream]
                facts = {stream.name: _committed(connection, stream.name) for stream in self._streams}
            counts = {reader: Count(reader, 0, 0) for reader in READERS}
            for stream, rows in facts.items():
                of = [
                    Comparison(
                        *(reader, rows, handed[reader, stream], stands[reader, stream]),
                        *(self._back.get(stream), final, self._times),
                    )
                    for reader in READERS
                ]
                self._note_lost(stream, of)
                found = [comparison.count() for comparison in of]
                for comparison, count in zip(of, found, strict=True):
                    counts[comparison.reader] += count + self._forgotten[comparison.reader, stream]
                if all(count.right for count in found):
                    self._forget(stream, of)
        return [*counts.values()]

    def _note_lost(self, stream: str, of: Sequence[Comparison]) -> None:
        head = self._heads.get(stream)
        if head is not None:
            if any(id > head for comparison in of for id in comparison.strangers):
                self.lost.add(stream)
            if any(row.late for comparison in of for row in comparison.handed):
                self.late.add(stream)

    def _forget(self, stream: str, of: Sequence[Comparison]) -> None:
        reached = min(comparison.stand.linear for comparison in of if comparison.reader == "linear")
        done = [comparison.up_to(reached) for comparison in of]
        counts = {it.reader: self._forgotten[it.reader, stream] + it.count() for it in done}
        if not done[0].facts or not all(count.complete for count in counts.values()):
            return
        rows = {row.mark for row in done[0].facts}
        marks = [*rows.union(*(it.marks for it in done))]
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
        """What earlier plays compared; from then on we know better than a database that went back."""
        if not self._forgotten:
            rows = connection.execute("select reader, stream, facts from demo.compared").fetchall()
            found = {(reader, stream): facts for reader, stream, facts in rows}
            for key in [(reader, stream.name) for reader in READERS for stream in self._streams]:
                self._forgotten[key] = Count(key[0], found.get(key, 0), found.get(key, 0))


_EFFECTS = sql.Identifier("demo", "effects")


def _facts_of(stream: str) -> sql.Identifier:
    return sql.Identifier("demo", stream)


def _delete(connection: Connection, table: sql.Identifier, marks: Sequence[Hashable]) -> None:
    connection.execute(sql.SQL("delete from {} where mark = any(%s)").format(table), [marks])


def _begun(connection: Connection) -> bool:
    """Whether any reader has made its table of places."""
    row = connection.execute("select to_regclass('tidemark_reader.places') is not null").fetchone()
    return row is not None and bool(row[0])


def _stand(connection: Connection, reader: Mode, stream: str) -> Stand:
    row: tuple[int, Mapping[str, Any]] | None = connection.execute(
        "select linear, positions from tidemark_reader.places where reader = %s and stream = %s", [reader, stream]
    ).fetchone()
    return Stand(abs(row[0]), {writer: abs(id) for writer, id in row[1].items()}) if row else Stand(0, {})


def _handed(connection: Connection, reader: Mode, stream: str) -> list[HandedRow]:
    rows = connection.execute(
        "select abs(stream_id), writer, mark, late is not null from demo.effects"
        " where reader = %s and stream = %s order by number",
        [reader, stream],
    )
    return [HandedRow(*row) for row in rows]


def _committed(connection: Connection, stream: str) -> list[FactRow]:
    rows = connection.execute(sql.SQL("select abs(stream_id), writer, mark from {}").format(_facts_of(stream)))
    return [FactRow(*row) for row in rows]
