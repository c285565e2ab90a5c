"""The bridge: sends the facts that Synapse's workers write to Kafka when they complete (docs/how-to/synapse.md).

While a server is unavailable, the bridge waits without a time limit. Its memory is bounded: facts wait in Synapse's
database. One of several bridges of a stream works, the others are on standby until its session ends.
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
from tidemark.common.postgres_session import BRIDGE_LOCK, Connection, PostgresSession
from tidemark.sources.producer import RecordProducer
from tidemark.sources.run_loop import PATIENCE, LoopMetrics, RunLoop, set_lock_timeout
from tidemark.sources.synapse import state, tables, timelines
from tidemark.sources.synapse.channel import ChannelEvent, SynapseChannel
from tidemark.sources.synapse.evidence import HeadSamples
from tidemark.sources.synapse.state import SCHEMA, SynapseServer, Unsent
from tidemark.sources.synapse.streams import BridgedStream, StreamPublisher
from tidemark.sources.synapse.tables import TableWriter
from tidemark.sources.transactions import (
    OpenTransaction,
    SourceReports,
    end_own_transaction,
    flush_wal,
    running_transactions,
    server_history,
)
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Rdata


class BridgeMetrics(LoopMetrics):
    """The metrics of one bridge process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "tidemark_synapse", "synapse", ["stream"])
        self.started = Gauge(
            "tidemark_synapse_started_timestamp_seconds",
            "Time at which the process began (s since 1970).",
            registry=registry,
        )
        self.started.set_to_current_time()
        self.sent = Gauge(
            "tidemark_synapse_sent_timestamp_seconds",
            "Time at which Kafka last acknowledged a record, or had all of them (s since 1970). Not rising while the"
            " bridge is active: Kafka does not accept records, or the loop hangs.",
            registry=registry,
        )
        self.listening = Gauge(
            "tidemark_synapse_listening",
            "1 while Synapse's replication channel is subscribed. 0: Redis is away, and no position can advance.",
            registry=registry,
        )
        self.lines = Gauge(
            "tidemark_synapse_lines",
            "Lines received on Synapse's replication channel since the process began.",
            registry=registry,
        )
        self.facts = Counter(
            "tidemark_synapse_facts",
            "Facts that were written to the bridge's outbox. They are sent until Kafka has acknowledged them.",
            ["stream"],
            registry=registry,
        )
        self.unseen = Counter(
            "tidemark_synapse_unseen",
            "Ranges that were published as unseen: overwritten rows may have been in them. Readers read the table"
            " there.",
            ["stream"],
            registry=registry,
        )
        self.late = Counter(
            "tidemark_synapse_late",
            "Facts that the tables had where everything was published, which were published as late: two processes had"
            " one worker_name, or a sequence went back. Any is a fault outside of the bridge, which its log names.",
            ["stream"],
            registry=registry,
        )
        self.lag_ids = Gauge(
            "tidemark_synapse_lag_ids",
            "IDs that are given out and not published, by the writer that has not passed them. Staying above 0: that"
            " worker blocks the stream, or is gone and not retired.",
            ["stream", "writer"],
            registry=registry,
        )
        self.lag_seconds = Gauge(
            "tidemark_synapse_lag_seconds",
            "For how long the writer's position has not advanced while IDs beyond it are given out. Of every writer of"
            " a stream at once: no worker is received, or a transaction of a dead worker is open.",
            ["stream", "writer"],
            registry=registry,
        )
        self.silent = Gauge(
            "tidemark_synapse_silent_writers",
            "Workers that have not announced a position yet, of a stream that has not begun. Staying above 0: one is"
            " not started, or is misspelt in --writers; the log names them.",
            ["stream"],
            registry=registry,
        )
        self._waited: dict[str, Mapping[str, tuple[int, float]]] = {}

    def clear(self) -> None:
        super().clear()
        self.silent.clear()
        self.blocked.clear()
        for stream in [*self._waited]:
            self.show_lag(stream, {}, 0, 0)

    def show_lag(self, stream: str, sent_upto: Mapping[str, int], head: int, now: float) -> None:
        """Show the lag of each writer. `sent_upto`: by writer, the highest published ID. `head`: the highest ID that
        was given out. `now`: seconds of a monotonic clock."""
        before = self._waited.get(stream, {})
        for gone in before.keys() - sent_upto.keys():
            self.lag_ids.remove(stream, gone)
            self.lag_seconds.remove(stream, gone)
        self._waited[stream] = after = {}
        for writer, at in sent_upto.items():
            was, since = before.get(writer, (at, now))
            after[writer] = at, since if was == at < head else now
            self.lag_ids.labels(stream, writer).set(max(0, head - at))
            self.lag_seconds.labels(stream, writer).set(now - after[writer][1])


log = get_logger(__name__)

MOST_UNSENT = 20_000
"""The largest number of records that wait for Kafka's acknowledgement; further facts wait in Synapse's database."""
SHORTEST, LONGEST = 0.01, 0.05
_CHECK_EVERY = 1.0
_ASKED_AFTER, _ASKED_EVERY = 10.0, 60.0
"""Seconds until the first request for the positions of all workers, and between further ones. The answer has a line for
every writer of every stream.
"""
_DEEP_EVERY, _NEWEST = 60, 1000
"""One in this many audits compares all remembered published facts; the others compare only the newest."""


class SynapseBridge(RunLoop):
    """The bridge. `own`: a session of the database with the bridge's state. `synapse`: a session of Synapse's
    database."""

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
        super().__init__(own, SCHEMA, BRIDGE_LOCK, producer, metrics, halt, heartbeat)
        self._synapse = synapse
        self._channel = channel
        self._streams = streams
        self._names = [stream.name for stream in streams]
        self._metrics = metrics
        self._publishers: dict[str, StreamPublisher] = {}
        self._heads: dict[str, int] = {}
        """By stream, the highest ID that was seen to be given out, also on earlier connections."""
        self._sent: dict[str, int] = {}
        """By stream, the highest outbox number that was sent on this connection."""
        self._done: list[int] = []
        self._in_flight = 0
        self._checks = 0
        self._asked, self._ask_backoff = 0.0, Backoff(_ASKED_AFTER, _ASKED_EVERY)
        self._ask_pause = _ASKED_AFTER

    def _lock_keys(self, connection: Connection) -> Sequence[int]:
        return state.lock_keys(connection, self._names)

    def _close(self) -> None:
        super()._close()
        self._synapse.close()

    def _work(self, connection: Connection) -> None:
        with self._synapse.use() as synapse:
            set_lock_timeout(synapse)
            self._begin(synapse, connection)
            self._has_worked = True
            self._log_recovery()
            self._publish(synapse, connection)

    def _begin(self, synapse: Connection, own: Connection) -> None:
        """Send the records that the previous bridge left in the outbox, and load the state of the streams."""
        self._connect_producer()
        self._sent, self._done, self._in_flight = dict.fromkeys(self._names, 0), [], 0
        self._oversized.forget()
        history = server_history(synapse, self._synapse.where, "events")
        tables.check_server(synapse, self._channel.name)
        server = SynapseServer(history.database, flush_wal(synapse), self._channel.name)
        self._server = server
        self._publishers = {}
        for stream in self._streams:
            head = tables.head(synapse, stream.stream)
            read = partial(tables.identities, synapse, stream.stream)
            seen = self._heads.get(stream.name, 0)
            known = timelines.begin(own, stream.stream, stream.name, server, head, read, seen)
            self._heads[stream.name] = head
            writers = {*stream.writers} or tables.writers(synapse, stream.stream)
            samples = HeadSamples.load(own, stream.name)
            self._publishers[stream.stream.name] = StreamPublisher(stream, server, known, writers, head, samples)
        self._send(own)
        self._deliver()
        self._settle(own)
        self._reports = SourceReports({}, self._heartbeat)
        self._channel.take()
        self._channel.ask()
        self._asked = time.monotonic()

    def _publish(self, synapse: Connection, own: Connection) -> None:
        """Send completed facts until an error ends the work."""
        backoff, checked = Backoff(SHORTEST, LONGEST, 1.2), 0.0
        self._metrics.active.set(1)
        while not self._halt.is_set():
            self._metrics.heartbeat.set_to_current_time()
            received = self._receive()
            if self._in_flight < MOST_UNSENT and self._round(synapse, own):
                self._send(own)
                received = True
            self._poll_kafka()
            if not self._in_flight or self._done:
                self._metrics.sent.set_to_current_time()
            now = time.monotonic()
            if now - checked >= _CHECK_EVERY:
                self._settle(own)
                self._check_streams(synapse, own)
                checked = now
            if received:
                backoff.reset()
            self._halt.wait(backoff.next())
        self._producer.flush(PATIENCE)
        self._settle(own)

    def _receive(self) -> bool:
        received = self._channel.take()
        for report in received:
            if isinstance(report, ChannelEvent):
                for publisher in self._publishers.values():
                    decider = publisher.decider
                    decider.asked_all() if report is ChannelEvent.ASKED else decider.mark_uncertain()
            elif (listed := self._publishers.get(report.stream)) is not None:
                listed.receive(report)
        return bool(received)

    def _round(self, synapse: Connection, own: Connection) -> bool:
        """Decide all streams once. Returns whether there are records to send."""
        asked = [publisher for publisher in self._publishers.values() if publisher.decider.wants_observation]
        if asked:
            heads = self._see(synapse, asked)
            end_own_transaction(synapse)
            runs = running_transactions(synapse)
            table_writers = (
                tables.table_writers(synapse, [publisher.of.stream for publisher in asked], runs) if runs else []
            )
            for publisher in asked:
                name = publisher.of.stream.name
                publisher.decider.observe(
                    heads[name], frozenset(writer.number for writer in table_writers if name in writer.streams)
                )
        moved = False
        for publisher in self._publishers.values():
            if publisher.blocked_reason or publisher.of.name in self._oversized:
                continue
            before = publisher.known
            for advance in publisher.round(synapse, own):
                self._metrics.facts.labels(publisher.of.name).inc(len(advance.facts))
                if advance.unseen:
                    self._metrics.unseen.labels(publisher.of.name).inc()
            moved |= publisher.known is not before
        return moved

    def _see(self, synapse: Connection, publishers: Iterable[StreamPublisher]) -> dict[str, int]:
        """By stream, the highest ID that was given out. Raises `SequenceWentBack`."""
        by_name = {publisher.of.stream.name: publisher for publisher in publishers}
        heads = tables.heads(synapse, [publisher.of.stream for publisher in by_name.values()])
        for name, publisher in by_name.items():
            self._heads[publisher.of.name] = max(heads[name], publisher.head)
            publisher.see(heads[name])
        return heads

    def _send(self, own: Connection) -> None:
        sent = {name: number for name, number in self._sent.items() if name not in self._oversized}
        unsent = state.unsent(own, sent)
        for at, record in enumerate(unsent):
            if record.stream in self._oversized:
                continue
            if len(record.value) > self._producer.max_value_bytes(record.stream):
                writer, id = _fact_of(record.stream, unsent[at:])
                self._oversized.add(record.stream, writer, id, len(record.value), self._producer, time.monotonic())
                continue
            self._sent[record.stream] = record.number
            self._in_flight += 1
            self._producer.send_all(record.stream, [record.value], partial(self._acknowledged, record.number))

    def _acknowledged(self, number: int) -> None:
        self._done.append(number)
        self._in_flight -= 1

    def _settle(self, own: Connection) -> None:
        if self._done:
            done, self._done = self._done, []
            state.delete_acknowledged(own, done)

    def _check_streams(self, synapse: Connection, own: Connection) -> None:
        """Update metrics, audit the streams, execute requested retirements, and report open transactions.

        All workers are asked for their positions if a stream lags.
        """
        self._metrics.listening.set(self._channel.connected)
        self._metrics.lines.set(self._channel.lines)
        if self._grow_producer():
            self._oversized.forget()
            self._send(own)
        self._audit(synapse, own)
        heads = self._see(synapse, self._publishers.values())
        now, lagging = time.monotonic(), set[str]()
        for name, publisher in self._publishers.items():
            self._metrics.show_lag(publisher.of.name, publisher.sent_upto, heads[name], now)
            if any(at < heads[name] for at in publisher.sent_upto.values()):
                lagging.add(name)
        ordered_retirements = [publisher.retire(own) for publisher in self._publishers.values()]
        if any(ordered_retirements):
            self._channel.ask()
        has_waiting = False
        for publisher in self._publishers.values():
            self._metrics.blocked.labels(publisher.of.name).set(bool(publisher.blocked_reason))
            has_waiting |= not publisher.has_begun
            self._metrics.silent.labels(publisher.of.name).set(0 if publisher.has_begun else len(publisher.silent))
        if not (lagging or has_waiting):
            self._ask_backoff.reset()
            self._ask_pause = self._ask_backoff.next()
        elif now - self._asked >= self._ask_pause:
            self._asked, self._ask_pause = now, self._ask_backoff.next()
            self._channel.ask()
            for publisher in self._publishers.values():
                if not publisher.has_begun:
                    log.info(
                        "Waiting for the position of every writer", stream=publisher.of.name, silent=publisher.silent
                    )
        self._report_streams(
            tables.table_writers(synapse, [self._publishers[name].of.stream for name in lagging]) if lagging else []
        )

    def _audit(self, synapse: Connection, own: Connection) -> None:
        """Check that the database is the same one, and that no fact appeared at or below published positions.

        Raises `Unavailable` if it is another database.
        """
        if server_history(synapse, self._synapse.where, "events").database != self._server.database:
            raise Unavailable("Postgres", self._synapse.where, "the database is another one than a moment ago")
        clock, deep = tables.now(synapse), self._checks % _DEEP_EVERY == 0
        self._checks += 1
        for publisher in self._publishers.values():
            publisher.check_sequence(synapse)
            publisher.age(synapse, own, clock)
            late = publisher.audit(synapse, own, None if deep else _NEWEST)
            if late:
                self._metrics.late.labels(publisher.of.name).inc(len(late))
                self._send(own)
            publisher.name_contradictions()

    def _report_streams(self, writers: Sequence[TableWriter]) -> None:
        opened = list[OpenTransaction]()
        slowest = {
            name: publisher.known.slowest_writer
            for name, publisher in self._publishers.items()
            if publisher.known is not None
        }
        for writer in writers:
            for name in sorted(writer.streams & slowest.keys()):
                sent_upto = self._publishers[name].of.name
                opened.append(replace(writer.transaction, stream=sent_upto, writer=slowest[name].writer))
        # Always report as the same writer: a report of another writer would never be withdrawn.
        known = [publisher.known for publisher in self._publishers.values() if publisher.known is not None]
        self._reports.reporters = {
            stream.name: (first, stream.epochs[first]) for stream in known for first in [min(stream.sent_upto)]
        }
        blocked = {
            publisher.of.name: publisher.blocked_reason
            for publisher in self._publishers.values()
            if publisher.blocked_reason
        }
        self._report(opened, blocked)


def _fact_of(stream: str, unsent: Sequence[Unsent]) -> tuple[str, int | None]:
    """Writer and ID of the first record of the stream: for a fact of several rows, the last record has the ID."""
    for record in (records.decode(row.value) for row in unsent if row.stream == stream):
        if not isinstance(record, Rdata):
            break
        if isinstance(record.id, int):
            return record.writer, record.id
    return "", None
