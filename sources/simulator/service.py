"""A service that writes facts with `tidemark.Writer`: the life of one process, until it is stopped.

What it writes is in its tables and in Tidemark's streams, row for row. Its transactions complete out of order, because
several connections are at work; some roll back and some hang, where the play has these faults.
"""

import threading
import time
from collections.abc import Sequence, Set
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

import psycopg
import structlog
from psycopg import sql

from tidemark.sources.client import Writer
from tidemark.sources.simulator.script import Fault, PlayedStream

log = structlog.get_logger(__name__)

CONNECTIONS = 3
TRANSACTION_SECONDS = 0.03  # mean, between the reservation and the end
HANG_SECONDS = (1.5, 6.0)
RECONNECT_SECONDS = 0.2
ROLLBACKS = 0.1
HANGS = 0.01


@dataclass(frozen=True, slots=True)
class ServiceRole:
    """The part of one process, which writes as `writer`. `rate`: transactions per second; `seed` makes them."""

    writer: str
    streams: Sequence[PlayedStream]
    faults: Set[Fault]
    rate: float
    seed: str


def serve(role: ServiceRole, dsn: str, told: threading.Event) -> None:
    """Write until `told` is set. Raises what the database refuses."""
    hands = [_Hand(role, number, dsn, told) for number in range(CONNECTIONS)]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        work = [pool.submit(hand.work) for hand in hands]
        wait(work, return_when=FIRST_EXCEPTION)
        told.set()
    for each in work:
        each.result()


class _Hand:
    """One connection at work, on a thread of its own."""

    def __init__(self, role: ServiceRole, number: int, dsn: str, told: threading.Event) -> None:
        self._role = role
        self._random = Random(f"{role.seed} {number}")
        self._writer = Writer(role.writer)
        self._dsn = dsn
        self._told = told

    def work(self) -> None:
        """A service outlives its database: what was open is lost, and the next transaction has another connection."""
        while not self._told.is_set():
            try:
                self._work_connected()
            except (psycopg.OperationalError, psycopg.InterfaceError, psycopg.Rollback) as problem:
                # psycopg lets its Rollback out where the connection is gone that was to be rolled back.
                log.warning("A transaction broke off", problem=str(problem))
                self._told.wait(RECONNECT_SECONDS)

    def _work_connected(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self._told.wait(self._random.expovariate(self._role.rate / CONNECTIONS)):
                self._transact(connection)

    def _transact(self, connection: psycopg.Connection[Any]) -> None:
        """One transaction; or two savepoints in one, of which the first is undone."""
        chance = self._random.random()
        undone = Fault.ROLLBACK in self._role.faults and chance < ROLLBACKS
        savepoints = undone and chance < ROLLBACKS / 4
        with connection.transaction() if savepoints else nullcontext():
            with connection.transaction():
                self._write(connection)
                self._dwell()
                if undone:
                    raise psycopg.Rollback
            if savepoints:
                with connection.transaction():
                    self._write(connection)

    def _write(self, connection: psycopg.Connection[Any]) -> None:
        """Usually one fact of one row; some of several rows, some facts of several streams."""
        several = min(2, len(self._role.streams))
        for stream in self._random.sample(self._role.streams, self._random.choice((1, 1, 1, several))):
            count, parts = self._random.choice((1, 1, 1, 3)), [{"part": 1}]
            if count > 1:
                for id in self._writer.append_many(connection, stream.name, parts * count):
                    self._insert(connection, stream.name, id, parts)
            elif self._random.random() < 0.5:
                self._insert(connection, stream.name, self._writer.append(connection, stream.name, *parts), parts)
            else:
                id = self._writer.reserve(connection, stream.name)
                parts = [{"part": part} for part in range(1, self._random.choice((1, 3)) + 1)]
                self._insert(connection, stream.name, id, parts)
                self._writer.complete(connection, stream.name, id, *parts)

    def _insert(
        self, connection: psycopg.Connection[Any], stream: str, id: int, parts: Sequence[dict[str, int]]
    ) -> None:
        insert = sql.SQL("insert into {} (stream_id, part, writer, written_at) values (%s, %s, %s, now())")
        for row in parts:
            into = insert.format(sql.Identifier("demo", stream))
            connection.execute(into, [id, row["part"], self._role.writer])

    def _dwell(self) -> None:
        """The transaction takes its time; a hanging one is cut short when the process is to end."""
        if Fault.HANG in self._role.faults and self._random.random() < HANGS:
            self._told.wait(self._random.uniform(*HANG_SECONDS))
        else:
            time.sleep(self._random.expovariate(1 / TRANSACTION_SECONDS))
