"""What Tidemark's own core makes of a topic, and whether that is the truth of the service's database."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from confluent_kafka import Consumer, Message, TopicPartition

from tests.streaming.builders import IN_FACTS, packed
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.kafka_lookup import split_run
from tidemark.sources.topics import Topics
from tidemark.streaming.core import codec
from tidemark.streaming.core.batch import apply_batch
from tidemark.streaming.core.effects import StreamEffects
from tidemark.streaming.core.store import States
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.records import FactRun, Open, Rdata, Record, Topic, read


@dataclass
class Verdict:
    """`effects` of one batch with everything, by stream; IDs are signed. `announced` are the IDs of facts, in
    records of their own or of many."""

    records: list[Record]
    effects: dict[str, StreamEffects]
    states: dict[str, bytes]
    rejected: dict[str, int]
    announced: dict[str, set[int]] = field(default_factory=dict)

    def position(self, stream: str, writer: str) -> int:
        return codec.decode(self.states[stream]).writers[writer].position

    def positions(self, stream: str) -> dict[str, int]:
        """By writer."""
        known = codec.decode(self.states[stream]).writers if stream in self.states else {}
        return {name: known[name].position for name in known}

    def transactions(self, stream: str) -> dict[str, list[str]]:
        """Who holds open IDs, by writer."""
        return self.effects[stream].summary.transactions if stream in self.effects else {}

    def blocked(self, stream: str) -> str:
        """Why the relay sends nothing new of the stream, as it reports; empty if it does."""
        found = self.effects[stream].summary.sources if stream in self.effects else []
        return "; ".join(it.report.blocked for it in found)

    def kinds(self, stream: str = "orders") -> list[tuple[str, int, int | str]]:
        """Kind, epoch and ID of every record, in order."""
        return [
            (str(record.__struct_config__.tag), record.epoch, record.id)
            for record in self.records
            if record.stream == stream and not isinstance(record, Open | FactRun)
        ]


class Judge:
    """Reads one topic of one partition."""

    def __init__(self, connection: KafkaConnection, topic: str) -> None:
        self._connection = connection
        self._topic = topic

    def messages(self) -> list[Message]:
        """All that is there now."""
        end = Topics(self._connection).end_offsets({self._topic: 1})[self._topic, 0]
        consumer = Consumer({**self._connection.client_settings(), "group.id": "judge", "enable.auto.commit": "false"})
        consumer.assign([TopicPartition(self._topic, 0, 0)])
        found: list[Message] = []
        try:
            while len(found) < end:
                found += consumer.consume(end - len(found), timeout=60)
        finally:
            consumer.close()
        return found

    def verdict(self) -> Verdict:
        return judged([(message.key(), message.value()) for message in self.messages()])


def judged(messages: Sequence[tuple[bytes, bytes]]) -> Verdict:
    """What the core makes of these keys and values, in one batch of one partition."""
    packets = packed((offset, 0, IN_FACTS, key, value) for offset, (key, value) in enumerate(messages))
    states: dict[str, bytes] = {}
    done = apply_batch(0, States(states), packets, 0, Bounds())
    records = [read(value, key, Topic.FACTS) for key, value in messages]
    announced: dict[str, set[int]] = {}
    for record in chain.from_iterable(map(split_run, records)):
        if isinstance(record, Rdata) and isinstance(record.id, int):
            announced.setdefault(record.stream, set()).add(record.id)
    rejected: dict[str, int] = {}
    for bad in done.rejected:
        rejected[bad.reason] = rejected.get(bad.reason, 0) + bad.count
    return Verdict(records, {stream.stream: stream for stream in done.streams}, states, rejected, announced)
