"""Runs migrations: numbered SQL files of one folder, applied in order, each in its own transaction.

A released file is never edited; a change is a new file. Services never migrate, they only check the version.

During an upgrade, old code runs in the new schema, and after a rollback it runs there again. Therefore a migration adds
first, and a migration one minor version later removes. A file that old code can run with has the comment
`Works with code for schema N`.

Several parts of Tidemark share the schema `tidemark`, in one or two databases. Each has its own folder and its own
table of versions.
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
    """The migrations of one part of Tidemark.

    Attributes:
        package: the package with the folder `migrations`.
        table: the table of versions in the schema `tidemark`.
        command: the command that applies the migrations, for messages.
    """

    package: str
    table: str
    command: str

    @cached_property
    def scripts(self) -> Mapping[int, tuple[str, str]]:
        """Version -> (file name, SQL), in ascending order."""
        scripts: dict[int, tuple[str, str]] = {}
        entries = (entry for entry in (files(self.package) / "migrations").iterdir() if entry.name.endswith(".sql"))
        for entry in sorted(entries, key=lambda entry: entry.name):
            number = int(entry.name.split("_")[0])
            assert number not in scripts, f"two migrations have number {number}"
            scripts[number] = entry.name, entry.read_text("utf-8")
        return scripts

    @property
    def wanted(self) -> int:
        """The version of the schema that this code was written for."""
        return max(self.scripts)

    def migrate(self, session: PostgresSession) -> list[int]:
        """Migrate the schema to this version.

        Takes no lock if there is nothing to do. Otherwise it waits for locks for up to a minute, one second at a time,
        and logs the sessions that have them (`common.lock_waits`). Several processes may migrate at once; one of them
        applies each version. After a failure, the versions before it stay applied, and the next call continues. A newer
        schema is not changed.

        Returns:
            The versions that were applied now.

        Raises:
            SchemaMismatch: a newer schema does not work with this code.
            PrerequisitePending: a lock was not free in time.
        """
        applied = list[int]()
        while True:
            current = run_locking(session, f"reading tidemark.{self.table}", self._current_version)
            if current is None:
                # Another process may create them at the same moment.
                with suppress(errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateSchema):
                    run_locking(session, f"making tidemark.{self.table}", self._make_table)
            elif missing := [number for number in self.scripts if number > current]:
                name, _ = self.scripts[missing[0]]
                if run_locking(session, f"migration {name}", partial(self._apply, missing[0])):
                    log.info("Migrated the database", version=missing[0], file=name)
                    applied.append(missing[0])
            else:
                return applied

    def version(self, connection: Connection) -> int | None:
        """The version of the schema; 0 if no migration was applied, None if there is no table of versions."""
        name = f"tidemark.{self.table}"
        if not connection.execute("select 1 where to_regclass(%s) is not null", [name]).fetchone():
            return None
        query = sql.SQL("select coalesce(max(version), 0) from {}").format(self._table)
        row = connection.execute(query).fetchone()
        return 0 if row is None else int(row[0])

    def check(self, connection: Connection) -> None:
        """Raise `SchemaMismatch` unless this code can write in the schema.

        The version is the wanted one, or a newer one that works with this code.
        """
        self.check_from(connection, self.wanted)

    def check_from(self, connection: Connection, oldest: int) -> None:
        """Raise `SchemaMismatch` unless this code can read the schema, which it can from version `oldest` on."""
        version = self.version(connection) or 0
        if not oldest <= version <= self.wanted and not self._works_for_us(connection, version):
            raise SchemaMismatch(version, self.wanted, self.command)

    def _current_version(self, connection: Connection) -> int | None:
        """The version of the schema; None if the table of versions is missing.

        Raises `SchemaMismatch` for a newer schema that does not work with this code.
        """
        version = self.version(connection)
        if version is not None and version > self.wanted:
            self.check(connection)
        return version

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
        """Apply a migration; returns False if another process did. The lock blocks other migrations, and no readers."""
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

    def _works_for_us(self, connection: Connection, version: int) -> bool:
        if version < self.wanted:
            return False
        query = sql.SQL("select works_with <= %s from {} where version = %s").format(self._table)
        row = connection.execute(query, (self.wanted, version)).fetchone()
        return row is not None and bool(row[0])

    @property
    def _table(self) -> sql.Identifier:
        return sql.Identifier("tidemark", self.table)


def _works_with(number: int, script: str) -> int:
    comment = _WORKS_WITH.search(script)
    return int(comment[1]) if comment else number
