"""The verbs that read Kafka's records again: `tidemark trace`. They change nothing."""

from typing import TYPE_CHECKING, Any, Final

import click

from tidemark.app.commands import CommandFailed, OurCommand, loaded

if TYPE_CHECKING:
    from tidemark.app.settings import Settings
    from tidemark.sinks.letters import DeadLetter

MOST_ID: Final = 2**63 - 1


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
    from tidemark.app import trace, trace_text
    from tidemark.app.letter_commands import LOOKED
    from tidemark.sinks.postgres.life import IdPast
    from tidemark.sinks.redis.publish import Redis, RedisConfig
    from tidemark.sources.recorded import Recorded

    settings = loaded()
    with IdPast(settings.postgres, "tidemark trace") as past:
        encoded = past.state(stream)
        if encoded is None:
            raise CommandFailed(f"there is no stream {stream}; `tidemark status` shows all")
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
    from tidemark.sinks.dead_letters import DeadLettersConfig
    from tidemark.sinks.letters import Letters
    from tidemark.sources.topics import Topics

    kafka, topic = settings.kafka, settings.kafka_dead_letters_topic
    partitions = Topics(kafka).describe([topic])[topic].partitions
    with Letters(DeadLettersConfig(topic, kafka.client(), kafka.producer())) as letters:
        return letters.newest(range(len(partitions)), most)


COMMANDS: Final = [trace]
