"""`Reader`: the loop of a service that reads a stream, for threads. The asyncio form is in `aio_reader`."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import psycopg
from psycopg.rows import TupleRow, dict_row

from tidemark.sinks.reader.asks import Answer, Ask, Begin, Commit, Reset, Role, Row, Sql
from tidemark.sinks.reader.driver import Driver
from tidemark.sinks.reader.events import Late
from tidemark.sinks.reader.following import Mode
from tidemark.sinks.reader.positions import Positions, until_handed
from tidemark.sinks.reader.reading import Portion, Reading, ReadTerms
from tidemark.sinks.reader.sessions import Databases
from tidemark.sinks.reader.table import Table
from tidemark.sinks.reader.token import ZERO, Token

Connection = psycopg.Connection[TupleRow]
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Batch(Generic[C]):
    """Rows of the backing table, ascending, as dicts; all rows of a fact are in one batch.

    Do everything that comes of them on `connection`: it is inside the transaction that also moves the reader's place,
    and that is committed when the loop goes on. Do not keep it. `late` is None for rows in their order; otherwise these
    rows belong to IDs that the reader has passed without them (see `Late`).
    """

    rows: list[Row]
    connection: C
    late: Late | None


class Reader(Iterator[Batch[Connection]]):
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
        self._name = name
        self._stopping = stopping or threading.Event()
        terms = ReadTerms(stream, table, name, mode, since, rows, replica=primary is not None)
        self._driver: Driver[Portion] = Driver(Reading(terms).steps())
        self._sessions: dict[Role, Connection] = {}
        self._trusted: set[Role] = set()
        self._transaction: ExitStack | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what was not committed."""
        self._transaction = None
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def __next__(self) -> Batch[Connection]:
        portion = until_handed(self._driver, self._carry_out, self._stopped)
        if portion is None:
            raise StopIteration
        return Batch(portion.rows, self._sessions["place"], portion.late)

    def _stopped(self) -> bool:
        return self._stopping.is_set() and self._transaction is None

    def _carry_out(self, ask: Ask) -> Answer:
        match ask:
            case Sql(role, statement):
                with self._databases.translated(role), self._session(role).cursor(row_factory=dict_row) as cursor:
                    cursor.execute(statement)
                    return cursor.fetchall() if cursor.description else []
            case Begin():
                with self._databases.translated("place"):
                    transaction = ExitStack()
                    transaction.enter_context(self._session("place").transaction())
                    self._transaction = transaction
            case Commit():
                assert self._transaction is not None
                transaction, self._transaction = self._transaction, None
                with self._databases.translated("place"):
                    transaction.close()
            case Reset():
                self.close()
            case _:
                return self._positions.carry_out(ask, self._stopping)
        return None

    def _session(self, role: Role) -> Connection:
        if role not in self._sessions:
            try:
                made = psycopg.connect(self._databases.conninfo(role, self._name), autocommit=True)
            except psycopg.OperationalError as error:
                if role not in self._trusted:
                    self._databases.refuse(role, error)
                raise
            self._sessions[role] = made
            self._trusted.add(role)
        return self._sessions[role]
