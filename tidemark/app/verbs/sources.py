"""`tidemark relay`, `tidemark follow` and `tidemark synapse`: the processes that connect other databases to
Tidemark, and the commands for these databases."""

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click

from tidemark.app.commands import CommandGroup, json_option, load_settings, retirement_wait_option, server_wait_option
from tidemark.app.output import applied_migrations, field_values, json_text

if TYPE_CHECKING:
    from tidemark.sources.transactions import OpenTransaction

_dsn = click.option("--dsn", help="DSN of the database of the service or readers. Default: TIDEMARK_POSTGRES_DSN.")


@click.group("relay", cls=CommandGroup, invoke_without_command=True)
@_dsn
@click.option("--writer", help="Writer name of this database; it can never change. Default: the name of the database.")
@click.option("--metrics", help="Serve /metrics, /livez and /readyz at this address, host:port.")
@click.pass_context
def relay(ctx: click.Context, dsn: str | None, writer: str | None, metrics: str | None) -> None:
    """Send to Kafka the facts that services wrote with `tidemark.append`. Runs until SIGTERM or Ctrl-C.

    Run one relay for each database. A second relay waits as a standby. A relay stores its state only in the database.
    """
    ctx.obj = dsn
    if ctx.invoked_subcommand is None:
        settings = load_settings(other_database=dsn is not None)
        from tidemark.app import relay

        relay.run(settings, relay.RelayPlan(dsn or settings.postgres, writer, metrics))


@relay.command("migrate")
@_dsn
@click.option("--stream", "streams", multiple=True, help="Create this stream if it does not exist; may be repeated.")
@click.option(
    "--direction",
    type=click.Choice(["forward", "backward"]),
    default="forward",
    show_default=True,
    help="Direction of the IDs of the streams of --stream: forward (1, 2, ...) or backward (-1, -2, ...).",
)
@server_wait_option
@json_option
@click.pass_obj
def relay_migrate(
    group_dsn: str | None,
    dsn: str | None,
    streams: tuple[str, ...],
    direction: Literal["forward", "backward"],
    *,
    wait: float,
    as_json: bool,
) -> None:
    """Create or update the tables and functions of `tidemark.append` in a service's database. Create the streams of
    --stream."""
    settings = load_settings(other_database=(dsn or group_dsn) is not None)
    from tidemark.app import relay
    from tidemark.common.backoff import wait_out

    database = dsn or group_dsn or settings.postgres
    say = partial(click.echo, err=as_json)
    migration = wait_out(lambda: relay.migrate(database, streams, direction, say), threading.Event(), wait)
    if as_json:
        click.echo(json_text(migration))


@relay.command("retire")
@_dsn
@click.argument("writer")
@click.argument("stream", required=False)
@retirement_wait_option
@json_option
@click.pass_obj
def relay_retire(
    group_dsn: str | None, dsn: str | None, writer: str, stream: str | None, *, wait: float, as_json: bool
) -> None:
    """Retire WRITER, a name of append_as that is no longer used, in STREAM or in all streams of WRITER.

    The relay first sends all facts of WRITER and waits until WRITER has no open transaction. Then readers and positions
    no longer wait for WRITER. If WRITER appends again, it joins again.
    """
    settings = load_settings(other_database=(dsn or group_dsn) is not None)
    from tidemark.app import relay

    order = relay.RetireOrder(writer, stream, wait)
    say = partial(click.echo, err=as_json)
    retired = relay.retire(dsn or group_dsn or settings.postgres, order, threading.Event(), say)
    if as_json:
        click.echo(json_text({"writer": writer, "retired": retired}))


@relay.command("blockers")
@_dsn
@json_option
@click.pass_obj
def relay_blockers(group_dsn: str | None, dsn: str | None, *, as_json: bool) -> None:
    """Show the open transactions that block a stream: process, user, application, state, start, query."""
    settings = load_settings(other_database=(dsn or group_dsn) is not None)
    from tidemark.app import relay

    transactions = relay.read_blockers(dsn or group_dsn or settings.postgres())
    if as_json:
        click.echo(json_text({"blockers": [_transaction_fields(transaction) for transaction in transactions]}))
        return
    for transaction in transactions:
        click.echo(str(transaction))
    if not transactions:
        click.echo("no open transaction blocks a stream")


def _transaction_fields(transaction: "OpenTransaction") -> dict[str, Any]:
    """The fields of a transaction, and the statement that ends it."""
    return field_values(transaction) | {"ending_statement": transaction.ending_statement}


@click.group("follow", cls=CommandGroup, invoke_without_command=True)
@_dsn
@click.option("--stream", "streams", multiple=True, help="Follow this stream; may be repeated. Default: all streams.")
@click.option("--metrics", help="Serve /metrics, /livez and /readyz at this address, host:port.")
@click.pass_context
def follow(ctx: click.Context, dsn: str | None, streams: tuple[str, ...], metrics: str | None) -> None:
    """Copy the published positions into a database of readers, for `tidemark_reader.take`, until SIGTERM or Ctrl-C.

    A database whose relay has TIDEMARK_REDIS_URL does not need this command: the relay copies the positions. Positions
    come from TIDEMARK_REDIS_URL. Late facts that Redis no longer has come from TIDEMARK_POSTGRES_DSN, if this setting
    and --dsn are given.
    """
    ctx.obj = dsn
    if ctx.invoked_subcommand is None:
        settings = load_settings(other_database=dsn is not None)
        from tidemark.app.follow_positions import run
        from tidemark.app.settings import is_set

        history = settings.postgres() if dsn and is_set("postgres_dsn") else None
        run(settings, dsn or settings.postgres, streams or None, history, metrics)


@follow.command("migrate")
@_dsn
@server_wait_option
@json_option
@click.pass_obj
def follow_migrate(group_dsn: str | None, dsn: str | None, *, wait: float, as_json: bool) -> None:
    """Create or update the tables and functions of `tidemark_reader.take` in a database of readers."""
    settings = load_settings(other_database=(dsn or group_dsn) is not None)
    from tidemark.app.follow_positions import migrate

    installed = migrate(dsn or group_dsn or settings.postgres, threading.Event(), wait)
    if as_json:
        click.echo(json_text({"installed": installed}))
    else:
        click.echo("installed the functions of readers" if installed else "the functions of readers are up to date")


@click.group("synapse", cls=CommandGroup, invoke_without_command=True)
@click.option("--server-name", help="Synapse's server_name: the name of its replication channel.")
@click.option(
    "--stream", "streams", multiple=True, default=["events"], help="Send this stream; may be repeated. Default: events."
)
@click.option(
    "--writers",
    multiple=True,
    help="stream=worker,worker: all writers of a stream, as in Synapse's stream_writers. The stream starts when each"
    " writer has sent a record.",
)
@click.option("--prefix", default="", help="Prefix of the streams' names in Kafka.")
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
    """Send the streams of a Synapse homeserver to Kafka, until SIGTERM or Ctrl-C. Synapse is not changed.

    TIDEMARK_SYNAPSE_DSN and TIDEMARK_SYNAPSE_REDIS_URL are Synapse's addresses. The bridge stores its state in
    TIDEMARK_POSTGRES_DSN.
    """
    if ctx.invoked_subcommand is None:
        settings = load_settings()
        from tidemark.app import synapse

        if server_name is None:
            raise click.UsageError("Missing option '--server-name'.")
        synapse.run(settings, synapse.BridgePlan(server_name, streams, writers, prefix, metrics))


@synapse.command("migrate")
@server_wait_option
@json_option
def synapse_migrate(*, wait: float, as_json: bool) -> None:
    """Create or update the bridge's tables in Tidemark's own database."""
    settings = load_settings()
    from tidemark.app import synapse
    from tidemark.common.backoff import wait_out

    applied = wait_out(lambda: synapse.migrate(settings), threading.Event(), wait)
    if as_json:
        click.echo(json_text({"applied": applied}))
    else:
        click.echo(applied_migrations(applied))


@synapse.command("retire")
@click.argument("writer")
@click.argument("stream", required=False)
@retirement_wait_option
@json_option
def synapse_retire(writer: str, stream: str | None, *, wait: float, as_json: bool) -> None:
    """Retire WRITER, a worker that was removed from Synapse for good, in STREAM or in all streams of WRITER.

    The bridge first sends all facts of WRITER in Synapse's tables. Then readers and positions no longer wait for
    WRITER. If WRITER sends again, it joins again.
    """
    settings = load_settings()
    from tidemark.app import synapse

    order = synapse.WorkerRetirement(writer, stream, wait)
    retired = synapse.retire(settings, order, threading.Event(), partial(click.echo, err=as_json))
    if as_json:
        click.echo(json_text({"writer": writer, "retired": retired}))


@synapse.command("blockers")
@json_option
def synapse_blockers(*, as_json: bool) -> None:
    """Show the long open transactions of Synapse that block a stream, oldest first, and how to end each of them."""
    settings = load_settings()
    from tidemark.app import synapse
    from tidemark.sources.transactions import REPORTED_AFTER

    writers = synapse.read_blockers(settings)
    if as_json:
        rows = [{"streams": sorted(writer.streams)} | _transaction_fields(writer.transaction) for writer in writers]
        omitted = {"stream", "writer"}  # a transaction of Synapse has many streams, and its writer is not known
        blockers = [{name: value for name, value in row.items() if name not in omitted} for row in rows]
        click.echo(json_text({"blockers": blockers}))
        return
    for writer in writers:
        transaction = writer.transaction
        query = "" if transaction.pid is None else f": {transaction.query or '-'}"
        click.echo(f"{', '.join(sorted(writer.streams))}: {transaction.process}{query}")
        click.echo(f"    to end it, run in Synapse's database: {transaction.ending_statement}")
    if not writers:
        click.echo(f"no transaction of Synapse has been open for {REPORTED_AFTER.total_seconds():g} s or longer")
