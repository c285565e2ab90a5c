"""`tidemark readers`: show the lag of readers; move, reset and delete their places; retry or drop parked facts.

Places and parked facts are stored in a database of readers. Each change is first noted in the audit table of Tidemark's
database, like an operator override.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Never

import click

from tidemark.app.commands import (
    CHECK_FAILED,
    MAX_ID,
    CommandFailed,
    CommandGroup,
    add_change_options,
    echo_result,
    load_settings,
    require_confirmation,
    unknown_stream_text,
)
from tidemark.app.diagnosis.reader_lag import ReaderLag, ReaderStatus, sentences
from tidemark.app.output import count, duration, join_escaped, json_text, table
from tidemark.common.errors import BadToken
from tidemark.common.postgres_session import Dsn
from tidemark.common.timestamps import timestamp
from tidemark.sinks.postgres.database import session_of
from tidemark.sinks.postgres.history import LagHistory
from tidemark.sinks.postgres.inspect import LateCompletions
from tidemark.sinks.postgres.operators import OverrideLog
from tidemark.sinks.reader import ZERO, ParkedFact, ReaderPlaces, StoredPlace, Token
from tidemark.streaming.core.effects import OperatorOverride
from tidemark.streaming.values.direction import is_beyond

HEADINGS: Final = (
    "STREAM", "READER", "PARTITION", "STATE", "PLACE", "LAG (IDS)", "LAG", "LAST COMMIT", "COPIES", "PARKED", "LATE",
)  # fmt: skip
PARKED_HEADINGS: Final = ("READER", "STREAM", "ID", "PARKED", "RETRY", "REASON")
_RIGHT_ALIGNED: Final = {"LAG (IDS)", "COPIES", "PARKED", "LATE", "ID"}
MAX_TOKEN_CHARS: Final = 24  # of a token in the list; of a longer token, the list shows only the linear position
MAX_LATE_COMPLETIONS: Final = (
    10_000  # newest late completions of a stream: a reader reads only these again after a seek
)

_as_json = click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
_dsn = click.option(
    "--dsn", help="Database with the readers' places. Default: TIDEMARK_READERS_DSN, else TIDEMARK_POSTGRES_DSN."
)


@dataclass(frozen=True, slots=True)
class Readers:
    """Access to the stored data about readers: `store` is in a database of readers, the rest in Tidemark's database."""

    store: ReaderPlaces
    history: LagHistory
    late: LateCompletions
    override_log: OverrideLog

    def read_statuses(self, reader: str | None, stream: str | None) -> list[ReaderStatus]:
        """Read the status of each partition of the readers; None selects all readers, or all streams."""
        return ReaderLag(self.history).statuses(self.store.places(reader, stream))

    def require_statuses(self, reader: str, stream: str) -> list[ReaderStatus]:
        """Read the status of each partition of a reader. Raises `CommandFailed` if the reader does not exist."""
        return self.read_statuses(reader, stream) or self._raise_missing(reader, stream)

    def _raise_missing(self, reader: str, stream: str) -> Never:
        """Raise `CommandFailed`: the reader does not exist."""
        raise CommandFailed(
            f"there is no reader {reader} of {stream} in {self.store.where}; `tidemark readers list` shows all readers"
        )

    def read_place(self, reader: str, stream: str) -> StoredPlace:
        """Read the place of a reader without partitions, or of one partition of a reader.

        Raises `CommandFailed` if the reader does not exist, or if `reader` names a reader with several partitions.
        """
        listed = self.store.places(reader, stream)
        if not listed:
            self._raise_missing(reader, stream)
        if len(listed) > 1:
            raise CommandFailed(
                f"{reader} of {stream} has {len(listed)} partitions: name one of them, such as '{listed[0].reader}'"
            )
        return listed[0]

    def apply(self, stored: StoredPlace, action: "Action") -> int:
        """Add a change to the audit table, apply the change, and store the outcome in the audit table.

        Returns the number of the entry in the audit table. If the change fails, stores the outcome `refused`, and
        raises the error.
        """
        span = (stored.linear, action.goal_id) if action.goal_id else (0, 0)
        kind = f"READER {action.kind}"
        override = OperatorOverride(stored.reader, 0, kind, *span, action.by, action.why)
        entry = self.override_log.log(stored.stream, override)
        try:
            action.run()
        except BaseException:
            self.override_log.note_outcome(entry, "refused")
            raise
        self.override_log.note_outcome(entry, "applied")
        return entry.number


@dataclass(frozen=True, slots=True)
class Action:
    """A change of a reader's place or its parked facts.

    Attributes:
        kind: the kind of the entry in the audit table, without the prefix `READER`.
        by: the author.
        why: the reason.
        run: applies the change.
        goal_id: the linear position to which the place moves, signed; 0 if the place does not move or moves to the
            beginning.
    """

    kind: str
    by: str
    why: str
    run: Callable[[], object]
    goal_id: int = 0


@click.group("readers", cls=CommandGroup)
def readers() -> None:
    """Show the lag of readers; move, reset and delete their places; retry or drop parked facts."""


@readers.command("list")
@click.argument("stream", required=False)
@click.option(
    "--check", is_flag=True, help="End with exit code 3 if a reader is stuck, not running, or ahead of its stream."
)
@_dsn
@_as_json
def readers_list(stream: str | None, dsn: str | None, *, check: bool, as_json: bool) -> None:
    """List the readers of all streams, or of STREAM: place, lag, last commit, copies, parked facts, and late
    completions that the reader has not read yet."""
    with open_databases(dsn) as databases:
        statuses = databases.read_statuses(None, stream)
        where = databases.store.where
        if stream is not None and not statuses and not databases.override_log.has_stream(stream):
            raise CommandFailed(unknown_stream_text(stream, databases.override_log.stream_names()))
    if as_json:
        click.echo(json_text({"readers": statuses}))
    elif statuses:
        click.echo(join_escaped(_table(statuses, datetime.now(UTC))))
    else:
        click.echo(f"no readers in {where}" if stream is None else f"no readers of {stream} in {where}")
    if check and any(status.state in {"stuck", "not running", "ahead"} for status in statuses):
        raise SystemExit(CHECK_FAILED)


@readers.command("show")
@click.argument("reader")
@click.argument("stream")
@_dsn
@_as_json
def readers_show(reader: str, stream: str, dsn: str | None, *, as_json: bool) -> None:
    """Show why READER lags behind STREAM, its place, last commit, copies, parked facts and unread late completions. If
    READER has partitions, show each of them."""
    with open_databases(dsn) as databases:
        statuses = databases.require_statuses(reader, stream)
    if as_json:
        click.echo(json_text({"readers": statuses}))
    else:
        now = datetime.now(UTC)
        click.echo("\n\n".join(join_escaped(_detail_lines(status, now)) for status in statuses))


@readers.command("seek")
@click.argument("reader")
@click.argument("stream")
@click.argument("token", metavar="TOKEN|now|beginning")
@_dsn
@add_change_options
def readers_seek(
    reader: str, stream: str, token: str, dsn: str | None, by: str, why: str, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Move the place of READER of STREAM to a token such as m7, to `now` or to the `beginning`.

    If the place moves back, the reader receives facts again: their effects come twice unless the service first removes
    them. If the place moves forward, the reader skips facts. Parked facts beyond the new place are deleted. Copies of
    the reader may run during the change.
    """
    with open_databases(dsn) as databases:
        stored = databases.read_place(reader, stream)
        linear = databases.history.linear_positions([stream]).get(stream)
        if linear is None:
            raise CommandFailed(unknown_stream_text(stream, databases.override_log.stream_names()))
        goal = _parse_goal(token, stored, linear)
        must_read = [
            (late.writer, late.prev, late.id)
            for late in databases.late.newest(stream, MAX_LATE_COMPLETIONS, with_resolved=True)
            if late.number <= stored.late and is_beyond(late.id, goal.at(late.writer))
        ]
        databases.store.check_seek(stored, goal)
        distance = _distance_text(stored.linear, goal.linear)
        change_text = f"{reader} of {stream} moves from {stored.token} to {goal}: {distance}"
        action = Action("SEEK", by, why, lambda: databases.store.seek(stored, goal, must_read), goal.linear)
        _change(databases, stored, action, change_text, dry_run=dry_run, yes=yes, as_json=as_json)


@readers.command("reset")
@click.argument("reader")
@click.argument("stream")
@_dsn
@add_change_options
def readers_reset(
    reader: str, stream: str, dsn: str | None, by: str, why: str, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Delete the place of READER of STREAM: the reader starts again at the `since` of its service.

    Parked facts are deleted too. Copies of the reader may run during the change.
    """
    with open_databases(dsn) as databases:
        stored = databases.read_place(reader, stream)
        change_text = f"{reader} of {stream} loses its place {stored.token} and {count(stored.parked, 'parked fact')}"
        action = Action("RESET", by, why, lambda: databases.store.reset(stored))
        _change(databases, stored, action, change_text, dry_run=dry_run, yes=yes, as_json=as_json)


@readers.command("delete")
@click.argument("reader")
@click.argument("stream")
@_dsn
@add_change_options
def readers_delete(
    reader: str, stream: str, dsn: str | None, by: str, why: str, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Delete everything that is stored about READER of STREAM. Use this command if the service of READER no longer
    exists. First stop all copies of READER."""
    with open_databases(dsn) as databases:
        stored = databases.read_place(reader, stream)
        if stored.copies:
            raise CommandFailed(
                f"{count(stored.copies, 'copy')} of {reader} would create the place again: first stop all copies"
            )
        change_text = f"{reader} of {stream} at {stored.token} is deleted, with {count(stored.parked, 'parked fact')}"
        action = Action("DELETE", by, why, lambda: databases.store.delete(stored))
        _change(databases, stored, action, change_text, dry_run=dry_run, yes=yes, as_json=as_json)


@readers.group("parked", cls=CommandGroup)
def readers_parked() -> None:
    """List facts that readers have parked; retry or drop them."""


@readers_parked.command("list")
@click.argument("reader", required=False)
@click.argument("stream", required=False)
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Largest number of facts to show.")
@_dsn
@_as_json
def readers_parked_list(reader: str | None, stream: str | None, limit: int, dsn: str | None, *, as_json: bool) -> None:
    """List parked facts, newest first. With READER, only the facts that this reader parked; with STREAM too, only its
    facts of this stream."""
    with ReaderPlaces(_readers_dsn(dsn)) as store:
        facts = store.parked(reader, stream, limit)
    if as_json:
        click.echo(json_text({"parked": facts}))
    else:
        click.echo(join_escaped(_parked_table(facts, datetime.now(UTC))) if facts else "no parked facts")


def _parked_arguments(command: Callable[..., None]) -> Callable[..., None]:
    """Add the common arguments and options of the commands that change parked facts."""
    ids = click.argument("ids", type=click.IntRange(-MAX_ID, MAX_ID), nargs=-1, required=True, metavar="ID...")
    return click.argument("reader")(click.argument("stream")(ids(_dsn(add_change_options(command)))))


def _change_parked(
    kind: str, template: str, change: Callable[[ReaderPlaces, Sequence[ParkedFact]], object], *, reader: str,
    stream: str, ids: Sequence[int], dsn: str | None, by: str, why: str, dry_run: bool, yes: bool, as_json: bool,
) -> None:  # fmt: skip
    """Run a command that changes parked facts: show the change, ask for confirmation, and apply it.

    Args:
        kind: the kind of the entry in the audit table, without the prefix `READER`.
        template: the change as text, with `{}` for the number of parked facts.
        change: applies the change to the parked facts.
    """
    with open_databases(dsn) as databases:
        stored, facts = databases.read_place(reader, stream), _read_parked_facts(databases.store, reader, stream, ids)
        change_text = f"{reader} of {stream} {template.format(count(len(facts), 'parked fact'))}"
        action = Action(kind, by, why, lambda: change(databases.store, facts))
        _change(databases, stored, action, change_text, facts, dry_run=dry_run, yes=yes, as_json=as_json)


@readers_parked.command("retry")
@_parked_arguments
def readers_parked_retry(**options: Any) -> None:
    """Let READER of STREAM receive parked facts again. First repair the cause of the error.

    A running copy receives the facts within seconds, in a batch with `is_retry` set. A fact that fails again is parked
    again.
    """
    _change_parked("RETRY", "gets {} again", ReaderPlaces.retry, **options)


@readers_parked.command("drop")
@_parked_arguments
def readers_parked_drop(**options: Any) -> None:
    """Delete parked facts of READER of STREAM.

    Use this command after you have made the effects by hand, or if the effects are not needed.
    """
    _change_parked("DROP", "drops {}", ReaderPlaces.drop, **options)


@contextmanager
def open_databases(dsn: str | None) -> Iterator[Readers]:
    """Open the database of readers and Tidemark's database, and close both at the end of the block.

    `dsn`: the database of readers; None: the database in the settings.
    """
    settings = load_settings(other_database=dsn is not None)
    with (
        ReaderPlaces(dsn or settings.readers) as store,
        session_of(settings.postgres, "tidemark readers") as session,
    ):
        yield Readers(store, LagHistory(session), LateCompletions(session), OverrideLog(session))


def _readers_dsn(dsn: str | None) -> Dsn:
    """The database of readers: `dsn`, or the database in the settings if `dsn` is None."""
    settings = load_settings(other_database=dsn is not None)
    return dsn or settings.readers


def _parse_goal(text: str, stored: StoredPlace, linear: int) -> Token:
    """Parse the token to which a place moves.

    Args:
        text: a token, `now` or `beginning`.
        stored: the place.
        linear: the stream's linear position.

    Raises:
        UsageError: the text is not a token, or its IDs have another sign than the IDs of the stream.
        CommandFailed: the token is beyond the linear position, or has writers although the reader reads in linear mode.
    """
    try:
        goal = {"now": Token(linear), "beginning": ZERO}.get(text) or Token.parse(text)
        goal.compare(Token(linear))
    except BadToken as problem:
        raise click.UsageError(str(problem)) from None
    if is_beyond(goal.linear, linear):
        raise CommandFailed(
            f"{goal} is beyond the linear position {linear} of {stored.stream}: the reader would miss facts"
        )
    if goal.positions and stored.mode == "linear":
        raise CommandFailed(f"{stored.reader} reads in linear mode: give a token without writers, m{goal.linear}")
    return goal


def _distance_text(before: int, after: int) -> str:
    """The number of IDs between two linear positions as text, and whether they are skipped or read again."""
    if before == after:
        return "the linear position does not change; facts that were read beyond it are read again"
    number = abs(abs(after) - abs(before))
    subject = f"{count(number, 'ID')} {'is' if number == 1 else 'are'}"
    return f"{subject} skipped" if is_beyond(after, before) else f"{subject} read again"


def _read_parked_facts(store: ReaderPlaces, reader: str, stream: str, ids: Sequence[int]) -> list[ParkedFact]:
    """Read the parked facts with these IDs. Raises `CommandFailed` if one is not parked."""
    facts = store.parked_with_ids(reader, stream, ids)
    missing = sorted({*ids} - {fact.id for fact in facts})
    if missing:
        raise CommandFailed(
            f"{reader} of {stream} has no parked fact with ID {', '.join(map(str, missing))}:"
            " `tidemark readers parked list` shows the parked facts"
        )
    return facts


def _change(
    databases: Readers,
    stored: StoredPlace,
    action: Action,
    change_text: str,
    facts: Sequence[ParkedFact] = (),
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Show the change, ask for confirmation, apply the change, and show the result. With `dry_run`, only show the
    change.

    Args:
        databases: the databases.
        stored: the place to change.
        action: the change.
        change_text: the change as text.
        facts: the parked facts to change, for the JSON output.
    """
    click.echo(join_escaped([change_text]), err=as_json)
    number = None
    if not dry_run:
        require_confirmation(stored.reader, "the reader's name", yes=yes)
        number = databases.apply(stored, action)
    if as_json:
        echo_result(
            json_text(
                {
                    "reader": stored.reader,
                    "stream": stored.stream,
                    "would": change_text,
                    "ids": [fact.id for fact in facts],
                    "dry_run": dry_run,
                    "number": number,
                }
            )
        )
    elif not dry_run:
        echo_result(f"done, logged as override {number}")


def _table(statuses: Sequence[ReaderStatus], now: datetime) -> list[str]:
    rows = [
        (
            status.stream,
            status.reader if status.partition is None else status.reader.rpartition("[")[0],
            "" if status.partition is None else f"{status.partition}/{status.partitions}",
            status.state,
            _short_token(status.token),
            _number_text(status.lag_ids),
            "" if status.lag_seconds is None else duration(status.lag_seconds),
            "" if status.last_commit is None else f"{duration((now - status.last_commit).total_seconds())} ago",
            _number_text(status.copies),
            str(status.parked),
            _number_text(status.late),
        )
        for status in statuses
    ]
    return table(HEADINGS, rows, _RIGHT_ALIGNED)


def _short_token(token: str | None) -> str:
    if token is None:
        return ""
    return token if len(token) <= MAX_TOKEN_CHARS else f"{token.partition('~')[0]}~…"


def _number_text(value: int | None) -> str:
    return "?" if value is None else str(value)


def _detail_lines(status: ReaderStatus, now: datetime) -> Iterator[str]:
    yield from sentences(status, duration, now)
    yield f"place: {status.token or 'none'}"
    yield f"mode: {status.mode}"
    yield f"linear position of {status.stream}: {'not known' if status.stream_linear is None else status.stream_linear}"
    if status.last_commit is not None:
        yield f"last commit: {timestamp(status.last_commit)}"
    yield f"copies: {'not known' if status.copies is None else status.copies}"
    yield f"parked: {status.parked}" + (f", of which {status.retried} are retried" if status.retried else "")
    yield f"late: {0 if status.late is None else status.late}"


def _parked_table(facts: Sequence[ParkedFact], now: datetime) -> list[str]:
    rows = [
        (
            fact.reader,
            fact.stream,
            str(fact.id),
            f"{duration((now - fact.parked_at).total_seconds())} ago",
            "" if fact.retry_at is None else f"requested {duration((now - fact.retry_at).total_seconds())} ago",
            fact.reason,
        )
        for fact in facts
    ]
    return table(PARKED_HEADINGS, rows, _RIGHT_ALIGNED)
