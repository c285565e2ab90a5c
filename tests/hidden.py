"""Row level security as a house rule switches it on: for every table of a schema, without a policy."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo


def switch_rls(connection: psycopg.Connection, schema: str, how: str, only: str = "") -> None:
    """`how`: enable, disable, force or no force. `only`: one table."""
    tables = connection.execute(
        "select oid::regclass::text from pg_class where relnamespace = %s::regnamespace and relkind in ('r', 'p')"
        " and relname ~ %s",
        [schema, only],
    ).fetchall()
    for (table,) in tables:
        connection.execute(f"alter table {table} {how} row level security".encode())


@contextmanager
def login(connection: psycopg.Connection, dsn: str, name: str, *roles: str) -> Iterator[str]:
    """An address with a user of its own, who owns nothing and is a member of `roles`."""
    user = sql.Identifier(name)
    connection.execute(sql.SQL("create role {} login password 'x'").format(user))
    for role in roles:
        connection.execute(sql.SQL("grant {} to {}").format(sql.Identifier(role), user))
    try:
        yield make_conninfo(dsn, user=name, password="x")
    finally:
        connection.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
            " where usename = %s and pid <> pg_backend_pid()",
            [name],
        )
        connection.execute(sql.SQL("drop owned by {} cascade").format(user))
        connection.execute(sql.SQL("drop role {}").format(user))
