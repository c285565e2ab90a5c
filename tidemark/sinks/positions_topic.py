"""The sink that publishes positions to a compacted Kafka topic: the key of a record is the stream, its value is JSON.

Kafka only appends, so a position would go back if an older value followed a newer value. Four things prevent this:

- Each value is merged with the last value of its key, so no position in the new value is lower.
- The producer is transactional, so retries neither repeat nor reorder records.
- The transactional ID is the topic's name, so the brokers refuse a former owner of the lease as soon as the next owner
  has connected.
- The header `fence` has the token of the owner. A former owner that connects again first reads the higher token of the
  next owner, and stops.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

import msgspec
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from tidemark.common.errors import LeaseLost, Stop, Unavailable
from tidemark.common.log import get_logger
from tidemark.sinks.dead_letters import KafkaConnections
from tidemark.sinks.port import Batch, CommitResult, Fence, RefillResult
from tidemark.sinks.postgres.store import Postgres
from tidemark.sinks.reader import Token
from tidemark.streaming.values.direction import farther

log = get_logger(__name__)

T = TypeVar("T")

FENCE_HEADER = "fence"
STREAMS_PER_CHUNK = 1000  # streams in one transaction of a refill
FRAME_BYTES = 200  # upper bound of Kafka's overhead for a batch with one record, including its header
FENCED_CODES = KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH
DEFAULT_MAX_BYTES = 1_048_588  # Kafka's default of max.message.bytes


class PositionRecord(msgspec.Struct, frozen=True, gc=False):
    """The value of a record, as JSON. The fields mean the same as in the sidecar's answer for the stream: `linear` is
    the linear position, `vector` is writer -> position, and `token` is the token of these positions.
    """

    stream: str
    linear: int
    vector: dict[str, int]
    token: str


_DECODER = msgspec.json.Decoder(PositionRecord)
_ENCODER = msgspec.json.Encoder()


class IdentifiedTopic(Protocol):
    """A topic. `id` distinguishes it from an earlier topic of the same name. `partitions`: the number of partitions."""

    @property
    def id(self) -> str: ...
    @property
    def partitions(self) -> int: ...


class TopicLookup(Protocol):
    """Queries the brokers about a topic. Methods raise `Unavailable` and `TopicMissing`."""

    def identities(self, names: Iterable[str]) -> Mapping[str, Any]:
        """Query the topics. Returns the name of each topic -> its `IdentifiedTopic`."""

    def max_message_bytes(self, name: str) -> int:
        """Query the topic's limit for one batch of records, in bytes.

        Raises `Refused` if this user may not describe the topic.
        """


@dataclass(frozen=True, slots=True)
class PositionsTopicConfig:
    """The topic of positions, and how to connect to it.

    Attributes:
        topic: the name of the topic.
        client: librdkafka settings of the reader. May contain a password.
        producer: librdkafka settings of the producer. May contain a password.
        timeout_seconds: the time until a Kafka call without an answer is an error.
    """

    topic: str
    client: Mapping[str, str] = field(repr=False)
    producer: Mapping[str, str] = field(repr=False)
    timeout_seconds: float = 10.0


class PositionsTopic:
    """The `Sink` that writes to the topic of positions. A context manager. Any thread may call its methods.

    Connects at the first call.
    """

    name = "kafka"

    def __init__(self, postgres: Postgres, config: PositionsTopicConfig, topics: TopicLookup, fence: Fence) -> None:
        self._postgres = postgres
        self._topic = config.topic
        self._timeout_seconds = config.timeout_seconds
        self._topics = topics
        self._fence = fence
        self._kafka = KafkaConnections(
            config.client,
            {**config.producer, "transactional.id": config.topic},
            config.timeout_seconds,
            "read_committed",
        )
        self._lock = threading.Lock()
        self._compared_positions: dict[str, tuple[int, int]] = {}
        self._reported_fault_by_stream: dict[str, str] = {}
        self._has_unreported_loss = True  # for `check_for_loss`, which returns True at its first call
        self._identity: IdentifiedTopic | None = None
        self._forget_content()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._disconnect()

    @contextmanager
    def _exclusive_call(self) -> Iterator[None]:
        """Run the block in one thread at a time, and convert Kafka's errors.

        After an error in the block, disconnects, so that the next call connects and reads the topic again. After a
        block without an error, `faults` returns the faults that the block has found.
        """
        with self._lock:
            self._kafka.errors.forget()
            try:
                with self._kafka.errors.translate_errors():
                    yield
            except BaseException:
                self._disconnect()
                raise
            self._reported_fault_by_stream = self._fault_by_stream.copy()

    def _forget_content(self) -> None:
        """Forget the content of the topic, which is then read again before the next record is written."""
        self._values: dict[str, bytes] = {}  # the last record of each stream
        self._fault_by_stream: dict[str, str] = {}
        self._next_offsets: dict[int, int] = {}  # partition -> the next offset to read
        self._newest_token = 0  # the highest token in the topic
        self._is_compared_with_postgres = False
        self._max_bytes = DEFAULT_MAX_BYTES
        self._producer: Producer | None = None

    def _disconnect(self) -> None:
        self._kafka.close()
        self._forget_content()

    def check(self) -> None:
        with self._exclusive_call():
            self._identify()

    def publish(self, batch: Batch, committed: CommitResult) -> int:
        with self._exclusive_call():
            return self._retry_if_fenced(lambda producer: self._publish(producer, batch, committed))

    def _publish(self, producer: Producer, batch: Batch, committed: CommitResult) -> int:
        if not self._is_compared_with_postgres:
            # The topic may lack batches that earlier processes committed.
            return self._refill(producer).stream_count
        values: dict[str, bytes] = {}
        others: list[str] = []
        for _, effects in batch.streams():
            stream = effects.stream
            if committed.is_repeat or stream not in self._values:
                others.append(stream)
            elif stream not in self._fault_by_stream:
                rows = {row.writer: row.position for row in effects.writers}
                rows |= {writer: at for (name, writer), at in committed.higher_positions.items() if name == stream}
                values[stream] = self._merge(stream, effects.linear, rows, effects.dropped_writers)
        return self._write(producer, values | self._stored_values(others))

    def faults(self) -> Mapping[str, str]:
        return self._reported_fault_by_stream

    def compared_positions(self) -> Mapping[str, tuple[int, int]]:
        return self._compared_positions

    def check_for_loss(self) -> bool:
        with self._exclusive_call():
            self._identify()
            self._read_new()
            self._has_unreported_loss, lost = False, self._has_unreported_loss
            return lost

    def refill(self) -> RefillResult:
        with self._exclusive_call():
            if self._fault_by_stream:
                self._disconnect()  # the topic is read again, because a fault may be repaired
            return self._retry_if_fenced(self._refill)

    def _retry_if_fenced(self, call: Callable[[Producer], T]) -> T:
        """Run `call` with the connected producer, and return its result.

        If the brokers fence the producer, connect again and run `call` once more: the other process may be a former
        owner. Raises `LeaseLost` if the topic has a higher token.
        """
        try:
            return call(self._take_over())
        except KafkaException as error:
            if error.args[0].code() not in FENCED_CODES:
                raise
        self._disconnect()
        return call(self._take_over())

    def _refill(self, producer: Producer) -> RefillResult:
        """Compare the topic with all streams in Postgres, and write the streams that differ."""
        linear: dict[str, tuple[int, int]] = {}
        streams = self._postgres.streams()
        changed = 0
        for start in range(0, len(streams), STREAMS_PER_CHUNK):
            values = self._stored_values(streams[start : start + STREAMS_PER_CHUNK], linear)
            changed += self._write(producer, values)
        self._compared_positions, self._is_compared_with_postgres = linear, True
        if changed:
            log.info("Refilled the topic of positions from Postgres", topic=self._topic, streams=changed)
        return RefillResult(changed)

    def _stored_values(
        self, streams: Iterable[str], linear: dict[str, tuple[int, int]] | None = None
    ) -> dict[str, bytes]:
        """Return stream -> the value to write, from the positions in Postgres. Streams with a fault are left out.

        If `linear` is not None, adds stream -> (linear position in Postgres, linear position in the topic) to `linear`.
        """
        values = {}
        for stream, row in self._postgres.positions(list(streams)).items():
            if stream in self._fault_by_stream:
                continue
            if linear is not None and stream in self._values:
                linear[stream] = row.linear, _DECODER.decode(self._values[stream]).linear
            values[stream] = self._merge(stream, row.linear, row.positions, row.forgotten_writers)
        return values

    def _merge(self, stream: str, linear: int, positions: Mapping[str, int], dropped_writers: Iterable[str]) -> bytes:
        """Return the next value of a stream. No position in the next value is lower than in the last value.

        Args:
            stream: the name of the stream.
            linear: the new linear position.
            positions: writer -> new position. Other writers keep the position of the last value.
            dropped_writers: writers to leave out.
        """
        vector = dict(positions)
        if (last := self._values.get(stream)) is not None:
            before = _DECODER.decode(last)
            linear = farther(linear, before.linear)
            for writer, position in before.vector.items():
                vector[writer] = farther(vector.get(writer, position), position)
        for writer in dropped_writers:
            vector.pop(writer, None)
        vector = dict(sorted(vector.items()))
        return _ENCODER.encode(PositionRecord(stream, linear, vector, str(Token.of(linear, vector))))

    def _write(self, producer: Producer, values: Mapping[str, bytes]) -> int:
        """Write the values that differ from the last values, in one transaction. Returns the number of these values.

        A value that is too large for the topic becomes a fault of its stream. If the topic does not have this owner's
        token yet and no value differs, one last value is written again, so that former owners read the token.

        Args:
            producer: the connected producer.
            values: stream -> value.
        """
        changed = {}
        for stream, value in values.items():
            key = stream.encode()
            if len(value) + len(key) + FRAME_BYTES > self._max_bytes:
                self._fault_by_stream[stream] = (
                    f"a record of {len(value)} bytes is too large for topic {self._topic}; raise max.message.bytes of "
                    f"the topic, now {self._max_bytes}"
                )
            elif value != self._values.get(stream):
                changed[stream] = key, value
        count = len(changed)
        if not changed and self._values and self._newest_token != self._fence.token:
            stream, value = next(iter(self._values.items()))
            changed[stream] = stream.encode(), value  # so that former owners read this token
        if not changed:
            return 0
        self._fence.check()
        headers = [(FENCE_HEADER, str(self._fence.token).encode())]
        errors: list[KafkaError] = []
        written: dict[int, int] = {}  # partition -> offset of the last record

        def note_delivery(error: KafkaError | None, record: Message) -> None:
            if error is not None:
                errors.append(error)
            else:
                written[record.partition()] = record.offset()

        producer.begin_transaction()
        for key, value in changed.values():
            while True:
                try:
                    producer.produce(self._topic, key=key, value=value, headers=headers, on_delivery=note_delivery)
                    break
                except BufferError:
                    producer.poll(0.1)
        try:
            producer.commit_transaction(self._timeout_seconds)
        except KafkaException as error:
            raise KafkaException(errors[0] if errors else error.args[0]) from error
        self._newest_token = self._fence.token
        self._values |= {stream: value for stream, (_, value) in changed.items()}
        for partition, offset in written.items():
            self._next_offsets[partition] = self._wait_until_visible(partition, offset)
        return count

    def _wait_until_visible(self, partition: int, offset: int) -> int:
        """Wait until consumers can read a committed record, and return the end offset of the partition.

        This may take a moment after the commit. Raises `Unavailable` after `timeout_seconds`.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            end = self._kafka.reader().offsets(self._topic, partition)[1]
            if end > offset:
                return end
            if time.monotonic() > deadline:
                raise Unavailable("Kafka", self._kafka.errors.where, "a committed transaction is not visible yet")
            time.sleep(0.005)

    def _take_over(self) -> Producer:
        """Read the new records of the topic, and return the producer. At the first call, connect the producer.

        The connection fences the producer of the former owner. Raises `LeaseLost` if the topic has a higher token.
        """
        self._fence.check()
        if self._identity is None:
            self._identify()
        self._read_new()
        if self._producer is None:
            with suppress(Stop):  # this user may not describe the topic
                self._max_bytes = self._topics.max_message_bytes(self._topic)
            producer = self._kafka.producer()
            producer.init_transactions(self._timeout_seconds)
            self._producer = producer
            self._read_new()  # records of the former owner before it was fenced
        return self._producer

    def _identify(self) -> None:
        """Query the identity of the topic. If the topic was created again, note the loss of its records."""
        identity: IdentifiedTopic = self._topics.identities([self._topic])[self._topic]
        if self._identity is not None and self._identity.id != identity.id:
            self._note_loss("it was created again")
        self._identity = identity

    def _note_loss(self, problem: str) -> None:
        """Log that the topic has lost records, disconnect, and let `check_for_loss` report the loss."""
        log.warning("The topic of positions has lost records", topic=self._topic, problem=problem)
        self._disconnect()
        self._has_unreported_loss = True

    def _read_new(self) -> None:
        """Read the records that other processes have written since the last call. Detect lost records.

        Raises `LeaseLost` if the topic has a higher token than this owner.
        """
        assert self._identity is not None
        for partition in range(self._identity.partitions):
            first, end = self._kafka.reader().offsets(self._topic, partition)
            following = self._next_offsets.get(partition, first)
            if end < following or (first > following > 0):
                self._note_loss(f"partition {partition} is at offsets {first} to {end}, and was read up to {following}")
                return self._read_new()
            if end > following:
                for record in self._kafka.reader().read(self._topic, partition, following):
                    if record is None:
                        break
                    self._apply_record(record)
            self._next_offsets[partition] = end
        if self._newest_token > self._fence.token:
            raise LeaseLost(self._fence.token, self._newest_token)
        return None

    def _apply_record(self, record: Message) -> None:
        """Store the value and the token of a record, or a fault of the stream if Tidemark did not write the record."""
        key, value = record.key() or b"", record.value()
        stream = key.decode(errors="replace")
        self._fault_by_stream.pop(stream, None)
        if value is None:
            self._values.pop(stream, None)
            return
        try:
            fences = [int(text) for name, text in record.headers() or () if name == FENCE_HEADER]
            if _DECODER.decode(value).stream != stream:
                raise ValueError("the key is not the name of the stream")
        except ValueError as error:  # includes msgspec's errors
            self._values.pop(stream, None)
            self._fault_by_stream[stream] = (
                f"the newest record, at offset {record.offset()} of partition {record.partition()} of topic "
                f"{self._topic}, was not written by Tidemark ({error}); write a record with this key and a null value, "
                "and Tidemark writes the position again"
            )
            return
        self._values[stream] = value
        self._newest_token = max([self._newest_token, *fences])
