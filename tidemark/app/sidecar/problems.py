"""Error responses, as application/problem+json (RFC 9457).

Problem                     `type` is a stable name, sent as a URN; `detail` is for people
├── BadRequest              400 a parameter is invalid
├── WrongHost               421 the header `Host` has none of the names of this sidecar
├── Unauthorized            401 no valid bearer token
├── UnknownStream           404 no server has the stream
├── NotYet                  412 a wait timed out
├── Busy                    429 a limit of this process is reached
├── RecoveringProblem       503 no server can answer now
├── StoppingProblem         503 this process is stopping
└── SlowProblem             504 Postgres took too long for this query
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import ClassVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tidemark.app.sidecar import answers

MEDIA_TYPE = "application/problem+json"
NO_STORE_HEADER = {"Cache-Control": "no-store"}
NO_SNIFF_HEADER = {"X-Content-Type-Options": "nosniff"}
_REASON_PHRASES = {HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "Content Too Large"}  # RFC 9110; Python 3.13 and later


def urn(type_: str) -> str:
    """The URI of a problem type. RFC 9457 recommends absolute URIs."""
    return f"urn:tidemark:problem:{type_}"


class Problem(Exception):
    """An error that an operation raises. `handle_problem` turns it into the response."""

    status: ClassVar[HTTPStatus]
    type: ClassVar[str]
    title: ClassVar[str]
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, detail: str, stream: answers.StreamAnswer | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.stream = stream

    def response(self) -> Response:
        body = answers.ProblemAnswer(
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
        super().__init__(f"stream {stream[:255]!r} does not exist: no record of it was read; see /v1/streams")


class NotYet(Problem):
    status = HTTPStatus.PRECONDITION_FAILED  # not 408, after which browsers and proxies repeat a request
    type = "not-yet"
    title = "The stream has not reached the token"


class Busy(Problem):
    status = HTTPStatus.TOO_MANY_REQUESTS
    type = "busy"
    title = "The limit of this sidecar is reached"
    headers: ClassVar[dict[str, str]] = {"Retry-After": "1"}


class RecoveringProblem(Problem):
    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "recovering"
    title = "No server can answer now"
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
    body = answers.ProblemAnswer(type=urn(type_), title=title, status=status, detail=status.description or title)
    return _response(body, dict(headers or {}))


async def handle_defect(_: Request, __: Exception) -> Response:
    """Starlette's handler of unexpected exceptions. Starlette raises the exception again afterwards."""
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    detail = "the sidecar failed unexpectedly; see its log"
    return _response(answers.ProblemAnswer(type=urn("internal"), title=status.phrase, status=status, detail=detail), {})


def _response(body: answers.ProblemAnswer, headers: dict[str, str]) -> Response:
    return Response(
        msgspec.json.encode(body), body.status, {**NO_STORE_HEADER, **NO_SNIFF_HEADER, **headers}, MEDIA_TYPE
    )
