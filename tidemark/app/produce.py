"""`tidemark produce`: JSON lines to Kafka under the right key, for trying things by hand.

Every line is checked as the pipeline will check it, so that a mistake shows here and not among the dead letters.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tidemark.common.errors import BadRecord
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.producer import topic_producer
from tidemark.sources.topics import Topics
from tidemark.streaming.wire import records

DELIVERY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Produced:
    """What became of the lines; `last` is partition and offset of the record that was acknowledged last."""

    sent: int
    refused: int
    last: tuple[int, int] | None

    def summary(self, topic: str) -> str:
        text = f"{self.sent} record{'' if self.sent == 1 else 's'} sent to {topic}"
        if self.last is not None:
            text += f", the last to partition {self.last[0]} at offset {self.last[1]}"
        return text


def produce(
    connection: KafkaConnection, topic: str, role: records.Topic, lines: Iterable[bytes], refuse: Callable[[str], None]
) -> Produced:
    """Send the good lines and `refuse` the bad ones, each with its number and reason; blank lines count for nothing.

    Raises `TopicMissing` and, where Kafka does not take the records within half a minute, `Unavailable`: some of the
    lines may have arrived then, and sending all again makes duplicates, which Tidemark counts and passes over.
    """
    Topics(connection).describe([topic])
    producer = topic_producer(connection, topic, give_up_after=DELIVERY_SECONDS)
    refused = 0
    for number, line in enumerate(lines, start=1):
        value = line.strip()
        if not value:
            continue
        try:
            stream = records.decode(value).stream
            records.read(value, stream.encode(), role)
        except BadRecord as error:
            refused += 1
            refuse(f"line {number}: {error}")
            continue
        producer.send(stream, value)
    producer.deliver(DELIVERY_SECONDS)
    return Produced(producer.delivered, refused, producer.last)
