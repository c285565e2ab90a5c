"""The dead letters read back: what `sinks.dead_letters` wrote, for people who look and replay."""

from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Self

from confluent_kafka import KafkaException, Message

from tidemark.sinks.dead_letters import DeadLettersConfig
from tidemark.sinks.kafka_copy import KafkaConnections
from tidemark.streaming.values.limits import printable


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
