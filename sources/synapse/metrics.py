"""The metrics of `tidemark synapse`. `docs/metrics.md` is made from this file too."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge


class BridgeMetrics:
    """Those of one process, in a registry of its own or of the caller's choice."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.speaking = Gauge(
            "tidemark_synapse_speaking",
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
        self.behind = Gauge(
            "tidemark_synapse_behind_ids",
            "IDs that are given out and not told, by the writer that has not gone past them. Staying above 0: that"
            " worker holds the stream, or is gone and not retired.",
            ["stream", "writer"],
            registry=registry,
        )
        self.oldest = Gauge(
            "tidemark_synapse_oldest_transaction_seconds",
            "How long the oldest transaction has been open that writes to the stream's tables.",
            ["stream"],
            registry=registry,
        )
        self._held: set[str] = set()

    def held(self, seconds: Mapping[str, float]) -> None:
        """By stream how long the oldest transaction is open that writes to it."""
        for gone in self._held - seconds.keys():
            self.oldest.remove(gone)
        for name, age in seconds.items():
            self.oldest.labels(name).set(age)
        self._held = {*seconds}
