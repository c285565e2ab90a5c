"""The verbs that prepare servers and run processes: config, migrate, topics, pipeline, sidecar and simulate."""

import math
import threading
import time
from typing import Literal

import click

from tidemark.app.commands import Amount, OurCommand, loaded, waiting


@click.command("config", cls=OurCommand)
def config() -> None:
    """Print the effective settings, secrets masked, and where each came from."""
    from tidemark.app.config import lines

    click.echo("\n".join(lines(loaded())))


@click.command("migrate", cls=OurCommand)
@waiting
def migrate(*, wait: float) -> None:
    """Bring the database's schema up to this version."""
    settings = loaded()
    from tidemark.common.backoff import wait_out
    from tidemark.sinks.postgres.database import migrate

    applied = wait_out(lambda: migrate(settings.postgres), threading.Event(), wait)
    click.echo(f"applied {', '.join(map(str, applied))}" if applied else "the schema is up to date")


@click.command("topics", cls=OurCommand)
@waiting
def topics(*, wait: float) -> None:
    """Make the topics that are missing, and check those that are there."""
    settings = loaded().model_copy(update={"kafka_create_topics": True})
    from tidemark.app.preflight import ready
    from tidemark.common.backoff import wait_out
    from tidemark.sources.topics import Topics

    found = wait_out(lambda: ready(settings, Topics(settings.kafka)), threading.Event(), wait)
    for name, topic in found.items():
        count = len(topic.partitions)
        click.echo(f"{name}: {count} partition{'' if count == 1 else 's'}")


@click.command("pipeline", cls=OurCommand)
@click.option(
    "--accept",
    multiple=True,
    type=click.Choice(["partitions", "loss", "shards"]),
    help="Start once in spite of what an earlier start refused; may be repeated.",
)
def pipeline(accept: tuple[Literal["partitions", "loss", "shards"], ...]) -> None:
    """Read facts from Kafka and publish positions, until SIGTERM or Ctrl-C."""
    settings = loaded()
    from tidemark.app import pipeline

    pipeline.run(settings, frozenset(accept))


@click.command("sidecar", cls=OurCommand)
def sidecar() -> None:
    """Serve positions over HTTP and the line protocol, until SIGTERM or Ctrl-C. Any number may run."""
    settings = loaded()
    from tidemark.app import serve

    serve.run(settings)


@click.command("simulate", cls=OurCommand)
@click.option("--seconds", type=Amount(min=0), default=math.inf, help="How long; without it until Ctrl-C.")
@click.option("--rate", type=Amount(0, min_open=True), default=40.0, show_default=True, help="Transactions/s in all.")
@click.option("--streams", type=click.IntRange(1), default=5, show_default=True, help="How many streams.")
@click.option("--writers", type=click.IntRange(1), default=3, show_default=True, help="Writers at the beginning.")
@click.option(
    "--workload",
    type=click.Choice(["streams", "rooms"]),
    default="streams",
    show_default=True,
    help="rooms: a chat server's (docs/explanation/rooms.md); --streams is not for them.",
)
@click.option("--prefix", default="", help="Begins each stream's and writer's name.")
@click.option("--seed", type=int, help="Repeat the script that had this seed; the interleaving is never the same.")
@click.option("--faults", "named", help="Names with commas between, all, or none; without it all but the servers'.")
@click.option(
    "--verify", is_flag=True, help="In the end compare what was read with what was written; exit 1 on a fault."
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
    named: str | None,
    verify: bool,
) -> None:
    """Write and read with real processes that roll back, hang, die, pause, join late and leave.

    Faults: rollback, hang, crash, pause, late, leave, relay, reader; of the local stack: pipeline, redis, kafka,
    postgres-crash, failover, restore. For the last three the services get a Postgres of their own.
    """
    settings = loaded()
    from tidemark.app.simulation import simulate
    from tidemark.app.simulation.script import WriterPlan, faults
    from tidemark.app.simulation.workload import SimulationPlan

    seed = time.time_ns() % 2**32 if seed is None else seed
    click.echo(f"running with --seed {seed}")
    writer_plan = WriterPlan(streams, writers, rate, prefix, "persister" if workload == "rooms" else "writer")
    plan = SimulationPlan(writer_plan, faults(named), seed, seconds)
    simulate.run(settings, plan, workload, verify=verify)
