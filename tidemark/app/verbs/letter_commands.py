"""`tidemark dead-letters`: list, show and replay what the pipeline refused.

Exit codes beside those of all commands are those of `tidemark.app.verbs.act_commands`.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from tidemark.app.commands import CommandFailed, CommandGroup, confirmed, loaded
from tidemark.app.printed import as_object
from tidemark.app.verbs.act_commands import NOT_SEEN, answering, until_seen

if TYPE_CHECKING:
    from tidemark.app.settings import Settings
    from tidemark.sinks.dead_letters import DeadLetter, Letters
    from tidemark.sinks.postgres.operators import Acts

LOOKED: Final = 10_000  # letters of each partition that a filter looks at, the newest

_as_json = click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")


class LetterPlace(click.ParamType[tuple[int, int]]):
    """`OFFSET`, of partition 0, or `PARTITION/OFFSET`, as the list shows it."""

    name = "OFFSET"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        found = re.fullmatch(r"(?:(\d{1,9})/)?(\d{1,18})", str(value))
        if found is None:
            self.fail(f"{value!r} is no offset such as 17, or 1/17 of partition 1", param, ctx)
        return int(found[1] or 0), int(found[2])


@click.group("dead-letters", cls=CommandGroup)
def dead_letters() -> None:
    """What the pipeline refused, byte for byte: list it, show it, and send it again once after its cause is mended."""


@dead_letters.command("list", extra="sidecar")
@click.argument("stream", required=False)
@click.option("--reason", help="Only these.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="So many, the newest.")
@_as_json
def letters_list(stream: str | None, reason: str | None, limit: int, *, as_json: bool) -> None:
    """List the newest dead letters of all streams, or STREAM."""
    settings = loaded()
    from tidemark.app.verbs import letters
    from tidemark.sources.topics import Topics

    topic = settings.kafka_dead_letters_topic
    partitions = Topics(settings.kafka).describe([topic])[topic].partitions
    most = limit if stream is None and reason is None else LOOKED
    with _servers(settings) as (kafka, acts):
        replayed = acts.replays()
        wanted = [
            it
            for it in kafka.newest(range(len(partitions)), most)
            if stream in (None, it.stream) and reason in (None, it.reason)
        ][:limit]
    if as_json:
        click.echo(as_object({"dead_letters": [letters.plain(it, replayed) for it in wanted]}))
    else:
        click.echo(letters.as_table(wanted, replayed, time.time()) if wanted else "no dead letters")


@dead_letters.command("show", extra="sidecar")
@click.argument("place", type=LetterPlace(), metavar="OFFSET")
@_as_json
def letters_show(place: tuple[int, int], *, as_json: bool) -> None:
    """Show all of the dead letter at OFFSET: why, where the record stood, its key, value and headers."""
    settings = loaded()
    from tidemark.app.verbs import letters

    with _servers(settings) as (kafka, acts):
        found, replayed = _letter(kafka, place), acts.replays()
    click.echo(as_object(letters.plain(found, replayed)) if as_json else letters.as_text(found, replayed, time.time()))


@dead_letters.command("replay", extra="sidecar")
@click.argument("place", type=LetterPlace(), metavar="OFFSET")
@answering
@until_seen
def letters_replay(
    place: tuple[int, int], by: str, why: str, *, dry_run: bool, yes: bool, as_json: bool, wait: float
) -> None:
    """Send the record of the dead letter at OFFSET to the facts topic again, once, after its cause is mended.

    It is tried on the state first, and not sent where it would be refused again. A JOIN or RETIRE is never sent again.
    """
    settings = loaded()
    from tidemark.app.verbs import acting, acts, letters
    from tidemark.sinks.postgres.store import Postgres, PostgresConfig

    topic = settings.kafka_facts_topic
    with Postgres(PostgresConfig(settings.postgres)) as postgres, _servers(settings) as (kafka, noted):
        postgres.check_readable()
        letter = _letter(kafka, place)

        def tried() -> letters.Replay:
            return letters.replay(letter, topic, postgres.states([letter.stream]).get(letter.stream), time.time())

        trial = tried()
        for line in trial.told():
            click.echo(line, err=as_json)
        if trial.is_settled():
            raise CommandFailed("the stream knows all that it says: there is nothing to replay")
        if (act := noted.replays().get(letter.origin)) is not None:
            raise CommandFailed(f"act {act} has sent this record again before")
        if dry_run:
            if as_json:
                click.echo(as_object({"would": [*trial.told()], "outcome": None}))
            return
        confirmed(letter.place, "the offset", yes=yes)
        sent = acting.send_again(noted, settings.kafka, topic, trial, by, why)
        click.echo(sent.told(), err=as_json)
        found = acting.outcome(noted, sent, wait, lambda: acting.replayed(tried))
        stored = postgres.states([letter.stream]).get(letter.stream)
    now = {
        "not seen": f"no batch has read it within {wait:g} s; it will be counted when the pipeline reads it",
        "refused": "the pipeline refused it again: look at the newest dead letters",
        "applied": "applied: " + ("" if stored is None else acts.standing(stored, trial.record.writer)),
    }[found]
    if as_json:
        click.echo(as_object({"would": [*trial.told()], **sent.plain(), "outcome": found, "result": now}))
    else:
        click.echo(now)
    if found != "applied":
        raise SystemExit(NOT_SEEN if found == "not seen" else 1)


@contextmanager
def _servers(settings: "Settings") -> "Iterator[tuple[Letters, Acts]]":
    from tidemark.sinks.dead_letters import DeadLettersConfig, Letters
    from tidemark.sinks.postgres.database import session_of
    from tidemark.sinks.postgres.operators import Acts

    kafka = settings.kafka
    config = DeadLettersConfig(settings.kafka_dead_letters_topic, kafka.client(), kafka.producer())
    with session_of(settings.postgres, "tidemark act") as session, Letters(config) as letters:
        yield letters, Acts(session)


def _letter(kafka: "Letters", place: tuple[int, int]) -> "DeadLetter":
    found = kafka.at(*place)
    if found is None:
        raise CommandFailed(f"there is no dead letter at offset {place[1]} of partition {place[0]}")
    return found
