"""The verbs that only ask: nothing is changed by any of them, so anybody on call may type them."""

import click

from tidemark.app.commands import OurCommand, loaded


@click.command("verify", cls=OurCommand, extra="sidecar")
@click.option("--history", is_flag=True, help="Also read the whole history: it must join from first to last.")
@click.option("--sidecar", "sidecars", multiple=True, metavar="URL", help="Also compare this sidecar; may be repeated.")
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="Seconds in which a copy has to come to what Postgres holds.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.pass_context
def verify(context: click.Context, sidecars: tuple[str, ...], patience: float, *, history: bool, as_json: bool) -> None:
    """Compare Postgres, the query's state, Redis and sidecars; end with exit code 1 where they differ."""
    from tidemark.app import verify
    from tidemark.app.copies import RedisKeys, RedisTokens, Sidecar
    from tidemark.app.encryption import trusting
    from tidemark.sinks.postgres.audit import Audit
    from tidemark.sinks.redis.publish import Redis, RedisConfig

    settings = loaded()
    trust = trusting(settings.sidecar_ca_file)
    asked = [Sidecar(url, settings.sidecar_tokens, trust) for url in sidecars]
    with Audit(settings.postgres) as audit, Redis(RedisConfig(settings.redis)) as redis:
        audit.check()
        report = verify.compared(audit, [RedisKeys(redis), RedisTokens(redis), *asked], patience)
        if history:
            verify.with_history(audit, report)
    click.echo(verify.as_json(report) if as_json else verify.as_text(report))
    if not report.alike:
        context.exit(1)


COMMANDS = [verify]
