"""The operations that tell what moved a stream, and what holds it back."""

import asyncio
import time
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from tidemark.app.sidecar import cursor, moves
from tidemark.app.sidecar.describing import blocker
from tidemark.app.sidecar.looks import existing
from tidemark.app.sidecar.operation import Call, Operation, json
from tidemark.app.sidecar.problems import BadRequest, Recovering, Unauthorized, UnknownStream
from tidemark.app.sidecar.program import Page, page
from tidemark.sinks.reader.token import Token
from tidemark.streaming.errors import BadToken, Stop, Unavailable

Limit = Annotated[int, Meta(ge=1, le=10_000)]


class GapsQuery(msgspec.Struct, frozen=True):
    limit: Limit = 1000


class AdvancesQuery(msgspec.Struct, frozen=True):
    since: Annotated[str, Meta(description="A token, or the `next` of the page before.")] = "m0"
    limit: Limit = 1000


async def gaps(call: Call) -> Response:
    (snapshot,) = await call.service.snapshots.get([call.stream])
    details, read_at = existing(snapshot).details, snapshot.details_read_at
    if details is None or read_at is None:
        raise Recovering("gaps come from Postgres, which does not answer")
    query: GapsQuery = call.query
    return json(
        moves.Gaps(
            stream=call.stream,
            gaps=[blocker(gap) for gap in details.gaps[: query.limit]],
            total=len(details.gaps),
            age_seconds=round(max(0.0, time.monotonic() - read_at), 3),
        )
    )


async def advances(call: Call) -> Response:
    query: AdvancesQuery = call.query
    since = cursor.since(call.stream, query.since)
    try:
        if isinstance(since, Token) and (known := await call.service.snapshots.positions(call.stream)):
            since.compare(Token.of(known.linear, known.vector))  # a stream does not turn round
        found = await page(call.service.hands, call.stream, since, query.limit)
    except (Unavailable, Stop) as problem:
        raise Recovering(str(problem)) from None
    except BadToken as problem:
        raise BadRequest(str(problem)) from None
    if found is None:
        raise UnknownStream(call.stream)
    return await asyncio.to_thread(_answered, call.stream, found)  # ten thousand moves would keep others waiting


def _answered(stream: str, found: Page) -> Response:
    return json(
        moves.Advances(
            stream=stream,
            moves=[moves.told(stream, event) for event in found.events],
            next=cursor.of_places({stream: found.place}),
            complete=found.complete,
        )
    )


OPERATIONS = [
    Operation(
        "/v1/streams/{stream}/gaps",
        "gaps",
        "What is open above the positions of a stream's writers.",
        gaps,
        moves.Gaps,
        query=GapsQuery,
        problems=(BadRequest, Unauthorized, UnknownStream, Recovering),
    ),
    Operation(
        "/v1/streams/{stream}/advances",
        "advances",
        "What moved a stream, each writer's moves joined without a hole, in pages.",
        advances,
        moves.Advances,
        query=AdvancesQuery,
        problems=(BadRequest, Unauthorized, UnknownStream, Recovering),
    ),
]
