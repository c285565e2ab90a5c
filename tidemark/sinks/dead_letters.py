"""The dead letters: rejected records, fetched from Kafka again by their offsets and sent on byte for byte.

At least once: a batch that is repeated sends its dead letters again; their headers show which are the same record.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from tidemark.common.errors import BadRecord, TidemarkError, TopicMissing
from tidemark.common.kafka_errors import ErrorListener
from tidemark.common.log import get_logger
from tidemark.common.partition_reader import PartitionReader
from tidemark.streaming.values.limits import Reason, Rejected, printable
from tidemark.streaming.wire.records import FactRun, Topic, read

Headers = Sequence[tuple[str, Any]]
ANY_PARTITION = -1


class Outgoing(NamedTuple):
    """A record on its way: its own key, value and headers, and in `origin` headers of ours."""

    origin: Headers = ()
    key: Any = None
    value: Any = b""
    headers: Headers = ()
    partition: int = ANY_PARTITION


class Outbox:
    """Records between the producer and its acknowledgement. `gone` counts those of which the topic took nothing.

    `instead` says what to send in place of a record that is too large for the topic, None for nothing.
    """

    def __init__(self, producer: Producer, topic: str, instead: Callable[[Outgoing], Outgoing | None]) -> None:
        self.gone = 0
        self._producer = producer
        self._topic = topic
        self._instead = instead
        self._too_large: list[Outgoing] = []  # seen to in `flush`, as a callback may not produce
        self._error: KafkaError | None = None

    def put(self, record: Outgoing) -> None:
        def delivered(error: KafkaError | None, _: Message) -> None:
            bare = not (record.key or record.value or record.headers)
            if error is not None and error.code() == KafkaError.MSG_SIZE_TOO_LARGE and not bare:
                self._too_large.append(record)
            elif error is not None:
                self._error = error

        headers = [*record.headers, *record.origin]
        while True:
            try:
                self._producer.produce(
                    self._topic,
                    key=record.key,
                    value=record.value,
                    headers=headers,
                    partition=record.partition,
                    on_delivery=delivered,
                )
            except BufferError:
                self._producer.poll(0.1)
            else:
                self._producer.poll(0)
                return

    def put_instead(self, record: Outgoing | None) -> None:
        self.gone += 1
        if record is not None:
            self.put(record)

    def flush(self) -> KafkaError | None:
        """Wait for the acknowledgements, which come or fail within the message time-out; the first failure, if any."""
        self._await()
        too_large, self._too_large = self._too_large, []
        for record in too_large:
            # The brokers refuse a whole batch for one of its records, so each gets a batch of its own.
            self.put(record)
            self._await()
            if self._too_large:
                self._too_large.clear()
                self.put_instead(self._instead(record))
        self._await()
        return self._error

    def _await(self) -> None:
        while self._error is None and self._producer.flush(1.0):
            pass


class KafkaConnections:
    """Both directions, each connected when it is first asked for; `errors` hears of both. The producer's records fail
    after `patience` (s); `isolation` is the reader's.
    """

    def __init__(self, client: Mapping[str, str], producer: Mapping[str, str], patience: float, isolation: str) -> None:
        self.errors = ErrorListener(client["bootstrap.servers"])
        self._client = client
        self._producer = producer
        self._patience = patience
        self._isolation = isolation
        self._reader: PartitionReader | None = None
        self._writer: Producer | None = None

    def reader(self) -> PartitionReader:
        if self._reader is None:
            self._reader = PartitionReader(self._client, self.errors, self._patience, self._isolation)
        return self._reader

    def writer(self) -> Producer:
        if self._writer is None:
            self._writer = Producer(
                {
                    **self._producer,
                    "message.timeout.ms": str(int(self._patience * 1000)),
                    # Before the time-out, so that a missing topic is told from brokers that are away.
                    "topic.metadata.propagation.max.ms": str(int(self._patience * 500)),
                    "message.max.bytes": "100000000",  # the brokers decide, not our client
                    "error_cb": self.errors,
                }
            )
        return self._writer

    def close(self) -> None:
        """Drop both, and what is still unsent; they may be asked for again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._writer is not None:
            self._writer.purge()
            self._writer = None


log = get_logger(__name__)

FAR = 2_000  # offsets that are read and thrown away rather than sought over
LONGEST_DETAIL = 500  # characters: it may quote the record


@dataclass(frozen=True, slots=True)
class DeadLettersConfig:
    """`client` and `producer` are librdkafka settings and may hold a password. `patience`: seconds without progress."""

    topic: str
    client: Mapping[str, str] = field(repr=False)
    producer: Mapping[str, str] = field(repr=False)
    patience: float = 5.0


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """Records sent to the dead letters, and how many of them went without their value because it is gone."""

    sent: int = 0
    gone: int = 0


class DeadLetters:
    """One thread at a time. Connects when the first record is rejected; a context manager."""

    def __init__(self, config: DeadLettersConfig) -> None:
        self._config = config
        # Nothing is asked for but what the query has read, so all of it was committed.
        self._kafka = KafkaConnections(config.client, config.producer, config.patience, "read_uncommitted")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop both connections, and what is still unsent with them; the next call opens new ones."""
        self._kafka.close()

    def send(self, rejected: Sequence[Rejected]) -> DeadLettered:
        """Send every rejected record on and wait until the brokers have them.

        A dead letter has the key, value and headers of its record, and the headers `reason`, `topic`, `partition`,
        `offset`; where more can be said, also `detail`. Where retention removed the record meanwhile, or it is too
        large for the dead letters, the value is empty and a header `gone` says why. Raises `Unavailable` (call again:
        all are sent again), `Refused`, `TopicMissing`.
        """
        if not rejected:
            return DeadLettered()
        try:
            return self._send(rejected)
        except KafkaException as error:
            self.close()
            raise self._explained(error.args[0]) from error
        except TidemarkError:
            self.close()
            raise

    def _send(self, rejected: Sequence[Rejected]) -> DeadLettered:
        self._kafka.errors.forget()
        found: dict[tuple[str, int], dict[int, tuple[str, int]]] = {}
        for item in rejected:
            offsets = np.frombuffer(item.offsets, "<i8")
            ids = np.frombuffer(item.ids, "<i8") if item.ids else np.zeros_like(offsets)
            reasons = ((item.reason, id) for id in ids.tolist())
            found.setdefault((item.topic, item.partition), {}).update(zip(offsets.tolist(), reasons, strict=True))
        outbox = Outbox(self._kafka.writer(), self._config.topic, instead=_too_large)
        sent = 0
        for (topic, partition), wanted in found.items():
            before = outbox.gone
            for offset, record in self._records(topic, partition, sorted(wanted)):
                reason, id = wanted[offset]
                origin = _origin(reason, topic, partition, offset)
                if record is None:
                    outbox.put_instead(_without_record(Outgoing(origin), "removed by retention"))
                else:
                    if detail := _detail(record.value(), record.key(), reason, id):
                        origin = [*origin, ("detail", detail[:LONGEST_DETAIL].encode(errors="replace"))]
                    outbox.put(Outgoing(origin, record.key(), record.value(), record.headers() or ()))
                sent += 1
            if gone := outbox.gone - before:
                log.warning(
                    "Rejected records were gone before they could be kept",
                    topic=topic,
                    partition=partition,
                    records=gone,
                )
        if (error := outbox.flush()) is not None:
            raise KafkaException(error)
        return DeadLettered(sent, outbox.gone)

    def _records(self, topic: str, partition: int, wanted: Sequence[int]) -> Iterator[tuple[int, Message | None]]:
        """Each wanted offset (ascending) with its record, None where there is no such record any more."""
        reader = self._kafka.reader()
        pending = list(reversed(wanted))
        while pending:
            first, end = reader.offsets(topic, partition, known=pending[0])
            while pending and not first <= pending[-1] < end:
                yield pending.pop(), None
            if not pending:
                break
            with closing(reader.read(topic, partition, pending[-1])) as records:
                for record in records:
                    here = None if record is None else record.offset()
                    while pending and (here is None or pending[-1] < here):
                        yield pending.pop(), None
                    if pending and pending[-1] == here:
                        yield pending.pop(), record
                    if not pending or (here is not None and pending[-1] - here > FAR):
                        break

    def _explained(self, error: KafkaError) -> TidemarkError:
        if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
            return TopicMissing(self._config.topic)
        return self._kafka.errors.explain(error)


def _detail(value: bytes | None, key: bytes | None, reason: str, id: int) -> str:
    """What is wrong with the record, beyond its `reason`, and in which of its facts; empty where nothing more is known.

    `id` is the first that does not fit what its stream holds, 0 where the record shows its fault by itself.
    """
    if reason == Reason.NOT_STORABLE:
        return "Postgres refused what followed from it: the pipeline's log has its answer"
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


def _without_record(letter: Outgoing, why: str) -> Outgoing:
    return Outgoing((*letter.origin, ("gone", why.encode())))


def _too_large(letter: Outgoing) -> Outgoing:
    return _without_record(letter, "too large for this topic")


def _origin(reason: str, topic: str, partition: int, offset: int) -> Headers:
    values = (("reason", reason), ("topic", topic), ("partition", partition), ("offset", offset))
    return [(name, str(value).encode()) for name, value in values]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A rejected record as it lies in the dead letters at `partition` and `offset`, since `time` (ms).

    `origin` is topic, partition and offset of the record itself. `gone` says why there is no value, where there is
    none. `headers` are the record's own.
    """

    partition: int
    offset: int
    time: int
    reason: str
    origin: tuple[str, int, int]
    detail: str
    gone: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]

    @property
    def stream(self) -> str:
        """As its key says, readable whatever it holds."""
        return _readable(self.key or b"")

    @property
    def place(self) -> str:
        """As people name it: the offset, before it the partition unless that is 0."""
        return f"{self.partition}/{self.offset}" if self.partition else str(self.offset)


class Letters:
    """For one thread; a context manager. Methods raise `Unavailable` and `Refused`."""

    def __init__(self, config: DeadLettersConfig) -> None:
        self._topic = config.topic
        self._kafka = KafkaConnections(config.client, config.producer, config.patience, "read_committed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._kafka.close()

    def newest(self, partitions: Collection[int], most: int) -> list[DeadLetter]:
        """Of each partition the last `most` offsets, newest first."""
        found = [it for partition in partitions for it in self._from(partition, most)]
        return sorted(found, key=lambda it: (it.time, it.partition, it.offset), reverse=True)

    def at(self, partition: int, offset: int) -> DeadLetter | None:
        """None where no letter is, or is any more."""
        try:
            first, end = self._kafka.reader().offsets(self._topic, partition)
            if not first <= offset < end:
                return None
            with closing(self._kafka.reader().read(self._topic, partition, offset)) as records:
                found = next(records, None)
        except KafkaException as error:
            raise self._kafka.errors.explain(error.args[0]) from error
        return None if found is None or found.offset() != offset else _letter(found)

    def _from(self, partition: int, most: int) -> Iterator[DeadLetter]:
        try:
            reader = self._kafka.reader()
            first, end = reader.offsets(self._topic, partition)
            if first == end:
                return
            with closing(reader.read(self._topic, partition, max(first, end - most))) as records:
                for record in records:
                    if record is None or record.offset() >= end:
                        return
                    yield _letter(record)
        except KafkaException as error:
            raise self._kafka.errors.explain(error.args[0]) from error


def _letter(message: Message) -> DeadLetter:
    """Ours are the last headers of their names: the record may have had some of the same."""
    headers: list[tuple[str, Any]] = list(message.headers() or ())
    ours = {name: _readable(value or b"") for name, value in headers}
    at = next((i for i in range(len(headers) - 1, -1, -1) if headers[i][0] == "reason"), len(headers))
    return DeadLetter(
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        time=message.timestamp()[1],
        reason=ours.get("reason", ""),
        origin=(ours.get("topic", ""), _number(ours.get("partition")), _number(ours.get("offset"))),
        detail=_header(headers[at:], "detail"),
        gone=_header(headers[at:], "gone"),
        key=message.key(),
        value=message.value(),
        headers=tuple((name, value or b"") for name, value in headers[:at]),
    )


def _header(headers: list[tuple[str, Any]], name: str) -> str:
    return next((_readable(value or b"") for given, value in headers if given == name), "")


def _readable(data: bytes) -> str:
    """Nothing that a terminal would obey: anybody may have written it."""
    return printable(data.decode(errors="replace"))


def _number(text: str | None) -> int:
    """-1 where whoever wrote the letter said none."""
    return int(text) if text is not None and text.isdecimal() else -1
