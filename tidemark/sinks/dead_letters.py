"""The dead letters: rejected records, fetched from Kafka again by their offsets and sent on byte for byte.

At least once: a batch that is repeated sends its dead letters again; their headers show which are the same record.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import structlog
from confluent_kafka import KafkaError, KafkaException, Message

from tidemark.common.errors import BadRecord, TidemarkError, TopicMissing
from tidemark.sinks.kafka_copy import Headers, KafkaConnections, Outbox, Outgoing
from tidemark.streaming.values.limits import Reason, Rejected
from tidemark.streaming.wire.records import FactRun, Topic, read

log = structlog.get_logger(__name__)

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
