"""`/openapi.json`: the HTTP interface described from the operations and the types that they answer with."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidemark.app.sidecar import answers
from tidemark.app.sidecar.problems import MEDIA_TYPE, BadRequest, Problem, Unauthorized, urn
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


SCHEMAS = "#/components/schemas/"
SUFFIX = "Answer"  # of our types, which the document leaves out
NAME = r"^[^\s\x00-\x1f\x7f-\x9f]{1,255}$"
HEADERS = {
    "If-None-Match": "An ETag that the client has: 304 where nothing has changed.",
    "Last-Event-ID": "The last event's `id`: go on behind it.",
}
PATH = "/openapi.json"
BEARER: Mapping[str, Any] = {"token": {"type": "http", "scheme": "bearer"}}


def operation(others: Sequence[Operation], security: Mapping[str, Any]) -> Operation:
    """The operation that answers the document about `others` and itself. `security`: `BEARER`, or nothing where whoever
    asks is answered."""

    async def describe(_: OperationCall) -> Response:
        return Response(text, media_type=JSON)

    itself = Operation(PATH, "openapi", "This document.", describe, dict[str, Any])
    text = msgspec.json.encode(document([*others, itself], security))
    return itself


def document(operations: Sequence[Operation], security: Mapping[str, Any]) -> dict[str, Any]:
    types = [type_ for it in operations for type_ in (it.answers, it.query, *it.others.values())]
    schemas, components = msgspec.json.schema_components(
        [*types, answers.ProblemAnswer], ref_template=SCHEMAS + "{name}"
    )
    known = dict(zip(map(repr, [*types, answers.ProblemAnswer]), map(_published, schemas), strict=True))
    queries = {it.query.__name__ for it in operations}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tidemark sidecar",
            "version": version("tidemark-streams"),
            "description": "How far each stream may be read. IDs are signed 64-bit integers.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {it.path: {"get": _described(it, known, components, security)} for it in operations},
        "components": {
            "schemas": {
                name.removesuffix(SUFFIX): _published(schema)
                for name, schema in components.items()
                if name not in queries
            },
            **({"securitySchemes": security} if security else {}),
        },
    }


def _published(schema: Any) -> Any:
    """A schema with the names that users of the interface see: those of our types without `SUFFIX`."""
    match schema:
        case dict():
            return {
                key: value.removesuffix(SUFFIX) if key == "title" and isinstance(value, str) else _published(value)
                for key, value in schema.items()
            }
        case list():
            return [_published(it) for it in schema]
        case str() if schema.startswith(SCHEMAS):
            return schema.removesuffix(SUFFIX)
    return schema


def _described(
    it: Operation, known: Mapping[str, Any], components: Mapping[str, Any], security: Mapping[str, Any]
) -> dict[str, Any]:
    answered = {"description": it.summary, "content": {it.media: {"schema": known[repr(it.answers)]}}}
    responses: dict[str, Any] = {"200": answered}
    if it.tagged:
        tag = {"ETag": {"description": "Equal while nothing changed.", "required": True, "schema": {"type": "string"}}}
        answered["headers"] = tag
        responses["304"] = {"description": "Nothing changed.", "headers": tag}
    for status, type_ in it.others.items():
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {JSON: {"schema": known[repr(type_)]}},
        }
    for problem in [problem for problem in it.problems if security or problem is not Unauthorized]:
        responses[str(int(problem.status))] = _refusal(problem, known)
    described = {
        "operationId": it.name,
        "summary": it.summary,
        "parameters": [*_in_path(it), *_in_query(it, components), *_in_headers(it)],
        "responses": responses,
    }
    return described | ({"security": [{name: []} for name in security]} if it.guarded and security else {})


def _refusal(problem: type[Problem], known: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "description": f"{problem.title}: `{urn(problem.type)}`.",
        "content": {MEDIA_TYPE: {"schema": known[repr(answers.ProblemAnswer)]}},
    }


def _in_path(it: Operation) -> list[dict[str, Any]]:
    if "{stream}" not in it.path:
        return []
    schema = {"type": "string", "pattern": NAME}
    return [{"name": "stream", "in": "path", "required": True, "description": "Its name.", "schema": schema}]


def _in_query(it: Operation, components: Mapping[str, Any]) -> list[dict[str, Any]]:
    schema = components[it.query.__name__]
    required = schema.get("required", [])
    return [
        {
            "name": name,
            "in": "query",
            "required": name in required,
            "description": described.get("description", name),
            "schema": {key: value for key, value in described.items() if key != "description"},
        }
        for name, described in schema["properties"].items()
    ]


def _in_headers(it: Operation) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "description": HEADERS[name], "schema": {"type": "string"}}
        for name in it.headers
    ]
