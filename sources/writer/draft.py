"""What one transaction of the caller has reserved and given, while it runs. Pure; one thread or task.

It decides nothing: rows of a savepoint that was rolled back are noted here and are not in the outbox, and it is the
outbox that counts. It only knows what to ask the database, and when a transaction must not be committed.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg

from sources.writer.chain import Chain
from streaming import wire
from streaming.errors import FactWithoutRow, RowTooLarge, SequenceSetBack, WriterFenced

MAX_ROW = 900_000
"""Bytes of one row: what Kafka takes by default (1 MB) less room for the rest of the record."""
MAX_IDS = 10_000
"""IDs that one call may reserve: they hold back their stream until the transaction ends."""

RESERVE = "select ids, xid::text from tidemark.reserve(%s, %s, %s, %s, %s, %s, %s, %s)"
ADD = "select tidemark.add_rows(%s, %s, %s, %s, %s, %s, %s)"
AWAIT_FENCE = "select pg_advisory_xact_lock_shared(tidemark.writer_lock(%s))"
_FENCED, _SET_BACK = "TM001", "TM002"


@dataclass(frozen=True, slots=True)
class Outlet:
    """A stream as a running writer has it; `oid` is its sequence."""

    name: str
    oid: int
    sign: int
    chain: Chain


@dataclass(slots=True)
class Reservation:
    """One call of `tidemark.reserve`; `answer` is its row. `ids` are signed, and empty while a fence is under way."""

    params: Sequence[Any]
    answer: Sequence[Any] | None = None
    ids: list[int] = field(default_factory=list)


class Draft:
    """`xid` is the transaction's number, once something was reserved."""

    def __init__(self, instance: str, epoch: int, outlets: Mapping[str, Outlet]) -> None:
        self.xid: str | None = None
        self.instance = instance
        self._epoch = epoch
        self._outlets = outlets
        self._rows: dict[str, dict[int, int]] = {}
        self._voids: set[tuple[str, int]] = set()
        self._broken: BaseException | None = None
        self._whole = False

    def outlet(self, stream: str) -> Outlet:
        """Raises KeyError, with the names there are, for a stream that the writer was not made with."""
        try:
            return self._outlets[stream]
        except KeyError:
            raise KeyError(f"this writer has no stream {stream!r}, but {', '.join(sorted(self._outlets))}") from None

    @contextmanager
    def reserving(self, outlet: Outlet, count: int, body: str | None = None) -> Iterator[Reservation]:
        """Between the two halves the caller runs `RESERVE` and sets `answer`; it must be the only one on this stream.

        `body` is the row of a fact that is complete with it (`encoded`); then `count` is 1.
        """
        if not 0 < count <= MAX_IDS:
            raise ValueError(f"{count} IDs at once: 1 to {MAX_IDS} are possible")
        prev = outlet.sign * outlet.chain.begin()
        params = (self.instance, self._epoch, outlet.name, outlet.oid, outlet.sign, prev, count, body)
        reservation = Reservation(params)
        try:
            with self._asking(outlet.name):
                yield reservation
                if reservation.answer is not None and reservation.answer[0] is not None:
                    reservation.ids, self.xid = reservation.answer
        except BaseException:
            outlet.chain.missed()
            raise
        if reservation.ids:
            outlet.chain.took([abs(id) for id in reservation.ids], time.monotonic())
            rows = 0 if body is None else 1
            self._rows.setdefault(outlet.name, {}).update(dict.fromkeys(reservation.ids, rows))
        else:
            outlet.chain.missed()

    @contextmanager
    def adding(self, stream: str, id: int, rows: Sequence[object]) -> Iterator[Sequence[Any]]:
        """Gives the parameters of `ADD`, which the caller runs inside."""
        given = self._given(stream, id)
        outlet = self._outlets[stream]
        bodies = [encoded(stream, row) for row in rows]
        prev = outlet.sign * outlet.chain.prev(abs(id))
        with self._asking(stream):
            yield (self.instance, self._epoch, stream, id, prev, given[id], bodies)
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
            self._outlets[stream].chain.end(map(abs, ids), rowless, now)
        self._rows = {}

    def __len__(self) -> int:
        """How many IDs it has reserved."""
        return sum(map(len, self._rows.values()))

    def _given(self, stream: str, id: int) -> dict[int, int]:
        given = self._rows.get(stream, {})
        if id not in given:
            raise ValueError(f"{stream} {id} was not reserved in this transaction")
        return given

    @contextmanager
    def _asking(self, stream: str) -> Iterator[None]:
        """Where the server says no, it has undone all of the call. Where its answer is lost (a cancelled task, Ctrl-C,
        a broken connection), a row may stand there with an ID that nobody knows: then there must be no commit.
        """
        try:
            yield
        except psycopg.Error as error:
            if error.sqlstate == _FENCED:
                raise WriterFenced(self.instance, self._epoch) from error
            if error.sqlstate == _SET_BACK:
                raise SequenceSetBack(stream, error.diag.message_primary or "") from error
            if error.sqlstate is None:
                self._broken = error
            raise
        except BaseException as error:
            self._broken = error
            raise


def encoded(stream: str, row: object) -> str:
    """A row as JSON. Raises `RowTooLarge`, and TypeError for what JSON cannot hold."""
    body = bytes(wire.row(row))
    if len(body) > MAX_ROW:
        raise RowTooLarge(stream, len(body), MAX_ROW)
    return body.decode()
