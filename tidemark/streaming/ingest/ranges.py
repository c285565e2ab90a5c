"""Offset ranges of Kafka's partitions, read by Spark's Python workers; and where partitions end, for who plans them.

Spark names a range and nobody else: no group, no commits. A range is exact: what lies in it and was committed comes
once and in order, and what is not to be had any more raises. After an error a reader is not to be used again.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from tidemark.common.errors import Unavailable
from tidemark.common.kafka_errors import ErrorListener, concerns_group
from tidemark.streaming.ingest.consumer import open_consumer
from tidemark.streaming.ingest.record_batch import PlannedRange, RecordBatch
from tidemark.streaming.wire.records import Topic

READING: Final = {
    "group.id": "tidemark-pipeline",  # wanted by librdkafka; nothing is ever committed to it
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    # Records that went before they were read must stop the query and not be passed over (docs/design.md 3).
    "auto.offset.reset": "error",
    # What a writer's transaction aborted never happened, and is no evidence (docs/design.md, rule 1).
    "isolation.level": "read_committed",
    # Nothing else tells that no record comes any more where a range ends with the marks of transactions.
    "enable.partition.eof": "true",
    # A broker answers in turn: a fetch of what is not there yet would hold up the next range.
    "fetch.wait.max.ms": "1",
    # A full queue is filled again after a second by default, which costs 3 µs a record.
    "fetch.queue.backoff.ms": "1",
    # What was fetched beyond the range is fetched again with the next one.
    "queued.max.messages.kbytes": str(8 << 10),
}

PATIENCE = 60.0  # seconds for the next record
_WAIT = 0.01  # seconds: a call waits as long for what may be no record
_AT_ONCE = 4_000  # messages a call, which has a price of its own; with 50 000 that of each is half as much again
_AT_FIRST = 50  # messages, while nobody knows how large they are
_BYTES = 2 << 20  # a call, about

_ANSWER = 1.0  # seconds for one of the brokers' answers
_STALE = 5.0  # seconds without any: a client that has seen its brokers go knows little of those that came

TopicOffsets = dict[str, dict[int, int]]
"""An offset of each partition, by topic."""

_Positions = dict[PlannedRange, int]
"""The offset from which on a range may have more records."""


class RangeReader:
    """A consumer for ranges, one or some at a time. `names` are those of the topics. For one thread.

    `patience`: seconds without a record after which ranges that are not at their end raise `Unavailable`.
    """

    def __init__(self, client: Mapping[str, str], names: Mapping[Topic, str], patience: float = PATIENCE) -> None:
        self._names = names
        self._patience = patience
        self._max_messages = _AT_FIRST
        self._errors = ErrorListener(client["bootstrap.servers"])
        with self._errors.explaining():
            self._consumer = open_consumer({**client, **READING}, self._errors)

    def read(self, ranges: Sequence[PlannedRange]) -> Iterator[tuple[PlannedRange, RecordBatch]]:
        """The records of ranges of as many partitions, fetched together: those of each in order, but nothing is said of
        the order of ranges. Whoever leaves off before their end parks, or reads others.
        """
        positions = {planned: planned.start for planned in ranges if planned.start < planned.end}
        self._errors.forget()
        self._fetch(positions)
        deadline = time.monotonic() + self._patience
        while positions:
            with self._errors.explaining():
                batches, fetched_beyond = self._next(positions)
            yield from batches
            positions = {planned: offset for planned, offset in positions.items() if offset < planned.end}
            if batches:
                deadline = time.monotonic() + self._patience
            elif fetched_beyond and positions:
                self._fetch(positions)  # and no more of what lies behind the others
            self._errors.raise_refusal()
            if positions and time.monotonic() > deadline:
                planned, offset = next(iter(positions.items()))
                others = f", nor of {len(positions) - 1} other ranges" if len(positions) > 1 else ""
                name = f"{self._names[planned.topic]}[{planned.partition}]"
                problem = f"no record of {name} from {offset} to {planned.end}{others}"
                raise self._errors.explain(KafkaError(KafkaError._TIMED_OUT, problem))

    def park(self) -> None:
        """Fetch nothing until the next range: an answer that is under way would hold that up."""
        with self._errors.explaining():
            self._consumer.unassign()

    def close(self) -> None:
        self._consumer.close()

    def _fetch(self, positions: _Positions) -> None:
        with self._errors.explaining():
            self._consumer.assign(
                (self._names[planned.topic], planned.partition, offset) for planned, offset in positions.items()
            )

    def _next(self, positions: _Positions) -> tuple[list[tuple[PlannedRange, RecordBatch]], bool]:
        """The next records of these ranges, if any came, and whether others did; moves what they are `at`."""
        batches: list[tuple[PlannedRange, RecordBatch]] = []
        remaining = sum(planned.end - offset for planned, offset in positions.items())
        with self._consumer.consume(min(self._max_messages, remaining), _WAIT) as messages:
            offsets, codes = messages.offsets, messages.codes
            failed = np.flatnonzero(codes).tolist()
            ends = [number for number in failed if _is_end(messages.error(number))]
            masks = messages.by_partition()
            for planned, offset in positions.items():
                mask = masks.get((self._names[planned.topic], planned.partition))
                if mask is None:
                    continue
                records = mask & (codes == 0) & (offset <= offsets)
                # Records come in order: one from behind the range's end says that holes are all that is left of it.
                passed = offsets[records][-1:] + 1
                partition_ends = [int(offsets[number]) for number in ends if mask[number]]
                positions[planned] = max([offset, *passed.tolist(), *partition_ends])
                inside = records & (offsets < planned.end)
                if inside.any():
                    batches.append((planned, messages.fetched(inside)))
            count = sum(batch.size for _, batch in batches)
            fetched_beyond = len(codes) - len(failed) > count
        if batches:
            size = sum(len(batch.values) for _, batch in batches)
            self._max_messages = max(1, min(_AT_ONCE, _BYTES * count // (size + 1)))
        return batches, fetched_beyond


def _is_end(error: KafkaError) -> bool:
    """Whether nothing is there yet behind what was read. Raises what else is no record."""
    if concerns_group(error):
        return False
    if error.code() != KafkaError._PARTITION_EOF:
        raise KafkaException(error)
    return True


class EndOffsets:
    """Asks where partitions end: behind what is committed there. For one thread.

    `patience`: seconds that brokers may be away. An answer below what was read already is asked for again a sixth as
    long, because a partition's new leader may not know for a moment how far it is committed.
    """

    def __init__(self, client: Mapping[str, str], patience: float = PATIENCE) -> None:
        self._client = client
        self._patience = patience
        self._errors = ErrorListener(client["bootstrap.servers"])
        self._consumer: Consumer | None = None

    def beyond(self, known: TopicOffsets) -> TopicOffsets:
        """The ends of all partitions in `known`. Raises `Unavailable` and `Refused`."""
        began = fresh = time.monotonic()
        while True:
            patience = self._patience
            try:
                ends = self._ask(known)
                back = [(topic, number) for topic, number, end in _each(ends) if end < known[topic][number]]
                if not back:
                    return ends
                topic, number = back[0]
                problem = f"{topic}[{number}] ends at {ends[topic][number]}, and {known[topic][number]} was read"
                failure, patience = Unavailable("Kafka", self._errors.where, problem), self._patience / 6
            except Unavailable as error:
                failure = error
                if time.monotonic() - fresh > _STALE:
                    self.close()
                    fresh = time.monotonic()
            if time.monotonic() - began > patience:
                raise failure
            time.sleep(0.1)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _ask(self, known: TopicOffsets) -> TopicOffsets:
        self._errors.forget()
        with self._errors.explaining():
            if self._consumer is None:
                self._consumer = Consumer({**self._client, **READING, "error_cb": self._errors})
            latest = [TopicPartition(topic, number, OFFSET_END) for topic, number, _ in _each(known)]
            try:
                answers = self._consumer.offsets_for_times(latest, _ANSWER)
            except KafkaException:
                self._consumer.poll(0.1)  # why, is told to the listener, and not while the request waits
                self._errors.raise_refusal()
                raise
            ends: TopicOffsets = {topic: {} for topic in known}
            for answer in answers:
                if answer.error is not None:
                    raise KafkaException(answer.error)
                ends[answer.topic][answer.partition] = answer.offset
        return ends


def _each(offsets: TopicOffsets) -> Iterator[tuple[str, int, int]]:
    return ((topic, number, offset) for topic, partitions in offsets.items() for number, offset in partitions.items())
