"""Reads offset ranges of Kafka's partitions, and queries the end offsets of partitions.

Spark decides which ranges are read, so no consumer group is used, and no offset is committed to Kafka. Each record of a
range is read once and in order, except records of aborted transactions. If Kafka has deleted records of a range, the
reader raises an error. Do not use a reader after an error.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from tidemark.common.errors import Unavailable
from tidemark.common.kafka import ErrorListener, is_group_refusal
from tidemark.streaming.ingest.consumer import open_consumer
from tidemark.streaming.ingest.record_batch import PlannedRange, RecordBatch
from tidemark.streaming.wire.records import Topic

CONSUMER_SETTINGS: Final = {
    "group.id": "tidemark-pipeline",  # librdkafka requires it; offsets are never committed
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    # Records that were deleted before they were read must stop the query (docs/design.md 3).
    "auto.offset.reset": "error",
    # An aborted record is no evidence (docs/design.md, rule 1).
    "isolation.level": "read_committed",
    # Without these events, the end of a range that ends with transaction markers cannot be detected.
    "enable.partition.eof": "true",
    # A broker answers requests in order. A fetch request that waits for new records would delay the next range.
    "fetch.wait.max.ms": "1",
    # By default a full queue is filled again after a second. This delay costs 3 µs for each record.
    "fetch.queue.backoff.ms": "1",
    # Limit prefetching: records beyond the range are fetched again with the next range.
    "queued.max.messages.kbytes": str(8 << 10),
}

PATIENCE_SECONDS = 60.0  # time limit without a record, or without an answer of the brokers
_POLL_SECONDS = 0.01  # time limit of one call of the consumer
_MAX_MESSAGES = 4_000  # per call of the consumer; with 50,000, each message takes 50 % more CPU
_FIRST_MESSAGES = 50  # per call, while the size of messages is unknown
_POLL_BYTES = 2 << 20  # per call, approximately

_ANSWER_SECONDS = 1.0  # time limit of one request
_REOPEN_SECONDS = 5.0  # without an answer: then a new client is opened, because the old one may not know new brokers

TopicOffsets = dict[str, dict[int, int]]
"""An offset for each partition, by topic."""

_Positions = dict[PlannedRange, int]
"""The next offset of each unfinished range."""


class RangeReader:
    """Reads offset ranges with one consumer. For one thread.

    Args:
        client: librdkafka's settings of the connection.
        names: the names of the topics.
        patience: after this many seconds without a record, `read` raises `Unavailable`.

    Raises:
        Unavailable, Refused: librdkafka refuses the settings.
    """

    def __init__(
        self, client: Mapping[str, str], names: Mapping[Topic, str], patience: float = PATIENCE_SECONDS
    ) -> None:
        self._names = names
        self._patience = patience
        self._max_messages = _FIRST_MESSAGES
        self._errors = ErrorListener(client["bootstrap.servers"])
        with self._errors.translate_errors():
            self._consumer = open_consumer({**client, **CONSUMER_SETTINGS}, self._errors)

    def read(self, ranges: Sequence[PlannedRange]) -> Iterator[tuple[PlannedRange, RecordBatch]]:
        """Read ranges together. If you leave the iterator before its end, call `stop_fetching` or `read` next.

        Args:
            ranges: at most one range of each partition.

        Yields:
            A range and its next records. The records of a range come in order; ranges alternate in any order.

        Raises:
            Unavailable: no record came for `patience` seconds, or the brokers returned an error.
            Refused: a person must resolve the problem.
        """
        positions = {planned: planned.start for planned in ranges if planned.start < planned.end}
        self._errors.forget()
        self._start_fetching(positions)
        deadline = time.monotonic() + self._patience
        while positions:
            with self._errors.translate_errors():
                batches, fetched_beyond = self._poll(positions)
            yield from batches
            positions = {planned: offset for planned, offset in positions.items() if offset < planned.end}
            if batches:
                deadline = time.monotonic() + self._patience
            elif fetched_beyond and positions:
                self._start_fetching(positions)  # stop fetching beyond finished ranges
            self._errors.raise_refusal()
            if positions and time.monotonic() > deadline:
                planned, offset = next(iter(positions.items()))
                name = f"{self._names[planned.topic]}[{planned.partition}]"
                last_offset, count = planned.end - 1, len(positions)
                problem = f"no record of {name} from offset {offset} to {last_offset} (unfinished ranges: {count})"
                raise self._errors.explain(KafkaError(KafkaError._TIMED_OUT, problem))

    def stop_fetching(self) -> None:
        """Stop fetching, because a pending fetch would delay the next `read`."""
        with self._errors.translate_errors():
            self._consumer.unassign()

    def close(self) -> None:
        self._consumer.close()

    def _start_fetching(self, positions: _Positions) -> None:
        with self._errors.translate_errors():
            self._consumer.assign(
                (self._names[planned.topic], planned.partition, offset) for planned, offset in positions.items()
            )

    def _poll(self, positions: _Positions) -> tuple[list[tuple[PlannedRange, RecordBatch]], bool]:
        """Poll Kafka once, for up to `_POLL_SECONDS`, and advance `positions`.

        Returns:
            The next records of the ranges, and whether records outside the ranges arrived.
        """
        batches: list[tuple[PlannedRange, RecordBatch]] = []
        remaining = sum(planned.end - offset for planned, offset in positions.items())
        with self._consumer.consume(min(self._max_messages, remaining), _POLL_SECONDS) as messages:
            offsets, codes = messages.offsets, messages.codes
            failed = np.flatnonzero(codes).tolist()
            ends = [number for number in failed if _is_end(messages.error(number))]
            masks = messages.masks_by_partition()
            for planned, offset in positions.items():
                mask = masks.get((self._names[planned.topic], planned.partition))
                if mask is None:
                    continue
                records = mask & (codes == 0) & (offset <= offsets)
                # Records arrive in order. After a record beyond the end of the range, no record of the range follows.
                passed = offsets[records][-1:] + 1
                partition_ends = [int(offsets[number]) for number in ends if mask[number]]
                positions[planned] = max([offset, *passed.tolist(), *partition_ends])
                inside = records & (offsets < planned.end)
                if inside.any():
                    batches.append((planned, messages.record_batch(inside)))
            count = sum(batch.size for _, batch in batches)
            fetched_beyond = len(codes) - len(failed) > count
        if batches:
            size = sum(len(batch.values) for _, batch in batches)
            self._max_messages = max(1, min(_MAX_MESSAGES, _POLL_BYTES * count // (size + 1)))
        return batches, fetched_beyond


def _is_end(error: KafkaError) -> bool:
    """Whether the error marks the end of a partition. False if the broker refused the consumer group, which is not
    used.

    Raises:
        KafkaException: any other error.
    """
    if is_group_refusal(error):
        return False
    if error.code() != KafkaError._PARTITION_EOF:
        raise KafkaException(error)
    return True


class EndOffsets:
    """Fetches the read_committed end offsets (last stable offsets) of partitions. For one thread.

    A new leader of a partition may lag for a moment. If an end offset is below an offset that was already read, `fetch`
    repeats the query, for up to a sixth of `patience`.

    Args:
        client: librdkafka's settings of the connection.
        patience: after this many seconds without an answer of the brokers, `fetch` raises `Unavailable`.
    """

    def __init__(self, client: Mapping[str, str], patience: float = PATIENCE_SECONDS) -> None:
        self._client = client
        self._patience = patience
        self._errors = ErrorListener(client["bootstrap.servers"])
        self._consumer: Consumer | None = None

    def fetch(self, known_offsets: TopicOffsets) -> TopicOffsets:
        """Fetch the end offsets of all partitions in `known_offsets`.

        Args:
            known_offsets: the next offset to read of each partition.

        Raises:
            Unavailable: the brokers did not answer for `patience` seconds, or the end of a partition stays below its
                offset in `known_offsets`.
            Refused: a person must resolve the problem.
        """
        started = last_opened = time.monotonic()
        while True:
            patience = self._patience
            try:
                ends = self._query(known_offsets)
                regressed = [
                    (topic, number) for topic, number, end in _flatten(ends) if end < known_offsets[topic][number]
                ]
                if not regressed:
                    return ends
                topic, number = regressed[0]
                end, next_offset = ends[topic][number], known_offsets[topic][number]
                problem = f"{topic}[{number}] ends at offset {end}, but the next to read is {next_offset}"
                failure, patience = Unavailable("Kafka", self._errors.where, problem), self._patience / 6
            except Unavailable as error:
                failure = error
                if time.monotonic() - last_opened > _REOPEN_SECONDS:
                    self.close()
                    last_opened = time.monotonic()
            if time.monotonic() - started > patience:
                raise failure
            time.sleep(0.1)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _query(self, known_offsets: TopicOffsets) -> TopicOffsets:
        self._errors.forget()
        with self._errors.translate_errors():
            if self._consumer is None:
                self._consumer = Consumer({**self._client, **CONSUMER_SETTINGS, "error_cb": self._errors})
            latest = [TopicPartition(topic, number, OFFSET_END) for topic, number, _ in _flatten(known_offsets)]
            try:
                answers = self._consumer.offsets_for_times(latest, _ANSWER_SECONDS)
            except KafkaException:
                self._consumer.poll(0.1)  # calls the error listener with the cause
                self._errors.raise_refusal()
                raise
            ends: TopicOffsets = {topic: {} for topic in known_offsets}
            for answer in answers:
                if answer.error is not None:
                    raise KafkaException(answer.error)
                ends[answer.topic][answer.partition] = answer.offset
        return ends


def _flatten(offsets: TopicOffsets) -> Iterator[tuple[str, int, int]]:
    return ((topic, number, offset) for topic, partitions in offsets.items() for number, offset in partitions.items())
