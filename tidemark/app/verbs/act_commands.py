"""`tidemark skip`, `retire` and `join`: what an operator settles without a writer's evidence.

Exit codes beside those of all commands: 1 also where the act was refused, here or by the pipeline; 3 where it was sent
and no batch has read it in time.
"""

import re
import time
from collections.abc import Callable
from typing import Any, Final

import click

from tidemark.app.commands import Amount, CommandFailed, OurCommand, confirmed, loaded, no_stream, said, tell

NOT_SEEN: Final = 3
MOST_ID: Final = 2**63 - 1


_ANSWERING: Final[list[Callable[[Any], Any]]] = [
    click.option("--by", required=True, callback=said, help="Who answers for it; it is kept."),
    click.option("--why", required=True, callback=said, help="Why it must be; it is kept."),
    click.option("--dry-run", is_flag=True, help="Show what would happen and send nothing."),
    click.option("--yes", is_flag=True, help="Do not ask. Needed where nobody can be asked."),
    click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object."),
]

_FORCING: Final[list[Callable[[Any], Any]]] = [
    click.option(
        "--epoch", type=click.IntRange(0), help="Without it the writer as it lives now; to fence it, the next."
    ),
    click.option("--beyond", is_flag=True, help="Also past what the stream has allocated. No position comes back."),
    click.option("--force", "overrule", is_flag=True, help="Also where the writer is alive."),
]

until_seen = click.option(
    "--wait", type=Amount(min=0), default=60.0, show_default=True, help="Seconds to wait for the effect."
)


def answering(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every verb that changes something."""
    for option in reversed(_ANSWERING):
        command = option(command)
    return command


def _act(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_FORCING):
        command = option(command)
    return answering(until_seen(command))


class IdRange(click.ParamType[tuple[int, int]]):
    """`A..B`, both ends among the IDs, as `tidemark gaps` shows them; comes out as `(prev, id]`."""

    name = "A..B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        found = re.fullmatch(r"(-?\d+)(?:\.\.(-?\d+))?", str(value))
        first, last = (int(it or found[1]) for it in found.groups()) if found else (0, 0)
        if not first or first * last < 0 or abs(first) > abs(last) or abs(last) > MOST_ID:
            self.fail(f"{value!r} is no range of IDs such as 8..11, or -8..-11", param, ctx)
        return (first - 1 if first > 0 else first + 1), last


@click.command("skip", cls=OurCommand, extra="sidecar")
@click.argument("stream")
@click.argument("writer")
@click.argument("ids", type=IdRange(), metavar="A..B")
@_act
def skip(ids: tuple[int, int], **options: Any) -> None:
    """Settle what WRITER has open from A to B, both among them. What completes there after all is late.

    The last resort: end the transaction that is open, or restart the writer that hangs.
    """
    _carry_out("SKIP", prev=ids[0], id=ids[1], **options)


@click.command("retire", cls=OurCommand, extra="sidecar")
@click.argument("stream")
@click.argument("writer")
@_act
@click.option("--id", type=int, default=0, help="Settle what is open up to here; without it nothing may be open.")
def retire(**options: Any) -> None:
    """Let the line of STREAM wait for WRITER no more; for `*`: for none that never joined."""
    _carry_out("RETIRE", **options)


@click.command("join", cls=OurCommand, extra="sidecar")
@click.argument("stream")
@click.argument("writer")
@_act
@click.option("--id", type=int, required=True, help="All of the writer's up to here is complete.")
def join(**options: Any) -> None:
    """Join in the name of WRITER, which never joined STREAM; or take back what was skipped beyond --id."""
    _carry_out("JOIN", **options)


@click.command("fence", cls=OurCommand, extra="sidecar")
@click.argument("stream")
@click.argument("writer")
@_act
@click.option("--id", type=int, help="All of it up to here is complete. Without it the last ID that it completed.")
def fence(**options: Any) -> None:
    """End the epoch of WRITER, so that nothing counts any more that its old process sends.

    For a process that cannot be stopped. What it left open is settled, and what it sends from now on is refused.
    """
    _carry_out("FENCE", **options)


COMMANDS: Final = (skip, retire, fence, join)


def _carry_out(
    kind: str, *, overrule: bool, dry_run: bool, yes: bool, as_json: bool, wait: float, **fields: Any
) -> None:
    settings = loaded()
    from tidemark.app.verbs import acting, acts
    from tidemark.sinks.postgres.database import session_of
    from tidemark.sinks.postgres.operators import Acts
    from tidemark.sinks.postgres.store import Postgres, PostgresConfig
    from tidemark.streaming.values.policies import Policies

    with (
        Postgres(PostgresConfig(settings.postgres)) as postgres,
        session_of(settings.postgres, "tidemark act") as session,
    ):
        postgres.check_readable()
        stored = postgres.states([fields["stream"]]).get(fields["stream"])
        if stored is None:
            raise CommandFailed(no_stream(fields["stream"]))
        act = acts.asked(kind, stored, fields)
        trial = acts.attempt(stored, act, time.time(), Policies(postgres.policies.given(), settings.policy_defaults))
        for line in [*trial.moves(), *trial.warnings()]:
            click.echo(line, err=as_json)
        objections = [*acts.of_a_bridge(act, postgres.conditions.bridges()), *trial.objections()]
        for line in [*trial.dangers(), *(() if overrule else objections)]:
            raise CommandFailed(line)
        if dry_run:
            if as_json:
                click.echo(acting.as_json(trial, None, None, None))
            return
        confirmed(act.writer, "the writer's name", yes=yes)
        noted = Acts(session)
        sent = acting.send(noted, settings.kafka, settings.kafka_control_topic, trial)
        try:
            tell(sent.told(), err=as_json)
            found = acting.outcome(noted, sent, wait, lambda: noted.became(sent.noted))
        except KeyboardInterrupt:
            tell(
                f"it is sent, and not taken back: `tidemark acts show {sent.noted.number}` tells what becomes of it",
                err=True,
            )
            raise
        now = acting.result(found, postgres, trial, wait)
    tell(acting.as_json(trial, sent, found, now) if as_json else now)
    if found != "applied":
        raise SystemExit(NOT_SEEN if found == "not seen" else 1)
