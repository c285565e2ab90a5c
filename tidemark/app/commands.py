"""Shared parts of all commands: exit codes, one-line errors, common options, and the settings."""

import errno
import getpass
import math
import os
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

from tidemark.app.output import one_line
from tidemark.common.environment import VariableGroup, bypass_proxies_for_loopback, remove_foreign_variables
from tidemark.common.errors import Refused, Stop, TidemarkError, Unavailable

if TYPE_CHECKING:
    from tidemark.app.settings import Settings

_OUTPUT_ERRORS: Final = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO}


class CommandFailed(click.ClickException):
    """A failure that is shown as one line without a stack trace."""

    exit_code = 1


class CommandStopped(CommandFailed):
    """A failure that a person must resolve."""

    exit_code = 2


class OurCommand(click.Command):
    """A command that rejects arguments that are not UTF-8."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for word in args:
            try:
                word.encode()
            except UnicodeEncodeError:
                raise click.UsageError(f"{word!a} is not UTF-8", ctx) from None
        return super().parse_args(ctx, args)


class CommandGroup(OurCommand, click.Group):
    """A command group that reports errors in one line with the exit codes of `tidemark.app.cli`."""

    command_class = OurCommand
    group_class = type

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command with the name in `args`. If the name is unknown, raises an error with similar names."""
        names = self.list_commands(ctx)
        is_unknown = args[0] not in names and not args[0].startswith("-")
        if is_unknown and not ctx.resilient_parsing and (similar := get_close_matches(args[0], names)):
            suggestion = " or ".join(map(repr, similar))
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {suggestion}?", ctx)
        return super().resolve_command(ctx, args)

    def run_command(self, ctx: click.Context) -> Any:
        """Run the command without error handling."""
        return super().invoke(ctx)

    def error_text(self, ctx: click.Context, error: TidemarkError) -> str:
        """The error in one line."""
        return (local_stack_hint(error) if isinstance(error, Refused | Unavailable) else None) or one_line(error)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return self.run_command(ctx)
        except Stop as error:
            raise CommandStopped(self.error_text(ctx, error)) from None
        except TidemarkError as error:
            raise CommandFailed(self.error_text(ctx, error)) from None
        except KeyboardInterrupt:
            ctx.exit(130)
        except OSError as problem:
            if problem.errno not in _OUTPUT_ERRORS:
                raise
            _discard_output(sys.stdout)
            raise CommandFailed(f"the output cannot be written: {problem.strerror}") from None


def local_stack_hint(error: Unavailable | Refused) -> str | None:
    """The text of an error, with a hint to start the local stack; None if the server is not of a local stack.

    A server counts as a server of a local stack if its address is the default. It also counts if its address is from
    `stack.env` and no process listens at this address. Connects to the address to find out.
    """
    from tidemark.app.connections import accepts_connections
    from tidemark.app.settings import origin_of, stack_env, variable_of

    name = {"Postgres": "postgres_dsn", "Kafka": "kafka_bootstrap_servers", "Redis": "redis_url"}.get(error.what)
    origin = "" if name is None else origin_of(name)
    listening = accepts_connections(error.where)
    if name is None or not (origin == "default" or (origin == str(stack_env()) and not listening)):
        return None
    problem = one_line(error) if listening else f"{error.what} does not answer at {error.where}"
    return f"{problem}: is `tidemark up` running? If not, start it or set {variable_of(name)}"


class Amount(click.FloatRange):
    """A number. `nan` is rejected, because it would pass all range checks."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


json_option = click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")


wait_for_servers = click.option(
    "--wait",
    type=Amount(min=0),
    default=0.0,
    help="Seconds to try again while a server does not answer; inf: forever. Default: try once.",
)


wait_for_retirement = click.option(
    "--wait",
    type=Amount(min=0),
    default=30.0,
    help="Seconds to wait until the writer is retired; inf: forever. Default: 30.",
)


_SETTINGS: Final = "tidemark.settings"


def check_settings(ctx: click.Context) -> None:
    """Load the settings into `ctx`, from which `loaded` takes them later. Raises `BadSetting` if a setting is wrong."""
    from tidemark.app.settings import load

    ctx.meta[_SETTINGS] = load()


def loaded(*, other_database: bool = False) -> "Settings":
    """Load the settings of this process and configure its log. Call this function before slow imports, so that a wrong
    setting is reported at once.

    Changes environment variables that would redirect local requests: adds the loopback addresses to `no_proxy`, and
    removes `PG...` variables if the process connects only to the database of the local stack.

    Args:
        other_database: whether the process also connects to a database that is not in the settings. The `PG...`
            variables apply to that database, and are kept.

    Raises:
        BadSetting: a setting is wrong.
    """
    from tidemark.app import logs
    from tidemark.app.settings import load

    context = click.get_current_context(silent=True)
    settings: Settings = (context and context.meta.get(_SETTINGS)) or load()

    logs.configure_at_first_line(settings)
    bypass_proxies_for_loopback()
    if not other_database and settings.synapse_dsn is None and _uses_local_stack(settings):
        remove_foreign_variables([VariableGroup.POSTGRES])
    return settings


def _uses_local_stack(settings: "Settings") -> bool:
    """Whether the Postgres address is the address in `stack.env` of the local stack."""
    from tidemark.app.settings import read_stack_env, variable_of

    return settings.postgres_dsn.get_secret_value() == read_stack_env().get(variable_of("postgres_dsn"))


def require_confirmation(word: str, description: str, *, yes: bool) -> None:
    """Ask the operator to type `word` as a confirmation, unless `yes`.

    Args:
        word: the text to type, such as the name of a stream.
        description: a description of the text, such as "the stream's name".
        yes: skip the question.

    Raises:
        UsageError: standard input is not a terminal.
        CommandFailed: the operator typed another word.
        KeyboardInterrupt, SystemExit: the operator pressed Ctrl-C or Ctrl-D.
    """
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():  # None: standard input is closed
        raise click.UsageError("standard input is not a terminal: add --yes, or preview with --dry-run")
    try:
        answer = click.prompt(f"Type {description} to confirm ({word})", err=True)
    except click.Abort as end:
        click.echo("\nnothing was sent", err=True)
        raise (KeyboardInterrupt if isinstance(end.__context__, KeyboardInterrupt) else SystemExit(1)) from None
    if answer != word:
        raise CommandFailed("nothing was sent")


def echo_result(line: str, *, err: bool = False) -> None:
    """Print the result of completed work; if `err`, to stderr. Ignores an error of the output, because the exit code
    reports the result."""
    try:
        click.echo(line, err=err)
    except OSError:
        _discard_output(sys.stderr if err else sys.stdout)


def _discard_output(stream: TextIO) -> None:
    """Redirect the stream to /dev/null, so that flushing its buffer at exit causes no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def no_stream(name: str, names: Iterable[str] = ()) -> str:
    """The error text for an unknown stream `name`. The text suggests the most similar stream of `names`, if any."""
    similar = get_close_matches(name, names, n=1)
    suggestion = f"; did you mean {similar[0]}?" if similar else ";"
    return f"there is no stream {name}{suggestion} `tidemark status` shows all streams"


def own_name() -> str:
    """The name of the current user, or the user ID if the user has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return str(os.getuid())


def plain_text(_: click.Context, param: click.Parameter, text: str) -> str:
    """Check the text of an option (a callback of click). Rejects blank text and control characters."""
    if not text.strip() or not text.isprintable():
        raise click.BadParameter("give one line of text, not empty and without control characters", param=param)
    return text


CHECK_FAILED: Final = 3  # exit code of --check
EFFECT_NOT_CONFIRMED: Final = 3  # exit code if the effect of an override was not confirmed in time
MAX_ID: Final = 2**63 - 1

_CHANGE_OPTIONS: Final[list[Callable[[Any], Any]]] = [
    click.option("--by", required=True, callback=plain_text, help="Your name; stored with the change."),
    click.option("--why", required=True, callback=plain_text, help="The reason; stored with the change."),
    click.option("--dry-run", is_flag=True, help="Show what would happen, and change nothing."),
    click.option("--yes", is_flag=True, help="Do not ask for confirmation. Required without a terminal."),
    json_option,
]

wait_for_effect = click.option(
    "--wait", type=Amount(min=0), default=60.0, show_default=True, help="Seconds to wait for the effect."
)


def change_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the common options of all commands that change something: `--by`, `--why`, `--dry-run`, `--yes`, `--json`."""
    for option in reversed(_CHANGE_OPTIONS):
        command = option(command)
    return command
