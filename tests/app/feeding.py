"""A simulation that feeds the topic of a pipeline under test, and knows the truth."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.app.running import PATIENCE
from tests.play.cast import Cast
from tests.play.simulation import Simulation
from tests.play.stream import SimulatedStream
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.producer import RecordProducer
from tidemark.streaming.wire.records import Record, encode


class PlayFeed:
    """A simulation whose records go to a topic as fast as Kafka takes them; time is the play's own.

    One thread plays; `truth` may be asked by any.
    """

    def __init__(self, kafka: KafkaConnection, topic: str, seed: int, cast: Cast) -> None:
        self.sent = 0
        self._simulation = Simulation(seed, cast)
        self._producer = RecordProducer(kafka, topic, give_up_after=PATIENCE)
        self._lock = threading.Lock()

    def until(self, now: float) -> None:
        """Play up to `now`; all is in Kafka when this returns."""
        with self._lock:
            records = self._simulation.step(now)
        self._send(records)

    def end(self) -> None:
        """Let everything complete, so that no position is held back."""
        with self._lock:
            records = self._simulation.drain()
        self._send(records)

    @contextmanager
    def truth(self) -> Iterator[list[SimulatedStream]]:
        """The streams, which do not move on meanwhile."""
        with self._lock:
            yield self._simulation.streams()

    def _send(self, records: Sequence[Record]) -> None:
        for record in records:
            self._producer.send(record.stream, encode(record))
        self.sent += len(records)
        assert self._producer.flush(PATIENCE) == 0
