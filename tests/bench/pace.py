"""What a contestant costs where little comes: the cores that it takes at a few facts a second, sent while it runs."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import click

from tests.bench.competitors.task import ask, check
from tests.bench.contestants import WHOLE, Contestants, RacePlan
from tests.bench.rate import RateLimits
from tests.bench.site import BenchSite
from tests.bench.topic import Loaded, Sender, joined, paced
from tests.bench.usage import Samples, sampled
from tests.bench.whole import not_begun
from tests.bench.workload import Completions, Rendering, Shape, WritersAtWork

RATE, _WARM_RATE = 200, 4_000
"""Facts a second."""
_SETTLE_SECONDS = 4.0
"""In which a JVM compiles what has become due before."""
_FOREVER = 1e9

HEAD = f"cores at {RATE}/s"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Stream and value of records that come at random moments of `seconds`; what is taken in the last `counted` of
    these counts.
    """

    records: Sequence[tuple[int, bytes]]
    seconds: float
    counted: float = 0.0


@dataclass(slots=True)
class _Feed:
    sender: Sender
    stretches: Sequence[Stretch]
    _counted: list[tuple[float, float]] = field(default_factory=list)

    def send(self) -> None:
        """All of it, in its time."""
        for stretch in self.stretches:
            times = paced(len(stretch.records), stretch.seconds, seed=1)
            for _, (stream, value) in zip(times, stretch.records, strict=True):
                self.sender.send_records([stream], [value])
            if stretch.counted:
                ended = time.time()
                self._counted.append((ended - stretch.counted, ended))
        self.sender.flush()

    def cores(self, samples: Samples) -> list[float]:
        """On average, for each stretch that counts."""
        return [samples.cpu(began, ended) / (ended - began) for began, ended in self._counted]


def run(
    site: BenchSite, contestants: Contestants, plan: RacePlan, together: Sequence[int] = (1,)
) -> dict[str, list[float]]:
    """Cores by contestant, with at most so many facts `together` in a record. Each has a topic of its own, with the
    plan's shape and the same records. Nobody is measured where the plan has no `paced_seconds`.
    """
    if not plan.paced_seconds:
        return {}
    play = WritersAtWork(plan.shape)
    sent = stretches(play, plan.warm_seconds, plan.paced_seconds, together)
    cores: dict[str, list[float]] = {}
    for name in contestants.names:
        topic = site.fresh("paced")
        feed = _Feed(joined(site.connection, topic, plan.partitions, plan.shape), sent)
        records = feed.sender.records + sum(len(stretch.records) for stretch in sent)
        loaded = Loaded(topic, plan.partitions, records, 0, play, 0)
        if name == WHOLE:
            samples = _whole(site, loaded, feed)
        else:
            task = contestants.task(name, loaded, plan.batch, RateLimits(0, records, _FOREVER))
            answer, samples = ask(name, contestants.command(name), task, feed.send)
            check(name, answer, loaded.positions())
        cores[name] = feed.cores(samples)
        click.echo(f"{RATE} facts/s: {name}: {', '.join(f'{each:.3f}' for each in cores[name])} cores", err=True)
    return cores


def stretches(play: WritersAtWork, warm: float, seconds: float, together: Sequence[int]) -> list[Stretch]:
    """A warm-up of so many seconds, with more facts in each; then for each of `together` the stretch that counts.

    Some records follow it quickly: who ends with the last has what it counts behind it, and with fewer facts than that
    a writer would have no full record.
    """
    shape = play.shape
    lead, counting = round(_WARM_RATE * warm), round(RATE * (_SETTLE_SECONDS + seconds))
    found: list[Stretch] = []
    for most in together:
        over = RATE + (most - 1) * shape.streams * shape.writers
        records = in_time(shape, play.step(lead + counting + over).then(play.finish()), most)
        first, last = lead // most, (lead + counting) // most
        found.append(Stretch(records[:first], lead / _WARM_RATE))
        found.append(Stretch(records[first:last], _SETTLE_SECONDS + seconds, seconds))
        found.append(Stretch(records[last:], 1 + over / _WARM_RATE))
        lead = 0
    return found


def in_time(shape: Shape, edges: Completions, together: int) -> list[tuple[int, bytes]]:
    """Stream and value of each record, as they are sent one after the other. The writers of RUN records take turns."""
    rendering = Rendering(shape)
    if together == 1:
        return list(zip(rendering.streams(edges), rendering.values(edges), strict=True))
    owners = range(shape.streams * shape.writers)
    runs = (rendering.runs(edges.pick(edges.owner == owner), together) for owner in owners)
    return [record for turn in zip_longest(*runs) for record in turn if record is not None]


def _whole(site: BenchSite, loaded: Loaded, feed: _Feed) -> Samples:
    """A new pipeline with default settings; what it published in the end must be right for the figure to count."""
    running = not_begun(site, loaded.name, loaded.partitions, site.database(), site.emptied_redis(), {})
    running.server.spawn()
    try:
        with sampled(running.pid, every=0.25, servers=site.sinks) as samples:
            feed.send()
        running.await_positions(loaded.play)
    finally:
        running.server.stop()
    return samples


def described(plan: RacePlan) -> dict[str, float]:
    """How it was measured; empty where nobody was."""
    return {"warm_seconds": plan.warm_seconds, "seconds": plan.paced_seconds} if plan.paced_seconds else {}


def explained(figures: Mapping[str, Any], besides: str = "") -> list[str]:
    """What the column says, and a blank line; nothing of results that do not have it."""
    how = figures.get("paced")
    if not how:
        return []
    return [
        f"*{HEAD}*: the same processes at {RATE} facts a second, which come at random moments to a topic of the same"
        f" shape, over {how['seconds']:g} s. Before that, {_WARM_RATE:,} a second come for {how['warm_seconds']:g} s,"
        f" so that a JVM compiles its code, and {RATE} for {_SETTLE_SECONDS:g} s. Tidemark has its default settings,"
        " the other two on Spark wait for nothing, a Python loop takes what a second has brought, the others take"
        f" records as they come. {besides}".rstrip(),
        "",
    ]
