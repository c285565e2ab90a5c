"""The bridge: sends facts of Synapse's workers to Kafka when the facts complete (docs/how-to/synapse.md).

While a server is unavailable, the bridge retries without a time limit. The bridge's memory is bounded, because unsent
facts stay in Synapse's database. If several bridges run for a stream, one is active. The others are on standby until
the session of the active bridge ends.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from tidemark.common.backoff import Backoff
from tidemark.common.errors import Unavailable
from tidemark.common.log import get_logger
from tidemark.common.postgres_session import BRIDGE_LOCK_SPACE, Connection, PostgresSession
from tidemark.sources.producer import RecordProducer
from tidemark.sources.run_loop import DELIVERY_TIMEOUT_SECONDS, LoopMetrics, RunLoop, set_lock_timeout
from tidemark.sources.synapse import state, tables, timelines
from tidemark.sources.synapse.channel import ChannelEvent, SynapseChannel
from tidemark.sources.synapse.evidence import HeadSamples
from tidemark.sources.synapse.state import SCHEMA, OutboxRecord, SynapseServer
from tidemark.sources.synapse.streams import BridgedStream, StreamPublisher
from tidemark.sources.synapse.tables import TableWriter
from tidemark.sources.transactions import (
    OpenTransaction,
    SourceReports,
    flush_wal,
    read_running_transactions,
    read_server_history,
    use_up_transaction_number,
)
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Rdata


class BridgeMetrics(LoopMetrics):
    """The metrics of one bridge process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "tidemark_synapse", "synapse", ["stream"])
        self.started = Gauge(
            "tidemark_synapse_started_timestamp_seconds",
            "Time at which the process started (s since 1970).",
            registry=registry,
        )
        self.started.set_to_current_time()
        self.sent = Gauge(
            "tidemark_synapse_sent_timestamp_seconds",
            "Time at which Kafka last acknowledged a record, or had acknowledged all (s since 1970). If it does not"
            " rise while the bridge is active, Kafka does not accept records or the loop hangs.",
            registry=registry,
        )
        self.listening = Gauge(
            "tidemark_synapse_listening",
            "1 while Synapse's replication channel is subscribed. If 0, Redis is unavailable and no position advances.",
            registry=registry,
        )
        self.lines = Gauge(
            "tidemark_synapse_lines",
            "Lines received on Synapse's replication channel since the process started.",
            registry=registry,
        )
        self.facts = Counter(
            "tidemark_synapse_facts",
            "Facts that were written to the bridge's outbox. They are sent again until Kafka acknowledges them.",
            ["stream"],
            registry=registry,
        )
        self.unseen = Counter(
            "tidemark_synapse_unseen",
            "Ranges that were published as unseen, because rows in them may have been overwritten. Readers read the"
            " table for these ranges.",
            ["stream"],
            registry=registry,
        )
        self.late = Counter(
            "tidemark_synapse_late",
            "Facts that appeared in Synapse's tables below published positions, and were published as late. The log of"
            " the bridge names them. The cause: two processes had the same worker_name, or a sequence was set back.",
            ["stream"],
            registry=registry,
        )
        self.lag_ids = Gauge(
            "tidemark_synapse_lag_ids",
            "IDs that were given out and that the writer's published position has not passed. If it stays above 0, the"
            " worker blocks the stream, or no longer exists and is not retired.",
            ["stream", "writer"],
            registry=registry,
        )
        self.lag_seconds = Gauge(
            "tidemark_synapse_lag_seconds",
            "Seconds for which the writer's position has not advanced although IDs beyond it were given out. If it"
            " rises for all writers of a stream, no position was received, or a transaction of a dead worker is open.",
            ["stream", "writer"],
            registry=registry,
        )
        self.silent = Gauge(
            "tidemark_synapse_silent_writers",
            "Workers that have not announced a position yet, of a stream that has not begun. If it stays above 0, a"
            " worker is not running or is misspelt in --writers; the log names the workers.",
            ["stream"],
            registry=registry,
        )
        self._progress: dict[str, Mapping[str, tuple[int, float]]] = {}
        """Stream -> writer -> the published position, and the time (seconds of a monotonic clock) since when the
        position is unchanged and below the head."""

    def clear(self) -> None:
        super().clear()
        self.silent.clear()
        self.blocked.clear()
        for stream in [*self._progress]:
            self.show_lag(stream, {}, 0, 0)

    def show_lag(self, stream: str, sent_upto: Mapping[str, int], head: int, now: float) -> None:
        """Set the gauges of the lag of each writer, and remove the gauges of writers that are gone.

        Args:
            stream: the stream's name in Kafka.
            sent_upto: writer -> its published position (a magnitude).
            head: the highest ID that was given out (a magnitude).
            now: seconds of a monotonic clock.
        """
        before = self._progress.get(stream, {})
        for removed in before.keys() - sent_upto.keys():
            self.lag_ids.remove(stream, removed)
            self.lag_seconds.remove(stream, removed)
        self._progress[stream] = after = {}
        for writer, position in sent_upto.items():
            old_position, since = before.get(writer, (position, now))
            after[writer] = position, since if old_position == position < head else now
            self.lag_ids.labels(stream, writer).set(max(0, head - position))
            self.lag_seconds.labels(stream, writer).set(now - after[writer][1])


log = get_logger(__name__)

MAX_IN_FLIGHT = 20_000
"""The largest number of sent records that Kafka has not acknowledged. Above this number, facts stay in Synapse's
database."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.01, 0.05  # between two iterations of the loop
_CHECK_SECONDS = 1.0  # between two checks of the streams
_MIN_REQUEST_SECONDS, _MAX_REQUEST_SECONDS = 10.0, 60.0
"""While a stream lags or has not begun: seconds between two requests for the positions of all workers. The pause grows,
because the answer has a line for every writer of every stream."""
_AUDITS_PER_FULL_AUDIT, _AUDITED_FACTS = 60, 1000
"""Every `_AUDITS_PER_FULL_AUDIT`-th audit compares all stored published facts. The other audits compare the newest
`_AUDITED_FACTS`."""


class SynapseBridge(RunLoop):
    """The run loop of the bridge (see `RunLoop`).

    Args:
        synapse: a session of Synapse's database.
        own: a session of the database with the bridge's state.
        channel: Synapse's replication channel. Its thread must run.
        producer: makes a producer for the topic of facts.
        streams: the streams to send.
        metrics: the metrics to update.
        halt: ends the loop.
        heartbeat: the longest time in seconds between two OPEN records of a stream; 0 for no heartbeat.
    """

    def __init__(
        self,
        synapse: PostgresSession,
        own: PostgresSession,
        channel: SynapseChannel,
        producer: Callable[[], RecordProducer],
        streams: Sequence[BridgedStream],
        metrics: BridgeMetrics,
        halt: threading.Event,
        heartbeat: int = 0,
    ) -> None:
        super().__init__(own, SCHEMA, BRIDGE_LOCK_SPACE, producer, metrics, halt, heartbeat)
        self._synapse = synapse
        self._channel = channel
        self._streams = streams
        self._names = [stream.name for stream in streams]
        self._metrics = metrics
        self._publishers: dict[str, StreamPublisher] = {}
        self._heads: dict[str, int] = {}
        """Name in Kafka -> the highest ID that was given out, as this process has read it on any connection."""
        self._sent_numbers: dict[str, int] = {}
        """Name in Kafka -> the highest outbox number that was sent on this connection."""
        self._acknowledged_numbers: list[int] = []
        """The outbox numbers of acknowledged records that are still in the outbox."""
        self._in_flight_count = 0
        self._audit_count = 0
        self._requested_at, self._request_backoff = 0.0, Backoff(_MIN_REQUEST_SECONDS, _MAX_REQUEST_SECONDS)
        self._request_pause_seconds = _MIN_REQUEST_SECONDS

    def _lock_keys(self, connection: Connection) -> Sequence[int]:
        return state.read_lock_keys(connection, self._names)

    def _close(self) -> None:
        super()._close()
        self._synapse.close()

    def _work(self, connection: Connection) -> None:
        """Connect to Synapse's database, and publish the streams until `halt` is set."""
        with self._synapse.use() as synapse:
            set_lock_timeout(synapse)
            self._begin(synapse, connection)
            self._has_worked = True
            self._log_recovery()
            self._publish(synapse, connection)

    def _begin(self, synapse: Connection, own: Connection) -> None:
        """Load the state of the streams, and send the records that the previous bridge left in the outbox.

        If Synapse's database was set back, begins new timelines. Waits until Kafka has acknowledged the records. Then
        requests the positions of all workers.
        """
        self._connect_producer()
        self._sent_numbers, self._acknowledged_numbers, self._in_flight_count = dict.fromkeys(self._names, 0), [], 0
        self._oversized.clear()
        history = read_server_history(synapse, self._synapse.where, "events")
        tables.check_server(synapse, self._channel.name)
        server = SynapseServer(history.database, flush_wal(synapse), self._channel.name)
        self._server = server
        self._publishers = {}
        for stream in self._streams:
            head = tables.read_head(synapse, stream.stream)
            read = partial(tables.read_marks, synapse, stream.stream)
            highest = self._heads.get(stream.name, 0)
            known = timelines.load_progress(own, stream.stream, stream.name, server, head, read, highest)
            self._heads[stream.name] = head
            writers = {*stream.writers} or tables.read_writers(synapse, stream.stream)
            samples = HeadSamples.load(own, stream.name)
            self._publishers[stream.stream.name] = StreamPublisher(stream, server, known, writers, head, samples)
        self._send(own)
        self._flush()
        self._delete_acknowledged(own)
        self._reports = SourceReports({}, self._heartbeat)
        self._channel.take()
        self._channel.request_positions()
        self._requested_at = time.monotonic()

    def _publish(self, synapse: Connection, own: Connection) -> None:
        """Publish complete facts until `halt` is set. Then wait up to `DELIVERY_TIMEOUT_SECONDS` until Kafka has
        acknowledged the sent records."""
        backoff, checked = Backoff(MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS, 1.2), 0.0
        self._metrics.active.set(1)
        while not self._halt.is_set():
            self._metrics.heartbeat.set_to_current_time()
            received = self._receive()
            if self._in_flight_count < MAX_IN_FLIGHT and self._decide_streams(synapse, own):
                self._send(own)
                received = True
            self._poll_kafka()
            if not self._in_flight_count or self._acknowledged_numbers:
                self._metrics.sent.set_to_current_time()
            now = time.monotonic()
            if now - checked >= _CHECK_SECONDS:
                self._delete_acknowledged(own)
                self._check_streams(synapse, own)
                checked = now
            if received:
                backoff.reset()
            self._halt.wait(backoff.next())
        self._producer.flush(DELIVERY_TIMEOUT_SECONDS)
        self._delete_acknowledged(own)

    def _receive(self) -> bool:
        """Apply the messages of the channel to the deciders. Returns whether there were any."""
        received = self._channel.take()
        for report in received:
            if isinstance(report, ChannelEvent):
                for publisher in self._publishers.values():
                    decider = publisher.decider
                    decider.note_request() if report is ChannelEvent.REQUESTED else decider.mark_uncertain()
            elif (stream_publisher := self._publishers.get(report.stream)) is not None:
                stream_publisher.receive(report)
        return bool(received)

    def _decide_streams(self, synapse: Connection, own: Connection) -> bool:
        """Observe the database. For each stream, write the records that may be published now to the outbox.

        Returns whether a stream has new records in the outbox. Raises `SequenceWentBack` and the errors of
        `StreamPublisher.publish`.
        """
        observed = [publisher for publisher in self._publishers.values() if publisher.decider.needs_observation]
        if observed:
            heads = self._read_heads(synapse, observed)
            use_up_transaction_number(synapse)
            running = read_running_transactions(synapse)
            table_writers = (
                tables.read_table_writers(synapse, [publisher.bridged.stream for publisher in observed], running)
                if running
                else []
            )
            for publisher in observed:
                name = publisher.bridged.stream.name
                publisher.decider.observe(
                    heads[name],
                    frozenset(writer.transaction_number for writer in table_writers if name in writer.streams),
                )
        moved = False
        for publisher in self._publishers.values():
            if publisher.blocked_reason or publisher.bridged.name in self._oversized:
                continue
            before = publisher.progress
            for advance in publisher.publish(synapse, own):
                self._metrics.facts.labels(publisher.bridged.name).inc(len(advance.facts))
                if advance.is_unseen:
                    self._metrics.unseen.labels(publisher.bridged.name).inc()
            moved |= publisher.progress is not before
        return moved

    def _read_heads(self, synapse: Connection, publishers: Iterable[StreamPublisher]) -> dict[str, int]:
        """Read the highest ID that was given out, for each stream: name on the replication channel -> magnitude.

        Updates the heads of the publishers. Raises `SequenceWentBack`.
        """
        by_name = {publisher.bridged.stream.name: publisher for publisher in publishers}
        heads = tables.read_heads(synapse, [publisher.bridged.stream for publisher in by_name.values()])
        for name, publisher in by_name.items():
            self._heads[publisher.bridged.name] = max(heads[name], publisher.head)
            publisher.update_head(heads[name])
        return heads

    def _send(self, own: Connection) -> None:
        """Give the producer the records of the outbox that were not sent on this connection. A record above the topic's
        limit blocks its stream."""
        sent = {name: number for name, number in self._sent_numbers.items() if name not in self._oversized}
        unsent = state.read_outbox(own, sent)
        for at, record in enumerate(unsent):
            if record.stream in self._oversized:
                continue
            if len(record.value) > self._producer.max_value_bytes(record.stream):
                writer, id = _find_fact(record.stream, unsent[at:])
                self._oversized.add(record.stream, writer, id, len(record.value), self._producer, time.monotonic())
                continue
            self._sent_numbers[record.stream] = record.number
            self._in_flight_count += 1
            self._producer.send_all(record.stream, [record.value], partial(self._on_acknowledged, record.number))

    def _on_acknowledged(self, number: int) -> None:
        self._acknowledged_numbers.append(number)
        self._in_flight_count -= 1

    def _delete_acknowledged(self, own: Connection) -> None:
        """Delete the acknowledged records from the outbox."""
        if self._acknowledged_numbers:
            numbers, self._acknowledged_numbers = self._acknowledged_numbers, []
            state.delete_acknowledged(own, numbers)

    def _check_streams(self, synapse: Connection, own: Connection) -> None:
        """Update metrics, audit the streams, start requested retirements, and report open transactions.

        While a stream lags or has not begun, requests the positions of all workers from time to time. Sends oversized
        records when the topic's limit was raised.
        """
        self._metrics.listening.set(self._channel.is_connected)
        self._metrics.lines.set(self._channel.line_count)
        if self._switch_to_larger_producer():
            self._oversized.clear()
            self._send(own)
        self._audit(synapse, own)
        heads = self._read_heads(synapse, self._publishers.values())
        now, lagging = time.monotonic(), set[str]()
        for name, publisher in self._publishers.items():
            self._metrics.show_lag(publisher.bridged.name, publisher.sent_upto, heads[name], now)
            if any(position < heads[name] for position in publisher.sent_upto.values()):
                lagging.add(name)
        started_retirements = [publisher.start_retirements(own) for publisher in self._publishers.values()]
        if any(started_retirements):
            self._channel.request_positions()
        has_unstarted = False
        for publisher in self._publishers.values():
            self._metrics.blocked.labels(publisher.bridged.name).set(bool(publisher.blocked_reason))
            has_unstarted |= not publisher.has_begun
            self._metrics.silent.labels(publisher.bridged.name).set(
                0 if publisher.has_begun else len(publisher.silent_writers)
            )
        if not (lagging or has_unstarted):
            self._request_backoff.reset()
            self._request_pause_seconds = self._request_backoff.next()
        elif now - self._requested_at >= self._request_pause_seconds:
            self._requested_at, self._request_pause_seconds = now, self._request_backoff.next()
            self._channel.request_positions()
            for publisher in self._publishers.values():
                if not publisher.has_begun:
                    log.info(
                        "A stream of Synapse has not begun: it begins when no writer is silent, and the transactions of"
                        " earlier processes have ended",
                        stream=publisher.bridged.name,
                        silent=publisher.silent_writers,
                    )
        self._report_streams(
            tables.read_table_writers(synapse, [self._publishers[name].bridged.stream for name in lagging])
            if lagging
            else []
        )

    def _audit(self, synapse: Connection, own: Connection) -> None:
        """Check the sequence of each stream. If facts appeared at or below published positions, publish these facts as
        late.

        Raises `Unavailable` if the session is now connected to another database, and the errors of
        `StreamPublisher.audit`.
        """
        if read_server_history(synapse, self._synapse.where, "events").database != self._server.database:
            raise Unavailable("Postgres", self._synapse.where, "the address now leads to another database")
        clock, is_full = tables.read_clock(synapse), self._audit_count % _AUDITS_PER_FULL_AUDIT == 0
        self._audit_count += 1
        for publisher in self._publishers.values():
            publisher.check_sequence(synapse)
            publisher.update_retention(synapse, own, clock)
            late = publisher.audit(synapse, own, None if is_full else _AUDITED_FACTS)
            if late:
                self._metrics.late.labels(publisher.bridged.name).inc(len(late))
                self._send(own)
            publisher.log_discarded_positions()

    def _report_streams(self, writers: Sequence[TableWriter]) -> None:
        """Report the open transactions and the blocked streams, as metrics and as OPEN records."""
        opened = list[OpenTransaction]()
        slowest = {
            name: publisher.progress.slowest_encoder
            for name, publisher in self._publishers.items()
            if publisher.progress is not None
        }
        for writer in writers:
            for name in sorted(writer.streams & slowest.keys()):
                stream_name = self._publishers[name].bridged.name
                opened.append(replace(writer.transaction, stream=stream_name, writer=slowest[name].writer))
        # Name the same writer in every report. A new report replaces only an earlier report that names the same writer.
        known = [publisher.progress for publisher in self._publishers.values() if publisher.progress is not None]
        self._reports.reporters = {
            stream.name: (first, stream.epochs[first]) for stream in known for first in [min(stream.sent_upto)]
        }
        blocked = {
            publisher.bridged.name: publisher.blocked_reason
            for publisher in self._publishers.values()
            if publisher.blocked_reason
        }
        self._report(opened, blocked)


def _find_fact(stream: str, unsent: Sequence[OutboxRecord]) -> tuple[str, int | None]:
    """Find the writer and the signed ID of the first fact of a stream in `unsent`. The fact's last record has the ID.

    Returns an empty name and None if the stream's first record in `unsent` belongs to no fact.
    """
    for record in (records.decode(row.value) for row in unsent if row.stream == stream):
        if not isinstance(record, Rdata):
            break
        if isinstance(record.id, int):
            return record.writer, record.id
    return "", None
