"""Workloads in Kafka: a topic made, and filled before anything is measured."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from sources.kafka import KafkaConnection
from tests.bench.workload import Edges, Play, Rendering, Shape

_STEP = 50_000


@dataclass(frozen=True, slots=True)
class Loaded:
    """A filled topic; `play` knows what the positions are once all of it was read."""

    name: str
    partitions: int
    records: int
    bytes: int
    play: Play


class Filler:
    """Sends to one topic. A stream's records go to the partition `stream number % partitions`, so that the partitions
    are equally full; a producer would choose by the key, and Tidemark only minds that a stream stays in one.
    """

    def __init__(self, connection: KafkaConnection, topic: str, partitions: int) -> None:
        admin = AdminClient(connection.client())
        admin.create_topics([NewTopic(topic, partitions, config={"retention.ms": "-1"})])[topic].result(timeout=10)
        self._producer = Producer(connection.producer() | {"queue.buffering.max.messages": str(4 * _STEP)})
        self._topic = topic
        self._partitions = partitions
        self.records = 0
        self.bytes = 0

    def send(self, keys: list[bytes], streams: Iterable[int], values: Iterable[bytes]) -> None:
        """Returns when everything was handed to the client; `flush` waits for the broker."""
        parts: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for stream, value in zip(streams, values, strict=True):
            parts[stream % self._partitions].append({"key": keys[stream], "value": value})
            self.bytes += len(value)
        for partition, messages in parts.items():
            self.records += len(messages)
            while len(self._producer) + len(messages) > 3 * _STEP:
                self._producer.poll(0.05)
            accepted = self._producer.produce_batch(self._topic, messages, partition=partition)
            if accepted != len(messages):
                raise RuntimeError(f"Kafka's client took {accepted} of {len(messages)} records")

    def flush(self) -> None:
        left = self._producer.flush(60)
        if left:
            raise RuntimeError(f"{left} records were not acknowledged within a minute")


def fill(
    connection: KafkaConnection,
    topic: str,
    shape: Shape,
    *,
    records: int,
    partitions: int,
    keep: Callable[[Edges], Edges] = lambda edges: edges,
) -> Loaded:
    """Make `topic` and fill it with JOINs and about `records` completions; `keep` may leave some out."""
    filler = Filler(connection, topic, partitions)
    play, rendering = Play(shape), Rendering(shape)
    streams, joins = zip(*rendering.joins(), strict=True)
    filler.send(rendering.keys, streams, joins)

    def send(edges: Edges) -> None:
        edges = keep(edges)
        filler.send(rendering.keys, rendering.streams(edges), rendering.values(edges))

    for begun in range(0, records, _STEP):
        send(play.step(min(_STEP, records - begun)))
    send(play.finish())
    filler.flush()
    return Loaded(topic, partitions, filler.records, filler.bytes, play)
