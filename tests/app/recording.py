"""A pipeline without Spark: what stands on real topics goes through the rules into real sinks, batch by batch."""

from collections.abc import Iterable
from typing import Self

from tests.sinks.given import NOW
from tests.sinks.reader.given import Pipeline
from tidemark.app.diagnosis.replayed import make_packets
from tidemark.sinks.port import Batch
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.kafka_lookup import RecordReader
from tidemark.sources.producer import RecordProducer
from tidemark.sources.topics import Topics, topic_plans
from tidemark.streaming.core.batch import apply_batch
from tidemark.streaming.core.store import States
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import FactRun, Join, Position, Rdata, Record, Topic, encode_row

STREAM = "events"


def fact(writer: str, id: int, prev: int) -> Record:
    return Rdata(stream=STREAM, writer=writer, epoch=1, prev=prev, id=id, row=encode_row({"id": id}))


class Recording:
    """Each `batch` sends records and has them read and published a minute after the last."""

    def __init__(self, pipeline: Pipeline, dsn: str, redis_url: str, kafka: str, prefix: str, now: int = NOW) -> None:
        """`now`: the time of the batches, in milliseconds since 1970."""
        self._now = now
        self.facts, self.control, self.dead = f"{prefix}.facts", f"{prefix}.control", f"{prefix}.dead"
        self.connection = KafkaConnection(kafka)
        self.variables = {
            "TIDEMARK_POSTGRES_DSN": dsn,
            "TIDEMARK_REDIS_URL": redis_url,
            "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": kafka,
            "TIDEMARK_KAFKA_FACTS_TOPIC": self.facts,
            "TIDEMARK_KAFKA_CONTROL_TOPIC": self.control,
            "TIDEMARK_KAFKA_DEAD_LETTERS_TOPIC": self.dead,
        }
        self.states: dict[str, bytes] = {}
        self._pipeline = pipeline
        self._roles = {self.facts: Topic.FACTS, self.control: Topic.CONTROL}
        self._next = dict.fromkeys(self._roles, 0)
        self._number = 0
        self._kafka = RecordReader(self.connection)
        self._producers: dict[str, RecordProducer] = {}
        Topics(self.connection).create_missing(topic_plans(self.facts, self.control, self.dead, 1))

    def send(self, *told: Record, topic: str | None = None) -> None:
        self.send_bytes(*((records.encode(it), it.stream) for it in told), topic=topic)

    def send_bytes(self, *values: tuple[bytes, str], topic: str | None = None) -> None:
        """Each under its key."""
        name = topic or self.facts
        if name not in self._producers:
            self._producers[name] = RecordProducer(self.connection, name, give_up_after=30.0)
        for value, key in values:
            self._producers[name].send(key, value)
        assert self._producers[name].flush(30.0) == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._kafka.__exit__(*error)

    def batch(self, *facts: Record, acts: Iterable[Record] = ()) -> None:
        self.send(*facts)
        self.send(*acts, topic=self.control)
        self.read()

    def read(self) -> None:
        """One batch of all that is new."""
        self._number += 1
        now = self._now + 60_000 * self._number
        messages = []
        for topic, first in self._next.items():
            _, end = self._kafka.offset_range(topic, 0)
            messages += [*self._kafka.between(topic, 0, first, end)]
            self._next[topic] = end
        effects = apply_batch(0, States(self.states), make_packets(messages, self._roles), now, Bounds())
        batch = Batch("query", self._number, self._pipeline.lease.token, [effects])
        self._pipeline.mirror.publish(batch, self._pipeline.store.apply(batch))

    def tell(self) -> None:
        """a completes 2 and 4 a minute after 5, and b never tells of 9 and 10."""
        self.batch(*(Join(stream=STREAM, writer=name, epoch=1, id=0) for name in ("a", "b")))
        over = Position(stream=STREAM, writer="b", epoch=1, prev=3, id=5)
        self.batch(fact("a", 1, 0), fact("a", 5, 4), fact("b", 3, 0), over)
        run = FactRun(stream=STREAM, writer="a", epoch=1, prev=1, ids=[2, 4], rows=[[], [encode_row("x\u009b2J")]])
        self.batch(run)
        self.batch(fact("b", 12, 10), fact("b", 8, 5), Position(stream=STREAM, writer="a", epoch=1, prev=5, id=12))
