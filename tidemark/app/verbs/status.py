"""`tidemark status` and `tidemark top`: the positions of all streams, what blocks them, and the state of the pipeline.
Positions and blockers are read from Postgres."""

import itertools
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import click
import msgspec

from tidemark.app.commands import CHECK_FAILED, Amount, CommandFailed, Utf8Command, load_settings, unknown_stream_text
from tidemark.app.diagnosis import health, open_ranges
from tidemark.app.diagnosis.health import PipelineCondition
from tidemark.app.diagnosis.open_ranges import lag_answer, last_seen
from tidemark.app.output import count, duration, echo, id_range, join_escaped, json_text, table
from tidemark.app.verbs import gaps
from tidemark.common.errors import Unavailable
from tidemark.sinks.postgres.positions import RequeueStatus
from tidemark.sinks.postgres.status import BridgeStatus, ReadStatus, SinkFault
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.streaming.core import codec
from tidemark.streaming.core.effects import Blocker, LinearBlocker, LinearLag, Source, Summary, is_brief, summarize

HEADINGS = ("STREAM", "LINEAR", "WRITER", "EPOCH", "POSITION", "PENDING", "LAST RECORD", "OPEN IDS")
NUMBER_HEADINGS = {"LINEAR", "EPOCH", "POSITION", "PENDING"}


NO_STREAMS: Final = (
    "no streams yet: a stream appears within seconds after a writer sends its first record, if the pipeline runs"
)


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """The status of one writer. IDs are signed.

    Attributes:
        writer: the name of the writer.
        epoch: the current epoch.
        position: the position.
        retired: whether the writer has retired.
        pending: the number of pending edges.
        gaps: the gaps `(low, top]`, nearest to 0 first.
        last_seen: the time at which the pipeline read the writer's newest record; None if not known.
    """

    writer: str
    epoch: int
    position: int
    retired: bool
    pending: int
    gaps: list[tuple[int, int]]
    last_seen: datetime | None


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """The status of one stream. IDs are signed.

    Attributes:
        stream: the name of the stream.
        linear: the linear position.
        writers: the writers that have joined.
        summary: counts and blockers.
        faults: the sinks that cannot publish the stream.
        requeues: deferred records that are being requeued, or that are lost.
        bridge: the status of the bridge that sends the stream; None if `tidemark synapse` does not send the stream.
        home_partition: the Kafka partition of the stream; None if unknown.
        read_status: the partitions that the pipeline reads with lag; None if not known
            (`ConditionReader.reading_status`).
    """

    stream: str
    linear: int
    writers: list[WriterStatus]
    summary: Summary
    faults: list[SinkFault]
    requeues: list[RequeueStatus]
    bridge: BridgeStatus | None
    home_partition: int | None = None
    read_status: ReadStatus | None = None


def stream_statuses(
    encoded_states: Mapping[str, bytes],
    only_stream: str | None = None,
    faults: Sequence[SinkFault] = (),
    requeues: Sequence[RequeueStatus] = (),
    bridges: Mapping[str, BridgeStatus] = {},
    read_status: ReadStatus | None = None,
) -> list[StreamStatus]:
    """Compute the status of all streams, or of the stream `only_stream`, sorted by name. `encoded_states`: stream ->
    encoded state."""
    return [
        _stream_status(
            name,
            data,
            [fault for fault in faults if fault.stream == name],
            [requeue for requeue in requeues if requeue.stream == name],
            bridges.get(name),
            read_status,
        )
        for name, data in sorted(encoded_states.items())
        if only_stream is None or name == only_stream
    ]


def _stream_status(
    name: str,
    data: bytes,
    faults: list[SinkFault],
    requeues: list[RequeueStatus],
    bridge: BridgeStatus | None,
    read_status: ReadStatus | None,
) -> StreamStatus:
    stream = codec.decode(data)
    signed = stream.direction.signed
    writers = [
        WriterStatus(
            writer,
            known.epoch,
            signed(known.position),
            known.retired_at is not None,
            known.chain.pending_edges,
            [(signed(low), signed(top)) for low, top, _ in known.chain.gaps()],
            last_seen(known.last_seen),
        )
        for writer, known in sorted(stream.writers.items())
    ]
    linear, summary = signed(stream.linear.position), summarize(stream)
    return StreamStatus(name, linear, writers, summary, faults, requeues, bridge, stream.home_partition, read_status)


def read_stream_statuses(
    postgres: Postgres, encoded_states: Mapping[str, bytes], only_stream: str | None = None
) -> list[StreamStatus]:
    """Call `stream_statuses` with faults, requeues, bridges and reading status from `postgres`."""
    reader = postgres.conditions
    return stream_statuses(
        encoded_states, only_stream, reader.faults(), reader.requeues(), reader.bridges(), reader.reading_status()
    )


def to_json(streams: Sequence[StreamStatus], now: float, health: PipelineCondition) -> str:
    """The JSON of `tidemark status`. `now`: seconds since 1970, to compute ages."""
    return json_text(json_fields(streams, now, health))


def json_fields(streams: Sequence[StreamStatus], now: float, health: PipelineCondition) -> dict[str, Any]:
    return {"pipeline": health.to_json(), "streams": [_stream_fields(stream, now) for stream in streams]}


def _stream_fields(stream: StreamStatus, now: float) -> dict[str, Any]:
    oldest = stream.summary.oldest_blocker
    return {
        "stream": stream.stream,
        "linear": stream.linear,
        "writers": stream.writers,
        "pending": stream.summary.pending_count,
        "unknown_writers": stream.summary.unknown_writers,
        "oldest_gap": None
        if oldest is None
        else {
            "writer": oldest.writer,
            "epoch": oldest.epoch,
            "low": None if oldest.is_unknown else oldest.low,
            "top": None if oldest.is_unknown else oldest.top,
            "unknown": oldest.is_unknown,
            "age_seconds": round(max(0.0, now - oldest.since / 1000), 1),
        },
        "linear_lag": None if stream.summary.linear_lag is None else _lag_fields(stream.summary.linear_lag, now),
        "open_transactions": stream.summary.transactions,
        "deferred": stream.summary.deferred_writers,
        "requeued": [
            {"writer": requeue.writer, "since": requeue.since, "gone": requeue.gone, "problem": requeue.problem}
            for requeue in stream.requeues
        ],
        "bridge": stream.bridge,
        "sources": [
            {
                "writer": source.writer,
                "heartbeat_seconds": source.report.heartbeat or None,
                "last_seen": last_seen(source.last_seen),
                "blocked": source.report.blocked or None,
                "problem": _source_problem(stream, source, now) or None,
            }
            for source in stream.summary.sources
        ],
        "not_shown": [{"sink": fault.sink, "since": fault.since, "problem": fault.problem} for fault in stream.faults],
    }


def _lag_fields(lag: LinearLag, now: float) -> dict[str, Any]:
    """The fields of the linear lag in the sidecar's answers, and `age_seconds` of the lag and of each blocker."""
    answer: dict[str, Any] = msgspec.to_builtins(lag_answer(lag))
    starts_ms = [lag.since, *(blocker.since for blocker in lag.blockers)]
    for fields, start_ms in zip([answer, *answer["blockers"]], starts_ms, strict=True):
        fields["age_seconds"] = None if start_ms is None else round(max(0.0, now - start_ms / 1000), 1)
    return answer


def to_table(streams: Sequence[StreamStatus], now: float) -> str:
    """Text for people: a table with a line for each writer, then lines about blockers and problems of streams."""
    lines = table(HEADINGS, [row for stream in streams for row in _writer_rows(stream, now)], NUMBER_HEADINGS)
    for lines_of in (
        _bridge_lines,
        _source_lines,
        _lag_lines,
        _transaction_lines,
        _deferred_lines,
        _requeue_lines,
        _fault_lines,
    ):
        lines += [f"{stream.stream}: {line}" for stream in streams for line in lines_of(stream, now)]
    return join_escaped(lines)


def _writer_rows(stream: StreamStatus, now: float) -> Iterator[tuple[str, ...]]:
    """A row for each writer. Only the first row has the name, the linear position and the oldest open IDs of the
    stream."""
    head = [stream.stream, str(stream.linear)]
    oldest = "" if stream.summary.oldest_blocker is None else open_ids_text(stream.summary.oldest_blocker, now)
    for writer in stream.writers:
        epoch = f"{writer.epoch} retired" if writer.retired else str(writer.epoch)
        seen = "" if writer.last_seen is None else f"{duration(now - writer.last_seen.timestamp())} ago"
        yield (*head, writer.writer, epoch, str(writer.position), str(writer.pending), seen, oldest)
        head, oldest = ["", ""], ""
    for name in stream.summary.unknown_writers:
        writer_name, _, epoch = name.rpartition("/")
        yield (*head, writer_name, epoch, "not joined", "", "", oldest)
        head, oldest = ["", ""], ""


def open_ids_text(blocker: Blocker, now: float) -> str:
    """The oldest blocker of a stream as text: its open IDs, such as `359 (tidemark, 4 s)`, or the writer that has not
    joined."""
    age = duration(now - blocker.since / 1000)
    if blocker.is_unknown:
        return f"{blocker.writer} has not joined ({age})"
    return f"{id_range(blocker.low, blocker.top)} ({blocker.writer}, {age})"


def _bridge_lines(stream: StreamStatus, now: float) -> Iterator[str]:
    bridge = stream.bridge
    if bridge is None:
        return
    if bridge.is_connected is None:
        yield "sent by a bridge to Synapse; this replica cannot show whether the bridge runs: use the primary"
    elif bridge.is_connected:
        since = "" if bridge.since is None else f", connected for {duration(now - bridge.since.timestamp())}"
        yield f"sent by a bridge to Synapse{since}"
    else:
        seen = max((writer.last_seen.timestamp() for writer in stream.writers if writer.last_seen), default=None)
        last = "no record was ever read" if seen is None else f"last record {duration(now - seen)} ago"
        yield f"the bridge to Synapse is not connected; {last}"


def _source_problem(stream: StreamStatus, source: Source, now: float) -> str:
    return open_ranges.source_problem(
        source, stream.home_partition, now, stream.read_status, is_bridged=stream.bridge is not None
    )


def _source_lines(stream: StreamStatus, now: float) -> Iterator[str]:
    """A line for each relay or bridge that is silent or blocked, with the reason."""
    yield from (text for source in stream.summary.sources if (text := _source_problem(stream, source, now)))


def _lag_lines(stream: StreamStatus, now: float) -> Iterator[str]:
    """The linear lag and its blockers as lines. Empty without a lag, or if it is younger than `BRIEF_WAIT_SECONDS`."""
    lag = stream.summary.linear_lag
    if lag is None or is_brief(lag.since, now):
        return
    age = "" if lag.since is None else f" for {duration(now - lag.since / 1000)}"
    yield f"blocked{age}, lag {count(lag.id_count, 'ID')}"
    for cause in lag.blockers:
        yield blocker_text(cause, now)
    if (more := lag.blocker_count - len(lag.blockers)) > 0:
        yield f"and for {count(more, 'more writer')}"


def blocker_text(cause: LinearBlocker, now: float) -> str:
    """The writer that blocks a stream, and the reason, as text."""
    age = duration(now - cause.last_seen / 1000)
    seen = f"last record {age} ago" if cause.last_seen else "no record was ever read"
    match cause.reason:
        case "unknown":
            return f"waiting for {cause.writer} (epoch {cause.epoch}): it has not joined; {seen}"
        case "gap":
            return f"waiting for {cause.writer}: IDs beyond {cause.position} are open; {seen}"
        case "transaction":
            return f"waiting for {cause.writer}: a transaction is open beyond ID {cause.position}; {seen}"
    silence = f"no record for {age}" if cause.last_seen else seen
    return f"waiting for {cause.writer}: {silence} (last position {cause.position})"


def _transaction_lines(stream: StreamStatus, _: float) -> Iterator[str]:
    for writer, transactions in sorted(stream.summary.transactions.items()):
        for transaction in transactions:
            yield f"open transaction of {writer}: {transaction}"


def _deferred_lines(stream: StreamStatus, _: float) -> Iterator[str]:
    for name in stream.summary.deferred_writers:
        writer = name.rpartition("/")[0]
        yield (
            f"records of {writer} are deferred, because the writer has too many pending ranges; the pipeline requeues"
            " the records later"
        )


def _requeue_lines(stream: StreamStatus, now: float) -> Iterator[str]:
    for requeue in stream.requeues:
        if requeue.gone:
            why = requeue.problem or "retention, or the size limit of the topic"
            yield (
                f"up to {requeue.gone} deferred records of {requeue.writer} are lost from partition"
                f" {requeue.partition} ({why}); the open IDs of the writer wait for its next JOIN"
            )
        else:
            problem = f": {requeue.problem}" if requeue.problem else ""
            age = duration(now - requeue.since.timestamp())
            yield f"deferred records of {requeue.writer} are being requeued for {age}{problem}"


def _fault_lines(stream: StreamStatus, now: float) -> Iterator[str]:
    for fault in stream.faults:
        yield f"missing in {fault.sink} for {duration(now - fault.since.timestamp())}: {fault.problem}"


@click.command("status", cls=Utf8Command)
@click.argument("stream", required=False)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.option("--check", is_flag=True, help="End with exit code 3 if the pipeline has problems, but not for gaps.")
@click.pass_context
def status(context: click.Context, stream: str | None, *, as_json: bool, check: bool) -> None:
    """Show the positions of all streams, or of STREAM, their writers and blockers, and the state of the pipeline."""
    settings = load_settings()
    with Postgres(PostgresConfig(settings.postgres)) as postgres:
        postgres.check_readable()
        stored = postgres.states()
        if stream is not None and stream not in stored:
            raise CommandFailed(unknown_stream_text(stream, stored))
        statuses = read_stream_statuses(postgres, stored, stream)
        pipeline = health.read_configured_condition(settings, postgres)
    if as_json:
        click.echo(to_json(statuses, time.time(), pipeline))
    else:
        echo(to_table(statuses, time.time()) if statuses else NO_STREAMS)
        echo(
            "\n".join([*pipeline.lines(datetime.now(UTC)), *(f"problem: {problem}" for problem in pipeline.problems())])
        )
    if check and pipeline.problems():
        context.exit(CHECK_FAILED)


@click.command("top", cls=Utf8Command)
@click.argument("stream", required=False)
@click.option("--every", type=Amount(min=0.2), default=2.0, show_default=True, help="Seconds between two queries.")
@click.option("--times", type=click.IntRange(1), help="Stop after this many queries. Default: run until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="For programs: a JSON object in a line for each query.")
def top(stream: str | None, every: float, times: int | None, *, as_json: bool) -> None:
    """Show the output of `tidemark status` and `tidemark gaps` repeatedly. If Postgres does not answer, try again."""
    settings = load_settings()
    with Postgres(PostgresConfig(settings.postgres)) as postgres:
        postgres.check_readable()
        for query in itertools.count(1):
            try:
                stored = postgres.states(None if stream is None else [stream])
                pipeline = health.read_configured_condition(settings, postgres)
                now = time.time()
                statuses = read_stream_statuses(postgres, stored)
                open_now = open_ranges.read_open_ranges(postgres, stored, now, settings.policy_defaults)
            except Unavailable as problem:
                click.echo(str(problem), err=True)
            else:
                if stream is not None and not stored:
                    raise CommandFailed(unknown_stream_text(stream, postgres.streams()))
                if as_json:
                    click.echo(msgspec.json.encode({**json_fields(statuses, now, pipeline), "gaps": open_now}))
                else:
                    problems = [f"problem: {problem}" for problem in pipeline.problems()]
                    blocked = gaps.to_text(open_now, now) if open_now else gaps.NO_GAPS
                    text = [*pipeline.lines(datetime.now(UTC)), *problems, blocked]
                    _show([*text, "", to_table(statuses, now)])
            if query == times:
                break
            time.sleep(every)


def _show(parts: Sequence[str]) -> None:
    """Print the parts. On a terminal, the parts replace the last output, and are cut to the height of the terminal."""
    lines = "\n".join(parts).splitlines()
    if sys.stdout.isatty():
        click.echo(_clear_sequence(), nl=False)
        lines = fit_terminal(lines, *shutil.get_terminal_size())
    echo("\n".join(lines))


def _clear_sequence() -> str:
    """The escape sequence that clears this terminal; empty if the terminal has none."""
    import curses  # noqa: PLC0415 - only `tidemark top` on a terminal needs it

    try:
        curses.setupterm()
    except curses.error:  # terminfo has no entry for the terminal: use the sequence of most terminals
        return "\033[2J\033[1;1H"
    return (curses.tigetstr("clear") or b"").decode()


def fit_terminal(lines: Sequence[str], columns: int, rows: int) -> list[str]:
    """The first lines that fit on a terminal of this size, with one row left. The terminal wraps long lines."""
    rows_used = itertools.accumulate(max(1, math.ceil(len(line) / max(1, columns))) for line in lines)
    return [line for line, used in zip(lines, rows_used, strict=True) if used < rows]
