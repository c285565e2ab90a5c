"""The schema `tidemark` in Postgres: numbered SQL files, applied in order, each in a transaction of its own.

A file that was released is never edited; a change is a new file. The service itself never migrates, it only checks.
"""

from importlib.resources import files

import structlog

from sinks.database import Connection, Database
from streaming.errors import SchemaMismatch

log = structlog.get_logger(__name__)


def _scripts() -> dict[int, tuple[str, str]]:
    """Version -> (file name, SQL), in ascending order."""
    found = (entry for entry in files(__name__).iterdir() if entry.name.endswith(".sql"))
    return {
        int(entry.name.split("_")[0]): (entry.name, entry.read_text("utf-8"))
        for entry in sorted(found, key=lambda entry: entry.name)
    }


WANTED = max(_scripts())


def migrate(dsn: str) -> list[int]:
    """Bring the schema up to this Tidemark's version; returns the versions applied now, [] when it was up to date.

    Several at once are safe: the others wait for the first and then find nothing to do. After a failure the versions
    before it stay applied, and a second call goes on there. Raises `SchemaMismatch` where the schema is newer.
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
    found = version(connection) or 0
    if found > WANTED:
        raise SchemaMismatch(found, WANTED)
    applied = []
    for number, (name, script) in _scripts().items():
        if number > found:
            with connection.transaction():
                connection.execute(script.encode())
                connection.execute(
                    "insert into tidemark.schema_version (version, name) values (%s, %s)", (number, name)
                )
            log.info("Migrated the database", version=number, file=name)
            applied.append(number)
    return applied


def version(connection: Connection) -> int | None:
    """The schema's version; 0 when nothing was applied yet, None where there is no schema at all."""
    exists = connection.execute("select 1 where to_regclass('tidemark.schema_version') is not null").fetchone()
    if not exists:
        return None
    newest = connection.execute("select version from tidemark.schema_version order by version desc limit 1").fetchone()
    return newest[0] if newest else 0


def check(connection: Connection) -> None:
    """Raise `SchemaMismatch` unless the database has exactly the schema that this Tidemark was written for."""
    found = version(connection) or 0
    if found != WANTED:
        raise SchemaMismatch(found, WANTED)
