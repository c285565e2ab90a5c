"""Computes the metrics of streams for a scrape, and logs the thresholds that streams cross.

There may be a million streams. Sums are updated with every batch, so that a scrape reads only the streams with their
own series and the streams that are not quiet.
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
    BRIEF_WAIT_SECONDS,
    LinearBlocker,
    ShardEffects,
    Source,
    StreamEffects,
    Summary,
    summarize,
)
from tidemark.streaming.core.fast_path import read_if_caught_up
from tidemark.streaming.core.store import ShardedStates
from tidemark.streaming.values.limits import Policies

QUIET_SUMMARY = Summary(0, 0, None, [], 0, None)
"""The shared summary of all quiet streams: no pending records, gaps, linear lag or unknown writers."""


@dataclass(slots=True)
class StreamEntry:
    """The metrics of one stream. IDs are signed.

    Attributes:
        linear: the linear position.
        allocated: the highest allocated ID.
        positions: writer -> position, without retired writers.
        summary: the summary of the stream, without its sources. With its sources, a stream with a relay would never be
            quiet.
        sources: the relays and bridges of the stream that send OPEN records.
    """

    linear: int
    allocated: int
    positions: dict[str, int]
    summary: Summary
    sources: Sequence[Source] = ()

    @classmethod
    def of_state(cls, encoded_state: bytes) -> "StreamEntry":
        """The metrics of an encoded stream state."""
        if (quiet := read_if_caught_up(encoded_state)) is not None:
            return cls(quiet.linear, quiet.linear, quiet.positions, QUIET_SUMMARY, quiet.sources)
        stream = codec.decode(encoded_state)
        signed = stream.direction.signed
        positions = {name: signed(w.position) for name, w in stream.writers.items() if w.retired_at is None}
        linear, allocated = signed(stream.linear.position), signed(stream.allocated)
        return cls(linear, allocated, positions, *_split_sources(summarize(stream)))

    @property
    def has_ended(self) -> bool:
        """Whether all writers have retired, and every writer that has sent a record has joined."""
        return not self.positions and not self.summary.unknown_writers


def _split_sources(summary: Summary) -> tuple[Summary, Sequence[Source]]:
    """Return a copy of the summary without its sources, and the sources."""
    return (replace(summary, sources=[]), summary.sources) if summary.sources else (summary, ())


class StreamEntries:
    """The metrics of streams that have not ended, by name. For one thread.

    The metrics of a quiet stream are computed from its encoded state when a batch or a scrape needs them.

    Args:
        max_first: the largest number of streams that `first_names` returns.
        stored: the encoded states of all streams.

    Attributes:
        linear_sum: the sum of the linear positions.
        allocated_sum: the sum of the highest allocated IDs.
        position_sum: the sum of the positions of all writers that have not retired.
        writer_count: the number of writers that have not retired.
        active_entries: the metrics of the streams that are not quiet, by name.
        sources: stream -> its relays and bridges that send OPEN records. Streams without such a source are left out.
        version: a number that rises when a stream begins or ends.
        ended_streams: the names of the streams that have ended.
    """

    def __init__(self, max_first: int, stored: ShardedStates) -> None:
        self.active_entries: dict[str, StreamEntry] = {}
        self.sources: dict[str, Sequence[Source]] = {}
        self.linear_sum = self.allocated_sum = self.position_sum = self.writer_count = 0
        self.ended_streams: set[str] = set()
        self.version = self._stream_count = 0
        self._stored = stored
        self._decoded: dict[str, StreamEntry] = {}
        self._max_first = max_first
        self._preferred_names: Collection[str] = ()
        self._first_ranks: list[tuple[bool, str]] | None = None  # (whether not preferred, name) of `first_names`
        for name, data in stored.items():
            entry = StreamEntry.of_state(data)
            if entry.has_ended:
                self.ended_streams.add(name)
                continue
            self._stream_count += 1
            self._count(name, entry, 1)
            if entry.summary is not QUIET_SUMMARY:
                self._decoded[name] = entry

    def __len__(self) -> int:
        return self._stream_count

    def __getitem__(self, name: str) -> StreamEntry:
        """The metrics of a stream. Raises `KeyError` if the stream is unknown or has ended."""
        if (entry := self._find(name)) is None:
            raise KeyError(name)
        return entry

    def __iter__(self) -> Iterator[str]:
        stored = self._stored.names()
        yield from self._decoded
        yield from (name for name in stored if name not in self._decoded and name not in self.ended_streams)

    def update(self, stream: StreamEffects) -> None:
        """Apply the effects of a batch on one stream."""
        name = stream.stream
        known = self._find(name)
        entry = known or StreamEntry(0, 0, {}, QUIET_SUMMARY)
        if known is not None:
            self._count(name, known, -1)
        entry.linear, entry.allocated = stream.linear, stream.allocated
        entry.summary, entry.sources = _split_sources(stream.summary)
        for row in stream.writers:
            if row.is_retired:
                entry.positions.pop(row.writer, None)
            else:
                entry.positions[row.writer] = row.position
        if entry.has_ended:
            if name not in self.ended_streams:
                self._end(name)
            return
        self._count(name, entry, 1)
        if known is None:
            self._begin(name, entry)

    def prefer(self, names: Collection[str]) -> None:
        """Set the streams that `first_names` returns before all others."""
        self._preferred_names, self._first_ranks = names, None

    def first_names(self) -> list[str]:
        """The names of at most `max_first` streams: preferred streams first, then others, each group sorted by name."""
        if self._first_ranks is None:
            first = [(False, name) for name in sorted(self._preferred_names) if self._find(name) is not None]
            last = None
            for name in merge(self._stored.names(), nsmallest(self._max_first + len(first), self._decoded)):
                if len(first) >= self._max_first:
                    break
                if name != last and name not in self.ended_streams and name not in self._preferred_names:
                    first.append((True, name))
                last = name
            self._first_ranks = first[: self._max_first]
        return [name for _, name in self._first_ranks]

    def _find(self, name: str) -> StreamEntry | None:
        if (entry := self._decoded.get(name)) is not None or name in self.ended_streams:
            return entry
        if (data := self._stored.get(name)) is None:
            return None
        self._decoded[name] = entry = StreamEntry.of_state(data)
        return entry

    def _begin(self, name: str, entry: StreamEntry) -> None:
        self._decoded[name] = entry
        self.ended_streams.discard(name)
        self._stream_count += 1
        self.version += 1
        if self._first_ranks is not None:
            insort(self._first_ranks, self._rank(name))
            del self._first_ranks[self._max_first :]

    def _end(self, name: str) -> None:
        self.ended_streams.add(name)
        self.version += 1
        if self._decoded.pop(name, None) is not None:
            self._stream_count -= 1
            if self._first_ranks and self._rank(name) <= self._first_ranks[-1]:
                self._first_ranks = None  # the list lacks a stream now

    def _rank(self, name: str) -> tuple[bool, str]:
        return name not in self._preferred_names, name

    def _count(self, name: str, entry: StreamEntry, sign: int) -> None:
        """Add a stream to the sums and to `active_entries` and `sources` (`sign` 1), or remove the stream (-1)."""
        self.linear_sum += sign * entry.linear
        self.allocated_sum += sign * entry.allocated
        self.position_sum += sign * sum(entry.positions.values())
        self.writer_count += sign * len(entry.positions)
        self.sources.pop(name, None)
        if entry.sources and sign > 0:
            self.sources[name] = entry.sources
        if entry.summary is QUIET_SUMMARY:
            return
        if entry.summary == QUIET_SUMMARY:
            entry.summary = QUIET_SUMMARY
        elif sign > 0:
            self.active_entries[name] = entry
        else:
            del self.active_entries[name]


log = get_logger(__name__)

THRESHOLDS = ("gap_seconds", "silent_seconds", "behind_seconds", "behind_ids")
NEAR_BOUND_SHARE = 0.5  # a stream that uses a smaller part of a bound has no series for the bound
AGGREGATED_BY_MAX = ("age", "behind_seconds")  # all other gauges are aggregated by the sum
OTHER_STREAMS, OTHER_WRITERS = "other streams", "other writers"  # no stream has these names: a name contains no space
NO_STATES = ShardedStates(1, {})

Entries = Mapping[str, StreamEntry]


class _Sums(NamedTuple):
    """Cached sums of the linear positions in Postgres and in one sink, as pairs (sum in Postgres, sum in the sink).

    Attributes:
        compared: the result of `Sink.compared_positions` from which the sums were computed.
        total: the sums of all streams.
        version: `StreamEntries.version` at the time when `ended_total` was computed.
        ended_total: the sums of the streams that have ended.
    """

    compared: Mapping[str, tuple[int, int]]
    total: tuple[int, int]
    version: int
    ended_total: tuple[int, int]


class StreamCollector(Collector):
    """The Prometheus collector of streams. One thread calls `update` after each batch; any thread may call `collect`.

    Values come from the states at the start, and later from the effects of batches. The number of series is limited:
    streams and writers beyond the limits share one series. Streams with a policy come first, then streams by name.
    Streams that have ended and writers that have retired have no series.

    Attributes:
        read_offsets: (topic, partition) -> next offset to read.
    """

    def __init__(self, now: Callable[[], float] = time.time, max_streams: int = 1000, max_writers: int = 5000) -> None:
        """
        Args:
            now: a clock, in seconds since 1970.
            max_streams: the largest number of streams with their own series.
            max_writers: the largest number of writers with their own series.
        """
        self.read_offsets: dict[tuple[str, int], int] = {}
        self._entries = StreamEntries(max_streams, NO_STATES)
        self._sums_by_sink: dict[int, _Sums] = {}
        # Cache: (version of `_entries`, policies, setting -> result of `_min_threshold_of_others`).
        self._threshold_cache: tuple[int, Policies, dict[str, int | None]] | None = None
        self._lock = threading.Lock()
        self._now = now
        self._began_at = self._answering_since = now()
        self._max_streams = max_streams
        self._max_writers = max_writers
        self._policies = Policies()
        self._bounds = self._policies.bounds()
        self._sinks: Sequence[Sink] = ()

    def load(self, states: ShardedStates, offsets: Mapping[str, Mapping[int, int]]) -> None:
        """Replace all values by the values of stored states, so that all streams have metrics after a restart.

        Args:
            states: the states of all streams.
            offsets: topic -> partition -> next offset to read.
        """
        self.read_offsets.update(
            {(topic, number): offset for topic, partitions in offsets.items() for number, offset in partitions.items()}
        )
        self._begin(StreamEntries(self._max_streams, states))

    def count_new_offsets(self, effects: Sequence[ShardEffects]) -> int:
        """Count the offsets that a batch has read. Call this method before `update` with the same batch."""
        reached = {(seen.topic, seen.partition): seen.offset for shard in effects for seen in shard.next_offsets}
        return sum(offset - self.read_offsets.get(partition, offset) for partition, offset in reached.items())

    def set_policies(self, policies: Policies) -> None:
        with self._lock:
            self._policies, self._bounds = policies, policies.bounds()
            self._entries.prefer(policies.by_name)

    @contextmanager
    def showing_sinks(self, sinks: Sequence[Sink]) -> Iterator[None]:
        """During the block, `collect` also returns the linear positions in these sinks."""
        self._sinks = sinks
        try:
            yield
        finally:
            self._sinks = ()

    def set_kafka_answers(self, *, is_answering: bool) -> None:
        """Set whether Kafka answers. While Kafka does not answer, no relay or bridge counts as silent.

        When Kafka answers again, each heartbeat timeout starts again.
        """
        self._answering_since = self._now() if is_answering else math.inf

    def forget(self) -> None:
        """Remove the values of all streams and the Kafka gauges, but keep `read_offsets`. Called after another process
        has taken the lease: without batches, all ages would only rise."""
        self._begin(StreamEntries(self._max_streams, NO_STATES))
        for gauge in metrics.KAFKA_GAUGES:
            gauge.clear()

    def _begin(self, entries: StreamEntries) -> None:
        with self._lock:
            self._answering_since = self._now()
            entries.prefer(self._policies.by_name)
            self._entries, self._sums_by_sink, self._threshold_cache = entries, {}, None

    def update(self, effects: Iterable[ShardEffects]) -> None:
        """Apply the effects of a published batch."""
        with self._lock:
            for shard in effects:
                self.read_offsets.update({(seen.topic, seen.partition): seen.offset for seen in shard.next_offsets})
                for stream in shard.streams:
                    self._entries.update(stream)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Compute the metrics for a scrape, on the thread of the scrape."""
        families = {
            key: GaugeMetricFamily(name, meaning, labels=labels)
            for key, (name, labels, meaning) in STREAM_GAUGES.items()
        }
        now = self._now()
        with self._lock:
            entries = self._entries
            named = {stream: entries[stream] for stream in entries.first_names()}
            others = len(entries) - len(named)
            active = {stream: entry for stream, entry in entries.active_entries.items() if stream not in named}
            free, other_writers, other_positions = self._max_writers, entries.writer_count, entries.position_sum
            for stream, entry in named.items():
                shown = sorted(entry.positions.items())[:free]
                free -= len(shown)
                for writer, position in shown:
                    families["position"].add_metric([stream, writer], position)
                other_writers -= len(shown)
                other_positions -= sum(position for _, position in shown)
            if other_writers:
                families["position"].add_metric([OTHER_STREAMS, OTHER_WRITERS], other_positions)
            for stream, entry in named.items():
                for key, value in self._values(entry, now).items():
                    families[key].add_metric([stream], value)
            if others:
                for key, value in self._others(named, active, now).items():
                    families[key].add_metric([OTHER_STREAMS], value)
            self._show_bounds(families["bound"], named, active)
            self._show_copies(families["copy"], named, others)
            self._show_thresholds(families, named, others)
            unnamed = self._show_blockers(families["blocked"], families["blocker_last_seen"], now)
            self._show_sources(families["source_silent"], families["source_blocked"], now)
        for kind, count in (("streams", others), ("writers", other_writers), ("blockers", unnamed)):
            families["omitted"].add_metric([kind], count)
        return families.values()

    def lagging_streams(self) -> dict[str, dict[str, Any]]:
        """The streams with a long linear lag: stream -> fields of its log line.

        A lag is long after `behind_seconds` of the policy, or after `BRIEF_WAIT_SECONDS` if no policy has this setting.
        """
        now, lagging = self._now(), dict[str, dict[str, Any]]()
        with self._lock:
            for stream, entry in self._entries.active_entries.items():
                lag = entry.summary.linear_lag
                seconds = self._age(lag.since, now) if lag is not None else 0.0
                if lag is None or seconds < (self._policies.value(stream, "behind_seconds") or BRIEF_WAIT_SECONDS):
                    continue
                fields = {"stream": stream, "linear": entry.linear, "ids": lag.id_count, "seconds": round(seconds)}
                if lag.blockers:
                    fields |= {"writer": lag.blockers[0].writer, "reason": lag.blockers[0].reason}
                lagging[stream] = fields
        return lagging

    def near_bounds(self) -> dict[str, dict[str, Any]]:
        """The bounds of which a stream uses `NEAR_BOUND_SHARE` or more: "stream bound" -> fields of the log line."""
        with self._lock:
            return {
                f"{stream} {bound}": {"stream": stream, "bound": bound, "used": round(used, 2)}
                for stream, entry in self._entries.active_entries.items()
                for bound, used in self._used_shares(stream, entry.summary).items()
            }

    def _show_bounds(self, family: GaugeMetricFamily, named: Entries, others: Entries) -> None:
        for stream, entry in named.items():
            for bound, used in self._used_shares(stream, entry.summary).items():
                family.add_metric([stream, bound], used)
        fullest: dict[str, float] = {}
        for stream, entry in others.items():
            for bound, used in self._used_shares(stream, entry.summary).items():
                fullest[bound] = max(used, fullest.get(bound, 0.0))
        for bound, used in fullest.items():
            family.add_metric([OTHER_STREAMS, bound], used)

    def _used_shares(self, stream: str, summary: Summary) -> dict[str, float]:
        """The used share of each bound of the stream, without shares below `NEAR_BOUND_SHARE`."""
        bounds = self._bounds.for_stream(stream)
        used = {
            "pending": summary.max_span_count / bounds.pending,
            "completed": summary.completed_interval_count / bounds.completed,
            "unknown": len(summary.unknown_writers) / bounds.unjoined,
        }
        return {bound: ratio for bound, ratio in used.items() if ratio >= NEAR_BOUND_SHARE}

    def _show_thresholds(self, families: Mapping[str, GaugeMetricFamily], named: Entries, other_count: int) -> None:
        for setting in THRESHOLDS:
            for stream in named:
                if (value := self._policies.value(stream, setting)) is not None:
                    families[f"policy_{setting}"].add_metric([stream], value)
            if other_count and (threshold := self._min_threshold_of_others(setting)):
                families[f"policy_{setting}"].add_metric([OTHER_STREAMS], threshold)

    def _min_threshold_of_others(self, setting: str) -> int | None:
        """The lowest threshold of the streams without their own series; None if no such stream has the threshold."""
        if not any(setting in given for given in self._policies.by_name.values()):
            return self._policies.value("*", setting)
        entries, policies = self._entries, self._policies
        if self._threshold_cache is None or self._threshold_cache[:2] != (entries.version, policies):
            self._threshold_cache = entries.version, policies, {}
        minima = self._threshold_cache[2]
        if setting not in minima:
            named = {*entries.first_names()}
            values = (policies.value(stream, setting) for stream in entries if stream not in named)
            minima[setting] = min((value for value in values if value is not None), default=None)
        return minima[setting]

    def _show_copies(self, family: GaugeMetricFamily, named: Entries, other_count: int) -> None:
        """Add the linear positions in Postgres and in each sink."""
        for number, sink in enumerate(self._sinks):
            compared = sink.compared_positions()
            sums = self._sums(number, compared)
            for index, copy in enumerate(("postgres", sink.name)):
                if index == 0 and number > 0:
                    continue
                shown = [(stream, compared[stream][index]) for stream in named if stream in compared]
                for stream, linear in shown:
                    family.add_metric([stream, copy], linear)
                if other_count:
                    family.add_metric([OTHER_STREAMS, copy], sums[index] - sum(linear for _, linear in shown))

    def _sums(self, number: int, compared: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
        """The sums of the linear positions of the streams that have not ended: (in Postgres, in the sink).

        `number` is the index of the sink. The sums are cached until `compared` is another object.
        """
        sums, entries = self._sums_by_sink.get(number), self._entries
        if sums is None or sums.compared is not compared:
            sums = _Sums(compared, _sum_pairs(compared.values()), -1, (0, 0))
        if sums.version != entries.version:
            ended = _sum_pairs(compared[stream] for stream in entries.ended_streams if stream in compared)
            sums = sums._replace(version=entries.version, ended_total=ended)
        self._sums_by_sink[number] = sums
        return sums.total[0] - sums.ended_total[0], sums.total[1] - sums.ended_total[1]

    def _show_blockers(self, family: GaugeMetricFamily, last_seen: GaugeMetricFamily, now: float) -> int:
        """Add a series for each blocker that has blocked for `BRIEF_WAIT_SECONDS` or longer, the oldest first.

        Returns the number of blockers without a series. A blocker has none beyond the largest number of series, and
        beyond the largest number of blockers in the summary of a stream.
        """
        unnamed = 0
        blockers: list[tuple[float, str, LinearBlocker]] = []
        for stream, entry in self._entries.active_entries.items():
            if entry.summary.linear_lag is not None:
                rows = [
                    (self._age(blocker.since, now), stream, blocker) for blocker in entry.summary.linear_lag.blockers
                ]
                blockers += [row for row in rows if row[0] >= BRIEF_WAIT_SECONDS]
                unnamed += entry.summary.linear_lag.blocker_count - len(entry.summary.linear_lag.blockers)
        blockers.sort(key=lambda row: (-row[0], row[1], row[2].writer))
        for age, stream, blocker in blockers[: self._max_streams]:
            labels = [stream, blocker.writer, blocker.reason]
            family.add_metric(labels, age)
            if blocker.last_seen:
                last_seen.add_metric(labels, now - blocker.last_seen / 1000)
        if rest := blockers[self._max_streams :]:
            family.add_metric([OTHER_STREAMS, OTHER_WRITERS, "any"], rest[0][0])
        return len(rest) + unnamed

    def _show_sources(self, silent: GaugeMetricFamily, blocked: GaugeMetricFamily, now: float) -> None:
        """Add a series for each relay or bridge that is silent or blocked, the longest first; the rest share one."""
        silent_rows, blocked_rows = list[tuple[float, str, str]](), list[tuple[float, str, str]]()
        for stream, sources in self._entries.sources.items():
            for source in sources:
                if (seconds := source.overdue_seconds(now, self._answering_since)) is not None:
                    silent_rows.append((seconds, stream, source.writer))
                elif source.report.blocked:
                    blocked_rows.append((now - source.report.since / 1000, stream, source.writer))
        for family, rows in ((silent, silent_rows), (blocked, blocked_rows)):
            rows.sort(reverse=True)
            for seconds, stream, writer in rows[: self._max_streams]:
                family.add_metric([stream, writer], seconds)
            if rest := rows[self._max_streams :]:
                family.add_metric([OTHER_STREAMS, OTHER_WRITERS], rest[0][0])

    def _others(self, named: Entries, active: Entries, now: float) -> dict[str, float]:
        """The aggregated values of the streams without their own series: key of `STREAM_GAUGES` -> value.

        `named`: the streams with their own series. `active`: the other streams that are not quiet. The values of quiet
        streams are 0, except the linear position and the highest allocated ID, which are computed from sums.
        """
        rows = [self._values(entry, now) for entry in (StreamEntry(0, 0, {}, QUIET_SUMMARY), *active.values())]
        values = {key: (max if key in AGGREGATED_BY_MAX else sum)(row[key] for row in rows) for key in rows[0]}
        values["linear"] = self._entries.linear_sum - sum(entry.linear for entry in named.values())
        values["allocated"] = self._entries.allocated_sum - sum(entry.allocated for entry in named.values())
        return values

    def _values(self, entry: StreamEntry, now: float) -> dict[str, float]:
        """The values of one stream: key of `STREAM_GAUGES` -> value."""
        oldest, lag = entry.summary.oldest_blocker, entry.summary.linear_lag
        return {
            "linear": entry.linear,
            "allocated": entry.allocated,
            "pending": entry.summary.pending_count,
            "gaps": entry.summary.gap_count,
            "age": self._age(oldest.since, now) if oldest else 0.0,
            "unknown": len(entry.summary.unknown_writers),
            "behind": lag.id_count if lag else 0,
            "behind_seconds": self._age(lag.since, now) if lag else 0.0,
        }

    def _age(self, since: int | None, now: float) -> float:
        """Seconds since `since` (milliseconds since 1970); None: since this collector was created."""
        return max(0.0, now - (self._began_at if since is None else since / 1000))


def _sum_pairs(positions: Iterable[tuple[int, int]]) -> tuple[int, int]:
    postgres = sink = 0
    for stored, published in positions:
        postgres += stored
        sink += published
    return postgres, sink


MAX_LINES: Final = 10  # log lines of one kind in one check; if there are more, one line has their number and 10 names
Fields = dict[str, Any]


@dataclass(slots=True)
class ThresholdLog:
    """Logs once when a stream exceeds a threshold, and once when the stream no longer exceeds it. For one thread.

    The first check logs all thresholds that are exceeded.
    """

    collector: StreamCollector
    _crossed_thresholds: dict[str, dict[str, Fields]] = field(default_factory=dict)

    def check(self) -> None:
        """Log the changes since the last check."""
        lagging = self.collector.lagging_streams()
        self._compare("The linear lag of a stream is long", "The linear lag of a stream is no longer long", lagging)
        self._compare("A stream is near a bound", "A stream is no longer near a bound", self.collector.near_bounds())

    def _compare(self, event: str, end_event: str, crossed: dict[str, Fields]) -> None:
        before = self._crossed_thresholds.get(event, {})
        self._crossed_thresholds[event] = crossed
        _log_lines(log.warning, event, [fields for name, fields in crossed.items() if name not in before])
        _log_lines(
            log.info, end_event, [_identifying_fields(fields) for name, fields in before.items() if name not in crossed]
        )


def _identifying_fields(fields: Fields) -> Fields:
    """The fields that identify the stream and the bound, without values that change."""
    return {name: fields[name] for name in ("stream", "bound") if name in fields}


def _log_lines(write: Callable[..., object], event: str, lines: list[Fields]) -> None:
    lines.sort(key=itemgetter("stream"))
    if len(lines) > MAX_LINES:
        write(event, count=len(lines), streams=[fields["stream"] for fields in lines[:MAX_LINES]])
        return
    for fields in lines:
        write(event, **fields)
