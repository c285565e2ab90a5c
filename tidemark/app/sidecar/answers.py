"""The answers of the sidecar: their types, from which `/openapi.json` is generated, and functions that build them
from snapshots and errors. Pure.

IDs are signed 64-bit integers. A client that reads JSON numbers as floating point loses IDs beyond 2^53. Docstrings
and field descriptions are the public documentation. The public name of a type has no suffix `Answer`.

An error is answered as application/problem+json (RFC 9457):

Problem                     `type` is a stable name, sent as a URN; `detail` is for people
├── BadRequest              400 a parameter is invalid
├── WrongHost               421 the header `Host` has none of the names of this sidecar
├── Unauthorized            401 no valid bearer token
├── UnknownStream           404 no server has the stream
├── UnreachableToken        409 the stream can never reach the token
├── NotYet                  412 the stream did not reach the token before the time-out
├── Busy                    429 this process has no slot for the request
├── RecoveringProblem       503 the servers cannot answer this request now
├── StoppingProblem         503 this process is stopping
└── SlowProblem             504 Postgres took too long for this query
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from hashlib import blake2b
from http import HTTPStatus
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tidemark.app.diagnosis.open_ranges import LinearLagAnswer, Name, StreamId, lag_answer, moment
from tidemark.app.read_side.postgres_reader import Details
from tidemark.app.read_side.snapshots import Snapshot
from tidemark.sinks.reader import Advance, Event, Late, LinearMove, MissingLateCompletions, Reread, Token
from tidemark.streaming.core.effects import Blocker

Seconds = Annotated[float, Meta(ge=0)]
State = Annotated[
    Literal["known", "recovering"],
    Meta(description="`recovering`: the stream exists, but its positions are not known yet, so they are not sent."),
]
Source = Annotated[
    Literal["redis", "postgres", "memory"],
    Meta(
        description="Where the positions were read. `memory`: an earlier read of this process, because neither Redis"
        " nor Postgres has returned the positions now."
    ),
]


class BlockerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`writer` has not completed the IDs in `(low, top]`. If `low` and `top` are null, the writer never joined, and
    blocks the linear position."""

    writer: Name
    epoch: Annotated[int, Meta(ge=0)]
    low: StreamId | None
    top: StreamId | None
    since: Annotated[
        datetime,
        Meta(description="When the pipeline first saw the gap, or a record of the writer that never joined."),
    ]


class StreamAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The positions of a stream. `epochs`, `retired`, `pending`, `blockers`, `linear_lag`, `last_seen` and
    `open_transactions` come from Postgres alone: null until Postgres answers for the first time."""

    stream: Name
    state: State
    linear: Annotated[
        StreamId | None, Meta(description="The linear position: every ID of every writer up to this ID is complete.")
    ]
    vector: Annotated[
        dict[str, StreamId], Meta(description="Writer to position: every ID of the writer up to there is complete.")
    ]
    token: Annotated[str | None, Meta(description="The linear position and the vector as one text: m7~web.9.")]
    epochs: dict[str, int] | None
    retired: list[str] | None
    pending: Annotated[int | None, Meta(description="The number of completed IDs above a gap of their writer.")]
    blockers: Annotated[
        list[BlockerAnswer] | None,
        Meta(
            description="What blocks a position now: the nearest gap of each writer, and the writers that never"
            " joined. Oldest first."
        ),
    ]
    linear_lag: Annotated[
        LinearLagAnswer | None,
        Meta(
            description="What blocks the linear position. Null if the linear position has reached the highest allocated"
            " ID and every writer has joined. Also null until Postgres answers for the first time."
        ),
    ]
    last_seen: Annotated[
        dict[str, datetime] | None,
        Meta(
            description="When the pipeline read the newest record of each writer. Writers without this time are left"
            " out."
        ),
    ]
    open_transactions: Annotated[
        dict[str, list[str]] | None,
        Meta(description="By writer, the reported transactions with open IDs, for people."),
    ]
    source: Source | None
    age_seconds: Annotated[
        Seconds | None,
        Meta(description="Seconds since the positions were read from a server; null if they are not known."),
    ]
    details_age_seconds: Annotated[
        Seconds | None, Meta(description="Seconds since the fields that come from Postgres alone were read.")
    ]


class StreamsAnswer(msgspec.Struct, frozen=True):
    """A page of streams, sorted by name. Pass `next` as `after` for the next page; null: this page is the last one."""

    streams: list[StreamAnswer]
    next: Name | None


class HealthAnswer(msgspec.Struct, frozen=True):
    """`problems` are texts for people. A sidecar may be ready and have problems: for example, Redis is down, and
    Postgres answers."""

    ready: bool
    problems: list[str]


class ProblemAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error (RFC 9457)."""

    type: Annotated[str, Meta(description="What went wrong, for programs.")]
    title: str
    status: Annotated[int, Meta(ge=400, le=599)]
    detail: Annotated[str, Meta(description="What went wrong and what to do, for people.")]
    stream: Annotated[
        StreamAnswer | None,
        Meta(description="The positions of the stream, if a token was not reached. Otherwise, the field is left out."),
    ] = None


def stream_answer(snapshot: Snapshot, now: float) -> StreamAnswer:
    """Convert a snapshot. `now`: the current time of the monotonic clock, in seconds, for the ages in the answer."""
    known, details, read_at = snapshot.positions, snapshot.details, snapshot.details_read_at
    return StreamAnswer(
        stream=snapshot.stream,
        state="recovering" if known is None else "known",
        linear=None if known is None else known.linear,
        vector={} if known is None else dict(sorted(known.vector.items())),
        token=None if known is None else str(Token.of(known.linear, known.vector)),
        epochs=None if details is None else dict(sorted(details.epochs.items())),
        retired=None if details is None else sorted(details.retired_writers),
        pending=None if details is None else details.pending_count,
        blockers=None if details is None else [blocker_answer(gap) for gap in nearest_blockers(details)],
        linear_lag=None if details is None else lag_answer(details.linear_lag),
        last_seen=None if details is None else {name: moment(seen) for name, seen in sorted(details.last_seen.items())},
        open_transactions=None if details is None else dict(sorted(details.transactions.items())),
        source=None if known is None else known.source,
        age_seconds=None if known is None else _age_seconds(now, known.read_at),
        details_age_seconds=None if read_at is None else _age_seconds(now, read_at),
    )


def nearest_blockers(details: Details) -> Iterable[Blocker]:
    """The nearest gap of each writer, and the writers that never joined, oldest first. Each of these blocks a position
    now."""
    nearest: dict[tuple[str, int, bool], Blocker] = {}
    for gap in details.gaps:
        key = gap.writer, gap.epoch, gap.is_unknown
        if key not in nearest or abs(gap.low) < abs(nearest[key].low):
            nearest[key] = gap
    return sorted(nearest.values(), key=lambda gap: (gap.since, gap.writer))


def blocker_answer(gap: Blocker) -> BlockerAnswer:
    return BlockerAnswer(
        writer=gap.writer,
        epoch=gap.epoch,
        low=None if gap.is_unknown else gap.low,
        top=None if gap.is_unknown else gap.top,
        since=moment(gap.since),
    )


def etag(body: StreamAnswer | StreamsAnswer) -> str:
    """A weak ETag: equal for answers that differ only in the ages of their streams."""
    streams, following = (body.streams, body.next) if isinstance(body, StreamsAnswer) else ([body], None)
    content = msgspec.json.encode([*(_without_ages(stream) for stream in streams), following])
    return f'W/"{blake2b(content, digest_size=12).hexdigest()}"'


def _without_ages(stream: StreamAnswer) -> StreamAnswer:
    return msgspec.structs.replace(stream, age_seconds=None, details_age_seconds=None)


def _age_seconds(now: float, read_at: float) -> float:
    return round(max(0.0, now - read_at), 3)


Count = Annotated[int, Meta(ge=0)]


class AdvanceAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="advance"):
    """The position of `writer` moved over `(prev, id]`. The counts are for `(evidence_prev, id]`, the whole stored
    advance. If the client began inside the stored advance, the counts are upper bounds for `(prev, id]`."""

    stream: Name
    writer: Name
    epoch: Count
    prev: StreamId
    id: StreamId
    evidence_prev: StreamId
    facts: Annotated[int, Meta(ge=0, description="IDs with a fact.")]
    empty: Annotated[int, Meta(ge=0, description="IDs that their writer declared void, announced, or joined past.")]
    unseen: Annotated[
        int, Meta(ge=0, description="IDs settled by a join: they may have facts that were never announced.")
    ]
    skipped: Annotated[int, Meta(ge=0, description="IDs that an operator skipped.")]
    linear: Annotated[StreamId, Meta(description="The linear position of the stream after the batch.")]
    batch: Count
    time: Annotated[datetime, Meta(description="The time of the batch.")]


class RereadAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="reread"):
    """The IDs of `writer` in `(prev, id]` are complete, but their evidence is no longer available: read the table. If
    `writer` is null, the IDs of every writer except the writers in `besides` are complete."""

    stream: Name
    writer: Name | None
    prev: StreamId
    id: StreamId
    besides: list[Name]


class LateAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="late"):
    """IDs of `writer` in `(prev, id]` that completed after the range had been settled without them: read the range
    again. `facts`: how many of these IDs have a fact."""

    stream: Name
    number: Count
    writer: Name
    epoch: Count
    prev: StreamId
    id: StreamId
    facts: Count
    why: Annotated[
        str,
        Meta(
            description="`skipped`: an operator had settled the range, or the epoch never joined. `regressed`: the"
            " source database was restored, or an override was taken back. `final`: the linear position had passed the"
            " ID, or another writer had completed the ID. `announced`: the writer had declared that it has no fact in"
            " the range."
        ),
    ]
    batch: Count
    time: datetime


class MissingLateCompletionsAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="late-lost"):
    """The late completions with numbers in `(after, number]` are no longer available."""

    stream: Name
    after: Count
    number: Count


class LinearMoveAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="linear"):
    """The linear position moved to `linear`. The moves of writers up to this position, if any, were sent before."""

    stream: Name
    linear: StreamId


Move = AdvanceAnswer | RereadAnswer | LateAnswer | MissingLateCompletionsAnswer


class AdvancesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of moves. Pass `next` as `since` for the next page. `complete`: whether the page has everything that was
    published when the page was read."""

    stream: Name
    moves: list[Move]
    next: str
    complete: bool


class DeferredRangeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Records of `writer` are deferred, because too many of its ranges are pending. The records stay in Kafka, and are
    read again when there is room."""

    writer: Name
    epoch: Count


class RequeueAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Deferred records of `writer` that are read again from Kafka, or that are lost. `gone`: how many of them may be
    lost. The IDs of lost records stay open until the writer's next JOIN."""

    writer: Name
    since: datetime
    gone: Annotated[
        int,
        Meta(
            ge=0,
            description="The number of offsets whose record can no longer be read again: at most this many records of"
            " the writer are lost.",
        ),
    ]
    problem: Annotated[
        str | None,
        Meta(
            description="Why the records are not read yet, or why they are gone, for people; null if there is no"
            " problem."
        ),
    ]


class GapsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Open ranges and writers that never joined, the oldest first. `total` also counts the entries beyond `limit`."""

    stream: Name
    gaps: list[BlockerAnswer]
    linear_lag: Annotated[
        LinearLagAnswer | None,
        Meta(
            description="What blocks the linear position. Null if the linear position has reached the highest allocated"
            " ID and every writer has joined."
        ),
    ]
    open_transactions: Annotated[
        dict[str, list[str]],
        Meta(description="By writer, the reported transactions with open IDs, for people."),
    ]
    total: Count
    deferred: list[DeferredRangeAnswer]
    requeued: list[RequeueAnswer]
    age_seconds: Annotated[Seconds, Meta(description="Seconds since the answer was read from Postgres.")]


def gaps_answer(stream: str, details: Details, limit: int, age_seconds: float) -> GapsAnswer:
    """Convert `details` to an answer with at most `limit` gaps. `age_seconds`: the age of `details`."""
    return GapsAnswer(
        stream=stream,
        gaps=[blocker_answer(gap) for gap in details.gaps[:limit]],
        linear_lag=lag_answer(details.linear_lag),
        open_transactions=dict(sorted(details.transactions.items())),
        total=len(details.gaps),
        deferred=[DeferredRangeAnswer(writer=writer, epoch=epoch) for writer, epoch in details.deferred_writer_epochs],
        requeued=[
            RequeueAnswer(writer=requeue.writer, since=requeue.since, gone=requeue.gone, problem=requeue.problem)
            for requeue in details.requeues
        ],
        age_seconds=round(max(0.0, age_seconds), 3),
    )


def move_answer(stream: str, event: Event) -> Move:
    match event:
        case Advance():
            return AdvanceAnswer(
                stream=stream,
                writer=event.writer,
                epoch=event.epoch,
                prev=event.prev,
                id=event.id,
                evidence_prev=event.evidence_prev,
                **msgspec.structs.asdict(event.evidence),
                linear=event.linear,
                batch=event.batch,
                time=moment(event.time),
            )
        case Reread():
            return RereadAnswer(
                stream=stream, writer=event.writer, prev=event.prev, id=event.id, besides=sorted(event.besides)
            )
        case Late():
            return LateAnswer(
                stream=stream,
                number=event.number,
                writer=event.writer,
                epoch=event.epoch,
                prev=event.prev,
                id=event.id,
                facts=event.facts,
                why=event.why,
                batch=event.batch,
                time=moment(event.time),
            )
        case MissingLateCompletions():
            return MissingLateCompletionsAnswer(stream=stream, after=event.after, number=event.number)
        case LinearMove():
            raise AssertionError("followers in vector mode yield no LinearMove")


PROBLEM_MEDIA_TYPE = "application/problem+json"
NO_STORE_HEADER = {"Cache-Control": "no-store"}
NO_SNIFF_HEADER = {"X-Content-Type-Options": "nosniff"}
_REASON_PHRASES = {HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "Content Too Large"}  # RFC 9110; Python 3.13 and later


def urn(type_: str) -> str:
    """The URI of a problem type. RFC 9457 recommends absolute URIs."""
    return f"urn:tidemark:problem:{type_}"


class Problem(Exception):
    """An error of a request, with its response. `stream`: the positions of the stream, if a token was not reached."""

    status: ClassVar[HTTPStatus]
    type: ClassVar[str]
    title: ClassVar[str]
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, detail: str, stream: StreamAnswer | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.stream = stream

    def response(self) -> Response:
        body = ProblemAnswer(
            type=urn(self.type), title=self.title, status=self.status, detail=self.detail, stream=self.stream
        )
        return _response(body, self.headers)


class BadRequest(Problem):
    status = HTTPStatus.BAD_REQUEST
    type = "bad-request"
    title = "A parameter is invalid"


class WrongHost(Problem):
    status = HTTPStatus.MISDIRECTED_REQUEST
    type = "wrong-host"
    title = "Unknown host name"


class Unauthorized(Problem):
    status = HTTPStatus.UNAUTHORIZED
    type = "unauthorized"
    title = "A bearer token is required"
    headers: ClassVar[dict[str, str]] = {"WWW-Authenticate": 'Bearer realm="tidemark"'}


class UnknownStream(Problem):
    status = HTTPStatus.NOT_FOUND
    type = "unknown-stream"
    title = "There is no such stream"

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"stream {stream[:255]!r} does not exist: no record of it was read; for all names, see /v1/streams"
        )


class UnreachableToken(Problem):
    status = HTTPStatus.CONFLICT
    type = "unreachable-token"
    title = "The stream can never reach the token"


class NotYet(Problem):
    status = HTTPStatus.PRECONDITION_FAILED  # not 408, after which browsers and proxies repeat a request
    type = "not-yet"
    title = "The stream has not reached the token"


class Busy(Problem):
    status = HTTPStatus.TOO_MANY_REQUESTS
    type = "busy"
    title = "A limit of this sidecar is reached"
    headers: ClassVar[dict[str, str]] = {"Retry-After": "1"}


class RecoveringProblem(Problem):
    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "recovering"
    title = "The servers cannot answer this request now"
    headers: ClassVar[dict[str, str]] = {"Retry-After": "1"}


class StoppingProblem(Problem):
    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "stopping"
    title = "This sidecar is stopping"
    headers: ClassVar[dict[str, str]] = {"Retry-After": "1"}

    def __init__(self) -> None:
        super().__init__("this sidecar is stopping; ask another sidecar, or try again")


class SlowProblem(Problem):
    status = HTTPStatus.GATEWAY_TIMEOUT
    type = "slow"
    title = "Postgres did not answer in time"
    headers: ClassVar[dict[str, str]] = {"Retry-After": "5"}


async def handle_problem(_: Request, problem: Exception) -> Response:
    """Starlette's handler of `Problem`."""
    assert isinstance(problem, Problem)
    return problem.response()


async def handle_http_error(_: Request, problem: Exception) -> Response:
    """Starlette's handler of its own errors, such as an unknown path or method."""
    assert isinstance(problem, HTTPException)
    return status_response(HTTPStatus(problem.status_code), problem.headers)


def reason_phrase(status: HTTPStatus) -> str:
    """The reason phrase of a status, the same in every version of Python."""
    return _REASON_PHRASES.get(status, status.phrase)


def status_response(status: HTTPStatus, headers: Mapping[str, str] | None = None) -> Response:
    """The response for an HTTP error that is not a `Problem`."""
    title = reason_phrase(status)
    type_ = title.lower().replace(" ", "-")
    body = ProblemAnswer(type=urn(type_), title=title, status=status, detail=status.description or title)
    return _response(body, dict(headers or {}))


async def handle_defect(_: Request, __: Exception) -> Response:
    """Starlette's handler of unexpected exceptions. Starlette raises the exception again afterwards."""
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    detail = "the sidecar failed unexpectedly; see its log"
    return _response(ProblemAnswer(type=urn("internal"), title=status.phrase, status=status, detail=detail), {})


def _response(body: ProblemAnswer, headers: dict[str, str]) -> Response:
    return Response(
        msgspec.json.encode(body), body.status, {**NO_STORE_HEADER, **NO_SNIFF_HEADER, **headers}, PROBLEM_MEDIA_TYPE
    )
