"""Facts with a record above the topic's `max.message.bytes`. They are not sent, so their stream waits for them, and no
other stream does.

A record is judged by its size before compression. No record of such a fact is sent: Kafka would take the smaller ones,
and the last of them, which has the ID, would make the fact look complete.
"""

from collections.abc import Callable
from dataclasses import replace

import structlog
from msgspec import Raw
from prometheus_client import Gauge

from tidemark.common.errors import Unavailable
from tidemark.sources.producer import RecordProducer
from tidemark.sources.relay.decider import Decided
from tidemark.sources.relay.queries import AppendedFact
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Rdata

log = structlog.get_logger(__name__)

SHORTEST, LONGEST = 5.0, 60.0
"""Seconds between two queries for the topic's limit, at first and in the end."""


class OversizedFacts:
    """Of one connection to the database. `gauge` shows their number by stream."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._bytes: dict[tuple[str, int], int] = {}
        self._pause = SHORTEST
        self._due = 0.0

    def forget(self) -> None:
        """Begin anew: all facts above the floors are judged again."""
        for stream, _ in self._bytes:
            self._gauge.labels(stream).set(0)
        self._bytes = {}

    def without(self, decided: Decided, producer: RecordProducer, now: float) -> Decided:
        """What of it the topic takes. The rest is logged once, and kept with its size."""
        stream, signed = decided.told.stream.name, decided.told.stream.towards.signed
        limit, fitting = producer.max_value_bytes(stream), list[AppendedFact]()
        for fact in decided.facts:
            # `bytes` covers the rows and what surrounds them, so a longer computation is rarely needed.
            if fact.bytes + _NAMES <= limit or (size := _largest(decided, fact)) <= limit:
                fitting.append(fact)
                continue
            if not self._bytes:
                self._pause, self._due = SHORTEST, now + SHORTEST
            self._bytes[stream, signed(fact.id)] = size
            needed = size + producer.max_bytes - limit
            log.error(
                "A fact is too large for the Kafka topic; its stream waits",
                stream=stream,
                id=signed(fact.id),
                bytes=needed,
                limit=producer.max_bytes,
                do=f"raise max.message.bytes of the topic to at least {needed}",
            )
            self._gauge.labels(stream).set(sum(1 for name, _ in self._bytes if name == stream))
        return decided if len(fitting) == len(decided.facts) else replace(decided, facts=fitting)

    def larger(self, make: Callable[[], RecordProducer], now: float) -> RecordProducer | None:
        """A producer that takes one of them, once the topic does; asks less and less often."""
        if not self._bytes or now < self._due:
            return None
        self._due, self._pause = now + self._pause, min(2 * self._pause, LONGEST)
        try:
            producer = make()
        except Unavailable:
            return None
        fits = any(size <= producer.max_value_bytes(stream) for (stream, _), size in self._bytes.items())
        return producer if fits else None


_NAMES = 2 * 4 * 255
"""Bytes of the names of stream and writer, at most."""


def _largest(decided: Decided, fact: AppendedFact) -> int:
    """Bytes of the largest record of the fact."""
    signed, writer = decided.told.stream.towards.signed, decided.told.name_of(fact.writer)
    around = Rdata(
        stream=decided.told.stream.name,
        writer=writer,
        epoch=decided.told.writers[writer].epoch,
        prev=signed(fact.id - 1),
        id=signed(fact.id),
        row=Raw(b""),
    )
    return len(records.encode(around)) + max(map(len, fact.rows), default=0)
