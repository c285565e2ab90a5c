"""Services that append, relays that decide, and the truth, on one Postgres, one step at a time.

What the services commit stands in a table of their own, written in the same transactions. What relays decide counts as
sent at once, which is the worst case: whatever happens afterwards, it cannot be taken back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count

import psutil
import psycopg

from tests.streaming.builders import IN_FACTS, packed
from tests.waiting import eventually
from tidemark.common.errors import Refused, Unavailable
from tidemark.common.postgres_session import Connection, PostgresSession
from tidemark.sinks.reader_database import install
from tidemark.sources.kafka_lookup import split_run
from tidemark.sources.relay import epochs
from tidemark.sources.relay.decider import Decider, Decision
from tidemark.sources.relay.epochs import StreamEpoch
from tidemark.sources.relay.queries import SCHEMA, session_of
from tidemark.sources.relay.relay import OUTBOX, encode_decision
from tidemark.sources.transactions import read_server_history
from tidemark.streaming.core.batch import apply_batch
from tidemark.streaming.core.codec import decode
from tidemark.streaming.core.effects import StreamEffects
from tidemark.streaming.core.store import States
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Join, Rdata, Void

WRITER = "shop"
MakeDecider = Callable[[Connection, list[StreamEpoch]], Decider]
_names = count(1)
_tokens = count(1)
"""Of each fact, which is what its rows hold: an ID may be given out twice."""


class Service:
    """A connection of a service, which runs one transaction at a time; `reserved` are IDs that it has not completed."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.savepoints = 0
        self.reserved: list[tuple[int, str]] = []
        self.open = False
        self._connection: psycopg.Connection | None = None

    @property
    def pid(self) -> int | None:
        return None if self._connection is None else self._connection.info.backend_pid

    def run(self, statement: str, *arguments: object) -> int | None:
        """The number that it gives. Whatever fails ends the transaction."""
        if self._connection is None or self._connection.closed:
            # One thread plays all: who waits behind a writer that retires in an open transaction would wait for ever.
            self._connection = psycopg.connect(self._dsn, autocommit=True, options="-c lock_timeout=50")
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

    def append(self, stream: str, rows: int, writer: str = "") -> int | None:
        token = next(_tokens)
        return self.run(
            "with made as (select tidemark.append_as(%s, %s, variadic %s::jsonb[]) as id)"
            " insert into truth select %s, id, %s, %s, %s from made returning id",
            writer,
            stream,
            [str(token)] * rows,
            stream,
            rows,
            writer,
            token,
        )

    def append_many(self, stream: str, rows: int, writer: str = "") -> None:
        tokens = [next(_tokens) for _ in range(rows)]
        self.run(
            "with made as ("
            " select * from unnest(tidemark.append_many(%s, %s::jsonb[], %s), %s::integer[]) as it (id, token))"
            " insert into truth select %s, id, 1, %s, token from made",
            stream,
            [*map(str, tokens)],
            writer,
            tokens,
            stream,
            writer,
        )

    def reserve(self, stream: str, writer: str = "") -> None:
        if (id := self.run("select tidemark.reserve(%s, %s)", stream, writer)) is not None:
            self.reserved.append((id, writer))

    def complete(self, stream: str, rows: int) -> None:
        """The oldest ID that was reserved. Where that went with a savepoint, the transaction goes too."""
        (id, writer), token = self.reserved.pop(0), next(_tokens)
        self.run("select tidemark.complete(%s, %s, variadic %s::jsonb[])::text", stream, id, [str(token)] * rows)
        if self.open:
            self.run("insert into truth values (%s, %s, %s, %s, %s)", stream, id, rows, writer, token)

    @staticmethod
    def token() -> int:
        """Of a fact that no function appends."""
        return next(_tokens)

    def retire(self, stream: str, writer: str) -> None:
        self.run("select tidemark.retire_writer(%s, %s)", writer, stream)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


_DIED = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.ProgrammingError, Unavailable, Refused)


class SteppedRelay:
    """A relay that takes a step at a time; after an error of its connection it begins anew, as a process would."""

    def __init__(self, dsn: str, make: MakeDecider, sent: Callable[[list[bytes]], object], most_facts: int) -> None:
        self._dsn = dsn
        self._make = make
        self._sent = sent
        self._most_facts = most_facts
        self._unknown_writers: dict[int, dict[str, int]] = {}
        self._session: PostgresSession | None = None
        self._decider: Decider | None = None
        self._steps: Iterator[object] | None = None
        self.unacknowledged: list[Decision] = []
        self.refused = False
        """Whether a person has to mend something first."""
        self.promotions = 0
        """How often a standby took the place of the server."""

    def die(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = self._decider = self._steps = None
        self.unacknowledged = []

    def look(self) -> bool:
        """One step of a round; whether the round has ended, or is refused."""
        try:
            decider = self.begin()
            if self._steps is None:
                self._steps = decider.run_round(10_000)
            try:
                next(self._steps)
            except StopIteration as over:
                self._steps = None
                for decided in over.value:
                    self._sent([*encode_decision(decided, self._most_facts)])
                    self.unacknowledged.append(decided)
                self._give_way()
                return True
        except _DIED as error:
            self.die()
            self.refused = isinstance(error, Refused)
            return self.refused
        self.refused = False
        return False

    def round(self) -> None:
        """All steps up to the end of a round."""
        while not self.look():
            pass

    def acknowledge(self, *, first: bool = False) -> None:
        if self.unacknowledged and self._decider is not None:
            self._decider.note_acknowledged(self.unacknowledged.pop(0 if first else -1))

    def lose_ranges(self) -> None:
        """A round of which only facts and voids reach Kafka, before the relay raises the floor and dies."""
        sent, self._sent = self._sent, lambda _: None
        self.round()
        for decided in self.unacknowledged:
            if not decided.announced_ranges:
                sent([*encode_decision(decided, self._most_facts)])
                self.begin().note_acknowledged(decided)
        self.settle()
        self.die()
        self._sent = sent

    def settle(self) -> None:
        try:
            if self._decider is not None:
                for _ in self._decider.raise_floors():
                    pass
                self._give_way()
        except _DIED:
            self.die()

    def cut_chains(self) -> None:
        try:
            if self._decider is not None:
                for _ in self._decider.write_common_cuts():
                    pass
        except _DIED:
            self.die()

    def finish(self) -> None:
        """Everything that is open is decided, in Kafka, and deleted."""
        for _ in range(1000):
            self.round()
            while self.unacknowledged:
                self.acknowledge()
            self.settle()
            if self._decider is not None and not self._decider.undecided_streams:
                if not self._needs_common_cut():
                    return
                self.cut_chains()
        raise AssertionError("an ID stays undecided for ever")

    def begin(self) -> Decider:
        """Begun, with writers that were found before; no step of a round is taken."""
        if self._decider is None:
            self._session = self._session or session_of(self._dsn, "relay")
            with self._session.use() as connection:
                found = self._acted(connection)
                epochs.store_acknowledged(connection, found)
                self._decider = self._make(connection, [each for each in found if each.writers])
        return self._decider

    @property
    def begun(self) -> bool:
        """Whether nobody and nothing new was found since it began."""
        return self._decider is not None

    @property
    def rests(self) -> bool:
        """Whether nothing is open that it may decide."""
        return self._decider is not None and not self._decider.undecided_streams

    def break_off(self) -> None:
        """It dies before the database knows that writers have joined or are retired."""
        if self._decider is None:
            with suppress(*_DIED), session_of(self._dsn, "relay") as session, session.use() as connection:
                self._acted(connection)
        self.die()

    def _acted(self, connection: Connection) -> list[StreamEpoch]:
        history = read_server_history(connection, "here", OUTBOX)
        history = replace(history, database=f"{history.database}/{self.promotions}")
        found = epochs.begin(connection, history, WRITER, self._unknown_writers)
        self._unknown_writers = {}
        self._sent([records.encode(record) for each in found for record in each.join_and_retire_records()])
        return found

    def _needs_common_cut(self) -> bool:
        assert self._decider is not None
        return any(
            each.chains and each.chains.needs_common_cut(each.evidence.head) for each in self._decider._streams.values()
        )

    def _give_way(self) -> None:
        """Others were here, or somebody new: begin anew."""
        if self._decider is not None and self._decider.is_outdated:
            self._unknown_writers = self._decider.unknown_writers
            self._decider, self.unacknowledged = None, []


class World:
    """One stream, made anew; `close` leaves nothing open."""

    def __init__(self, dsn: str, make: MakeDecider = Decider, *, direction: str = "forward") -> None:
        self.stream = f"orders-{next(_names)}"
        self._direction = direction
        self.dsn = dsn
        self._admin = psycopg.connect(dsn, autocommit=True)
        self._admin.execute("delete from tidemark.append_outbox")
        self._admin.execute("delete from tidemark.append_streams")
        self._admin.execute("delete from truth")
        self._admin.execute("select tidemark.create_stream(%s, %s)", [self.stream, direction])
        self.services = [Service(dsn) for _ in range(3)]
        self.bystander = Service(dsn)
        self.operator = Service(dsn)
        self.relays = [SteppedRelay(dsn, make, self._send, most_facts) for most_facts in (1, 3)]
        self.prepared: list[str] = []
        self.core = Core(self.stream)

    def drop(self) -> bool:
        """Whether it was possible."""
        return self.operator.run("select tidemark.drop_stream(%s)", self.stream) is not None

    def make_again(self) -> None:
        """Made again, if it was dropped."""
        self.operator.run("select tidemark.create_stream(%s, %s)", self.stream, self._direction)

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
        eventually(self._has_ended)  # a connection that is made before the server has noticed goes with the others
        eventually(self._answers)
        for service in [*self.services, self.bystander, self.operator]:
            service.close()
            service.end()

    def _has_ended(self) -> bool:
        try:
            self._admin.execute("select 1")
        except psycopg.Error:
            return True
        return False

    def _answers(self) -> bool:
        try:
            self._admin.close()
            self._admin = psycopg.connect(self.dsn, autocommit=True)
        except psycopg.OperationalError:
            return False
        return True

    def check(self) -> None:
        """No void is committed, every fact that was sent is, and no position has passed one that was not."""
        truth, core = self._truth(), self.core
        wrong = {id for id in core.voids if truth.get(id, (0, ""))[0]}
        assert not wrong, f"committed, and told as void: {wrong}"
        lost = {id for id, rows in core.facts.items() if truth.get(id, (0, ""))[0] != rows}
        assert not lost, f"told, and not committed so: {lost}"
        for id, (rows, writer) in truth.items():
            if rows and id not in core.facts:
                name = writer or WRITER
                assert abs(id) > core.line, f"{id} of {name} is not told, and the line is at {core.line}"
                position = core.positions.get(name, 0)
                assert abs(id) > position, f"{id} is not told, and {name} is at {position}"
        assert core.rejected.keys() <= {"zombie"}, core.rejected
        assert core.late == 0

    def finish(self) -> None:
        """All transactions end, a relay that knows nothing goes over everything; then all is told, once and right."""
        self.make_again()
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
        facts = {id: writer or WRITER for id, (rows, writer) in self._truth().items() if rows}
        assert facts == self.core.writers
        [(head, floor)] = self._admin.execute(
            "select abs(coalesce(pg_sequence_last_value(ids), s.after)), abs(floor)"
            " from tidemark.append_streams s join tidemark.append_progress using (number)"
        ).fetchall()
        assert {abs(id) for id in facts} | {abs(id) for id in self.core.voids} == {*range(1, head + 1)}
        assert floor == head
        assert self._admin.execute("select count(*) from tidemark.append_outbox").fetchone() == (0,)
        assert self.core.line == head
        assert {position for name, position in self.core.positions.items() if name not in self.core.retired} == {head}
        assert {*self.core.positions} >= {*facts.values()}
        ended = "select writer from tidemark.append_writers where state <> 'joined'"
        assert {name for (name,) in self._admin.execute(ended).fetchall()} == self.core.retired

    def close(self) -> None:
        for relay in self.relays:
            relay.die()
        for service in [*self.services, self.bystander, self.operator]:
            service.close()
        for gid in [*self.prepared]:
            self.resolve(gid, "rollback")
        self._admin.close()

    def _send(self, values: list[bytes]) -> None:
        self.core.take(values)
        self.check()

    def _truth(self) -> dict[int, tuple[int, str]]:
        rows = self._admin.execute("select id, rows, writer from truth where stream = %s", [self.stream]).fetchall()
        return {id: (count, writer) for id, count, writer in rows}


class Core:
    """What Tidemark makes of the records as they come, a batch each time; and what they say of each ID."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._states: dict[str, bytes] = {}
        self._next = 0
        self._epochs: dict[str, int] = {}
        self.facts: dict[int, int] = {}
        self.writers: dict[int, str] = {}
        self.joined: dict[str, int] = {}
        """By writer the ID of its first JOIN."""
        self.unseen: dict[str, int] = {}
        """By writer up to where facts may be that were never announced."""
        self.voids: set[int] = set()
        self.rejected: dict[str, int] = {}
        self.late = 0
        self.late_ids: set[int] = set()
        self.timelines: list[tuple[int, str]] = []
        self.told = 0
        self.line = 0
        self.positions: dict[str, int] = {}
        self.retired: set[str] = set()

    def take(self, values: list[bytes]) -> list[StreamEffects]:
        """The next records of the topic; gives what they do."""
        if not values:
            return []
        batch = 0
        for record in (one for value in values for one in split_run(records.decode(value))):
            if isinstance(record, Rdata):
                batch += 1
                if isinstance(record.id, int):
                    if record.epoch >= self._epochs.get(record.writer, 0):
                        self.facts[record.id], self.writers[record.id] = batch, record.writer
                    batch = 0
            elif isinstance(record, Join):
                self.joined.setdefault(record.writer, abs(record.id))
                if record.unseen:
                    self.unseen[record.writer] = abs(record.id)
                self._epochs[record.writer] = max(record.epoch, self._epochs.get(record.writer, 0))
            elif isinstance(record, Void):
                self.voids.add(record.id)
        key = self._stream.encode()
        packets = packed((self._next + at, 0, IN_FACTS, key, value) for at, value in enumerate(values))
        self._next += len(values)
        done = apply_batch(0, States(self._states), packets, 0, Bounds())
        for bad in done.rejected:
            self.rejected[bad.reason] = self.rejected.get(bad.reason, 0) + bad.count
        for stream in done.streams:
            self.late += len(stream.late)
            self.late_ids.update(id for it in stream.late for id in range(it.prev + 1, it.id + 1))
            self.timelines += [(it.id, it.why) for it in stream.timelines]
        self.told = max([self.told, *map(abs, self.facts), *map(abs, self.voids)])
        state = decode(self._states[self._stream])
        self.line = state.linear.position
        self.positions = {name: state.writers[name].position for name in state.writers}
        self.retired = {name for name in state.writers if state.writers[name].retired_at is not None}
        return [*done.streams]


@contextmanager
def prepared_schema(dsn: str) -> Iterator[None]:
    with session_of(dsn, "test") as session:
        SCHEMA.migrate(session)
        install(session)
        with session.use() as connection:
            connection.execute(
                "create table if not exists truth (stream text, id bigint, rows integer, writer text, token integer)"
            )
    yield
