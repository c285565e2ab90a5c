"""The relay: sends to Kafka the facts that services appended in their database (docs/design.md 4b).

The relay has no state of its own. While Kafka or the database is unavailable, the relay retries without a time limit.
The facts stay in the database, and the relay's memory is bounded. One of several relays of a database works; the others
are on standby. Two active relays would only cause duplicates in Kafka.

`docs/reference/metrics.md` is generated from `RelayMetrics`.

This module encodes decisions as Kafka records (docs/design.md 3). Every relay makes the same edges of the same IDs.
Only the number of edges in a record may differ, which does not change the meaning of the records.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Raw
from prometheus_client import CollectorRegistry, Counter, Gauge

from tidemark.common.backoff import Backoff
from tidemark.common.errors import BadSetting, MalformedFact
from tidemark.common.log import get_logger
from tidemark.common.postgres_session import Connection, PostgresSession
from tidemark.sources.producer import RecordProducer
from tidemark.sources.relay import epochs, queries
from tidemark.sources.relay.decider import Decider, Decision
from tidemark.sources.relay.evidence import EmptyRange, iterate_ids
from tidemark.sources.relay.queries import DEAD_CLIENT_WARNING_SECONDS, SCHEMA, AppendedFact, read_dead_client_timeout
from tidemark.sources.run_loop import LoopMetrics, RunLoop, set_lock_timeout
from tidemark.sources.transactions import SourceReports, read_server_history
from tidemark.streaming.values.intervals import NO_INTERVALS, Intervals
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import FactRun, Join, Position, Rdata, Void, explain_bad_name, is_writer_name

MAX_RUN_FACTS = 200
"""The default of the largest number of edges in a RUN record."""
MAX_RUN_BYTES = 256 * 1024
"""The largest size of a RUN record, in bytes. A larger fact is sent as RDATA records."""
_VOID_BYTES = 30
"""The approximate size of a void in a RUN record, in bytes."""
_decoder = msgspec.json.Decoder(Raw)


@dataclass(frozen=True, slots=True)
class _RecordEdge:
    """The edge `(id - 1, id]` of a fact or a void. The ID is a magnitude.

    Attributes:
        writer: the writer's name on Kafka.
        id: the ID.
        rows: the rows of the fact; empty for a void.
        size_bytes: the approximate size of the edge in a RUN record, in bytes.
    """

    writer: str
    id: int
    rows: Sequence[Raw]
    size_bytes: int


def encode_decision(decision: Decision, max_edges: int = 1, max_bytes: int = MAX_RUN_BYTES) -> Iterator[bytes]:
    """Encode a decision: the edges of facts and voids in ascending order of their IDs, then the ranges without a fact.

    Up to `max_edges` edges of one writer with neighbouring IDs share a RUN record. A fact outside a RUN has one record
    for each of its rows, and only the last of these records has the ID. A void outside a RUN has one record.

    Args:
        decision: the decision to encode.
        max_edges: the largest number of edges of a record.
        max_bytes: the largest sum of the edges' sizes in a RUN record.

    Returns:
        The values of the records, made one at a time.

    Raises:
        MalformedFact: a row is not JSON. The fact cannot be sent, and the fact's ID is not void.
    """
    stream_epoch, stream = decision.stream_epoch, decision.stream_epoch.stream.name
    signed = stream_epoch.stream.direction.signed

    for chain in _chains(decision, max_edges, max_bytes):
        writer, epoch = chain[0].writer, stream_epoch.writers[chain[0].writer].epoch
        prev, ids = signed(chain[0].id - 1), [signed(edge.id) for edge in chain]
        if len(chain) > 1:
            rows = [list(edge.rows) for edge in chain]
            yield records.encode(FactRun(stream=stream, writer=writer, epoch=epoch, prev=prev, ids=ids, rows=rows))
        elif not chain[0].rows:
            yield records.encode(Void(stream=stream, writer=writer, epoch=epoch, prev=prev, id=ids[0]))
        else:
            *first, last = chain[0].rows
            for row in first:
                yield records.encode(Rdata(stream=stream, writer=writer, epoch=epoch, id="batch", row=row))
            yield records.encode(Rdata(stream=stream, writer=writer, epoch=epoch, id=ids[0], row=last))
    for empty_range in [*_previously_published_ranges(decision), *decision.announced_ranges]:
        epoch = stream_epoch.writers[empty_range.writer].epoch
        prev, id = signed(empty_range.prev), signed(empty_range.id)
        yield records.encode(Position(stream=stream, writer=empty_range.writer, epoch=epoch, prev=prev, id=id))


def _previously_published_ranges(decision: Decision) -> Iterator[EmptyRange]:
    """The ranges with which `decision.previously_published_ids` is announced.

    The IDs may have had facts, so they are announced and not declared void. If the stream has one writer, neighbouring
    IDs share a range: each earlier edge had one ID, so every range ends at an earlier edge. Otherwise each range has
    one ID.
    """
    for low, high in decision.previously_published_ids:
        cuts = [low, high] if len(decision.stream_epoch.writers) == 1 else range(low, high + 1)
        yield from (EmptyRange(decision.stream_epoch.database_writer, prev, id) for prev, id in pairwise(cuts))


def _chains(decision: Decision, max_edges: int, max_bytes: int) -> Iterator[list[_RecordEdge]]:
    """Group the edges of facts and voids by record: neighbouring IDs of one writer, up to both limits."""
    chain: list[_RecordEdge] = []
    size = 0
    for edge in _edges(decision):
        if chain:
            is_next = edge.writer == chain[0].writer and edge.id == chain[-1].id + 1
            if not (is_next and len(chain) < max_edges and size + edge.size_bytes <= max_bytes):
                yield chain
                chain, size = [], 0
        chain.append(edge)
        size += edge.size_bytes
    if chain:
        yield chain


def _edges(decision: Decision) -> Iterator[_RecordEdge]:
    """The edges of facts and voids in ascending order of their IDs. Raises `MalformedFact`."""
    voids = iterate_ids(decision.void_ids)
    next_void = next(voids, None)
    for fact in decision.facts:
        while next_void is not None and next_void < fact.id:
            yield _RecordEdge(decision.stream_epoch.database_writer, next_void, (), _VOID_BYTES)
            next_void = next(voids, None)
        try:
            rows = () if fact.is_void else [*map(_decoder.decode, fact.rows)]
        except (msgspec.DecodeError, TypeError, RecursionError) as error:
            stream = decision.stream_epoch.stream
            raise MalformedFact(stream.name, stream.direction.signed(fact.id), str(error)) from None
        yield _RecordEdge(decision.stream_epoch.kafka_name(fact.writer), fact.id, rows, fact.size_bytes)
    while next_void is not None:
        yield _RecordEdge(decision.stream_epoch.database_writer, next_void, (), _VOID_BYTES)
        next_void = next(voids, None)


_VOIDS_AT_ONCE = 10_000
_VOID_RECORD_BYTES = 200
_ENVELOPE_BYTES = 3000
"""The largest size of a RUN record without its facts: the names of stream and writer, and JSON syntax."""


@dataclass(slots=True, eq=False)
class InFlightDecision:
    """A decision whose records were sent, with the count of unacknowledged records.

    Attributes:
        decision: the decision, without the rows of its facts.
        size_bytes: the approximate size of the decision's records in bytes.
        unacknowledged_count: the number of the decision's records that Kafka has not acknowledged.
    """

    decision: Decision
    size_bytes: int
    unacknowledged_count: int = 0

    def note_acknowledged(self) -> None:
        """Record that Kafka has acknowledged one record."""
        self.unacknowledged_count -= 1

    def count_records(self, values: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the values unchanged, and add 1 to `unacknowledged_count` for each value."""
        for value in values:
            self.unacknowledged_count += 1
            yield value


def send_decision(producer: RecordProducer, decision: Decision, max_run_facts: int) -> InFlightDecision:
    """Encode the records of a decision and queue them in the producer. Blocks while the producer's queue is full.

    Does not wait for Kafka's acknowledgements.

    Args:
        producer: the producer.
        decision: the decision to send. No record of a fact may be too large for the topic.
        max_run_facts: the largest number of edges in a RUN record.

    Raises:
        MalformedFact: a row is not JSON.
        Refused, Unavailable: an earlier record failed.
    """
    name = decision.stream_epoch.stream.name
    size = sum(fact.size_bytes for fact in decision.facts)
    size += _VOID_RECORD_BYTES * (decision.void_ids.width() + len(decision.announced_ranges))
    max_bytes = min(MAX_RUN_BYTES, producer.max_value_bytes(name) - _ENVELOPE_BYTES)
    # `unacknowledged_count` begins with 1, so that the decision is not acknowledged before all records are sent.
    in_flight = InFlightDecision(decision.without_rows(), size, 1)
    producer.send_all(
        name, in_flight.count_records(encode_decision(decision, max_run_facts, max_bytes)), in_flight.note_acknowledged
    )
    in_flight.note_acknowledged()
    return in_flight


def split_decision(decision: Decision) -> Iterator[Decision]:
    """Split a decision into parts with at most `_VOIDS_AT_ONCE` voids, because each void can become a record of its
    own."""
    if decision.facts or decision.announced_ranges or decision.previously_published_ids:
        yield Decision(
            decision.stream_epoch,
            decision.facts,
            NO_INTERVALS,
            decision.announced_ranges,
            decision.previously_published_ids,
        )
    for low, high in decision.void_ids:
        for start in range(low, high, _VOIDS_AT_ONCE):
            yield Decision(decision.stream_epoch, [], Intervals.of([(start, min(high, start + _VOIDS_AT_ONCE))]))


def largest_record_bytes(decision: Decision, fact: AppendedFact) -> int:
    """The size in bytes of the fact's largest record, if each row of the fact has its own record: an upper bound."""
    signed, writer = decision.stream_epoch.stream.direction.signed, decision.stream_epoch.kafka_name(fact.writer)
    envelope = Rdata(
        stream=decision.stream_epoch.stream.name,
        writer=writer,
        epoch=decision.stream_epoch.writers[writer].epoch,
        prev=signed(fact.id - 1),
        id=signed(fact.id),
        row=Raw(b""),
    )
    return len(records.encode(envelope)) + max(map(len, fact.rows), default=0)


class RelayMetrics(LoopMetrics):
    """The metrics of one relay process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "tidemark_relay", "relay", ["stream", "writer"])
        self.last_poll = Gauge(
            "tidemark_relay_last_poll_timestamp_seconds",
            "Time of the last query of the database (s since 1970). If it does not rise while the relay is active,"
            " Kafka does not accept records, or the database does not answer.",
            registry=registry,
        )
        self.facts = Counter(
            "tidemark_relay_facts", "Facts that Kafka has acknowledged.", ["stream"], registry=registry
        )
        self.voids = Counter(
            "tidemark_relay_voids",
            "IDs without a fact that Kafka has acknowledged: of transactions that rolled back, and IDs that the relay"
            " took itself (common cuts).",
            ["stream"],
            registry=registry,
        )
        self.undecided = Gauge(
            "tidemark_relay_undecided_ids",
            "IDs that were given out and are not decided. If it stays above 0, an open transaction blocks the stream;"
            " `tidemark relay blockers` names the transaction.",
            ["stream"],
            registry=registry,
        )
        self.outbox_ids = Gauge(
            "tidemark_relay_outbox_ids",
            "IDs that were given out, and whose rows the relay has not yet deleted from tidemark.append_outbox. If it"
            " rises, an open transaction blocks the stream, or Kafka is unavailable or too slow.",
            ["stream"],
            registry=registry,
        )


log = get_logger(__name__)

_NAMES_BYTES = 2 * 4 * 255
"""The largest size of the names of stream and writer in a record, in bytes."""
MAX_UNACKNOWLEDGED_BYTES = 16 * 1024 * 1024
"""The largest size of the sent records that Kafka has not acknowledged, in bytes. At this limit, the relay sends
nothing, and further facts stay in the database."""
SHORTEST_ROUND_PAUSE_SECONDS, LONGEST_ROUND_PAUSE_SECONDS = 0.005, 0.05
"""Seconds between two queries of the database: the first after a change, the second after a while without changes."""
_FLOOR_INTERVAL_SECONDS = 1.0
"""Seconds between two raises of the floors, and between two updates of the metrics."""
_FLOORS_AT_ONCE = 500
"""The largest number of streams whose floors are raised between two rounds, each in its own transaction."""
_COMMON_CUT_INTERVAL_SECONDS = 1.0
"""The shortest time between two common cuts of a stream, in seconds. See `evidence`."""
_CHAINS_PER_SECOND = 200
"""The largest number of chains that common cuts cut in a second. With more chains the pause between two common cuts is
longer."""
_SETTINGS = "tcp_keepalives_idle, tcp_keepalives_interval, tcp_keepalives_count or idle_in_transaction_session_timeout"
OUTBOX = "tidemark.append_outbox"
REGRESSION_EVENT = (
    "The database or its sequence went back, or a row was committed below the floor: a new timeline begins"
)
_JOINED_AT_ONCE = 500
"""The largest number of streams whose JOINs are sent, and then stored as acknowledged, together. Because of this limit,
a relay makes progress even if it is often killed."""


class AppendRelay(RunLoop):
    """The run loop of the relay of one database (see `RunLoop`).

    Args:
        session: the session for all queries.
        producer: makes a producer for the topic of facts.
        writer: the name of the database's own writer; None for the name of the database.
        metrics: the metrics to update.
        halt: stops the relay.
        max_run_facts: the largest number of edges in a RUN record.
        heartbeat: seconds between two OPEN records of a stream; 0 to send OPEN records only after a change.
    """

    def __init__(
        self,
        session: PostgresSession,
        producer: Callable[[], RecordProducer],
        writer: str | None,
        metrics: RelayMetrics,
        halt: threading.Event,
        max_run_facts: int = MAX_RUN_FACTS,
        heartbeat: int = 0,
    ) -> None:
        super().__init__(session, SCHEMA, queries.LOCK_KEY_BASE, producer, metrics, halt, heartbeat)
        self._max_run_facts = max_run_facts
        self._configured_writer = writer
        self._writer = writer or ""
        self._metrics = metrics
        self._unknown_writers: dict[int, dict[str, int]] = {}  # see `Decider.unknown_writers`
        self._blocked_reasons: dict[str, str] = {}
        self._streams_without_common_cut: set[queries.AppendStream] = set()
        self._unsent: deque[Decision] = deque()
        self._in_flight: list[InFlightDecision] = []

    def _lock_keys(self, connection: Connection) -> Sequence[int]:
        return [0]

    def _work(self, connection: Connection) -> None:
        """Join the streams and send their facts, until `halt` is set. Joins again when streams, epochs or floors
        change."""
        set_lock_timeout(connection)
        if not self._has_worked and (seconds := read_dead_client_timeout(connection)) > DEAD_CLIENT_WARNING_SECONDS:
            log.warning(
                f"If the host of a service dies, its open transaction may block a stream for {seconds:g} s, until"
                f" Postgres ends the transaction; set a lower value of {_SETTINGS}"
            )
        self._has_worked = True
        self._connect_producer()
        while not self._halt.is_set():
            streams = self._join_streams(connection)
            self._metrics.heartbeat.set_to_current_time()
            self._metrics.active.set(1)
            decider = Decider(connection, streams)
            reporters = {
                stream.stream.name: (stream.database_writer, stream.writers[stream.database_writer].epoch)
                for stream in streams
            }
            self._reports = SourceReports(reporters, self._heartbeat)
            self._unsent.clear()
            self._in_flight = []
            self._oversized.clear()
            try:
                self._send_decided(connection, decider)
            finally:
                self._unknown_writers = decider.unknown_writers

    def _join_streams(self, connection: Connection) -> list[epochs.StreamEpoch]:
        """Begin new epochs if necessary, and send the JOINs and RETIREs (see `_flush`).

        Returns the streams with writers.
        """
        history = read_server_history(connection, self._session.where, OUTBOX)
        self._writer = self._configured_writer or connection.info.dbname
        if not is_writer_name(self._writer):
            raise BadSetting("writer", explain_bad_name(self._writer))
        stream_epochs = epochs.begin(connection, history, self._writer, self._unknown_writers)
        for stream_epoch in stream_epochs:
            if stream_epoch.regression:
                log.warning(
                    REGRESSION_EVENT,
                    stream=stream_epoch.stream.name,
                    floor=stream_epoch.floor,
                    why=stream_epoch.regression,
                )
        changed = [stream_epoch for stream_epoch in stream_epochs if stream_epoch.join_and_retire_records()]
        for start in range(0, len(changed), _JOINED_AT_ONCE):
            batch = changed[start : start + _JOINED_AT_ONCE]
            for record in (record for stream_epoch in batch for record in stream_epoch.join_and_retire_records()):
                self._producer.send(record.stream, records.encode(record))
                event = "Joining" if isinstance(record, Join) else "Retiring"
                log.info(event, stream=record.stream, writer=record.writer, epoch=record.epoch, id=record.id)
            self._flush()
            epochs.store_acknowledged(connection, batch)
        return [stream_epoch for stream_epoch in stream_epochs if stream_epoch.writers]

    def _send_decided(self, connection: Connection, decider: Decider) -> None:
        """Decide and send facts, and raise floors, until `halt` is set, the decider is outdated, or the producer
        changes."""
        backoff, floors_raised_at, metrics_updated_at, last_common_cut = (
            Backoff(SHORTEST_ROUND_PAUSE_SECONDS, LONGEST_ROUND_PAUSE_SECONDS, 1.2),
            time.monotonic(),
            0.0,
            time.monotonic(),
        )
        while not (self._halt.is_set() or decider.is_outdated):
            self._metrics.heartbeat.set_to_current_time()
            if not self._unsent and (free_bytes := self._free_bytes()) > 0:
                self._unsent += (
                    part for decision in _run_steps(decider.run_round(free_bytes)) for part in split_decision(decision)
                )
                self._metrics.last_poll.set_to_current_time()
                self._report_blocked(decider)
            while self._unsent and self._free_bytes() > 0:
                self._send(self._unsent.popleft())
            self._process_acknowledgements(decider)
            now = time.monotonic()
            if now - floors_raised_at >= _FLOOR_INTERVAL_SECONDS:
                _run_steps(decider.raise_floors(_FLOORS_AT_ONCE))
                floors_raised_at = time.monotonic()
            if now - last_common_cut >= max(_COMMON_CUT_INTERVAL_SECONDS, decider.chain_count / _CHAINS_PER_SECOND):
                _run_steps(decider.write_common_cuts())
                self._report_without_common_cut(connection, decider)
                last_common_cut = now
            if self._switch_to_larger_producer():
                break
            if now - metrics_updated_at >= _FLOOR_INTERVAL_SECONDS:
                self._update_metrics(connection, decider)
                metrics_updated_at = now
            if self._in_flight:
                backoff.reset()
            if not decider.has_backlog or self._free_bytes() <= 0:
                self._halt.wait(backoff.next())
        _run_steps(decider.raise_floors())

    def _report_blocked(self, decider: Decider) -> None:
        """Log each stream that was blocked or unblocked, or whose problem changed, since the last call. Updates the
        metric.
        """
        blocked = {stream: str(problem) for stream, problem in decider.blocked.items()}
        if blocked == self._blocked_reasons:
            return
        for stream in {*blocked, *self._blocked_reasons}:
            if blocked.get(stream) != self._blocked_reasons.get(stream):
                if stream in blocked:
                    log.warning("A stream is blocked", stream=stream, problem=blocked[stream])
                else:
                    log.info("A stream continues", stream=stream)
            self._metrics.blocked.labels(stream).set(stream in blocked)
        self._blocked_reasons = blocked

    def _report_without_common_cut(self, connection: Connection, decider: Decider) -> None:
        """Log each stream for which the lock of common cuts was free at the last call, and is not free now."""
        for stream in decider.streams_without_common_cut - self._streams_without_common_cut:
            log.warning(
                "Cannot move the positions of idle writers: a session holds the lock of the stream's common cuts",
                stream=stream.name, blockers=queries.describe_common_cut_lock_sessions(connection, stream),
                do="end that session",
            )  # fmt: skip
        self._streams_without_common_cut = {*decider.streams_without_common_cut}

    def _free_bytes(self) -> int:
        """How many bytes of records may be sent before Kafka acknowledges more; 0 or less if none."""
        return MAX_UNACKNOWLEDGED_BYTES - sum(in_flight.size_bytes for in_flight in self._in_flight)

    def _send(self, decision: Decision) -> None:
        self._in_flight.append(send_decision(self._producer, self._remove_oversized(decision), self._max_run_facts))

    def _remove_oversized(self, decision: Decision) -> Decision:
        """Copy the decision without the facts that have a record too large for the topic. Reports these facts.

        No record of such a fact may be sent. Otherwise Kafka would accept the fact's smaller records. If the last
        record, which has the ID, were accepted, readers would take the fact for complete.
        """
        stream, signed = decision.stream_epoch.stream.name, decision.stream_epoch.stream.direction.signed
        limit, fitting = self._producer.max_value_bytes(stream), list[AppendedFact]()
        for fact in decision.facts:
            # `size_bytes` is an upper bound of the rows and the JSON around them, so a record is rarely encoded here.
            if fact.size_bytes + _NAMES_BYTES <= limit or (size := largest_record_bytes(decision, fact)) <= limit:
                fitting.append(fact)
                continue
            writer, now = decision.stream_epoch.kafka_name(fact.writer), time.monotonic()
            self._oversized.add(stream, writer, signed(fact.id), size, self._producer, now)
        return decision if len(fitting) == len(decision.facts) else replace(decision, facts=fitting)

    def _process_acknowledgements(self, decider: Decider) -> None:
        """Poll Kafka's acknowledgements, note the acknowledged decisions in the decider, and update the metrics."""
        self._poll_kafka()
        for in_flight in [in_flight for in_flight in self._in_flight if not in_flight.unacknowledged_count]:
            decider.note_acknowledged(in_flight.decision)
            name = in_flight.decision.stream_epoch.stream.name
            self._metrics.facts.labels(name).inc(sum(1 for fact in in_flight.decision.facts if not fact.is_void))
            self._metrics.voids.labels(name).inc(
                in_flight.decision.void_ids.width() + sum(1 for fact in in_flight.decision.facts if fact.is_void)
            )
        before, self._in_flight = (
            len(self._in_flight),
            [in_flight for in_flight in self._in_flight if in_flight.unacknowledged_count],
        )
        if len(self._in_flight) < before or not (self._in_flight or self._unsent):
            self._log_recovery()

    def _update_metrics(self, connection: Connection, decider: Decider) -> None:
        for name, count in decider.undecided_counts.items():
            self._metrics.undecided.labels(name).set(count)
        for name, count in decider.ids_above_floor.items():
            self._metrics.outbox_ids.labels(name).set(count)
        self._report(queries.read_blockers(connection) if decider.undecided_streams else [], self._blocked_reasons)


def _run_steps(steps: Generator[str, None, Any]) -> Any:
    """Run all steps of a generator and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as over:
            return over.value
