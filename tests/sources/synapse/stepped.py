"""The bridge itself on real databases, one round at a time, with workers that write and announce as those of Synapse.

A record that the bridge sends counts as acknowledged at once, which is the worst case: nothing takes the record back.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from prometheus_client import CollectorRegistry

from tests.sources.relay.world import Core
from tidemark.sources.kafka import MAX_MESSAGE_BYTES
from tidemark.sources.kafka_lookup import split_run
from tidemark.sources.producer import RecordProducer
from tidemark.sources.synapse import state, tables
from tidemark.sources.synapse.bridge import BridgeMetrics, SynapseBridge
from tidemark.sources.synapse.channel import ChannelEvent, ChannelMessage, SynapseChannel
from tidemark.sources.synapse.streams import BridgedStream
from tidemark.sources.synapse.tables import STREAMS
from tidemark.streaming.core.effects import StreamEffects
from tidemark.streaming.wire import records
from tidemark.streaming.wire.line_protocol import PositionCommand, RdataCommand
from tidemark.streaming.wire.records import Rdata

SERVER_NAME = "one.test"
WRITERS = ("misc1", "misc2")
TABLES = """
    create table users (name text);
    create table events (stream_ordering bigint);
    create sequence push_rules_stream_sequence;
    create table push_rules_stream (stream_id bigint, instance_name text, user_id text);
    create sequence cache_invalidation_stream_seq;
    create table cache_invalidation_stream_by_instance (
        stream_id bigint, instance_name text, cache_func text, keys text[], invalidation_ts bigint
    );
"""
_TOKENS = {"push_rules": "user_id", "caches": "cache_func"}
"""By stream, the column that holds a fact's token, which is the first value of the fact's row."""


class RowCore(Core):
    """Takes each record alone, so that it is known what became of each fact: `published` in time, or `named` as late.

    Facts are known by tokens, because an ID may be given out twice.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.published: set[str] = set()
        self.named: set[str] = set()
        self._tokens: list[str] = []

    def take(self, values: list[bytes]) -> list[StreamEffects]:
        done = list[StreamEffects]()
        for record in (one for value in values for one in split_run(records.decode(value))):
            effects = super().take([records.encode(record)])
            done += effects
            if isinstance(record, Rdata):
                self._tokens.append(json.loads(bytes(record.row))[0])
                if isinstance(record.id, int):
                    self._note(record.id, effects)
        return done

    def _note(self, id: int, effects: Iterable[StreamEffects]) -> None:
        for effect in effects:
            if any(late.prev < id <= late.id and late.facts for late in effect.late):
                self.named.update(self._tokens)
            elif effect.counts.get("applied"):
                self.published.update(self._tokens)
        self._tokens = []


class MemoryProducer(RecordProducer):
    """Appends each record to `values`, and acknowledges the record at once."""

    def __init__(self, values: list[bytes]) -> None:
        self.max_bytes = MAX_MESSAGE_BYTES
        self.where = "here"
        self.delivered_count = 0
        self._values = values

    def send(self, stream: str, value: bytes) -> None:
        self.send_all(stream, [value], lambda: None)

    def send_all(self, stream: str, values: Iterable[bytes], on_acknowledged: Callable[[], None]) -> None:
        for value in values:
            self._values.append(value)
            self.delivered_count += 1
            on_acknowledged()

    def poll_backlog(self) -> int:
        return 0

    def flush(self, seconds: float) -> int:
        return 0


class SteppedChannel(SynapseChannel):
    """Gives the bridge the `messages` of workers. Each round of the bridge waits in `take` until the test goes on."""

    def __init__(self, answers: Callable[[], list[PositionCommand]], halt: threading.Event) -> None:
        super().__init__(dict, SERVER_NAME, halt)
        self.is_connected = True
        self.waiting = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.messages: list[ChannelMessage] = []
        self._answers = answers
        self._is_requested = False

    def take(self) -> list[ChannelMessage]:
        self.waiting.release()
        self.go_on.acquire()
        if self._is_requested:
            self.messages += [ChannelEvent.REQUESTED, *self._answers()]
        messages, self.messages, self._is_requested = self.messages, [], False
        return messages

    def request_positions(self) -> None:
        self._is_requested = True


class Worker:
    """A process of Synapse that writes one stream. `position` is the one that it announces, and never goes back.

    `reserved` are its IDs that no transaction uses yet.
    """

    def __init__(self, name: str, position: int) -> None:
        self.name = name
        self.position = position
        self.reserved: list[int] = []


@dataclass
class OpenWrite:
    """A transaction that has written a fact and has not ended. `worker` is None if its process has ended."""

    id: int
    worker: Worker | None
    connection: psycopg.Connection


class SteppedBridge:
    """One stream of Synapse, its workers, and one bridge after the other; `core` is what Tidemark makes of it.

    `sql` is a session of Synapse's database, `synapse_dsn` its address, `dsn` that of the bridge's own database.
    """

    def __init__(self, sql: psycopg.Connection, synapse_dsn: str, dsn: str, name: str) -> None:
        self.sql = sql
        self._synapse_dsn = synapse_dsn
        self._dsn = dsn
        self._stream = STREAMS[name]
        self._table = self._stream.queries[0].name
        self._values: list[bytes] = []
        self._facts = 0
        self.core = RowCore(name)
        self.workers = [Worker(writer, self.head()) for writer in WRITERS]
        self.open: list[OpenWrite] = []
        self._failure: BaseException | None = None
        self._begin()

    def _begin(self) -> None:
        self._halt = threading.Event()
        self._channel = SteppedChannel(self._answers, self._halt)
        self._thread = threading.Thread(target=self._run, name="bridge of the test", daemon=True)
        self._thread.start()
        self._wait()

    def _run(self) -> None:
        bridged = BridgedStream(self._stream, self._stream.name, WRITERS)
        try:
            with tables.synapse_session(self._synapse_dsn) as synapse, state.state_session(self._dsn) as own:
                SynapseBridge(
                    synapse,
                    own,
                    self._channel,
                    lambda: MemoryProducer(self._values),
                    [bridged],
                    BridgeMetrics(CollectorRegistry()),
                    self._halt,
                ).run()
        except BaseException as error:  # noqa: BLE001 - raised in the other thread
            self._failure = error
        finally:
            self._channel.waiting.release()

    def _wait(self) -> None:
        assert self._channel.waiting.acquire(timeout=60), "the bridge does not begin a round"
        if self._failure is not None:
            raise self._failure
        self.core.take(self._values)
        self._values.clear()

    def stop(self) -> None:
        """End the process of the bridge."""
        self._halt.set()
        self._channel.go_on.release()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def restart(self) -> None:
        """A new process of the bridge takes the place of the old one."""
        self.stop()
        self._wait()
        self._begin()

    def disconnect(self) -> bool:
        """End the bridge's session in Synapse's database. Returns whether there was one."""
        ended = self.sql.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
            " where datname = current_database() and application_name = 'tidemark synapse'"
        ).fetchall()
        return ended == [(True,)]

    def round(self) -> None:
        """Let the bridge work for one round, or connect again."""
        self._channel.go_on.release()
        self._wait()

    def rounds(self, count: int = 8) -> None:
        """Let the bridge work for `count` rounds, and check what it has published."""
        for _ in range(count):
            self.round()
        self.check()

    def head(self) -> int:
        """The highest ID that the sequence has given out."""
        return tables.read_head(self.sql, self._stream)

    def set_sequence(self, at: int) -> None:
        self.sql.execute("select setval(%s, %s)", [self._stream.sequence, at])

    def delete_rows(self, above: int) -> None:
        """As by a restore of the rows up to that ID."""
        self.sql.execute(f"delete from {self._table} where stream_id > %s".encode(), [above])

    def waste(self) -> None:
        """An ID that gets no row."""
        self.sql.execute("select nextval(%s)", [self._stream.sequence])

    def write(self, count: int = 1) -> list[int]:
        """The workers write `count` facts in turns, each in its own transaction. Returns the IDs."""
        ids = list[int]()
        for number in range(count):
            worker = self.workers[number % len(self.workers)]
            ids.append(self.reserve(worker))
            self._insert(self.sql, worker, worker.reserved.pop())
        return ids

    def reserve(self, worker: Worker) -> int:
        """The worker takes an ID, as Synapse does before it opens a transaction."""
        row = self.sql.execute("select nextval(%s)", [self._stream.sequence]).fetchone()
        assert row is not None
        worker.reserved.append(row[0])
        return int(row[0])

    def begin_write(self, worker: Worker) -> None:
        """The worker opens a transaction for its oldest reserved ID, if there is one."""
        if worker.reserved:
            connection, id = psycopg.connect(self._synapse_dsn), worker.reserved.pop(0)
            self._insert(connection, worker, id)
            self.open.append(OpenWrite(id, worker, connection))

    def end_write(self, number: int, *, commits: bool) -> None:
        """An open transaction ends, if there is one."""
        if self.open:
            write = self.open.pop(number % len(self.open))
            if commits:
                write.connection.commit()
            write.connection.close()

    def _insert(self, connection: psycopg.Connection, worker: Worker, id: int) -> None:
        self._facts += 1
        more = "" if self._stream.name == "push_rules" else ", null, (extract(epoch from now()) * 1000)::bigint"
        statement = f"insert into {self._table} values (%s, %s, %s{more})"
        connection.execute(statement.encode(), [id, worker.name, str(self._facts)])

    def announce(self) -> None:
        """Each worker announces what lies between its position and its lowest ID in use, its facts as rows."""
        head, name = self.head(), self._stream.name
        for worker in self.workers:
            in_use = [*worker.reserved, *(write.id for write in self.open if write.worker is worker)]
            top = min([head + 1, *in_use]) - 1
            for fact in tables.read_facts(self.sql, self._stream, worker.position, top, worker.name)[1]:
                *first, last = fact.rows
                self._channel.messages += [RdataCommand(name, worker.name, None, row) for row in first]
                self._channel.messages.append(RdataCommand(name, worker.name, fact.id, last))
                worker.position = fact.id
            if worker.position < top:
                self._channel.messages.append(PositionCommand(name, worker.name, worker.position, top))
                worker.position = top

    def restart_workers(self) -> None:
        """All processes end. Then each new one finds the highest ID in the sequence, asks for all positions, and
        announces its own."""
        self.workers = [Worker(worker.name, self.head()) for worker in self.workers]
        for write in self.open:
            write.worker = None
        for _ in self.workers:
            self._channel.messages += [ChannelEvent.LOSS, *self._answers()]

    def _answers(self) -> list[PositionCommand]:
        return [
            PositionCommand(self._stream.name, worker.name, worker.position, worker.position) for worker in self.workers
        ]

    @property
    def rows(self) -> dict[str, tuple[int, str]]:
        """By the token of each fact in the table, its ID and its writer."""
        found = self.sql.execute(
            f"select {_TOKENS[self._stream.name]}, stream_id, instance_name from {self._table}".encode()
        )
        return {token: (id, writer) for token, id, writer in found.fetchall()}

    @property
    def unpublished(self) -> dict[str, tuple[int, str]]:
        """The facts that are neither published nor late."""
        known = self.core.published | self.core.named
        return {token: fact for token, fact in self.rows.items() if token not in known}

    def finish(self) -> None:
        """Every transaction commits, the sequence is repaired, and new workers begin. Then everything is published."""
        while self.open:
            self.end_write(0, commits=True)
        self.set_sequence(max([self.head(), *(id for id, _ in self.rows.values())]))
        self.waste()
        self.restart_workers()
        self.rounds()
        assert self.unpublished == {}
        assert self.sent_upto == dict.fromkeys(WRITERS, self.head())

    def check(self) -> None:
        """No position has passed a fact that is in the table and was not published, and no record was refused."""
        passed = {
            token: (id, writer)
            for token, (id, writer) in self.unpublished.items()
            if id <= self.sent_upto.get(writer, 0)
        }
        assert not passed, f"passed: {passed}, positions {self.sent_upto}"
        assert self.core.rejected == {}

    @property
    def sent_upto(self) -> dict[str, int]:
        """By writer, the position that the bridge has stored."""
        with psycopg.connect(self._dsn) as own:
            return dict(own.execute("select writer, sent_upto from tidemark.synapse_writers").fetchall())


@contextmanager
def stepped(synapse_dsn: str, dsn: str, name: str, prepare: str = "") -> Iterator[SteppedBridge]:
    """A bridge that runs. `prepare`: SQL for Synapse's database before the bridge begins."""
    with state.state_session(dsn) as session:
        state.SCHEMA.migrate(session)
    with psycopg.connect(synapse_dsn, autocommit=True) as sql:
        sql.execute((TABLES + prepare).encode())
        bridge = SteppedBridge(sql, synapse_dsn, dsn, name)
        try:
            yield bridge
        finally:
            for write in bridge.open:
                write.connection.close()
            bridge.stop()
