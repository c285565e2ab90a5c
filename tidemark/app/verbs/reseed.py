"""`tidemark reseed`: change the number of shards for the next start of the pipeline."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace

import click

from tidemark.app.commands import Utf8Command, current_user_name, load_settings, require_printable_text
from tidemark.app.settings import Settings
from tidemark.app.versions import OURS, require_successor
from tidemark.common.errors import PrerequisitePending, Stopping
from tidemark.sinks.postgres.database import session_of
from tidemark.sinks.postgres.lease import Lease, LeaseConfig
from tidemark.sinks.postgres.operators import EVERY_STREAM, OverrideLog
from tidemark.sinks.postgres.store import Postgres, PostgresConfig, RememberedSetup
from tidemark.streaming.core.effects import OperatorOverride

LEASE_TIMEOUT_SECONDS = 5.0  # long enough for the lease of a killed pipeline to expire


@dataclass(frozen=True, slots=True)
class Reseed:
    """The result of a reseed.

    Attributes:
        streams: number of streams with a stored state.
        before: the former number of shards; None if no pipeline has run yet.
        shards: the new number of shards.
        act: the number of the entry in the audit table (`tidemark overrides`); None for a dry run.
    """

    streams: int
    before: int | None
    shards: int
    act: int | None = None

    def to_text(self) -> str:
        lines = [f"streams that the next start loads from Postgres: {self.streams}"]
        if self.before not in {None, self.shards}:
            lines.append(f"shards: {self.shards} instead of {self.before}")
        if self.act is not None:
            lines.append(f"logged as override {self.act}")
        return "\n".join(lines)


def run(settings: Settings, by: str, why: str, *, dry_run: bool) -> Reseed:
    """Store the number of shards of `settings` in Postgres, so that the next start of the pipeline accepts the number.

    First waits for the pipeline's lease, up to `LEASE_TIMEOUT_SECONDS`, and notes the change in the audit table. If no
    pipeline has run yet, no number is stored. If the connection to Postgres is lost, the number may be stored already:
    call this function again.

    Args:
        settings: the settings of the pipeline.
        by: the author, for the audit table.
        why: the reason, for the audit table.
        dry_run: only return the result; change nothing, and do not acquire the lease.

    Raises:
        PrerequisitePending: another process has the lease.
        SchemaMismatch: this Tidemark cannot write in the schema.
        VersionSkew: the pipeline's version differs by more than one minor version from this version.
        Unavailable: Postgres does not answer.
        Refused: Postgres refuses a statement.
    """
    with Postgres(PostgresConfig(settings.postgres)) as postgres:
        postgres.check_writable()
        require_successor(postgres.pipeline_version())
        if dry_run:
            return _preview(settings, postgres)
        with _exclusive_lease(settings, postgres, why), session_of(settings.postgres, "tidemark reseed") as session:
            reseed = _preview(settings, postgres)
            override_log = OverrideLog(session)
            entry = override_log.log(EVERY_STREAM, OperatorOverride("", 0, "RESEED", 0, 0, by, why))
            if reseed.before is not None:
                postgres.remember_setup(RememberedSetup(settings.shards, {}))
            override_log.note_outcome(entry, "applied")
            return replace(reseed, act=entry.number)


@contextmanager
def _exclusive_lease(settings: Settings, postgres: Postgres, why: str) -> Iterator[None]:
    """Acquire the pipeline's lease, and release it at the end of the block.

    Raises `PrerequisitePending` if another process still has the lease after `LEASE_TIMEOUT_SECONDS`.
    """
    timed_out = threading.Event()
    timer = threading.Timer(LEASE_TIMEOUT_SECONDS, timed_out.set)
    timer.start()
    config = LeaseConfig(f"reseed: {why}", version=OURS)
    with ExitStack() as stack:
        stack.callback(timer.cancel)
        try:
            stack.enter_context(Lease.acquire(settings.postgres, config, timed_out))
        except Stopping:
            owner = postgres.conditions.current().owner or "another process"
            raise PrerequisitePending("a reseed", postgres.where, f"{owner} has the lease: stop the pipeline") from None
        yield


def _preview(settings: Settings, postgres: Postgres) -> Reseed:
    """Read the result that a reseed would have now, without the number of an entry in the audit table."""
    return Reseed(len(postgres.states()), postgres.remembered_setup().shard_count, settings.shards)


@click.command("reseed", cls=Utf8Command)
@click.option(
    "--by",
    default=current_user_name,
    show_default="the current user",
    callback=require_printable_text,
    help="Your name; stored with the change.",
)
@click.option(
    "--why",
    default="by hand",
    show_default=True,
    callback=require_printable_text,
    help="The reason; stored with the change.",
)
@click.option("--dry-run", is_flag=True, help="Show what would happen, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
def reseed(by: str, why: str, *, dry_run: bool, as_json: bool) -> None:
    """Set the number of shards of a stopped pipeline to TIDEMARK_SHARDS.

    The next start of the pipeline loads all states from Postgres into the new shards.
    """
    settings = load_settings()
    result = run(settings, by, why, dry_run=dry_run)
    click.echo(json.dumps({**asdict(result), "dry_run": dry_run}) if as_json else result.to_text())
