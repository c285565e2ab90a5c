"""The long poll: answer when a stream has come as far as a token."""

import time
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from tidemark.app.sidecar import answers, cursor
from tidemark.app.sidecar.bells import slept
from tidemark.app.sidecar.describing import described
from tidemark.app.sidecar.looks import existing
from tidemark.app.sidecar.operation import Call, Operation, json
from tidemark.app.sidecar.problems import Ahead, BadRequest, Busy, NotYet, Recovering, Unauthorized, UnknownStream
from tidemark.sinks.reader.asks import LONGEST_WAIT
from tidemark.sinks.reader.order import beyond
from tidemark.sinks.reader.standing import GRACE
from tidemark.sinks.reader.token import Token
from tidemark.streaming.errors import BadToken


class WaitQuery(msgspec.Struct, frozen=True):
    token: Annotated[str, Meta(description="How far the stream shall be complete: m7, or m7~web.9.")]
    timeout: Annotated[
        float, Meta(ge=0, description="Seconds to wait at most; cut to what the server allows, 60 by default.")
    ] = 30.0


async def wait(call: Call) -> Response:
    query: WaitQuery = call.query
    token = cursor.token(query.token)
    with call.service.held.one("wait"):
        began = time.monotonic()
        deadline = began + min(query.timeout, call.service.longest_wait)
        ahead_since = None
        while True:
            bell = call.service.bells.bell(call.stream)
            known = await call.service.snapshots.positions(call.stream)
            now = time.monotonic()
            if known is not None and _reached(Token.of(known.linear, known.vector), token):
                return json(await _stands(call))
            if known is None or known.head is None or not beyond(token.farthest(), known.head):
                ahead_since = None
            elif ahead_since is None:
                ahead_since = now
            # A token that was just issued may be ahead of the head for a moment: writers announce once a second.
            if ahead_since is not None and now >= min(ahead_since + GRACE, deadline):
                assert known is not None
                detail = (
                    f"writers of {call.stream} have come to {known.head}: this is a token of another stream or database"
                )
                raise Ahead(detail, await _stands(call))
            if now >= deadline:
                raise NotYet(f"{call.stream} did not reach {token} in {now - began:.1f} s", await _stands(call))
            await slept(bell, min(LONGEST_WAIT, deadline - now))
            if await call.request.is_disconnected():
                raise NotYet("the client went away")


def _reached(stands: Token, token: Token) -> bool:
    try:
        return stands.covers(token)
    except BadToken as problem:
        raise BadRequest(str(problem)) from None


async def _stands(call: Call) -> answers.Stream:
    """Raises `UnknownStream`, `Recovering`."""
    (snapshot,) = await call.service.snapshots.get([call.stream])
    return described(existing(snapshot), time.monotonic())


OPERATIONS = [
    Operation(
        "/v1/streams/{stream}/wait",
        "wait",
        "Answers when the stream is complete up to a token.",
        wait,
        answers.Stream,
        query=WaitQuery,
        problems=(BadRequest, Unauthorized, UnknownStream, NotYet, Ahead, Busy, Recovering),
    ),
]
