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
    """Ends the command with exit code 1 and one line of text, without a stack trace."""

    exit_code = 1


class CommandStopped(CommandFailed):
    """Ends the command with exit code 2 and one line of text: a person must correct something."""

    exit_code = 2


class Utf8Command(click.Command):
    """A command that rejects arguments that are not UTF-8."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for word in args:
            try:
                word.encode()
            except UnicodeEncodeError:
                raise click.UsageError(f"{word!a} is not UTF-8", ctx) from None
        return super().parse_args(ctx, args)


class CommandGroup(Utf8Command, click.Group):
    """A command group that reports errors in one line with the exit codes of `tidemark.app.cli`."""

    command_class = Utf8Command
    group_class = type

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command whose name is the first of `args`. Raises `UsageError` if the name is unknown; the text
        suggests similar names, if there are any."""
        names = self.list_commands(ctx)
        is_unknown = args[0] not in names and not args[0].startswith("-")
        if is_unknown and not ctx.resilient_parsing and (similar := get_close_matches(args[0], names)):
            suggestion = " or ".join(map(repr, similar))
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {suggestion}?", ctx)
        return super().resolve_command(ctx, args)

    def run_command(self, ctx: click.Context) -> Any:
        """Run the command. All errors are raised unchanged."""
        return super().invoke(ctx)

    def error_text(self, ctx: click.Context, error: TidemarkError) -> str:
        """The text of the error in one line, with the hint of `text_with_stack_hint` if the hint applies."""
        return (text_with_stack_hint(error) if isinstance(error, Refused | Unavailable) else None) or one_line(error)

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


def text_with_stack_hint(error: Unavailable | Refused) -> str | None:
    """The text of an error, with the hint that the local stack may not run; None if this hint does not apply.

    The hint applies if the server's address is the default. The hint also applies if the address is from `stack.env`,
    and no process listens at the address. Connects to the address to find out (see `accepts_connections`).
    """
    from tidemark.app.connections import accepts_connections
    from tidemark.app.settings import origin_of, stack_env, variable_of

    name = {"Postgres": "postgres_dsn", "Kafka": "kafka_bootstrap_servers", "Redis": "redis_url"}.get(error.what)
    origin = "" if name is None else origin_of(name)
    is_listening = accepts_connections(error.where)
    if name is None or not (origin == "default" or (origin == str(stack_env()) and not is_listening)):
        return None
    problem = one_line(error) if is_listening else f"{error.what} does not answer at {error.where}"
    return f"{problem}: is `tidemark up` running? If not, start it or set {variable_of(name)}"


class Amount(click.FloatRange):
    """The type of an option with a number in a range. Rejects `nan`, which would pass all range checks."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


json_option = click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")


server_wait_option = click.option(
    "--wait",
    type=Amount(min=0),
    default=0.0,
    help="Seconds to keep trying while a server does not answer; inf: no limit. Default: try once.",
)


retirement_wait_option = click.option(
    "--wait",
    type=Amount(min=0),
    default=30.0,
    help="Seconds to wait for the retirement in each stream; inf: no limit. Default: 30.",
)


_SETTINGS_KEY: Final = "tidemark.settings"
"""The key of the settings in the `meta` of click's context."""


def preload_settings(ctx: click.Context) -> None:
    """Load the settings into `ctx`. `load_settings` later returns them. Raises `BadSetting` if a setting is wrong."""
    from tidemark.app.settings import load

    ctx.meta[_SETTINGS_KEY] = load()


def load_settings(*, other_database: bool = False) -> "Settings":
    """Load the settings of this process, and configure its log. Call this function before slow imports, so that a wrong
    setting is reported at once.

    Changes environment variables of this process that could redirect requests to the local stack. If a proxy is set,
    adds the loopback addresses to `no_proxy`. Removes the `PG...` variables if `postgres_dsn` is the address of the
    local stack, and neither `synapse_dsn`, `readers_dsn` nor `other_database` is set.

    Args:
        other_database: whether the process also connects to a database that is not in the settings. The `PG...`
            variables apply to this other database too, so they are kept.

    Raises:
        BadSetting: a setting is wrong.
    """
    from tidemark.app import logs
    from tidemark.app.settings import load

    context = click.get_current_context(silent=True)
    settings: Settings = (context and context.meta.get(_SETTINGS_KEY)) or load()

    logs.configure_at_first_line(settings)
    bypass_proxies_for_loopback()
    dsns = (settings.synapse_dsn, settings.readers_dsn)
    if not (other_database or any(dsns)) and _uses_local_stack(settings):
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
        description: a description of `word`, such as "the stream's name".
        yes: whether to skip the question.

    Raises:
        UsageError: standard input is not a terminal.
        CommandFailed: the operator typed another word.
        KeyboardInterrupt: the operator pressed Ctrl-C.
        SystemExit: the operator pressed Ctrl-D; the exit code is 1.
    """
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():  # None: standard input is closed
        raise click.UsageError("standard input is not a terminal: add --yes, or preview with --dry-run")
    try:
        answer = click.prompt(f"Type {description} to confirm ({word})", err=True)
    except click.Abort as end:
        click.echo("\nnothing was changed", err=True)
        raise (KeyboardInterrupt if isinstance(end.__context__, KeyboardInterrupt) else SystemExit(1)) from None
    if answer != word:
        raise CommandFailed(f"the answer is not {word}, so nothing was changed")


def echo_result(line: str, *, err: bool = False) -> None:
    """Print the result of completed work to stdout, or to stderr if `err`. Ignores output errors: the work is done, so
    the exit code must report success."""
    try:
        click.echo(line, err=err)
    except OSError:
        _discard_output(sys.stderr if err else sys.stdout)


def _discard_output(stream: TextIO) -> None:
    """Redirect the stream to /dev/null, so that Python can write the rest of its buffer at exit without an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def unknown_stream_text(name: str, names: Iterable[str] = ()) -> str:
    """The error text for an unknown stream `name`. The text suggests the most similar name in `names`, if there is
    one."""
    similar = get_close_matches(name, names, n=1)
    suggestion = f"; did you mean {similar[0]}?" if similar else ";"
    return f"there is no stream {name}{suggestion} `tidemark status` shows all streams"


def current_user_name() -> str:
    """The name of the current user, or the user ID if the user has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return str(os.getuid())


def require_printable_text(_: click.Context, param: click.Parameter, text: str) -> str:
    """Return the text of an option (a callback of click). Raises `BadParameter` if the text is blank or has a character
    that is not printable, such as a line break."""
    if not text.strip() or not text.isprintable():
        raise click.BadParameter("give one line of text, not blank and without control characters", param=param)
    return text


CHECK_FAILED: Final = 3  # exit code if a check of --check failed
EFFECT_NOT_CONFIRMED: Final = 3  # exit code if the effect of an override was not confirmed in time
MAX_ID: Final = 2**63 - 1

_CHANGE_OPTIONS: Final[list[Callable[[Any], Any]]] = [
    click.option("--by", required=True, callback=require_printable_text, help="Your name; stored with the change."),
    click.option("--why", required=True, callback=require_printable_text, help="The reason; stored with the change."),
    click.option("--dry-run", is_flag=True, help="Show what would happen, and change nothing."),
    click.option("--yes", is_flag=True, help="Do not ask for confirmation. Required without a terminal."),
    json_option,
]

effect_wait_option = click.option(
    "--wait",
    type=Amount(min=0),
    default=60.0,
    show_default=True,
    help="Longest time to wait until the change takes effect, in seconds. If it does not in this time, the exit code is"
    " 3; the change is not withdrawn.",
)


def add_change_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options `--by`, `--why`, `--dry-run`, `--yes` and `--json` to a command with which operators change
    something."""
    for option in reversed(_CHANGE_OPTIONS):
        command = option(command)
    return command
