"""The batches that a service receives, and the parking of facts whose effects fail."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import Any, Generic, TypeVar

import psycopg

from tidemark.common.errors import Retry, Stop
from tidemark.common.log import get_logger
from tidemark.common.postgres_session import explain_error, first_line
from tidemark.sinks.reader.checkpoint import CheckpointStore
from tidemark.sinks.reader.databases import EffectsTransaction, find_psycopg_error
from tidemark.sinks.reader.events import Late
from tidemark.sinks.reader.requests import Row

log = get_logger(__name__)

C = TypeVar("C")

MAX_REASON_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class ReadBatch(Generic[C]):
    """Rows of the backing table, and the transaction for their effects. All rows of a fact are in one batch.

    Write all effects of the batch on `connection`. The open transaction of `connection` also moves the reader's place,
    and is committed when the loop continues. Do not use the connection after the batch, and do not end the transaction.

    Attributes:
        rows: the rows, each as a dict (column -> value), ordered by ID away from 0.
        connection: the connection of the reader's own database, or the session of your library (`Reader(effects=...)`).
        late: the late completion to which the rows belong; None if the rows are in order.
        withdrawn: ranges of IDs as pairs (lower ID, higher ID), both included. Empty unless the source was restored.
            The earlier facts of these IDs no longer exist: undo their effects, and then process `rows`, which has the
            new facts of these IDs. Some of the IDs may never have had a fact. A reader with partitions gets the ranges
            once for each `partition`, and must undo only the effects of that partition.
        is_retry: whether the rows belong to a parked fact for which an operator requested a retry.
        partition: the number of the partition of the rows, from 0; None if the reader has no partitions.
    """

    rows: list[Row]
    connection: C
    late: Late | None
    withdrawn: Sequence[tuple[int, int]]
    is_retry: bool
    partition: int | None
    _id: str
    _checkpoint_store: CheckpointStore
    _transaction: EffectsTransaction

    def facts(self) -> Iterator[tuple[int, list[Row]]]:
        """Yield each fact of the batch as (ID, rows of the fact), in the order of `rows`."""
        for id, rows in groupby(self.rows, key=lambda row: row[self._id]):
            yield id, list(rows)

    def parking(self, id: int, *errors: type[Exception]) -> "Parking":
        """Return a context manager that parks the fact `id` if its effects fail.

        Use `with`, or `async with` for an `AsyncReader`. The block runs in a savepoint. If the block raises one of the
        `errors`, the effects of the block are rolled back, and the error is logged. The fact and the error are stored
        in `tidemark_reader.parked` for an operator, and the loop continues. Other errors are raised. Errors that a
        retry may solve (a lost connection, a deadlock) and Tidemark's errors of the kind `Stop` are always raised.

        Args:
            id: the stream ID of the fact.
            errors: the classes of errors for which the fact is parked.
        """
        return Parking(self._checkpoint_store, self._transaction, id, errors)


class Parking(AbstractContextManager[None], AbstractAsyncContextManager[None]):
    """The context manager of `ReadBatch.parking`, for `with` and for `async with`."""

    def __init__(
        self,
        checkpoint_store: CheckpointStore,
        transaction: EffectsTransaction,
        id: int,
        errors: tuple[type[Exception], ...],
    ) -> None:
        self._checkpoint_store = checkpoint_store
        self._transaction = transaction
        self._id = id
        self._errors = errors
        self._savepoint: Any = None

    def __enter__(self) -> None:
        self._savepoint = self._transaction.savepoint()
        self._savepoint.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            if self._savepoint.__exit__(kind, error, trace):
                return True
        except self._errors as raised:  # SQLAlchemy may write objects only at the end of the savepoint
            if error is not None or not self._can_park(raised):
                raise
            error = raised
        if not self._can_park(error):
            return False
        self._transaction.driver.execute(self._checkpoint_store.park_statement(self._id, self._log_reason(error)))
        return True

    async def __aenter__(self) -> None:
        self._savepoint = self._transaction.savepoint()
        await self._savepoint.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            if await self._savepoint.__aexit__(kind, error, trace):
                return True
        except self._errors as raised:
            if error is not None or not self._can_park(raised):
                raise
            error = raised
        if not self._can_park(error):
            return False
        await self._transaction.driver.execute(self._checkpoint_store.park_statement(self._id, self._log_reason(error)))
        return True

    def _can_park(self, error: BaseException | None) -> bool:
        """Whether the fact may be parked for `error`. True if `parking` was called with a class of the error, a retry
        cannot solve the error, and the error is not a `Stop`."""
        if not isinstance(error, self._errors) or isinstance(error, Retry | Stop):
            return False
        cause = find_psycopg_error(error)
        return cause is None or not isinstance(explain_error(cause, "", {}), Retry)

    def _log_reason(self, error: BaseException | None) -> str:
        """Log that the fact is parked, and return the reason to store: the error as text that Postgres accepts."""
        text = first_line(error) if isinstance(error, psycopg.Error) else str(error)
        reason = (
            f"{type(error).__name__}: {text}"[:MAX_REASON_CHARACTERS]
            .replace("\0", "?")
            .encode(errors="replace")
            .decode()
        )
        log.warning("Parked a fact", reader=self._checkpoint_store.reader, id=self._id, problem=reason)
        return reason
