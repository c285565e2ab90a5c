"""Cost and latency of every contestant at four rates, from very few facts to many: one table."""

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np

from tests.bench.competitors.task import ask, check
from tests.bench.contestants import NAMES, WHOLE, Contestants, RacePlan
from tests.bench.latency import MoveTimes, subscribed
from tests.bench.race import THROUGHPUT, on_jvm
from tests.bench.rate import RateLimits, RateMark
from tests.bench.site import BenchSite
from tests.bench.table import table
from tests.bench.topic import Loaded, Sender, joined
from tests.bench.usage import Samples, sampled
from tests.bench.whole import not_begun
from tests.bench.workload import Completions, Rendering, WritersAtWork, moments

RATES = (20, 200, 2_000, 20_000)
"""Facts a second."""
_WARM_RATE = 4_000
_FOREVER = 1e9
_TOGETHER_SECONDS = 0.001
_RIVAL = "streams-heap"


@dataclass(frozen=True, slots=True)
class CostsPlan:
    """Each contestant has one process. First come `warm_seconds` with 4,000 facts a second. Then each rate lasts for
    `settle_seconds`, which do not count, and for `seconds`. Of `against`, unless it is empty, are those that take part.
    Eight minutes as it is.
    """

    warm_seconds: float = 10.0
    settle_seconds: float = 2.0
    seconds: float = 8.0
    against: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """What one rate takes: seconds since 1970, and the numbers of the first record and of the one after the last."""

    began: float
    ended: float
    first: int
    last: int


@dataclass(slots=True)
class Feed:
    """The records, which it sends in their time. `sent` are the times (s since 1970) at which they were sent."""

    sender: Sender
    edges: Completions
    plan: CostsPlan
    moves: MoveTimes
    sent: list[float] = field(default_factory=list)
    spans: dict[int, Span] = field(default_factory=dict)

    def send(self) -> None:
        rendering = Rendering(self.moves.shape)
        streams, values = rendering.streams(self.edges), rendering.values(self.edges)
        owners, prevs, ids = self.edges.owner.tolist(), self.edges.prev.tolist(), self.edges.id.tolist()

        def pass_time(rate: int, seconds: float) -> None:
            """Send at random moments; what is due within a millisecond is sent together."""
            due = moments(round(rate * seconds), seconds, seed=1)
            began, done, first = time.monotonic(), 0, len(self.sent)
            while done < len(due):
                now = time.monotonic()
                if (stop := bisect_right(due, now - began)) == done:
                    time.sleep(max(_TOGETHER_SECONDS, began + due[done] - now))
                    continue
                chosen = slice(first + done, first + stop)
                for edge in zip(owners[chosen], prevs[chosen], ids[chosen], strict=True):
                    self.moves.completed_one(*edge, now)
                self.sent += [time.time()] * (stop - done)
                self.sender.send_records(streams[chosen], values[chosen])
                done = stop
            time.sleep(max(0.0, began + seconds - time.monotonic()))

        pass_time(_WARM_RATE, self.plan.warm_seconds)
        for rate in RATES:
            pass_time(rate, self.plan.settle_seconds)
            began, first = time.time(), len(self.sent)
            pass_time(rate, self.plan.seconds)
            self.spans[rate] = Span(began, time.time(), first, len(self.sent))
        pass_time(len(values) - len(self.sent), 1.0)
        self.sender.flush()


def run(site: BenchSite, plan: CostsPlan) -> dict[str, Any]:
    race = RacePlan(THROUGHPUT.shape, THROUGHPUT.wanted, records=0, against=plan.against)
    contestants = Contestants(site, race)
    seconds = plan.settle_seconds + plan.seconds
    begun = round(_WARM_RATE * plan.warm_seconds) + round(sum(RATES) * seconds) + RATES[-1]
    costs: dict[str, dict[str, dict[str, float]]] = {}
    for name in contestants.names:
        play, topic = WritersAtWork(race.shape), site.fresh("costs")
        edges = play.step(begun).then(play.finish())
        feed = Feed(joined(site.connection, topic, race.partitions, race.shape), edges, plan, MoveTimes(race.shape))
        loaded = Loaded(topic, race.partitions, feed.sender.records + len(edges), 0, play, 0)
        if name == WHOLE:
            samples, latencies = _whole(site, loaded, feed)
        else:
            before = feed.sender.records
            task = contestants.task(name, loaded, race.batch, RateLimits(0, loaded.records, _FOREVER))
            answer, samples = ask(name, contestants.command(name), task, feed.send)
            check(name, answer, loaded.positions())
            latencies = by_count(feed, answer.marks, before)
        costs[name] = {
            str(rate): {
                "cores": samples.cpu(span.began, span.ended) / (span.ended - span.began),
                "rate": (span.last - span.first) / (span.ended - span.began),
                "p50": float(np.percentile(latencies(span), 50)),
                "p99": float(np.percentile(latencies(span), 99)),
            }
            for rate, span in feed.spans.items()
        }
        click.echo(f"{name}: {costs[name]}", err=True)
    return {
        "costs": costs,
        "streams": race.shape.streams,
        "writers": race.shape.writers,
        "seconds": plan.seconds,
        "settle_seconds": plan.settle_seconds,
        "warm_seconds": plan.warm_seconds,
        "jvm": contestants.jvm,
        "skipped": contestants.skipped,
    }


_Latencies = Callable[[Span], Sequence[float]]
"""The latencies, in milliseconds, of what was sent in a span."""


def _whole(site: BenchSite, loaded: Loaded, feed: Feed) -> tuple[Samples, _Latencies]:
    """A new pipeline with default settings. Its figures count if its positions are right in the end."""
    running = not_begun(site, loaded.name, loaded.partitions, site.database(), site.emptied_redis(), {})
    offset = time.time() - time.monotonic()
    with ExitStack() as stack:
        running.server.start()
        stack.callback(running.server.stop)
        with subscribed(running.redis_url, feed.moves.shape, feed.moves):
            with sampled(running.pid, every=0.25, servers=site.sinks) as samples:
                feed.send()
            running.await_positions(loaded.play)
    return samples, lambda span: feed.moves.between(span.began - offset, span.ended - offset)


def by_count(feed: Feed, marks: Sequence[RateMark], before: int) -> _Latencies:
    """A record counts as processed when the contestant has processed as many records as were sent up to it.

    Args:
        before: records that were in the topic before the first one of `feed`.
    """
    records, at = [mark.records for mark in marks], [mark.at for mark in marks]

    def latencies(span: Span) -> list[float]:
        numbers = np.arange(span.first, span.last)
        places = np.searchsorted(records, before + numbers + 1)
        return (1000 * (np.array(at)[places] - np.array(feed.sent)[numbers])).clip(0).tolist()  # type: ignore[no-any-return]

    return latencies


def render(figures: Mapping[str, Any]) -> list[str]:
    head = ["what", *(part for rate in RATES for part in (f"{rate:,}/s: cores", "p50, p99"))]
    rows = [
        [NAMES[name], *(cell for rate in RATES for cell in _cells(costs[str(rate)]))]
        for name, costs in figures["costs"].items()
    ]
    return [
        f"{figures['streams']} streams x {figures['writers']} writers. Each rate lasts {figures['seconds']:g} s after"
        f" {figures['settle_seconds']:g} s that do not count; {figures['warm_seconds']:g} s with {_WARM_RATE:,} facts a"
        " second come first. *Cores* are those of the contestant, for Tidemark with Postgres and Redis. Latency is that"
        " of *Quiet systems*; for the others, which publish nothing, until the record was processed.",
        "",
        *table(head, rows),
        "",
        *_slow(figures["costs"]),
        *on_jvm(figures),
    ]


def _slow(costs: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Names the rates that the sender did not reach, because the machine was busy."""
    slow = [
        f"{name} {cost['rate']:,.0f} of {int(rate):,}"
        for name, by_rate in costs.items()
        for rate, cost in by_rate.items()
        if cost["rate"] < 0.95 * int(rate)
    ]
    return [f"The sender did not reach each rate: {', '.join(slow)}.", ""] if slow else []


README_ROW = "| cores at "


def readme_row(figures: Mapping[str, Any]) -> str:
    """The line of the table in the README."""

    def cores(name: str) -> str:
        return ", ".join(f"{figures['costs'][name][str(rate)]['cores']:.2f}" for rate in RATES)

    rates = ", ".join(f"{rate:,}" for rate in RATES)
    rival = f" (Kafka Streams: {cores(_RIVAL)})" if _RIVAL in figures["costs"] else ""
    return f"{README_ROW}{rates} facts/s{rival} | {cores(WHOLE)} | `costs` |"


def _cells(cost: Mapping[str, float]) -> list[str]:
    return [f"{cost['cores']:.2f}", f"{cost['p50']:,.0f}, {cost['p99']:,.0f} ms"]
