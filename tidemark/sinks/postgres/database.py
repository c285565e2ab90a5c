"""Tidemark's own database, as the pipeline and its readers use it: sessions, the schema, and many rows in a statement.

The schema `tidemark` is made by the files in `migrations/`; see `common.migrations`.
"""

from collections.abc import Iterable
from typing import Any, LiteralString, TypeAlias

from psycopg import Cursor
from psycopg.rows import TupleRow

from tidemark.common.migrations import Migrations
from tidemark.common.postgres_session import Connection, DatabaseUse, Dsn, PostgresSession
from tidemark.sinks.postgres.arrays import as_array

_USE = DatabaseUse(
    "TIDEMARK_POSTGRES_DSN",
    refusals={
        "28": "check the user and the password in TIDEMARK_POSTGRES_DSN, or TIDEMARK_POSTGRES_PASSWORD",
        "3D": "create the database, or correct its name in TIDEMARK_POSTGRES_DSN",
        "3F": "run `tidemark migrate`",
        "42P01": "run `tidemark migrate`",
        "42501": "grant the user the role tidemark_owner (who only looks: tidemark_reader; who acts by hand:"
        " tidemark_operator too), or run `tidemark migrate` as a user who may create a schema",
    },
    password="TIDEMARK_POSTGRES_PASSWORD",
)

SCHEMA = Migrations("tidemark.sinks.postgres", "schema_version", "tidemark migrate")
READABLE = 3
"""The oldest schema in which everything lies where our reads look for it: a sidecar may be newer than its pipeline."""


def session_of(dsn: Dsn, application: str) -> PostgresSession:
    """A session to Tidemark's database; `application` is its name among the sessions of the server."""
    return PostgresSession(dsn, application, _USE)


def migrate(dsn: Dsn) -> list[int]:
    """`SCHEMA.migrate` in a session of its own."""
    with session_of(dsn, "tidemark migrate") as session:
        return SCHEMA.migrate(session)


Rows: TypeAlias = Iterable[tuple[Any, ...]]


def execute(connection: Connection, statement: LiteralString, rows: Rows, *more: object) -> Cursor[TupleRow] | None:
    """Run `statement` with one array per column of `rows`, then `more`; without rows nothing runs and None comes back.

    The statement casts each array (`postgres.arrays`). None is null.
    """
    columns = list(zip(*rows, strict=True))
    return connection.execute(statement, [*map(as_array, columns), *more]) if columns else None
