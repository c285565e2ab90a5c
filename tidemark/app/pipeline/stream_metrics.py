"""Metrics of streams at the time of a scrape, and the log of thresholds that streams cross.

There may be a million streams. Sums are updated with every change, so that a scrape reads only streams with their own
series and streams that are not quiet.
"""

import math
import threading
import time
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import merge, nsmallest
from operator import itemgetter
from typing import Any, Final, NamedTuple

from msgspec.structs import replace
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tidemark.app.pipeline import metrics
from tidemark.app.pipeline.metrics import STREAM_GAUGES
from tidemark.common.log import get_logger
from tidemark.sinks.port import Sink
from tidemark.streaming.core import codec
from tidemark.streaming.core.effects import (
    BRIEF_WAIT,
    LinearBlocker,
    ShardEffects,
    Source,
    StreamEffects,
    Summary,
    summarize,
)
from tidemark.streaming.core.fast_path import caught_up
from tidemark.streaming.core.store import ShardedStates
from tidemark.streaming.values.limits import Policies

QUIET = Summary(0, 0, None, [], 0, None)
"""The summary of every stream without pending records, gaps, linear lag and unknown writers: one object for all."""


@dataclass(slots=True)
class StreamEntry:
    """The metrics of one stream. `positions` has the writers that have not retired. `sources` were removed from the
    summary, because otherwise no stream with a relay would be quiet.
    """

    linear: int
    allocated: int
    positions: dict[str, int]
    summary: Summary
    sources: Sequence[Source] = ()

    @classmethod
    def of_state(cls, stored: bytes) -> "StreamEntry":
        if (resting := caught_up(stored)) is not None:
            return cls(resting.linear, resting.linear, resting.positions, QUIET, resting.sources)
        stream = codec.decode(stored)
        signed = stream.direction.signed
        positions = {name: signed(w.position) for name, w in stream.writers.items() if w.retired is None}
        linear, allocated = signed(stream.linear.position), signed(stream.allocated)
        return cls(linear, allocated, positions, *_divided(summarize(stream)))

    @property
    def ended(self) -> bool:
        """Whether all writers have retired, and none is unknown."""
        return not self.positions and not self.summary.unknown


def _divided(summary: Summary) -> tuple[Summary, Sequence[Source]]:
    """A summary without its sources, and the sources."""
    return (replace(summary, sources=[]), summary.sources) if summary.sources else (summary, ())


class StreamEntries:
    """Streams that have not ended, by name. For one thread.

    A stream whose state has not changed since the start stays encoded until it is read.

    Attributes:
        linear: sum of the linear positions.
        allocated: sum of the highest IDs.
        positions: sum of the positions of `writers` writers.
        active: streams that are not quiet.
        sources: by stream, the relays and bridges that send OPEN records.
        version: changes when a stream begins or ends.
        ended: names of the streams that have ended.
    """

    def __init__(self, most: int, stored: ShardedStates) -> None:
        self.active: dict[str, StreamEntry] = {}
        self.sources: dict[str, Sequence[Source]] = {}
        self.linear = self.allocated = self.positions = self.writers = 0
        self.version = 0
        self.ended: set[str] = set()
        self._streams = 0
        self._stored = stored
        self._open: dict[str, StreamEntry] = {}
        self._most = most
        self._preferred: Collection[str] = ()
        self._first: list[tuple[bool, str]] | None = None
        for name, data in stored.items():
            entry = StreamEntry.of_state(data)
            if entry.ended:
                self.ended.add(name)
                continue
            self._streams += 1
            self._count(name, entry, 1)
            if entry.summary is not QUIET:
                self._open[name] = entry

    def __len__(self) -> int:
        return self._streams

    def __getitem__(self, name: str) -> StreamEntry:
        """The entry of a stream. Raises KeyError."""
        entry = self._find(name)
        if entry is None:
            raise KeyError(name)
        return entry

    def __iter__(self) -> Iterator[str]:
        yield from self._open
        yield from (name for name in self._stored.names() if name not in self._open and name not in self.ended)

    def update(self, stream: StreamEffects) -> None:
        """Apply the effects of a batch."""
        name = stream.stream
        known = self._find(name)
        entry = known or StreamEntry(0, 0, {}, QUIET)
        if known is not None:
            self._count(name, known, -1)
        entry.linear, entry.allocated = stream.linear, stream.allocated
        entry.summary, entry.sources = _divided(stream.summary)
        for row in stream.writers:
            if row.retired:
                entry.positions.pop(row.writer, None)
            else:
                entry.positions[row.writer] = row.position
        if entry.ended:
            if name not in self.ended:
                self._end(name)
            return
        self._count(name, entry, 1)
        if known is None:
            self._begin(name, entry)

    def prefer(self, names: Collection[str]) -> None:
        """Put these streams first in `first`."""
        self._preferred, self._first = names, None

    def first(self) -> list[str]:
        """The first `most` streams in the order of names, preferred ones first."""
        if self._first is None:
            first = [(False, name) for name in sorted(self._preferred) if self._find(name) is not None]
            last = None
            for name in merge(self._stored.names(), nsmallest(self._most + len(first), self._open)):
                if len(first) >= self._most:
                    break
                if name != last and name not in self.ended and name not in self._preferred:
                    first.append((True, name))
                last = name
            self._first = first[: self._most]
        return [name for _, name in self._first]

    def _find(self, name: str) -> StreamEntry | None:
        if (entry := self._open.get(name)) is not None or name in self.ended:
            return entry
        if (data := self._stored.get(name)) is None:
            return None
        self._open[name] = entry = StreamEntry.of_state(data)
        return entry

    def _begin(self, name: str, entry: StreamEntry) -> None:
        self._open[name] = entry
        self.ended.discard(name)
        self._streams += 1
        self.version += 1
        if self._first is not None:
            insort(self._first, self._rank(name))
            del self._first[self._most :]

    def _end(self, name: str) -> None:
        self.ended.add(name)
        self.version += 1
        if self._open.pop(name, None) is not None:
            self._streams -= 1
            if self._first and self._rank(name) <= self._first[-1]:
                self._first = None  # another stream takes its place

    def _rank(self, name: str) -> tuple[bool, str]:
        return name not in self._preferred, name

    def _count(self, name: str, entry: StreamEntry, sign: int) -> None:
        self.linear += sign * entry.linear
        self.allocated += sign * entry.allocated
        self.positions += sign * sum(entry.positions.values())
        self.writers += sign * len(entry.positions)
        self.sources.pop(name, None)
        if entry.sources and sign > 0:
            self.sources[name] = entry.sources
        if entry.summary is QUIET:
            return
        if entry.summary == QUIET:
            entry.summary = QUIET
        elif sign > 0:
            self.active[name] = entry
        else:
            del self.active[name]


log = get_logger(__name__)

THRESHOLDS = ("gap_seconds", "silent_seconds", "behind_seconds", "behind_ids")
NEAR_BOUND = 0.5  # a stream that uses less of a bound has no series for it
MAXIMA = ("age", "behind_seconds")  # aggregated by the maximum; other gauges by the sum
OTHER_STREAMS, OTHER_WRITERS = "other streams", "other writers"  # no name has a space
NO_STATES = ShardedStates(1, {})

Entries = Mapping[str, StreamEntry]


class _Sums(NamedTuple):
    """Sums of linear positions (Postgres, sink) for one result of `Sink.compared`: over all streams, and over ended
    ones.

    The sum of ended streams is of `version` of the entries.
    """

    compared: Mapping[str, tuple[int, int]]
    everything: tuple[int, int]
    version: int
    ended: tuple[int, int]


class StreamCollector(Collector):
    """The Prometheus collector of streams. The thread of batches updates it; any number of threads scrape it.

    Values come from the states at the start and from the effects of batches afterwards. The first `streams` streams by
    name, streams with a policy first, have their own series, and so do the first `writers` of their writers. All others
    share one series, so that a scrape is bounded. Streams that have ended and writers that have retired have no series.

    `read` has the next offset to read, by topic and partition. `now` returns seconds since 1970.
    """

    def __init__(self, now: Callable[[], float] = time.time, streams: int = 1000, writers: int = 5000) -> None:
        self.read: dict[tuple[str, int], int] = {}
        self._entries = StreamEntries(streams, NO_STATES)
        self._copied: dict[int, _Sums] = {}
        self._least: tuple[int, Policies, dict[str, int | None]] | None = None
        self._lock = threading.Lock()
        self._now = now
        self._began = self._reading_since = now()
        self._streams = streams
        self._writers = writers
        self._policies = Policies()
        self._bounds = self._policies.bounds()
        self._sinks: Sequence[Sink] = ()

    def load(self, states: ShardedStates, offsets: Mapping[str, Mapping[int, int]]) -> None:
        """Load the states in Postgres, so that after a restart streams without traffic have metrics too."""
        self.read.update(
            {(topic, number): offset for topic, partitions in offsets.items() for number, offset in partitions.items()}
        )
        self._begin(StreamEntries(self._streams, states))

    def new_offsets(self, effects: Sequence[ShardEffects]) -> int:
        """The number of offsets that a batch has read and `update` has not counted yet."""
        reached = {(seen.topic, seen.partition): seen.offset for shard in effects for seen in shard.progress}
        return sum(offset - self.read.get(partition, offset) for partition, offset in reached.items())

    def follow(self, policies: Policies) -> None:
        """Replace the policies."""
        with self._lock:
            self._policies, self._bounds = policies, policies.bounds()
            self._entries.prefer(policies.given)

    @contextmanager
    def comparing(self, sinks: Sequence[Sink]) -> Iterator[None]:
        """Show the linear positions of these sinks during the block. A process without the lease has none."""
        self._sinks = sinks
        try:
            yield
        finally:
            self._sinks = ()

    def set_reading(self, *, is_reading: bool) -> None:
        """Set whether Kafka answers. While Kafka does not answer, no heartbeat counts as missed; later, time counts
        from its next answer.
        """
        self._reading_since = self._now() if is_reading else math.inf

    def forget(self) -> None:
        """Drop all values, because another process has the lease, and gaps and lag would age indefinitely."""
        self._begin(StreamEntries(self._streams, NO_STATES))
        for gauge in metrics.KAFKA_GAUGES:
            gauge.clear()

    def _begin(self, entries: StreamEntries) -> None:
        with self._lock:
            self._reading_since = self._now()
            entries.prefer(self._policies.given)
            self._entries, self._copied, self._least = entries, {}, None

    def update(self, effects: Iterable[ShardEffects]) -> None:
        """Apply the effects of a published batch."""
        with self._lock:
            for shard in effects:
                self.read.update({(seen.topic, seen.partition): seen.offset for seen in shard.progress})
                for stream in shard.streams:
                    self._entries.update(stream)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The metrics for a scrape. Called on its thread."""
        families = {
            key: GaugeMetricFamily(name, meaning, labels=labels)
            for key, (name, labels, meaning) in STREAM_GAUGES.items()
        }
        now = self._now()
        with self._lock:
            entries = self._entries
            named = {stream: entries[stream] for stream in entries.first()}
            others = len(entries) - len(named)
            active = {stream: entry for stream, entry in entries.active.items() if stream not in named}
            left, writers, positions = self._writers, entries.writers, entries.positions
            for stream, entry in named.items():
                shown = sorted(entry.positions.items())[:left]
                left -= len(shown)
                for writer, position in shown:
                    families["position"].add_metric([stream, writer], position)
                writers -= len(shown)
                positions -= sum(position for _, position in shown)
            if writers:
                families["position"].add_metric([OTHER_STREAMS, OTHER_WRITERS], positions)
            for stream, entry in named.items():
                for key, value in self._values(entry, now).items():
                    families[key].add_metric([stream], value)
            if others:
                for key, value in self._others(named, active, now).items():
                    families[key].add_metric([OTHER_STREAMS], value)
            self._show_bounds(families["bound"], named, active)
            self._show_copies(families["copy"], named, others)
            self._show_thresholds(families, named, others)
            unnamed = self._show_blockers(families["held"], families["holder_silent"], now)
            self._show_sources(families["source_silent"], families["source_blocked"], now)
        for kind, count in (("streams", others), ("writers", writers), ("blockers", unnamed)):
            families["together"].add_metric([kind], count)
        return families.values()

    def blocked(self) -> dict[str, dict[str, Any]]:
        """The fields of a log line for each stream whose linear position has lagged longer than its policy allows."""
        now, blocked = self._now(), dict[str, dict[str, Any]]()
        with self._lock:
            for stream, entry in self._entries.active.items():
                behind = entry.summary.linear_lag
                seconds = self._age(behind.since, now) if behind is not None else 0.0
                if behind is None or seconds < (self._policies.value(stream, "behind_seconds") or BRIEF_WAIT):
                    continue
                fields = {"stream": stream, "linear": entry.linear, "ids": behind.ids, "seconds": round(seconds)}
                if behind.blockers:
                    fields |= {"writer": behind.blockers[0].writer, "reason": behind.blockers[0].reason}
                blocked[stream] = fields
        return blocked

    def near_bounds(self) -> dict[str, dict[str, Any]]:
        """The fields of a log line for each bound of a stream that is at least half used."""
        with self._lock:
            return {
                f"{stream} {bound}": {"stream": stream, "bound": bound, "used": round(used, 2)}
                for stream, entry in self._entries.active.items()
                for bound, used in self._used(stream, entry.summary).items()
            }

    def _show_bounds(self, family: GaugeMetricFamily, named: Entries, others: Entries) -> None:
        for stream, entry in named.items():
            for bound, used in self._used(stream, entry.summary).items():
                family.add_metric([stream, bound], used)
        fullest: dict[str, float] = {}
        for stream, entry in others.items():
            for bound, used in self._used(stream, entry.summary).items():
                fullest[bound] = max(used, fullest.get(bound, 0.0))
        for bound, used in fullest.items():
            family.add_metric([OTHER_STREAMS, bound], used)

    def _used(self, stream: str, summary: Summary) -> dict[str, float]:
        bounds = self._bounds.of(stream)
        used = {
            "pending": summary.spans / bounds.pending,
            "completed": summary.completed / bounds.completed,
            "unknown": len(summary.unknown) / bounds.unjoined,
        }
        return {bound: ratio for bound, ratio in used.items() if ratio >= NEAR_BOUND}

    def _show_thresholds(self, families: Mapping[str, GaugeMetricFamily], named: Entries, others: int) -> None:
        for setting in THRESHOLDS:
            for stream in named:
                if (value := self._policies.value(stream, setting)) is not None:
                    families[f"policy_{setting}"].add_metric([stream], value)
            if others and (least := self._least_of_others(setting)):
                families[f"policy_{setting}"].add_metric([OTHER_STREAMS], least)

    def _least_of_others(self, setting: str) -> int | None:
        if not any(setting in given for given in self._policies.given.values()):
            return self._policies.value("*", setting)
        entries, policies = self._entries, self._policies
        if self._least is None or self._least[:2] != (entries.version, policies):
            self._least = entries.version, policies, {}
        least = self._least[2]
        if setting not in least:
            named = {*entries.first()}
            values = (policies.value(stream, setting) for stream in entries if stream not in named)
            least[setting] = min((value for value in values if value is not None), default=None)
        return least[setting]

    def _show_copies(self, family: GaugeMetricFamily, named: Entries, others: int) -> None:
        for number, sink in enumerate(self._sinks):
            compared = sink.compared()
            sums = self._sums(number, compared)
            for index, copy in enumerate(("postgres", sink.name)):
                if index == 0 and number > 0:
                    continue
                shown = [(stream, compared[stream][index]) for stream in named if stream in compared]
                for stream, linear in shown:
                    family.add_metric([stream, copy], linear)
                if others:
                    family.add_metric([OTHER_STREAMS, copy], sums[index] - sum(linear for _, linear in shown))

    def _sums(self, number: int, compared: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
        """Sums over the streams that have not ended. All streams are read only after a new comparison."""
        known, entries = self._copied.get(number), self._entries
        if known is None or known.compared is not compared:
            known = _Sums(compared, _summed(compared.values()), -1, (0, 0))
        if known.version != entries.version:
            ended = _summed(compared[stream] for stream in entries.ended if stream in compared)
            known = known._replace(version=entries.version, ended=ended)
        self._copied[number] = known
        return known.everything[0] - known.ended[0], known.everything[1] - known.ended[1]

    def _show_blockers(self, family: GaugeMetricFamily, silent: GaugeMetricFamily, now: float) -> int:
        """Add the blockers; returns the number of blockers without their own series."""
        unnamed = 0
        blockers: list[tuple[float, str, LinearBlocker]] = []
        for stream, entry in self._entries.active.items():
            if entry.summary.linear_lag is not None:
                rows = [
                    (self._age(blocker.since, now), stream, blocker) for blocker in entry.summary.linear_lag.blockers
                ]
                blockers += [row for row in rows if row[0] >= BRIEF_WAIT]
                unnamed += entry.summary.linear_lag.count - len(entry.summary.linear_lag.blockers)
        blockers.sort(key=lambda row: (-row[0], row[1], row[2].writer))
        for age, stream, blocker in blockers[: self._streams]:
            labels = [stream, blocker.writer, blocker.reason]
            family.add_metric(labels, age)
            if blocker.seen:
                silent.add_metric(labels, now - blocker.seen / 1000)
        if rest := blockers[self._streams :]:
            family.add_metric([OTHER_STREAMS, OTHER_WRITERS, "any"], rest[0][0])
        return len(rest) + unnamed

    def _show_sources(self, silent: GaugeMetricFamily, blocked: GaugeMetricFamily, now: float) -> None:
        """Add the streams whose relay or bridge sends nothing new, longest first."""
        silent_rows, blocked_rows = list[tuple[float, str, str]](), list[tuple[float, str, str]]()
        for stream, sources in self._entries.sources.items():
            for source in sources:
                if (seconds := source.overdue(now, self._reading_since)) is not None:
                    silent_rows.append((seconds, stream, source.writer))
                elif source.report.blocked:
                    blocked_rows.append((now - source.report.since / 1000, stream, source.writer))
        for family, rows in ((silent, silent_rows), (blocked, blocked_rows)):
            rows.sort(reverse=True)
            for seconds, stream, writer in rows[: self._streams]:
                family.add_metric([stream, writer], seconds)
            if rest := rows[self._streams :]:
                family.add_metric([OTHER_STREAMS, OTHER_WRITERS], rest[0][0])

    def _others(self, named: Entries, active: Entries, now: float) -> dict[str, float]:
        """The values of all streams that are not `named`. Quiet streams only have a linear position and a highest
        ID.
        """
        rows = [self._values(entry, now) for entry in (StreamEntry(0, 0, {}, QUIET), *active.values())]
        values = {key: (max if key in MAXIMA else sum)(row[key] for row in rows) for key in rows[0]}
        values["linear"] = self._entries.linear - sum(entry.linear for entry in named.values())
        values["allocated"] = self._entries.allocated - sum(entry.allocated for entry in named.values())
        return values

    def _values(self, entry: StreamEntry, now: float) -> dict[str, float]:
        oldest, behind = entry.summary.oldest, entry.summary.linear_lag
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
        """Seconds since `since` (ms), or since the start of this process if it is None."""
        return max(0.0, now - (self._began if since is None else since / 1000))


def _summed(positions: Iterable[tuple[int, int]]) -> tuple[int, int]:
    postgres = sink = 0
    for stored, published in positions:
        postgres += stored
        sink += published
    return postgres, sink


SINGLE: Final = 10  # lines of one kind in one check; more are merged into one line
Fields = dict[str, Any]


@dataclass(slots=True)
class ThresholdLog:
    """Logs once when a stream crosses a threshold, and once when it returns. For one thread.

    The first check of a process logs all crossed thresholds.
    """

    collector: StreamCollector
    _crossed: dict[str, dict[str, Fields]] = field(default_factory=dict)

    def check(self) -> None:
        """Compare the streams with the last check."""
        blocked = self.collector.blocked()
        self._compare("The linear position is blocked", "The linear position is no longer blocked", blocked)
        self._compare("A stream is near a bound", "A stream is no longer near a bound", self.collector.near_bounds())

    def _compare(self, event: str, end: str, crossed: dict[str, Fields]) -> None:
        before = self._crossed.get(event, {})
        self._crossed[event] = crossed
        _log(log.warning, event, [fields for name, fields in crossed.items() if name not in before])
        _log(log.info, end, [_names(fields) for name, fields in before.items() if name not in crossed])


def _names(fields: Fields) -> Fields:
    """The identifying fields, without values that change."""
    return {name: fields[name] for name in ("stream", "bound") if name in fields}


def _log(write: Callable[..., object], event: str, lines: list[Fields]) -> None:
    lines.sort(key=itemgetter("stream"))
    if len(lines) > SINGLE:
        write(event, count=len(lines), streams=[fields["stream"] for fields in lines[:SINGLE]])
        return
    for fields in lines:
        write(event, **fields)
