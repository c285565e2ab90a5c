"""The relay: sends to Kafka what services appended in their database (docs/design.md 4b).

It has no state of its own. While Kafka or the database is unavailable, the relay waits without a time limit. The facts
wait in the database, and the memory of the relay is bounded by bytes. One of several relays of a database works; the
others are on standby. Two active relays would only cause duplicates in Kafka.

`docs/reference/metrics.md` is generated from the metrics at the beginning.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from tidemark.common.backoff import Backoff
from tidemark.common.errors import BadSetting
from tidemark.common.log import get_logger
from tidemark.common.postgres_session import Connection, PostgresSession
from tidemark.sources.producer import RecordProducer
from tidemark.sources.relay import encode, epochs, queries
from tidemark.sources.relay.decider import Decider, Decision
from tidemark.sources.relay.encode import MOST_FACTS, InFlight, parts
from tidemark.sources.relay.queries import SCHEMA, SILENT_SECONDS, AppendedFact, silence
from tidemark.sources.run_loop import LoopMetrics, RunLoop, set_lock_timeout
from tidemark.sources.transactions import SourceReports, server_history
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Join, is_writer, why_no_name


class RelayMetrics(LoopMetrics):
    """The metrics of one relay process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "tidemark_relay", "relay", ["stream", "writer"])
        self.last_poll = Gauge(
            "tidemark_relay_last_poll_timestamp_seconds",
            "Time of the last query of the database (s since 1970). Not rising while the relay is active: Kafka does"
            " not accept records, or the database does not answer.",
            registry=registry,
        )
        self.facts = Counter(
            "tidemark_relay_facts", "Facts that Kafka has acknowledged.", ["stream"], registry=registry
        )
        self.voids = Counter(
            "tidemark_relay_voids",
            "IDs without a fact that Kafka has acknowledged: their transactions rolled back.",
            ["stream"],
            registry=registry,
        )
        self.undecided = Gauge(
            "tidemark_relay_undecided_ids",
            "IDs that are given out and not decided. Staying above 0: an open transaction blocks the stream;"
            " `tidemark relay blockers` names it.",
            ["stream"],
            registry=registry,
        )
        self.kept = Gauge(
            "tidemark_relay_outbox_ids",
            "IDs above the floor, whose rows are still in the database. Rising: a transaction blocks the stream, or"
            " Kafka is away or too slow.",
            ["stream"],
            registry=registry,
        )


log = get_logger(__name__)

_NAMES_BYTES = 2 * 4 * 255
"""Bytes of the names of stream and writer, at most."""
MOST_BYTES = 16 * 1024 * 1024
"""The largest number of bytes that wait for Kafka's acknowledgement; further facts wait in the database."""
SHORTEST, LONGEST = 0.005, 0.05
"""Seconds between two queries of the database: the first while there are changes, the second after a while without
changes."""
_SETTLED_EVERY = 1.0
_SETTLED_AT_ONCE = 500
"""Streams whose floors are raised between two rounds, each in its own transaction."""
_BEAT_EVERY = 1.0
_CHAINS_PER_SECOND = 200
"""The largest number of chains that beats cut in a second. With more chains there are fewer beats."""
_SETTINGS = "tcp_keepalives_idle, tcp_keepalives_interval, tcp_keepalives_count or idle_in_transaction_session_timeout"
OUTBOX = "tidemark.append_outbox"
REGRESSED = "The database or its sequence went back, or a row came below the floor: a new timeline begins"
_JOINED_AT_ONCE = 500
"""Streams whose JOINs are acknowledged together, so that a relay that is killed often makes progress."""


class AppendRelay(RunLoop):
    """The relay. `writer` is the database's writer name in Tidemark; None: the name of the database. Up to `most_facts`
    facts of a backlog share a record."""

    def __init__(
        self,
        session: PostgresSession,
        producer: Callable[[], RecordProducer],
        writer: str | None,
        metrics: RelayMetrics,
        halt: threading.Event,
        most_facts: int = MOST_FACTS,
        heartbeat: int = 0,
    ) -> None:
        super().__init__(session, SCHEMA, queries.LOCK, producer, metrics, halt, heartbeat)
        self._most_facts = most_facts
        self._given_name = writer
        self._writer = writer or ""
        self._metrics = metrics
        self._unknown_writers: dict[int, dict[str, int]] = {}
        self._blocked: dict[str, str] = {}
        self._without_beat: set[queries.AppendStream] = set()
        self._due: deque[Decision] = deque()
        self._in_flight: list[InFlight] = []

    def _lock_keys(self, connection: Connection) -> Sequence[int]:
        return [0]

    def _work(self, connection: Connection) -> None:
        """Work until the connection breaks, or streams or epochs change."""
        set_lock_timeout(connection)
        if not self._has_worked and (seconds := silence(connection)) > SILENT_SECONDS:
            log.warning("A host that dies may hold a stream for long", seconds=seconds, set=_SETTINGS)
        self._has_worked = True
        self._connect_producer()
        while not self._halt.is_set():
            streams = self._join_streams(connection)
            self._metrics.heartbeat.set_to_current_time()
            self._metrics.active.set(1)
            decider = Decider(connection, streams)
            reporters = {stream.stream.name: (stream.own, stream.writers[stream.own].epoch) for stream in streams}
            self._reports = SourceReports(reporters, self._heartbeat)
            self._due.clear()
            self._in_flight = []
            self._oversized.clear()
            try:
                self._send_decided(connection, decider)
            finally:
                self._unknown_writers = decider.unknown_writers

    def _join_streams(self, connection: Connection) -> list[epochs.StreamEpoch]:
        found_history = server_history(connection, self._session.where, OUTBOX)
        self._writer = self._given_name or connection.info.dbname
        if not is_writer(self._writer):
            raise BadSetting("writer", why_no_name(self._writer))
        stream_epochs = epochs.begin(connection, found_history, self._writer, self._unknown_writers)
        for stream_epoch in stream_epochs:
            if stream_epoch.regression:
                log.warning(
                    REGRESSED, stream=stream_epoch.stream.name, floor=stream_epoch.floor, why=stream_epoch.regression
                )
        acting = [stream_epoch for stream_epoch in stream_epochs if stream_epoch.acts()]
        for start in range(0, len(acting), _JOINED_AT_ONCE):
            together = acting[start : start + _JOINED_AT_ONCE]
            for record in (record for stream_epoch in together for record in stream_epoch.acts()):
                self._producer.send(record.stream, records.encode(record))
                event = "Joining" if isinstance(record, Join) else "Retiring"
                log.info(event, stream=record.stream, writer=record.writer, epoch=record.epoch, id=record.id)
            self._deliver()
            epochs.note_acknowledged(connection, together)
        return [stream_epoch for stream_epoch in stream_epochs if stream_epoch.writers]

    def _send_decided(self, connection: Connection, decider: Decider) -> None:
        backoff, settled, watched, last_beat = Backoff(SHORTEST, LONGEST, 1.2), time.monotonic(), 0.0, time.monotonic()
        while not (self._halt.is_set() or decider.is_outdated):
            self._metrics.heartbeat.set_to_current_time()
            if not self._due and (room := self._room()) > 0:
                self._due += (part for decided in _result(decider.round(room)) for part in parts(decided))
                self._metrics.last_poll.set_to_current_time()
                self._report_blocked(decider)
            while self._due and self._room() > 0:
                self._send(self._due.popleft())
            self._process_acknowledgements(decider)
            now = time.monotonic()
            if now - settled >= _SETTLED_EVERY:
                _result(decider.settle(_SETTLED_AT_ONCE))
                settled = time.monotonic()
            if now - last_beat >= max(_BEAT_EVERY, decider.chain_count / _CHAINS_PER_SECOND):
                _result(decider.beat())
                self._report_without_beat(connection, decider)
                last_beat = now
            if self._grow_producer():
                break
            if now - watched >= _SETTLED_EVERY:
                self._update_metrics(connection, decider)
                watched = now
            if self._in_flight:
                backoff.reset()
            if not decider.has_backlog or self._room() <= 0:
                self._halt.wait(backoff.next())
        _result(decider.settle())

    def _report_blocked(self, decider: Decider) -> None:
        """Log once when a stream becomes blocked, and once when it continues."""
        blocked = {stream: str(problem) for stream, problem in decider.blocked.items()}
        if blocked == self._blocked:
            return
        for stream in {*blocked, *self._blocked}:
            if blocked.get(stream) != self._blocked.get(stream):
                if stream in blocked:
                    log.warning("A stream is blocked", stream=stream, problem=blocked[stream])
                else:
                    log.info("A stream continues", stream=stream)
            self._metrics.blocked.labels(stream).set(stream in blocked)
        self._blocked = blocked

    def _report_without_beat(self, connection: Connection, decider: Decider) -> None:
        """Log a stream once if another session prevents its beats."""
        for stream in decider.without_beat - self._without_beat:
            log.warning(
                "The linear position of a stream waits: a session holds the lock of its heartbeats",
                stream=stream.name, holder=queries.heartbeat_lockers(connection, stream), do="end that session",
            )  # fmt: skip
        self._without_beat = {*decider.without_beat}

    def _room(self) -> int:
        return MOST_BYTES - sum(decided.size for decided in self._in_flight)

    def _send(self, decided: Decision) -> None:
        self._in_flight.append(encode.send(self._producer, self._fitting(decided), self._most_facts))

    def _fitting(self, decided: Decision) -> Decision:
        """The facts that the topic accepts. For a fact that is too large, no record is sent: Kafka would accept its
        smaller records, and the last one, which has the ID, would make the fact look complete.
        """
        stream, signed = decided.stream_epoch.stream.name, decided.stream_epoch.stream.towards.signed
        limit, fitting = self._producer.max_value_bytes(stream), list[AppendedFact]()
        for fact in decided.facts:
            # `bytes` covers the rows and what surrounds them, so a longer computation is rarely needed.
            if fact.bytes + _NAMES_BYTES <= limit or (size := encode.largest_record(decided, fact)) <= limit:
                fitting.append(fact)
                continue
            writer, now = decided.stream_epoch.name_of(fact.writer), time.monotonic()
            self._oversized.add(stream, writer, signed(fact.id), size, self._producer, now)
        return decided if len(fitting) == len(decided.facts) else replace(decided, facts=fitting)

    def _process_acknowledgements(self, decider: Decider) -> None:
        """Apply the acknowledgements of Kafka."""
        self._poll_kafka()
        for in_flight in [in_flight for in_flight in self._in_flight if not in_flight.left]:
            decider.note_acknowledged(in_flight.decided)
            name = in_flight.decided.stream_epoch.stream.name
            self._metrics.facts.labels(name).inc(sum(1 for fact in in_flight.decided.facts if not fact.is_void))
            self._metrics.voids.labels(name).inc(
                in_flight.decided.voids.width() + sum(1 for fact in in_flight.decided.facts if fact.is_void)
            )
        before, self._in_flight = len(self._in_flight), [in_flight for in_flight in self._in_flight if in_flight.left]
        if len(self._in_flight) < before or not (self._in_flight or self._due):
            self._log_recovery()

    def _update_metrics(self, connection: Connection, decider: Decider) -> None:
        for name, count in decider.undecided.items():
            self._metrics.undecided.labels(name).set(count)
        for name, count in decider.ids_above_floor.items():
            self._metrics.kept.labels(name).set(count)
        self._report(queries.blockers(connection) if decider.open else [], self._blocked)


def _result(steps: Generator[str, None, Any]) -> Any:
    """Take all steps of a generator and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as over:
            return over.value
