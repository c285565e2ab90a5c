"""The metrics of `tidemark synapse`. `docs/reference/metrics.md` is made from this file too."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from tidemark.sources.run_loop import LoopMetrics
from tidemark.sources.transactions import OldestOpenGauge, OpenTransaction


class BridgeMetrics(LoopMetrics):
    """Those of one process, in a registry of its own or of the caller's choice."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.active = Gauge(
            "tidemark_synapse_publishing",
            "1 while this process tells what Synapse writes, 0 while it waits for a server or for another one to end."
            " 0 everywhere: nothing is told, and nothing is lost.",
            registry=registry,
        )
        self.standby = Gauge(
            "tidemark_synapse_standby", "1 while this process waits because another one speaks.", registry=registry
        )
        self.heartbeat = Gauge(
            "tidemark_synapse_heartbeat_timestamp_seconds",
            "When the loop last went round (s since 1970). Older than a minute: it hangs.",
            registry=registry,
        )
        self.sent = Gauge(
            "tidemark_synapse_sent_timestamp_seconds",
            "When Kafka last took of what is told, or had all of it (s since 1970). Standing still while it speaks:"
            " Kafka takes nothing, or the loop hangs.",
            registry=registry,
        )
        self.listening = Gauge(
            "tidemark_synapse_listening",
            "1 while Synapse's channel is subscribed. 0: Redis is away, and nothing can be told.",
            registry=registry,
        )
        self.lines = Gauge(
            "tidemark_synapse_lines", "Lines heard on Synapse's channel since the process began.", registry=registry
        )
        self.facts = Counter(
            "tidemark_synapse_facts",
            "Facts that were told: they are noted, and go to Kafka until it has acknowledged them.",
            ["stream"],
            registry=registry,
        )
        self.unseen = Counter(
            "tidemark_synapse_unseen",
            "Ranges that were told as unseen: of overwritten rows nobody knows whether there was one. Readers read the"
            " table there.",
            ["stream"],
            registry=registry,
        )
        self.late = Counter(
            "tidemark_synapse_late",
            "Facts that the tables had where everything was told, published as late: two processes had one worker_name,"
            " or a sequence went back. Any is a fault outside of the bridge, which its log names.",
            ["stream"],
            registry=registry,
        )
        self.oversized = Gauge(
            "tidemark_synapse_oversized",
            "1 for a stream whose next record is above the topic's max.message.bytes: it waits, the log names the"
            " record with its ID and size. Raise max.message.bytes of the topic.",
            ["stream"],
            registry=registry,
        )
        self.lag_ids = Gauge(
            "tidemark_synapse_lag_ids",
            "IDs that are given out and not told, by the writer that has not gone past them. Staying above 0: that"
            " worker holds the stream, or is gone and not retired.",
            ["stream", "writer"],
            registry=registry,
        )
        self.lag_seconds = Gauge(
            "tidemark_synapse_lag_seconds",
            "For how long no more of the writer has been told, while IDs beyond are given out. Of every writer of a"
            " stream at once: nobody is heard, or a transaction of a dead worker is open.",
            ["stream", "writer"],
            registry=registry,
        )
        self.silent = Gauge(
            "tidemark_synapse_silent_writers",
            "Workers for whose first word a stream waits that has not begun. Staying above 0: one is not started, or is"
            " misspelt in --writers; the log names them.",
            ["stream"],
            registry=registry,
        )
        self.oldest = Gauge(
            "tidemark_synapse_oldest_transaction_seconds",
            "How long the oldest transaction has been open that writes to the tables of a stream that is behind."
            " Rising: it hangs, readers wait for it; `tidemark synapse blockers` names it.",
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
        for stream in [*self._waited]:
            self.show_lag(stream, {}, 0, 0)

    def show_lag(self, stream: str, sent_upto: Mapping[str, int], head: int, now: float) -> None:
        """By writer up to where the stream is told, of all that is given out; `now`: seconds of any one clock."""
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
