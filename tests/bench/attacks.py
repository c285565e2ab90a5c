"""One sidecar under attack, from each side and from all at once, and with all its clients coming back at once."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
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
from tidemark.app.stack.processes import SidecarProcess

ASK_EVERY = 0.1  # seconds
_HEAVIEST = "come_and_go"
_FEW_FILES = 1024
_PROBES = ("/livez", "/readyz")
_CONDITIONS = ("slowest probe", "requests that failed", "most memory")
_DESCRIPTIONS = {
    "newlines": "newlines without end on the line protocol",
    "endless_head, half_open": "heads of requests that never end",
    "page, long_page": "pages of the history with 1 and with 10,000 advances",
    "long_token": "tokens of 60 KB",
    "come_and_go": "20 clients that follow from the beginning of the history, and leave",
    "many_names": "2,000 unknown names in one request for events",
    "long_name": "names of 60 KB and a bad line on the line protocol",
    "scrapes": "`/metrics` again and again",
    "all_positions": "`REPLICATE` again and again on the line protocol",
    "one_address": "2,500 streams of events",
    "silent_lines, named_lines": "2,500 connections of the line protocol, without and with a name",
}


@dataclass(frozen=True, slots=True)
class AttackPlan:
    """`each` honest clients follow one stream and `all` follow all of them, for `seconds` without an attack, for as
    many while all attacks are on another sidecar, and on theirs, and for half as many under each attack alone, and
    while the heaviest is on another. Each attack begins after `before` seconds of peace under the same load. Then
    `returning` clients, of which `returning_all` follow all streams, come back at once after `away` s; and
    `many_clients` who follow all of `many` streams come, go and come back."""

    streams: int = 20
    writers: int = 50
    each: int = 190
    all: int = 10
    seconds: float = 30.0
    before: float = 10.0
    returning: int = 1000
    returning_all: int = 10
    away: float = 3.0
    many: int = 3000
    many_clients: int = 40


@dataclass
class Asked:
    """Seconds that requests of an honest client took, each on a connection of its own, and what was not answered with
    200: of probes, and of GETs of a stream."""

    probes: list[float] = field(default_factory=list)
    gets: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        return {
            "get": percentiles([1000 * seconds for seconds in self.gets]),
            "probe": max(self.probes),
            "probes": len(self.probes),
            "failed": len(self.failed),
        }


def run(site: BenchSite, plan: AttackPlan) -> dict[str, Any]:
    half = replace(plan, seconds=plan.seconds / 2)
    return {
        "streams": plan.streams,
        "writers": plan.writers,
        "clients": plan.each + plan.all,
        "seconds": plan.seconds,
        "before": plan.before,
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
    load = Load(dsn, url, plan.streams, plan.writers, plan.before + plan.seconds)
    with ExitStack() as processes:
        with rights.soft_limit(files):
            sidecar, tcp = processes.enter_context(started(site, dsn, url))
        publisher = processes.enter_context(running(publishing, load))
        answer(publisher, dict)
        crowd = following.Crowd(sidecar.port, names, plan.each, plan.all, str(stamps))
        followers = processes.enter_context(running(following, crowd))
        answer(followers, dict)
        victim, lines = processes.enter_context(started(site, dsn, url)) if elsewhere else (sidecar, tcp)
        attack = attacking.Attack(victim.port, lines, names, [*acts])
        attacker = processes.enter_context(running(attacking, attack))
        answer(attacker, dict)
        tell(publisher, {})
        with _asking(sidecar.port, names) as before:
            time.sleep(plan.before)
        begun, logged = time.time(), _log_size(victim)
        tell(attacker, {})
        with _asking(sidecar.port, names) as during:
            published = answer(publisher, PublishedLoad)
            tell(followers, published.positions)
            saw = answer(followers, following.Saw)
        tell(attacker, {})
        done = answer(attacker, dict)
        if saw.torn or saw.lost or saw.short:
            raise WrongResult(f"{saw}, {sidecar.log_tail(5)}")
        peaceful = {batch: sent for batch, sent in published.sent.items() if sent < begun}
        attacked = {batch: sent for batch, sent in published.sent.items() if sent >= begun}
        found = {
            "rate": load.advances_per_second,
            "before": {"latency": percentiles(latencies(stamps, peaceful)), **before.figures()},
            "latency": percentiles(latencies(stamps, attacked)),
            **during.figures(),
            "late": published.late,
            "peak": peak_of(sidecar),
            "log": _log_size(victim) - logged,
            "done": done,
        }
    click.echo(f"{name}: {found}, {(before.failed + during.failed)[:5]}", err=True)
    return found


def _log_size(sidecar: SidecarProcess) -> int:
    """Bytes."""
    return sidecar.home.log(sidecar.name).stat().st_size


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
        with _asking(sidecar.port, names) as asked:
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
            **asked.figures(),
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
        with _asking(sidecar.port, names) as asked:
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
            **asked.figures(),
            "peak": peak_of(sidecar),
            "more": peak_of(sidecar) - peak,
        }
    click.echo(f"many: {found}", err=True)
    return found


@contextmanager
def _asking(port: int, streams: Sequence[str]) -> Iterator[Asked]:
    """Probe as a kubelet does, and GET streams, while the block runs."""
    asked, over = Asked(), threading.Event()

    def ask(paths: Sequence[str], found: list[float]) -> None:
        number = 0
        while not over.wait(ASK_EVERY):
            path = paths[number % len(paths)]
            number += 1
            began = time.monotonic()
            connection = HTTPConnection("127.0.0.1", port, timeout=30)
            try:
                connection.request("GET", path)
                if (status := connection.getresponse().status) != HTTPStatus.OK:
                    asked.failed.append(f"{path}: {status}")
            except (OSError, HTTPException) as problem:
                asked.failed.append(f"{path}: {problem!r}")
            finally:
                connection.close()
            found.append(time.monotonic() - began)

    gets = [f"/v1/streams/{stream}" for stream in streams]
    threads = [threading.Thread(target=ask, args=args) for args in ((_PROBES, asked.probes), (gets, asked.gets))]
    for thread in threads:
        thread.start()
    try:
        yield asked
    finally:
        over.set()
        for thread in threads:
            thread.join()


def render(figures: Mapping[str, Any]) -> list[str]:
    peace, attack, back = (figures[name] for name in ("peace", "attack", "back"))
    rows = {
        "no attack": peace,
        "all attacks, on another sidecar": figures["beside"],
        "all attacks": attack,
        **{f"`{act}`": row for act, row in figures["alone"].items()},
        **{f"`{act}`, on another sidecar": row for act, row in figures["beside_alone"].items()},
        f"`one_address`, with a soft limit of {_FEW_FILES} files": figures["few_files"],
    }
    return [
        f"{figures['clients']} clients of `/v1/events`, each of which checks every move, while {peace['rate']:,}"
        f" advances a second of {figures['streams']} streams with {figures['writers']} writers each pass. Another"
        " client asks for a stream ten times a second, and one more probes as often. Each row is a sidecar of its own:"
        f" {figures['before']:.0f} s under this load, then an attack for {figures['seconds']:.0f} s (all attacks at"
        " once) or half as long (one attack), from one address. Attackers, clients and servers share the machine, so"
        " the same is shown while another sidecar on it is attacked instead. A cell has the figure before the attack"
        " and the figure during it. No client lost a move.",
        "",
        *(f"- {_code(name)}: {text}" for name, text in _DESCRIPTIONS.items()),
        "",
        *table(
            ["", "to a client, p50", "p99", "a GET, p50", "p99", *_CONDITIONS, "log"],
            [
                [
                    name,
                    *(_change(row, of, percentile) for of in ("latency", "get") for percentile in ("50", "99")),
                    *_condition(row),
                    f"{row['log'] / 1024:,.0f} KiB",
                ]
                for name, row in rows.items()
            ],
        ),
        "",
        f"{figures['returning']:,} clients, {figures['returning_all']} of which follow all streams, lose their"
        f" connections and come back {figures['away']:.0f} s later, all at once, under the same load. Until all of them"
        f" had received what they missed, the sidecar took {back['spent']:.1f} s of a core:",
        "",
        *table(
            ["received what they missed, p50", "highest", *_CONDITIONS],
            [[*(f"{back['seconds'][p]:.2f} s" for p in ("50", "100")), *_condition(back)]],
        ),
        *_rendered_many(figures["many"], figures["away"]),
    ]


def _rendered_many(many: Mapping[str, Any], away: float) -> list[str]:
    return [
        "",
        f"{many['clients']} clients, each of which follows all of {many['streams']:,} streams that rest, come at once"
        f" ({many['came']:.1f} s of a core), lose their connections, and come back {away:.0f} s later"
        f" ({many['spent']:.1f} s). They took {mib(many['more'])}:",
        "",
        *table(
            ["received what they missed, highest", *_CONDITIONS],
            [[f"{many['seconds']:.2f} s", *_condition(many)]],
        ),
    ]


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def _change(row: Mapping[str, Any], of: str, percentile: str) -> str:
    """Milliseconds before the attack and during it."""
    return " → ".join(f"{found[of][percentile]:,.0f}" for found in (row["before"], row)) + " ms"


def _condition(row: Mapping[str, Any]) -> list[str]:
    return [f"{1000 * row['probe']:,.0f} ms", f"{row['failed']}", mib(row["peak"])]
