"""Copies of a reader in any language that are killed at random moments, and their effects compared with the table.

The tables, the role and the grants are those of docs/how-to/read-in-any-language.md.
"""

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import psycopg
from psycopg.conninfo import conninfo_to_dict

from tests.services.shop import Shop, table
from tests.sinks.take.given import Positioned
from tests.waiting import eventually
from tidemark.app.stack.processes import free_port, listens
from tidemark.sinks.reader import ReaderPlaces
from tidemark.sinks.reader_database import install, reader_session

PAGE = (Path(__file__).parents[2] / "docs/how-to/read-in-any-language.md").read_text()
KILLS = int(os.environ.get("LANGUAGES_KILLS", "4"))
COPIES = 3 if KILLS > 10 else 2
WRITERS = 4
MOST_UNREAD = 500
WAKING_SECONDS = 10.0
"""How long a program waits for a notification."""
PASSWORD = "secret"
Command = Sequence[str | Path]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program did. `inside`: kills of a copy whose transaction was open and had the reader's place."""

    facts: int
    kills: int
    inside: int
    missed: int
    doubled: int
    unordered: int
    wrong: int

    def __str__(self) -> str:
        return (
            f"{self.facts} facts, {self.kills} kills ({self.inside} inside a transaction), "
            f"missed {self.missed}, doubled {self.doubled}, out of order {self.unordered}, wrong {self.wrong}"
        )


@contextmanager
def billing_department(dsn: str) -> Iterator[dict[str, str]]:
    """The table of invoices and the role of the page, and no orders; gives what the programs connect by."""
    (script,) = re.findall(r"^```sql\n(CREATE TABLE invoices.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(b"truncate orders;" + str(script).encode())
        # Makes transactions long, so that kills hit them.
        connection.execute(
            "create function linger() returns trigger language plpgsql as"
            " $$ begin perform pg_sleep(0.002); return new; end $$;"
            "create trigger linger after insert on invoices for each row execute function linger()"
        )
        try:
            yield {"PGUSER": "billing", "PGPASSWORD": PASSWORD}
        finally:
            connection.execute("drop owned by billing; drop role billing; drop table invoices; drop function linger")


@dataclass
class Copies:
    """Copies of one program. Each that is killed is replaced."""

    command: Command
    environment: Mapping[str, str]
    log: Path
    running: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.filled()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for copy in self.running:
            copy.kill()
            copy.wait()

    def filled(self) -> bool:
        """Start copies that lack. A copy that has ended by itself is a failure."""
        for copy in self.running:
            assert copy.poll() in (None, -signal.SIGKILL), self.log.read_text()
        self.running = [copy for copy in self.running if copy.poll() is None]
        while len(self.running) < COPIES:
            with self.log.open("ab") as log:
                self.running.append(subprocess.Popen(self.command, env=self.environment, stdout=log, stderr=log))
        return True

    def kill(self, chance: random.Random, connection: psycopg.Connection) -> bool | None:
        """Kill a copy that is connected. Returns whether it had the reader's place; None if no copy is connected."""
        by_port = dict(self._connected())
        if not by_port:
            return None
        query = """
            select client_port from pg_stat_activity
            where client_port = any (%s) and xact_start is not null and wait_event_type is distinct from 'Lock'
        """
        ports = sorted(by_port)
        if chance.random() < 0.7:
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                if inside := connection.execute(query, [ports]).fetchall():
                    ports = [port for (port,) in inside]
                    break
        port = chance.choice(ports)
        victim = by_port[port]
        os.kill(victim.pid, signal.SIGSTOP)  # so that what is seen is how it dies
        had_place = (port,) in connection.execute(query, [[port]]).fetchall()
        victim.kill()
        victim.wait()
        return had_place

    def _connected(self) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
        for copy in self.running:
            with suppress(psutil.NoSuchProcess):
                for at in psutil.Process(copy.pid).net_connections("tcp"):
                    if at.raddr and str(at.raddr.port) == self.environment["PGPORT"]:
                        yield at.laddr.port, copy


class Orders:
    """Threads that place orders, of which some are rolled back, and which are committed in another order than begun."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._halt = threading.Event()
        self._paused = False
        self._threads = [threading.Thread(target=self._place, args=(number,)) for number in range(WRITERS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._halt.set()
        for thread in self._threads:
            thread.join()

    def pause(self, paused: bool) -> None:
        self._paused = paused

    def _place(self, seed: int) -> None:
        chance = random.Random(seed)
        with psycopg.connect(self._dsn) as connection:
            while not self._halt.is_set():
                if self._paused:
                    time.sleep(0.05)
                    continue
                place(connection, chance.randrange(1000))
                time.sleep(chance.expovariate(1 / 0.04))
                if chance.random() < 0.2:
                    connection.rollback()
                connection.commit()


def place(connection: psycopg.Connection, total: int) -> None:
    connection.execute("insert into orders (stream_id, total) select tidemark.append('orders', '{}'), %s", [total])


def read_up_to(connection: psycopg.Connection) -> int:
    """The place of the reader; 0 before it has one."""
    query = "select linear from tidemark_reader.places where stream = 'orders' and reader = 'billing'"
    row = connection.execute(query).fetchone()
    return int(row[0]) if row else 0


def killed(shop: Shop, command: Command, log: Path) -> Outcome:
    """Run copies of the program beside writers, kill some of them, and compare invoices with orders."""
    chance = random.Random(len(str(command)))
    with billing_department(shop.dsn) as role, shop.sql() as connection:
        done = inside = 0
        with Copies(command, {**shop.environment, **role}, log) as copies:
            with Orders(shop.dsn) as placing:
                deadline = time.monotonic() + 120 + 20 * KILLS
                while done < KILLS:
                    assert time.monotonic() < deadline, f"{done} kills: {log.read_text()}"
                    time.sleep(chance.random() * 0.3)
                    placing.pause(shop.head() - read_up_to(connection) > MOST_UNREAD)
                    copies.filled()
                    had_place = copies.kill(chance, connection)
                    if had_place is not None:
                        done += 1
                        inside += had_place

            def is_read() -> bool:
                return copies.filled() and read_up_to(connection) >= shop.head()

            eventually(is_read, 240.0, log.read_text)
            if KILLS > 10:
                time.sleep(WAKING_SECONDS + 1)
                place(connection, 1)
                eventually(is_read, 60.0, log.read_text)
        orders = dict(connection.execute("select stream_id, total from orders").fetchall())
        invoices = connection.execute("select stream_id, total from invoices order by number").fetchall()
    ids = [id for id, _ in invoices]
    return Outcome(
        facts=len(orders),
        kills=done,
        inside=inside,
        missed=len(orders.keys() - set(ids)),
        doubled=len(ids) - len(set(ids)),
        unordered=sum(later < earlier for earlier, later in pairwise(ids)),
        wrong=sum(orders.get(id) != total for id, total in invoices),
    )


def late_facts(dsn: str, shop: Shop, command: Command, log: Path) -> None:
    """In an empty database: a fact that comes after the reader passed its ID is billed once, after the others."""
    with reader_session(dsn, "test") as session, psycopg.connect(dsn, autocommit=True) as connection:
        install(session)
        connection.execute(table().encode())
        readers = Positioned(dsn, session, connection)

        def billed() -> list[int]:
            return [id for (id,) in connection.execute("select stream_id from invoices order by number").fetchall()]

        with billing_department(dsn) as role:
            connection.execute("insert into orders values (1, 40), (2, 41), (4, 42)")
            readers.publish(4)
            name = str(conninfo_to_dict(dsn)["dbname"])
            with Copies(command, {**shop.environment, **role, "PGDATABASE": name}, log) as copies:
                eventually(lambda: copies.filled() and billed() == [1, 2, 4], 60.0, log.read_text)
                connection.execute("insert into orders values (3, 43)")
                readers.late(1, 2, 3)
                readers.publish(5)
                eventually(lambda: copies.filled() and billed() == [1, 2, 4, 3], 60.0, log.read_text)


def parked_facts(shop: Shop, command: Command, log: Path) -> tuple[int, int]:
    """Run copies of a program that parks the facts whose invoice violates a constraint, and kill some copies. Then drop
    the constraint and retry. Returns the number of orders and of parked facts.
    """
    chance = random.Random(1)
    with billing_department(shop.dsn) as role, shop.sql() as connection:
        connection.execute("alter table invoices add constraint payable check (total % 7 <> 0)")
        connection.execute("delete from tidemark_reader.parked")

        def stored(query: str) -> list[int]:
            return [id for (id,) in connection.execute(query.encode()).fetchall()]

        with Copies(command, {**shop.environment, **role}, log) as copies:
            with Orders(shop.dsn):
                for _ in range(KILLS):
                    eventually(lambda: copies.filled() and copies.kill(chance, connection) is not None)
                    time.sleep(chance.random() * 0.5)
                eventually(lambda: copies.filled() and bool(stored("select id from tidemark_reader.parked")))
            eventually(lambda: copies.filled() and read_up_to(connection) >= shop.head(), 240.0, log.read_text)
            parked = stored("select id from tidemark_reader.parked order by id")
            assert parked == stored("select stream_id from orders where total % 7 = 0 order by stream_id")
            payable = stored("select stream_id from orders where total % 7 <> 0 order by stream_id")
            assert stored("select stream_id from invoices order by number") == payable

            connection.execute("alter table invoices drop constraint payable")
            with ReaderPlaces(shop.dsn) as places:
                assert places.retry(places.parked_with_ids("billing", "orders", parked)) == len(parked)
            eventually(lambda: not stored("select id from tidemark_reader.parked"), 60.0, log.read_text)
            assert stored("select stream_id from invoices order by number") == payable + parked
    return len(payable + parked), len(parked)


def read_your_writes(shop: Shop, service: Command, reader: Command, log: Path, count: int) -> Sequence[float]:
    """Place orders over HTTP and ask for the invoices with the token of each answer, while copies of the reader are
    killed. Returns how long each answer took, in seconds. In the end nobody reads, and the service says so.
    """
    chance = random.Random(1)
    seconds = []
    environment = {**shop.environment, "PORT": str(free_port())}
    with (
        billing_department(shop.dsn) as role,
        shop.sql() as connection,
        log.open("ab") as output,
        subprocess.Popen(service, env=environment, stdout=output, stderr=output) as process,
    ):
        try:
            eventually(lambda: listens(int(environment["PORT"])), 60.0, log.read_text)
            with (
                closing(HTTPConnection("127.0.0.1", int(environment["PORT"]), timeout=30)) as browser,
                Copies(reader, {**shop.environment, **role}, log) as copies,
            ):
                eventually(lambda: copies.kill(chance, connection) is not None)
                for number in range(count):
                    if number % 10 == 0:
                        copies.kill(chance, connection)
                    copies.filled()
                    _, placed = _asked(browser, "POST", "/orders")
                    began = time.monotonic()
                    id = int(placed["token"].removeprefix("m"))
                    eventually(lambda placed=placed, id=id: _is_billed(browser, placed["token"], id))  # type: ignore[misc]
                    seconds.append(time.monotonic() - began)
            with closing(HTTPConnection("127.0.0.1", int(environment["PORT"]), timeout=30)) as browser:
                _, placed = _asked(browser, "POST", "/orders")
                status, answer = _asked(browser, "GET", f"/invoices?token={placed['token']}")
                assert (status, answer) == (503, {"error": f"invoices are not yet at {placed['token']}"})
                assert _asked(browser, "GET", "/invoices")[0] == 200
        finally:
            process.kill()
    return seconds


def _is_billed(browser: HTTPConnection, token: str, id: int) -> bool:
    """Whether the service answers in time; then the answer has the invoice."""
    status, invoices = _asked(browser, "GET", f"/invoices?token={token}")
    assert status in (200, 503)
    assert status == 503 or [id, 40] in invoices
    return status == 200


def _asked(browser: HTTPConnection, method: str, path: str) -> tuple[int, Any]:
    browser.request(method, path)
    with browser.getresponse() as response:
        return response.status, json.load(response)
