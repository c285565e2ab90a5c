"""A service that reads streams with `sinks.reader`: what comes of each row is one row of effects, once.

The row goes into `demo.effects` in the transaction that also moves the reader's place.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow
from psycopg.types.json import Jsonb

from sinks.reader import Advance, Event, Late, LateLost, Line, Place, Positions, Reread
from sinks.reader.following import Mode

Connection = psycopg.Connection[TupleRow]


@dataclass(frozen=True, slots=True)
class Role:
    """What one process is: the reader called after its mode, of these streams."""

    mode: Mode
    streams: Sequence[str]


@dataclass(frozen=True, slots=True)
class Servers:
    """`dsn` is that of facts and effects, `tidemark` that of Tidemark's own database."""

    dsn: str
    redis_url: str
    tidemark: str


def read(role: Role, servers: Servers, stopping: threading.Event) -> None:
    """Read until `stopping` is set, each stream on a thread. Raises what the library or psycopg does."""
    with (
        Positions(servers.redis_url, servers.tidemark) as positions,
        ThreadPoolExecutor(len(role.streams)) as pool,
    ):
        readers = [_Reader(role.mode, stream, positions, servers.dsn) for stream in role.streams]
        work = [pool.submit(reader.run, stopping) for reader in readers]
        wait(work, return_when=FIRST_EXCEPTION)
        stopping.set()
    for each in work:
        each.result()


class _Reader:
    def __init__(self, mode: Mode, stream: str, positions: Positions, dsn: str) -> None:
        self._mode = mode
        self._stream = stream
        self._positions = positions
        self._dsn = dsn

    def run(self, stopping: threading.Event) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            follow = self._positions.follow(self._stream, self._mode, self._place(connection), stopping)
            for event in follow:
                assert follow.place is not None
                with connection.transaction():
                    self._apply(connection, event)
                    self._keep(connection, follow.place)

    def _apply(self, connection: Connection, event: Event) -> None:
        """An effect for each row of what the event covers, ascending."""
        whose: sql.Composable
        match event:
            case Advance(writer=writer, prev=prev, id=id) | Reread(writer=str(writer), prev=prev, id=id):
                whose = sql.SQL("writer = {}").format(writer)
            case Reread(prev=prev, id=id, besides=besides):
                whose = sql.SQL("writer <> all({})").format(sorted(besides))
            case Line(prev=prev, id=id):
                whose = sql.SQL("true")
            case Late() | LateLost():
                raise AssertionError(f"nothing comes late in a play, but {event} did")
        if event.proven_empty:
            return
        connection.execute(
            sql.SQL(
                "insert into demo.effects (reader, stream, stream_id, part, writer)"
                " select {reader}, {stream}, stream_id, part, writer from {facts}"
                " where {whose} and abs(stream_id) > {prev} and abs(stream_id) <= {id} order by abs(stream_id), part"
            ).format(
                reader=self._mode,
                stream=self._stream,
                facts=sql.Identifier("demo", self._stream),
                whose=whose,
                prev=abs(prev),
                id=abs(id),
            )
        )

    def _place(self, connection: Connection) -> Place:
        row = connection.execute(
            "select linear, positions, late from demo.places where reader = %s and stream = %s",
            [self._mode, self._stream],
        ).fetchone()
        return Place() if row is None else Place(*row)

    def _keep(self, connection: Connection, place: Place) -> None:
        connection.execute(
            """
            insert into demo.places (reader, stream, linear, positions, late) values (%s, %s, %s, %s, %s)
            on conflict (reader, stream) do update set
                linear = excluded.linear, positions = excluded.positions, late = excluded.late
            """,
            [self._mode, self._stream, place.linear, Jsonb(dict(place.positions)), place.late],
        )
