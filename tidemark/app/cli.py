"""The command line. Every command imports what it needs itself, so that `produce` does not wait for Spark.

Exit codes: 0 done, 1 the command failed, 2 a person must decide (wrong usage, wrong setting, any `Stop`), 3 what was
asked for with `--check` does not hold, or an act's effect was not seen in time, 130 Ctrl-C.
"""

import json
import math
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, Literal

import click

from tidemark.app.commands import Amount, CommandFailed, CommandGroup, loaded, no_stream, own_name, said, waiting
from tidemark.app.relay_commands import relay
from tidemark.app.synapse_commands import synapse
from tidemark.app.verbs import act_commands, ask_commands, record_commands
from tidemark.app.verbs.audit_commands import acts
from tidemark.app.verbs.late_commands import late
from tidemark.app.verbs.letter_commands import dead_letters
from tidemark.app.verbs.policy_commands import policy

UNHEALTHY = 3


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="tidemark")
def main() -> None:
    """Tidemark tells every reader of an append-only log how far it may safely read.

    Settings come from TIDEMARK_... in the environment; `tidemark config` shows them.
    """


@main.command(extra="local")
@click.option("--demo", is_flag=True, help="Also play several writers whose facts complete out of order.")
def up(*, demo: bool) -> None:
    """Run the whole local stack: Kafka, Postgres, Redis, the pipeline and the sidecar."""
    settings = loaded()
    from tidemark.app import up

    up.run(settings, demo=demo)


@main.command()
def config() -> None:
    """Print the effective settings, secrets masked, and where each came from."""
    from tidemark.app.config import lines

    click.echo("\n".join(lines(loaded())))


@main.command()
@waiting
def migrate(*, wait: float) -> None:
    """Bring the database's schema up to this version."""
    settings = loaded()
    from tidemark.common.backoff import wait_out
    from tidemark.sinks.postgres.database import migrate

    applied = wait_out(lambda: migrate(settings.postgres), threading.Event(), wait)
    click.echo(f"applied {', '.join(map(str, applied))}" if applied else "the schema is up to date")


@main.command(extra="pipeline")
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


@main.command(extra="pipeline")
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


@main.command(extra="sidecar")
def sidecar() -> None:
    """Serve positions over HTTP and the line protocol, until SIGTERM or Ctrl-C. Any number may run."""
    settings = loaded()
    from tidemark.app import serve

    serve.run(settings)


@main.command()
@click.argument("address", required=False)
@click.option("--stream", "streams", multiple=True, help="Show only this stream; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="For programs: a JSON object per line.")
@click.option("--server", help="End with exit code 2 where the server has another name.")
@click.option(
    "--tls", is_flag=True, help="Over TLS, also without TIDEMARK_SIDECAR_CA_FILE: by the system's authorities."
)
def listen(address: str | None, streams: tuple[str, ...], server: str | None, *, as_json: bool, tls: bool) -> None:
    """Show what a sidecar sends over the line protocol at ADDRESS (host:port; without it TIDEMARK_LINES_LISTEN)."""
    settings = loaded()
    from functools import partial

    from tidemark.app.connections import host_port
    from tidemark.app.lines import client as listen
    from tidemark.app.lines.client import Listening
    from tidemark.app.tls_listener import trusting

    try:
        where = host_port(address or settings.lines_listen)
    except ValueError as problem:
        raise click.BadParameter(f"{address!r} is {problem}", param_hint="ADDRESS") from None
    show = listen.as_json if as_json else str if settings.no_color else listen.coloured
    trust = partial(trusting, settings.sidecar_ca_file) if tls or settings.sidecar_ca_file else None
    for command in Listening(where, server, trust).commands():
        if listen.wanted(command, streams):
            click.echo(show(command))


@main.command(extra="sidecar")
@click.argument("stream", required=False)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.option(
    "--check", is_flag=True, help="End with exit code 3 where the pipeline behind the positions has problems."
)
@click.pass_context
def status(context: click.Context, stream: str | None, *, as_json: bool, check: bool) -> None:
    """Show how far every stream (or STREAM) and its writers are, who holds them back, and how the pipeline is."""
    settings = loaded()
    from tidemark.app import health
    from tidemark.app.verbs import status
    from tidemark.sinks.postgres.store import Postgres, PostgresConfig

    with Postgres(PostgresConfig(settings.postgres)) as postgres:
        postgres.check_readable()
        found = status.of(postgres, postgres.states(), stream)
        how = health.read(postgres, settings.kafka, settings.redis)
    if stream is not None and not found:
        raise CommandFailed(no_stream(stream))
    if as_json:
        click.echo(status.as_json(found, time.time(), how))
    else:
        click.echo(status.as_table(found, time.time()) if found else "no streams yet: nothing has been read from Kafka")
        click.echo("\n".join([how.line(), *(f"problem: {problem}" for problem in how.problems())]))
    if check and how.problems():
        context.exit(UNHEALTHY)


@main.command(extra="sidecar")
@click.argument("stream", required=False)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.option("--check", is_flag=True, help="End with exit code 3 where anything is held back.")
@click.pass_context
def gaps(context: click.Context, stream: str | None, *, as_json: bool, check: bool) -> None:
    """Show every gap and silent writer of all streams (or STREAM), and the command that would settle it."""
    settings = loaded()
    from tidemark.app import open_ranges
    from tidemark.app.verbs import gaps
    from tidemark.sinks.postgres.store import Postgres, PostgresConfig

    with Postgres(PostgresConfig(settings.postgres)) as postgres:
        postgres.check_readable()
        stored = postgres.states(None if stream is None else [stream])
        found = open_ranges.of(postgres, stored, time.time(), settings.policy_defaults)
    if stream is not None and not stored:
        raise CommandFailed(no_stream(stream))
    if as_json:
        click.echo(gaps.as_json(found))
    else:
        click.echo(gaps.as_text(found, time.time()) if found else "nothing is held back")
    if check and found:
        context.exit(UNHEALTHY)


@main.command(extra="pipeline")
@click.option(
    "--by", default=own_name, show_default="who runs it", callback=said, help="Who answers for it; it is kept."
)
@click.option("--why", default="by hand", show_default=True, callback=said, help="Why it must be; it is kept.")
@click.option("--dry-run", is_flag=True, help="Show what would happen and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
def reseed(by: str, why: str, *, dry_run: bool, as_json: bool) -> None:
    """Have the pipeline, which is stopped, begin with as many shards as TIDEMARK_SHARDS says, and with states in
    today's format."""
    settings = loaded()
    from tidemark.app.verbs import reseed

    done = reseed.run(settings, by, why, dry_run=dry_run)
    click.echo(json.dumps({**asdict(done), "dry_run": dry_run}) if as_json else done.as_text())


@main.command(extra="sidecar")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--metrics", multiple=True, help="Also keep what this address answers; without it the pipeline's.")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
def bundle(file: Path | None, metrics: tuple[str, ...], *, as_json: bool) -> None:
    """Write what a report of a fault needs to FILE (.tar.gz): settings without secrets, versions, positions, gaps, the
    last advances, and what the servers say; also where some of them do not answer."""
    settings = loaded()
    from tidemark.app.verbs import bundle

    chosen = file or Path(time.strftime("tidemark-bundle-%Y%m%d-%H%M%S.tar.gz", time.gmtime()))
    try:
        made = bundle.write(settings, chosen, metrics or (settings.metrics_url,))
    except OSError as problem:
        raise CommandFailed(f"{chosen}: {problem.strerror}") from None
    click.echo(bundle.as_json(made) if as_json else bundle.as_text(made))


@main.command(extra="relay")
@click.argument("file", type=click.File("rb"), default="-")
@click.option("--control", is_flag=True, help="Send operators' records to the control topic instead.")
def produce(file: BinaryIO, *, control: bool) -> None:
    """Send JSON lines from FILE (or standard input) to Kafka, each under the key that it must have.

    Bad lines are named and left out; then the exit code is 1.
    """
    settings = loaded()
    from tidemark.app.produce import produce
    from tidemark.streaming.wire.records import Topic

    topic = settings.kafka_control_topic if control else settings.kafka_facts_topic
    role = Topic.CONTROL if control else Topic.FACTS
    produced = produce(settings.kafka, topic, role, file, lambda problem: click.echo(problem, err=True))
    click.echo(produced.summary(topic))
    if produced.refused:
        raise SystemExit(1)


@main.command(extra="local")
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
    from tidemark.app.simulation import rooms, simulate
    from tidemark.sources.simulator.script import Players, faults

    seed = time.time_ns() % 2**32 if seed is None else seed
    click.echo(f"playing with --seed {seed}")
    cast = Players(streams, writers, rate, prefix, "persister" if workload == "rooms" else "writer")
    play = simulate.Play(cast, faults(named), seed, seconds)
    run = rooms.run if workload == "rooms" else simulate.run
    run(settings, play, verify=verify)


GROUPS = (acts, dead_letters, late, policy, relay, synapse)
for command in (*ask_commands.COMMANDS, *record_commands.COMMANDS, *act_commands.COMMANDS, *GROUPS):
    main.add_command(command)

if __name__ == "__main__":
    main()
