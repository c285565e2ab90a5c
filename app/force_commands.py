"""`tidemark force`: what an operator settles without a writer's evidence."""

import time
from collections.abc import Callable
from typing import Any, Final

import click

from tidemark.app.commands import CommandFailed, CommandGroup, loaded

_OPTIONS: Final[list[Callable[[Any], Any]]] = [
    click.argument("stream"),
    click.argument("writer"),
    click.option("--epoch", type=click.IntRange(0), help="Without it the writer as it lives now."),
    click.option("--by", required=True, help="Who answers for it; it is kept."),
    click.option("--why", required=True, help="Why it must be; it is kept."),
    click.option("--beyond", is_flag=True, help="Also past what the stream has allocated. No position comes back."),
    click.option("--dry-run", is_flag=True, help="Show what would happen and send nothing."),
]


def _act(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.group("force", cls=CommandGroup)
def force() -> None:
    """Settle IDs without their writer's evidence: say what that does, and send it to the control topic.

    The last resort: end the transaction that is open, or restart the writer that hangs.
    """


@force.command("skip", extra="sidecar")
@_act
@click.option("--prev", type=int, required=True, help="The ID before the first that is settled.")
@click.option("--id", type=int, required=True, help="The last ID that is settled.")
def force_skip(**options: Any) -> None:
    """Settle what WRITER has open in (PREV, ID] of STREAM. What completes there after all is late."""
    _force("SKIP", **options)


@force.command("retire", extra="sidecar")
@_act
@click.option("--id", type=int, default=0, help="Settle what is open up to here; without it nothing may be open.")
def force_retire(**options: Any) -> None:
    """Let the line of STREAM wait for WRITER no more; of `*`: for none that never joined."""
    _force("RETIRE", **options)


@force.command("join", extra="sidecar")
@_act
@click.option("--id", type=int, required=True, help="All of the writer's up to here is complete.")
def force_join(**options: Any) -> None:
    """Join in the name of WRITER, which never joined STREAM or will not for a new epoch."""
    _force("JOIN", **options)


def _force(kind: str, *, dry_run: bool, **fields: Any) -> None:
    from tidemark.app import force
    from tidemark.sinks.postgres.store import Postgres, PostgresConfig

    settings = loaded()
    act = force.KINDS[kind](**{name: value for name, value in fields.items() if value is not None})
    with Postgres(PostgresConfig(settings.postgres)) as postgres:
        postgres.check_readable()
        stored = postgres.states([act.stream]).get(act.stream)
    if stored is None:
        raise CommandFailed(f"there is no stream {act.stream}; `tidemark status` shows all")
    done = force.attempt(stored, act, int(time.time() * 1000))
    for line in force.told(stored, done):
        click.echo(line)
    if not dry_run:
        topic = settings.kafka_control_topic
        click.echo(force.send(settings.kafka, topic, act, done).summary(topic))
