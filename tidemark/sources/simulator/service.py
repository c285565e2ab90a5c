"""A service that writes facts in its transactions: the life of one process, until it is stopped.

What it writes is in its tables and in Tidemark's streams, row for row. Its transactions complete out of order, because
several connections are at work; some roll back and some hang, where the play has these faults.
"""

import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from random import Random

from tidemark.common.log import get_logger
from tidemark.sources.simulator.drivers import BrokenOff, Driver, ServiceConnection, Undone, installed
from tidemark.sources.simulator.script import Fault, PlayedStream

log = get_logger(__name__)

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
    drivers = installed()
    hands = [_Hand(role, number, dsn, told, drivers[number % len(drivers)]) for number in range(CONNECTIONS)]
    together([hand.work for hand in hands], told)


def together(hands: Sequence[Callable[[], None]], told: threading.Event) -> None:
    """Each on a thread of its own until `told` is set, which it is when one of them ends. Raises what they raise.

    A hand outlives its database: it raises `BrokenOff` when what was open is lost, and begins again with another
    connection.
    """

    def outliving(hand: Callable[[], None]) -> None:
        while not told.is_set():
            try:
                hand()
            except BrokenOff as problem:
                log.warning("A transaction broke off", problem=str(problem))
                told.wait(RECONNECT_SECONDS)

    with ThreadPoolExecutor(len(hands)) as pool:
        work = [pool.submit(outliving, hand) for hand in hands]
        wait(work, return_when=FIRST_EXCEPTION)
        told.set()
    for each in work:
        each.result()


def dwell(faults: Set[Fault], random: Random, told: threading.Event) -> None:
    """A transaction takes its time; a hanging one is cut short when the process is to end."""
    if Fault.HANG in faults and random.random() < HANGS:
        told.wait(random.uniform(*HANG_SECONDS))
    else:
        time.sleep(random.expovariate(1 / TRANSACTION_SECONDS))


class _Hand:
    """One connection at work, on a thread of its own."""

    def __init__(self, role: ServiceRole, number: int, dsn: str, told: threading.Event, driver: Driver) -> None:
        self._role = role
        self._random = Random(f"{role.seed} {number}")
        self._dsn = dsn
        self._told = told
        self._driver = driver

    def work(self) -> None:
        with self._driver(self._dsn, self._role.writer) as connection:
            while not self._told.wait(self._random.expovariate(self._role.rate / CONNECTIONS)):
                self._transact(connection)

    def _transact(self, connection: ServiceConnection) -> None:
        """One transaction; or two savepoints in one, of which the first is undone."""
        chance = self._random.random()
        undone = Fault.ROLLBACK in self._role.faults and chance < ROLLBACKS
        savepoints = undone and chance < ROLLBACKS / 4
        with connection.transaction() if savepoints else nullcontext():
            with suppress(Undone), connection.transaction():
                self._write(connection)
                dwell(self._role.faults, self._random, self._told)
                if undone:
                    raise Undone
            if savepoints:
                with connection.transaction():
                    self._write(connection)

    def _write(self, connection: ServiceConnection) -> None:
        """Usually one fact of one row; some of several rows, some facts of several streams."""
        several = min(2, len(self._role.streams))
        for stream in self._random.sample(self._role.streams, self._random.choice((1, 1, 1, several))):
            count, parts = self._random.choice((1, 1, 1, 3)), [{"part": 1}]
            if count > 1:
                for id in connection.append_many(stream.name, parts * count):
                    connection.insert(stream.name, id, 1)
            elif self._random.random() < 0.5:
                connection.insert(stream.name, connection.append(stream.name, *parts), 1)
            else:
                id = connection.reserve(stream.name)
                parts = [{"part": part} for part in range(1, self._random.choice((1, 3)) + 1)]
                for row in parts:
                    connection.insert(stream.name, id, row["part"])
                connection.complete(stream.name, id, *parts)
