"""Positions of a stream in a database of readers, moved by the test, and what a reader takes."""

from collections.abc import Sequence
from typing import Any

import psycopg

from tidemark.common.postgres_session import PostgresSession
from tidemark.sinks.reader_database import PublishedLate, StreamUpdate, publish

Taken = tuple[int, int, list[int]]


class Positioned:
    """`sql` is a session in autocommit."""

    def __init__(self, dsn: str, session: PostgresSession, sql: psycopg.Connection) -> None:
        self.dsn = dsn
        self.sql = sql
        self.session = session

    def publish(self, linear: int, stream: str = "orders", **writers: int) -> None:
        publish(self.session, {stream: StreamUpdate(linear, writers)})

    def decide(self, linear: int, stream: str = "orders") -> None:
        """What the relay of this database says."""
        self.sql.execute(
            "select tidemark_reader.publish('database', %s, %s::bigint[], null, array(select timeline"
            " from tidemark_reader.positions where stream = %s))",
            [[stream], [linear], stream],
        )

    def late(
        self, number: int, prev: int, id: int, facts: int = 1, writer: str = "web", why: str = "regressed"
    ) -> None:
        late = PublishedLate(number, writer, 1, prev, id, facts, why)
        publish(self.session, {"orders": StreamUpdate(0, {}, late=[late])})

    def take(self, *more: object, sql: psycopg.Connection | None = None, **named: object) -> Taken | None:
        """One row of `take('orders', 'mailer')`."""
        rows = self.rows("take", *more, sql=sql, **named)
        assert len(rows) <= 1
        return rows[0] if rows else None

    def rows(self, function: str, *more: object, sql: psycopg.Connection | None = None, **named: object) -> list[Any]:
        columns = "writer, low, high, late" if function == "take_vector" else "low, high, late"
        return self.columns(columns, function, *more, sql=sql, **named)

    def columns(
        self, columns: str, function: str, *more: object, sql: psycopg.Connection | None = None, **named: object
    ) -> list[Any]:
        given: Sequence[object] = more or ("orders", "mailer")
        arguments = ", ".join(["%s"] * len(given) + [f"{name} => %s" for name in named])
        query = f"select {columns} from tidemark_reader.{function}({arguments})".encode()
        return (sql or self.sql).execute(query, [*given, *named.values()]).fetchall()
