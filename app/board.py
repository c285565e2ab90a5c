"""What is known of every stream right now, for the scrape: from the states at the start, from effects afterwards.

One writer (the batch's thread), any number of readers: a stream's entry is replaced, never changed.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tidemark.app.metrics import STREAM_GAUGES
from tidemark.streaming import state
from tidemark.streaming.effects import ShardEffects, Summary
from tidemark.streaming.summary import summarize


@dataclass(frozen=True, slots=True)
class Entry:
    linear: int
    positions: Mapping[str, int]
    summary: Summary


class Board(Collector):
    """`now` gives seconds since 1970. `read` holds the next offset to read, by topic and partition."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.read: dict[tuple[str, int], int] = {}
        self._entries: dict[str, Entry] = {}
        self._now = now

    def load(self, states: Mapping[str, bytes], read: Mapping[tuple[str, int], int]) -> None:
        """Start from what Postgres holds, so that a restart without traffic shows every stream."""
        self.read.update(read)
        for name, stored in states.items():
            stream = state.decode(stored)
            sign = -1 if stream.direction < 0 else 1
            positions = {writer: sign * known.chain.position for writer, known in stream.writers.items()}
            self._entries[name] = Entry(sign * stream.line.position, positions, summarize(stream))

    def update(self, effects: Iterable[ShardEffects]) -> None:
        """A batch was published."""
        for shard in effects:
            self.read.update({(seen.topic, seen.partition): seen.offset for seen in shard.progress})
            for stream in shard.streams:
                before = self._entries.get(stream.stream)
                positions = dict(before.positions) if before else {}
                positions.update((row.writer, row.position) for row in stream.writers)
                for writer in stream.dropped:
                    positions.pop(writer, None)
                self._entries[stream.stream] = Entry(stream.linear, positions, stream.summary)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Called by the scrape, on its thread."""
        families = {
            key: GaugeMetricFamily(name, meaning, labels=labels)
            for key, (name, labels, meaning) in STREAM_GAUGES.items()
        }
        now = self._now()
        for stream, entry in sorted(self._entries.copy().items()):
            for writer, position in sorted(entry.positions.items()):
                families["position"].add_metric([stream, writer], position)
            oldest = entry.summary.oldest
            values = {
                "linear": entry.linear,
                "pending": entry.summary.pending,
                "gaps": entry.summary.gaps,
                "age": max(0.0, now - oldest.since / 1000) if oldest else 0.0,
                "unknown": len(entry.summary.unknown),
            }
            for key, value in values.items():
                families[key].add_metric([stream], value)
        return families.values()
