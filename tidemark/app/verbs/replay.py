"""`tidemark replay`: apply recorded records again, without Spark, and compare the positions with the stored history.

The positions do not depend on how records are divided into batches. So for each batch of the history, the replay
applies records until it reaches the positions of the batch. Then all positions must be equal.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Final

import click
import msgspec

from tidemark.app.commands import CommandFailed, Utf8Command, load_settings, unknown_stream_text
from tidemark.app.diagnosis.replayed import NO_EVIDENCE, Replayed, ReplayStart, find_start, group_messages_by_stream
from tidemark.app.output import count, echo, field_values, join_escaped, json_text, progress
from tidemark.app.verbs.explain import evidence_text
from tidemark.app.verbs.kafka_records import read_file, read_topics, to_line
from tidemark.app.verbs.kafka_records import to_text as record_text
from tidemark.common.errors import BadRecord
from tidemark.common.timestamps import timestamp
from tidemark.sinks.postgres.inspect import AppliedOverride, BatchHistory, StoredBatch, StreamBatches
from tidemark.sources.kafka_lookup import RecordedMessage
from tidemark.streaming.values.direction import is_beyond
from tidemark.streaming.values.limits import Bounds, Evidence, Policies
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Topic

MAX_CHUNK_RECORDS: Final = 4096  # the largest number of records that are applied together


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between a stream's history and its replay.

    Attributes:
        stream: the name of the stream.
        record: the record after which history and replay differ; None if they differ after the last record.
        writer: the writer whose position differs; None for the linear position.
        history: the position in the history, signed; None if the history has no position of the writer.
        replayed: the position in the replay, signed.
        batch: the number of the batch of the history; None at the end of the history.
        time: the time of the batch; None at the end of the history.
        evidence: the evidence in the history and in the replay, if only the evidence differs; otherwise None.
    """

    stream: str
    record: RecordedMessage | None
    writer: str | None
    history: int | None
    replayed: int | None
    batch: int | None
    time: datetime | None
    evidence: tuple[Evidence, Evidence] | None = None


@dataclass(frozen=True, slots=True)
class ComparedPart:
    """The part of a stream that was compared.

    Attributes:
        after: the last batch that was not compared at the beginning; None if all of the beginning was compared.
        offset: the first recorded offset of the stream's partition; 0 if no record is missing.
        line_from: linear positions are compared beyond this ID, signed. None: if `after` is None, all linear
            positions are compared; if `after` is not None, no linear position is compared.
        upto: the last compared batch, if the records end before the history; otherwise None.
        behind: the number of batches after `upto`. They were not compared.
    """

    after: StoredBatch | None = None
    offset: int = 0
    line_from: int | None = None
    upto: StoredBatch | None = None
    behind: int = 0


@dataclass(slots=True)
class ReplayReport:
    """The result of a replay.

    Attributes:
        records: the number of records in the recording that batches have read.
        batches: the number of batches that were compared.
        equal: the streams without a difference in the compared part.
        parted: the first difference of each stream that differs.
        parts: stream -> compared part, for the equal streams that were compared only in part.
        unknown: stream -> reason, for the streams that could not be compared.
        absent: the streams of the history of which the recording has no record.
    """

    records: int = 0
    batches: int = 0
    equal: list[str] = field(default_factory=list)
    parted: list[Divergence] = field(default_factory=list)
    parts: dict[str, ComparedPart] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The result for one stream.

    Attributes:
        batch_count: the number of batches without a difference.
        last_batch: the last batch without a difference; None if there is none.
        divergence: the first difference; None if there is none up to the last batch, or up to the end of the records.
        has_linear: whether the linear position was compared at the end.
    """

    batch_count: int
    last_batch: StoredBatch | None
    divergence: Divergence | None = None
    has_linear: bool = True


@dataclass(slots=True)
class _StreamProgressBar:
    """The progress bar of one stream. Records that a second comparison applies again do not move the bar.

    Attributes:
        advance: moves the progress bar by a number of records.
        remaining_records: the number of records by which the bar can still move.
    """

    advance: Callable[[int], None]
    remaining_records: int

    def move_by(self, records: int) -> None:
        """Move the bar by this number of records, but not beyond its end."""
        records = min(records, self.remaining_records)
        self.remaining_records -= records
        if records:
            self.advance(records)

    def finish(self) -> None:
        """Move the bar to its end."""
        self.move_by(self.remaining_records)


def compare_history(
    history: BatchHistory,
    messages: Sequence[RecordedMessage],
    roles: Mapping[str, Topic],
    bounds: Bounds,
    only_stream: str | None = None,
) -> ReplayReport:
    """Replay the records that batches have read, and compare each stream with its history. Shows the progress.

    Args:
        history: the stored history.
        messages: the recorded records, sorted by topic, partition and offset.
        roles: topic name -> role of the topic.
        bounds: the bounds with which the pipeline ran.
        only_stream: the stream of `messages`, if `messages` has only one; None: `messages` has the records of all
            streams.
    """
    next_offsets = history.next_offsets()
    read = [
        message
        for message in messages
        if message.offset < next_offsets.get((message.topic, message.partition), message.offset + 1)
    ]
    first_offsets: dict[tuple[str, int], int] = {}
    last_messages = {(message.topic, message.partition): message for message in read}
    for message in read:
        first_offsets.setdefault((message.topic, message.partition), message.offset)
    result, streams = ReplayReport(records=len(read)), group_messages_by_stream(read)
    result.absent = [name for name in history.streams() if name not in streams and only_stream in (None, name)]
    with progress("applying", sum(map(len, streams.values())), "record") as advance:
        for stream, of_stream in sorted(streams.items()):
            progress_bar = _StreamProgressBar(advance, len(of_stream))
            stream_history = history.stream(stream)
            if stream_history is not None:  # None: all records of the stream are dead letters
                partitions = {
                    (message.topic, message.partition) for message in of_stream if roles[message.topic] is Topic.FACTS
                }
                first_offset = max((first_offsets[partition] for partition in partitions), default=0)
                # A batch that is older than the last record has read no later record, so the replay must reach the
                # positions of the batch.
                complete_until_ms = min(
                    (
                        last_messages[partition].time
                        for partition in partitions
                        if last_messages[partition].offset + 1 < next_offsets.get(partition, 0)
                    ),
                    default=None,
                )
                _add_comparison(
                    result,
                    stream_history,
                    stream,
                    of_stream,
                    roles,
                    bounds,
                    first_offset,
                    complete_until_ms,
                    progress_bar,
                )
            progress_bar.finish()
    return result


def _add_comparison(
    result: ReplayReport,
    history: StreamBatches,
    stream: str,
    messages: Sequence[RecordedMessage],
    roles: Mapping[str, Topic],
    bounds: Bounds,
    first_offset: int,
    complete_until_ms: int | None,
    progress_bar: _StreamProgressBar,
) -> None:
    """Compare one stream with its history, and add the outcome to `result`.

    `first_offset`: the first recorded offset of the stream's partition. The other arguments are those of
    `compare_stream`.
    """
    start, comparison = None, None
    if history.is_complete:
        comparison = compare_stream(history, stream, messages, roles, bounds, complete_until_ms, None, progress_bar)
    if not history.is_complete or (first_offset and comparison is not None and comparison.divergence is not None):
        facts = [message for message in messages if roles[message.topic] is Topic.FACTS]
        start = find_start(history, stream, facts, bounds, is_truncated=first_offset > 0)
        missing = (
            f"the recording begins at offset {first_offset}"
            if first_offset
            else "the first days of the history were dropped"
        )
        if start is None or start.uncompared_batches == len(history.batches):
            result.unknown[stream] = f"{missing}, and some ID was open after every later batch"
            return
        comparison = compare_stream(history, stream, messages, roles, bounds, complete_until_ms, start, progress_bar)
        if comparison.divergence is not None and comparison.divergence.record is None:
            last = batch_name(comparison.last_batch or start.last_skipped_batch)
            result.unknown[stream] = f"{missing}, and the records do not continue from {last}"
            return
    assert comparison is not None
    batches = len(history.batches) - (start.uncompared_batches if start else 0)
    if comparison.divergence is not None:
        result.batches += batches
        result.parted.append(comparison.divergence)
        return
    result.batches += comparison.batch_count
    result.equal.append(stream)
    remaining_batches = batches - comparison.batch_count
    if start is not None or remaining_batches:
        result.parts[stream] = ComparedPart(
            start.last_skipped_batch if start else None,
            first_offset,
            start.highest_position if start is not None and comparison.has_linear else None,
            comparison.last_batch if remaining_batches else None,
            remaining_batches,
        )


def batch_name(batch: StoredBatch) -> str:
    return f"batch {batch.batch} of {timestamp(batch.time)}"


def compare_stream(
    history: StreamBatches,
    stream: str,
    messages: Sequence[RecordedMessage],
    roles: Mapping[str, Topic],
    bounds: Bounds,
    complete_until_ms: int | None,
    start: ReplayStart | None,
    progress_bar: _StreamProgressBar,
) -> _Comparison:
    """Replay a stream, and compare it with its history up to the first difference.

    Args:
        history: the stored history of the stream.
        stream: the name of the stream.
        messages: the records of the stream that batches have read.
        roles: topic name -> role of the topic.
        bounds: the bounds with which the pipeline ran.
        complete_until_ms: records after this time (milliseconds since 1970) may be missing; None if none is missing.
        start: the state and the batch at which the comparison starts; None: the beginning of the history.
        progress_bar: the progress bar of the stream.
    """
    facts = [message for message in messages if roles[message.topic] is Topic.FACTS]
    overrides = _applied_overrides(
        [message for message in messages if roles[message.topic] is Topic.CONTROL], history.overrides
    )
    state, stored = Replayed(stream, bounds), dict[str, Evidence]()
    batches, last, at = history.batches, None, 0
    if start is not None:
        state, batches = start.replayed, batches[start.uncompared_batches :]
        overrides = [override for override in overrides if override[1] > start.last_skipped_batch.time]
    for number, batch in enumerate(batches):
        for move in batch.advances:
            stored[move.writer] = stored.get(move.writer, NO_EVIDENCE) + move.evidence
        due = [overrides.pop(0)[0] for _ in [*overrides] if overrides[0][1] <= batch.time]
        time_ms = int(batch.time.timestamp() * 1000)
        goal = batch if start is None or start.is_linear_comparable(state) else replace(batch, linear=None)
        applied, state = _advance_to(goal, state, facts[at:], due, roles, time_ms, progress_bar)
        at += applied
        if (
            complete_until_ms is not None
            and time_ms >= complete_until_ms
            and not state.has_reached(goal)
            and not _is_beyond_history(state, history)
        ):
            return _Comparison(number, last, has_linear=goal is batch)
        divergence = _find_divergence(stream, state, goal, stored)
        if divergence is not None:
            record = facts[at - 1] if at and state.has_reached(goal) else None
            return _Comparison(number, last, replace(divergence, record=record))
        last = batch
    has_linear = start is None or start.is_linear_comparable(state)
    divergence = _compare_end(history, stream, state, facts[at:], [override for override, _ in overrides], roles)
    if divergence is not None and (divergence.writer is not None or (has_linear and complete_until_ms is None)):
        return _Comparison(len(batches), last, divergence)
    return _Comparison(len(batches), last, has_linear=has_linear)


def _is_beyond_history(state: Replayed, history: StreamBatches) -> bool:
    """Whether the replay has moved any writer beyond its newest position in the history."""
    return any(is_beyond(at, history.positions.get(writer, 0)) for writer, at in state.positions.items())


def _advance_to(
    batch: StoredBatch,
    state: Replayed,
    facts: Sequence[RecordedMessage],
    overrides: Sequence[RecordedMessage],
    roles: Mapping[str, Topic],
    time_ms: int,
    progress_bar: _StreamProgressBar,
) -> tuple[int, Replayed]:
    """Apply records until the replay reaches a batch: the fewest of `facts`, and then all `overrides`.

    If the replay does not reach the batch, all `facts` are applied. `time_ms`: the time of the batch, in milliseconds
    since 1970.

    Returns:
        The number of applied `facts`, and the replay after the `overrides`.
    """

    def try_records(base: Replayed, more: Sequence[RecordedMessage]) -> Replayed:
        return base.apply(more, roles, time_ms).apply(overrides, roles, time_ms)

    low, step = 0, 1  # `state` contains the first `low` records, which do not reach the batch
    attempt = try_records(state, [])
    if attempt.has_reached(batch):
        return 0, attempt
    while low < len(facts):
        chunk = facts[low : low + step]
        reached = try_records(state, chunk)
        if not reached.has_reached(batch):
            state, low, step = state.apply(chunk, roles, time_ms), low + len(chunk), min(2 * step, MAX_CHUNK_RECORDS)
            progress_bar.move_by(len(chunk))
            continue
        too_few, enough = 0, len(chunk)  # binary search: `too_few` records do not reach the batch, `enough` do
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            attempt = try_records(state, chunk[:middle])
            if attempt.has_reached(batch):
                enough, reached = middle, attempt
            else:
                too_few = middle
        progress_bar.move_by(enough)
        return low + enough, reached
    return low, try_records(state, [])


def _find_divergence(
    stream: str, state: Replayed, batch: StoredBatch, stored_evidence: Mapping[str, Evidence]
) -> Divergence | None:
    """Compare the replay with the positions and the evidence after a batch. Returns None if they are equal.

    `stored_evidence`: writer -> sum of the evidence in the history up to the batch.
    """
    for move in batch.advances:
        replayed = state.positions.get(move.writer, 0)
        counts = stored_evidence[move.writer], state.evidence_by_writer.get(move.writer, NO_EVIDENCE)
        if replayed != move.id or counts[0] != counts[1]:
            evidence = counts if replayed == move.id else None
            return Divergence(stream, None, move.writer, move.id, replayed, batch.batch, batch.time, evidence)
    if batch.linear is not None and state.linear != batch.linear:
        return Divergence(stream, None, None, batch.linear, state.linear, batch.batch, batch.time)
    return None


def _compare_end(
    history: StreamBatches,
    stream: str,
    state: Replayed,
    facts: Sequence[RecordedMessage],
    overrides: Sequence[RecordedMessage],
    roles: Mapping[str, Topic],
) -> Divergence | None:
    """Apply the remaining records, and compare the positions with the end of the history. Returns None if the positions
    are equal."""
    time_ms = max([message.time for message in (*facts, *overrides)], default=0)
    end = state.apply(facts, roles, time_ms).apply(overrides, roles, time_ms)
    moved = next((writer for writer in end.positions if end.positions[writer] != history.positions.get(writer)), None)
    if moved is None:
        if end.linear == history.linear:
            return None
        return Divergence(stream, None, None, history.linear, end.linear, None, None)
    for number in range(1, len(facts) + 1):
        if state.apply(facts[:number], roles, time_ms).positions.get(moved) != state.positions.get(moved):
            return Divergence(
                stream, facts[number - 1], moved, history.positions.get(moved), end.positions[moved], None, None
            )
    return Divergence(stream, None, moved, history.positions.get(moved), end.positions[moved], None, None)


def _applied_overrides(
    messages: Sequence[RecordedMessage], applied_overrides: Sequence[AppliedOverride]
) -> list[tuple[RecordedMessage, datetime]]:
    """The messages that are in `applied_overrides`, each with the time of its batch, in order of time."""
    unmatched, applied = [*applied_overrides], []
    for message in messages:
        try:
            record = records.read(message.value, message.key, Topic.CONTROL)
        except BadRecord:
            continue
        assert isinstance(record, records.OverridableRecord)
        for entry in unmatched:
            prev = record.prev if isinstance(record, records.Skip) else entry.prev
            fields = (records.kind_of(record).name, record.writer, prev, record.id, record.by, record.why)
            if (entry.kind, entry.writer, entry.prev, entry.id, entry.by, entry.why) == fields:
                unmatched.remove(entry)
                applied.append((message, entry.time))
                break
    return sorted(applied, key=lambda pair: pair[1])


MAX_SHOWN: Final = 10  # streams of a kind in the text; the JSON has all


def to_json(result: ReplayReport) -> str:
    parted = [
        field_values(divergence)
        | {"record": None if divergence.record is None else msgspec.Raw(to_line(divergence.record).encode())}
        for divergence in result.parted
    ]
    return json_text(field_values(result) | {"parted": parted})


def to_text(report: ReplayReport) -> str:
    lines = [line for divergence in report.parted[:MAX_SHOWN] for line in _divergence_lines(divergence)]
    if len(report.parted) > MAX_SHOWN:
        lines.append(f"{count(len(report.parted) - MAX_SHOWN, 'more stream')} differ from their history")
    unknown = [f"{stream}: not compared: {why}" for stream, why in report.unknown.items()]
    parts = [f"{stream}: equal in part: {_part_text(part)}" for stream, part in report.parts.items()]
    for shown, result in ((unknown, "not compared"), (parts, "equal in part")):
        lines += shown[:MAX_SHOWN]
        if len(shown) > MAX_SHOWN:
            lines.append(f"{count(len(shown) - MAX_SHOWN, 'more stream')} {result}")
    if report.absent:
        names = ", ".join(report.absent[:MAX_SHOWN]) + (", ..." if len(report.absent) > MAX_SHOWN else "")
        lines.append(f"without a record: {count(len(report.absent), 'stream')}: {names}")
    total = len(report.equal) + len(report.parted) + len(report.unknown)
    lines.append(
        f"{count(report.records, 'record')} reproduce the stored history of {len(report.equal)} of"
        f" {count(total, 'stream')} ({count(report.batches, 'batch')})"
    )
    return join_escaped(lines)


def _part_text(part: ComparedPart) -> str:
    clauses = []
    if part.after is not None:
        missing = f"the recording begins at offset {part.offset}" if part.offset else "older history was dropped"
        linear = "no linear positions" if part.line_from is None else f"linear positions only beyond {part.line_from}"
        clauses.append(f"after {batch_name(part.after)}, because {missing}; {linear}")
    if part.behind:
        upto = "no batch" if part.upto is None else batch_name(part.upto)
        clauses.append(f"up to {upto}, where the recording ends ({count(part.behind, 'later batch')})")
    return ", and ".join(clauses)


def _divergence_lines(divergence: Divergence) -> Iterator[str]:
    where = "after the last record" if divergence.record is None else "at the record below"
    when = (
        "at the end" if divergence.time is None else f"after batch {divergence.batch} of {timestamp(divergence.time)}"
    )
    subject = "the linear position" if divergence.writer is None else divergence.writer
    stored, replayed = str(divergence.history), str(divergence.replayed)
    if divergence.evidence is not None:
        stored_evidence, replayed_evidence = map(evidence_text, divergence.evidence)
        stored, replayed = f"{divergence.history} by {stored_evidence}", f"by {replayed_evidence}"
    yield (
        f"{divergence.stream}: differs {where}: {when} {subject} is {stored} in the history"
        f" and {replayed} in the replay"
    )
    if divergence.record is not None:
        yield f"    {record_text(divergence.record)}"


@click.command("replay", cls=Utf8Command)
@click.argument("source", metavar="[TOPIC or FILE]", required=False)
@click.option("--stream", help="Compare only this stream.")
@click.option(
    "--records",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    help="Maximum number of records to read from Kafka. With more records, the command fails.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.pass_context
def replay(context: click.Context, source: str | None, stream: str | None, records: int, *, as_json: bool) -> None:
    """Apply recorded records again, without Spark, and compare the positions with the history in Postgres.

    The records come from a FILE that `tidemark tail --all --json` wrote (-: standard input), or from Kafka: from TOPIC,
    by default the facts topic. Exit code 1 if the positions differ, 3 if a stream could not be compared, or if no
    stream was compared.
    """
    settings = load_settings()
    is_file = source is not None and (source == "-" or Path(source).is_file())
    if source is not None and not is_file and re.fullmatch(r"[\w.-]{1,249}", source, re.ASCII) is None:
        raise click.BadParameter(
            f"{source!r} is neither an existing file nor the name of a topic", param_hint="TOPIC or FILE"
        )
    facts = settings.kafka_facts_topic if source is None or is_file else source
    roles = {facts: Topic.FACTS, settings.kafka_control_topic: Topic.CONTROL}
    if len(roles) == 1:
        raise click.UsageError(
            f"{facts} is the control topic: give the facts topic; the control topic is always read too"
        )
    with BatchHistory.open(settings.postgres) as history:
        if stream is not None and stream not in (names := history.streams()):
            raise CommandFailed(unknown_stream_text(stream, names))
        read = read_file(source or "-") if is_file else read_topics(settings, facts, records)
        messages = {}
        for message in read:
            if message.topic not in roles:
                raise CommandFailed(
                    f"the file has a record of topic {message.topic}, which is neither TIDEMARK_KAFKA_FACTS_TOPIC nor"
                    " TIDEMARK_KAFKA_CONTROL_TOPIC: set them to the topics of the recording"
                )
            if stream is None or message.key == stream.encode():
                # A file may contain a record twice, from two recordings.
                messages[message.topic, message.partition, message.offset] = message
        bounds = Policies(history.policies(), settings.policy_defaults).bounds()
        result = compare_history(history, [messages[offset] for offset in sorted(messages)], roles, bounds, stream)
    if as_json:
        click.echo(to_json(result))
    else:
        echo(to_text(result))
    if result.parted or result.unknown or not result.equal:
        context.exit(1 if result.parted else 3)
