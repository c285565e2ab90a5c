"""Recorded records through the pure core: packed as the query packs them, and fed to one stream after another."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np

from tidemark.sinks.postgres.inspect import PastBatch
from tidemark.sources.kafka_lookup import RecordedMessage
from tidemark.streaming.core.batch import advance
from tidemark.streaming.core.store import States
from tidemark.streaming.ingest.compact import pack
from tidemark.streaming.ingest.decode import Decoder
from tidemark.streaming.ingest.record_batch import Fetched
from tidemark.streaming.values.direction import beyond
from tidemark.streaming.values.limits import Bounds, Evidence
from tidemark.streaming.wire.records import Topic
from tidemark.streaming.wire.runs import Packet

NOTHING: Final = Evidence()


class _Named(msgspec.Struct):
    stream: str = ""


_named = msgspec.json.Decoder(_Named)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A stream as far as it was replayed; `counts` are the sums of each writer's evidence."""

    stream: str
    bounds: Bounds
    encoded: bytes | None = None
    linear: int = 0
    positions: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, Evidence] = field(default_factory=dict)

    def fed(self, messages: Sequence[RecordedMessage], roles: Mapping[str, Topic], now: int) -> "Replayed":
        """With more records, as one batch at `now` (ms)."""
        if not messages:
            return self
        states = {} if self.encoded is None else {self.stream: self.encoded}
        effects = advance(0, States(states), packed(messages, roles), now, self.bounds)
        for done in effects.streams:
            if done.stream == self.stream:
                positions, counts = dict(self.positions), dict(self.counts)
                for move in done.advances:
                    positions[move.writer] = move.id
                    counts[move.writer] = counts.get(move.writer, NOTHING) + move.evidence
                return replace(
                    self, encoded=states[self.stream], linear=done.linear, positions=positions, counts=counts
                )
        return self

    def counting_anew(self) -> "Replayed":
        return replace(self, counts={})

    def reaches(self, batch: PastBatch) -> bool:
        """Whether all has come at least as far as after that batch."""
        return not beyond(self.linear if batch.linear is None else batch.linear, self.linear) and not any(
            beyond(move.id, self.positions.get(move.writer, 0)) for move in batch.advances
        )


def by_stream(messages: Iterable[RecordedMessage]) -> dict[str, list[RecordedMessage]]:
    """In their order, under the stream that the key names and that which the value names: a record that is refused may
    be a fact of either."""
    found: dict[str, list[RecordedMessage]] = defaultdict(list)
    for it in messages:
        keyed = (it.key or b"").decode(errors="replace")
        try:
            named = _named.decode(it.value or b"").stream or keyed
        except (ValueError, RecursionError):
            named = keyed
        for stream in {keyed, named}:
            found[stream].append(it)
    return found


def packed(messages: Iterable[RecordedMessage], roles: Mapping[str, Topic]) -> list[Packet]:
    """As the query packs them, of any partitions; `roles` has each topic's."""
    parted: dict[tuple[str, int], list[RecordedMessage]] = defaultdict(list)
    for it in messages:
        parted[it.topic, it.partition].append(it)
    found: list[Packet] = []
    for (topic, partition), of in parted.items():
        decoder = Decoder(roles[topic])
        decoder.add(_fetched(of))
        found += [packet for _, packet in pack(topic, partition, decoder, 1)]
    return found


def _fetched(of: Sequence[RecordedMessage]) -> Fetched:
    numbers = np.array([(it.offset, it.time) for it in of], np.int64)
    return Fetched.of([it.key for it in of], [it.value for it in of], *numbers.T)
