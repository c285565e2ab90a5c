"""The verbs that only ask: nothing is changed by any of them, so anybody on call may type them."""

import curses
import itertools
import json
import math
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from tidemark.app.commands import Amount, CommandFailed, CommandStopped, OurCommand, loaded, no_stream
from tidemark.common.errors import NotReached, Reject, StreamNotKnown, Unavailable


@click.command("verify", cls=OurCommand, extra="sidecar")
@click.option("--history", is_flag=True, help="Also read the whole history: it must join from first to last.")
@click.option("--sidecar", "sidecars", multiple=True, metavar="URL", help="Also compare this sidecar; may be repeated.")
@click.option(
    "--patience",
    type=Amount(min=0),
    default=5.0,
    show_default=True,
    help="Seconds in which a copy has to come to what Postgres holds.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.pass_context
def verify(context: click.Context, sidecars: tuple[str, ...], patience: float, *, history: bool, as_json: bool) -> None:
    """Compare Postgres, the query's state, Redis and sidecars; end with exit code 1 where they differ."""
    settings = loaded()
    from tidemark.app.tls_listener import trusting
    from tidemark.app.verbs import verify
    from tidemark.app.verbs.copies import RedisKeys, RedisTokens, Sidecar
    from tidemark.sinks.postgres.audit import Audit
    from tidemark.sinks.redis.publish import Redis, RedisConfig

    trust = trusting(settings.sidecar_ca_file)
    asked = [Sidecar(url, settings.sidecar_tokens_file, trust) for url in sidecars]
    with Audit(settings.postgres) as audit, Redis(RedisConfig(settings.redis)) as redis:
        audit.check()
        report = verify.compared(audit, [RedisKeys(redis), RedisTokens(redis), *asked], patience)
        if history:
            verify.with_history(audit, report)
    click.echo(verify.as_json(report) if as_json else verify.as_text(report))
    if not report.alike:
        context.exit(1)


class Moment(click.ParamType[datetime]):
    """ISO 8601, or a time of today; in UTC where nothing else is said."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        now = datetime.now(UTC)
        try:
            found = datetime.fromisoformat(f"{now.date()}T{value}" if re.match(r"\d\d:\d\d", value) else value)
        except ValueError:
            self.fail(f"{value!r} is no time such as 10:03, 2026-11-22T10:03:05Z or 2026-11-22T10:03+01:00", param, ctx)
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)


@click.command("explain", cls=OurCommand, extra="sidecar")
@click.argument("stream")
@click.option("--at", type=Moment(), help="Of this time; without it of now.")
@click.option(
    "--between", type=Moment(), nargs=2, metavar="A B", help="Of every stand of ten seconds or longer between the two."
)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
def explain(stream: str, at: datetime | None, between: tuple[datetime, datetime] | None, *, as_json: bool) -> None:
    """Show why the line of STREAM stood where it stood: who held it, from when to when, and what let it go."""
    if at is not None and between is not None:
        raise click.UsageError("--at and --between cannot be given together")
    settings = loaded()
    from tidemark.app import open_ranges
    from tidemark.app.verbs import explain, gaps
    from tidemark.sinks.postgres.inspect import StreamPast
    from tidemark.sinks.postgres.store import Postgres, PostgresConfig

    now = datetime.now(UTC)
    if min(between or [at or now]) > now:
        raise click.UsageError("that time is still to come: is it in UTC?")
    with StreamPast(settings.postgres) as past:
        encoded = past.state(stream)
        if encoded is None:
            raise CommandFailed(no_stream(stream))
        if between is not None:
            since, until = min(between), min(max(between), now)
            begins = past.begins(stream)
            if begins is None or begins > until:
                raise CommandFailed(f"the history of {stream} that is kept does not go back to then")
            found = explain.between(past, stream, encoded, since, until)
            if len(found) == explain.STANDS and (last := found[-1].stand.until) is not None:
                click.echo(f"these are the first {len(found)}; ask again from {last.isoformat()} on", err=True)
            if begins > since:
                click.echo(f"the history of {stream} that is kept begins at {explain.clock(begins)}", err=True)
        else:
            found = [it for it in [explain.at(past, stream, encoded, at or now)] if it is not None]
    if not found and between is None:
        raise CommandFailed(f"the history of {stream} that is kept does not go back to then")
    if as_json:
        click.echo(explain.as_json(found))
        return
    click.echo(explain.as_text(found, now) if found else "the line never waited for ten seconds or longer")
    if at is None and between is None:
        with Postgres(PostgresConfig(settings.postgres)) as postgres:
            open_now = open_ranges.of(postgres, {stream: encoded}, now.timestamp(), settings.policy_defaults)
        if open_now:
            click.echo(gaps.as_text(open_now, now.timestamp()))


@click.command("wait", cls=OurCommand, extra="sidecar")
@click.argument("stream")
@click.argument("token")
@click.option("--writer", help="TOKEN is an ID of this writer; without it one ID stands for all up to it.")
@click.option("--timeout", type=Amount(min=0), default=60.0, show_default=True, help="Seconds to wait; inf: for ever.")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
def wait(stream: str, token: str, writer: str | None, timeout: float, *, as_json: bool) -> None:
    """Wait until STREAM is complete up to TOKEN (m7~web.9, or an ID): exit code 1 where it is not in time.

    2 where there is no such stream, or TOKEN is none of it.
    """
    settings = loaded()
    from tidemark.sinks.reader.positions import Positions

    until = int(token) if re.fullmatch(r"-?\d{1,19}", token) else token
    if writer is not None and isinstance(until, str):
        raise click.UsageError("with --writer, TOKEN is an ID")
    with Positions(settings.redis, settings.postgres()) as positions:
        try:
            stands = positions.wait(stream, until, writer, None if math.isinf(timeout) else timeout)
        except (Reject, NotReached) as problem:
            if isinstance(problem, StreamNotKnown) or (isinstance(problem, NotReached) and problem.stands is None):
                raise CommandStopped(no_stream(stream)) from None
            if isinstance(problem, Reject):
                raise CommandStopped(str(problem)) from None
            raise CommandFailed(f"{problem}; `tidemark gaps {shlex.quote(stream)}` tells who holds it") from None
    if as_json:
        found = {"stream": stream, "linear": stands.linear, "vector": dict(stands.vector), "token": str(stands.token)}
        click.echo(json.dumps(found))
    else:
        click.echo(f"{stream} stands at {stands.token}")


@click.command("top", cls=OurCommand, extra="sidecar")
@click.argument("stream", required=False)
@click.option("--every", type=Amount(min=0.2), default=2.0, show_default=True, help="Seconds between looks.")
@click.option("--times", type=click.IntRange(1), help="End after so many looks; without it at Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="For programs: a JSON object per line and look.")
def top(stream: str | None, every: float, times: int | None, *, as_json: bool) -> None:
    """Show what `tidemark status` and `tidemark gaps` say, live; a server that is away is waited for."""
    settings = loaded()
    from tidemark.app import health, open_ranges
    from tidemark.app.verbs import gaps, status
    from tidemark.sinks.postgres.store import Postgres, PostgresConfig

    with Postgres(PostgresConfig(settings.postgres)) as postgres:
        postgres.check_readable()
        for look in itertools.count(1):
            try:
                stored = postgres.states(None if stream is None else [stream])
                how = health.read(postgres, settings.kafka, settings.redis)
                now = time.time()
                found = status.of(postgres, stored)
                held = open_ranges.of(postgres, stored, now, settings.policy_defaults)
            except Unavailable as problem:
                click.echo(str(problem), err=True)
            else:
                if stream is not None and not stored:
                    raise CommandFailed(no_stream(stream))
                if as_json:
                    click.echo(msgspec.json.encode({**status.plain(found, now, how), "gaps": held}))
                else:
                    problems = [f"problem: {problem}" for problem in how.problems()]
                    text = [how.line(), *problems, gaps.as_text(held, now) if held else "nothing is held back"]
                    _show([*text, "", status.as_table(found, now)])
            if look == times:
                break
            time.sleep(every)


def _show(parts: Sequence[str]) -> None:
    """On a terminal in the place of what was shown before, and no more than it has room for: what is held comes
    first."""
    lines = "\n".join(parts).splitlines()
    if sys.stdout.isatty():
        click.echo(_clearing(), nl=False)
        lines = fitting(lines, *shutil.get_terminal_size())
    click.echo("\n".join(lines))


def _clearing() -> str:
    """What clears this terminal; nothing for one that cannot be cleared, which shows one look below the other."""
    try:
        curses.setupterm()
    except curses.error:  # nobody knows it
        return "\033[2J\033[1;1H"
    return (curses.tigetstr("clear") or b"").decode()


def fitting(lines: Sequence[str], columns: int, rows: int) -> list[str]:
    """The first of them for which a terminal of that size, which breaks long ones, has room and a row left over."""
    taken = itertools.accumulate(max(1, math.ceil(len(line) / max(1, columns))) for line in lines)
    return [line for line, upto in zip(lines, taken, strict=True) if upto < rows]


COMMANDS = [verify, explain, wait, top]
