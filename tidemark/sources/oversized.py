"""Records above the topic's `max.message.bytes`. They are not sent. Their stream waits for them, other streams go on.

A record is judged by its size before compression.
"""

from collections.abc import Callable

from prometheus_client import Gauge

from tidemark.common.backoff import Backoff
from tidemark.common.errors import Unavailable
from tidemark.common.log import get_logger
from tidemark.sources.producer import RecordProducer

log = get_logger(__name__)

SHORTEST, LONGEST = 5.0, 60.0
"""Seconds between two queries for the topic's limit, at first and in the end."""


class OversizedRecords:
    """The records that one connection to a database could not send. `gauge` shows their number by stream."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._bytes: dict[tuple[str, int | None], int] = {}
        self._backoff = Backoff(SHORTEST, LONGEST)
        self._due = 0.0

    def __contains__(self, stream: str) -> bool:
        """Whether a record of the stream was not sent."""
        return any(name == stream for name, _ in self._bytes)

    def forget(self) -> None:
        """Begin anew: every record is judged again."""
        for stream, _ in self._bytes:
            self._gauge.labels(stream).set(0)
        self._bytes = {}

    def add(self, stream: str, writer: str, id: int | None, size: int, producer: RecordProducer, now: float) -> None:
        """Note a record that was not sent, and log it.

        Args:
            stream: the stream of the record.
            writer: the writer of the record, empty if it is not known.
            id: the stream ID of the record's fact, with its sign, None if it is not known.
            size: bytes of the record's value.
            producer: the producer whose limit is too low.
            now: seconds of a monotonic clock.
        """
        if not self._bytes:
            self._backoff = Backoff(SHORTEST, LONGEST)
            self._due = now + SHORTEST
        self._bytes[stream, id] = size
        self._gauge.labels(stream).set(sum(1 for name, _ in self._bytes if name == stream))
        needed = size + producer.max_bytes - producer.max_value_bytes(stream)
        log.error(
            "A record is too large for the Kafka topic; its stream waits, other streams go on",
            stream=stream, writer=writer, id=id, bytes=needed, limit=producer.max_bytes,
            do=f"raise max.message.bytes of the topic to at least {needed}",
        )  # fmt: skip

    def larger(self, make: Callable[[], RecordProducer], now: float) -> RecordProducer | None:
        """A producer that takes one of the records, once the topic does. Asks Kafka less and less often."""
        if not self._bytes or now < self._due:
            return None
        self._due = now + self._backoff.next()
        try:
            producer = make()
        except Unavailable:
            return None
        fits = any(size <= producer.max_value_bytes(stream) for (stream, _), size in self._bytes.items())
        return producer if fits else None
