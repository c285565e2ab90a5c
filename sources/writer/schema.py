"""The writer's part of the schema `tidemark`, in the service's own database: numbered SQL files, applied in order.

It has a version of its own, so that it may share a database, and the schema, with what the pipeline writes. A file that
was released is never edited; a change is a new file. A writer never migrates, it only checks.
"""

from importlib.resources import files

import structlog

from tidemark.sources.writer.session import Connection, Session
from tidemark.streaming.errors import SchemaMismatch

log = structlog.get_logger(__name__)

COMMAND = "tidemark writer migrate"


def _scripts() -> dict[int, tuple[str, str]]:
    """Version -> (file name, SQL), in ascending order."""
    found = (entry for entry in (files(__package__) / "migrations").iterdir() if entry.name.endswith(".sql"))
    return {
        int(entry.name.split("_")[0]): (entry.name, entry.read_text("utf-8"))
        for entry in sorted(found, key=lambda entry: entry.name)
    }


WANTED = max(_scripts())


def migrate(session: Session) -> list[int]:
    """Apply what is missing, each file in a transaction of its own; the versions applied now.

    Several at once are safe: the others wait for the first. Raises `SchemaMismatch` where the schema is newer.
    """
    with session.use() as connection:
        connection.execute("select pg_advisory_lock(hashtextextended('tidemark.writer.migrate', 0))")
        try:
            return _upgrade(connection)
        finally:
            connection.execute("select pg_advisory_unlock(hashtextextended('tidemark.writer.migrate', 0))")


def _upgrade(connection: Connection) -> list[int]:
    with connection.transaction():
        connection.execute("create schema if not exists tidemark")
        connection.execute(
            "create table if not exists tidemark.writer_schema_version"
            " (version integer primary key, name text not null, applied_at timestamptz not null default now())"
        )
    applied = pending(connection)
    for number in applied:
        name, script = _scripts()[number]
        with connection.transaction():
            connection.execute(script.encode())
            connection.execute(
                "insert into tidemark.writer_schema_version (version, name) values (%s, %s)", (number, name)
            )
        log.info("Migrated the writer's schema", version=number, file=name)
    return applied


def pending(connection: Connection) -> list[int]:
    """The versions that `migrate` would apply. Raises `SchemaMismatch` where the schema is newer."""
    found = version(connection)
    if found > WANTED:
        raise SchemaMismatch(found, WANTED, COMMAND)
    return [number for number in _scripts() if number > found]


def version(connection: Connection) -> int:
    """The schema's version, 0 where nothing was applied yet."""
    if connection.execute("select 1 where to_regclass('tidemark.writer_schema_version') is null").fetchone():
        return 0
    row = connection.execute("select coalesce(max(version), 0) from tidemark.writer_schema_version").fetchone()
    return 0 if row is None else int(row[0])


def check(connection: Connection) -> None:
    """Raise `SchemaMismatch` unless the schema is exactly the one that this library was written for."""
    if (found := version(connection)) != WANTED:
        raise SchemaMismatch(found, WANTED, COMMAND)
