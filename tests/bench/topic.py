"""Workloads in Kafka: topics made, records sent, topics filled before anything is measured."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.bench.workload import Completions, Rendering, Shape, WritersAtWork, moments
from tidemark.sources.kafka import KafkaConnection

_STEP = 50_000


@dataclass(frozen=True, slots=True)
class Loaded:
    """A filled topic; `play` knows what the positions are once all of it was read. `facts` counts voids too."""

    name: str
    partitions: int
    records: int
    bytes: int
    play: WritersAtWork
    facts: int

    def positions(self) -> dict[str, dict[str, int]]:
        """Of all writers, by stream, once all of the topic was read."""
        shape = self.play.shape
        return {shape.stream(number): self.play.positions(number) for number in range(shape.streams)}


def create(connection: KafkaConnection, topic: str, partitions: int) -> None:
    admin = AdminClient(connection.client_settings())
    admin.create_topics([NewTopic(topic, partitions, config={"retention.ms": "-1"})])[topic].result(timeout=10)


class Sender:
    """Sends to one topic. A stream's records go to the partition `stream number % partitions`, so that the partitions
    are equally full; a producer would choose by the key, and Tidemark only minds that a stream stays in one.

    A record has at most `together` facts; more than one make it a RUN.
    """

    def __init__(
        self, connection: KafkaConnection, topic: str, partitions: int, shape: Shape, together: int = 1
    ) -> None:
        self._together = together
        self._producer = Producer(connection.producer_settings() | {"queue.buffering.max.messages": str(4 * _STEP)})
        self._topic = topic
        self._partitions = partitions
        self._rendering = Rendering(shape)
        self.records = 0
        self.bytes = 0
        self.facts = 0

    def join(self) -> None:
        """Send one JOIN per writer: what stands first in a topic."""
        streams, joins = zip(*self._rendering.joins(), strict=True)
        self.send_records(streams, joins)

    def send(self, edges: Completions) -> None:
        """Returns when everything was handed to the client; `flush` waits for the broker."""
        if self._together > 1:
            self.send_records(*zip(*self._rendering.runs(edges, self._together), strict=True))
        else:
            self.send_records(self._rendering.streams(edges), self._rendering.values(edges))
        self.facts += len(edges)

    def send_records(self, streams: Iterable[int], values: Iterable[bytes]) -> None:
        """As `send`; their facts are not counted."""
        parts: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for stream, value in zip(streams, values, strict=True):
            parts[stream % self._partitions].append({"key": self._rendering.keys[stream], "value": value})
            self.bytes += len(value)
        for partition, messages in parts.items():
            self.records += len(messages)
            while len(self._producer) + len(messages) > 3 * _STEP:
                self._producer.poll(0.01)
            accepted = self._producer.produce_batch(self._topic, messages, partition=partition)
            if accepted != len(messages):
                raise RuntimeError(f"Kafka's client took {accepted} of {len(messages)} records")

    def flush(self) -> None:
        """Raises where the broker does not acknowledge everything within a minute."""
        left = self._producer.flush(60)
        if left:
            raise RuntimeError(f"{left} records were not acknowledged within a minute")


def joined(connection: KafkaConnection, topic: str, partitions: int, shape: Shape, together: int = 1) -> Sender:
    """Make `topic`, in which all writers have joined."""
    create(connection, topic, partitions)
    sender = Sender(connection, topic, partitions, shape, together)
    sender.join()
    sender.flush()
    return sender


def paced(count: int, seconds: float, seed: int) -> Iterator[None]:
    """Return at so many random moments, or as soon as the caller asks where that is later; end after `seconds`."""
    began = time.monotonic()
    for moment in moments(count, seconds, seed):
        time.sleep(max(0.0, began + moment - time.monotonic()))
        yield
    time.sleep(max(0.0, began + seconds - time.monotonic()))


def fill(
    connection: KafkaConnection,
    topic: str,
    shape: Shape,
    *,
    records: int,
    partitions: int,
    keep: Callable[[Completions], Completions] = lambda edges: edges,
    together: int = 1,
) -> Loaded:
    """Make `topic` and fill it with `records`, the JOINs included; `keep` may leave some out. They are counted as if
    each had one fact, and not `together`.
    """
    play, sender = WritersAtWork(shape), joined(connection, topic, partitions, shape, together)
    for begun in range(sender.records, records, _STEP):
        sender.send(keep(play.step(min(_STEP, records - begun))))
    sender.send(keep(play.finish()))
    sender.flush()
    return Loaded(topic, partitions, sender.records, sender.bytes, play, sender.facts)
