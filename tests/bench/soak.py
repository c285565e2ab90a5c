"""Does memory grow: the whole stack at an even rate for a long time, with gaps open at every moment."""

import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import psutil

from tests.bench.site import BenchSite
from tests.bench.table import table
from tests.bench.topic import Sender, joined
from tests.bench.usage import KINDS, MIB, sampled
from tests.bench.whole import Whole, pipeline
from tests.bench.workload import Shape, WritersAtWork

# At 1000 a second one transaction in 500 takes about half a minute: each writer has about two such gaps at a time.
_SHAPE = Shape(streams=4, writers=8, slow_every=500, slow_factor=500)
_STEPS_PER_SECOND = 10
_EVERY_SECONDS = 10.0
_THIRDS = ("first third", "second third", "last third")


@dataclass(frozen=True, slots=True)
class SoakPlan:
    minutes: float = 30.0
    rate: int = 1000
    partitions: int = 4


def run(site: BenchSite, plan: SoakPlan) -> dict[str, Any]:
    topic = site.fresh("soak")
    play = WritersAtWork(_SHAPE)
    sender = joined(site.connection, topic, plan.partitions, _SHAPE)
    heaps: list[int | None] = []
    with pipeline(site, topic, plan.partitions, {}) as running:
        with sampled(running.pid, min(_EVERY_SECONDS, plan.minutes * 2)) as samples:
            for third in _THIRDS:
                _send(plan, play, sender)
                heaps.append(_live_heap(running))
                click.echo(f"{third}: {sender.records} records, live heap {heaps[-1]}", err=True)
        sender.send(play.finish())
        sender.flush()
        running.await_records(sender.records, seconds=60)
        running.await_positions(play)
    return {
        "minutes": plan.minutes,
        "rate": plan.rate,
        "records": sender.records,
        "every": _EVERY_SECONDS,
        "at": [sample.at - samples.taken[0].at for sample in samples.taken],
        "rss": {kind: samples.series(kind) for kind in KINDS},
        "live_heap": heaps,
    }


def render(figures: Mapping[str, Any]) -> list[str]:
    at = figures["at"]
    rows = [[kind, *_thirds(series), _slope(at, series)] for kind, series in figures["rss"].items()]
    heaps = [[f"{heap / MIB:.1f}" if heap is not None else "?" for heap in figures["live_heap"]]]
    return [
        f"{figures['rate']:,} records a second for {figures['minutes']:g} minutes ({figures['records']:,} records)"
        " through the whole stack, each writer with gaps of about half a minute all the time; resident memory sampled"
        f" every {figures['every']:g} s, in MiB. The slope leaves the first third out, in which the JVM warms up. Every"
        " position was right at the end.",
        "",
        *table(["mean of the", *_THIRDS, "slope after it"], rows),
        "",
        "What is alive in the JVM's heap after a full collection at the end of each third: "
        + ", ".join(f"{heap} MiB" for heap in heaps[0])
        + ".",
    ]


def _send(plan: SoakPlan, play: WritersAtWork, sender: Sender) -> None:
    """One third of the time."""
    due = time.monotonic()
    ends = due + plan.minutes * 60 / len(_THIRDS)
    while due < ends:
        time.sleep(max(0.0, due - time.monotonic()))
        sender.send(play.step(plan.rate // _STEPS_PER_SECOND))
        due += 1 / _STEPS_PER_SECOND


def _live_heap(running: Whole) -> int | None:
    """Bytes alive in the pipeline's JVM after a full collection; None where there is no `jcmd` (a JRE)."""
    jcmd = shutil.which("jcmd")
    if jcmd is None:
        return None
    jvm = next(child for child in psutil.Process(running.pid).children(recursive=True) if child.name() == "java")
    histogram = subprocess.run(
        [jcmd, str(jvm.pid), "GC.class_histogram"], capture_output=True, text=True, check=True
    ).stdout
    total = re.search(r"^Total\s+\d+\s+(\d+)", histogram, re.MULTILINE)
    return int(total[1]) if total else None


def _thirds(series: Sequence[int]) -> list[str]:
    return [f"{part.mean() / MIB:.1f}" for part in np.array_split(np.array(series), len(_THIRDS))]


def _slope(at: Sequence[float], series: Sequence[int]) -> str:
    first = len(at) // len(_THIRDS)
    per_second = np.polyfit(at[first:], series[first:], 1)[0]
    return f"{per_second * 3600 / MIB:+.1f} MiB/h"
