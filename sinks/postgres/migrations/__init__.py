"""The schema `tidemark` in Postgres: numbered SQL files, applied in order, each in a transaction of its own.

A file that was released is never edited; a change is a new file. The service itself never migrates, it only checks.

Versions meet while they are exchanged: the schema is migrated first, under the old pipeline, and stays when that comes
back. So a change first adds, and takes away one minor version later: a file says `Works with code for schema N` where
code of that age is not disturbed by it.
"""

import re
from importlib.resources import files

import structlog

from tidemark.sinks.postgres.session import Connection, Database, Dsn
from tidemark.streaming.errors import SchemaMismatch

log = structlog.get_logger(__name__)


def _scripts() -> dict[int, tuple[str, str]]:
    """Version -> (file name, SQL), in ascending order."""
    found: dict[int, tuple[str, str]] = {}
    for entry in sorted(files(__name__).iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".sql"):
            number = int(entry.name.split("_")[0])
            assert number not in found, f"two migrations have number {number}"
            found[number] = entry.name, entry.read_text("utf-8")
    return found


WANTED = max(_scripts())
READABLE = 3
"""The oldest schema in which everything lies where our reads look for it: a sidecar may be newer than its pipeline."""

_WORKS_WITH = re.compile(r"^-- Works with code for schema (\d+)\.$", re.MULTILINE)


def migrate(dsn: Dsn) -> list[int]:
    """Bring the schema up to this Tidemark's version; returns the versions applied now, [] when it was up to date.

    Several at once are safe: the others wait for the first and then find nothing to do. After a failure the versions
    before it stay applied, and a second call goes on there. A newer schema is left as it is. Raises `SchemaMismatch`
    where that does not work with this Tidemark.
    """
    database = Database(dsn, "tidemark migrate")
    try:
        with database.session() as connection:
            connection.execute("select pg_advisory_lock(hashtextextended('tidemark.migrate', 0))")
            return _upgrade(connection)
    finally:
        database.close()


def _upgrade(connection: Connection) -> list[int]:
    with connection.transaction():
        if version(connection) is None:
            connection.execute("create schema if not exists tidemark")
            connection.execute(
                "create table tidemark.schema_version"
                " (version integer primary key, name text not null, applied_at timestamptz not null default now())"
            )
        connection.execute("alter table tidemark.schema_version add column if not exists works_with integer")
    found = version(connection) or 0
    if found > WANTED:
        check(connection)
    applied = []
    for number, (name, script) in _scripts().items():
        if number > found:
            with connection.transaction():
                connection.execute(script.encode())
                connection.execute(
                    "insert into tidemark.schema_version (version, name, works_with) values (%s, %s, %s)",
                    (number, name, _works_with(number, script)),
                )
            log.info("Migrated the database", version=number, file=name)
            applied.append(number)
    return applied


def _works_with(number: int, script: str) -> int:
    said = _WORKS_WITH.search(script)
    return int(said[1]) if said else number


def version(connection: Connection) -> int | None:
    """The schema's version; 0 when nothing was applied yet, None where there is no schema at all."""
    exists = connection.execute("select 1 where to_regclass('tidemark.schema_version') is not null").fetchone()
    if not exists:
        return None
    newest = connection.execute("select version from tidemark.schema_version order by version desc limit 1").fetchone()
    return newest[0] if newest else 0


def check(connection: Connection) -> None:
    """Raise `SchemaMismatch` unless this Tidemark can write in the schema: it was written for it, or for an older one
    that its successor has left in working order."""
    found = version(connection) or 0
    if found != WANTED and not _works_for_us(connection, found):
        raise SchemaMismatch(found, WANTED)


def check_readable(connection: Connection) -> None:
    """Raise `SchemaMismatch` unless this Tidemark can read the schema."""
    found = version(connection) or 0
    if not READABLE <= found <= WANTED and not _works_for_us(connection, found):
        raise SchemaMismatch(found, WANTED)


def _works_for_us(connection: Connection, found: int) -> bool:
    if found < WANTED:
        return False
    row = connection.execute(
        "select works_with <= %s from tidemark.schema_version where version = %s", (WANTED, found)
    ).fetchone()
    return row is not None and bool(row[0])
