"""The loop of a service that reads a table along with its stream, for threads; `aio_loop` has the asyncio form.

The logic of both is in `read`.
"""

import os
import threading
from collections.abc import Iterator
from typing import Self

import psycopg
from psycopg.rows import TupleRow, dict_row

from tidemark.common.session_settings import BACKEND, SessionConnection, unprepared_where_pooled
from tidemark.sinks.reader.batch import ReadBatch
from tidemark.sinks.reader.databases import Databases, unreadable
from tidemark.sinks.reader.follow import Mode
from tidemark.sinks.reader.positions import Positions, until_handed
from tidemark.sinks.reader.read_loop import Portion, ReadConfig, Reading
from tidemark.sinks.reader.requests import (
    Answer,
    BeginTransaction,
    CloseSessions,
    CommitTransaction,
    Driver,
    Request,
    Role,
    RunSql,
)
from tidemark.sinks.reader.table import Table
from tidemark.sinks.reader.token import ZERO, Token

Connection = psycopg.Connection[TupleRow]


class Reader(Iterator[ReadBatch[Connection]]):
    """A context manager and an iterator of batches, for one thread.

    What is done with a batch is committed when the next one is asked for, and only then: a loop that is left by
    `break` or by an error gives the batch in hand back, effects and all. Ends between two batches once `stopping` is
    set. Waits for servers that are away and says so in the log. Raises `Refused`, `ReaderModeChanged`, `LateUnknown`,
    `LateNeedsWriter`, and whatever psycopg raises of a statement that the database does not understand.
    """

    def __init__(
        self,
        positions: Positions,
        stream: str,
        table: Table,
        *,
        name: str,
        source: str,
        effects: str,
        mode: Mode = "linear",
        since: Token = ZERO,
        rows: int = 1000,
        primary: str | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        """`name` is that of the place; every copy of a service uses the same, and they take turns.

        `source` is the address of the database with the backing `table`, `effects` that of the reader's own; where
        `source` is a replica, `primary` is that of its primary. `since` is where a new reader begins. A batch has at
        most `rows` rows, unless one fact has more. Raises `BadSetting`.
        """
        self._positions = positions
        self._databases = Databases(source, effects, primary)
        self._stopping = stopping or threading.Event()
        self._config = ReadConfig(stream, table, name, mode, since, rows, replica=primary is not None)
        self._trusted: set[Role] = set()
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._reading = Reading(self._config)
        self._driver: Driver[Portion] = Driver(self._reading.steps())
        self._sessions: dict[Role, Connection] = {}
        self._transaction: psycopg.Transaction | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what was not committed. Who goes on with the reader begins at the place that is kept."""
        self._drop()
        self._begin()

    def _drop(self) -> None:
        # Those of the process that we are a fork of stay open: closing them would end its own.
        if self._process == os.getpid():
            for session in self._sessions.values():
                session.close()
        self._transaction = None
        self._sessions.clear()

    def __iter__(self) -> Self:
        """A loop that was left by an error, and is begun again, does not commit what it had half done."""
        if self._transaction is not None:
            self.close()
        return self

    @property
    def promised(self) -> Token:
        """What this reader has read and committed: what it may promise to a process that waits for it."""
        return self._reading.promised

    @property
    def usable(self) -> Token:
        """What is complete as far as this reader knows: what it may use already."""
        return self._reading.usable

    def __next__(self) -> ReadBatch[Connection]:
        if self._process != os.getpid():
            self._begin()
        portion = until_handed(self._driver, self._carry_out, self._stopped)
        if portion is None:
            raise StopIteration
        table, ledger = self._config.table, self._reading.ledger
        return ReadBatch(portion.rows, self._sessions["place"], portion.late, table.id, ledger)

    def _stopped(self) -> bool:
        return self._stopping.is_set() and self._transaction is None

    def _carry_out(self, request: Request) -> Answer:
        match request:
            case RunSql(role, statement):
                with (
                    self._databases.translated(role, self._sessions),
                    self._session(role).cursor(row_factory=dict_row) as cursor,
                ):
                    cursor.execute(statement)
                    try:
                        return cursor.fetchall() if cursor.description else []
                    except Exception as error:
                        raise unreadable(cursor, request, error) from error
            case BeginTransaction():
                with self._databases.translated("place", self._sessions):
                    transaction = psycopg.Transaction(self._session("place"))
                    transaction.__enter__()
                    self._transaction = transaction
            case CommitTransaction():
                assert self._transaction is not None
                transaction, self._transaction = self._transaction, None
                with self._databases.translated("place", self._sessions):
                    transaction.__exit__(None, None, None)
            case CloseSessions():
                self._drop()
            case _:
                return self._positions.carry_out(request, self._stopping)
        return None

    def _session(self, role: Role) -> Connection:
        if role not in self._sessions:
            try:
                conninfo = self._databases.conninfo(role, self._config.reader)
                if role == "place":  # the batch's connection: its settings are those of the database
                    made = psycopg.connect(conninfo, autocommit=True)
                    unprepared_where_pooled(made, made.execute(BACKEND).fetchone())
                else:
                    made = SessionConnection.open(conninfo)
            except psycopg.OperationalError as error:
                if role not in self._trusted:
                    self._databases.refuse(role, error)
                raise
            self._sessions[role] = made
            self._trusted.add(role)
        return self._sessions[role]
