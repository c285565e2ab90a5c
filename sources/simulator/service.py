"""A service that writes facts with `sources.writer`, as a service would: the life of one process, until it is stopped.

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
from prometheus_client import CollectorRegistry
from psycopg import sql

from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.simulator.script import Fault
from tidemark.sources.writer import Facts, Stream, Writer
from tidemark.streaming.errors import Retry

log = structlog.get_logger(__name__)

CONNECTIONS = 3
TRANSACTION_SECONDS = 0.03  # mean, between the reservation and the end
HANG_SECONDS = (1.5, 6.0)
RECONNECT_SECONDS = 0.2
ROLLBACKS = 0.1
HANGS = 0.01


@dataclass(frozen=True, slots=True)
class WriterRole:
    """The part of one writer's process. `rate` is its transactions per second; `seed` makes its transactions."""

    instance: str
    streams: Sequence[Stream]
    faults: Set[Fault]
    rate: float
    seed: str


class Ending:
    """The order to a process to end; for signal handlers, too."""

    def __init__(self) -> None:
        self.told = threading.Event()
        self.retiring = False

    def stop(self) -> None:
        self.told.set()

    def retire(self) -> None:
        self.retiring = True
        self.told.set()


def serve(role: WriterRole, dsn: str, kafka: KafkaConnection, topic: str, ending: Ending) -> None:
    """Write until the end. Raises `WriterFenced` where a successor has taken over, and what any writer raises."""
    registry = CollectorRegistry()  # nobody scrapes a process that lives for seconds
    with Writer(dsn, kafka, instance=role.instance, streams=role.streams, topic=topic, registry=registry) as writer:
        hands = [_Hand(role, number, writer, dsn, ending.told) for number in range(CONNECTIONS)]
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            work = [pool.submit(hand.work) for hand in hands]
            wait(work, return_when=FIRST_EXCEPTION)
            ending.told.set()
        for each in work:
            each.result()
        if ending.retiring:
            writer.retire()


class _Hand:
    """One connection at work, on a thread of its own."""

    def __init__(self, role: WriterRole, number: int, writer: Writer, dsn: str, told: threading.Event) -> None:
        self._role = role
        self._random = Random(f"{role.seed} {number}")
        self._writer = writer
        self._dsn = dsn
        self._told = told

    def work(self) -> None:
        """A service outlives its database: what was open is lost, and the next transaction has another connection."""
        while not self._told.is_set():
            try:
                self._work_connected()
            except (psycopg.OperationalError, psycopg.InterfaceError, psycopg.Rollback, Retry) as problem:
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
            with self._writer.transaction(connection) as facts:
                self._write(connection, facts)
                self._dwell()
                if undone:
                    raise psycopg.Rollback
            if savepoints:
                with self._writer.transaction(connection) as facts:
                    self._write(connection, facts)

    def _write(self, connection: psycopg.Connection[Any], facts: Facts) -> None:
        """Usually one fact of one row; some of several rows, some facts of several streams."""
        several = min(2, len(self._role.streams))
        for stream in self._random.sample(self._role.streams, self._random.choice((1, 1, 1, several))):
            insert = sql.SQL("insert into {} (stream_id, part, writer, written_at) values (%s, %s, %s, now())").format(
                sql.Identifier("demo", stream.name)
            )
            for id in facts.reserve_many(stream.name, self._random.choice((1, 1, 1, 3))):
                parts = range(1, self._random.choice((1, 1, 1, 3)) + 1)
                for part in parts:
                    connection.execute(insert, [id, part, self._role.instance])
                facts.add(stream.name, id, *({"part": part} for part in parts))

    def _dwell(self) -> None:
        """The transaction takes its time; a hanging one is cut short when the process is to end."""
        if Fault.HANG in self._role.faults and self._random.random() < HANGS:
            self._told.wait(self._random.uniform(*HANG_SECONDS))
        else:
            time.sleep(self._random.expovariate(1 / TRANSACTION_SECONDS))
