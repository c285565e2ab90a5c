"""Batches as a service receives them, and the parking of facts on which the service fails."""

from collections.abc import Iterator, Sequence
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
from tidemark.sinks.reader.effects import OwnTransaction, psycopg_error
from tidemark.sinks.reader.events import Late
from tidemark.sinks.reader.requests import Row

log = get_logger(__name__)

C = TypeVar("C")

MAX_REASON = 2000  # characters


@dataclass(frozen=True, slots=True)
class ReadBatch(Generic[C]):
    """Rows of the backing table, ascending, as dicts. All rows of a fact are in one batch.

    Write all effects of the batch on `connection`. It is inside the transaction that also moves the checkpoint of the
    reader, and that is committed when the loop continues. Do not keep the connection, and do not end its transaction.

    `late` is None for rows in order. Otherwise the rows belong to IDs that the reader has passed without them; see
    `Late`. `is_retry`: the rows of one fact that was parked, which an operator has handed over again.

    `withdrawn` has pairs of IDs, each the first and the last of a range, the lower one first. It is empty unless the
    source was restored. The facts that these IDs had before are gone: undo what they did, and then process `rows`,
    which has the facts that these IDs have now. Some of the IDs may never have had a fact. A reader with partitions
    gets them once for each `partition`, and undoes what that partition did.

    `partition` is the number of the partition that the rows are of; None if the reader has none.
    """

    rows: list[Row]
    connection: C
    late: Late | None
    withdrawn: Sequence[tuple[int, int]]
    is_retry: bool
    partition: int | None
    _id: str
    _ledger: CheckpointStore
    _opened: OwnTransaction

    def facts(self) -> Iterator[tuple[int, list[Row]]]:
        """The rows of each fact, with its ID."""
        for id, rows in groupby(self.rows, key=lambda row: row[self._id]):
            yield id, list(rows)

    def parking(self, id: int, *errors: type[Exception]) -> "Parking":
        """A savepoint for the effects of the fact `id`: `with`, or `async with` for an `AsyncReader`.

        One of the `errors` inside rolls the effects back and puts the fact into `tidemark_reader.parked`, with the
        reason, for a person. The error is logged and the loop continues. Every other error is raised, and so is an
        error that a retry may solve (a lost connection, a deadlock).
        """
        return Parking(self._ledger, self._opened, id, errors)


class Parking(AbstractContextManager[None], AbstractAsyncContextManager[None]):
    """The block of `ReadBatch.parking`, in both forms."""

    def __init__(
        self, ledger: CheckpointStore, opened: OwnTransaction, id: int, errors: tuple[type[Exception], ...]
    ) -> None:
        self._ledger = ledger
        self._opened = opened
        self._id = id
        self._errors = errors
        self._savepoint: Any = None

    def __enter__(self) -> None:
        self._savepoint = self._opened.savepoint()
        self._savepoint.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            if self._savepoint.__exit__(kind, error, trace):
                return True
        except self._errors as raised:  # a session that writes its objects at the end of the savepoint
            if error is not None or not self._parks(raised):
                raise
            error = raised
        if not self._parks(error):
            return False
        self._opened.driver.execute(self._ledger.parked(self._id, self._reason(error)))
        return True

    async def __aenter__(self) -> None:
        self._savepoint = self._opened.savepoint()
        await self._savepoint.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            if await self._savepoint.__aexit__(kind, error, trace):
                return True
        except self._errors as raised:
            if error is not None or not self._parks(raised):
                raise
            error = raised
        if not self._parks(error):
            return False
        await self._opened.driver.execute(self._ledger.parked(self._id, self._reason(error)))
        return True

    def _parks(self, error: BaseException | None) -> bool:
        if not isinstance(error, self._errors) or isinstance(error, Retry | Stop):
            return False
        cause = psycopg_error(error)
        return cause is None or not isinstance(explained(cause, "", {}), Retry)

    def _reason(self, error: BaseException | None) -> str:
        text = first_line(error) if isinstance(error, psycopg.Error) else str(error)
        reason = f"{type(error).__name__}: {text}"[:MAX_REASON].replace("\0", "?").encode(errors="replace").decode()
        log.warning("Parked a fact", reader=self._ledger.reader, id=self._id, problem=reason)
        return reason
