"""`tidemark dead-letters`: list and show rejected records, and send one again after a trial on the stored state.

A fact, void or announcement can be sent again: its meaning does not depend on the order of records. A marker such as a
JOIN or RETIRE is valid only at its offset (docs/decisions/0001-segments.md), and is never sent again. A single row of a
fact with several rows is never sent again, either.
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
    add_change_options,
    effect_wait_option,
    load_settings,
    require_confirmation,
)
from tidemark.app.output import duration, json_text, table
from tidemark.app.verbs.overrides import (
    Outcome,
    SentOverride,
    effect_lines,
    positions_line,
    require_topic,
    send_logged_override,
    wait_for_outcome,
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
    """The effects that the record of a dead letter would have on the stored state of its stream.

    Attributes:
        dead_letter: the dead letter.
        record: the record of the dead letter.
        effects: the effects on the stream of a batch that has only this record.
    """

    dead_letter: DeadLetter
    record: records.Rdata | records.Void | records.Position | FactRun
    effects: StreamEffects

    def lines(self) -> Iterator[str]:
        """The record as one line of text, then one line for each effect. If nothing moves, a line says so."""
        record = self.record
        kind = records.kind_of(record).name
        yield f"{kind} of {record.writer} in epoch {record.epoch}, rejected as {self.dead_letter.reason}"
        effects = [*effect_lines(self.effects)]
        yield from effects
        if not effects:
            counted = ", ".join(f"{name} {count}" for name, count in self.effects.counts.items()) or "nothing"
            linear = f"the linear position of {record.stream} stays at {self.effects.linear}"
            yield f"no position moves; {linear}; counted as: {counted}"

    def is_contained(self) -> bool:
        """Whether the stored state already contains the record, so that the record would change nothing."""
        return {*self.effects.counts} <= {"duplicate"}

    def is_deferred(self) -> bool:
        """Whether the pipeline would defer the record: the record is above a gap, and its writer has reached the bound
        of pending ranges."""
        return "deferred" in self.effects.counts

    def override(self, by: str, why: str) -> OperatorOverride:
        """The entry for the audit table, with the range of the record and the kind REPLAY."""
        prev, ids, _ = _edges(self.record)
        return OperatorOverride(self.record.writer, self.record.epoch, "REPLAY", prev, ids[-1], by, why)


def try_replay(
    dead_letter: DeadLetter, facts_topic: str, encoded_state: bytes | None, now: float, bounds: Bounds = DEFAULT_BOUNDS
) -> ReplayTrial:
    """Apply the record of a dead letter to a copy of its stream's state.

    Args:
        dead_letter: the dead letter.
        facts_topic: only records of this topic can be sent again.
        encoded_state: the stream's encoded state; None if the stream does not exist.
        now: seconds since 1970.
        bounds: the bounds of the streams' states.

    Raises:
        BadRecord: the record is missing, must not be sent again, or would be rejected again.
    """
    if dead_letter.value is None:
        gone = f"the dead letter has no copy of the record: {dead_letter.why_stripped}"
        raise BadRecord(
            "gone", gone if dead_letter.why_stripped else "the record has no value, so it would be rejected again"
        )
    if dead_letter.origin[0] != facts_topic:
        raise BadRecord(
            "wrong_topic",
            f"the record is from topic {dead_letter.origin[0]}, and only records of {facts_topic} can be sent again: if"
            " the record is an operator override, run its command again",
        )
    record = records.read(dead_letter.value, dead_letter.key, Topic.FACTS)
    if isinstance(record, records.Join | records.Retire | records.Skip | records.Open):
        raise BadRecord(
            "not_replayed",
            f"{records.kind_of(record).name} records are valid only at their offset and cannot be sent again: a writer"
            " sends a new JOIN at its next start",
        )
    if isinstance(record, records.Rdata) and record.id == "batch":
        raise BadRecord(
            "not_replayed",
            "the record is one row of a fact with several rows (its `id` is `batch`), and one row cannot be sent again"
            " alone",
        )
    states = {} if encoded_state is None else {record.stream: encoded_state}
    home = 0 if encoded_state is None else (codec.decode(encoded_state).home_partition or 0)
    now_ms = int(now * 1000)
    packet = Packet(facts_topic, home, Topic.FACTS, 1, PackedRuns.of([_to_run(record, now_ms)]), [], [], [])
    effects = apply_batch(0, States(states), [packet], now_ms, bounds)
    for bad in effects.rejected:
        raise BadRecord(
            bad.reason, "the record would be rejected again: it does not fit the current state of the stream"
        )
    return ReplayTrial(dead_letter, record, effects.streams[0])


def _edges(
    record: records.Rdata | records.Void | records.Position | FactRun,
) -> tuple[int, list[int], list[Kind]]:
    """The `prev` of the record's first edge, and the IDs and the kinds of all its edges, signed. A fact without `prev`
    gets an edge of only its own ID."""
    if isinstance(record, FactRun):
        return record.prev, record.ids, [Kind.RDATA if rows else Kind.VOID for rows in record.rows]
    assert isinstance(record.id, int)
    if isinstance(record, records.Rdata) and not isinstance(record.prev, int):
        return record.id - 1 if record.id > 0 else record.id + 1, [record.id], [Kind.RDATA]
    assert isinstance(record.prev, int)
    return record.prev, [record.id], [records.kind_of(record)]


def _to_run(record: records.Rdata | records.Void | records.Position | FactRun, time_ms: int) -> PackedRun:
    """Convert a record to a run of its edges. `time_ms`: the time of the record, in milliseconds since 1970."""
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
        time_ms,
        time_ms,
    )


def find_replay_outcome(retry_trial: Callable[[], ReplayTrial]) -> Outcome:
    """Find the outcome of a replay after the pipeline has read the record.

    Args:
        retry_trial: tries the record on the current state, as `try_replay`. Called once.

    Returns:
        `applied` if the state contains the record, `not seen` if the pipeline has deferred the record, otherwise
        `refused`.
    """
    try:
        again = retry_trial()
        return "applied" if again.is_contained() else "not seen" if again.is_deferred() else "refused"
    except BadRecord:
        return "refused"


def send_again(
    override_log: OverrideLog, connection: KafkaConnection, topic: str, trial: ReplayTrial, by: str, why: str
) -> SentOverride:
    """Log the replay in the audit table, and send the unchanged record to `topic`.

    Raises:
        BadRecord: the record was replayed before.
        CommandFailed: the topic is missing, or Kafka did not acknowledge the record. If the replay is logged already,
            the text has its number.
    """
    assert trial.dead_letter.value is not None
    require_topic(connection, topic)
    entry = override_log.note_replay(trial.record.stream, trial.override(by, why), trial.dead_letter.origin)
    return send_logged_override(override_log, entry, connection, topic, Topic.FACTS, trial.dead_letter.value)


def to_table(entries: Sequence[DeadLetter], replays: Mapping[tuple[str, int, int], int], now: float) -> str:
    return "\n".join(table(HEADINGS, [_row(dead_letter, replays, now) for dead_letter in entries]))


def _row(dead_letter: DeadLetter, replays: Mapping[tuple[str, int, int], int], now: float) -> tuple[str, ...]:
    topic, partition, offset = dead_letter.origin
    number = replays.get(dead_letter.origin)
    override = "" if number is None else f"override {number}"
    return (
        dead_letter.display_offset,
        duration(now - dead_letter.time / 1000),
        dead_letter.reason,
        dead_letter.stream,
        f"{topic}[{partition}] {offset}",
        override,
        dead_letter.why_stripped or dead_letter.detail,
    )


def json_fields(dead_letter: DeadLetter, replays: Mapping[tuple[str, int, int], int]) -> dict[str, Any]:
    """The fields of the JSON of a dead letter. `key` and `value` are text, or None if the record has none. If the bytes
    are not UTF-8, the field is None, and `key_base64` or `value_base64` has the bytes. `replays`: as in `to_text`."""
    fields: dict[str, Any] = {
        "partition": dead_letter.partition,
        "offset": dead_letter.offset,
        "time": dead_letter.time / 1000,
        "reason": dead_letter.reason,
        "detail": dead_letter.detail or None,
        "gone": dead_letter.why_stripped or None,
        "stream": dead_letter.stream,
        "record": dict(zip(("topic", "partition", "offset"), dead_letter.origin, strict=True)),
        "replay_override": replays.get(dead_letter.origin),
    }
    for name, data in (("key", dead_letter.key), ("value", dead_letter.value)):
        try:
            fields[name] = None if data is None else data.decode()
        except UnicodeDecodeError:
            fields |= {name: None, f"{name}_base64": data}
    return fields | {"headers": [[name, value.decode(errors="replace")] for name, value in dead_letter.headers]}


def to_text(dead_letter: DeadLetter, replays: Mapping[tuple[str, int, int], int], now: float) -> str:
    """A dead letter as lines of text. Key, value and headers are JSON-encoded, so that a terminal does not execute
    them. `replays`: origin -> number of the override that replayed the record."""
    fields = json_fields(dead_letter, replays)
    shown = ("reason", "detail", "gone", "stream", "replay_override")
    lines = [f"{name}: {fields[name]}" for name in shown if fields[name] is not None]
    lines.append("record: {}[{}] {}".format(*dead_letter.origin) + f", {duration(now - dead_letter.time / 1000)} ago")
    for name, value in ((field, fields.get(f"{field}_base64", fields[field])) for field in ("key", "value")):
        lines += [f"{name}: {msgspec.json.encode(value).decode()}"]
    lines += [f"header {msgspec.json.encode(header).decode()}" for header in fields["headers"]]
    return "\n".join(lines)


MAX_SEARCHED: Final = 10_000  # newest dead letters of each partition that a search with a filter reads

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
    """List and show rejected records, and send one again unchanged."""


@dead_letters.command("list")
@click.argument("stream", required=False)
@click.option("--reason", help="Only dead letters with this reason, such as wrong_type: see the column REASON.")
@click.option(
    "--limit", type=click.IntRange(1), default=20, show_default=True, help="Largest number of dead letters to show."
)
@_as_json
def dead_letters_list(stream: str | None, reason: str | None, limit: int, *, as_json: bool) -> None:
    """List the newest dead letters of all streams, or of STREAM, newest first.

    With STREAM or --reason, only the newest 10,000 dead letters of each partition are searched.
    """
    settings = load_settings()
    topic = settings.kafka_dead_letters_topic
    partitions = Topics(settings.kafka).describe([topic])[topic].partitions
    to_read = limit if stream is None and reason is None else MAX_SEARCHED
    with _open_servers(settings) as (reader, override_log):
        replays = override_log.replays()
        matching = [
            dead_letter
            for dead_letter in reader.newest(range(len(partitions)), to_read)
            if stream in (None, dead_letter.stream) and reason in (None, dead_letter.reason)
        ][:limit]
    if as_json:
        click.echo(json_text({"dead_letters": [json_fields(dead_letter, replays) for dead_letter in matching]}))
    else:
        is_filtered = stream is not None or reason is not None
        nothing = "no dead letter matches" if is_filtered else "no dead letters"
        click.echo(to_table(matching, replays, time.time()) if matching else nothing)


@dead_letters.command("show")
@click.argument("address", type=DeadLetterOffset(), metavar="OFFSET")
@_as_json
def dead_letters_show(address: tuple[int, int], *, as_json: bool) -> None:
    """Show the dead letter at OFFSET: the reason, and the offset, key, value and headers of the rejected record."""
    settings = load_settings()
    with _open_servers(settings) as (reader, override_log):
        dead_letter, replays = _read_dead_letter(reader, address), override_log.replays()
    click.echo(json_text(json_fields(dead_letter, replays)) if as_json else to_text(dead_letter, replays, time.time()))


@dead_letters.command("replay")
@click.argument("address", type=DeadLetterOffset(), metavar="OFFSET")
@add_change_options
@effect_wait_option
def dead_letters_replay(
    address: tuple[int, int], by: str, why: str, *, dry_run: bool, yes: bool, as_json: bool, wait: float
) -> None:
    """Send the record of the dead letter at OFFSET to the facts topic again. Possible once for each rejected record.

    First repair the cause of the rejection. The record is tried on the stored state, and not sent if it would be
    rejected again. Never sent again: JOIN, RETIRE and OPEN, records of the control topic, and a single row of a fact
    with several rows.
    """
    settings = load_settings()
    topic = settings.kafka_facts_topic
    with Postgres(PostgresConfig(settings.postgres)) as postgres, _open_servers(settings) as (reader, override_log):
        postgres.check_readable()
        dead_letter = _read_dead_letter(reader, address)

        def retry_trial() -> ReplayTrial:
            bounds = Policies(postgres.policies.read(), settings.policy_defaults).bounds()
            stored = postgres.states([dead_letter.stream]).get(dead_letter.stream)
            return try_replay(dead_letter, topic, stored, time.time(), bounds)

        trial = retry_trial()
        for line in trial.lines():
            click.echo(line, err=as_json)
        if trial.is_contained():
            raise CommandFailed("the stream already contains this record: there is nothing to replay")
        if trial.is_deferred():
            raise CommandFailed(
                f"the pipeline would defer this record, because {trial.record.writer} has too many pending ranges above"
                f" its position: close its gaps first (`tidemark gaps {dead_letter.stream}` shows how)"
            )
        if (number := override_log.replays().get(dead_letter.origin)) is not None:
            raise CommandFailed(
                f"this record was replayed before, as override {number}: see `tidemark overrides show {number}`"
            )
        if dry_run:
            if as_json:
                click.echo(json_text({"would": [*trial.lines()], "outcome": None}))
            return
        require_confirmation(dead_letter.display_offset, "the offset", yes=yes)
        sent = send_again(override_log, settings.kafka, topic, trial, by, why)
        click.echo(sent.line(), err=as_json)
        outcome = wait_for_outcome(override_log, sent, wait, lambda: find_replay_outcome(retry_trial))
        stored = postgres.states([dead_letter.stream]).get(dead_letter.stream)
    result = {
        "not seen": f"no batch has applied the record after {wait:g} s: do not send it again. It takes effect when the"
        " pipeline has read it and its writer is below the bound of pending ranges",
        "refused": "the pipeline rejected the record again: see `tidemark dead-letters list`",
        "applied": "applied: " + ("" if stored is None else positions_line(stored, trial.record.writer)),
    }[outcome]
    if as_json:
        click.echo(json_text({"would": [*trial.lines()], **sent.json_fields(), "outcome": outcome, "result": result}))
    else:
        click.echo(result)
    if outcome != "applied":
        raise SystemExit(EFFECT_NOT_CONFIRMED if outcome == "not seen" else 1)


@contextmanager
def _open_servers(settings: "Settings") -> Iterator[tuple[DeadLetterReader, OverrideLog]]:
    """Open the dead letters in Kafka and the audit table in Postgres. Closes both at the end of the block."""
    kafka = settings.kafka
    config = DeadLettersConfig(settings.kafka_dead_letters_topic, kafka.client_settings(), kafka.producer_settings())
    with session_of(settings.postgres, "tidemark override") as session, DeadLetterReader(config) as reader:
        yield reader, OverrideLog(session)


def _read_dead_letter(reader: DeadLetterReader, address: tuple[int, int]) -> DeadLetter:
    """Read the dead letter at `address`: (partition, offset). Raises `CommandFailed` if it does not exist."""
    dead_letter = reader.read_at(*address)
    if dead_letter is None:
        raise CommandFailed(
            f"there is no dead letter at offset {address[1]} of partition {address[0]}: `tidemark dead-letters list`"
            " shows the newest"
        )
    return dead_letter
