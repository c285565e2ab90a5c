"""The commands that show the settings, prepare servers and run processes: config, migrate, topics, pipeline, sidecar
and simulate."""

import math
import threading
import time
from functools import partial
from typing import Literal

import click
import msgspec

from tidemark.app.commands import Amount, Utf8Command, json_option, load_settings, server_wait_option
from tidemark.app.output import applied_migrations, count, json_text, progress


@click.command("config", cls=Utf8Command)
@json_option
def config(*, as_json: bool) -> None:
    """Print the effective settings with masked secrets, and the source of each setting."""
    from tidemark.app.settings import effective_settings, settings_lines, unknown_settings

    settings = load_settings()
    if as_json:
        click.echo(json_text({"settings": effective_settings(settings), "unknown": unknown_settings()}))
    else:
        click.echo("\n".join(settings_lines(settings)))


@click.command("migrate", cls=Utf8Command)
@server_wait_option
@json_option
def migrate(*, wait: float, as_json: bool) -> None:
    """Create or update Tidemark's schema in Postgres."""
    settings = load_settings()
    from tidemark.common.backoff import wait_out
    from tidemark.sinks.postgres.database import migrate

    show_progress = partial(progress, "migrating", unit="migration")
    applied = wait_out(lambda: migrate(settings.postgres, show_progress), threading.Event(), wait)
    if as_json:
        click.echo(json_text({"applied": applied}))
    else:
        click.echo(applied_migrations(applied))


@click.command("topics", cls=Utf8Command)
@server_wait_option
@json_option
def topics(*, wait: float, as_json: bool) -> None:
    """Create the Kafka topics that are missing, and check the cleanup policy of all topics."""
    settings = msgspec.structs.replace(load_settings(), kafka_create_topics=True)
    from tidemark.app.pipeline.preflight import check_topics
    from tidemark.common.backoff import wait_out
    from tidemark.sources.topics import Topics

    checked = wait_out(lambda: check_topics(settings, Topics(settings.kafka)), threading.Event(), wait)
    partitions = {name: len(topic.partitions) for name, topic in checked.items()}
    if as_json:
        rows = [{"topic": name, "partitions": number} for name, number in partitions.items()]
        click.echo(json_text({"topics": rows}))
        return
    for name, number in partitions.items():
        click.echo(f"{name}: {count(number, 'partition')}")


@click.command("pipeline", cls=Utf8Command)
@click.option(
    "--accept",
    multiple=True,
    type=click.Choice(["partitions", "loss", "shards"]),
    help="Start despite one failed check: partitions (a topic has another number of partitions), loss (records were"
    " lost) or shards (TIDEMARK_SHARDS has changed). May be repeated.",
)
def pipeline(accept: tuple[Literal["partitions", "loss", "shards"], ...]) -> None:
    """Read records from Kafka and publish positions, until SIGTERM or Ctrl-C."""
    settings = load_settings()
    from tidemark.app.pipeline import supervisor as pipeline

    pipeline.run(settings, frozenset(accept))


@click.command("sidecar", cls=Utf8Command)
def sidecar() -> None:
    """Serve positions over HTTP and the line protocol, until SIGTERM or Ctrl-C. Any number of sidecars may run."""
    settings = load_settings()
    from tidemark.app.serving import serve

    serve.run(settings)


@click.command("simulate", cls=Utf8Command)
@click.option("--seconds", type=Amount(min=0), default=math.inf, help="Duration in seconds. Default: until Ctrl-C.")
@click.option(
    "--rate",
    type=Amount(0, min_open=True),
    default=40.0,
    show_default=True,
    help="Transactions per second of all writers together.",
)
@click.option("--streams", type=click.IntRange(1), default=5, show_default=True, help="Number of streams.")
@click.option("--writers", type=click.IntRange(1), default=3, show_default=True, help="Number of writers at the start.")
@click.option(
    "--workload",
    type=click.Choice(["streams", "rooms"]),
    default="streams",
    show_default=True,
    help="rooms: a chat server (docs/explanation/rooms.md); --streams has no effect.",
)
@click.option("--prefix", default="", help="Prefix of the names of streams and writers.")
@click.option("--seed", type=int, help="Seed of the fault schedule and of random choices; the timing still differs.")
@click.option(
    "--faults",
    "fault_names",
    help="Faults to inject: names separated by commas, or all, or none. Default: all except faults of servers.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="At the end, compare the facts that were read with the facts that were written; exit code 1 if they differ.",
)
def simulate(
    *,
    seconds: float,
    rate: float,
    streams: int,
    writers: int,
    workload: str,
    prefix: str,
    seed: int | None,
    fault_names: str | None,
    verify: bool,
) -> None:
    """Run writing and reading processes on real servers, and inject faults into the processes and the servers.

    Faults: rollback, hang, crash, pause, late, leave, relay, reader; of the local stack: pipeline, redis, kafka,
    postgres-crash, failover, restore, restore-in-place, row-security, sequence-back, sequence-jump, sequence-cache,
    oversized, control-nul. For postgres-crash and all faults after it in this list, the services use a second Postgres
    server.
    """
    settings = load_settings()
    from tidemark.app.simulation import simulate
    from tidemark.app.simulation.script import WriterPlan, parse_faults
    from tidemark.app.simulation.workload import SimulationPlan

    seed = time.time_ns() % 2**32 if seed is None else seed
    click.echo(f"running with --seed {seed}")
    writer_plan = WriterPlan(streams, writers, rate, prefix, "persister" if workload == "rooms" else "writer")
    plan = SimulationPlan(writer_plan, parse_faults(fault_names), seed, seconds)
    simulate.run(settings, plan, workload, verify=verify)
