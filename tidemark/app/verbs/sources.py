"""`tidemark relay` and its verbs."""

import threading
from typing import Literal

import click

from tidemark.app.commands import CommandGroup, awaiting_its_end, loaded, waiting

_dsn = click.option("--dsn", help="The service's database; without it TIDEMARK_POSTGRES_DSN.")


@click.group("relay", cls=CommandGroup, invoke_without_command=True)
@_dsn
@click.option("--writer", help="What Tidemark calls this database; without it the database's name. Kept for life.")
@click.option("--metrics", help="Serve /metrics, /livez and /readyz at this address, host:port.")
@click.pass_context
def relay(ctx: click.Context, dsn: str | None, writer: str | None, metrics: str | None) -> None:
    """Send to Kafka what services appended to their database with `tidemark.append`, until SIGTERM or Ctrl-C.

    One for each database; a second one waits and takes over. It keeps nothing.
    """
    ctx.obj = dsn
    if ctx.invoked_subcommand is None:
        settings = loaded(other_database=dsn is not None)
        from tidemark.app import relay

        relay.run(settings, relay.RelayPlan(dsn or settings.postgres, writer, metrics))


@relay.command("migrate")
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


@relay.command("retire")
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


@relay.command("blockers")
@_dsn
@click.pass_obj
def relay_blockers(given: str | None, dsn: str | None) -> None:
    """Name the open transactions that hold a stream: process, user, application, state, since when, query."""
    settings = loaded(other_database=(dsn or given) is not None)
    from tidemark.app import relay

    relay.blockers(dsn or given or settings.postgres(), click.echo)


@click.group("synapse", cls=CommandGroup, invoke_without_command=True)
@click.option("--server-name", help="Synapse's server_name, after which its replication channel is called.")
@click.option(
    "--stream", "streams", multiple=True, default=["events"], help="Tell this stream; may be repeated. Default: events."
)
@click.option(
    "--writers",
    multiple=True,
    help="stream=worker,worker: all that write it, as in stream_writers. The stream begins when all have spoken.",
)
@click.option("--prefix", default="", help="What the streams' names begin with on Kafka.")
@click.option("--metrics", help="Serve /metrics, /livez and /readyz at this address, host:port.")
@click.pass_context
def synapse(
    ctx: click.Context,
    server_name: str | None,
    streams: tuple[str, ...],
    writers: tuple[str, ...],
    prefix: str,
    metrics: str | None,
) -> None:
    """Send to Kafka what the workers of a Synapse write, until SIGTERM or Ctrl-C. Nothing in Synapse changes.

    TIDEMARK_SYNAPSE_DSN and TIDEMARK_SYNAPSE_REDIS_URL say where it is; the bridge remembers in TIDEMARK_POSTGRES_DSN.
    """
    if ctx.invoked_subcommand is None:
        settings = loaded()
        from tidemark.app import synapse

        if server_name is None:
            raise click.UsageError("Missing option '--server-name'.")
        synapse.run(settings, synapse.BridgePlan(server_name, streams, writers, prefix, metrics))


@synapse.command("migrate")
@waiting
def synapse_migrate(*, wait: float) -> None:
    """Make or update the tables in which the bridge remembers what it said, in Tidemark's own database."""
    settings = loaded()
    from tidemark.app import synapse
    from tidemark.common.backoff import wait_out

    wait_out(lambda: synapse.migrate(settings, click.echo), threading.Event(), wait)


@synapse.command("retire")
@click.argument("writer")
@click.argument("stream", required=False)
@awaiting_its_end
def synapse_retire(writer: str, stream: str | None, *, wait: float) -> None:
    """End WRITER, a worker that was stopped and taken out of Synapse for good, in STREAM or in all that know it.

    The bridge first tells what the tables have of it. Then readers and positions wait for it no more. If it is heard
    again it is a writer again.
    """
    settings = loaded()
    from tidemark.app import synapse

    synapse.retire(settings, synapse.WorkerGone(writer, stream, wait), threading.Event(), click.echo)


@synapse.command("blockers")
def synapse_blockers() -> None:
    """Show the open transactions of Synapse that readers wait for, the oldest first, and what ends each."""
    settings = loaded()
    from tidemark.app import synapse

    synapse.blockers(settings, click.echo)
