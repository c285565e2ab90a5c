"""Letters on their way to one topic: handed to a producer, acknowledged or not."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, Message, Producer

Headers = Sequence[tuple[str, Any]]


class Letter(NamedTuple):
    origin: Headers
    key: Any = None
    value: Any = b""
    headers: Headers = ()

    def without_record(self, why: str) -> "Letter":
        return Letter((*self.origin, ("gone", why.encode())))


class Outbox:
    """What was handed to the producer and is not acknowledged yet."""

    def __init__(self, producer: Producer, topic: str) -> None:
        self.gone = 0
        self._producer = producer
        self._topic = topic
        self._refused: list[Letter] = []  # as too large; seen to in `flush`, as a callback may not produce
        self._error: KafkaError | None = None

    def put(self, letter: Letter) -> None:
        def delivered(error: KafkaError | None, _: Message) -> None:
            if error is not None and error.code() == KafkaError.MSG_SIZE_TOO_LARGE and letter.value:
                self._refused.append(letter)
            elif error is not None:
                self._error = error

        headers = [*letter.headers, *letter.origin]
        while True:
            try:
                self._producer.produce(
                    self._topic, key=letter.key, value=letter.value, headers=headers, on_delivery=delivered
                )
            except BufferError:
                self._producer.poll(0.1)
            else:
                self._producer.poll(0)
                return

    def put_empty(self, letter: Letter, why: str) -> None:
        self.gone += 1
        self.put(letter.without_record(why))

    def flush(self) -> KafkaError | None:
        """Wait for the acknowledgements, which come or fail within the message time-out; the first failure, if any."""
        self._await()
        refused, self._refused = self._refused, []
        for letter in refused:
            # The brokers refuse a whole batch for one of its records, so each gets a batch of its own.
            self.put(letter)
            self._await()
            if self._refused:
                self._refused.clear()
                self.put_empty(letter, "too large for this topic")
        self._await()
        return self._error

    def _await(self) -> None:
        while self._error is None and self._producer.flush(1.0):
            pass
