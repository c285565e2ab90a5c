"""The reservations and rows of one transaction of the caller, while it runs. Pure; one thread or task.

Decides nothing: rows of a savepoint that was rolled back are noted here and are not in the outbox, and the outbox is
what counts. Only says what to ask the database, and when a transaction must not be committed.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import psycopg
from prometheus_client import Histogram
from psycopg import sql

from tidemark.sources.writer import history
from tidemark.sources.writer.chain import ReservationChain
from tidemark.streaming import records
from tidemark.streaming.direction import Direction
from tidemark.streaming.errors import FactWithoutRow, RowTooLarge

MAX_ROW = 900_000
"""Bytes of one row: what Kafka takes by default (1 MB) less room for the rest of the record."""
MAX_IDS = 10_000
"""IDs that one call may reserve: they hold back their stream until the transaction ends."""

ADD = "select tidemark.add_rows(%s, %s, %s, %s, %s, %s)"


@dataclass(frozen=True, slots=True)
class StreamHandle:
    """A stream as a running writer has it; `oid` is its sequence.

    `call` takes IDs from it, in SQL, and `reserve` does nothing else. What never changes is part of their text, and not
    among the parameters, each of which costs a microsecond or two for every ID.
    """

    name: str
    oid: int
    towards: Direction
    chain: ReservationChain
    call: str
    reserve: bytes
    latency: Histogram


def reserve_call(instance: str, epoch: int, stream: str, oid: int, towards: Direction) -> str:
    """A call of `tidemark.reserve` with named parameters: those of `Reservation.params`."""
    call = sql.SQL("tidemark.reserve({}, {}, {}, {}, {}, ")
    text = call.format(*map(sql.Literal, (instance, epoch, stream, oid, towards.value))).as_string()
    return text.replace("%", "%%") + "%(tidemark_floor)s, %(tidemark_count)s, %(tidemark_row)s)"


def reserve_statement(call: str) -> bytes:
    return f"select {call}, pg_current_xact_id()::text".encode()


@lru_cache(maxsize=1000)
def write_statement(call: str, statement: str) -> bytes:
    """The reservation and a statement of the caller's, which has `%(id)s` for the new ID, in one.

    A statement in a WITH clause is run to its end whether or not it is asked for its rows.
    """
    own = statement.replace("%(id)s", "(select ids[1] from tidemark_fact)")
    return (
        f"with tidemark_fact as materialized (select {call} as ids), tidemark_own as ({own})"
        " select ids, pg_current_xact_id()::text from tidemark_fact"
    ).encode()


class Reservation:
    """One call of `tidemark.reserve`; whoever runs it sets `answer` to its row. `ids` are signed."""

    __slots__ = ("answer", "ids", "params")

    def __init__(self, floor: int, count: int, body: str | None) -> None:
        self.params = {"tidemark_floor": floor, "tidemark_count": count, "tidemark_row": body}
        self.answer: Sequence[Any] | None = None
        self.ids: list[int] = []


class PendingTransaction:
    """`xid` is the transaction's number, once something was reserved."""

    def __init__(self, instance: str, epoch: int, handles: Mapping[str, StreamHandle]) -> None:
        self.xid: str | None = None
        self.epoch = epoch
        self._instance = instance
        self._handles = handles
        self._rows: dict[str, dict[int, int]] = {}
        self._voids: set[tuple[str, int]] = set()
        self._broken: BaseException | None = None
        self._whole = False

    def handle(self, stream: str) -> StreamHandle:
        """Raises KeyError, with the names there are, for a stream that the writer was not made with."""
        try:
            return self._handles[stream]
        except KeyError:
            raise KeyError(f"this writer has no stream {stream!r}, but {', '.join(sorted(self._handles))}") from None

    @contextmanager
    def reserving(self, handle: StreamHandle, count: int, body: str | None = None) -> Iterator[Reservation]:
        """Between the two halves the caller runs `handle.reserve`, or what contains it, and sets `answer`.

        `body` is the row of a fact that is complete with it (`encoded`); then `count` is 1.
        """
        if not 0 < count <= MAX_IDS:
            raise ValueError(f"{count} IDs at once: 1 to {MAX_IDS} are possible")
        began = time.monotonic()
        call = handle.chain.begin()
        reservation = Reservation(handle.towards.signed(call.floor), count, body)
        try:
            yield reservation
            assert reservation.answer is not None
            ids, self.xid = reservation.answer
        except BaseException as error:
            handle.chain.missed(call)
            raise self._explained(error) from error
        now = time.monotonic()
        handle.chain.took(call, [*map(abs, ids)], now)
        self._rows.setdefault(handle.name, {}).update(dict.fromkeys(ids, 0 if body is None else 1))
        reservation.ids = ids
        handle.latency.observe(now - began)

    @contextmanager
    def adding(self, stream: str, id: int, rows: Sequence[object]) -> Iterator[Sequence[Any]]:
        """Gives the parameters of `ADD`, which the caller runs inside."""
        given = self._given(stream, id)
        bodies = [encoded(stream, row) for row in rows]
        try:
            yield (self._instance, self.epoch, stream, id, given[id], bodies)
        except BaseException as error:
            raise self._explained(error) from error
        given[id] += len(bodies)
        self._voids.discard((stream, id))

    def void(self, stream: str, id: int) -> None:
        if self._given(stream, id)[id]:
            raise ValueError(f"{stream} {id} has rows")
        self._voids.add((stream, id))

    def require_whole(self) -> None:
        """Before the commit. Raises what broke the transaction, and `FactWithoutRow` for an ID without row or void."""
        if self._broken is not None:
            raise self._broken
        for stream, ids in self._rows.items():
            bare = [id for id, rows in ids.items() if not rows and (stream, id) not in self._voids]
            if bare:
                raise FactWithoutRow(stream, bare)
        self._whole = True

    def end(self) -> None:
        """The transaction has ended. The outbox knows which IDs are facts; here is only known which never were."""
        now = time.monotonic()
        for stream, ids in self._rows.items():
            rowless = [abs(id) for id, rows in ids.items() if not (rows and self._whole)]
            self._handles[stream].chain.end(map(abs, ids), rowless, now)
        self._rows = {}

    def __len__(self) -> int:
        """The number of its reserved IDs."""
        return sum(map(len, self._rows.values()))

    def _given(self, stream: str, id: int) -> dict[int, int]:
        given = self._rows.get(stream, {})
        if id not in given:
            raise ValueError(f"{stream} {id} was not reserved in this transaction")
        return given

    def _explained(self, error: BaseException) -> BaseException:
        """The error to raise for `error`.

        Where the server says no, it has undone all of the call. Where its answer is lost (a cancelled task, Ctrl-C, a
        broken connection), a row may stand there with an ID that nobody knows: then there must be no commit.
        """
        if not isinstance(error, psycopg.Error) or error.sqlstate is None:
            self._broken = error
        return history.over(error, self._instance, self.epoch) or error


def encoded(stream: str, row: object) -> str:
    """A row as JSON. Raises `RowTooLarge`, and TypeError for what JSON cannot hold."""
    body = bytes(records.row(row))
    if len(body) > MAX_ROW:
        raise RowTooLarge(stream, len(body), MAX_ROW)
    return body.decode()
