"""Batches as a service gets them, and the parking of facts on which it fails."""

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import Any, Generic, TypeVar

import psycopg

from tidemark.common.errors import Retry, Stop
from tidemark.common.log import get_logger
from tidemark.common.postgres_session import explained, first_line
from tidemark.sinks.reader.checkpoint import CheckpointStore
from tidemark.sinks.reader.events import Late
from tidemark.sinks.reader.requests import Row

log = get_logger(__name__)

C = TypeVar("C")

LONGEST = 2000  # characters of a reason


@dataclass(frozen=True, slots=True)
class ReadBatch(Generic[C]):
    """Rows of the backing table, ascending, as dicts; all rows of a fact are in one batch.

    Do everything that comes of them on `connection`: it is inside the transaction that also moves the reader's place,
    and that is committed when the loop goes on. Do not keep it, and do not end its transaction. `late` is None for rows
    in their order; otherwise these rows belong to IDs that the reader has passed without them (see `Late`).
    """

    rows: list[Row]
    connection: C
    late: Late | None
    _id: str
    _ledger: CheckpointStore

    def facts(self) -> Iterator[tuple[int, list[Row]]]:
        """The rows fact by fact, each with its ID."""
        for id, rows in groupby(self.rows, key=lambda row: row[self._id]):
            yield id, list(rows)

    def parking(self, id: int, *errors: type[Exception]) -> "Parking":
        """A savepoint for what comes of the fact `id`: `with`, or `async with` of an `AsyncReader`.

        One of the `errors` inside takes that back and puts the fact into `tidemark_reader.parked`, with the reason, for
        a person; it is logged, and the loop goes on. Every other error passes, and so does what will mend by itself
        (a lost connection, a deadlock).
        """
        return Parking(self._ledger, self.connection, id, errors)


class Parking(AbstractContextManager[None], AbstractAsyncContextManager[None]):
    """One block of either form; see `ReadBatch.parking`."""

    def __init__(self, ledger: CheckpointStore, connection: Any, id: int, errors: tuple[type[Exception], ...]) -> None:
        self._ledger = ledger
        self._connection = connection
        self._id = id
        self._errors = errors
        self._savepoint: Any = None

    def __enter__(self) -> None:
        self._savepoint = self._connection.transaction()
        self._savepoint.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._savepoint.__exit__(kind, error, trace):
            return True
        if not self._parks(error):
            return False
        self._connection.execute(self._ledger.parked(self._id, self._said(error)))
        return True

    async def __aenter__(self) -> None:
        self._savepoint = self._connection.transaction()
        await self._savepoint.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if await self._savepoint.__aexit__(kind, error, trace):
            return True
        if not self._parks(error):
            return False
        await self._connection.execute(self._ledger.parked(self._id, self._said(error)))
        return True

    def _parks(self, error: BaseException | None) -> bool:
        if not isinstance(error, self._errors) or isinstance(error, Retry | Stop):
            return False
        return not (isinstance(error, psycopg.Error) and isinstance(explained(error, "", {}), Retry))

    def _said(self, error: BaseException | None) -> str:
        text = first_line(error) if isinstance(error, psycopg.Error) else str(error)
        reason = f"{type(error).__name__}: {text}"[:LONGEST].replace("\0", "?").encode(errors="replace").decode()
        log.warning("Parked a fact that failed", reader=self._ledger.reader, id=self._id, problem=reason)
        return reason
