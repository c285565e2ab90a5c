"""`tidemark relay` and its verbs."""

import threading
from typing import Literal

import click

from tidemark.app.commands import CommandGroup, awaiting_its_end, loaded, waiting

_dsn = click.option("--dsn", help="The service's database; without it TIDEMARK_POSTGRES_DSN.")


@click.group("relay", cls=CommandGroup, extra="relay", invoke_without_command=True)
@_dsn
@click.option("--writer", help="What Tidemark calls this database; without it the database's name. Kept for life.")
@click.option("--metrics", help="Serve /metrics, /livez and /readyz at this address, host:port.")
@click.option(
    "--wire",
    type=click.IntRange(1, 2),
    default=1,
    help="2: many facts of a backlog share a Kafka record. Pipelines and sidecars must be as new as this relay.",
)
@click.pass_context
def relay(ctx: click.Context, dsn: str | None, writer: str | None, metrics: str | None, wire: int) -> None:
    """Send to Kafka what services appended to their database with `tidemark.append`, until SIGTERM or Ctrl-C.

    One for each database; a second one waits and takes over. It keeps nothing.
    """
    ctx.obj = dsn
    if ctx.invoked_subcommand is None:
        settings = loaded(other_database=dsn is not None)
        from tidemark.app import relay

        relay.run(settings, relay.RelayPlan(dsn or settings.postgres, writer, metrics, wire))


@relay.command("migrate", extra="relay")
@_dsn
@click.option("--stream", "streams", multiple=True, help="Make this stream unless it is there; may be repeated.")
@click.option(
    "--direction", type=click.Choice(["forward", "backward"]), default="forward", help="Where the streams' IDs go."
)
@waiting
@click.pass_obj
def relay_migrate(
    given: str | None,
    dsn: str | None,
    streams: tuple[str, ...],
    direction: Literal["forward", "backward"],
    *,
    wait: float,
) -> None:
    """Make or update what `tidemark.append` needs in a service's database."""
    settings = loaded(other_database=(dsn or given) is not None)
    from tidemark.app import relay
    from tidemark.common.backoff import wait_out

    where = dsn or given or settings.postgres
    wait_out(lambda: relay.migrate(where, streams, direction, click.echo), threading.Event(), wait)


@relay.command("retire", extra="relay")
@_dsn
@click.argument("writer")
@click.argument("stream", required=False)
@awaiting_its_end
@click.pass_obj
def relay_retire(given: str | None, dsn: str | None, writer: str, stream: str | None, *, wait: float) -> None:
    """End WRITER, a name given to append_as that nobody uses any more, in STREAM or in all that know it.

    Once nothing of it is open and the relay has told all of it, readers and positions wait for it no more. If it
    appends again it begins anew.
    """
    settings = loaded(other_database=(dsn or given) is not None)
    from tidemark.app import relay

    order = relay.RetireOrder(writer, stream, wait)
    relay.retire(dsn or given or settings.postgres, order, threading.Event(), click.echo)


@relay.command("blockers", extra="relay")
@_dsn
@click.pass_obj
def relay_blockers(given: str | None, dsn: str | None) -> None:
    """Name the open transactions that hold a stream: process, user, application, state, since when, query."""
    settings = loaded(other_database=(dsn or given) is not None)
    from tidemark.app import relay

    relay.blockers(dsn or given or settings.postgres(), click.echo)
