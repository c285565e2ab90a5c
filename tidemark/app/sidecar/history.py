"""The operations behind an open stream on the live page: its lag and gaps over the past hour, and its readers."""

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from tidemark.app.diagnosis.open_ranges import Name, StreamId
from tidemark.app.diagnosis.reader_lag import ReaderState, ReaderStatus
from tidemark.app.sidecar.openapi import Operation, OperationCall, json
from tidemark.app.sidecar.operations import existing
from tidemark.app.sidecar.problems import RecoveringProblem, SlowAnswer, Unauthorized, UnknownStream
from tidemark.common.errors import Slow, Stop, Unavailable
from tidemark.sinks.postgres.lag_history import StreamHistoryChart

Count = Annotated[int, Meta(ge=0)]


class PastGapAnswer(msgspec.Struct, frozen=True):
    """The IDs in `(low, top]` were open from `opened` to `closed`; null: they are open now."""

    low: StreamId
    top: StreamId
    opened: datetime
    closed: datetime | None
    closed_by: Annotated[str | None, Meta(description="`completed`, `joined`, `retired` or `skipped`.")]


class PastWriterAnswer(msgspec.Struct, frozen=True):
    writer: Name
    moved: Annotated[list[int], Meta(description="The IDs by which its position moved, in each step.")]
    gaps: Annotated[list[PastGapAnswer], Meta(description="The longest ones, oldest first.")]


class HistoryAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The past hour in steps, oldest first."""

    stream: Name
    since: datetime
    step_seconds: float
    lag_seconds: Annotated[
        list[float],
        Meta(description="The largest lag in each step: how long the oldest ID that had to be waited for was known."),
    ]
    writers: list[PastWriterAnswer]


class ReaderAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A reader of the stream: `tidemark readers show` says the same."""

    reader: str
    mode: str
    state: ReaderState
    token: Annotated[str | None, Meta(description="What it has read; null: it has not begun.")]
    linear: StreamId | None
    lag_ids: Count | None
    lag_seconds: Annotated[float | None, Meta(description="Since when the stream is beyond its place.")]
    last_commit: datetime | None
    copies: Annotated[int | None, Meta(description="Processes that run it; null: they cannot be counted.")]
    parked: Count
    late: Annotated[int | None, Meta(description="Late completions that it does not have yet.")]


class ReadersAnswer(msgspec.Struct, frozen=True):
    stream: Name
    readers: list[ReaderAnswer]


def history_answer(stream: str, chart: StreamHistoryChart) -> HistoryAnswer:
    gaps: dict[str, list[PastGapAnswer]] = {}
    for gap in chart.gaps:
        gaps.setdefault(gap.writer, []).append(PastGapAnswer(gap.low, gap.top, gap.opened, gap.closed, gap.closed_by))
    idle = [0] * len(chart.lag)
    return HistoryAnswer(
        stream=stream,
        since=chart.since,
        step_seconds=chart.step.total_seconds(),
        lag_seconds=chart.lag,
        writers=[
            PastWriterAnswer(writer, chart.moved.get(writer, idle), gaps.get(writer, []))
            for writer in sorted({*chart.moved, *gaps})
        ],
    )


def reader_answer(status: ReaderStatus) -> ReaderAnswer:
    return ReaderAnswer(**{name: getattr(status, name) for name in ReaderAnswer.__struct_fields__})


async def history(call: OperationCall) -> Response:
    await _require(call)
    try:
        return json(history_answer(call.stream, await call.service.read_side.stream_history.chart(call.stream)))
    except Slow as problem:
        raise SlowAnswer(str(problem)) from None
    except (Unavailable, Stop) as problem:
        raise RecoveringProblem(str(problem)) from None


async def readers(call: OperationCall) -> Response:
    await _require(call)
    try:
        statuses = await call.service.read_side.stream_history.readers()
    except Slow as problem:
        raise SlowAnswer(str(problem)) from None
    except (Unavailable, Stop) as problem:
        raise RecoveringProblem(str(problem)) from None
    return json(
        ReadersAnswer(call.stream, [reader_answer(status) for status in statuses if status.stream == call.stream])
    )


async def _require(call: OperationCall) -> None:
    (snapshot,) = await call.service.read_side.snapshots.get([call.stream])
    existing(snapshot)


OPERATIONS = [
    Operation(
        "/v1/streams/{stream}/history",
        "history",
        "The lag of a stream and the gaps of its writers over the past hour.",
        history,
        HistoryAnswer,
        problems=(Unauthorized, UnknownStream, RecoveringProblem, SlowAnswer),
    ),
    Operation(
        "/v1/streams/{stream}/readers",
        "readers",
        "The readers of a stream whose places are in the database of TIDEMARK_READERS_DSN.",
        readers,
        ReadersAnswer,
        problems=(Unauthorized, UnknownStream, RecoveringProblem, SlowAnswer),
    ),
]
