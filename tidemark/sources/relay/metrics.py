"""The relay's metrics. `docs/reference/metrics.md` is made from this file too."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from tidemark.sources.run_loop import LoopMetrics
from tidemark.sources.transactions import OldestOpenGauge, OpenTransaction


class RelayMetrics(LoopMetrics):
    """The metrics of one relay process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.active = Gauge(
            "tidemark_relay_active",
            "1 while this process sends facts to Kafka, 0 while it waits for a server or is a standby. 0 everywhere:"
            " facts wait in the service's database.",
            registry=registry,
        )
        self.standby = Gauge(
            "tidemark_relay_standby",
            "1 while this process waits because another relay works on its database.",
            registry=registry,
        )
        self.heartbeat = Gauge(
            "tidemark_relay_heartbeat_timestamp_seconds",
            "Time of the last round of an active relay's loop (s since 1970). Older than a minute: it hangs.",
            registry=registry,
        )
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
        self.oversized = Gauge(
            "tidemark_relay_oversized_facts",
            "Facts above the topic's max.message.bytes, which are not sent. Above 0: the stream waits for them; the log"
            " names each with its ID and size. Raise max.message.bytes of the topic.",
            ["stream"],
            registry=registry,
        )
        self.blocked = Gauge(
            "tidemark_relay_blocked_streams",
            "1 while no new ID of the stream is decided, because its sequence is unfit. The log has the problem and the"
            " statement that repairs it.",
            ["stream"],
            registry=registry,
        )
        self.oldest = Gauge(
            "tidemark_relay_oldest_transaction_seconds",
            "Age of the oldest open transaction that blocks a stream, by the writer in whose name it has appended"
            " (empty: no fact of that name was sent yet); no series if none is open. Rising: it hangs, and readers wait"
            " for it; `tidemark relay blockers` names it.",
            ["stream", "writer"],
            registry=registry,
        )
        self.open = OldestOpenGauge(self.oldest)

    def open_labels(self, transaction: OpenTransaction) -> tuple[str, ...]:
        return transaction.stream, transaction.writer
