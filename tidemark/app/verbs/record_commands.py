"""The verbs that read Kafka's records again: `tidemark trace`, `tail` and `replay`. They change nothing."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tidemark.app.commands import CommandFailed, OurCommand, loaded, no_stream
from tidemark.app.verbs.act_commands import MOST_ID

if TYPE_CHECKING:
    from tidemark.app.settings import Settings
    from tidemark.sinks.dead_letters import DeadLetter
    from tidemark.sources.kafka_lookup import Recorded, RecordedMessage


class StreamIdType(click.ParamType[int]):
    name = "ID"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            found = int(str(value))
        except ValueError:
            found = 0
        if not 0 < abs(found) <= MOST_ID:
            self.fail(f"{value!r} is no ID such as 17, or -17 of a stream that goes down", param, ctx)
        return found


@click.command("trace", cls=OurCommand, extra="sidecar", context_settings={"ignore_unknown_options": True})
@click.argument("stream")
@click.argument("id", type=StreamIdType(), metavar="ID")
@click.option(
    "--records", type=click.IntRange(1), default=1_000_000, show_default=True, help="Read so many of Kafka at most."
)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.pass_context
def trace(context: click.Context, stream: str, id: int, records: int, *, as_json: bool) -> None:
    """Show the life of one ID of STREAM: its record in Kafka, who settled it, what held it, when it was published.

    Exit code 1 where no record that was counted has named an ID as high.
    """
    settings = loaded()
    from tidemark.app.verbs import trace, trace_text
    from tidemark.app.verbs.letter_commands import LOOKED
    from tidemark.sinks.postgres.inspect import IdPast
    from tidemark.sinks.redis.publish import Redis, RedisConfig
    from tidemark.sources.kafka_lookup import Recorded

    with IdPast(settings.postgres, "tidemark trace") as past:
        encoded = past.state(stream)
        if encoded is None:
            raise CommandFailed(no_stream(stream))
        it = trace.of_postgres(past, stream, encoded, id)
        home = trace.home(encoded)
        with Recorded(settings.kafka) as kafka, Redis(RedisConfig(settings.redis)) as redis:
            if home is not None:
                topic = settings.kafka_facts_topic
                trace.asking(it, "records", lambda: trace.of_kafka(it, past, kafka, topic, home, records))
            trace.asking(it, "dead letters", lambda: trace.of_letters(it, _letters(settings, LOOKED)))
            trace.asking(it, "Redis", lambda: trace.of_redis(it, redis.published))
    click.echo(trace_text.as_json(it) if as_json else trace_text.as_text(it))
    if not it.known:
        context.exit(1)


def _letters(settings: "Settings", most: int) -> "list[DeadLetter]":
    from tidemark.sinks.dead_letters import DeadLettersConfig, Letters
    from tidemark.sources.topics import Topics

    kafka, topic = settings.kafka, settings.kafka_dead_letters_topic
    partitions = Topics(kafka).describe([topic])[topic].partitions
    with Letters(DeadLettersConfig(topic, kafka.client(), kafka.producer())) as letters:
        return letters.newest(range(len(partitions)), most)


@click.command("tail", cls=OurCommand, extra="sidecar")
@click.argument("stream", required=False)
@click.option("--last", type=click.IntRange(0), default=10, show_default=True, help="So many of each partition first.")
@click.option("--all", "everything", is_flag=True, help="All that retention kept, in place of the last.")
@click.option("--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object per line, as `tidemark replay` reads them.")
def tail(stream: str | None, last: int, *, everything: bool, follow: bool, as_json: bool) -> None:
    """Show the records of all streams (or STREAM) on the facts and the control topic as they lie in Kafka.

    `tidemark tail --all --json > FILE` records them.
    """
    settings = loaded()
    from tidemark.app.verbs.recordings import as_line, as_text
    from tidemark.sources.kafka_lookup import Recorded

    show = as_line if as_json else as_text
    key = None if stream is None else stream.encode()
    with Recorded(settings.kafka) as kafka:
        places = _places(settings, kafka)
        nexts = {place: low if everything else max(low, high - last) for place, (low, high) in places.items()}
        shown = 0
        while True:
            for place, first in nexts.items():
                _, end = kafka.bounds(*place)
                for it in kafka.between(*place, first, end):
                    if key in (None, it.key):
                        click.echo(show(it))
                        shown += 1
                nexts[place] = max(first, end)
            if not follow:
                if stream is not None and not shown:
                    looked = (
                        "no record that retention kept" if everything else f"none of the last {last} of each partition"
                    )
                    more = (
                        "`tidemark status` shows all streams"
                        if everything
                        else "look farther back with --last or --all"
                    )
                    click.echo(f"{looked} is of {stream}; {more}", err=True)
                return
            time.sleep(0.5)


def _places(settings: "Settings", kafka: "Recorded") -> dict[tuple[str, int], tuple[int, int]]:
    """Topic and partition -> its bounds."""
    from tidemark.sources.topics import Topics

    topics = Topics(settings.kafka).describe([settings.kafka_facts_topic, settings.kafka_control_topic])
    return {
        (topic, partition): kafka.bounds(topic, partition)
        for topic in (settings.kafka_facts_topic, settings.kafka_control_topic)
        for partition in range(len(topics[topic].partitions))
    }


@click.command("replay", cls=OurCommand, extra="pipeline")
@click.argument("source", metavar="[TOPIC or FILE]", required=False)
@click.option("--stream", help="Only this stream.")
@click.option(
    "--records", type=click.IntRange(1), default=1_000_000, show_default=True, help="Read so many of Kafka at most."
)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.pass_context
def replay(context: click.Context, source: str | None, stream: str | None, records: int, *, as_json: bool) -> None:
    """Feed recorded records to the rules again, without Spark, and compare with the history in Postgres.

    They come from the FILE that `tidemark tail --all --json` wrote (-: standard input), or from Kafka: from TOPIC, or
    without it from the facts topic. Exit code 1 where the two part, 3 where of a stream it cannot be told.
    """
    settings = loaded()
    from tidemark.app.verbs import replay, replay_text
    from tidemark.sinks.postgres.inspect import past_batches
    from tidemark.streaming.values.policies import Policies
    from tidemark.streaming.wire.records import Topic

    file = source is not None and (source == "-" or Path(source).is_file())
    if source is not None and not file and re.fullmatch(r"[\w.-]{1,249}", source, re.ASCII) is None:
        raise click.BadParameter(
            f"{source!r} is no file that is there, and no topic's name", param_hint="TOPIC or FILE"
        )
    facts = settings.kafka_facts_topic if source is None or file else source
    roles = {facts: Topic.FACTS, settings.kafka_control_topic: Topic.CONTROL}
    if len(roles) == 1:
        raise click.UsageError(f"{facts} is the control topic: name the facts topic, whose acts come with it")
    with past_batches(settings.postgres) as past:
        if stream is not None and stream not in past.streams():
            raise CommandFailed(no_stream(stream))
        read = _from_file(source or "-") if file else _from_kafka(settings, facts, records)
        messages = {}
        for it in read:
            if it.topic not in roles:
                raise CommandFailed(
                    f"{it.topic} is neither TIDEMARK_KAFKA_FACTS_TOPIC nor TIDEMARK_KAFKA_CONTROL_TOPIC"
                )
            if stream is None or it.key == stream.encode():
                messages[it.topic, it.partition, it.offset] = it  # two recordings may be in one file
        bounds = Policies(past.policies(), settings.policy_defaults).bounds()
        found = replay.report(past, [messages[place] for place in sorted(messages)], roles, bounds, stream)
    click.echo(replay_text.as_json(found) if as_json else replay_text.as_text(found))
    if found.parted or found.unknown or not found.alike:
        context.exit(1 if found.parted else 3)


def _from_file(name: str) -> "Iterator[RecordedMessage]":
    from tidemark.app.verbs.recordings import from_lines

    with click.open_file(name, "rb") as lines:
        yield from from_lines(lines, CommandFailed)


def _from_kafka(settings: "Settings", facts: str, most: int) -> "Iterator[RecordedMessage]":
    from tidemark.sources.kafka_lookup import Recorded

    with Recorded(settings.kafka) as kafka:
        changed = settings.model_copy(update={"kafka_facts_topic": facts})
        places = _places(changed, kafka)
        count = sum(high - low for low, high in places.values())
        if count > most:
            raise CommandFailed(
                f"there are about {count} records, and --records allows {most}: they are held in memory"
            )
        for place, bounds in places.items():
            yield from kafka.between(*place, *bounds)


COMMANDS: Final = [trace, tail, replay]
