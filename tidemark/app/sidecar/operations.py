"""The operations that answer with one response: positions of streams, their moves, gaps and history, and the state of
processes.

`wait` is a long poll: it answers when a stream has reached a token, or after a time-out.
"""

import asyncio
import time
from bisect import bisect_right
from datetime import datetime
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from tidemark.app.diagnosis.open_ranges import Name, StreamId
from tidemark.app.diagnosis.reader_lag import ReaderState, ReaderStatus
from tidemark.app.logs import shorten
from tidemark.app.read_side.fallback import HistoryPage, HistoryPager
from tidemark.app.read_side.redis_reader import wait_for_notification
from tidemark.app.read_side.snapshots import Snapshot
from tidemark.app.sidecar.answers import (
    AdvancesAnswer,
    BadRequest,
    Busy,
    GapsAnswer,
    HealthAnswer,
    NotYet,
    RecoveringProblem,
    SlowProblem,
    StoppingProblem,
    StreamAnswer,
    StreamsAnswer,
    Unauthorized,
    UnknownStream,
    UnreachableToken,
    etag,
    gaps_answer,
    move_answer,
    stream_answer,
)
from tidemark.app.sidecar.event_stream import decode_since, decode_token, encode_places
from tidemark.app.sidecar.openapi import Operation, OperationCall, etag_response, json_response
from tidemark.app.sidecar.service import OpenRequest
from tidemark.app.sidecar.watch import PipelineAnswer
from tidemark.common.errors import BadToken, NotReached, Slow, Stop, Unavailable
from tidemark.sinks.postgres.history import StreamHistoryChart
from tidemark.sinks.reader import (
    GRACE_SECONDS,
    TOKEN_PATTERN,
    AwaitEntry,
    CheckStreamName,
    Driver,
    PositionSnapshot,
    ReadKeys,
    Request,
    StreamKeys,
    Token,
    WaitConfig,
    wait_for_token,
)
from tidemark.streaming.values.direction import is_beyond

PLAIN_TEXT = "text/plain"
Limit = Annotated[int, Meta(ge=1, le=10_000, description="The largest number of entries in the answer.")]
LAST_ID_AFTER_SECONDS = 1.0
"""After how many seconds of a wait the database of the readers is asked whether it has given out the token's ID."""
LAST_ID_TIMEOUT_SECONDS = 2.0
SERVER_COUNT = 2  # Redis and Postgres; one of them is enough to answer


class StreamsQuery(msgspec.Struct, frozen=True):
    after: Annotated[str, Meta(description="The `next` of the previous page.")] = ""
    limit: Limit = 1000


async def all_streams(call: OperationCall) -> Response:
    snapshots, query = call.service.read_side.snapshots, call.query
    names = sorted(await snapshots.names())
    if not names and (problems := await call.service.read_side.problems()):
        raise RecoveringProblem("; ".join(problems))
    now = time.monotonic()
    first = bisect_right(names, query.after)
    page, rest = names[first : first + query.limit], names[first + query.limit :]
    streams = [stream_answer(snapshot, now) for snapshot in await snapshots.get(page)]
    body = StreamsAnswer(streams, page[-1] if rest else None)
    return etag_response(call.request, body, etag(body))


async def one_stream(call: OperationCall) -> Response:
    (snapshot,) = await call.service.read_side.snapshots.get([call.stream])
    body = stream_answer(require_existing(snapshot), time.monotonic())
    return etag_response(call.request, body, etag(body))


def require_existing(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot if its stream exists.

    Raises:
        UnknownStream: the stream does not exist.
        RecoveringProblem: it is not known whether the stream exists (`Snapshot.exists`).
    """
    if snapshot.exists is False:
        raise UnknownStream(snapshot.stream)
    if snapshot.exists is None:
        raise RecoveringProblem(
            f"it is not known whether stream {snapshot.stream!r} exists: Redis has not returned its positions, and"
            " Postgres cannot be read now; try again"
        )
    return snapshot


async def pipeline(call: OperationCall) -> Response:
    return json_response(await call.service.watch.read_pipeline())


async def livez(_: OperationCall) -> Response:
    return Response("alive\n", media_type=PLAIN_TEXT)


async def readyz(call: OperationCall) -> Response:
    read_side = call.service.read_side
    problems = await read_side.problems()
    # Positions never become wrong, so the positions in memory can be answered.
    ready = len(problems) < SERVER_COUNT or read_side.snapshots.has_positions
    return json_response(HealthAnswer(ready=ready, problems=problems), 200 if ready else 503)


async def scrape(call: OperationCall) -> Response:
    return Response(await call.service.metrics_text.get(), headers={"Content-Type": CONTENT_TYPE_LATEST})


class GapsQuery(msgspec.Struct, frozen=True):
    limit: Limit = 1000


class AdvancesQuery(msgspec.Struct, frozen=True):
    since: Annotated[
        str,
        Meta(
            description="A token, or the `next` of the previous page.",
            extra_json_schema={"pattern": f"^({TOKEN_PATTERN}|p[A-Za-z0-9_-]+)$"},
        ),
    ] = "m0"
    limit: Limit = 1000


async def gaps(call: OperationCall) -> Response:
    (snapshot,) = await call.service.read_side.snapshots.get([call.stream])
    details, read_at = require_existing(snapshot).details, snapshot.details_read_at
    if details is None or read_at is None:
        raise RecoveringProblem(
            f"the gaps of {call.stream} have not been read yet: Postgres does not answer or is slow, or the pipeline"
            " has a later version than this sidecar; try again"
        )
    query: GapsQuery = call.query
    return json_response(gaps_answer(call.stream, details, query.limit, time.monotonic() - read_at))


async def advances(call: OperationCall) -> Response:
    query: AdvancesQuery = call.query
    since = await call.service.large_request_throttle.parse(
        call.address, query.since, partial(decode_since, call.stream)
    )
    try:
        if isinstance(since, Token) and (known := await call.service.read_side.snapshots.positions(call.stream)):
            since.compare(Token.of(known.linear, known.vector))  # raises BadToken if the directions differ
        page = await HistoryPager(call.service.read_side.request_handler, call.stream, since, query.limit).next_page()
    except Slow as problem:
        raise SlowProblem(str(problem)) from None
    except (Unavailable, Stop) as problem:
        raise RecoveringProblem(str(problem)) from None
    except BadToken as problem:
        raise BadRequest(str(problem)) from None
    if page is None:
        raise UnknownStream(call.stream)
    # On a thread, because encoding ten thousand moves would block the event loop.
    return await asyncio.to_thread(_advances_response, call.stream, page)


def _advances_response(stream: str, page: HistoryPage) -> Response:
    return json_response(
        AdvancesAnswer(
            stream=stream,
            moves=[move_answer(stream, event) for event in page.events],
            next=encode_places({stream: page.place}),
            complete=page.is_last,
        )
    )


class WaitQuery(msgspec.Struct, frozen=True):
    token: Annotated[
        str,
        Meta(
            description="The token that the stream must reach, such as m7 or m7~web.9.",
            extra_json_schema={"pattern": f"^{TOKEN_PATTERN}$"},
        ),
    ]
    timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="The longest wait in seconds. The sidecar reduces values above its limit, which is 60 by"
            " default.",
        ),
    ] = 30.0


async def wait(call: OperationCall) -> Response:
    query: WaitQuery = call.query
    token = await call.service.large_request_throttle.parse(call.address, query.token, decode_token)
    began = time.monotonic()
    timeout = min(query.timeout, call.service.limits.wait_seconds)
    program = wait_for_token(call.stream, token, WaitConfig(timeout, GRACE_SECONDS))
    with call.service.open_request_slots.take_slot("wait", call.address) as request:
        try:
            await _run_wait(call, Driver[PositionSnapshot](program), request, token)
        except NotReached as problem:
            seconds, answer = time.monotonic() - began, await _read_stream_answer(call)
            detail = (
                f"{call.stream} did not reach {shorten(query.token)} in {seconds:.1f} s:"
                f" {problem.progress}{_blocker_text(answer)}"
            )
            raise NotYet(detail, answer) from None
        except BadToken as problem:
            raise BadRequest(str(problem)) from None
        return json_response(await _read_stream_answer(call))


async def _run_wait(
    call: OperationCall, driver: Driver[PositionSnapshot], open_request: OpenRequest, token: Token
) -> None:
    """Wait until the stream has reached `token`, with the program of `driver`. Reads positions after each notification
    and once a second.

    Raises:
        NotReached: the time-out of `driver` has passed.
        BadToken: the IDs of the token and of the stream have different signs.
        Problem: the stream does not exist or can never reach the token, no server answers, the client has disconnected,
            its slot went to another client, or the process stops.
    """
    read_side = call.service.read_side
    check_at: float | None = time.monotonic() + LAST_ID_AFTER_SECONDS
    notification = read_side.notifications.next_event(call.stream)
    while isinstance(step := driver.step(), Request):
        match step:
            case ReadKeys():
                notification = read_side.notifications.next_event(call.stream)
                known = await read_side.snapshots.positions(call.stream)
                if known is None:
                    await _read_stream_answer(call)  # raises if no server has the stream
                    driver.send_answer(StreamKeys(None, {}))
                else:
                    driver.send_answer(StreamKeys(known.linear, known.vector, known.last_late_number, known.allocated))
            case CheckStreamName():
                driver.send_answer(answer=True)
            case AwaitEntry(seconds=seconds):
                if call.service.stopping.is_set():
                    raise StoppingProblem
                if open_request.is_evicted:
                    raise Busy(
                        "this sidecar has reached its limit of open requests, and gave the slot of this request to a"
                        " client of another address; ask another sidecar, or try again"
                    )
                await wait_for_notification(notification, seconds)
                if await call.request.is_disconnected():
                    raise NotYet("the client disconnected")
                if check_at is not None and time.monotonic() >= check_at:
                    check_at = None
                    await _check_reachable(call, token)
                driver.send_answer(None)


async def _check_reachable(call: OperationCall, token: Token) -> None:
    """Raise `UnreachableToken` if the database of the readers proves that it has not given out the token's ID.

    The last ID is read after the request arrived, because an older one proves nothing. Does not raise in two cases:

    - The last ID is not read within `LAST_ID_TIMEOUT_SECONDS`.
    - Tidemark has read a record with an ID beyond the last ID. Then the database is not the writers' database, or not
      its primary.
    """
    read_side = call.service.read_side
    known = await read_side.snapshots.positions(call.stream)
    if known is None or known.allocated is None or not is_beyond(token.farthest(), known.allocated):
        return
    try:
        async with asyncio.timeout(LAST_ID_TIMEOUT_SECONDS):
            last_id = await read_side.stream_history.last_id(call.stream)
    except (Unavailable, Stop, TimeoutError):
        return
    if last_id is None or is_beyond(known.allocated, last_id) or not is_beyond(token.farthest(), last_id):
        return
    answer = await _read_stream_answer(call)
    raise UnreachableToken(
        f"{call.stream} is at {answer.token}, and its database has given out no ID beyond {last_id}: the token"
        f" {shorten(str(token))} belongs to another stream or database, or its transaction was lost in a failover or"
        " a restore",
        answer,
    )


def _blocker_text(answer: StreamAnswer) -> str:
    """The writers that block the linear position, as text for people; empty if there are none."""
    if answer.linear_lag is None or not answer.linear_lag.blockers:
        return ""
    return "; its linear position is blocked by " + ", ".join(
        f"{blocker.writer} ({blocker.reason})" for blocker in answer.linear_lag.blockers
    )


async def _read_stream_answer(call: OperationCall) -> StreamAnswer:
    """Read the positions of the stream. Raises `UnknownStream` and `RecoveringProblem`."""
    (snapshot,) = await call.service.read_side.snapshots.get([call.stream])
    return stream_answer(require_existing(snapshot), time.monotonic())


OPERATIONS = [
    Operation(
        "/v1/streams",
        "streams",
        "The positions of all streams.",
        all_streams,
        StreamsAnswer,
        query=StreamsQuery,
        problems=(BadRequest, Unauthorized, RecoveringProblem),
        headers=("If-None-Match",),
    ),
    Operation(
        "/v1/streams/{stream}",
        "stream",
        "The positions of one stream.",
        one_stream,
        StreamAnswer,
        problems=(Unauthorized, UnknownStream, RecoveringProblem),
        headers=("If-None-Match",),
    ),
    Operation(
        "/v1/streams/{stream}/gaps",
        "gaps",
        "The open ranges above the positions of a stream's writers, and what blocks its linear position.",
        gaps,
        GapsAnswer,
        query=GapsQuery,
        problems=(BadRequest, Unauthorized, UnknownStream, RecoveringProblem),
    ),
    Operation(
        "/v1/streams/{stream}/advances",
        "advances",
        "The moves of a stream, in pages. The moves of each writer have no gap between them.",
        advances,
        AdvancesAnswer,
        query=AdvancesQuery,
        problems=(BadRequest, Unauthorized, UnknownStream, RecoveringProblem, SlowProblem),
    ),
    Operation(
        "/v1/streams/{stream}/wait",
        "wait",
        "Answers when the stream has reached a token.",
        wait,
        StreamAnswer,
        query=WaitQuery,
        problems=(BadRequest, Unauthorized, UnknownStream, UnreachableToken, NotYet, Busy, RecoveringProblem),
    ),
    Operation(
        "/v1/pipeline",
        "pipeline",
        "The state of the pipeline: its owner, its last batch and its rejected records.",
        pipeline,
        PipelineAnswer,
        problems=(Unauthorized,),
    ),
    Operation("/livez", "livez", "Whether this process runs.", livez, str, media_type=PLAIN_TEXT),
    Operation(
        "/readyz",
        "readyz",
        "Whether this process can answer. 503: neither Redis nor Postgres can be read, and no positions were read"
        " before.",
        readyz,
        HealthAnswer,
        other_answers={503: HealthAnswer},
    ),
    Operation(
        "/metrics",
        "metrics",
        "The metrics of this process, for Prometheus.",
        scrape,
        str,
        media_type=PLAIN_TEXT,
        problems=(Unauthorized,),
    ),
]


Count = Annotated[int, Meta(ge=0)]


class PastGapAnswer(msgspec.Struct, frozen=True):
    """The IDs in `(low, top]` were open from `opened` to `closed`. If `closed` is null, they are open now."""

    low: StreamId
    top: StreamId
    opened: datetime
    closed: datetime | None
    closed_by: Annotated[
        str | None, Meta(description="`completed`, `joined`, `retired` or `skipped`; null if the IDs are open now.")
    ]


class PastWriterAnswer(msgspec.Struct, frozen=True):
    writer: Name
    moved: Annotated[list[int], Meta(description="By how many IDs the position of the writer moved, in each step.")]
    gaps: Annotated[list[PastGapAnswer], Meta(description="The longest gaps, oldest first.")]


class HistoryAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The past hour of a stream in steps of `step_seconds`, oldest first."""

    stream: Name
    since: datetime
    step_seconds: float
    lag_seconds: Annotated[
        list[float],
        Meta(description="The largest lag in each step: the age of the oldest known ID beyond the linear position."),
    ]
    writers: list[PastWriterAnswer]


class ReaderAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A reader of the stream, as `tidemark readers show` prints it."""

    reader: str
    mode: str
    state: ReaderState
    token: Annotated[
        str | None, Meta(description="The token up to which the reader has read; null if it has read nothing.")
    ]
    linear: StreamId | None
    lag_ids: Count | None
    lag_seconds: Annotated[
        float | None,
        Meta(
            description="For how many seconds the stream has been beyond the place of the reader; 0 if the reader has"
            " read everything; null if not known."
        ),
    ]
    last_commit: datetime | None
    copies: Annotated[int | None, Meta(description="Processes that run the reader; null if they cannot be counted.")]
    parked: Count
    late: Annotated[int | None, Meta(description="Late completions that the reader has not read yet.")]


class ReadersAnswer(msgspec.Struct, frozen=True):
    stream: Name
    readers: list[ReaderAnswer]


def history_answer(stream: str, chart: StreamHistoryChart) -> HistoryAnswer:
    gaps: dict[str, list[PastGapAnswer]] = {}
    for gap in chart.gaps:
        gaps.setdefault(gap.writer, []).append(PastGapAnswer(gap.low, gap.top, gap.opened, gap.closed, gap.closed_by))
    idle = [0] * len(chart.lag_seconds)
    return HistoryAnswer(
        stream=stream,
        since=chart.since,
        step_seconds=chart.step.total_seconds(),
        lag_seconds=chart.lag_seconds,
        writers=[
            PastWriterAnswer(writer, chart.moved_ids_by_writer.get(writer, idle), gaps.get(writer, []))
            for writer in sorted({*chart.moved_ids_by_writer, *gaps})
        ],
    )


def reader_answer(status: ReaderStatus) -> ReaderAnswer:
    return ReaderAnswer(**{name: getattr(status, name) for name in ReaderAnswer.__struct_fields__})


async def history(call: OperationCall) -> Response:
    await _require_stream(call)
    try:
        return json_response(
            history_answer(call.stream, await call.service.read_side.stream_history.chart(call.stream))
        )
    except Slow as problem:
        raise SlowProblem(str(problem)) from None
    except (Unavailable, Stop) as problem:
        raise RecoveringProblem(str(problem)) from None


async def readers(call: OperationCall) -> Response:
    await _require_stream(call)
    try:
        statuses = await call.service.read_side.stream_history.readers()
    except Slow as problem:
        raise SlowProblem(str(problem)) from None
    except (Unavailable, Stop) as problem:
        raise RecoveringProblem(str(problem)) from None
    return json_response(
        ReadersAnswer(call.stream, [reader_answer(status) for status in statuses if status.stream == call.stream])
    )


async def _require_stream(call: OperationCall) -> None:
    """Read the stream's snapshot. Raises the errors of `require_existing`."""
    (snapshot,) = await call.service.read_side.snapshots.get([call.stream])
    require_existing(snapshot)


OPERATIONS += [
    Operation(
        "/v1/streams/{stream}/history",
        "history",
        "The lag of a stream and the gaps of its writers over the past hour.",
        history,
        HistoryAnswer,
        problems=(Unauthorized, UnknownStream, RecoveringProblem, SlowProblem),
    ),
    Operation(
        "/v1/streams/{stream}/readers",
        "readers",
        "The readers of a stream whose places are in the database of TIDEMARK_READERS_DSN, or without this setting, in"
        " Tidemark's database.",
        readers,
        ReadersAnswer,
        problems=(Unauthorized, UnknownStream, RecoveringProblem, SlowProblem),
    ),
]
