"""Services that append, relays that decide, and the truth, on one Postgres, one step at a time.

What the services commit stands in a table of their own, written in the same transactions. What relays decide counts as
sent at once, which is the worst case: whatever happens afterwards, it cannot be taken back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

import psutil
import psycopg

from tests.sources.writer.judge import judged
from tests.waiting import eventually
from tidemark.sources.relay import join
from tidemark.sources.relay.database import SCHEMA, session_of
from tidemark.sources.relay.decider import Decided, Decider
from tidemark.sources.relay.evidence import ids_of
from tidemark.sources.relay.join import Told
from tidemark.sources.relay.told import told
from tidemark.streaming import records
from tidemark.streaming.postgres_session import Connection, PostgresSession

WRITER = "shop"
MakeDecider = Callable[[Connection, list[Told]], Decider]
_names = count(1)


class Service:
    """A connection of a service, which runs one transaction at a time; `reserved` are IDs that it has not completed."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.savepoints = 0
        self.reserved: list[int] = []
        self.open = False
        self._connection: psycopg.Connection | None = None

    @property
    def pid(self) -> int | None:
        return None if self._connection is None else self._connection.info.backend_pid

    def run(self, statement: str, *arguments: object) -> int | None:
        """The number that it gives. Whatever fails ends the transaction."""
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(self._dsn, autocommit=True)
        try:
            found = self._connection.execute(statement.encode(), arguments)
            row = found.fetchone() if found.description else None
        except psycopg.Error:
            self.end()
            with suppress(psycopg.Error):
                self._connection.execute("rollback")
            return None
        return None if row is None else row[0]

    def begin(self, isolation: str, durable: str) -> None:
        self.run("select 1")  # a session that was ended is noticed, and replaced
        self.run(f"begin isolation level {isolation}")
        self.open = True
        self.run(f"set local synchronous_commit = {durable}")

    def end(self) -> None:
        self.open, self.savepoints, self.reserved = False, 0, []

    def append(self, stream: str, rows: int) -> int | None:
        return self.run(
            "with made as (select tidemark.append(%s, variadic %s::jsonb[]) as id)"
            " insert into truth select %s, id, %s from made returning id",
            stream,
            ["{}"] * rows,
            stream,
            rows,
        )

    def append_many(self, stream: str, rows: int) -> None:
        self.run(
            "with made as (select unnest(tidemark.append_many(%s, %s::jsonb[])) as id)"
            " insert into truth select %s, id, 1 from made",
            stream,
            ["{}"] * rows,
            stream,
        )

    def reserve(self, stream: str) -> None:
        if (id := self.run("select tidemark.reserve(%s)", stream)) is not None:
            self.reserved.append(id)

    def complete(self, stream: str, rows: int) -> None:
        """The oldest ID that was reserved. Where that went with a savepoint, the transaction goes too."""
        id = self.reserved.pop(0)
        self.run("select tidemark.complete(%s, %s, variadic %s::jsonb[])::text", stream, id, ["{}"] * rows)
        if self.open:
            self.run("insert into truth values (%s, %s, %s)", stream, id, rows)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class SteppedRelay:
    """A relay that takes a step at a time; after an error of its connection it begins anew, as a process would."""

    def __init__(self, dsn: str, make: MakeDecider, sent: Callable[[Decided], None]) -> None:
        self._dsn = dsn
        self._make = make
        self._sent = sent
        self._session: PostgresSession | None = None
        self._decider: Decider | None = None
        self._steps: Iterator[object] | None = None
        self.unacknowledged: list[Decided] = []

    def die(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = self._decider = self._steps = None
        self.unacknowledged = []

    def look(self) -> bool:
        """One step of a round; whether the round has ended."""
        try:
            decider = self._begun()
            if self._steps is None:
                self._steps = decider.round(10_000)
            try:
                next(self._steps)
            except StopIteration as over:
                self._steps = None
                for decided in over.value:
                    self._sent(decided)
                    self.unacknowledged.append(decided)
                return True
        except psycopg.Error:
            self.die()
        return False

    def round(self) -> None:
        """All steps up to the end of a round."""
        while not self.look():
            pass

    def acknowledge(self) -> None:
        if self.unacknowledged and self._decider is not None:
            self._decider.acknowledged(self.unacknowledged.pop())

    def settle(self) -> None:
        try:
            if self._decider is not None:
                for _ in self._decider.settle():
                    pass
        except psycopg.Error:
            self.die()

    def finish(self) -> None:
        """Everything that is open is decided, in Kafka, and deleted."""
        for _ in range(1000):
            self.round()
            while self.unacknowledged:
                self.acknowledge()
            self.settle()
            if self._decider is not None and not self._decider.open:
                return
        raise AssertionError("an ID stays undecided for ever")

    def _begun(self) -> Decider:
        if self._decider is None:
            self._session = session_of(self._dsn, "relay")
            with self._session.use() as connection:
                found = join.begin(connection, "here", WRITER)
                join.joined(connection, found)
                self._decider = self._make(connection, found)
        return self._decider


class World:
    """One stream, made anew; `close` leaves nothing open."""

    def __init__(self, dsn: str, make: MakeDecider = Decider, *, direction: str = "forward") -> None:
        self.stream = f"orders-{next(_names)}"
        self.dsn = dsn
        self._admin = psycopg.connect(dsn, autocommit=True)
        self._admin.execute("delete from tidemark.append_outbox")
        self._admin.execute("delete from tidemark.append_streams")
        self._admin.execute("delete from truth")
        self._admin.execute("select tidemark.create_stream(%s, %s)", [self.stream, direction])
        self.services = [Service(dsn) for _ in range(3)]
        self.bystander = Service(dsn)
        self.relays = [SteppedRelay(dsn, make, self._send) for _ in range(2)]
        self.prepared: list[str] = []
        self.facts: dict[int, int] = {}
        self.voids: set[int] = set()
        self._values: list[bytes] = []

    def prepare(self, service: Service) -> None:
        gid = f"{self.stream}-{next(_names)}"
        service.run(f"prepare transaction '{gid}'")
        if service.open:
            self.prepared.append(gid)
        service.end()

    def resolve(self, gid: str, how: str) -> None:
        self._admin.execute(f"{how} prepared '{gid}'".encode())
        self.prepared.remove(gid)

    def terminate(self, service: Service) -> None:
        self._admin.execute("select pg_terminate_backend(%s, 5000)", [service.pid])
        service.end()

    def crash(self) -> None:
        """The server dies and begins again: all that was not on its way to the disk is gone."""
        with psycopg.connect(self.dsn, autocommit=True) as victim:
            psutil.Process(victim.info.backend_pid).kill()
            with suppress(psycopg.Error):
                victim.execute("select 1")
            victim.close()
        eventually(self._answers)
        for service in [*self.services, self.bystander]:
            service.close()
            service.end()

    def _answers(self) -> bool:
        try:
            self._admin.close()
            self._admin = psycopg.connect(self.dsn, autocommit=True)
        except psycopg.OperationalError:
            return False
        return True

    def check(self) -> None:
        """No void is committed, and every fact that was sent is."""
        truth = self._truth()
        wrong = {id for id in self.voids if truth.get(id)}
        assert not wrong, f"committed, and told as void: {wrong}"
        lost = {id for id, rows in self.facts.items() if truth.get(id) != rows}
        assert not lost, f"told, and not committed so: {lost}"

    def finish(self) -> None:
        """All transactions end, a relay that knows nothing goes over everything; then all is told, once and right."""
        for service in self.services:
            service.run("commit")
            service.end()
        self.bystander.run("rollback")
        for gid in [*self.prepared]:
            self.resolve(gid, "commit")
        for relay in self.relays:
            relay.die()
        self.relays[0].finish()
        self.check()
        truth = self._truth()
        assert {id for id, rows in truth.items() if rows} == self.facts.keys()
        [(head, floor)] = self._admin.execute(
            "select abs(coalesce(pg_sequence_last_value(ids), 0)), abs(floor)"
            " from tidemark.append_streams join tidemark.append_progress using (number)"
        ).fetchall()
        assert {abs(id) for id in self.facts} | {abs(id) for id in self.voids} == {*range(1, head + 1)}
        assert floor == head
        assert self._admin.execute("select count(*) from tidemark.append_outbox").fetchone() == (0,)
        self._core_agrees(head)

    def _core_agrees(self, head: int) -> None:
        """What Tidemark makes of the records: its position has passed every ID, and nothing was refused."""
        [epoch] = {records.decode(value).epoch for value in self._values} or {1}
        first = records.encode(records.Join(stream=self.stream, writer=WRITER, epoch=epoch, id=0))
        key = self.stream.encode()
        verdict = judged([(key, value) for value in [first, *self._values]])
        assert abs(verdict.position(self.stream, WRITER)) == head
        assert verdict.rejected == {}
        assert verdict.announced.get(self.stream, set()) == self.facts.keys()

    def close(self) -> None:
        for relay in self.relays:
            relay.die()
        for service in [*self.services, self.bystander]:
            service.close()
        for gid in [*self.prepared]:
            self.resolve(gid, "rollback")
        self._admin.close()

    def _send(self, decided: Decided) -> None:
        signed = decided.told.stream.towards.signed
        self._values += told(decided, WRITER)
        self.voids |= {signed(id) for id in ids_of(decided.voids)}
        self.voids |= {signed(fact.id) for fact in decided.facts if not fact.rows}
        self.facts |= {signed(fact.id): len(fact.rows) for fact in decided.facts if fact.rows}
        self.check()

    def _truth(self) -> dict[int, int]:
        return dict(self._admin.execute("select id, rows from truth where stream = %s", [self.stream]).fetchall())


@contextmanager
def prepared_schema(dsn: str) -> Iterator[None]:
    with session_of(dsn, "test") as session:
        SCHEMA.migrate(session)
        with session.use() as connection:
            connection.execute("create table if not exists truth (stream text, id bigint, rows integer)")
    yield
