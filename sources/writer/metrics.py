"""The writer's metrics, in a registry of the service's choice. `docs/metrics.md` is made from this file too."""

import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tidemark.sources.writer.chain import ReservationChain


class WriterMetrics:
    """All metrics of all writers in one registry; they have the labels `instance` and `stream`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["instance", "stream"]
        self.in_flight = Gauge(
            "tidemark_writer_in_flight",
            "IDs whose transactions have not ended; each holds its stream back.",
            labels,
            registry=registry,
        )
        self.oldest_in_flight = Gauge(
            "tidemark_writer_oldest_in_flight_seconds",
            "Since when the oldest of them was reserved, 0 while there is none. Rising: a transaction hangs, readers"
            " wait for it. Look for it in pg_stat_activity.",
            labels,
            registry=registry,
        )
        self.outbox = Gauge(
            "tidemark_writer_outbox_ids",
            "IDs whose transactions have ended and of which Kafka has not acknowledged what became of them. Rising:"
            " Kafka is away or too slow; the service goes on and the facts wait in its database.",
            labels,
            registry=registry,
        )
        self.outbox_age = Gauge(
            "tidemark_writer_outbox_age_seconds",
            "Since when the oldest of them has waited, 0 while there is none.",
            labels,
            registry=registry,
        )
        self.reservation = Histogram(
            "tidemark_writer_reservation_seconds",
            "From the call to the reserved ID: one round trip, the turn of other threads before it, and a fence.",
            labels,
            registry=registry,
            buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1, 5),
        )
        self.heartbeats = Counter(
            "tidemark_writer_heartbeats",
            "Times that an idle writer announced that nothing of it lies below what its sequence has given out.",
            labels,
            registry=registry,
        )
        self.fenced = Gauge(
            "tidemark_writer_fenced",
            "1 once another process has taken over this instance: nothing can be written here any more, end it.",
            ["instance"],
            registry=registry,
        )


_made: "WeakKeyDictionary[CollectorRegistry, WriterMetrics]" = WeakKeyDictionary()


def metrics_in(registry: CollectorRegistry) -> WriterMetrics:
    """Several writers of a process share what is in one registry."""
    if registry not in _made:
        _made[registry] = WriterMetrics(registry)
    return _made[registry]


class Meters:
    """The metrics of one writer, its labels filled in. Any thread."""

    def __init__(self, registry: CollectorRegistry, instance: str) -> None:
        self._metrics = metrics_in(registry)
        self._instance = instance

    def reservation(self, stream: str) -> Histogram:
        """Observe each reservation with it: looking up its labels costs more than that."""
        return self._metrics.reservation.labels(self._instance, stream)

    def heartbeat(self, stream: str) -> None:
        self._metrics.heartbeats.labels(self._instance, stream).inc()

    def fenced(self) -> None:
        self._metrics.fenced.labels(self._instance).set(1)

    def watch(self, stream: str, chain: ReservationChain, oldest_unacknowledged: Callable[[], float | None]) -> None:
        """Ask these whenever the metrics are scraped; times are of `time.monotonic`."""
        found, labels = self._metrics, (self._instance, stream)
        found.in_flight.labels(*labels).set_function(lambda: chain.in_flight)
        found.outbox.labels(*labels).set_function(lambda: chain.unacknowledged)
        found.oldest_in_flight.labels(*labels).set_function(lambda: _age(chain.oldest_in_flight()))
        found.outbox_age.labels(*labels).set_function(lambda: _age(oldest_unacknowledged()))


def _age(since: float | None) -> float:
    return 0.0 if since is None else time.monotonic() - since
