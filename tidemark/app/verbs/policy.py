"""`tidemark policy`: limits, alert thresholds and retention of single streams."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from tidemark.app.commands import (
    CommandFailed,
    CommandGroup,
    add_change_options,
    echo_result,
    load_settings,
    require_confirmation,
)
from tidemark.app.output import json_text, table
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.streaming.values.limits import POLICY_SETTINGS, Policies, policy_names

if TYPE_CHECKING:
    from tidemark.app.settings import Settings
    from tidemark.sinks.postgres.store import Postgres

MAX_SHOWN: Final = 5  # names of streams that a policy fits
MAX_NAME_CHARS: Final = 255  # of a stream's name

_as_json = click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")


def _require_name(_: click.Context, param: click.Parameter, name: str) -> str:
    """Return the name unchanged (a callback of click). Raises `BadParameter` if no stream or policy can have it."""
    prefix = name.removesuffix("*")
    if (
        not name
        or len(prefix) > MAX_NAME_CHARS
        or not prefix.isprintable()
        or any(letter.isspace() for letter in prefix)
    ):
        raise click.BadParameter(
            f"{name!r} is neither the name of a stream nor a prefix followed by *: give at most {MAX_NAME_CHARS}"
            " printable characters without spaces",
            param=param,
        )
    return name


def _require_setting(setting: str) -> str:
    """Return the name unchanged. Raises `BadParameter` if it is not a setting of a policy."""
    if setting not in POLICY_SETTINGS:
        raise click.BadParameter(
            f"{setting!r} is not a setting of a policy; the settings are {', '.join(POLICY_SETTINGS)}"
        )
    return setting


def _parse_values(_: click.Context, param: click.Parameter, words: Sequence[str]) -> dict[str, int]:
    """Parse the arguments SETTING=VALUE (a callback of click). Returns setting -> value. Raises `BadParameter`."""
    values: dict[str, int] = {}
    for word in words:
        setting, _equals, text = word.partition("=")
        maximum = POLICY_SETTINGS[_require_setting(setting)].maximum
        if setting in values:
            raise click.BadParameter(f"{setting} is given twice", param=param)
        if not (text.isascii() and text.isdecimal() and len(text) <= len(str(maximum)) and 1 <= int(text) <= maximum):
            raise click.BadParameter(f"{word!r}: {setting} must be a whole number from 1 to {maximum}", param=param)
        values[setting] = int(text)
    return values


@click.group("policy", cls=CommandGroup)
def policy() -> None:
    """Set limits, alert thresholds and retention of single streams.

    The name of a policy is a stream's name, or a prefix of names followed by `*`; `*` alone fits all streams.
    """


@policy.command("list")
@_as_json
def policy_list(*, as_json: bool) -> None:
    """List all policies."""
    with _open_database() as (_, postgres):
        stored = postgres.policies.read()
    if as_json:
        click.echo(json_text({"policies": stored}))
    else:
        rows = [(name, setting, str(value)) for name, values in stored.items() for setting, value in values.items()]
        lines = table(("POLICY", "SETTING", "VALUE"), rows, {"VALUE"})
        click.echo("\n".join(lines) if rows else "no policies")


@policy.command("show")
@click.argument("stream", callback=_require_name)
@_as_json
def policy_show(stream: str, *, as_json: bool) -> None:
    """Show the settings of STREAM, each with the policy from which it comes. The stream need not exist yet."""
    with _open_database() as (settings, postgres):
        policies = Policies(postgres.policies.read(), settings.policy_defaults)
    sources = {setting: policies.policy_name(stream, setting) for setting in POLICY_SETTINGS}
    values = {setting: policies.value(stream, setting) for setting in POLICY_SETTINGS}
    if as_json:
        effective = {setting: {"value": values[setting], "policy": sources[setting]} for setting in POLICY_SETTINGS}
        click.echo(json_text({"stream": stream, "settings": effective}))
        return
    rows = [
        (
            setting,
            "none" if values[setting] is None else str(values[setting]),
            sources[setting] or "default",
            setting_type.meaning,
        )
        for setting, setting_type in POLICY_SETTINGS.items()
    ]
    click.echo("\n".join(table(("SETTING", "VALUE", "FROM", "MEANING"), rows, {"VALUE"})))


@policy.command("set")
@click.argument("name", callback=_require_name)
@click.argument("values", nargs=-1, required=True, metavar="SETTING=VALUE...", callback=_parse_values)
@add_change_options
def policy_set(
    name: str, values: dict[str, int], by: str, why: str, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Set values of the policy NAME: the name of a stream, or a prefix followed by `*`.

    `tidemark policy show STREAM` lists all settings and their meanings.
    """
    _change(name, values, by, why, dry_run=dry_run, yes=yes, as_json=as_json)


@policy.command("unset")
@click.argument("name", callback=_require_name)
@click.argument(
    "settings", nargs=-1, metavar="[SETTING]...", callback=lambda *words: [_require_setting(word) for word in words[2]]
)
@add_change_options
def policy_unset(
    name: str, settings: Sequence[str], by: str, why: str, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Remove settings of the policy NAME; without SETTING, all of them. Then the next policy that fits applies, or the
    default."""
    _change(name, dict.fromkeys(settings), by, why, dry_run=dry_run, yes=yes, as_json=as_json)


@contextmanager
def _open_database() -> "Iterator[tuple[Settings, Postgres]]":
    settings = load_settings()
    with Postgres(PostgresConfig(settings.postgres)) as postgres:
        postgres.check_readable()
        yield settings, postgres


def _change(
    name: str, changes: Mapping[str, int | None], by: str, why: str, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Show the effects of a change, ask for confirmation, store the change, and show the result.

    `changes`: setting -> new value; None removes the setting. If `changes` is empty, all settings of the policy are
    removed.
    """
    with _open_database() as (_, postgres):
        stored = postgres.policies.read()
        changes = changes or dict.fromkeys(stored.get(name, ()))
        missing = [
            setting for setting, value in changes.items() if value is None and setting not in stored.get(name, ())
        ]
        if missing or not changes:
            raise CommandFailed(f"the policy {name} has no {', '.join(missing) or 'settings'}")
        streams = [stream for stream in postgres.streams() if name in policy_names(stream)]
        for line in _effect_lines(name, changes, streams, stored):
            click.echo(line, err=as_json)
        number, text = None, ""
        if not dry_run:
            require_confirmation(name, "the policy's name", yes=yes)
            number, text = postgres.policies.change(name, changes, by, why)
    if as_json:
        echo_result(
            json_text({"policy": name, "changes": changes, "streams": streams, "dry_run": dry_run, "act": number})
        )
    elif not dry_run:
        echo_result(f"{text}; logged as override {number}. A running pipeline applies the change within seconds")


def _effect_lines(
    name: str,
    changes: Mapping[str, int | None],
    streams: Sequence[str],
    stored_policies: Mapping[str, Mapping[str, int]],
) -> Iterator[str]:
    """The lines to show before the confirmation: the streams that the policy fits, and the cost of the change.

    Args:
        name: the name of the policy.
        changes: setting -> new value; None removes the setting.
        streams: the streams that the policy fits.
        stored_policies: all policies before the change.
    """
    named = ", ".join(streams[:MAX_SHOWN]) + (
        f" and {len(streams) - MAX_SHOWN} more" if len(streams) > MAX_SHOWN else ""
    )
    yield f"the policy {name} fits {named}" if streams else f"no stream fits {name} yet"
    changed = {
        setting: value for setting, value in {**stored_policies.get(name, {}), **changes}.items() if value is not None
    }
    if Policies({**stored_policies, name: changed}).bounds() != Policies(stored_policies).bounds():
        yield "the pipeline restarts its query after the current batch: readers wait a few seconds longer"
