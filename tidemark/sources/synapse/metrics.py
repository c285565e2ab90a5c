"""The metrics of `tidemark synapse`. `docs/reference/metrics.md` is made from this file too."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from tidemark.sources.run_loop import LoopMetrics
from tidemark.sources.transactions import OldestOpenGauge, OpenTransaction


class BridgeMetrics(LoopMetrics):
    """The metrics of one bridge process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.started = Gauge(
            "tidemark_synapse_started_timestamp_seconds",
            "Time at which the process began (s since 1970).",
            registry=registry,
        )
        self.started.set_to_current_time()
        self.active = Gauge(
            "tidemark_synapse_publishing",
            "1 while this process sends facts to Kafka, 0 while it waits for a server or is a standby. 0 everywhere:"
            " no fact is sent, and none is lost.",
            registry=registry,
        )
        self.standby = Gauge(
            "tidemark_synapse_standby",
            "1 while this process waits because another bridge works on its streams.",
            registry=registry,
        )
        self.heartbeat = Gauge(
            "tidemark_synapse_heartbeat_timestamp_seconds",
            "Time of the last round of the loop (s since 1970). Older than a minute: it hangs.",
            registry=registry,
        )
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
        self.oversized = Gauge(
            "tidemark_synapse_oversized",
            "1 for a stream whose next record is above the topic's max.message.bytes: the stream waits, and the log"
            " names the record with its ID and size. Raise max.message.bytes of the topic.",
            ["stream"],
            registry=registry,
        )
        self.blocked = Gauge(
            "tidemark_synapse_blocked_streams",
            "1 while nothing of the stream is published, because its sequence has a CACHE, a CYCLE or another INCREMENT"
            " than Synapse gives it. The log has the statement that repairs it.",
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
        self.oldest = Gauge(
            "tidemark_synapse_oldest_transaction_seconds",
            "Age of the oldest transaction that writes to the tables of a stream that lags. Rising: it hangs, and"
            " readers wait for it; `tidemark synapse blockers` names it.",
            ["stream"],
            registry=registry,
        )
        self.open = OldestOpenGauge(self.oldest)
        self._waited: dict[str, Mapping[str, tuple[int, float]]] = {}

    def open_labels(self, transaction: OpenTransaction) -> tuple[str, ...]:
        return (transaction.stream,)

    def clear(self) -> None:
        super().clear()
        self.silent.clear()
        self.blocked.clear()
        for stream in [*self._waited]:
            self.show_lag(stream, {}, 0, 0)

    def show_lag(self, stream: str, sent_upto: Mapping[str, int], head: int, now: float) -> None:
        """By writer, up to where the stream is published, of all IDs up to `head`; `now`: seconds of any one clock."""
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
