"""One operation of the HTTP interface: its path, what it takes, what it answers; `/openapi.json` is made from these."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidemark.app.sidecar.problems import BadRequest, Problem
from tidemark.app.sidecar.service import Service

JSON = "application/json"


class NoQuery(msgspec.Struct, frozen=True):
    """An operation that takes no parameters but those of its path."""


@dataclass(frozen=True, slots=True)
class OperationCall:
    """A request, checked: `stream` is that of the path ("" where it names none), `query` the operation's struct."""

    service: Service
    request: Request
    stream: str
    query: Any

    @property
    def address(self) -> str:
        """The client's; behind a trusted proxy the one that the proxy names."""
        return self.request.client.host if self.request.client else ""


@dataclass(frozen=True, slots=True)
class Operation:
    """`answers` is the type of what a 200 holds, `media` its media type; `headers` names what a request may send;
    `others` are types of what comes with another status, without being a problem."""

    path: str
    name: str
    summary: str
    act: Callable[[OperationCall], Awaitable[Response]]
    answers: Any
    query: type[msgspec.Struct] = NoQuery
    media: str = JSON
    problems: Sequence[type[Problem]] = ()
    headers: Sequence[str] = ()
    others: Mapping[int, Any] = field(default_factory=dict)

    @property
    def guarded(self) -> bool:
        """Whether it needs a bearer token, where tokens are set."""
        return self.path.startswith("/v1/") or self.path == "/metrics"

    @property
    def tagged(self) -> bool:
        """Whether its answers carry an ETag."""
        return "If-None-Match" in self.headers


def parsed(query: type[msgspec.Struct], given: Sequence[tuple[str, str]]) -> msgspec.Struct:
    """Raises `BadRequest`. A parameter that stands there several times makes a list; unknown ones are left alone."""
    many: dict[str, list[str]] = {}
    for name, text in given:
        many.setdefault(name, []).append(text)
    lists = _lists(query)
    values = {name: texts if name in lists else texts[-1] for name, texts in many.items()}
    try:
        return msgspec.convert(values, query, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None


@cache
def _lists(query: type[msgspec.Struct]) -> frozenset[str]:
    """Names of the parameters that may stand there several times."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(query) if "list" in str(field.type))


def json(body: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, dict(headers or {}), JSON)


def tagged(request: Request, body: msgspec.Struct, tag: str) -> Response:
    """304 without a body where the client has this answer already."""
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    had = [each.strip() for each in request.headers.get("if-none-match", "").split(",")]
    if tag in had or "*" in had:
        return Response(status_code=304, headers=headers)
    return json(body, headers=headers)
