"""The operations of the HTTP interface, as values, and `/openapi.json`, which is made from them."""

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
    """An operation that takes only the parameters of its path."""


@dataclass(frozen=True, slots=True)
class OperationCall:
    """A request, checked. `stream` is that of the path (empty if the path has none), `query` the operation's struct."""

    service: Service
    request: Request
    stream: str
    query: Any

    @property
    def address(self) -> str:
        """The address of the client; behind a trusted proxy, the one that the proxy names."""
        return self.request.client.host if self.request.client else ""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: its path, what it takes, what it answers.

    Attributes:
        answers: the type of a 200 answer, and `media` its media type.
        headers: the names of headers that a request may have.
        others: the types of answers with another status that are no problems.
    """

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
        """Whether it needs a bearer token, if tokens are set."""
        return self.path.startswith("/v1/") or self.path == "/metrics"

    @property
    def tagged(self) -> bool:
        """Whether its answers carry an ETag."""
        return "If-None-Match" in self.headers


def parsed(query: type[msgspec.Struct], given: Sequence[tuple[str, str]]) -> msgspec.Struct:
    """Raises `BadRequest`. A parameter that is given several times makes a list. Unknown parameters are ignored."""
    texts_of: dict[str, list[str]] = {}
    for name, text in given:
        texts_of.setdefault(name, []).append(text)
    lists = _lists(query)
    values = {name: texts if name in lists else texts[-1] for name, texts in texts_of.items()}
    try:
        return msgspec.convert(values, query, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None


@cache
def _lists(query: type[msgspec.Struct]) -> frozenset[str]:
    """Names of the parameters that may be given several times."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(query) if "list" in str(field.type))


def json(body: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, dict(headers or {}), JSON)


def tagged(request: Request, body: msgspec.Struct, tag: str) -> Response:
    """304 without a body if the client has this answer already."""
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    known_tags = [text.strip() for text in request.headers.get("if-none-match", "").split(",")]
    if tag in known_tags or "*" in known_tags:
        return Response(status_code=304, headers=headers)
    return json(body, headers=headers)


SCHEMAS = "#/components/schemas/"
SUFFIX = "Answer"  # of our types, which the document leaves out
NAME = r"^[^\s\x00-\x1f\x7f-\x9f]{1,255}$"
HEADERS = {
    "If-None-Match": "An ETag that the client has: 304 if nothing has changed.",
    "Last-Event-ID": "The `id` of the last event: continue after it.",
}
PATH = "/openapi.json"
BEARER: Mapping[str, Any] = {"token": {"type": "http", "scheme": "bearer"}}


def operation(others: Sequence[Operation], security: Mapping[str, Any]) -> Operation:
    """The operation that answers the document about `others` and itself. `security`: `BEARER`, or empty if every
    request is answered."""

    async def describe(_: OperationCall) -> Response:
        return Response(text, media_type=JSON)

    itself = Operation(PATH, "openapi", "This document.", describe, dict[str, Any])
    text = msgspec.json.encode(document([*others, itself], security))
    return itself


def document(operations: Sequence[Operation], security: Mapping[str, Any]) -> dict[str, Any]:
    types = [
        type_ for operation in operations for type_ in (operation.answers, operation.query, *operation.others.values())
    ]
    schemas, components = msgspec.json.schema_components(
        [*types, answers.ProblemAnswer], ref_template=SCHEMAS + "{name}"
    )
    known = dict(zip(map(repr, [*types, answers.ProblemAnswer]), map(_published, schemas), strict=True))
    queries = {operation.query.__name__ for operation in operations}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tidemark sidecar",
            "version": version("tidemark-streams"),
            "description": "How far each stream may be read. IDs are signed 64-bit integers.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            operation.path: {"get": _described(operation, known, components, security)} for operation in operations
        },
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
    """A schema with the public names: those of our types without `SUFFIX`."""
    match schema:
        case dict():
            return {
                key: value.removesuffix(SUFFIX) if key == "title" and isinstance(value, str) else _published(value)
                for key, value in schema.items()
            }
        case list():
            return [_published(item) for item in schema]
        case str() if schema.startswith(SCHEMAS):
            return schema.removesuffix(SUFFIX)
    return schema


def _described(
    operation: Operation, known: Mapping[str, Any], components: Mapping[str, Any], security: Mapping[str, Any]
) -> dict[str, Any]:
    answered = {
        "description": operation.summary,
        "content": {operation.media: {"schema": known[repr(operation.answers)]}},
    }
    responses: dict[str, Any] = {"200": answered}
    if operation.tagged:
        tag = {"ETag": {"description": "Equal while nothing changed.", "required": True, "schema": {"type": "string"}}}
        answered["headers"] = tag
        responses["304"] = {"description": "Nothing changed.", "headers": tag}
    for status, type_ in operation.others.items():
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {JSON: {"schema": known[repr(type_)]}},
        }
    for problem in [problem for problem in operation.problems if security or problem is not Unauthorized]:
        responses[str(int(problem.status))] = _refusal(problem, known)
    described = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": [*_in_path(operation), *_in_query(operation, components), *_in_headers(operation)],
        "responses": responses,
    }
    return described | ({"security": [{name: []} for name in security]} if operation.guarded and security else {})


def _refusal(problem: type[Problem], known: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "description": f"{problem.title}: `{urn(problem.type)}`.",
        "content": {MEDIA_TYPE: {"schema": known[repr(answers.ProblemAnswer)]}},
    }


def _in_path(operation: Operation) -> list[dict[str, Any]]:
    if "{stream}" not in operation.path:
        return []
    schema = {"type": "string", "pattern": NAME}
    return [{"name": "stream", "in": "path", "required": True, "description": "Its name.", "schema": schema}]


def _in_query(operation: Operation, components: Mapping[str, Any]) -> list[dict[str, Any]]:
    schema = components[operation.query.__name__]
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


def _in_headers(operation: Operation) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "description": HEADERS[name], "schema": {"type": "string"}}
        for name in operation.headers
    ]
