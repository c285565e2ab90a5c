"""Records between the relay and Kafka's acknowledgement, bounded by bytes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tidemark.sources.producer import RecordProducer
from tidemark.sources.relay.decider import Decided
from tidemark.sources.relay.encode import MOST_BYTES, told
from tidemark.streaming.values.intervals import EMPTY, Intervals

_VOIDS_AT_ONCE = 10_000
_VOID_BYTES = 200
_NAMES_BYTES = 3000
"""Of a record that several facts share: the names of stream and writer, and what surrounds the facts."""


@dataclass(slots=True, eq=False)
class InFlight:
    """What was decided together, without its rows; `left` of its records are not acknowledged. `size` in bytes."""

    decided: Decided
    size: int
    left: int = 0

    def acknowledged(self) -> None:
        self.left -= 1

    def counted(self, values: Iterable[bytes]) -> Iterator[bytes]:
        """The same values, each of which is to be acknowledged."""
        for value in values:
            self.left += 1
            yield value


def send(producer: RecordProducer, decided: Decided, most_facts: int) -> InFlight:
    """Send the records of `decided`, made one by one. A record has `most_facts` of a backlog."""
    name = decided.told.stream.name
    size = sum(fact.bytes for fact in decided.facts)
    size += _VOID_BYTES * (decided.voids.width() + len(decided.announced))
    most_bytes = min(MOST_BYTES, producer.max_value_bytes(name) - _NAMES_BYTES)
    # `left` begins with 1, so that nothing is acknowledged before all of it is sent.
    parcel = InFlight(decided.without_rows(), size, 1)
    producer.send_all(name, parcel.counted(told(decided, most_facts, most_bytes)), parcel.acknowledged)
    parcel.acknowledged()
    return parcel


def parts(decided: Decided) -> Iterator[Decided]:
    """The same in parts that do not take much memory: voids are ranges until they are told."""
    if decided.facts or decided.announced or decided.emptied:
        yield Decided(decided.told, decided.facts, EMPTY, decided.announced, decided.emptied)
    for low, high in decided.voids:
        for start in range(low, high, _VOIDS_AT_ONCE):
            yield Decided(decided.told, [], Intervals.of([(start, min(high, start + _VOIDS_AT_ONCE))]))
