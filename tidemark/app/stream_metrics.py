"""What a board shows of each stream, and of all of them in one number. Kept up with each change, so that a scrape looks
at no stream that has no series of its own and of which nothing is to be told. Not for threads.
"""

import threading
import time
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import merge, nsmallest
from operator import itemgetter
from typing import Any, Final, NamedTuple

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tidemark.app import metrics
from tidemark.app.metrics import STREAM_GAUGES
from tidemark.common.log import get_logger
from tidemark.sinks.port import Sink
from tidemark.streaming.core import codec as state
from tidemark.streaming.core.effects import ShardEffects, StreamEffects, Summary, summarize
from tidemark.streaming.core.fast_path import at_rest
from tidemark.streaming.core.linear_lag import HELD_AFTER, Holder
from tidemark.streaming.core.store import ShardedStates
from tidemark.streaming.values.policies import Policies

QUIET = Summary(0, 0, None, [], 0, None)
"""Of a stream of which nothing is to be told: one for all of them."""


@dataclass(slots=True)
class BoardEntry:
    """`positions` are those of the writers that have not retired."""

    linear: int
    allocated: int
    positions: dict[str, int]
    summary: Summary

    @classmethod
    def of(cls, stored: bytes) -> "BoardEntry":
        if (resting := at_rest(stored)) is not None:
            return cls(resting.line, resting.line, resting.positions, QUIET)
        stream = state.decode(stored)
        signed = stream.direction.signed
        positions = {name: signed(it.position) for name, it in stream.writers.items() if it.retired is None}
        return cls(signed(stream.linear.position), signed(stream.allocated), positions, summarize(stream))

    @property
    def ended(self) -> bool:
        """All writers have retired, and nobody is waited for."""
        return not self.positions and not self.summary.unknown


class BoardEntries:
    """Streams that have not ended, by name. `first` names the first `most` of them, the `preferred` before all.

    `linear`, `allocated` and `positions` are sums, of `writers` positions; `restless` are those that are not quiet.
    `version` changes as streams come and go; `ended` are those that have. Those at rest stay among the `stored` states,
    with which they began, until they change or somebody looks: there may be a million of them.
    """

    def __init__(self, most: int, stored: ShardedStates) -> None:
        self.restless: dict[str, BoardEntry] = {}
        self.linear = self.allocated = self.positions = self.writers = 0
        self.version = 0
        self.ended: set[str] = set()
        self._streams = 0
        self._stored = stored
        self._open: dict[str, BoardEntry] = {}
        self._most = most
        self._preferred: Collection[str] = ()
        self._first: list[tuple[bool, str]] | None = None
        for name, data in stored.items():
            entry = BoardEntry.of(data)
            if entry.ended:
                self.ended.add(name)
                continue
            self._streams += 1
            self._count(name, entry, 1)
            if entry.summary is not QUIET:
                self._open[name] = entry

    def __len__(self) -> int:
        return self._streams

    def __getitem__(self, name: str) -> BoardEntry:
        """Raises KeyError."""
        entry = self._find(name)
        if entry is None:
            raise KeyError(name)
        return entry

    def __iter__(self) -> Iterator[str]:
        yield from self._open
        yield from (name for name in self._stored.names() if name not in self._open and name not in self.ended)

    def update(self, stream: StreamEffects) -> None:
        name = stream.stream
        known = self._find(name)
        entry = known or BoardEntry(0, 0, {}, QUIET)
        if known is not None:
            self._count(name, known, -1)
        entry.linear, entry.allocated, entry.summary = stream.linear, stream.allocated, stream.summary
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
        self._preferred, self._first = names, None

    def first(self) -> list[str]:
        if self._first is None:
            found = [(False, name) for name in sorted(self._preferred) if self._find(name) is not None]
            last = None
            for name in merge(self._stored.names(), nsmallest(self._most + len(found), self._open)):
                if len(found) >= self._most:
                    break
                if name != last and name not in self.ended and name not in self._preferred:
                    found.append((True, name))
                last = name
            self._first = found[: self._most]
        return [name for _, name in self._first]

    def _find(self, name: str) -> BoardEntry | None:
        if (entry := self._open.get(name)) is not None or name in self.ended:
            return entry
        if (data := self._stored.get(name)) is None:
            return None
        self._open[name] = found = BoardEntry.of(data)
        return found

    def _begin(self, name: str, entry: BoardEntry) -> None:
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
                self._first = None  # another moves up

    def _rank(self, name: str) -> tuple[bool, str]:
        return name not in self._preferred, name

    def _count(self, name: str, entry: BoardEntry, sign: int) -> None:
        self.linear += sign * entry.linear
        self.allocated += sign * entry.allocated
        self.positions += sign * sum(entry.positions.values())
        self.writers += sign * len(entry.positions)
        if entry.summary is QUIET:
            return
        if entry.summary == QUIET:
            entry.summary = QUIET
        elif sign > 0:
            self.restless[name] = entry
        else:
            del self.restless[name]


log = get_logger(__name__)

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
            "unknown": len(summary.unknown) / bounds.unjoined,
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


SINGLE: Final = 10  # lines of one kind and one look; with more they are one
Fields = dict[str, Any]


@dataclass(slots=True)
class Crossings:
    """One thread. `look` compares with the look before; a process that starts tells what it finds."""

    board: Board
    _over: dict[str, dict[str, Fields]] = field(default_factory=dict)

    def look(self) -> None:
        self._compare("A line waits", "A line goes on", self.board.waiting())
        self._compare("A bound is near", "A bound is far again", self.board.near())

    def _compare(self, over: str, under: str, found: dict[str, Fields]) -> None:
        before = self._over.get(over, {})
        self._over[over] = found
        _tell(log.warning, over, [it for name, it in found.items() if name not in before])
        _tell(log.info, under, [_named(it) for name, it in before.items() if name not in found])


def _named(it: Fields) -> Fields:
    """Without what was true when it crossed."""
    return {name: it[name] for name in ("stream", "bound") if name in it}


def _tell(say: Callable[..., object], what: str, found: list[Fields]) -> None:
    found.sort(key=itemgetter("stream"))
    if len(found) > SINGLE:
        say(what, count=len(found), streams=[it["stream"] for it in found[:SINGLE]])
        return
    for it in found:
        say(what, **it)
