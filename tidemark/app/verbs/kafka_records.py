"""`tidemark produce` and `tidemark tail`: write and read records in Kafka by hand, as lines of JSON.

`tidemark produce` checks the form of each record as the pipeline does, so that a malformed record does not end in the
dead letters. `tidemark tail --json` writes records in the form that `tidemark replay` reads: `key` and `value` are
text; `key_base64` and `value_base64` replace them if the bytes are not UTF-8.
"""

import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import click
import msgspec
from msgspec import Meta

from tidemark.app.commands import CommandFailed, Utf8Command, json_option, load_settings
from tidemark.app.output import count, escape_unprintable, json_text, progress
from tidemark.app.settings import Settings
from tidemark.common.errors import BadRecord
from tidemark.common.timestamps import timestamp
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.kafka_lookup import RecordedMessage, RecordReader
from tidemark.sources.producer import make_topic_producer
from tidemark.sources.topics import Topics
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Topic

DELIVERY_SECONDS = 30.0  # the longest wait for Kafka's acknowledgements


@dataclass(frozen=True, slots=True)
class ProduceResult:
    """The result of `produce_lines`.

    Attributes:
        sent_count: number of records that Kafka acknowledged.
        invalid_count: number of invalid lines, which were not sent.
        last_record: partition and offset of the record that was acknowledged last; None if no record was sent.
    """

    sent_count: int
    invalid_count: int
    last_record: tuple[int, int] | None

    def summary(self, topic: str) -> str:
        text = f"{count(self.sent_count, 'record')} sent to {topic}"
        if self.last_record is not None:
            text += f", the last to partition {self.last_record[0]} at offset {self.last_record[1]}"
        return text


def produce_lines(
    connection: KafkaConnection,
    topic: str,
    role: records.Topic,
    lines: Iterable[bytes],
    on_invalid: Callable[[str], None],
) -> ProduceResult:
    """Send the valid lines to a topic, and wait until Kafka has acknowledged them. Skips blank lines.

    Args:
        connection: how to connect to Kafka.
        topic: the topic's name.
        role: `FACTS`, or `CONTROL` for operator overrides.
        lines: one JSON record in each line.
        on_invalid: called once for each invalid line, with an error text that contains the line number.

    Raises:
        TopicMissing: the topic does not exist.
        Refused: this user may not describe the topic or write to it.
        Unavailable: Kafka did not acknowledge all records within `DELIVERY_SECONDS`. Facts can be sent again:
            Tidemark ignores duplicates.
    """
    Topics(connection).describe([topic])
    producer = make_topic_producer(connection, topic, give_up_after=DELIVERY_SECONDS)
    invalid_count = 0
    for number, line in enumerate(lines, start=1):
        value = line.strip()
        if not value:
            continue
        try:
            stream = records.decode(value).stream
            records.read(value, stream.encode(), role)
        except BadRecord as error:
            invalid_count += 1
            on_invalid(f"line {number}: {error}")
            continue
        producer.send(stream, value)
    producer.deliver(DELIVERY_SECONDS)
    return ProduceResult(producer.delivered_count, invalid_count, producer.last_acknowledged)


MAX_SHOWN_CHARS: Final = 200  # of a record's value


class RecordedLine(msgspec.Struct, omit_defaults=True):
    """A record as one line of `tidemark tail --json`.

    Attributes:
        time: milliseconds since 1970; -1 if unknown.
        key: the key as text; None if there is no key, or if `key_base64` has the key.
        value: the value as text; None if there is no value, or if `value_base64` has the value.
    """

    topic: str
    partition: Annotated[int, Meta(ge=0, lt=2**31)]
    offset: Annotated[int, Meta(ge=0, lt=2**63 - 1)]
    time: Annotated[int, Meta(ge=-1, lt=2**53)]
    key: str | None = None
    value: str | None = None
    key_base64: str | None = None
    value_base64: str | None = None


_decoder: Final = msgspec.json.Decoder(RecordedLine)


def to_line(message: RecordedMessage) -> str:
    fields: dict[str, Any] = {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "time": message.time,
    }
    for name, data in (("key", message.key), ("value", message.value)):
        if data is None:
            continue
        try:
            fields[name] = data.decode()
        except UnicodeDecodeError:
            fields[f"{name}_base64"] = data
    return msgspec.json.encode(fields).decode()


def from_lines(lines: Iterable[bytes], make_error: Callable[[str], Exception]) -> Iterator[RecordedMessage]:
    """Parse lines of `tidemark tail --json`. Skips blank lines.

    Args:
        lines: the lines.
        make_error: makes the exception for the first invalid line from the error text. Then this function raises it.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            parsed = _decoder.decode(line)
            key, value = (
                None
                if text is None and base64 is None
                else (text.encode() if text is not None else b64decode(base64 or ""))
                for text, base64 in ((parsed.key, parsed.key_base64), (parsed.value, parsed.value_base64))
            )
        except (ValueError, RecursionError) as problem:
            raise make_error(f"line {number} is not a record of `tidemark tail --json`: {problem}") from None
        yield RecordedMessage(parsed.topic, parsed.partition, parsed.offset, parsed.time, key, value)


def to_text(message: RecordedMessage) -> str:
    """A record as one line of text, with the first `MAX_SHOWN_CHARS` characters of the value."""
    name = "unreadable"
    with suppress(BadRecord):
        record = records.decode(message.value)
        name = f"{records.kind_of(record).name} of {record.writer} in {record.stream}"
    value = (message.value or b"").decode(errors="replace")
    shown, ellipsis = value[:MAX_SHOWN_CHARS], "..." if len(value) > MAX_SHOWN_CHARS else ""
    when = timestamp(datetime.fromtimestamp(max(message.time, 0) / 1000, UTC))
    contents = f"{escape_unprintable(name)}: {escape_unprintable(shown)}{ellipsis}"
    return f"{when} {message.topic}/{message.partition} {message.offset} {contents}"


@click.command("produce", cls=Utf8Command)
@click.argument("file", type=click.File("rb"), default="-")
@click.option("--control", is_flag=True, help="Send operator overrides to the control topic, and not facts.")
@json_option
def produce(file: BinaryIO, *, control: bool, as_json: bool) -> None:
    """Send records from FILE, or standard input, to the facts topic: one JSON object in each line. The command adds the
    key.

    Invalid lines are reported and not sent. The exit code is 1 if any line is invalid.
    """
    settings = load_settings()
    topic = settings.kafka_control_topic if control else settings.kafka_facts_topic
    role = Topic.CONTROL if control else Topic.FACTS
    produced = produce_lines(settings.kafka, topic, role, file, lambda problem: click.echo(problem, err=True))
    if as_json:
        last = (
            None
            if produced.last_record is None
            else dict(zip(("partition", "offset"), produced.last_record, strict=True))
        )
        click.echo(
            json_text({"topic": topic, "sent": produced.sent_count, "refused": produced.invalid_count, "last": last})
        )
    else:
        click.echo(produced.summary(topic))
    if produced.invalid_count:
        raise SystemExit(1)


@click.command("tail", cls=Utf8Command)
@click.argument("stream", required=False)
@click.option(
    "--last",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="First show the newest records, this many of each partition. With STREAM, those of STREAM among them.",
)
@click.option("--all", "all_records", is_flag=True, help="First show all records that Kafka still has.")
@click.option("--follow", is_flag=True, help="Then show new records until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object in each line, as `tidemark replay` reads them.")
def tail(stream: str | None, last: int, *, all_records: bool, follow: bool, as_json: bool) -> None:
    """Show the records of all streams, or of STREAM, in the facts topic and the control topic.

    `tidemark tail --all --json > FILE` stores the records for `tidemark replay`.
    """
    settings = load_settings()
    show = to_line if as_json else to_text
    key = None if stream is None else stream.encode()
    with RecordReader(settings.kafka) as kafka:
        partitions = read_offset_ranges(settings, kafka)
        next_offsets = {
            partition: low if all_records else max(low, high - last) for partition, (low, high) in partitions.items()
        }
        shown = 0
        while True:
            for partition, first in next_offsets.items():
                _, end = kafka.offset_range(*partition)
                for message in kafka.between(*partition, first, end):
                    if key in (None, message.key):
                        click.echo(show(message))
                        shown += 1
                next_offsets[partition] = max(first, end)
            if not follow:
                if stream is not None and not shown:
                    read_records = (
                        "no record in Kafka" if all_records else f"none of the last {last} records of each partition"
                    )
                    hint = (
                        "`tidemark status` shows all streams"
                        if all_records
                        else "for older records, raise --last or use --all"
                    )
                    click.echo(f"{read_records} is of stream {stream}; {hint}", err=True)
                return
            time.sleep(0.5)


def read_offset_ranges(settings: Settings, kafka: RecordReader) -> dict[tuple[str, int], tuple[int, int]]:
    """Read the range of stored offsets of every partition of the facts topic and the control topic from Kafka.

    Returns:
        (topic, partition) -> (first offset, offset after the last record).
    """
    topics = Topics(settings.kafka).describe([settings.kafka_facts_topic, settings.kafka_control_topic])
    return {
        (topic, partition): kafka.offset_range(topic, partition)
        for topic in (settings.kafka_facts_topic, settings.kafka_control_topic)
        for partition in range(len(topics[topic].partitions))
    }


def read_file(path: str) -> Iterator[RecordedMessage]:
    """Yield the records of a file that `tidemark tail --json` wrote; `-` is standard input.

    Shows the progress on a terminal. Raises `CommandFailed` for an invalid line, and `OSError` if the file cannot be
    read.
    """
    size = 0 if path == "-" else Path(path).stat().st_size
    with click.open_file(path, "rb") as lines, progress("reading the file", size, "byte") as advance:

        def lines_with_progress() -> Iterator[bytes]:
            for line in lines:
                yield line
                advance(len(line))

        yield from from_lines(lines_with_progress(), CommandFailed)


def read_topics(settings: Settings, facts_topic: str, max_records: int) -> Iterator[RecordedMessage]:
    """Yield all records of `facts_topic` and of the control topic, and show the progress on a terminal.

    Raises `CommandFailed` if these topics have more than about `max_records` records.
    """
    with RecordReader(settings.kafka) as kafka:
        changed = msgspec.structs.replace(settings, kafka_facts_topic=facts_topic)
        partitions = read_offset_ranges(changed, kafka)
        number = sum(high - low for low, high in partitions.values())
        if number > max_records:
            raise CommandFailed(
                f"Kafka has about {number} records, more than --records={max_records}: raise --records if the records"
                " fit in memory"
            )
        with progress("reading Kafka", number, "record") as advance:
            for partition, bounds in partitions.items():
                for record in kafka.between(*partition, *bounds):
                    yield record
                    advance(1)
