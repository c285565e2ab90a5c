"""The command line. Every command imports what it needs itself, so that `produce` does not wait for Spark.

Exit codes: 0 done, 1 the command failed, 2 a person must decide (wrong usage, wrong setting, any `Stop`), 130 Ctrl-C.
"""

from typing import Any

import click

from app import logs
from app.settings import Settings, load
from streaming.errors import Stop, TidemarkError


class _Failed(click.ClickException):
    """Shown as one line without a stack trace."""

    exit_code = 1


class _Stopped(_Failed):
    exit_code = 2


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Stop as error:
            raise _Stopped(_one_line(error)) from None
        except TidemarkError as error:
            raise _Failed(_one_line(error)) from None
        except KeyboardInterrupt:
            ctx.exit(130)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="tidemark")
def main() -> None:
    """Tidemark tells every reader of an append-only log how far it may safely read.

    Settings come from TIDEMARK_... in the environment; `tidemark config` shows them.
    """


def _settings() -> Settings:
    settings = load()
    logs.configure(settings)
    return settings


@main.command()
@click.option("--demo", is_flag=True, help="Also play several writers whose facts complete out of order.")
def up(*, demo: bool) -> None:
    """Run the whole local stack: Kafka, Postgres, Redis and the pipeline."""
    from app import up

    up.run(_settings(), demo=demo)


@main.command()
def config() -> None:
    """Print the effective settings, secrets masked, and where each came from."""
    from app.config import lines

    for line in lines(_settings()):
        click.echo(line)


@main.command()
def migrate() -> None:
    """Bring the database's schema up to this version."""
    from sinks.migrations import migrate

    applied = migrate(_settings().postgres_dsn.get_secret_value())
    click.echo(f"applied {', '.join(map(str, applied))}" if applied else "the schema is up to date")


@main.command()
@click.option(
    "--accept",
    multiple=True,
    type=click.Choice(["partitions", "loss", "shards"]),
    help="Start once in spite of what an earlier start refused; may be repeated.",
)
def pipeline(accept: tuple[str, ...]) -> None:
    """Read facts from Kafka and publish positions, until SIGTERM or Ctrl-C."""
    from app import pipeline

    pipeline.run(_settings(), accept=frozenset(accept))


if __name__ == "__main__":
    main()
