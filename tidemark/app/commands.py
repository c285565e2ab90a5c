"""Shared parts of all commands: exit codes, one-line errors, and the extra that a command needs."""

import errno
import getpass
import math
import os
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

from tidemark.app.output import one_line
from tidemark.common.environment import Foreign, bypass_proxies_for_loopback, forget
from tidemark.common.errors import Refused, Stop, TidemarkError, Unavailable

if TYPE_CHECKING:
    from tidemark.app.settings import Settings

_UNWRITABLE: Final = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO}


class CommandFailed(click.ClickException):
    """A failure that is shown as one line without a stack trace."""

    exit_code = 1


class CommandStopped(CommandFailed):
    exit_code = 2


class OurCommand(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for word in args:
            try:
                word.encode()
            except UnicodeEncodeError:
                raise click.UsageError(f"{word!a} is not UTF-8", ctx) from None
        return super().parse_args(ctx, args)


class CommandGroup(OurCommand, click.Group):
    command_class = OurCommand
    group_class = type

    def run_command(self, ctx: click.Context) -> Any:
        """Run the command without error handling."""
        return super().invoke(ctx)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return self.run_command(ctx)
        except Refused as error:
            raise CommandStopped(without_stack(error) or one_line(error)) from None
        except Stop as error:
            raise CommandStopped(one_line(error)) from None
        except Unavailable as error:
            raise CommandFailed(without_stack(error) or one_line(error)) from None
        except TidemarkError as error:
            raise CommandFailed(one_line(error)) from None
        except KeyboardInterrupt:
            ctx.exit(130)
        except OSError as problem:
            if problem.errno not in _UNWRITABLE:
                raise
            _discard_output(sys.stdout)
            raise CommandFailed(f"the output cannot be written: {problem.strerror}") from None


def without_stack(error: Unavailable | Refused) -> str | None:
    """The error text for a server whose address is not set; None if it is set."""
    from tidemark.app.settings import origin_of, stack_env, variable_of

    name = {"Postgres": "postgres_dsn", "Kafka": "kafka_bootstrap_servers", "Redis": "redis_url"}.get(error.what)
    origin = "" if name is None else origin_of(name)
    listening = _listens(error.where)
    if name is None or not (origin == "default" or (origin == str(stack_env()) and not listening)):
        return None
    problem = one_line(error) if listening else f"{error.what} does not answer at {error.where}"
    return f"{problem}: is `tidemark up` running? else set {variable_of(name)}"


def _listens(where: str) -> bool:
    """Whether a process accepts connections at the first `host:port` in `where`, which may be a list or end with a
    path.
    """
    from tidemark.app.connections import host_port

    try:
        socket.create_connection(host_port(where.partition(",")[0].partition("/")[0]), timeout=1.0).close()
    except (OSError, ValueError):
        return False
    return True


class Amount(click.FloatRange):
    """A number other than `nan`, which would pass all range checks."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number


waiting = click.option(
    "--wait",
    type=Amount(min=0),
    default=0.0,
    help="Seconds to try for while a server does not answer; inf: for ever. Without it once.",
)


awaiting_its_end = click.option(
    "--wait", type=Amount(min=0), default=30.0, help="Seconds to wait for its end; inf: for ever. Default: 30."
)


_SETTINGS: Final = "tidemark.settings"


def check_settings(ctx: click.Context) -> None:
    """Read the settings, for `loaded` to return. Raises `BadSetting`."""
    from tidemark.app.settings import load

    ctx.meta[_SETTINGS] = load()


def loaded(*, other_database: bool = False) -> "Settings":
    """Load the settings of this process and configure its log. Call this before other imports, so that a wrong setting
    is reported without waiting for Spark.

    Removes environment variables that would redirect local requests: proxies for loopback, and `PG...` if the database
    belongs to the local stack.

    Args:
        other_database: the process also connects to a user's database, for which `PG...` variables apply.

    Raises:
        BadSetting: a setting is wrong.
    """
    from tidemark.app import logs
    from tidemark.app.settings import load

    context = click.get_current_context(silent=True)
    settings: Settings = (context and context.meta.get(_SETTINGS)) or load()

    logs.configure_at_first_line(settings)
    bypass_proxies_for_loopback()
    if not other_database and settings.synapse_dsn is None and _is_of_stack(settings):
        forget([Foreign.POSTGRES])
    return settings


def _is_of_stack(settings: "Settings") -> bool:
    """Whether the database belongs to the local stack, including when the shell has sourced `stack.env`."""
    from tidemark.app.settings import read_stack_env, variable_of

    return settings.postgres_dsn.get_secret_value() == read_stack_env().get(variable_of("postgres_dsn"))


def confirmed(word: str, name: str, *, yes: bool) -> None:
    """Ask a person to type `word` (the `name` of it), unless `yes`. Raises `UsageError` without a terminal."""
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():  # None: standard input is closed
        raise click.UsageError("standard input is not a terminal: add --yes, or preview with --dry-run")
    try:
        answer = click.prompt(f"Type {name} to do it ({word})", err=True)
    except click.Abort as end:
        click.echo("\nnothing was sent", err=True)
        raise (KeyboardInterrupt if isinstance(end.__context__, KeyboardInterrupt) else SystemExit(1)) from None
    if answer != word:
        raise CommandFailed("nothing was sent")


def echo_result(line: str, *, err: bool = False) -> None:
    """`click.echo` for completed work: if standard output is closed, the exit code still reports the result."""
    try:
        click.echo(line, err=err)
    except OSError:
        _discard_output(sys.stderr if err else sys.stdout)


def _discard_output(stream: TextIO) -> None:
    """Redirect standard output, so that flushing its buffer at exit causes no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def no_stream(name: str) -> str:
    """The error for an unknown stream."""
    return f"there is no stream {name}; `tidemark status` shows all"


def own_name() -> str:
    """The name of the current user, or its number if it has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return str(os.getuid())


def plain_text(_: click.Context, param: click.Parameter, text: str) -> str:
    """Reject blank text and control characters."""
    if not text.strip() or not text.isprintable():
        raise click.BadParameter("say it in words, in one line without control characters", param=param)
    return text


CHECK_FAILED: Final = 3
NOT_SEEN: Final = 3
MOST_ID: Final = 2**63 - 1

_ANSWERING: Final[list[Callable[[Any], Any]]] = [
    click.option("--by", required=True, callback=plain_text, help="Who is responsible; stored with the change."),
    click.option("--why", required=True, callback=plain_text, help="The reason; stored with the change."),
    click.option("--dry-run", is_flag=True, help="Show what would happen and send nothing."),
    click.option("--yes", is_flag=True, help="Do not ask. Required without a terminal."),
    click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object."),
]

until_seen = click.option(
    "--wait", type=Amount(min=0), default=60.0, show_default=True, help="Seconds to wait for the effect."
)


def answering(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of every verb that changes something."""
    for option in reversed(_ANSWERING):
        command = option(command)
    return command
