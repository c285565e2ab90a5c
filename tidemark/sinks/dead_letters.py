"""Reads records from Kafka again by offset, and produces copies of them: dead letters and requeued records.

*Dead letters* are copies of rejected records in a topic of their own. Each dead letter is sent at least once: a
repeated batch sends its dead letters again. The headers of a dead letter identify the rejected record.

*Requeued* records are copies of deferred records at the end of the same partition. The pipeline reads these copies like
any other record. Each record is requeued at least once: after a crash, some records are produced again as duplicates. A
separate thread requeues, because it may have to read hours of records to find a few, while batches continue.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from tidemark.common.errors import BadRecord, LeaseLost, TidemarkError, TopicMissing, Unavailable
from tidemark.common.kafka import ErrorListener, PartitionReader, explain_missing_record
from tidemark.common.log import get_logger
from tidemark.sinks.background import LeasedThread
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.positions import PendingRequeue
from tidemark.sinks.postgres.store import Postgres
from tidemark.streaming.values.limits import Reason, RejectedRecords, replace_unprintable
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import FactRun, Topic, read

Headers = Sequence[tuple[str, Any]]
ANY_PARTITION = -1  # lets the producer choose the partition


class OutgoingRecord(NamedTuple):
    """A record to produce. `headers`: the headers of the copied record, to which `tidemark_headers` are appended."""

    tidemark_headers: Headers = ()
    key: Any = None
    value: Any = b""
    headers: Headers = ()
    partition: int = ANY_PARTITION


class UnacknowledgedRecords:
    """Produces records and waits for their acknowledgements.

    `gone_count`: the number of records that were replaced or dropped.

    Args:
        producer: produces the records.
        topic: the topic of the records.
        replacement_of: returns the replacement of a record that is too large for the topic; None to drop the record.
    """

    def __init__(
        self, producer: Producer, topic: str, replacement_of: Callable[[OutgoingRecord], OutgoingRecord | None]
    ) -> None:
        self.gone_count = 0
        self._producer = producer
        self._topic = topic
        self._replacement_of = replacement_of
        self._too_large: list[OutgoingRecord] = []  # replaced in `flush`, because a callback may not produce
        self._error: KafkaError | None = None

    def put(self, record: OutgoingRecord) -> None:
        """Produce a record. Waits while the producer's queue is full. `flush` returns the error of a failed record."""

        def note_delivery(error: KafkaError | None, _: Message) -> None:
            is_empty = not (record.key or record.value or record.headers)
            if error is not None and error.code() == KafkaError.MSG_SIZE_TOO_LARGE and not is_empty:
                self._too_large.append(record)
            elif error is not None:
                self._error = error

        headers = [*record.headers, *record.tidemark_headers]
        while True:
            try:
                self._producer.produce(
                    self._topic,
                    key=record.key,
                    value=record.value,
                    headers=headers,
                    partition=record.partition,
                    on_delivery=note_delivery,
                )
            except BufferError:
                self._producer.poll(0.1)
            else:
                self._producer.poll(0)
                return

    def put_replacement(self, record: OutgoingRecord | None) -> None:
        """Count one record as gone, and produce `record` in its place. None: there is no replacement."""
        self.gone_count += 1
        if record is not None:
            self.put(record)

    def flush(self) -> KafkaError | None:
        """Replace records that are too large, and wait until all records are acknowledged or one has failed.

        A record fails at the latest after `message.timeout.ms`. Returns the error of a record; None if none failed.
        """
        self._wait_for_acknowledgements()
        too_large, self._too_large = self._too_large, []
        for record in too_large:
            # The brokers refuse a whole batch because of one record, so each record gets a batch of its own.
            self.put(record)
            self._wait_for_acknowledgements()
            if self._too_large:
                self._too_large.clear()
                self.put_replacement(self._replacement_of(record))
        self._wait_for_acknowledgements()
        return self._error

    def _wait_for_acknowledgements(self) -> None:
        while self._error is None and self._producer.flush(1.0):
            pass


class KafkaConnections:
    """A Kafka reader and a producer, each created at its first use. `errors` collects the errors of both.

    Args:
        client: librdkafka settings of the reader.
        producer: librdkafka settings of the producer.
        timeout_seconds: the time until a read without progress, or an unacknowledged record, is an error.
        isolation: the isolation level of the reader: `read_committed` or `read_uncommitted`.
    """

    def __init__(
        self, client: Mapping[str, str], producer: Mapping[str, str], timeout_seconds: float, isolation: str
    ) -> None:
        self.errors = ErrorListener(client["bootstrap.servers"])
        self._client_settings = client
        self._producer_settings = producer
        self._timeout_seconds = timeout_seconds
        self._isolation = isolation
        self._reader: PartitionReader | None = None
        self._producer: Producer | None = None

    def reader(self) -> PartitionReader:
        """Return the reader; create it at the first call."""
        if self._reader is None:
            self._reader = PartitionReader(self._client_settings, self.errors, self._timeout_seconds, self._isolation)
        return self._reader

    def producer(self) -> Producer:
        """Return the producer; create it at the first call."""
        if self._producer is None:
            self._producer = Producer(
                {
                    **self._producer_settings,
                    "message.timeout.ms": str(int(self._timeout_seconds * 1000)),
                    # Shorter than the timeout: a missing topic is then distinguished from unavailable brokers.
                    "topic.metadata.propagation.max.ms": str(int(self._timeout_seconds * 500)),
                    "message.max.bytes": "100000000",  # only the brokers limit the size
                    "error_cb": self.errors,
                }
            )
        return self._producer

    def close(self) -> None:
        """Close the reader and the producer, and drop unsent records. The next use connects again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._producer is not None:
            self._producer.purge()
            self._producer = None


log = get_logger(__name__)

SEEK_DISTANCE = 2_000  # offsets to the next wanted record: up to this distance, reading on is faster than a seek
MAX_DETAIL_LENGTH = 500  # characters: a detail may quote the record


@dataclass(frozen=True, slots=True)
class DeadLettersConfig:
    """The topic of dead letters, and how to connect to Kafka.

    `client` (of the reader) and `producer` are librdkafka settings and may contain a password. `timeout_seconds`: the
    time until a read without progress, or an unacknowledged record, is an error.
    """

    topic: str
    client: Mapping[str, str] = field(repr=False)
    producer: Mapping[str, str] = field(repr=False)
    timeout_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class DeadLetterResult:
    """`sent_count`: number of dead letters. `stripped_count`: number of those without the record's content."""

    sent_count: int = 0
    stripped_count: int = 0


class DeadLetters:
    """Copies rejected records to the topic of dead letters. A context manager for one thread at a time.

    Connects when the first record is rejected.
    """

    def __init__(self, config: DeadLettersConfig) -> None:
        self._config = config
        # The query has already read these records, so they need no isolation.
        self._kafka = KafkaConnections(config.client, config.producer, config.timeout_seconds, "read_uncommitted")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and drop unsent records. The next `send` connects again."""
        self._kafka.close()

    def send(self, rejected_records: Sequence[RejectedRecords]) -> DeadLetterResult:
        """Produce a dead letter for every rejected record, and wait for the acknowledgements.

        A dead letter has the key, value and headers of its record, and the headers `reason`, `topic`, `partition`,
        `offset`, and `detail` if more is known. The dead letter of a record that Kafka no longer has, or that is too
        large for the topic, has only these headers and the header `gone` with the reason.

        Raises:
            Unavailable: call again; all records are then sent again.
            Refused: the brokers refuse the client.
            TopicMissing: the topic of dead letters does not exist.
        """
        if not rejected_records:
            return DeadLetterResult()
        try:
            return self._send(rejected_records)
        except KafkaException as error:
            self.close()
            raise self._convert_error(error.args[0]) from error
        except TidemarkError:
            self.close()
            raise

    def _send(self, rejected_records: Sequence[RejectedRecords]) -> DeadLetterResult:
        self._kafka.errors.forget()
        by_partition: dict[tuple[str, int], dict[int, tuple[str, int]]] = {}
        for item in rejected_records:
            offsets = np.frombuffer(item.offsets, "<i8")
            ids = np.frombuffer(item.ids, "<i8") if item.ids else np.zeros_like(offsets)
            reasons = ((item.reason, id) for id in ids.tolist())
            offsets_of = by_partition.setdefault((item.topic, item.partition), {})
            offsets_of.update(zip(offsets.tolist(), reasons, strict=True))
        unacknowledged = UnacknowledgedRecords(
            self._kafka.producer(), self._config.topic, replacement_of=_replacement_of_too_large
        )
        sent = 0
        for (topic, partition), wanted in by_partition.items():
            before = unacknowledged.gone_count
            for offset, record in self._records(topic, partition, sorted(wanted)):
                reason, id = wanted[offset]
                origin = _tidemark_headers(reason, topic, partition, offset)
                if isinstance(record, str):
                    unacknowledged.put_replacement(_strip_record(OutgoingRecord(origin), record))
                else:
                    if detail := _detail(record.value(), record.key(), reason, id):
                        origin = [*origin, ("detail", detail[:MAX_DETAIL_LENGTH].encode(errors="replace"))]
                    unacknowledged.put(OutgoingRecord(origin, record.key(), record.value(), record.headers() or ()))
                sent += 1
            if gone := unacknowledged.gone_count - before:
                log.warning(
                    "Rejected records are no longer in Kafka, so their dead letters have no copy of the record",
                    topic=topic,
                    partition=partition,
                    records=gone,
                )
        if (error := unacknowledged.flush()) is not None:
            raise KafkaException(error)
        return DeadLetterResult(sent, unacknowledged.gone_count)

    def _records(self, topic: str, partition: int, offsets: Sequence[int]) -> Iterator[tuple[int, Message | str]]:
        """Yield each offset, and its record or why Kafka has no such record. `offsets` is ascending."""
        reader = self._kafka.reader()
        pending = list(reversed(offsets))
        while pending:
            first, end = reader.offsets(topic, partition, known_offset=pending[0])
            while pending and not first <= pending[-1] < end:
                yield (offset := pending.pop()), explain_missing_record(offset, first, end)
            if not pending:
                break
            with closing(reader.read(topic, partition, pending[-1])) as records:
                for record in records:
                    at = None if record is None else record.offset()
                    while pending and (at is None or pending[-1] < at):
                        yield (offset := pending.pop()), explain_missing_record(offset, first, end)
                    if pending and record is not None and pending[-1] == at:
                        yield pending.pop(), record
                    if not pending or (at is not None and pending[-1] - at > SEEK_DISTANCE):
                        break

    def _convert_error(self, error: KafkaError) -> TidemarkError:
        if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
            return TopicMissing(self._config.topic)
        return self._kafka.errors.explain(error)


def _detail(value: bytes | None, key: bytes | None, reason: str, id: int) -> str:
    """Return the text of the header `detail`: what is wrong with the record; empty if this is unknown.

    `id` is the ID nearest to 0 that contradicts its stream; 0 if the record itself is invalid.
    """
    if reason == Reason.NOT_STORABLE:
        return "Postgres refused the effects of this record: the pipeline's log has the error"
    for topic in Topic:
        try:
            record = read(value, key, topic)
        except BadRecord as bad:
            if bad.reason == reason:
                return bad.detail
            continue
        if id:
            at = f"ids[{record.ids.index(id)}]" if isinstance(record, FactRun) and id in record.ids else "id"
            return f"{at} {id} contradicts what was settled before"
    return ""


def _strip_record(record: OutgoingRecord, why: str) -> OutgoingRecord:
    """Create a record with only Tidemark's headers, and the header `gone` with the value `why`."""
    return OutgoingRecord((*record.tidemark_headers, ("gone", why.encode())))


def _replacement_of_too_large(record: OutgoingRecord) -> OutgoingRecord:
    return _strip_record(record, "too large for this topic")


def _tidemark_headers(reason: str, topic: str, partition: int, offset: int) -> Headers:
    values = (("reason", reason), ("topic", topic), ("partition", partition), ("offset", offset))
    return [(name, str(value).encode()) for name, value in values]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter: a copy of a rejected record, with the reason.

    Attributes:
        partition: the partition of the dead letter, in the topic of dead letters.
        offset: the offset of the dead letter.
        time: the time of the dead letter, in milliseconds since 1970.
        reason: why the record was rejected, as in `Reason`.
        origin: (topic, partition, offset) of the rejected record. A number is -1 if it is unknown.
        detail: what is wrong with the record, as text for a person; empty if unknown.
        why_stripped: why key, value and headers are missing; empty if the dead letter has the whole record.
        key: the key of the rejected record; None if there is none.
        value: the value of the rejected record; None if there is none.
        headers: pairs (name, value): the headers of the rejected record.
    """

    partition: int
    offset: int
    time: int
    reason: str
    origin: tuple[str, int, int]
    detail: str
    why_stripped: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]

    @property
    def stream(self) -> str:
        """The key of the rejected record, usually the name of its stream, as printable text."""
        return _printable_text(self.key or b"")

    @property
    def display_offset(self) -> str:
        """The offset as text, after the partition and a slash (`3/17`) unless the partition is 0."""
        return f"{self.partition}/{self.offset}" if self.partition else str(self.offset)


class DeadLetterReader:
    """Reads dead letters. A context manager for one thread. Methods raise `Unavailable` and `Refused`."""

    def __init__(self, config: DeadLettersConfig) -> None:
        self._topic = config.topic
        self._kafka = KafkaConnections(config.client, config.producer, config.timeout_seconds, "read_committed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._kafka.close()

    def newest(self, partitions: Collection[int], limit: int) -> list[DeadLetter]:
        """Read the dead letters at the last `limit` offsets of each partition, and return them newest first."""
        dead_letters = [letter for partition in partitions for letter in self._last(partition, limit)]
        return sorted(dead_letters, key=lambda letter: (letter.time, letter.partition, letter.offset), reverse=True)

    def read_at(self, partition: int, offset: int) -> DeadLetter | None:
        """Read the dead letter at this offset. Returns None if it does not exist or was deleted."""
        try:
            first, end = self._kafka.reader().offsets(self._topic, partition)
            if not first <= offset < end:
                return None
            with closing(self._kafka.reader().read(self._topic, partition, offset)) as records:
                message = next(records, None)
        except KafkaException as error:
            raise self._kafka.errors.explain(error.args[0]) from error
        return None if message is None or message.offset() != offset else _parse_dead_letter(message)

    def _last(self, partition: int, limit: int) -> Iterator[DeadLetter]:
        try:
            reader = self._kafka.reader()
            first, end = reader.offsets(self._topic, partition)
            if first == end:
                return
            with closing(reader.read(self._topic, partition, max(first, end - limit))) as records:
                for record in records:
                    if record is None or record.offset() >= end:
                        return
                    yield _parse_dead_letter(record)
        except KafkaException as error:
            raise self._kafka.errors.explain(error.args[0]) from error


def _parse_dead_letter(message: Message) -> DeadLetter:
    """Parse a dead letter.

    The rejected record may have headers with the same names as Tidemark's headers. Tidemark's headers come last.
    """
    headers: list[tuple[str, Any]] = list(message.headers() or ())
    ours = {name: _printable_text(value or b"") for name, value in headers}
    at = next((i for i in range(len(headers) - 1, -1, -1) if headers[i][0] == "reason"), len(headers))
    return DeadLetter(
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        time=message.timestamp()[1],
        reason=ours.get("reason", ""),
        origin=(ours.get("topic", ""), _parse_number(ours.get("partition")), _parse_number(ours.get("offset"))),
        detail=_header(headers[at:], "detail"),
        why_stripped=_header(headers[at:], "gone"),
        key=message.key(),
        value=message.value(),
        headers=tuple((name, value or b"") for name, value in headers[:at]),
    )


def _header(headers: list[tuple[str, Any]], name: str) -> str:
    """Return the value of the first header with this name, as printable text; empty if there is none."""
    return next((_printable_text(value or b"") for header, value in headers if header == name), "")


def _printable_text(data: bytes) -> str:
    """Decode to printable text without control characters, because the producer of the record is not trusted."""
    return replace_unprintable(data.decode(errors="replace"))


def _parse_number(text: str | None) -> int:
    """Parse the number in a header; -1 if the header is missing or is not a number."""
    return int(text) if text is not None and text.isdecimal() else -1


RETRY_PAUSE_SECONDS = 5.0  # between a failed step and the next step


@dataclass(frozen=True, slots=True)
class RequeueConfig:
    """Settings of the requeuing thread.

    Attributes:
        topic: the facts topic.
        client: librdkafka settings of the consumer. May contain a password.
        producer: librdkafka settings of the producer. May contain a password.
        timeout_seconds: the time until a read without progress, or an unacknowledged record, is an error.
        max_records: the largest number of records that one step produces.
        max_bytes: the approximate number of bytes after which a step ends.
        max_read: the largest number of records that one step reads.
        poll_seconds: the pause between two steps. The defaults limit requeuing to 10,000 records/s.
    """

    topic: str
    client: Mapping[str, str] = field(repr=False)
    producer: Mapping[str, str] = field(repr=False)
    timeout_seconds: float = 5.0
    max_records: int = 5_000
    max_bytes: int = 4 << 20
    max_read: int = 100_000
    poll_seconds: float = 0.5


class Requeuer(LeasedThread):
    """The thread that requeues deferred records. Problems are logged, stored for `tidemark status`, and retried.

    The position of a writer does not pass its deferred records. `on_produced` is called after each successful step,
    with the number of records that the step has produced.
    """

    def __init__(
        self, config: RequeueConfig, postgres: Postgres, lease: Lease, on_produced: Callable[[int], object]
    ) -> None:
        super().__init__("requeuer", lease)
        self._config = config
        self._postgres = postgres
        self._on_produced = on_produced
        # Records of an aborted transaction must not be requeued: they would be produced outside of a transaction.
        self._kafka = KafkaConnections(config.client, config.producer, config.timeout_seconds, "read_committed")
        self._problem = ""

    def work(self) -> float:
        requeue = None
        try:
            requeue = next(iter(self._postgres.pending_requeues()), None)
            if requeue is not None:
                self._postgres.note_requeue(*self.step(requeue))
            if self._problem:
                log.info("Deferred records can be requeued again")
            self._problem = ""
        except LeaseLost:
            raise
        except TidemarkError as error:
            problem = str(error)
            if problem != self._problem:  # once, not at every retry
                log.warning("Cannot requeue deferred records; trying again", problem=problem)
            self._problem = problem
            if requeue is not None:
                with suppress(Unavailable):
                    self._postgres.note_requeue(requeue, problem)
        return RETRY_PAUSE_SECONDS if self._problem else self._config.poll_seconds

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.close()

    def close(self) -> None:
        """Close the connections to Kafka. The next step connects again."""
        self._kafka.close()

    def step(self, requeue: PendingRequeue) -> tuple[PendingRequeue, str | None]:
        """Produce some records of a requeue, and wait for the acknowledgements. Raises `Unavailable` and `Refused`.

        Returns:
            The rest of the requeue, and the problem that prevents the rest; None if there is no problem.
        """
        try:
            return self._step(requeue)
        except KafkaException as error:
            self._kafka.close()
            raise self._kafka.errors.explain(error.args[0]) from error
        except TidemarkError:
            self._kafka.close()
            raise

    def _step(self, requeue: PendingRequeue) -> tuple[PendingRequeue, str | None]:
        self._kafka.errors.forget()
        topic, problem = self._config.topic, None
        unacknowledged = UnacknowledgedRecords(self._kafka.producer(), topic, replacement_of=lambda _: None)
        oldest, end = self._kafka.reader().offsets(topic, requeue.partition)
        following = min(max(requeue.next, oldest), requeue.last + 1)
        gone = following - requeue.next
        sent = volume = read = 0
        with closing(self._kafka.reader().read(topic, requeue.partition, following)) as records:
            while following <= requeue.last and sent < self._config.max_records and volume < self._config.max_bytes:
                record = next(records, None)
                if record is None or record.offset() >= end:  # records from `end` on were just requeued
                    problem = f"cannot read offset {following}: open transaction, restarted broker, or lost records"
                    break
                key, value = record.key(), record.value()
                if record.offset() <= requeue.last and is_edge(
                    value, key, requeue.stream, requeue.writer, requeue.epoch
                ):
                    unacknowledged.put(OutgoingRecord((), key, value, record.headers() or (), requeue.partition))
                    sent, volume = sent + 1, volume + len(key) + len(value)
                following, read = min(record.offset(), requeue.last) + 1, read + 1
                if read == self._config.max_read:
                    break
        if (error := unacknowledged.flush()) is not None:
            raise KafkaException(error)
        self._on_produced(sent - unacknowledged.gone_count)
        if gone or unacknowledged.gone_count:
            log.warning(
                "Deferred records may be lost; the IDs of lost records stay open until the writer's next JOIN",
                stream=requeue.stream,
                writer=requeue.writer,
                partition=requeue.partition,
                gone=gone,
                too_large=unacknowledged.gone_count,
            )
        return replace(requeue, next=following, gone=requeue.gone + gone + unacknowledged.gone_count), problem


def is_edge(value: bytes | None, key: bytes | None, stream: str, writer: str, epoch: int) -> bool:
    """Whether a record of the facts topic has edges of this stream, writer and epoch. Only such ones are requeued."""
    if key != stream.encode():
        return False
    try:
        record = records.read(value, key, records.Topic.FACTS)
    except BadRecord:
        return False
    if isinstance(record, records.Rdata) and record.id == "batch":
        return False
    kinds = records.Rdata | records.Void | records.Position | records.FactRun
    return isinstance(record, kinds) and (record.writer, record.epoch) == (writer, epoch)
