"""The runner of migrations: numbered SQL files of one folder, applied in order, each in a transaction of its own.

A file that was released is never edited; a change is a new file. Services never migrate, they only check.

Versions meet while they are exchanged: the schema is migrated first, under the old code, and stays when that comes
back. So a change first adds, and takes away one minor version later: a file says `Works with code for schema N` where
code of that age is not disturbed by it.

Several owners share one schema, `tidemark`, in one database or in two: each has its own folder and its own versions.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.resources import files

from psycopg import errors, sql

from tidemark.common.errors import SchemaMismatch
from tidemark.common.lock_waits import run_locking
from tidemark.common.log import get_logger
from tidemark.common.postgres_session import Connection, PostgresSession

log = get_logger(__name__)

_WORKS_WITH = re.compile(r"^-- Works with code for schema (\d+)\.$", re.MULTILINE)


@dataclass(frozen=True)
class Migrations:
    """One owner's files: those of `migrations/` in `package`, recorded in the table `tidemark.<table>`.

    `command` is what a person runs to apply them.
    """

    package: str
    table: str
    command: str

    @cached_property
    def scripts(self) -> Mapping[int, tuple[str, str]]:
        """Version -> (file name, SQL), in ascending order."""
        found: dict[int, tuple[str, str]] = {}
        entries = (entry for entry in (files(self.package) / "migrations").iterdir() if entry.name.endswith(".sql"))
        for entry in sorted(entries, key=lambda entry: entry.name):
            number = int(entry.name.split("_")[0])
            assert number not in found, f"two migrations have number {number}"
            found[number] = entry.name, entry.read_text("utf-8")
        return found

    @property
    def wanted(self) -> int:
        """The schema's version that this code was written for."""
        return max(self.scripts)

    def migrate(self, session: PostgresSession) -> list[int]:
        """Bring the schema up to this version; returns the versions applied now, [] when it was up to date.

        Takes no lock if there is nothing to do. Otherwise it waits for each lock a second at a time, for a minute in
        all, and logs which sessions hold it (`common.lock_waits`). Several at once are safe: each version is applied
        by one of them. After a failure the versions before it stay applied, and a second call goes on there. A newer
        schema is left as it is. Raises `SchemaMismatch` where that does not work with this code, and `OthersFirst`
        where a lock was not free in time.
        """
        applied = list[int]()
        while True:
            found = run_locking(session, f"reading tidemark.{self.table}", self._found)
            if found is None:
                # Another migration may make them at the same moment.
                with suppress(errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateSchema):
                    run_locking(session, f"making tidemark.{self.table}", self._make_table)
            elif missing := [number for number in self.scripts if number > found]:
                name, _ = self.scripts[missing[0]]
                if run_locking(session, f"migration {name}", partial(self._apply, missing[0])):
                    log.info("Migrated the database", version=missing[0], file=name)
                    applied.append(missing[0])
            else:
                return applied

    def version(self, connection: Connection) -> int | None:
        """The schema's version; 0 when nothing was applied yet, None where there is no table of versions."""
        name = f"tidemark.{self.table}"
        if not connection.execute("select 1 where to_regclass(%s) is not null", [name]).fetchone():
            return None
        query = sql.SQL("select coalesce(max(version), 0) from {}").format(self._table)
        row = connection.execute(query).fetchone()
        return 0 if row is None else int(row[0])

    def check(self, connection: Connection) -> None:
        """Raise `SchemaMismatch` unless this code can write in the schema: it was written for it, or for an older one
        that its successor has left in working order."""
        self.check_from(connection, self.wanted)

    def check_from(self, connection: Connection, oldest: int) -> None:
        """The same, for code that can do with any schema from `oldest` on."""
        found = self.version(connection) or 0
        if not oldest <= found <= self.wanted and not self._works_for_us(connection, found):
            raise SchemaMismatch(found, self.wanted, self.command)

    def _found(self, connection: Connection) -> int | None:
        """The schema's version; None if the table of versions is missing.

        Raises `SchemaMismatch` for a newer schema that does not work with this code.
        """
        found = self.version(connection)
        if found is not None and found > self.wanted:
            self.check(connection)
        return found

    def _make_table(self, connection: Connection) -> None:
        if self.version(connection) is None:
            connection.execute("create schema if not exists tidemark")
            connection.execute(
                sql.SQL(
                    "create table {} (version integer primary key, name text not null,"
                    " applied_at timestamptz not null default now(), works_with integer)"
                ).format(self._table)
            )

    def _apply(self, number: int, connection: Connection) -> bool:
        """Whether the version was still missing. The lock keeps out other migrations and no reader of the table."""
        connection.execute(sql.SQL("lock table {} in share row exclusive mode").format(self._table))
        if (self.version(connection) or 0) >= number:
            return False
        name, script = self.scripts[number]
        connection.execute(script.encode())
        connection.execute(
            sql.SQL("insert into {} (version, name, works_with) values (%s, %s, %s)").format(self._table),
            (number, name, _works_with(number, script)),
        )
        return True

    def _works_for_us(self, connection: Connection, found: int) -> bool:
        if found < self.wanted:
            return False
        query = sql.SQL("select works_with <= %s from {} where version = %s").format(self._table)
        row = connection.execute(query, (self.wanted, found)).fetchone()
        return row is not None and bool(row[0])

    @property
    def _table(self) -> sql.Identifier:
        return sql.Identifier("tidemark", self.table)


def _works_with(number: int, script: str) -> int:
    said = _WORKS_WITH.search(script)
    return int(said[1]) if said else number
