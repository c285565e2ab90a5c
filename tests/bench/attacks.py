"""One sidecar under attack, from each side and from all at once, and with all its clients coming back at once."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from typing import Any

import click

from tests.bench import rights
from tests.bench.crowd import attacking, following, publishing, returning
from tests.bench.crowd.publishing import Load, PublishedLoad, stream_name
from tests.bench.sidecar import answer, latencies, peak_of, percentiles, processor_seconds, running, started, tell
from tests.bench.site import BenchSite
from tests.bench.table import mib, table
from tests.bench.whole import WrongResult

PROBE_EVERY = 0.2  # seconds
_HEAVIEST = "come_and_go"
_FEW_FILES = 1024
_PROBES = ("/livez", "/readyz")


@dataclass(frozen=True, slots=True)
class AttackPlan:
    """`each` honest clients follow one stream, `all` follow all of them, for `seconds` in peace, for as many while all
    attacks are on another sidecar, and on theirs, and for half as many under each attack alone, and while the heaviest
    is on another. Then `returning` clients, of which `returning_all` follow all streams, come back at once after `away`
    s; and `many_clients` who follow all of `many` streams come, go and come back."""

    streams: int = 20
    writers: int = 50
    each: int = 190
    all: int = 10
    seconds: float = 30.0
    returning: int = 1000
    returning_all: int = 10
    away: float = 3.0
    many: int = 3000
    many_clients: int = 40


@dataclass
class Probes:
    """`seconds` of each probe; `failed`: not answered with 200."""

    seconds: list[float] = field(default_factory=list)
    failed: int = 0


def run(site: BenchSite, plan: AttackPlan) -> dict[str, Any]:
    half = replace(plan, seconds=plan.seconds / 2)
    return {
        "streams": plan.streams,
        "writers": plan.writers,
        "clients": plan.each + plan.all,
        "seconds": plan.seconds,
        "returning": plan.returning,
        "returning_all": plan.returning_all,
        "away": plan.away,
        "peace": _followed(site, plan, "in peace"),
        "beside": _followed(site, plan, "beside another that is attacked", attacking.ACTS, elsewhere=True),
        "attack": _followed(site, plan, "attacked", attacking.ACTS),
        "alone": {act: _followed(site, half, act, [act]) for act in (*attacking.ACTS, *attacking.CROWDS)},
        "beside_alone": {_HEAVIEST: _followed(site, half, f"beside {_HEAVIEST}", [_HEAVIEST], elsewhere=True)},
        "few_files": _followed(site, half, "few files", ["one_address"], files=_FEW_FILES),
        "back": _returned(site, plan),
        "many": _many(site, plan),
    }


def _followed(
    site: BenchSite,
    plan: AttackPlan,
    name: str,
    acts: Sequence[str] = (),
    *,
    elsewhere: bool = False,
    files: int = 0,
) -> dict[str, Any]:
    """`elsewhere`: another sidecar on this machine is attacked, which shows what sharing it costs. `files`: the soft
    limit of open files with which the sidecar starts."""
    dsn, url = site.database(), site.emptied_redis()
    names = [stream_name(number) for number in range(plan.streams)]
    stamps = site.directory("stamps") / "events"
    load = Load(dsn, url, plan.streams, plan.writers, plan.seconds)
    with ExitStack() as processes:
        with rights.soft_limit(files):
            sidecar, tcp = processes.enter_context(started(site, dsn, url))
        publisher = processes.enter_context(running(publishing, load))
        answer(publisher, dict)
        crowd = following.Crowd(sidecar.port, names, plan.each, plan.all, str(stamps))
        followers = processes.enter_context(running(following, crowd))
        answer(followers, dict)
        if acts:
            victim, lines = processes.enter_context(started(site, dsn, url)) if elsewhere else (sidecar, tcp)
            attack = attacking.Attack(victim.port, lines, names, [*acts])
            attacker = processes.enter_context(running(attacking, attack))
            answer(attacker, dict)
        with _probed(sidecar.port) as probes:
            tell(publisher, {})
            published = answer(publisher, PublishedLoad)
            tell(followers, published.positions)
            saw = answer(followers, following.Saw)
        done = {}
        if acts:
            tell(attacker, {})
            done = answer(attacker, dict)
        if saw.torn or saw.lost or saw.short:
            raise WrongResult(f"{saw}, {sidecar.log_tail(5)}")
        found = {
            "rate": load.advances_per_second,
            "latency": percentiles(latencies(stamps, published.sent)),
            "late": published.late,
            "probe": max(probes.seconds),
            "probes": len(probes.seconds),
            "failed": probes.failed,
            "peak": peak_of(sidecar),
            "done": done,
        }
    click.echo(f"{name}: {found}", err=True)
    return found


def _returned(site: BenchSite, plan: AttackPlan) -> dict[str, Any]:
    dsn, url = site.database(), site.emptied_redis()
    names = [stream_name(number) for number in range(plan.streams)]
    load = Load(dsn, url, plan.streams, plan.writers, plan.seconds)
    with started(site, dsn, url) as (sidecar, _), ExitStack() as processes:
        publisher = processes.enter_context(running(publishing, load))
        answer(publisher, dict)
        crowd = returning.Returning(sidecar.port, names, plan.returning, plan.returning_all, plan.away)
        clients = processes.enter_context(running(returning, crowd))
        answer(clients, dict)
        tell(publisher, {})
        time.sleep(plan.seconds / 4)
        with _probed(sidecar.port) as probes:
            before = processor_seconds(sidecar)
            tell(clients, {})
            returned = answer(clients, returning.Returned)
            spent = processor_seconds(sidecar) - before
        published = answer(publisher, PublishedLoad)
        tell(clients, published.positions)
        saw = answer(clients, following.Saw)
        if saw.torn or saw.lost or saw.short or returned.failed:
            raise WrongResult(f"{saw}, {returned.failed} failed, {sidecar.log_tail(5)}")
        found = {
            "rate": load.advances_per_second,
            "seconds": percentiles(returned.seconds),
            "spent": spent,
            "probe": max(probes.seconds),
            "failed": probes.failed,
            "peak": peak_of(sidecar),
        }
    click.echo(f"back: {found}", err=True)
    return found


def _many(site: BenchSite, plan: AttackPlan) -> dict[str, Any]:
    dsn, url = site.database(), site.emptied_redis()
    names = [stream_name(number) for number in range(plan.many)]
    with started(site, dsn, url) as (sidecar, _), ExitStack() as processes:
        publisher = processes.enter_context(running(publishing, Load(dsn, url, plan.many, 1, 1.0)))
        answer(publisher, dict)
        before, peak = processor_seconds(sidecar), peak_of(sidecar)
        with _probed(sidecar.port) as probes:
            crowd = returning.Returning(sidecar.port, names, plan.many_clients, plan.many_clients, plan.away)
            clients = processes.enter_context(running(returning, crowd))
            answer(clients, dict)
            came = processor_seconds(sidecar) - before
            tell(clients, {})
            returned = answer(clients, returning.Returned)
        if returned.failed:
            raise WrongResult(f"{returned.failed} failed, {sidecar.log_tail(5)}")
        found = {
            "streams": plan.many,
            "clients": plan.many_clients,
            "came": came,
            "spent": processor_seconds(sidecar) - before - came,
            "seconds": max(returned.seconds),
            "probe": max(probes.seconds),
            "failed": probes.failed,
            "peak": peak_of(sidecar),
            "more": peak_of(sidecar) - peak,
        }
    click.echo(f"many: {found}", err=True)
    return found


@contextmanager
def _probed(port: int) -> Iterator[Probes]:
    """Ask as a kubelet does, while the block runs."""
    probes, over = Probes(), threading.Event()

    def probe() -> None:
        while not over.wait(PROBE_EVERY):
            for path in _PROBES:
                began = time.monotonic()
                connection = HTTPConnection("127.0.0.1", port, timeout=30)
                try:
                    connection.request("GET", path)
                    probes.failed += connection.getresponse().status != 200
                except (OSError, HTTPException):
                    probes.failed += 1
                finally:
                    connection.close()
                probes.seconds.append(time.monotonic() - began)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield probes
    finally:
        over.set()
        thread.join()


def render(figures: Mapping[str, Any]) -> list[str]:
    peace, attack, back = (figures[name] for name in ("peace", "attack", "back"))
    return [
        f"{figures['clients']} clients of `/v1/events`, each of which checks every move, while {peace['rate']:,}"
        f" advances a second of {figures['streams']} streams with {figures['writers']} writers each pass for"
        f" {figures['seconds']:.0f} s: in peace, and while one sidecar is sent newlines without end, endless and"
        " half-open heads, small and large pages of the history, tokens of 60 KB, thousands of unknown names in one"
        " request, names of 60 KB on the line protocol, and clients that come and go from the beginning of the history,"
        " all at once, from one address of their own. Attackers, clients and servers share the machine, so"
        " the same is shown"
        " while another sidecar on it is attacked instead. Then each attack alone, for half as long, and as many event"
        " streams, silent connections and connections with a name as one address can open (`one_address`,"
        " `silent_lines`, `named_lines`). Nobody lost a"
        " move.",
        "",
        *table(
            ["", "to a client, p50", "p99", "slowest probe", "probes that failed", "most memory"],
            [
                [name, *(f"{row['latency'][p]:,.0f} ms" for p in ("50", "99")), *_condition(row)]
                for name, row in (
                    ("in peace", peace),
                    ("another is attacked", figures["beside"]),
                    ("under attack", attack),
                    *((f"`{act}` alone", row) for act, row in figures["alone"].items()),
                    *((f"`{act}` alone, on another", row) for act, row in figures.get("beside_alone", {}).items()),
                    *(
                        (f"`one_address` alone, with a soft limit of {_FEW_FILES} files", row)
                        for row in [figures.get("few_files")]
                        if row
                    ),
                )
            ],
        ),
        "",
        f"{figures['returning']:,} clients, {figures['returning_all']} of which follow all streams, lose their"
        f" connections and come back {figures['away']:.0f} s later, all at once, under the same load. Until all of them"
        f" had been told what they missed, the sidecar took {back['spent']:.1f} s of a core:",
        "",
        *table(
            ["told what they missed, p50", "highest", "slowest probe", "probes that failed", "most memory"],
            [[*(f"{back['seconds'][p]:.2f} s" for p in ("50", "100")), *_condition(back)]],
        ),
        *(_rendered_many(figures["many"], figures["away"]) if "many" in figures else []),
    ]


def _rendered_many(many: Mapping[str, Any], away: float) -> list[str]:
    return [
        "",
        f"{many['clients']} clients, each of which follows all of {many['streams']:,} streams that rest, come at once"
        f" ({many['came']:.1f} s of a core), lose their connections, and come back {away:.0f} s later"
        f" ({many['spent']:.1f} s). They took {mib(many['more'])}:",
        "",
        *table(
            ["told what they missed, highest", "slowest probe", "probes that failed", "most memory"],
            [[f"{many['seconds']:.2f} s", *_condition(many)]],
        ),
    ]


def _condition(row: Mapping[str, Any]) -> list[str]:
    return [f"{1000 * row['probe']:,.0f} ms", f"{row['failed']}", mib(row["peak"])]
