"""`tidemark dead-letters`: list and show rejected records, and send one again after a trial on the stored state.

A fact, a void or an announcement may be sent again, because its meaning does not depend on the order of records. A JOIN
or RETIRE is valid only at its offset (docs/decisions/0001-segments.md), so it is never sent again.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
import numpy as np

from tidemark.app.commands import (
    EFFECT_NOT_CONFIRMED,
    CommandFailed,
    CommandGroup,
    change_options,
    effect_wait_option,
    load_settings,
    require_confirmation,
)
from tidemark.app.output import duration, json_text, table
from tidemark.app.verbs.overrides import (
    Outcome,
    SentOverride,
    await_outcome,
    effect_lines,
    positions_line,
    require_topic,
    send_logged,
)
from tidemark.common.errors import BadRecord
from tidemark.sinks.dead_letters import DeadLetter, DeadLetterReader, DeadLettersConfig
from tidemark.sinks.postgres.database import session_of
from tidemark.sinks.postgres.operators import OverrideLog
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import Topics
from tidemark.streaming.core import codec
from tidemark.streaming.core.batch import apply_batch
from tidemark.streaming.core.effects import OperatorOverride, StreamEffects
from tidemark.streaming.core.store import States
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.limits import Bounds, Policies
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import FactRun, Kind, Topic
from tidemark.streaming.wire.runs import PackedRun, PackedRuns, Packet

if TYPE_CHECKING:
    from tidemark.app.settings import Settings
DEFAULT_BOUNDS: Final = Bounds()
HEADINGS: Final = ("OFFSET", "AGE", "REASON", "STREAM", "RECORD", "REPLAYED", "DETAIL")


@dataclass(frozen=True, slots=True)
class ReplayTrial:
    """The effects that the record of a dead letter would have now.

    Attributes:
        letter: the dead letter.
        record: the record of the dead letter.
        effects: the effects on the stream of a batch that has only this record.
    """

    letter: DeadLetter
    record: records.Rdata | records.Void | records.Position | FactRun
    effects: StreamEffects

    def lines(self) -> Iterator[str]:
        """The effects as text, one line each."""
        record = self.record
        kind = records.kind_of(record).name
        yield f"{kind} of {record.writer} in epoch {record.epoch}, rejected as {self.letter.reason}"
        moves = [*effect_lines(self.effects)]
        yield from moves
        if not moves:
            counted = ", ".join(f"{name} {count}" for name, count in self.effects.counts.items()) or "nothing"
            linear = f"the linear position of {record.stream} stays at {self.effects.linear}"
            yield f"no position moves; {linear}; counted as: {counted}"

    def is_contained(self) -> bool:
        """Whether the record changes nothing, because the stored state already contains the record."""
        return {*self.effects.counts} <= {"duplicate"}

    def is_deferred(self) -> bool:
        """Whether the pipeline would defer the record, because its writer has too many IDs above a gap."""
        return "deferred" in self.effects.counts

    def override(self, by: str, why: str) -> OperatorOverride:
        """The entry for the audit table."""
        prev, ids, _ = _edges(self.record)
        return OperatorOverride(self.record.writer, self.record.epoch, "REPLAY", prev, ids[-1], by, why)


def try_replay(
    letter: DeadLetter, facts_topic: str, stored: bytes | None, now: float, bounds: Bounds = DEFAULT_BOUNDS
) -> ReplayTrial:
    """Apply the record of a dead letter to a copy of its stream's state.

    Args:
        letter: the dead letter.
        facts_topic: only records of this topic can be sent again.
        stored: the stream's encoded state; None if the stream does not exist.
        now: seconds since 1970.
        bounds: the bounds of the pipeline.

    Raises:
        BadRecord: the record cannot be sent again, or would be rejected again.
    """
    if letter.value is None:
        raise BadRecord("gone", letter.gone or "the dead letter has no record")
    if letter.origin[0] != facts_topic:
        raise BadRecord(
            "wrong_topic",
            f"the record is from topic {letter.origin[0]}: to send an operator override again, run its command again",
        )
    record = records.read(letter.value, letter.key, Topic.FACTS)
    if isinstance(record, records.Join | records.Retire | records.Skip | records.Open):
        raise BadRecord(
            "not_replayed", "a JOIN or RETIRE is valid only at its offset: the writer sends a new one at its next start"
        )
    if isinstance(record, records.Rdata) and record.id == "batch":
        raise BadRecord(
            "not_replayed",
            "the record is one row of a fact with several rows (its `id` is `batch`), and one row cannot be sent again"
            " alone",
        )
    states = {} if stored is None else {record.stream: stored}
    home = 0 if stored is None else (codec.decode(stored).home or 0)
    packet = Packet(facts_topic, home, Topic.FACTS, 1, PackedRuns.of([_to_run(record, int(now * 1000))]), [], [], [])
    effects = apply_batch(0, States(states), [packet], int(now * 1000), bounds)
    for bad in effects.rejected:
        raise BadRecord(
            bad.reason, "the record would be rejected again: it does not fit the current state of the stream"
        )
    return ReplayTrial(letter, record, effects.streams[0])


def _edges(
    record: records.Rdata | records.Void | records.Position | FactRun,
) -> tuple[int, list[int], list[Kind]]:
    """The `prev` of the record's first edge, and the IDs and the kinds of all its edges."""
    if isinstance(record, FactRun):
        return record.prev, record.ids, [Kind.RDATA if rows else Kind.VOID for rows in record.rows]
    assert isinstance(record.id, int)
    if isinstance(record, records.Rdata) and not isinstance(record.prev, int):
        return record.id - 1 if record.id > 0 else record.id + 1, [record.id], [Kind.RDATA]
    assert isinstance(record.prev, int)
    return record.prev, [record.id], [records.kind_of(record)]


def _to_run(record: records.Rdata | records.Void | records.Position | FactRun, now: int) -> PackedRun:
    """Convert a record to a run of its edges. `now` is the time of the record, in milliseconds since 1970."""
    prev, ids, kinds = _edges(record)
    return PackedRun(
        record.stream,
        record.writer,
        record.epoch,
        Direction.of(ids[-1]),
        abs(prev),
        np.abs(np.array(ids, np.int64)).tobytes(),
        np.array(kinds, np.uint8).tobytes(),
        np.zeros(len(ids), np.uint32).tobytes(),
        0,
        0,
        now,
        now,
    )


def replayed_outcome(try_again: Callable[[], ReplayTrial]) -> Outcome:
    """Find the outcome of a replay after the pipeline has read the record.

    Args:
        try_again: applies the record to a copy of the current state.

    Returns:
        `applied` if the state contains the record, `not seen` if the pipeline has deferred the record, otherwise
        `refused`.
    """
    try:
        again = try_again()
        return "applied" if again.is_contained() else "not seen" if again.is_deferred() else "refused"
    except BadRecord:
        return "refused"


def send_again(
    override_log: OverrideLog, connection: KafkaConnection, topic: str, trial: ReplayTrial, by: str, why: str
) -> SentOverride:
    """Log the replay in the audit table, and send the unchanged record to `topic`.

    Raises:
        BadRecord: the dead letter was replayed before.
        CommandFailed: Kafka does not answer, or the topic is missing.
    """
    assert trial.letter.value is not None
    require_topic(connection, topic)
    entry = override_log.note_replay(trial.record.stream, trial.override(by, why), trial.letter.origin)
    return send_logged(override_log, entry, connection, topic, Topic.FACTS, trial.letter.value)


def to_table(letters: Sequence[DeadLetter], replayed: Mapping[tuple[str, int, int], int], now: float) -> str:
    return "\n".join(table(HEADINGS, [_row(letter, replayed, now) for letter in letters]))


def _row(letter: DeadLetter, replayed: Mapping[tuple[str, int, int], int], now: float) -> tuple[str, ...]:
    topic, partition, offset = letter.origin
    number = replayed.get(letter.origin)
    override = "" if number is None else f"override {number}"
    return (
        letter.display_offset, f"{duration(now - letter.time / 1000)}", letter.reason, letter.stream,
        f"{topic}[{partition}] {offset}", override, letter.gone or letter.detail,
    )  # fmt: skip


def plain(letter: DeadLetter, replayed: Mapping[tuple[str, int, int], int]) -> dict[str, Any]:
    """The fields of the JSON of a dead letter. `key` and `value` are text. If the bytes are not UTF-8, the field is
    null, and `key_base64` or `value_base64` has the bytes. `replayed`: as in `to_text`."""
    fields: dict[str, Any] = {
        "partition": letter.partition,
        "offset": letter.offset,
        "time": letter.time / 1000,
        "reason": letter.reason,
        "detail": letter.detail or None,
        "gone": letter.gone or None,
        "stream": letter.stream,
        "record": dict(zip(("topic", "partition", "offset"), letter.origin, strict=True)),
        "replayed_by_act": replayed.get(letter.origin),
    }
    for name, data in (("key", letter.key), ("value", letter.value)):
        try:
            fields[name] = None if data is None else data.decode()
        except UnicodeDecodeError:
            fields |= {name: None, f"{name}_base64": data}
    return fields | {"headers": [[name, value.decode(errors="replace")] for name, value in letter.headers]}


def to_text(letter: DeadLetter, replayed: Mapping[tuple[str, int, int], int], now: float) -> str:
    """A dead letter with all its fields as text. `replayed`: origin -> number of the override that replayed the record.

    Key, value and headers are JSON-encoded, so that a terminal does not execute them.
    """
    fields = plain(letter, replayed)
    shown = ("reason", "detail", "gone", "stream", "replayed_by_act")
    lines = [f"{name}: {fields[name]}" for name in shown if fields[name] is not None]
    lines.append("record: {}[{}] {}".format(*letter.origin) + f", {duration(now - letter.time / 1000)} ago")
    for name, value in ((field, fields.get(f"{field}_base64", fields[field])) for field in ("key", "value")):
        lines += [f"{name}: {msgspec.json.encode(value).decode()}"]
    lines += [f"header {msgspec.json.encode(header).decode()}" for header in fields["headers"]]
    return "\n".join(lines)


MAX_FILTERED: Final = 10_000  # newest dead letters of each partition that a search with a filter reads

_as_json = click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")


class DeadLetterOffset(click.ParamType[tuple[int, int]]):
    """`OFFSET` of partition 0, or `PARTITION/OFFSET`, as the list shows it. Converted to (partition, offset)."""

    name = "OFFSET"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        match = re.fullmatch(r"(?:(\d{1,9})/)?(\d{1,18})", str(value))
        if match is None:
            self.fail(f"{value!r} is not an offset, such as 17, or 1/17 for offset 17 of partition 1", param, ctx)
        return int(match[1] or 0), int(match[2])


@click.group("dead-letters", cls=CommandGroup)
def dead_letters() -> None:
    """List and show rejected records, byte for byte, and send one of them again."""


@dead_letters.command("list")
@click.argument("stream", required=False)
@click.option("--reason", help="Only dead letters with this reason, such as wrong_type: see the column REASON.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Newest entries to show.")
@_as_json
def dead_letters_list(stream: str | None, reason: str | None, limit: int, *, as_json: bool) -> None:
    """List the newest dead letters of all streams, or of STREAM.

    With STREAM or --reason, only the newest 10,000 dead letters of each partition are searched.
    """
    settings = load_settings()
    topic = settings.kafka_dead_letters_topic
    partitions = Topics(settings.kafka).describe([topic])[topic].partitions
    to_read = limit if stream is None and reason is None else MAX_FILTERED
    with _open_servers(settings) as (kafka, override_log):
        replayed = override_log.replays()
        matching = [
            letter
            for letter in kafka.newest(range(len(partitions)), to_read)
            if stream in (None, letter.stream) and reason in (None, letter.reason)
        ][:limit]
    if as_json:
        click.echo(json_text({"dead_letters": [plain(letter, replayed) for letter in matching]}))
    else:
        click.echo(to_table(matching, replayed, time.time()) if matching else "no dead letters")


@dead_letters.command("show")
@click.argument("place", type=DeadLetterOffset(), metavar="OFFSET")
@_as_json
def dead_letters_show(place: tuple[int, int], *, as_json: bool) -> None:
    """Show the dead letter at OFFSET: the reason, the offset of the record, its key, value and headers."""
    settings = load_settings()
    with _open_servers(settings) as (kafka, override_log):
        letter, replayed = _read_letter(kafka, place), override_log.replays()
    click.echo(json_text(plain(letter, replayed)) if as_json else to_text(letter, replayed, time.time()))


@dead_letters.command("replay")
@click.argument("place", type=DeadLetterOffset(), metavar="OFFSET")
@change_options
@effect_wait_option
def dead_letters_replay(
    place: tuple[int, int], by: str, why: str, *, dry_run: bool, yes: bool, as_json: bool, wait: float
) -> None:
    """Send the record of the dead letter at OFFSET to the facts topic again. Possible once for each dead letter.

    First repair the cause of the rejection. The record is tried on the stored state, and not sent if it would be
    rejected again. A JOIN or RETIRE is never sent again.
    """
    settings = load_settings()
    topic = settings.kafka_facts_topic
    with Postgres(PostgresConfig(settings.postgres)) as postgres, _open_servers(settings) as (kafka, override_log):
        postgres.check_readable()
        letter = _read_letter(kafka, place)

        def try_again() -> ReplayTrial:
            bounds = Policies(postgres.policies.read(), settings.policy_defaults).bounds()
            return try_replay(letter, topic, postgres.states([letter.stream]).get(letter.stream), time.time(), bounds)

        trial = try_again()
        for line in trial.lines():
            click.echo(line, err=as_json)
        if trial.is_contained():
            raise CommandFailed("the stream already contains this record: there is nothing to replay")
        if trial.is_deferred():
            raise CommandFailed(
                f"the pipeline would defer this record, because {trial.record.writer} has too many IDs above a gap:"
                f" settle the gap first (`tidemark gaps {letter.stream}`)"
            )
        if (number := override_log.replays().get(letter.origin)) is not None:
            raise CommandFailed(f"this record was replayed before, as override {number}")
        if dry_run:
            if as_json:
                click.echo(json_text({"would": [*trial.lines()], "outcome": None}))
            return
        require_confirmation(letter.display_offset, "the offset", yes=yes)
        sent = send_again(override_log, settings.kafka, topic, trial, by, why)
        click.echo(sent.line(), err=as_json)
        final = await_outcome(override_log, sent, wait, lambda: replayed_outcome(try_again))
        stored = postgres.states([letter.stream]).get(letter.stream)
    result = {
        "not seen": f"no batch has read the record after {wait:g} s; it takes effect when the pipeline reads it",
        "refused": "the pipeline rejected the record again: see the newest dead letters",
        "applied": "applied: " + ("" if stored is None else positions_line(stored, trial.record.writer)),
    }[final]
    if as_json:
        click.echo(json_text({"would": [*trial.lines()], **sent.plain(), "outcome": final, "result": result}))
    else:
        click.echo(result)
    if final != "applied":
        raise SystemExit(EFFECT_NOT_CONFIRMED if final == "not seen" else 1)


@contextmanager
def _open_servers(settings: "Settings") -> Iterator[tuple[DeadLetterReader, OverrideLog]]:
    """Connect to the dead letters in Kafka and to the audit table in Postgres while the block runs."""
    kafka = settings.kafka
    config = DeadLettersConfig(settings.kafka_dead_letters_topic, kafka.client_settings(), kafka.producer_settings())
    with session_of(settings.postgres, "tidemark override") as session, DeadLetterReader(config) as letters:
        yield letters, OverrideLog(session)


def _read_letter(kafka: DeadLetterReader, place: tuple[int, int]) -> DeadLetter:
    """Read the dead letter at (partition, offset). Raises `CommandFailed` if there is none."""
    letter = kafka.read_at(*place)
    if letter is None:
        raise CommandFailed(
            f"there is no dead letter at offset {place[1]} of partition {place[0]}: see tidemark dead-letters list"
        )
    return letter
