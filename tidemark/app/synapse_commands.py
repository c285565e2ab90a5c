"""`tidemark synapse` and its verb."""

import threading

import click

from tidemark.app.commands import CommandGroup, awaiting_its_end, loaded, waiting


@click.group("synapse", cls=CommandGroup, extra="synapse", invoke_without_command=True)
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


@synapse.command("migrate", extra="synapse")
@waiting
def synapse_migrate(*, wait: float) -> None:
    """Make or update the tables in which the bridge remembers what it said, in Tidemark's own database."""
    settings = loaded()
    from tidemark.app import synapse
    from tidemark.common.backoff import wait_out

    wait_out(lambda: synapse.migrate(settings, click.echo), threading.Event(), wait)


@synapse.command("retire", extra="synapse")
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


@synapse.command("blockers", extra="synapse")
def synapse_blockers() -> None:
    """Show the open transactions of Synapse that readers wait for, the oldest first, and what ends each."""
    settings = loaded()
    from tidemark.app import synapse

    synapse.blockers(settings, click.echo)
