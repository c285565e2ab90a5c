"""What scrapes show of streams: the positions of every stream, and who holds them.

They come from the states at the start, from effects afterwards. One thread writes (the batch's), any number read.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tidemark.app import metrics
from tidemark.app.metrics import STREAM_GAUGES
from tidemark.sinks.port import Sink
from tidemark.streaming import state
from tidemark.streaming.effects import ShardEffects, StreamEffects, Summary, summarize
from tidemark.streaming.holders import HELD_AFTER, Holder
from tidemark.streaming.plain import at_rest
from tidemark.streaming.policies import Policies

log = structlog.get_logger(__name__)

THRESHOLDS = ("gap_seconds", "silent_seconds", "behind_seconds", "behind_ids")
NEAR = 0.5  # of a bound: what fills less of it is no series
OTHER_STREAMS, OTHER_WRITERS = "other streams", "other writers"  # no name has a space


_QUIET = Summary(0, 0, None, [], 0, None)  # one for all: streams may be many


@dataclass(slots=True)
class BoardEntry:
    """`positions` are those of the writers that have not retired."""

    linear: int
    allocated: int
    positions: dict[str, int]
    summary: Summary

    @property
    def ended(self) -> bool:
        """All writers have retired, and nobody is waited for."""
        return not self.positions and not self.summary.unknown


Entries = Sequence[tuple[str, BoardEntry]]


class Board(Collector):
    """`now` gives seconds since 1970. `read` holds the next offset to read, by topic and partition.

    The first `streams` by name, those with a policy of their own before all, have series of their own, and of their
    writers the first `writers`; the others are one series together, so that a scrape has a bound. Streams that ended
    and writers that retired have none.
    """

    def __init__(self, now: Callable[[], float] = time.time, streams: int = 1000, writers: int = 5000) -> None:
        self.read: dict[tuple[str, int], int] = {}
        self._entries: dict[str, BoardEntry] = {}
        self._lock = threading.Lock()
        self._now = now
        self._began = now()
        self._streams = streams
        self._writers = writers
        self._policies = Policies()
        self._bounds = self._policies.bounds()
        self._sinks: Sequence[Sink] = ()

    def load(self, states: Mapping[str, bytes], read: Mapping[tuple[str, int], int]) -> None:
        """Start from what Postgres holds, so that a restart without traffic shows every stream."""
        self.read.update(read)
        entries = {}
        for name, stored in states.items():
            if (resting := at_rest(stored)) is not None:
                entries[name] = BoardEntry(resting.line, resting.line, resting.positions, _QUIET)
                continue
            stream = state.decode(stored)
            signed = stream.direction.signed
            summary = summarize(stream)
            positions = {
                writer: signed(known.position) for writer, known in stream.writers.items() if known.retired is None
            }
            entries[name] = BoardEntry(signed(stream.line.position), signed(stream.allocated), positions, summary)
        with self._lock:
            self._entries = {name: entry for name, entry in entries.items() if not entry.ended}

    def follow(self, policies: Policies) -> None:
        """From now on, until there are others."""
        self._policies, self._bounds = policies, policies.bounds()

    @contextmanager
    def beside(self, sinks: Sequence[Sink]) -> Iterator[None]:
        """Show what these show, while the block runs: a process without the lease compares nothing any more."""
        self._sinks = sinks
        try:
            yield
        finally:
            self._sinks = ()

    def forget(self) -> None:
        """Another process has the lease: what this one knows gets old, and a gap that is closed would age for ever, as
        would records that this one has not read."""
        with self._lock:
            self._entries = {}
        for gauge in (metrics.KAFKA_END, metrics.KAFKA_READ, metrics.KAFKA_LAG):
            gauge.clear()

    def update(self, effects: Iterable[ShardEffects]) -> None:
        """A batch was published."""
        with self._lock:
            for shard in effects:
                self.read.update({(seen.topic, seen.partition): seen.offset for seen in shard.progress})
                for stream in shard.streams:
                    self._update(stream)

    def _update(self, stream: StreamEffects) -> None:
        summary = _QUIET if stream.summary == _QUIET else stream.summary
        entry = self._entries.setdefault(stream.stream, BoardEntry(0, 0, {}, summary))
        entry.linear, entry.allocated, entry.summary = stream.linear, stream.allocated, summary
        for row in stream.writers:
            if row.retired:
                entry.positions.pop(row.writer, None)
            else:
                entry.positions[row.writer] = row.position
        if entry.ended:
            del self._entries[stream.stream]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Called by the scrape, on its thread."""
        families = {
            key: GaugeMetricFamily(name, meaning, labels=labels)
            for key, (name, labels, meaning) in STREAM_GAUGES.items()
        }
        now = self._now()
        with self._lock:
            own = self._policies.given
            entries = sorted(self._entries.items(), key=lambda it: (it[0] not in own, it[0]))
            named, others = entries[: self._streams], entries[self._streams :]
            left, writers, positions = self._writers, 0, 0
            for number, (stream, entry) in enumerate(entries):
                shown = sorted(entry.positions.items())[:left] if number < self._streams else []
                left -= len(shown)
                for writer, position in shown:
                    families["position"].add_metric([stream, writer], position)
                writers += len(entry.positions) - len(shown)
                positions += sum(entry.positions.values()) - sum(position for _, position in shown)
            if writers:
                families["position"].add_metric([OTHER_STREAMS, OTHER_WRITERS], positions)
            for stream, entry in named:
                for key, value in self._values(entry, now).items():
                    families[key].add_metric([stream], value)
            of_others = [self._values(entry, now) for _, entry in others]
            for key in of_others[0] if of_others else ():
                several = max if key in ("age", "behind_seconds") else sum
                families[key].add_metric([OTHER_STREAMS], several(values[key] for values in of_others))
            self._show_bounds(families["bound"], named, others)
            self._show_copies(families["copy"], named, others)
            self._show_thresholds(families, named, others)
            unnamed = self._show_holders(families["held"], families["holder_silent"], entries, now)
        for what, count in (("streams", len(others)), ("writers", writers), ("holders", unnamed)):
            families["together"].add_metric([what], count)
        return families.values()

    def waiting(self) -> dict[str, dict[str, Any]]:
        """Streams whose line is below its head for longer than it may be, each with what a log says of that."""
        now, found = self._now(), {}
        with self._lock:
            for stream, it in self._entries.items():
                behind = it.summary.behind
                seconds = self._age(behind.since, now) if behind is not None else 0.0
                if behind is None or seconds < (self._policies.value(stream, "behind_seconds") or HELD_AFTER):
                    continue
                who = {"writer": behind.holders[0].writer, "reason": behind.holders[0].reason} if behind.holders else {}
                found[stream] = {"stream": stream, "linear": it.linear, "ids": behind.ids, "seconds": round(seconds)}
                found[stream] |= who
        return found

    def near(self) -> dict[str, dict[str, Any]]:
        """The same of streams and bounds of them that are filled by half or more."""
        with self._lock:
            return {
                f"{stream} {bound}": {"stream": stream, "bound": bound, "used": round(used, 2)}
                for stream, it in self._entries.items()
                for bound, used in self._used(stream, it.summary).items()
            }

    def _show_bounds(self, family: GaugeMetricFamily, named: Entries, others: Entries) -> None:
        for stream, entry in named:
            for bound, used in self._used(stream, entry.summary).items():
                family.add_metric([stream, bound], used)
        fullest: dict[str, float] = {}
        for stream, entry in others:
            for bound, used in self._used(stream, entry.summary).items():
                fullest[bound] = max(used, fullest.get(bound, 0.0))
        for bound, used in fullest.items():
            family.add_metric([OTHER_STREAMS, bound], used)

    def _used(self, stream: str, summary: Summary) -> dict[str, float]:
        bounds = self._bounds.of(stream)
        used = {
            "pending": summary.spans / bounds.pending,
            "completed": summary.completed / bounds.completed,
            "unknown": len(summary.unknown) / bounds.held,
        }
        return {bound: ratio for bound, ratio in used.items() if ratio >= NEAR}

    def _show_thresholds(self, families: Mapping[str, GaugeMetricFamily], named: Entries, others: Entries) -> None:
        for setting in THRESHOLDS:
            for stream, _ in named:
                if (value := self._policies.value(stream, setting)) is not None:
                    families[f"policy_{setting}"].add_metric([stream], value)
            values = (self._policies.value(stream, setting) for stream, _ in others)
            if least := min((value for value in values if value is not None), default=None):
                families[f"policy_{setting}"].add_metric([OTHER_STREAMS], least)

    def _show_copies(self, family: GaugeMetricFamily, named: Entries, others: Entries) -> None:
        for copy, lines in self._copies():
            for stream, _ in named:
                if stream in lines:
                    family.add_metric([stream, copy], lines[stream])
            if others:
                family.add_metric([OTHER_STREAMS, copy], sum(lines.get(stream, 0) for stream, _ in others))

    def _copies(self) -> Iterator[tuple[str, dict[str, int]]]:
        for number, sink in enumerate(self._sinks):
            compared = sink.compared()
            if number == 0:
                yield "postgres", {stream: durable for stream, (durable, _) in compared.items()}
            yield sink.name, {stream: shown for stream, (_, shown) in compared.items()}

    def _show_holders(self, family: GaugeMetricFamily, silent: GaugeMetricFamily, entries: Entries, now: float) -> int:
        """Returns how many have no series of their own."""
        unnamed = 0
        held: list[tuple[float, str, Holder]] = []
        for stream, entry in entries:
            if entry.summary.behind is not None:
                found = [(self._age(it.since, now), stream, it) for it in entry.summary.behind.holders]
                held += [it for it in found if it[0] >= HELD_AFTER]
                unnamed += entry.summary.behind.count - len(entry.summary.behind.holders)
        held.sort(key=lambda it: (-it[0], it[1], it[2].writer))
        for age, stream, it in held[: self._streams]:
            labels = [stream, it.writer, it.reason]
            family.add_metric(labels, age)
            if it.seen:
                silent.add_metric(labels, now - it.seen / 1000)
        if rest := held[self._streams :]:
            family.add_metric([OTHER_STREAMS, OTHER_WRITERS, "any"], rest[0][0])
        return len(rest) + unnamed

    def _values(self, entry: BoardEntry, now: float) -> dict[str, float]:
        oldest, behind = entry.summary.oldest, entry.summary.behind
        return {
            "linear": entry.linear,
            "allocated": entry.allocated,
            "pending": entry.summary.pending,
            "gaps": entry.summary.gaps,
            "age": self._age(oldest.since, now) if oldest else 0.0,
            "unknown": len(entry.summary.unknown),
            "behind": behind.ids if behind else 0,
            "behind_seconds": self._age(behind.since, now) if behind else 0.0,
        }

    def _age(self, since: int | None, now: float) -> float:
        """Of what nobody knows since when (a state of an earlier version), since this process looks."""
        return max(0.0, now - (self._began if since is None else since / 1000))
