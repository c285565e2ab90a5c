"""The process beside a service's database that sends to Kafka what was appended there (docs/design.md 4b).

It has no state of its own. While Kafka or the database is away it waits, for as long as that takes; what waits with it
stands in the database, and what it holds in memory is bounded by bytes. One of several relays of a database works, the
others wait for its session to end; that two might work at once costs duplicates and nothing else.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from typing import Any

import structlog

from tidemark.common.errors import BadSetting, Refused, Retry
from tidemark.common.lock_waits import with_lockers
from tidemark.common.postgres_session import Connection, PostgresSession
from tidemark.sources.producer import RecordProducer
from tidemark.sources.relay import encode, epochs, queries
from tidemark.sources.relay.decider import Decided, Decider
from tidemark.sources.relay.encode import InFlight, parts
from tidemark.sources.relay.metrics import RelayMetrics
from tidemark.sources.relay.oversized import OversizedFacts
from tidemark.sources.relay.queries import SCHEMA, SILENT_SECONDS, blockers, silence
from tidemark.sources.relay.waiting import KafkaWait, OtherRelayWait
from tidemark.sources.transactions import Reports, history
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Join, is_writer, why_no_name

log = structlog.get_logger(__name__)

MOST_BYTES = 16 * 1024 * 1024
"""Bytes of records that wait for Kafka's acknowledgement; the rest waits in the database."""
SHORTEST, LONGEST = 0.005, 0.05
"""Seconds between two looks at the database: the first while something happens, the second after a while without."""
_SETTLED_EVERY = 1.0
_SETTLED_AT_ONCE = 500
"""Streams whose floors are raised between two rounds, a transaction each."""
_BEAT_EVERY = 1.0
_LINES_A_SECOND = 200
"""Writers that beats tell of, at the most: where there are more, there are fewer beats."""
_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_TURN = 1.0
"""Seconds between two attempts of a relay that waits for another."""
_SETTINGS = "tcp_keepalives_idle, tcp_keepalives_interval, tcp_keepalives_count or idle_in_transaction_session_timeout"
OUTBOX = "tidemark.append_outbox"
REGRESSED = "The database or its sequence went back, or a row came below the floor: a new timeline begins"
LOCK_TIMEOUT = "10s"
"""How long it waits in silence for whoever has locked its tables or sequences."""
_PATIENCE = 30.0
"""Seconds that Kafka has to acknowledge a JOIN, before everything is begun anew."""
_JOINED_AT_ONCE = 500
"""Streams whose JOINs are acknowledged together: a relay that is killed then leaves the next one fewer to send."""
_STEADY = 60.0
"""Seconds of work after which the next failure is the first one again."""


class AppendRelay:
    """Runs in the thread that calls `run`, until `halt` is set.

    `writer` is what Tidemark calls the database, None for its own name. A record has `most_facts` of a backlog.
    """

    def __init__(
        self,
        session: PostgresSession,
        producer: Callable[[], RecordProducer],
        writer: str | None,
        metrics: RelayMetrics,
        halt: threading.Event,
        most_facts: int = 1,
    ) -> None:
        self._session = session
        self._most_facts = most_facts
        self._make_producer = producer
        self._producer: RecordProducer
        self._connected = False
        """Whether there is a producer, and nothing has failed since it was made."""
        self._given = writer
        self._writer = writer or ""
        self._metrics = metrics
        self._halt = halt
        self._strangers: dict[int, dict[str, int]] = {}
        self._held: dict[str, str] = {}
        self._due: deque[Decided] = deque()
        self._flying: list[InFlight] = []
        self._reports = Reports({})
        self._problem = ""
        """What facts wait for; empty while they go out."""
        self._other_relay = OtherRelayWait(queries.LOCK)
        self._kafka_wait = KafkaWait()
        self._oversized = OversizedFacts(metrics.oversized)

    def run(self) -> None:
        """Raises `Stop` where a person must decide, what a server refuses before it ever worked, and what nobody
        expected: the process ends then, and says so, rather than to go on with half of itself."""
        pause, worked = _PAUSE, False
        while not self._halt.is_set():
            began = time.monotonic()
            try:
                with self._session.use() as connection:
                    SCHEMA.check(connection)
                    connection.execute("select set_config('lock_timeout', %s, false)", [LOCK_TIMEOUT])
                    if self._has_its_turn(connection):
                        if not worked and (seconds := silence(connection)) > SILENT_SECONDS:
                            log.warning("A host that dies may hold a stream for long", seconds=seconds, set=_SETTINGS)
                        worked, began = True, time.monotonic()
                        if not self._connected:
                            self._producer = self._make_producer()
                            self._connected, self._kafka_wait = True, KafkaWait()
                        self._relay(connection)
            except (Retry, Refused) as error:
                if isinstance(error, Refused) and not worked:
                    raise
                problem = with_lockers(self._session, error)
                if self._problem != problem:
                    log.warning("Facts wait in the database", problem=problem)
                self._problem = problem
                self._session.close()
                self._connected = False
                if time.monotonic() - began > _STEADY:
                    pause = _PAUSE
                self._halt.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            finally:
                self._metrics.relaying.set(0)
                self._metrics.standby.set(0)
                self._metrics.open.show([])

    def _has_its_turn(self, connection: Connection) -> bool:
        """Wait until no other relay of this database is connected. Not in the server: that would hold a snapshot."""
        while not self._halt.is_set():
            row = connection.execute("select pg_try_advisory_lock(%s, 0)", [queries.LOCK]).fetchone()
            if row is not None and row[0]:
                self._metrics.standby.set(0)
                self._other_relay.over()
                return True
            self._metrics.standby.set(1)
            self._other_relay.waits(connection)
            self._halt.wait(_TURN)
        return False

    def _relay(self, connection: Connection) -> None:
        """Work until the connection breaks, or streams or epochs are others."""
        while not self._halt.is_set():
            streams = self._joined(connection)
            self._metrics.heartbeat.set_to_current_time()
            self._metrics.relaying.set(1)
            decider = Decider(connection, streams)
            self._reports = Reports({it.stream.name: (it.own, it.writers[it.own].epoch) for it in streams})
            self._due.clear()
            self._flying = []
            self._oversized.forget()
            try:
                self._work(connection, decider)
            finally:
                self._strangers = decider.strangers

    def _joined(self, connection: Connection) -> list[epochs.Told]:
        found_history = history(connection, self._session.where, OUTBOX)
        self._writer = self._given or connection.info.dbname
        if not is_writer(self._writer):
            raise BadSetting("writer", why_no_name(self._writer))
        found = epochs.begin(connection, found_history, self._writer, self._strangers)
        for each in found:
            if each.regression:
                log.warning(REGRESSED, stream=each.stream.name, floor=each.floor, why=each.regression)
        acting = [each for each in found if each.acts()]
        for start in range(0, len(acting), _JOINED_AT_ONCE):
            together = acting[start : start + _JOINED_AT_ONCE]
            for record in (record for each in together for record in each.acts()):
                self._producer.send(record.stream, records.encode(record))
                what = "Joining" if isinstance(record, Join) else "Retiring"
                log.info(what, stream=record.stream, writer=record.writer, epoch=record.epoch, id=record.id)
            self._deliver()
            epochs.acknowledged(connection, together)
        return [each for each in found if each.writers]

    def _deliver(self) -> None:
        """Return when Kafka has acknowledged everything; raises `Unavailable` if it does not in time."""
        deadline = time.monotonic() + _PATIENCE
        while (left := self._producer.flush(0.5)) and time.monotonic() < deadline and not self._halt.is_set():
            self._kafka_wait.look(self._producer, left)
        self._producer.deliver(0)

    def _work(self, connection: Connection, decider: Decider) -> None:
        pause, settled, watched, beaten = SHORTEST, time.monotonic(), 0.0, time.monotonic()
        while not (self._halt.is_set() or decider.outrun):
            self._metrics.heartbeat.set_to_current_time()
            if not self._due and (room := self._room()) > 0:
                self._due += (part for decided in _result(decider.round(room)) for part in parts(decided))
                self._metrics.looked.set_to_current_time()
                self._report_held(decider)
            while self._due and self._room() > 0:
                self._send(self._due.popleft())
            self._hear(decider)
            now = time.monotonic()
            if now - settled >= _SETTLED_EVERY:
                _result(decider.settle(_SETTLED_AT_ONCE))
                settled = time.monotonic()
            if now - beaten >= max(_BEAT_EVERY, decider.lines / _LINES_A_SECOND):
                _result(decider.beat())
                beaten = now
            if (producer := self._oversized.larger(self._make_producer, now)) is not None:
                self._deliver()
                self._producer, self._kafka_wait = producer, KafkaWait()
                log.info("The Kafka topic takes larger records now", limit=producer.max_bytes)
                break
            if now - watched >= _SETTLED_EVERY:
                self._watch(connection, decider)
                watched = now
            if self._flying:
                pause = SHORTEST
            if not decider.hurries or self._room() <= 0:
                self._halt.wait(pause)
                pause = min(pause * 1.2, LONGEST)
        _result(decider.settle())

    def _report_held(self, decider: Decider) -> None:
        """Name each stream that is held, once, and that it goes on."""
        held = {stream: str(problem) for stream, problem in decider.held.items()}
        if held == self._held:
            return
        for stream in {*held, *self._held}:
            if held.get(stream) != self._held.get(stream):
                if stream in held:
                    log.warning("A stream is held", stream=stream, problem=held[stream])
                else:
                    log.info("A stream goes on", stream=stream)
            self._metrics.held.labels(stream).set(stream in held)
        self._held = held

    def _room(self) -> int:
        return MOST_BYTES - sum(each.size for each in self._flying)

    def _send(self, decided: Decided) -> None:
        fitting = self._oversized.without(decided, self._producer, time.monotonic())
        self._flying.append(encode.send(self._producer, fitting, self._most_facts))

    def _hear(self, decider: Decider) -> None:
        """Learn what Kafka has acknowledged."""
        self._kafka_wait.look(self._producer, self._producer.backlog())
        for each in [each for each in self._flying if not each.left]:
            decider.acknowledged(each.decided)
            name = each.decided.told.stream.name
            self._metrics.facts.labels(name).inc(sum(1 for fact in each.decided.facts if not fact.void))
            self._metrics.voids.labels(name).inc(
                each.decided.voids.width() + sum(1 for fact in each.decided.facts if fact.void)
            )
        before, self._flying = len(self._flying), [each for each in self._flying if each.left]
        if self._problem and (len(self._flying) < before or not (self._flying or self._due)):
            log.info("Facts go out again")
            self._problem = ""

    def _watch(self, connection: Connection, decider: Decider) -> None:
        for name, count in decider.undecided.items():
            self._metrics.undecided.labels(name).set(count)
        for name, count in decider.kept.items():
            self._metrics.kept.labels(name).set(count)
        found = blockers(connection) if decider.open else []
        now = datetime.now(UTC)
        self._metrics.open.show(((each.stream, each.writer), each.age(now)) for each in found)
        for report in self._reports.due(found, now):
            self._producer.send(report.stream, records.encode(report))


def _result(steps: Generator[str, None, Any]) -> Any:
    """What a generator of steps returns, all of them taken."""
    while True:
        try:
            next(steps)
        except StopIteration as over:
            return over.value
