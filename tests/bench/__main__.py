"""The benchmark's command line. Without a subcommand it measures everything but `soak`, about an hour and a quarter."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from tests.bench import (
    append,
    attacks,
    contestants,
    cores,
    costs,
    flat,
    gap,
    history,
    idle,
    latency,
    outbox,
    quiet,
    race,
    report,
    results,
    rights,
    rooms,
    runs,
    sidecar,
    soak,
    standing,
    take,
)
from tests.bench.site import BenchSite, servers
from tidemark.app import logs
from tidemark.app.settings import load
from tidemark.app.versions import find_java

Run = Callable[[BenchSite], dict[str, Any]]


@click.group(invoke_without_command=True, context_settings={"show_default": True})
@click.pass_context
def main(context: click.Context) -> None:
    """Measure Tidemark and write docs/explanation/benchmarks.md."""
    logs.configure(load(log_level="warning"))
    if context.invoked_subcommand is None:
        context.invoke(everything)


@main.command("all")
def everything() -> None:
    """Everything but `soak`, at full size."""
    with servers() as site:
        _races(site, race.THROUGHPUT.records)
        _record("cores", cores.run(site, cores.CoresPlan()))
        _record("latency", latency.run(site, latency.LatencyPlan()))
        _record("quiet", quiet.run(site, quiet.QuietPlan()))
        _record("costs", costs.run(site, costs.CostsPlan()))
        _record("gap", gap.run(site, gap.GapPlan()))
        _record("append", append.run(site, append.AppendPlan()))
        _record("sidecar", sidecar.run(site, sidecar.CrowdPlan()))
        _record("attacks", attacks.run(site, attacks.AttackPlan()))
        _record("rights", rights.run(site))
        _record("history", history.run(site, history.HistoryPlan()))
        _record("standing", standing.run(site, standing.StandingPlan()))
        _record("idle", idle.run(site, idle.IdlePlan()))
        _record("rooms", rooms.run(site, rooms.RoomsPlan()))
    _record("flat", flat.run(flat.FlatPlan()))
    _record("take", take.run(take.TakePlan()))


def _sizes(plan: Any, *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Options for these fields of `plan`, with its own values as defaults."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for name in reversed(names):
            command = click.option(f"--{name.replace('_', '-')}", default=getattr(plan, name))(command)
        return command

    return add


_PACED = ("warm_seconds", "paced_seconds")

_against = click.option(
    "--against",
    multiple=True,
    type=click.Choice([name for name in contestants.NAMES if name != contestants.WHOLE]),
    help="Only this one beside Tidemark; may be repeated.",
)


@main.command()
@_sizes(race.THROUGHPUT, "records", "batch", "warm_batches", "rounds", *_PACED)
@_against
def races(**sizes: Any) -> None:
    """`throughput`, `streams` and `runs`, one after the other."""
    with servers() as site:
        _races(site, **sizes)


def _races(site: BenchSite, records: int, **sizes: Any) -> None:
    """`records` of each topic, or as many facts."""
    for name, plan in (("throughput", race.THROUGHPUT), ("streams", race.STREAMS)):
        _record(name, race.run(site, replace(plan, records=records, **sizes)))
    _record("runs", runs.run(site, runs.RunsPlan(facts=records, **sizes)))


@main.command()
@_sizes(race.THROUGHPUT, "records", "batch", "warm_batches", "rounds", *_PACED)
@_against
def throughput(**sizes: Any) -> None:
    """Few streams: Tidemark, its ceiling, and its alternatives."""
    _on_servers("throughput", lambda site: race.run(site, replace(race.THROUGHPUT, **sizes)))


@main.command()
@_sizes(race.STREAMS, "records", "batch", "warm_batches", "rounds", "partitions", *_PACED)
@_against
def streams(**sizes: Any) -> None:
    """10 000 streams: Tidemark, its ceiling, and its alternatives on the JVM."""
    _on_servers("streams", lambda site: race.run(site, replace(race.STREAMS, **sizes)))


@main.command("runs")
@_sizes(runs.RunsPlan(), "facts", "batch", "warm_batches", "rounds", *_PACED)
@_against
def runs_(**sizes: Any) -> None:
    """Facts one to a Kafka record, and many: Tidemark and its alternatives on the JVM."""
    _on_servers("runs", lambda site: runs.run(site, runs.RunsPlan(**sizes)))


@main.command("cores")
@_sizes(cores.CoresPlan(), "cores", "records", "rounds")
def cores_(**sizes: Any) -> None:
    """What one core does."""
    _on_servers("cores", lambda site: cores.run(site, cores.CoresPlan(**sizes)))


@main.command("latency")
@_sizes(latency.LatencyPlan(), "rate", "warm_seconds", "seconds")
def latency_(**sizes: Any) -> None:
    """Completion to subscriber, under light traffic."""
    _on_servers("latency", lambda site: latency.run(site, latency.LatencyPlan(**sizes)))


@main.command("quiet")
@_sizes(quiet.QuietPlan(), "shares", "warm_seconds", "seconds", "partitions")
def quiet_(**sizes: Any) -> None:
    """What little traffic costs, or none, with more and less time between batches."""
    _on_servers("quiet", lambda site: quiet.run(site, quiet.QuietPlan(**sizes)))


@main.command("costs")
@_sizes(costs.CostsPlan(), "warm_seconds", "settle_seconds", "seconds")
@_against
def costs_(**sizes: Any) -> None:
    """Cost and latency at four rates: Tidemark and its alternatives."""
    _on_servers("costs", lambda site: costs.run(site, costs.CostsPlan(**sizes)))


@main.command("gap")
@_sizes(gap.GapPlan(), "pending", "batch", "batches", "rounds")
def gap_(**sizes: Any) -> None:
    """One gap with very many pending IDs."""
    _on_servers("gap", lambda site: gap.run(site, gap.GapPlan(**sizes)))


@main.command("flat")
@_sizes(flat.FlatPlan(), "records", "batch")
def flat_(**sizes: Any) -> None:
    """Very many IDs through one stream, without Spark and Kafka."""
    _record("flat", flat.run(flat.FlatPlan(**sizes)))


@main.command("take")
@_sizes(take.TakePlan(), "rate", "seconds", "rows")
def take_(**sizes: Any) -> None:
    """Readers in SQL: from the commit to `tidemark_reader.take`, and partitions. Without Kafka."""
    _record("take", take.run(take.TakePlan(**sizes)))


@main.command("append")
@_sizes(append.AppendPlan(), "seconds", "rounds", "backlog", "per_second")
def append_(**sizes: Any) -> None:
    """A service's transactions with `tidemark.append` and without, and the relay."""
    _on_servers("append", lambda site: append.run(site, append.AppendPlan(**sizes)))


@main.command("outbox")
@_sizes(outbox.OutboxPlan(), "seconds", "after", "per_second", "backlog")
def outbox_(**sizes: Any) -> None:
    """How large the outbox and the relay grow, also with Kafka away for an hour."""
    _on_servers("outbox", lambda site: outbox.run(site, outbox.OutboxPlan(**sizes)))


@main.command("sidecar")
@_sizes(sidecar.CrowdPlan(), "streams", "writers", "each", "all", "lines", "seconds", "requests", "asking")
def sidecar_(**sizes: Any) -> None:
    """One sidecar with very many clients."""
    _on_servers("sidecar", lambda site: sidecar.run(site, sidecar.CrowdPlan(**sizes)))


@main.command("attacks")
@_sizes(
    attacks.AttackPlan(),
    "streams",
    "writers",
    "each",
    "all",
    "seconds",
    "before",
    "returning",
    "returning_all",
    "away",
    "many",
    "many_clients",
)
def attacks_(**sizes: Any) -> None:
    """One sidecar under attack, and with all clients coming back at once."""
    _on_servers("attacks", lambda site: attacks.run(site, attacks.AttackPlan(**sizes)))


@main.command("rights")
def rights_() -> None:
    """Logins with few rights that hold locks and append large facts."""
    _on_servers("rights", rights.run)


@main.command("history")
@_sizes(history.HistoryPlan(), "streams", "batches")
def history_(**sizes: Any) -> None:
    """The history in Postgres under very many busy streams."""
    _on_servers("history", lambda site: history.run(site, history.HistoryPlan(**sizes)))


@main.command("standing")
@_sizes(standing.StandingPlan(), "batches", "markers")
def standing_(**sizes: Any) -> None:
    """What a stream has and a batch does not touch."""
    _on_servers("standing", lambda site: standing.run(site, standing.StandingPlan(**sizes)))


@main.command("idle")
@_sizes(idle.IdlePlan(), "streams", "seconds", "rate")
def idle_(**sizes: Any) -> None:
    """A start with very many streams, and what they cost while they rest."""
    _on_servers("idle", lambda site: idle.run(site, idle.IdlePlan(**sizes)))


@main.command("rooms")
@_sizes(rooms.RoomsPlan(), "events", "rooms", "members", "held", "syncs")
def rooms_(**sizes: Any) -> None:
    """The room DAG: the pure rules, and sync among very many events."""
    _on_servers("rooms", lambda site: rooms.run(site, rooms.RoomsPlan(**sizes)))


@main.command("soak")
@_sizes(soak.SoakPlan(), "minutes", "rate")
def soak_(**sizes: Any) -> None:
    """Memory of the whole stack over time."""
    _on_servers("soak", lambda site: soak.run(site, soak.SoakPlan(**sizes)))


def _on_servers(name: str, run: Run) -> None:
    with servers() as site:
        _record(name, run(site))


def _record(name: str, figures: dict[str, Any]) -> None:
    machine = results.machine(find_java(load().java_home))
    results.save(name, sys.argv[1:], machine, figures)
    report.write()
    click.echo(f"wrote {report.PAGE}", err=True)


if __name__ == "__main__":
    main()
