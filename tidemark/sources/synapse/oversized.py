"""Records above the topic's `max.message.bytes`. Such a record is not sent, and no later one of its stream: the stream
waits for it, and no other stream does. A record is judged by its size before compression.
"""

from collections.abc import Callable, Iterator, Sequence

import structlog
from prometheus_client import Gauge

from tidemark.common.errors import Unavailable
from tidemark.sources.producer import RecordProducer
from tidemark.sources.synapse.state import Unsent
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Rdata

log = structlog.get_logger(__name__)

SHORTEST, LONGEST = 5.0, 60.0
"""Seconds between two queries for the topic's limit, at first and in the end."""


class OversizedRecords:
    """Of one connection to the bridge's database. `gauge` is 1 for each stream that waits."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._bytes: dict[str, int] = {}
        self._pause = SHORTEST
        self._due = 0.0

    def __contains__(self, stream: str) -> bool:
        return stream in self._bytes

    def forget(self) -> None:
        """All that was not acknowledged is judged again."""
        for stream in self._bytes:
            self._gauge.labels(stream).set(0)
        self._bytes = {}

    def fitting(self, unsent: Sequence[Unsent], producer: RecordProducer, now: float) -> Iterator[Unsent]:
        """What may be sent. The first record of a stream that the topic does not take is logged."""
        for place, each in enumerate(unsent):
            if each.stream in self._bytes:
                continue
            size, limit = len(each.value), producer.max_value_bytes(each.stream)
            if size <= limit:
                yield each
                continue
            if not self._bytes:
                self._pause, self._due = SHORTEST, now + SHORTEST
            self._bytes[each.stream] = size
            self._gauge.labels(each.stream).set(1)
            needed = size + producer.max_bytes - limit
            writer, id = _fact(unsent[place:], each.stream)
            log.error(
                "A record of Synapse is too large for the Kafka topic; its stream waits, the others go on",
                stream=each.stream, writer=writer, id=id, bytes=needed, limit=producer.max_bytes,
                do=f"raise max.message.bytes of the topic to at least {needed}",
            )  # fmt: skip

    def larger(self, make: Callable[[], RecordProducer], now: float) -> RecordProducer | None:
        """A producer that takes one of them, once the topic does; asks less and less often."""
        if not self._bytes or now < self._due:
            return None
        self._due, self._pause = now + self._pause, min(2 * self._pause, LONGEST)
        try:
            producer = make()
        except Unavailable:
            return None
        fits = any(size <= producer.max_value_bytes(stream) for stream, size in self._bytes.items())
        return producer if fits else None


def _fact(unsent: Sequence[Unsent], stream: str) -> tuple[str, int | None]:
    """Writer and ID of the first record of the stream: of several rows of a fact, the last record has the ID."""
    found = (records.decode(each.value) for each in unsent if each.stream == stream)
    for record in found:
        if not isinstance(record, Rdata):
            break
        if isinstance(record.id, int):
            return record.writer, record.id
    return "", None
