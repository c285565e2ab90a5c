"""One sidecar with very many clients: what they are told, how late, and what it costs."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
import numpy as np
import psutil

from tests.bench.crowd import asking, following, lining, publishing
from tests.bench.crowd.publishing import Load, stream_name
from tests.bench.site import BenchSite
from tests.bench.table import mib, table
from tests.bench.topic import create
from tests.bench.whole import WrongResult
from tidemark.app.stack.processes import LOOPBACK, SidecarProcess, free_port

_PERCENTILES = (50, 90, 99, 100)
CHECKING = 5  # clients of the line protocol that check every line

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CrowdPlan:
    """`each` clients follow one stream, `all` follow all of them, and `lines` do so by the line protocol, while
    `streams` x `writers` move five times a second; then `requests` a second for `asking` seconds."""

    streams: int = 100
    writers: int = 10
    each: int = 1990
    all: int = 10
    lines: int = 500
    seconds: float = 30.0
    requests: int = 1000
    asking: float = 30.0


def run(site: BenchSite, plan: CrowdPlan) -> dict[str, Any]:
    dsn, url = site.database(), site.emptied_redis()
    names = [stream_name(number) for number in range(plan.streams)]
    stamps = site.directory("stamps")
    load = Load(dsn, url, plan.streams, plan.writers, plan.seconds)
    with started(site, dsn, url) as (sidecar, tcp):
        crowd = following.Crowd(sidecar.port, names, plan.each, plan.all, str(stamps / "events"))
        lines = lining.Lines(tcp, plan.streams, plan.writers, plan.lines, CHECKING, str(stamps / "lines"))
        with ExitStack() as processes:
            publisher = processes.enter_context(running(publishing, load))
            answer(publisher, dict)  # the streams are there
            followers = processes.enter_context(running(following, crowd))
            liners = processes.enter_context(running(lining, lines))
            answer(followers, dict)
            answer(liners, dict)
            click.echo(f"{plan.each + plan.all + plan.lines} clients are there", err=True)
            before = processor_seconds(sidecar)
            tell(publisher, {})
            published = answer(publisher, publishing.PublishedLoad)
            spent = processor_seconds(sidecar) - before
            tell(followers, published.positions)
            tell(liners, published.positions)
            saw, heard = answer(followers, following.Saw), answer(liners, lining.LinesHeard)
        peak = peak_of(sidecar)
        click.echo(f"{saw}, {heard}, {mib(peak)}, {spent:.1f} s of a core, {published.late:.2f} s late", err=True)
        if saw.torn or saw.lost or saw.short or heard.torn or heard.lost or heard.short:
            raise WrongResult(f"{saw}, {heard}, {sidecar.log_tail(5)}")
        with running(asking, asking.Questions(sidecar.port, names, plan.requests, plan.asking)) as asker:
            answers = answer(asker, asking.Answers)
    return {
        "streams": plan.streams,
        "rate": load.advances_per_second,
        "seconds": plan.seconds,
        "each": plan.each,
        "all": plan.all,
        "lines": plan.lines,
        "moves": saw.moves,
        "bytes": saw.bytes,
        "line_bytes": heard.bytes,
        "core": spent / plan.seconds,
        "late": published.late,
        "peak": peak,
        "latency": percentiles(latencies(stamps / "events", published.sent)),
        "line_latency": percentiles(latencies(stamps / "lines", published.sent)),
        "requests": plan.requests,
        "asking": plan.asking,
        "failed": answers.failed,
        "answered": percentiles([1000 * it for it in answers.latencies]),
    }


def render(figures: Mapping[str, Any]) -> list[str]:
    return [
        f"{figures['each'] + figures['all']:,} clients of `/v1/events`, {figures['each']:,} of which follow one of"
        f" {figures['streams']} streams and {figures['all']} all of them, and {figures['lines']} clients of the line"
        f" protocol, which all hear everything, on one sidecar, while {figures['rate']:,} advances a second pass for"
        f" {figures['seconds']:.0f} s: five batches a second by the pipeline's own sinks, into Postgres and then by"
        " `publish.lua` into Redis. The advances are of IDs without facts. Servers, publisher and clients share the"
        " machine. Every client of `/v1/events` checks that each move joins the one before, and five of the line"
        " protocol do; all ended with the same positions.",
        "",
        f"The events were {figures['moves']:,} moves, {figures['bytes'] / 1e6:,.0f} MB, the lines"
        f" {figures['line_bytes'] / 1e6:,.0f} MB; the sidecar took {figures['core']:.2f} of a core and at most"
        f" {mib(figures['peak'])}. The last batch was published {figures['late']:.2f} s late.",
        "",
        f"Then {figures['requests']:,} requests a second for `/v1/streams/{{stream}}` for {figures['asking']:.0f} s,"
        f" counted from when each was due; {figures['failed']:,} were not answered.",
        "",
        *table(
            ["", *(f"p{name}" if name != "100" else "highest" for name in figures["latency"])],
            [
                ["from the call that publishes a batch in Redis to a client's event", *_cells(figures["latency"])],
                ["from that call to a client's line", *_cells(figures["line_latency"])],
                ["from a request to its answer", *_cells(figures["answered"])],
            ],
        ),
    ]


def _cells(percentiles: Mapping[str, float]) -> list[str]:
    return [f"{value:,.3g} ms" if value < 100 else f"{value:,.0f} ms" for value in percentiles.values()]


def latencies(stamps: Path, sent: Mapping[int, float]) -> list[float]:
    """In ms, from a batch's publication to the arrival of news of which it is the newest batch; of those in `sent`."""
    return [1000 * (at - sent[int(batch)]) for batch, at in np.fromfile(stamps).reshape(-1, 2) if int(batch) in sent]


def percentiles(values: list[float]) -> dict[str, float]:
    return {str(p): float(np.percentile(values, p)) for p in _PERCENTILES}


@contextmanager
def started(site: BenchSite, dsn: str, url: str) -> Iterator[tuple[SidecarProcess, int]]:
    """A sidecar, and the port of its lines."""
    port, tcp, topic = free_port(), free_port(), site.fresh("sidecar")
    create(site.connection, topic, 1)
    variables = {
        "TIDEMARK_POSTGRES_DSN": dsn,
        "TIDEMARK_REDIS_URL": url,
        "TIDEMARK_SIDECAR_PORT": str(port),
        "TIDEMARK_LINES_LISTEN": f"{LOOPBACK}:{tcp}",
        "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": site.kafka.bootstrap_servers,
        "TIDEMARK_KAFKA_FACTS_TOPIC": topic,
    }
    server = SidecarProcess(site.home, port, variables)
    server.start()
    try:
        yield server, tcp
    finally:
        server.stop()


@contextmanager
def running(module: Any, argument: msgspec.Struct) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", module.__name__, msgspec.json.encode(argument).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[bytes], told: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(told) + b"\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[bytes], type_: type[T]) -> T:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise WrongResult(f"a process of the crowd ended with {process.wait()}")
    return msgspec.json.decode(line, type=type_)


def peak_of(sidecar: SidecarProcess) -> int:
    """Most resident memory that it ever had, in bytes."""
    lines = Path(f"/proc/{sidecar.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def processor_seconds(sidecar: SidecarProcess) -> float:
    times = psutil.Process(sidecar.pid).cpu_times()
    return float(times.user + times.system)
