"""What a system costs in which little happens, or nothing; and what waiting for more records trades for that."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np
import psutil

from tests.bench.latency import MoveTimes, finish, send, subscribed
from tests.bench.site import BenchSite
from tests.bench.table import table, verdict
from tests.bench.topic import Sender, joined
from tests.bench.whole import Whole, pipeline
from tests.bench.workload import Shape, WritersAtWork

_SHAPE = Shape(streams=5, writers=8)
_RATES = (200, 20)
_WANTED_IDLE, _WANTED_SLOW, _WANTED_FAST = 0.02, 0.12, 0.35  # cores
_WANTED_P50, _WANTED_P99, _WANTED_RESTART = 200.0, 400.0, 10.0


@dataclass(frozen=True, slots=True)
class QuietPlan:
    """`shares`, with commas between them, are values of `TIDEMARK_BATCH_CPU_SHARE`; each is measured with a pipeline of
    its own, warmed up with 200 records a second. `seconds` for each of four phases: 200 records a second,
    20, none, and none again, which is measured. Nine minutes as it is.
    """

    shares: str = "0.35,0.1,1"
    warm_seconds: float = 40.0
    seconds: float = 30.0
    partitions: int = 4


@dataclass(slots=True)
class _Cores:
    """Cores that processes took on average, with the children that they had meanwhile."""

    pipeline: float = 0.0
    broker: float = 0.0
    batches: float = 0.0
    """A second."""
    took: tuple[float, float] = field(default=(0.0, 0.0))
    """Beginning and end by the monotonic clock."""

    def figures(self) -> dict[str, float]:
        return {"pipeline": self.pipeline, "broker": self.broker, "batches": self.batches}


def run(site: BenchSite, plan: QuietPlan) -> dict[str, Any]:
    return {
        "seconds": plan.seconds,
        "warm_seconds": plan.warm_seconds,
        "shares": {share: _measure(site, plan, share) for share in plan.shares.split(",")},
    }


def _measure(site: BenchSite, plan: QuietPlan, share: str) -> dict[str, Any]:
    topic = site.fresh("quiet")
    play, moves = WritersAtWork(_SHAPE), MoveTimes(_SHAPE)
    sender = joined(site.connection, topic, plan.partitions, _SHAPE)
    found: dict[str, Any] = {}
    with (
        pipeline(site, topic, plan.partitions, {"TIDEMARK_BATCH_CPU_SHARE": share}) as running,
        subscribed(running.redis_url, _SHAPE, moves),
    ):
        send(_RATES[0], plan.warm_seconds, play, sender, moves)
        for rate in _RATES:
            with _counted(site, running) as cores:
                send(rate, plan.seconds, play, sender, moves)
            found[str(rate)] = cores
        finish(play, sender, moves)
        running.await_positions(play)
        time.sleep(plan.seconds)  # in which the JVM compiles what has become due before
        with _counted(site, running) as idle:
            time.sleep(plan.seconds)
        found["idle"] = idle.figures()
        for rate in _RATES:
            cores = found[str(rate)]
            p50, p99 = np.percentile(moves.between(*cores.took), (50, 99))
            found[str(rate)] = cores.figures() | {"p50": float(p50), "p99": float(p99)}
        found["restart"] = _restart(running, play, sender)
    click.echo(f"{share}: {found}", err=True)
    return found


def _restart(running: Whole, play: WritersAtWork, sender: Sender) -> float:
    """Seconds from a `kill -9` of the pipeline to the moves of what came meanwhile, in Redis; it is started at once."""
    began = time.monotonic()
    os.kill(running.pid, signal.SIGKILL)
    while running.server.running:
        time.sleep(0.01)
    running.server.spawn()
    sender.send(play.step(10).then(play.finish()))
    sender.flush()
    running.await_positions(play, seconds=120)
    return time.monotonic() - began


@contextmanager
def _counted(site: BenchSite, running: Whole) -> Iterator[_Cores]:
    """What the block takes; to be read after it."""
    counted = _Cores()
    broker = psutil.Process(site.kafka.pid)
    pipeline_before, broker_before, batches = _cpu(psutil.Process(running.pid)), _cpu(broker), running.batches()
    began = time.monotonic()
    yield counted
    counted.took = began, time.monotonic()
    seconds = counted.took[1] - began
    counted.pipeline = (_cpu(psutil.Process(running.pid)) - pipeline_before) / seconds
    counted.broker = (_cpu(broker) - broker_before) / seconds
    counted.batches = (running.batches() - batches) / seconds


def _cpu(parent: psutil.Process) -> float:
    """CPU seconds of a process and all below it, of those too that ended and were waited for."""
    total = 0.0
    for process in [parent, *parent.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:  # it is counted by its parent now
            continue
    return total


def render(figures: Mapping[str, Any]) -> list[str]:
    rows = figures["shares"]
    first = next(iter(rows.values()))
    fast, slow = (first[str(rate)] for rate in _RATES)
    phases = [str(rate) for rate in reversed(_RATES)]
    head = ["share", "no traffic: cores", "broker"]
    head += [f"{rate}/s: {what}" for rate in phases for what in ("cores", "batches/s", "p50", "p99")]
    cells = []
    for share, row in rows.items():
        idle = row["idle"]
        cells.append([share, f"{idle['pipeline']:.3f}", f"{idle['broker']:.3f}"])
        for rate in phases:
            cells[-1] += _cells(row[rate])
    return [
        f"5 streams x 8 writers, none to 200 records a second; {figures['seconds']:g} s for each figure, after"
        f" {figures['warm_seconds']:g} s of warm-up. *Cores* are those of the pipeline: its driver, its JVM, its Python"
        " workers and whatever they start; the broker's own stand beside them where nothing comes. *share*:"
        " `TIDEMARK_BATCH_CPU_SHARE`; the first line has the default. Latencies are from the call that sends the"
        " completion which lets a position move, to the subscriber's receipt of that move.",
        "",
        *table(head, cells),
        "",
        f"Of the first line: no traffic {verdict(first['idle']['pipeline'], _WANTED_IDLE)} cores; 20 records a second"
        f" {verdict(slow['pipeline'], _WANTED_SLOW)} cores, {1000 * slow['pipeline'] / slow['batches']:.0f} ms of a"
        f" core a batch; 200 records a second {verdict(fast['pipeline'], _WANTED_FAST)} cores, p50"
        f" {verdict(fast['p50'], _WANTED_P50, ' ms')}, p99"
        f" {verdict(fast['p99'], _WANTED_P99, ' ms')}. From `kill -9` and a start right after it to moving positions:"
        f" {verdict(first['restart'], _WANTED_RESTART, ' s')}.",
    ]


def _cells(phase: Mapping[str, float]) -> list[str]:
    times = [f"{phase[percentile]:,.0f} ms" for percentile in ("p50", "p99")]
    return [f"{phase['pipeline']:.2f}", f"{phase['batches']:.1f}", *times]
