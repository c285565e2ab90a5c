"""What scrapes show of streams: the positions of every stream, and who holds them.

They come from the states at the start, from effects afterwards. One thread writes (the batch's), any number read.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tidemark.app import metrics
from tidemark.app.board_entries import QUIET, BoardEntries, BoardEntry
from tidemark.app.metrics import STREAM_GAUGES
from tidemark.sinks.port import Sink
from tidemark.streaming.core.effects import ShardEffects, Summary
from tidemark.streaming.core.linear_lag import HELD_AFTER, Holder
from tidemark.streaming.core.store import ShardedStates
from tidemark.streaming.values.policies import Policies

log = structlog.get_logger(__name__)

THRESHOLDS = ("gap_seconds", "silent_seconds", "behind_seconds", "behind_ids")
NEAR = 0.5  # of a bound: what fills less of it is no series
LONGEST = ("age", "behind_seconds")  # of streams together the highest counts, of all else the sum
OTHER_STREAMS, OTHER_WRITERS = "other streams", "other writers"  # no name has a space
NOTHING = ShardedStates(1, {})

Entries = Mapping[str, BoardEntry]


class _Sums(NamedTuple):
    """Of the lines in Postgres and in the sink, as `compared`: of all streams, and of those that ended up to `version`
    of the entries."""

    compared: Mapping[str, tuple[int, int]]
    everything: tuple[int, int]
    version: int
    ended: tuple[int, int]


class Board(Collector):
    """`now` gives seconds since 1970. `read` holds the next offset to read, by topic and partition.

    The first `streams` by name, those with a policy of their own before all, have series of their own, and of their
    writers the first `writers`; the others are one series together, so that a scrape has a bound. Streams that ended
    and writers that retired have none.
    """

    def __init__(self, now: Callable[[], float] = time.time, streams: int = 1000, writers: int = 5000) -> None:
        self.read: dict[tuple[str, int], int] = {}
        self._entries = BoardEntries(streams, NOTHING)
        self._copied: dict[int, _Sums] = {}
        self._least: tuple[int, Policies, dict[str, int | None]] | None = None
        self._lock = threading.Lock()
        self._now = now
        self._began = now()
        self._streams = streams
        self._writers = writers
        self._policies = Policies()
        self._bounds = self._policies.bounds()
        self._sinks: Sequence[Sink] = ()

    def load(self, states: ShardedStates, offsets: Mapping[str, Mapping[int, int]]) -> None:
        """Start from what Postgres holds, so that a restart without traffic shows every stream."""
        self.read.update({(topic, number): at for topic, of in offsets.items() for number, at in of.items()})
        self._begin(BoardEntries(self._streams, states))

    def new_offsets(self, effects: Sequence[ShardEffects]) -> int:
        """How many a batch read that is not shown yet."""
        reached = {(seen.topic, seen.partition): seen.offset for shard in effects for seen in shard.progress}
        return sum(offset - self.read.get(place, offset) for place, offset in reached.items())

    def follow(self, policies: Policies) -> None:
        """From now on, until there are others."""
        with self._lock:
            self._policies, self._bounds = policies, policies.bounds()
            self._entries.prefer(policies.given)

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
        self._begin(BoardEntries(self._streams, NOTHING))
        for gauge in metrics.KAFKA_GAUGES:
            gauge.clear()

    def _begin(self, entries: BoardEntries) -> None:
        with self._lock:
            entries.prefer(self._policies.given)
            self._entries, self._copied, self._least = entries, {}, None

    def update(self, effects: Iterable[ShardEffects]) -> None:
        """A batch was published."""
        with self._lock:
            for shard in effects:
                self.read.update({(seen.topic, seen.partition): seen.offset for seen in shard.progress})
                for stream in shard.streams:
                    self._entries.update(stream)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Called by the scrape, on its thread."""
        families = {
            key: GaugeMetricFamily(name, meaning, labels=labels)
            for key, (name, labels, meaning) in STREAM_GAUGES.items()
        }
        now = self._now()
        with self._lock:
            entries = self._entries
            named = {stream: entries[stream] for stream in entries.first()}
            others = len(entries) - len(named)
            restless = {stream: entry for stream, entry in entries.restless.items() if stream not in named}
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
                for key, value in self._together(named, restless, now).items():
                    families[key].add_metric([OTHER_STREAMS], value)
            self._show_bounds(families["bound"], named, restless)
            self._show_copies(families["copy"], named, others)
            self._show_thresholds(families, named, others)
            unnamed = self._show_holders(families["held"], families["holder_silent"], now)
        for what, count in (("streams", others), ("writers", writers), ("holders", unnamed)):
            families["together"].add_metric([what], count)
        return families.values()

    def waiting(self) -> dict[str, dict[str, Any]]:
        """Streams whose line is below its head for longer than it may be, each with what a log says of that."""
        now, found = self._now(), {}
        with self._lock:
            for stream, it in self._entries.restless.items():
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
                for stream, it in self._entries.restless.items()
                for bound, used in self._used(stream, it.summary).items()
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
            "unknown": len(summary.unknown) / bounds.held,
        }
        return {bound: ratio for bound, ratio in used.items() if ratio >= NEAR}

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
        found = self._least[2]
        if setting not in found:
            named = {*entries.first()}
            values = (policies.value(stream, setting) for stream in entries if stream not in named)
            found[setting] = min((value for value in values if value is not None), default=None)
        return found[setting]

    def _show_copies(self, family: GaugeMetricFamily, named: Entries, others: int) -> None:
        for number, sink in enumerate(self._sinks):
            compared = sink.compared()
            sums = self._sums(number, compared)
            for place, copy in enumerate(("postgres", sink.name)):
                if place == 0 and number > 0:
                    continue
                shown = [(stream, compared[stream][place]) for stream in named if stream in compared]
                for stream, line in shown:
                    family.add_metric([stream, copy], line)
                if others:
                    family.add_metric([OTHER_STREAMS, copy], sums[place] - sum(line for _, line in shown))

    def _sums(self, number: int, compared: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
        """Of the streams that have not ended; all are looked at only where they were compared again."""
        known, entries = self._copied.get(number), self._entries
        if known is None or known.compared is not compared:
            known = _Sums(compared, _summed(compared.values()), -1, (0, 0))
        if known.version != entries.version:
            ended = _summed(compared[stream] for stream in entries.ended if stream in compared)
            known = known._replace(version=entries.version, ended=ended)
        self._copied[number] = known
        return known.everything[0] - known.ended[0], known.everything[1] - known.ended[1]

    def _show_holders(self, family: GaugeMetricFamily, silent: GaugeMetricFamily, now: float) -> int:
        """Returns how many have no series of their own."""
        unnamed = 0
        held: list[tuple[float, str, Holder]] = []
        for stream, entry in self._entries.restless.items():
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

    def _together(self, named: Entries, restless: Entries, now: float) -> dict[str, float]:
        """Those that are not named, in one: the quiet ones among them add their lines alone."""
        values = [self._values(entry, now) for entry in (BoardEntry(0, 0, {}, QUIET), *restless.values())]
        found = {key: (max if key in LONGEST else sum)(it[key] for it in values) for key in values[0]}
        found["linear"] = self._entries.linear - sum(entry.linear for entry in named.values())
        found["allocated"] = self._entries.allocated - sum(entry.allocated for entry in named.values())
        return found

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


def _summed(lines: Iterable[tuple[int, int]]) -> tuple[int, int]:
    durable = shown = 0
    for one, other in lines:
        durable += one
        shown += other
    return durable, shown
